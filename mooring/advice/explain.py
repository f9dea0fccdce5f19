"""What to make of an advice: theory beside evidence, who is unlike the rest, what it would take."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import torch

from mooring.advice import why
from mooring.advice.choice import MOST_CLIENTS, Choice, weights_of
from mooring.advice.families import GLOBAL, MOORED, Setting
from mooring.advice.path import penalised
from mooring.advice.shaping import ColumnSets, on_columns
from mooring.advice.survey import Survey, survey
from mooring.core.errors import RequestError
from mooring.data.clients import PARTS, Clients
from mooring.engines.prepare import Job
from mooring.shapes.columns import ShapedColumns

MOST_SURVEYED = 1_000  # clients that the theorems' constants are estimated from


def some_of(clients: Clients) -> Clients:
    """A part of very many clients, evenly taken."""
    if len(clients) <= MOST_SURVEYED:
        return clients
    some = torch.linspace(0, len(clients) - 1, MOST_SURVEYED).long()
    parts = {part: getattr(clients, part).select(some) for part in PARTS}
    return replace(clients, names=tuple(clients.names[i] for i in some.tolist()), **parts)


def theory_of(job: Job) -> Survey | None:
    """What the theorems say; None where they do not apply."""
    try:
        return survey(job.task, some_of(job.clients), job.run.training.weights)
    except RequestError:
        return None


def explained(
    job: Job, frame: pd.DataFrame, choice: Choice, shape: ShapedColumns | None = None
) -> tuple[pd.DataFrame, why.Moored | None]:
    """The clients' table with who is unlike the rest, the rows that training alone would need, what each one brings.

    And the fit behind it, where there is one.
    """
    task, clients, m, fit = job.task, job.clients, len(job.clients), None
    needs, gives = np.full(m, np.nan), np.full(m, np.nan)
    if m <= MOST_CLIENTS and int(clients.train.size.min()) > 0:
        p = weights_of(clients.train, clients.weighting(job.run.training.weights))
        setting = heaviest_moored(choice)
        sets = None if shape is None else ColumnSets(task, shape)
        at = on_columns(task, clients.train, sets, setting.columns)
        mine = [prior for prior in choice.priors if prior.columns == setting.columns]
        fit = why.moored_fit(at.task, at.rows, p, setting, mine)
        if fit is not None:
            unit = clients.target_scale**task.unit_power
            needs = why.rows_to_match(fit, clients.train) * (frame["rows"] / frame["train"]).to_numpy()
            held = on_columns(task, clients.validation, sets, setting.columns).rows
            gives = unit * why.brings(at.task, fit, p, held, setting.ridge * penalised(at.task))
    outlier = why.unlike(choice.priors[0], m) if choice.priors else np.zeros(m, bool)
    return frame.assign(is_outlier=outlier, rows_to_match=needs, contribution=gives), fit


def heaviest_moored(choice: Choice) -> Setting:
    """The setting that explains the models: only where a moor holds them is it known how far they follow whose rows."""
    moored = [setting for setting in choice.mix if setting.family in (GLOBAL, *MOORED)]
    return max(moored, key=choice.mix.__getitem__, default=choice.plan)
