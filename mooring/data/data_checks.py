"""Checks of the data: all findings, not only the first."""

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
from mooring.data.cures import Cure
from mooring.data.data_warnings import find_leaks, find_suspicious_values
from mooring.data.formula_parser import parse_formula
from mooring.data.formulas import learn_formula, required_columns
from mooring.data.load_options import LoadOptions
from mooring.data.loading import clean_rows, roles_of
from mooring.data.schema_client import find_nearest_cell, survey_columns
from mooring.data.schema_server import explain_useless_columns, find_outlier_cells, summarize_column
from mooring.data.sheet_layout import TOTAL
from mooring.data.splits import TRAIN, Shares, parse_shares
from mooring.data.table_sources import read_source
from mooring.data.tables import Table, count_phrase, quote_list, require_column
from mooring.data.target import Target, read_target

TARGET_READING, ERROR, WARNING, NOTE = "target", "error", "warning", "note"
SEVERITIES = (TARGET_READING, ERROR, WARNING, NOTE)
MAX_SIZE_RATIO = 100  # largest client against the median one
MAX_MISSING_SHARE = 0.5
CLIP_SHARES = (0.01, 0.02, 0.05)  # of a column's lowest and highest numbers, where clipping is suggested
EXPECTED_REPEATS, MAX_REPEAT_SHARE = 20, 0.05
MAX_SIMILAR_FINDINGS = 5  # more findings of one form become one line
NAMES_AND_NUMBERS = re.compile(r"'[^']*'|-?\d[\d.,e+-]*%?")  # names and numbers within a sentence


class Finding(NamedTuple):
    severity: str  # "target": its kind; "error": `load` refuses; "warning": results may mislead; "note"
    client: str | None
    column: str | None
    sentence: str
    count: int = 1  # type: ignore[assignment]  # number of similar findings in this line
    cures: tuple[Cure, ...] = ()  # options that mend it, the first one being the usual one


class CheckedTable(NamedTuple):
    """Data that all checks share."""

    table: Table
    roles: ColumnRoles
    code: np.ndarray
    names: list[str]
    columns: dict[str, tuple[str, Values]]  # kind and values of every feature
    useless: dict[str, str]  # features that are left out, with reasons
    target: Target | None
    seed: int
    shares: Shares
    allowed: frozenset[str] = frozenset()  # columns that may predict the target almost perfectly


def check(
    source: object,
    **arguments: object,
) -> list[Finding]:
    """Return the target's kind, then all errors, warnings and notes on a source, worst first; many findings
    of one form are one line. The arguments are those of `load`."""
    options = LoadOptions.make(arguments)
    client, target, kind, seed = options.client, options.target, options.target_type, options.seed
    unit, time_column, split, weights = options.group, options.time_column, options.split, options.weights
    features, drop, min_rows, drop_small = options.features, options.drop, options.min_rows, options.drop_small
    findings: list[Finding] = []

    def attempt(work: Callable[[], Any], column: str | None = None) -> Any:
        try:
            return work()
        except RequestError as error:
            findings.append(Finding(ERROR, None, column, str(error)))
            return None

    def finish() -> list[Finding]:
        return group_similar(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))

    table = attempt(lambda: read_source(source, options.reading()))
    if table is None:
        return finish()
    roles_by_name = {"client": client or table.client or "client", "target": target or table.target or "target"}
    asked_for = {"group": unit, "time": time_column, "split": split, "weights": weights}
    roles_by_name |= {role: name for role, name in asked_for.items() if isinstance(name, str)}
    for role, name in roles_by_name.items():
        attempt(partial(require_column, table.frame, name, role, table.title), name)
    if findings:
        other_columns = [c for c in table.frame.columns if c not in roles_by_name.values()]
        findings += column_findings(table, {c: detect_and_parse(table.frame[c]) for c in other_columns}, {})
        return finish()

    unreadable = [
        Finding(ERROR, None, stray.column, stray.describe(table.place(int(stray.rows[0]))), cures=stray.cures)
        for stray in table.strays
    ]
    unreadable += [Finding(ERROR, None, doubt.column, f"{table.title}: {doubt.sentence}") for doubt in table.ambiguous]
    if options.formula is not None and table.x is None:
        formula = parse_formula(options.formula)
        attempt(lambda: learn_formula(formula, table.frame, table.place, table.title))
        formula_columns = required_columns(formula)
        features = [
            name for name in formula_columns if name in table.frame.columns and name not in roles_by_name.values()
        ]
    roles = attempt(lambda: roles_of(table, options))
    cleaned = None if roles is None else attempt(lambda: clean_rows(table, options, roles))
    if cleaned is None:
        return finish()
    table, new_notes = cleaned
    findings += [Finding(NOTE, None, None, note) for note in new_notes]
    if options.drop_missing_target:
        remaining = attempt(lambda: rules.drop_missing_targets(table, roles_by_name["target"]), roles_by_name["target"])
        if remaining is None:
            return finish()
        table, new_notes = remaining
        findings += [Finding(NOTE, None, roles_by_name["target"], note) for note in new_notes]
    members = attempt(lambda: rules.client_codes(table, roles_by_name["client"]), roles_by_name["client"])
    names = (
        []
        if roles is None or table.x is not None
        else attempt(lambda: rules.feature_names(table, roles, features, drop))
    )
    used_names = {*(names or ()), *roles_by_name.values()}
    refused = {finding.column: finding for finding in unreadable if finding.column in used_names}
    findings += refused.values()
    columns = {name: detect_and_parse(table.frame[name]) for name in names or [] if name not in refused}
    code, clients = members or (np.zeros(len(table.frame), dtype=np.int64), [table.title])
    survey = ColumnStatistics(
        tuple(clients), survey_columns(table.frame, [*columns, roles_by_name["target"]], code, len(clients))
    )
    useless = explain_useless_columns({name: summarize_column(survey, name) for name in columns})
    findings += column_findings(table, columns, useless)
    target_kind = table.kind if kind == "auto" and table.kind else kind
    answer = None
    if roles_by_name["target"] not in refused:
        answer = attempt(
            lambda: read_target(
                table.frame[roles_by_name["target"]], target_kind, table.place, table.title, code, clients
            ),
            roles_by_name["target"],
        )
    if answer is not None:
        findings.append(
            Finding(
                TARGET_READING,
                None,
                roles_by_name["target"],
                describe_target(roles_by_name["target"], answer, target_kind),
            )
        )
    numbers = [*columns, *([roles_by_name["target"]] if answer is not None and answer.kind == REGRESSION else [])]

    def find_cell(client: str, column: str, near: float) -> float:
        return find_nearest_cell(table.frame, code == clients.index(client), column, near)

    for cell in find_outlier_cells(survey, numbers, table.title, find_cell):
        severity, column = ERROR if cell.refused else WARNING, cell.column
        cures = () if column == roles_by_name["target"] else (Cure("drop", column),)
        if column in columns:
            cures = (*suggest_clipping(columns[column][1], cell.limits), *cures)
        findings.append(Finding(severity, cell.client, column, cell.sentence, cures=cures))
    if roles is not None and members is not None:
        small = attempt(lambda: rules.explain_smallness(table, roles, code, len(clients), min_rows))
        tiny = rules.find_unsplittable_clients(roles, code, len(clients), min_rows)
        for i, reason in sorted((small or {}).items()):
            left_out = drop_small or i in tiny
            end = "; it is left out, and gets the global model." if left_out else "."
            sentence = f"Client '{clients[i]}' has {reason}{end}"
            cures = () if left_out else (Cure("drop_small", True),)
            findings.append(Finding(WARNING if left_out else ERROR, clients[i], None, sentence, cures=cures))
        attempt(lambda: rules.weights_by_client(table, roles.weights, code, clients), roles.weights)
        if small and len(small) == len(clients):
            findings.append(Finding(ERROR, None, None, f"{table.title}: every client is too small."))
        checked = CheckedTable(
            table, roles, code, clients, columns, useless, answer, seed, parse_shares(split), frozenset(options.allow)
        )
        for find_issues in (
            name_findings, size_findings, class_findings, value_findings, client_column_findings, copy_findings
        ):  # fmt: skip
            findings += find_issues(checked)
        if answer is not None:
            findings += attempt(lambda: list(part_findings(checked, small or {}))) or []
    return finish()


def suggest_clipping(values: Values, limits: tuple[float, float]) -> tuple[Cure, ...]:
    """Return the smallest clipping that affects all cells beyond the limits, if there is one."""
    if isinstance(values, pd.Categorical):
        return ()
    share = max((values < limits[0]).mean(), (values > limits[1]).mean())
    return tuple(Cure("winsorize", clipped) for clipped in CLIP_SHARES if share < clipped)[:1]


def describe_target(name: str, target: Target, requested: str) -> str:
    """Return a sentence on the target's kind."""
    if target.classes:
        count = np.bincount(target.y, minlength=len(target.classes))
        class_texts = [f"'{value}' ({n} rows)" for value, n in zip(target.classes[:MAX_SIMILAR_FINDINGS], count)]
        remainder = (
            f" and {len(target.classes) - MAX_SIMILAR_FINDINGS} more"
            if len(target.classes) > MAX_SIMILAR_FINDINGS
            else ""
        )
        description = f"{len(target.classes)} classes, {', '.join(class_texts)}{remainder}"
    else:
        y = target.y
        description = (
            f"{'counts' if target.kind == COUNT else 'numbers'} from {y.min():g} to {y.max():g}, mean {y.mean():g}"
        )
    end = "" if requested != "auto" else "; another kind can be asked for"
    return f"Target '{name}' is taken as {target.kind}: {description}{end}."


def group_similar(findings: list[Finding]) -> list[Finding]:
    """Return findings with similar ones of many columns or clients merged into one line; the order is unchanged."""
    similar: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        form = NAMES_AND_NUMBERS.sub("_", finding.sentence)
        similar.setdefault((finding.severity, form), []).append(finding)
    out = []
    for (severity, _), group in similar.items():
        if len(group) <= MAX_SIMILAR_FINDINGS:
            out += group
            continue
        columns, clients = ({getattr(f, of) for f in group} for of in ("column", "client"))
        column, client = (next(iter(s)) if len(s) == 1 else None for s in (columns, clients))
        other_names = [f.column if len(columns) > 1 else f.client for f in group[1:]]
        repeats = f"The same is found {len(other_names)} times more: {quote_list(dict.fromkeys(other_names))}."
        sentence = f"{group[0].sentence} {repeats}"
        cures = group[0].cures if all(finding.cures == group[0].cures for finding in group) else ()
        out.append(Finding(severity, client, column, sentence, len(group), cures))
    return out


def detect_and_parse(series: pd.Series) -> tuple[str, Values]:
    kind = detect_kind(series)
    return kind, parse_values(series, kind)[0]


def column_findings(table: Table, columns: dict[str, tuple[str, Values]], useless: dict[str, str]) -> Iterator[Finding]:
    """Cells that cannot be read, missing values, keys, constants."""
    for name, (kind, values) in columns.items():
        series = table.frame[name]
        slips, infinite = parse_values(series, kind)[1], find_infinities(values)
        if len(slips):
            problem = f"{count_phrase(len(slips), 'value')} of a column of {kind}s cannot be read"
            sentence = f"Column '{name}': {problem}; the first is '{series.iloc[slips[0]]}' in {table.place(slips[0])}."
            yield Finding(ERROR, None, name, sentence)
        if len(infinite):
            location = f"the first in {table.place(infinite[0])}"
            yield Finding(
                ERROR, None, name, f"Column '{name}': {count_phrase(len(infinite), 'infinite value')}, {location}."
            )
        if name in useless:
            sentence = f"Column '{name}' {useless[name]}; it is left out unless it is asked for."
            yield Finding(NOTE, None, name, sentence)
            continue
        share = is_missing(values).mean()
        if share > 0:
            severity = WARNING if share > MAX_MISSING_SHARE else NOTE
            sentence = f"Column '{name}': {share:.1%} of the values are missing."
            yield Finding(severity, None, name, sentence, cures=(Cure("drop", name),))


def name_findings(checked: CheckedTable) -> Iterator[Finding]:
    """Clients that may be one client, spelt twice."""
    first_names: dict[str, str] = {}
    for name in checked.names:
        normalized = "".join(name.split()).casefold()
        if normalized in first_names:
            sentence = (
                f"Clients '{first_names[normalized]}' and '{name}' differ in case or spaces only; are they the same?"
            )
            yield Finding(WARNING, name, checked.roles.client, sentence)
        first_names.setdefault(normalized, name)
        if TOTAL.match(name):
            sentence = f"Client '{name}' is named like a total; if its rows are sums of others, delete them."
            yield Finding(WARNING, name, checked.roles.client, sentence)


def size_findings(checked: CheckedTable) -> Iterator[Finding]:
    size = np.bincount(checked.code, minlength=len(checked.names))
    if len(size) == 1:
        sentence = f"There is one client only, '{checked.names[0]}'; a federation needs two or more. Check --client."
        yield Finding(ERROR, None, checked.roles.client, sentence)
    largest, middle = int(size.argmax()), float(np.median(size))
    if size[largest] > MAX_SIZE_RATIO * middle:
        name = checked.names[largest]
        sentence = f"Client '{name}' has {size[largest]} rows, {size[largest] / middle:.0f} times the median client."
        yield Finding(WARNING, name, None, sentence + " Weights by size make it the whole federation.")


def class_findings(checked: CheckedTable) -> Iterator[Finding]:
    """Clients with one class."""
    if checked.target is None:
        return
    y, roles = checked.target.y, checked.roles
    if checked.target.kind in (BINARY, CLASSES):
        cells = np.unique(np.stack([checked.code, y]), axis=1)
        lone = np.flatnonzero(np.bincount(cells[0], minlength=len(checked.names)) == 1)
        first = {int(c): int(k) for c, k in cells.T[::-1]}
        for i in lone:
            level = checked.target.classes[first[int(i)]]
            sentence = (
                f"Client '{checked.names[i]}' has one class only, '{level}'; a local model cannot learn the others."
            )
            yield Finding(WARNING, checked.names[i], roles.target, sentence)


def value_findings(checked: CheckedTable) -> Iterator[Finding]:
    """Yield columns that reveal the target, codes for missing values, and levels that may be one."""
    if checked.target is not None:
        columns = {name: values for name, (_, values) in checked.columns.items() if name not in checked.useless}
        for leak in find_leaks(columns, checked.target, checked.roles.target):
            severity = NOTE if leak.column in checked.allowed else ERROR
            yield Finding(severity, None, leak.column, leak.sentence, cures=leak.cures)
        for suspicion in find_suspicious_values(columns, checked.target, checked.roles.target):
            yield Finding(WARNING, None, suspicion.column, suspicion.sentence, cures=suspicion.cures)


def client_column_findings(checked: CheckedTable) -> Iterator[Finding]:
    """Columns that some clients lack altogether, that do not vary within clients, or that number a client's rows."""
    clients, size = len(checked.names), np.bincount(checked.code, minlength=len(checked.names))
    for name, (_, values) in checked.columns.items():
        if name in checked.useless:
            continue
        absent = is_missing(values)
        lacking = np.flatnonzero(sum_by_client(absent, checked.code, clients) == size)
        for finding in list_by_client(checked, lacking, name, WARNING, f"has no value of column '{name}'"):
            yield finding._replace(cures=(Cure("drop", name),))
        codes = np.asarray(values.codes if isinstance(values, pd.Categorical) else values, dtype=float)
        cells = pd.DataFrame({"client": checked.code, "value": codes})[~absent].value_counts()
        distinct = np.bincount(cells.index.get_level_values("client"), minlength=clients)
        yield from list_by_client(
            checked, np.flatnonzero(distinct == 1), name, NOTE, f"has one value only of column '{name}'"
        )
        if types.is_integer_dtype(checked.table.frame[name]) and numbers_rows(cells, size):
            sentence = f"Column '{name}' hardly repeats within a client; if it numbers the rows, drop it."
            yield Finding(NOTE, None, name, sentence, cures=(Cure("drop", name),))


def numbers_rows(cells: pd.Series, size: np.ndarray) -> bool:
    """Return whether values repeat within clients far less often than if clients drew from the values of all
    clients."""
    share = cells.groupby(level="value").sum().to_numpy() / cells.sum()
    pairs = (size * (size - 1) / 2).sum()
    repeats = (cells * (cells - 1) / 2).sum()
    return bool(pairs * (share**2).sum() >= EXPECTED_REPEATS and repeats <= MAX_REPEAT_SHARE * pairs * (share**2).sum())


def list_by_client(
    checked: CheckedTable, hit: np.ndarray, column: str | None, severity: str, problem: str, max_listed: int = 5
) -> Iterator[Finding]:
    """Yield a finding for each client, or one for all if they are many."""
    if len(hit) <= max_listed:
        for i in hit:
            yield Finding(severity, checked.names[i], column, f"Client '{checked.names[i]}' {problem}.")
    else:
        clients_text = f"{len(hit)} of {len(checked.names)} clients ({quote_list((checked.names[i] for i in hit), 3)})"
        yield Finding(severity, None, column, f"{clients_text}: each {problem}.")


def copy_findings(checked: CheckedTable) -> Iterator[Finding]:
    """Rows, and whole clients, that are copies of others."""
    content = checked.table.frame.drop(columns=checked.roles.client)
    if checked.table.x is not None or content.shape[1] < 2:
        return
    text = [c for c in content.columns if not types.is_numeric_dtype(content[c])]
    row = pd.util.hash_pandas_object(content.astype(dict.fromkeys(text, str)), index=False).to_numpy()
    twice = pd.DataFrame({"client": checked.code, "row": row}).duplicated().to_numpy()
    copies = np.bincount(checked.code[twice], minlength=len(checked.names))
    problem = "has rows that repeat; train and test may share them, unless --drop-repeats leaves them out"
    repeated = list_by_client(checked, np.flatnonzero(copies), None, NOTE, problem)
    yield from (finding._replace(cures=(Cure("drop_repeats", True),)) for finding in repeated)
    order = np.lexsort((row, checked.code))
    start = np.searchsorted(checked.code[order], np.arange(1, len(checked.names)))
    first_names: dict[bytes, str] = {}
    for name, rows in zip(checked.names, np.split(row[order], start)):
        first_name = first_names.setdefault(rows.tobytes(), name)
        if first_name != name:
            yield Finding(WARNING, name, None, f"Clients '{first_name}' and '{name}' hold exactly the same rows.")


def part_findings(checked: CheckedTable, small: dict[int, str]) -> Iterator[Finding]:
    """Parts that lack rows or classes, once small clients are left out."""
    is_kept = ~np.isin(checked.code, list(small))
    if checked.target is None or not is_kept.any():
        return
    target = checked.target._replace(y=checked.target.y[is_kept])
    code, names = rules.compact_codes(checked.code[is_kept], checked.names)
    part, notes = rules.split_rows(
        rules.subset(checked.table, is_kept), checked.roles, code, names, target, checked.seed, checked.shares
    )
    for note in notes:
        yield Finding(WARNING, None, None, note)
    if target.kind not in (BINARY, CLASSES):
        return
    trained = set(target.y[part == TRAIN])
    for part_code in (1, 2):
        unseen = sorted(set(target.y[part == part_code]) - trained)
        if unseen:
            levels = quote_list(target.classes[k] for k in unseen)
            sentence = f"Classes {levels} are in the {PARTS[part_code]} rows, but in no client's training rows."
            yield Finding(WARNING, None, checked.roles.target, sentence)
