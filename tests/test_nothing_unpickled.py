"""The audit hook of conftest.py hears what is unpickled: without that its silence would mean nothing."""

import io
import pickle
from multiprocessing import Pipe

import numpy as np
import pytest

from mooring.core.cohort import Round


def test_the_hook_hears(unpickled):
    pickle.loads(pickle.dumps(Round))  # noqa: S301
    assert len(unpickled) == 1 and "Round" in unpickled[0]
    array = io.BytesIO()
    np.save(array, np.array([Round]), allow_pickle=True)
    array.seek(0)
    with pytest.raises(ValueError):
        np.load(array)
    assert len(unpickled) == 1


def test_talk_between_our_own_processes_is_another_thing(unpickled):
    here, there = Pipe()
    here.send(Round)
    assert there.recv() is Round and not unpickled
