"""A killed reproduction, run again, comes to the same bytes: the trial T1 of `benchmarks/torture.py` on `reproduce`."""

import shutil
import sys

import pytest

from benchmarks.torture import Job, kill_jobs
from mooring_papers.base.reproduce import reproduce
from mooring_papers.base.trial_cache import CACHE_DIR_VARIABLE
from mooring_papers.report.reproduction import draw_record


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux") or shutil.which("strace") is None, reason="needs strace")
def test_a_killed_reproduction_comes_to_the_same_bytes(tmp_path, monkeypatch):
    out = tmp_path / "papers"
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(out / "trials"))

    def work():
        for record in reproduce("alternative-weights", "smoke", out, workers=1):
            draw_record(record, out)

    attempts, survived, worst = kill_jobs([Job("reproduce", out, work, work)], tmp_path, True)
    assert attempts == survived >= 10, worst
