"""The agreement on a schema from sums over clients alone (`core/summing.py`), without statistics of any single client.

    program = agree_by_sums(member, columns, options, secret, clients)       at every client; at the server without rows

The decisions are those of `schema_server.py`; what they need arrives as sums:

    survey     counts and yes/no flags of each column; votes for medians and spreads in coarse bins
    ranges     votes in fine bins, inside the coarse ones in use; the sum of the medians in the central bin; classes
    centers    votes for medians about the center; the classes' names
    distances  votes for the furthest cells about the center, in spreads
    levels     levels of the training rows; counts; votes for the furthest usual cells where a client has an outlier
    names      the names of common levels
    tally      sums and sums of squares about the center
    spread     sums of squares about the means

A vote is a count of clients by bin: each client marks one bin. A bin with one vote shows that some client has such a
value to within the bin (19 %; a factor of 4 or more far from usual magnitudes), and not which client has it.

Levels are counted and named by `level_sums.py` if they have at least `MIN_LEVEL_ROWS` training rows; other levels
count as "other". Numbers and dates have no levels.

Votes, flags and tables count clients and rows; they are whole numbers and do not count against the budget of numbers
that are not linear in rows. Nor does the sum of the medians in the central bin, one number per column, which needs
`MIN_CLIENTS` clients in the bin (two of two).

Equal to `agree_on_schema` of the pooled table: kinds, empty and constant columns, texts with too many levels, keys that
are text, classes, counts, and levels in their order if rare ones are taken as "other" there; means and scales to 1e-9.
Within a bin: the limits of clipped columns, the largest count, and the width of a column of whole numbers, which
decides whether it is a key. Cells beyond the limits are noted for the client's own operator only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from mooring.core.errors import RequestError
from mooring.core.summing import Program, Step
from mooring.data.clients import BINARY, CLASSES, COUNT, REGRESSION
from mooring.data.column_statistics import ColumnStatistics, LevelCount
from mooring.data.column_types import CATEGORY, MAX_LEVEL_BYTES, is_missing, sort_levels
from mooring.data.level_sums import (
    MIN_CLIENTS,
    OwnLevels,
    Part,
    add_up,
    count_levels,
    find_common,
    hash_text,
    is_single,
    name_levels,
    separate_levels,
    sum_names,
)
from mooring.data.schema import Limits, Schema, clip_columns, clip_outliers
from mooring.data.schema_client import ClientTable, ParsedTable, parse_table, sum_squares, survey_table
from mooring.data.schema_server import (
    MAX_CATEGORY_LEVELS,
    TARGET_KEY,
    UNNAMED,
    ColumnSummary,
    OutlierRule,
    SchemaPlan,
    complete_schema,
    draft_schema,
    explain_useless_columns,
    measure_distances,
    plan_features,
)
from mooring.data.tables import Note, quote_list
from mooring.data.target import (
    MAX_CODE,
    MAX_NAMED_CLASSES,
    MIN_READABLE_SHARE,
    TargetDescription,
    TargetSummary,
    describe_classes,
    fitting_kind,
    refuse_classes,
    refuse_key,
)
from mooring.data.vote_bins import (
    COARSE,
    COARSE_OF_FINE,
    COARSE_SIGNED,
    COUNT_GRID,
    FINE,
    RELATIVE,
    RELATIVE_SIGNED,
)

MIN_LEVEL_ROWS = 10  # of a level whose name is shared
MEDIAN_STEPS = 2.0**48  # of the largest magnitude in a bin
MIN_RELATIVE_VARIANCE = 2.0**-50  # of a column against the square of its range
ALL = "all clients"  # takes the place of a client in statistics that were added up

SURVEY = Step("schema: survey", "kinds of columns, columns without use, magnitudes", 1.0)
RANGES = Step("schema: ranges", "spreads and centers of columns, classes", 1.0)
CENTERS = Step("schema: centers", "medians of the clients' medians, names of classes", 1.0)
DISTANCES = Step("schema: distances", "ranges of columns in spreads", 1.0)
LEVELS = Step("schema: levels", "levels of categories, counts, limits of outliers", 1.0)
NAMES = Step("schema: names", "names of common levels", 1.0)
TALLY = Step("schema: tally", "means of columns", 2.0**-60)
SPREAD = Step("schema: spread", "scales of columns", 2.0**-56)


@dataclass(frozen=True)
class SchemaOptions:
    """What all clients agreed on before: the roles and the options that decide on a schema."""

    target: str
    client: str | None = None  # the column with the clients' names
    target_type: str = "auto"
    min_category_rows: int = 1
    keeps_useless: bool = False  # the columns were chosen: all are kept
    formula: str | None = None
    title: str = "the clients"


@dataclass(frozen=True, eq=False)
class Agreement:
    """What a client has after the agreement. The server has no rows, and no notes of its own."""

    schema: Schema
    plan: SchemaPlan
    reading: ParsedTable | None
    notes: list[str]  # the same for all
    own_notes: list[str] = field(default_factory=list)  # for the operator of this client alone


SIZES = ("between", "off", "reach")  # spreads of a client's values
COUNTS = (
    "clients", "rows", "present", "numbers", "dates", "finite", "distinct", "present_squares", "repeating", "varying",
    "wide", "whole", "with_values", "ranging", "code", "numeric", "text", "named", "small_code",
)  # fmt: skip
TRAINING_COUNTS = ("rows", "present", "missing", "with_values", "ranging", "code")
Facts = dict[str, dict[str, float]]  # a client's statistics of its columns
Counts = dict[str, float]  # sums over clients, of a column


def agree_by_sums(
    member: ClientTable | None,
    columns: Sequence[str],
    options: SchemaOptions,
    secret: bytes,
    clients: int,
    reread: Callable[[SchemaPlan], ClientTable] | None = None,
) -> Program[Agreement]:
    """Agree on the schema of all clients' rows.

    `member` has the rows of one client; None is the server, which adds nothing and gets the same schema. `columns` are
    the columns to learn from, in their order; no other one is read. `secret` is shared by the clients, new in every run
    and unknown to the server. `reread` returns the same rows with the plan's categories read as they are written.
    """
    if options.formula is not None or (member is not None and member.formula is not None):
        raise RequestError(f"{options.title}: a formula cannot be agreed on by sums; name the columns instead.")
    facts, own_classes = ({}, {}) if member is None else survey_client(member, columns, options)
    plan, rules, extents, doubtful = yield from plan_by_sums(facts, own_classes, columns, options, secret, clients)
    reading, outliers = None, dict[str, ClientOutlier]()
    if member is not None:
        outliers = {name: judge_client(facts[name], rule) for name, rule in rules.items() if facts[name]["finite"]}
        refuse_cells(outliers, rules, options.title)
        member = member if reread is None else reread(plan)
        reading = parse_table(member, plan)
    training, limits, max_count, tables = yield from count_training(plan, reading, rules, outliers, doubtful, secret)
    rows, rare = training[options.target]["rows"], max(options.min_category_rows, MIN_LEVEL_ROWS)
    if not rows:
        raise RequestError(f"{options.title}: no client has a training row.")
    plan = plan.model_copy(update={"limits": limits, "notes": (*plan.notes, *map(Note, describe_limits(limits)))})
    own_notes = describe_own_outliers(outliers, rules, limits) + ([] if reading is None else reading.notes)
    reading = None if reading is None else clip_reading(reading, plan.target, limits)

    own_levels = count_own_levels(plan, reading)
    places = yield from separate_levels(tables, own_levels, secret)
    shared = find_common(places, rare, clients)
    names = yield from add_up(NAMES, {"names": sum_names(shared, own_levels, places, secret)})
    levels = name_levels(shared, names["names"], places)

    scales = find_scales(plan, rules, extents)
    sums = yield from sum_moments(plan, reading, scales, rows)
    tally = make_tally(plan, training, scales, sums, max_count, levels)
    draft = draft_schema(tally, plan, rare=rare, title=options.title)
    variances = estimate_variances(sums, scales, training)
    schema = yield from find_scale(member, draft, reading, variances, rows)
    return Agreement(schema, plan, reading, list(plan.notes), own_notes)


class PlanOfSums(NamedTuple):
    """A plan, and where the numbers of each column lie."""

    plan: SchemaPlan
    rules: dict[str, OutlierRule]
    extents: dict[str, tuple[float, float]]  # bounds of all numbers
    doubtful: list[str]  # columns that may have outliers


def plan_by_sums(
    facts: Facts,
    own_classes: dict[str, int],
    columns: Sequence[str],
    options: SchemaOptions,
    secret: bytes,
    clients: int,
) -> Part[PlanOfSums]:
    """Return the kinds of the columns, those that are left out, and the target's kind and classes."""
    target = options.target
    counts, magnitudes = yield from count_columns(facts, [*columns, target], secret)
    if counts[target]["clients"] != clients:
        raise RequestError(f"{options.title}: {counts[target]['clients']:.0f} of {clients} clients take part.")
    summaries = {name: summarize_counts(count) for name, count in counts.items()}
    numbers = [n for n, column in summaries.items() if column.finite and (n == target or column.kind != CATEGORY)]

    may_be_classes = counts[target]["named"] == clients and options.target_type in ("auto", BINARY, CLASSES)
    tables = {target: count_levels(target, own_classes, secret)} if may_be_classes else {}
    ranges, tables = yield from find_ranges(facts, {name: magnitudes[name] for name in numbers}, tables, clients)
    places = yield from separate_levels(tables, {target: own_classes}, secret)
    chosen = choose_target(target, counts[target], len(places.get(target, {})), clients, options)
    if chosen != REGRESSION:
        ranges.pop(target, None)
    has_classes = chosen in (BINARY, CLASSES)
    shared = find_common(places, MIN_LEVEL_ROWS, clients) if has_classes else []
    rules, names = yield from find_centers(facts, ranges, sum_names(shared, {target: own_classes}, places, secret))
    answer = TargetDescription(chosen, (), [])
    if has_classes:
        classes = name_levels(shared, names, places)[target]
        refuse_rare_classes(classes, clients, f"{options.title}: target column '{target}'")
        is_whole = counts[target]["whole"] == clients
        answer = describe_classes(target, options.target_type, chosen, sort_levels(classes), is_whole)

    units = {name: rule.spread or ranges[name].vote_unit for name, rule in rules.items()}
    rules, extents, doubtful = yield from find_extents(facts, rules, units)
    for name, (low, high) in extents.items():
        summaries[name] = summaries[name]._replace(width=high - low + 1)
    used = {name: summaries[name] for name in columns}
    kinds = {name: column.kind for name, column in used.items()}
    dropped = {} if options.keeps_useless else explain_useless_columns(used)
    plan = SchemaPlan(
        target=target,
        client=options.client,
        kind=answer.kind,  # type: ignore[arg-type]
        classes=answer.classes,
        columns=plan_features(kinds, dropped),
        asked=options.keeps_useless,
        dropped=dropped,
        notes=tuple(map(Note, (*answer.notes, *describe_mixed_columns(counts, kinds, dropped)))),
    )
    return PlanOfSums(plan, rules, extents, doubtful)


def survey_client(member: ClientTable, columns: Sequence[str], options: SchemaOptions) -> tuple[Facts, dict[str, int]]:
    """Return a client's statistics of its columns and target, which do not leave it, and its rows by class."""
    if len(member.clients) != 1:
        raise ValueError(f"one client takes part in a program, got {len(member.clients)}")
    missing = [name for name in (*columns, options.target) if name not in member.table.frame.columns]
    if missing:
        raise RequestError(f"{member.table.title}: the agreed columns {quote_list(missing)} are missing.")
    if member.roles.target != options.target:
        raise RequestError(
            f"{member.table.title}: the target column must be the same for all clients, but it is "
            f"'{member.roles.target}' here and '{options.target}' elsewhere."
        )
    survey = survey_table(replace(member, features=list(columns), kind=options.target_type), exact=True)
    facts = {name: {fact: float(value[0]) for fact, value in of.items()} for name, of in survey.facts.items()}
    facts[options.target] |= {"present": facts[options.target]["rows"], "dates": 0.0}
    for column in facts.values():
        column["reach"] = max(column["high"] - column["middle"], column["middle"] - column["low"])
    classes = {level: count.rows for level, count in survey.levels.get(options.target, {}).items()}
    long = next((level for level in classes if len(level.encode()) > MAX_LEVEL_BYTES), None)
    if long is not None:
        raise RequestError(
            f"{member.table.title}: target column '{options.target}': the class '{long}' is longer than "
            f"{MAX_LEVEL_BYTES} bytes; shorten it."
        )
    return facts, classes


def count_columns(
    facts: Facts, names: Sequence[str], secret: bytes
) -> Part[tuple[dict[str, Counts], dict[str, dict[str, np.ndarray]]]]:
    """Return sums of counts and flags by column, and votes in coarse bins for the median and for three spreads."""
    blocks = {
        "counts": np.array([count_column(name, facts.get(name), secret) for name in names]),
        "middle": np.array([COARSE_SIGNED.vote(value_of(facts, name, "middle")) for name in names]),
    } | {size: np.array([COARSE.vote(value_of(facts, name, size)) for name in names]) for size in SIZES}
    total = yield from add_up(SURVEY, blocks)
    counts = {name: dict(zip(COUNTS, row.tolist())) for name, row in zip(names, total["counts"])}
    votes = {name: {fact: total[fact][j] for fact in ("middle", *SIZES)} for j, name in enumerate(names)}
    return counts, votes


def value_of(facts: Facts, name: str, fact: str) -> float | None:
    """Return a client's statistic of a column of numbers; None for the server, and without numbers."""
    return facts[name][fact] if name in facts and facts[name]["finite"] else None


def count_column(name: str, facts: dict[str, float] | None, secret: bytes) -> np.ndarray:
    """Return what a client adds to the counts of a column, in the order of `COUNTS`."""
    if facts is None:
        return np.zeros(len(COUNTS))
    present, numbers, distinct, has_values = (facts[f] for f in ("present", "numbers", "distinct", "finite"))
    named = facts.get("named", 0.0)
    is_text = numbers < MIN_READABLE_SHARE * present if "named" in facts else numbers == 0 and present > 0
    is_number = not named and numbers > 0 if "named" in facts else numbers == present > 0 and distinct > 2
    is_code = facts["whole"] and facts["low"] >= 0 and facts["high"] <= MAX_CODE
    values = {fact: facts[fact] for fact in ("rows", "present", "numbers", "dates", "finite", "distinct", "whole")} | {
        "clients": 1,
        "present_squares": present**2,
        "repeating": distinct != present,
        "varying": distinct > 1,
        "wide": distinct > MAX_CATEGORY_LEVELS,
        **describe_constancy(name, facts["low"], facts["high"], has_values, secret),
        "numeric": is_number,
        "text": is_text,
        "named": named,
        "small_code": is_code,
    }
    return np.array([float(values[count]) for count in COUNTS])


def describe_constancy(name: str, low: float, high: float, has_values: float, secret: bytes) -> Counts:
    """Return flags of values and of different values, and the code of the value of a constant column."""
    is_constant = has_values and low == high
    code = hash_text(secret, name, float(low + 0.0).hex())[1] if is_constant else 0
    return {"with_values": float(has_values > 0), "ranging": float(has_values > 0 and low != high), "code": float(code)}


def is_constant(counts: Counts) -> bool:
    """Return whether all values of all clients are equal."""
    return not counts["ranging"] and is_single(counts["code"], counts["with_values"])


def summarize_counts(counts: Counts) -> ColumnSummary:
    """Return the summary of a column; the width of numbers is found later."""
    return ColumnSummary(
        **{fact: int(counts[fact]) for fact in ("rows", "present", "numbers", "dates", "finite", "distinct")},
        present_squares=counts["present_squares"],
        repeats=counts["repeating"] > 0,
        varies=counts["varying"] > 0,
        is_wide=counts["wide"] > 0,
        is_constant=is_constant(counts),
        is_whole=counts["whole"] == counts["clients"],
        width=1.0,
    )


class Range(NamedTuple):
    """Where the numbers of a column lie."""

    center: float  # near the median of the clients' medians
    spread: float  # the usual client's
    vote_unit: float  # in which distances from the center are voted on


def find_ranges(
    facts: Facts, magnitudes: dict[str, dict[str, np.ndarray]], tables: dict[str, np.ndarray], clients: int
) -> Part[tuple[dict[str, Range], dict[str, np.ndarray]]]:
    """Return the ranges of columns of numbers, from votes in fine bins, and the totals of the tables.

    The center is the mean of the clients' medians that lie in the coarse bin with the median client, if they are
    enough to hide each of them; else the bin's.
    """
    in_use = {(name, size): votes[size][COARSE_OF_FINE] > 0 for name, votes in magnitudes.items() for size in SIZES}
    central = {name: COARSE_SIGNED.quantile(votes["middle"], 0.5) for name, votes in magnitudes.items()}
    medians = np.zeros(len(magnitudes))
    for j, (name, bin_) in enumerate(central.items()):
        middle, in_bin = value_of(facts, name, "middle"), magnitudes[name]["middle"][bin_]
        if middle is not None and COARSE_SIGNED.place(middle) == bin_ and in_bin >= min(MIN_CLIENTS, clients):
            medians[j] = round(float(np.clip(middle / median_unit(bin_), -MEDIAN_STEPS, MEDIAN_STEPS)))
    fine = {f"{name}\0{size}": FINE.vote(value_of(facts, name, size))[used] for (name, size), used in in_use.items()}
    blocks = {f"table\0{name}": table for name, table in tables.items()}
    total = yield from add_up(RANGES, {"medians": medians, **fine, **blocks})
    ranges = {}
    for j, (name, bin_) in enumerate(central.items()):
        votes = {}
        for size in SIZES:
            votes[size] = np.zeros(len(FINE))
            votes[size][in_use[name, size]] = total[f"{name}\0{size}"]
        count = magnitudes[name]["middle"][bin_]
        center = float(total["medians"][j] / count * median_unit(bin_)) or float(COARSE_SIGNED.center[bin_])
        spread = float(max(FINE.center[FINE.quantile(votes[size], 0.5)] for size in ("between", "off")))
        furthest = FINE.highest(votes["reach"])
        reach = float(FINE.upper[furthest]) if furthest else 0.0
        ranges[name] = Range(center, spread, spread or reach or abs(center) or 1.0)
    return ranges, {name: total[f"table\0{name}"] for name in tables}


def median_unit(bin_: int) -> float:
    """Return the unit in which medians of a coarse bin are added."""
    return float(max(abs(COARSE_SIGNED.lower[bin_]), abs(COARSE_SIGNED.upper[bin_]))) / MEDIAN_STEPS


def choose_target(target: str, counts: Counts, classes: int, clients: int, options: SchemaOptions) -> str:
    """Return the target's kind; a target that cannot be learned is refused."""
    location, rows, kind = f"{options.title}: target column '{target}'", int(counts["rows"]), options.target_type
    named = counts["named"] == clients
    facts = TargetSummary(rows, int(counts["numbers"]), classes, named, counts["small_code"] == clients)
    chosen = fitting_kind(target, facts) if kind == "auto" else kind
    if chosen not in (BINARY, CLASSES):
        if is_constant(counts) and counts["finite"] == rows:
            raise RequestError(f"{location} has the same value in every row; there is nothing to learn.")
        return chosen
    if not named:
        if counts["numeric"] and counts["text"] and kind == "auto":
            raise RequestError(
                f"{location} holds numbers at some clients, but text at others; all clients must have the same kind of "
                "target."
            )
        refuse_key(f"more than {MAX_NAMED_CLASSES}", rows, location)
    refuse_classes(classes, chosen, rows, location)
    return chosen


def refuse_rare_classes(classes: Mapping[str, int], clients: int, location: str) -> None:
    unnamed = sum(name.startswith(UNNAMED) for name in classes)
    if unnamed:
        holders = f"fewer than {MIN_CLIENTS} clients" if clients >= MIN_CLIENTS else "one client only"
        raise RequestError(
            f"{location}: {unnamed} of {len(classes)} classes have fewer than {MIN_LEVEL_ROWS} rows, or are at "
            f"{holders}; the names of such classes are not shared. Merge them with other classes, or leave their rows "
            "out."
        )


def find_centers(
    facts: Facts, ranges: dict[str, Range], names: np.ndarray
) -> Part[tuple[dict[str, OutlierRule], np.ndarray]]:
    """Return the centers and spreads of columns, from votes for the medians about the ranges' centers, and the total
    of `names`."""
    votes = np.zeros((len(ranges), len(RELATIVE_SIGNED)))
    for j, (name, about) in enumerate(ranges.items()):
        middle = value_of(facts, name, "middle")
        votes[j] = RELATIVE_SIGNED.vote(None if middle is None else (middle - about.center) / about.vote_unit)
    total = yield from add_up(CENTERS, {"votes": votes, "names": names})
    rules = {}
    for (name, about), vote in zip(ranges.items(), total["votes"]):
        quartiles = [RELATIVE_SIGNED.center[RELATIVE_SIGNED.quantile(vote, share)] for share in (0.25, 0.75)]
        center = about.center + about.vote_unit * RELATIVE_SIGNED.median(vote)
        rules[name] = OutlierRule(center, max(about.spread, float(quartiles[1] - quartiles[0]) * about.vote_unit))
    return rules, total["names"]


def find_extents(
    facts: Facts, rules: dict[str, OutlierRule], units: dict[str, float]
) -> Part[tuple[dict[str, OutlierRule], dict[str, tuple[float, float]], list[str]]]:
    """Return the complete rules, bounds of all numbers of each column, and the columns that may have outliers."""
    sides, distances = np.zeros((len(rules), 2, len(RELATIVE_SIGNED))), np.zeros((len(rules), 2, len(RELATIVE)))
    for j, (name, rule) in enumerate(rules.items()):
        if value_of(facts, name, "middle") is None:
            continue
        for k, fact in enumerate(("low", "high")):
            sides[j, k] = RELATIVE_SIGNED.vote((facts[name][fact] - rule.center) / units[name])
        own = judge_client(facts[name], rule)
        distances[j] = [RELATIVE.vote(own.distance), RELATIVE.vote(own.own_distance)]
    total = yield from add_up(DISTANCES, {"sides": sides, "distances": distances})
    complete, extents, doubtful = {}, {}, []
    for (name, rule), (low, high), (distance, own_distance) in zip(rules.items(), total["sides"], total["distances"]):
        bottom = RELATIVE_SIGNED.lower[RELATIVE_SIGNED.quantile(low, 0)] * units[name]
        top = RELATIVE_SIGNED.upper[RELATIVE_SIGNED.highest(high)] * units[name]
        usual, own_usual = (float(RELATIVE.center[RELATIVE.quantile(v, 0.5)]) for v in (distance, own_distance))
        complete[name] = rule._replace(usual=usual, own_usual=own_usual)
        extents[name] = float(bottom), float(top)
        if RELATIVE.upper[RELATIVE.highest(distance)] > complete[name].loose:
            doubtful.append(name)
    return complete, extents, doubtful


class ClientOutlier(NamedTuple):
    """A client's furthest cell of a column."""

    extreme: float
    distance: float
    own_distance: float
    usual_distance: float  # of what is no outlier: the cell, or the client's median
    is_stray: bool
    is_refused: bool


def judge_client(facts: dict[str, float], rule: OutlierRule) -> ClientOutlier:
    extreme, distance, own_distance, shifted = measure_distances({k: np.array([v]) for k, v in facts.items()}, rule)
    alien, stray = rule.find_strays(distance, own_distance)
    usual = max(float(distance[0]) * (not stray[0]), float(shifted[0]) * (not alien[0]))
    refused = rule.is_refused(distance, extreme)
    return ClientOutlier(
        float(extreme[0]), float(distance[0]), float(own_distance[0]), usual, bool(stray[0]), bool(refused[0])
    )


def refuse_cells(outliers: Mapping[str, ClientOutlier], rules: Mapping[str, OutlierRule], title: str) -> None:
    """Refuse a client's own cells that would set the scale of a column for everybody."""
    refused = {name: own for name, own in outliers.items() if own.is_refused}
    if refused:
        name = max(refused, key=lambda name: refused[name].distance)
        own = refused[name]
        sentence = rules[name].describe(f"{own.extreme:.6g}", own.extreme, own.distance, True, (0.0, 0.0))
        raise RequestError(f"{title}: column '{name}': {sentence}")


def describe_limits(limits: Limits) -> list[str]:
    return [
        f"Column '{name}': numbers below {low:.6g} or above {high:.6g} count as less distant ones; the clients that "
        "have such numbers are informed."
        for name, (low, high) in limits.items()
    ]


def describe_own_outliers(
    outliers: Mapping[str, ClientOutlier], rules: Mapping[str, OutlierRule], limits: Limits
) -> list[str]:
    """Return notes on a client's own clipped cells, for its operator."""
    notes = []
    for name, (low, high) in limits.items():
        own = outliers.get(name)
        if own is not None and not low <= own.extreme <= high:
            sentence = rules[name].describe(f"{own.extreme:.6g}", own.extreme, own.distance, False, limits[name])
            notes.append(f"Column '{name}': {sentence}")
    return notes


def describe_mixed_columns(counts: dict[str, Counts], kinds: dict[str, str], dropped: Mapping[str, str]) -> list[str]:
    return [
        f"Column '{name}' is numbers at some clients and text at others; it was taken as text."
        for name, kind in kinds.items()
        if kind == CATEGORY and name not in dropped and counts[name]["numeric"] and counts[name]["text"]
    ]


def count_training(
    plan: SchemaPlan,
    reading: ParsedTable | None,
    rules: dict[str, OutlierRule],
    outliers: Mapping[str, ClientOutlier],
    doubtful: Sequence[str],
    secret: bytes,
) -> Part[tuple[dict[str, Counts], Limits, int, dict[str, np.ndarray]]]:
    """Return counts of the training rows by column, the limits of columns with outliers, the largest count of a target
    of counts, and the tables of levels."""
    names = [*(feature.name for feature in plan.columns), plan.target]
    own_levels = count_own_levels(plan, reading)
    counts = np.zeros((len(names), len(TRAINING_COUNTS)))
    for j, name in enumerate(names if reading is not None else []):
        counts[j] = count_training_column(name, reading, plan.target, secret)  # type: ignore[arg-type]
    votes = np.zeros((len(doubtful), 2, len(RELATIVE)))
    for j, name in enumerate(doubtful):
        if name in outliers:
            votes[j, 0] = RELATIVE.vote(outliers[name].usual_distance)
            votes[j, 1] = RELATIVE.vote(outliers[name].distance if outliers[name].is_stray else None)
    largest = np.zeros(len(COUNT_GRID) if plan.kind == COUNT else 0)
    if plan.kind == COUNT and reading is not None and reading.train.any():
        largest = COUNT_GRID.vote(float(reading.target.y[reading.train].max()))
    tables = {f"table\0{name}": count_levels(name, levels, secret) for name, levels in own_levels.items()}
    total = yield from add_up(LEVELS, {"counts": counts, "votes": votes, "largest": largest, **tables})
    limits = {}
    for name, (usual, stray) in zip(doubtful, total["votes"]):
        furthest = float(RELATIVE.upper[RELATIVE.highest(usual)])
        if stray.any() and RELATIVE.center[RELATIVE.highest(stray)] > rules[name].stretch(furthest):
            limits[name] = rules[name].limits(furthest)
    max_count = math.ceil(COUNT_GRID.upper[COUNT_GRID.highest(total["largest"])]) - 1 if plan.kind == COUNT else 0
    training = {name: dict(zip(TRAINING_COUNTS, row.tolist())) for name, row in zip(names, total["counts"])}
    return training, limits, max_count, {name: total[f"table\0{name}"] for name in own_levels}


def count_training_column(name: str, reading: ParsedTable, target: str, secret: bytes) -> list[float]:
    """Return what a client adds to the counts of a column's training rows, in the order of `TRAINING_COUNTS`."""
    values = reading.target.y.astype(float) if name == target else reading.columns[name]
    absent = is_missing(values)
    present = values[reading.train & ~absent]
    numbers = np.zeros(0) if isinstance(present, pd.Categorical) else present
    low, high = (float(numbers.min()), float(numbers.max())) if len(numbers) else (0.0, 0.0)
    constancy = describe_constancy(name, low, high, len(numbers), secret)
    return [float(reading.train.sum()), float(len(present)), float(absent.sum()), *constancy.values()]


def count_own_levels(plan: SchemaPlan, reading: ParsedTable | None) -> OwnLevels:
    """Return the training rows of each level of the categories; no levels at the server."""
    levels: OwnLevels = {feature.name: {} for feature in plan.columns if feature.kind == CATEGORY}
    for name in levels if reading is not None else ():
        values = reading.columns[name][reading.train]  # type: ignore[union-attr]
        count = np.bincount(values.codes[values.codes >= 0], minlength=len(values.categories))
        levels[name] = {values.categories[k]: int(count[k]) for k in np.flatnonzero(count)}
    return levels


def clip_reading(reading: ParsedTable, target: str, limits: Limits) -> ParsedTable:
    """Return the rows with clipped outliers."""
    answer = reading.target
    if target in limits:
        answer = answer._replace(y=clip_outliers(answer.y, limits[target]))
    return replace(reading, columns=clip_columns(reading.columns, limits), target=answer)


def find_scales(
    plan: SchemaPlan, rules: dict[str, OutlierRule], extents: dict[str, tuple[float, float]]
) -> dict[str, tuple[float, float]]:
    """Return the center of each column of numbers, and a bound of the distances from it."""
    scales = {}
    for name in [f.name for f in plan.columns if f.kind != CATEGORY] + [plan.target] * (plan.kind == REGRESSION):
        low, high = extents.get(name, (-1.0, 1.0))
        reach = max(-low, high)
        if name in plan.limits:
            reach = min(reach, (plan.limits[name][1] - plan.limits[name][0]) / 2)
        scales[name] = (rules[name].center if name in rules else 0.0), reach
    return scales


def sum_moments(
    plan: SchemaPlan, reading: ParsedTable | None, scales: dict[str, tuple[float, float]], rows: float
) -> Part[dict[str, np.ndarray]]:
    """Return the first two moments of the training rows, by column, about the centers and in the bounds."""
    sums = np.zeros((len(scales), 2))
    for j, (name, (center, reach)) in enumerate(scales.items() if reading is not None else ()):
        values = reading.target.y if name == plan.target else reading.columns[name]  # type: ignore[union-attr]
        scaled = (values[reading.train] - center) / reach  # type: ignore[union-attr]
        sums[j] = np.nansum(scaled) / rows, np.nansum(scaled**2) / rows
    total = yield from add_up(TALLY, {"sums": sums})
    return dict(zip(scales, total["sums"]))


def make_tally(
    plan: SchemaPlan,
    training: dict[str, Counts],
    scales: dict[str, tuple[float, float]],
    sums: dict[str, np.ndarray],
    max_count: int,
    levels: dict[str, dict[str, int]],
) -> ColumnStatistics:
    """Return the statistics from which a draft is made, as of one client with all rows."""
    facts = {}
    for name, counts in training.items():
        center, reach = scales.get(name, (0.0, 0.0))
        total = center * counts["present"] + reach * float(sums[name][0]) * counts["rows"] if name in sums else 0.0
        high = float(max_count) if name == plan.target else 1.0
        facts[name] = {fact: counts[fact] for fact in ("rows", "present", "missing")} | {
            "has": 1.0,
            "total": total,
            "low": high if is_constant(counts) else high - 1,
            "high": high,
        }
    return gather(facts, {name: {level: LevelCount(n, ALL) for level, n in of.items()} for name, of in levels.items()})


def gather(facts: dict[str, Counts], levels: dict[str, dict[str, LevelCount]]) -> ColumnStatistics:
    return ColumnStatistics(
        (ALL,), {name: {fact: np.array([value]) for fact, value in of.items()} for name, of in facts.items()}, levels
    )


def estimate_variances(
    sums: dict[str, np.ndarray], scales: dict[str, tuple[float, float]], training: dict[str, Counts]
) -> dict[str, float]:
    """Return the approximate variance of each column of numbers: the unit of its exact sum of squares."""
    variances = {}
    for name, (first, second) in sums.items():
        share = max(training[name]["present"] / training[name]["rows"], 1e-12)
        variance = second / share - (first / share) ** 2
        variances[name] = float(max(variance, MIN_RELATIVE_VARIANCE)) * scales[name][1] ** 2
    return variances


def find_scale(
    member: ClientTable | None,
    draft: Schema,
    reading: ParsedTable | None,
    variances: dict[str, float],
    rows: float,
) -> Part[Schema]:
    """Return the schema with the scales of its columns, from sums of squares about the means."""
    encoded = [(column, name) for column in draft.columns for name in column.encoded]
    units = [variances[c.name] if c.kind != CATEGORY and name == c.name else 1.0 for c, name in encoded]
    units_of_sums = np.array([*units, variances.get(draft.target, 1.0)]) * rows
    squares = np.zeros(len(units_of_sums))
    if member is not None and reading is not None:
        own = sum_squares(member, draft, reading)
        squares[:-1] = [own.total(str(j), "squares") for j in range(len(units))]
        squares[-1] = own.total(TARGET_KEY, "squares") if draft.kind == REGRESSION else 0.0
    total = yield from add_up(SPREAD, {"squares": squares / units_of_sums})
    *columns, target = (total["squares"] * units_of_sums).tolist()
    facts = {str(j): {"squares": square} for j, square in enumerate(columns)}
    facts[TARGET_KEY] = {"rows": rows, "squares": target}
    return complete_schema(gather(facts, {}), draft)
