"""`Clients`: federated data, ragged, with train, validation and test parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mooring.core.cohort import CohortData, Rows
from mooring.core.errors import RequestError
from mooring.core.seeds import client_key

PARTS = ("train", "validation", "test")
REGRESSION, BINARY, CLASSES, COUNT = "regression", "binary", "classes", "count"
MULTILABEL = "labels"  # several yes or no per row, for networks


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
    items: Any = None  # where inputs are no tensors: what `train.x` numbers (core/items.py)
    schema: Any = None  # how a table became these arrays; None for arrays
    placement: Any = None  # data frame (client, row, part): which source row is in which part
    weights_from_column: Mapping[str, float] | None = None  # of a column of the table, by client
    has_random_parts: bool = False  # whether the parts were drawn at random, nobody having asked for any
    units: Mapping[str, Tensor] | None = None  # by part: each row's unit, rows of which no fold may tear apart
    times: Mapping[str, Tensor] | None = None  # by part: when each row was observed, for folds that go forward in time
    truth: Any = None  # planted parameters, for generators
    title: str = ""
    notes: list[str] = field(default_factory=list)  # sentences on what was dropped, imputed, moved

    def __post_init__(self) -> None:
        if len(set(self.names)) != len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise RequestError(f"client '{twice}' appears twice; client names must differ.")

    def __len__(self) -> int:
        return len(self.names)

    @property
    def keys(self) -> np.ndarray:
        return np.array([client_key(name) for name in self.names], dtype=np.uint64)

    def weights(self, kind: str | Mapping[str, float] = "size") -> Tensor:
        """p_i: proportional to the training rows ("size"), all equal ("uniform"), or to numbers of one's own: a number
        for each client by name, or the name of the column that the table was read with."""
        if kind == "size":
            return self.train.size.double() / self.train.size.sum()
        if kind == "uniform":
            return torch.full((len(self),), 1 / len(self), dtype=torch.float64)
        given = self.weights_from_column if isinstance(kind, str) else kind
        if given is None:
            raise RequestError(f"weights must be 'size', 'uniform' or a number for each client, got {kind!r}.")
        lacking = next((name for name in self.names if name not in given), None)
        if lacking is not None:
            raise RequestError(f"weights has no number for client '{lacking}'.")
        p = torch.tensor([float(given[name]) for name in self.names], dtype=torch.float64)
        return p / p.sum()

    def weighting(self, kind: str | Mapping[str, float]) -> str | Tensor:
        """The rule "size" or "uniform" for those who weigh some of the rows only; else the numbers p_i."""
        return kind if kind in ("size", "uniform") and isinstance(kind, str) else self.weights(kind)

    def cohort(self, p: Tensor | None = None, position: Tensor | None = None) -> CohortData:
        """What a visit sees of the clients at `position` (default: all)."""
        everyone = torch.arange(len(self))
        p = self.weights() if p is None else p
        whole = CohortData(self.keys, everyone, p, self.train, self.validation)
        return whole if position is None else whole.select(position)


def require_finite(values: Tensor, who: str, what: str = "inputs") -> None:
    """Refuse a client's rows that hold NaN or infinite numbers."""
    if not values.dtype.is_floating_point or bool(torch.isfinite(values.sum())):
        return  # a finite sum has finite terms
    bad = ~torch.isfinite(values).reshape(len(values), -1).all(1)
    if bad.any():
        raise RequestError(
            f"{who}: {int(bad.sum())} of {len(values)} rows hold NaN or infinite {what}, the first is row "
            f"{int(bad.nonzero()[0]) + 1}; correct them or leave them out."
        )


def from_arrays(
    xs: Sequence[Any],
    ys: Sequence[Any],
    *,
    names: Sequence[str] | None = None,
    parts: Sequence[Any] | None = None,
    kind: str = REGRESSION,
    dtype: torch.dtype = torch.float64,
    **facts: Any,
) -> Clients:
    """Clients from each client's arrays as they are; `parts[i]` names the part of every row (default: all train)."""
    names = [str(i) for i in range(len(xs))] if names is None else list(names)
    parts = [np.full(len(y), "train") for y in ys] if parts is None else [np.asarray(part) for part in parts]
    label = torch.int64 if kind in (BINARY, CLASSES) else dtype
    for name, x, y in zip(names, xs, ys):
        for what, values in (("inputs", x), ("targets", y)):
            require_finite(torch.tensor(np.asarray(values)), f"client '{name}'", what)

    def rows(part: str) -> Rows:
        mine = [np.asarray(p) == part for p in parts]
        return Rows.stack(
            [torch.as_tensor(np.asarray(x)[keep]).to(dtype) for x, keep in zip(xs, mine)],
            [torch.as_tensor(np.asarray(y)[keep]).to(label) for y, keep in zip(ys, mine)],
        )

    train, validation, test = (rows(part) for part in PARTS)
    return Clients(tuple(names), train, validation, test, kind=kind, **facts)
