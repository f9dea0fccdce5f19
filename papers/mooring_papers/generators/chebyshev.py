"""Chebyshev fitting: every client has one strip of the interval, and all estimate the entire function.

kernel, Section 7.4. f(x) = U_5(x) = 32 x^5 - 32 x^3 + 6 x on [-1, 1], features 1, x, ..., x^5, y = f(x) +
noise N(0, 1). Client i of m has an even grid of n points in [-1 + 2 (i-1)/m, -1 + 2 i/m), starting at the strip's
left end, so that all points together are -1 + 2 k/N, or (grid = "midpoint") half a step later.

Held-out rows are uniform on [-1, 1] for every client, and so is the truth's second moment.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mooring.core.errors import RequestError
from mooring.data.clients import REGRESSION, Clients
from mooring_papers.generators.ground_truth import LinearTruth
from mooring_papers.generators.random_streams import (
    assemble_clients,
    require_known,
    require_nonnegative,
    size_weights,
    split_sizes,
)

U5 = (0.0, 6.0, 0.0, -32.0, 0.0, 32.0)
POWERS = np.arange(len(U5))


@dataclass(frozen=True)
class Chebyshev:
    clients: int = 20
    samples: int | tuple[int, ...] = 10
    noise: float = 0.5
    grid: str = "left"  # or "midpoint"
    validation: int = 0  # extra rows: the grid itself is for training
    test: int = 0

    def make(self, seed: int = 0) -> Clients:
        require_known("Chebyshev", "grid", self.grid, ("left", "midpoint"))
        require_nonnegative("Chebyshev", noise=self.noise)
        for field, rows in (("validation", self.validation), ("test", self.test)):
            if 0 < rows < 1:
                raise RequestError(f"Chebyshev: {field} must be a whole number of extra rows, got {rows}.")
        sizes = split_sizes(self.samples, self.clients, self.validation, self.test)
        offset = 0.0 if self.grid == "left" else 0.5

        def draw(i, part, rng, n):
            if part == "train":
                point = -1 + 2 / self.clients * (i + (np.arange(n) + offset) / n)
            else:
                point = 2 * rng.random(n) - 1
            x = point[:, None] ** POWERS
            return x, x @ np.array(U5) + self.noise * rng.standard_normal(n)

        m = self.clients
        moments = torch.from_numpy(_moments()).expand(m, -1, -1) / 2
        w = torch.tensor(U5, dtype=torch.float64).repeat(m, 1)
        return assemble_clients(
            seed,
            sizes,
            draw,
            kind=REGRESSION,
            features=tuple(f"x^{k}" for k in POWERS),
            truth=LinearTruth(w, size_weights(sizes), second_moment=moments, noise=self.noise),
            title="Chebyshev polynomial U_5",
        )


def _moments() -> np.ndarray:
    """[6, 6]: the integrals of x^(a+b) over [-1, 1]."""
    total = POWERS[:, None] + POWERS
    return np.where(total % 2 == 0, 2 / (total + 1), 0.0)


def squared_distance(w: Tensor) -> Tensor:
    """[...]: the integral of (f_w - U_5)^2 over [-1, 1] for coefficients w [..., 6] (not divided by the length 2)."""
    gap = w - torch.tensor(U5, dtype=w.dtype)
    return torch.einsum("...a,ab,...b->...", gap, torch.from_numpy(_moments()).to(w.dtype), gap)
