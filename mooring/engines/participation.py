"""Participation: the clients of a round."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mooring.algorithms.base import AnyAlgorithm
from mooring.core.errors import RequestError
from mooring.core.seeds import add_mixed_counter, mix_counter, random_words, words_below
from mooring.engines.training_state import TrainingPlan

COHORT_DRAW_CLIENTS = 1 << 16  # clients of a large population whose random words are drawn at once


def sample_cohort(plan: TrainingPlan, keys: np.ndarray, t: int) -> Tensor:
    """Return the clients of round t: uniform, without replacement, the same for every method under one seed."""
    return draw_cohort(plan, mix_counter(keys), t)


def draw_cohort(plan: TrainingPlan, mixed_keys: np.ndarray, t: int) -> Tensor:
    """`sample_cohort`, given mix_counter(keys): the clients with the lowest random words."""
    state, m = random_words(plan.seed, "participation", t), len(mixed_keys)
    count = cohort_size(plan, m)
    share = (count + 6 * count**0.5 + 10) / m  # fewer than `count` words in this share are very unlikely
    places, random_values = _lowest_words(state, mixed_keys, share) if share < 0.5 else (np.zeros(0, int), np.zeros(0))
    if len(places) < count:
        places, random_values = np.arange(m), add_mixed_counter(state, mixed_keys)
    return torch.from_numpy(np.sort(places[np.argsort(random_values, kind="stable")[:count]]))


def _lowest_words(state: np.ndarray, mixed_keys: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions and random words of the clients with words in the lowest `share`, by blocks that fit the
    cache."""
    places, low_values, buffer = [], [], np.empty((2, min(COHORT_DRAW_CLIENTS, len(mixed_keys))), np.uint64)
    for begin in range(0, len(mixed_keys), COHORT_DRAW_CLIENTS):
        block = mixed_keys[begin : begin + COHORT_DRAW_CLIENTS]
        low, block_values = words_below(state, block, int(share * 2.0**64), buffer)
        places.append(begin + low)
        low_values.append(block_values)
    return np.concatenate(places), np.concatenate(low_values)


def cohort_size(plan: TrainingPlan, m: int) -> int:
    """Return the number of clients out of m in a round."""
    count = round(plan.participation * m) if plan.participation <= 1 else int(plan.participation)
    if count > m:
        raise RequestError(f"participation asks for {count} clients, but there are {m}.")
    return max(count, 1)


def refuse_partial_participation(algorithm: AnyAlgorithm, plan: TrainingPlan, m: int) -> None:
    """Refuse partial participation where the algorithm needs every client."""
    if cohort_size(plan, m) < m and (algorithm.full_participation or algorithm.pooled):
        raise RequestError(f"{algorithm.name} needs every client in every round; set participation = 1.")
