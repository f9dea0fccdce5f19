"""Gains where no posterior exists (networks, kinked losses, very many parameters): held-out rows alone tell.

Client i's n_i held-out rows have losses that differ between two models by d_i on average, with standard deviation u_i
over rows (steadied by all clients'). The effects theta_i = gain_i / u_i are draws from N(mu, t^2) over the clients,
each observed with error 1/sqrt(n_i); mu and t are integrated, t on a grid: an estimate of t that happens to be 0 would
decide about all clients at once. Effects, not gains, have one law: a client whose models differ more has both larger
gains and larger errors, and weights by error would then be weights by gain.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mooring.advice.calibrate import Witness
from mooring.advice.gain import Gain

STEADY = 10.0  # rows' worth of everybody's variance that a client's own is steadied by
SPREADS = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0)  # t, in a typical client's error; half-Cauchy prior


def steadied_error(error: Tensor, rows: Tensor) -> Tensor:
    """[m]: standard errors of the mean differences, with row variances steadied by all clients."""
    n = rows.double()
    own = error.double() ** 2 * n
    freedom = (n - 1).clamp(min=0)
    pooled = (freedom * torch.nan_to_num(own)).sum() / freedom.sum().clamp(min=1)
    return ((freedom * torch.nan_to_num(own) + STEADY * pooled) / (freedom + STEADY) / n.clamp(min=1)).sqrt()


def held_out_gain(seen: Witness) -> Gain:
    """Every client's gain from `observed`, `error` and `rows` alone; a client without rows has the others' law."""
    n = seen.rows.double()
    error = steadied_error(seen.error, seen.rows)
    unit = torch.where(n > 0, error * n.clamp(min=1).sqrt(), 0.0)
    typical = unit[n > 0].mean() if bool((n > 0).any()) else unit.sum()
    unit = torch.where(n > 0, unit, typical)
    known = (n > 0) & (unit > 0) & torch.isfinite(seen.observed)
    if not bool(known.any()):
        nothing = torch.zeros(1, len(n), dtype=torch.float64)
        one = torch.ones(1, dtype=torch.float64)
        return Gain(
            one[:, None].expand(1, len(n)), nothing, nothing, nothing[0], one, torch.zeros_like(one), nothing[0]
        )
    effect, noise = torch.where(known, seen.observed / unit, 0.0), 1 / n.clamp(min=1)
    t2 = (torch.tensor(SPREADS, dtype=torch.float64)[:, None] ** 2) * noise[known].median()  # [t, 1]
    precision = torch.where(known, 1 / (t2 + noise), 0.0)  # [t, m]
    total = precision.sum(1, keepdim=True)
    centre = (precision * effect).sum(1, keepdim=True) / total
    fit = -0.5 * (torch.where(known, (t2 + noise).log(), 0.0) + precision * (effect - centre) ** 2).sum(1)
    edges = torch.tensor(SPREADS, dtype=torch.float64)
    width = torch.cat([(edges[1:2] - edges[:1]) / 2, (edges[2:] - edges[:-2]) / 2, (edges[-1:] - edges[-2:-1]) / 2])
    prior = width / (1 + edges**2)
    weight = torch.softmax(prior.log() + fit - 0.5 * total[:, 0].log(), 0)
    own = torch.where(known, t2 / (t2 + noise), 0.0)
    mean = unit * (centre + own * (effect - centre))
    spread = torch.where(known, own * noise, t2) + (1 - own) ** 2 / total
    share = n / n.sum()
    shared = ((1 - own) * unit) @ share
    none = torch.zeros_like(unit)
    together = shared**2 / total[:, 0]
    return Gain(weight[:, None].expand(-1, len(n)), mean, unit**2 * spread, noise * unit**2, weight, together, none)
