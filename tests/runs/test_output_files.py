"""The page on output files is up to date, and runs write exactly the files and keys that it lists."""

from pathlib import Path

import pytest

import mooring
from mooring.cli import main
from mooring.runs.directory import open_run
from mooring.runs.tensor_files import read_tensors
from tests.report.example_runs import federation
from tools.output_files import ADVICE_KEYS, COMPARISON_KEYS, FILES, FIT_KEYS, SUMMARY_KEYS, TENSORS, format_output_files

ROOT = Path(__file__).parent.parent.parent


def test_the_page_is_up_to_date():
    assert (ROOT / "docs" / "output-files.md").read_text() == format_output_files()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        federation().to_csv("table.csv", index=False)
        how = ["table.csv", "--client", "who", "--target", "y", "--threads", "1"]
        rounds = {"fit": ["--rounds", "4"], "compare": ["--rounds", "4", "--methods", "local,fedavg"], "advise": []}
        for command, more in rounds.items():
            with pytest.raises(SystemExit) as left:
                main([command, *how, *more, "--out", command])
            assert left.value.code == 0
    return folder


@pytest.mark.parametrize("command", ["advise", "fit", "compare"])
def test_runs_write_the_files_that_are_listed(runs, command):
    known = {name for names in FILES for name in names.split(", .svg")[0].split(", ")}
    written = {path.name + "/" * path.is_dir() for path in (runs / command).iterdir()} - {"curves.svg"}
    assert written <= known
    promised = {name for name, (who, _) in FILES.items() if command in who.split(", ") and name.isidentifier()}
    assert promised <= written


def test_keys_are_those_that_are_listed(runs):
    advice, fit, comparison = (open_run(runs / name) for name in ("advise", "fit", "compare"))
    assert set(advice.advice) == set(ADVICE_KEYS) and set(advice.advice["summary"]) == set(SUMMARY_KEYS)
    assert set(fit.summary) == set(FIT_KEYS) - {"privacy"}
    assert set(comparison.comparison) == set(COMPARISON_KEYS)
    assert set(mooring.open(runs / "fit").summary) == set(fit.summary)
    for name in ("advise", "fit"):
        tensors, _ = read_tensors(runs / name / "models.safetensors")
        assert {key.split(".")[0] for key in tensors} <= {key.split(".")[0] for key in TENSORS}
