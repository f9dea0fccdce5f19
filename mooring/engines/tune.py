"""Measured speed of a run on this machine: threads, clients per chunk, kernels.

A measurement does not change a run: a proposed setting is used only if it is requested, and is then
in the run file.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple, Unpack

import torch

from mooring.algorithms.base import AnyAlgorithm
from mooring.core.cohort import Round, chunk_size
from mooring.core.types import NamedValues
from mooring.engines import loop, participation
from mooring.engines.prepare import Job, prepare
from mooring.engines.request import request
from mooring.engines.simulator import Simulator
from mooring.runs.option_types import Options
from mooring.tasks.compiled_steps import compile_steps, has_compiled_steps, is_numba_available

CHUNK_FACTOR = 4  # chunks of a quarter, once and four times the usual number of clients are tried
TIMED_ROUNDS = 3  # of which the quickest counts; one before them warms up


class TunedSetting(NamedTuple):
    """The time of a round with these settings."""

    threads: int
    chunk: int
    kernels: str
    seconds: float

    @property
    def options(self) -> str:
        return f"--threads {self.threads} --chunk {self.chunk} --kernels {self.kernels}"


def tune(
    source: object,
    *,
    algorithm: str | AnyAlgorithm | None = None,
    model: object = None,
    settings: NamedValues | None = None,
    trust_code: bool = False,
    **options: Unpack[Options],
) -> list[TunedSetting]:
    """Time rounds of the run that `fit` would train, with other settings; return them, the fastest first.

    Elapsed time is measured, so the machine should be idle.
    """
    run = request(
        source, purpose="fit", algorithm=algorithm, settings=settings, model=model, trust_code=trust_code, **options
    )
    job = prepare(run, None if isinstance(source, str) else source, model)
    exchange = Simulator(job.task, job.clients, job.clients.weights(run.training.weights))
    resolved, _ = loop.resolve(job.algorithms()[0], job.task, exchange, job.plan.seed)
    before = torch.get_num_threads()
    try:
        trials = [TunedSetting(*setting, time_round(job, resolved, *setting)) for setting in list_settings(job)]
    finally:
        torch.set_num_threads(before)
    return sorted(trials, key=lambda trial: trial.seconds)


def list_settings(job: Job) -> Iterator[tuple[int, int, str]]:
    """Threads, chunk and kernels to try."""
    cohort, usual = participation.cohort_size(job.plan, len(job.clients)), chunk_size(job.task)
    chunks = sorted({min(max(size, 1), cohort) for size in (usual // CHUNK_FACTOR, usual, usual * CHUNK_FACTOR)})
    compiled = has_compiled_steps(job.task) and is_numba_available()
    for threads in sorted({1, torch.get_num_threads()}):
        for kernels in ("torch", "numba") if compiled else ("torch",):
            yield from ((threads, chunk, kernels) for chunk in chunks)


def time_round(job: Job, algorithm: AnyAlgorithm, threads: int, chunk: int, kernels: str) -> float:
    """Return the elapsed time of a round."""
    torch.set_num_threads(threads)
    task = compile_steps(job.task) if kernels == "numba" else job.task
    exchange, w0 = Simulator(task, job.clients, job.clients.weights(), chunk), task.start(job.plan.seed)
    exchange.begin(algorithm, w0)
    server, m, took = algorithm.init(task, w0)[0], len(job.clients), []
    for t in range(1, TIMED_ROUNDS + 2):
        cohort = participation.sample_cohort(job.plan, exchange.data.keys, t)
        begin = time.perf_counter()
        exchange.ask(server, cohort, Round(t, job.plan.rounds, m, len(cohort), 1.0, job.plan.seed))
        took.append(time.perf_counter() - begin)
    return min(took[1:])
