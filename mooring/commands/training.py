"""Runs: advise, fit, compare, resume, watch, report, tune."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from mooring.commands.common import (
    INTERRUPTED,
    Run,
    app,
    begun,
    csv_text,
    emit,
    free_directory,
    prepared,
    task_only,
    tell_tracker,
)
from mooring.core.errors import RequestError
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
from mooring.runs.sections import ALGORITHM

ONCE = tuple(name for name in TRAINING if name != "seeds")
Each = Annotated[bool, typer.Option("--clients", help="A row for every client, too.")]
OF_ROUNDS = tuple(name for name in ONCE if name not in ("keep", "checkpoint_every", "baselines"))


@app.command(epilog=example("mooring advise exam.csv --client school --target score"))
@takes(*DATA, *TASK, *OF_ROUNDS, *ADVICE)
def advise(
    source: Source,
    set_: SetTask = None,
    out: Out = None,
    clients: Each = False,
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
    show_written(display, out, instead, clients)
    tell_tracker(display, out, track)


def show_written(display: Any, run: Path, instead: Any, clients: bool = False) -> None:
    """A run that is written: its page and its answer, or `instead` an object as JSON or a text."""
    from mooring.report.answers import show_run
    from mooring.report.page import write_report

    page = write_report([run])
    if isinstance(instead, str):
        sys.stdout.write(instead)
    elif instead is not None:
        emit(instead)
    else:
        show_run(display, run, clients)
        display.say(f"Page: {page}")


@app.command(epilog=example("mooring fit exam.csv --client school --target score --set lam=0.5"))
@takes(*DATA, *TASK, *ONCE)
def fit(
    source: Source,
    algorithm: Method = None,
    set_: Set = None,
    out: Out = None,
    clients: Each = False,
    json_: Json = False,
    csv_: Csv = False,
    track: Track = None,
    trust: Trust = False,
    **given: Any,
) -> None:
    """Train one method on a federation, with training alone and one common model beside it."""
    from mooring.engines.fit import as_json
    from mooring.engines.fit import fit as train

    display = prepared(json_ or csv_, track)
    settings, given = apart(set_, given)
    out = begun(out or free_directory(source, algorithm or ("fit" if source.endswith(".toml") else ALGORITHM)))
    with display.progress() as tell:
        result = train(source, algorithm=algorithm, settings=settings, out=out, tell=tell, trust=trust, **given)
    display.notes(result.notes)
    show_written(display, out, as_json(result) if json_ else csv_text(result.clients) if csv_ else None, clients)
    tell_tracker(display, out, track)


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
    from mooring.report.figures import draw_images

    display = prepared(json_ or csv_, track)
    fields, given = apart(set_, given)
    out = begun(out or free_directory(source, "compare"))
    with display.progress() as tell:
        result = run(source, by_commas(methods), settings=by_method(fields), out=out, tell=tell, trust=trust, **given)
    draw_images(out)
    display.notes(result.notes)
    show_written(display, out, as_json(result) if json_ else csv_text(result.clients) if csv_ else None)
    tell_tracker(display, out, track)


@app.command(epilog="Example: mooring resume runs/exam-1")
def resume(run: Run, json_: Json = False, trust: Trust = False) -> None:
    """Continue an interrupted run (its directory RUN) to the very result it would have had."""
    from mooring.advice import advise as advising
    from mooring.engines import compare as comparing
    from mooring.engines import fit as fitting
    from mooring.report.figures import draw_images
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
        instead: Any = {name: told[name] for name in advising.PRINTED}
    elif purpose == "compare":
        draw_images(run)
        instead = comparing.as_json(result)
    else:
        instead = fitting.as_json(fitted)
    show_written(display, run, instead if json_ else None)


@app.command(epilog="Example: mooring watch runs/heart-fedprox_one_stage-1")
def watch(run: Run) -> None:
    """A running job, from its directory RUN: how far it is, its losses, who takes part, who failed, the time left.

    What is shown is that of the latest checkpoint. Where there is no terminal, a line is written at every change.
    """
    from mooring.report.terminal import Display
    from mooring.report.watch import watch as show

    show(Display(), run)


@app.command(epilog="Example: mooring report runs/exam-advice-1 --open")
def report(
    runs: Annotated[list[Path], typer.Argument(hidden=True, metavar="RUN...")],
    out: Annotated[
        Path | None, typer.Option("--out", help="The page. [RUN/report.html; of several runs mooring-report.html]")
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
    images: Annotated[bool, typer.Option("--images", help="Figures as PNG and SVG, too, in RUN.")] = False,
) -> None:
    """Write the page of a run again, or one page of several runs side by side (their directories RUN...)."""
    from mooring.report.page import write_report
    from mooring.report.terminal import Display

    page, display = write_report(runs, out), Display()
    if images:
        from mooring.report.figures import draw_images

        for run in runs:
            display.say(f"Images: {', '.join(map(str, draw_images(run)))}")
    display.say(f"Page: {page}")
    if open_:
        typer.launch(page.resolve().as_uri())


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
