import numpy as np
import pandas as pd
import pytest

from mooring.core.errors import RequestError
from mooring.runs.atomic_files import parquet_bytes, write_parquet
from mooring.runs.table_schemas import CLIENTS_SCHEMA, ROUNDS_SCHEMA, clients_table, read_records, rounds_table
from mooring.runs.tensor_files import read_tensors, write_tensors

WORK = {"samples": 60, "gradients": 60, "promised": 3, "broken": 1}
COUNTS = {"bytes_up": 800, "bytes_down": 400, "asked": 3, "accepted": 2, **WORK}


def a_round(t, **losses):
    return {"round": t, **COUNTS, **losses}


ROWS = [
    a_round(1, train_loss=1.5, validation_loss=float("nan")),
    a_round(2, train_loss=float("inf"), test_loss=np.float64(0.1)),
    a_round(2**40, train_loss=None),
]


def test_rounds_have_the_columns_that_the_run_fills(tmp_path):
    write_parquet(tmp_path / "rounds.parquet", rounds_table(ROWS))
    frame = read_records(tmp_path / "rounds.parquet", ROUNDS_SCHEMA)
    assert " ".join(frame.columns) == (
        "round train_loss test_loss bytes_up bytes_down samples gradients promised broken asked accepted"
    )
    assert (frame.dtypes[["round", "samples", "asked"]] == "int64").all()
    assert (frame.dtypes[["train_loss", "test_loss"]] == "float64").all()
    np.testing.assert_array_equal(frame["train_loss"], [1.5, np.inf, np.nan])
    np.testing.assert_array_equal(frame["test_loss"], [np.nan, 0.1, np.nan])
    assert frame["round"].tolist() == [1, 2, 2**40]


def test_clients_have_the_columns_that_the_run_fills(tmp_path):
    sizes = {"rows": 10, "train": 6, "validation": 2, "test": 2}
    rows = [{"client": "a", **sizes, "local": 1.0, "recommended": "personal", "lam": np.nan}, {"client": "ü", **sizes}]
    write_parquet(tmp_path / "clients.parquet", clients_table(rows))
    frame = read_records(tmp_path / "clients.parquet", CLIENTS_SCHEMA)
    assert " ".join(frame.columns) == "client rows train validation test recommended local"
    assert frame["client"].tolist() == ["a", "ü"]
    assert frame["recommended"][0] == "personal" and pd.isna(frame["recommended"][1])
    (tmp_path / "clients.parquet").write_bytes(parquet_bytes(clients_table([])))
    assert list(read_records(tmp_path / "clients.parquet", CLIENTS_SCHEMA)) == ["client", *sizes]
    assert all(field.metadata[b"about"] for field in (*CLIENTS_SCHEMA, *ROUNDS_SCHEMA))


def test_equal_records_are_equal_bytes_also_after_a_checkpoint(tmp_path):
    """A resumed run builds its table from records that went through a checkpoint."""
    write_tensors(tmp_path / "a", {}, {"records": ROWS})
    resumed = read_tensors(tmp_path / "a")[1]["records"]
    shuffled = [dict(reversed(row.items())) for row in ROWS]
    assert len({parquet_bytes(rounds_table(rows)) for rows in (ROWS, resumed, shuffled)}) == 1
    without = [a_round(1, train_loss=1.5), *ROWS[1:]]
    assert parquet_bytes(rounds_table(without)) == parquet_bytes(rounds_table(ROWS))  # NaN is no value
    assert parquet_bytes(rounds_table(ROWS)) != parquet_bytes(rounds_table(ROWS[:2]))


def test_unknown_and_missing_columns_are_named():
    with pytest.raises(RequestError, match=r"rounds.parquet has no column 'los'; it has round, train_loss"):
        rounds_table([a_round(1, los=2.0)])
    with pytest.raises(RequestError, match="every row needs a value of 'asked'"):
        rounds_table([{name: value for name, value in a_round(1).items() if name != "asked"}])
    with pytest.raises(RequestError, match="every row needs a value of 'client'"):
        clients_table([{"rows": 1, "train": 1, "validation": 0, "test": 0}])


def test_a_table_of_another_version_is_refused(tmp_path):
    write_parquet(tmp_path / "a", pd.DataFrame({"t": [1], "loss": [0.5]}))
    with pytest.raises(RequestError, match=r"has the columns t, loss; this version of Mooring reads round, train_loss"):
        read_records(tmp_path / "a", ROUNDS_SCHEMA)
