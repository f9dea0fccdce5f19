"""Bad input: one sentence that names the place."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mooring.core.errors import RequestError
from mooring.data.sources import load

GOOD = "site,x,colour,y\n" + "".join(
    f"{s},{i / 7:.3f},{'rgb'[i % 3]},{i * 0.37:.3f}\n" for s in "ab" for i in range(40)
)


def with_row(row, values, text=GOOD):
    lines = text.splitlines()
    lines[row] = values
    return "\n".join(lines) + "\n"


def texts(*cells):
    """A table whose columns are given as text."""
    return "site,x,y\n" + "\n".join(cells) + "\n"


BAD_TEXT = {
    "empty file": ("", ["data.csv", "empty"]),
    "blank file": ("\n\n", ["data.csv", "empty"]),
    "header only": ("site,x,y\n", ["data.csv", "no rows"]),
    "same name twice": (GOOD.replace("colour", "x"), ["data.csv", "column 'x' appears 2 times"]),
    "no client column": (GOOD.replace("site", "Sites"), ["client column 'site'", "'Sites'", "Did you mean 'Sites'?"]),
    "no target column": (GOOD.replace(",y", ",why"), ["target column 'y'", "'colour', 'why'"]),
    "text in numbers": (with_row(3, "a,oops,r,0.5"), ["data.csv, row 3", "column 'x'", "'oops' is not a number"]),
    "infinite feature": (with_row(5, "a,-inf,r,0.5"), ["row 5", "column 'x'", "infinite"]),
    "infinite target": (with_row(6, "a,1,r,inf"), ["row 6", "column 'y'", "infinite"]),
    "missing target": (with_row(7, "a,1,r,"), ["row 7", "column 'y'", "missing", "1 of 80", "drop"]),
    "text in the target": (with_row(8, "a,1,r,high"), ["row 8", "column 'y'", "'high' is not a number"]),
    "constant target": (texts(*(f"a,{i},2" for i in range(9))), ["column 'y'", "one class only, '2'"]),
    "missing client": (with_row(9, ",1,r,0.1"), ["row 9", "client column 'site'", "missing"]),
    "long row": (with_row(4, "a,1,r,2,3,4"), ["data.csv", "line 5"]),
    "all rows long": (GOOD.replace("colour,y", "y"), ["data.csv", "more values than the header"]),
    "cut off": (GOOD.rstrip("\n").rsplit(",", 1)[0], ["data.csv", "last line has 3 of 4 values", "cut off"]),
    "open quote": (with_row(80, 'b,1,"r,2'), ["data.csv", "not a regular table"]),
    "bad split value": (
        GOOD.replace("colour", "split").replace(",r,", ",train,").replace(",g,", ",exam,"),
        ["row 2", "column 'split'", "'exam'", "'train', 'validation', 'test'"],
    ),
    "small client": (GOOD + "c,1,r,2\n", ["client 'c' has 1 row", "at least 5", "--min-rows", "--drop-small"]),
    "bad date": (
        "site,d,y\n" + "".join(f"a,2020-01-{i + 1:02d},{i}.5\n" for i in range(25)) + "a,2020-13-45,2.5\n",
        ["row 26", "column 'd'", "'2020-13-45' is not a date"],
    ),
}


@pytest.mark.parametrize("case", BAD_TEXT)
def test_bad_csv(tmp_path, case):
    text, expected = BAD_TEXT[case]
    (tmp_path / "data.csv").write_text(text)
    options = {"split": "split"} if case == "bad split value" else {}
    with pytest.raises(RequestError) as error:
        load(tmp_path / "data.csv", client="site", target="y", **options)
    for words in expected:
        assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_the_good_table_of_these_tests_is_good(tmp_path):
    (tmp_path / "data.csv").write_text(GOOD)
    assert load(tmp_path / "data.csv", client="site", target="y").names == ("a", "b")


def truncated_parquet():
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"site": ["a"] * 9, "y": list(range(9))}), sink)
    return sink.getvalue().to_pybytes()[:-20]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("data.csv", bytes(range(256)) * 8, "binary"),
        ("data.csv", "site,y\nZürich,1\n".encode("latin-1"), "UTF-8"),
        ("data.parquet", b"PAR1 but not really", "not a readable Parquet"),
        ("data.parquet", truncated_parquet(), "not a readable Parquet"),
        ("data.parquet", b"", "not a readable Parquet"),
        ("data.npz", b"PK\x03\x04 cut off", "not a readable .npz"),
        ("data.npz", b"", "not a readable .npz"),
        ("data.xlsx", b"whatever", ".csv"),
    ],
)
def test_unreadable_files(tmp_path, name, content, expected):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RequestError, match=f"{name}: .*{expected}"):
        load(tmp_path / name, client="site", target="y")


def test_missing_file_proposes_a_neighbour(tmp_path):
    (tmp_path / "schools.csv").write_text(GOOD)
    with pytest.raises(RequestError, match=r"school\.csv: there is no such file.*Did you mean 'schools\.csv'"):
        load(tmp_path / "school.csv", client="site", target="y")


def test_parquet_with_a_column_twice(tmp_path):
    table = pa.Table.from_arrays([pa.array([1, 2]), pa.array([3, 4])], names=["y", "y"])
    pq.write_table(table, tmp_path / "data.parquet")
    with pytest.raises(RequestError, match=r"data\.parquet: column 'y' appears 2 times"):
        load(tmp_path / "data.parquet", client="site", target="y")


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ({"X": np.zeros((3, 2)), "y": np.zeros(3)}, "array 'group' is missing; it holds 'X', 'y'"),
        ({"X": np.zeros((3, 2)), "y": np.zeros(4), "group": np.zeros(3)}, "X 3, y 4, group 3"),
        ({"X": np.zeros((3, 2)), "y": np.zeros((3, 2)), "group": np.zeros(3)}, r"y must have one value per row"),
        ({"X": np.zeros((2, 2)), "y": np.zeros(2), "group": np.array(["a", {}], dtype=object)}, "holds objects"),
        (
            {"X": np.zeros((2, 2)), "y": np.zeros(2), "group": np.array([0, 5]), "group_names": np.array(["a"])},
            "group must number the 1 group_names",
        ),
        (
            {"X": np.zeros((2, 2)), "y": np.zeros(2), "group": np.zeros(2), "feature_names": np.array(["a"])},
            "1 feature_names are given for 2 columns",
        ),
    ],
)
def test_bad_npz(tmp_path, arrays, expected):
    np.savez(tmp_path / "data.npz", **arrays)
    with pytest.raises(RequestError, match=r"data\.npz: .*" + expected):
        load(tmp_path / "data.npz")


def test_folder_files_must_share_columns(tmp_path):
    frame = pd.DataFrame({"x": np.arange(9.0), "z": np.arange(9.0) % 4, "y": np.arange(9) / 2})
    frame.to_csv(tmp_path / "north.csv", index=False)
    frame.drop(columns="z").to_parquet(tmp_path / "south.parquet")
    with pytest.raises(RequestError, match=r"south\.parquet lacks column 'z'.*north\.csv"):
        load(tmp_path, target="y")
    frame.assign(w=1).to_parquet(tmp_path / "south.parquet")
    with pytest.raises(RequestError, match=r"south\.parquet has the extra column 'w'"):
        load(tmp_path, target="y")


def test_folder_errors_name_the_file_and_its_row(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n" + "".join(f"{i},{i}.5\n" for i in range(40)))
    (tmp_path / "b.csv").write_text("x,y\n" + "".join(f"{i},{i}.5\n" for i in range(3)) + "oops,1\n7,7.5\n")
    with pytest.raises(RequestError, match=r"b\.csv, row 4, column 'x': 'oops' is not a number"):
        load(tmp_path, target="y")


def test_empty_folder(tmp_path):
    with pytest.raises(RequestError, match="holds no table"):
        load(tmp_path, target="y")


def test_semicolons_and_decimal_commas(tmp_path):
    rows = "".join(f"a;{i},5;{i},25\n" for i in range(12))
    (tmp_path / "data.csv").write_text("site;x;y\n" + rows)
    clients = load(tmp_path / "data.csv", client="site", target="y")
    assert clients.schema.columns[0].kind == "number"
    assert any("decimal commas" in note for note in clients.notes)
    every = np.concatenate([part.of(0)[1].numpy() for part in (clients.train, clients.validation, clients.test)])
    np.testing.assert_allclose(np.sort(every * clients.target_scale + clients.target_mean), np.arange(12) + 0.25)


def test_unknown_names_of_features_and_kinds(tmp_path):
    (tmp_path / "data.csv").write_text(GOOD)
    asked = {"client": "site", "target": "y"}
    for options, expected in [
        ({"features": ["color"]}, "feature column 'color'.*Did you mean 'colour'"),
        ({"drop": ["nothing"]}, "feature column 'nothing'"),
        ({"features": ["y"]}, "'y' is the target column"),
        ({"unit": "person"}, "unit column 'person'"),
        ({"time": "colour"}, "time column 'colour' is text such as 'r'"),
        ({"unit": "x", "time": "x"}, "one way, got unit = 'x' and time = 'x'"),
        ({"kind": "binomial"}, "'regression', 'binary', 'classes', 'count', got 'binomial'"),
        ({"kind": "binary"}, "a binary target has two"),
        ({"kind": "count"}, "row 2, target column 'y': 0.37 is not a count"),
        ({"min_rows": 2}, "min_rows must be at least 3"),
        ({"drop": ["x", "colour"]}, "no feature column is left"),
    ]:
        with pytest.raises(RequestError, match=expected):
            load(tmp_path / "data.csv", **asked, **options)


def test_strange_sources():
    for source in (3, {}, {"a": 1}, (1, 2)):
        with pytest.raises(RequestError, match="clients are read from a path"):
            load(source)
