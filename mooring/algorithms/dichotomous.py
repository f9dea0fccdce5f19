"""Dichotomous: one common model or everyone alone, whichever heterogeneity or validation rows favour.

alternative, Corollaries 3.1 and 4.1 (known_r), Section 3.3 (full_data); effect, Appendix C.3 (sample_split).

    w   = arg min_w  sum_i p_i L_i(w)                        v_i = arg min_v  L_i(v) + ridge/2 |v|^2

    known_r        w at all clients if R^2 <= ell_max m / (mu N), else everyone's v_i
    full_data      both from all training rows; the one with the smaller validation risk
    sample_split   v_i from the share `fraction` of a client's rows, w from everybody's other rows; then as full_data
    unit           "system": one choice for all, by the p-weighted risk; "client": each chooses; "auto": as the sources
                   do, each client after sample splitting (`effect`), the whole system otherwise (`alternative`)
                   known_r always chooses for all: R is R_rms for the system's mean risk, R_max for every client's

Symbols  w: Server.w    v_i or w: Client.v    radius: R    ell_max: sup of the loss
Limits   known_r with radius = 0 is Global, with a large one Local; fraction = 1 is Local, fraction = 0 is Global
Departs  validation rows choose, never test rows; a client without any follows the system's choice. radius = "auto" is
         estimated from the clients' fits; ell_max = "auto" is noise^2/mu, which makes the threshold the variance
         noise^2/(mu^2 n) of a local fit: a squared loss has no bound. ridge as in Local; fraction = 1/2 is ours.
         Without any validation rows only known_r can choose
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mooring.algorithms.base import Algorithm, Auto
from mooring.algorithms.hyperparameters import auto_ridge, check_ranges
from mooring.core.cohort import Rows
from mooring.core.errors import RequestError
from mooring.core.seeds import uniforms
from mooring.estimates.lambda_from_statistics import bound_curvature, require_federation
from mooring.theory.alternative import choose_model


class Server(NamedTuple):
    w: Tensor  # [d]


class Client(NamedTuple):
    v: Tensor  # [C, d]
    alone: Tensor  # [C] bool, the decision


@dataclass(frozen=True)
class Dichotomous(Algorithm):
    variant: str = "full_data"
    unit: str = "auto"
    ridge: Auto = "auto"
    fraction: float = 0.5
    radius: Auto = "auto"  # these three: known_r only
    mu: Auto = "auto"
    ell_max: Auto = "auto"

    paper: ClassVar[str] = "alternative, Corollary 3.1 and Section 3.3; effect, Appendix C.3"
    group: ClassVar[str] = "baseline"
    reveals: ClassVar[str] = "everything: all rows are pooled; an analysis for simulations"
    pooled: ClassVar[bool] = True
    full_participation: ClassVar[bool] = True
    required_capabilities: ClassVar[tuple[str, ...]] = ("prox", "solve")

    def __post_init__(self) -> None:
        check_ranges(
            self, variant=("known_r", "full_data", "sample_split"), unit=("auto", "system", "client"), fraction=(0, 1)
        )
        check_ranges(
            self, ridge=(0, None, "auto"), radius=(0, None, "auto"), mu=(0, None, "auto"), ell_max=(0, None, "auto")
        )

    @property
    def one_shot(self) -> bool:
        return True

    @property
    def required_statistics(self):
        estimate = self.variant == "known_r" and self.radius == "auto"
        return (("alone",) if self.ridge == "auto" else ()) + (("rules",) if estimate else ())

    def resolve(self, task, statistics):
        ridge = auto_ridge(statistics) if self.ridge == "auto" else self.ridge
        unit = self.unit
        if unit == "auto":
            unit = "client" if self.variant == "sample_split" else "system"
        radius, mu, ell_max = self.radius, self.mu, self.ell_max
        if self.variant != "known_r":
            radius, mu, ell_max = (0.0 if value == "auto" else value for value in (radius, mu, ell_max))
        if radius == "auto":
            found = require_federation("Dichotomous: radius = 'auto'", task, statistics).radii
            radius = found.rms.value if unit == "system" else found.most.value
        if "auto" in (mu, ell_max):
            known = bound_curvature("Dichotomous: variant = 'known_r'", task, statistics)
            mu = known.mu if mu == "auto" else mu
            ell_max = known.noise**2 / mu if ell_max == "auto" else ell_max
        return replace(self, unit=unit, ridge=ridge, radius=radius, mu=mu, ell_max=ell_max)

    def init(self, task, w0):
        return Server(w0), Client(w0, torch.zeros((), dtype=torch.bool))

    def client_update(self, server, client, task, data, round):
        own, shared = data.train, data.train
        if self.variant == "sample_split":
            own, shared = split_rows(data.train, data.keys, self.fraction, round.seed)
        zero = torch.zeros(1, task.dim, dtype=task.dtype)
        v, w = zero.expand(len(data), -1), server.w
        if int(own.size.sum()) > 0:
            v = own.each(lambda rows, _: task.prox(zero, self.ridge, rows.full(task)))
        if int(shared.size.sum()) > 0:
            w = task.solve(shared.pooled(data.p))[0]
        alone = (self.choose(v, w, task, data) | (int(shared.size.sum()) == 0)) & (own.size > 0)
        return Client(torch.where(alone[:, None], v, w), alone), (w - server.w).expand(len(data), -1)

    def choose(self, v, w, task, data):
        """[C]: who should keep its own model."""
        if self.variant == "known_r":
            verdict = choose_model(self.radius, self.mu, self.ell_max, data.train.size.numpy())
            return torch.full((len(data),), verdict == "alone")
        held = data.validation
        if int(held.size.sum()) == 0:
            raise RequestError(
                f"Dichotomous: variant = '{self.variant}' chooses on validation rows, but there are none; "
                "keep some, or use variant = 'known_r'."
            )
        gain = held.each(
            lambda rows, at: task.risk(w.expand(len(at), -1), rows.padded()) - task.risk(v[at], rows.padded())
        )
        system = ((data.p * gain).nansum() > 0).expand(len(data))
        return system if self.unit == "system" else torch.where(gain.isnan(), system, gain > 0)

    def server_update(self, server, mean, round):
        return Server(server.w + mean)

    def personal_model(self, server, client):
        return client.v


def split_rows(rows: Rows, keys: np.ndarray, fraction: float, seed: int) -> tuple[Rows, Rows]:
    """Each client's rows at random: the share `fraction`, rounded, and the others."""
    first, second = [], []
    for c, key in enumerate(keys):
        x, y = rows.of(c)
        draw = uniforms(seed, "algorithm", key, np.arange(len(y)))
        order = torch.from_numpy(np.argsort(draw, kind="stable"))
        cut = round(fraction * len(y))
        first.append((x[order[:cut]], y[order[:cut]]))
        second.append((x[order[cut:]], y[order[cut:]]))
    return Rows.stack(*map(list, zip(*first))), Rows.stack(*map(list, zip(*second)))
