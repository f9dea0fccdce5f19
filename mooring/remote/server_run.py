"""A run as the server leads it: wait for clients, agree on a schema, train, send every client its result.

The same call resumes an interrupted run: the run directory contains the participants and the agreed schema.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from mooring.core.cohort import Rows
from mooring.core.errors import ClientError, RequestError
from mooring.core.types import JsonObject
from mooring.data.clients import BINARY, CLASSES, PARTS, Clients
from mooring.data.column_statistics import ColumnStatistics, merge_statistics
from mooring.data.column_types import CATEGORY, DATE
from mooring.data.formulas import INTERCEPT, FormulaState, MixedFormula, categories_in, parse_formula
from mooring.data.rare_categories import LevelNames, find_common_fingerprints, name_levels
from mooring.data.schema import OTHER_LEVEL, Schema, describe_schema
from mooring.data.schema_server import SchemaPlan, complete_schema, draft_schema, plan_schema
from mooring.data.tables import Note
from mooring.engines.exchange import BEST, LAST, ClientRoster
from mooring.engines.fit import continue_fit, start_fit
from mooring.engines.fit_files import summarize_fit
from mooring.engines.fit_result import FitResult
from mooring.engines.loop import full_round
from mooring.engines.prepare import FIXED_TERMS_NOTE, Job, make_task
from mooring.engines.progress import OnProgress, ignore_progress
from mooring.engines.reply_checks import check_sizes
from mooring.remote.client_node import run_digest
from mooring.remote.exchange import RemoteExchange
from mooring.remote.fixed_sums import FixedSums
from mooring.remote.messages import ClientFailedError, Payload
from mooring.remote.messenger import (
    MIN_CLIENTS,
    Messenger,
    ignore_event,
    ignore_message,
)
from mooring.remote.secure_rule import (
    FIXED,
    MAX_ROWS_OVER_MEDIAN,
    PLAIN,
    bound_rows,
    bound_weight,
    check_secure_run,
    decide_secure,
    explain_visibility,
    sums_of,
)
from mooring.remote.secure_sums import SecureAggregator
from mooring.remote.transport import Transport
from mooring.runs.atomic_files import directory_lock, write_json
from mooring.runs.directory import RunDirectory, open_run
from mooring.runs.runfile import RunFile
from mooring.runs.sections import FederationSection

PARTICIPATION_FILE = "federation.json"  # how often each client was missed, and which were left out
CLIENTS_TITLE = "the clients"
MALFORMED_ERRORS = (ArithmeticError, KeyError, IndexError, TypeError, ValueError)  # that malformed statistics lead to
REPORTED_SHARE = 0.5  # of the weight, above which a client is named
MAX_DISTINCT_OF_CATEGORY = 10  # different numbers at one client, above which a column is not a category
T = TypeVar("T")


class PreparedFederation(NamedTuple):
    """A federation whose clients are connected and agree on a schema."""

    directory: RunDirectory | None  # of a run that is resumed
    run: RunFile
    options: FederationSection
    messenger: Messenger
    clients: Clients  # names, sizes and schema; their rows stay with them


def prepare_federation(
    run: RunFile,
    transport: Transport,
    out: str | Path,
    report: Callable[[str], None],
    refuse: Callable[[RunFile, FederationSection], None],
    record: Callable[..., None] = ignore_event,
) -> PreparedFederation:
    """Wait for the clients and agree on a schema, or read it from the run directory `out`; `refuse` checks the run."""
    run, directory = decide_secure(run), open_run(out) if Path(out).exists() else None
    if directory is not None:
        run = check_same_run(directory, run)
    options = run.federation or FederationSection()
    if options.clients is None:
        raise RequestError("how many clients take part? Set [federation] clients = 8, or list their names.")
    refuse(run, options)
    if sentence := explain_visibility(run):
        report(sentence)
    if run.training.threads:
        torch.set_num_threads(run.training.threads)
    messenger = Messenger(
        transport, run_digest(run), wait=options.wait, deadline=options.deadline, report=report, record=record
    )
    names = messenger.wait_for_clients(options.clients)
    if directory is None:
        run, clients = agree_on_run(messenger, names, run)
    else:
        if isinstance(options.clients, list) and (unknown := sorted(set(options.clients) - set(names))):
            raise RequestError(
                f"client '{unknown[0]}' of the run in {directory.path} cannot take part any more; start a new run with "
                "another --out."
            )
        schema = Schema.model_validate({k: v for k, v in directory.schema.items() if k != "seal"})
        clients = adopt_schema(messenger, names, run, schema, [], fresh=False)
    return PreparedFederation(directory, run, options, messenger, clients)


def agree_on_run(messenger: Messenger, names: tuple[str, ...], run: RunFile) -> tuple[RunFile, Clients]:
    """Return the clients that can take part, and the run file with their names, so that a resume finds them."""
    names, clients = resolve_participants(messenger, names, run)
    options = (run.federation or FederationSection()).model_copy(update={"clients": list(names)})
    return run.model_copy(update={"federation": options}), clients


def write_participation(out: str | Path, messenger: Messenger, names: tuple[str, ...]) -> None:
    """Write how often each client was missed, and which were left out and why."""
    missed = {name: messenger.missed[name] for name in names if messenger.missed[name]}
    about = {"clients": list(names), "missed": missed, "dropped": messenger.dropped, "dismissed": messenger.dismissed}
    write_json(Path(out) / PARTICIPATION_FILE, about)


def run_federation(
    run: RunFile,
    transport: Transport,
    out: str | Path,
    *,
    report: Callable[[str], None] = ignore_message,
    record: Callable[..., None] = ignore_event,
    on_progress: OnProgress = ignore_progress,
) -> FitResult:
    """Run a federation to its end, from the beginning or from the last checkpoint in the run directory `out`."""
    directory, run, options, messenger, clients = prepare_federation(
        run, transport, out, report, check_run_allowed, record
    )
    if directory is None:  # a federation saves every round, so that a crash costs one at most
        run = run.model_copy(update={"training": run.training.model_copy(update={"checkpoint_every": 1})})
    while True:
        job = Job(run, clients, make_task(run, clients))
        exchange = make_exchange(messenger, job, options, fresh=directory is None)
        if directory is not None:
            with directory_lock(directory.path):
                result, note = continue_fit(job, directory, exchange, on_progress)
            report(note or "the run resumed from its checkpoint")
            break
        try:
            result = start_fit(job, out, on_progress, exchange)
            break
        except ClientError as error:
            if Path(out).exists():  # rounds have begun
                raise
            run, clients = agree_on_run(messenger, exclude_clients(messenger, clients.names, error), run)
    send_results(exchange, result)
    write_participation(out, messenger, clients.names)
    return result


def make_exchange(messenger: Messenger, job: Job, options: FederationSection, *, fresh: bool) -> RemoteExchange:
    clients = job.clients
    sizes = {part: getattr(clients, part).size for part in PARTS}
    roster = ClientRoster(clients.names, clients.keys, clients.weights(job.run.training.weights), sizes)
    row = (clients.train.x[:1], clients.train.y[:1])
    kind, sums = sums_of(job.run), None
    if kind != PLAIN:
        sums = (
            FixedSums(messenger, roster, clients, job.run)
            if kind == FIXED
            else SecureAggregator(messenger, roster.names, options)
        )
    return RemoteExchange(messenger, roster, job.task, options, row, fresh=fresh, sums=sums)


def check_run_allowed(run: RunFile, options: FederationSection) -> None:
    if run.training.attack is not None:
        raise RequestError("attack is for trials in one process; leave it out of a federation's run file.")
    check_secure_run(run, options)


def check_same_run(directory: RunDirectory, run: RunFile) -> RunFile:
    """Return the run of a directory, or refuse it where the run file describes another."""
    known = directory.run
    if run_digest(known) != run_digest(run):
        raise RequestError(f"{directory.path} is another run than the run file's; choose another --out.")
    return known


def resolve_participants(messenger: Messenger, names: tuple[str, ...], run: RunFile) -> tuple[tuple[str, ...], Clients]:
    """Agree on a schema and on numbers of rows; where a client cannot take part, the others agree without it."""
    while True:
        try:
            schema, notes = agree_on_schema(messenger, names, run)
            return names, adopt_schema(messenger, names, run, schema, notes, fresh=True)
        except ClientFailedError as error:
            names = exclude_clients(messenger, names, error)


def exclude_clients(messenger: Messenger, names: tuple[str, ...], error: ClientError) -> tuple[str, ...]:
    """Dismiss clients that cannot take part and return the others; raise the error where too few are left."""
    remaining = tuple(name for name in names if name not in error.clients)
    if len(remaining) < MIN_CLIENTS:
        raise error
    for name, why in error.clients.items():
        messenger.dismiss(name, why)
    return remaining


def agree_on_schema(messenger: Messenger, names: tuple[str, ...], run: RunFile) -> tuple[Schema, list[str]]:
    """Return the schema of all clients' rows, from counts and sums, and notes."""

    replies: dict[str, Payload] = {}
    common: JsonObject = {}  # fields of all messages
    formula = None if run.data.formula is None else parse_formula(run.data.formula)

    def request_statistics(what: str, notes: Iterable[str] = (), **fields: object) -> dict[str, ColumnStatistics]:
        messages = {name: Payload(common | fields | {"notes": notes_visible_to(notes, name)}) for name in names}
        replies.update(messenger.ask_all(what, messages))
        return {name: ColumnStatistics.from_json(str(replies[name].fields["summary"])) for name in names}

    def agree_on_columns(categories: Collection[str] = ()) -> tuple[SchemaPlan, Schema, tuple[str, ...] | None]:
        """The plan, the draft and the names of the coefficients that vary by a formula."""
        surveys = request_statistics("survey")
        varying = agree_on_varying(replies) if common else None
        check_text_in_numeric_columns(surveys)
        kind, is_chosen = run.data.target_type or "auto", run.data.features is not None or formula is not None
        plan = agree_or_reject(
            surveys, lambda merged: plan_schema(merged, kind=kind, keep_useless=is_chosen, title=CLIENTS_TITLE)
        )
        columns = [
            feature.model_copy(update={"kind": CATEGORY}) if feature.name in categories else feature
            for feature in plan.columns
        ]
        plan = plan.model_copy(update={"columns": tuple(columns)})
        plan_fields = plan.model_dump(mode="json", exclude={"notes"})
        tallies, min_rows = request_statistics("tally", plan=plan_fields), run.data.min_category_rows or 1
        wanted = find_common_fingerprints(tallies.values(), min_rows, messenger.run)
        level_names: LevelNames = {column: {} for column in wanted}
        name_requests = dict.fromkeys(names, Payload(common | {"plan": plan_fields, "wanted": wanted}))
        for reply in messenger.ask_all("names", name_requests).values() if wanted else ():
            for column, levels in reply.fields["names"].items():
                level_names[column] |= levels
        tallies = name_levels(tallies, level_names, messenger.run)
        draft = agree_or_reject(tallies, lambda merged: draft_schema(merged, plan, rare=min_rows, title=CLIENTS_TITLE))
        return plan, draft, varying

    state = None
    if formula is not None:
        _, columns_of_formula, _ = agree_on_columns(categories_in(formula))
        state = make_formula_state(formula, columns_of_formula)
        common["formula"] = state.model_dump(mode="json")
    plan, draft, varying = agree_on_columns()
    plan_fields = plan.model_dump(mode="json", exclude={"notes"})
    spreads = request_statistics("spread", plan.notes, plan=plan_fields, draft=draft.model_dump(mode="json"))
    schema = agree_or_reject(spreads, lambda merged: complete_schema(merged, draft))
    notes = [*plan.notes, *describe_schema(schema.columns, schema.dropped)]
    if state is not None and varying is not None:
        all_vary = set(varying) == {INTERCEPT, *schema.features}
        state = state.model_copy(update={"varying": varying, "all_vary": all_vary})
        schema = schema.model_copy(update={"formula": state})
        notes += [FIXED_TERMS_NOTE] if run.algorithm is not None and not all_vary else []
    return schema, notes


def make_formula_state(formula: MixedFormula, draft: Schema) -> FormulaState:
    """Return the kinds, categories and replacements that the clients' columns agree on, for a formula."""
    columns = [column for column in draft.columns if not column.part]
    return FormulaState(
        text=formula.text,
        transforms={},
        levels={
            column.name: tuple(level for level in column.levels if not (column.other and level == OTHER_LEVEL))
            for column in columns
            if column.kind == CATEGORY
        },
        dates=tuple(column.name for column in columns if column.kind == DATE),
        fills={column.name: column.fill for column in columns},
        varying=(),
        all_vary=False,
    )


def agree_on_varying(replies: Mapping[str, Payload]) -> tuple[str, ...]:
    """Return the names of the coefficients that vary between clients; a client with others is named."""
    first = next(iter(replies.values())).fields.get("varying")
    for name, reply in replies.items():
        varying = reply.fields.get("varying")
        if not isinstance(varying, list) or varying != first:
            raise ClientFailedError(name, f"client '{name}' makes other columns of the formula than the others.")
    return tuple(str(name) for name in first)  # type: ignore[union-attr]


def check_text_in_numeric_columns(surveys: dict[str, ColumnStatistics]) -> None:
    """Reject clients with text in a column that is numeric at most clients: the column would be lost for all."""
    survey, problems = merge_statistics(surveys.values()), dict[str, str]()
    for column, counts in survey.facts.items():
        if not {"present", "numbers", "distinct", "dates"} <= counts.keys():
            continue  # the target
        present, numbers = counts["present"], counts["numbers"] + counts["dates"]
        numeric = (present > 0) & (numbers >= present)
        is_text = (present > 0) & ~numeric
        if (
            not is_text.any()
            or 2 * numeric.sum() <= (present > 0).sum()
            or counts["distinct"][numeric].max() <= MAX_DISTINCT_OF_CATEGORY
        ):
            continue
        for i in is_text.nonzero()[0]:
            count = f"{present[i] - numbers[i]:.0f} of {present[i]:.0f} values"
            problems.setdefault(
                survey.clients[i],
                f"client '{survey.clients[i]}', column '{column}': {count} are text, and the other clients have "
                "numbers there. Correct the cells or leave them empty, and join the next run.",
            )
    if problems and len(surveys) - len(problems) >= MIN_CLIENTS:
        raise ClientFailedError(*next(iter(problems.items())), problems)


def notes_visible_to(notes: Iterable[str], name: str) -> list[str]:
    """Return the notes that a client may read: they name no client but itself."""
    return [note for note in notes if not isinstance(note, Note) or note.is_visible_to(name)]


def agree_or_reject(by_client: dict[str, ColumnStatistics], agree: Callable[[ColumnStatistics], T]) -> T:
    """Return what all clients' statistics agree on; reject the one client without which the others agree."""
    try:
        return agree(merge_statistics(by_client.values()))
    except (RequestError, *MALFORMED_ERRORS) as error:
        for name in by_client if len(by_client) > MIN_CLIENTS else ():
            others = [summary for other, summary in by_client.items() if other != name]
            named = f"client '{name}'" in str(error) or not isinstance(error, RequestError)
            if named and can_agree(agree, others):
                why = str(error) if isinstance(error, RequestError) else f"its statistics are malformed ({error})"
                raise ClientFailedError(name, why) from error
        raise


def can_agree(agree: Callable[[ColumnStatistics], object], parts: list[ColumnStatistics]) -> bool:
    try:
        agree(merge_statistics(parts))
    except (RequestError, *MALFORMED_ERRORS):
        return False
    return True


def adopt_schema(
    messenger: Messenger, names: tuple[str, ...], run: RunFile, schema: Schema, notes: list[str], *, fresh: bool
) -> Clients:
    """Send the schema to the clients; return them with their numbers of rows, without rows."""
    fields = {"schema": schema.model_dump(mode="json"), "fresh": fresh}
    replies = messenger.ask_all("adopt", {name: Payload(fields) for name in names})
    notes = [*notes, *(Note(f"left out: {why}", [name]) for name, why in messenger.dismissed.items())]
    wide = run.task.model is None and run.task.name != "module"
    dtype = torch.float64 if wide else torch.float32
    label = torch.int64 if schema.kind in (BINARY, CLASSES) else dtype

    sizes = cap_reported_rows(messenger, names, replies, (run.federation or FederationSection()).max_rows)

    def counted(part: str) -> Rows:
        size = check_sizes(names, [sizes[name][part] for name in names])
        x, y = torch.zeros(1, len(schema.features), dtype=dtype), torch.zeros(1, dtype=label)
        return Rows(x, y, torch.zeros_like(size), size)  # one row of zeros, which shows what rows look like

    own = bound_weights(messenger, {name: float(replies[name].fields["weight"] or math.nan) for name in names})
    clients = Clients(
        names,
        counted("train"),
        counted("validation"),
        counted("test"),
        kind=schema.kind,
        classes=schema.classes,
        features=schema.features,
        target_mean=schema.target_mean,
        target_scale=schema.target_scale,
        schema=schema,
        has_random_parts=all(bool(replies[name].fields.get("by_chance")) for name in names),
        weights_from_column=None if any(math.isnan(weight) for weight in own.values()) else own,
        title=Path(run.data.source).stem,
        notes=notes,
    )
    report_large_shares(messenger, clients, run)
    return clients


def cap_reported_rows(
    messenger: Messenger, names: tuple[str, ...], replies: dict[str, Payload], max_rows: int | None
) -> dict[str, dict[str, int]]:
    """Return the numbers of rows that clients report, by part, at most `max_rows`, or MAX_ROWS_OVER_MEDIAN times the
    median; a client that reports more is named."""
    sizes = {name: {part: int(replies[name].fields["sizes"][part]) for part in PARTS} for name in names}
    median = statistics.median(about["train"] for about in sizes.values())
    bound = bound_rows((about["train"] for about in sizes.values()), max_rows)
    for name, about in sizes.items():
        for part in PARTS:
            if about[part] > bound:
                why = f"max_rows = {bound}" if max_rows else f"{MAX_ROWS_OVER_MEDIAN} times the median of {median:g}"
                messenger.report(
                    f"client '{name}' reports {about[part]} rows to {part}; it counts with {bound} ({why})"
                )
                about[part] = bound
    return sizes


def bound_weights(messenger: Messenger, own: dict[str, float]) -> dict[str, float]:
    """Return the weights that clients report, bounded in the same way."""
    known = [weight for weight in own.values() if not math.isnan(weight)]
    out = {name: weight if math.isnan(weight) else bound_weight(weight, known) for name, weight in own.items()}
    for name, weight in own.items():
        if weight > out[name]:
            messenger.report(f"client '{name}' reports a weight of {weight:g}; it counts with {out[name]:g}")
    return out


def report_large_shares(messenger: Messenger, clients: Clients, run: RunFile) -> None:
    """Name a client with more than half of the weight."""
    if run.training.weight_cap is not None:
        return
    for name, share in zip(clients.names, clients.weights(run.training.weights).tolist()):
        if share > REPORTED_SHARE and len(clients) > MIN_CLIENTS:
            messenger.report(f"client '{name}' has {share:.0%} of the weight; weight_cap in [training] bounds it")


def send_results(exchange: RemoteExchange, result: FitResult) -> None:
    """Send every client the round whose model it uses, and its losses."""
    trained, plan = result.trained, result.job.plan
    shown, server = trained.outcome.at(trained.checkpoint)
    at = LAST if trained.checkpoint == LAST or shown.t == trained.outcome.last.t else BEST
    rows: list[JsonObject] = [{str(k): v for k, v in row.items()} for row in result.clients.to_dict("records")]
    turn = full_round(shown.t, trained.outcome.rounds, exchange.roster, plan)
    summary = summarize_fit(result.job, trained, result.summary)
    summaries = [summary | {"notes": notes_visible_to(summary["notes"], name)} for name in exchange.roster.names]
    exchange.send_results(server, turn, at, rows, summaries)
