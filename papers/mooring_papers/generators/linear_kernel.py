"""Linear clients of `kernel`: equal or shifted true models, full or degenerate inputs.

kernel, Sections 6.2.2 and 7.1-7.3. y = x'theta_i + noise N(0, 1), theta* ~ N(0, I), and max_ij |theta_i - theta_j| =
gap.

    mode            theta_i for a gap (the paper's Gamma) and a random unit vector u
    probe_vs_rest   theta* at the probe client, theta* + gap u at all others
    probe_moved     theta* + gap u at the probe client, theta* at all others
    two_cluster     theta* - gap/2 u at even clients, theta* + gap/2 u at odd ones
    gaussian        theta* + independent Gaussian vectors, rescaled

    design          rows of client i
    full            N(0, I)
    sparse          N(0, d/r I_E), E a random set of r coordinates                         Section 7.3
    subspace        sqrt(d/r) U f,  f ~ N(0, I_r), U [d, r] random orthonormal             Example 2
    orthogonal      the r = n rows of sqrt(d) U'                                           Example 1

Symbols  Gamma: gap    r_i: rank    sigma: noise
Departs  The paper does not say how theta_i follow from Gamma; with probe_vs_rest the probe's norm, on which its
         threshold depends, stays that of theta*. Held-out rows of the orthogonal design come from the subspace design.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from mooring.core.errors import RequestError
from mooring.data.clients import REGRESSION, Clients
from mooring_papers.generators.ground_truth import LinearTruth
from mooring_papers.generators.random_streams import (
    INPUTS_STREAM,
    assemble_clients,
    client_generator,
    require_known,
    require_nonnegative,
    shared_generator,
    size_weights,
    split_sizes,
)

MODES = ("probe_vs_rest", "gaussian", "probe_moved", "two_cluster")
DESIGNS = ("full", "sparse", "subspace", "orthogonal")
SCARCE_AND_RICH = (50,) * 10 + (500,) * 10  # sizes of Sections 7.2 and 7.3


@dataclass(frozen=True)
class LinearKernel:
    clients: int = 25
    samples: int | tuple[int, ...] = 500
    dim: int = 100
    noise: float = 0.5
    gap: float = 0.0
    mode: str = "probe_vs_rest"
    probe: int = 0
    design: str = "full"
    rank: int | tuple[int, ...] | None = None  # r, one for all or one each; None: dim
    validation: float = 0
    test: float = 0

    def make(self, seed: int = 0) -> Clients:
        require_known("LinearKernel", "mode", self.mode, MODES)
        require_known("LinearKernel", "design", self.design, DESIGNS)
        require_nonnegative("LinearKernel", noise=self.noise, gap=self.gap)
        if not 0 <= self.probe < self.clients:
            raise RequestError(f"LinearKernel: probe must be 0 to {self.clients - 1}, got {self.probe}.")
        sizes = split_sizes(self.samples, self.clients, self.validation, self.test)
        theta = self._truths(seed)
        roots = [self._root(client_generator(seed, i, INPUTS_STREAM), r) for i, r in enumerate(self._ranks(sizes))]

        def draw(i, part, rng, n):
            root = roots[i]
            fixed = self.design == "orthogonal" and part == "train"
            x = np.sqrt(n) * root.T if fixed else rng.standard_normal((n, root.shape[1])) @ root.T
            return x, x @ theta[i] + self.noise * rng.standard_normal(n)

        moments = torch.from_numpy(np.stack([root @ root.T for root in roots]))
        truth = LinearTruth(torch.from_numpy(theta), size_weights(sizes), second_moment=moments, noise=self.noise)
        title = f"linear clients, {self.design} design, truths {self.gap:g} apart"
        return assemble_clients(seed, sizes, draw, kind=REGRESSION, truth=truth, title=title)

    def _ranks(self, sizes: list[tuple[int, ...]]) -> list[int]:
        rank = self.dim if self.rank is None else self.rank
        ranks = list(rank) if isinstance(rank, Iterable) else [rank] * self.clients
        if len(ranks) != self.clients:
            raise RequestError(f"LinearKernel: rank lists {len(ranks)} numbers for {self.clients} clients.")
        for i, r in enumerate(ranks):
            if not 1 <= r <= self.dim:
                raise RequestError(f"LinearKernel: rank must be 1 to {self.dim}, got {r}.")
            if self.design == "orthogonal" and r != sizes[i][0]:
                raise RequestError(
                    f"LinearKernel: the orthogonal design needs as many rows as its rank; client {i} has "
                    f"{sizes[i][0]} rows and rank {r}."
                )
        return ranks

    def _root(self, rng: np.random.Generator, r: int) -> np.ndarray:
        """A factor A [d, r] of the second moment A A' of a client's rows."""
        if self.design == "full":
            return np.eye(self.dim)
        if self.design == "sparse":
            return np.sqrt(self.dim / r) * np.eye(self.dim)[:, rng.permutation(self.dim)[:r]]
        return np.sqrt(self.dim / r) * np.linalg.qr(rng.standard_normal((self.dim, r)))[0]

    def _truths(self, seed: int) -> np.ndarray:
        common = shared_generator(seed).standard_normal(self.dim)
        u = shared_generator(seed, INPUTS_STREAM).standard_normal(self.dim)
        u /= np.linalg.norm(u)
        probe = np.arange(self.clients)[:, None] == self.probe
        if self.mode == "gaussian" and self.clients > 1:
            z = np.stack([client_generator(seed, i).standard_normal(self.dim) for i in range(self.clients)])
            return common + self.gap / max(np.linalg.norm(z - row, axis=1).max() for row in z) * z
        if self.mode == "two_cluster":
            return common + self.gap * (np.arange(self.clients)[:, None] % 2 - 0.5) * u
        return common + self.gap * (probe if self.mode == "probe_moved" else ~probe) * u


def stationarity_setup() -> LinearKernel:
    """Section 7.1: one truth, 25 clients with 500 rows each."""
    return LinearKernel()


def model_heterogeneity(gap: float, mode: str = "probe_vs_rest", probe: int = 0) -> LinearKernel:
    """Section 7.2: clients 0-9 have 50 rows, clients 10-19 have 500."""
    return LinearKernel(clients=20, samples=SCARCE_AND_RICH, gap=gap, mode=mode, probe=probe)


def covariate_heterogeneity(rank: int) -> LinearKernel:
    """Section 7.3: as 7.2 with one truth and random supports of `rank` coordinates."""
    return LinearKernel(clients=20, samples=SCARCE_AND_RICH, design="sparse", rank=rank)
