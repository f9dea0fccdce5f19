import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from mooring.core.errors import RequestError
from mooring.runs.files import parquet_bytes, write_parquet
from mooring.runs.records import CLIENTS, ROUNDS, clients_table, read_records, rounds_table
from mooring.runs.tensors import read_tensors, write_tensors

WORK = {"samples": 60, "gradients": 60, "promised": 3, "broken": 1}
COUNTS = {"bytes_up": 800, "bytes_down": 400, "asked": 3, "accepted": 2, **WORK}


def a_round(t, **losses):
    return {"t": t, **COUNTS, **losses}


ROWS = [
    a_round(1, train_loss=1.5, validation_loss=float("nan")),
    a_round(2, train_loss=float("inf"), test_loss=np.float64(0.1)),
    a_round(2**40, train_loss=None),
]


def test_rounds_have_fixed_columns_and_types(tmp_path):
    write_parquet(tmp_path / "rounds.parquet", rounds_table(ROWS))
    frame = read_records(tmp_path / "rounds.parquet", ROUNDS)
    assert " ".join(frame.columns) == (
        "t train_loss validation_loss test_loss test_rmse test_r2 test_accuracy test_auc bytes_up bytes_down samples "
        "gradients promised broken gradient_promised gradient_reached asked accepted epsilon"
    )
    assert (frame.dtypes[["t", "samples", "asked"]] == "int64").all()
    assert (frame.dtypes[["train_loss", "test_loss"]] == "float64").all()
    np.testing.assert_array_equal(frame["train_loss"], [1.5, np.inf, np.nan])
    np.testing.assert_array_equal(frame["test_loss"], [np.nan, 0.1, np.nan])
    assert frame["t"].tolist() == [1, 2, 2**40]


def test_clients_have_fixed_columns_and_types(tmp_path):
    sizes = {"rows": 10, "train": 6, "validation": 2, "test": 2}
    rows = [{"client": "a", **sizes, "alone": 1.0, "deploy": "personal"}, {"client": "ü", **sizes}]
    write_parquet(tmp_path / "clients.parquet", clients_table(rows))
    frame = read_records(tmp_path / "clients.parquet", CLIENTS)
    assert " ".join(frame.columns) == (
        "client rows train validation test alone common personal gain gain_percent rmse mae r2 accuracy auc lam alpha "
        "left_out deploy will_do "
        "gain_over_alone gain_over_alone_low gain_over_alone_high "
        "gain_over_alone_percent gain_over_alone_percent_low gain_over_alone_percent_high "
        "chance_over_alone sure_over_alone "
        "gain_over_common gain_over_common_low gain_over_common_high "
        "gain_over_common_percent gain_over_common_percent_low gain_over_common_percent_high "
        "chance_over_common sure_over_common"
    )
    assert frame["client"].tolist() == ["a", "ü"]
    assert frame["deploy"][0] == "personal" and pd.isna(frame["deploy"][1])
    empty = parquet_bytes(clients_table([]))
    (tmp_path / "clients.parquet").write_bytes(empty)
    assert (read_records(tmp_path / "clients.parquet", CLIENTS).dtypes == frame.dtypes).all()


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
    with pytest.raises(RequestError, match=r"rounds.parquet has no column 'los'; it knows t, train_loss"):
        rounds_table([a_round(1, los=2.0)])
    with pytest.raises(RequestError, match="every row needs a value of 'asked'"):
        rounds_table([{name: value for name, value in a_round(1).items() if name != "asked"}])
    with pytest.raises(RequestError, match="every row needs a value of 'client'"):
        clients_table([{"rows": 1, "train": 1, "validation": 0, "test": 0}])


def test_a_table_of_an_earlier_version_is_read(tmp_path):
    """Columns that came later are empty in it, and those that are no more are left out."""
    rows = [{"client": "a", "rows": 10, "train": 6, "validation": 2, "test": 2, "alone": 1.0}]
    before = clients_table(rows).drop_columns(["left_out"]).append_column("verdict", pa.array(["undecided"]))
    write_parquet(tmp_path / "a", before)
    frame = read_records(tmp_path / "a", CLIENTS)
    assert frame["left_out"].isna().all() and frame["alone"].tolist() == [1.0] and "verdict" not in frame


def test_a_table_of_another_version_is_refused(tmp_path):
    write_parquet(tmp_path / "a", pd.DataFrame({"t": [1], "loss": [0.5]}))
    with pytest.raises(RequestError, match=r"has the columns t, loss; this version of Mooring reads t, train_loss"):
        read_records(tmp_path / "a", ROUNDS)
