"""Reproduce experiments: run their trials, decide their claims and write one record per experiment.

The record of an experiment under a preset is `kernel-fig1-quick.json` in the output folder.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path

from mooring.core.errors import RequestError
from mooring.core.types import JsonObject
from mooring.data.benchmark_datasets import DATA_DIR_VARIABLE
from mooring.runs.atomic_files import make_synced_folder, write_error, write_json
from mooring_papers.base import catalog, trial_cache
from mooring_papers.base.records import make_record
from mooring_papers.base.registry import Registration, apply_registration
from mooring_papers.base.results import MissingTrials, PlannedResults, Trial
from mooring_papers.base.runner import OnTrial, run

SMOKE = "smoke"  # the preset of the tests: it decides no claim


def reproduce(
    what: str | Sequence[str],
    preset: str = "quick",
    out: str | Path = "reproduction",
    *,
    only: Sequence[str] = (),
    repeats: int | None = None,
    data_dir: str | None = None,
    workers: int | None = None,
    on_progress: OnTrial = lambda what, done, all: None,
) -> list[JsonObject]:
    """Return the records of the experiments that `what` selects: an id, a paper, `all`, or a list of these.

    The registered preset runs with the registered repeats and seeds and decides the claims; a claim that is not
    registered is refused. `only` selects points, such as ["row=MNIST CNN2"], and `repeats` replaces the number of the
    preset. Such runs, and other presets, decide nothing, and their records contain no registration.
    """
    names = [what] if isinstance(what, str) else what
    entries = {
        entry.id: catalog.restrict_experiment(entry, preset, only, repeats)
        for name in names
        for entry in catalog.select_experiments(name)
    }
    if data_dir is not None:
        os.environ[DATA_DIR_VARIABLE] = str(Path(data_dir).resolve())  # for the processes that run the trials
    if only:
        for entry in entries.values():
            check_comparisons(entry, preset)
    out = Path(out)
    try:
        make_synced_folder(out.absolute())
    except OSError as error:
        raise write_error(out, error) from error
    registrations: dict[str, dict[str, Registration]] = {}
    for name, entry in entries.items():
        if preset != SMOKE:
            registered_entry, answered = apply_registration(entry, preset)
            if not only and repeats is None:
                entries[name], registrations[name] = registered_entry, answered
    finished = run(
        list(entries.values()), preset, trial_cache.default_trial_folder(), workers=workers, on_progress=on_progress
    )
    try:
        records = [
            make_record(entry, preset, finished[entry.id], registrations.get(entry.id)) for entry in entries.values()
        ]
    except KeyError as missing:
        if not only:
            raise
        raise _incomplete(missing) from missing
    for record in records:
        write_json(out / f"{record['experiment']}-{preset}.json", record)
    return records


def check_comparisons(entry: catalog.CatalogEntry, preset: str) -> None:
    """Refuse a selection without the points that claims compare, before its trials run."""
    planned = PlannedResults(
        [Trial(dict(point), seed, {}) for point in entry.experiment.presets[preset].points for seed in (0, 1)]
    )
    for claim in entry.experiment.claims:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # lines through points that are all alike
                claim.check(planned)
        except MissingTrials as missing:
            raise _incomplete(missing) from missing
        except Exception:  # the claim needs the values: it is checked again when they are known
            continue


def _incomplete(missing: KeyError) -> RequestError:
    return RequestError(f"--only leaves out what is compared: {missing.args[0]}.")


def list_claims(records: Sequence[JsonObject]) -> list[JsonObject]:
    """Return the claims of all records, one row per claim."""
    keys = ("claim", "word", "worst", "numbers", "says", "registration")
    return [
        {"experiment": record["experiment"], **{key: claim[key] for key in keys}}
        for record in records
        for claim in record["claims"]
    ]
