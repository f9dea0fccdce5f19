"""Failing disks and dying processes, for the tests of files."""

import pytest

from tests.support import faults as fault_functions


@pytest.fixture
def faults():
    """The functions of `tests/support/faults.py`; a child that a failed test leaves behind is ended."""
    yield fault_functions
    fault_functions.end_children()
