"""Bag-of-words users: short texts as word counts, each user with its own topics and its own use of words.

A text of class c by user i has `length` independent words, word v with probability

    theta_icv  ~  exp(-log(v + 1) + signal S_cv + topics T_iv + taste U_icv),  S, T, U ~ N(0, 1)

(Zipf's law, the class's words, the user's topics, the user's words for a class). With taste = 0 users share one
classifier up to its bias. x are the counts, classes are equally likely, and Bayes' rule is linear with weight_c =
log theta_ic and no bias. Two classes make a binary target.
"""

from dataclasses import dataclass

import numpy as np
import torch

from mooring.core.errors import RequestError
from mooring.data.clients import BINARY, CLASSES, Clients
from mooring_papers.generators.ground_truth import ClassTruth, flatten_parameters
from mooring_papers.generators.random_streams import (
    assemble_clients,
    client_generator,
    require_nonnegative,
    shared_generator,
    size_weights,
    split_sizes,
)


@dataclass(frozen=True)
class BagOfWords:
    clients: int = 50
    samples: int | tuple[int, ...] = 30
    words: int = 200
    length: int = 20
    classes: int = 2
    signal: float = 0.5
    topics: float = 0.5
    taste: float = 0.25
    validation: float = 0
    test: float = 0.2

    def make(self, seed: int = 0) -> Clients:
        require_nonnegative("BagOfWords", signal=self.signal, topics=self.topics, taste=self.taste)
        if self.classes < 2:
            raise RequestError(f"BagOfWords: classes must be at least 2, got {self.classes}.")
        sizes = split_sizes(self.samples, self.clients, self.validation, self.test)
        common = -np.log(np.arange(self.words) + 1.0)
        common = common + self.signal * shared_generator(seed).standard_normal((self.classes, self.words))
        theta = np.stack([self._user(client_generator(seed, i), common) for i in range(self.clients)])

        def draw(i, part, rng, n):
            y = rng.integers(0, self.classes, n)
            return rng.multinomial(self.length, theta[i][y]).astype(float), y

        weight = torch.from_numpy(np.log(theta)).mT  # [m, words, classes]
        bias = torch.zeros(self.clients, self.classes, dtype=torch.float64)
        return assemble_clients(
            seed,
            sizes,
            draw,
            kind=BINARY if self.classes == 2 else CLASSES,
            classes=tuple(str(c) for c in range(self.classes)),
            features=tuple(f"word {v}" for v in range(self.words)),
            truth=ClassTruth(flatten_parameters(weight, bias), size_weights(sizes), weight, bias),
            title="bag-of-words users",
        )

    def _user(self, rng: np.random.Generator, common: np.ndarray) -> np.ndarray:
        topics = self.topics * rng.standard_normal(self.words)
        score = common + topics + self.taste * rng.standard_normal(common.shape)
        score = np.exp(score - score.max(1, keepdims=True))
        return score / score.sum(1, keepdims=True)
