"""One schema for all clients, from the statistics of each (`column_statistics.py`): the server's side of
`schema_client.py`.

    plan   = plan_schema(merge_statistics(surveys))              kinds, columns left out, the target's kind and classes
    draft  = draft_schema(merge_statistics(tallies), plan)       vocabularies, imputation, means
    schema = complete_schema(merge_statistics(spreads), draft)   scales

The pooled path takes the same three steps with all clients' summaries at once, so a federation whose tables never meet
gives the schema of the pooled table, bit for bit: sums over clients are taken in the order of their names.

A cell far outside the range of all clients would set the scale of its column, and distort the global model, for all
clients. It is refused, by client and column, if it lies further than MAX_CELL_DISTANCE spreads from the center. If it
lies OUTLIER_FACTOR times further than the usual client's furthest cell, in the spreads of all clients and in its own
client's, it is noted and clipped (`schema.clip_outliers`); so is a client whose median lies beyond MAX_CLIENT_DISTANCE
spreads. Usual values are lower medians over clients, which a single client of two cannot move.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from mooring.core.errors import RequestError
from mooring.data.clients import COUNT, REGRESSION
from mooring.data.column_statistics import ColumnStatistics, LevelCount
from mooring.data.column_types import CATEGORY, DATE, MONTH, NUMBER, WEEKDAY, choose_kind, sort_levels
from mooring.data.schema import OTHER_LEVEL, OUTLIER_FACTOR, Column, Feature, Limits, Schema, clip_outliers
from mooring.data.tables import Note
from mooring.data.target import agree_target

MAX_CATEGORY_LEVELS = 50  # a category with more levels has few rows per level and makes the model wide
MIN_VALUES_FOR_KEY = 10  # fewer values without a repeat are no evidence of a key
MIN_EXPECTED_REPEATS = 5  # whole numbers without a repeat where this many were expected are a key
KEY_NAME = re.compile(r"(?i:(^|[ _.-])(id|key|uuid|guid|index|rownames?|row))$|^Unnamed: \d+$|[a-z]I[dD]$")
MIN_RELATIVE_SCALE = 1e-12  # a spread this small against the mean is rounding of a constant
MAX_CELL_DISTANCE, MAX_CLIENT_DISTANCE = (
    1e5,
    1e3,
)  # distances from the center, in spreads: of a cell, of a client's median
TARGET_KEY = "target"  # key of the target in the statistics; columns are numbered
MAX_MAGNITUDE = 1e100  # squares and their sums stay finite below


class SchemaPlan(BaseModel):
    """The plan that clients receive after the survey."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    target: str
    client: str | None
    kind: Literal["regression", "binary", "classes", "count"]
    classes: tuple[str, ...] = ()
    columns: tuple[Feature, ...] = ()
    asked: bool = False  # the columns were chosen: all are kept
    dropped: dict[str, str] = {}
    limits: Limits = {}  # of columns with outlier cells, which are clipped
    notes: tuple[Note, ...] = Field((), exclude=True)  # not every client may read every note


def plan_schema(
    survey: ColumnStatistics,
    *,
    kind: str = "auto",
    keep_useless: bool = False,
    title: str = "the clients",
    find_cell: FindCell | None = None,
) -> SchemaPlan:
    """Return the plan: kinds of the columns, columns left out, and the target's kind. `keep_useless` keeps all
    columns; `find_cell` is that of `find_outlier_cells`."""
    roles = {role: require_one_value(counts, f"{title}: the {role} column") for role, counts in survey.roles.items()}
    target = roles["target"] or ""
    names = ordered_columns(survey, target, title)
    answer = agree_target(survey, target, kind, title)
    kinds = {name: agreed_kind(survey, name) for name in names}
    numbers = [name for name in names if kinds[name] != CATEGORY]
    checked = [*numbers, *([target] if answer.kind == REGRESSION else [])]
    stray = list(find_outlier_cells(survey, checked, title, find_cell))
    refuse_first(stray)
    dropped = (
        {}
        if keep_useless
        else {n: reason for n in names if (reason := explain_uselessness(survey, n, kinds[n])) is not None}
    )
    columns: list[Feature] = []
    for name in names:
        if name in dropped:
            continue
        columns.append(feature(name, kinds[name]))
        if kinds[name] == DATE:
            parts = {f"{name} {part}": part for part in (MONTH, WEEKDAY)}
            columns += [feature(new, CATEGORY, name, part) for new, part in parts.items() if new not in names]
    notes = [Note(text) for text in answer.notes] + mixed_notes(survey, kinds, dropped)
    notes += [Note(cell.sentence, [cell.client], cell.column) for cell in stray]
    return SchemaPlan.model_validate(
        {
            "target": target,
            "client": roles["client"],
            "kind": answer.kind,
            "classes": answer.classes,
            "columns": tuple(columns),
            "asked": keep_useless,
            "dropped": dropped,
            "limits": {cell.column: cell.limits for cell in stray},
            "notes": tuple(notes),
        }
    )


def feature(name: str, kind: str, source: str = "", part: str = "") -> Feature:
    return Feature.model_validate({"name": name, "kind": kind, "source": source, "part": part})


def require_one_value(counts: dict[str, LevelCount], label: str) -> str | None:
    """Return the value of all clients; different values are refused by the names of two clients."""
    if len(counts) > 1:
        values = [f"client '{level.client}' has '{name or 'none'}'" for name, level in list(counts.items())[:2]]
        raise RequestError(f"{label} must be the same for all clients, but {' and '.join(values)}.")
    return next(iter(counts)) or None


def ordered_columns(survey: ColumnStatistics, target: str, title: str) -> list[str]:
    """Return the feature columns, in the order of the first client's table; a client that differs is named."""
    names = [name for name in survey.facts if name != target]
    for name in names:
        has = survey.of(name, "has") > 0
        if not has.all():
            lacking = [client for client, yes in zip(survey.clients, has) if not yes]
            holding = [client for client, yes in zip(survey.clients, has) if yes]
            if len(holding) < len(lacking):
                raise RequestError(
                    f"{title}: client '{holding[0]}' has the extra column '{name}'; all must have the same columns."
                )
            raise RequestError(f"{title}: client '{lacking[0]}' lacks column '{name}'; all must have the same columns.")
    return sorted(names, key=lambda name: (survey.of(name, "place")[0], name))


def agreed_kind(survey: ColumnStatistics, name: str) -> str:
    return choose_kind(*(int(survey.total(name, fact)) for fact in ("present", "numbers", "dates")))


def explain_uselessness(survey: ColumnStatistics, name: str, kind: str) -> str | None:
    """Return why a column is left out: empty, constant, a key, or text with too many levels; None if it is kept.

    Only repeats within a client count, which can be found without sending values.
    """
    present, distinct = survey.of(name, "present"), survey.of(name, "distinct")
    count = int(present.sum())
    if count == 0:
        return "has no values"
    if kind == CATEGORY:
        if (distinct == present).all() and count >= MIN_VALUES_FOR_KEY and (distinct > 1).any():
            return "is a key: its texts do not repeat within any client"
        if distinct.max() > MAX_CATEGORY_LEVELS:
            return (
                f"is text with {distinct.max():.0f} different values or more at one client{number_hint(survey, name)}"
            )
        return None
    has_values = survey.of(name, "finite") > 0
    if not has_values.any():
        return None  # infinite values are refused by their rows
    low, high = survey.of(name, "low")[has_values].min(), survey.of(name, "high")[has_values].max()
    if low == high and survey.total(name, "finite") == survey.total(name, "rows"):
        return "has the same value everywhere"
    if kind == NUMBER and survey.of(name, "whole").all():
        return explain_key(name, present, distinct, high - low + 1)
    return None


def explain_key(name: str, present: np.ndarray, distinct: np.ndarray, width: float) -> str | None:
    """Return why whole numbers are a key: by name and with many values, or without expected repeats; None if not.

    n numbers drawn from a range of some width repeat about n^2 / (2 width) times; a range narrower than the number of
    rows means that numbers repeat between clients (rows counted within each client).
    """
    is_named_key = KEY_NAME.search(name) is not None
    all_distinct = bool((distinct == present).all()) and present.sum() > 1
    unique = all_distinct and width >= present.sum()
    expected_repeats = (present**2).sum() / (2 * width)
    if (is_named_key and min(distinct.sum(), width) > MAX_CATEGORY_LEVELS) or (
        unique and (is_named_key or expected_repeats >= MIN_EXPECTED_REPEATS)
    ):
        return "is a key: its whole numbers " + ("do not repeat within any client" if unique else "hardly repeat")
    return None


def number_hint(survey: ColumnStatistics, name: str) -> str:
    """Return a hint that text is partly numbers, or ""."""
    share = survey.total(name, "numbers") / survey.total(name, "present")
    return f", {share:.0%} of them numbers" if share >= 0.5 else ""


def mixed_notes(survey: ColumnStatistics, kinds: dict[str, str], dropped: dict[str, str]) -> list[Note]:
    """Return notes on columns that are numbers at some clients and text at others."""
    notes = []
    for name, kind in kinds.items():
        if kind != CATEGORY or name in dropped:
            continue
        present, numbers = survey.of(name, "present"), survey.of(name, "numbers")
        numeric = survey.select_clients(name, (numbers == present) & (present > 0) & (survey.of(name, "distinct") > 2))
        texts = survey.select_clients(name, (numbers == 0) & (present > 0))
        if numeric and texts:
            text = (
                f"Column '{name}' is numbers at client '{numeric[0]}' and text at client '{texts[0]}'; "
                "it was taken as text."
            )
            notes.append(Note(text, [numeric[0], texts[0]], name))
    return notes


class OutlierCell(NamedTuple):
    client: str
    column: str
    distance: float  # in spreads
    refused: bool
    limits: tuple[float, float]  # beyond which a cell is clipped
    sentence: str


FindCell = Callable[[str, str, float], float]  # (client, column, a rounded extreme) -> the cell


def find_outlier_cells(
    survey: ColumnStatistics, names: list[str], title: str, find_cell: FindCell | None = None
) -> Iterator[OutlierCell]:
    """Yield clients' extremes far outside the range of the other clients. Extremes in a survey are rounded; where the
    rows are at hand, `find_cell` returns the cell itself."""
    for name in names:
        column = survey.facts[name]
        has_values = column["finite"] > 0
        if not has_values.any():
            continue
        middle = column["middle"]
        centre = float(np.median(middle[has_values]))
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            median_range = float(np.subtract(*np.quantile(middle[has_values], (0.75, 0.25), method="inverted_cdf")))
            spread = max(*(lower_median(column[fact][has_values]) for fact in ("between", "off")), median_range)
            extreme = np.where(
                np.abs(column["high"] - centre) >= np.abs(column["low"] - centre), column["high"], column["low"]
            )
            # A column that hardly varies has no spread: only extreme values are refused.
            unit = spread if spread > 0 else MAX_CELL_DISTANCE * max(1.0, abs(centre))
            distance = np.where(has_values, np.abs(extreme - centre) / unit, 0.0)
            own_distance = np.where(column["between"] > 0, np.abs(extreme - middle) / column["between"], np.inf)
            shifted = np.where(has_values, np.abs(middle - centre) / unit, 0.0)
        loose = OUTLIER_FACTOR * max(1.0, lower_median(distance[has_values])) if spread > 0 else MAX_CLIENT_DISTANCE
        alien = distance > max(MAX_CLIENT_DISTANCE, loose)
        stray = alien | ((distance > loose) & (own_distance > OUTLIER_FACTOR * lower_median(own_distance[has_values])))
        within = np.append(distance[~stray], shifted[~alien])
        stretch = max(loose, 2 * float(within.max(initial=0.0)))
        refused = has_values & ((distance > MAX_CELL_DISTANCE) | (np.abs(extreme) > MAX_MAGNITUDE))
        limits = (centre - stretch * unit, centre + stretch * unit)
        for i in np.flatnonzero(refused | (has_values & stray & (distance > stretch))):
            client, value = survey.clients[i], extreme[i]
            cell = f"about {value:.6g}" if find_cell is None else f"{find_cell(client, name, float(value)):.6g}"
            location = f"client '{client}', column '{name}': {cell} lies"
            distance_text = f"{distance[i]:,.0f} times the usual spread ({spread:.3g}) from the median ({centre:.6g})"
            end = (
                "; it would set the scale of the column for everybody. Correct it, leave the cell empty, or leave the "
                "column out."
                if refused[i]
                else f"; is it right? What lies beyond {limits[int(value > centre)]:.6g} counts as "
                f"{clip_outliers(value, limits):.6g}, so that it does not spoil the others' models."
            )
            yield OutlierCell(
                client, name, float(distance[i]), bool(refused[i]), limits, f"{title}: {location} {distance_text}{end}"
            )


def lower_median(values: np.ndarray) -> float:
    """Return the median that is one of the values: of two the lower, so that a single one cannot raise it."""
    return float(np.quantile(values, 0.5, method="inverted_cdf"))


def refuse_first(cells: list[OutlierCell]) -> None:
    refused = [cell for cell in cells if cell.refused]
    if refused:
        raise RequestError(max(refused, key=lambda cell: cell.distance).sentence)


def draft_schema(tally: ColumnStatistics, plan: SchemaPlan, *, rare: int = 1, title: str = "the clients") -> Schema:
    """Return the draft: vocabularies, imputation and means. Levels with fewer than `rare` training rows in all become
    "other"."""
    if rare < 1:
        raise RequestError(f"rare must be at least 1, got {rare}.")
    low, high = tally.of(plan.target, "low").min(), tally.of(plan.target, "high").max()
    if low == high:
        raise RequestError(
            f"{title}: target column '{plan.target}' has the same value in every training row; "
            "there is nothing to learn."
        )
    dropped, columns = dict(plan.dropped), []
    for feature in plan.columns:
        reason = None if plan.asked else explain_constant(tally, feature)
        if reason is None:
            columns.append(learn_column(tally, feature, rare))
        elif not feature.part:
            dropped[feature.name] = reason
    if (plan.columns or plan.dropped) and not any(column.encoded for column in columns):
        refuse_useless(dropped, title)
    target_mean = tally.total(plan.target, "total") / max(tally.total(plan.target, "rows"), 1.0)
    return Schema(
        target=plan.target,
        client=plan.client,
        kind=plan.kind,
        classes=plan.classes,
        columns=tuple(columns),
        mean=means(tally, columns),
        scale=(),
        target_mean=target_mean if plan.kind == REGRESSION else 0.0,
        max_count=float(high) if plan.kind == COUNT else None,
        limits=plan.limits,
        dropped=dropped,
    )


def refuse_useless(dropped: dict[str, str], title: str) -> None:
    reasons = "; ".join(f"'{name}' {reason}" for name, reason in list(dropped.items())[:5])
    raise RequestError(f"{title}: no useful feature column is left ({reasons or 'all are constant'}).")


def explain_constant(tally: ColumnStatistics, feature: Feature) -> str | None:
    """Return why a column is uninformative: its training rows are empty or equal; None if it is not."""
    present = tally.of(feature.name, "present")
    if present.sum() == 0:
        return "has no value in any training row"
    if feature.kind == CATEGORY:
        num_levels = len(tally.levels.get(feature.name, {}))
        if num_levels > MAX_CATEGORY_LEVELS and not feature.part:
            return f"is text with {num_levels} different values"
        is_constant = num_levels == 1
    else:
        has_values = present > 0
        is_constant = (
            tally.of(feature.name, "low")[has_values].min() == tally.of(feature.name, "high")[has_values].max()
        )
    return (
        "has the same value in every training row"
        if is_constant and tally.total(feature.name, "missing") == 0
        else None
    )


def learn_column(tally: ColumnStatistics, feature: Feature, rare: int) -> Column:
    """Return a column's vocabulary and the replacement for missing values."""
    present = tally.total(feature.name, "present")
    flagged = not feature.part and present < tally.total(feature.name, "rows")
    fields = feature.model_dump() | {"flagged": flagged}
    if feature.kind != CATEGORY:
        return Column(**fields, fill=tally.total(feature.name, "total") / max(present, 1.0))
    count = {value: level.rows for value, level in tally.levels.get(feature.name, {}).items()}
    kept_levels = sort_levels(value for value, number in count.items() if number >= rare and value != OTHER_LEVEL)
    has_other = len(kept_levels) + (OTHER_LEVEL in count) < len(count)
    levels = [*kept_levels, OTHER_LEVEL] if has_other or count.get(OTHER_LEVEL, 0) >= rare else kept_levels
    if not has_other:
        levels = sort_levels(levels)
    grouped = {value: count.get(value, 0) for value in levels}
    if has_other:
        grouped[OTHER_LEVEL] = sum(count.values()) - sum(count[value] for value in kept_levels)
    fill = max(levels, key=lambda value: grouped[value]) if levels else ""
    return Column(**fields, fill=fill, levels=tuple(levels), other=has_other)


def means(tally: ColumnStatistics, columns: list[Column]) -> tuple[float, ...]:
    """Return each encoded column's mean over all training rows, missing values filled."""
    if not columns:
        return ()
    rows = tally.total(columns[0].name, "rows")
    numbers = [column.name for column in columns if column.kind != CATEGORY]
    summed: dict[str, float] = {}
    if numbers:
        total, count = (sum_statistic(tally, numbers, fact) for fact in ("total", "present"))
        summed = dict(zip(numbers, (total / np.maximum(count, 1)).tolist()))
    out: list[float] = []
    for column in columns:
        absent = rows - tally.total(column.name, "present")
        if column.kind != CATEGORY:
            out.append(summed[column.name])  # filling with the mean keeps it
        else:
            count_of = {value: level.rows for value, level in tally.levels.get(column.name, {}).items()}
            counts = [count_of.get(value, 0) + absent * (value == column.fill) for value in column.levels]
            if column.other:
                counts[-1] += sum(n for value, n in count_of.items() if value not in column.levels)
            out += [number / rows for number in (counts[1:] if len(counts) <= 2 else counts)]
        if column.flagged:
            out.append(absent / rows)
    return tuple(out)


def sum_statistic(summary: ColumnStatistics, columns: list[str], fact: str) -> np.ndarray:
    """Return [d]: a statistic of each column, added up in the order of the clients' names."""
    return np.add.accumulate(summary.stack(columns, fact), axis=0)[-1]


def complete_schema(spread: ColumnStatistics, draft: Schema) -> Schema:
    """Return the schema with scales: standard deviations (divided by n) over all clients' training rows; 1 for a
    constant column."""
    rows = spread.total(TARGET_KEY, "rows")
    scale: tuple[float, ...] = ()
    if draft.mean:
        squares = sum_statistic(spread, [str(j) for j in range(len(draft.mean))], "squares")
        scale = tuple(scales(squares, np.array(draft.mean), rows).tolist())
    target = 1.0
    if draft.kind == REGRESSION:
        squares = np.array([spread.total(TARGET_KEY, "squares")])
        target = float(scales(squares, np.array([draft.target_mean]), rows)[0])
    return draft.model_copy(update={"scale": scale, "target_scale": target})


def scales(squares: np.ndarray, mean: np.ndarray, rows: float) -> np.ndarray:
    deviations = np.sqrt(squares / max(rows, 1.0))
    return np.where(deviations > MIN_RELATIVE_SCALE * np.abs(mean), deviations, 1.0)
