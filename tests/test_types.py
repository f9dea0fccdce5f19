"""`py.typed` is a promise: a type checker knows what the package offers."""

import subprocess
import sys

import pytest

import mooring
from tests.support.repository import ROOT

CALLS = """
import mooring

reveal_type(mooring.fit("a.csv", rounds=7, split=[0.5, 0.25, 0.25], weights={"a": 1.0}))
reveal_type(mooring.compare("run.toml", ["local", "fedavg"], seed=3))
reveal_type(mooring.advise("a.csv", checkpoint="last"))
mooring.fit("a.csv", rounds="7")
mooring.fit("a.csv", roundz=7)
mooring.nothing
"""
SAID = {
    4: 'Revealed type is "mooring.engines.fit.FitResult"',
    5: 'Revealed type is "mooring.engines.compare.Comparison"',
    6: 'Revealed type is "mooring.advice.advise.AdviceResult"',
    7: 'Argument "rounds" to "fit" has incompatible type "str"',
    8: 'Unexpected keyword argument "roundz"',
    9: 'Module has no attribute "nothing"',
}


def test_the_names_are_there():
    assert sorted(mooring._PUBLIC) == mooring.__all__
    assert all(getattr(mooring, name).__module__ == module for name, module in mooring._PUBLIC.items())


@pytest.mark.slow
def test_a_type_checker_knows_the_options(tmp_path):
    (tmp_path / "calls.py").write_text(CALLS)
    argv = [sys.executable, "-m", "mypy", "--config-file=", "--ignore-missing-imports", "--follow-imports=silent"]
    argv += ["--cache-dir", str(tmp_path / "cache"), str(tmp_path / "calls.py")]
    said = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, check=False).stdout.splitlines()
    for line, words in SAID.items():
        assert any(f"calls.py:{line}: " in one and words in one for one in said), (line, said)
