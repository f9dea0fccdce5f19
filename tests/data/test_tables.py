"""Bad input: one sentence that names the place."""

import gzip
import importlib.util

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mooring.core.errors import RequestError
from mooring.data import file_readers
from mooring.data.loading import load

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
    "small client": (GOOD + "c,1,r,2\n" * 4, ["client 'c' has 4 rows", "at least 5", "--min-rows", "--drop-small"]),
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
        ("data.csv.gz", b"not packed", "not a readable .gz"),
        ("data.csv.gz", gzip.compress(GOOD.encode())[:-20], "not a readable .gz"),
        ("data.csv", b"site," * 3 + b'"' + b"x" * 200_000 + b"\n1,2,3,4\n", "header line cannot be read"),
        ("data.parquet", b"PAR1 but not really", "not a readable Parquet"),
        ("data.parquet", truncated_parquet(), "not a readable Parquet"),
        ("data.parquet", b"", "not a readable Parquet"),
        ("data.npz", b"PK\x03\x04 cut off", "not a readable .npz"),
        ("data.npz", b"", "not a readable .npz"),
        ("data.ods", b"whatever", ".csv"),
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
        ({"group": "person"}, "group column 'person'"),
        ({"time_column": "colour"}, "time column 'colour' is text such as 'r'"),
        ({"group": "x", "time_column": "x"}, "one way"),
        ({"target_type": "binomial"}, "'regression', 'binary', 'classes', 'count', got 'binomial'"),
        ({"target_type": "binary"}, "a binary target has two"),
        ({"target_type": "count"}, "row 2, target column 'y': 0.37 is not a count"),
        ({"min_rows": 0}, "min_rows must be at least 1"),
        ({"drop": ["x", "colour"]}, "no feature column is left"),
    ]:
        with pytest.raises(RequestError, match=expected):
            load(tmp_path / "data.csv", **asked, **options)


def test_strange_sources():
    for source in (3, {}, {"a": 1}, (1, 2)):
        with pytest.raises(RequestError, match="clients are read from a path"):
            load(source)


def wide(columns, rows=12):
    """A table whose header is longer than what used to be read of it."""
    names = [f"a_rather_long_name_of_column_{j}" for j in range(columns)]
    numbers = np.random.default_rng(0).normal(size=(rows, columns)).round(3)
    lines = [",".join(["7" if i % 2 else "007", *map(str, row), str(i / 7)]) for i, row in enumerate(numbers)]
    return ",".join(["site", *names, "y"]) + "\n" + "\n".join(lines) + "\n"


def test_a_header_of_any_length_is_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(file_readers, "SNIFF_BYTES", 4_096)
    text = wide(200)
    assert text.index("\n") > file_readers.SNIFF_BYTES
    (tmp_path / "data.csv").write_text(text)
    assert load(tmp_path / "data.csv", client="site", target="y").names == ("007", "7")
    moved = "\n".join(",".join([*line.split(",")[1:], line.split(",")[0]]) for line in text.splitlines()) + "\n"
    (tmp_path / "data.csv").write_text(moved)  # the client column comes last
    assert load(tmp_path / "data.csv", client="site", target="y").names == ("007", "7")
    (tmp_path / "data.csv").write_text(wide(4_500, 6))
    assert file_readers.read_file(tmp_path / "data.csv", file_readers.CellReading())[0].shape == (6, 4_502)


def test_names_such_as_na_are_names_and_only_an_empty_cell_is_missing(tmp_path):
    names = ["NA", "None", "null", "nan", "?"]
    rows = "".join(f"{name},{i / 7:.3f},{i * 0.37:.3f}\n" for name in names for i in range(6))
    (tmp_path / "data.csv").write_text("site,x,y\n" + rows)
    assert load(tmp_path / "data.csv", client="site", target="y").names == tuple(sorted(names))
    (tmp_path / "data.csv").write_text("site,x,y\n" + rows + ",1,1\n")
    with pytest.raises(RequestError, match="row 31, client column 'site': the name is missing"):
        load(tmp_path / "data.csv", client="site", target="y")
    (tmp_path / "data.csv").write_text("site,x,y\n" + rows.replace(",0.000,", ",NA,"))
    assert load(tmp_path / "data.csv", client="site", target="y").features == ("x", "x missing")


def test_missing_values_are_those_of_pandas_and_two_more():
    from pandas._libs.parsers import STR_NA_VALUES

    assert set(file_readers.MISSING_TEXTS) == STR_NA_VALUES | {"?", "."}


def test_three_is_one_client_however_it_is_written(tmp_path):
    frame = pd.DataFrame({"x": np.arange(24) / 3, "y": np.arange(24) % 5 / 7})
    for site in ([3] * 24, [3.0] * 24, ["3"] * 24, [3, 3.0, "3", "3.0"] * 6):
        assert load(frame.assign(site=pd.Series(site)), client="site", target="y").names == ("3",)
    (tmp_path / "data.csv").write_text("site,x,y\n" + "".join(f"{s},{i / 3},{i % 5 / 7}\n" for i in range(9) for s in (
        "3", "3.0", "3.00", "03", "3.5")))  # fmt: skip
    assert load(tmp_path / "data.csv", client="site", target="y").names == ("03", "3", "3.5")


@pytest.mark.parametrize(
    ("encoding", "said"), [("utf-8", ""), ("utf-8-sig", ""), ("cp1252", "cp1252"), ("latin-1", "cp1252")]
)
def test_encodings(tmp_path, encoding, said):
    text = GOOD.replace("\na,", "\nZürich,").replace("colour", "größe")
    (tmp_path / "data.csv").write_bytes(text.encode(encoding))
    clients = load(tmp_path / "data.csv", client="site", target="y")
    assert clients.names == ("Zürich", "b") and "größe=g" in clients.features
    assert any(f"read as {said}" in note for note in clients.notes) == bool(said)
    (tmp_path / "data.csv").write_bytes(text.encode("latin-1").replace(b"\xfc", b"\x81"))  # no such byte in cp1252
    assert load(tmp_path / "data.csv", client="site", target="y").names[0] == "Z\x81rich"


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_line_ends(tmp_path, end):
    (tmp_path / "data.csv").write_bytes(GOOD.replace("\n", end).encode())
    assert load(tmp_path / "data.csv", client="site", target="y").placement["row"].max() == 79


def test_packed_files_alone_and_in_folders(tmp_path):
    (tmp_path / "data.csv").write_text(GOOD)
    (tmp_path / "data.csv.gz").write_bytes(gzip.compress(GOOD.encode()))
    plain = load(tmp_path / "data.csv", client="site", target="y")
    assert load(tmp_path / "data.csv.gz", client="site", target="y").schema == plain.schema
    (tmp_path / "sites").mkdir()
    own = pd.read_csv(tmp_path / "data.csv")
    for name, rows in own.groupby("site"):
        rows.drop(columns="site").to_csv(tmp_path / "sites" / f"{name}.csv.gz", index=False)
    assert load(tmp_path / "sites", target="y").names == ("a", "b")


def test_a_packed_file_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(file_readers, "MAX_UNPACKED_BYTES", 1000)
    (tmp_path / "data.csv.gz").write_bytes(gzip.compress(GOOD.encode()))
    with pytest.raises(RequestError, match="unpacks to more than 1,000 bytes"):
        load(tmp_path / "data.csv.gz", client="site", target="y")


def test_excel(tmp_path):
    frame = pd.DataFrame({"site": ["007", "NA"] * 20, "x": np.arange(40) / 7, "y": np.arange(40) * 0.37})
    if importlib.util.find_spec("openpyxl") is None:
        (tmp_path / "data.xlsx").write_bytes(b"whatever")
        with pytest.raises(RequestError, match=r"data\.xlsx: .*openpyxl, which is not installed"):
            load(tmp_path / "data.xlsx", client="site", target="y")
        return
    frame.to_excel(tmp_path / "data.xlsx", index=False)
    clients = load(tmp_path / "data.xlsx", client="site", target="y")
    assert clients.names == ("007", "NA")
    # A workbook keeps 16 digits of a number: the standardised column, of size 1, may move by a few units of the last.
    np.testing.assert_allclose(clients.train.x, load(frame, client="site", target="y").train.x, rtol=0, atol=1e-14)
    (tmp_path / "data.xlsx").write_bytes(b"whatever")
    with pytest.raises(RequestError, match="not a readable Excel file"):
        load(tmp_path / "data.xlsx", client="site", target="y")


def test_thousands_separators_are_numbers(tmp_path):
    rows = "".join(f'{s},"{1000 + 97 * i:,}",{i % 7},"{3750 + i:,}"\n' for s in "ab" for i in range(20))
    (tmp_path / "data.csv").write_text("site,price,x,y\n" + rows)
    clients = load(tmp_path / "data.csv", client="site", target="y")
    assert clients.kind == "regression" and clients.features == ("price", "x")
    assert 3750 < clients.target_mean < 3770
    odd = rows.replace('"3,750"', '"0,750"')
    (tmp_path / "data.csv").write_text("site,price,x,y\n" + odd)
    with pytest.raises(RequestError, match="'0,750' is not a number"):
        load(tmp_path / "data.csv", client="site", target="y")
