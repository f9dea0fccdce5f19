"""What came out of the experiments, from their records: figures, tables, and the page of all claims.

python -m mooring.report.reproduction RECORDS PAGE
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from mooring.core.errors import RequestError
from mooring.core.papers import BY_KEY, PAPERS
from mooring.report.markdown import brief, markdown, number, table
from mooring.report.terminal import Display
from mooring.runs.files import read_json, write_whole

HEAD = """# Reproduction of the five papers

Every claim of the papers' figures and tables, tested as a function of our results that can fail. `mooring reproduce
ID` runs one of them again; this page is written by `mooring reproduce ... --page`. A claim holds only if it holds
beyond the 95 % interval over repeats. "Time" is work on one core. The papers stand in [papers.md](papers.md).
"""
PRESETS = ("quick", "paper")  # on the page, in this order; smoke runs are no results


def title(record: Mapping[str, Any]) -> str:
    """The experiment's title, with its data where they are not the paper's."""
    return f"{record['experiment']}: {record['title']}" + (f" (data: {record['data']})" if record["data"] else "")


def draw_record(record: Mapping[str, Any], folder: str | Path) -> None:
    """The figure and the tables of a record, beside it."""
    from mooring.report.panels import draw

    name = Path(folder) / f"{record['experiment']}-{record['preset']}"
    if record["panels"]:
        for ending, data in draw(title(record), record["panels"]).items():
            write_whole(f"{name}.{ending}", data)
    if record["tables"]:
        parts = [f"# {title(record)}", *(table(one) for one in record["tables"])]
        write_whole(f"{name}.md", "\n\n".join(parts).encode())


def show_claims(display: Display, claims: Sequence[Mapping[str, Any]], preset: str, folder: str | Path) -> None:
    """Every claim of a selection in the terminal."""
    rows = [
        {**row, "held": "held" if row["held"] else "FAILED", "numbers": brief(dict(row["numbers"]))} for row in claims
    ]
    columns = {"experiment": "experiment", "says": "claim", "held": "", "numbers": "numbers"}
    held = sum(bool(row["held"]) for row in claims)
    heading = f"{held} of {len(claims)} claims held, preset {preset}"
    display.table(heading, rows, columns, f"Figures and tables: {folder}", spare=("numbers",))


def write_page(records: str | Path, page: str | Path) -> None:
    """Write the page from all records in a folder."""
    folder, page = Path(records), Path(page)
    found = [record for path in folder.glob("*.json") if (record := read_json(path)).get("preset") in PRESETS]
    if not found:
        raise RequestError(f"{folder} holds no record of an experiment; run `mooring reproduce all --out {folder}`.")
    found.sort(key=_order)
    pictures = Path(os.path.relpath(folder, page.parent))
    parts = [HEAD, _summary(found)]
    for paper, mine in groupby(found, key=lambda record: record["paper"]):
        parts.append(f"## {paper}: {BY_KEY[paper].title}\n" if paper in BY_KEY else f"## {paper}\n")
        for record in mine:
            picture = f"{_anchor(record)}.png"
            parts.append(_experiment(record, pictures / picture if (folder / picture).exists() else None))
    write_whole(page, "\n".join(parts).encode())


def _order(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Papers as in the bibliography; figures and tables by their numbers; the quick preset first."""
    keys = [paper.key for paper in PAPERS]
    place = keys.index(record["paper"]) if record["paper"] in keys else len(keys)
    name = [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", record["experiment"])]
    return place, name, PRESETS.index(record["preset"])


def _summary(records: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for record in records:
        held = sum(claim["held"] for claim in record["claims"])
        name = record["experiment"]
        shown = f"{held} of {len(record['claims'])}"
        rows.append([f"[{name}](#{_anchor(record)})", record["preset"], shown, _time(record["seconds"])])
    return markdown(["experiment", "preset", "claims held", "time"], rows)


def _experiment(record: Mapping[str, Any], picture: Path | None) -> str:
    data = f" Data: {record['data']}." if record["data"] else ""
    lines = [
        f"### {record['experiment']}, {record['preset']}\n",
        f"{record['title']}.{data} {record['repeats']} repeats, time {_time(record['seconds'])}.\n",
    ]
    if record["reads"]:
        lines.append(f"{record['reads']}\n")
    if picture is not None:
        lines.append(f"![{record['experiment']}]({picture.as_posix()})\n")
    lines += [table(one) for one in record["tables"]]
    rows = [
        [claim["claim"], claim["says"], "held" if claim["held"] else "**failed**", number(claim["numbers"])]
        for claim in record["claims"]
    ]
    lines.append(markdown(["claim", "says", "", "numbers"], rows))
    failed = [claim for claim in record["claims"] if not claim["held"]]
    lines += [f"*{claim['claim']}* failed. {claim['note'] or 'The reason is not known.'}\n" for claim in failed]
    return "\n".join(lines)


def _anchor(record: Mapping[str, Any]) -> str:
    return f"{record['experiment']}-{record['preset']}"


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


if __name__ == "__main__":
    write_page(sys.argv[1], sys.argv[2])
