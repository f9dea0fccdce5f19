"""A whole run as the server leads it: call the roll, agree on a schema, fit, tell every client its result.

The same call goes on with a run that was interrupted: the run directory says who takes part and what was agreed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from mooring.core.cohort import Rows
from mooring.core.errors import ClientError, RequestError
from mooring.data.clients import BINARY, CLASSES, PARTS, Clients
from mooring.data.column_statistics import ColumnStatistics, merge_statistics
from mooring.data.rare_categories import LevelNames, find_common_fingerprints, name_levels
from mooring.data.schema import Schema, describe_schema
from mooring.data.schema_server import complete_schema, draft_schema, plan_schema
from mooring.engines.exchange import BEST, LAST, ClientRoster
from mooring.engines.fit import continue_fit, start_fit
from mooring.engines.fit_files import summarize_fit
from mooring.engines.fit_result import FitResult
from mooring.engines.flower.client_node import run_digest
from mooring.engines.flower.exchange import FlowerExchange
from mooring.engines.flower.messages import Payload
from mooring.engines.flower.messenger import MIN_CLIENTS, ClientFailedError, Grid, Messenger, ignore_message
from mooring.engines.flower.secure_server import check_secure_run
from mooring.engines.loop import full_round
from mooring.engines.prepare import Job, make_task
from mooring.engines.progress import OnProgress, ignore_progress
from mooring.engines.reply_checks import check_sizes
from mooring.runs.atomic_files import directory_lock, write_json
from mooring.runs.directory import RunDirectory, open_run
from mooring.runs.runfile import RunFile
from mooring.runs.sections import FederationSection

PARTICIPATION_FILE = "federation.json"  # who was missed how often, and who was left out
CLIENTS_TITLE = "the clients"
MALFORMED_ERRORS = (ArithmeticError, KeyError, IndexError, TypeError, ValueError)  # what malformed statistics lead to
MAX_ROWS_OVER_MEDIAN = (
    100  # rows that a client counts with at most, in medians of all clients, where max_rows is not set
)
REPORTED_SHARE = 0.5  # of the weight, above which a client is named
MAX_DISTINCT_OF_CATEGORY = 10  # different numbers at one client, above which a column is not a category
T = TypeVar("T")


class PreparedFederation(NamedTuple):
    """A federation whose clients are there and agree on a schema."""

    directory: RunDirectory | None  # of a run that goes on
    run: RunFile
    how: FederationSection
    post: Messenger
    clients: Clients  # names, sizes and schema; their rows are elsewhere


def prepare_federation(
    run: RunFile,
    grid: Grid,
    out: str | Path,
    say: Callable[[str], None],
    refuse: Callable[[RunFile, FederationSection], None],
) -> PreparedFederation:
    """Call the roll and agree, or find in the run directory `out` what was agreed; `refuse` what cannot be run so."""
    directory = open_run(out) if Path(out).exists() else None
    if directory is not None:
        run = check_same_run(directory, run)
    how = run.federation or FederationSection()
    if how.clients is None:
        raise RequestError("how many clients take part? Say it in the run file: [federation] clients = 8, or by names.")
    refuse(run, how)
    if run.training.threads:
        torch.set_num_threads(run.training.threads)
    post = Messenger(grid, run_digest(run), wait=how.wait, say=say)
    names = post.call_roll(how.clients)
    if directory is None:
        run, clients = agree_on_run(post, names, run)
    else:
        if isinstance(how.clients, list) and (gone := sorted(set(how.clients) - set(names))):
            raise RequestError(
                f"client '{gone[0]}' of the run in {directory.path} cannot take part any more; start a new run with "
                "another --out."
            )
        schema = Schema.model_validate({k: v for k, v in directory.schema.items() if k != "seal"})
        clients = adopt_schema(post, names, run, schema, [], fresh=False)
    return PreparedFederation(directory, run, how, post, clients)


def agree_on_run(post: Messenger, names: tuple[str, ...], run: RunFile) -> tuple[RunFile, Clients]:
    """The clients that can take part and agree; the run file names them, so that whoever resumes finds them."""
    names, clients = resolve_participants(post, names, run)
    how = (run.federation or FederationSection()).model_copy(update={"clients": list(names)})
    return run.model_copy(update={"federation": how}), clients


def write_participation(out: str | Path, post: Messenger, names: tuple[str, ...]) -> None:
    """Who was missed how often, and who was left out, and why."""
    missed = {name: post.missed[name] for name in names if post.missed[name]}
    about = {"clients": list(names), "missed": missed, "dropped": post.dropped, "dismissed": post.dismissed}
    write_json(Path(out) / PARTICIPATION_FILE, about)


def run_federation(
    run: RunFile,
    grid: Grid,
    out: str | Path,
    *,
    say: Callable[[str], None] = ignore_message,
    tell: OnProgress = ignore_progress,
) -> FitResult:
    """Run a federation to its end, from its beginning or from where the run directory `out` stands."""
    directory, run, how, post, clients = prepare_federation(run, grid, out, say, check_run_allowed)
    if directory is None:  # a federation saves every round, so that a crash costs one at most
        run = run.model_copy(update={"training": run.training.model_copy(update={"checkpoint_every": 1})})
    while True:
        job = Job(run, clients, make_task(run, clients))
        exchange = make_exchange(post, job, how, fresh=directory is None)
        if directory is not None:
            with directory_lock(directory.path):
                result, note = continue_fit(job, directory, exchange, tell)
            say(note or "the run resumed from its checkpoint")
            break
        try:
            result = start_fit(job, out, tell, exchange)
            break
        except ClientError as error:
            if Path(out).exists():  # rounds have begun
                raise
            run, clients = agree_on_run(post, exclude_clients(post, clients.names, error), run)
    send_results(exchange, result)
    write_participation(out, post, clients.names)
    return result


def make_exchange(post: Messenger, job: Job, how: FederationSection, *, fresh: bool) -> FlowerExchange:
    clients = job.clients
    sizes = {part: getattr(clients, part).size for part in PARTS}
    roster = ClientRoster(clients.names, clients.keys, clients.weights(job.run.training.weights), sizes)
    row = (clients.train.x[:1], clients.train.y[:1])
    return FlowerExchange(post, roster, job.task, how, row, fresh=fresh)


def check_run_allowed(run: RunFile, how: FederationSection) -> None:
    if run.training.attack is not None:
        raise RequestError("attack is for trials in one process; leave it out of a federation's run file.")
    check_secure_run(run, how)


def check_same_run(directory: RunDirectory, run: RunFile) -> RunFile:
    """The run of a directory, if it is the one that the run file asks for."""
    known = directory.run
    if run_digest(known) != run_digest(run):
        raise RequestError(f"{directory.path} is another run than the run file's; choose another --out.")
    return known


def resolve_participants(post: Messenger, names: tuple[str, ...], run: RunFile) -> tuple[tuple[str, ...], Clients]:
    """Agree on a schema and call the roll; a client that cannot take part is left out, and the others begin again."""
    while True:
        try:
            schema, notes = agree_on_schema(post, names, run)
            return names, adopt_schema(post, names, run, schema, notes, fresh=True)
        except ClientFailedError as error:
            names = exclude_clients(post, names, error)


def exclude_clients(post: Messenger, names: tuple[str, ...], error: ClientError) -> tuple[str, ...]:
    """Those who are left when some cannot take part, who are told why; the error where they are too few."""
    left = tuple(name for name in names if name not in error.clients)
    if len(left) < MIN_CLIENTS:
        raise error
    for name, why in error.clients.items():
        post.dismiss(name, why)
    return left


def agree_on_schema(post: Messenger, names: tuple[str, ...], run: RunFile) -> tuple[Schema, list[str]]:
    """The schema of all clients' rows, from counts and sums; and notes."""

    def ask(what: str, notes: Iterable[str] = (), **words: Any) -> dict[str, ColumnStatistics]:
        letters = {name: Payload(words | {"notes": notes_visible_to(notes, name)}) for name in names}
        replies = post.ask_all(what, letters)
        return {name: ColumnStatistics.from_json(str(replies[name].words["summary"])) for name in names}

    asked = run.data.features is not None
    surveys = ask("survey")
    check_text_in_numeric_columns(surveys)
    plan = agree_or_reject(
        surveys, lambda told: plan_schema(told, kind=run.data.target_type or "auto", asked=asked, title=CLIENTS_TITLE)
    )
    words = plan.model_dump(mode="json", exclude={"notes"})
    told, least = ask("tally", plan=words), run.data.min_category_rows or 1
    wanted = find_common_fingerprints(told.values(), least, post.run)
    spelt: LevelNames = {column: {} for column in wanted}
    to_spell = dict.fromkeys(names, Payload({"plan": words, "wanted": wanted}))
    for reply in post.ask_all("names", to_spell).values() if wanted else ():
        for column, levels in reply.words["names"].items():
            spelt[column] |= levels
    told = name_levels(told, spelt, post.run)
    draft = agree_or_reject(told, lambda told: draft_schema(told, plan, rare=least, title=CLIENTS_TITLE))
    spreads = ask("spread", plan.notes, plan=words, draft=draft.model_dump(mode="json"))
    schema = agree_or_reject(spreads, lambda told: complete_schema(told, draft))
    return schema, [*plan.notes, *describe_schema(schema.columns, schema.dropped)]


def check_text_in_numeric_columns(surveys: dict[str, ColumnStatistics]) -> None:
    """Unfit for clients with words in a column that is numbers at most clients: the column would be lost for all."""
    survey, found = merge_statistics(surveys.values()), dict[str, str]()
    for column, about in survey.facts.items():
        if not {"present", "numbers", "distinct", "dates"} <= about.keys():
            continue  # the target
        present, numbers = about["present"], about["numbers"] + about["dates"]
        numeric = (present > 0) & (numbers >= present)
        words = (present > 0) & ~numeric
        if (
            not words.any()
            or 2 * numeric.sum() <= (present > 0).sum()
            or about["distinct"][numeric].max() <= MAX_DISTINCT_OF_CATEGORY
        ):
            continue
        for i in words.nonzero()[0]:
            count = f"{present[i] - numbers[i]:.0f} of {present[i]:.0f} values"
            found.setdefault(
                survey.clients[i],
                f"client '{survey.clients[i]}', column '{column}': {count} are words, and the other clients have "
                "numbers there. Correct the cells or leave them empty, and join the next run.",
            )
    if found and len(surveys) - len(found) >= MIN_CLIENTS:
        raise ClientFailedError(*next(iter(found.items())), found)


def notes_visible_to(notes: Iterable[str], name: str) -> list[str]:
    """Those that a client may read: on itself, or on no client."""
    return [note for note in notes if f"client '{name}'" in note or "client '" not in note]


def agree_or_reject(told: dict[str, ColumnStatistics], agree: Callable[[ColumnStatistics], T]) -> T:
    """What all clients' summaries agree on; Unfit for the one client without which the others agree."""
    try:
        return agree(merge_statistics(told.values()))
    except (RequestError, *MALFORMED_ERRORS) as error:
        for name in told if len(told) > MIN_CLIENTS else ():
            others = [summary for other, summary in told.items() if other != name]
            named = f"client '{name}'" in str(error) or not isinstance(error, RequestError)
            if named and can_agree(agree, others):
                why = str(error) if isinstance(error, RequestError) else f"its statistics are malformed ({error})"
                raise ClientFailedError(name, why) from error
        raise


def can_agree(agree: Callable[[ColumnStatistics], Any], told: list[ColumnStatistics]) -> bool:
    try:
        agree(merge_statistics(told))
    except (RequestError, *MALFORMED_ERRORS):
        return False
    return True


def adopt_schema(
    post: Messenger, names: tuple[str, ...], run: RunFile, schema: Schema, notes: list[str], *, fresh: bool
) -> Clients:
    """The clients as the server knows them, their numbers of rows and not their rows; they are told the schema."""
    words = {"schema": schema.model_dump(mode="json"), "fresh": fresh}
    replies = post.ask_all("adopt", {name: Payload(words) for name in names})
    notes = [*notes, *(f"left out: {why}" for why in post.dismissed.values())]
    wide = run.task.model is None and run.task.name != "module"
    dtype = torch.float64 if wide else torch.float32
    label = torch.int64 if schema.kind in (BINARY, CLASSES) else dtype

    sizes = bound_sizes(post, names, replies, (run.federation or FederationSection()).max_rows)

    def counted(part: str) -> Rows:
        size = check_sizes(names, [sizes[name][part] for name in names])
        x, y = torch.zeros(1, len(schema.features), dtype=dtype), torch.zeros(1, dtype=label)
        return Rows(x, y, torch.zeros_like(size), size)  # one row of zeros, which shows what rows look like

    own = bound_weights(post, {name: float(replies[name].words["weight"] or math.nan) for name in names})
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
        has_random_parts=all(bool(replies[name].words.get("by_chance")) for name in names),
        weights_from_column=None if any(math.isnan(weight) for weight in own.values()) else own,
        title=Path(run.data.source).stem,
        notes=notes,
    )
    report_large_shares(post, clients, run)
    return clients


def bound_sizes(
    post: Messenger, names: tuple[str, ...], replies: dict[str, Payload], max_rows: int | None
) -> dict[str, dict[str, int]]:
    """The numbers of rows that clients report, by part: a client counts with `max_rows` training rows at most, or with
    ROWS_OVER_MEDIAN times the median, and is named where it reports more."""
    sizes = {name: {part: int(replies[name].words["sizes"][part]) for part in PARTS} for name in names}
    median = statistics.median(about["train"] for about in sizes.values())
    bound = max_rows or max(int(MAX_ROWS_OVER_MEDIAN * median), 1)
    for name, about in sizes.items():
        for part in PARTS:
            if about[part] > bound:
                why = f"max_rows = {bound}" if max_rows else f"{MAX_ROWS_OVER_MEDIAN} times the median of {median:g}"
                post.say(f"client '{name}' reports {about[part]} rows to {part}; it counts with {bound} ({why})")
                about[part] = bound
    return sizes


def bound_weights(post: Messenger, own: dict[str, float]) -> dict[str, float]:
    """Weights of a column that clients name themselves, bounded in the same way."""
    known = [weight for weight in own.values() if not math.isnan(weight)]
    bound = MAX_ROWS_OVER_MEDIAN * statistics.median(known) if known else math.inf
    for name, weight in own.items():
        if weight > bound:
            post.say(f"client '{name}' reports a weight of {weight:g}; it counts with {bound:g}")
    return {name: min(weight, bound) if not math.isnan(weight) else weight for name, weight in own.items()}


def report_large_shares(post: Messenger, clients: Clients, run: RunFile) -> None:
    """Name a client that has most of the weight."""
    if run.training.weight_cap is not None:
        return
    for name, share in zip(clients.names, clients.weights(run.training.weights).tolist()):
        if share > REPORTED_SHARE and len(clients) > MIN_CLIENTS:
            post.say(f"client '{name}' has {share:.0%} of the weight; weight_cap in [training] bounds it")


def send_results(exchange: FlowerExchange, result: FitResult) -> None:
    """Every client is told which round's model to use, and how it does."""
    trained, plan = result.trained, result.job.plan
    shown, server = trained.outcome.at(trained.checkpoint)
    at = LAST if trained.checkpoint == LAST or shown.t == trained.outcome.last.t else BEST
    rows: list[dict[str, Any]] = [{str(k): v for k, v in row.items()} for row in result.clients.to_dict("records")]
    turn = full_round(shown.t, trained.outcome.rounds, exchange.roster, plan)
    summary = summarize_fit(result.job, trained, result.summary)
    told = [summary | {"notes": notes_visible_to(summary["notes"], name)} for name in exchange.roster.names]
    exchange.leave(server, turn, at, rows, told)
