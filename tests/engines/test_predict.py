"""Whose model answers which row."""

import numpy as np
import pandas as pd

from mooring.engines.fit import fit
from mooring.engines.predict import predict


def test_a_clients_number_may_be_written_in_any_way(tmp_path):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"town": np.arange(90) % 3, "x": rng.normal(size=90)})
    frame["y"] = frame["x"] * (1 + frame["town"]) + 5 * frame["town"]
    fit(frame, client="town", target="y", rounds=3, threads=1, out=tmp_path / "run")
    rows = frame.head(6)
    expected, notes = predict(tmp_path / "run", rows)
    assert notes == [] and expected["y"].nunique() == 6
    for town in (rows["town"].astype(float), rows["town"].astype(str), rows["town"].map(lambda t: f"{t}.0")):
        found, notes = predict(tmp_path / "run", rows.assign(town=town))
        assert notes == []
        pd.testing.assert_frame_equal(found.drop(columns="town"), expected.drop(columns="town"))


def test_a_row_without_a_client_is_predicted_with_the_global_model(tmp_path):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"town": np.repeat(list("abc"), 30), "x": rng.normal(size=90)})
    frame["y"] = frame["x"] + frame["town"].map({"a": 0.0, "b": 5.0, "c": 9.0})
    fit(frame, client="town", target="y", rounds=3, threads=1, out=tmp_path / "run")
    rows = frame.head(3).assign(town=[None, "a", "nobody"], x=0.5)
    found, notes = predict(tmp_path / "run", rows)
    assert found["y"][0] == found["y"][2] != found["y"][1]
    assert len(notes) == 2 and all("global model" in note for note in notes)


def test_every_row_is_answered_whatever_its_client_cell_holds(tmp_path):
    """Numbers with gaps: the reader makes them floats, and no row may keep what happened to be in memory."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"town": np.repeat([1, 2, 3], 30), "x": rng.normal(size=90)})
    frame["y"] = frame["x"] + 5 * frame["town"]
    fit(frame, client="town", target="y", rounds=3, threads=1, out=tmp_path / "run")
    rows = frame.head(4).assign(town=[None, 2, None, 9], x=0.5)
    rows.to_csv(tmp_path / "new.csv", index=False)
    for source in (rows, tmp_path / "new.csv"):
        found, notes = predict(tmp_path / "run", source)
        assert found["y"][0] == found["y"][2] == found["y"][3] != found["y"][1]
        assert np.isfinite(found["y"]).all() and list(found["client"]) == ["", "2", "", "9"]
        assert notes == [
            "2 rows with an empty cell in column 'town': predicted with the global model.",
            "1 unknown client, '9': predicted with the global model.",
        ]
    empty, notes = predict(tmp_path / "run", rows.assign(town=None))
    assert empty["y"].nunique() == 1 and empty["y"][0] == found["y"][0]
    assert notes == ["4 rows with an empty cell in column 'town': predicted with the global model."]


def test_one_client_answers_all_rows_however_its_number_is_written(tmp_path):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"town": np.repeat([1, 2, 3], 30), "x": rng.normal(size=90)})
    frame["y"] = frame["x"] + 5 * frame["town"]
    fit(frame, client="town", target="y", rounds=3, threads=1, out=tmp_path / "run")
    expected = predict(tmp_path / "run", frame.head(3).assign(town=3))[0]
    for name in ("3", 3, 3.0, "3.0", np.int64(3)):
        found = predict(tmp_path / "run", frame.head(3), client=name)[0]
        pd.testing.assert_frame_equal(found[["client", "y", "model"]], expected[["client", "y", "model"]])


def test_clients_too_small_to_learn_have_the_global_model_and_are_named(tmp_path):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"town": ["lone", *np.repeat(["a", "b"], 30)], "x": rng.normal(size=61)})
    frame["y"] = frame["x"] + 5 * (frame["town"] == "a")
    result = fit(frame, client="town", target="y", rounds=3, threads=1, out=tmp_path / "run")
    assert any("'lone'; the global model is used for them" in note for note in result.job.clients.notes)
    found, notes = predict(tmp_path / "run", frame.head(1))
    assert notes == ["1 unknown client, 'lone': predicted with the global model."]
    same, _ = predict(tmp_path / "run", frame.head(1).assign(town=None))
    assert found["y"][0] == same["y"][0]
