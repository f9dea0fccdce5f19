"""Estimates of a federation: the summaries of the clients of a convex task, their variation, and lam by every rule.

`fit` (lam = "auto" or a rule's name), `mooring theory` and `advise` all use this module, so that equal rows give equal
numbers. Clients without rows are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mooring.core.client_functions import ClientRows
from mooring.core.task import Task
from mooring.estimates.client_queries import cached_summary
from mooring.estimates.client_summaries import ClientSummary, omitted_ridge
from mooring.estimates.heterogeneity_likelihood import Radii, estimate_radii
from mooring.estimates.lambda_rules import LambdaRule, lambda_rules, resolve_auto_lam
from mooring.estimates.random_effects import choose_by_aic
from mooring.estimates.task_random_effects import SampledRandomEffects, available_forms, estimate_random_effects


@dataclass(frozen=True, eq=False)
class FederationEstimates:
    clients: Tensor  # [k], positions of the clients with rows
    n: Tensor  # [k]
    p: Tensor  # [k], their weights, of sum 1
    ridge: float  # the task's ridge that the summary's Hessians leave out
    scalar: SampledRandomEffects  # places in these are among the k
    diagonal: SampledRandomEffects | None  # None: too many coefficients, or not requested
    summary: ClientSummary | None  # None: not requested

    @property
    def auto(self) -> float:
        """The value of lam = "auto"."""
        return resolve_auto_lam(self.scalar, self.n, self.p)

    @property
    def rules(self) -> dict[str, LambdaRule]:
        """lam by every rule; needs the summary."""
        assert self.summary is not None
        spreads = self.scalar, self.diagonal or self.scalar
        return lambda_rules(self.summary, self.p, *spreads, self.ridge, self.radii)

    @property
    def best(self) -> SampledRandomEffects:
        """The form of variation that the likelihood prefers."""
        if self.diagonal is None or choose_by_aic(self.scalar.spread, self.diagonal.spread) is self.scalar.spread:
            return self.scalar
        return self.diagonal

    @cached_property
    def radii(self) -> Radii:
        """R, R_max and R_i; needs the summary."""
        assert self.summary is not None
        return estimate_radii(self.summary, self.best, self.p)


def estimate_federation(task: Task, rows: ClientRows, p: Tensor, everything: bool = True) -> FederationEstimates | None:
    """Return the clients' variation and, with `everything`, all that the rules need; None if it cannot be estimated."""
    size = rows.size
    with_rows = torch.nonzero(size > 0)[:, 0]
    sampled = rows if len(with_rows) == len(size) else rows.select(with_rows)
    forms = [form for form in available_forms(task) if form == "scalar" or (form == "diagonal" and everything)]
    estimates = sampled.map_independent(lambda form: [estimate_random_effects(task, sampled, form)], forms)
    (scalar,), (diagonal,) = next(estimates), next(estimates, [None])
    if scalar is None:
        return None
    summary = cached_summary(task, sampled) if everything else None
    weight = p[with_rows].double()
    ridge = omitted_ridge(task)
    return FederationEstimates(
        with_rows, size[with_rows].double(), weight / weight.sum(), ridge, scalar, diagonal, summary
    )
