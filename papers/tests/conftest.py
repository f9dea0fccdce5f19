"""Trials of smoke presets, run once for all tests; and what holds for the tests of `mooring` holds here too."""

import os

import pytest

from tests.conftest import (  # noqa: F401
    nothing_is_unpickled,
    same_process_for_every_test,
    separate_user_state,
)


@pytest.fixture(scope="session")
def kept(tmp_path_factory):
    """Trials of smoke presets, shared by all tests of a session, whichever process runs them."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "trials"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def session_cache(kept, monkeypatch):
    monkeypatch.setenv("MOORING_CACHE", str(kept))
    return kept
