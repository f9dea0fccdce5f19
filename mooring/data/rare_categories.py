"""Levels that few rows have travel as fingerprints: a client does not name them, unless they are not rare in all.

    hidden   = hide(tally, rare, salt)                    at the client: levels with fewer than `rare` rows of its own
    wanted   = common(tallies, rare, salt)                at the server: fingerprints that `rare` rows or more have
    names    = spell(tally, wanted, salt)                 at the client: what those stand for
    tallies  = named(tallies, names, salt)                at the server

The schema is then that of the pooled table: levels with fewer rows in all are grouped as "other" there too. Whoever
guesses a level can check the guess against its fingerprint, the server included.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from mooring.data.column_statistics import ColumnStatistics, LevelCount, merge_statistics

MARK = "\x00"  # begins a fingerprint; no level read from a table does
Wanted = dict[str, list[str]]  # column -> fingerprints
LevelNames = dict[str, dict[str, str]]  # column -> fingerprint -> level


def fingerprint(salt: str, column: str, level: str) -> str:
    return MARK + hashlib.sha256("\x00".join((salt, column, level)).encode()).hexdigest()[:24]


def hide_rare_levels(tally: ColumnStatistics, rare: int, salt: str) -> ColumnStatistics:
    """A client's tally with its rare levels as fingerprints."""
    return renamed(tally, lambda column, level, rows: level if rows >= rare else fingerprint(salt, column, level))


def find_common_fingerprints(tallies: Iterable[ColumnStatistics], rare: int, salt: str) -> Wanted:
    """Fingerprints that enough rows have, and that no client has named."""
    wanted: Wanted = {}
    for column, levels in merge_statistics(tallies).levels.items():
        known = {fingerprint(salt, column, level) for level in levels if not level.startswith(MARK)}
        many = [
            one for one, level in levels.items() if one.startswith(MARK) and one not in known and level.rows >= rare
        ]
        if many:
            wanted[column] = many
    return wanted


def reveal_levels(tally: ColumnStatistics, wanted: Mapping[str, Iterable[str]], salt: str) -> LevelNames:
    """What wanted fingerprints stand for, as far as this client's rows know."""
    out: LevelNames = {}
    for column, prints in wanted.items():
        mine = {fingerprint(salt, column, level): level for level in tally.levels.get(column, {})}
        out[column] = {one: mine[one] for one in prints if one in mine}
    return out


def name_levels(
    tallies: Mapping[str, ColumnStatistics], names: Mapping[str, Mapping[str, str]], salt: str
) -> dict[str, ColumnStatistics]:
    """Clients' tallies with fingerprints named where that is known: by `names`, or by a client that names the level."""
    known: LevelNames = {column: dict(prints) for column, prints in names.items()}
    for column, levels in merge_statistics(tallies.values()).levels.items():
        spoken = {fingerprint(salt, column, level): level for level in levels if not level.startswith(MARK)}
        known[column] = known.get(column, {}) | spoken
    return {
        client: renamed(tally, lambda column, level, rows: known.get(column, {}).get(level, level))
        for client, tally in tallies.items()
    }


def renamed(tally: ColumnStatistics, name: Callable[[str, str, int], str]) -> ColumnStatistics:
    """The tally with other names for its levels; levels of one name are added up."""
    levels: dict[str, dict[str, LevelCount]] = {}
    for column, found in tally.levels.items():
        mine = levels.setdefault(column, {})
        for level, about in found.items():
            new = name(column, level, about.rows)
            before = mine.get(new, LevelCount(0, about.client))
            mine[new] = LevelCount(before.rows + about.rows, min(before.client, about.client))
    return replace(tally, levels=levels)
