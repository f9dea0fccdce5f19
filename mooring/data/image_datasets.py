"""Federations from public images and texts: a pool, a partition, a test protocol.

    P1   every client is tested on rows like its own: a share of its rows, class by class
    P2   every client is tested on one shared set with all classes: the data set's own test part, or a held-out share

Accuracies under the two cannot be compared: a local model of a client with 2 of 10 classes may reach 100% under P1
and at most about 20% under P2.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from mooring.core.cohort import Rows
from mooring.core.errors import RequestError
from mooring.core.field_checks import describe_unknown
from mooring.core.seeds import client_key, generator
from mooring.core.user_code import is_spec, load_plugin, load_python, plugin_names
from mooring.data import partitions
from mooring.data.benchmark_datasets import BenchmarkDataset, PixelScale, load_benchmark
from mooring.data.clients import CLASSES, Clients

DEFAULT_NUM_CLIENTS = 100  # unless the data set has its own
PROTOCOLS = ("P1", "P2")
PARTITIONS = ("classes", "shards", "dirichlet", "dirichlet_equal", "iid", "powerlaw", "group")


ENTRY_POINT_GROUP = "mooring.partitions"  # under which an installed package offers partitions


def load_image_dataset(
    name: str,
    data_dir: str | Path | None = None,
    *,
    partition: str | None = None,
    clients: int | None = None,
    classes_per_client: int = 2,
    alpha: float = 1.0,
    exponent: float = 1.0,
    protocol: str = "P1",
    test: float = 0.2,
    validation: float = 0.0,
    seed: int = 0,
    samples_per_client: int | None = None,
    least: int = 5,
    test_samples: int | None = None,
    only: Sequence[str] | None = None,
    flat: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Clients:
    """Load the public data set `name` as a federation.

    `partition`: "group" gives each writer, user or role its own rows and is the default where those are known; else
    "classes" (exactly `classes_per_client` classes each, the default), "shards" (as many shards each), "dirichlet" and
    "dirichlet_equal" (`alpha`), "iid" or "powerlaw" (`exponent`). `clients`: 100, or all groups with `least` rows.
    `only` keeps some classes. `samples_per_client` caps a client's rows, before `test` (P1, and P2 without a test part
    of its own) and `validation` shares are taken from them; `test_samples` caps the shared test set of P2.
    Images are standardized by the fixed constants of `benchmark_datasets`, and are vectors or (`flat = False`)
    [channel, row, column]; texts stay token codes, int64.
    """
    pool = load_benchmark(name, data_dir)
    _check(partition, protocol, test, validation)
    if only is not None:
        pool = _select_classes(pool, only)
    partition = partition or ("classes" if pool.group is None else "group")
    if partition == "group" and pool.group is None:
        raise RequestError(f"data set '{name}' does not know who made its rows; partition it otherwise than by group.")
    x, y, free, common = _sources(pool, partition, protocol, test, seed)
    rows_by_client = _assign_rows(
        partition, y[free], pool.group, clients, classes_per_client, alpha, exponent, least, seed
    )
    rows_by_client = [free[rows] for rows in rows_by_client]
    maker = pool.group if partition == "group" else None
    names = [f"client {i}" if maker is None else str(maker[rows[0]]) for i, rows in enumerate(rows_by_client)]
    split = [
        _split(rows, y[rows], samples_per_client, 0.0 if common is not None else test, validation, client_name, seed)
        for client_name, rows in zip(names, rows_by_client)
    ]
    trains, validations, tests = ([parts[k] for parts in split] for k in range(3))
    if protocol == "P2" and common is None:
        common = np.concatenate(tests)
    if common is not None:
        if test_samples is not None and test_samples < len(common):
            common = common[interleave_classes(y[common], generator(seed, "split"))[:test_samples]]
        tests = [common]

    def rows(index: list[np.ndarray]) -> Rows:
        positions = np.concatenate(index)
        size = torch.tensor([len(client_rows) for client_rows in index])
        values = _tensor(x[positions], pool.scale, flat, dtype)
        return Rows(values, torch.from_numpy(y[positions]), torch.cumsum(size, 0) - size, size)

    def share_rows(shared: Rows) -> Rows:
        """Return the same rows for every client, stored once."""
        return Rows(shared.x, shared.y, shared.start.expand(len(names)).clone(), shared.size.expand(len(names)).clone())

    tested = rows(tests)
    return Clients(
        tuple(names),
        rows(trains),
        rows(validations),
        share_rows(tested) if common is not None else tested,
        kind=CLASSES,
        classes=pool.classes,
        title=f"{name} ({pool.source}), {len(names)} clients, partition '{partition}', test protocol {protocol}",
    )


def interleave_classes(y: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return a random order in which every block of rows has about the proportions of the labels y.

    Rows of a class take random places at the quantiles (rank + u) / size, u uniform.
    """
    shuffled = rng.permutation(len(y))
    _, label, counts = np.unique(y[shuffled], return_inverse=True, return_counts=True)
    rank = np.empty(len(y), dtype=np.int64)
    start = np.cumsum(counts) - counts
    by_class = np.argsort(label, kind="stable")
    rank[by_class] = np.arange(len(y)) - start[label[by_class]]
    return shuffled[np.argsort((rank + rng.random(len(y))) / counts[label], kind="stable")]


def _sources(
    pool: BenchmarkDataset, partition: str, protocol: str, test: float, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """Return x, y, the rows that are assigned to clients, and the shared test rows (None: the clients' own)."""
    x, y, train = pool.x, pool.y, np.arange(len(pool.y))
    if pool.x_test is not None and (protocol == "P2" or pool.group is None):
        x, y = np.concatenate([x, pool.x_test]), np.concatenate([y, pool.y_test])
        return (x, y, train, np.arange(len(train), len(y))) if protocol == "P2" else (x, y, np.arange(len(y)), None)
    if protocol == "P1":
        return x, y, train, None
    if test == 0:
        raise RequestError("under P2 this data set needs a test share above 0: it has no test part of its own.")
    if partition == "group":  # the clients' held-out rows together
        return x, y, train, None
    order = interleave_classes(y, generator(seed, "split"))
    test_rows = max(round(test * len(y)), 1)
    return x, y, order[test_rows:], order[:test_rows]


def _check(partition: str | None, protocol: str, test: float, validation: float) -> None:
    if partition is not None and partition not in PARTITIONS and not is_spec(partition):
        offered = plugin_names(ENTRY_POINT_GROUP)
        if partition not in offered:
            raise RequestError(f"{describe_unknown('partition', partition, [*PARTITIONS, *offered])}.")
    if protocol not in PROTOCOLS:
        raise RequestError(f"protocol must be P1 (own test rows) or P2 (common test set), got {protocol!r}.")
    if not (test >= 0 and validation >= 0 and test + validation < 1):
        raise RequestError(
            f"test and validation are shares that leave some rows to train, got {test} and {validation}."
        )


def _select_classes(pool: BenchmarkDataset, only: Sequence[str]) -> BenchmarkDataset:
    """Return the rows of some classes, coded in the order of `only`."""
    unknown = [label for label in only if label not in pool.classes]
    if unknown:
        raise RequestError(f"class {unknown[0]!r} is not in the data; known are {', '.join(pool.classes)}.")
    code = np.full(len(pool.classes), -1)
    code[[pool.classes.index(label) for label in only]] = np.arange(len(only))

    def select(x, y):
        return (None, None) if x is None else (x[code[y] >= 0], code[y][code[y] >= 0])

    x, y = select(pool.x, pool.y)
    x_test, y_test = select(pool.x_test, pool.y_test)
    group = None if pool.group is None else pool.group[code[pool.y] >= 0]
    return pool._replace(x=x, y=y, x_test=x_test, y_test=y_test, group=group, classes=tuple(only))


def _assign_rows(partition, y, group, clients, classes_per_client, alpha, exponent, least, seed) -> list[np.ndarray]:
    if partition == "group":
        return partitions.by_group(group, clients=clients, least=least, seed=seed)
    clients = DEFAULT_NUM_CLIENTS if clients is None else clients
    if partition not in PARTITIONS:
        return _assign_by_plugin(partition, y, clients, seed)
    rows_by_client = {
        "classes": lambda: partitions.classes_per_client(y, clients, classes_per_client, seed),
        "shards": lambda: partitions.shards(y, clients, classes_per_client, seed),
        "dirichlet": lambda: partitions.dirichlet(y, clients, alpha, seed, least=least),
        "dirichlet_equal": lambda: partitions.dirichlet(y, clients, alpha, seed, equal_sizes=True),
        "iid": lambda: partitions.iid(y, clients, seed),
        "powerlaw": lambda: partitions.powerlaw_sizes(y, clients, exponent, seed, least=least),
    }[partition]()
    smallest = min(len(rows) for rows in rows_by_client)
    if smallest < least:
        raise RequestError(
            f"partition '{partition}' leaves a client of {clients} with {smallest} rows; at least {least} are needed: "
            f"take fewer clients or a smaller least."
        )
    return rows_by_client


def _assign_by_plugin(partition: str, y: np.ndarray, clients: int, seed: int) -> list[np.ndarray]:
    """The rows of each client by a function of the user's own or of an installed package: f(y, clients, seed)."""
    assign = load_python(partition, "partition") if is_spec(partition) else load_plugin(ENTRY_POINT_GROUP, partition)
    rows_by_client = [np.asarray(rows) for rows in assign(y, clients, seed)]
    every = np.concatenate(rows_by_client) if rows_by_client else np.empty(0, dtype=np.int64)
    if len(rows_by_client) != clients or any(len(rows) == 0 for rows in rows_by_client):
        counts = [len(rows) for rows in rows_by_client]
        raise RequestError(f"partition {partition!r} must give rows to each of {clients} clients, got {counts[:10]}.")
    if every.dtype.kind not in "iu" or every.min() < 0 or every.max() >= len(y) or len(np.unique(every)) < len(every):
        raise RequestError(f"partition {partition!r} must give row numbers from 0 to {len(y) - 1}, each at most once.")
    return rows_by_client


def _split(rows, y, max_rows, test, validation, name, seed) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A client's rows for train, validation and test; a share above 0 is at least one row."""
    order = rows[interleave_classes(y, generator(seed, "split", client_key(name)))]
    order = order if max_rows is None else order[:max_rows]
    tested, validated = (max(round(share * len(order)), 1) if share > 0 else 0 for share in (test, validation))
    if len(order) - tested - validated < 1:
        raise RequestError(f"client '{name}' has {len(order)} rows; too few to train, validate and test.")
    return order[tested + validated :], order[tested : tested + validated], order[:tested]


def _tensor(x: np.ndarray, scale: PixelScale | None, flat: bool, dtype: torch.dtype) -> torch.Tensor:
    if scale is None:
        return torch.from_numpy(x)
    pixels = torch.from_numpy(x).to(dtype)
    pixels = pixels[:, None] if pixels.ndim == 3 else pixels.movedim(-1, 1)  # [N, channel, row, column]
    mean, std = (torch.tensor(part, dtype=dtype)[:, None, None] for part in (scale.mean, scale.std))
    pixels = (pixels / scale.top - mean) / std
    return pixels.flatten(1) if flat else pixels
