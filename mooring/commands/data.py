"""Before a run: init, check, theory, and the local page."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from mooring.commands.common import app, emit, task_only
from mooring.core.errors import RequestError
from mooring.core.trust import ASK
from mooring.options import DATA, Json, SetTask, Source, Trust, example, takes

TABLE_ONLY = tuple(name for name in DATA if name not in ("partition", "data_dir", "rare"))


@app.command(epilog="Example: mooring init visits.csv --out run.toml")
def init(
    source: Source,
    client: Annotated[str | None, typer.Option("--client", help="Column that identifies the client. [asked]")] = None,
    target: Annotated[str | None, typer.Option("--target", help="Column to predict. [asked]")] = None,
    drop_small: Annotated[
        bool | None, typer.Option("--drop-small/--no-drop-small", help="Leave clients with few rows out. [asked]")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="The run file to write. [run.toml]", show_default=False)] = Path(
        "run.toml"
    ),
) -> None:
    """Write a run file for a table.

    It has a comment on every option. SOURCE is a table; at most three questions are asked, and none without a terminal.
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


@app.command(epilog=example("mooring check exam.csv --client school --target score"))
@takes(*TABLE_ONLY, "weights", "seed")
def check(source: Source, json_: Json = False, trust: Trust = False, **given: Any) -> None:
    """Check a table for problems, client by client.

    The exit code is 2 when something must be fixed first.
    """
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


@app.command(epilog=example("mooring theory exam.csv --client school --target score"))
@takes(*DATA, "task", "weights", "seed", "threads")
def theory(source: Source, set_: SetTask = None, json_: Json = False, trust: Trust = False, **given: Any) -> None:
    """Apply the theorems to a federation.

    Constants, heterogeneity, thresholds, and lambda by every rule. `mooring theorem` evaluates a theorem at quantities
    of your own.
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


@app.command("app", epilog="Example: mooring app --open")
def local_page(
    folder: Annotated[
        Path, typer.Option("--folder", help="Where tables and runs are kept. [mooring-app]", show_default=False)
    ] = Path("mooring-app"),
    port: Annotated[int, typer.Option("--port", help="Port to listen on. [any that is free]", show_default=False)] = 0,
    open_: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Open a local page that recommends models for a table.

    Drop a table, choose its columns, and download the report and the models. It listens on the loopback address only,
    and its address holds a token. Interrupt it to end it.
    """
    from mooring.report.terminal import Display
    from mooring.runs.directory import refuse_unwritable

    try:
        from mooring.app.server import serve as show
    except ModuleNotFoundError as missing:
        if missing.name not in ("starlette", "uvicorn"):
            raise
        raise RequestError(f"`mooring app` needs {missing.name}: pip install 'mooring-fl[app]'.") from None
    refuse_unwritable(folder / "runs")

    def ready(address: str) -> None:
        Display().say(f"Mooring's page: {address}")
        if open_:
            typer.launch(address)

    show(folder, port, ready)
