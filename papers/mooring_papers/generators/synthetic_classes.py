"""Synthetic(gamma, beta): the multi-class benchmark whose clients differ in model and in inputs.

apfl, Appendix B.1, after Li et al., Federated optimization in heterogeneous networks, MLSys 2020. Client i has

    u_i ~ N(0, gamma),  entries of W_i [q, c] and b_i [c] ~ N(u_i, 1)     model
    B_i ~ N(0, beta),   entries of mean_i [q] ~ N(B_i, 1)                 inputs
    x ~ N(mean_i, diag(k^-1.2)),  y = argmax(W_i'x + b_i)                 rows; k^-1.2 are variances

Symbols  gamma: model_spread    beta: input_spread    q: dim    c: classes
Departs  gamma and beta are standard deviations as in the widely used generator; `spreads = "var"` reads them as
         variances, which the notation suggests. The paper calls (0, 0) iid, but its clients still differ (unit
         variances above): `iid = True` shares W, b and mean. Sizes are not printed: samples = "lognormal" gives
         n_i = floor(lognormal(4, 2)) + 50, at most `most`. The paper's 20 % validation part is our test part.
Truth    (W_i, b_i), the rule that made the labels; they are separable, so the log-loss has no finite minimiser.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
import torch

from mooring.data.clients import CLASSES, Clients
from mooring_papers.generators.ground_truth import ClassTruth, flatten_parameters
from mooring_papers.generators.random_streams import (
    INPUTS_STREAM,
    ROWS_STREAM,
    assemble_clients,
    client_generator,
    require_known,
    require_nonnegative,
    shared_generator,
    size_weights,
    split_sizes,
)

DECAY = 1.2
LOG_MEAN, LOG_STD, FLOOR = 4.0, 2.0, 50  # distribution of the sizes
SIZES = ROWS_STREAM + 3  # the stream of the sizes, after those of the three parts


@dataclass(frozen=True)
class SyntheticClasses:
    clients: int = 100
    samples: int | tuple[int, ...] | str = 100  # or "lognormal"
    dim: int = 60
    classes: int = 10
    model_spread: float = 0.0
    input_spread: float = 0.0
    spreads: str = "std"  # unit of the two spreads: "std" or "var"
    iid: bool = False
    most: int = 1000  # cap of lognormal sizes
    validation: float = 0
    test: float = 0.2

    def make(self, seed: int = 0) -> Clients:
        require_known("SyntheticClasses", "spreads", self.spreads, ("std", "var"))
        require_nonnegative("SyntheticClasses", model_spread=self.model_spread, input_spread=self.input_spread)
        samples: int | Sequence[int]
        if isinstance(self.samples, str):
            require_known("SyntheticClasses", "samples", self.samples, ("lognormal",))
            samples = [self._lognormal(seed, i) for i in range(self.clients)]
        else:
            samples = self.samples
        sizes = split_sizes(samples, self.clients, self.validation, self.test)
        models = [
            self._model(shared_generator(seed) if self.iid else client_generator(seed, i)) for i in range(self.clients)
        ]
        means = [
            self._mean(shared_generator(seed, INPUTS_STREAM) if self.iid else client_generator(seed, i, INPUTS_STREAM))
            for i in range(self.clients)
        ]
        deviation = np.arange(1, self.dim + 1) ** (-DECAY / 2)

        def draw(i, part, rng, n):
            weight, bias = models[i]
            x = means[i] + deviation * rng.standard_normal((n, self.dim))
            return x, (x @ weight + bias).argmax(1)

        weight, bias = (torch.from_numpy(np.stack(part)) for part in zip(*models))
        return assemble_clients(
            seed,
            sizes,
            draw,
            kind=CLASSES,
            classes=tuple(str(c) for c in range(self.classes)),
            truth=ClassTruth(flatten_parameters(weight, bias), size_weights(sizes), weight, bias),
            title=f"Synthetic({self.model_spread:g}, {self.input_spread:g})" + (", iid" if self.iid else ""),
        )

    def _std(self, spread: float) -> float:
        return spread if self.spreads == "std" else sqrt(spread)

    def _model(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        u = self._std(self.model_spread) * rng.standard_normal()
        return u + rng.standard_normal((self.dim, self.classes)), u + rng.standard_normal(self.classes)

    def _mean(self, rng: np.random.Generator) -> np.ndarray:
        return self._std(self.input_spread) * rng.standard_normal() + rng.standard_normal(self.dim)

    def _lognormal(self, seed: int, client: int) -> int:
        n = int(np.floor(client_generator(seed, client, SIZES).lognormal(LOG_MEAN, LOG_STD))) + FLOOR
        return min(n, self.most)
