"""How tightly each client is moored: the stiffness lam of the pull lam/2 |v - w|^2.

A stiffness is one number, one number per client, one per coefficient, or the product of the last two (a client's
noise over its rows, times a coefficient's inverse spread).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mooring.core.errors import RequestError


@dataclass(frozen=True)
class Moor:
    """lam_ij = per_client[i] * per_coefficient[j]; a missing factor is 1."""

    per_client: tuple[float, ...] | None = None
    per_coefficient: tuple[float, ...] | None = None


@dataclass(frozen=True, eq=False)
class Each:
    """One number of a run for all its clients, where clients of several runs are one cohort: a number per row [C]."""

    values: Tensor


Stiffness = float | Moor | Each


def stiffness(lam: Stiffness, index: Tensor, like: Tensor) -> Tensor:
    """lam for the clients at `index`, as [C, 1] or [C, d], ready to multiply [C, d]."""
    if isinstance(lam, Each):
        return lam.values.to(like.dtype)[:, None]
    if not isinstance(lam, Moor):
        return torch.full((len(index), 1), float(lam), dtype=like.dtype)
    rows = torch.ones(len(index), 1, dtype=like.dtype)
    if lam.per_client is not None:
        rows = torch.tensor(lam.per_client, dtype=like.dtype)[index][:, None]
    if lam.per_coefficient is not None:
        rows = rows * torch.tensor(lam.per_coefficient, dtype=like.dtype)
    return rows


def is_uniform(lam: Stiffness) -> bool:
    """Whether all clients and coefficients share one number, so that plain averaging is right."""
    return not isinstance(lam, Moor)


def parse_stiffness(owner: str, lam: Any, rules: tuple[str, ...] = ()) -> Stiffness | str:
    """A stiffness from a run file or the command line: a number, a rule's name, a list (per client) or a table."""
    if isinstance(lam, str):
        if lam in rules:
            return lam
        known = ", ".join(repr(rule) for rule in rules)
        raise RequestError(f"{owner}: lam must be a number >= 0 or one of {known}, got {lam!r}.")
    if isinstance(lam, dict):
        unknown = sorted(set(lam) - {"per_client", "per_coefficient"})
        if unknown:
            raise RequestError(f"{owner}: lam knows per_client and per_coefficient, got {unknown[0]!r}.")
        lam = Moor(*(None if lam.get(k) is None else tuple(lam[k]) for k in ("per_client", "per_coefficient")))
    elif isinstance(lam, list | tuple):
        lam = Moor(per_client=tuple(lam))
    values = [lam] if not isinstance(lam, Moor) else [*(lam.per_client or ()), *(lam.per_coefficient or ())]
    for value in values:
        if not isinstance(value, int | float) or not value >= 0:
            raise RequestError(f"{owner}: lam must be >= 0, got {value}.")
    return lam if isinstance(lam, Moor) else float(lam)
