"""Random draws of generators: sizes of the parts, random streams by client and purpose, and the assembled `Clients`.

Streams are split so that comparisons are paired: client i's rows depend only on the seed and on i, its training rows
do not change when test rows are added, and changing a spread rescales the same draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from mooring.core.errors import RequestError
from mooring.core.seeds import generator, generator_from_word, random_words
from mooring.data.clients import PARTS, Clients, from_arrays

SHARED, OWN = 0, 1
TRUTH_STREAM, INPUTS_STREAM, ROWS_STREAM = 0, 1, 2  # purposes of streams; ROWS_STREAM + k is the k-th part

Sizes = list[tuple[int, ...]]  # per client: rows of train, validation, test
Draw = Callable[[int, str, np.random.Generator, int], tuple[np.ndarray, np.ndarray]]


def shared_generator(seed: int, purpose: int = TRUTH_STREAM) -> np.random.Generator:
    """Return the stream of parameters that all clients share."""
    return generator(seed, "data", SHARED, purpose)


def client_generator(seed: int, client: int, purpose: int = TRUTH_STREAM) -> np.random.Generator:
    """Return a stream that depends on the client's number and on no other client."""
    return generator(seed, "data", OWN, client, purpose)


def client_generators(seed: int, clients: int, purpose: int = TRUTH_STREAM) -> Iterator[np.random.Generator]:
    """Return `client_generator` of each client, in order."""
    return map(generator_from_word, random_words(seed, "data", OWN, np.arange(clients), purpose))


def split_sizes(samples: int | Sequence[int], clients: int, validation: float, test: float) -> Sizes:
    """Return the rows of (train, validation, test) per client.

    `samples` is a number for all or one per client. A held-out part given as a whole number is that many extra rows
    for each client; given as a fraction below 1 it is that share of the client's samples, taken from training.
    """
    if clients < 1:
        raise RequestError(f"clients must be at least 1, got {clients}.")
    numbers = np.asarray(samples)
    per_client = [int(n) for n in (numbers if numbers.ndim else np.full(clients, numbers))]
    if len(per_client) != clients:
        raise RequestError(
            f"samples lists {len(per_client)} numbers for {clients} clients; give one number or one each."
        )
    sizes = []
    for i, n in enumerate(per_client):
        held_out = [_held_out(name, part, n) for name, part in (("validation", validation), ("test", test))]
        held_out_rows = sum(count for count, share in held_out if share)
        if n - held_out_rows < 1:
            raise RequestError(
                f"client {i} has {n} samples, {held_out_rows} of them held out; at least 1 must stay to train on."
            )
        sizes.append((n - held_out_rows, *(count for count, _ in held_out)))
    return sizes


def _held_out(name: str, part: float, n: int) -> tuple[int, bool]:
    """The rows of a held-out part, and whether they are a share of the n samples."""
    if 0 < part < 1:
        return round(part * n), True
    if part < 0 or part != int(part):
        raise RequestError(f"{name} must be a share below 1 or a whole number of rows, got {part}.")
    return int(part), False


def size_weights(sizes: Sizes) -> torch.Tensor:
    """p_i proportional to the training rows."""
    train = torch.tensor([n[0] for n in sizes], dtype=torch.float64)
    return train / train.sum()


def assemble_clients(seed: int, sizes: Sizes, draw: Draw, **metadata: Any) -> Clients:
    """Return clients whose rows of each part come from `draw(client, part, stream, rows) -> x, y`."""
    xs, ys, parts = [], [], []
    streams = zip(*(client_generators(seed, len(sizes), ROWS_STREAM + k) for k in range(len(PARTS))))
    for i, (counts, client_streams) in enumerate(zip(sizes, streams)):
        pairs = [draw(i, part, rng, n) for part, rng, n in zip(PARTS, client_streams, counts) if n]
        xs.append(np.concatenate([x for x, _ in pairs]))
        ys.append(np.concatenate([y for _, y in pairs]))
        parts.append(np.repeat(PARTS, counts))
    return from_arrays(xs, ys, parts=parts, **metadata)


def require_known(owner: str, field: str, value: str, names: Sequence[str]) -> None:
    """Refuse a word that is not one of `names`."""
    if value not in names:
        raise RequestError(f"{owner}: {field} must be one of {', '.join(names)}, got {value!r}.")


def require_nonnegative(owner: str, **fields: float) -> None:
    for field, value in fields.items():
        if not (np.isfinite(value) and value >= 0):
            raise RequestError(f"{owner}: {field} must be a number >= 0, got {value}.")
