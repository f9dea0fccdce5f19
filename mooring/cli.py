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
from mooring.core.level import LEVEL
from mooring.core.trust import ASK
from mooring.options import (
    ADVICE,
    DATA,
    TASK,
    TRAINING,
    Csv,
    Json,
    Method,
    Methods,
    Out,
    Set,
    SetEach,
    SetTask,
    Source,
    Track,
    Trust,
    apart,
    by_commas,
    by_method,
    example,
    takes,
)
from mooring.runs.sections import ALGORITHM, installed

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 120},
    help="Personalized federated learning: how tightly should each client be moored to the others?",
)

DEBUG = {"on": False}
ANYWHERE = ("--debug", "--quiet", "--verbose")  # options that may stand anywhere
INTERRUPTED: list[Path] = []  # the run directory of the command that is running
Run = Annotated[Path, typer.Argument(hidden=True)]
Of = Annotated[
    str | None, typer.Option("--method", help="Of a comparison: whose models. [the best on validation rows]")
]
TABLE_ONLY = tuple(name for name in DATA if name not in ("partition", "data_dir", "rare"))
ONCE = tuple(name for name in TRAINING if name != "seeds")
OF_ROUNDS = tuple(name for name in ONCE if name not in ("keep", "checkpoint_every", "baselines"))


def tell_version(asked: bool) -> None:
    if asked:
        print(f"mooring {installed()}")  # noqa: T201
        raise typer.Exit


@app.callback(epilog="Example: mooring advise heart --out runs/heart")
def options(
    quiet: Annotated[bool, typer.Option("--quiet", help="The answer only: no notes, no progress.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Tell every step, with the time it took.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the stack trace of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Tell the version.", callback=tell_version, is_eager=True)
    ] = False,
) -> None:
    pass  # the first three may stand anywhere: `main` takes them


@app.command(epilog=example("mooring fit exam.csv --client school --target score --set lam=0.5"))
@takes(*DATA, *TASK, *ONCE)
def fit(
    source: Source,
    algorithm: Method = None,
    set_: Set = None,
    out: Out = None,
    json_: Json = False,
    csv_: Csv = False,
    track: Track = None,
    trust: Trust = False,
    **given: Any,
) -> None:
    """Train one method on a federation, with training alone and one common model beside it."""
    from mooring.engines.fit import fit as train
    from mooring.report.answers import show_run
    from mooring.report.page import write_report

    display = prepared(json_ or csv_, track)
    settings, given = apart(set_, given)
    out = begun(out or free_directory(source, algorithm or ("fit" if source.endswith(".toml") else ALGORITHM)))
    with display.progress() as tell:
        result = train(source, algorithm=algorithm, settings=settings, out=out, tell=tell, trust=trust, **given)
    display.notes(result.notes)
    page = write_report([out])
    if json_:
        emit({"summary": result.summary, "clients": result.clients.to_dict("records"), "run": str(result.run)})
    elif csv_:
        sys.stdout.write(csv_text(result.clients))
    else:
        show_run(display, out)
        display.say(f"Page: {page}")
    tell_tracker(display, out, track)


@app.command(epilog=example("mooring tune exam.csv --client school --target score --algorithm fedavg"))
@takes(*DATA, *TASK, "participation", "weights", "threads")
def tune(
    source: Source, algorithm: Method = None, set_: Set = None, json_: Json = False, trust: Trust = False, **given: Any
) -> None:
    """Which threads, chunk and kernels are fastest on this machine: a few rounds with each. Nothing is written."""
    from mooring.engines.tune import tune as measure
    from mooring.report.terminal import Display

    display = Display(json_)
    settings, given = apart(set_, given)
    trials = measure(source, algorithm=algorithm, settings=settings, trust=trust, **given)
    if json_:
        emit({"proposed": trials[0]._asdict(), "trials": [trial._asdict() for trial in trials]})
        return
    for trial in trials:
        display.say(f"{1000 * trial.seconds:10.1f} ms a round with {trial.options}")
    display.say(f"Fastest: {trials[0].options}")


@app.command(epilog=example("mooring compare exam.csv --client school --target score --methods local,fedavg,ditto"))
@takes(*DATA, *TASK, *(name for name in TRAINING if name != "baselines"))
def compare(
    source: Source,
    methods: Methods = None,
    set_: SetEach = None,
    out: Out = None,
    json_: Json = False,
    csv_: Csv = False,
    track: Track = None,
    trust: Trust = False,
    **given: Any,
) -> None:
    """Train several methods on the same data, splits and cohorts."""
    from mooring.engines.compare import as_json
    from mooring.engines.compare import compare as run
    from mooring.report.answers import show_run
    from mooring.report.figures import draw_comparison
    from mooring.report.page import write_report

    display = prepared(json_ or csv_, track)
    fields, given = apart(set_, given)
    out = begun(out or free_directory(source, "compare"))
    with display.progress() as tell:
        result = run(source, by_commas(methods), settings=by_method(fields), out=out, tell=tell, trust=trust, **given)
    draw_comparison(out)
    page = write_report([out])
    display.notes(result.notes)
    if json_:
        emit(as_json(result))
    elif csv_:
        sys.stdout.write(csv_text(result.clients))
    else:
        show_run(display, out)
        display.say(f"Page: {page}")
    tell_tracker(display, out, track)


@app.command(epilog="Example: mooring resume runs/exam-1")
def resume(run: Run, json_: Json = False, trust: Trust = False) -> None:
    """Continue an interrupted run (its directory RUN) to the very result it would have had."""
    from mooring.advice import advise as advising
    from mooring.engines import compare as comparing
    from mooring.engines import fit as fitting
    from mooring.report.answers import show_run
    from mooring.report.page import write_report
    from mooring.report.terminal import Display
    from mooring.runs.directory import open_run

    display = Display(json_)
    INTERRUPTED[:] = [run]
    purpose, notes = open_run(run).run.mooring.purpose, []
    with display.progress() as tell:
        if purpose == "compare":
            result = comparing.resume(run, tell, trust=trust)
            notes = result.notes
        elif purpose == "fit":
            fitted, note = fitting.resume(run, tell, trust=trust)
            notes = [note] if note else []
        elif purpose == "advise":
            if not open_run(run).finished:
                advising.resume(run, tell, trust=trust)
        else:
            raise RequestError(
                f"{run} is a run of '{purpose}', which is written whole when it is done: there is nothing to resume."
            )
    display.notes(notes)
    if purpose == "advise":
        told = open_run(run).advice | {"run": str(run)}
        return show_advised(display, run, {k: told[k] for k in advising.PRINTED} if json_ else None)
    page = write_report([run])
    if json_:
        if purpose == "compare":
            emit(comparing.as_json(result))
        else:
            emit({"summary": fitted.summary, "clients": fitted.clients.to_dict("records"), "run": str(run)})
    else:
        show_run(display, run)
        display.say(f"Page: {page}")
    return None


@app.command(epilog="Example: mooring report runs/exam-advice-1 --open")
def report(
    runs: Annotated[list[Path], typer.Argument(hidden=True, metavar="RUN...")],
    out: Annotated[
        Path | None, typer.Option("--out", help="The page. [RUN/report.html; of several runs mooring-report.html]")
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
) -> None:
    """Write the page of a run again, or one page of several runs side by side (their directories RUN...)."""
    from mooring.report.page import write_report
    from mooring.report.terminal import Display

    page = write_report(runs, out)
    Display().say(f"Page: {page}")
    if open_:
        typer.launch(page.resolve().as_uri())


@app.command("app", epilog="Example: mooring app --open")
def local_page(
    folder: Annotated[
        Path, typer.Option("--folder", help="Where tables and runs are kept. [mooring-app]", show_default=False)
    ] = Path("mooring-app"),
    port: Annotated[int, typer.Option("--port", help="Port to listen on. [any that is free]", show_default=False)] = 0,
    open_: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
) -> None:
    """A page on this machine: drop a table, pick its columns, press a button, take the report and the models.

    It listens on the loopback address only, and its own address holds a token. Interrupt it to end it.
    """
    from mooring.report.terminal import Display
    from mooring.runs.directory import refuse_unwritable

    try:
        from mooring.app.server import serve as show
    except ModuleNotFoundError as missing:
        if missing.name not in ("starlette", "uvicorn"):
            raise
        raise RequestError(f"`mooring app` needs {missing.name}: pip install 'mooring[app]'.") from None
    refuse_unwritable(folder / "runs")

    def ready(address: str) -> None:
        Display().say(f"Mooring's page: {address}")
        if open_:
            typer.launch(address)

    show(folder, port, ready)


@app.command(epilog="Example: mooring watch runs/heart-fedprox_one_stage-1")
def watch(run: Run) -> None:
    """A running job, from its directory RUN: how far it is, its losses, who takes part, who failed, the time left.

    What is shown is that of the latest checkpoint. Where there is no terminal, a line is written at every change.
    """
    from mooring.report.terminal import Display
    from mooring.report.watch import watch as show

    show(Display(), run)


@app.command(epilog="Example: mooring init visits.csv --out run.toml")
def init(
    source: Source,
    client: Annotated[str | None, typer.Option("--client", help="Column that says whose row it is. [asked]")] = None,
    target: Annotated[str | None, typer.Option("--target", help="Column to predict. [asked]")] = None,
    drop_small: Annotated[
        bool | None, typer.Option("--drop-small/--no-drop-small", help="Leave clients with few rows out. [asked]")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="The run file to write. [run.toml]", show_default=False)] = Path(
        "run.toml"
    ),
) -> None:
    """Write a run file with a comment on every option, from a table and at most three questions.

    SOURCE is a table. Where there is no terminal nothing is asked: the options say it.
    """
    from mooring.engines.questions import run_file_of
    from mooring.report.terminal import Display
    from mooring.runs.directory import refuse_unwritable
    from mooring.runs.files import write_whole

    if out.exists():
        raise RequestError(f"{out} already exists; choose another --out.")
    refuse_unwritable(out)
    ask = typer.prompt if ASK else None  # ASK is empty in a pipe
    text = run_file_of(source, out.name, {"client": client, "target": target, "drop_small": drop_small}, ask)
    write_whole(out, text.encode())
    Display().say(f"Written: {out}; `mooring advise {shlex.quote(str(out))}` runs it.")


@app.command(epilog="Example: mooring explain lambda")
def explain(
    term: Annotated[list[str] | None, typer.Argument(hidden=True, metavar="TERM")] = None, json_: Json = False
) -> None:
    """What a word of the answers means, an option or an algorithm; without a TERM, the words that are known."""
    from mooring.report.glossary import TERMS
    from mooring.report.terminal import Display

    if not term:
        Display().say(", ".join(TERMS))
        return
    text, where = meaning(" ".join(term))
    if json_:
        emit({"term": " ".join(term), "text": text, "read": where})
    else:
        Display().say(f"{text}\nRead on: {where}")


def meaning(word: str) -> tuple[str, str]:
    """What a word means, and where to read on."""
    from mooring import options as flags
    from mooring.algorithms import base
    from mooring.report.glossary import find, words

    if (found := find(word)) is not None:
        return found.text, f"docs/{found.page}"
    bare = word.lstrip("-").replace("-", "_")
    if bare in flags.names():
        told = flags.describe(bare)
        return f"{told['summary']} Without {told['flag']} it is: {told['default']}.", "docs/options.md"
    if bare in base.names():
        return f"{bare}: {base.describe(bare)['summary']}", "docs/maths.md; `mooring list algorithms` names them all"
    raise RequestError(f"mooring explain: {unknown('word', word, [*words(), *flags.names(), *base.names()])}.")


@app.command(epilog="Example: mooring predict runs/exam-1 new.csv --out predictions.csv")
def predict(
    run: Run,
    source: Source,
    client: Annotated[str | None, typer.Option("--client", help="Whose model answers. [each row's own]")] = None,
    method: Of = None,
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
    from mooring.runs.files import csv_bytes, write_whole

    display = Display(json_)
    if out is not None:
        refuse_unwritable(out)
    frame, notes = answer(run, source, client, method, trust)
    display.notes(notes)
    if json_:
        emit({"predictions": frame.to_dict("records"), "run": str(run)})
    elif out is not None:
        if out.exists():
            raise RequestError(f"{out} already exists; choose another --out.")
        write_whole(out, csv_bytes(frame))
        display.say(f"{len(frame)} predictions in {out}")
    else:
        sys.stdout.write(csv_bytes(frame).decode())


@app.command(epilog="Example: mooring export runs/exam-1 --out coefficients.csv")
def export(
    run: Run,
    to: Annotated[
        str,
        typer.Option(
            "--to", help="csv, json or sklearn (coefficients), torch or onnx (network). [csv]", show_default=False
        ),
    ] = "csv",
    client: Annotated[str | None, typer.Option("--client", help="Whose model. [everyone's]")] = None,
    method: Of = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write this file instead of printing.")] = None,
) -> None:
    """Models of a finished run for other tools, in the units of the data.

    RUN is the run's directory. csv: a row for each client and term with its coefficient, the common one and the
    deviation. json: the same as one object. sklearn: JSON that `mooring.load_sklearn` reads. torch: a network's weights
    (safetensors), of the common model or of --client; onnx: the network itself.
    """
    from mooring.engines.export import export as write
    from mooring.report.terminal import Display

    content, notes = write(run, to, client, method)
    display = Display(json=True)
    display.notes(notes)
    if out is None:
        if to in ("torch", "onnx"):
            raise RequestError(f"--to {to} writes a file; say which by --out.")
        sys.stdout.write(content.decode())
    else:
        from mooring.runs.files import write_whole

        if out.exists():
            raise RequestError(f"{out} already exists; choose another --out.")
        write_whole(out, content)
        display.say(f"Written: {out}")


@app.command(epilog="Example: mooring personalize runs/exam-1 newcomer.csv --out runs/exam-joined")
@takes("min_rows", "drop_small", "seed")
def personalize(
    run: Run,
    source: Source,
    how: Annotated[
        str, typer.Option("--how", help="mixture, prox, finish, alone or tune. [auto]", show_default=False)
    ] = "auto",
    method: Of = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="A new run directory: the run with the newcomers in it.")
    ] = None,
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
    found = answer(run, source, how=how, method=method, out=out, **given)
    display.notes(found.notes)
    if json_:
        told = {"metric": found.metric, "way": found.way, "clients": found.clients.to_dict("records")}
        emit(told | {"run": str(out or run)})
    else:
        show_newcomers(display, found.clients, found.metric, found.way)
        if out is not None:
            display.say(f"Run: {out}, with the newcomers in it; `mooring predict {out} new.csv` serves them.")


@app.command(epilog=example("mooring advise exam.csv --client school --target score"))
@takes(*DATA, *TASK, *OF_ROUNDS, *ADVICE)
def advise(
    source: Source,
    set_: SetTask = None,
    out: Out = None,
    clients: Annotated[bool, typer.Option("--clients", help="A row for every client, too.")] = False,
    json_: Json = False,
    csv_: Csv = False,
    track: Track = None,
    trust: Trust = False,
    **given: Any,
) -> None:
    """Train alone, together or in between? What each client should deploy, what it gains, and how sure that is."""
    from mooring.advice.advise import advise as run
    from mooring.advice.advise import as_json

    display = prepared(json_ or csv_, track)
    given = task_only(set_, given)
    out = begun(out or free_directory(source, "advice"))
    with display.progress() as tell:
        advice = run(source, out=out, tell=tell, trust=trust, **given)
    display.notes(advice.job.clients.notes)
    instead = as_json(advice) if json_ else csv_text(advice.clients) if csv_ else None
    show_advised(display, out, instead, clients)
    tell_tracker(display, out, track)


def show_advised(display: Any, run: Path, instead: Any, clients: bool = False) -> None:
    """An advice that is written: its figures, its page and its answer, or `instead` an object as JSON or a text."""
    from mooring.report.answers import show_run
    from mooring.report.figures import draw_advice
    from mooring.report.page import write_report

    draw_advice(run)
    page = write_report([run])
    if isinstance(instead, str):
        sys.stdout.write(instead)
    elif instead is not None:
        emit(instead)
    else:
        show_run(display, run, clients)
        display.say(f"Page: {page}")


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
        {
            "name": "algorithm",
            "summary": "what",
            "fields": "fields for --set",
            "paper": "source",
            "limits": "limits",
            "reveals": "reveals",
        },
    ),
    "tasks": (
        "mooring.tasks.catalog",
        "names",
        {"name": "task", "summary": "what", "targets": "targets", "exact": "exact prox"},
    ),
    "datasets": ("mooring.data.datasets", "known", {"name": "data set", "summary": "what", "needs": "needs"}),
    "options": (
        "mooring.options",
        "names",
        {"flag": "flag", "file": "run file", "python": "Python", "default": "default", "summary": "what"},
    ),
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
        short = [{k: list(v) if isinstance(v, dict) else v for k, v in row.items()} for row in rows]
        caption = "Defaults of the fields: `mooring list algorithms --json`." if what == "algorithms" else ""
        Display().table(what, short, columns, caption, spare=("limits", "reveals", "paper"))


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
    """Run figures and tables of the papers; every claim is held, open or contradicted.

    Exit code 3 when one is contradicted, 4 when none is but some are open.

    WHAT is an experiment's id (`mooring list experiments`), a paper such as kernel, or all.
    """
    from mooring.experiments.base import catalog
    from mooring.experiments.base.claims import CONTRADICTED, HELD
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
        write_page(out, page, [catalog.describe(one) for one in catalog.ids()])
    if json_:
        emit({"claims": found})
    else:
        show_claims(display, found, preset, out)
    words = {row["word"] for row in found}
    if words != {HELD}:
        raise typer.Exit(3 if CONTRADICTED in words else 4)


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


def prepared(aside: bool, track: str | None) -> Any:
    """Where a command speaks (`aside`: stdout is for data); a tracker that is not there is told before the work."""
    from mooring.report.terminal import Display

    if track is not None:
        from mooring.report.track import refuse_missing

        refuse_missing(track)
    return Display(aside)


def tell_tracker(display: Any, out: Path, track: str | None) -> None:
    if track is not None:
        from mooring.report.track import track as tell

        display.say(f"Tracked: {tell(out, track)}")


def begun(out: Path) -> Path:
    """Where a run is about to be written: it must be possible, and an interrupted command tells how to go on."""
    from mooring.runs.directory import refuse_unwritable

    refuse_unwritable(out)
    INTERRUPTED[:] = [out]
    return out


federation = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="A federation across processes.",
    epilog="Example: mooring federation up run.toml --clients clients/ --embedded",
)
keys = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Certificates and keys of a federation.",
    epilog="Example: mooring keys init keys --clients north,south,west",
)
app.add_typer(federation, name="federation")
app.add_typer(keys, name="keys")
Insecure = Annotated[bool, typer.Option("--insecure", help="Without TLS, on this machine only.")]
Embedded = Annotated[
    bool, typer.Option("--embedded", help="Answer in this process, not through Flower's own node: quicker.")
]


@app.command(epilog="Example: mooring serve run.toml --keys keys --host 0.0.0.0 --clients 3 --out runs/three")
def serve(
    run: Run,
    out: Out = None,
    clients: Annotated[
        int | None, typer.Option("--clients", help="How many take part. [as [federation] says]", show_default=False)
    ] = None,
    key_folder: Annotated[Path | None, typer.Option("--keys", help="Folder made by `mooring keys init`.")] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen on.")] = 9092,
    insecure: Insecure = False,
    json_: Json = False,
) -> None:
    """Lead a federation whose clients `mooring join` from their own machines; the same command goes on after a crash.

    RUN is a run file. Rows and personal models stay with the clients.
    """
    from mooring.engines.flower.federation import serve as lead
    from mooring.report.terminal import Display

    display = Display(json_)
    out = out or Path("runs") / f"{run.stem}-federation"
    with display.progress() as tell:
        lead(
            run, out, key_folder=key_folder, host=host, port=port, insecure=insecure, clients=clients, say=whisper,
            tell=tell,
        )  # fmt: skip
    show_federation(display, out, json_)


@app.command(epilog="Example: mooring join run.toml --data me.csv --state me --server host:9092 --ca ca.crt --key me")
def join(
    run: Run,
    data: Annotated[Path, typer.Option("--data", help="This client's own table.")],
    state: Annotated[Path, typer.Option("--state", help="Folder for what this client keeps.")],
    server: Annotated[str, typer.Option("--server", metavar="HOST:PORT", help="Where the server is.")] = (
        "127.0.0.1:9092"
    ),
    name: Annotated[str | None, typer.Option("--name", help="This client's name. [the file's]")] = None,
    ca: Annotated[Path | None, typer.Option("--ca", help="The federation's certificate, ca.crt.")] = None,
    key: Annotated[Path | None, typer.Option("--key", help="This client's private key.")] = None,
    insecure: Insecure = False,
    embedded: Embedded = False,
    json_: Json = False,
) -> None:
    """Take part in a federation with one client's table; the same command goes on after a crash.

    RUN is the same run file as the server's. Rows and the personal model stay in this machine's folders.
    """
    from mooring.engines.flower.federation import join as take_part
    from mooring.report.terminal import Display

    told = take_part(
        run, data, state, server=server, name=name, ca=ca, key=key, insecure=insecure, embedded=embedded, say=whisper
    )
    if json_:
        emit(told)
    else:
        Display().say(
            f"Test {told['metric']} of your own model {told['personal']:.4g}"
            + ("" if told["alone"] is None else f", trained alone {told['alone']:.4g}")
            + ("" if "verdict" not in told else f": {in_a_sentence(told)}")
            + f". `mooring predict {told['result']} NEW.csv` uses it."
        )


def in_a_sentence(told: dict[str, Any]) -> str:
    """What a client's own test rows say of its own model beside training alone."""
    if told["gain_low"] is None:
        return "too few test rows to tell them apart"
    known = {"the same": "the same model", "undecided": "your test rows cannot tell them apart"}
    ends = f"saves {told['gain_low']:.3g} to {told['gain_high']:.3g} a row at 95 %"
    return known.get(told["verdict"], f"{told['verdict']}, it {ends}")


@federation.command("up", epilog="Example: mooring federation up run.toml --clients clients/ --embedded")
def federation_up(
    run: Run,
    clients: Annotated[Path, typer.Option("--clients", help="Folder with one table per client.")],
    out: Out = None,
    insecure: Insecure = False,
    embedded: Embedded = False,
    json_: Json = False,
) -> None:
    """A whole federation on this machine, a process per client, over TLS: for trying it out.

    RUN is a run file. Keys, logs and the clients' folders are in OUT.federation.
    """
    from mooring.engines.flower.federation import up
    from mooring.report.terminal import Display

    display = Display(json_)
    out = out or Path("runs") / f"{run.stem}-federation"
    with display.progress() as tell:
        up(run, clients, out, embedded=embedded, insecure=insecure, say=whisper, tell=tell)
    show_federation(display, out, json_)


@keys.command("init", epilog="Example: mooring keys init keys --clients north,south,west --host fed.example.org")
def keys_init(
    folder: Annotated[Path, typer.Argument(hidden=True)],
    clients: Annotated[list[str], typer.Option("--clients", metavar="A,B", help="The clients' names.")],
    host: Annotated[list[str] | None, typer.Option("--host", metavar="A,B", help="The server's host names.")] = None,
) -> None:
    """Make a certificate authority, the server's certificate and a key for each client, as far as they lack."""
    from mooring.engines.flower.federation import need_flower
    from mooring.report.terminal import Display

    need_flower()
    from mooring.engines.flower.keys import init

    written = init(folder, by_commas(clients) or [], by_commas(host) or [])
    Display().say(f"{len(written)} files in {folder}. A client needs ca.crt and its own file of clients/.")


def whisper(sentence: str) -> None:
    """What is waited for, where it does not mix with the answer."""
    print(sentence, file=sys.stderr, flush=True)  # noqa: T201


def show_federation(display: Any, out: Path, json_: bool) -> None:
    from mooring.report.answers import show_run
    from mooring.runs.directory import open_run

    directory = open_run(out)
    if json_:
        emit({"summary": directory.summary, "clients": directory.clients.to_dict("records"), "run": str(out)})
    else:
        show_run(display, out)


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
        DEBUG["on"] = "--debug" in given
        LEVEL[0] = "quiet" if "--quiet" in given else "verbose" if "--verbose" in given else "normal"
        code = app([word for word in given if word not in ANYWHERE], prog_name="mooring", standalone_mode=False)
        if code == 130:  # typer's own way to say that it was interrupted
            interrupted()
    except Exception as error:
        if DEBUG["on"]:
            raise
        code = say_error(error)
    except KeyboardInterrupt:
        code = interrupted()
    sys.exit(code if isinstance(code, int) else 0)


def csv_text(frame: Any) -> str:
    """A table as CSV, without formulas for spreadsheets."""
    from mooring.runs.files import csv_bytes

    return csv_bytes(frame).decode()


def interrupted() -> int:
    """Say how an interrupted command goes on; its exit code."""
    going = [run for run in INTERRUPTED if (run / "run.toml").is_file()]
    how = f"go on with `mooring resume {shlex.quote(str(going[0]))}`" if going else "nothing was written"
    print(f"interrupted; {how}.", file=sys.stderr)  # noqa: T201
    return 130


def command_of(context: Any) -> str:
    """`mooring fit`, whichever way it was started."""
    return "mooring" if context.parent is None else f"{command_of(context.parent)} {context.info_name}"


def say_error(error: Exception) -> int:
    """Say an error in one sentence, which may hold words from files and data; its exit code."""
    import click

    from mooring.report.terminal import plain

    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, click.NoSuchOption) and error.ctx is not None:
        known = [word for parameter in error.ctx.command.params for word in parameter.opts if word.startswith("--")]
        error = RequestError(f"{command_of(error.ctx)}: {unknown('option', error.option_name, known)}.")
    if isinstance(error, click.UsageError) and error.ctx is not None:
        text = error.format_message().split(" Did you mean")[0]
        if isinstance(error.ctx.command, click.Group) and text.startswith("No such command"):
            asked = text.split("'", 1)[-1].rstrip("'.")
            text = f"{unknown('command', asked, error.ctx.command.commands)}."
        error = RequestError(f"{command_of(error.ctx)}: {text} `{command_of(error.ctx)} --help` tells how to use it.")
    if isinstance(error, click.ClickException):
        error = RequestError(error.format_message())
    if isinstance(error, click.Abort):
        return interrupted()
    foreseen = isinstance(error, RequestError | WorkError)
    text = str(error) if foreseen else f"unexpected {type(error).__name__}: {error} (run with --debug for the details)"
    print(f"error: {plain(text)}", file=sys.stderr)  # noqa: T201
    return 2 if isinstance(error, RequestError) else 1
