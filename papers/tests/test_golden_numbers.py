"""The numbers of the smoke presets are those of golden_numbers.json: a change of the code that changes them is noticed.

If a change of numbers is intended, raise `Experiment.version` of the experiments that the test names and write the file
again: `python papers/tests/test_golden_numbers.py`.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest

from mooring_papers.base import catalog, runner

FILE = Path(__file__).parent / "golden_numbers.json"
GOLDEN = json.loads(FILE.read_text()) if FILE.exists() else {}
DIGITS = 6  # significant, in the file
RELATIVE, ABSOLUTE = 1e-3, 1e-6  # other processors and versions of libraries differ by less


def summarize(name, folder):
    """The version of an experiment, and the mean of the finite values of each series over its smoke trials."""
    entry = catalog.load_experiment(name)
    values: dict[str, list] = {}
    for trial in runner.run([entry], "smoke", folder, workers=1)[name].results.trials:
        for series, value in trial.values.items():
            values.setdefault(series, []).extend(np.atleast_1d(np.asarray(value, dtype=float)))
    finite = {series: np.asarray(numbers)[np.isfinite(numbers)] for series, numbers in values.items()}
    means = {series: float(f"{numbers.mean():.{DIGITS}g}") for series, numbers in finite.items() if len(numbers)}
    return {"version": entry.experiment.version, "numbers": means}


@pytest.mark.parametrize("name", catalog.list_experiments())
def test_smoke_presets_give_the_golden_numbers(name, session_cache):
    found = summarize(name, session_cache)
    assert found["version"] == GOLDEN[name]["version"], "write the file again; see above"
    assert found["numbers"] == pytest.approx(GOLDEN[name]["numbers"], rel=RELATIVE, abs=ABSOLUTE), "see above"


def test_the_file_names_the_experiments():
    assert list(GOLDEN) == catalog.list_experiments()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        summaries = {name: summarize(name, Path(cache)) for name in catalog.list_experiments()}
    FILE.write_text(json.dumps(summaries, indent=1) + "\n")
