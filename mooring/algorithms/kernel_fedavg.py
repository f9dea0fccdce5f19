"""Kernel FedAvg: any number of FedAvg rounds on squared loss at once, with the theory's early stop.

kernel, Section 4, Propositions 1 and 3, Eq. 23.

    w_t = w_{t-1} - sum_i p_i matrix_i w_{t-1} + sum_i p_i push_i,    H_i = X_i'X_i/n_i + ridge
    matrix_i = eta G_i H_i,  push_i = eta G_i X_i'y_i/n_i,            G_i = sum_{tau < steps} (I - eta H_i)^tau

    rounds_exact = t         w_t, t whole, by eigendecomposition of the mean matrix: a million rounds cost what one does
    rounds_exact = "limit"   w_inf; directions that no row sees stay as they were at the start
    rounds_exact = "stop"    w_T, T = max{ t : Rad(1/sqrt(eta t steps)) <= norm/(sqrt(2e) sigma eta t steps) }

The task must be linear in w: linear, or kernel, whose random features stand for the kernel. Clients send their matrices
once and the run is over. Kernels without features would need all points in one place.
With batch > 0 a pass over consecutive minibatches takes the place of a step.

Symbols  w: Server.w, the paper's theta    T: Server.rounds    steps: the paper's s    eta: below 1/max_i |H_i|
Limits   FedAvg with full batches and as many rounds; steps = 1 at the limit is Global
Departs  p_i may differ from n_i/N and the task may have a ridge, which the stop does not see; sigma = "residuals" and
         norm = "path" are estimates of what Eq. 23 takes as known (norm = 1 is the paper's own)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from mooring.algorithms.hyperparameters import check_ranges
from mooring.algorithms.kernel_path import KernelPath
from mooring.core.task import Task
from mooring.core.types import Auto
from mooring.estimates.client_statistics import ClientStatistics
from mooring.theory import kernel_operator as op

AUTO_STEP_SHARE = 0.5  # eta = "auto" takes this share of the largest step that Lemma 4 allows


@dataclass(frozen=True)
class KernelFedAvg(KernelPath):
    eta: Auto = "auto"
    steps: int = 10

    paper: ClassVar[str] = "kernel, Propositions 1 and 3, Eq. 23"

    def __post_init__(self) -> None:
        check_ranges(self, eta=(0, None, "auto"), steps=(1, None))
        super().__post_init__()
        if self.eta != "auto":
            self.update  # noqa: B018  # refuses eta = 0

    @property
    def update(self) -> op.LocalUpdate:
        return op.fedavg(float(self.eta), self.steps)

    def resolve(self, task: Task, statistics: ClientStatistics) -> KernelFedAvg:
        return replace(self, eta=AUTO_STEP_SHARE / float(statistics.smooth.max())) if self.eta == "auto" else self
