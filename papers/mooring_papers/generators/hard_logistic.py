"""Logistic clients with bounded inputs: the instances behind the lower bound, and a smooth family around them.

alternative, Section 4.1 and Appendix A. The d coordinates of x are independent, with mean 0 and bounded by 1; y = 1
with probability sigmoid(x'w_i), labels 0 and 1. With N samples in all and p_i = n_i / N,

    hard     w_i = delta_i v_i,  v_i uniform on {-1, 1}^d
             delta_i = scale / sqrt(n_i)  if R^2 >= d m / N,  else  scale R / sqrt(d)
    smooth   w_i = w_0 + R u_i with sum_i p_i u_i = 0 and max_i |u_i| = 1, so that R_max = R

Symbols  R: radius    c of Appendix A: scale, at most 1 / (2 sqrt 2) for inputs bounded by 1 (the paper prints its
         lower bound with 2 sqrt 2, for which it is negative)
"""

from dataclasses import dataclass
from math import log2, sqrt

import numpy as np
import torch
from scipy.stats import qmc

from mooring.core.errors import RequestError
from mooring.data.clients import BINARY, Clients
from mooring_papers.generators.ground_truth import LogisticTruth, PointInputs
from mooring_papers.generators.random_streams import (
    assemble_clients,
    client_generator,
    require_known,
    require_nonnegative,
    shared_generator,
    size_weights,
    split_sizes,
)
from mooring_papers.generators.synthetic_logit import bernoulli

POINTS = 2**14  # points that stand for the input distribution in population risks


@dataclass(frozen=True)
class HardLogistic:
    clients: int = 20
    samples: int | tuple[int, ...] = 100
    dim: int = 5
    radius: float = 1.0
    family: str = "hard"  # "hard" or "smooth"
    inputs: str = "uniform"  # on [-1, 1]^d, or "rademacher": on {-1, 1}^d
    scale: float = 1 / (2 * sqrt(2))
    ridge: float = 0.0
    validation: float = 0
    test: float = 0

    def make(self, seed: int = 0) -> Clients:
        require_known("HardLogistic", "family", self.family, ("hard", "smooth"))
        require_known("HardLogistic", "inputs", self.inputs, ("uniform", "rademacher"))
        require_nonnegative("HardLogistic", radius=self.radius, ridge=self.ridge)
        if not 0 < self.scale <= 1 / (2 * sqrt(2)):
            raise RequestError(f"HardLogistic: scale must be in (0, {1 / (2 * sqrt(2)):.4f}], got {self.scale}.")
        sizes = split_sizes(self.samples, self.clients, self.validation, self.test)
        p = size_weights(sizes)
        truths = self._hard(seed, sizes) if self.family == "hard" else self._smooth(seed, p.numpy())

        def draw(i, part, rng, n):
            x = 2 * rng.random((n, self.dim)) - 1
            x = x if self.inputs == "uniform" else np.sign(x)
            return x, bernoulli(x @ truths[i], rng)

        inputs = PointInputs(torch.from_numpy(input_points(self.dim, self.inputs)))
        truth = LogisticTruth.solve(torch.from_numpy(truths), p, self.ridge, inputs)
        title = f"logistic clients, {self.family} family"
        return assemble_clients(seed, sizes, draw, kind=BINARY, classes=("0", "1"), truth=truth, title=title)

    def _hard(self, seed: int, sizes: list[tuple[int, ...]]) -> np.ndarray:
        n = np.array([size[0] for size in sizes])
        signs = np.stack([2.0 * client_generator(seed, i).integers(0, 2, self.dim) - 1 for i in range(self.clients)])
        is_far = self.radius**2 >= self.dim * self.clients / n.sum()
        delta = self.scale / np.sqrt(n) if is_far else np.full(self.clients, self.scale * self.radius / sqrt(self.dim))
        return delta[:, None] * signs

    def _smooth(self, seed: int, p: np.ndarray) -> np.ndarray:
        w0 = shared_generator(seed).standard_normal(self.dim) / sqrt(self.dim)
        if self.clients == 1 or self.radius == 0:
            return np.tile(w0, (self.clients, 1))
        u = np.stack([client_generator(seed, i).standard_normal(self.dim) for i in range(self.clients)])
        u /= np.linalg.norm(u, axis=1, keepdims=True)
        u -= p @ u
        return w0 + self.radius * u / np.linalg.norm(u, axis=1).max()


def input_points(dim: int, inputs: str) -> np.ndarray:
    """Points [k, dim] whose averages stand for expectations over x: all corners where there are few, else Sobol's
    sequence with every point's mirror image, so that odd moments vanish."""
    if inputs == "rademacher" and dim <= log2(POINTS):
        return 2.0 * ((np.arange(2**dim)[:, None] >> np.arange(dim)) & 1) - 1
    half = POINTS // 2
    x = 2 * (qmc.Sobol(dim, scramble=False).random(half) + 0.5 / half) - 1
    x = np.concatenate([x, -x])
    return x if inputs == "uniform" else np.sign(x)
