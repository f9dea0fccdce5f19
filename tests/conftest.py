"""One thread for all tests: the problems are tiny, and the sums come out the same everywhere. Nothing is unpickled.

Files get their markers by name, so that `make test` and `make check` select them without a list: see FILE_MARKERS.
"""

import gc
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from mooring.core.logs import LOGGER

torch.set_num_threads(1)

# A shell's background job ignores interrupts, and so would all processes that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

FILE_MARKERS = {  # by a part of the file's path below tests/
    "browser": "browser",
    "_processes": "processes",
    "_kills": "processes",
    "_unauthorized": "processes",
    "test_same_bytes": "processes",
    "journeys": "docs",
    "test_docs": "docs",
}
COMPILES = ("core/test_sgd_step.py", "engines/test_kernel_choice.py")  # kernels, for 10 s in every process anew
BETWEEN_PROCESSES = ("/multiprocessing/", "/concurrent/futures/")  # Python's own messages to processes that it started
UNPICKLED: list[str] = []


def record_unpickling(event, args):
    if event == "pickle.find_class":
        frame, files = sys._getframe(1), []
        while frame is not None:
            files.append(frame.f_code.co_filename)
            frame = frame.f_back
        if not any(place in file for place in BETWEEN_PROCESSES for file in files[:8]):
            UNPICKLED.append(f"{args} by {files[:3]}")


sys.addaudithook(record_unpickling)


def pytest_collection_modifyitems(config, items):
    for item in items:
        place = item.path.as_posix().partition(f"{Path(__file__).parent.as_posix()}/")[2]
        for part, marker in FILE_MARKERS.items():
            if part in place:
                item.add_marker(marker)
    if not config.pluginmanager.hasplugin("randomly"):
        items.sort(key=lambda item: not item.path.as_posix().endswith(COMPILES))  # one after the other, in one process


def pytest_collection_finish():
    """Collections during tests skip the modules, which live as long as the process: 2% of all time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_is_unpickled(request):
    """In no test at all, in whatever it calls; a test that means to says so by the fixture `unpickled`."""
    yield
    unpickled = UNPICKLED.copy()
    UNPICKLED.clear()
    assert not unpickled or "unpickled" in request.fixturenames


@pytest.fixture(autouse=True)
def same_process_for_every_test():
    """Restores what a command sets for its whole process: the number of threads, and how much is printed."""
    threads, level = torch.get_num_threads(), LOGGER.level
    yield
    torch.set_num_threads(threads)
    LOGGER.setLevel(level)


@pytest.fixture
def unpickled():
    """What was unpickled during the test."""
    UNPICKLED.clear()
    return UNPICKLED


@pytest.fixture(autouse=True, scope="session")
def separate_user_state(tmp_path_factory):
    """Keeps files that tests trust out of the state of the user who runs them, and does not wait for disks.

    What survives a power cut cannot be tested here; that files are synced, and when, is tested by recording the calls.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.setattr(os, "fsync", lambda handle: None)
        yield
