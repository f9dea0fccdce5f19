"""What the commands print, from plain tables and from a run directory alone."""

import json
import os
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from mooring.core.errors import RequestError
from mooring.report import answers
from mooring.report.reproduction import show_claims
from mooring.report.terminal import Display, shown
from mooring.runs.directory import open_run
from mooring.runs.files import frame_of, json_bytes
from tests.advice.test_advise import planted

LOSS, GAIN = 7654321.25, -1234567.5
OTHERS = ("alone", "common")
CLIENTS = pd.DataFrame(
    {
        "client": ["school of arts", "[a]"],
        "rows": [1_234_567, 7_654_321],
        "alone": [LOSS, 2 * LOSS],
        "common": [LOSS + 1, LOSS + 2],
        "personal": [LOSS + 3, LOSS + 4],
        "gain": [GAIN, -GAIN],
        "gain_percent": [-1234567.25, 45.5],
        "deploy": ["common", "personal"],
        "will_do": ["common", "alone"],
        **{f"gain_over_{other}_percent{end}": [GAIN, -GAIN] for other in OTHERS for end in ("", "_low", "_high")},
        **{f"chance_over_{other}": [0.123456, 0.99] for other in OTHERS},
        **{f"sure_over_{other}": ["open", "sure"] for other in OTHERS},
        "left_out": [None, "3 rounds: its reply was not finite"],
    }
)
SUMMARY = {"title": "[b] exam", "metric": "mse", "alone": LOSS, "common": LOSS + 1, "personal": LOSS + 2}
METHOD = {"test_loss": LOSS, "last_test_loss": LOSS + 1, "bytes": 7_654_321, "seconds": 1234567.5, "rounds": 1_234_567}
ONE = {"value": LOSS, "low": GAIN, "high": 2 * LOSS, "method": "a long way to say where a number comes from", "R": LOSS}


def fit(display):
    more = {"algorithm": "fedprox_one_stage", "kept": "best", "best_round": 1_234_567, "last_round": 7_654_321}
    measures = {who: {"rmse": LOSS, "mae": LOSS, "r2": -LOSS} for who in ("alone", "common", "personal")}
    more |= {"measures": measures, "gain_percent": -1234567.25}
    answers.show_fit(display, SUMMARY | more, CLIENTS, each=True)


def advice(display):
    told = {"title": "t", "headline": "Personal models pay.", "summary": {"level": 0.95}, "words": ["[a] does well."]}
    answers.show_advice(display, told | {"clients": CLIENTS.to_dict("records")}, clients=True)


def comparison(display):
    known = {"accuracy": 0.123456789, "auc": 0.87654321}
    methods = [{"method": name, "kept_round": 1_234_567, **METHOD, **known} for name in ("local", "fedprox_one_stage")]
    clients = [{"client": "[a]", "local": LOSS, "fedprox_one_stage": LOSS}]
    answers.show_comparison(display, {"title": "t", "metric": "log-loss", "methods": methods, "clients": clients})


def repeated(display):
    spread = {"test_loss_sd": LOSS, "behind": -LOSS, "behind_sd": LOSS, "accuracy": 0.5, "kept_round": 1.5}
    methods = [{"method": f"ditto lam={lam}", **METHOD, **spread} for lam in (0.1, 10)]
    clients = [{"client": "[a]", "ditto lam=0.1": LOSS, "ditto lam=10": LOSS}]
    answers.show_comparison(display, {"title": "t", "metric": "log-loss", "methods": methods, "clients": clients})


def newcomers(display):
    answers.show_newcomers(display, CLIENTS, "mse", "prox")


def theory(display):
    found = {
        "constants": {"smooth": ONE, "mu": ONE},
        "heterogeneity": {**ONE, "R_max": ONE, "Gamma": ONE, "by_feature": {"[x]": 1.0, "y": 2.0}},
        "thresholds": {"alternative": {**ONE, "side": "undecided", "source": "alternative, Corollary 3.1"}},
        "lambda": {"client_and_coefficient": {**ONE, "source": "empirical Bayes, restricted likelihood"}},
        "promises": {"rounds": 1_234_567, "common_aer": LOSS},
        "words": ["R is large."],
        "assumptions": ["mu is 0."],
    }
    answers.show_theory(display, found)


def findings(display):
    row = {
        "count": 1,
        "severity": "error",
        "client": "[a]",
        "column": "age",
        "sentence": f"The value {shown(LOSS)} is far off.",
    }
    answers.show_findings(display, "rows.csv", [row | {"count": 1}] * 2)


def claims(display):
    numbers = {"value": LOSS, "reference": 2 * LOSS, "ratio": GAIN, "low": GAIN, "high": LOSS, "limit": 1.0}
    row = {"experiment": "kernel-fig1", "says": f"the error stays below {shown(LOSS)} at every R", "word": "open"}
    show_claims(display, [row | {"worst": numbers}], "quick", "out")


@pytest.mark.parametrize("show", [fit, advice, comparison, repeated, newcomers, theory, findings, claims])
def test_every_table_fits_80_columns_and_cuts_no_number(show, capsys, monkeypatch):
    """A narrow terminal shows the numbers that a wide one shows, but for columns that it says it left out."""
    seen = {}
    for width in (80, 300):
        monkeypatch.setenv("COLUMNS", str(width))
        show(Display())
        seen[width] = capsys.readouterr().out
    tables = [line for line in seen[80].splitlines() if len(line) > 80]
    assert all(line.endswith(".") for line in tables)  # sentences are the terminal's to wrap
    numbers = {width: [word for word in text.split() if word.count(",") >= 2] for width, text in seen.items()}
    assert numbers[80] and set(numbers[80]) <= set(numbers[300])
    if "Left out" not in seen[80]:
        assert sorted(numbers[80]) == sorted(numbers[300])
    assert "Left out" not in seen[300]


def test_sentences_about_a_fit(capsys):
    fit(Display())
    out = capsys.readouterr().out
    assert "[b] exam" in out and "round 1234567, the best on validation rows; those of round 7654321, the last" in out
    assert "Of 2 clients, 1 do better with the common model than alone" in out
    assert "fedprox_one_stage: one common model will do: with personal ones the test mse is" in out


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """An advice whose clients have names that are markup to somebody."""
    from mooring.advice.advise import advise

    folder = tmp_path_factory.mktemp("runs")
    frame = planted(0.5, clients=6)
    frame["who"] = frame["who"].map({"c0": "[a]", "c1": "$x_{$", "c2": "\x1b[31m"}).fillna(frame["who"])
    advise(frame, client="who", target="y", threads=1, out=folder / "run")
    return folder / "run"


def test_reports_work_from_the_directory_alone(run, tmp_path):
    """In another process, with nothing that trains loaded, and the same bytes twice."""
    os.symlink(run, tmp_path / "there")
    code = (
        "import sys\n"
        "from mooring.report.answers import show_run\n"
        "from mooring.report.figures import draw_images\n"
        "from mooring.report.terminal import Display\n"
        "show_run(Display(), 'there', clients=True)\n"
        "draw_images('there')\n"
        "rooms = ('engines', 'advice', 'algorithms', 'tasks', 'experiments', 'data.sources', 'theory')\n"
        "sys.exit(any(name.startswith(f'mooring.{room}') for name in sys.modules for room in rooms))\n"
    )
    images = []
    for _ in range(2):
        env = {**os.environ, "PYTHONPATH": os.getcwd(), "COLUMNS": "80"}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=env, check=False
        )
        assert done.returncode == 0, done.stderr
        images.append([(run / f"{name}.{end}").read_bytes() for name in ("gains", "path") for end in ("png", "svg")])
    assert images[0] == images[1]
    assert "[a]" in done.stdout and "$x_{$" in done.stdout and "\x1b" not in done.stdout
    assert "Personal models are the best guess" in done.stdout and done.stdout.endswith("Run: there\n")


def test_a_run_of_another_kind_is_one_sentence(run):
    with pytest.raises(RequestError, match=r"has no summary\.json: that belongs to runs of 'fit'"):
        open_run(run).summary  # noqa: B018


def test_tables_survive_json():
    rows = [{"a": 1.0, "b": "x", "c": np.inf, "d": None}, {"a": np.nan, "b": "Infinity", "c": 2, "d": None}]
    back = frame_of(json.loads(json_bytes({"rows": rows}))["rows"])
    assert back["a"].isna().tolist() == [False, True] and back["c"].tolist() == [np.inf, 2.0]
    assert back["b"].tolist() == ["x", "Infinity"] and list(frame_of(rows)["c"]) == [np.inf, 2.0]
