"""What explains the recommendations: theory, outliers, rows that local models would need, contributions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import torch

from mooring.advice.candidates.column_sets import ColumnSets, on_columns
from mooring.advice.candidates.families import GLOBAL, PULLED_FAMILIES, Setting
from mooring.advice.candidates.lambda_path import ridge_mask
from mooring.advice.evaluation.setting_choice import MAX_CHOOSING_CLIENTS, Choice, client_weights
from mooring.advice.reporting import contributions
from mooring.advice.reporting.theory_report import TheoryReport, report_theory
from mooring.core.errors import RequestError
from mooring.data.clients import PARTS, Clients
from mooring.engines.prepare import Job
from mooring.shapes.columns import ShapedColumns

MAX_THEORY_CLIENTS = 1_000  # clients that the theorems' constants are estimated from


def subsample_clients(clients: Clients) -> Clients:
    """A part of very many clients, evenly taken."""
    if len(clients) <= MAX_THEORY_CLIENTS:
        return clients
    some = torch.linspace(0, len(clients) - 1, MAX_THEORY_CLIENTS).long()
    parts = {part: getattr(clients, part).select(some) for part in PARTS}
    return replace(clients, names=tuple(clients.names[i] for i in some.tolist()), **parts)


def find_theory(job: Job) -> TheoryReport | None:
    """The theory report; None where the theorems do not apply."""
    try:
        return report_theory(job.task, subsample_clients(job.clients), job.run.training.weights)
    except RequestError:
        return None


def add_explanations(
    job: Job, frame: pd.DataFrame, choice: Choice, shape: ShapedColumns | None = None
) -> tuple[pd.DataFrame, contributions.PulledFit | None]:
    """The clients' table with outliers, the rows that local models would need and contributions; and the fit that
    these follow from, where there is one.
    """
    task, clients, m, fit = job.task, job.clients, len(job.clients), None
    needs, contribution = np.full(m, np.nan), np.full(m, np.nan)
    if m <= MAX_CHOOSING_CLIENTS and int(clients.train.size.min()) > 0:
        p = client_weights(clients.train, clients.weighting(job.run.training.weights))
        setting = heaviest_pulled_setting(choice)
        sets = None if shape is None else ColumnSets(task, shape)
        at = on_columns(task, clients.train, sets, setting.columns)
        own_priors = [prior for prior in choice.priors if prior.columns == setting.columns]
        fit = contributions.fit_with_curvature(at.task, at.rows, p, setting, own_priors)
        if fit is not None:
            unit = clients.target_scale**task.unit_power
            needs = contributions.rows_to_match(fit, clients.train) * (frame["rows"] / frame["train"]).to_numpy()
            held = on_columns(task, clients.validation, sets, setting.columns).rows
            contribution = unit * contributions.estimate_contributions(
                at.task, fit, p, held, setting.ridge * ridge_mask(at.task)
            )
    outlier = contributions.find_outliers(choice.priors[0], m) if choice.priors else np.zeros(m, bool)
    others = contributions.mean_loss_of_others(frame)
    share = np.divide(contribution, others, out=np.full(m, np.nan), where=others > 0)
    return frame.assign(
        is_outlier=outlier,
        rows_to_match=needs,
        others_held_out=np.where(np.isnan(contribution), np.nan, others),
        contribution=contribution,
        contribution_pct=100 * share,
    ), fit


def heaviest_pulled_setting(choice: Choice) -> Setting:
    """The setting that explains the models: only of pulled models it is known how far they follow which rows."""
    pulled = [setting for setting in choice.mix if setting.family in (GLOBAL, *PULLED_FAMILIES)]
    return max(pulled, key=choice.mix.__getitem__, default=choice.plan)
