"""Prediction intervals cover what they promise, for known and new clients; predictions keep their rows' columns."""

import numpy as np
import pandas as pd
import pytest

import mooring
from mooring.cli import main
from mooring.engines.prediction_intervals import UnseenPredictions, score_residuals


def planted(seed, clients=40):
    """Clients with intercepts, slopes and noise of their own."""
    rng = np.random.default_rng(seed)
    code = np.repeat(np.arange(clients), rng.integers(8, 50, clients))
    x, noise = rng.normal(size=(len(code), 2)), rng.uniform(0.7, 1.5, clients)
    slope, level = rng.normal(1, 0.5, (clients, 2)), rng.normal(0, 1, clients)
    y = level[code] + (x * slope[code]).sum(1) + noise[code] * rng.normal(size=len(code))
    return pd.DataFrame(x, columns=["u", "v"]).assign(site=[f"s{i}" for i in code], y=100 + 10 * y)


@pytest.fixture(scope="module")
def advised(tmp_path_factory):
    frame = planted(0)
    test = np.random.default_rng(1).random(len(frame)) < 0.3
    path = tmp_path_factory.mktemp("advised") / "run"
    train = frame[~test]
    advice = mooring.advise(train, client="site", target="y", out=path, theory=False, shape="linear", min_rows=3)
    return advice, frame[test & frame["site"].isin(train["site"])], path


def share_inside(predicted):
    actual = predicted["y (actual)"]
    return float(((actual >= predicted["y_low"]) & (actual <= predicted["y_high"])).mean())


def test_intervals_cover_known_and_new_clients(advised):
    advice, test, _ = advised
    assert 0.85 <= share_inside(advice.predict(test, interval=0.9)) <= 0.95
    with pytest.warns(UserWarning, match="unknown clients"):
        new = advice.predict(planted(7).assign(site=lambda f: "new " + f["site"]), interval=0.9)
    assert 0.85 <= share_inside(new) <= 0.95
    assert (new["model"] == "global (unknown client)").all()
    wide = advice.predict(test, interval=0.99)
    assert (wide["y_high"] > advice.predict(test, interval=0.9)["y_high"]).all()


def test_a_saved_run_has_the_same_intervals_and_keeps_the_rows_columns(advised):
    advice, test, path = advised
    rows = test.assign(key=[f"k{i}" for i in range(len(test))])
    saved, memory = mooring.open(path).predict(rows, interval=0.9), advice.predict(rows, interval=0.9)
    pd.testing.assert_frame_equal(saved, memory)
    assert saved["key"].tolist() == rows["key"].tolist() and (saved["model"] == "personal").all()
    assert saved["y (actual)"].tolist() == rows["y"].tolist()
    with pytest.raises(mooring.RequestError, match="a share above 0 and below 1"):
        mooring.open(path).predict(rows, interval=90)


def test_the_command_writes_intervals_and_workbooks_and_overwrites_when_forced(advised, tmp_path, capsys):
    _, test, path = advised
    test.drop(columns="y").to_csv(tmp_path / "new.csv", index=False)
    words = ["predict", str(path), str(tmp_path / "new.csv"), "--interval", "90%", "--out"]

    def run(*more):
        with pytest.raises(SystemExit) as left:
            main([*words, *more])
        return left.value.code

    assert run(str(tmp_path / "out.csv")) == 0
    found = pd.read_csv(tmp_path / "out.csv")
    assert {"u", "v", "site", "y", "y_low", "y_high", "model"} <= set(found.columns)
    assert run(str(tmp_path / "out.csv")) == 2 and "--force" in capsys.readouterr().err
    assert run(str(tmp_path / "out.csv"), "--force") == 0
    pytest.importorskip("openpyxl")
    assert run(str(tmp_path / "out.xlsx")) == 0
    sheet = pd.read_excel(tmp_path / "out.xlsx")
    np.testing.assert_allclose(sheet["y_low"], found["y_low"], rtol=1e-9)


def test_held_out_measures_are_in_the_targets_units(advised):
    advice, test, _ = advised
    measures = advice.summary["held_out_measures"]
    assert set(measures) == {"local", "global", "personal", "recommended"}
    residual = advice.predict(test)["y"].to_numpy() - test["y"].to_numpy()
    assert measures["recommended"]["rmse"] == pytest.approx(np.sqrt((residual**2).mean()), rel=0.15)
    assert measures["recommended"]["mae"] < measures["recommended"]["rmse"] < measures["global"]["rmse"]
    assert 0 < measures["global"]["r2"] < measures["personal"]["r2"] < 1


def test_scores_of_known_residuals():
    rng = np.random.default_rng(0)
    owner = np.repeat([0, 1], 4000)
    y = rng.normal(0, np.where(owner == 0, 1.0, 3.0))
    known = UnseenPredictions(y, np.zeros_like(y), owner)
    scores = score_residuals(("a", "b"), known, known)
    assert scores.half_width("a", 0.9) == pytest.approx(1.645, rel=0.06)
    assert scores.half_width("b", 0.9) == pytest.approx(3 * 1.645, rel=0.06)
    assert scores.half_width("new", 0.6) > scores.half_width("a", 0.6)


def test_intervals_of_a_fit_cover_its_clients(tmp_path):
    frame = planted(3, 30)
    test = np.random.default_rng(1).random(len(frame)) < 0.3
    options = {"client": "site", "target": "y", "baselines": False, "min_rows": 3, "rounds": 20}
    mooring.fit(frame[~test], out=tmp_path / "run", **options)
    predicted, _ = mooring.predict(
        tmp_path / "run", frame[test & frame["site"].isin(frame[~test]["site"])], interval=0.9
    )
    assert 0.85 <= share_inside(predicted) <= 0.95
    predicted, notes = mooring.predict(tmp_path / "run", frame.head(3).assign(site="nobody"), interval=0.9)
    assert predicted["y_low"].isna().all() and "3 rows of unknown clients have no interval" in " ".join(notes)


def test_runs_without_intervals_say_so(tmp_path):
    frame = planted(3, 6).assign(y=lambda table: np.where(table["y"] > 100, "high", "low"))
    mooring.fit(frame, client="site", target="y", algorithm="local", rounds=1, out=tmp_path / "run", baselines=False)
    with pytest.raises(mooring.RequestError, match="no prediction intervals"):
        mooring.open(tmp_path / "run").predict(frame, interval=0.9)
