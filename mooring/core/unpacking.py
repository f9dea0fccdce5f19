"""Packed files have a limit: a small one that would fill the memory is refused before it does."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow
import pyarrow.parquet

from mooring.core.errors import RequestError

VARIABLE = "MOORING_MAX_UNPACKED_BYTES"  # sets the limit for this process
DEFAULT_MAX_UNPACKED_BYTES = 2**30


def max_unpacked_bytes() -> int:
    """Bytes that a packed file may become: 1 GiB, or what the environment's MOORING_MAX_UNPACKED_BYTES says."""
    text = os.environ.get(VARIABLE, "")
    try:
        return int(float(text)) if text else DEFAULT_MAX_UNPACKED_BYTES
    except (ValueError, OverflowError):
        raise RequestError(f"{VARIABLE} must be a number of bytes, got {text!r}.") from None


MOST_UNPACKED = max_unpacked_bytes()
TOO_LARGE = f"set {VARIABLE} to allow more"


def read_bounded(source: Path | pyarrow.BufferReader, title: str) -> pyarrow.Table:
    """A Parquet file's table, refused where it would unpack to more than MOST_UNPACKED.

    A cell takes eight bytes or more, however well a column of equal cells is packed; texts are counted as they come.
    """
    with pyarrow.parquet.ParquetFile(source) as file:
        about = file.metadata
        packed = sum(about.row_group(k).total_byte_size for k in range(about.num_row_groups))
        size, batches = max(8 * about.num_rows * about.num_columns, packed), []
        if size <= MOST_UNPACKED:
            size = 0
            for batch in file.iter_batches():
                batches.append(batch)
                size += batch.nbytes
                if size > MOST_UNPACKED:
                    break
        if size > MOST_UNPACKED:
            raise RequestError(
                f"{title}: unpacks to more than {MOST_UNPACKED:,} bytes; give fewer rows or columns, or {TOO_LARGE}."
            )
        return pyarrow.Table.from_batches(batches, file.schema_arrow)
