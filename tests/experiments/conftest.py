import pytest


@pytest.fixture(scope="session")
def kept(tmp_path_factory):
    """Trials of smoke presets, shared by all tests of a session."""
    return tmp_path_factory.mktemp("trials")


@pytest.fixture
def session_cache(kept, monkeypatch):
    monkeypatch.setenv("MOORING_CACHE", str(kept))
    return kept
