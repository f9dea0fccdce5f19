"""What is done with a finished run's models: predict, export, personalize."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from mooring.commands.common import Of, Run, app, emit
from mooring.core.errors import RequestError
from mooring.options import Json, Source, Trust, takes


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
