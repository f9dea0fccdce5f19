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
from collections.abc import Callable, Collection, Iterator, Mapping
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
UNNAMED = "\0"  # starts the place of a level whose name is not shared: it counts as "other"
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
    columns = {name: summarize_column(survey, name) for name in names}
    kinds = {name: column.kind for name, column in columns.items()}
    numbers = [name for name in names if kinds[name] != CATEGORY]
    checked = [*numbers, *([target] if answer.kind == REGRESSION else [])]
    stray = list(find_outlier_cells(survey, checked, title, find_cell))
    refuse_first(stray)
    dropped = {} if keep_useless else explain_useless_columns(columns)
    notes = [Note(text) for text in answer.notes] + mixed_notes(survey, kinds, dropped)
    notes += [Note(cell.sentence, [cell.client], cell.column) for cell in stray]
    return SchemaPlan.model_validate(
        {
            "target": target,
            "client": roles["client"],
            "kind": answer.kind,
            "classes": answer.classes,
            "columns": plan_features(kinds, dropped),
            "asked": keep_useless,
            "dropped": dropped,
            "limits": {cell.column: cell.limits for cell in stray},
            "notes": tuple(notes),
        }
    )


def plan_features(kinds: dict[str, str], dropped: Collection[str]) -> tuple[Feature, ...]:
    """Return the features of the columns that are kept; a date becomes three of them."""
    features: list[Feature] = []
    for name in kinds:
        if name in dropped:
            continue
        features.append(feature(name, kinds[name]))
        if kinds[name] == DATE:
            parts = {f"{name} {part}": part for part in (MONTH, WEEKDAY)}
            features += [feature(new, CATEGORY, name, part) for new, part in parts.items() if new not in kinds]
    return tuple(features)


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


class ColumnSummary(NamedTuple):
    """What decides on the use of a column, over all clients."""

    rows: int
    present: int
    numbers: int
    dates: int
    finite: int
    distinct: int  # the sum over clients of their numbers of different values
    present_squares: float  # the sum over clients of `present` squared
    repeats: bool  # whether a value occurs twice at some client
    varies: bool  # whether some client has two different values
    is_wide: bool  # whether some client has more than MAX_CATEGORY_LEVELS different values
    is_constant: bool  # whether the finite values of all clients are the same number
    is_whole: bool  # whether all clients store whole numbers
    width: float  # the distance between the extremes, and 1

    @property
    def kind(self) -> str:
        return choose_kind(self.present, self.numbers, self.dates)


def summarize_column(survey: ColumnStatistics, name: str) -> ColumnSummary:
    """Return the summary of a column of a survey."""
    present, distinct = survey.of(name, "present"), survey.of(name, "distinct")
    has_values = survey.of(name, "finite") > 0
    low, high = (survey.of(name, fact)[has_values] for fact in ("low", "high"))
    width = float(high.max() - low.min()) if has_values.any() else 0.0
    return ColumnSummary(
        **{fact: int(survey.total(name, fact)) for fact in ("rows", "present", "numbers", "dates", "finite")},
        distinct=int(distinct.sum()),
        present_squares=float((present**2).sum()),
        repeats=bool((distinct != present).any()),
        varies=bool((distinct > 1).any()),
        is_wide=bool((distinct > MAX_CATEGORY_LEVELS).any()),
        is_constant=width == 0 and bool(has_values.any()),
        is_whole=bool(survey.of(name, "whole").all()),
        width=width + 1,
    )


def explain_useless_columns(columns: Mapping[str, ColumnSummary]) -> dict[str, str]:
    """Return the columns that are left out, with reasons."""
    reasons = {name: explain_uselessness(name, column) for name, column in columns.items()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def explain_uselessness(name: str, column: ColumnSummary) -> str | None:
    """Return why a column is left out: empty, constant, a key, or text with too many levels; None if it is kept.

    Only repeats within a client count, which can be found without sending values.
    """
    if column.present == 0:
        return "has no values"
    if column.kind == CATEGORY:
        if not column.repeats and column.present >= MIN_VALUES_FOR_KEY and column.varies:
            return "is a key: its texts do not repeat within any client"
        if column.is_wide:
            share = column.numbers / column.present
            hint = f", {share:.0%} of them numbers" if share >= 0.5 else ""
            return f"is text with more than {MAX_CATEGORY_LEVELS} different values at one client{hint}"
        return None
    if column.finite == 0:
        return None  # infinite values are refused by their rows
    if column.is_constant and column.finite == column.rows:
        return "has the same value everywhere"
    return explain_key(name, column) if column.kind == NUMBER and column.is_whole else None


def explain_key(name: str, column: ColumnSummary) -> str | None:
    """Return why whole numbers are a key: by name and with many values, or without expected repeats; None if not.

    n numbers drawn from a range of some width repeat about n^2 / (2 width) times; a range narrower than the number of
    rows means that numbers repeat between clients (rows counted within each client).
    """
    is_named_key = KEY_NAME.search(name) is not None
    unique = not column.repeats and column.present > 1 and column.width >= column.present
    expected_repeats = column.present_squares / (2 * column.width)
    if (is_named_key and min(column.distinct, column.width) > MAX_CATEGORY_LEVELS) or (
        unique and (is_named_key or expected_repeats >= MIN_EXPECTED_REPEATS)
    ):
        return "is a key: its whole numbers " + ("do not repeat within any client" if unique else "hardly repeat")
    return None


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


class OutlierRule(NamedTuple):
    """The usual range of a column: which cells are outliers."""

    center: float  # the median of the clients' medians
    spread: float  # the usual spread of a client's values, or that of the clients' medians if it is larger
    usual: float = 0.0  # the usual client's distance of its furthest cell from the center, in units
    own_usual: float = 0.0  # the same from its own median, in its own spreads

    @property
    def unit(self) -> float:
        """The spread; a column that hardly varies has none: only extreme values are refused."""
        return self.spread if self.spread > 0 else MAX_CELL_DISTANCE * max(1.0, abs(self.center))

    @property
    def loose(self) -> float:
        return OUTLIER_FACTOR * max(1.0, self.usual) if self.spread > 0 else MAX_CLIENT_DISTANCE

    def find_strays(self, distance: np.ndarray, own_distance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which clients are alien as a whole, and which have a stray cell, by their furthest cells' distances
        from the center, in units, and from their own medians, in their own spreads."""
        alien = distance > max(MAX_CLIENT_DISTANCE, self.loose)
        return alien, alien | ((distance > self.loose) & (own_distance > OUTLIER_FACTOR * self.own_usual))

    def is_refused(self, distance: np.ndarray, extreme: np.ndarray) -> np.ndarray:
        return (distance > MAX_CELL_DISTANCE) | (np.abs(extreme) > MAX_MAGNITUDE)

    def stretch(self, furthest: float) -> float:
        """Return the distance beyond which cells are clipped: all usual cells and medians lie within `furthest`."""
        return max(self.loose, 2 * furthest)

    def limits(self, furthest: float) -> tuple[float, float]:
        reach = self.stretch(furthest) * self.unit
        return self.center - reach, self.center + reach

    def describe(self, cell: str, value: float, distance: float, refused: bool, limits: tuple[float, float]) -> str:
        """Return the end of a sentence on an outlier."""
        spreads = f"{distance:,.0f} times the usual spread ({self.spread:.3g}) from the median ({self.center:.6g})"
        end = (
            "; it would set the scale of the column for everybody. Correct it, leave the cell empty, or leave the "
            "column out."
            if refused
            else f"; is it right? What lies beyond {limits[int(value > self.center)]:.6g} counts as "
            f"{float(clip_outliers(np.asarray(value), limits)):.6g}, so that it does not spoil the others' models."
        )
        return f"{cell} lies {spreads}{end}"


def measure_distances(
    column: Mapping[str, np.ndarray], rule: OutlierRule
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return, by client with values, the furthest cell, its distance from the center in units and from the client's
    own median in its own spreads, and the median's distance from the center in units."""
    low, high, middle, between = (column[fact] for fact in ("low", "high", "middle", "between"))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        extreme = np.where(np.abs(high - rule.center) >= np.abs(low - rule.center), high, low)
        distance = np.abs(extreme - rule.center) / rule.unit
        own_distance = np.where(between > 0, np.abs(extreme - middle) / between, np.inf)
        shifted = np.abs(middle - rule.center) / rule.unit
    return extreme, distance, own_distance, shifted


def find_outlier_cells(
    survey: ColumnStatistics, names: list[str], title: str, find_cell: FindCell | None = None
) -> Iterator[OutlierCell]:
    """Yield clients' extremes far outside the range of the other clients. Extremes in a survey are rounded; where the
    rows are at hand, `find_cell` returns the cell itself."""
    for name in names:
        has_values = survey.of(name, "finite") > 0
        if not has_values.any():
            continue
        clients = [client for client, yes in zip(survey.clients, has_values) if yes]
        column = {fact: values[has_values] for fact, values in survey.facts[name].items()}
        middle = column["middle"]
        with np.errstate(over="ignore", invalid="ignore"):
            median_range = float(np.subtract(*np.quantile(middle, (0.75, 0.25), method="inverted_cdf")))
        spread = max(*(lower_median(column[fact]) for fact in ("between", "off")), median_range)
        rule = OutlierRule(float(np.median(middle)), spread)
        extreme, distance, own_distance, shifted = measure_distances(column, rule)
        rule = rule._replace(usual=lower_median(distance), own_usual=lower_median(own_distance))
        alien, stray = rule.find_strays(distance, own_distance)
        furthest = float(np.append(distance[~stray], shifted[~alien]).max(initial=0.0))
        refused, limits = rule.is_refused(distance, extreme), rule.limits(furthest)
        for i in np.flatnonzero(refused | (stray & (distance > rule.stretch(furthest)))):
            client, value = clients[i], float(extreme[i])
            cell = f"about {value:.6g}" if find_cell is None else f"{find_cell(client, name, value):.6g}"
            sentence = rule.describe(cell, value, float(distance[i]), bool(refused[i]), limits)
            yield OutlierCell(
                client,
                name,
                float(distance[i]),
                bool(refused[i]),
                limits,
                f"{title}: client '{client}', column '{name}': {sentence}",
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
    kept_levels = sort_levels(
        value
        for value, number in count.items()
        if number >= rare and value != OTHER_LEVEL and not value.startswith(UNNAMED)
    )
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
