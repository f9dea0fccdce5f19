"""Local solvers on a cohort: stochastic gradient descent and the proximal step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor

from mooring.core.cohort import Batch, CohortData, Condensed, HasSummary, Round, Rows, broadcast_per_client
from mooring.core.minibatches import (
    RowDraw,
    count_local_steps,
    draw_rows,
    forward_keys,
    minibatches,
    without_finished_clients,
)
from mooring.core.optimizers import Optimizer
from mooring.core.sgd_step import MixtureUpdate, Pull, step_terms
from mooring.core.task import LocalSteps, MixtureSteps, Task

MAX_DRAWN_ROWS = 1 << 22  # drawn before steps are taken: bounds memory
PLAIN_SGD = Optimizer()
StepSize = float | Tensor | Callable[[int], float | Tensor]


class Ball(NamedTuple):
    """All w with |w - center| <= radius (center 0 when None)."""

    radius: float
    center: Tensor | None = None


class Box(NamedTuple):
    """All w with low <= w <= high in every coordinate."""

    low: float
    high: float


class Fixed(NamedTuple):
    """All w whose coordinates in `mask` have the given values: those that training starts from."""

    mask: Tensor  # [d] bool
    values: Tensor  # [d] or [C, d]


Region = Ball | Box | Fixed


class StepContext(NamedTuple):
    """The terms of local steps other than the data."""

    pull: Pull | None  # (lam, center)
    shift: Tensor | None  # [d] or [C, d]
    rule: Optimizer
    state: Tensor  # [C, 1 + moments * d], of the optimizer, changed in place
    keys: np.ndarray  # [S, C], seeds of the forward passes
    fixed: Fixed | None  # coefficients that keep their values


def set_buffers(task: Task, w: Tensor, buffers: Tensor | None) -> Tensor:
    """w [C, d], with the buffers [C, d - gradient_dim] of `Task.train_grad` written into it; None: as it is."""
    if buffers is not None:
        w[:, task.gradient_dim :] = buffers
    return w


def project(w: Tensor, region: Region | None) -> Tensor:
    """The point of the region nearest to each row of w; None is all of space."""
    if region is None:
        return w
    if isinstance(region, Box):
        return w.clamp(region.low, region.high)
    if isinstance(region, Fixed):
        return torch.where(region.mask, region.values, w)
    center = torch.zeros_like(w) if region.center is None else region.center
    gap = w - center
    norm = gap.norm(dim=-1, keepdim=True)
    return center + gap * (region.radius / norm.clamp(min=region.radius))


def inverse_decay(eta: float | Tensor, decay: float, before: float | Tensor = 0) -> Callable[[int], float | Tensor]:
    """The step size eta / (1 + decay * k), k counted on from `before` (a number or [C]); decay 0 is constant."""
    return lambda k: eta / (1 + decay * (before + k))


def geometric_decay(
    eta: float | Tensor, decay: float, before: int | Tensor = 0, every: int | Tensor = 1
) -> Callable[[int], Tensor]:
    """The step size eta (1 - decay)^j, j full stretches of `every` steps (a number or [C]) done before the k-th step,
    k counted on from `before` (a number or [C])."""
    return lambda k: eta * (1 - decay) ** torch.as_tensor((before + k) // every, dtype=torch.float64)


class TrainTerms(TypedDict, total=False):
    """Terms of local steps: see `train`."""

    pull: Pull | None
    shift: Tensor | None
    region: Region | None
    slot: int


def sgd(task: Task, w: Tensor, data: CohortData, round: Round, eta: StepSize, **terms: Any) -> Tensor:
    """Each client's rows of `w` [C, d] (or one start [d] for all) after plain local SGD: see `train`."""
    return train(task, w, data, round, eta, **terms)[0]


def train(
    task: Task,
    w: Tensor,
    data: CohortData,
    round: Round,
    eta: StepSize,
    *,
    batch: int | None = None,
    steps: int | Tensor | None = None,
    epochs: int | None = None,
    pull: Pull | None = None,
    shift: Tensor | None = None,
    region: Region | None = None,
    slot: int = 0,
    draws: str = "passes",
    rule: Optimizer = PLAIN_SGD,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Each client's rows of `w` [C, d] (or one start [d] for all) after its local steps, and its optimizer's state.

    A step of the optimizer `rule` goes along g = grad L_batch(v) + lam (v - center) + shift, pull = (lam, center), and
    is projected to the region; plain SGD is v <- project(v - eta g). lam may be a number, [C], [C, 1] or [C, d]. The
    full gradient is used when batch is None. A task that can take plain steps in place, or all of them at once, does.
    `state` is that of `Optimizer.init`; None: fresh.
    """
    fixed = region if isinstance(region, Fixed) else None
    frozen = None if fixed is None else task.freeze(fixed.mask)
    task = task if frozen is None else frozen
    training_steps = task.training_steps(data.train) if region is None or fixed is not None else None
    if training_steps is not None:
        counts = count_local_steps(data.train.size, batch, steps, epochs)
        drawn = draw_rows(data, round, batch=batch, counts=counts, slot=slot, draws=draws)
        v = w.expand(len(data), -1).clone()
        state = rule.init(len(v), task.gradient_dim, v) if state is None else state
        first = 0
        for row_index, n, sizes in step_pieces(drawn, counts, eta, v.dtype):
            keys = forward_keys(data, round, slot, np.arange(first, first + len(sizes))[:, None])
            training_steps(v, v, data.train, row_index, n, sizes, StepContext(pull, shift, rule, state, keys, fixed))
            first += len(sizes)
        return v, state
    fusible = rule.is_plain and (region is None or frozen is not None)
    summed = batch is None and isinstance(task, HasSummary)
    local_steps = task.local_steps(data.train) if fusible and not summed else None
    if local_steps is not None:
        counts = count_local_steps(data.train.size, batch, steps, epochs)
        drawn = draw_rows(data, round, batch=batch, counts=counts, slot=slot, draws=draws)
        return run_local_steps(local_steps, w, data.train, counts, drawn, eta, pull, shift), w.new_zeros(len(data), 1)
    v = w.expand(len(data), -1).clone()
    state = rule.init(len(v), task.gradient_dim, v) if state is None else state
    step_in_place = task.step_in_place() if fusible else None
    for step in minibatches(task, data, round, batch=batch, steps=steps, epochs=epochs, slot=slot, draws=draws):
        size = eta(step.k) if callable(eta) else eta
        if step_in_place is not None and isinstance(step.batch, Batch):
            step_in_place(v, step.batch, step_terms(v, size, step.active, pull, shift))
            continue
        g = task.grad(v, step.batch)
        if pull is not None:
            g = torch.addcmul(g, v - pull[1], broadcast_per_client(pull[0], v))
        if shift is not None:
            g = g + shift
        if fixed is not None:
            g = torch.where(fixed.mask, 0.0, g)  # they count in no norm
        rate = broadcast_per_client(size, v)
        if rule.is_plain:
            if region is None and step.active is None:
                v.addcmul_(g, -rate)  # v is our own: a large cohort is not allocated anew at every step
                continue
            moved = project(torch.addcmul(v, g, -rate), region)
            v = moved if step.active is None else torch.where(step.active[:, None], moved, v)
            continue
        rule.step(v, g, rate, state, step.active)
        v = project(v, region)
    return v, state


def run_local_steps(
    local_steps: LocalSteps,
    w: Tensor,
    rows: Rows,
    counts: Tensor,
    drawn: Iterator[RowDraw],
    eta: StepSize,
    pull: Pull | None,
    shift: Tensor | None,
) -> Tensor:
    """[C, d]: the models after all local steps, taken as many at once as MAX_DRAWN_ROWS allows."""
    start = w if w.ndim == 2 else w[None]
    v = start.new_empty(len(rows), start.shape[1])
    for row_index, n, rate in step_pieces(drawn, counts, eta, v.dtype):
        local_steps(v, start, rows, row_index, n, rate, pull, shift)
        start = v
    return v if start is v else v.copy_(start)


def run_mixture_steps(
    mixture_steps: MixtureSteps,
    w: Tensor,
    v: Tensor,
    alpha: Tensor,
    data: CohortData,
    round: Round,
    eta: StepSize,
    *,
    batch: int | None,
    steps: int | Tensor | None,
    draws: str,
    moves_in_step: Callable[[int], bool],
    on_validation: bool,
    pull: float,
    by_parts: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """w [C, d], v [C, d] and alpha [C] after the local steps of APFL, by a task that takes many at once.

    moves_in_step(k) is whether alpha moves in step k: along the step's rows, or along validation rows of slot 1 if
    `on_validation`, for clients that have any; `pull` and `by_parts` are those of `MixtureUpdate`.
    """
    counts = count_local_steps(data.train.size, batch, steps, None)
    drawn = draw_rows(data, round, batch=batch, counts=counts, draws=draws)
    validation_draws = draw_rows(data, round, batch=batch, counts=counts, slot=1, draws=draws, part="validation")
    w_start, v_start, alpha = w.expand_as(v)[:1] if w.ndim == 1 else w, v, alpha.clone()
    w, v, k = v.new_empty(v.shape), v.new_empty(v.shape), 0
    for row_index, n, rate in step_pieces(drawn, counts, eta, v.dtype):
        moves = [moves_in_step(j) for j in range(k, k + len(rate))]
        validation = [next(validation_draws) for moved in moves if on_validation and moved]
        is_active = (rate != 0)[moves]
        update = MixtureUpdate(moves, None, row_index[:0], n[:0], pull, by_parts)
        if validation:
            update = update._replace(
                rows=data.validation,
                row_index=np.stack([draw.row_index for draw in validation]),
                n=np.where(is_active, np.stack([draw.n for draw in validation]), 0),
            )
        mixture_steps(w, v, alpha, (w_start, v_start), data.train, row_index, n, rate, update)
        w_start, v_start, k = w, v, k + len(rate)
    return (w, v, alpha) if k else (w.copy_(w_start), v.copy_(v_start), alpha)


def step_pieces(
    drawn: Iterator[RowDraw], counts: Tensor, eta: StepSize, dtype: torch.dtype
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Steps in pieces of at most MAX_DRAWN_ROWS rows: row_index [S, C, B], n [S, C] and rate [S, C], which is 0 for
    clients that have no steps left."""
    pending: list[RowDraw] = []
    dtype = torch.float32 if dtype == torch.bfloat16 else dtype  # which numpy lacks
    last = int(counts.max()) if len(counts) else 0
    for k, draw in enumerate(drawn):
        pending.append(draw)
        if len(pending) * draw.row_index.size < MAX_DRAWN_ROWS and k + 1 < last:
            continue
        steps = range(k + 1 - len(pending), k + 1)
        is_active = np.array(steps)[:, None] < counts.numpy()
        row_index, n = np.stack([draw.row_index for draw in pending]), np.stack([draw.n for draw in pending])
        timed_steps = steps if callable(eta) else steps[:1]  # the same in all steps
        sizes = [
            torch.as_tensor(eta(j) if callable(eta) else eta, dtype=dtype).expand(len(counts)) for j in timed_steps
        ]
        yield row_index, np.where(is_active, n, 0), torch.stack(sizes).numpy() * is_active
        pending = []


def record_tolerance(task: Task, v: Tensor, rows: Condensed, lam: float | Tensor, center: Tensor, tol: float) -> None:
    """Measure |grad h_i(v)|, h_i(v) = L_i(v) + lam/2 |v - center|^2, after a solve that promised at most tol."""
    task.record_solve(task.grad(v, rows).addcmul_(v - center, broadcast_per_client(lam, v)).norm(dim=1), tol)


def descend_to_tolerance(
    task: Task,
    v: Tensor,
    rows: Condensed,
    lam: float | Tensor,
    center: Tensor,
    eta: float | Tensor,
    *,
    tol: float,
    most: int,
    rule: Optimizer = PLAIN_SGD,
    state: Tensor | None = None,
) -> Tensor:
    """Full-gradient steps on h_i(v) = L_i(v) + lam/2 |v - center|^2 until each client certifies |grad h_i| <= tol.

    At most `most` steps; a finished client waits for the others. The task records tol and the norm that was reached.
    tol = 0: all steps are taken. Steps are those of the optimizer `rule`, whose
    `state` is changed in place.
    """
    state = rule.init(len(v), task.gradient_dim, v) if state is None else state
    pull, rate = broadcast_per_client(lam, v), broadcast_per_client(eta, v)
    norm, live = torch.full((len(v),), torch.inf, dtype=v.dtype), torch.ones(len(v), dtype=torch.bool)
    for k in range(most + 1 if tol > 0 else most):
        g, buffers = task.train_grad(v, rows if bool(live.all()) else without_finished_clients(rows, ~live))
        p = task.gradient_dim
        g[:, :p].addcmul_(v[:, :p] - center[..., :p], pull if pull.shape[-1] == 1 else pull[:, :p])
        norm = torch.where(live, g.norm(dim=1), norm)
        live = ~(norm <= tol)  # a gradient that is nan has reached nothing
        if k == most or not bool(live.any()):
            break
        if rule.is_plain:
            moved = torch.addcmul(v, g, -rate)
        else:
            moved = v.clone()
            rule.step(moved[:, :p], g[:, :p], rate, state, live)
        moved = set_buffers(task, moved, buffers)
        v = moved if bool(live.all()) else torch.where(live[:, None], moved, v)
    if tol > 0:
        task.record_solve(norm, tol)
    return v
