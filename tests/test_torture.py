"""A few attempts of every trial of `make torture`; all of them take half an hour."""

import shutil
import sys

import pytest

from benchmarks import torture

QUICK = ["T3", "T6", "T15"]


def rows(out):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines()[2:]]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc and strace are Linux's")
@pytest.mark.parametrize("which", QUICK)
def test_quick_trials(which, capsys):
    assert torture.main(["--quick", which]) == 0
    (row,) = rows(capsys.readouterr().out)
    assert row[0] == which and row[2] == row[3] and int(row[2]) >= 5


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("which", ["T1", "T2", "T4", "T5", "T7", "T8", "T10", "T12"])
def test_the_other_trials(which, capsys):
    assert torture.main(["--quick", which]) == 0
    assert all(row[2] == row[3] for row in rows(capsys.readouterr().out))


def test_a_trial_that_fails_is_told(monkeypatch, capsys):
    monkeypatch.setattr(torture, "TRIALS", [torture.Trial("T0", "nothing", lambda folder, quick: (3, 2, "it broke"))])
    assert torture.main([]) == 1
    assert rows(capsys.readouterr().out) == [["T0", "nothing", "3", "2", "it broke"]]
