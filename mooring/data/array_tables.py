"""Arrays as tables: `.npz` files, and X, y, groups in Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import pandas as pd

from mooring.core.errors import RequestError
from mooring.core.size_limits import HOW_TO_RAISE_LIMIT, MAX_UNPACKED_BYTES
from mooring.core.types import JsonObject
from mooring.data.file_readers import require_distinct_names
from mooring.data.tables import Table, quote_list


def read_npz(path: Path) -> Table:
    """Return the table in arrays `X`, `y`, `group`, and optionally `split`, `task`, `feature_names`, `group_names`."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as content:
            file_names = content.files
            if sum(entry.file_size for entry in content.zip.infolist()) > MAX_UNPACKED_BYTES:
                raise RequestError(
                    f"{path.name}: unpacks to more than {MAX_UNPACKED_BYTES:,} bytes; {HOW_TO_RAISE_LIMIT}."
                )
            array_names = ("X", "y", "group", "split", "task", "feature_names", "group_names")
            arrays = {name: content[name] for name in array_names if name in file_names}
    except RequestError:
        raise
    except (BadZipFile, OSError, EOFError) as failure:
        raise RequestError(f"{path.name}: is not a readable .npz file; it may be cut off or damaged.") from failure
    except ValueError as failure:
        raise RequestError(f"{path.name}: holds objects; only plain arrays of numbers and text are read.") from failure
    lacking = [name for name in ("X", "y", "group") if name not in arrays]
    if lacking:
        raise RequestError(f"{path.name}: the array '{lacking[0]}' is missing; it holds {quote_list(file_names)}.")
    return table_of_arrays(
        arrays["X"],
        arrays["y"],
        arrays["group"],
        title=path.name,
        split=arrays.get("split"),
        kind=str(arrays["task"]) if "task" in arrays else None,
        feature_names=arrays.get("feature_names"),
        group_names=arrays.get("group_names"),
    )


def table_of_arrays(
    x: Any,
    y: Any,
    group: Any,
    *,
    title: str = "the arrays",
    split: Any = None,
    kind: str | None = None,
    feature_names: Any = None,
    group_names: Any = None,
) -> Table:
    """Return a table from inputs (an array or a data frame), targets and client labels of the same length."""
    y, group = np.asarray(y), np.asarray(group)
    lengths = {"X": len(x), "y": len(y), "group": len(group)} | ({} if split is None else {"split": len(split)})
    if len(set(lengths.values())) > 1:
        sizes = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise RequestError(f"{title}: the arrays must have equally many rows, got {sizes}.")
    if y.ndim != 1 or group.ndim != 1:
        name, shape = ("y", y.shape) if y.ndim != 1 else ("group", group.shape)
        raise RequestError(f"{title}: {name} must have one value per row, got the shape {shape}.")
    if len(y) == 0:
        raise RequestError(f"{title}: the table has no rows.")
    if group_names is not None:
        if group.dtype.kind not in "iu" or group.min() < 0 or group.max() >= len(group_names):
            raise RequestError(f"{title}: group must number the {len(group_names)} group_names from 0.")
        group = np.asarray(group_names)[group]
    extra = {"group": group, "y": y} | ({} if split is None else {"split": split})
    metadata: JsonObject = {"title": title, "client": "group", "target": "y", "kind": kind}
    if not isinstance(x, pd.DataFrame):
        x = np.asarray(x)
        if x.ndim == 1:
            x = x[:, None]
        if x.ndim > 2:
            return Table(pd.DataFrame(extra), x=x, **metadata)
        names = [f"x{j}" for j in range(x.shape[1])] if feature_names is None else [str(n) for n in feature_names]
        if len(names) != x.shape[1]:
            raise RequestError(f"{title}: {len(names)} feature_names are given for {x.shape[1]} columns of X.")
        x = pd.DataFrame(x, columns=names)
    require_distinct_names([*(str(name) for name in x.columns), *extra], title)
    return Table(x.reset_index(drop=True).assign(**extra), **metadata)
