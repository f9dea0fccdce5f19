"""Data frames of other libraries (polars, PyArrow, Modin, ...) as those of pandas, by narwhals."""

from __future__ import annotations

import pandas as pd


def to_pandas(value: object) -> object:
    """Return a data frame of any library as one of pandas; other values are unchanged."""
    if isinstance(value, pd.DataFrame) or not (hasattr(value, "columns") or hasattr(value, "column_names")):
        return value
    try:
        import narwhals
    except ModuleNotFoundError:
        return value
    frame = narwhals.from_native(value, eager_only=True, pass_through=True)
    return frame.to_pandas() if isinstance(frame, narwhals.DataFrame) else value


def series_to_numpy(value: object) -> object:
    """Return a series of another library as an array; other values are unchanged."""
    return value.to_numpy() if hasattr(value, "to_numpy") and not isinstance(value, pd.Series) else value
