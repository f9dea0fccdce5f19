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
from mooring.data.agreement import agree_draft, agree_plan, agree_schema
from mooring.data.clients import BINARY, CLASSES, PARTS, Clients
from mooring.data.rare import Names, common, named
from mooring.data.schema import Schema, describe
from mooring.data.summary import Summary, merge
from mooring.engines.exchange import BEST, LAST, Roster
from mooring.engines.fit import Result, Tell, go_on, in_short, silent, start
from mooring.engines.flower.exchange import FlowerExchange
from mooring.engines.flower.home import digest_of_run
from mooring.engines.flower.parcels import Parcel
from mooring.engines.flower.post import FEWEST, Grid, Post, Unfit, say_nothing
from mooring.engines.flower.secure_server import check_secure
from mooring.engines.guard import checked_sizes
from mooring.engines.loop import everyones
from mooring.engines.prepare import Job, make_task
from mooring.runs.directory import RunDir, open_run
from mooring.runs.files import held, write_json
from mooring.runs.runfile import RunFile
from mooring.runs.sections import Federation

FEDERATION = "federation.json"  # who was missed how often, and who was left out
TITLE = "the clients"
BROKEN = (ArithmeticError, KeyError, IndexError, TypeError, ValueError)  # what malformed statistics lead to
ROWS_OVER_MEDIAN = 100  # rows that a client counts with at most, in medians of all clients, where max_rows is not set
NOTED_SHARE = 0.5  # of the weight, above which a client is named
CONTINUOUS = 10  # different numbers at one client, above which a column is not a category
T = TypeVar("T")


class Gathered(NamedTuple):
    """A federation whose clients are there and agree on a schema."""

    directory: RunDir | None  # of a run that goes on
    run: RunFile
    how: Federation
    post: Post
    clients: Clients  # names, sizes and schema; their rows are elsewhere


def gather(
    run: RunFile, grid: Grid, out: str | Path, say: Callable[[str], None], refuse: Callable[[RunFile, Federation], None]
) -> Gathered:
    """Call the roll and agree, or find in the run directory `out` what was agreed; `refuse` what cannot be run so."""
    directory = open_run(out) if Path(out).exists() else None
    if directory is not None:
        run = same_run(directory, run)
    how = run.federation or Federation()
    if how.clients is None:
        raise RequestError("how many clients take part? Say it in the run file: [federation] clients = 8, or by names.")
    refuse(run, how)
    if run.training.threads:
        torch.set_num_threads(run.training.threads)
    post = Post(grid, digest_of_run(run), wait=how.wait, say=say)
    names = post.call_roll(how.clients)
    if directory is None:
        run, clients = agreed_run(post, names, run)
    else:
        if isinstance(how.clients, list) and (gone := sorted(set(how.clients) - set(names))):
            raise RequestError(
                f"client '{gone[0]}' of the run in {directory.path} cannot take part any more; start a new run with "
                "another --out."
            )
        schema = Schema.model_validate({k: v for k, v in directory.schema.items() if k != "seal"})
        clients = roll(post, names, run, schema, [], fresh=False)
    return Gathered(directory, run, how, post, clients)


def agreed_run(post: Post, names: tuple[str, ...], run: RunFile) -> tuple[RunFile, Clients]:
    """The clients that can take part and agree; the run file names them, so that whoever resumes finds them."""
    names, clients = prepare(post, names, run)
    how = (run.federation or Federation()).model_copy(update={"clients": list(names)})
    return run.model_copy(update={"federation": how}), clients


def write_missed(out: str | Path, post: Post, names: tuple[str, ...]) -> None:
    """Who was missed how often, and who was left out, and why."""
    missed = {name: post.missed[name] for name in names if post.missed[name]}
    about = {"clients": list(names), "missed": missed, "dropped": post.dropped, "dismissed": post.dismissed}
    write_json(Path(out) / FEDERATION, about)


def converse(
    run: RunFile, grid: Grid, out: str | Path, *, say: Callable[[str], None] = say_nothing, tell: Tell = silent
) -> Result:
    """Run a federation to its end, from its beginning or from where the run directory `out` stands."""
    directory, run, how, post, clients = gather(run, grid, out, say, refuse_trials)
    if directory is None:  # a federation saves every round, so that a crash costs one at most
        run = run.model_copy(update={"training": run.training.model_copy(update={"checkpoint_every": 1})})
    while True:
        job = Job(run, clients, make_task(run, clients))
        exchange = exchange_with(post, job, how, fresh=directory is None)
        if directory is not None:
            with held(directory.path):
                result, note = go_on(job, directory, exchange, tell)
            say(note or "the run resumed from its checkpoint")
            break
        try:
            result = start(job, out, tell, exchange)
            break
        except ClientError as error:
            if Path(out).exists():  # rounds have begun
                raise
            run, clients = agreed_run(post, without(post, clients.names, error), run)
    goodbye(exchange, result)
    write_missed(out, post, clients.names)
    return result


def exchange_with(post: Post, job: Job, how: Federation, *, fresh: bool) -> FlowerExchange:
    clients = job.clients
    sizes = {part: getattr(clients, part).size for part in PARTS}
    roster = Roster(clients.names, clients.keys, clients.weights(job.run.training.weights), sizes)
    row = (clients.train.x[:1], clients.train.y[:1])
    return FlowerExchange(post, roster, job.task, how, row, fresh=fresh)


def refuse_trials(run: RunFile, how: Federation) -> None:
    if run.training.attack is not None:
        raise RequestError("attack is for trials in one process; leave it out of a federation's run file.")
    check_secure(run, how)


def same_run(directory: RunDir, run: RunFile) -> RunFile:
    """The run of a directory, if it is the one that the run file asks for."""
    known = directory.run
    if digest_of_run(known) != digest_of_run(run):
        raise RequestError(f"{directory.path} is another run than the run file's; choose another --out.")
    return known


def prepare(post: Post, names: tuple[str, ...], run: RunFile) -> tuple[tuple[str, ...], Clients]:
    """Agree on a schema and call the roll; a client that cannot take part is left out, and the others begin again."""
    while True:
        try:
            schema, notes = agree(post, names, run)
            return names, roll(post, names, run, schema, notes, fresh=True)
        except Unfit as error:
            names = without(post, names, error)


def without(post: Post, names: tuple[str, ...], error: ClientError) -> tuple[str, ...]:
    """Those who are left when some cannot take part, who are told why; the error where they are too few."""
    left = tuple(name for name in names if name not in error.clients)
    if len(left) < FEWEST:
        raise error
    for name, why in error.clients.items():
        post.dismiss(name, why)
    return left


def agree(post: Post, names: tuple[str, ...], run: RunFile) -> tuple[Schema, list[str]]:
    """The schema of all clients' rows, from counts and sums; and notes."""

    def ask(what: str, notes: Iterable[str] = (), **words: Any) -> dict[str, Summary]:
        letters = {name: Parcel(words | {"notes": not_on_others(notes, name)}) for name in names}
        replies = post.ask_all(what, letters)
        return {name: Summary.from_json(str(replies[name].words["summary"])) for name in names}

    asked = run.data.features is not None
    surveys = ask("survey")
    check_words(surveys)
    plan = agreed(surveys, lambda told: agree_plan(told, kind=run.data.kind or "auto", asked=asked, title=TITLE))
    words = plan.model_dump(mode="json", exclude={"notes"})
    told, least = ask("tally", plan=words), run.data.rare or 1
    wanted = common(told.values(), least, post.run)
    spelt: Names = {column: {} for column in wanted}
    to_spell = dict.fromkeys(names, Parcel({"plan": words, "wanted": wanted}))
    for reply in post.ask_all("names", to_spell).values() if wanted else ():
        for column, levels in reply.words["names"].items():
            spelt[column] |= levels
    told = named(told, spelt, post.run)
    draft = agreed(told, lambda told: agree_draft(told, plan, rare=least, title=TITLE))
    spreads = ask("spread", plan.notes, plan=words, draft=draft.model_dump(mode="json"))
    schema = agreed(spreads, lambda told: agree_schema(told, draft))
    return schema, [*plan.notes, *describe(schema.columns, schema.dropped)]


def check_words(surveys: dict[str, Summary]) -> None:
    """Unfit for clients with words in a column that is numbers at most clients: the column would be lost for all."""
    survey, found = merge(surveys.values()), dict[str, str]()
    for column, about in survey.facts.items():
        if not {"present", "numbers", "distinct", "dates"} <= about.keys():
            continue  # the target
        present, numbers = about["present"], about["numbers"] + about["dates"]
        numeric = (present > 0) & (numbers >= present)
        words = (present > 0) & ~numeric
        if (
            not words.any()
            or 2 * numeric.sum() <= (present > 0).sum()
            or about["distinct"][numeric].max() <= CONTINUOUS
        ):
            continue
        for i in words.nonzero()[0]:
            count = f"{present[i] - numbers[i]:.0f} of {present[i]:.0f} values"
            found.setdefault(
                survey.clients[i],
                f"client '{survey.clients[i]}', column '{column}': {count} are words, and the other clients have "
                "numbers there. Correct the cells or leave them empty, and join the next run.",
            )
    if found and len(surveys) - len(found) >= FEWEST:
        raise Unfit(*next(iter(found.items())), found)


def not_on_others(notes: Iterable[str], name: str) -> list[str]:
    """Those that a client may read: on itself, or on no client."""
    return [note for note in notes if f"client '{name}'" in note or "client '" not in note]


def agreed(told: dict[str, Summary], agree: Callable[[Summary], T]) -> T:
    """What all clients' summaries agree on; Unfit for the one client without which the others agree."""
    try:
        return agree(merge(told.values()))
    except (RequestError, *BROKEN) as error:
        for name in told if len(told) > FEWEST else ():
            others = [summary for other, summary in told.items() if other != name]
            named = f"client '{name}'" in str(error) or not isinstance(error, RequestError)
            if named and agrees(agree, others):
                why = str(error) if isinstance(error, RequestError) else f"its statistics are malformed ({error})"
                raise Unfit(name, why) from error
        raise


def agrees(agree: Callable[[Summary], Any], told: list[Summary]) -> bool:
    try:
        agree(merge(told))
    except (RequestError, *BROKEN):
        return False
    return True


def roll(post: Post, names: tuple[str, ...], run: RunFile, schema: Schema, notes: list[str], *, fresh: bool) -> Clients:
    """The clients as the server knows them, their numbers of rows and not their rows; they are told the schema."""
    words = {"schema": schema.model_dump(mode="json"), "fresh": fresh}
    replies = post.ask_all("adopt", {name: Parcel(words) for name in names})
    notes = [*notes, *(f"left out: {why}" for why in post.dismissed.values())]
    wide = run.task.model is None and run.task.name != "module"
    dtype = torch.float64 if wide else torch.float32
    label = torch.int64 if schema.kind in (BINARY, CLASSES) else dtype

    sizes = bounded_sizes(post, names, replies, (run.federation or Federation()).max_rows)

    def counted(part: str) -> Rows:
        size = checked_sizes(names, [sizes[name][part] for name in names])
        x, y = torch.zeros(1, len(schema.features), dtype=dtype), torch.zeros(1, dtype=label)
        return Rows(x, y, torch.zeros_like(size), size)  # one row of zeros, which shows what rows look like

    own = bounded_weights(post, {name: float(replies[name].words["weight"] or math.nan) for name in names})
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
        parts_by_chance=all(bool(replies[name].words.get("by_chance")) for name in names),
        own_weights=None if any(math.isnan(weight) for weight in own.values()) else own,
        title=Path(run.data.source).stem,
        notes=notes,
    )
    note_shares(post, clients, run)
    return clients


def bounded_sizes(
    post: Post, names: tuple[str, ...], replies: dict[str, Parcel], max_rows: int | None
) -> dict[str, dict[str, int]]:
    """The numbers of rows that clients report, by part: a client counts with `max_rows` training rows at most, or with
    ROWS_OVER_MEDIAN times the median, and is named where it reports more."""
    sizes = {name: {part: int(replies[name].words["sizes"][part]) for part in PARTS} for name in names}
    median = statistics.median(about["train"] for about in sizes.values())
    bound = max_rows or max(int(ROWS_OVER_MEDIAN * median), 1)
    for name, about in sizes.items():
        for part in PARTS:
            if about[part] > bound:
                why = f"max_rows = {bound}" if max_rows else f"{ROWS_OVER_MEDIAN} times the median of {median:g}"
                post.say(f"client '{name}' reports {about[part]} rows to {part}; it counts with {bound} ({why})")
                about[part] = bound
    return sizes


def bounded_weights(post: Post, own: dict[str, float]) -> dict[str, float]:
    """Weights of a column that clients name themselves, bounded in the same way."""
    known = [weight for weight in own.values() if not math.isnan(weight)]
    bound = ROWS_OVER_MEDIAN * statistics.median(known) if known else math.inf
    for name, weight in own.items():
        if weight > bound:
            post.say(f"client '{name}' reports a weight of {weight:g}; it counts with {bound:g}")
    return {name: min(weight, bound) if not math.isnan(weight) else weight for name, weight in own.items()}


def note_shares(post: Post, clients: Clients, run: RunFile) -> None:
    """Name a client that has most of the weight."""
    if run.training.weight_cap is not None:
        return
    for name, share in zip(clients.names, clients.weights(run.training.weights).tolist()):
        if share > NOTED_SHARE and len(clients) > FEWEST:
            post.say(f"client '{name}' has {share:.0%} of the weight; weight_cap in [training] bounds it")


def goodbye(exchange: FlowerExchange, result: Result) -> None:
    """Every client is told which round's model to use, and how it does."""
    trained, plan = result.trained, result.job.plan
    shown, server = trained.outcome.at(trained.keep)
    at = LAST if trained.keep == LAST or shown.t == trained.outcome.last.t else BEST
    rows: list[dict[str, Any]] = [{str(k): v for k, v in row.items()} for row in result.clients.to_dict("records")]
    turn = everyones(shown.t, trained.outcome.rounds, exchange.roster, plan)
    summary = in_short(result.job, trained, result.summary)
    told = [summary | {"notes": not_on_others(summary["notes"], name)} for name in exchange.roster.names]
    exchange.leave(server, turn, at, rows, told)
