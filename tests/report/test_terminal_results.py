"""What the commands print, from plain tables and from a run directory alone."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from mooring.core.errors import RequestError
from mooring.report import terminal_results
from mooring.report.figures import draw_images
from mooring.report.terminal import Display, format_cell
from mooring.runs.atomic_files import frame_from_rows, json_bytes
from mooring.runs.directory import open_run
from tests.support.planted_table import planted

LOSS, GAIN = 7654321.25, -1234567.5
OTHERS = ("local", "global")
ENDS = ("", "_ci_low", "_ci_high")
CLIENTS = pd.DataFrame(
    {
        "client": ["school of arts", "[a]"],
        "rows": [1_234_567, 7_654_321],
        "local": [LOSS, 2 * LOSS],
        "global": [LOSS + 1, LOSS + 2],
        "pooled": [LOSS + 1, LOSS + 2],
        "personal": [LOSS + 3, LOSS + 4],
        "recommended": ["global", "personal"],
        **{f"improvement_over_{other}_pct{end}": [GAIN, -GAIN] for other in OTHERS for end in ENDS},
        "confidence": ["low", "high"],
        "left_out": [None, "3 rounds: its reply was not finite"],
    }
)
LINE = {"mean": 1.0, "ci_low": -1.0, "ci_high": 3.0, "pct": 1234567.25, "pct_ci_low": -1e6, "pct_ci_high": 3.5e6}
SUMMARY = {"title": "[b] exam", "metric": "mse", "local": LOSS, "pooled": LOSS + 1, "personal": LOSS + 2}
METHOD = {"test_loss": LOSS, "last_test_loss": LOSS + 1, "bytes": 7_654_321, "seconds": 1234567.5, "rounds": 1_234_567}
ONE = {"value": LOSS, "low": GAIN, "high": 2 * LOSS, "method": "a long way to say where a number comes from", "R": LOSS}


def fit(display):
    more = {"algorithm": "fedprox_personal", "checkpoint": "best", "best_round": 1_234_567, "last_round": 7_654_321}
    measures = {who: {"rmse": LOSS, "mae": LOSS, "r2": -LOSS} for who in ("local", "pooled", "personal")}
    more |= {"measures": measures, "test_rows": 1_234_567, "level": 0.95}
    more |= {"improvement_over_local": LINE, "improvement_over_pooled": None}
    terminal_results.show_fit(display, SUMMARY | more, CLIENTS.drop(columns="recommended"), per_client=True)


def advice(display):
    summary = {"metric": "mse", "client_level": 0.9}
    told = {
        "title": "t",
        "headline": "Use the global model.",
        "summary": summary,
        "words": {"losses": "[a] does well."},
    }
    terminal_results.show_advice(display, told | {"clients": CLIENTS.to_dict("records")}, per_client=True)


def comparison(display):
    known = {"accuracy": 0.123456789, "auc": 0.87654321}
    methods = [{"method": name, "used_round": 1_234_567, **METHOD, **known} for name in ("local", "fedprox_personal")]
    clients = [{"client": "[a]", "test": 12, "local": LOSS, "fedprox_personal": LOSS}]
    terminal_results.show_comparison(
        display, {"title": "t", "metric": "log-loss", "methods": methods, "clients": clients}
    )


def repeated(display):
    spread = {"test_loss_sd": LOSS, "behind": -LOSS, "behind_sd": LOSS, "accuracy": 0.5, "used_round": 1.5}
    methods = [{"method": f"ditto lam={lam}", **METHOD, **spread} for lam in (0.1, 10)]
    clients = [{"client": "[a]", "test": 12, "ditto lam=0.1": LOSS, "ditto lam=10": LOSS}]
    terminal_results.show_comparison(
        display, {"title": "t", "metric": "log-loss", "methods": methods, "clients": clients}
    )


def new_clients(display):
    terminal_results.show_new_clients(display, CLIENTS, "mse", "prox")


def theory(display):
    found = {
        "constants": {"smooth": ONE, "mu": ONE},
        "heterogeneity": {**ONE, "R_max": ONE, "Gamma": ONE, "by_feature": {"[x]": 1.0, "y": 2.0}},
        "thresholds": {"alternative": {**ONE, "side": "neither", "source": "alternative, Corollary 3.1"}},
        "lambda": {"client_and_coefficient": {**ONE, "source": "empirical Bayes, restricted likelihood"}},
        "promises": {"rounds": 1_234_567, "global_aer": LOSS},
        "words": ["R is large."],
        "assumptions": ["mu is 0."],
    }
    terminal_results.show_theory(display, found)


def findings(display):
    row = {
        "count": 1,
        "severity": "error",
        "client": "[a]",
        "column": "age",
        "sentence": f"The value {format_cell(LOSS)} is far off.",
    }
    terminal_results.show_findings(display, "rows.csv", [row | {"count": 1}] * 2)


@pytest.mark.parametrize("show", [fit, advice, comparison, repeated, new_clients, theory, findings])
def test_every_table_fits_80_columns_and_cuts_no_number(show, capsys, monkeypatch):
    """A narrow terminal shows the numbers that a wide one shows, but for columns that it says it left out."""
    seen = {}
    for width in (80, 300):
        monkeypatch.setenv("COLUMNS", str(width))
        show(Display())
        seen[width] = capsys.readouterr().out
    wide = [line for line in seen[80].splitlines() if len(line) > 80]
    assert all(line.endswith(".") for line in wide)  # sentences are the terminal's to wrap
    numbers = {width: [word for word in text.split() if word.count(",") >= 2] for width, text in seen.items()}
    assert numbers[80] and set(numbers[80]) <= set(numbers[300])
    if "Left out" not in seen[80]:
        assert sorted(numbers[80]) == sorted(numbers[300])
    assert "Left out" not in seen[300]


def test_sentences_about_a_fit(capsys):
    """Scores with intervals over clients, and no recommendation."""
    fit(Display())
    out = " ".join(capsys.readouterr().out.split())
    assert "fedprox_personal on [b] exam (2 clients" in out
    assert "round 1234567, the best on validation rows; those of round 7654321, the last" in out
    assert "(95% CI: 1,000,000% higher to 3,500,000% lower) than with local models (7,654,321)" in out
    assert "These test rows cannot separate it from local models. `mooring advise` uses all rows" in out
    assert "pooled model" not in out  # its interval is not known
    assert "RMSE: 7,654,321 (fedprox_personal), 7,654,321 (pooled)" in out


def test_headings_are_all_different_and_names_are_never_cut_before_numbers(capsys, monkeypatch):
    frame = CLIENTS.assign(client=["a hospital with a name", "b"])
    for width in (68, 80, 100, 160):
        monkeypatch.setenv("COLUMNS", str(width))
        terminal_results.show_new_clients(Display(), frame, "mse", "prox")
        out = capsys.readouterr().out
        assert "a hospital with a name" in out
        heads = re.split(r"  +", next(line for line in out.splitlines() if "recommended" in line).strip())
        assert len(set(heads)) == len(heads)


def test_ten_clients_are_shown_and_all_on_request(capsys):
    frame = pd.concat([CLIENTS] * 20, ignore_index=True).assign(client=[f"c{i}" for i in range(40)])
    told = {"title": "t", "headline": "Use it.", "summary": {"metric": "mse", "client_level": 0.9}, "words": {}}
    for all_of_them, count in ((False, 10), (True, 40)):
        terminal_results.show_advice(Display(), told | {"clients": frame.to_dict("records")}, all_of_them, "runs/t")
        out = capsys.readouterr().out
        assert len(re.findall(r"^  c\d+ ", out, re.M)) == count
        assert ("--per-client or runs/t/clients.parquet" in " ".join(out.split())) is not all_of_them


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"_pct": 5.24, "_pct_ci_low": -4.8, "_pct_ci_high": 15.6}, "5.2% lower (-5 to 16)"),
        ({"_pct": -3.0, "_pct_ci_low": -9.0, "_pct_ci_high": 0.2}, "3.0% higher (-9 to 0.2)"),
        ({"_pct": 0.0, "_pct_ci_low": 0.0, "_pct_ci_high": 0.0}, "no difference"),
        ({"_pct": 99.97, "_pct_ci_low": 0.004, "_pct_ci_high": 100.0}, "99.97% lower (0.01 to 100)"),
        ({"_pct": float("nan")}, "-"),
    ],
)
def test_a_side_in_words(row, text):
    row = {f"improvement_over_local{key}": value for key, value in row.items()}
    assert terminal_results.describe_improvement(row, "local") == text
    assert terminal_results.describe_improvement(row | {"recommended": "local"}, "local") in ("same model", "-")


def test_notes_come_last_and_are_at_most_three(capsys):
    terminal_results.show_notes(Display(), [f"number {k}" for k in range(5)])
    err = capsys.readouterr().err
    assert err.count("note: number") == 3 and "2 more notes on the data: see the report." in err


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """An advice whose clients have names that are markup to somebody."""
    from mooring.advice.advise import advise

    folder = tmp_path_factory.mktemp("runs")
    frame = planted(0.5, clients=6)
    frame["who"] = frame["who"].map({"c0": "[a]", "c1": "$x_{$", "c2": "\x1b[31m"}).fillna(frame["who"])
    advise(frame, client="who", target="y", threads=1, out=folder / "run")
    return folder / "run"


def test_reports_need_only_the_directory(run, tmp_path):
    """In another process, with nothing that trains loaded, and the same bytes as in this one."""
    os.symlink(run, tmp_path / "there")
    code = (
        "import sys\n"
        "from mooring.report.terminal_results import show_run\n"
        "from mooring.report.figures import draw_images\n"
        "from mooring.report.terminal import Display\n"
        "show_run(Display(), 'there', per_client=True)\n"
        "draw_images('there')\n"
        "rooms = ('engines', 'advice', 'algorithms', 'tasks', 'data.sources', 'theory')\n"
        "sys.exit(any(name.startswith(f'mooring.{room}') for name in sys.modules for room in rooms))\n"
    )
    env = {**os.environ, "PYTHONPATH": os.getcwd(), "COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    files = [run / f"{name}.{end}" for name in ("improvements", "path") for end in ("png", "svg")]
    images = [file.read_bytes() for file in files]
    draw_images(run)
    assert images == [file.read_bytes() for file in files]
    assert "[a]" in done.stdout and "$x_{$" in done.stdout and "\x1b" not in done.stdout
    last = done.stdout.strip().splitlines()[-1]
    assert last == "Run: there    Predict: mooring predict there new.csv"


def test_a_run_of_another_kind_is_one_sentence(run):
    with pytest.raises(RequestError, match=r"has no summary\.json: that belongs to runs of 'fit'"):
        open_run(run).summary  # noqa: B018


def test_tables_survive_json():
    rows = [{"a": 1.0, "b": "x", "c": np.inf, "d": None}, {"a": np.nan, "b": "Infinity", "c": 2, "d": None}]
    back = frame_from_rows(json.loads(json_bytes({"rows": rows}))["rows"])
    assert back["a"].isna().tolist() == [False, True] and back["c"].tolist() == [np.inf, 2.0]
    assert back["b"].tolist() == ["x", "Infinity"] and list(frame_from_rows(rows)["c"]) == [np.inf, 2.0]


def test_measures_are_shown_by_model_in_one_sentence_each():
    measures = {"recommended": {"rmse": 1.25, "r2": 0.9}, "local": {"rmse": 2.0, "r2": 0.75}, "global": {}}
    assert terminal_results.describe_measures(measures, terminal_results.EVALUATED_MODELS) == [
        "RMSE: 1.25 (recommended), 2 (local).",
        "R2: 0.9 (recommended), 0.75 (local).",
    ]
    assert terminal_results.describe_measures({}, terminal_results.EVALUATED_MODELS) == []
