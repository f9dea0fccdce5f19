"""Training of one algorithm and of the baselines beside it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mooring.algorithms.base import build
from mooring.core.aggregation import MEAN
from mooring.core.errors import ClientError
from mooring.engines import training_checkpoint
from mooring.engines.callbacks import Callback, plan_callbacks
from mooring.engines.divergence import suggest_step_sizes
from mooring.engines.exchange import BEST, LAST, Exchange
from mooring.engines.fit_result import RoundModels, TrainedModels
from mooring.engines.loop import TrainingSteps, collect_models, resolve, run_steps, training_steps
from mooring.engines.prepare import Job
from mooring.engines.privacy import make_private_mean
from mooring.engines.progress import OnProgress, ignore_progress
from mooring.engines.training_state import Diverged, TrainingState
from mooring.runs.directory import RunDirectory


def train(
    job: Job,
    ready: Any,
    exchange: Exchange,
    state: TrainingState,
    directory: RunDirectory | None = None,
    on_progress: OnProgress = ignore_progress,
    callbacks: Sequence[Callback] = (),
) -> TrainedModels:
    """Train for the rounds that are left: the models of the best and of the last of them."""
    return run_steps(train_steps(job, ready, exchange, state, directory, on_progress, callbacks))


def train_steps(
    job: Job,
    ready: Any,
    exchange: Exchange,
    state: TrainingState,
    directory: RunDirectory | None = None,
    on_progress: OnProgress = ignore_progress,
    callbacks: Sequence[Callback] = (),
) -> TrainingSteps[TrainedModels]:
    """`train` as a generator that yields each round's request and is sent the replies."""
    clients, path = len(exchange.roster), None if directory is None else directory.path
    all_callbacks = plan_callbacks(
        ready,
        job.plan,
        clients,
        callbacks,
        private=make_private_mean(job.plan, clients, path),
        save=None if directory is None else lambda now: training_checkpoint.save_training(directory, now, exchange),
        report=lambda now, rounds: on_progress(ready.name + describe_epsilon(now), now.t, rounds),
    )
    try:
        outcome = yield from training_steps(ready, exchange, job.plan, state, all_callbacks)
    except Diverged as error:
        raise Diverged(f"{error} {suggest_step_sizes(ready, job.task, exchange, job.plan, state.t + 1)}") from error
    unit = job.clients.target_scale**job.task.unit_power

    def after(which: str) -> RoundModels:
        shown, server = outcome.at(which)
        models, alpha = collect_models(outcome, exchange, job.plan, which), exchange.numbers("alpha", which)
        return RoundModels(
            shown.t, ready.global_model(server), models, shown.validation * unit, shown.test * unit, alpha
        )

    last = after(LAST)
    return TrainedModels(ready, outcome, job.plan.checkpoint, last, last if outcome.best.t == last.t else after(BEST))


def describe_epsilon(state: TrainingState) -> str:
    """The epsilon that a private run has spent so far; empty for others."""
    epsilon = state.records[-1].get("epsilon")
    return "" if epsilon is None else f": epsilon {epsilon:.3g}"


def train_baseline(
    name: str, job: Job, exchange: Exchange, on_progress: OnProgress = ignore_progress
) -> TrainedModels | None:
    """Train a baseline at the same clients, all honest and in every round; None where that cannot be done."""
    plain = {"participation": 1.0, "average": MEAN, "clip": None, "weight_cap": None, "attack": None}
    plain |= {"noise": None, "delta": None}
    run = job.run.model_copy(update={"training": job.run.training.model_copy(update=plain)})
    beside, asked = replace(job, run=run), build(name, {})
    apart = exchange.beside(asked)
    if apart is None:
        return None
    try:
        ready, server = resolve(asked, job.task, apart, job.plan.seed)
        return train(beside, ready, apart, TrainingState(server), None, on_progress)
    except Diverged as error:
        warnings.warn(f"without the baseline '{name}': {error}")
    except ClientError:
        if not getattr(exchange, "is_remote", False):
            raise  # a client that went away from a deployment was named already
    return None
