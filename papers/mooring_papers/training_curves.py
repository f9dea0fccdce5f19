"""Train a federation and record the losses and accuracies of its models, on training and on test rows.

Series of `follow`, all at the rounds in "round": loss and accuracy of the models that clients use ("train loss",
"test accuracy", ...) and, with the word "common", of the server's model. Numbers are means over clients, each counting
once, and with the word "worst" those of the client with the largest loss or the lowest accuracy; losses are without
penalties. They are over all clients, or, with `online`, over those that took part in the
round that is evaluated, which is how `apfl` evaluates.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

import torch
from torch import Tensor

from mooring.algorithms.base import AnyAlgorithm
from mooring.core.cohort import Batch, Rows
from mooring.core.task import Task
from mooring.data.clients import Clients
from mooring.engines.participation import sample_cohort
from mooring.engines.simulate import RoundSnapshot, simulate
from mooring.engines.training_state import TrainingPlan

PARTS = ("train", "test")


def train_and_evaluate(
    algorithm: AnyAlgorithm,
    task: Task,
    clients: Clients,
    *,
    rounds: int,
    every: int,
    seed: int,
    participation: float = 1.0,
    common: bool = False,
    online: bool = False,
) -> dict[str, list[float]]:
    """Return the curves of a run, evaluated at round 1 and at every `every`-th; `common` adds the server's model.

    The algorithm's settings must be numbers. Clients have equal weights in averages, and cohorts depend only on the
    seed. Where a method has mixtures, "alpha" is their mean.
    """
    curves: dict[str, list[float]] = {"round": []}

    def note(name: str, value: float) -> None:
        curves.setdefault(name, []).append(value)

    def watch(now: RoundSnapshot) -> None:
        if now.t % every and now.t not in (1, rounds):
            return
        note("round", now.t)
        models = now.models()
        taking_part = sample_cohort(plan, now.exchange.roster.keys, now.t) if online else torch.arange(len(clients))
        models = models[taking_part]
        rows = {part: getattr(clients, part).select(taking_part) for part in PARTS}
        for part in PARTS:
            losses, accuracies = by_client(task, models, rows[part])
            note(f"{part} loss", float(losses.nanmean()))
            note(f"{part} accuracy", float(accuracies.nanmean()))
            note(f"worst {part} loss", float(losses.nan_to_num(-inf).max()))
            note(f"worst {part} accuracy", float(accuracies.nan_to_num(inf).min()))
            if common:
                loss, accuracy = loss_and_accuracy(task, now.server.w.expand_as(models), rows[part])
                note(f"common {part} loss", loss)
                note(f"common {part} accuracy", accuracy)
        note("alpha", mean_alpha(now))

    plan = TrainingPlan(rounds, participation, seed, evaluate_every=rounds)
    simulate(algorithm, task, clients, plan, weights="uniform", resolved=True, watch=watch)
    return curves


def loss_and_accuracy(task: Task, models: Tensor, rows: Rows) -> tuple[float, float]:
    """Mean over clients of the loss and of the accuracy of models [m, d] on their own rows."""
    loss, accuracy = by_client(task, models, rows)
    return float(loss.nanmean()), float(accuracy.nanmean())


def measure_accuracy(task: Task, w: Tensor, batch: Batch) -> Tensor:
    """[C]: the share of rows whose most probable class is theirs; nan for a client without rows."""
    hits = (batch.weight * (task.predict(w, batch.x).argmax(-1) == batch.y)).sum(1)
    return torch.where(batch.weight.sum(1) > 0, hits, torch.full_like(hits, torch.nan)).double()


def by_client(task: Task, models: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """[m] losses and accuracies of models [m, d] on their own rows; nan for a client without rows."""
    loss = torch.full((len(rows),), torch.nan, dtype=torch.float64)
    accuracy = loss.clone()
    for block in rows.blocks():
        batch = rows.select(block).padded()
        loss[block] = task.risk(models[block], batch).double()
        accuracy[block] = measure_accuracy(task, models[block], batch)
    return loss, accuracy


def mean_alpha(now: RoundSnapshot) -> float:
    """The mean mixture of a method that has one, else nan."""
    alpha = getattr(now.exchange.states.fields, "alpha", None)
    return float("nan") if alpha is None else float(alpha.double().mean())


def to_single_precision(clients: Clients) -> Clients:
    """The same federation with features in single precision, as networks want them."""

    def rows(part: Rows) -> Rows:
        return Rows(part.x.float(), part.y, part.start, part.size)

    return replace(clients, train=rows(clients.train), validation=rows(clients.validation), test=rows(clients.test))
