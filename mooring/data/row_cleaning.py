"""Cures that a user asks for: repeated rows left out, levels merged, extreme numbers pulled in."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import pandas as pd

from mooring.core.errors import RequestError

MIN_DIFFERENT_NUMBERS = 10  # of a column that is clipped


def parse_merges(merges: Sequence[str] | Mapping[str, str] | None) -> dict[str, str]:
    """{"suny": "sunny"} of ["suny=sunny"]."""
    if not merges:
        return {}
    if isinstance(merges, Mapping):
        return {str(old): str(new) for old, new in merges.items()}
    out = {}
    for text in merges:
        old, equals, new = text.partition("=")
        if not equals or not old.strip() or not new.strip():
            raise RequestError(f"--merge-levels takes OLD=NEW, got {text!r}.")
        out[old.strip()] = new.strip()
    return out


def merge_levels(frame: pd.DataFrame, merges: Mapping[str, str], title: str) -> tuple[pd.DataFrame, list[str]]:
    """The table with texts replaced wherever they stand, and notes; a text that stands nowhere is refused."""
    if not merges:
        return frame, []
    frame, notes = frame.copy(), []
    counts = dict.fromkeys(merges, 0)
    for name in frame.columns:
        column = frame[name]
        if pd.api.types.is_numeric_dtype(column) or pd.api.types.is_datetime64_any_dtype(column):
            continue
        plain = column.astype(object)
        hits = plain.map(lambda value: str(value).strip() in merges, na_action="ignore").fillna(False).to_numpy(bool)
        if hits.any():
            old = plain[hits].map(lambda value: str(value).strip())
            for level, count in old.value_counts().items():
                counts[str(level)] += int(count)
            plain[hits] = old.map(merges)
            frame[name] = plain
    for old, count in counts.items():
        if count == 0:
            raise RequestError(f"{title}: --merge-levels names '{old}', which stands in no column.")
        notes.append(f"'{old}' was read as '{merges[old]}' in {count} cell{'' if count == 1 else 's'}.")
    return frame, notes


def repeated(frame: pd.DataFrame) -> np.ndarray:
    """[rows]: whether a row repeats an earlier one in every column."""
    text = [name for name in frame.columns if not pd.api.types.is_numeric_dtype(frame[name])]
    return frame.astype(dict.fromkeys(text, str)).duplicated().to_numpy()


def winsorized(
    frame: pd.DataFrame, share: float, others: Collection[str | None]
) -> tuple[pd.DataFrame, dict[str, tuple[float, float]]]:
    """The table with each column of many different numbers clipped at two quantiles, and these; `others` stay."""
    clip = {}
    for name in frame.columns:
        column = frame[name]
        if name in others or not pd.api.types.is_numeric_dtype(column) or pd.api.types.is_bool_dtype(column):
            continue
        values = column.to_numpy(float, na_value=np.nan)
        known = values[np.isfinite(values)]
        if len(np.unique(known)) < MIN_DIFFERENT_NUMBERS:
            continue
        low, high = (float(end) for end in np.quantile(known, (share, 1 - share), method="inverted_cdf"))
        clip[str(name)] = (low, high)
        frame = frame.assign(**{name: column.clip(low, high)})
    return frame, clip
