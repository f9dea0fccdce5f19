"""Whatever a table holds, it is read or refused in one sentence: no other error, ever."""

import datetime
import decimal
import io
import os
import random
import warnings
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.torture import mutate
from mooring.core.errors import RequestError
from mooring.data.data_checks import check
from mooring.data.loading import load
from mooring.runs.runfile import make_run, parse_run, run_bytes
from tests.support.full_run_file import FULL

FEW = settings(
    max_examples=25, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
MANY = settings(FEW, max_examples=1000, derandomize=False)
CELLS = st.one_of(
    st.sampled_from(["", "NA", "nan", "inf", "-inf", "1e999", "1,5", "1.5", "0", "-0", "007", "TRUE", "2024-01-01",
                     "2024-13-45", "00:00", "=1+1", '"', "a\nb", "\x1b[31m", "[/red]", "\u202e", "é", "\ufeff", "1_000",
                     "0x10", "1e-320", "9" * 400, "None", "{}", "[]", "1;2", "%s", "$x_{$"]),
    st.integers(-3, 3).map(str),
    st.floats(allow_nan=True).map(repr),
    st.text(max_size=5),
)  # fmt: skip
COLUMN = {
    "list": pa.array([[1, 2]] * 12),
    "struct": pa.array([{"a": 1}] * 12),
    "map": pa.array([[("a", 1)]] * 12, pa.map_(pa.string(), pa.int64())),
    "binary": pa.array([b"\xff\x00"] * 12),
    "decimal": pa.array([decimal.Decimal("1.50")] * 12),
    "time": pa.array([datetime.time(1, 2)] * 12),
    "duration": pa.array([datetime.timedelta(days=k) for k in range(12)]),
    "date": pa.array([datetime.date(2024, 1, 1 + k) for k in range(12)]),
    "old date": pa.array([datetime.date(1, 1, 1 + k) for k in range(12)]),
    "zoned": pa.array([datetime.datetime(2024, 1, 1 + k, tzinfo=datetime.UTC) for k in range(12)]),
    "null": pa.nulls(12),
    "bool": pa.array([True, None] * 6),
    "half": pa.array(np.arange(12, dtype=np.float16)),
    "unsigned": pa.array(np.full(12, 2**64 - 1, np.uint64)),
    "codes": pa.array(list("abababababab")).dictionary_encode(),
    "text": pa.array(list("abababababab")),
    "nan": pa.array([float("nan")] * 12),
    "number": pa.array(np.arange(12) * 0.37),
}


def read_or_refused(source, **about):
    """And `check` finds nothing worse to say than `load`."""
    for work in (load, check):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                work(source, **about)
            except RequestError as refusal:
                assert str(refusal).strip()


def odd_csv(folder, header, rows, end, separator):
    quoted = ('"' + cell.replace('"', '""') + '"' for cell in header)
    lines = [
        separator.join(quoted),
        *(separator.join(f'"{c}"' if separator in c or "\n" in c else c for c in r) for r in rows),
    ]
    (folder / "odd.csv").write_bytes(end.join(lines).encode("utf-8", "surrogatepass"))
    read_or_refused(folder / "odd.csv", client="who", target="y")


NAMES = st.lists(st.sampled_from(["who", "y", "x", "", "who ", "id", "Unnamed: 1"]), min_size=2, max_size=5)
ROWS = st.lists(st.lists(CELLS, min_size=1, max_size=5), min_size=1, max_size=15)
HEADERS = st.one_of(st.just(["who", "x", "y"]), NAMES)
TABLES = (HEADERS, ROWS, st.sampled_from(["\n", "\r\n", "\r"]), st.sampled_from([",", ";", "\t"]))


@FEW
@given(*TABLES)
def test_odd_csv(tmp_path, header, rows, end, separator):
    odd_csv(tmp_path, header, rows, end, separator)


@pytest.mark.slow
@MANY
@given(*TABLES)
def test_many_odd_csv(tmp_path, header, rows, end, separator):
    odd_csv(tmp_path, header, rows, end, separator)


@pytest.mark.parametrize("role", ["who", "y", "x"])
@pytest.mark.parametrize("kind", COLUMN)
def test_odd_columns(tmp_path, kind, role):
    columns = {"who": COLUMN["text"], "x": COLUMN["number"], "y": COLUMN["number"]} | {role: COLUMN[kind]}
    pq.write_table(pa.table(columns), tmp_path / "odd.parquet")
    read_or_refused(tmp_path / "odd.parquet", client="who", target="y")


def npz_of(**arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


ARRAYS = [
    3.0, np.zeros(0), np.zeros((0, 2)), np.zeros((9, 0)), np.zeros((9, 2, 2)), np.full((9, 2), "a"),
    np.full((9, 2), np.nan), np.full((9, 2), 1e300), np.zeros((9, 2), bool), np.zeros((8, 2)),
    np.zeros((9, 2), complex), np.zeros((9, 2), "M8[s]"),
]  # fmt: skip


@pytest.mark.parametrize("x", ARRAYS)
@pytest.mark.parametrize("y", [np.arange(9.0), 3.0, np.zeros((9, 2)), np.full(9, "a"), np.full(9, np.nan)])
def test_odd_arrays(tmp_path, x, y):
    (tmp_path / "odd.npz").write_bytes(npz_of(X=x, y=y, groups=np.arange(9) % 3))
    read_or_refused(tmp_path / "odd.npz")


def odd_bytes(folder, seed):
    rng = random.Random(seed)
    good = np.random.default_rng(0).normal(size=(12, 2))
    text = "who,x,y\n" + "".join(f"{'ab'[k % 2]},{a:.3f},{b:.3f}\n" for k, (a, b) in enumerate(good))
    sink = io.BytesIO()
    pq.write_table(pa.table({"who": COLUMN["text"], "x": good[:, 0], "y": good[:, 1]}), sink)
    for name, data in (("csv", text.encode()), ("parquet", sink.getvalue()), ("npz", npz_of(X=good, y=good[:, 0]))):
        (folder / f"odd.{name}").write_bytes(mutate(data, rng))
        read_or_refused(folder / f"odd.{name}", **({} if name == "npz" else {"client": "who", "target": "y"}))
    with suppress(RequestError):
        parse_run(mutate(run_bytes(make_run(FULL, "here")), rng), "odd.toml")


@FEW
@given(st.integers(0, 2**32))
def test_odd_bytes(tmp_path, seed):
    odd_bytes(tmp_path, seed)


@pytest.mark.slow
@MANY
@given(st.integers(0, 2**32))
def test_many_odd_bytes(tmp_path, seed):
    odd_bytes(tmp_path, seed)


def test_a_pipe_in_a_file_s_place_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.csv")
    read_or_refused(tmp_path / "pipe.csv", client="who", target="y")
