"""The penalty lam/2 |v - w|^2 of each client: its strength lam.

A stiffness is one number, one number per client, one per coefficient, or the product of the last two (a client's
noise over its rows, times a coefficient's inverse spread).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mooring.core.errors import RequestError
from mooring.core.types import JsonObject


@dataclass(frozen=True)
class PerClientPenalty:
    """lam_ij = per_client[i] * per_coefficient[j]; a missing factor is 1."""

    per_client: tuple[float, ...] | None = None
    per_coefficient: tuple[float, ...] | None = None


@dataclass(frozen=True, eq=False)
class PerRow:
    """One number of a run for all its clients, where clients of several runs are one cohort: a number per row [C]."""

    values: Tensor


Penalty = float | PerClientPenalty | PerRow
PenaltyOrRule = Penalty | str  # a stiffness, or the name of a rule that `Algorithm.resolve` turns into one


def penalty_rows(lam: PenaltyOrRule, index: Tensor, like: Tensor) -> Tensor:
    """lam for the clients at `index`, as [C, 1] or [C, d], ready to multiply [C, d]."""
    if isinstance(lam, PerRow):
        return lam.values.to(like.dtype)[:, None]
    if not isinstance(lam, PerClientPenalty):
        return torch.full((len(index), 1), float(lam), dtype=like.dtype)
    rows = torch.ones(len(index), 1, dtype=like.dtype)
    if lam.per_client is not None:
        rows = torch.tensor(lam.per_client, dtype=like.dtype)[index][:, None]
    if lam.per_coefficient is not None:
        rows = rows * torch.tensor(lam.per_coefficient, dtype=like.dtype)
    return rows


def uniform_lam(lam: PenaltyOrRule) -> float:
    """lam where it is one number for all clients and coefficients; anything else is refused."""
    if not isinstance(lam, int | float):
        raise TypeError(f"lam must be one number here, got {lam!r}.")
    return lam


def is_uniform(lam: PenaltyOrRule) -> bool:
    """Whether all clients and coefficients share one number, so that plain averaging is right."""
    return not isinstance(lam, PerClientPenalty)


def parse_lam(
    owner: str, lam: PenaltyOrRule | list[float] | tuple[float, ...] | JsonObject, rules: tuple[str, ...] = ()
) -> PenaltyOrRule:
    """A stiffness from a run file or the command line: a number, a rule's name, a list (per client) or a table."""
    if isinstance(lam, str):
        if lam in rules:
            return lam
        names = ", ".join(repr(rule) for rule in rules)
        raise RequestError(f"{owner}: lam must be a number >= 0 or one of {names}, got {lam!r}.")
    if isinstance(lam, dict):
        unknown = sorted(set(lam) - {"per_client", "per_coefficient"})
        if unknown:
            raise RequestError(f"{owner}: lam takes per_client and per_coefficient, got {unknown[0]!r}.")
        lam = PerClientPenalty(
            *(None if lam.get(k) is None else tuple(lam[k]) for k in ("per_client", "per_coefficient"))
        )
    elif isinstance(lam, list | tuple):
        lam = PerClientPenalty(per_client=tuple(lam))
    values = [lam] if not isinstance(lam, PerClientPenalty) else [*(lam.per_client or ()), *(lam.per_coefficient or ())]
    for value in values:
        if not isinstance(value, int | float) or not value >= 0:
            raise RequestError(f"{owner}: lam must be >= 0, got {value}.")
    return float(lam) if isinstance(lam, int | float) else lam
