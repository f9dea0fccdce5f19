"""Any source of rows as one `Table`: a path, a data frame, arrays, or a dict with something for each client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mooring.core.errors import RequestError
from mooring.core.types import JsonObject
from mooring.data import datasets
from mooring.data.array_tables import read_npz, table_of_arrays
from mooring.data.client_arrays import rows_by_client, stack_items
from mooring.data.clients import PARTS
from mooring.data.file_readers import CellReading, require_distinct_names
from mooring.data.tables import Table, join_typed, read_table, with_types

SOURCE_FORMS = (
    "a path, a data frame, (X, y, groups), or a dict that gives each client a data frame, (x, y) or a torch Dataset"
)


CLIENT_NAMES = CellReading(names=frozenset(("client",)))


def read_source(source: object, cells: CellReading = CLIENT_NAMES) -> Table:
    """Return the rows of a source; `cells` describes the formats of its columns."""
    source = to_pandas(source)
    if isinstance(source, str) and source in datasets.EMBEDDED_TABLES and datasets.is_dataset_name(source):
        embedded = datasets.EMBEDDED_TABLES[source]
        table = read_table(datasets.table_path(source), cells._replace(names=cells.names | {embedded.client}))
        return replace(table, title=source, client=embedded.client, target=embedded.target)
    if isinstance(source, (str, Path)):
        path = Path(source)
        if not path.exists() and path.name == str(source) and not path.suffix:
            datasets.require_known_dataset(str(source))
            raise RequestError(f"data set '{source}' is no table.")
        return read_npz(path) if path.is_file() and path.suffix.lower() == ".npz" else read_table(path, cells)
    if isinstance(source, pd.DataFrame):
        return table_of_frame(source, "the data frame", cells)
    if isinstance(source, tuple) and len(source) == 3:
        return table_of_arrays(*source)
    if isinstance(source, list) and source:
        source = {f"client {i}": value for i, value in enumerate(source)}
    if isinstance(source, Mapping) and source:
        if any(
            isinstance(value, Mapping | DataLoader) and not isinstance(value, pd.DataFrame) for value in source.values()
        ):
            return table_of_parts(source)
        return table_of_clients({str(name): value for name, value in source.items()}, cells)
    raise RequestError(f"clients are read from {SOURCE_FORMS}; got {type(source).__name__}.")


def table_of_frame(frame: pd.DataFrame, title: str, cells: CellReading = CLIENT_NAMES) -> Table:
    frame = frame.rename(columns=str).reset_index(drop=True)
    require_distinct_names(list(frame.columns), title)
    if frame.empty:
        raise RequestError(f"{title}: the table has no rows.")
    return with_types(Table(frame, title), cells.typing())


def table_of_clients(source: JsonObject, cells: CellReading = CLIENT_NAMES) -> Table:
    labels = [f"client '{name}'" for name in source]
    values = list(source.values())
    if all(isinstance(value, pd.DataFrame) for value in values):
        tables = {name: table_of_frame(frame, f"client '{name}'", cells) for name, frame in source.items()}
        return join_typed(tables, "the tables", labels)
    if all(isinstance(value, Dataset) for value in values):
        pairs: list[Any] = [stack(dataset, label) for dataset, label in zip(values, labels)]
    elif all(isinstance(value, tuple) and len(value) == 2 for value in values):
        pairs = [(np.asarray(x), np.asarray(y)) for x, y in values]
    else:
        raise RequestError(f"clients are read from {SOURCE_FORMS}; the dict holds {type(values[0]).__name__}.")
    for (x, y), label in zip(pairs, labels):
        if len(x) != len(y):
            raise RequestError(f"{label}: x and y must have equally many rows, got {len(x)} and {len(y)}.")
        if x.shape[1:] != pairs[0][0].shape[1:]:
            shapes = f"{tuple(x.shape[1:])}, unlike {tuple(pairs[0][0].shape[1:])} of {labels[0]}"
            raise RequestError(f"{label}: the inputs have the shape {shapes}.")
    sizes = [len(y) for _, y in pairs]
    group = np.repeat(np.array(list(source), dtype=object), sizes)
    if isinstance(pairs[0][0], Tensor):
        answers = np.asarray(torch.cat([y for _, y in pairs]))
        table = Table(pd.DataFrame({"group": group, "y": answers}), "the data sets", "group", "y")
        inputs = torch.cat([x for x, _ in pairs])
    else:
        table = table_of_arrays(np.concatenate([x for x, _ in pairs]), np.concatenate([y for _, y in pairs]), group)
        inputs = table.x
    row = np.concatenate([np.arange(size) for size in sizes])
    origin = np.repeat(np.array(labels, dtype=object), sizes)
    return Table(table.frame, table.title, "group", "y", origin=origin, row=row, x=inputs)


def table_of_parts(source: Mapping[object, object]) -> Table:
    """Return the table of clients whose rows come by part, or in batches."""
    rows_of_client = rows_by_client(source)
    sizes = [len(client_rows.y) for client_rows in rows_of_client.values()]
    group = np.repeat(np.array(list(rows_of_client), dtype=object), sizes)
    parts = [client_rows.part for client_rows in rows_of_client.values() if client_rows.part is not None]
    if 0 < len(parts) < len(rows_of_client):
        raise RequestError(
            "some clients have parts (train, validation, test) and some do not; all must have them, or none."
        )
    split = np.array(PARTS, dtype=object)[np.concatenate(parts)] if parts else None
    x, y = (
        torch.cat([client_rows.x for client_rows in rows_of_client.values()]).numpy(),
        torch.cat([client_rows.y for client_rows in rows_of_client.values()]).numpy(),
    )
    return table_of_arrays(x, y, group, split=split)


def stack(dataset: Dataset, label: str) -> tuple[Tensor, Tensor]:
    """Return all items (x, y) of a torch data set as two tensors, a number y for each."""
    x, y = stack_items(dataset, label)
    y = y.squeeze(-1) if y.ndim == 2 and y.shape[1] == 1 else y
    if y.ndim != 1:
        raise RequestError(f"{label}: y must have one value per row, got the shape {tuple(y.shape)}.")
    return x, y


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
