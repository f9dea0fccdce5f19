"""The plan of a recommendation across machines in words, for the operators who read it before they join."""

from __future__ import annotations

import textwrap

from mooring.advice.federated.plan import list_steps, nonlinear_budget, plan_digest
from mooring.advice.federated.program import shape_of
from mooring.data import level_sums, schema_sums
from mooring.runs.runfile import RunFile
from mooring.shapes.columns import LINEAR
from mooring.tasks.linear import Linear
from mooring.tasks.linear_losses import Poisson
from mooring.tasks.logistic import Logistic

FEW_CLIENTS = 5  # below which all but one of them are few

SCHEMA_NUMBERS = {  # of the agreement on a schema, at most: in words, since they depend on the kinds of columns
    schema_sums.SURVEY: "243 per column",
    schema_sums.RANGES: "48 per client and column; classes 12,288",
    schema_sums.CENTERS: "213 per numeric column; 65 per class",
    schema_sums.DISTANCES: "640 per numeric column",
    schema_sums.LEVELS: "12,288 per category",
    level_sums.SEPARATION: "4,096 per category (rare)",
    schema_sums.NAMES: "65 per common level",
    schema_sums.TALLY: "2 per numeric column",
    schema_sums.SPREAD: "1 per encoded column",
}


def describe_plan(run: RunFile, columns: int) -> list[str]:
    """Return the plan of a run file in lines of at most 80 characters, for so many encoded columns.

    A client's operator reads it before joining; the same file gives the same digest, which a policy can list.
    """
    options, kind = run.federation, run.data.target_type or "regression"
    named = None if options is None else options.clients
    clients = len(named) if isinstance(named, list) else named or 0
    task = {"binary": Logistic(columns), "classes": Logistic(columns, classes=3), "count": Poisson(columns)}
    shape = shape_of(task.get(kind, Linear(columns)))
    planned = list_steps(clients, shape)
    budget = nonlinear_budget(clients, shape.dim)
    out = [
        f"Plan {plan_digest(run)}",
        f"{clients} clients, {columns} encoded columns (--columns), target: {kind}.",
        "",
        "Every client sends these sums under masks; the server learns totals only.",
        "",
        f"{'sum':<22}{'numbers':>9}{'times':>7}  {'counts':<8}what for",
    ]
    for step, numbers in SCHEMA_NUMBERS.items():
        wrapped = textwrap.wrap(numbers, 32)
        out.append(f"{step.name:<22}{'':>9}{step.times:>7}  {'':<8}{wrapped[0]}")
        out += [f"{'':48}{line}" for line in wrapped[1:]]
    for part in planned:
        counted = "" if part.step.linear else f"{part.counted:,}"
        purpose = textwrap.wrap(part.step.purpose, 32)
        out.append(f"{part.step.name:<22}{part.numbers:>9,}{part.times:>7}  {counted:<8}{purpose[0]}")
        out += [f"{'':48}{line}" for line in purpose[1:]]
    if run.advice is None or run.advice.shape != LINEAR:
        out += [
            "Where the clients have enough rows, a histogram of 32 bins of every numeric",
            "column is added up as well, and sums of the models include spline columns.",
        ]
    total = sum(part.counted for part in planned)
    out += [
        "",
        f"Numbers that are not linear in rows: {total:,} of {budget:,} that the budget allows.",
        "Declared in the clear, where a client's policy shares results: its rows, three",
        "losses to two digits, and its recommendation.",
    ]
    if clients < FEW_CLIENTS:
        out.append(f"With {clients} clients, {clients - 1} of them together can open what the last one sent.")
    return out
