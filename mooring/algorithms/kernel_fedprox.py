"""Kernel FedProx: any number of shared-model FedProx rounds on squared loss at once, with the theory's early stop.

kernel, Section 4 (Eq. 6), Propositions 1 and 3, Eq. 23; there eta = 1/lam.

    w_t = w_{t-1} - sum_i p_i matrix_i w_{t-1} + sum_i p_i push_i,    H_i = X_i'X_i/n_i + ridge
    matrix_i = (lam + H_i)^(-1) H_i,  push_i = (lam + H_i)^(-1) X_i'y_i/n_i

    rounds_exact = t         w_t, by eigendecomposition of the mean matrix: a million rounds cost what one costs
    rounds_exact = "limit"   w_inf, the minimizer of sum_i p_i F_i, F_i the Moreau envelope of L_i
    rounds_exact = "stop"    w_T, T of Eq. 23 with eta = 1/lam and s = 1

The task must be linear in w: linear, or kernel, whose random features stand for the kernel. Clients send their matrices
once and the run is over. With batch > 0 a round is one pass of proximal solves over consecutive minibatches, each
centred at the last one's solution.

Symbols  w: Server.w, the paper's theta    T: Server.rounds    lam: the paper's 1/eta
Limits   fedprox with exact solves and as many rounds; lam -> infinity at the limit is Global, lam -> 0 averages
         the local fits
Departs  as kernel_fedavg: p_i, the ridge, sigma = "residuals" and norm = "path"
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from mooring.algorithms.hyperparameters import check_ranges
from mooring.algorithms.kernel_fedavg import AUTO_STEP_SHARE
from mooring.algorithms.kernel_path import KernelPath
from mooring.core.errors import RequestError
from mooring.core.task import Task
from mooring.core.types import Auto, as_number
from mooring.estimates.client_statistics import ClientStatistics
from mooring.theory import kernel_operator as op


@dataclass(frozen=True)
class KernelFedProx(KernelPath):
    lam: Auto = "auto"  # twice the largest curvature: no client runs far from the global model in a round

    paper: ClassVar[str] = "kernel, Eq. 6, Propositions 1 and 3, Eq. 23"

    def __post_init__(self) -> None:
        check_ranges(self, lam=(0, None, "auto"))
        if self.lam == 0:
            raise RequestError("KernelFedProx: lam must be > 0, got 0; without a pull use Local.")
        super().__post_init__()

    @property
    def update(self) -> op.LocalUpdate:
        return op.fedprox(1 / as_number(self.lam))

    def resolve(self, task: Task, statistics: ClientStatistics) -> KernelFedProx:
        return replace(self, lam=float(statistics.smooth.max()) / AUTO_STEP_SHARE) if self.lam == "auto" else self
