"""Synthetic-Logit: logistic clients with Gaussian inputs and a prescribed spread of their truths.

effect, Section 6.1. Client i has

    x ~ N(v_i, diag(j^-1.2)),  v_i ~ N(0, I)             inputs
    w_i = w_0 + spread N(0, I),  w_0 ~ N(0, I)           planted truth; spread is the paper's R, per coordinate
    y ~ Bernoulli(sigmoid(x'w_i))                        labels 0 and 1

Departs  The paper prints y = argmax(sigmoid(.)), for which the logistic risk has no finite minimiser: labels are drawn.
         It prints w_i ~ N(0, R), under which spread = 0 makes all labels coin flips: `centred = False` gives that.
         The planted R per coordinate is about R sqrt(d) as the radius of Assumption 1: use `truth.r_max`.
         With a ridge (which gives strong convexity) the truth is the minimiser of the regularised population risk.
"""

from dataclasses import dataclass

import numpy as np
import torch

from mooring.data.clients import BINARY, Clients
from mooring_papers.generators.ground_truth import GaussianInputs, LogisticTruth
from mooring_papers.generators.random_streams import (
    INPUTS_STREAM,
    assemble_clients,
    client_generator,
    require_nonnegative,
    shared_generator,
    size_weights,
    split_sizes,
)

DECAY = 1.2  # the input variances are j^-DECAY


@dataclass(frozen=True)
class SyntheticLogit:
    clients: int = 20
    samples: int | tuple[int, ...] = 100
    dim: int = 10
    spread: float = 1.0
    ridge: float = 1e-2
    centred: bool = True  # around a common w_0 ~ N(0, I); False: around 0, as printed
    validation: float = 0
    test: float = 0

    def make(self, seed: int = 0) -> Clients:
        require_nonnegative("SyntheticLogit", spread=self.spread, ridge=self.ridge)
        sizes = split_sizes(self.samples, self.clients, self.validation, self.test)
        positions = range(self.clients)
        w0 = shared_generator(seed).standard_normal(self.dim) * self.centred
        planted = np.stack([w0 + self.spread * client_generator(seed, i).standard_normal(self.dim) for i in positions])
        mean = np.stack([client_generator(seed, i, INPUTS_STREAM).standard_normal(self.dim) for i in positions])
        variance = np.arange(1, self.dim + 1) ** -DECAY

        def draw(i, part, rng, n):
            x = mean[i] + np.sqrt(variance) * rng.standard_normal((n, self.dim))
            return x, bernoulli(x @ planted[i], rng)

        inputs = GaussianInputs(torch.from_numpy(mean), torch.from_numpy(np.tile(variance, (self.clients, 1))))
        truth = LogisticTruth.solve(torch.from_numpy(planted), size_weights(sizes), self.ridge, inputs)
        return assemble_clients(
            seed, sizes, draw, kind=BINARY, classes=("0", "1"), truth=truth, title="Synthetic-Logit"
        )


def bernoulli(logit: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Labels 1 with probability sigmoid(logit)."""
    return (rng.random(len(logit)) < 1 / (1 + np.exp(-logit))).astype(np.int64)
