"""Losses on held-out rows as the choice asks for them: sums by client and fold, and how far settings are apart.

sums    [folds, m, settings]   sums of losses over a client's rows of a fold
count   [folds, m]             how many rows these are
apart   of pairs of settings, which may differ by fold and client: the sums over all rows of the difference of the
        two losses, and of its square
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mooring.core.client_functions import ClientRows, client_function
from mooring.core.cohort import Batch, StateTree
from mooring.core.task import Task


class HeldOutLosses(Protocol):
    @property
    def sums(self) -> Tensor: ...

    @property
    def count(self) -> Tensor: ...

    def apart(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Of pairs of settings [pairs, folds, m], two tensors [pairs]."""
        ...


@dataclass(frozen=True, eq=False)
class LossesByRow:
    """Losses of rows that are here."""

    loss: Tensor  # [settings, N]
    fold: Tensor  # [N]
    owner: Tensor  # [N], each row's client
    clients: int  # m

    @cached_property
    def _cell(self) -> Tensor:
        """[N]: fold and client as one number."""
        return self.fold * self.clients + self.owner

    @property
    def _shape(self) -> tuple[int, int]:
        return int(self.fold.max()) + 1, self.clients

    @cached_property
    def sums(self) -> Tensor:
        folds, m = self._shape
        out = torch.zeros(folds * m, len(self.loss), dtype=torch.float64)
        return out.index_add_(0, self._cell, self.loss.T.double()).view(folds, m, -1)

    @cached_property
    def count(self) -> Tensor:
        folds, m = self._shape
        return torch.bincount(self._cell, minlength=folds * m).view(folds, m)

    def apart(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        out = []
        for gap, other in zip(first, second):
            gap = self._of(gap) - self._of(other)
            out.append(torch.stack([gap.sum(), gap.square().sum()]))
        total, square = torch.stack(out, 1)
        return total, square

    def _of(self, setting: Tensor) -> Tensor:
        """[N]: each row's loss with the setting [folds, m] of its fold and client."""
        if bool((setting == setting.flatten()[0]).all()):
            return self.loss[int(setting.flatten()[0])].double()
        return self.loss.gather(0, setting.flatten()[self._cell][None])[0].double()


@dataclass(frozen=True, eq=False)
class LossesByModel:
    """Losses of rows elsewhere: each fold's models are sent to their clients again, and sums come back."""

    task: Task
    held: Sequence[ClientRows]  # [folds], whom to ask
    models: Sequence[Tensor]  # [folds], each [m, settings, d]
    known: dict[tuple[bytes, bytes], tuple[Tensor, Tensor]] = field(default_factory=dict)  # pairs that were asked for

    @cached_property
    def sums(self) -> Tensor:
        def of_fold(k: int) -> list[Tensor]:
            return [sum_model_losses(self.task, self.held[k], self.models[k])]

        return torch.stack([sums for (sums,) in self.held[0].map_independent(of_fold, range(len(self.held)))])

    @cached_property
    def count(self) -> Tensor:
        return torch.stack([held.size for held in self.held])

    def apart(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        pairs = first.contiguous().numpy().tobytes(), second.contiguous().numpy().tobytes()
        if pairs not in self.known:
            self.known[pairs] = self._ask_apart(first, second)
        return self.known[pairs]

    def _ask_apart(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        def of_fold(k: int) -> list[StateTree]:
            rows = torch.arange(len(self.models[k]))[:, None]
            pair = (self.models[k][rows, which[:, k].T] for which in (first, second))  # each [m, pairs, d]
            return [sum_loss_gaps(self.task, self.held[k], *pair)]

        gaps = [gap for (gap,) in self.held[0].map_independent(of_fold, range(len(self.held)))]
        return sum(gap.total.sum(0) for gap in gaps), sum(gap.square.sum(0) for gap in gaps)  # type: ignore[return-value]


def _losses(task: Task, batch: Batch, w: Tensor) -> Tensor:
    """[C, B] of one model each, to the digits in which they are stored (`FoldResult`), 0 on padding."""
    return torch.where(batch.weight > 0, task.row_risk(w, batch).float().double(), 0.0)


@client_function
def sum_model_losses(task: Task, batch: Batch, models: Tensor) -> Tensor:
    """[C, settings]: sums of losses with models [C, settings, d]."""
    return torch.stack([_losses(task, batch, w).sum(1) for w in models.unbind(1)], 1)


class GapSums(NamedTuple):
    total: Tensor  # [C, pairs]
    square: Tensor  # [C, pairs]


@client_function
def sum_loss_gaps(task: Task, batch: Batch, first: Tensor, second: Tensor) -> GapSums:
    """Sums of differences of losses, and of their squares, of pairs of models [C, pairs, d]."""
    gap = [
        _losses(task, batch, model) - _losses(task, batch, other)
        for model, other in zip(first.unbind(1), second.unbind(1))
    ]
    return GapSums(torch.stack([g.sum(1) for g in gap], 1), torch.stack([g.square().sum(1) for g in gap], 1))
