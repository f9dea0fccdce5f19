"""Reproduce a selection: run, judge every claim, draw, and keep a record of each experiment.

In the output folder an experiment under a preset leaves `kernel-fig1-quick.json` (its record), `.png`, `.svg` and,
where it has tables, `.md`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mooring.data.pools import ENVIRONMENT
from mooring.experiments.base import cache, catalog
from mooring.experiments.base.draw import draw
from mooring.experiments.base.runner import Finished, Tell, run
from mooring.experiments.base.tables import table
from mooring.runs.files import make_folder, unwritten, write_json, write_whole


def reproduce(
    what: str | Sequence[str],
    preset: str = "quick",
    out: str | Path = "reproduction",
    *,
    data_dir: str | None = None,
    workers: int | None = None,
    tell: Tell = lambda what, done, all: None,
) -> list[dict[str, Any]]:
    """Records of the experiments that `what` selects (an id, a paper, `all`, or several), in order."""
    names = [what] if isinstance(what, str) else what
    entries = {entry.id: entry for name in names for entry in catalog.select(name)}
    for entry in entries.values():
        catalog.preset(entry, preset)
    if data_dir is not None:
        os.environ[ENVIRONMENT] = str(Path(data_dir).resolve())  # for the processes that run the trials
    out = Path(out)
    try:
        make_folder(out.absolute())
    except OSError as error:
        raise unwritten(out, error) from error
    finished = run(list(entries.values()), preset, cache.default_folder(), workers=workers, tell=tell)
    return [_record(entry, preset, finished[entry.id], out) for entry in entries.values()]


def claims(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The claims of all records, one row each."""
    keys = ("claim", "held", "numbers", "says")
    return [
        {"experiment": record["experiment"], **{key: claim[key] for key in keys}}
        for record in records
        for claim in record["claims"]
    ]


def title(entry: catalog.Entry, preset: str) -> str:
    """The experiment's title, with its data where they are not the paper's."""
    data = entry.experiment.presets[preset].data
    return f"{entry.id}: {entry.experiment.title}" + (f" (data: {data})" if data else "")


def _record(entry: catalog.Entry, preset: str, finished: Finished, out: Path) -> dict[str, Any]:
    experiment, results = entry.experiment, finished.results
    name = f"{entry.id}-{preset}"
    verdicts = [(claim, claim.check(results)) for claim in experiment.claims]
    files = {}
    if experiment.panels:
        files |= {f"{name}.{end}": data for end, data in draw(title(entry, preset), experiment.panels, results).items()}
    tables = [table(one, results) for one in experiment.tables]
    if tables:
        files[f"{name}.md"] = "\n\n".join([f"# {title(entry, preset)}", *tables]).encode()
    for file, data in files.items():
        write_whole(out / file, data)
    record = {
        "experiment": entry.id,
        "paper": entry.paper,
        "title": experiment.title,
        "preset": preset,
        "data": experiment.presets[preset].data,
        "repeats": experiment.presets[preset].repeats,
        "seconds": finished.seconds,
        "reads": experiment.reads,
        "files": sorted(files),
        "tables": tables,
        "claims": [
            {"claim": c.id, "says": c.says, "held": v.held, "numbers": v.numbers, "note": c.note} for c, v in verdicts
        ],
    }
    write_json(out / f"{name}.json", record)
    return record
