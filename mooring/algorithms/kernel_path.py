"""What kernel FedAvg and kernel FedProx share: any number of rounds on squared loss at once.

Each client sends what it does in any round, a matrix and a vector; the server applies their means as often as Eq. 23 of
kernel or the user sets.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mooring.algorithms.base import Algorithm, NoState
from mooring.algorithms.hyperparameters import check_ranges
from mooring.core.cohort import CohortData, Round
from mooring.core.errors import RequestError
from mooring.core.local_training import LocalTraining
from mooring.core.task import Task, require
from mooring.core.types import Auto, as_number
from mooring.tasks.linear import Linear
from mooring.theory import kernel_operator as op
from mooring.theory import kernel_rounds as exact
from mooring.theory.kernel_stopping import stopping_time


class Server(NamedTuple):
    w: Tensor  # [d]
    rounds: Tensor  # [], number of rounds that w is the result of; infinity at the limit


class Message(NamedTuple):
    matrix: Tensor  # [C, d, d]
    push: Tensor  # [C, d]
    moment: Tensor | None  # [C, d, d] X_i'X_i/n_i, for the stop alone, like `sums`
    sums: Tensor | None  # [C, 3] (n_i, n_i sigma_i^2, y_i'y_i)/p_i: their weighted means are sums over clients


@dataclass(frozen=True, kw_only=True)
class KernelPath(Algorithm[Server, NoState, Message]):
    """Fields and rounds of the two algorithms, which differ in what a client does in a round."""

    rounds_exact: Auto = "stop"  # or "limit"
    batch: int = 0  # 0: all rows
    per: str = "client"  # a batch's loss is divided by 2 n_i; "batch": by 2 batch
    sigma: Auto = "residuals"  # standard deviation of the noise in y, for the stop
    norm: Auto = "path"  # |w_0 - truth|, for the stop

    group: ClassVar[str] = "global"
    fixed_steps: ClassVar[str] = "its rounds are taken at once, in closed form"
    reveals: ClassVar[str] = (
        "each client's X'X/n and X'y/n (d x d and d numbers, sent once); only their weighted means are used, so secure "
        "aggregation hides a client's own"
    )
    full_participation: ClassVar[bool] = True
    additive: ClassVar[bool] = False  # type: ignore[misc,assignment]  # matrices
    server_only: ClassVar[tuple[str, ...]] = ("rounds",)

    def __post_init__(self) -> None:
        check_ranges(self, rounds_exact=(0, None, "stop", "limit"), batch=(0, None), per=exact.BATCH_LOSS_SCALES)
        rounds, owner = self.rounds_exact, type(self).__name__
        if not isinstance(rounds, str) and not float(rounds).is_integer():
            raise RequestError(f"{owner}: rounds_exact must be a whole number, 'stop' or 'limit', got {rounds}.")
        check_ranges(self, sigma=(0, None, "residuals"), norm=(0, None, "path"))
        if rounds == "stop" and self.batch and self.per == "batch":
            raise RequestError(f"{owner}: Eq. 23 knows no steps of size 1/batch; with per = 'batch' set rounds_exact.")

    @property
    def one_shot(self) -> bool:
        return True

    @property
    def required_statistics(self) -> tuple[str, ...]:
        return ()

    @property
    def update(self) -> op.LocalUpdate:
        """What a client does in a round."""
        raise NotImplementedError

    def init(self, task: Task, w0: Tensor) -> tuple[Server, NoState]:
        if not isinstance(task, Linear):
            raise RequestError(
                f"{self.name} needs squared loss and a task that is linear in its parameters, 'linear' or 'kernel'; "
                f"task '{task.name}' is not."
            )
        return Server(w0, torch.tensor(0.0, dtype=torch.float64)), NoState()

    def client_update(self, server: Server, client: NoState, local: LocalTraining) -> tuple[NoState, Message]:
        return client, send_matrices(self, local.task, local.data)

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        return advance_server(self, server, mean)

    def personal_model(self, server: Server, client: NoState) -> Tensor:
        return server.w


def send_matrices(algorithm: KernelPath, task: Task, data: CohortData) -> Message:
    """The clients' part of any round, and the statistics that the stopping rule needs."""
    update, rows = algorithm.update, data.train.full(task)
    push = -task.grad(torch.zeros(len(data), task.dim, dtype=task.dtype), rows).double()
    values, vectors = rows.values.double(), rows.vectors.double()
    curvature = values + task.ridge
    op.require_contraction(update.eta * float(curvature.max()), update)
    if algorithm.batch:
        stays = [minibatch_update(algorithm, task, *data.train.of(c)) for c in range(len(data))]
        matrix, push = (torch.from_numpy(np.stack(parts)) for parts in zip(*stays))
    else:
        gain = update.eta * torch.from_numpy(op.local_gain(curvature.numpy(), update))
        matrix = _spectral(vectors, gain * curvature)
        push = (_spectral(vectors, gain) @ push[..., None])[..., 0]
    if algorithm.rounds_exact != "stop":
        return Message(matrix, push, None, None)
    n, noise = data.train.size.double(), torch.zeros(len(data), dtype=torch.float64)
    if algorithm.sigma == "residuals":
        clients = (client_design(task, *data.train.of(c)) for c in range(len(data)))
        noise = torch.tensor([exact.residual_variance(x, y) for x, y in clients], dtype=torch.float64)
    sums = torch.stack([n, n * noise, n * rows.square.double()], 1) / data.p.clamp(min=exact.SMALLEST_NORM)[:, None]
    return Message(matrix, push, _spectral(vectors, values), sums)


def advance_server(algorithm: KernelPath, server: Server, mean: Message) -> Server:
    """The global model after all its rounds, from the weighted means of the clients' messages."""
    update, matrix, push = algorithm.update, mean.matrix.numpy(), mean.push.numpy()
    flow, start = exact.make_theta_flow(matrix, push, update), server.w.double().numpy()
    rounds = algorithm.rounds_exact
    if mean.moment is not None and mean.sums is not None:
        rounds = choose_stopping_round(
            algorithm, flow, start, np.linalg.eigvalsh(mean.moment.numpy()), *mean.sums.tolist()
        )
    count = np.inf if rounds == "limit" else float(rounds)
    if algorithm.batch:
        w = exact.propagate(matrix, push, count, start)
    else:
        w = (
            op.limit_point(flow, UNIT_RESPONSE, start)
            if rounds == "limit"
            else op.theta_at(flow, UNIT_RESPONSE, int(count), start)
        )
    return Server(torch.from_numpy(w).to(server.w.dtype), torch.tensor(count, dtype=torch.float64))


UNIT_RESPONSE = np.ones(1)  # the only response of an averaged flow


def choose_stopping_round(
    algorithm: KernelPath,
    flow: op.ThetaFlow,
    start: np.ndarray,
    spectrum: np.ndarray,
    rows: float,
    noise: float,
    square: float,
) -> int:
    """T of Eq. 23 from the spectrum of X'X/N and the sums of n_i, n_i sigma_i^2 and y_i'y_i.

    Minibatch rounds count as their symmetric part here.
    """

    def moved(rounds: int) -> float:
        return float(((op.theta_at(flow, UNIT_RESPONSE, rounds, start) - start) ** 2).sum())

    sigma = (noise / rows) ** 0.5 if algorithm.sigma == "residuals" else as_number(algorithm.sigma)
    norm = algorithm.norm
    if isinstance(norm, str):
        first = (square / rows / max(spectrum.sum(), exact.SMALLEST_NORM)) ** 0.5
        norm = exact.norm_from_path(moved, flow.eigenvalues, spectrum, round(rows), flow.update, sigma, first)
    rounds = stopping_time(spectrum, round(rows), flow.update, sigma, norm) if norm > 0 else 0
    if rounds == 0:
        warnings.warn(
            f"{algorithm.name}: Eq. 23 allows not one round (sigma = {sigma:.3g}, norm = {norm:.3g}, {rows:.0f} rows), "
            "so the model stays at its start. Set rounds_exact to a number or to 'limit' to train all the same."
        )
    return rounds


def minibatch_update(algorithm: KernelPath, task: Task, x: Tensor, y: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """(matrix, push) of one client; batches are consecutive rows, the same in every round."""
    design, target = client_design(task, x, y)
    update, batch = algorithm.update, algorithm.batch
    if algorithm.per == "batch" and not update.prox and len(y):
        cuts = np.split(design, range(batch, len(design), batch))
        steepest = update.eta * max(np.linalg.norm(part, 2) ** 2 for part in cuts) / min(batch, len(y))
        if steepest >= 1:
            warnings.warn(
                f"{algorithm.name}: a batch's step is {steepest:.3g}, outside the theory, which asks for < 1."
            )
    return exact.minibatch_round(design, target, update, batch, algorithm.per, task.ridge)


def client_design(task: Task, x: Tensor, y: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """A client's design [n, d] and targets [n]."""
    return require(task, Linear).design(x[None])[0].double().numpy(), y.double().numpy()


def _spectral(vectors: Tensor, values: Tensor) -> Tensor:
    return (vectors * values[:, None]) @ vectors.mT
