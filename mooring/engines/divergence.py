"""Advice on a run that diverged: try smaller steps, and propose those that work."""

from __future__ import annotations

from dataclasses import fields, replace

from mooring.algorithms.base import AnyAlgorithm
from mooring.core.aggregation import MEAN
from mooring.core.errors import RequestError
from mooring.core.task import Task
from mooring.core.types import JsonObject
from mooring.engines.exchange import Exchange
from mooring.engines.loop import resolve, run
from mooring.engines.training_state import Diverged, TrainingPlan, TrainingState

STEP_SIZE_FIELDS = ("eta", "personal_eta", "inner_eta", "gamma", "server_step")  # fields that are step sizes
MAX_TRIAL_ROUNDS = 10  # rounds that a proposal is tried for, at most
STEP_SIZE_FACTORS = (0.1, 0.01, 1e-3, 1e-4)


def suggest_step_sizes(algorithm: AnyAlgorithm, task: Task, exchange: Exchange, plan: TrainingPlan, t: int) -> str:
    """Return a sentence on step sizes that work, tried for the rounds before the divergence, up to MAX_TRIAL_ROUNDS."""
    saved_note = "What was saved before is whole."
    sizes = {f.name: getattr(algorithm, f.name) for f in fields(algorithm) if f.name in STEP_SIZE_FIELDS}
    sizes = {name: value for name, value in sizes.items() if isinstance(value, int | float)}
    if not sizes:
        return f"{algorithm.name} has no step size to make smaller: look at the data of the clients named. {saved_note}"
    defaults = {f.name: f.default for f in fields(algorithm)}
    usual = {name: defaults[name] for name in sizes}
    shorter = [
        {name: value * share for name, value in sizes.items() if name != "server_step"} for share in STEP_SIZE_FACTORS
    ]
    for changes in (usual, *shorter):
        working = try_step_sizes(algorithm, changes, task, exchange, replace(plan, rounds=min(t, MAX_TRIAL_ROUNDS)))
        if working is not None:
            changed = {name: working[name] for name in working if name in sizes and working[name] != sizes[name]}
            if changed:
                was = ", ".join(f"{name} = {sizes[name]:.3g}" for name in changed)
                now = ", ".join(f"{name} = {value:.3g}" for name, value in changed.items())
                return f"Too large: {was}; with {now} the loss falls. {saved_note}"
    was = ", ".join(f"{name} = {value:.3g}" for name, value in sizes.items())
    return f"No smaller steps than {was} were found to help: look at the data of the clients named. {saved_note}"


def try_step_sizes(
    algorithm: AnyAlgorithm, changes: JsonObject, task: Task, exchange: Exchange, plan: TrainingPlan
) -> JsonObject | None:
    """Return the resolved fields with these changes if the loss on training rows does not rise; else None."""
    trial_exchange = exchange.beside(algorithm)
    if trial_exchange is None:
        return None
    honest = replace(plan, evaluate_every=plan.rounds, patience=None, average=MEAN, attack=None, noise=None, delta=None)
    try:
        resolved, server = resolve(replace(algorithm, **changes), task, trial_exchange, plan.seed)
        outcome = run(resolved, trial_exchange, honest, TrainingState(server))
    except (Diverged, RequestError):
        return None
    if not outcome.last.train_loss <= outcome.state.first_loss:
        return None
    return {f.name: getattr(resolved, f.name) for f in fields(resolved)}
