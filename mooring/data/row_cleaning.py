"""Cleaning on request: repeated rows left out, levels merged, extreme numbers clipped."""

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
        return {str(level): str(new) for level, new in merges.items()}
    out = {}
    for text in merges:
        old, equals, new = text.partition("=")
        if not equals or not old.strip() or not new.strip():
            raise RequestError(f"--merge-levels takes OLD=NEW, got {text!r}.")
        out[old.strip()] = new.strip()
    return out


def merge_levels(frame: pd.DataFrame, merges: Mapping[str, str], title: str) -> tuple[pd.DataFrame, list[str]]:
    """Return the table with replaced texts, and notes; a text that does not occur is refused."""
    frame, counts = replace_levels(frame, merges)
    notes = []
    for level, count in counts.items():
        if count == 0:
            raise RequestError(f"{title}: --merge-levels names '{level}', which stands in no column.")
        notes.append(f"'{level}' was read as '{merges[level]}' in {count} cell{'' if count == 1 else 's'}.")
    return frame, notes


def replace_levels(frame: pd.DataFrame, merges: Mapping[str, str]) -> tuple[pd.DataFrame, dict[str, int]]:
    """Return the table with replaced texts, and the number of cells of each."""
    counts = dict.fromkeys(merges, 0)
    if not merges:
        return frame, counts
    frame = frame.copy()
    for name in frame.columns:
        column = frame[name]
        if pd.api.types.is_numeric_dtype(column) or pd.api.types.is_datetime64_any_dtype(column):
            continue
        values = column.astype(object)
        hits = values.map(lambda value: str(value).strip() in merges, na_action="ignore").fillna(False).to_numpy(bool)
        if hits.any():
            level_texts = values[hits].map(lambda value: str(value).strip())
            for merged, count in level_texts.value_counts().items():
                counts[str(merged)] += int(count)
            values[hits] = level_texts.map(merges)
            frame[name] = values
    return frame, counts


def find_repeats(frame: pd.DataFrame) -> np.ndarray:
    """Return [rows]: whether a row repeats an earlier one in every column."""
    text = [name for name in frame.columns if not pd.api.types.is_numeric_dtype(frame[name])]
    return frame.astype(dict.fromkeys(text, str)).duplicated().to_numpy()


def clip_quantiles(
    frame: pd.DataFrame, share: float, excluded: Collection[str | None]
) -> tuple[pd.DataFrame, dict[str, tuple[float, float]]]:
    """Return the table with columns of many different numbers clipped at two quantiles, and these; `excluded` are
    unchanged."""
    clip = {}
    for name in frame.columns:
        column = frame[name]
        if name in excluded or not pd.api.types.is_numeric_dtype(column) or pd.api.types.is_bool_dtype(column):
            continue
        values = column.to_numpy(float, na_value=np.nan)
        finite = values[np.isfinite(values)]
        if len(np.unique(finite)) < MIN_DIFFERENT_NUMBERS:
            continue
        low, high = (float(end) for end in np.quantile(finite, (share, 1 - share), method="inverted_cdf"))
        clip[str(name)] = (low, high)
        frame = frame.assign(**{name: column.clip(low, high)})
    return frame, clip
