"""Rare levels are sent as fingerprints: a client names them only if they are not rare over all clients.

    hidden   = hide_rare_levels(tally, rare, salt)             client: levels with fewer than `rare` of its rows
    common   = find_common_fingerprints(tallies, rare, salt)   server: fingerprints with at least `rare` rows
    names    = reveal_levels(tally, common, salt)              client: the levels of these
    tallies  = name_levels(tallies, names, salt)               server

The schema is then that of the pooled table: levels with fewer rows in all are grouped as "other" there too. Anyone who
guesses a level, including the server, can check the guess against its fingerprint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from mooring.data.column_statistics import ColumnStatistics, LevelCount, merge_statistics

MARK = "\x00"  # begins a fingerprint; no level read from a table does
Fingerprints = dict[str, list[str]]  # column -> fingerprints
LevelNames = dict[str, dict[str, str]]  # column -> fingerprint -> level


def fingerprint(salt: str, column: str, level: str) -> str:
    return MARK + hashlib.sha256("\x00".join((salt, column, level)).encode()).hexdigest()[:24]


def hide_rare_levels(tally: ColumnStatistics, rare: int, salt: str) -> ColumnStatistics:
    """Return a client's tally with its rare levels as fingerprints."""
    return rename_levels(tally, lambda column, level, rows: level if rows >= rare else fingerprint(salt, column, level))


def find_common_fingerprints(tallies: Iterable[ColumnStatistics], rare: int, salt: str) -> Fingerprints:
    """Return fingerprints with enough rows that no client has named."""
    common: Fingerprints = {}
    for column, levels in merge_statistics(tallies).levels.items():
        named = {fingerprint(salt, column, level) for level in levels if not level.startswith(MARK)}
        frequent = [
            key for key, level in levels.items() if key.startswith(MARK) and key not in named and level.rows >= rare
        ]
        if frequent:
            common[column] = frequent
    return common


def reveal_levels(tally: ColumnStatistics, requested: Mapping[str, Iterable[str]], salt: str) -> LevelNames:
    """Return the levels of requested fingerprints that this client has."""
    out: LevelNames = {}
    for column, prints in requested.items():
        own_levels = {fingerprint(salt, column, level): level for level in tally.levels.get(column, {})}
        out[column] = {key: own_levels[key] for key in prints if key in own_levels}
    return out


def name_levels(
    tallies: Mapping[str, ColumnStatistics], names: Mapping[str, Mapping[str, str]], salt: str
) -> dict[str, ColumnStatistics]:
    """Return clients' tallies with fingerprints replaced by known names: from `names`, or from a client that names
    the level."""
    names_by_column: LevelNames = {column: dict(prints) for column, prints in names.items()}
    for column, levels in merge_statistics(tallies.values()).levels.items():
        named = {fingerprint(salt, column, level): level for level in levels if not level.startswith(MARK)}
        names_by_column[column] = names_by_column.get(column, {}) | named
    return {
        client: rename_levels(tally, lambda column, level, rows: names_by_column.get(column, {}).get(level, level))
        for client, tally in tallies.items()
    }


def rename_levels(tally: ColumnStatistics, name: Callable[[str, str, int], str]) -> ColumnStatistics:
    """Return the tally with other names for its levels; counts of equal names are added up."""
    levels: dict[str, dict[str, LevelCount]] = {}
    for column, counts in tally.levels.items():
        new_counts = levels.setdefault(column, {})
        for level, count in counts.items():
            new = name(column, level, count.rows)
            before = new_counts.get(new, LevelCount(0, count.client))
            new_counts[new] = LevelCount(before.rows + count.rows, min(before.client, count.client))
    return replace(tally, levels=levels)
