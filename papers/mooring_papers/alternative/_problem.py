"""Planted linear and logistic federations of equal clients, at a radius given in the theorems' own unit.

The unit of R_rms is noise/(mu sqrt(n)), the distance at which local and joint training are equally good for
quadratics (`theory/alternative.py`): in it the borders of `alternative` carry no constants.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from mooring.core.task import Task
from mooring.data.clients import Clients
from mooring.tasks.linear import Linear
from mooring.tasks.logistic import Logistic
from mooring_papers.exact_minimum import average_excess
from mooring_papers.generators import HardLogistic, LinearFederation

DIM = {"linear": 10, "logistic": 5}
RIDGE = 1e-2  # of logistic regression


class Problem(NamedTuple):
    clients: Clients
    task: Task
    mu: float  # smallest eigenvalue of the mean population Hessian at the truths
    noise: float  # rho: root mean square of a record's gradient at its truth

    @property
    def radius(self) -> float:
        """R_rms mu/noise, which the rules compare with 1/sqrt(n)."""
        return self.clients.truth.r_rms * self.mu / self.noise

    def risk(self, models: Tensor) -> float:
        """Return the average excess risk of models [m, d] or [d]."""
        return average_excess(self.clients.truth.excess_risk(models), self.clients.weights())


def problem(seed: int, task: str, clients: int, relative: float, samples: int, validation: int = 0) -> Problem:
    """Return clients whose true models have R_rms = relative * noise/(mu sqrt(n)), up to the ridge's shrinkage."""
    return MAKE[task](seed, clients, relative * unit(seed, task, clients, samples), samples, validation)


@lru_cache(maxsize=1)  # the same for all radii of a trial
def unit(seed: int, task: str, clients: int, samples: int) -> float:
    """Return the generator's radius at which R_rms of the planted truths is noise/(mu sqrt(n)), constants being those
    at 0."""
    near, far = (MAKE[task](seed, clients, radius, samples, 0) for radius in (0.0, 1.0))
    planted = getattr(far.clients.truth, "planted", far.clients.truth.w)  # before the ridge
    spread = float((planted - planted.mean(0)).square().sum(1).mean().sqrt())
    return near.noise / (near.mu * samples**0.5) / spread


def linear(seed: int, clients: int, radius: float, samples: int, validation: int) -> Problem:
    dim = DIM["linear"]
    data = LinearFederation(clients, samples, dim, radius / dim**0.5, validation=validation).make(seed)
    return Problem(data, Linear(dim, intercept=False), 1.0, data.truth.noise * dim**0.5)


def logistic(seed: int, clients: int, radius: float, samples: int, validation: int) -> Problem:
    dim = DIM["logistic"]
    make = HardLogistic(clients, samples, dim, radius, "smooth", "rademacher", ridge=RIDGE, validation=validation)
    data = make.make(seed)
    curvature = data.truth.inputs.hessian(data.truth.w).mean(0)
    mu = float(torch.linalg.eigvalsh(curvature)[0]) + RIDGE
    return Problem(data, Logistic(dim, intercept=False, ridge=RIDGE), mu, float(curvature.trace()) ** 0.5)


MAKE = {"linear": linear, "logistic": logistic}
