"""What is wrong with my data? All findings, not only the first."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from pandas.api import types

from mooring.core.errors import RequestError
from mooring.data import column_roles as rules
from mooring.data.clients import BINARY, CLASSES, COUNT, PARTS, REGRESSION
from mooring.data.column_roles import ColumnRoles
from mooring.data.column_statistics import ColumnStatistics, sum_by_client
from mooring.data.column_types import Values, detect_kind, find_infinities, is_missing, parse_values
from mooring.data.data_warnings import find_leaks, find_suspicious_values
from mooring.data.formulas import learn_formula, parse_formula, required_columns
from mooring.data.load_options import LoadOptions
from mooring.data.loading import clean_rows, roles_of
from mooring.data.schema_client import survey_columns
from mooring.data.schema_server import explain_uselessness, find_outlier_cells
from mooring.data.splits import TRAIN, Shares, parse_shares
from mooring.data.table_sources import read_source
from mooring.data.tables import Table, count_phrase, quote_list, require_column
from mooring.data.target import Target, read_target

TARGET_READING, ERROR, WARNING, NOTE = "target", "error", "warning", "note"
SEVERITIES = (TARGET_READING, ERROR, WARNING, NOTE)
MAX_SIZE_RATIO = 100  # largest client against the median one
MAX_MISSING_SHARE = 0.5
EXPECTED_REPEATS, MAX_REPEAT_SHARE = 20, 0.05
MAX_SIMILAR_FINDINGS = 5  # more findings of one form become one line
NAMES_AND_NUMBERS = re.compile(r"'[^']*'|-?\d[\d.,e+-]*%?")  # what a sentence fills in: names and numbers


class Finding(NamedTuple):
    severity: str  # "target": what it is taken for; "error": load refuses; "warning": results may mislead; "note"
    client: str | None
    column: str | None
    sentence: str
    count: int = 1  # type: ignore[assignment]  # how many findings of this form the line stands for


class CheckedTable(NamedTuple):
    """What the checks share."""

    table: Table
    roles: ColumnRoles
    code: np.ndarray
    names: list[str]
    columns: dict[str, tuple[str, Values]]  # kind and values of every feature
    useless: dict[str, str]  # features that are left out, and why
    target: Target | None
    seed: int
    shares: Shares
    allowed: frozenset[str] = frozenset()  # columns that may predict the target almost perfectly


def check(
    source: Any,
    **given: Any,
) -> list[Finding]:
    """What the target is taken for, then everything that is or may be wrong with a source, worst first; many findings
    of one form are one line. The arguments are those of `load`."""
    options = LoadOptions.make(given)
    client, target, kind, seed = options.client, options.target, options.target_type, options.seed
    unit, time_column, split, weights = options.group, options.time_column, options.split, options.weights
    features, drop, min_rows, drop_small = options.features, options.drop, options.min_rows, options.drop_small
    found: list[Finding] = []

    def attempt(work: Callable[[], Any], column: str | None = None) -> Any:
        try:
            return work()
        except RequestError as error:
            found.append(Finding(ERROR, None, column, str(error)))
            return None

    def all_found() -> list[Finding]:
        return grouped(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity)))

    table = attempt(lambda: read_source(source, options.reading()))
    if table is None:
        return all_found()
    wanted = {"client": client or table.client or "client", "target": target or table.target or "target"}
    asked_for = {"group": unit, "time": time_column, "split": split, "weights": weights}
    wanted |= {role: name for role, name in asked_for.items() if isinstance(name, str)}
    for role, name in wanted.items():
        attempt(partial(require_column, table.frame, name, role, table.title), name)
    if found:
        others = [c for c in table.frame.columns if c not in wanted.values()]
        found += column_findings(table, {c: parsed(table.frame[c]) for c in others}, {})
        return all_found()

    unreadable = [(stray.column, stray.describe(table.place(int(stray.rows[0])))) for stray in table.strays]
    unreadable += [(doubt.column, f"{table.title}: {doubt.sentence}") for doubt in table.ambiguous]
    if options.formula is not None and table.x is None:
        formula = parse_formula(options.formula)
        attempt(lambda: learn_formula(formula, table.frame, table.place, table.title))
        named = required_columns(formula, map(str, table.frame.columns))
        features = [name for name in named if name in table.frame.columns and name not in wanted.values()]
    roles = attempt(lambda: roles_of(table, options))
    cleaned = None if roles is None else attempt(lambda: clean_rows(table, options, roles))
    if cleaned is None:
        return all_found()
    table, said = cleaned
    found += [Finding(NOTE, None, None, note) for note in said]
    if options.drop_missing_target:
        kept = attempt(lambda: rules.drop_missing_targets(table, wanted["target"]), wanted["target"])
        if kept is None:
            return all_found()
        table, said = kept
        found += [Finding(NOTE, None, wanted["target"], note) for note in said]
    members = attempt(lambda: rules.client_codes(table, wanted["client"]), wanted["client"])
    names = (
        []
        if roles is None or table.x is not None
        else attempt(lambda: rules.feature_names(table, roles, features, drop))
    )
    refused = {name: sentence for name, sentence in unreadable if name in {*(names or ()), *wanted.values()}}
    found += [Finding(ERROR, None, name, sentence) for name, sentence in refused.items()]
    columns = {name: parsed(table.frame[name]) for name in names or [] if name not in refused}
    code, clients = members or (np.zeros(len(table.frame), dtype=np.int64), [table.title])
    survey = ColumnStatistics(
        tuple(clients), survey_columns(table.frame, [*columns, wanted["target"]], code, len(clients))
    )
    reasons = {name: explain_uselessness(survey, name, kind_) for name, (kind_, _) in columns.items()}
    useless = {name: reason for name, reason in reasons.items() if reason is not None}
    found += column_findings(table, columns, useless)
    asked = table.kind if kind == "auto" and table.kind else kind
    answer = None
    if wanted["target"] not in refused:
        answer = attempt(
            lambda: read_target(table.frame[wanted["target"]], asked, table.place, table.title, code, clients),
            wanted["target"],
        )
    if answer is not None:
        found.append(Finding(TARGET_READING, None, wanted["target"], taken_for(wanted["target"], answer, asked)))
    numbers = [*columns, *([wanted["target"]] if answer is not None and answer.kind == REGRESSION else [])]
    for cell in find_outlier_cells(survey, numbers, table.title):
        found.append(Finding(ERROR if cell.refused else WARNING, cell.client, cell.column, cell.sentence))
    if roles is not None and members is not None:
        small = attempt(lambda: rules.explain_smallness(table, roles, code, len(clients), min_rows))
        tiny = rules.find_unsplittable_clients(roles, code, len(clients), min_rows)
        for i, reason in sorted((small or {}).items()):
            left_out = drop_small or i in tiny
            end = "; it is left out, and gets the global model." if left_out else "."
            sentence = f"Client '{clients[i]}' has {reason}{end}"
            found.append(Finding(WARNING if left_out else ERROR, clients[i], None, sentence))
        attempt(lambda: rules.weights_by_client(table, roles.weights, code, clients), roles.weights)
        if small and len(small) == len(clients):
            found.append(Finding(ERROR, None, None, f"{table.title}: every client is too small."))
        facts = CheckedTable(
            table, roles, code, clients, columns, useless, answer, seed, parse_shares(split), frozenset(options.allow)
        )
        for about in (
            name_findings, size_findings, class_findings, value_findings, client_column_findings, copy_findings
        ):  # fmt: skip
            found += about(facts)
        if answer is not None:
            found += attempt(lambda: list(part_findings(facts, small or {}))) or []
    return all_found()


def taken_for(name: str, target: Target, asked: str) -> str:
    """What the target is, before any work is done."""
    if target.classes:
        count = np.bincount(target.y, minlength=len(target.classes))
        shown = [f"'{value}' ({n} rows)" for value, n in zip(target.classes[:MAX_SIMILAR_FINDINGS], count)]
        more = (
            f" and {len(target.classes) - MAX_SIMILAR_FINDINGS} more"
            if len(target.classes) > MAX_SIMILAR_FINDINGS
            else ""
        )
        what = f"{len(target.classes)} classes, {', '.join(shown)}{more}"
    else:
        y = target.y
        what = f"{'counts' if target.kind == COUNT else 'numbers'} from {y.min():g} to {y.max():g}, mean {y.mean():g}"
    end = "" if asked != "auto" else "; another kind can be asked for"
    return f"Target '{name}' is taken as {target.kind}: {what}{end}."


def grouped(findings: list[Finding]) -> list[Finding]:
    """Findings that say the same of many columns or clients as one line each; the order stays."""
    alike: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        form = NAMES_AND_NUMBERS.sub("_", finding.sentence)
        alike.setdefault((finding.severity, form), []).append(finding)
    out = []
    for (severity, _), group in alike.items():
        if len(group) <= MAX_SIMILAR_FINDINGS:
            out += group
            continue
        columns, clients = ({getattr(f, of) for f in group} for of in ("column", "client"))
        column, client = (next(iter(s)) if len(s) == 1 else None for s in (columns, clients))
        others = [f.column if len(columns) > 1 else f.client for f in group[1:]]
        said = f"{group[0].sentence} The same is found {len(others)} times more: {quote_list(dict.fromkeys(others))}."
        out.append(Finding(severity, client, column, said, len(group)))
    return out


def parsed(series: pd.Series) -> tuple[str, Values]:
    kind = detect_kind(series)
    return kind, parse_values(series, kind)[0]


def column_findings(table: Table, columns: dict[str, tuple[str, Values]], useless: dict[str, str]) -> Iterator[Finding]:
    """Cells that cannot be read, missing values, keys, constants."""
    for name, (kind, values) in columns.items():
        series = table.frame[name]
        slips, infinite = parse_values(series, kind)[1], find_infinities(values)
        if len(slips):
            what = f"{count_phrase(len(slips), 'value')} of a column of {kind}s cannot be read"
            sentence = f"Column '{name}': {what}; the first is '{series.iloc[slips[0]]}' in {table.place(slips[0])}."
            yield Finding(ERROR, None, name, sentence)
        if len(infinite):
            where = f"the first in {table.place(infinite[0])}"
            yield Finding(
                ERROR, None, name, f"Column '{name}': {count_phrase(len(infinite), 'infinite value')}, {where}."
            )
        if name in useless:
            sentence = f"Column '{name}' {useless[name]}; it is left out unless it is asked for."
            yield Finding(NOTE, None, name, sentence)
            continue
        share = is_missing(values).mean()
        if share > 0:
            severity = WARNING if share > MAX_MISSING_SHARE else NOTE
            yield Finding(severity, None, name, f"Column '{name}': {share:.1%} of the values are missing.")


def name_findings(facts: CheckedTable) -> Iterator[Finding]:
    """Clients that may be one client, spelt twice."""
    seen: dict[str, str] = {}
    for name in facts.names:
        plain = "".join(name.split()).casefold()
        if plain in seen:
            sentence = f"Clients '{seen[plain]}' and '{name}' differ in case or spaces only; are they the same?"
            yield Finding(WARNING, name, facts.roles.client, sentence)
        seen.setdefault(plain, name)


def size_findings(facts: CheckedTable) -> Iterator[Finding]:
    size = np.bincount(facts.code, minlength=len(facts.names))
    if len(size) == 1:
        yield Finding(WARNING, None, facts.roles.client, f"There is one client only, '{facts.names[0]}'.")
    largest, middle = int(size.argmax()), float(np.median(size))
    if size[largest] > MAX_SIZE_RATIO * middle:
        name = facts.names[largest]
        sentence = f"Client '{name}' has {size[largest]} rows, {size[largest] / middle:.0f} times the median client."
        yield Finding(WARNING, name, None, sentence + " Weights by size make it the whole federation.")


def class_findings(facts: CheckedTable) -> Iterator[Finding]:
    """Clients with one class."""
    if facts.target is None:
        return
    y, roles = facts.target.y, facts.roles
    if facts.target.kind in (BINARY, CLASSES):
        cells = np.unique(np.stack([facts.code, y]), axis=1)
        lone = np.flatnonzero(np.bincount(cells[0], minlength=len(facts.names)) == 1)
        first = {int(c): int(k) for c, k in cells.T[::-1]}
        for i in lone:
            level = facts.target.classes[first[int(i)]]
            sentence = f"Client '{facts.names[i]}' has one class only, '{level}'; it cannot learn the others alone."
            yield Finding(WARNING, facts.names[i], roles.target, sentence)


def value_findings(facts: CheckedTable) -> Iterator[Finding]:
    """Columns that tell the target, codes for missing values, and levels that are one level, spelt twice."""
    if facts.target is not None:
        columns = {name: values for name, (_, values) in facts.columns.items() if name not in facts.useless}
        for name, sentence in find_leaks(columns, facts.target, facts.roles.target):
            yield Finding(NOTE if name in facts.allowed else ERROR, None, name, sentence)
        for name, sentence in find_suspicious_values(columns, facts.target, facts.roles.target):
            yield Finding(WARNING, None, name, sentence)


def client_column_findings(facts: CheckedTable) -> Iterator[Finding]:
    """Columns that some clients lack altogether, that do not vary within clients, or that number a client's rows."""
    clients, size = len(facts.names), np.bincount(facts.code, minlength=len(facts.names))
    for name, (_, values) in facts.columns.items():
        if name in facts.useless:
            continue
        absent = is_missing(values)
        lacking = np.flatnonzero(sum_by_client(absent, facts.code, clients) == size)
        yield from per_client(facts, lacking, name, WARNING, f"has no value of column '{name}'")
        codes = np.asarray(values.codes if isinstance(values, pd.Categorical) else values, dtype=float)
        cells = pd.DataFrame({"client": facts.code, "value": codes})[~absent].value_counts()
        distinct = np.bincount(cells.index.get_level_values("client"), minlength=clients)
        yield from per_client(
            facts, np.flatnonzero(distinct == 1), name, NOTE, f"has one value only of column '{name}'"
        )
        if types.is_integer_dtype(facts.table.frame[name]) and numbers_rows(cells, size):
            sentence = f"Column '{name}' hardly repeats within a client; if it numbers the rows, drop it."
            yield Finding(NOTE, None, name, sentence)


def numbers_rows(cells: pd.Series, size: np.ndarray) -> bool:
    """Whether a value repeats within clients far less often than if clients drew from the common values."""
    share = cells.groupby(level="value").sum().to_numpy() / cells.sum()
    pairs = (size * (size - 1) / 2).sum()
    repeats = (cells * (cells - 1) / 2).sum()
    return bool(pairs * (share**2).sum() >= EXPECTED_REPEATS and repeats <= MAX_REPEAT_SHARE * pairs * (share**2).sum())


def per_client(
    facts: CheckedTable, hit: np.ndarray, column: str | None, severity: str, what: str, most: int = 5
) -> Iterator[Finding]:
    """A finding for each client, or one for all of them when they are many."""
    if len(hit) <= most:
        for i in hit:
            yield Finding(severity, facts.names[i], column, f"Client '{facts.names[i]}' {what}.")
    else:
        who = f"{len(hit)} of {len(facts.names)} clients ({quote_list((facts.names[i] for i in hit), 3)})"
        yield Finding(severity, None, column, f"{who}: each {what}.")


def copy_findings(facts: CheckedTable) -> Iterator[Finding]:
    """Rows, and whole clients, that are copies of others."""
    content = facts.table.frame.drop(columns=facts.roles.client)
    if facts.table.x is not None or content.shape[1] < 2:
        return
    text = [c for c in content.columns if not types.is_numeric_dtype(content[c])]
    row = pd.util.hash_pandas_object(content.astype(dict.fromkeys(text, str)), index=False).to_numpy()
    twice = pd.DataFrame({"client": facts.code, "row": row}).duplicated().to_numpy()
    copies = np.bincount(facts.code[twice], minlength=len(facts.names))
    yield from per_client(
        facts, np.flatnonzero(copies), None, NOTE, "has rows that repeat; train and test may share them"
    )
    order = np.lexsort((row, facts.code))
    start = np.searchsorted(facts.code[order], np.arange(1, len(facts.names)))
    seen: dict[bytes, str] = {}
    for name, rows in zip(facts.names, np.split(row[order], start)):
        other = seen.setdefault(rows.tobytes(), name)
        if other != name:
            yield Finding(WARNING, name, None, f"Clients '{other}' and '{name}' hold exactly the same rows.")


def part_findings(facts: CheckedTable, small: dict[int, str]) -> Iterator[Finding]:
    """Parts that lack rows or classes, once small clients are left out."""
    keep = ~np.isin(facts.code, list(small))
    if facts.target is None or not keep.any():
        return
    target = facts.target._replace(y=facts.target.y[keep])
    code, names = rules.compact_codes(facts.code[keep], facts.names)
    part, notes = rules.split_rows(
        rules.subset(facts.table, keep), facts.roles, code, names, target, facts.seed, facts.shares
    )
    for note in notes:
        yield Finding(WARNING, None, None, note)
    if target.kind not in (BINARY, CLASSES):
        return
    trained = set(target.y[part == TRAIN])
    for which in (1, 2):
        unseen = sorted(set(target.y[part == which]) - trained)
        if unseen:
            levels = quote_list(target.classes[k] for k in unseen)
            sentence = f"Classes {levels} are in the {PARTS[which]} rows, but in no client's training rows."
            yield Finding(WARNING, None, facts.roles.target, sentence)
