"""Packed files have a limit: a small one that would fill the memory is refused before it does."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow
import pyarrow.parquet

from mooring.core.errors import RequestError

LIMIT_VARIABLE = "MOORING_MAX_UNPACKED_BYTES"  # sets the limit for this process
DEFAULT_MAX_UNPACKED_BYTES = 2**30


def read_unpacked_limit() -> int:
    """Bytes that a packed file may become: 1 GiB, or the environment's MOORING_MAX_UNPACKED_BYTES."""
    text = os.environ.get(LIMIT_VARIABLE, "")
    try:
        return int(float(text)) if text else DEFAULT_MAX_UNPACKED_BYTES
    except (ValueError, OverflowError):
        raise RequestError(f"{LIMIT_VARIABLE} must be a number of bytes, got {text!r}.") from None


MAX_UNPACKED_BYTES = read_unpacked_limit()
HOW_TO_RAISE_LIMIT = f"set {LIMIT_VARIABLE} to allow more"


def read_bounded(source: Path | pyarrow.BufferReader, title: str) -> pyarrow.Table:
    """A Parquet file's table, refused where it would unpack to more than MOST_UNPACKED.

    A cell takes eight bytes or more, however well a column of equal cells is packed; texts are counted as they come.
    """
    with pyarrow.parquet.ParquetFile(source) as file:
        metadata = file.metadata
        packed = sum(metadata.row_group(k).total_byte_size for k in range(metadata.num_row_groups))
        size, batches = max(8 * metadata.num_rows * metadata.num_columns, packed), []
        if size <= MAX_UNPACKED_BYTES:
            size = 0
            for batch in file.iter_batches():
                batches.append(batch)
                size += batch.nbytes
                if size > MAX_UNPACKED_BYTES:
                    break
        if size > MAX_UNPACKED_BYTES:
            raise RequestError(
                f"{title}: unpacks to more than {MAX_UNPACKED_BYTES:,} bytes; give fewer rows or columns, or "
                f"{HOW_TO_RAISE_LIMIT}."
            )
        return pyarrow.Table.from_batches(batches, file.schema_arrow)
