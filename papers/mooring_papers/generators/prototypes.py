"""Class prototypes: Gaussian clouds around one point per class, with a style shift and label skew per client.

    x = prototype_y + style_i + noise N(0, I),  style_i ~ style N(0, I),  y uniform over the client's classes

Prototypes have independent N(0, distance^2 / (2 dim)) entries, so two of them are about `distance` apart, and Bayes'
accuracy between two classes is about Phi(distance / (2 noise)). Bayes' rule at client i is linear,

    weight_c = prototype_c / noise^2,  bias_c = -(|prototype_c|^2 / 2 + prototype_c'style_i) / noise^2,

and -inf for classes that the client lacks. Truth.w holds the styles.
"""

from dataclasses import dataclass
from math import sqrt

import numpy as np
import torch

from mooring.core.errors import RequestError
from mooring.data.clients import CLASSES, Clients
from mooring_papers.generators.ground_truth import ClassTruth
from mooring_papers.generators.random_streams import (
    INPUTS_STREAM,
    assemble_clients,
    client_generator,
    require_nonnegative,
    shared_generator,
    size_weights,
    split_sizes,
)


@dataclass(frozen=True)
class Prototypes:
    clients: int = 20
    samples: int | tuple[int, ...] = 100
    dim: int = 64
    classes: int = 10
    classes_per_client: int | None = None  # None: all
    distance: float = 5.0
    style: float = 0.0
    noise: float = 1.0
    validation: float = 0
    test: float = 0.2

    def make(self, seed: int = 0) -> Clients:
        require_nonnegative("Prototypes", distance=self.distance, style=self.style, noise=self.noise)
        if self.noise == 0:
            raise RequestError("Prototypes: noise must be > 0, got 0.")
        k = self.classes if self.classes_per_client is None else self.classes_per_client
        if not 1 <= k <= self.classes:
            raise RequestError(f"Prototypes: classes_per_client must be 1 to {self.classes}, got {k}.")
        sizes = split_sizes(self.samples, self.clients, self.validation, self.test)
        points = self.distance / sqrt(2 * self.dim) * shared_generator(seed).standard_normal((self.classes, self.dim))
        styles = np.stack(
            [self.style * client_generator(seed, i).standard_normal(self.dim) for i in range(self.clients)]
        )
        client_classes = np.stack(
            [client_generator(seed, i, INPUTS_STREAM).permutation(self.classes)[:k] for i in range(self.clients)]
        )

        def draw(i, part, rng, n):
            y = client_classes[i][rng.integers(0, k, n)]
            return points[y] + styles[i] + self.noise * rng.standard_normal((n, self.dim)), y

        bias = -((points**2).sum(1) / 2 + styles @ points.T) / self.noise**2
        absent = np.ones_like(bias, dtype=bool)
        np.put_along_axis(absent, client_classes, False, axis=1)
        bias[absent] = -np.inf
        weight = torch.from_numpy(points.T / self.noise**2).expand(self.clients, -1, -1)
        return assemble_clients(
            seed,
            sizes,
            draw,
            kind=CLASSES,
            classes=tuple(str(c) for c in range(self.classes)),
            truth=ClassTruth(torch.from_numpy(styles), size_weights(sizes), weight, torch.from_numpy(bias)),
            title="class prototypes",
        )
