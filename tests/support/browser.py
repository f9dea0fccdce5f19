"""A real browser for tests: Debian's Chromium, driven by playwright. Tests that want one are skipped without it."""

import shutil

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here: install Debian's chromium")


def launched(driver):
    """A browser of playwright's."""
    return driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
