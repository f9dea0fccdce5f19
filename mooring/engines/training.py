"""Training of one algorithm and of the baselines beside it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

from mooring.algorithms.base import AnyAlgorithm, build
from mooring.core.aggregation import MEAN
from mooring.core.errors import ClientError
from mooring.engines import training_checkpoint
from mooring.engines.callbacks import Callback, plan_callbacks
from mooring.engines.divergence import suggest_step_sizes
from mooring.engines.exchange import BEST, LAST, Exchange
from mooring.engines.fit_result import RoundModels, TrainedModels
from mooring.engines.local_update import extend_model
from mooring.engines.loop import TrainingSteps, collect_models, resolve, run_steps, training_steps
from mooring.engines.prepare import Job
from mooring.engines.privacy import make_private_mean
from mooring.engines.progress import OnProgress, ignore_progress
from mooring.engines.training_state import Diverged, TrainingState
from mooring.runs.directory import RunDirectory


def train(
    job: Job,
    algorithm: AnyAlgorithm,
    exchange: Exchange,
    state: TrainingState,
    directory: RunDirectory | None = None,
    on_progress: OnProgress = ignore_progress,
    callbacks: Sequence[Callback] = (),
) -> TrainedModels:
    """Train for the remaining rounds; return the models of the best and of the last round."""
    return run_steps(train_steps(job, algorithm, exchange, state, directory, on_progress, callbacks))


def train_steps(
    job: Job,
    algorithm: AnyAlgorithm,
    exchange: Exchange,
    state: TrainingState,
    directory: RunDirectory | None = None,
    on_progress: OnProgress = ignore_progress,
    callbacks: Sequence[Callback] = (),
) -> TrainingSteps[TrainedModels]:
    """`train` as a generator that yields each round's request and is sent the replies."""
    clients, path = len(exchange.roster), None if directory is None else directory.path
    all_callbacks = plan_callbacks(
        algorithm,
        job.plan,
        clients,
        callbacks,
        private=make_private_mean(job.plan, clients, path),
        save=None if directory is None else lambda now: training_checkpoint.save_training(directory, now, exchange),
        report=lambda now, rounds: on_progress(algorithm.name + describe_epsilon(now), now.t, rounds),
    )
    try:
        outcome = yield from training_steps(algorithm, exchange, job.plan, state, all_callbacks)
    except Diverged as error:
        raise Diverged(f"{error} {suggest_step_sizes(algorithm, job.task, exchange, job.plan, state.t + 1)}") from error
    unit, dim = job.clients.target_scale**job.task.unit_power, algorithm.deployed_task(job.task).dim

    def collect_round(selection: str) -> RoundModels:
        evaluation, server = outcome.at(selection)
        models, alpha = collect_models(outcome, exchange, job.plan, selection), exchange.numbers("alpha", selection)
        return RoundModels(
            evaluation.t,
            extend_model(algorithm.global_model(server), dim),
            models,
            evaluation.validation * unit,
            evaluation.test * unit,
            alpha,
        )

    last = collect_round(LAST)
    return TrainedModels(
        algorithm, outcome, job.plan.checkpoint, last, last if outcome.best.t == last.t else collect_round(BEST)
    )


def describe_epsilon(state: TrainingState) -> str:
    """Return the epsilon that a private run has spent so far; "" for others."""
    epsilon = state.records[-1].get("epsilon")
    return "" if epsilon is None else f": epsilon {epsilon:.3g}"


def train_baseline(
    name: str, job: Job, exchange: Exchange, on_progress: OnProgress = ignore_progress
) -> TrainedModels | None:
    """Train a baseline at the same clients, all honest and in every round; None if that is not possible."""
    plain_options = {"participation": 1.0, "average": MEAN, "clip": None, "weight_cap": None, "attack": None}
    plain_options |= {"noise": None, "delta": None}
    run = job.run.model_copy(update={"training": job.run.training.model_copy(update=plain_options)})
    beside, baseline = replace(job, run=run), build(name, {})
    baseline_exchange = exchange.beside(baseline)
    if baseline_exchange is None:
        return None
    try:
        algorithm, server = resolve(baseline, job.task, baseline_exchange, job.plan.seed)
        return train(beside, algorithm, baseline_exchange, TrainingState(server), None, on_progress)
    except Diverged as error:
        warnings.warn(f"without the baseline '{name}': {error}")
    except ClientError:
        if not getattr(exchange, "is_remote", False):
            raise  # a client that went away from a deployment was named already
    return None
