"""Before a run: init, check, theory, and the local page."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from mooring.commands.common import app, parse_task_settings, print_json
from mooring.core.errors import RequestError
from mooring.core.trusted_files import CONFIRMATIONS
from mooring.options import DATA, Json, SetTask, Source, TrustCode, add_options, example

TABLE_OPTIONS = tuple(name for name in DATA if name not in ("partition", "data_dir", "min_category_rows"))


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
    from mooring.engines.init_wizard import write_run_file
    from mooring.report.terminal import Display
    from mooring.runs.atomic_files import write_atomically
    from mooring.runs.directory import check_writable

    if out.exists():
        raise RequestError(f"{out} already exists; choose another --out.")
    check_writable(out)
    prompt = typer.prompt if CONFIRMATIONS else None  # empty in a pipe
    text = write_run_file(source, out.name, {"client": client, "target": target, "drop_small": drop_small}, prompt)
    write_atomically(out, text.encode())
    Display().print_line(f"Written: {out}; `mooring advise {shlex.quote(str(out))}` runs it.")


@app.command(epilog=example("mooring check exam.csv --client school --target score"))
@add_options(*TABLE_OPTIONS, "weights", "seed")
def check(source: Source, json_: Json = False, trust_code: TrustCode = False, **given: Any) -> None:
    """Check a table for problems, client by client.

    The exit code is 2 when something must be fixed first.
    """
    from mooring.data.data_checks import check as inspect
    from mooring.engines.prepare import load_options
    from mooring.engines.request import request
    from mooring.report.terminal import Display
    from mooring.report.terminal_results import show_findings

    display = Display(json_)
    asked = request(source, purpose="advise", trust_code=trust_code, **given)
    findings = [
        finding._asdict() | {"cures": [cure._asdict() for cure in finding.cures]}
        for finding in inspect(asked.data.source, **load_options(asked))
    ]
    if json_:
        print_json({"findings": findings})
    else:
        show_findings(display, source, findings)
    if any(finding["severity"] == "error" for finding in findings):
        raise typer.Exit(2)


@app.command(epilog=example("mooring theory exam.csv --client school --target score"))
@add_options(*DATA, "task", "weights", "seed", "threads")
def theory(
    source: Source, set_: SetTask = None, json_: Json = False, trust_code: TrustCode = False, **given: object
) -> None:
    """Apply the theorems to a federation.

    It prints constants, heterogeneity, thresholds, and lambda by every rule. `mooring theorem` evaluates a theorem at
    quantities of your own.
    """
    from mooring.engines.prepare import prepare
    from mooring.engines.request import request
    from mooring.engines.theory_report import report_theory, theory_as_json
    from mooring.report.terminal import Display
    from mooring.report.terminal_results import show_notes, show_theory

    display = Display(json_)
    job = prepare(request(source, purpose="advise", trust_code=trust_code, **parse_task_settings(set_, given)))
    report = report_theory(job.task, job.clients, job.run.training.weights)
    if json_:
        print_json(theory_as_json(report))
    else:
        show_theory(display, theory_as_json(report))
    show_notes(display, job.clients.notes)


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
    from mooring.runs.directory import check_writable

    try:
        from mooring.app.web_server import serve as show
    except ModuleNotFoundError as missing:
        if missing.name not in ("starlette", "uvicorn"):
            raise
        raise RequestError(f"`mooring app` needs {missing.name}: pip install 'mooring-fl[app]'.") from None
    check_writable(folder / "runs")

    def ready(address: str) -> None:
        Display().print_line(f"Mooring's page: {address}")
        if open_:
            typer.launch(address)

    show(folder, port, ready)
