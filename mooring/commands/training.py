"""Runs: advise, fit, compare, resume, watch, report, tune."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mooring.commands.common import (
    RESUMABLE_RUNS,
    RunArgument,
    app,
    csv_text,
    free_directory,
    lasting_imports,
    log_to_tracker,
    mark_resumable,
    open_display,
    print_json,
    write_data,
)
from mooring.core.errors import RequestError
from mooring.options import (
    ADVICE,
    DATA,
    TASK,
    TRAINING,
    Csv,
    Json,
    Lam,
    Method,
    Methods,
    Out,
    Set,
    SetEach,
    Source,
    Track,
    TrustCode,
    add_options,
    example,
    group_by_method,
    parse_number,
    split_assignments,
    split_commas,
)
from mooring.runs.sections import DEFAULT_ALGORITHM

if TYPE_CHECKING:
    from mooring.report.terminal import Display

SINGLE_RUN_OPTIONS = tuple(name for name in TRAINING if name != "seeds")
PerClient = Annotated[bool, typer.Option("--per-client", help="Show all clients.")]
ROUND_OPTIONS = tuple(
    name for name in SINGLE_RUN_OPTIONS if name not in ("checkpoint", "checkpoint_every", "baselines")
)


@app.command(epilog=example("mooring advise exam.csv --client school --target score"))
@add_options(
    *DATA, *TASK, *ROUND_OPTIONS, *ADVICE, min_rows="1", rounds="100; networks only", participation="1; networks only"
)
def advise(
    source: Source,
    set_: Set = None,
    out: Out = None,
    per_client: PerClient = False,
    json_: Json = False,
    csv_: Csv = False,
    track: Track = None,
    trust_code: TrustCode = False,
    plan: Annotated[bool, typer.Option("--plan", help="List what clients would send.", show_default=False)] = False,
    columns: Annotated[
        int, typer.Option("--columns", help="Encoded columns that --plan counts with.", hidden=True)
    ] = 20,
    **given: Any,
) -> None:
    """Recommend a model for every client.

    It is local, global or personal, with its improvement and confidence.
    """
    if plan:
        show_plan(source, columns)
        return
    with lasting_imports():
        from mooring.advice.advise import advise as run
        from mooring.advice.advise import as_json

    display = open_display(json_ or csv_, track)
    settings, given = split_assignments(set_, given)
    out = mark_resumable(out or free_directory(source, "advice"))
    with display.progress() as on_progress:
        advice = run(source, out=out, settings=settings, progress=on_progress, trust_code=trust_code, **given)
    instead = as_json(advice) if json_ else csv_text(advice.clients) if csv_ else None
    show_written(display, out, instead, per_client, advice.job.clients.notes)
    log_to_tracker(display, out, track)


def show_plan(source: str, columns: int) -> None:
    """Print the plan of a run file."""
    from mooring.advice.federated.plan_text import describe_plan
    from mooring.engines.request import read_federation_request
    from mooring.report.terminal import Display

    if not str(source).endswith(".toml"):
        raise RequestError(f"--plan needs the run file of a federation, such as run.toml, not {source}.")
    display = Display()
    for line in describe_plan(read_federation_request(source), columns):
        display.print_line(line)


def show_written(
    display: Display, run: Path, instead: object, per_client: bool = False, notes: Sequence[str] | None = None
) -> None:
    """Write a run's report and show its answer, or `instead` of it print an object as JSON or a text and `notes`."""
    from mooring.report.html_report import write_report
    from mooring.report.terminal_results import show_notes
    from mooring.run_verbs import show_run

    write_report([run])
    if instead is None:
        show_run(display, run, per_client)
        return
    if isinstance(instead, str):
        write_data(instead)
    else:
        print_json(instead)
    show_notes(display, notes or [])


@app.command(epilog=example("mooring fit exam.csv --client school --target score --lam 0.5"))
@add_options(*DATA, *TASK, *SINGLE_RUN_OPTIONS)
def fit(
    source: Source,
    algorithm: Method = None,
    lam: Lam = None,
    set_: Set = None,
    out: Out = None,
    per_client: PerClient = False,
    json_: Json = False,
    csv_: Csv = False,
    track: Track = None,
    trust_code: TrustCode = False,
    **given: Any,
) -> None:
    """Train one algorithm and report its test scores.

    Beside it, local models and the pooled model are trained as baselines.
    """
    with lasting_imports():
        from mooring.engines.fit import fit as train
        from mooring.engines.fit_result import as_json

    display = open_display(json_ or csv_, track)
    settings, given = split_assignments(set_, given)
    settings |= {} if lam is None else {"lam": parse_number(lam)}
    out = mark_resumable(
        out or free_directory(source, algorithm or ("fit" if source.endswith(".toml") else DEFAULT_ALGORITHM))
    )
    with display.progress() as on_progress:
        result = train(
            source,
            algorithm=algorithm,
            settings=settings,
            out=out,
            progress=on_progress,
            trust_code=trust_code,
            **given,
        )
    instead = as_json(result) if json_ else csv_text(result.clients) if csv_ else None
    show_written(display, out, instead, per_client, result.notes)
    log_to_tracker(display, out, track)


@app.command(epilog=example("mooring compare exam.csv --client school --target score --methods local,fedavg,ditto"))
@add_options(*DATA, *TASK, *(name for name in TRAINING if name != "baselines"))
def compare(
    source: Source,
    methods: Methods = None,
    set_: SetEach = None,
    out: Out = None,
    per_client: PerClient = False,
    json_: Json = False,
    csv_: Csv = False,
    track: Track = None,
    trust_code: TrustCode = False,
    **given: Any,
) -> None:
    """Compare the test scores of several algorithms."""
    with lasting_imports():
        from mooring.engines.compare import as_json
        from mooring.engines.compare import compare as run
        from mooring.report.figures import draw_images

    display = open_display(json_ or csv_, track)
    fields, given = split_assignments(set_, given)
    out = mark_resumable(out or free_directory(source, "compare"))
    with display.progress() as on_progress:
        result = run(
            source,
            split_commas(methods),
            settings=group_by_method(fields),
            out=out,
            progress=on_progress,
            trust_code=trust_code,
            **given,
        )
    draw_images(out)
    instead = as_json(result) if json_ else csv_text(result.clients) if csv_ else None
    show_written(display, out, instead, per_client, result.notes)
    log_to_tracker(display, out, track)


@app.command(epilog="Example: mooring benchmark heart parkinsons --methods local,pooled,ditto --seeds 3")
@add_options(*DATA, *TASK, "rounds", "participation", "weights")
def benchmark(
    sources: Annotated[list[str], typer.Argument(hidden=True, metavar="SOURCE...")],
    methods: Annotated[
        list[str] | None,
        typer.Option("--methods", metavar="A,B", help="Names, groups (personal, global), or all. [personal,baseline]"),
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", help="Repetitions of each data set. [3]", show_default=False)] = 3,
    seed: Annotated[int, typer.Option("--seed", help="The first seed. [0]", show_default=False)] = 0,
    grid: Annotated[
        list[str] | None,
        typer.Option("--grid", metavar="METHOD.NAME=A,B", help="Settings to choose from on validation rows."),
    ] = None,
    tune: Annotated[bool, typer.Option("--tune/--no-tune", help="Choose lambda on validation rows. [yes]")] = True,
    out: Annotated[
        Path, typer.Option("--out", help="Folder; the same command resumes. [benchmark]", show_default=False)
    ] = Path("benchmark"),
    json_: Json = False,
    trust_code: TrustCode = False,
    **given: object,
) -> None:
    """Rank methods over several data sets and seeds.

    Each method's settings are chosen on validation rows. SOURCE... are tables, data sets or run files.
    """
    from mooring.engines.benchmark import as_json
    from mooring.engines.benchmark import benchmark as run
    from mooring.report.figure_style import encode_images
    from mooring.report.figures import draw_critical_differences
    from mooring.report.terminal import Display
    from mooring.runs.atomic_files import write_atomically

    display = Display(json_)
    RESUMABLE_RUNS[:] = ["comparisons that are done are kept: the same command resumes"]
    names = split_commas(methods) or ["personal", "baseline"]
    with display.progress() as on_progress:
        result = run(
            sources, names, out, seeds=seeds, seed=seed, tune=tune, grids=_parse_grids(grid), progress=on_progress,
            trust_code=trust_code, **given,
        )  # fmt: skip
    figure = draw_critical_differences(result.ranks, result.tests.critical_difference, result.tests.block)
    for form, image in encode_images(figure).items():
        write_atomically(out / f"critical-difference.{form}", image)
    if json_:
        print_json(as_json(result))
        return
    for row in result.ranks.to_dict("records"):
        p_value = row["p_value_against_best"]
        against = "" if p_value != p_value else f", p = {p_value:.3f} against the best"
        display.print_line(f"{row['mean_rank']:6.2f}  {row['method']}: {row['wins']} wins, {row['ties']} ties{against}")
    tests = result.tests
    display.print_line(
        f"Mean ranks over {tests.blocks} {tests.block}; Friedman p = {tests.p_value:.3g}, Nemenyi's critical "
        f"difference {tests.critical_difference:.2f}; p of Wilcoxon's test, adjusted by Holm."
    )
    display.notes(result.notes)
    display.print_line(
        f"Tables: {out}/table.csv, table.tex, results.csv, ranks.csv    Figure: {out}/critical-difference.svg"
    )


def _parse_grids(texts: list[str] | None) -> dict[str, dict[str, list[object]]] | None:
    """`ditto.lam=0.1,1` as {"ditto": {"lam": [0.1, 1]}}."""
    grids: dict[str, dict[str, list[object]]] = {}
    for text in texts or []:
        name, equals, values = text.partition("=")
        method, dot, field = name.rpartition(".")
        if not equals or not dot:
            raise RequestError(f"--grid takes METHOD.NAME=A,B, got {text!r}.")
        grids.setdefault(method, {})[field] = [parse_number(value) for value in values.split(",")]
    return grids or None


@app.command(epilog="Example: mooring resume runs/exam-1")
def resume(run: RunArgument, json_: Json = False, trust_code: TrustCode = False) -> None:
    """Resume an interrupted run.

    RUN is the run's directory. The result is bit-for-bit the one without interruption.
    """
    from mooring.report.figures import draw_images
    from mooring.report.terminal import Display
    from mooring.run_verbs import Inputs, as_json, resume_run
    from mooring.runs.directory import explain_contents, open_run
    from mooring.runs.purposes import PURPOSES

    display = Display(json_)
    RESUMABLE_RUNS[:] = [run]
    with explain_contents(run), display.progress() as on_progress:
        result, notes = resume_run(run, on_progress, Inputs(trust_code=trust_code))
    if PURPOSES[open_run(run).run.mooring.purpose].methods == "several":
        draw_images(run)
    display.notes(notes)
    show_written(display, run, as_json(result, run) if json_ else None)


@app.command(epilog="Example: mooring watch runs/heart-fedprox_personal-1")
def watch(run: RunArgument) -> None:
    """Show the progress of a run that is not finished.

    It shows rounds, losses, participation and the time left, as of the latest checkpoint. RUN is the run's directory.
    Without a terminal, one line is written per change.
    """
    from mooring.report.terminal import Display
    from mooring.report.watch import watch_run as show

    show(Display(), run)


@app.command(epilog="Example: mooring report runs/exam-advice-1 --open")
def report(
    runs: Annotated[list[Path], typer.Argument(hidden=True, metavar="RUN...")],
    out: Annotated[Path | None, typer.Option("--out", help="The report. [RUN/report.html]")] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    images: Annotated[bool, typer.Option("--images", help="Also write figures as PNG and SVG into RUN.")] = False,
) -> None:
    """Write the report of one or several runs.

    Several runs stand side by side. RUN... are the runs' directories.
    """
    from mooring.report.html_report import write_report
    from mooring.report.terminal import Display

    page, display = write_report(runs, out), Display()
    if images:
        from mooring.report.figures import draw_images

        for run in runs:
            display.print_line(f"Images: {', '.join(map(str, draw_images(run)))}")
    display.print_line(f"Report: {page}")
    if open_:
        typer.launch(page.resolve().as_uri())


@app.command(epilog=example("mooring tune exam.csv --client school --target score --algorithm fedavg"))
@add_options(*DATA, *TASK, "participation", "weights", "threads")
def tune(
    source: Source,
    algorithm: Method = None,
    set_: Set = None,
    json_: Json = False,
    trust_code: TrustCode = False,
    **given: Any,
) -> None:
    """Measure which settings are fastest on this machine.

    Threads, chunk and kernels are tried for a few rounds each. Nothing is written.
    """
    from mooring.engines.tune import tune as measure
    from mooring.report.terminal import Display

    display = Display(json_)
    settings, given = split_assignments(set_, given)
    trials = measure(source, algorithm=algorithm, settings=settings, trust_code=trust_code, **given)
    if json_:
        print_json({"proposed": trials[0]._asdict(), "trials": [trial._asdict() for trial in trials]})
        return
    for trial in trials:
        display.print_line(f"{1000 * trial.seconds:10.1f} ms per round with {trial.options}")
    display.print_line(f"Fastest: {trials[0].options}")
