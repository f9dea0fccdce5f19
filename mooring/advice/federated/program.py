"""The program of a recommendation across machines, as every client runs it on its own rows.

    agree on a schema        sums of counts, flags and votes (`data/schema_sums.py`)
    estimate                 the federation's numbers and the client's models (`estimate.py`)
    compare                  the client's recommendation (`inference/`)
    results                  how many clients got which recommendation

The server runs it without rows and learns `FederationResult`; a client also gets its `ClientResult`, of which at most
the declared scalars leave it. In one process (`advise_together`) the same programs give the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from mooring.advice.evaluation.loss_sums import MODEL_KINDS, LossSums
from mooring.advice.federated.estimate import (
    ClientModels,
    Federation,
    Shape,
    estimate_program,
    loss_sums,
)
from mooring.advice.federated.plan import RESULT_NUMBERS, RESULTS, plan_budget
from mooring.advice.federated.score_models import HomeRows, design, family_of
from mooring.advice.inference.recommendation import (
    Recommendations,
    describe_probability,
    recommendation_program,
)
from mooring.core.cohort import Rows
from mooring.core.errors import RequestError
from mooring.core.summing import Program, Sum, run_alone, run_together
from mooring.core.task import Task, with_columns
from mooring.data.clients import PARTS, Clients
from mooring.data.folds import drop_copies, number_distinct_rows, row_groups, row_times, usable_rows
from mooring.data.schema import Schema
from mooring.shapes.columns import LINEAR

CONFIDENCES = ("high", "moderate", "low")


class FederationResult(NamedTuple):
    """What everybody learns."""

    federation: Federation
    line: Recommendations | None  # of no client: its losses and lines; None where the budget has no evidence
    recommended: dict[str, int]  # how many clients got which recommendation
    confidence: dict[str, int]


class ClientResult(NamedTuple):
    """What a client learns about itself."""

    models: ClientModels
    held: LossSums
    recommendations: Recommendations


def shape_of(task: Task, schema: Schema | None = None, wanted: str = "auto") -> Shape:
    """Return the coefficients of a task; numeric columns of the schema may have curves, unless linear ones are
    `wanted`."""
    family, intercept = family_of(task), bool(getattr(task, "intercept", False))
    numeric = () if schema is None or wanted == LINEAR else schema.numeric_places
    return Shape(family, task.dim // family.scores, intercept, float(getattr(task, "ridge", 0.0)), numeric)


def apply_columns(task: Task, clients: Clients, result: FederationResult) -> tuple[Task, Clients]:
    """Return the task, the rows and the schema with the spline columns that models use."""
    columns = result.federation.columns
    if columns is None:
        return task, clients
    assert clients.schema is not None
    parts = {part: getattr(clients, part).map_columns(columns) for part in PARTS}
    schema = clients.schema.model_copy(update={"shape": columns.as_json()})
    clients = replace(clients, **parts, features=schema.features, schema=schema)
    return with_columns(task, columns.width), clients


def home_rows(task: Task, clients: Clients, position: int = 0) -> HomeRows:
    """Return one client's rows: all but a table's own test rows, repeated ones and units as blocks."""
    if row_times(clients) is not None:
        raise RequestError(
            "time_column does not apply across machines yet: models of earlier rows would need sums over these, and "
            "their difference from all sums shows the later rows. Leave it out."
        )
    rows, groups = usable_rows(clients).compact(), row_groups(clients)
    owner = torch.repeat_interleave(torch.arange(len(rows)), rows.size)
    own = owner == position
    mine = Rows(rows.x[own], rows.y[own], torch.zeros(1, dtype=torch.long), own.sum()[None])
    units = number_distinct_rows(mine) if groups is None else groups[own]
    if groups is None:
        mine, units, _ = drop_copies(mine, units)
    blocks: tuple[np.ndarray, ...] = ()
    if units is not None:
        number, count = units.numpy(), np.bincount(units.numpy())
        blocks = tuple(np.flatnonzero(number == k) for k in np.flatnonzero(count > 1))
    family = family_of(task)
    x = mine.x.double().numpy()
    return HomeRows(
        design(x, family.scores, bool(getattr(task, "intercept", False))), mine.y.double().numpy(), family, blocks
    )


def advise_program(
    shape: Shape, home: HomeRows | None, margin: float, level: float
) -> Program[tuple[FederationResult, ClientResult | None]]:
    """Return what everybody learns and, for a client, what it learns about itself; the server has no `home`."""
    homes = [] if home is None else [home]
    federation, models = yield from estimate_program(shape, homes, plan_budget)
    held, own = loss_sums(homes, models)
    recommendations = None
    if federation.budget.evidence:
        recommendations = yield from recommendation_program(held, own, margin, level)
    elif homes:
        recommendations = run_alone(recommendation_program(held, own, margin, level))
    own_numbers = np.zeros((len(homes), RESULT_NUMBERS))
    if homes and recommendations is not None:
        confidence = describe_probability(lowest_probability(recommendations))[0]
        own_numbers[0, MODEL_KINDS.index(str(recommendations.recommended[0]))] = 1
        own_numbers[0, len(MODEL_KINDS) + CONFIDENCES.index(str(confidence))] = 1
    total = [round(float(number)) for number in (yield Sum(RESULTS, own_numbers))]
    counts = dict(zip(MODEL_KINDS, total[:3])), dict(zip(CONFIDENCES, total[3:]))
    shared = recommendations if federation.budget.evidence else None
    result = FederationResult(federation, shared, *counts)
    if not homes or recommendations is None:
        return result, None
    return result, ClientResult(models[0], held, recommendations)


def lowest_probability(recommendations: Recommendations) -> np.ndarray:
    """[C]: the probability that the recommended model is better than the alternative that is nearest to it."""
    sides = [
        np.where(recommendations.is_same[o], 1.0, side.probability.numpy()) for o, side in recommendations.over.items()
    ]
    return np.min(sides, axis=0)


def advise_together(
    shape: Shape, homes: Sequence[HomeRows], margin: float, level: float, record: list[tuple[str, int]] | None = None
) -> tuple[FederationResult, list[ClientResult]]:
    """Run the programs of all clients, and of an observer, in one process."""
    programs = [advise_program(shape, home, margin, level) for home in [*homes, None]]
    *own, (result, _) = run_together(programs, record)
    return result, [part for _, part in own if part is not None]
