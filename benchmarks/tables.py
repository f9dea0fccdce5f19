"""Grouped tables that `benchmarks.tables_fetch` wrote to a folder, and their splits.

    entries = list_tables(folder, "design")
    frame = read_table(folder, entries[0])
    part = split_of(frame, entries[0], 1)          # "train", "validation" or "test" for each row

A split depends on the table's name and the seed only, so every method that is compared sees the same rows.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

TRAIN, VALIDATION, TEST = "train", "validation", "test"
BY_TIME = "time"
TEST_SHARE = VALIDATION_SHARE = 0.2

Entry = dict[str, Any]  # one element of tables.json


def list_tables(folder: Path, part: str | None = None) -> list[Entry]:
    """The entries of tables.json, smallest table first; only those of one part if it is given."""
    entries = json.loads((folder / "tables.json").read_text())["tables"]
    return sorted((e for e in entries if part in (None, e["part"])), key=lambda e: (e["rows"], e["name"]))


def read_table(folder: Path, entry: Entry) -> pd.DataFrame:
    """A table's rows, in the order in which splits number them."""
    return pd.read_parquet(folder / f"{entry['name']}.parquet")


def split_of(frame: pd.DataFrame, entry: Entry, seed: int | str) -> np.ndarray:
    """'train', 'validation' or 'test' for each row, within each client.

    With a number, a client's rows are assigned by chance: 20% test, 20% validation (rounded), the others train. With
    "time", the last 20% of its rows by the time column are test, the 20% before them validation; ties keep the order
    of the table.
    """
    if seed == BY_TIME:
        if not entry["time"]:
            raise ValueError(f"{entry['name']}: has no time column, so it cannot be split by time.")
        order = frame[entry["time"]].rank(method="first").to_numpy()
    else:
        digest = hashlib.sha256(f"{entry['name']}/{seed}".encode()).digest()
        order = np.random.default_rng(int.from_bytes(digest[:8], "big")).random(len(frame))
    client = frame[entry["client"]]
    from_last = pd.Series(order, index=frame.index).groupby(client).rank(method="first", ascending=False).to_numpy() - 1
    size = client.groupby(client).transform("size").to_numpy()
    test = np.floor(TEST_SHARE * size + 0.5)
    validation = np.floor(VALIDATION_SHARE * size + 0.5)
    return np.where(from_last < test, TEST, np.where(from_last < test + validation, VALIDATION, TRAIN))


def splits_of(entry: Entry, count: int, by_time: bool) -> list[int | str]:
    """The splits to run: seeds 1 to `count`, then by time where the table has a time column."""
    return [*range(1, count + 1), *([BY_TIME] if by_time and entry["time"] else [])]
