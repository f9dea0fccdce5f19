"""Estimates of a federation: the summaries of the clients of a convex task, how they vary, and lam by every rule.

`fit` (lam = "auto" or a rule's name), `mooring theory` and `advise` all go this way, so the same rows give the same
numbers. Clients without rows are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mooring.core.client_functions import ClientRows
from mooring.core.task import Task
from mooring.estimates.client_queries import summarize_rows
from mooring.estimates.client_summaries import ClientSummary, omitted_ridge
from mooring.estimates.heterogeneity_likelihood import Radii, estimate_radii
from mooring.estimates.lambda_rules import LambdaRule, lambda_rules, resolve_auto_lam
from mooring.estimates.random_effects import choose_by_aic
from mooring.estimates.task_random_effects import SampledRandomEffects, available_forms, estimate_random_effects


@dataclass(frozen=True, eq=False)
class FederationEstimates:
    clients: Tensor  # [k], those with rows, by their places among all
    n: Tensor  # [k]
    p: Tensor  # [k], their weights, of sum 1
    ridge: float  # what the summary's Hessians lack of the task's own
    scalar: SampledRandomEffects  # places in these are among the k
    diagonal: (
        SampledRandomEffects | None
    )  # None: the coefficients are too many to have one each, or it was not asked for
    summary: ClientSummary | None  # None: not asked for

    @property
    def auto(self) -> float:
        """What lam = "auto" becomes."""
        return resolve_auto_lam(self.scalar, self.n, self.p)

    @property
    def rules(self) -> dict[str, LambdaRule]:
        """lam by every rule; the summary must have been asked for."""
        assert self.summary is not None
        spreads = self.scalar, self.diagonal or self.scalar
        return lambda_rules(self.summary, self.p, *spreads, self.ridge, self.radii)

    @property
    def best(self) -> SampledRandomEffects:
        """One spread for all coefficients or one each, as the likelihood prefers."""
        if self.diagonal is None or choose_by_aic(self.scalar.spread, self.diagonal.spread) is self.scalar.spread:
            return self.scalar
        return self.diagonal

    @cached_property
    def radii(self) -> Radii:
        """R, R_max and R_i; the summary must have been asked for."""
        assert self.summary is not None
        return estimate_radii(self.summary, self.best, self.p)


def estimate_federation(task: Task, rows: ClientRows, p: Tensor, everything: bool = True) -> FederationEstimates | None:
    """How the clients vary and, with `everything`, all that the rules need; None where the spread cannot be told."""
    size = rows.size
    asked = torch.nonzero(size > 0)[:, 0]
    some = rows if len(asked) == len(size) else rows.select(asked)
    scalar = estimate_random_effects(task, some)
    if scalar is None:
        return None
    diagonal = (
        estimate_random_effects(task, some, "diagonal") if everything and "diagonal" in available_forms(task) else None
    )
    summary = summarize_rows(task, some) if everything else None
    weight = p[asked].double()
    ridge = omitted_ridge(task)
    return FederationEstimates(asked, size[asked].double(), weight / weight.sum(), ridge, scalar, diagonal, summary)
