"""Server optimizers: the mean change of the global model is a pseudo-gradient that the server's optimizer takes.

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan. Adaptive federated optimization. ICLR 2021, Algorithm 2;
Hsu, Qi, Brown. Measuring the effects of non-identical data distribution for federated visual classification. 2019
(FedAvgM). With the mean change D of a round:

    "sgd"        w <- w + server_step D                                     FedAvg
    "momentum"   m <- server_momentum m + D;   w <- w + server_step m       FedAvgM
    "adagrad"    s <- s + D^2                                               FedAdagrad
    "yogi"       s <- s - (1 - server_beta2) D^2 sign(s - D^2)              FedYogi
    "adam"       s <- server_beta2 s + (1 - server_beta2) D^2               FedAdam

The last three: m <- server_momentum m + (1 - server_momentum) D and w <- w + server_eta m / (sqrt(s) + server_tau),
with m = 0 and s = server_tau^2 at first. There is no correction for the start of m and s, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from mooring.algorithms.hyperparameters import check_ranges
from mooring.core.cohort import Round

SERVER_OPTIMIZERS = ("sgd", "momentum", "adagrad", "yogi", "adam")


class GlobalState(NamedTuple):
    """The state of a server that has one global model."""

    w: Tensor  # [d]
    moments: Tensor  # [k, d], m and s of the server's optimizer; k = 0 for "sgd"


@dataclass(frozen=True, kw_only=True)
class ServerOptimizer:
    """Hyperparameters of algorithms whose messages are changes of a global model."""

    server_optimizer: str = "sgd"
    server_momentum: float = 0.9  # of all but sgd
    server_beta2: float = 0.99  # of adam and yogi
    server_tau: float = 1e-3  # of adam, yogi and adagrad, as is
    server_eta: float = 0.03


SERVER_FIELDS = tuple(ServerOptimizer.__dataclass_fields__)


def check_server_optimizer(algorithm: ServerOptimizer) -> None:
    """Hold the fields of `ServerOptimizer` to their ranges."""
    check_ranges(algorithm, server_optimizer=SERVER_OPTIMIZERS, server_momentum=(0, 1), server_beta2=(0, 1))
    check_ranges(algorithm, server_tau=(0, None), server_eta=(0, None))


def init_moments(algorithm: ServerOptimizer, w0: Tensor) -> Tensor:
    """[k, d]: the optimizer's state before the first round."""
    if algorithm.server_optimizer == "sgd":
        return w0.new_zeros(0, len(w0))
    if algorithm.server_optimizer == "momentum":
        return w0.new_zeros(1, len(w0))
    return torch.stack([torch.zeros_like(w0), torch.full_like(w0, algorithm.server_tau**2)])


def apply_change(
    algorithm: ServerOptimizer, w: Tensor, moments: Tensor, change: Tensor, step: float = 1.0, decay: float = 1.0
) -> tuple[Tensor, Tensor]:
    """w and the moments after the mean change of a round; `step` times `decay` is the step of "sgd" and "momentum",
    server_eta times `decay` that of the others."""
    kind, beta = algorithm.server_optimizer, algorithm.server_momentum
    if kind == "sgd":
        return w + step * decay * change, moments
    if kind == "momentum":
        m = beta * moments[0] + change
        return w + step * decay * m, m[None]
    square, s = change.square(), moments[1]
    m = beta * moments[0] + (1 - beta) * change
    if kind == "adagrad":
        s = s + square
    elif kind == "yogi":
        s = s - (1 - algorithm.server_beta2) * square * torch.sign(s - square)
    else:
        s = algorithm.server_beta2 * s + (1 - algorithm.server_beta2) * square
    return w + algorithm.server_eta * decay * m / (s.sqrt() + algorithm.server_tau), torch.stack([m, s])


@dataclass(frozen=True, kw_only=True)
class GlobalServer(ServerOptimizer):
    """The server's part of algorithms whose server has a global model and nothing else."""

    server_only: ClassVar[tuple[str, ...]] = ("moments",)

    def init_server(self, w0: Tensor) -> GlobalState:
        return GlobalState(w0, init_moments(self, w0))

    def server_update(self, server: GlobalState, mean: Tensor, round: Round) -> GlobalState:
        return GlobalState(*apply_change(self, server.w, server.moments, mean))
