"""Tables as numbers: encoding, imputation, keys, dates, and the schema as JSON."""

import numpy as np
import pandas as pd
import pytest

from mooring.core.errors import RequestError
from mooring.data.loading import encode_new_rows, load
from mooring.data.schema import Schema, encode_table

ROWS = 60


@pytest.fixture
def frame():
    rng = np.random.default_rng(3)
    table = pd.DataFrame(
        {
            "site": np.repeat(["north", "south", "west"], 20),
            "number": rng.normal(5, 2, ROWS),
            "whole": rng.integers(0, 9, ROWS),
            "colour": rng.choice(["red", "green", "blue"], ROWS),
            "sex": rng.choice(["f", "m"], ROWS),
            "smoker": rng.random(ROWS) < 0.4,
            "day": pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.integers(0, 300, ROWS), "D"),
            "gap": np.where(rng.random(ROWS) < 0.3, np.nan, rng.normal(size=ROWS)),
            "y": rng.normal(size=ROWS),
        }
    )
    table["hole"] = table["colour"].where(rng.random(ROWS) < 0.7)
    table["text day"] = table["day"].dt.strftime("%Y-%m-%d")
    return table


def load_frame(frame, **options):
    return load(frame, **({"client": "site", "target": "y"} | options))


def in_source_order(clients, frame):
    """The loaded inputs and targets put back in the order of the table."""
    x, y = np.empty((len(frame), len(clients.features))), np.empty(len(frame))
    for part in ("train", "validation", "test"):
        rows = getattr(clients, part)
        for i, name in enumerate(clients.names):
            mine = clients.placement[(clients.placement.client == name) & (clients.placement.part == part)]["row"]
            x[mine], y[mine] = (value.numpy() for value in rows.of(i))
    return x, y


def test_encoding_equals_a_plain_loop(frame):
    clients = load_frame(frame)
    x, y = in_source_order(clients, frame)
    train = np.zeros(ROWS, dtype=bool)
    train[clients.placement.loc[clients.placement.part == "train", "row"]] = True

    def days(column):
        return [(pd.Timestamp(v) - pd.Timestamp("1970-01-01")).days for v in column]

    def parts(name):
        stamps = pd.to_datetime(frame[name])
        months, weekdays = stamps.dt.month, stamps.dt.strftime("%a")
        out = {f"{name} month={m}": months == m for m in sorted(set(months[train]))}
        return out | {f"{name} weekday={w}": weekdays == w for w in sorted(set(weekdays[train]))}

    common = frame["hole"][train].mode()[0]
    filled = {
        "number": frame["number"],
        "whole": frame["whole"],
        "colour=blue": frame["colour"] == "blue",
        "colour=green": frame["colour"] == "green",
        "colour=red": frame["colour"] == "red",
        "sex=m": frame["sex"] == "m",
        "smoker=True": frame["smoker"],
        "day": days(frame["day"]),
        **parts("day"),
        "gap": frame["gap"].fillna(frame["gap"][train].mean()),
        "gap missing": frame["gap"].isna(),
        "hole=blue": frame["hole"].fillna(common) == "blue",
        "hole=green": frame["hole"].fillna(common) == "green",
        "hole=red": frame["hole"].fillna(common) == "red",
        "hole missing": frame["hole"].isna(),
        "text day": days(frame["text day"]),
        **parts("text day"),
    }
    assert clients.features == tuple(filled)
    for j, values in enumerate(filled.values()):
        values = np.asarray(values, dtype=float)
        np.testing.assert_allclose(x[:, j], (values - values[train].mean()) / values[train].std(), atol=1e-10)
    target = frame["y"].to_numpy()
    np.testing.assert_allclose(clients.target_mean, target[train].mean())
    np.testing.assert_allclose(clients.target_scale, target[train].std())
    np.testing.assert_allclose(y * clients.target_scale + clients.target_mean, target)


def test_notes_say_what_was_done(frame):
    said = " ".join(load_frame(frame.assign(note=[f"text {i}" for i in range(ROWS)])).notes)
    assert "'gap', 'hole'" in said and "'day', 'text day'" in said and "'note' was left out: it is a key" in said


def test_useless_columns_are_dropped_and_named(frame):
    rng = np.random.default_rng(0)
    wide = frame.assign(
        key=np.arange(ROWS) + 1000,
        patient_id=rng.choice(10**9, ROWS, replace=False),
        salary=rng.choice(10**6, ROWS, replace=False),
        word=[f"w{i}" for i in range(ROWS)],
        same=3,
        empty=np.nan,
        distinct=rng.normal(size=ROWS),
        repeated=rng.choice([f"level {i}" for i in range(5)], ROWS),
    )
    many = pd.concat([wide] * 3, ignore_index=True).assign(street=[f"street {i % 60}" for i in range(3 * ROWS)])
    clients = load_frame(wide)
    twice = pd.concat([wide, wide.assign(site="east")], ignore_index=True)
    assert "is a key" in load_frame(twice).schema.dropped["patient_id"]
    assert set(clients.schema.dropped) == {"key", "patient_id", "word", "same", "empty"}
    assert {"salary", "distinct", "repeated=level 1"} <= set(clients.features)
    assert all(any(f"'{name}' was left out" in note for note in clients.notes) for name in clients.schema.dropped)
    assert "different values" in load_frame(many).schema.dropped["street"]


def test_features_and_drop_override(frame):
    keyed = frame.assign(key=np.arange(ROWS), same=1.0)
    assert load_frame(keyed, features=["key", "sex"]).features == ("key", "sex=m")
    assert load_frame(keyed, features=["sex", "same"]).features == ("sex=m", "same")
    assert "number" not in load_frame(frame, drop=["number"]).features


def test_json_round_trip(frame):
    clients = load_frame(frame)
    again = Schema.from_json(clients.schema.to_json())
    assert again == clients.schema
    np.testing.assert_array_equal(encode_table(frame, again)[0], encode_table(frame, clients.schema)[0])
    with pytest.raises(RequestError, match=r"schema\.json is not a schema"):
        Schema.from_json("{}")


def test_the_digest_follows_the_data(frame):
    digest = load_frame(frame).schema.digest
    assert len(digest) == 64 and digest == load_frame(frame.copy()).schema.digest
    for column, value in (("number", 1e3), ("colour", "red"), ("site", "west")):
        changed = frame.copy()
        changed.loc[0, column] = value
        if changed.loc[0, column] != frame.loc[0, column]:
            assert load_frame(changed).schema.digest != digest


def test_loaded_rows_equal_encoded_rows(frame):
    clients = load_frame(frame)
    x, y, notes = encode_new_rows(frame, clients.schema)
    np.testing.assert_allclose(x, in_source_order(clients, frame)[0])
    np.testing.assert_allclose(y, in_source_order(clients, frame)[1])
    assert notes == []


def test_rows_that_come_later(frame, tmp_path):
    clients = load_frame(frame)
    later = frame.head(4).drop(columns=["y", "site"]).copy()
    later.loc[0, "colour"] = "mauve"
    later.loc[1, "number"] = np.nan
    later.to_csv(tmp_path / "later.csv", index=False)
    x, y, notes = encode_new_rows(tmp_path / "later.csv", clients.schema)
    assert y is None and x.shape == (4, len(clients.features)) and x.dtype == np.float64
    raw = x * clients.schema.scale + clients.schema.mean
    colours = [clients.features.index(f"colour={c}") for c in ("blue", "green", "red")]
    np.testing.assert_allclose(raw[0, colours], 0, atol=1e-12)
    np.testing.assert_allclose(x[1, clients.features.index("number")], 0, atol=1e-12)
    assert any("'colour': 1 rows" in note and "'mauve'" in note and "zeros" in note for note in notes)
    assert any("'number': 1 rows have no value" in note for note in notes)


def test_a_missing_or_wrong_column_is_named(frame):
    schema = load_frame(frame).schema
    with pytest.raises(RequestError, match=r"column 'number' is missing.*Did you mean 'numbers'"):
        encode_new_rows(frame.rename(columns={"number": "numbers"}), schema)
    slip = frame.astype({"whole": object})
    slip.loc[2, "whole"] = "many"
    with pytest.raises(RequestError, match=r"row 3, column 'whole': 'many' is not a number"):
        encode_new_rows(slip, schema)


def test_codes_that_look_like_numbers_stay_levels(tmp_path):
    rows = [f"{'ab'[i % 2]},{['0', '1', '2', '3+'][i % 4]},{i * 0.7:.2f}" for i in range(40)]
    (tmp_path / "first.csv").write_text("site,kids,y\n" + "\n".join(rows) + "\n")
    schema = load(tmp_path / "first.csv", client="site", target="y").schema
    assert schema.columns[0].levels == ("0", "1", "2", "3+")
    (tmp_path / "later.csv").write_text("kids,z\n1,0\n,0\n2,0\n")
    for later in (tmp_path / "later.csv", pd.DataFrame({"kids": [1.0, np.nan, 2.0]})):
        raw = encode_new_rows(later, schema)[0] * schema.scale + schema.mean
        np.testing.assert_allclose(raw[[0, 2]], [[0, 1, 0, 0], [0, 0, 1, 0]], atol=1e-12)


def test_levels_and_statistics_come_from_training_rows_only(frame):
    part = np.tile(["train"] * 12 + ["validation"] * 4 + ["test"] * 4, 3)
    table = frame.assign(split=part)
    table.loc[table["split"] == "test", "colour"] = "violet"
    table.loc[table["split"] != "train", "number"] = 1e6
    clients = load_frame(table)
    assert "colour=violet" not in clients.features
    assert any("'colour': 12 rows" in note for note in clients.notes)
    assert clients.schema.mean[clients.features.index("number")] < 10
