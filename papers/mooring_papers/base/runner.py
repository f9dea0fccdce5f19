"""Run the trials of experiments on all cores; finished trials are stored, and an interrupted run resumes.

Trials that differ only in the `swept` coordinates of a preset are trained as one cohort, in one process. The last
digits of a trial's results depend on the cohort, so it is part of the trial's key, and a cohort is run completely or
not at all.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from threading import Thread, current_thread, main_thread
from typing import NamedTuple

import torch

from mooring.core.errors import RequestError, WorkError
from mooring.core.types import JsonObject, NamedValues
from mooring.engines.loop import TrainingSteps
from mooring.engines.sweep import run_together
from mooring_papers.base import catalog, trial_cache
from mooring_papers.base.experiment import Preset
from mooring_papers.base.results import Results, Trial

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # set to 1: trials share the cores

OnTrial = Callable[[str, int, int], None]


class Unit(NamedTuple):
    """A trial to run."""

    experiment: str
    point: JsonObject
    settings: JsonObject
    seed: int
    key: str
    beside: Sequence[NamedValues]  # the points that are trained as one cohort, including this one


class ExperimentResults(NamedTuple):
    results: Results
    seconds: float  # of processor time, including earlier runs


def list_trials(entry: catalog.CatalogEntry, preset: Preset) -> list[Unit]:
    """Return all trials of an experiment under a preset."""
    experiment, settings = entry.experiment, dict(preset.settings)
    cohorts: dict[str, list[NamedValues]] = {}

    def cohort_of(point: NamedValues) -> list[NamedValues]:
        fixed = {name: value for name, value in point.items() if name not in preset.swept}
        return cohorts.setdefault(repr(fixed), [])

    for point in preset.points:
        cohort_of(point).append(dict(point))

    def make_unit(point: NamedValues, seed: int) -> Unit:
        beside = cohort_of(point)
        arguments, together = {**point, **settings}, beside if len(beside) > 1 else ()
        key = trial_cache.trial_key(experiment.trial, arguments, seed, experiment.version, preset.needs, together)
        return Unit(entry.id, dict(point), settings, seed, key, beside)

    seeds = range(preset.first_seed, preset.first_seed + preset.repeats)
    return [make_unit(point, seed) for point in preset.points for seed in seeds]


def group_trials(units: Sequence[Unit]) -> list[list[Unit]]:
    """Return the trials in batches: those that are trained as one cohort are one batch."""
    groups: dict[str, list[Unit]] = {}
    for unit in units:
        groups.setdefault(repr((unit.experiment, unit.settings, unit.seed, unit.beside)), []).append(unit)
    return list(groups.values())


def run(
    entries: Sequence[catalog.CatalogEntry],
    preset: str,
    folder: Path,
    *,
    workers: int | None = None,
    on_progress: OnTrial = lambda what, done, all: None,
) -> dict[str, ExperimentResults]:
    """Return the results by experiment; `folder` is the cache, `workers` the number of processes (default: all
    cores)."""
    units = {entry.id: list_trials(entry, catalog.get_preset(entry, preset)) for entry in entries}
    all_units = [unit for trials in units.values() for unit in trials]
    finished = {
        name: trial for name in {unit.key for unit in all_units} if (trial := trial_cache.load_trial(folder, name))
    }
    unfinished = [batch for batch in group_trials(all_units) if any(unit.key not in finished for unit in batch)]
    missing = list({batch[0].key: batch for batch in unfinished}.values())
    total = len({unit.key for unit in all_units})
    on_progress(f"{preset} trials", len(finished), total)
    for unit in _run_batches(missing, folder, workers):
        trial = trial_cache.load_trial(folder, unit.key)
        assert trial is not None, f"trial {unit.key} was finished but not stored"
        finished[unit.key] = trial
        on_progress(f"{preset} trials", len(finished), total)
    return {id_: _collect_results(trials, finished) for id_, trials in units.items()}


def _run_batches(missing: list[list[Unit]], folder: Path, workers: int | None) -> Iterator[Unit]:
    """Run all batches and yield their trials in the order in which they finish."""
    workers = min(workers or os.cpu_count() or 1, len(missing))
    if workers <= 1:
        for batch in missing:
            _run_batch(batch, folder)
            yield from batch
        return
    other_processes = set(active_children())
    with _limit_threads(), ProcessPoolExecutor(workers, get_context("spawn"), _start_worker) as pool:
        with ignore_interrupts():  # the processes start with the first submission
            futures = {pool.submit(_run_batch, batch, folder): batch for batch in missing}
        try:
            for future in as_completed(futures):
                future.result()
                yield from futures[future]
        except KeyboardInterrupt:
            for worker in set(active_children()) - other_processes:
                worker.kill()  # do not wait for running trials; stored trials are complete
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _start_worker() -> None:
    """Use one thread, and exit when the parent process ends: a killed parent would leave its workers behind."""
    torch.set_num_threads(1)
    parent = parent_process()
    assert parent is not None

    def exit_with_parent() -> None:
        parent.join()
        os._exit(1)

    Thread(target=exit_with_parent, daemon=True).start()


@contextmanager
def ignore_interrupts() -> Iterator[None]:
    """Make processes that start within this block ignore interrupts, which a terminal sends to all processes."""
    if current_thread() is not main_thread():  # only the main thread receives signals
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _run_batch(batch: Sequence[Unit], folder: Path) -> None:
    """Run trials together and store their results once all have finished; the time is divided equally."""
    start = time.process_time()
    results = run_together([_run_trial(unit) for unit in batch])
    seconds = (time.process_time() - start) / len(batch)
    for unit, (values, _) in zip(batch, results):
        description = {"experiment": unit.experiment, "point": unit.point, "settings": unit.settings, "seed": unit.seed}
        trial_cache.save_trial(folder, unit.key, values, seconds, description)


def _run_trial(unit: Unit) -> TrainingSteps[JsonObject]:
    """Return the values of a trial; a trial that trains together with others yields its requests to its caller."""
    trial = catalog.load_experiment(unit.experiment).experiment.trial
    try:
        values = trial(seed=unit.seed, **unit.point, **unit.settings)
        return (yield from values) if isinstance(values, Generator) else values
    except (RequestError, WorkError):
        raise
    except Exception as error:
        place = ", ".join(f"{name} = {value}" for name, value in unit.point.items())
        raise WorkError(
            f"{unit.experiment} failed at {place or 'its point'}, seed {unit.seed}: {type(error).__name__}: {error}"
        ) from error


@contextmanager
def _limit_threads() -> Iterator[None]:
    """Make processes that start within this block use one thread."""
    before = {name: os.environ.get(name) for name in THREAD_VARIABLES}
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _collect_results(units: Sequence[Unit], finished: NamedValues) -> ExperimentResults:
    trials = [Trial(unit.point, unit.seed, finished[unit.key]["values"]) for unit in units]
    return ExperimentResults(Results(trials), sum(finished[unit.key]["seconds"] for unit in units))
