"""What the commands' options are called and how they are read, once for all commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from mooring.core.errors import RequestError

Source = Annotated[
    str, typer.Argument(help="A table (CSV, Parquet, npz), a folder of client tables, or a data set's name.")
]
Client = Annotated[str | None, typer.Option("--client", help="The column that says whose row it is.")]
Target = Annotated[str | None, typer.Option("--target", help="The column to predict.")]
Kind = Annotated[str, typer.Option("--kind", help="What the target is: auto, regression, binary, classes, count.")]
TaskName = Annotated[str, typer.Option("--task", help="auto, linear, logistic, ...: see `mooring list tasks`.")]
Model = Annotated[str | None, typer.Option("--model", help="A network of your own: my_model.py:make.")]
Features = Annotated[str | None, typer.Option("--features", help="Columns to learn from, separated by commas.")]
Drop = Annotated[str | None, typer.Option("--drop", help="Columns to leave out, separated by commas.")]
Unit = Annotated[str | None, typer.Option("--unit", help="Column whose equal values stay in one part.")]
Time = Annotated[str | None, typer.Option("--time", help="Column to split by time: the latest rows test.")]
Split = Annotated[str | None, typer.Option("--split", help="Column that says train, validation or test.")]
MinRows = Annotated[int | None, typer.Option("--min-rows", help="Fewest rows a client may have.")]
DropSmall = Annotated[bool, typer.Option("--drop-small", help="Leave clients with fewer rows out.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="A field of the algorithm: lam=0.1. Repeat for more.")]
Deal = Annotated[list[str] | None, typer.Option("--deal", help="How a pooled data set is dealt out: clients=100.")]
Rounds = Annotated[int | None, typer.Option("--rounds", help="Communication rounds (default 100).")]
Participation = Annotated[
    float | None, typer.Option("--participation", help="Share of clients a round, or their number.")
]
Weights = Annotated[str | None, typer.Option("--weights", help="Client weights p: size or uniform.")]
Seed = Annotated[int | None, typer.Option("--seed", help="The same seed gives the same bytes.")]
Patience = Annotated[int | None, typer.Option("--patience", help="Evaluations without improvement before stopping.")]
Threads = Annotated[int | None, typer.Option("--threads", help="Threads; kept in the run file.")]
Out = Annotated[Path | None, typer.Option("--out", help="The run directory (default: runs/NAME-1, -2, ...).")]
DataDir = Annotated[str | None, typer.Option("--data-dir", help="Folder of large data sets (or MOORING_DATA).")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else there.")]


def data_options(given: dict[str, Any]) -> dict[str, Any]:
    """The options of the run file's section [data], as the commands take them."""
    columns = {k: [c.strip() for c in given[k].split(",")] if given.get(k) else None for k in ("features", "drop")}
    plain = {k: given.get(k) for k in ("client", "target", "kind", "unit", "time", "split", "min_rows", "data_dir")}
    dealt = assignments(given.get("deal"))
    return plain | columns | {"drop_small": given.get("drop_small") or None, "partition": dealt or None}


def training_options(given: dict[str, Any]) -> dict[str, Any]:
    out = {k: given.get(k) for k in ("rounds", "weights", "seed", "patience", "threads")}
    part = given.get("participation")
    return out | {"participation": int(part) if part is not None and part > 1 else part}


def assignments(texts: list[str] | None) -> dict[str, Any]:
    """`lam=0.1` as {"lam": 0.1}: numbers, true/false, lists and tables as JSON writes them, anything else as text."""
    out = {}
    for text in texts or []:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise RequestError(f"--set takes NAME=VALUE, got {text!r}.")
        try:
            out[name.strip()] = json.loads(value)
        except json.JSONDecodeError:
            out[name.strip()] = value.strip()
    return out


def assignments_by_method(texts: list[str] | None) -> dict[str, dict[str, Any]]:
    """`fedavg.steps=5` as {"fedavg": {"steps": 5}}."""
    out: dict[str, dict[str, Any]] = {}
    for name, value in assignments(texts).items():
        method, dot, field = name.partition(".")
        if not dot:
            raise RequestError(f"--set takes METHOD.FIELD=VALUE here, got {name!r}.")
        out.setdefault(method, {})[field] = value
    return out
