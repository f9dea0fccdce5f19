"""`Clients`: federated data, ragged, with train, validation and test parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from mooring.core.cohort import CohortData, Rows
from mooring.core.errors import RequestError
from mooring.core.items import DatasetItems, TensorItems
from mooring.core.seeds import client_key

if TYPE_CHECKING:
    import pandas as pd


PARTS = ("train", "validation", "test")
REGRESSION, BINARY, CLASSES, COUNT = "regression", "binary", "classes", "count"
MULTILABEL = "labels"  # several columns of 0 and 1, for networks


@dataclass(frozen=True, eq=False)
class Clients:
    """A federation's data. Client i's rows of each part are `train.of(i)`, `validation.of(i)`, `test.of(i)`.

    A regression target is stored as (y - target_mean) / target_scale; reports turn losses back into its own units.
    """

    names: tuple[str, ...]
    train: Rows
    validation: Rows
    test: Rows
    kind: str  # "regression", "binary", "classes", "count" or "labels": what the target is
    classes: tuple[str, ...] = ()  # the target's values in the order of their codes
    features: tuple[str, ...] = ()
    target_mean: float = 0.0
    target_scale: float = 1.0
    target_column: bool = False  # whether arrays of targets had the shape [n, 1]: a loss in Python sees that
    items: TensorItems | DatasetItems | None = None  # that `train.x` numbers, if inputs are not tensors
    schema: Any = None  # conversion of the table to these arrays; None for arrays
    placement: pd.DataFrame | None = None  # data frame (client, row, part): the part of each source row
    weights_from_column: Mapping[str, float] | None = None  # of a column of the table, by client
    has_random_parts: bool = False  # whether the parts were drawn at random, without a request for a split
    units: Mapping[str, Tensor] | None = None  # by part: each row's group; no fold may split a group
    times: Mapping[str, Tensor] | None = None  # by part: time of each row, for folds in the order of time
    truth: Any = None  # planted parameters, for generators
    title: str = ""
    notes: list[str] = field(default_factory=list)  # sentences on dropped, imputed and clipped values

    def __post_init__(self) -> None:
        if len(set(self.names)) != len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise RequestError(f"client '{twice}' appears twice; client names must differ.")

    @property
    def max_count(self) -> float | None:
        """The largest count of the training rows, of tables rounded upwards; None for other targets."""
        if self.kind != COUNT:
            return None
        return float(self.train.y.max()) if self.schema is None else self.schema.max_count

    def __len__(self) -> int:
        return len(self.names)

    @property
    def keys(self) -> np.ndarray:
        return np.array([client_key(name) for name in self.names], dtype=np.uint64)

    def weights(self, kind: str | Mapping[str, float] = "size") -> Tensor:
        """Return p_i: proportional to the training rows ("size"), equal ("uniform"), or proportional to given numbers:
        one for each client by name, or the name of the column that the table was read with."""
        if kind == "size":
            return self.train.size.double() / self.train.size.sum()
        if kind == "uniform":
            return torch.full((len(self),), 1 / len(self), dtype=torch.float64)
        numbers = self.weights_from_column if isinstance(kind, str) else kind
        if numbers is None:
            raise RequestError(f"weights must be 'size', 'uniform' or a number for each client, got {kind!r}.")
        missing_name = next((name for name in self.names if name not in numbers), None)
        if missing_name is not None:
            raise RequestError(f"weights has no number for client '{missing_name}'.")
        p = torch.tensor([float(numbers[name]) for name in self.names], dtype=torch.float64)
        return p / p.sum()

    def weighting(self, kind: str | Mapping[str, float]) -> str | Tensor:
        """Return the rule "size" or "uniform", which also applies to a subset of rows; else the numbers p_i."""
        return kind if kind in ("size", "uniform") and isinstance(kind, str) else self.weights(kind)

    def cohort(self, p: Tensor | None = None, position: Tensor | None = None) -> CohortData:
        """Return the data of a local update of the clients at `position` (default: all)."""
        positions = torch.arange(len(self))
        p = self.weights() if p is None else p
        full_cohort = CohortData(self.keys, positions, p, self.train, self.validation)
        return full_cohort if position is None else full_cohort.select(position)


def require_finite(values: Tensor, label: str, role: str = "inputs") -> None:
    """Refuse a client's rows that contain NaN or infinite numbers."""
    if not values.dtype.is_floating_point or bool(torch.isfinite(values.sum())):
        return  # a finite sum has finite terms
    invalid = ~torch.isfinite(values).reshape(len(values), -1).all(1)
    if invalid.any():
        raise RequestError(
            f"{label}: {int(invalid.sum())} of {len(values)} rows hold NaN or infinite {role}, the first is row "
            f"{int(invalid.nonzero()[0]) + 1}; correct them or leave them out."
        )


def from_arrays(
    xs: Sequence[ArrayLike],
    ys: Sequence[Sequence[float] | np.ndarray | Tensor],
    *,
    names: Sequence[str] | None = None,
    parts: Sequence[np.ndarray] | None = None,
    kind: str = REGRESSION,
    dtype: torch.dtype = torch.float64,
    **metadata: Any,
) -> Clients:
    """Return clients from each client's arrays, unchanged; `parts[i]` names the part of every row (default: all
    train)."""
    names = [str(i) for i in range(len(xs))] if names is None else list(names)
    parts = [np.full(len(y), "train") for y in ys] if parts is None else [np.asarray(part) for part in parts]
    label = torch.int64 if kind in (BINARY, CLASSES) else dtype
    for name, x, y in zip(names, xs, ys):
        for role, values in (("inputs", x), ("targets", y)):
            require_finite(torch.tensor(np.asarray(values)), f"client '{name}'", role)

    def rows(part: str) -> Rows:
        is_selected = [np.asarray(p) == part for p in parts]
        return Rows.stack(
            [torch.as_tensor(np.asarray(x)[selected]).to(dtype) for x, selected in zip(xs, is_selected)],
            [torch.as_tensor(np.asarray(y)[selected]).to(label) for y, selected in zip(ys, is_selected)],
        )

    train, validation, test = (rows(part) for part in PARTS)
    return Clients(tuple(names), train, validation, test, kind=kind, **metadata)
