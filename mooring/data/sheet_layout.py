"""Location of the table inside a sheet: title lines above the header, total rows, footers and blank rows are not
data."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import pandas as pd

MIN_HEADER_SHARE = 0.6  # of the table's width that a header fills; a title line fills a cell or two
TOTAL = re.compile(
    r"(?i)^\W*(grand\s+|sub\s*-?\s*|overall\s+)?(total|totals|sum|summe|gesamt|gesamtsumme|zwischensumme|insgesamt|"
    r"totale|somme|sous-total|total g[ée]n[ée]ral|suma|ogółem|totaal|subtotal)\b[\s:.]*$"
)


class SheetLayout(NamedTuple):
    """Rows of a sheet, counted from 0."""

    header: int
    data: np.ndarray
    totals: list[int]
    footers: list[int]

    def describe(self, title: str) -> list[str]:
        """Return notes on rows that were left out; rows are counted from 1, as in spreadsheets."""
        notes = []
        if self.header > 0:
            notes.append(f"{title}: row {self.header + 1} was taken as the header; --header-row sets another.")
        for kind, rows in (("total", self.totals), ("footer", self.footers)):
            if rows:
                row_numbers = ", ".join(str(row + 1) for row in rows[:5]) + (", ..." if len(rows) > 5 else "")
                plural = "s were" if len(rows) > 1 else " was"
                notes.append(f"{title}: {len(rows)} {kind} row{plural} left out (row {row_numbers}).")
        return notes


def find_layout(cells: pd.DataFrame, header: int | None = None) -> SheetLayout | None:
    """Return the header, data and other rows of a sheet; None if there is no row below a header."""
    filled = cells.notna().to_numpy()
    count = filled.sum(1)
    filled_rows = np.flatnonzero(count > 0)
    if not len(filled_rows):
        return None
    if header is None:
        header = guess_header(cells, count)
    below = filled_rows[filled_rows > header]
    if not len(below):
        return None
    width = int(filled[header].sum())
    totals, footers = [], []
    for row in below.tolist():
        first = cells.iloc[row][filled[row]].iloc[0]
        if (isinstance(first, str) and TOTAL.match(first) and count[row] < max(2, width)) or (
            isinstance(first, str) and TOTAL.match(first) and row == below[-1]
        ):
            totals.append(row)
    last = len(below) - 1
    while last >= 0 and width >= 3 and (count[below[last]] == 1 or below[last] in totals):
        if below[last] not in totals:
            if not isinstance(cells.iloc[below[last]][filled[below[last]]].iloc[0], str):
                break
            footers.append(int(below[last]))
        last -= 1
    data = np.array([row for row in below.tolist() if row not in totals and row not in footers], dtype=np.int64)
    return SheetLayout(header, data, totals, sorted(footers)) if len(data) else None


def guess_header(cells: pd.DataFrame, count: np.ndarray) -> int:
    """Return the first row that fills most of the table's width with different texts, else the first that is not
    blank."""
    width = int(np.quantile(count[count > 0], 0.75))
    for row in np.flatnonzero(count >= max(min(2, width), MIN_HEADER_SHARE * width)).tolist():
        names = cells.iloc[row].dropna()
        texts = names.map(lambda name: isinstance(name, str))
        if texts.mean() > 0.5 and len(set(map(str, names))) == len(names):
            return row
    return int(np.flatnonzero(count > 0)[0])
