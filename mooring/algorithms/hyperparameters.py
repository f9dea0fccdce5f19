"""Checks of hyper-parameters, and the rules behind "auto", shared by the algorithms."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from mooring.core.cohort import CohortData, Round
from mooring.core.errors import RequestError
from mooring.core.minibatches import DRAWS, batches_per_epoch, count_local_steps
from mooring.core.penalty import PerClientPenalty, parse_lam
from mooring.core.solvers import StepSize, geometric_decay, inverse_decay, sgd
from mooring.core.task import Task
from mooring.estimates.client_statistics import RIDGE_GRID
from mooring.tasks.proximal import MAX_DENSE_PARAMETERS

DEFAULT_BATCH_ROWS = 32  # minibatch of tasks whose full passes are dear
NONSMOOTH_SCORE_STEP = 0.1  # of losses without curvature: the largest move of a score, targets being about 1 in size
MAX_LOSS_SHARE_OF_OTHERS = (
    0.1  # a client that costs the others this share of their loss by its say in a common ridge is not heard
)
MAX_SUMMABLE_LOSS = 1e250  # a loss whose sums stay finite
NETWORK_LAM_PER_CURVATURE = 0.1  # lam = "auto" where clients cannot tell how they vary, as a share of the curvature
GEOMETRIC_FADINGS = ("steps", "rounds", "epochs")  # fadings that take a share off the step size
FADINGS = ("inverse", *GEOMETRIC_FADINGS, "horizon")


def check_ranges(algorithm: Any, **rules: Any) -> None:
    """Hold fields to rules such as `steps=(1, None)` (a range, None open) or `inner=("auto", "sgd")` (choices).

    A field that is "auto" passes when its choices or the keyword `auto` allow it.
    """
    owner = type(algorithm).__name__
    for field, rule in rules.items():
        value = getattr(algorithm, field)
        if all(isinstance(choice, str) for choice in rule):
            if value not in rule:
                known = ", ".join(repr(choice) for choice in rule)
                raise RequestError(f"{owner}: {field} must be one of {known}, got {value!r}.")
            continue
        low, high, *words = rule
        if isinstance(value, str) and value in words:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            also = f" or {' or '.join(map(repr, words))}" if words else ""
            raise RequestError(f"{owner}: {field} must be a number{also}, got {value!r}.")
        if (low is not None and not value >= low) or (high is not None and not value <= high):
            bounds = f">= {low}" if high is None else f"between {low} and {high}"
            raise RequestError(f"{owner}: {field} must be {bounds}, got {value}.")


def parse_lam_field(algorithm: Any, rules: tuple[str, ...]) -> None:
    """Parse the field `lam` of a frozen dataclass in place."""
    object.__setattr__(algorithm, "lam", parse_lam(type(algorithm).__name__, algorithm.lam, rules))


def resolve_auto(algorithm: Any, task: Task, statistics: Any) -> Any:
    """The algorithm with "auto" in batch, lam and eta turned into numbers (in this order: later ones use earlier)."""
    changes: dict[str, Any] = {}
    have = {f.name for f in dataclasses.fields(algorithm)}
    if "batch" in have and algorithm.batch == "auto":
        changes["batch"] = auto_batch(task)
    if "lam" in have and algorithm.lam == "auto":
        changes["lam"] = auto_lam(task, statistics)
    if "eta" in have and algorithm.eta == "auto":
        batch = changes.get("batch", getattr(algorithm, "batch", 0))
        changes["eta"] = auto_eta(task, statistics, batch, changes.get("lam", getattr(algorithm, "lam", 0.0)))
    ready = dataclasses.replace(algorithm, **changes)
    check_lam_lengths(ready, task, len(statistics.n))
    return ready


def check_lam_lengths(algorithm: Any, task: Task, clients: int) -> None:
    """A lam with one number per client or per coefficient must have as many as there are."""
    lam, owner = getattr(algorithm, "lam", None), type(algorithm).__name__
    if isinstance(lam, PerClientPenalty):
        for found, right, what in ((lam.per_client, clients, "client"), (lam.per_coefficient, task.dim, "coefficient")):
            if found is not None and len(found) != right:
                raise RequestError(f"{owner}: lam has {len(found)} numbers, one per {what}, but there are {right}.")


def choose_inner_solver(algorithm: Any, task: Task, otherwise: str = "sgd") -> str:
    """The field `inner`, "auto" being "exact" where the task has a prox that is not too dear to take every round;
    refuses "exact" where it has none."""
    if algorithm.inner == "exact" and task.prox is None:
        owner = type(algorithm).__name__
        raise RequestError(f"{owner}: task '{task.name}' has no exact prox; set inner = '{otherwise}'.")
    if algorithm.inner != "auto":
        return algorithm.inner
    return "exact" if task.prox is not None and task.dim <= MAX_DENSE_PARAMETERS else otherwise


def auto_batch(task: Task) -> int:
    """All rows (0) where the task has an exact solver and few parameters, small batches elsewhere."""
    return 0 if task.solve is not None and task.dim <= MAX_DENSE_PARAMETERS else DEFAULT_BATCH_ROWS


def auto_eta(task: Task, statistics: Any, batch: int, lam: Any = 0.0) -> float:
    """1 / (largest curvature that a step can meet): the steepest client, small batches, and the pull."""
    pull = 0.0 if isinstance(lam, str) else largest_lam(lam)
    if not task.smooth_loss:
        # No curvature to go by: a step along one record's sub-gradient moves its score by KINKED_STEP at most.
        return NONSMOOTH_SCORE_STEP / (float(statistics.noise.max()) ** 2 + pull)
    curvature = statistics.smooth + (statistics.trace / batch if batch else 0.0)
    return 1.0 / (float(curvature.max()) + pull)


def batch_smoothness(statistics: Any, batch: int, replacement: bool = False) -> float:
    """A bound on the curvature of any client's loss on any `batch` of its rows (0: all of them).

    A mean over rows is at most its steepest row; and b of n rows, none of them twice, hold at most n/b times what all n
    hold. Drawn with replacement, one row may fill a batch.
    """
    if not batch:
        return float(statistics.smooth.max())
    if replacement:
        return float(statistics.largest.max())
    return float(torch.minimum(statistics.largest, (statistics.n / batch).clamp(min=1) * statistics.smooth).max())


def auto_ridge(statistics: Any) -> float:
    """The ridge of RIDGES with which the clients' own fits do best on all validation rows; 0 without any.

    A client does not decide for the others: where its say costs them more than SWAY of their loss, it has none. The one
    with most to lose is looked at first, as long as more than half of the clients are heard.
    """
    if statistics.alone is None or float(statistics.validation.sum()) == 0:
        return 0.0
    known = statistics.alone.nan_to_num(nan=0.0, posinf=MAX_SUMMABLE_LOSS).clamp(max=MAX_SUMMABLE_LOSS)
    loss = torch.where(statistics.validation[:, None] > 0, statistics.validation[:, None] * known, 0.0)
    stake = loss.amax(1) - loss.amin(1)
    heard = statistics.validation > 0
    least = int(heard.sum()) // 2 + 1
    while True:
        best = int(loss[heard].sum(0).argmin())
        others = heard.clone()
        others[torch.where(heard, stake, -1.0).argmax()] = False
        rest = loss[others].sum(0)
        if int(others.sum()) < least or rest[best] <= (1 + MAX_LOSS_SHARE_OF_OTHERS) * rest.min():
            return float(RIDGE_GRID[best])
        heard = others


def auto_lam(task: Task, statistics: Any) -> float:
    """The single lam of least expected risk under the clients' estimated spread: `auto` in `mooring theory`'s table.

    At most TIGHTEST (`estimates/lambda_rules.py`) times the curvature, also where no spread is seen. Where nothing can
    be told of a spread (`estimates/task_random_effects.py` says where), the pull is a share of the curvature.
    """
    if statistics.federation is not None:
        return statistics.federation.auto
    known = statistics.smooth[torch.isfinite(statistics.smooth)]
    return NETWORK_LAM_PER_CURVATURE * (float(known.mean()) if len(known) else 1.0)


def largest_lam(lam: Any) -> float:
    if not isinstance(lam, PerClientPenalty):
        return float(lam)
    return max(lam.per_client or (1.0,)) * max(lam.per_coefficient or (1.0,))


def check_local_work(algorithm: Any, *rules: str) -> None:
    """Hold the fields that all methods with local steps share to their ranges; eta may also be one of `rules`."""
    check_ranges(algorithm, eta=(0, None, "auto", *rules), decay=(0, None), fading=FADINGS, draws=DRAWS)
    check_ranges(algorithm, steps=(1, None), epochs=(0, None), batch=(0, None, "auto"))
    if algorithm.fading in GEOMETRIC_FADINGS:
        check_ranges(algorithm, decay=(0, 1))


def schedule(
    algorithm: Any, data: CohortData, round: Round, visits: Tensor | None = None
) -> tuple[int | None, Tensor, StepSize]:
    """(rows per batch, each client's number of steps [C], step size), as the fields batch (0: all rows), steps, epochs,
    eta, decay and fading say. The k-th local step of the run (from 0, counted as if a client came to every round) has

        fading = "inverse"   eta / (1 + decay k)
                 "steps"     eta (1 - decay)^k
                 "rounds"    eta (1 - decay)^(rounds before this one)
                 "epochs"    eta (1 - decay)^(whole passes that the client made over its rows in its own visits)
                 "horizon"   eta / sqrt(T), T the local steps of the whole run; decay plays no part

    `visits` [C] says how often each client has worked before: it keeps the count where its fading asks for it.
    """
    fading = getattr(algorithm, "fading", "inverse")  # an algorithm need not have all fields
    batch = algorithm.batch or None
    work = (None, algorithm.epochs) if algorithm.epochs else (algorithm.steps, None)
    count = count_local_steps(data.train.size, batch, *work)
    before = (round.t - 1) * count
    if fading == "horizon":
        return batch, count, algorithm.eta / (round.rounds * count.double()).sqrt()
    if not algorithm.decay:
        return batch, count, algorithm.eta
    if fading == "inverse":
        return batch, count, inverse_decay(algorithm.eta, algorithm.decay, before.double())
    if fading == "steps":
        return batch, count, geometric_decay(algorithm.eta, algorithm.decay, before)
    if fading == "rounds":
        return batch, count, algorithm.eta * (1 - algorithm.decay) ** (round.t - 1)
    own = before if visits is None else visits * count
    return batch, count, geometric_decay(algorithm.eta, algorithm.decay, own, batches_per_epoch(data.train.size, batch))


def init_update_count(algorithm: Any) -> Tensor:
    """The counter of a client's own visits in its first state: 0, or nothing at all where it is not needed."""
    return torch.tensor(0) if algorithm.fading == "epochs" else torch.zeros(0, dtype=torch.long)


def tracked_updates(visits: Tensor) -> Tensor | None:
    """A cohort's counters as `schedule` takes them: [C], or None where they are not kept."""
    return visits if visits.ndim == 1 else None


def local_sgd(
    algorithm: Any, task: Task, w: Tensor, data: CohortData, round: Round, visits: Tensor | None = None, **more: Any
) -> Tensor:
    """SGD as the algorithm's fields say: see `schedule`."""
    batch, count, eta = schedule(algorithm, data, round, visits)
    draws = getattr(algorithm, "draws", "passes")
    return sgd(task, w, data, round, eta, batch=batch, steps=count, draws=draws, **more)


def server_step_factor(algorithm: Any, round: Round) -> float:
    """What is left of the server's step in round t = 1, 2, ...: 1 / (1 + server_decay (t - 1))."""
    return 1 / (1 + algorithm.server_decay * (round.t - 1))


def finetune_global(
    algorithm: Any, task: Task, w: Tensor, data: CohortData, round: Round, visits: Tensor | None = None
) -> Tensor:
    """The common model after each client's `tune_steps` (or `tune_epochs`), with the draws and rates of the next round.

    With as many steps as a stay takes, this is what FedAvg's next stay would send back.
    """
    ahead = round._replace(t=round.t + 1)
    batch, _, eta = schedule(algorithm, data, ahead, visits)
    work = {"epochs": algorithm.tune_epochs} if algorithm.tune_epochs else {"steps": algorithm.tune_steps}
    return sgd(task, w, data, ahead, eta, batch=batch, draws=algorithm.draws, **work)
