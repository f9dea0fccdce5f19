import os

import pytest


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
