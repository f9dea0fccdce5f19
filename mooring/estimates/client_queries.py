"""What clients answer when it is asked how they vary: the only way from rows to the spread and the rules for lam.

    summary   once             sums of a linear task, or a fit with its covariance (`client_summaries.py`)
    slope     at a common w    the gradient and the Hessian of L_i: finds the common model
    refit     at a centre and  the penalised fit and the Hessian there: Laplace's approximation
              a stiffness
    pearson   at its model     two sums of residuals: how much more counts vary than Poisson's

Clients whose rows are in one place answer all at once (`Here`), others one by one (`Apart`); the numbers agree up to
rounding, and what is settled from them is rounded further than that (`lambda_rules.SETTLED`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from mooring.core.cohort import Batch, Rows, padded_batches, stack_states
from mooring.core.task import Task
from mooring.estimates.client_summaries import ClientSummary, summarize_clients


class ClientQueries(Protocol):
    """Stacked over the clients that are asked, [m, ...]."""

    @property
    def size(self) -> Tensor: ...

    def select(self, who: Tensor) -> ClientQueries: ...

    def summary(self) -> ClientSummary: ...

    def slope(self, w: Tensor) -> tuple[Tensor, Tensor]: ...

    def refit(self, center: Tensor, lam: Tensor, start: Tensor) -> tuple[Tensor, Tensor]: ...

    def pearson(self, models: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, eq=False)
class InMemoryQueries:
    """Clients whose rows are in this process."""

    task: Task
    rows: Rows

    @property
    def size(self) -> Tensor:
        return self.rows.size

    @cached_property
    def batches(self) -> list[tuple[Tensor, Batch]]:
        return padded_batches(self.rows)

    def select(self, who: Tensor) -> InMemoryQueries:
        return InMemoryQueries(self.task, self.rows.select(who))

    def summary(self) -> ClientSummary:
        return summarize_clients(self.task, self.rows)

    def slope(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients [m, d] and Hessians [m, d, d] of L_i at w [d]."""
        return self._filled(lambda block, batch: w.to(self.task.dtype).expand(len(block), -1), self.task.grad)

    def refit(self, center: Tensor, lam: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        """Minimisers [m, d] of L_i(v) + 1/2 sum_j lam_ij (v_j - center_j)^2 and the Hessians of L_i there."""
        center, lam = center.to(self.task.dtype), lam.to(self.task.dtype)
        return self._filled(
            lambda block, batch: self.task.prox(center, lam[block], batch, start[block]), lambda v, batch: v
        )

    def pearson(self, models: Tensor) -> tuple[Tensor, Tensor]:
        """Sums [m] of squared Pearson residuals and of residuals over means, at models [m, d]."""
        square, ratio = torch.empty(len(self.rows)).double(), torch.empty(len(self.rows)).double()
        for block, batch in self.batches:
            square[block], ratio[block] = (part.double() for part in self.task.pearson(models[block], batch))
        return square, ratio

    def _filled(self, where: Any, tell: Any) -> tuple[Tensor, Tensor]:
        first = torch.empty(len(self.rows), self.task.dim, dtype=self.task.dtype)
        hessians = torch.empty(len(self.rows), self.task.dim, self.task.dim, dtype=torch.float64)
        for block, batch in self.batches:
            v = where(block, batch)
            first[block], hessians[block] = tell(v, batch), self.task.hessian(v, batch).double()
        return first, hessians


@dataclass(frozen=True, eq=False)
class SeparateQueries:
    """Clients that are asked one by one, each an `Answers` of its own."""

    each: Sequence[ClientQueries]

    @property
    def size(self) -> Tensor:
        return torch.cat([one.size for one in self.each])

    def select(self, who: Tensor) -> SeparateQueries:
        return SeparateQueries([self.each[i] for i in who.tolist()])

    def summary(self) -> ClientSummary:
        return stack_states([one.summary() for one in self.each])

    def slope(self, w: Tensor) -> tuple[Tensor, Tensor]:
        return stack_states([one.slope(w) for one in self.each])

    def refit(self, center: Tensor, lam: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        return stack_states([one.refit(center, lam[i : i + 1], start[i : i + 1]) for i, one in enumerate(self.each)])

    def pearson(self, models: Tensor) -> tuple[Tensor, Tensor]:
        return stack_states([one.pearson(models[i : i + 1]) for i, one in enumerate(self.each)])
