"""Fixtures of the tests of engines."""

import pytest

from mooring.remote import messenger
from tests.remote.federation_runs import (
    Clock,
    write_clients,
)


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """A folder of client tables for each kind of target."""
    folder = tmp_path_factory.mktemp("tables")
    return {kind: write_clients(folder / kind, kind == "binary") for kind in ("regression", "binary")}


@pytest.fixture
def table(tmp_path):
    return write_clients(tmp_path / "clients")


@pytest.fixture
def clock(monkeypatch):
    clock, init = Clock(), messenger.Messenger.__init__
    monkeypatch.setattr(
        messenger.Messenger, "__init__", lambda self, *a, **k: init(self, *a, **k, clock=clock, sleep=clock.sleep)
    )
    return clock
