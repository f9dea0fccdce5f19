"""`report.html`: one or several runs as one page that needs nothing beside it, from their directories alone.

Text from data (names of clients, columns, files) is never markup: Jinja escapes what the page says, the numbers lie in
a JSON block in which no tag can end, and the script writes text nodes only. A policy in the page lets no script run but
ours (by its digest) and no request leave.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pandas as pd

from mooring.core.errors import RequestError
from mooring.report.contents import LABELS, Contents, contents
from mooring.report.style import VERDICTS
from mooring.report.terminal import shown
from mooring.runs.files import plain, write_whole

PAGE = "report.html"
SIDE_BY_SIDE = "mooring-report.html"
MARK = "<!-- A report of Mooring: `mooring report` writes it again. -->"
DIGITS = 6  # of the numbers in a page
HIDDEN = ("certainty",)  # for the pictures, not for the table
DARK = {"personal": "#35c79b", "common": "#5cb3ec", "alone": "#f58a4b", "undecided": "#a3a3a3"}


def write_report(runs: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """The page of one run, in its directory, or of several side by side; where it is."""
    if not runs:
        raise RequestError("mooring report: give at least one run's directory.")
    path = Path(out) if out is not None else Path(runs[0]) / PAGE if len(runs) == 1 else Path(SIDE_BY_SIDE)
    if path.is_dir():
        raise RequestError(f"{path} is a folder; --out takes the name of a page, such as {path / PAGE}.")
    if path.exists() and MARK.encode() not in path.read_bytes()[:200]:
        raise RequestError(f"{path} exists and is no report of Mooring's; choose another --out.")
    page = render([contents(run) for run in runs])
    write_whole(path, page.encode())
    return path


def render(parts: Sequence[Contents]) -> str:
    """The page as text; the same runs give the same bytes."""
    script, style = template("page.js"), template("page.css")
    return (
        environment()
        .get_template("page.html")
        .render(
            mark=MARK,
            runs=parts,
            several=len(parts) > 1,
            data=embedded([numbers(part) for part in parts]),
            script=script,
            style=style,
            colours={"light": VERDICTS, "dark": DARK},
            digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        )
    )


@cache
def environment(package: str = "mooring.report") -> jinja2.Environment:
    """Where a package's pages come from: what they are given is text, never markup."""
    loader = jinja2.FunctionLoader(lambda name: template(name, package))
    found = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    found.filters["shown"] = shown
    return found


@cache
def template(name: str, package: str = "mooring.report") -> str:
    return files(package).joinpath("templates", name).read_text(encoding="utf-8")


def embedded(value: Any) -> str:
    """JSON for a script block: no `<`, so that nothing in it can end the block."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def numbers(part: Contents) -> dict[str, Any]:
    """What the script draws: tables by column, numbers in short."""
    told = [name for name in part.clients if name in LABELS or name in [row["name"] for row in part.models]]
    order = [name for name in LABELS if name in told] + [name for name in told if name not in LABELS]
    order = [name for name in order if part.clients[name].notna().any()]
    made = {
        "purpose": part.purpose,
        "name": part.name,
        "title": part.title,
        "metric": part.metric,
        "recommends": part.recommends,
        "practical": 100 * part.practical,
        "columns": [{"key": name, "label": LABELS.get(name, name)} for name in order],
        "clients": columns(part.clients[[*order, *(name for name in HIDDEN if name in part.clients)]]),
        "path": part.path,
        "curve": part.curve,
        "rounds": [one | {"table": costs(one["table"])} for one in part.rounds],
        "spread": spread(part.theory),
        "coefficients": part.coefficients,
    }
    return plain(made, _digits)


def columns(frame: pd.DataFrame) -> dict[str, list[Any]]:
    return {name: frame[name].astype(object).where(frame[name].notna(), None).tolist() for name in frame}


def costs(rounds: pd.DataFrame) -> dict[str, list[Any]]:
    """Losses by round, and what had been spent by then."""
    sums = {
        "bytes": (rounds["bytes_up"] + rounds["bytes_down"]).cumsum(),
        "gradients": rounds["gradients"].cumsum(),
        "seconds": rounds["seconds"].cumsum(),
    }
    losses = {part: rounds[f"{part}_loss"] for part in ("test", "validation", "train")}
    spent = {"epsilon": rounds["epsilon"]} if "epsilon" in rounds else {}
    table = pd.DataFrame({"round": rounds["t"], **losses, **sums, **spent}).dropna(axis=1, how="all")
    return columns(table)


def spread(theory: dict[str, Any] | None) -> dict[str, Any] | None:
    """How much clients differ, and the borders beyond which theorems change sides."""
    if theory is None:
        return None
    found = theory["heterogeneity"]
    borders = [
        {"name": name.replace("_", " "), "R": part["R"], "side": part.get("side", ""), "source": part["source"]}
        for name, part in theory["thresholds"].items()
        if "R" in part
    ]
    ends = {name: found[name] if isinstance(found[name], float) else None for name in ("R", "low", "high")}
    return {**ends, "borders": [row for row in borders if isinstance(row["R"], float)]}


def _digits(value: float) -> float | int | None:
    """A number with DIGITS digits; None where it is not finite."""
    if not np.isfinite(value):
        return None
    value = float(f"{value:.{DIGITS}g}")
    return int(value) if value.is_integer() and abs(value) < 1e15 else value
