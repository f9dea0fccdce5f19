"""The page on what came out: all claims of the records in a folder, held or failed, with their numbers.

python -m mooring.experiments.base.page RECORDS PAGE
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from mooring.core.errors import RequestError
from mooring.experiments.base import catalog
from mooring.experiments.base.experiment import PRESETS
from mooring.experiments.base.tables import markdown, number
from mooring.runs.files import read_json, write_whole

HEAD = """# Reproduction of the five papers

Every claim of the papers' figures and tables, tested as a function of our results that can fail. `mooring reproduce
ID` runs one of them again; this page is written by `mooring reproduce ... --page`. A claim holds only if it holds
beyond the 95 % interval over repeats. "Time" is work on one core.
"""


def write_page(records: str | Path, page: str | Path) -> None:
    """Write the page from all records in a folder."""
    folder, page = Path(records), Path(page)
    paths = [path for one in catalog.ids() for end in PRESETS[1:] if (path := folder / f"{one}-{end}.json").exists()]
    if not paths:
        raise RequestError(f"{folder} holds no record of an experiment; run `mooring reproduce all --out {folder}`.")
    found = [read_json(path) for path in paths]
    parts = [HEAD, _summary(found)]
    for paper, mine in groupby(found, key=lambda record: record["paper"]):
        parts.append(f"## Paper {paper}\n")
        parts += [_experiment(record, Path(os.path.relpath(folder, page.parent))) for record in mine]
    write_whole(page, "\n".join(parts).encode())


def _summary(records: Sequence[dict[str, Any]]) -> str:
    rows = []
    for record in records:
        held = sum(claim["held"] for claim in record["claims"])
        name = record["experiment"]
        shown = f"{held} of {len(record['claims'])}"
        rows.append([f"[{name}](#{_anchor(record)})", record["preset"], shown, _time(record["seconds"])])
    return markdown(["experiment", "preset", "claims held", "time"], rows)


def _experiment(record: dict[str, Any], folder: Path) -> str:
    data = f" Data: {record['data']}." if record["data"] else ""
    lines = [
        f"### {record['experiment']}, {record['preset']}\n",
        f"{record['title']}.{data} {record['repeats']} repeats, time {_time(record['seconds'])}.\n",
    ]
    if record["reads"]:
        lines.append(f"{record['reads']}\n")
    lines += [f"![{record['experiment']}]({(folder / f).as_posix()})\n" for f in record["files"] if f.endswith(".png")]
    lines += record["tables"]
    rows = [
        [claim["claim"], claim["says"], "held" if claim["held"] else "**failed**", number(claim["numbers"])]
        for claim in record["claims"]
    ]
    lines.append(markdown(["claim", "says", "", "numbers"], rows))
    failed = [claim for claim in record["claims"] if not claim["held"]]
    lines += [f"*{claim['claim']}* failed. {claim['note'] or 'The reason is not known.'}\n" for claim in failed]
    return "\n".join(lines)


def _anchor(record: dict[str, Any]) -> str:
    return f"{record['experiment']}-{record['preset']}"


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


if __name__ == "__main__":
    write_page(sys.argv[1], sys.argv[2])
