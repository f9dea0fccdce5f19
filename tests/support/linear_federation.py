"""Linear clients with planted models around a shared vector, and their risks in closed form.

w ~ N(0, I),  w_i ~ N(w, spread^2 I),  y = x'w_i + noise N(0, 1),  x ~ N(0, I). A client's rows depend on the seed and
on its own number only.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mooring.core.seeds import generator
from mooring.data.clients import PARTS, REGRESSION, Clients, from_arrays


@dataclass(frozen=True)
class Truth:
    w: Tensor  # [m, d]

    @property
    def r_rms(self) -> float:
        return float((self.w - self.w.mean(0)).square().sum(1).mean().sqrt())

    def excess_risk(self, v: Tensor) -> Tensor:
        """[m]: 1/2 |v_i - w_i|^2, the loss being half the squared error; v is [m, d] or [d]."""
        return 0.5 * (v - self.w).square().sum(1)


@dataclass(frozen=True)
class LinearFederation:
    clients: int = 50
    samples: int = 40  # training rows of each client
    dim: int = 10
    spread: float = 0.5
    noise: float = 1.0
    validation: int = 0  # further rows of each client
    test: int = 0

    def make(self, seed: int = 0) -> Clients:
        center = generator(seed, "data", 0, 0).standard_normal(self.dim)
        truths, xs, ys = [], [], []
        for i in range(self.clients):
            truths.append(center + self.spread * generator(seed, "data", 1, i, 0).standard_normal(self.dim))
            for part, rows in enumerate(self._sizes()):
                rng = generator(seed, "data", 1, i, 2 + part)
                xs.append(rng.standard_normal((rows, self.dim)))
                ys.append(xs[-1] @ truths[i] + self.noise * rng.standard_normal(rows))
        parts = np.repeat(PARTS, self._sizes())
        width = len(PARTS)
        joined = [
            [np.concatenate(values[width * i : width * (i + 1)]) for i in range(self.clients)] for values in (xs, ys)
        ]
        truth = Truth(torch.from_numpy(np.stack(truths)))
        return from_arrays(*joined, parts=[parts] * self.clients, kind=REGRESSION, truth=truth, title="planted clients")

    def _sizes(self) -> tuple[int, int, int]:
        return self.samples, self.validation, self.test
