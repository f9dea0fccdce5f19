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
        pd.testing.assert_frame_equal(found, expected)


def test_a_row_without_a_client_is_answered_by_the_common_model(tmp_path):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"town": np.repeat(list("abc"), 30), "x": rng.normal(size=90)})
    frame["y"] = frame["x"] + frame["town"].map({"a": 0.0, "b": 5.0, "c": 9.0})
    fit(frame, client="town", target="y", rounds=3, threads=1, out=tmp_path / "run")
    rows = frame.head(3).assign(town=[None, "a", "nobody"], x=0.5)
    found, notes = predict(tmp_path / "run", rows)
    assert found["y"][0] == found["y"][2] != found["y"][1]
    assert len(notes) == 1 and "common model" in notes[0]
