"""The commands: parse, call one function, print. Heavy imports wait until a command needs them."""

from __future__ import annotations

import shlex
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from mooring.core.errors import RequestError, WorkError
from mooring.core.fields import unknown
from mooring.core.trust import ASK
from mooring.options import (
    DATA,
    TASK,
    TRAINING,
    Json,
    Method,
    Methods,
    Out,
    Set,
    SetEach,
    SetTask,
    Source,
    Trust,
    apart,
    by_commas,
    by_method,
    example,
    takes,
)
from mooring.runs.sections import ALGORITHM

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 120},
    help="Personalized federated learning: how tightly should each client be moored to the others?",
)

DEBUG = {"on": False}
INTERRUPTED: list[Path] = []  # the run directory of the command that is running
Run = Annotated[Path, typer.Argument(hidden=True)]
TABLE_ONLY = tuple(name for name in DATA if name not in ("partition", "data_dir", "rare"))
OF_ROUNDS = tuple(name for name in TRAINING if name not in ("keep", "checkpoint_every"))


@app.callback()
def options(debug: Annotated[bool, typer.Option("--debug", help="Show the stack trace of an error.")] = False) -> None:
    DEBUG["on"] = DEBUG["on"] or debug


@app.command(epilog=example("mooring fit exam.csv --client school --target score --set lam=0.5"))
@takes(*DATA, *TASK, *TRAINING)
def fit(
    source: Source,
    algorithm: Method = None,
    set_: Set = None,
    out: Out = None,
    json_: Json = False,
    trust: Trust = False,
    **given: Any,
) -> None:
    """Train one method on a federation, with training alone and one common model beside it."""
    from mooring.engines.fit import fit as train
    from mooring.report.answers import show_run
    from mooring.report.terminal import Display

    display = Display(json_)
    settings, given = apart(set_, given)
    out = begun(out or free_directory(source, algorithm or ("fit" if source.endswith(".toml") else ALGORITHM)))
    with display.progress() as tell:
        result = train(source, algorithm=algorithm, settings=settings, out=out, tell=tell, trust=trust, **given)
    display.notes(result.job.clients.notes)
    if json_:
        emit({"summary": result.summary, "clients": result.clients.to_dict("records"), "run": str(result.run)})
    else:
        show_run(display, result.run)


@app.command(epilog=example("mooring compare exam.csv --client school --target score --methods local,fedavg,ditto"))
@takes(*DATA, *TASK, *TRAINING)
def compare(
    source: Source,
    methods: Methods = None,
    set_: SetEach = None,
    out: Out = None,
    json_: Json = False,
    trust: Trust = False,
    **given: Any,
) -> None:
    """Train several methods on the same data, splits and cohorts."""
    from mooring.engines.compare import as_json
    from mooring.engines.compare import compare as run
    from mooring.report.answers import show_run
    from mooring.report.terminal import Display

    display = Display(json_)
    fields, given = apart(set_, given)
    out = begun(out or free_directory(source, "compare"))
    with display.progress() as tell:
        result = run(source, by_commas(methods), settings=by_method(fields), out=out, tell=tell, trust=trust, **given)
    display.notes(result.notes)
    if json_:
        emit(as_json(result))
    else:
        show_run(display, result.run)


@app.command(epilog="Example: mooring resume runs/exam-1")
def resume(run: Run, json_: Json = False, trust: Trust = False) -> None:
    """Continue an interrupted run (its directory RUN) to the very result it would have had."""
    from mooring.engines import compare as comparing
    from mooring.engines import fit as fitting
    from mooring.report.answers import show_run
    from mooring.report.terminal import Display
    from mooring.runs.directory import open_run

    display = Display(json_)
    INTERRUPTED[:] = [run]
    kind = open_run(run).run.mooring.kind
    with display.progress() as tell:
        if kind == "compare":
            result = comparing.resume(run, tell, trust=trust)
            notes = result.notes
        elif kind == "fit":
            fitted, note = fitting.resume(run, tell, trust=trust)
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
    else:
        show_run(display, run)


@app.command(epilog="Example: mooring predict runs/exam-1 new.csv --out predictions.csv")
def predict(
    run: Run,
    source: Source,
    client: Annotated[str | None, typer.Option("--client", help="Whose model answers. [each row's own]")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write a CSV file instead of printing.")] = None,
    json_: Json = False,
    trust: Trust = False,
) -> None:
    """Predict rows with a finished run's models.

    RUN is the run's directory, SOURCE a table with the same columns (the target may be missing).
    """
    from mooring.engines.predict import predict as answer
    from mooring.report.terminal import Display
    from mooring.runs.directory import refuse_unwritable
    from mooring.runs.files import write_whole

    display = Display(json_)
    if out is not None:
        refuse_unwritable(out)
    frame, notes = answer(run, source, client, trust)
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


@app.command(epilog="Example: mooring personalize runs/exam-1 newcomer.csv --out newcomer.safetensors")
@takes("min_rows", "drop_small", "seed")
def personalize(
    run: Run,
    source: Source,
    how: Annotated[
        str, typer.Option("--how", help="mixture, prox, finish, alone or tune. [auto]", show_default=False)
    ] = "auto",
    out: Annotated[Path | None, typer.Option("--out", help="Write the models to this safetensors file.")] = None,
    json_: Json = False,
    trust: Trust = False,
    **given: Any,
) -> None:
    """A personal model for a client that comes later, and whether joining pays.

    RUN is a finished run's directory, SOURCE the newcomer's table; with the run's client column, several newcomers'.
    """
    from mooring.advice.personalize import personalize as answer
    from mooring.engines.request import admit_run
    from mooring.report.answers import show_newcomers
    from mooring.report.terminal import Display
    from mooring.runs.directory import open_run, refuse_unwritable

    display = Display(json_)
    if out is not None:
        refuse_unwritable(out)
    if trust:
        admit_run(open_run(run).run, run, trust)
    found = answer(run, source, how=how, out=out, **given)
    display.notes(found.notes)
    if json_:
        told = {"metric": found.metric, "way": found.way, "clients": found.clients.to_dict("records")}
        emit(told | {"run": str(run)})
    else:
        show_newcomers(display, found.clients, found.metric, found.way)
        if out is not None:
            display.say(f"Models: {out}")


@app.command(epilog=example("mooring advise exam.csv --client school --target score"))
@takes(*DATA, *TASK, *OF_ROUNDS)
def advise(
    source: Source, set_: SetTask = None, out: Out = None, json_: Json = False, trust: Trust = False, **given: Any
) -> None:
    """Who should be moored how tightly? A verdict per client (alone, common, personal), with evidence."""
    from mooring.advice.advise import advise as run
    from mooring.advice.advise import as_json
    from mooring.report.answers import show_run
    from mooring.report.figures import draw_advice
    from mooring.report.terminal import Display

    display = Display(json_)
    given = task_only(set_, given)
    out = begun(out or free_directory(source, "advice"))
    with display.progress() as tell:
        advice = run(source, out=out, tell=tell, **given, **({"trust": True} if trust else {}))
    draw_advice(advice.run)
    display.notes(advice.job.clients.notes)
    if json_:
        emit(as_json(advice))
    else:
        show_run(display, advice.run)


@app.command(epilog=example("mooring theory exam.csv --client school --target score"))
@takes(*DATA, "task", "weights", "seed", "threads")
def theory(source: Source, set_: SetTask = None, json_: Json = False, trust: Trust = False, **given: Any) -> None:
    """What the theorems say about a federation: constants, heterogeneity, thresholds, lambda by every rule.

    `mooring theorem` evaluates a theorem at quantities of your own.
    """
    from mooring.advice.survey import as_table, survey
    from mooring.engines.prepare import prepare
    from mooring.engines.request import request
    from mooring.report.answers import show_theory
    from mooring.report.terminal import Display

    display = Display(json_)
    job = prepare(request(source, purpose="advise", trust=trust, **task_only(set_, given)))
    found = survey(job.task, job.clients, job.run.training.weights)
    display.notes(job.clients.notes)
    if json_:
        emit(as_table(found))
    else:
        show_theory(display, as_table(found))


@app.command(epilog=example("mooring check exam.csv --client school --target score"))
@takes(*TABLE_ONLY, "weights", "seed")
def check(source: Source, json_: Json = False, trust: Trust = False, **given: Any) -> None:
    """What is wrong with my data, per client? Exit code 2 when something must be put right first."""
    from mooring.data.checks import check as inspect
    from mooring.engines.prepare import load_options
    from mooring.engines.request import request
    from mooring.report.answers import show_findings
    from mooring.report.terminal import Display

    display = Display(json_)
    asked = request(source, purpose="advise", trust=trust, **given)
    findings = [finding._asdict() for finding in inspect(asked.data.source, **load_options(asked))]
    if json_:
        emit({"findings": findings})
    else:
        show_findings(display, source, findings)
    if any(finding["severity"] == "error" for finding in findings):
        raise typer.Exit(2)


LISTS: dict[str, tuple[str, str, dict[str, str]]] = {  # module, its function that names all, columns
    "algorithms": (
        "mooring.algorithms.base",
        "names",
        {"name": "algorithm", "summary": "what", "paper": "source", "limits": "limits", "reveals": "reveals"},
    ),
    "tasks": (
        "mooring.tasks.catalog",
        "names",
        {"name": "task", "summary": "what", "targets": "targets", "exact": "exact prox"},
    ),
    "datasets": ("mooring.data.datasets", "known", {"name": "data set", "summary": "what", "needs": "needs"}),
    "experiments": (
        "mooring.experiments.base.catalog",
        "ids",
        {"id": "experiment", "title": "what", "claims": "claims"},
    ),
}


@app.command("list", epilog="Example: mooring list algorithms")
def list_(
    what: Annotated[str, typer.Argument(hidden=True, metavar=f"{'|'.join(LISTS)}")],
    json_: Json = False,
) -> None:
    """What there is to choose from."""
    from mooring.report.terminal import Display

    if what not in LISTS:
        raise RequestError(f"mooring list: {unknown('list', what, LISTS)}.")
    module, names, columns = LISTS[what]
    found = import_module(module)
    rows = [found.describe(name) for name in getattr(found, names)()]
    if json_:
        emit({what: rows})
    else:
        Display().table(what, rows, columns, spare=("limits", "reveals"))


@app.command(epilog="Example: mooring reproduce all --preset quick")
@takes("data_dir")
def reproduce(
    what: Annotated[str, typer.Argument(hidden=True)],
    preset: Annotated[
        str,
        typer.Option("--preset", help="quick (a minute each) or paper (its own sizes). [quick]", show_default=False),
    ] = "quick",
    out: Annotated[
        Path, typer.Option("--out", help="Where figures, tables and records go. [reproduction]", show_default=False)
    ] = Path("reproduction"),
    page: Annotated[Path | None, typer.Option("--page", help="Write a page on all records in --out.")] = None,
    json_: Json = False,
    **given: Any,
) -> None:
    """Run figures and tables of the papers; every claim is held or failed. Exit code 3 when one failed.

    WHAT is an experiment's id (`mooring list experiments`), a paper such as kernel, or all.
    """
    from mooring.experiments.base.reproduce import claims
    from mooring.experiments.base.reproduce import reproduce as run
    from mooring.report.reproduction import draw_record, show_claims, write_page
    from mooring.report.terminal import Display
    from mooring.runs.directory import refuse_unwritable

    display = Display(json_)
    refuse_unwritable(out)
    with display.progress() as tell:
        records = run(what, preset, out, tell=tell, **given)
    for record in records:
        draw_record(record, out)
    found = claims(records)
    if page is not None:
        write_page(out, page)
    if json_:
        emit({"claims": found})
    else:
        show_claims(display, found, preset, out)
    if not all(row["held"] for row in found):
        raise typer.Exit(3)


@app.command(epilog=example("mooring theorem"))
def theorem(
    name: Annotated[str | None, typer.Argument(help="A theorem, or a statement of one; none: list all.")] = None,
    given: Annotated[list[str] | None, typer.Argument(help="Its quantities, such as mu=0.5 n=[20,30].")] = None,
    json_: Json = False,
) -> None:
    """The papers' theorems: list them, show what one asks for, or evaluate it at given quantities."""
    from mooring.report.terminal import Display
    from mooring.theory import catalog

    display = Display(json_)
    if given and name:
        answer = catalog.evaluate(name, given)
        if json_:
            emit(answer)
        else:
            display.table(
                name, [{"name": key, "value": part} for key, part in answer.items()], {"name": "", "value": ""}
            )
        return
    rows = catalog.describe(name)
    if json_:
        emit({"theorems" if name is None else "statements": rows})
    else:
        display.table(name or "theorems", rows, {"name": "name", "says": "what", "asks": "quantities"})


def begun(out: Path) -> Path:
    """Where a run is about to be written: it must be possible, and an interrupted command tells how to go on."""
    from mooring.runs.directory import refuse_unwritable

    refuse_unwritable(out)
    INTERRUPTED[:] = [out]
    return out


def free_directory(source: str, purpose: str) -> Path:
    """Where a run goes if nobody says: named after its source and what is done with it."""
    from mooring.runs.directory import default_out

    return default_out(f"{Path(source).stem}-{purpose}")


def task_only(texts: list[str] | None, given: dict[str, Any]) -> dict[str, Any]:
    """The options with the task's fields, where there is no algorithm to set fields of."""
    fields, given = apart(texts, given)
    if fields:
        raise RequestError(f"--set takes task.FIELD=VALUE here, got {next(iter(fields))!r}.")
    return given


def emit(value: Any) -> None:
    """One JSON object on stdout."""
    from mooring.runs.files import to_json

    sys.stdout.write(to_json(value) + "\n")


def main(argv: list[str] | None = None) -> None:
    """Run a command. Exit codes: 0 done, 1 the work failed, 2 the request was wrong."""
    warnings.showwarning = lambda message, *rest, **more: print(f"note: {message}", file=sys.stderr)  # noqa: T201
    if sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty():
        ASK[:] = [lambda question: typer.confirm(question, err=True)]
    try:
        given = sys.argv[1:] if argv is None else argv
        INTERRUPTED.clear()
        DEBUG["on"] = "--debug" in given  # wherever it stands
        code = app([word for word in given if word != "--debug"], standalone_mode=False)
        if code == 130:  # typer's own way to say that it was interrupted
            interrupted()
    except Exception as error:
        if DEBUG["on"]:
            raise
        code = told(error)
    except KeyboardInterrupt:
        code = interrupted()
    sys.exit(code if isinstance(code, int) else 0)


def interrupted() -> int:
    """Say how an interrupted command goes on; its exit code."""
    going = [run for run in INTERRUPTED if (run / "run.toml").is_file()]
    how = f"go on with `mooring resume {shlex.quote(str(going[0]))}`" if going else "nothing was written"
    print(f"interrupted; {how}.", file=sys.stderr)  # noqa: T201
    return 130


def told(error: Exception) -> int:
    """Say an error in one sentence; its exit code."""
    import click

    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, click.NoSuchOption) and error.ctx is not None:
        known = [word for parameter in error.ctx.command.params for word in parameter.opts if word.startswith("--")]
        error = RequestError(f"mooring {error.ctx.info_name}: {unknown('option', error.option_name, known)}.")
    if isinstance(error, click.ClickException):
        error.show()
        return 2
    if isinstance(error, click.Abort):
        return interrupted()
    foreseen = isinstance(error, RequestError | WorkError)
    text = str(error) if foreseen else f"unexpected {type(error).__name__}: {error} (run with --debug for the details)"
    print(f"error: {text}", file=sys.stderr)  # noqa: T201
    return 2 if isinstance(error, RequestError) else 1
