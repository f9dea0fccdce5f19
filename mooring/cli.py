"""The commands: parse, call one function, print. Heavy imports wait until a command needs them."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from mooring.core.errors import RequestError, WorkError
from mooring.options import (
    Client,
    DataDir,
    Deal,
    Drop,
    DropSmall,
    Features,
    Json,
    Kind,
    MinRows,
    Model,
    Out,
    Participation,
    Patience,
    Rounds,
    Seed,
    Set,
    Source,
    Split,
    Target,
    TaskName,
    Threads,
    Time,
    Unit,
    Weights,
    assignments,
    assignments_by_method,
    data_options,
    training_options,
)

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Personalized federated learning: how tightly should each client be moored to the others?",
)

DEBUG = {"on": False}


@app.callback()
def options(debug: Annotated[bool, typer.Option("--debug", help="Show the stack trace of an error.")] = False) -> None:
    DEBUG["on"] = DEBUG["on"] or debug


@app.command()
def fit(
    source: Source,
    client: Client = None,
    target: Target = None,
    kind: Kind = "auto",
    task: TaskName = "auto",
    algorithm: Annotated[str, typer.Option("--algorithm", help="See `mooring list algorithms`.")] = "fedprox_one_stage",
    set_: Set = None,
    model: Model = None,
    features: Features = None,
    drop: Drop = None,
    unit: Unit = None,
    time: Time = None,
    split: Split = None,
    min_rows: MinRows = None,
    drop_small: DropSmall = False,
    deal: Deal = None,
    rounds: Rounds = None,
    participation: Participation = None,
    weights: Weights = None,
    seed: Seed = None,
    patience: Patience = None,
    threads: Threads = None,
    out: Out = None,
    data_dir: DataDir = None,
    json_: Json = False,
) -> None:
    """Train one method on a federation, with training alone and one common model beside it.

    SOURCE may be a run.toml, which then says everything.
    """
    from mooring.display import Display, show_fit
    from mooring.engines.fit import fit as train
    from mooring.engines.fit import start
    from mooring.engines.prepare import prepare
    from mooring.runs.directory import default_out
    from mooring.runs.runfile import read_run

    display = Display(json_)
    with display.progress() as tell:
        if source.endswith(".toml"):
            given = read_run(source)
            if given.mooring.kind != "fit":
                raise RequestError(f"{source} describes a run of kind '{given.mooring.kind}', not 'fit'.")
            result = start(prepare(given), out or default_out(Path(source).stem), tell)
        else:
            result = train(
                source,
                algorithm=algorithm,
                settings=assignments(set_),
                out=out or default_out(f"{Path(source).stem}-{algorithm}"),
                tell=tell,
                task=task,
                model=model,
                **data_options(locals()),
                **training_options(locals()),
            )
    if json_:
        emit({"summary": result.summary, "clients": result.clients.to_dict("records"), "run": str(result.run)})
    display.notes(result.job.clients.notes)
    if not json_:
        show_fit(display, result)


@app.command()
def compare(
    source: Source,
    methods: Annotated[str, typer.Option("--methods", help="Names separated by commas.")] = (
        "local,global,fedavg,fedprox_shared,fedprox_one_stage"
    ),
    client: Client = None,
    target: Target = None,
    kind: Kind = "auto",
    task: TaskName = "auto",
    set_: Set = None,
    model: Model = None,
    features: Features = None,
    drop: Drop = None,
    unit: Unit = None,
    time: Time = None,
    split: Split = None,
    min_rows: MinRows = None,
    drop_small: DropSmall = False,
    deal: Deal = None,
    rounds: Rounds = None,
    participation: Participation = None,
    weights: Weights = None,
    seed: Seed = None,
    patience: Patience = None,
    threads: Threads = None,
    out: Out = None,
    data_dir: DataDir = None,
    json_: Json = False,
) -> None:
    """Train several methods on the same data, splits and cohorts. Fields: --set fedavg.steps=5."""
    from mooring.display import Display, show_comparison
    from mooring.engines.compare import as_json
    from mooring.engines.compare import compare as run
    from mooring.runs.directory import default_out

    display = Display(json_)
    with display.progress() as tell:
        result = run(
            source,
            [name.strip() for name in methods.split(",") if name.strip()],
            settings=assignments_by_method(set_),
            out=out or default_out(f"{Path(source).stem}-compare"),
            tell=tell,
            task=task,
            model=model,
            **data_options(locals()),
            **training_options(locals()),
        )
    if json_:
        emit(as_json(result))
    display.notes(result.notes)
    if not json_:
        show_comparison(display, result)


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    json_: Json = False,
) -> None:
    """Continue an interrupted run to the very result it would have had."""
    from mooring.display import Display, show_comparison, show_fit
    from mooring.engines import compare as comparing
    from mooring.engines import fit as fitting
    from mooring.runs.directory import open_run

    display = Display(json_)
    kind = open_run(run).run.mooring.kind
    with display.progress() as tell:
        if kind == "compare":
            result = comparing.resume(run, tell)
            notes = result.notes
        elif kind == "fit":
            fitted, note = fitting.resume(run, tell)
            notes = [note] if note else []
        else:
            raise RequestError(
                f"{run} is a run of kind '{kind}', which is written whole when it is done: there is nothing to resume."
            )
    display.notes(notes)
    if json_:
        if kind == "compare":
            emit(comparing.as_json(result))
        else:
            emit({"summary": fitted.summary, "clients": fitted.clients.to_dict("records"), "run": str(run)})
    elif kind == "compare":
        show_comparison(display, result)
    else:
        show_fit(display, fitted)


@app.command()
def predict(
    run: Annotated[Path, typer.Argument(help="A finished run.")],
    source: Annotated[str, typer.Argument(help="A table with the same columns (the target may be missing).")],
    client: Annotated[
        str | None, typer.Option("--client", help="Whose model answers (default: each row's own).")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write a CSV file instead of printing.")] = None,
    json_: Json = False,
) -> None:
    """Predict rows with a finished run's models."""
    from mooring.display import Display
    from mooring.engines.predict import predict as answer
    from mooring.runs.files import write_whole

    display = Display(json_)
    frame, notes = answer(run, source, client)
    display.notes(notes)
    if json_:
        emit({"predictions": frame.to_dict("records"), "run": str(run)})
    elif out is not None:
        if out.exists():
            raise RequestError(f"{out} already exists; choose another --out.")
        write_whole(out, frame.to_csv(index=False).encode())
        display.say(f"{len(frame)} predictions in {out}")
    else:
        sys.stdout.write(frame.to_csv(index=False))


@app.command()
def personalize(
    run: Annotated[Path, typer.Argument(help="A finished run.")],
    source: Annotated[str, typer.Argument(help="The newcomer's table; with the run's client column, several.")],
    how: Annotated[str, typer.Option("--how", help="auto, mixture, prox, finish, alone or tune.")] = "auto",
    seed: Seed = None,
    min_rows: MinRows = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write the models to this safetensors file.")] = None,
    json_: Json = False,
) -> None:
    """A personal model for a client that comes later, and whether joining pays."""
    from mooring.advice.personalize import personalize as answer
    from mooring.display import Display, show_personalized

    display = Display(json_)
    found = answer(run, source, how=how, out=out, seed=seed or 0, min_rows=min_rows or 5)
    display.notes(found.notes)
    if json_:
        emit({"metric": found.metric, "way": found.way, "clients": found.clients.to_dict("records"), "run": str(run)})
    else:
        show_personalized(display, found, out)


@app.command()
def advise(
    source: Source,
    client: Client = None,
    target: Target = None,
    kind: Kind = "auto",
    task: TaskName = "auto",
    model: Model = None,
    features: Features = None,
    drop: Drop = None,
    unit: Unit = None,
    time: Time = None,
    split: Split = None,
    min_rows: MinRows = None,
    drop_small: DropSmall = False,
    deal: Deal = None,
    rounds: Rounds = None,
    weights: Weights = None,
    seed: Seed = None,
    threads: Threads = None,
    out: Out = None,
    data_dir: DataDir = None,
    json_: Json = False,
) -> None:
    """Who should be moored how tightly? A verdict per client (alone, common, personal), with evidence."""
    from mooring.advice.advise import advise as run
    from mooring.advice.advise import as_json
    from mooring.advice.show import show_advice
    from mooring.display import Display
    from mooring.runs.directory import default_out

    display = Display(json_)
    with display.progress() as tell:
        advice = run(
            source,
            out=out or default_out(f"{Path(source).stem}-advice"),
            tell=tell,
            task=task,
            model=model,
            **data_options(locals()),
            **training_options(locals()),
        )
    display.notes(advice.job.clients.notes)
    if json_:
        emit(as_json(advice))
    else:
        show_advice(display, advice)


@app.command()
def theory(
    source: Source,
    client: Client = None,
    target: Target = None,
    kind: Kind = "auto",
    task: TaskName = "auto",
    features: Features = None,
    drop: Drop = None,
    unit: Unit = None,
    time: Time = None,
    split: Split = None,
    min_rows: MinRows = None,
    drop_small: DropSmall = False,
    deal: Deal = None,
    weights: Weights = None,
    seed: Seed = None,
    threads: Threads = None,
    data_dir: DataDir = None,
    json_: Json = False,
) -> None:
    """What the theorems say about a federation: constants, heterogeneity, thresholds, lambda by every rule."""
    from mooring.advice.survey import survey
    from mooring.display import Display, show_survey
    from mooring.engines.prepare import prepare, request

    display = Display(json_)
    how = {"algorithm": {"name": "local"}, **data_options(locals()), **training_options(locals())}
    job = prepare(request(source, purpose="fit", task=task, **how))
    found = survey(job.task, job.clients, weights or "size")
    display.notes(job.clients.notes)
    if json_:
        emit({("lambda" if name == "lam" else name): part for name, part in found._asdict().items()})
    else:
        show_survey(display, found)


@app.command()
def check(
    source: Source,
    client: Client = None,
    target: Target = None,
    kind: Kind = "auto",
    features: Features = None,
    drop: Drop = None,
    unit: Unit = None,
    time: Time = None,
    split: Split = None,
    min_rows: MinRows = None,
    json_: Json = False,
) -> None:
    """What is wrong with my data, per client? Exit code 2 when something must be put right first."""
    from mooring.data.checks import check as inspect
    from mooring.display import Display

    display = Display(json_)
    chosen = {k: v for k, v in data_options(locals()).items() if v is not None}
    findings = [finding._asdict() for finding in inspect(source, **chosen)]
    if json_:
        emit({"findings": findings})
    elif not findings:
        display.say(f"{source}: nothing to complain about.")
    else:
        columns = {"severity": "severity", "client": "client", "column": "column", "sentence": "what"}
        display.table(f"{source}: {len(findings)} finding(s)", findings, columns)
    if any(finding["severity"] == "error" for finding in findings):
        raise typer.Exit(2)


@app.command("list")
def list_(
    what: Annotated[str, typer.Argument(help="algorithms, tasks, datasets or experiments.")],
    json_: Json = False,
) -> None:
    """What there is to choose from."""
    from mooring.display import Display

    listing = {"algorithms": algorithms, "tasks": tasks, "datasets": datasets, "experiments": experiments}
    if what not in listing:
        raise RequestError(f"mooring list knows {', '.join(listing)}, got {what!r}.")
    rows, columns = listing[what]()
    if json_:
        emit({what: rows})
    else:
        Display().table(what, rows, columns)


def algorithms() -> tuple[list[dict[str, Any]], dict[str, str]]:
    from mooring.algorithms.base import describe, names

    columns = {"name": "algorithm", "summary": "what", "paper": "source", "limits": "limits", "reveals": "reveals"}
    return [describe(name) for name in names()], columns


def tasks() -> tuple[list[dict[str, Any]], dict[str, str]]:
    from mooring.tasks.catalog import describe, names

    return [describe(name) for name in names()], {
        "name": "task",
        "summary": "what",
        "targets": "targets",
        "exact": "exact prox",
    }


def datasets() -> tuple[list[dict[str, Any]], dict[str, str]]:
    from mooring.data.datasets import describe, known

    return [describe(name) for name in known()], {"name": "data set", "summary": "what", "needs": "needs"}


def experiments() -> tuple[list[dict[str, Any]], dict[str, str]]:
    from mooring.experiments.base.catalog import describe, ids

    return [describe(one) for one in ids()], {"id": "experiment", "title": "what", "claims": "claims"}


def emit(value: Any) -> None:
    """One JSON object on stdout."""
    from mooring.runs.files import to_json

    sys.stdout.write(to_json(value) + "\n")


@app.command()
def reproduce(
    what: Annotated[str, typer.Argument(help="An experiment's id, a paper such as 004, or all.")],
    preset: Annotated[
        str, typer.Option("--preset", help="quick (about a minute each) or paper (its own sizes).")
    ] = "quick",
    out: Annotated[Path, typer.Option("--out", help="Where figures, tables and records go.")] = Path("reproduction"),
    data_dir: DataDir = None,
    page: Annotated[Path | None, typer.Option("--page", help="Write a page on all records in --out.")] = None,
    json_: Json = False,
) -> None:
    """Run figures and tables of the papers; every claim is held or failed. Exit code 3 when one failed."""
    from mooring.display import Display
    from mooring.experiments.base.page import write_page
    from mooring.experiments.base.reproduce import claims
    from mooring.experiments.base.reproduce import reproduce as run
    from mooring.experiments.base.tables import brief

    display = Display(json_)
    with display.progress() as tell:
        records = run(what, preset, out, data_dir=data_dir, tell=tell)
    found = claims(records)
    if page is not None:
        write_page(out, page)
    if json_:
        emit({"claims": found})
    else:
        shown = [row | {"held": "held" if row["held"] else "FAILED", "numbers": brief(row["numbers"])} for row in found]
        columns = {"experiment": "experiment", "says": "claim", "held": "", "numbers": "numbers"}
        held = sum(row["held"] for row in found)
        display.table(
            f"{held} of {len(found)} claims held, preset {preset}", shown, columns, f"Figures and tables: {out}"
        )
    if not all(row["held"] for row in found):
        raise typer.Exit(3)


def main(argv: list[str] | None = None) -> None:
    """Run a command. Exit codes: 0 done, 1 the work failed, 2 the request was wrong."""
    warnings.showwarning = lambda message, *rest, **more: print(f"note: {message}", file=sys.stderr)  # noqa: T201
    try:
        given = sys.argv[1:] if argv is None else argv
        DEBUG["on"] = "--debug" in given  # wherever it stands
        code = app([word for word in given if word != "--debug"], standalone_mode=False)
    except Exception as error:
        if DEBUG["on"]:
            raise
        code = told(error)
    except KeyboardInterrupt:
        print("interrupted; a run that had begun goes on with `mooring resume`.", file=sys.stderr)  # noqa: T201
        code = 130
    sys.exit(code if isinstance(code, int) else 0)


def told(error: Exception) -> int:
    """Say an error in one sentence; its exit code."""
    import click

    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, click.ClickException):
        error.show()
        return 2
    if isinstance(error, click.Abort):
        return 130
    known = isinstance(error, RequestError | WorkError)
    text = str(error) if known else f"unexpected {type(error).__name__}: {error} (run with --debug for the details)"
    print(f"error: {text}", file=sys.stderr)  # noqa: T201
    return 2 if isinstance(error, RequestError) else 1
