"""Reproduce a selection: run, judge every claim, draw, and keep a record of each experiment.

In the output folder an experiment under a preset leaves `kernel-fig1-quick.json` (its record), `.png`, `.svg` and,
where it has tables, `.md`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mooring.core.errors import RequestError
from mooring.data.benchmark_datasets import DATA_DIR_VARIABLE
from mooring.experiments.base import catalog, trial_cache
from mooring.experiments.base.records import record
from mooring.experiments.base.registry import Registration, apply_registration
from mooring.experiments.base.runner import OnTrial, run
from mooring.runs.atomic_files import make_synced_folder, write_error, write_json

SMOKE = "smoke"  # a preset that tests whether experiments run: it decides no claim


def reproduce(
    what: str | Sequence[str],
    preset: str = "quick",
    out: str | Path = "reproduction",
    *,
    only: Sequence[str] = (),
    repeats: int | None = None,
    data_dir: str | None = None,
    workers: int | None = None,
    tell: OnTrial = lambda what, done, all: None,
) -> list[dict[str, Any]]:
    """Records of the experiments that `what` selects (an id, a paper, `all`, or several), in order.

    The registered preset runs with the registered repeats and seeds and decides the claims; a claim that is not
    registered is refused. `only` keeps some points, such as ["row=MNIST CNN2"], and `repeats` takes the preset's place:
    such runs, and other presets, decide nothing, and their records name no registration.
    """
    names = [what] if isinstance(what, str) else what
    entries = {
        entry.id: catalog.part(entry, preset, only, repeats)
        for name in names
        for entry in catalog.select_experiments(name)
    }
    if data_dir is not None:
        os.environ[DATA_DIR_VARIABLE] = str(Path(data_dir).resolve())  # for the processes that run the trials
    out = Path(out)
    try:
        make_synced_folder(out.absolute())
    except OSError as error:
        raise write_error(out, error) from error
    known: dict[str, dict[str, Registration]] = {}
    for name, entry in entries.items():
        if preset != SMOKE:
            sized, registrations = apply_registration(entry, preset)
            if not only and repeats is None:
                entries[name], known[name] = sized, registrations
    finished = run(list(entries.values()), preset, trial_cache.default_trial_folder(), workers=workers, tell=tell)
    try:
        records = [record(entry, preset, finished[entry.id], known.get(entry.id)) for entry in entries.values()]
    except KeyError as missing:
        if not only:
            raise
        raise RequestError(f"--only leaves out what is compared: {missing.args[0]}.") from missing
    for one in records:
        write_json(out / f"{one['experiment']}-{preset}.json", one)
    return records


def list_claims(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The claims of all records, one row each."""
    keys = ("claim", "word", "worst", "numbers", "says", "registration")
    return [
        {"experiment": record["experiment"], **{key: claim[key] for key in keys}}
        for record in records
        for claim in record["claims"]
    ]
