"""The contract of a task: losses, gradients and predictions of a cohort of parameter vectors.

Only a task splits the vector w into parts. Shapes: w [C, d], batch.x [C, B, ...], batch.y [C, B].
`Task` is what every task has; protocols such as `HasProx` are what some have: `isinstance(task, HasProx)`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from math import prod
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from mooring.core.cohort import Batch, Condensed, Rows
from mooring.core.errors import RequestError
from mooring.core.types import JsonObject

if TYPE_CHECKING:
    from mooring.core.sgd_step import StepTerms


class Constants(NamedTuple):
    """Constants of the clients' risks L_i that theory needs, each [C]."""

    smooth: Tensor  # largest curvature; nan where the loss is not smooth
    convex: Tensor  # smallest curvature: mu; 0 or below where L_i is not strongly convex
    noise: Tensor  # rho: root mean square of a row's gradient at the client's own fit (nonsmooth: a bound on it)
    trace: Tensor  # mean curvature of single rows summed over coordinates: what small batches add to `smooth`
    dispersion: Tensor  # phi in "gradient covariance = phi * Hessian": residual variance, or 1 for a likelihood
    largest: Tensor  # curvature of the steepest single row: a bound for minibatches of any size


class Metric(NamedTuple):
    """What a reported number measures."""

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
    """The position of a part of the model in w: w[start : start + size], of this shape."""

    name: str  # as users see it: "slopes", "intercept", "0.weight"
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
NORM_CLASS = re.compile(r"Norm([123]d)?$")


def layout_of(parts: Mapping[str, tuple[int, ...]], layers: dict[str, str] | None = None) -> Layout:
    """Parts one after another; each is a layer of its own unless `layers` names it."""
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


def trained_blocks(task: Task) -> Layout:
    """The blocks of the layout that gradients move."""
    return tuple(block for block in task.layout if block.start < task.gradient_dim)


def head_coefficients(task: Task, layers: int = 1) -> Tensor:
    """[d] bool: the parameters of the last layers; buffers, which are behind all parameters, are not among them."""
    task.check_head()
    mask = torch.zeros(task.dim, dtype=torch.bool)
    mask[: task.gradient_dim] = head_mask(trained_blocks(task), layers)
    return mask


def part_mask(task: Task, names: str | tuple[str, ...]) -> Tensor:
    """[d] bool: the coefficients of the parts that are named:

    "fc.weight"    a parameter
    "fc"           a layer, or a module that contains some
    "*.lora_*"     a pattern of these
    "head"         the last layer, unless a part is called so: a network's output layer, a table's intercepts
    "body"         all but the last layer
    "norm"         normalization layers: modules whose class name ends in Norm, Norm1d, Norm2d or Norm3d

    One string may hold several names, separated by commas.
    """
    mask = torch.zeros(task.dim, dtype=torch.bool)
    for name in names.split(",") if isinstance(names, str) else names:
        mask |= _named_mask(task, name.strip())
    return mask


def _named_mask(task: Task, name: str) -> Tensor:
    patterns = _norm_layers(task) if name == "norm" else [name]
    mask = torch.zeros(task.dim, dtype=torch.bool)
    for block in task.layout:
        mask[block.place] = any(_is_named(block, pattern) for pattern in patterns)
    if bool(mask.any()):
        return mask
    if name in ("head", "body"):
        head = head_coefficients(task)
        return head if name == "head" else ~head
    if name == "norm":
        raise RequestError("the model has no normalization layer to stay with clients; use fedavg, or name a part.")
    names = ", ".join(block.name for block in task.layout[:6]) + (", ..." if len(task.layout) > 6 else "")
    raise RequestError(f"personal: no part of the model is called {name!r}; it has {names}.")


def _norm_layers(task: Task) -> list[str]:
    module = getattr(task, "module", None)
    layers = {} if module is None else dict(module.named_modules())
    return [name for name, layer in layers.items() if NORM_CLASS.search(type(layer).__name__)]


def _is_named(block: ParameterBlock, pattern: str) -> bool:
    return block.name.startswith(pattern + ".") or any(fnmatchcase(n, pattern) for n in (block.name, block.layer))


def personal_mask(task: Task, personal: str | tuple[str, ...]) -> Tensor:
    """[d] bool: the coefficients that stay with their client: the named parts (`part_mask`) and local buffers."""
    mask = part_mask(task, personal)
    if task.local_buffers:
        mask[task.gradient_dim :] = True
    return mask


COMBINED_METHODS = {"derivatives": ("loss", "grad", "hessian"), "step_in_place": ("grad",)}  # from these


class Task(ABC):
    """What every task has. A task of your own inherits from it and defines the abstract methods."""

    name: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]]  # the targets it fits: "regression", "binary", "classes", "count"
    smooth_loss: ClassVar[bool] = True
    overdispersed: ClassVar[bool] = False  # whether targets may vary more than the likelihood implies: counts

    dim: int
    dtype: torch.dtype = torch.float64
    ridge: float = 0.0
    intercept: bool = False
    is_random: bool = False  # whether forward passes in training draw random numbers, as dropout does
    local_buffers: bool = False  # whether each client keeps the buffers of its network

    def __init_subclass__(cls) -> None:
        """A class that changes the loss or its derivatives does not inherit what computes them together or steps in
        place, which would be those of its parent."""
        super().__init_subclass__()
        for name, parts in COMBINED_METHODS.items():
            if name not in vars(cls) and any(part in vars(cls) for part in parts):
                setattr(cls, name, getattr(Task, name))

    @property
    @abstractmethod
    def metric(self) -> str:
        """What `row_risk` measures, as a user calls it; a class attribute where it is always the same."""

    @property
    def predicts_probabilities(self) -> bool:
        """Whether predictions of classes and labels are their probabilities."""
        return self.likelihood

    @property
    def likelihood(self) -> bool:
        """Whether the loss is a negative log-likelihood, its dispersion being 1."""
        return False

    @property
    def risk_per_loss(self) -> float:
        """How much `row_risk` changes when the loss of a row changes by 1."""
        return 1.0

    @property
    def layout(self) -> Layout:
        """The parts of w, in order."""
        return layout_of({"w": (self.dim,)})

    @property
    def unit_power(self) -> int:
        """How the metric grows with the unit of a regression target; a class attribute of a task with a new metric."""
        return find_metric(self.metric).unit_power

    @property
    def gradient_dim(self) -> int:
        """How many leading coefficients gradients move; those behind them are a network's buffers."""
        return self.dim

    def start(self, seed: int = 0) -> Tensor:
        """The first parameters [d] of every run."""
        return torch.zeros(self.dim, dtype=self.dtype)

    @abstractmethod
    def loss(self, w: Tensor, batch: Batch) -> Tensor:
        """[C]: the objective, penalties included."""

    @abstractmethod
    def grad(self, w: Tensor, batch: Batch) -> Tensor:
        """[C, d]: the gradient of `loss`, or a sub-gradient."""

    def derivatives(self, w: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, gradient and Hessian, which a task may compute together; only for tasks with `HasHessian`."""
        return self.loss(w, batch), self.grad(w, batch), require(self, HasHessian).hessian(w, batch)

    def train_grad(self, w: Tensor, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """[C, d], the gradient in training, and the buffers [C, d - gradient_dim] after its forward passes; None where
        the task has no buffers."""
        return self.grad(w, batch), None

    @abstractmethod
    def predict(self, w: Tensor, x: Tensor) -> Tensor:
        """The model's answer at x [C, B, ...]: values, or probabilities of the classes."""

    @abstractmethod
    def row_risk(self, w: Tensor, batch: Batch) -> Tensor:
        """[C, B]: the reported loss of each row, without penalties, in the unit that `metric` names."""

    @abstractmethod
    def constants(self, batch: Batch, w: Tensor | None = None) -> Constants:
        """Curvature and gradient noise of each L_i (near w, where they depend on it)."""

    def row_divergence(self, w: Tensor, reference: Tensor, batch: Batch) -> Tensor:
        """[C, B]: how much higher each row's `row_risk` would be with w on average, if the model `reference` were true.

        Losses that do not imply how targets vary have no such average: the absolute difference stands in.
        """
        return (self.row_risk(w, batch) - self.row_risk(reference, batch)).abs()

    def risk(self, w: Tensor, batch: Batch) -> Tensor:
        """[C]: the mean of `row_risk` over each client's rows; nan for a client without rows."""
        mean = (batch.weight * self.row_risk(w, batch)).sum(1)
        return torch.where(batch.weight.sum(1) > 0, mean, torch.full_like(mean, torch.nan))

    def describe(self) -> JsonObject:
        """The settings that the parameters belong to: written to the model file."""
        return {}

    def check_head(self) -> None:
        """Refuse models whose last layer is not their head."""
        return None

    def derive(self, build: Callable[[Task], Task]) -> Task:
        """Another task, built from this one; its work counts as this task's."""
        return build(self)

    def freeze(self, mask: Tensor) -> Task | None:
        """The task whose gradients are 0 at the coefficients in mask [d], which costs less, and whose local steps leave
        them as they are; None where the task has no such form."""
        return None

    # Faster ways to take local steps: None where a task has none.

    def step_in_place(self) -> InPlaceStep | None:
        """A function step(v, batch, terms) that takes one step of local SGD, changing v."""
        return None

    def local_steps(self, rows: Rows) -> LocalSteps | None:
        """A function that takes many steps of plain local SGD on these rows at once (`core/solvers.py`)."""
        return None

    def mixture_steps(self, rows: Rows) -> MixtureSteps | None:
        """The same for a model and its mixture with a second one, as APFL trains them."""
        return None

    def training_steps(self, rows: Rows) -> TrainingSteps | None:
        """A function that takes local steps client by client, for networks that behave differently in training."""
        return None

    # Counted by `core.costs.MeteredTask`.

    def count(self, batch: Condensed) -> int:
        """The number of rows in a batch or a summary."""
        return int((batch.weight > 0).sum() if isinstance(batch, Batch) else batch.n.sum())

    def record_draw(self, batch: Condensed) -> None:
        """Called with every minibatch that is drawn."""
        return None

    def record_solve(self, norm: Tensor, promise: float) -> None:
        """Called with the gradient norms [C] that inexact solves reached, and the norm that they promised."""
        return None


InPlaceStep = Callable[[Tensor, Batch, "StepTerms"], None]
# Each writes models [C, d] into its first argument; `row_index` [S, C, B], `n` [S, C] and `rate` [S, C] are the rows
# and step sizes of S steps; the last arguments are the terms of `core.solvers`.
LocalSteps = Callable[..., None]  # (v, start, rows, row_index, n, rate, pull, shift)
MixtureSteps = Callable[..., None]  # (w, v, alpha, start, rows, row_index, n, rate, update: MixtureUpdate)
TrainingSteps = Callable[..., None]  # (v, start, rows, row_index, n, rate, context: StepContext)


@runtime_checkable
class HasSolve(Protocol):
    """A task with an exact minimizer."""

    def solve(self, batch: Batch) -> Tensor:
        """[C, d]: the minimizer of each L_i."""


@runtime_checkable
class HasProx(Protocol):
    """A task with an exact proximal step."""

    def prox(self, center: Tensor, lam: Tensor | float, batch: Batch, start: Tensor | None = None) -> Tensor:
        """[C, d]: arg min_v L_i(v) + lam/2 |v - center|^2; a solver may begin at `start`."""


@runtime_checkable
class HasHessian(Protocol):
    """A task whose Hessians can be formed."""

    def hessian(self, w: Tensor, batch: Batch) -> Tensor:
        """[C, d, d]: the Hessian of each L_i at w."""


@runtime_checkable
class HasHessianProduct(Protocol):
    """A task whose Hessians can be multiplied with a direction without being formed."""

    def hessian_product(self, w: Tensor, batch: Batch, direction: Tensor) -> Tensor:
        """[C, d]: the Hessian of each L_i at w times its direction [C, d]."""


@runtime_checkable
class HasDispersion(Protocol):
    """A task whose targets vary more or less than its loss implies, if that were a negative log-likelihood: counts, and
    losses that are none. With sums over rows at models that leave f degrees of freedom,

        dispersion = (sum of squares / f) / (sum of scales / rows)
    """

    def dispersion_sums(self, w: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """[C], [C]: sums of squares and of scales over a client's rows."""


def has_known_dispersion(task: Task) -> bool:
    """Whether the dispersion of targets is 1, since the loss is a likelihood, or can be estimated."""
    return task.likelihood or (isinstance(task, HasDispersion) and callable(task.dispersion_sums))


@runtime_checkable
class HasColumns(Protocol):
    """A task on the columns of a table."""

    features: int


def with_columns(task: Task, features: int) -> Task:
    """The task on so many columns."""
    return replace(task, features=features)  # type: ignore[type-var]


Capability = TypeVar("Capability")


def require(task: Task, capability: type[Capability]) -> Capability:
    """The task as one with this capability, such as `HasProx`; a task without it is refused."""
    if not isinstance(task, capability):
        raise RequestError(f"task '{task.name}' has no `{capability.__name__.removeprefix('Has').lower()}`.")
    return task
