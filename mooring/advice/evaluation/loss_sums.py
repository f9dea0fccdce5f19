"""Sums over each client's rows that show how well its three models predict them: all that recommendations are based on.

For every row and the models local, global and personal (MODELS):

    loss         of each model
    difference   loss of local, and of global, less that of the personal model
    divergence   what that difference would be on average if the personal model were true (`Task.row_divergence`)
    deviation    difference - divergence: the part that depends on the row's own noise

A client sends sums of these and of a few products, never a row. Sums of several folds add up.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from mooring.core.client_functions import ClientRows, client_function
from mooring.core.cohort import Batch
from mooring.core.task import Task

LOCAL, GLOBAL, PERSONAL = "local", "global", "personal"
MODEL_KINDS = (LOCAL, GLOBAL, PERSONAL)
ALTERNATIVES = (LOCAL, GLOBAL)  # what the personal model is compared with


class ModelTriple(NamedTuple):
    """The models that are compared, of every client."""

    local: Tensor  # [m, d]
    global_: Tensor  # [d]
    personal: Tensor  # [m, d]
    centers: Tensor  # [k, d], the global model inside each averaged setting: what new clients are pulled to

    def each(self) -> tuple[Tensor, Tensor, Tensor]:
        """[m, d] each, in the order of MODELS."""
        return self.local, self.global_.expand_as(self.local), self.personal


class LossSums(NamedTuple):
    """Sums over each client's rows; the second axis is that of MODELS, or of OTHERS and their product."""

    rows: Tensor  # [m]
    loss: Tensor  # [m, 3]
    loss_square: Tensor  # [m], of the personal model
    difference: Tensor  # [m, 2]
    divergence: Tensor  # [m, 2]
    divergence_square: Tensor  # [m, 2]
    apart: Tensor  # [m], divergence of global from local
    deviation: Tensor  # [m, 3], squares of both deviations and their product


def zero_sums(m: int) -> LossSums:
    shapes = ((m,), (m, 3), (m,), (m, 2), (m, 2), (m, 2), (m,), (m, 3))
    return LossSums(*(torch.zeros(shape, dtype=torch.float64) for shape in shapes))


def sum_losses(task: Task, rows: ClientRows, models: ModelTriple) -> LossSums:
    """The sums of these rows with every client's three models."""
    if int(rows.size.sum()) == 0:
        return zero_sums(len(rows))
    return sum_row_losses(task, rows, *models.each())


@client_function
def sum_row_losses(task: Task, batch: Batch, local: Tensor, global_: Tensor, personal: Tensor) -> LossSums:
    """Of models [C, d] each."""
    real = batch.weight > 0

    def on_rows(values: Tensor) -> Tensor:
        return torch.where(real, values.double(), 0.0)

    loss = torch.stack([on_rows(task.row_risk(w, batch)) for w in (local, global_, personal)], -1)
    difference = loss[..., :2] - loss[..., 2:]
    divergence = torch.stack([on_rows(task.row_divergence(w, personal, batch)) for w in (local, global_)], -1)
    deviation = difference - divergence
    return LossSums(
        real.sum(1).double(),
        loss.sum(1),
        loss[..., 2].square().sum(1),
        difference.sum(1),
        divergence.sum(1),
        divergence.square().sum(1),
        on_rows(task.row_divergence(global_, local, batch)).sum(1),
        torch.cat([deviation.square(), deviation.prod(-1, keepdim=True)], -1).sum(1),
    )


def add_sums(parts: Iterable[LossSums]) -> LossSums:
    """The sums of several folds."""
    return LossSums(*(torch.stack(columns).sum(0) for columns in zip(*parts)))


def mean_losses(sums: LossSums) -> dict[str, Tensor]:
    """[m] by model; nan for a client without rows."""
    return dict(zip(MODEL_KINDS, (sums.loss / sums.rows[:, None]).unbind(1)))


def pooled_losses(sums: LossSums) -> dict[str, float]:
    """The mean over all clients' rows by model."""
    return dict(zip(MODEL_KINDS, (sums.loss.sum(0) / sums.rows.sum().clamp(min=1)).tolist()))
