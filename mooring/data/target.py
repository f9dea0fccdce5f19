"""The target column: what kind it is, its classes, its numbers."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import pandas as pd
from pandas.api import types

from mooring.core.errors import RequestError
from mooring.data.clients import BINARY, CLASSES, COUNT, REGRESSION
from mooring.data.columns import NUMBER, as_text, is_text, kind_of, read_values
from mooring.data.tables import Place, listing

KINDS = (REGRESSION, BINARY, CLASSES, COUNT)
FEW_VALUES, SMALL_VALUE = 10, 20  # whole numbers that are at most so many and so large may be codes of classes
QUANTITY = re.compile(
    r"(?i)count|number|score|points|rating|age|year|month|week|day|hour|time|amount|price|cost|size|length|visits"
    r"|^(n|nr|no|num)([_. ]|$)"
)


class Target(NamedTuple):
    kind: str
    y: np.ndarray  # class codes (int64), or numbers as they are (float64)
    classes: tuple[str, ...]
    notes: list[str]


def read_target(series: pd.Series, kind: str, place: Place, title: str) -> Target:
    """The target's values as `kind`, or as the kind that fits them best ("auto").

    Auto: text, booleans and columns with two values are classes; so are up to ten small whole numbers, unless the
    column's name speaks of a quantity; every other number is a regression target.
    """
    if kind not in (*KINDS, "auto"):
        raise RequestError(f"the target's kind must be one of {listing(('auto', *KINDS))}, got {kind!r}.")
    name = series.name
    empty = np.flatnonzero(series.isna())
    if len(empty):
        raise RequestError(
            f"{place(empty[0])}, target column '{name}': the value is missing, as in {len(empty)} of {len(series)} "
            "rows; drop the rows without a target."
        )
    notes = []
    found = choose_kind(series) if kind == "auto" else kind
    if kind == "auto" and found == CLASSES and types.is_integer_dtype(series):
        notes.append(
            f"Target '{name}' has {series.nunique()} different whole numbers and was taken as classes; "
            f"set its kind to 'regression' if they are amounts."
        )
    if found in (BINARY, CLASSES):
        text = as_text(series)
        classes = tuple(text.categories)
        refuse_classes(classes, found, len(series), f"{title}: target column '{name}'")
        if found == BINARY and classes != ("0", "1"):
            notes.append(f"Target '{name}': 1 stands for '{classes[1]}', 0 for '{classes[0]}'.")
        return Target(found, text.codes.astype(np.int64), classes, notes)
    y = read_values(series, NUMBER, place)
    if y.min() == y.max():
        raise RequestError(f"{title}: target column '{name}' is {y[0]:g} in every row; there is nothing to learn.")
    if found == COUNT:
        wrong = np.flatnonzero((y < 0) | (y != np.floor(y)))
        if len(wrong):
            raise RequestError(
                f"{place(wrong[0])}, target column '{name}': {y[wrong[0]]:g} is not a count; "
                "counts are whole numbers from 0 on."
            )
    return Target(found, y, (), notes)


def choose_kind(series: pd.Series) -> str:
    many = series.nunique()
    if many <= 2:
        return BINARY
    if types.is_bool_dtype(series) or (is_text(series) and kind_of(series) != NUMBER):
        return CLASSES
    codes = (
        types.is_integer_dtype(series)
        and many <= FEW_VALUES
        and series.min() >= 0
        and series.max() <= SMALL_VALUE
        and not QUANTITY.search(str(series.name))
    )
    return CLASSES if codes else REGRESSION


def refuse_classes(classes: tuple[str, ...], kind: str, rows: int, where: str) -> None:
    if len(classes) == 1:
        raise RequestError(f"{where} holds one class only, '{classes[0]}'; at least two are needed.")
    if kind == BINARY and len(classes) > 2:
        raise RequestError(f"{where} holds {len(classes)} values ({listing(classes, 5)}); a binary target has two.")
    if len(classes) > max(10, rows / 2):
        raise RequestError(f"{where} holds {len(classes)} classes in {rows} rows; it looks like a key, not a target.")


def known_target(series: pd.Series, kind: str, classes: tuple[str, ...], place: Place) -> np.ndarray:
    """A later table's target in the codes (or numbers) of the first one."""
    empty = np.flatnonzero(series.isna())
    if len(empty):
        raise RequestError(f"{place(empty[0])}, target column '{series.name}': the value is missing.")
    if kind not in (BINARY, CLASSES):
        return read_values(series, NUMBER, place)
    text = as_text(series)
    codes = pd.Index(classes).get_indexer(text.categories)[text.codes]
    strange = np.flatnonzero(codes < 0)
    if len(strange):
        raise RequestError(
            f"{place(strange[0])}, target column '{series.name}': '{text[strange[0]]}' is not one of the classes "
            f"{listing(classes)}."
        )
    return codes.astype(np.int64)
