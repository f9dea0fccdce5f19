"""Many runs as one: variants of an algorithm, and seeds, trained on the same clients as a single larger cohort.

Where models are small, what a round costs is calls of PyTorch and not arithmetic: forty runs cost little more than one
if all their clients are visited together. Clients of a variant start from that variant's server, with its numbers and
its seed, and their messages are averaged and merged apart: each variant ends where it would have ended alone, up to
rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mooring.core.averages import average
from mooring.core.cohort import Round, select, stacked
from mooring.core.costs import Meter
from mooring.core.moor import Each
from mooring.core.seeds import mixed
from mooring.core.threads import side_by_side
from mooring.data.clients import Clients
from mooring.engines import loop, visits
from mooring.engines.exchange import sent
from mooring.engines.loop import Evaluation, Plan, Progress
from mooring.engines.simulator import Simulator
from mooring.estimates.facts import Facts


class Variant(NamedTuple):
    """A run of a sweep."""

    algorithm: Any
    seed: int


class Swept(NamedTuple):
    """What a variant came to."""

    algorithm: Any  # settled
    seed: int
    server: Any
    exchange: Simulator
    last: Evaluation


def sweep(variants: Sequence[Variant], task: Any, clients: Clients, plan: Plan, weights: str = "size") -> list[Swept]:
    """Every variant after all rounds of `plan`, whose seed the variants replace; they need not have anything in common.

    Variants that differ in nothing but seeds and what their algorithm lists in `swept` are trained as one cohort.
    """
    known: dict[Any, tuple[Tensor, Facts]] = {}
    runs = [_begin(variant, task, clients, plan, weights, known) for variant in variants]
    groups: dict[Any, list[_Run]] = {}
    for run in runs:
        groups.setdefault(_likeness(run.algorithm), []).append(run)
    for group in groups.values():
        if len(group) > 1:
            _train_together(group, task)
        else:
            loop.run(group[0].algorithm, group[0].exchange, group[0].plan, group[0].progress)
    return [_ended(run) for run in runs]


class _Run(NamedTuple):
    algorithm: Any
    exchange: Simulator
    plan: Plan
    progress: Progress


class _Knowing(Simulator):
    """Clients that are asked for their facts once: `known` are those of other runs, by what was asked, and the start
    that they are about."""

    known: dict[Any, tuple[Tensor, Facts]]

    def facts(self, w0: Tensor, asks: tuple[str, ...] = ("fit", "alone")) -> Facts:
        if asks not in self.known or not torch.equal(self.known[asks][0], w0):
            self.known[asks] = w0, super().facts(w0, asks)
        return self.known[asks][1]


def _begin(
    variant: Variant, task: Any, clients: Clients, plan: Plan, weights: str, known: dict[Any, tuple[Tensor, Facts]]
) -> _Run:
    exchange = _Knowing(task, clients, clients.weights(weights))
    exchange.known = known
    algorithm, server = loop.settle(variant.algorithm, task, exchange, variant.seed)
    loop.check_participation(algorithm, plan, len(clients))
    return _Run(algorithm, exchange, replace(plan, seed=variant.seed), Progress(server))


def _ended(run: _Run) -> Swept:
    turn = loop.everyones(run.plan.rounds, run.plan.rounds, run.exchange.roster, run.plan)
    last = loop.evaluate(run.exchange, run.progress.server, turn)
    return Swept(run.algorithm, run.plan.seed, run.progress.server, run.exchange, last)


def _likeness(algorithm: Any) -> Any:
    """Equal for variants that can be one cohort."""
    free = [getattr(algorithm, name) for name in algorithm.swept]
    if not free or algorithm.pooled or algorithm.one_shot or not all(isinstance(value, float | int) for value in free):
        return id(algorithm)
    theirs = {field.name for field in fields(algorithm)} - set(algorithm.swept) - set(algorithm.merges)
    return type(algorithm), tuple((name, repr(getattr(algorithm, name))) for name in sorted(theirs))


def _train_together(runs: list[_Run], task: Any) -> None:
    lots = mixed(runs[0].exchange.data.keys)
    for t in range(1, runs[0].plan.rounds + 1):
        _round(runs, [loop.lowest_lots(run.plan, lots, t) for run in runs], task, t)
    for run in runs:
        run.progress.t = run.plan.rounds


def _round(runs: list[_Run], cohorts: list[Tensor], task: Any, t: int) -> None:
    """Round t of all runs, on their cohorts as one."""
    first, everyone = runs[0], runs[0].exchange.data
    owner = torch.repeat_interleave(torch.arange(len(runs)), len(cohorts[0]))
    seeds = np.array([run.plan.seed for run in runs], dtype=np.uint64)[owner.numpy()]
    data = replace(everyone.select(torch.cat(cohorts)), seeds=seeds)
    turn = Round(t, first.plan.rounds, len(everyone), len(cohorts[0]), 0.0, first.plan.seed)
    servers = stacked([_row(sent(run.algorithm, run.progress.server)) for run in runs])
    states = stacked([run.exchange.states.take(cohort) for run, cohort in zip(runs, cohorts)])
    numbers = {
        name: torch.tensor([float(getattr(run.algorithm, name)) for run in runs], dtype=torch.float64)
        for name in first.algorithm.swept
    }

    def stay(block: Tensor) -> tuple[Any, Any]:
        mine = owner[block]
        algorithm = _with(first.algorithm, {name: values[mine] for name, values in numbers.items()})
        clients = select(states, block)
        return visits.visit(algorithm, task, select(servers, mine), clients, data.select(block), turn, Meter())

    blocks = data.train.blocks(first.exchange.chunk)
    found, messages = stacked(side_by_side(stay, blocks), torch.argsort(torch.cat(blocks)))
    for r, (run, cohort) in enumerate(zip(runs, cohorts)):
        share, mine = run.exchange.p[cohort], owner == r
        here = turn._replace(weight=float(share.sum()), seed=run.plan.seed)
        mean = average(select(messages, mine), share, run.plan.average)
        run.progress.server = run.algorithm.merge(run.progress.server, mean, here)
        run.exchange.states.put(cohort, select(found, mine), t)


def _row(server: Any) -> Any:
    """A server's state with a leading dimension."""
    return type(server)(*(None if part is None else part[None] for part in server))


def _with(algorithm: Any, numbers: dict[str, Tensor]) -> Any:
    """The algorithm with a number per row in these fields; checks of fields are for what users give."""
    twin = object.__new__(type(algorithm))
    for field in fields(algorithm):
        object.__setattr__(twin, field.name, getattr(algorithm, field.name))
    for name, values in numbers.items():
        object.__setattr__(twin, name, Each(values) if name == "lam" else values)
    return twin
