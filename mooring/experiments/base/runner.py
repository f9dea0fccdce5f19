"""Run the trials of experiments on all cores, each trial once: finished ones are kept, an interrupted run goes on.

Trials that a preset says to be alike are trained as one cohort, in one process: all of them or none, since the last
digits of what a trial gives depend on who is trained with it. They are part of its key.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from threading import Thread, current_thread, main_thread
from typing import Any, NamedTuple

import torch

from mooring.core.errors import RequestError, WorkError
from mooring.engines.loop import Asking
from mooring.engines.sweep import all_answered
from mooring.experiments.base import catalog, trial_cache
from mooring.experiments.base.experiment import Preset
from mooring.experiments.base.results import Results, Trial

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # one each: the trials share the cores

OnTrial = Callable[[str, int, int], None]


class Unit(NamedTuple):
    """One trial to be run."""

    experiment: str
    point: dict[str, Any]
    settings: dict[str, Any]
    seed: int
    key: str
    beside: Sequence[Mapping[str, Any]]  # the points that are trained as one cohort, its own among them


class ExperimentResults(NamedTuple):
    results: Results
    seconds: float  # of processor time, whenever it was spent


def units(entry: catalog.CatalogEntry, preset: Preset) -> list[Unit]:
    trial, settings = entry.experiment.trial, dict(preset.settings)
    alike: dict[str, list[Mapping[str, Any]]] = {}

    def peers(point: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        fixed = {name: value for name, value in point.items() if name not in preset.swept}
        return alike.setdefault(repr(fixed), [])

    for point in preset.points:
        peers(point).append(dict(point))

    def unit(point: Mapping[str, Any], seed: int) -> Unit:
        beside = peers(point)
        key = trial_cache.trial_key(trial, {**point, **settings}, seed, preset.needs, beside if len(beside) > 1 else ())
        return Unit(entry.id, dict(point), settings, seed, key, beside)

    seeds = range(preset.first_seed, preset.first_seed + preset.repeats)
    return [unit(point, seed) for point in preset.points for seed in seeds]


def batches(units: Sequence[Unit]) -> list[list[Unit]]:
    """Trials that are trained as one cohort in one batch."""
    found: dict[str, list[Unit]] = {}
    for unit in units:
        found.setdefault(repr((unit.experiment, unit.settings, unit.seed, unit.beside)), []).append(unit)
    return list(found.values())


def run(
    entries: Sequence[catalog.CatalogEntry],
    preset: str,
    folder: Path,
    *,
    workers: int | None = None,
    tell: OnTrial = lambda what, done, all: None,
) -> dict[str, ExperimentResults]:
    """Results by experiment; `folder` keeps the trials, `workers` is the number of processes (default: the cores)."""
    wanted = {entry.id: units(entry, catalog.preset(entry, preset)) for entry in entries}
    everything = [unit for mine in wanted.values() for unit in mine]
    kept = {
        name: trial for name in {unit.key for unit in everything} if (trial := trial_cache.load_trial(folder, name))
    }
    some = [batch for batch in batches(everything) if any(unit.key not in kept for unit in batch)]
    missing = list({batch[0].key: batch for batch in some}.values())
    total = len({unit.key for unit in everything})
    tell(f"{preset} trials", len(kept), total)
    for unit in _finished(missing, folder, workers):
        done = trial_cache.load_trial(folder, unit.key)
        assert done is not None, f"trial {unit.key} was finished but not kept"
        kept[unit.key] = done
        tell(f"{preset} trials", len(kept), total)
    return {one: _gather(mine, kept) for one, mine in wanted.items()}


def _finished(missing: list[list[Unit]], folder: Path, workers: int | None) -> Iterator[Unit]:
    """The units of all batches in the order in which they get done."""
    workers = min(workers or os.cpu_count() or 1, len(missing))
    if workers <= 1:
        for batch in missing:
            work(batch, folder)
            yield from batch
        return
    others = set(active_children())
    with one_thread_each(), ProcessPoolExecutor(workers, get_context("spawn"), begin_worker) as pool:
        with ignore_interrupts():  # the processes start at the first of these
            futures = {pool.submit(work, batch, folder): batch for batch in missing}
        try:
            for future in as_completed(futures):
                future.result()
                yield from futures[future]
        except KeyboardInterrupt:
            for worker in set(active_children()) - others:
                worker.kill()  # nobody waits for trials that have begun; what is kept is whole
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def begin_worker() -> None:
    """One thread, and no life without the process that hands out the work: killed, it would leave workers behind."""
    torch.set_num_threads(1)
    parent = parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    Thread(target=follow, daemon=True).start()


@contextmanager
def ignore_interrupts() -> Iterator[None]:
    """Processes that start within this block ignore interrupts, which a terminal sends to all: this one answers."""
    if current_thread() is not main_thread():  # only the main thread hears them
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def work(batch: Sequence[Unit], folder: Path) -> None:
    """Run trials side by side and keep what they gave, once all are done; seconds are told in equal shares."""
    begin = time.process_time()
    found = all_answered([_values(unit) for unit in batch])
    seconds = (time.process_time() - begin) / len(batch)
    for unit, (values, _) in zip(batch, found):
        what = {"experiment": unit.experiment, "point": unit.point, "settings": unit.settings, "seed": unit.seed}
        trial_cache.save_trial(folder, unit.key, values, seconds, what)


def _values(unit: Unit) -> Asking[dict[str, Any]]:
    """What a trial gives; the questions of its training, if it asks them, are for whoever drives it."""
    trial = catalog.load_experiment(unit.experiment).experiment.trial
    try:
        values = trial(seed=unit.seed, **unit.point, **unit.settings)
        return (yield from values) if isinstance(values, Generator) else values
    except (RequestError, WorkError):
        raise
    except Exception as error:
        where = ", ".join(f"{name} = {value}" for name, value in unit.point.items())
        raise WorkError(
            f"{unit.experiment} failed at {where or 'its point'}, seed {unit.seed}: {type(error).__name__}: {error}"
        ) from error


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Processes that start within this block use one thread."""
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _gather(mine: Sequence[Unit], kept: Mapping[str, Any]) -> ExperimentResults:
    trials = [Trial(unit.point, unit.seed, kept[unit.key]["values"]) for unit in mine]
    return ExperimentResults(Results(trials), sum(kept[unit.key]["seconds"] for unit in mine))
