"""Checks of hyper-parameters, and the rules behind "auto", shared by the algorithms."""

from __future__ import annotations

import dataclasses
import warnings
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import torch

from mooring.core.cohort import Round
from mooring.core.errors import RequestError
from mooring.core.local_work import LocalWork
from mooring.core.minibatches import DRAWS
from mooring.core.optimizers import ADAPTIVE_OPTIMIZERS, OPTIMIZERS
from mooring.core.penalty import PenaltyOrRule, PerClientPenalty, parse_lam, uniform_lam
from mooring.core.task import HasProx, HasSolve, Task
from mooring.core.types import JsonObject, as_number
from mooring.estimates.client_statistics import RIDGE_GRID, ClientStatistics
from mooring.estimates.task_random_effects import has_known_noise
from mooring.tasks.proximal import MAX_DENSE_PARAMETERS, is_dense

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

DEFAULT_BATCH_ROWS = 32  # minibatch of tasks whose full passes are expensive
NONSMOOTH_SCORE_STEP = 0.1  # of losses without curvature: the largest move of a score, targets being about 1 in size
MAX_LOSS_SHARE_OF_OTHERS = 0.1  # a client whose vote on the ridge costs the others more of their loss is left out
MAX_SUMMABLE_LOSS = 1e250  # a loss whose sums stay finite
NETWORK_LAM_PER_CURVATURE = 0.1  # lam = "auto" where the between-client variance is unknown, as a share of curvature
ADAPTIVE_ETA = 1e-3  # eta = "auto" of Adam and AdamW, whose steps do not grow with gradients: torch.optim's default
GEOMETRIC_SCHEDULES = ("steps", "rounds", "epochs")  # schedules that take a share off the step size
SCHEDULES = ("inverse", *GEOMETRIC_SCHEDULES, "horizon", "cosine", "cosine_rounds")

A = TypeVar("A", bound="DataclassInstance")


class HasLam(Protocol):
    """An algorithm with a pull towards the global model."""

    @property
    def lam(self) -> PenaltyOrRule: ...


class HasInnerSolver(Protocol):
    """An algorithm with a choice of solvers for its clients' subproblems."""

    @property
    def inner(self) -> str: ...


class HasServerDecay(Protocol):
    """An algorithm whose server takes ever smaller steps."""

    @property
    def server_decay(self) -> float: ...


def check_ranges(algorithm: object, **rules: tuple[float | str | None, ...]) -> None:
    """Hold fields to rules such as `steps=(1, None)` (a range, None open) or `inner=("auto", "sgd")` (choices).

    A field that is "auto" passes when its choices or the keyword `auto` allow it.
    """
    owner = type(algorithm).__name__
    for field, rule in rules.items():
        value = getattr(algorithm, field)
        if all(isinstance(choice, str) for choice in rule):
            if value not in rule:
                choices = ", ".join(repr(choice) for choice in rule)
                raise RequestError(f"{owner}: {field} must be one of {choices}, got {value!r}.")
            continue
        low, high, *allowed = rule
        assert not isinstance(low, str) and not isinstance(high, str)  # numbers come first
        if isinstance(value, str) and value in allowed:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            alternatives = f" or {' or '.join(map(repr, allowed))}" if allowed else ""
            raise RequestError(f"{owner}: {field} must be a number{alternatives}, got {value!r}.")
        if (low is not None and not value >= low) or (high is not None and not value <= high):
            bounds = f">= {low}" if high is None else f"between {low} and {high}"
            raise RequestError(f"{owner}: {field} must be {bounds}, got {value}.")


def parse_lam_field(algorithm: HasLam, rules: tuple[str, ...]) -> None:
    """Parse the field `lam` of a frozen dataclass in place."""
    object.__setattr__(algorithm, "lam", parse_lam(type(algorithm).__name__, algorithm.lam, rules))


def resolve_auto(algorithm: A, task: Task, statistics: ClientStatistics) -> A:
    """The algorithm with "auto" in batch, lam and eta turned into numbers (in this order: later ones use earlier)."""
    changes: JsonObject = {}
    fields = {f.name: getattr(algorithm, f.name) for f in dataclasses.fields(algorithm)}
    if fields.get("batch") == "auto":
        changes["batch"] = auto_batch(task)
    if fields.get("lam") == "auto":
        changes["lam"] = auto_lam(task, statistics)
    if fields.get("eta") == "auto" and fields.get("optimizer") in ADAPTIVE_OPTIMIZERS:
        changes["eta"] = ADAPTIVE_ETA
    elif fields.get("eta") == "auto":
        resolved = fields | changes
        changes["eta"] = auto_eta(task, statistics, resolved.get("batch", 0), resolved.get("lam", 0.0))
    ready = dataclasses.replace(algorithm, **changes)
    check_lam_lengths(ready, task, len(statistics.n))
    return ready


def check_lam_lengths(algorithm: object, task: Task, clients: int) -> None:
    """A lam with one number per client or per coefficient must have as many as there are."""
    lam, owner = getattr(algorithm, "lam", None), type(algorithm).__name__
    if isinstance(lam, PerClientPenalty):
        for values, right, what in (
            (lam.per_client, clients, "client"),
            (lam.per_coefficient, task.dim, "coefficient"),
        ):
            if values is not None and len(values) != right:
                raise RequestError(f"{owner}: lam has {len(values)} numbers, one per {what}, but there are {right}.")


def choose_inner_solver(algorithm: HasInnerSolver, task: Task, otherwise: str = "sgd") -> str:
    """The field `inner`, "auto" being "exact" where the task has a prox that is not too expensive to take every round
    and no optimizer is asked for; refuses "exact" where the task has none."""
    if algorithm.inner == "exact" and not isinstance(task, HasProx):
        owner = type(algorithm).__name__
        raise RequestError(f"{owner}: task '{task.name}' has no exact prox; set inner = '{otherwise}'.")
    steps = takes_optimizer_steps(algorithm, otherwise)
    if algorithm.inner != "auto":
        return algorithm.inner
    return "exact" if isinstance(task, HasProx) and task.dim <= MAX_DENSE_PARAMETERS and not steps else otherwise


def takes_optimizer_steps(algorithm: HasInnerSolver, stepwise: str = "sgd") -> bool:
    """Whether an optimizer other than plain SGD is asked for; refuses one for an `inner` other than "auto" and
    `stepwise`, which would take no steps of it."""
    if not isinstance(algorithm, LocalWork) or algorithm.rule.is_plain:
        return False
    if algorithm.inner not in ("auto", stepwise):
        raise RequestError(
            f"{type(algorithm).__name__}: inner = '{algorithm.inner}' takes no steps of an optimizer; leave optimizer, "
            f"momentum, weight_decay and clip_grad at their defaults, or set inner = '{stepwise}'."
        )
    return True


def auto_batch(task: Task) -> int:
    """All rows (0) where the task has an exact solver and few parameters, small batches elsewhere."""
    return 0 if isinstance(task, HasSolve) and task.dim <= MAX_DENSE_PARAMETERS else DEFAULT_BATCH_ROWS


def auto_eta(task: Task, statistics: ClientStatistics, batch: int | Literal["auto"], lam: PenaltyOrRule = 0.0) -> float:
    """1 / (largest curvature that a step can meet): the steepest client, small batches, and the pull."""
    pull = 0.0 if isinstance(lam, str) else largest_lam(lam)
    if not task.smooth_loss:
        # No curvature to go by: a step along one record's sub-gradient moves its score by KINKED_STEP at most.
        return NONSMOOTH_SCORE_STEP / (float(statistics.noise.max()) ** 2 + pull)
    rows = as_number(batch)
    curvature = statistics.smooth + (statistics.trace / rows if rows else 0.0)
    return 1.0 / (float(curvature.max()) + pull)


def batch_smoothness(statistics: ClientStatistics, batch: int, replacement: bool = False) -> float:
    """A bound on the curvature of any client's loss on any `batch` of its rows (0: all of them).

    A mean over rows is at most its steepest row; and b of n rows, none of them twice, hold at most n/b times what all n
    hold. Drawn with replacement, one row may fill a batch.
    """
    if not batch:
        return float(statistics.smooth.max())
    if replacement:
        return float(statistics.largest.max())
    return float(torch.minimum(statistics.largest, (statistics.n / batch).clamp(min=1) * statistics.smooth).max())


def auto_ridge(statistics: ClientStatistics) -> float:
    """The ridge of RIDGE_GRID with which the clients' own fits do best on all validation rows; 0 without any.

    A client does not decide for the others: where its vote costs them more than MAX_LOSS_SHARE_OF_OTHERS of their loss,
    it is left out. The client with the largest stake comes first, as long as more than half of the clients remain.
    """
    if statistics.alone is None or float(statistics.validation.sum()) == 0:
        return 0.0
    losses = statistics.alone.nan_to_num(nan=0.0, posinf=MAX_SUMMABLE_LOSS).clamp(max=MAX_SUMMABLE_LOSS)
    loss = torch.where(statistics.validation[:, None] > 0, statistics.validation[:, None] * losses, 0.0)
    stake = loss.amax(1) - loss.amin(1)
    heard = statistics.validation > 0
    least = int(heard.sum()) // 2 + 1
    while True:
        best = int(loss[heard].sum(0).argmin())
        others = heard.clone()
        others[torch.where(heard, stake, -1.0).argmax()] = False
        others_loss = loss[others].sum(0)
        if int(others.sum()) < least or others_loss[best] <= (1 + MAX_LOSS_SHARE_OF_OTHERS) * others_loss.min():
            return float(RIDGE_GRID[best])
        heard = others


def auto_lam(task: Task, statistics: ClientStatistics) -> float:
    """The single lam of least expected risk under the estimated between-client variance (`auto` of `mooring theory`).

    At most MAX_AUTO_LAM_PER_CURVATURE (`estimates/lambda_rules.py`) times the curvature, also where the variance is 0.
    Where it cannot be estimated (see `estimates/task_random_effects.py`), lam is a share of the curvature.
    """
    if statistics.federation is not None:
        return statistics.federation.auto
    if is_dense(task) and not has_known_noise(task):
        warnings.warn(
            f"lam = 'auto' is {NETWORK_LAM_PER_CURVATURE:g} times the curvature: how clients vary cannot be estimated, "
            f"since task '{task.name}' is no likelihood and has no `dispersion_sums`; set lam, or use `mooring tune`."
        )
    return curvature_lam(statistics)


def curvature_lam(statistics: ClientStatistics) -> float:
    """NETWORK_LAM_PER_CURVATURE times the clients' mean curvature, or times 1 where it is unknown."""
    curvatures = statistics.smooth[torch.isfinite(statistics.smooth)]
    return NETWORK_LAM_PER_CURVATURE * (float(curvatures.mean()) if len(curvatures) else 1.0)


def largest_lam(lam: PenaltyOrRule) -> float:
    if not isinstance(lam, PerClientPenalty):
        return uniform_lam(lam)
    return max(lam.per_client or (1.0,)) * max(lam.per_coefficient or (1.0,))


def check_local_work(algorithm: LocalWork, *rules: str) -> None:
    """Hold the fields of `LocalWork` to their ranges; eta may also be one of `rules`."""
    check_ranges(algorithm, eta=(0, None, "auto", *rules), decay=(0, None), eta_schedule=SCHEDULES, draws=DRAWS)
    check_ranges(algorithm, steps=(1, None), epochs=(0, None), batch=(0, None, "auto"), warmup=(0, None))
    check_ranges(algorithm, optimizer=OPTIMIZERS, optimizer_state=("reset", "keep"), decay_every=(1, None))
    check_ranges(algorithm, momentum=(0, 1), beta1=(0, 1), beta2=(0, 1), epsilon=(0, None))
    check_ranges(algorithm, weight_decay=(0, None), clip_grad=(0, None))
    owner = type(algorithm).__name__
    if isinstance(algorithm.personal, list):
        object.__setattr__(algorithm, "personal", tuple(algorithm.personal))
    if algorithm.eta_schedule in GEOMETRIC_SCHEDULES:
        check_ranges(algorithm, decay=(0, 1))
    if algorithm.momentum and algorithm.optimizer != "sgd":
        raise RequestError(f"{owner}: momentum is for optimizer = 'sgd'; set beta1 for {algorithm.optimizer!r}.")
    if algorithm.nesterov and not algorithm.momentum:
        raise RequestError(f"{owner}: nesterov needs momentum > 0.")


def server_step_factor(algorithm: HasServerDecay, round: Round) -> float:
    """The factor of the server's step in round t = 1, 2, ...: 1 / (1 + server_decay (t - 1))."""
    return 1 / (1 + algorithm.server_decay * (round.t - 1))
