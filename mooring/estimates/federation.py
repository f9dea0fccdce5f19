"""One pipeline from rows to lam: what the clients of a convex task tell, and how they vary.

`fit` (lam = "auto" or a rule's name), `mooring theory` and `advise` all go this way, so the same rows give the same
numbers. Clients without rows have nothing to tell and are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mooring.core.task import Task
from mooring.estimates.answers import Answers
from mooring.estimates.client_spread import ClientSpread, client_spread, forms_of
from mooring.estimates.heterogeneity_likelihood import Radii, estimate_radii
from mooring.estimates.lambda_rules import Rule, lambda_rules, settled_single
from mooring.estimates.spread import likelier
from mooring.estimates.summaries import Summary, ridge_left_out


@dataclass(frozen=True, eq=False)
class Federation:
    clients: Tensor  # [k], those with rows, by their places among all
    n: Tensor  # [k]
    p: Tensor  # [k], their weights, of sum 1
    ridge: float  # what the summary's Hessians lack of the task's own
    scalar: ClientSpread  # places in these are among the k
    diagonal: ClientSpread | None  # None: the coefficients are too many to have one each, or it was not asked for
    summary: Summary | None  # None: not asked for

    @property
    def auto(self) -> float:
        """What lam = "auto" becomes."""
        return settled_single(self.scalar, self.n, self.p)

    @property
    def rules(self) -> dict[str, Rule]:
        """lam by every rule; the summary must have been asked for."""
        assert self.summary is not None
        spreads = self.scalar, self.diagonal or self.scalar
        return lambda_rules(self.summary, self.p, *spreads, self.ridge, self.radii)

    @property
    def best(self) -> ClientSpread:
        """One spread for all coefficients or one each, as the likelihood prefers."""
        if self.diagonal is None or likelier(self.scalar.spread, self.diagonal.spread) is self.scalar.spread:
            return self.scalar
        return self.diagonal

    @cached_property
    def radii(self) -> Radii:
        """R, R_max and R_i; the summary must have been asked for."""
        assert self.summary is not None
        return estimate_radii(self.summary, self.best, self.p)


def estimate_federation(task: Task, answers: Answers, p: Tensor, everything: bool = True) -> Federation | None:
    """How the clients vary and, with `everything`, all that the rules need; None where the spread cannot be told."""
    size = answers.size
    asked = torch.nonzero(size > 0)[:, 0]
    some = answers if len(asked) == len(size) else answers.select(asked)
    scalar = client_spread(task, some)
    if scalar is None:
        return None
    diagonal = client_spread(task, some, "diagonal") if everything and "diagonal" in forms_of(task) else None
    summary = some.summary() if everything else None
    weight = p[asked].double()
    ridge = ridge_left_out(task)
    return Federation(asked, size[asked].double(), weight / weight.sum(), ridge, scalar, diagonal, summary)
