"""L2GD: a coin decides between a gradient step at every client and a step towards their mean.

Hanzely, Richtarik. Federated learning of a mixture of global and local models. 2020, Algorithm 1.

    tails (1 - q)   v_i <- v_i - eta/(1 - q) grad L_i(v_i)                   at all clients
    heads (q)       v_i <- v_i - eta lam/q (v_i - w),   w = sum_i p_i v_i    at all clients

Messages are needed only where tails turn to heads, as heads leave w as it is. So a round is a run of heads, then a run
of tails, both of random length and at least one, the same for all clients through the seed; then w is updated.

Symbols  w: Server.w    v_i: Client.v    q: the paper's p    eta: its alpha/m
Limits   lam = 0 is Local; in expectation a step is gradient descent on sum_i p_i (L_i(v_i) + lam/2 |v_i - w|^2), the
         objective of one-stage FedProx
Departs  p_i weigh clients, and eta is not divided by them; q = "auto" is lam/(lam + L), held within [0.05, 0.95]; eta =
         "auto" is the paper's 1/(2 max(L/(1 - q), lam/q))
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

from torch import Tensor

from mooring.algorithms.base import Algorithm
from mooring.algorithms.hyperparameters import auto_eta, check_ranges, parse_lam_field, resolve_auto
from mooring.core.cohort import Round
from mooring.core.errors import RequestError
from mooring.core.local_training import LocalTraining
from mooring.core.penalty import PerClientPenalty
from mooring.core.seeds import uniforms
from mooring.core.task import Task
from mooring.core.types import Auto, as_number
from mooring.estimates.client_statistics import ClientStatistics

MIN_COIN_PROBABILITY = (
    0.05  # q = "auto" stays away from 0 and 1 by this much: at most twenty local steps a round on average
)
HEADS, TAILS = 0, 1


class Server(NamedTuple):
    w: Tensor  # [d]


class Client(NamedTuple):
    v: Tensor  # [C, d]


@dataclass(frozen=True)
class L2GD(Algorithm[Server, Client, Tensor]):
    lam: Auto = "auto"
    q: Auto = "auto"
    eta: Auto = "auto"
    batch: int | Literal["auto"] = "auto"  # 0: all rows

    paper: ClassVar[str] = "l2gd, Algorithm 1"
    reveals: ClassVar[str] = "each client's change of its personal model: all changes together are that model"
    fixed_steps: ClassVar[str] = "its equations fix every step: gradient steps of size eta/(1 - q), then to the mean"
    full_participation: ClassVar[bool] = True
    new_client_method: ClassVar[str] = "prox"

    def __post_init__(self) -> None:
        parse_lam_field(self, ("auto",))
        check_ranges(self, q=(0, 1, "auto"), eta=(0, None, "auto"), batch=(0, None, "auto"))
        if isinstance(self.lam, PerClientPenalty):
            raise RequestError("L2GD: lam must be one number, as steps towards the mean would else move the mean.")
        if self.q in (0, 1):
            raise RequestError(f"L2GD: q must lie strictly between 0 and 1, got {self.q}.")

    def resolve(self, task: Task, statistics: ClientStatistics) -> L2GD:
        ready = resolve_auto(self, task, statistics)
        pull, smooth = as_number(ready.lam), 1 / auto_eta(task, statistics, ready.batch)
        q = (
            min(max(pull / (pull + smooth), MIN_COIN_PROBABILITY), 1 - MIN_COIN_PROBABILITY)
            if self.q == "auto"
            else as_number(self.q)
        )
        eta = 1 / (2 * max(smooth / (1 - q), pull / q)) if self.eta == "auto" else as_number(self.eta)
        return replace(ready, q=q, eta=eta)

    def init(self, task: Task, w0: Tensor) -> tuple[Server, Client]:
        return Server(w0), Client(w0)

    def client_update(self, server: Server, client: Client, local: LocalTraining) -> tuple[Client, Tensor]:
        heads, tails = self.run_lengths(local.round)
        eta, q = as_number(self.eta), as_number(self.q)
        gap = (1 - eta * as_number(self.lam) / q) ** heads
        v = server.w + gap * (client.v - server.w)
        v = local.sgd(v, eta / (1 - q), steps=tails, batch=as_number(self.batch))
        return Client(v), v - client.v

    def run_lengths(self, round: Round) -> tuple[int, int]:
        """How many heads, then how many tails, this round has: what fair draws with P(heads) = q give."""
        return self.length(round, HEADS), self.length(round, TAILS)

    def length(self, round: Round, side: int) -> int:
        n = 1
        while (uniforms(round.seed, "algorithm", round.t, side, n)[0] < self.q) == (side == HEADS):
            n += 1
        return n

    def server_update(self, server: Server, mean: Tensor, round: Round) -> Server:
        return Server(server.w + round.weight * mean)  # replies that were lost leave their v_i, and so w, as they were

    def personal_model(self, server: Server, client: Client) -> Tensor:
        return client.v
