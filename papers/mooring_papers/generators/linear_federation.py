"""Gaussian random effects: linear clients whose coefficients vary around a shared vector.

    w ~ centre_scale N(0, I),  w_i ~ N(w, diag(spread^2)),  y = x'w_i + noise N(0, 1),  x ~ N(0, I)

The prior is known, so the Bayes oracle is too: it needs `truth.centre`, `truth.spread` and `truth.noise`.
With `intercept` there is one more coefficient, the last, that multiplies the constant 1; x has no column for it.
"""

from collections.abc import Sized
from dataclasses import dataclass

import numpy as np
import torch

from mooring.core.errors import RequestError
from mooring.data.clients import REGRESSION, Clients
from mooring.data.partitions import powerlaw_counts
from mooring_papers.generators.ground_truth import LinearTruth
from mooring_papers.generators.random_streams import (
    INPUTS_STREAM,
    assemble_clients,
    client_generators,
    require_known,
    require_nonnegative,
    shared_generator,
    size_weights,
    split_sizes,
)


@dataclass(frozen=True)
class LinearFederation:
    clients: int = 50
    samples: int | tuple[int, ...] = 40  # under a power law: the mean
    dim: int = 10
    spread: float | tuple[float, ...] = 0.5  # one for all coefficients, or one each
    noise: float = 1.0
    sizes: str = "equal"  # or "powerlaw"
    exponent: float = 1.0  # of the power law
    least: int = 4  # smallest number of samples under the power law
    intercept: bool = False
    centre_scale: float = 1.0
    validation: float = 0
    test: float = 0

    def make(self, seed: int = 0) -> Clients:
        require_known("LinearFederation", "sizes", self.sizes, ("equal", "powerlaw"))
        require_nonnegative("LinearFederation", noise=self.noise, centre_scale=self.centre_scale)
        d = self.dim + self.intercept
        if isinstance(self.spread, Sized) and len(self.spread) != d:
            raise RequestError(f"LinearFederation: spread lists {len(self.spread)} numbers for {d} coefficients.")
        spread = np.broadcast_to(np.asarray(self.spread, dtype=float), d)
        require_nonnegative("LinearFederation", **{f"spread[{k}]": s for k, s in enumerate(spread)})
        sizes = split_sizes(self._samples(seed), self.clients, self.validation, self.test)
        centre = self.centre_scale * shared_generator(seed).standard_normal(d)
        w = np.stack([centre + spread * rng.standard_normal(d) for rng in client_generators(seed, self.clients)])

        def draw(i, part, rng, n):
            x = rng.standard_normal((n, self.dim))
            constant = w[i, self.dim] if self.intercept else 0.0
            return x, x @ w[i, : self.dim] + constant + self.noise * rng.standard_normal(n)

        truth = LinearTruth(
            torch.from_numpy(w),
            size_weights(sizes),
            second_moment=torch.eye(d, dtype=torch.float64).expand(self.clients, d, d),
            noise=self.noise,
            centre=torch.from_numpy(centre),
            spread=torch.from_numpy(spread.copy()),
        )
        return assemble_clients(seed, sizes, draw, kind=REGRESSION, truth=truth, title="Gaussian random effects")

    def _samples(self, seed: int):
        if self.sizes == "equal":
            return self.samples
        if isinstance(self.samples, Sized):
            raise RequestError("LinearFederation: under a power law samples is one number, the mean.")
        total = self.clients * self.samples
        return powerlaw_counts(
            total, self.clients, self.exponent, shared_generator(seed, INPUTS_STREAM), least=self.least
        )
