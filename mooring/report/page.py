"""`report.html`: one or several runs in one file that needs nothing beside it, from their directories alone.

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
from mooring.core.sentences import direction
from mooring.report.contents import EXPECTED, LABELS, Contents, contents
from mooring.report.style import MODEL_COLOURS
from mooring.report.terminal import shown
from mooring.runs.directory import REPORT
from mooring.runs.files import plain, write_whole

SIDE_BY_SIDE = "mooring-report.html"
MARK = "<!-- A report of Mooring: `mooring report` writes it again. -->"
DIGITS = 6  # of the numbers in a page
HIDDEN = ("certainty", "kind", "personal", "pooled")  # for the figures, not for the table
DARK = {"personal": "#35c79b", "global": "#5cb3ec", "pooled": "#5cb3ec", "local": "#f58a4b", "undecided": "#a3a3a3"}
MIN_CONTRIBUTION_PCT = 0.1  # of the loss: smaller contributions are not listed
MAX_CONTRIBUTIONS = 10  # clients that the report lists by what they contribute


def write_report(runs: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """The page of one run, in its directory, or of several side by side; where it is."""
    if not runs:
        raise RequestError("mooring report: give at least one run's directory.")
    path = Path(out) if out is not None else Path(runs[0]) / REPORT if len(runs) == 1 else Path(SIDE_BY_SIDE)
    if path.is_dir():
        raise RequestError(f"{path} is a folder; --out takes the name of a file, such as {path / REPORT}.")
    if path.exists() and MARK.encode() not in path.read_bytes()[:200]:
        raise RequestError(f"{path} exists and is not a report of Mooring; choose another --out.")
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
            colours={"light": MODEL_COLOURS, "dark": DARK},
            contributions=contributions,
            script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        )
    )


@cache
def environment(package: str = "mooring.report") -> jinja2.Environment:
    """Where a package's pages come from: what they are given is text, never markup."""
    loader = jinja2.FunctionLoader(lambda name: template(name, package))
    found = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    found.filters["shown"] = shown
    found.filters["change"] = lambda pct: direction(-pct)
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
    known = [name for name in part.clients if name in LABELS or name in [row["name"] for row in part.models]]
    order = [name for name in LABELS if name in known] + [name for name in known if name not in LABELS]
    order = [name for name in order if part.clients[name].notna().any()]
    if part.purpose == "compare":  # which has them under the methods' own names
        order = [name for name in order if name not in HIDDEN]
    labels = LABELS | (EXPECTED if part.recommends else {})
    hidden = [name for name in HIDDEN if name in part.clients and name not in order]
    made = {
        "purpose": part.purpose,
        "name": part.name,
        "title": part.title,
        "metric": part.metric,
        "recommends": part.recommends,
        "personal": part.personal,
        "margin": None if part.margin is None else 100 * part.margin,
        "level": None if part.client_level is None else 100 * part.client_level,
        "columns": [{"key": name, "label": labels.get(name, name)} for name in order],
        "clients": columns(part.clients[[*order, *hidden]]),
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
    losses = {part: rounds[f"{part}_loss"] for part in ("test", "validation", "train") if f"{part}_loss" in rounds}
    spent = {"epsilon": rounds["epsilon"]} if "epsilon" in rounds else {}
    table = pd.DataFrame({"round": rounds["round"], **losses, **sums, **spent}).dropna(axis=1, how="all")
    return columns(table)


def contributions(part: Contents) -> list[dict[str, Any]]:
    """The clients that contribute most: the other clients' loss now and without them, and the change in percent."""
    if "contribution" not in part.clients or not part.recommends:
        return []
    now = next(row["loss"] for row in part.models if row["name"] == "personal")
    frame = part.clients[["client", "contribution"]].dropna().sort_values("contribution", ascending=False)
    if frame.empty or not now > 0 or 100 * frame["contribution"].abs().max() / now < MIN_CONTRIBUTION_PCT:
        return []
    return [
        {"client": row.client, "now": now, "without": now + row.contribution, "pct": 100 * row.contribution / now}
        for row in frame.head(MAX_CONTRIBUTIONS).itertuples()
    ]


def spread(theory: dict[str, Any] | None) -> dict[str, Any] | None:
    """How much clients differ, and the thresholds of the theorems."""
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
