"""`report.html`: one or several runs in one self-contained file, made from their directories.

Text from data (names of clients, columns, files) is never markup: Jinja escapes text, the numbers are in
a JSON block in which no tag can end, and the script writes text nodes only. A policy in the page allows no script but
ours (by its digest) and no requests.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

import jinja2
import numpy as np
import pandas as pd
from markupsafe import Markup, escape

from mooring.core.errors import RequestError
from mooring.core.score_sentences import direction
from mooring.core.types import JsonObject
from mooring.report.figure_style import MODEL_COLORS
from mooring.report.glossary import explain_label
from mooring.report.report_contents import COLUMN_LABELS, EXPECTED_LOSS_LABELS, ReportContents, collect_contents
from mooring.report.terminal import format_cell
from mooring.runs.atomic_files import to_plain, write_atomically
from mooring.runs.directory import REPORT_FILE, explain_contents

DEFAULT_COMPARISON_FILE = "mooring-report.html"
REPORT_MARKER = "<!-- A report of Mooring: `mooring report` writes it again. -->"
MAX_DIGITS = 6  # of the numbers in a page
FIGURE_ONLY_COLUMNS = ("certainty", "kind", "personal", "pooled")  # for the figures, not for the table
DARK_MODEL_COLORS = {
    "personal": "#35c79b",
    "global": "#5cb3ec",
    "pooled": "#5cb3ec",
    "local": "#f58a4b",
    "unknown": "#a3a3a3",
}
CARD_LABELS = (  # of a client's card, which the script writes
    "recommended",
    "lowest test loss",
    "confidence",
    "P(better than local)",
    "P(better than global)",
    "rows",
    "lambda",
    "alpha",
)
MIN_CONTRIBUTION_PCT = 0.1  # of the loss: smaller contributions are not listed
MAX_CONTRIBUTIONS = 10  # clients that the report lists by what they contribute


def write_report(runs: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write the report of one run into its directory, or of several in one file; return its path."""
    if not runs:
        raise RequestError("mooring report: give at least one run's directory.")
    path = (
        Path(out)
        if out is not None
        else Path(runs[0]) / REPORT_FILE
        if len(runs) == 1
        else Path(DEFAULT_COMPARISON_FILE)
    )
    if path.is_dir():
        raise RequestError(f"{path} is a folder; --out takes the name of a file, such as {path / REPORT_FILE}.")
    if path.exists() and REPORT_MARKER.encode() not in path.read_bytes()[:200]:
        raise RequestError(f"{path} exists and is not a report of Mooring; choose another --out.")
    parts = []
    for run in runs:
        with explain_contents(run):
            parts.append(collect_contents(run))
    with explain_contents(path):
        page = render_report(parts)
    write_atomically(path, page.encode())
    return path


def render_report(parts: Sequence[ReportContents]) -> str:
    """Return the report as text; equal runs give equal bytes."""
    script, style = read_template("page.js"), read_template("page.css")
    return (
        get_environment()
        .get_template("page.html")
        .render(
            mark=REPORT_MARKER,
            runs=parts,
            several=len(parts) > 1,
            data=encode_for_script([collect_figure_data(part) for part in parts]),
            script=script,
            style=style,
            colors={"light": MODEL_COLORS, "dark": DARK_MODEL_COLORS},
            contributions=list_contributions,
            script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        )
    )


@cache
def get_environment(package: str = "mooring.report") -> jinja2.Environment:
    """Return the templates of a package's pages; values in them are text, never markup."""
    loader = jinja2.FunctionLoader(lambda name: read_template(name, package))
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters["shown"] = format_cell
    environment.filters["code"] = mark_code
    environment.filters["change"] = lambda pct: direction(-pct)
    return environment


def mark_code(text: str) -> Markup:
    """A sentence with its words in backticks as code, all of it escaped."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


@cache
def read_template(name: str, package: str = "mooring.report") -> str:
    return files(package).joinpath("templates", name).read_text(encoding="utf-8")


def encode_for_script(value: object) -> str:
    """Return JSON for a script block: no `<`, so that nothing in it can end the block."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def collect_figure_data(part: ReportContents) -> JsonObject:
    """Return the data that the script draws: tables by column, with rounded numbers."""
    names = [name for name in part.clients if name in COLUMN_LABELS or name in [row["name"] for row in part.models]]
    order = [name for name in COLUMN_LABELS if name in names] + [name for name in names if name not in COLUMN_LABELS]
    order = [name for name in order if part.clients[name].notna().any()]
    if part.purpose == "compare":  # which has them under the methods' own names
        order = [name for name in order if name not in FIGURE_ONLY_COLUMNS]
    labels = COLUMN_LABELS | (EXPECTED_LOSS_LABELS if part.recommends else {})
    headings = {name: str(labels.get(name, name)) for name in order}
    hidden = [name for name in FIGURE_ONLY_COLUMNS if name in part.clients and name not in order]
    data = {
        "purpose": part.purpose,
        "name": part.name,
        "title": part.title,
        "metric": part.metric,
        "recommends": part.recommends,
        "personal": part.personal,
        "margin": None if part.margin is None else 100 * part.margin,
        "level": None if part.client_level is None else 100 * part.client_level,
        "columns": [{"key": name, "label": label, "about": explain_label(label)} for name, label in headings.items()],
        "terms": {label: explain_label(label) for label in CARD_LABELS},
        "clients": list_columns(below_hundred(part.clients[[*order, *hidden]])),
        "path": part.path,
        "curve": part.curve,
        "effects": part.effects,
        "rounds": [history | {"table": accumulate_costs(history["table"])} for history in part.rounds],
        "spread": summarize_heterogeneity(part.theory),
        "coefficients": part.coefficients,
    }
    return to_plain(data, _digits)


def below_hundred(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a table whose percentages below 100 do not round to 100, as in the terminal."""
    percents = [name for name in frame if "_pct" in str(name)]
    return frame.assign(
        **{name: frame[name].mask((frame[name] > 99.99) & (frame[name] < 100), 99.99) for name in percents}
    )


def list_columns(frame: pd.DataFrame) -> dict[str, list[object]]:
    return {name: frame[name].astype(object).where(frame[name].notna(), None).tolist() for name in frame}


def accumulate_costs(rounds: pd.DataFrame) -> dict[str, list[object]]:
    """Return losses by round, and cumulative costs."""
    sums = {
        "bytes": (rounds["bytes_up"] + rounds["bytes_down"]).cumsum(),
        "gradients": rounds["gradients"].cumsum(),
        "seconds": rounds["seconds"].cumsum(),
    }
    losses = {part: rounds[f"{part}_loss"] for part in ("test", "validation", "train") if f"{part}_loss" in rounds}
    spent = {"epsilon": rounds["epsilon"]} if "epsilon" in rounds else {}
    table = pd.DataFrame({"round": rounds["round"], **losses, **sums, **spent}).dropna(axis=1, how="all")
    return list_columns(table)


def list_contributions(part: ReportContents) -> list[JsonObject]:
    """Return the clients that contribute most: the other clients' loss now and without them, and the change in
    percent."""
    if "contribution_pct" not in part.clients or not part.recommends:
        return []
    frame = part.clients[["client", "others_held_out", "contribution", "contribution_pct"]].dropna()
    frame = frame.sort_values("contribution_pct", ascending=False)
    frame = frame[frame["contribution_pct"].abs() >= MIN_CONTRIBUTION_PCT]
    frame = frame.assign(without=frame["others_held_out"] + frame["contribution"])
    return frame.head(MAX_CONTRIBUTIONS).to_dict("records")


def summarize_heterogeneity(theory: JsonObject | None) -> JsonObject | None:
    """Return the heterogeneity of the clients, and the thresholds of the theorems."""
    if theory is None:
        return None
    radius = theory["heterogeneity"]
    borders = [
        {"name": name.replace("_", " "), "R": part["R"], "side": part.get("side", ""), "source": part["source"]}
        for name, part in theory["thresholds"].items()
        if "R" in part
    ]
    bounds = {name: radius[name] if isinstance(radius[name], float) else None for name in ("R", "low", "high")}
    return {**bounds, "borders": [row for row in borders if isinstance(row["R"], float)]}


def _digits(value: float) -> float | int | None:
    """Return a number with MAX_DIGITS digits; None if it is not finite."""
    if not np.isfinite(value):
        return None
    value = float(f"{value:.{MAX_DIGITS}g}")
    return int(value) if value.is_integer() and abs(value) < 1e15 else value
