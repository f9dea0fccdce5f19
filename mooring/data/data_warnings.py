"""Suspicious values: codes for missing values, one level spelled twice, a column that reveals the target."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from mooring.data.clients import BINARY, CLASSES
from mooring.data.column_types import Values, is_missing
from mooring.data.cures import Cure
from mooring.data.tables import count_phrase
from mooring.data.target import Target

SENTINELS = (-9.0, -99.0, -999.0, -9999.0, -99999.0, 99.0, 999.0, 9999.0, 99999.0, 999999.0, -1e4, -1e6)
MAX_LEVELS_FOR_LEAK = 50
MIN_EXPLAINED_SHARE = 0.999  # share of the target's variation, or of its rows, that one column explains
MAX_MAJORITY_SHARE = 0.99  # a class with this share is predicted nearly always without any column
MIN_ORDERED_ROWS, MIN_ORDERED_SHARE = 4, 0.9  # rows of clients, and share of clients, that show an order in time
MAX_VALUES_PER_ROW = 2.0  # distinct values over all clients, at most, as a multiple of the largest client's rows
TIME_NAME = re.compile(r"(?i)\b(year|yr|date|day|days|week|month|quarter|time|visit|wave|period|hour|occasion)\b")
YES_WORDS = frozenset(
    [
        "yes",
        "y",
        "true",
        "ja",
        "j",
        "wahr",
        "oui",
        "o",
        "vrai",
        "sí",
        "si",
        "s",
        "verdadero",
        "sì",
        "vero",
        "sim",
        "1",
        "x",
    ]
)
NO_WORDS = frozenset(["no", "n", "false", "nein", "falsch", "non", "faux", "falso", "não", "nao", "nee", "0"])
MAX_LEVELS_FOR_TYPOS = 300
MIN_ROWS_OF_SPELLING, MIN_TYPO_RATIO = 10, 10  # rows of the right spelling: in all, and per row of the wrong one
MIN_WORD_LETTERS, MIN_LIKENESS = 4, 0.85
MIN_ROWS_FOR_LEAK, MAX_ROWS_FOR_LEAK = 30, 100_000  # of the test whether a column reveals the target


class Suspicion(NamedTuple):
    column: str
    sentence: str
    cures: tuple[Cure, ...] = ()


def find_leaks(columns: Mapping[str, Values], target: Target, name_of_target: str) -> Iterator[Suspicion]:
    """Yield every column that predicts the target almost perfectly."""
    for name, values in columns.items():
        codes = values.codes if isinstance(values, pd.Categorical) else values
        advice = f"use --drop '{name}', or --allow '{name}' if it is known before the target is."
        cures = (Cure("drop", name), Cure("allow", name))
        if (not isinstance(values, pd.Categorical) or target.classes) and np.array_equal(codes, target.y):
            yield Suspicion(name, f"Column '{name}' equals the target '{name_of_target}': {advice}", cures)
        elif predicts_perfectly(values, target):
            sentence = f"Column '{name}' predicts the target '{name_of_target}' almost perfectly: {advice}"
            yield Suspicion(name, sentence, cures)


def find_suspicious_values(columns: Mapping[str, Values], target: Target, name_of_target: str) -> Iterator[Suspicion]:
    """Yield categories that may be one, and numbers that may be codes for missing values."""
    for name, values in columns.items():
        if isinstance(values, pd.Categorical):
            for first, second in twin_levels(order_by_rows(values)):
                problem = f"Column '{name}': '{first}' and '{second}' differ in case or spaces only, but count as two"
                yield _suggest_merge(name, problem, second, first)
            if merges := merge_answers(values.categories):
                flags = " ".join(f'--merge-levels "{merge}"' for merge in merges)
                words = f"{len(values.categories)} words for yes and no count as so many values"
                cures = tuple(Cure("merge_levels", merge) for merge in merges)
                yield Suspicion(name, f"Column '{name}': {words}; {flags} makes them two.", cures)
            for rare, usual in find_typos(values):
                yield _suggest_merge(name, f"Column '{name}': '{rare}' may be a typing error of '{usual}'", rare, usual)
        elif suspect := sentinel(values):
            code, count = suspect
            sentence = (
                f"Column '{name}': {code:g} stands in {count_phrase(count, 'row')}, far from all other values; if it "
                f"means missing, leave those cells empty, or use --na={code:g}."
            )
            yield Suspicion(name, sentence, (Cure("na", f"{code:g}"),))
    classes = order_by_rows(pd.Categorical.from_codes(target.y, target.classes)) if target.classes else []
    for first, second in twin_levels(classes):
        problem = f"Target '{name_of_target}': classes '{first}' and '{second}' differ in case or spaces only"
        yield _suggest_merge(name_of_target, problem, second, first)


def _suggest_merge(column: str, problem: str, old: str, new: str) -> Suspicion:
    merge = f"{old.strip()}={new.strip()}"
    return Suspicion(column, f'{problem}; --merge-levels "{merge}" makes them one.', (Cure("merge_levels", merge),))


def find_typos(values: pd.Categorical) -> list[tuple[str, str]]:
    """Rare levels that differ in a letter from frequent ones: (rare, frequent)."""
    count = np.bincount(values.codes[values.codes >= 0], minlength=len(values.categories))
    if len(count) > MAX_LEVELS_FOR_TYPOS:
        return []
    levels = [str(level) for level in values.categories]
    usual = [level for level, n in zip(levels, count) if n >= MIN_ROWS_OF_SPELLING and is_word(level)]
    pairs = []
    for level, n in zip(levels, count):
        if n > 0 and is_word(level):
            frequent = [
                candidate
                for candidate in usual
                if n * MIN_TYPO_RATIO <= count[levels.index(candidate)] and candidate != level
            ]
            close = difflib.get_close_matches(level.casefold(), [o.casefold() for o in frequent], 1, MIN_LIKENESS)
            if close:
                candidate_level = next(o for o in frequent if o.casefold() == close[0])
                if normalize_level(candidate_level) != normalize_level(level):  # else they are twins
                    pairs.append((level, candidate_level))
    return pairs


def is_word(level: str) -> bool:
    """Return whether a level is long enough to be misspelled and has no digits."""
    return len(level) >= MIN_WORD_LETTERS and not any(character.isdigit() for character in level)


def find_time_order(columns: Mapping[str, Values], code: np.ndarray) -> str | None:
    """A column that orders most clients' rows in time: dates, or numbers that never repeat within a client and are
    called like a time, or run over the same whole numbers at all clients. None if there is none."""
    rows = np.bincount(code)
    is_long = rows >= MIN_ORDERED_ROWS
    if is_long.sum() < 2:
        return None
    for name, values in columns.items():
        if isinstance(values, pd.Categorical) or not (values == np.rint(values)).all():
            continue
        distinct = len(np.unique(values))
        if distinct < MIN_ORDERED_ROWS:
            continue
        order = np.lexsort((values, code))
        is_repeat = (np.diff(code[order]) == 0) & (np.diff(values[order]) == 0)
        repeats = np.bincount(code[order][1:][is_repeat], minlength=len(rows))
        if (repeats[is_long] == 0).mean() < MIN_ORDERED_SHARE:
            continue
        is_shared = distinct <= MAX_VALUES_PER_ROW * rows.max()
        has_few_gaps = np.ptp(values) + 1 <= MAX_VALUES_PER_ROW * distinct
        if TIME_NAME.search(name) or (is_shared and has_few_gaps and is_long.sum() > 2):
            return name
    return None


def sentinel(values: np.ndarray) -> tuple[float, int] | None:
    """Return a number such as -999 that repeats and is far from all other values, and its count."""
    finite = values[np.isfinite(values)]
    if len(finite) < MIN_ROWS_FOR_LEAK:
        return None
    for code in (finite.min(), finite.max()):
        count = int((finite == code).sum())
        others = finite[finite != code]
        if code in SENTINELS and count > 1 and len(others):
            gap, range_ = np.abs(others - code).min(), others.max() - others.min()
            if gap > range_ > 0:  # further away than all the others lie from each other
                return float(code), count
    return None


def merge_answers(levels: Iterable[str]) -> list[str]:
    """Return what makes several words for yes and no two levels, as "ja=yes"; empty if a level is another word."""
    texts = {str(level).strip(): str(level).strip().casefold() for level in levels}
    if len(texts) <= 2 or not all(word in YES_WORDS or word in NO_WORDS for word in texts.values()):
        return []
    goal = {True: "yes", False: "no"}
    return [f"{text}={goal[word in YES_WORDS]}" for text, word in texts.items() if text != goal[word in YES_WORDS]]


def order_by_rows(values: pd.Categorical) -> list[str]:
    """Return the levels, the most frequent first."""
    count = np.bincount(values.codes[values.codes >= 0], minlength=len(values.categories))
    return [str(values.categories[k]) for k in np.argsort(-count, kind="stable")]


def normalize_level(level: str) -> str:
    """Return a level without differences in case and spaces."""
    return " ".join(level.split()).casefold()


def twin_levels(levels: Iterable[str]) -> list[tuple[str, str]]:
    """Return pairs of levels that differ in case or spaces only, in the order of the levels."""
    first_levels: dict[str, str] = {}
    pairs = []
    for level in levels:
        normalized = normalize_level(level)
        if normalized in first_levels:
            pairs.append((first_levels[normalized], level))
        first_levels.setdefault(normalized, level)
    return pairs


def predicts_perfectly(values: Values, target: Target) -> bool:
    """Return whether one column predicts the target almost perfectly.

    Few levels: the most frequent class of each level (or its mean) explains nearly all. Many numbers: the correlation
    with a number is nearly 1; or, along the sorted column, the class changes hardly more often than there are classes.
    """
    present = np.flatnonzero(~is_missing(values) if isinstance(values, pd.Categorical) else np.isfinite(values))
    present = present[:: 1 + len(present) // MAX_ROWS_FOR_LEAK]
    y = np.asarray(target.y)[present]
    if len(y) < MIN_ROWS_FOR_LEAK:
        return False
    column: Any = values[present]
    number = np.asarray(column.codes if isinstance(column, pd.Categorical) else column, dtype=float)
    classes = target.kind in (BINARY, CLASSES)
    if classes and np.bincount(y).max() > MAX_MAJORITY_SHARE * len(y):
        return False
    level = np.unique(number, return_inverse=True)[1]
    num_levels = int(level.max()) + 1
    if num_levels <= min(MAX_LEVELS_FOR_LEAK, len(y) / 5):
        return explained_by_levels(level, y, classes) >= MIN_EXPLAINED_SHARE
    if isinstance(column, pd.Categorical):
        return False
    if not classes:
        sizes = np.abs(number).max(), np.abs(y).max()  # divided by, so that squares do not overflow
        return np.ptp(y) > 0 and np.corrcoef(number / sizes[0], y / sizes[1])[0, 1] ** 2 >= MIN_EXPLAINED_SHARE
    if num_levels < 0.9 * len(y):  # ties hide the order
        return False
    ordered = y[np.argsort(number, kind="stable")]
    runs = 1 + int((ordered[1:] != ordered[:-1]).sum())
    return runs <= len(np.unique(y)) + 2 * (1 - MIN_EXPLAINED_SHARE) * len(y)  # a misplaced row makes two runs more


def explained_by_levels(level: np.ndarray, y: np.ndarray, classes: bool) -> float:
    """The share of rows in the most frequent class of their level, or of the variance between the levels' means."""
    if classes:
        return float(pd.crosstab(level, y).to_numpy().max(1).sum() / len(y))
    y = y.astype(float) / max(np.abs(y).max(), np.finfo(float).tiny)
    count = np.bincount(level)
    mean = np.bincount(level, y) / count
    spread = ((y - y.mean()) ** 2).sum()
    return float((count * (mean - y.mean()) ** 2).sum() / spread) if spread > 0 else 0.0
