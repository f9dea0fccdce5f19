"""Client functions that candidates are fitted by: the derivatives of losses, and each client's ridge fit."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mooring.core.client_functions import client_function
from mooring.core.cohort import Batch
from mooring.core.task import HasProx, Task, require
from mooring.estimates.client_queries import RELATIVE_GRADIENT_TOLERANCE
from mooring.tasks.linear import Linear
from mooring.tasks.proximal import is_dense, proximal_newton


class LossDerivatives(NamedTuple):
    """The clients' losses around their models."""

    loss: Tensor  # [C]
    slope: Tensor  # [C, d], the gradient
    hessian: Tensor  # [C, d, d]


@client_function
def differentiate_losses(task: Task, batch: Batch, v: Tensor) -> LossDerivatives:
    """L_i with its gradient and Hessian at v_i."""
    return LossDerivatives(*task.derivatives(v, batch))


@client_function
def fit_ridge(task: Task, batch: Batch, start: Tensor, *, pull: Tensor) -> Tensor:
    """arg min L_i(v) + 1/2 sum_j pull_j v_j^2, from `start`; `pull` [d], or one for all."""
    if isinstance(task, Linear) or not is_dense(task):
        return require(task, HasProx).prox(torch.zeros_like(start[:1]), pull[None] if pull.ndim else pull, batch, start)
    return proximal_newton(
        task, pull.expand_as(start), torch.zeros_like(start), batch, start, tol=RELATIVE_GRADIENT_TOLERANCE
    )
