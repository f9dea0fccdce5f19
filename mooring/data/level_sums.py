"""Levels of categories from sums over clients: counts by keyed buckets, then the names of common levels.

Levels are counted in a table of `BUCKETS` buckets per column, by a hash with a secret that clients share and the
server does not have. Each level adds a code to its bucket, which a mean of different codes imitates once in 2^20 cases,
so that two levels in one bucket are detected, and counted again with another salt. The name of a level is added up, as
bytes, only if enough rows of at least `MIN_CLIENTS` clients have it (of both, if there are two clients).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import zlib
from collections.abc import Generator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from mooring.core.summing import Step, Sum
from mooring.data.column_types import MAX_LEVEL_BYTES
from mooring.data.schema_server import UNNAMED

BUCKETS = 4096  # of a column's levels
MIN_CLIENTS = 3  # that have a level whose name is shared
MAX_SALTS = 4  # tables by which levels that share a bucket are told apart
CODE_BITS = 20

SEPARATION = Step("schema: separation", "levels that shared a bucket", 1.0, times=2 * (MAX_SALTS - 1))

OwnLevels = dict[str, dict[str, int]]  # a client's rows by column and level
T = TypeVar("T")
Part = Generator[Sum, np.ndarray, T]


def add_up(step: Step, blocks: dict[str, np.ndarray]) -> Part[dict[str, np.ndarray]]:
    """Return the totals of some arrays; without a number no step is taken."""
    sizes = [block.size for block in blocks.values()]
    if not sum(sizes):
        return blocks
    total = yield Sum(step, np.concatenate([block.ravel() for block in blocks.values()])[None])
    parts = np.split(total, np.cumsum(sizes)[:-1])
    return {name: part.reshape(block.shape) for (name, block), part in zip(blocks.items(), parts)}


class Place(NamedTuple):
    """A bucket in use, of the table of a column's levels with a salt."""

    column: str
    salt: int
    bucket: int
    rows: int
    clients: int
    is_single: bool  # whether one level only is in it


Places = dict[str, dict[tuple[int, int], Place]]  # by column, salt and bucket


def hash_text(secret: bytes, *parts: str | int) -> tuple[int, int]:
    """Return a bucket, and a code: a number behind which its checksum stands, so that a mean of codes is no code."""
    digest = hmac.new(secret, json.dumps(parts).encode(), hashlib.sha256).digest()
    number = int.from_bytes(digest[2:6], "big") % 2**CODE_BITS
    return int.from_bytes(digest[:2], "big") % BUCKETS, number * 2**CODE_BITS + checksum(number)


def checksum(number: int) -> int:
    return zlib.crc32(number.to_bytes(4, "big")) % 2**CODE_BITS


def is_single(total: float, count: float) -> bool:
    """Return whether a sum of codes is one of equal codes."""
    if count <= 0 or total % count:
        return False
    number, check = divmod(int(total) // int(count), 2**CODE_BITS)
    return number < 2**CODE_BITS and check == checksum(number)


def count_levels(column: str, levels: Mapping[str, int], secret: bytes, salt: int = 0) -> np.ndarray:
    """Return [buckets, 3]: the rows, one for this client, and the code of each of its levels."""
    table = np.zeros((BUCKETS, 3))
    for level, rows in levels.items():
        bucket, code = hash_text(secret, salt, column, level)
        table[bucket] += (rows, 1, code)
    return table


def separate_levels(tables: dict[str, np.ndarray], own_levels: OwnLevels, secret: bytes) -> Part[Places]:
    """Return the places of all levels, from totals of tables. Levels that share a bucket are counted again with another
    salt."""
    places: Places = {column: {} for column in tables}
    for salt in range(MAX_SALTS):
        shared = {column: set[int]() for column in tables}
        for column, table in tables.items():
            for bucket in np.flatnonzero(table[:, 1]).tolist():
                rows, clients, code = table[bucket]
                place = Place(column, salt, bucket, int(rows), int(clients), is_single(code, clients))
                if place.is_single or salt == MAX_SALTS - 1:
                    places[column][salt, bucket] = place
                else:
                    shared[column].add(bucket)
        again = {
            column: {
                level: rows
                for level, rows in own_levels[column].items()
                if hash_text(secret, salt, column, level)[0] in buckets
            }
            for column, buckets in shared.items()
            if buckets
        }
        if not again:
            break
        own_levels = again
        tables = yield from add_up(
            SEPARATION, {column: count_levels(column, levels, secret, salt + 1) for column, levels in again.items()}
        )
    return places


def find_common(places: Places, rows: int, clients: int) -> list[Place]:
    """Return the places of levels whose names may be shared."""
    holders = min(MIN_CLIENTS, clients)
    everything = (place for of in places.values() for place in of.values())
    return [place for place in everything if place.is_single and place.rows >= rows and place.clients >= holders]


def sum_names(shared: Sequence[Place], own_levels: OwnLevels, places: Places, secret: bytes) -> np.ndarray:
    """Return [shared places, bytes + 1]: the client's levels as bytes, and their checksums."""
    index = {place: j for j, place in enumerate(shared)}
    names = np.zeros((len(shared), MAX_LEVEL_BYTES + 1))
    for column in places if shared else ():
        for level in own_levels[column]:
            keys = ((salt, hash_text(secret, salt, column, level)[0]) for salt in range(MAX_SALTS))
            key = next(key for key in keys if key in places[column])
            if (j := index.get(places[column][key])) is not None:
                text = level.encode()
                names[j, : len(text)] = list(text)
                names[j, -1] = zlib.crc32(text)
    return names


def name_levels(shared: Sequence[Place], names: np.ndarray, places: Places) -> dict[str, dict[str, int]]:
    """Return the rows of each level of each column; a level that keeps its name to its clients has a place for one."""
    levels: dict[str, dict[str, int]] = {column: {} for column in places}
    text_of = {place: decode_name(row / place.clients) for place, row in zip(shared, names)}
    for column, of in places.items():
        for place in of.values():
            text = text_of.get(place)
            levels[column][f"{UNNAMED}{place.salt} {place.bucket}" if text is None else text] = place.rows
    return levels


def decode_name(mean: np.ndarray) -> str | None:
    """Return a level from the mean of its clients' bytes and checksums; None if they are not the same."""
    if (mean != np.rint(mean)).any() or (mean[:-1] > 255).any():
        return None
    text = bytes(mean[:-1].astype(np.uint8)).rstrip(b"\0")
    return text.decode(errors="replace") if zlib.crc32(text) == mean[-1] else None
