"""What a task is: losses, gradients and predictions of a cohort of parameter vectors.

Only a task knows how the vector w splits into parts. Shapes: w [C, d], batch.x [C, B, ...], batch.y [C, B].
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from math import prod
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from mooring.core.cohort import Batch
from mooring.core.errors import RequestError


class Constants(NamedTuple):
    """What theory asks of a client's risk L_i, each [C]."""

    smooth: Tensor  # largest curvature; nan where the loss has kinks
    convex: Tensor  # smallest curvature: mu; 0 or below where L_i is not strongly convex
    noise: Tensor  # rho: root mean square of a record's gradient at the client's own fit (kinks: a bound on it)
    trace: Tensor  # mean curvature of single rows summed over coordinates: what small batches add to `smooth`
    dispersion: Tensor  # phi in "gradient covariance = phi * Hessian": residual variance, or 1 for a likelihood
    largest: Tensor  # curvature of the steepest single row: a bound for minibatches of any size


class Metric(NamedTuple):
    """What a number that users are told measures."""

    name: str
    unit_power: int = 0  # how it grows with the unit of a regression target: squared, as it is, or not at all
    better: str = "lower"  # or "higher"


METRICS = {
    metric.name: metric
    for metric in (
        Metric("mse", 2),
        Metric("rmse", 1),
        Metric("mae", 1),
        Metric("pinball loss", 1),
        Metric("r2", better="higher"),
        Metric("accuracy", better="higher"),
        Metric("auc", better="higher"),
    )
}


def find_metric(name: str) -> Metric:
    """The metric of that name; one that is not listed has no unit, and less of it is better."""
    return METRICS.get(name, Metric(name))


class ParameterBlock(NamedTuple):
    """Where a part of the model lies inside w: w[start : start + size], of this shape."""

    name: str  # as users know it: "slopes", "intercept", "0.weight"
    shape: tuple[int, ...]
    start: int
    layer: str  # parts of one layer go together: a weight and its bias

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def place(self) -> slice:
        return slice(self.start, self.start + self.size)


Layout = tuple[ParameterBlock, ...]


def layout_of(parts: Mapping[str, tuple[int, ...]], layers: dict[str, str] | None = None) -> Layout:
    """Parts one after another; each is a layer of its own unless `layers` says otherwise."""
    out: list[ParameterBlock] = []
    start = 0
    for name, shape in parts.items():
        out.append(ParameterBlock(name, tuple(shape), start, (layers or {}).get(name, name)))
        start += out[-1].size
    return tuple(out)


def score_layout(features: int, scores: int, intercept: bool) -> Layout:
    """The layout of linear scores: slopes [features, scores], then intercepts [scores]."""
    parts: dict[str, tuple[int, ...]] = {"slopes": (features,) if scores == 1 else (features, scores)}
    return layout_of(parts | ({"intercept": (scores,)} if intercept else {}))


def layer_mask(layout: Layout, layers: tuple[str, ...]) -> Tensor:
    """[d] bool: which coefficients belong to these layers."""
    mask = torch.zeros(sum(part.size for part in layout), dtype=torch.bool)
    for part in layout:
        mask[part.place] = part.layer in layers
    return mask


def head_mask(layout: Layout, layers: int = 1) -> Tensor:
    """[d] bool: the last layers of a model: a network's output layer, a table's intercept."""
    names = tuple(dict.fromkeys(part.layer for part in layout))
    return layer_mask(layout, names[max(len(names) - layers, 0) :])


def personal_mask(task: Any, personal: str | tuple[str, ...]) -> Tensor:
    """[d] bool: the coefficients whose parts `personal` names: by a part's name ("fc.weight"), the layer or module that
    holds it ("fc"), a pattern ("*.lora_*"), or "head", the last layer unless a part is called so; a network's local
    buffers come on top."""
    layout, mask = task.layout, torch.zeros(task.dim, dtype=torch.bool)
    names = personal.split(",") if isinstance(personal, str) else personal
    for pattern in (name.strip() for name in names):
        named = [part for part in layout if _is_named(part.name, pattern)]
        if not named and pattern == "head":
            trained = tuple(part for part in layout if part.start < task.gradient_dim)
            mask[: task.gradient_dim] |= head_mask(trained)
            continue
        if not named:
            known = ", ".join(part.name for part in layout[:6])
            raise RequestError(f"personal: no part of the model is called {pattern!r}; it has {known}, ...")
        for part in named:
            mask[part.place] = True
    if task.local_buffers:
        mask[task.gradient_dim :] = True
    return mask


def _is_named(name: str, pattern: str) -> bool:
    return name == pattern or name.startswith(pattern + ".") or fnmatchcase(name, pattern)


class Task(Protocol):
    """The contract. Tasks inherit from it; optional parts are None where a task has none."""

    name: ClassVar[str]
    metric: ClassVar[Any]  # str, or a property: what `row_risk` measures, as a user calls it
    kinds: ClassVar[tuple[str, ...]]  # the targets it fits: "regression", "binary", "classes", "count"
    smooth_loss: ClassVar[bool] = True
    likelihood: ClassVar[Any] = False  # bool: whether the loss is a negative log-likelihood, its dispersion being 1
    overdispersed: ClassVar[bool] = False  # whether targets may vary more than the likelihood implies: counts
    risk_per_loss: ClassVar[Any] = 1.0  # float: how much `row_risk` changes when the loss of a row changes by 1
    intercept: bool = False

    # What some tasks have:
    condense: Any = None  # condense(batch) -> a summary that stands for the batch in full passes
    solve: Any = None  # solve(batch) -> [C, d], the exact minimiser of each L_i
    prox: Any = None  # prox(center, lam, batch, start=None) -> [C, d], exact arg min L_i(v) + lam/2 |v - center|^2
    hessian: Any = None  # hessian(w, batch) -> [C, d, d]
    curve: Any = None  # curve(w, batch, direction) -> [C, d], the Hessian times a direction
    pearson: Any = None  # pearson(w, batch) -> [C], [C]: sums that the dispersion of counts is estimated from
    step: Any = None  # step(v, batch, move): one step of local SGD, in place (`core/sgd_step.py`)
    stay: Any = None  # stay(v, begin, rows, place, n, rate, pull, shift): many steps at once (`core/solvers.py`)
    mix: Any = None  # mix(w, v, alpha, begin, rows, place, n, rate, felt): the same for a model and a mixture
    is_random: bool = False  # whether forward passes in training draw random numbers, as dropout does
    local_buffers: bool = False  # whether each client keeps the buffers of its network
    train_clients: Any = None  # train_clients(v, begin, rows, place, n, rate, context): steps in training mode
    lift: Any = None  # lift(x) -> the features that a kernel's linear model sees

    dim: int
    dtype: torch.dtype = torch.float64
    ridge: float = 0.0

    @property
    def layout(self) -> Layout:
        """The parts of w, in order."""
        return layout_of({"w": (self.dim,)})

    @property
    def unit_power(self) -> int:
        """How the metric grows with the unit of a regression target."""
        return find_metric(self.metric).unit_power

    @property
    def gradient_dim(self) -> int:
        """How many leading coefficients gradients move; those behind them are a network's buffers."""
        return self.dim

    def start(self, seed: int = 0) -> Tensor:
        """The first parameters [d] of every run."""
        return torch.zeros(self.dim, dtype=self.dtype)

    def loss(self, w: Tensor, batch: Any) -> Tensor:
        """[C]: the objective, penalties included."""
        raise NotImplementedError

    def grad(self, w: Tensor, batch: Any) -> Tensor:
        """[C, d]: the gradient of `loss`, or a sub-gradient."""
        raise NotImplementedError

    def predict(self, w: Tensor, x: Tensor) -> Tensor:
        """The model's answer at x [C, B, ...]: values, or probabilities of the classes."""
        raise NotImplementedError

    def row_risk(self, w: Tensor, batch: Batch) -> Tensor:
        """[C, B]: what a user is told about each row, without penalties, in the unit that `metric` names."""
        raise NotImplementedError

    def row_divergence(self, w: Tensor, reference: Tensor, batch: Batch) -> Tensor:
        """[C, B]: how much higher each row's `row_risk` would be with w on average, if the model `reference` were true.

        Losses that do not imply how targets vary have no such average: the absolute difference stands in.
        """
        return (self.row_risk(w, batch) - self.row_risk(reference, batch)).abs()

    def score(self, w: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Further measures a user of this task expects, each [C]; nan where undefined."""
        return {}

    def constants(self, batch: Any, w: Tensor | None = None) -> Constants:
        """Curvature and gradient noise of each L_i (near w, where they depend on it)."""
        raise NotImplementedError

    def risk(self, w: Tensor, batch: Batch) -> Tensor:
        """[C]: the mean of `row_risk` over each client's rows; nan for a client without rows."""
        mean = (batch.weight * self.row_risk(w, batch)).sum(1)
        return torch.where(batch.weight.sum(1) > 0, mean, torch.full_like(mean, torch.nan))

    def trains_by_client(self, rows: Any) -> bool:
        """Whether local steps are taken client by client, by `train_clients`: networks in training mode."""
        return False

    def reads(self, rows: Any) -> bool:
        """Whether `stay` can read these rows where they lie."""
        return False

    def count(self, batch: Any) -> int:
        """How many rows a batch or a summary stands for."""
        return int((batch.weight > 0).sum() if isinstance(batch, Batch) else batch.n.sum())

    def drawn(self, batch: Any) -> None:
        """Told of every draw; a metered task counts it."""
        return None

    def solved(self, norm: Tensor, promise: float) -> None:
        """Told of the gradient norms [C] that inexact solves ended at and promised; a metered task counts them."""
        return None

    def describe(self) -> dict[str, Any]:
        """Settings that the parameters belong to, for whoever reads a model file."""
        return {}
