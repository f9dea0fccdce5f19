"""Partitions: a pooled data set divided among clients, as a list with each client's row numbers.

Every row goes to at most one client, the row numbers of a client are in random order, and equal seeds give equal
partitions. `y` [N] contains the labels.
"""

from __future__ import annotations

from collections.abc import Sized

import numpy as np

from mooring.core.errors import RequestError
from mooring.core.seeds import generator

IID, CLASSES, SHARDS, DIRICHLET, GROUPS, POWERLAW = range(6)  # one random stream each
MAX_REDRAWS = 200  # attempts at a Dirichlet partition in which every client has enough rows


def iid(y: Sized, clients: int, seed: int = 0) -> list[np.ndarray]:
    """Assign rows at random, in equal sizes up to one row; all rows are used."""
    rows = len(y)
    _require_rows(rows, clients)
    return np.array_split(generator(seed, "data", IID).permutation(rows), clients)


def powerlaw_sizes(y: Sized, clients: int, exponent: float = 1.0, seed: int = 0, *, least: int = 1) -> list[np.ndarray]:
    """Assign rows at random, in sizes that fall like rank^-exponent; all rows are used."""
    rng = generator(seed, "data", POWERLAW)
    sizes = powerlaw_counts(len(y), clients, exponent, rng, least=least)
    return np.split(rng.permutation(len(y)), np.cumsum(sizes)[:-1])


def classes_per_client(y: object, clients: int, classes: int, seed: int = 0) -> list[np.ndarray]:
    """Assign rows of exactly `classes` classes to every client; all rows are used.

    The number of blocks of a class is proportional to its rows, so that clients have similar sizes.
    """
    y = np.asarray(y)
    values, counts = np.unique(y, return_counts=True)
    if not 1 <= classes <= len(values):
        raise RequestError(f"classes per client must be 1 to {len(values)}, the classes in the data, got {classes}.")
    _require_rows(len(y), clients)
    if clients * classes < len(values):
        raise RequestError(
            f"{clients} clients with {classes} classes each cannot hold all {len(values)} classes; "
            f"take at least {-(-len(values) // classes)} clients."
        )
    blocks = _count_blocks(counts, clients, clients * classes)
    is_short = counts < blocks
    if is_short.any():
        c = int(np.argmax(is_short))
        raise RequestError(f"class {values[c]} has {counts[c]} rows but {blocks[c]} clients need some of it.")
    rng = generator(seed, "data", CLASSES)
    chunks = [list(np.array_split(rng.permutation(np.flatnonzero(y == value)), k)) for value, k in zip(values, blocks)]
    remaining = blocks.copy()
    rows_by_client: list[np.ndarray] = [np.empty(0, dtype=np.int64)] * clients
    for client in rng.permutation(clients):
        # Taking the classes with most blocks left always leaves enough for later clients (Gale and Ryser).
        chosen = np.lexsort((rng.random(len(remaining)), -remaining))[:classes]
        remaining[chosen] -= 1
        rows_by_client[client] = rng.permutation(np.concatenate([chunks[c].pop() for c in chosen]))
    return rows_by_client


def shards(y: np.ndarray, clients: int, shards_per_client: int, seed: int = 0) -> list[np.ndarray]:
    """Cut rows, sorted by label, into clients * shards_per_client equal shards, assigned without replacement.

    A client has about that many classes: fewer if it draws two shards of a class, more if a shard crosses a border.
    """
    if shards_per_client < 1:
        raise RequestError(f"shards per client must be at least 1, got {shards_per_client}.")
    _require_rows(len(y), clients, shards_per_client)
    rng = generator(seed, "data", SHARDS)
    order = np.lexsort((rng.random(len(y)), y))
    blocks = np.array_split(order, clients * shards_per_client)
    hands = rng.permutation(len(blocks)).reshape(clients, shards_per_client)
    return [rng.permutation(np.concatenate([blocks[k] for k in hand])) for hand in hands]


def dirichlet(
    y: object, clients: int, alpha: float, seed: int = 0, *, least: int = 1, equal_sizes: bool = False
) -> list[np.ndarray]:
    """Label skew from Dirichlet(alpha): alpha -> inf is iid, alpha -> 0 leaves each client about one class.

    By default each class is spread over the clients by proportions ~ Dirichlet(alpha, ..., alpha), which also makes
    sizes uneven (alpha -> 0: every class lies with one client); all rows are used, and proportions are redrawn until
    every client has `least` rows. With `equal_sizes` each client draws its class proportions ~ Dirichlet(alpha k q), q
    the k classes' shares of the data, and takes N // clients rows accordingly while they last.
    """
    if not (np.isfinite(alpha) and alpha > 0):
        raise RequestError(f"Dirichlet's alpha must be a number > 0, got {alpha}.")
    y = np.asarray(y)
    _require_rows(len(y), clients, least)
    rng = generator(seed, "data", DIRICHLET)
    pools = [rng.permutation(np.flatnonzero(y == value)) for value in np.unique(y)]
    if equal_sizes:
        return _dirichlet_equal(pools, clients, alpha, rng)
    for _ in range(MAX_REDRAWS):
        cuts = [np.cumsum(rng.dirichlet(np.full(clients, alpha)))[:-1] * len(pool) for pool in pools]
        blocks = [np.split(pool, np.round(cut).astype(int)) for pool, cut in zip(pools, cuts)]
        rows_by_client = [rng.permutation(np.concatenate([block[i] for block in blocks])) for i in range(clients)]
        if min(len(rows) for rows in rows_by_client) >= least:
            return rows_by_client
    raise RequestError(
        f"Dirichlet({alpha}) over {clients} clients left a client with fewer than {least} rows in {MAX_REDRAWS} draws; "
        f"use a larger alpha, fewer clients or equal sizes."
    )


def _dirichlet_equal(pools: list[np.ndarray], clients: int, alpha: float, rng: np.random.Generator) -> list[np.ndarray]:
    remaining = np.array([len(pool) for pool in pools])
    size = remaining.sum() // clients
    prior = alpha * len(pools) * remaining / remaining.sum()
    stacks = [list(pool) for pool in pools]
    rows_by_client = []
    for _ in range(clients):
        share = rng.dirichlet(np.maximum(prior, 1e-12))
        rows: list[int] = []
        while len(rows) < size:
            open_share = np.where(remaining > 0, share, 0.0)
            # A client whose classes are exhausted gets rows of the others, in proportion.
            odds = open_share if open_share.sum() > 0 else remaining.astype(float)
            take = np.minimum(apportion(odds, size - len(rows)), remaining)
            remaining = remaining - take
            for stack, count in zip(stacks, take):
                rows += [stack.pop() for _ in range(count)]
        rows_by_client.append(rng.permutation(np.array(rows, dtype=np.int64)))
    return rows_by_client


def by_group(group: object, *, clients: int | None = None, least: int = 1, seed: int = 0) -> list[np.ndarray]:
    """Return one client per value of `group` [N] with at least `least` rows, in the order of the values.

    `clients` of them are chosen at random; None takes all.
    """
    group = np.asarray(group)
    values, place, counts = np.unique(group, return_inverse=True, return_counts=True)
    large = np.flatnonzero(counts >= least)
    if clients is not None:
        if not 1 <= clients <= len(large):
            raise RequestError(
                f"{clients} clients were asked for, but {len(large)} of {len(values)} groups have at least {least} "
                f"rows; ask for 1 to {len(large)} clients or fewer rows a client."
            )
        large = np.sort(generator(seed, "data", GROUPS).choice(large, clients, replace=False))
    if not len(large):
        raise RequestError(f"none of the {len(values)} groups has {least} rows.")
    order = np.argsort(place, kind="stable")
    start = np.cumsum(counts) - counts
    return [order[start[k] : start[k] + counts[k]] for k in large]


def powerlaw_counts(
    total: int, clients: int, exponent: float, rng: np.random.Generator, *, least: int = 1
) -> np.ndarray:
    """Return sizes that add up to `total`: `least` each, the others in proportion to rank^-exponent, with random
    ranks."""
    if not (np.isfinite(exponent) and exponent >= 0):
        raise RequestError(f"the power law's exponent must be a number >= 0, got {exponent}.")
    _require_rows(total, clients, least)
    rank = rng.permutation(clients) + 1.0
    return least + apportion(rank**-exponent, total - clients * least)


def apportion(share: np.ndarray, total: int) -> np.ndarray:
    """Return whole numbers in proportion to `share` that add up to `total` (largest remainders)."""
    exact = np.asarray(share, dtype=float) / np.sum(share) * total
    counts = np.floor(exact).astype(np.int64)
    first = np.argsort(counts - exact, kind="stable")[: total - counts.sum()]
    counts[first] += 1
    return counts


def _count_blocks(counts: np.ndarray, clients: int, total: int) -> np.ndarray:
    """Return the blocks per class, in proportion to its rows, each class in 1..clients blocks, `total` blocks in
    all."""
    blocks = np.ones(len(counts), dtype=np.int64)
    for _ in range(total - len(counts)):
        blocks[np.argmax(np.where(blocks < clients, counts / blocks, -1.0))] += 1
    return blocks


def _require_rows(rows: int, clients: int, min_rows: int = 1) -> None:
    if clients < 1:
        raise RequestError(f"clients must be at least 1, got {clients}.")
    if rows < clients * min_rows:
        raise RequestError(f"{rows} rows are too few for {clients} clients with at least {min_rows} each.")
