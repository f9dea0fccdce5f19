"""The plan of a recommendation across machines: which sums there are, how many numbers each has, and what for.

The plan follows from the run file alone, so that it can be read before anybody joins. A client runs its own program
(`program.py`), which yields these steps and no others: the server cannot ask for anything else. The digest of the plan
is part of what clients sign, so that all of them have the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from mooring.advice.federated import curves
from mooring.advice.federated import estimate as steps
from mooring.advice.federated.estimate import Budget, Shape, candidates_of
from mooring.advice.inference import improvements, recommendation
from mooring.core.summing import Step
from mooring.data import level_sums, schema_sums
from mooring.remote.transcript import PROTOCOL, canonical_bytes
from mooring.runs.runfile import RunFile

VERSION = 1  # of the programs: raised where their steps or numbers change
RESULTS = Step("results", "how many clients get which recommendation, with which confidence", 1.0, linear=False)
RESULT_NUMBERS = 6
EVIDENCE = {  # numbers of one occurrence, and occurrences
    improvements.IMPROVEMENT_MOMENTS: (36, 1),
    improvements.IMPROVEMENT_EXCESS: (8, 1),
    improvements.IMPROVEMENT_SCALE: (2, 1),
    recommendation.POOLED_LOSSES: (4, 1),
    recommendation.GUARD_COUNTS: (3, 1),
    recommendation.GUARD: (14, 3),
    recommendation.LINE: (25, 1),
    recommendation.EXPECTED_LOSSES: (5, 1),
}
EVIDENCE_NUMBERS = sum(numbers * times for numbers, times in EVIDENCE.values())
NOISE_NUMBERS = 6


class PlannedStep(NamedTuple):
    """A step of a plan."""

    step: Step
    numbers: int  # of each occurrence, at most: models on one set of columns may need more gradients than on another
    times: int  # at most

    @property
    def counted(self) -> int:
        return 0 if self.step.linear else self.numbers * self.times


def nonlinear_budget(clients: int, coefficients: int) -> int:
    """Return how many numbers that are not linear in rows a run may add up: a quarter of what describes the moments of
    all clients but one, each with a symmetric matrix and a vector of its coefficients."""
    return max(clients - 1, 0) * (coefficients + 1) * (coefficients + 2) // 8


def plan_budget(clients: int, shapes: Sequence[Shape]) -> Budget:
    """Return what a federation of so many clients affords, in the order of `estimate.py`, with models on these sets of
    columns, of which the last has all."""
    left, sets = nonlinear_budget(clients, shapes[-1].dim) - RESULT_NUMBERS, len(shapes)

    def afford(numbers: int) -> bool:
        nonlocal left
        if numbers > left:
            return False
        left -= numbers
        return True

    spread = afford(sets * (NOISE_NUMBERS + len(steps.VARIANCES)))
    intercept = spread and shapes[0].intercept and afford(sets * len(steps.VARIANCES))
    evidence = spread and afford(EVIDENCE_NUMBERS)
    budget = Budget(spread, intercept, evidence, False, steps.VARIANCE_STEPS)
    candidates = spread and afford(2 * sets * len(candidates_of(budget)))
    count, coefficients = 0, sum(shape.dim for shape in shapes)
    while spread and count < steps.VARIANCE_STEPS and afford(3 * coefficients):
        count += 1
    return budget._replace(candidates=candidates, variance_steps=count if count >= steps.MIN_VARIANCE_STEPS else 0)


def list_steps(clients: int, shape: Shape, extra: int = 0) -> list[PlannedStep]:
    """Return the steps after the agreement on a schema, where so many spline columns are tried."""
    shapes = [part.shape for part in steps.column_sets(shape, extra)]
    budget, k, p, sets = plan_budget(clients, shapes), shape.family.scores, shapes[-1].columns, len(shapes)
    coefficients = [part.dim for part in shapes]
    is_linear, centers = shape.family.has_noise, coefficients
    if sets > 1 and not budget.candidates:  # one set goes on, at most that of all columns
        budget, coefficients = plan_budget(clients, shapes[1:]), coefficients[1:]
    counted = len(coefficients)
    out = [PlannedStep(steps.SIZES, 1 + steps.SIZE_CLASSES, 1)]
    if shape.numeric:
        out.append(PlannedStep(curves.HISTOGRAM, curves.BINS * len(shape.numeric), 1))
    out.append(PlannedStep(steps.MOMENTS, p * (p + 1) // 2 + (p + 1 if is_linear else k), 1))
    if not is_linear:
        out += [
            PlannedStep(steps.GRADIENT, sum(1 + d for d in centers), steps.MAX_GRADIENTS),
            PlannedStep(steps.HESSIAN, sum(d * (d + 1) // 2 for d in centers), steps.MAX_HESSIANS),
        ]
    ridges = len(steps.GLOBAL_RIDGES) * (1 + (sets - 1) * len(steps.CURVE_RIDGES))
    out.append(PlannedStep(steps.RIDGE, ridges, 1))
    if budget.spread and (is_linear or shape.family.is_dispersed):
        out.append(PlannedStep(steps.NOISE, counted * NOISE_NUMBERS, 1))
    if budget.spread:
        out.append(PlannedStep(steps.SPREAD, counted * (1 + budget.intercept) * len(steps.VARIANCES), 1))
    if budget.variance_steps:
        out.append(PlannedStep(steps.VARIANCE, 3 * sum(coefficients), budget.variance_steps))
    if budget.candidates:
        count = counted * len(candidates_of(budget))
        out += [PlannedStep(steps.CANDIDATES, count, 1), PlannedStep(steps.DIFFERENCES, count, 1)]
    if budget.evidence:
        out += [PlannedStep(step, *size) for step, size in EVIDENCE.items()]
    return [*out, PlannedStep(RESULTS, RESULT_NUMBERS, 1)]


def plan_digest(run: RunFile) -> str:
    """Return a digest of all that decides what is added up; the run file's own digest is signed beside it."""
    constants = [
        steps.VARIANCES.tolist(),
        steps.FACTORS,
        steps.FIXED_VARIANCES,
        steps.MIXTURE_SHARES,
        steps.LOCAL_RIDGES,
        steps.GLOBAL_RIDGES,
        steps.CURVE_RIDGES,
    ]
    modules = (steps, curves, schema_sums, level_sums)
    everything = [*(part for module in modules for part in vars(module).values()), *EVIDENCE, RESULTS]
    declared = sorted(
        [part.name, part.quantum, part.linear, part.times] for part in everything if isinstance(part, Step)
    )
    advice = None if run.advice is None else run.advice.model_dump(mode="json")
    return hashlib.sha256(canonical_bytes([VERSION, PROTOCOL, declared, constants, advice])).hexdigest()[:32]
