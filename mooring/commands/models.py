"""Commands on the models of a finished run: predict, export, personalize."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mooring.commands.common import MethodChoice, RunArgument, app, lasting_imports, print_json, write_data
from mooring.core.errors import RequestError
from mooring.options import Json, Source, TrustCode, add_options


@app.command(epilog="Example: mooring predict runs/exam-1 new.csv --out predictions.csv")
def predict(
    run: RunArgument,
    source: Source,
    client: Annotated[
        str | None, typer.Option("--client", help="Use this client's model. [each row's own client]")
    ] = None,
    method: MethodChoice = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write a CSV or Excel file (.xlsx) instead of printing.")
    ] = None,
    interval: Annotated[
        str | None, typer.Option("--interval", metavar="LEVEL", help="Prediction intervals: 90%. [none]")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite --out.")] = False,
    json_: Json = False,
    trust_code: TrustCode = False,
) -> None:
    """Predict new rows with the models of a finished run.

    RUN is the run's directory, SOURCE a table with the same columns (the target may be missing). After `advise` each
    client's rows are predicted with its recommended model. Each row keeps its own columns; `model` names the model that
    predicted it.
    """
    with lasting_imports():
        from mooring.engines.predict import predict as answer
    from mooring.report.terminal import Display
    from mooring.runs.atomic_files import csv_bytes, excel_bytes, write_atomically
    from mooring.runs.directory import check_writable

    display = Display(json_)
    if out is not None:
        check_writable(out)
    if out is not None and out.exists() and not force:
        raise RequestError(f"{out} already exists; choose another --out, or use --force.")
    frame, notes = answer(run, source, client, method, trust_code, parse_level(interval))
    display.notes(notes)
    if json_:
        print_json({"predictions": frame.to_dict("records"), "run": str(run)})
    elif out is not None:
        write_atomically(out, excel_bytes(frame) if out.suffix.lower() == ".xlsx" else csv_bytes(frame))
        display.print_line(f"{len(frame)} predictions in {out}")
    else:
        write_data(csv_bytes(frame).decode())


def parse_level(text: str | None) -> float | None:
    """0.9 of "90%" or "0.9"."""
    if text is None:
        return None
    try:
        return float(text.strip().removesuffix("%")) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        raise RequestError(f"--interval takes a level such as 90% or 0.9, got {text!r}.") from None


@app.command(epilog="Example: mooring export runs/exam-1 --out coefficients.csv")
def export(
    run: RunArgument,
    to: Annotated[
        str,
        typer.Option(
            "--to", help="csv, json or sklearn (coefficients), torch or onnx (network). [csv]", show_default=False
        ),
    ] = "csv",
    client: Annotated[
        str | None, typer.Option("--client", help="Export this client's model only. [all clients]")
    ] = None,
    method: MethodChoice = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write this file instead of printing.")] = None,
) -> None:
    """Export the models of a finished run to other tools.

    RUN is the run's directory; coefficients are in the units of the data. csv: one row per client and term with its
    coefficient, the global one and the deviation. json: the same as one object. sklearn: JSON that
    `mooring.load_sklearn` reads. torch: a network's weights (safetensors), of the global model or of --client; onnx:
    the network itself.
    """
    from mooring.engines.export import export as write
    from mooring.report.terminal import Display

    content, notes = write(run, to, client, method)
    display = Display(json=True)
    display.notes(notes)
    if out is None:
        if to in ("torch", "onnx"):
            raise RequestError(f"--to {to} writes a file; name it with --out.")
        write_data(content.decode())
    else:
        from mooring.runs.atomic_files import write_atomically

        if out.exists():
            raise RequestError(f"{out} already exists; choose another --out.")
        write_atomically(out, content)
        display.print_line(f"Written: {out}")


@app.command(epilog="Example: mooring personalize runs/exam-1 new_client.csv --out runs/exam-joined")
@add_options("min_rows", "drop_small", "seed")
def personalize(
    run: RunArgument,
    source: Source,
    how: Annotated[
        str,
        typer.Option(
            "--how",
            help="How the personal model is made: mixture, prox, finetune, local or tune. [auto]",
            show_default=False,
        ),
    ] = "auto",
    method: MethodChoice = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="A new run directory: the run and the new clients. [none]")
    ] = None,
    json_: Json = False,
    trust_code: TrustCode = False,
    **given: Any,
) -> None:
    """Recommend a model for new clients of a finished run.

    RUN is the run's directory, SOURCE the new client's table; with the run's client column, several new clients'.
    """
    from mooring.advice.new_clients.personalize import personalize as answer
    from mooring.engines.request import check_trusted_run
    from mooring.report.terminal import Display
    from mooring.report.terminal_results import show_new_clients, show_notes
    from mooring.runs.directory import check_writable, explain_contents, open_run

    display = Display(json_)
    if out is not None:
        check_writable(out)
    if trust_code:
        check_trusted_run(open_run(run).run, run, trust_code)
    with explain_contents(run):
        result = answer(run, source, how=how, method=method, out=out, **given)
    if json_:
        record = {"metric": result.metric, "way": result.way, "clients": result.clients.to_dict("records")}
        print_json(record | {"run": str(out or run)})
    else:
        show_new_clients(display, result.clients, result.metric, result.way)
        if out is not None:
            display.print_line(f"Run: {out}    Predict: mooring predict {out} new.csv")
    show_notes(display, result.notes)
