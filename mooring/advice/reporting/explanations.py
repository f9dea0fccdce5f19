"""What explains the recommendations: theory, outliers, rows that local models would need, contributions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from torch import Tensor

from mooring.advice.candidates.families import GLOBAL, PULLED_FAMILIES, Setting
from mooring.advice.evaluation.setting_choice import MAX_CHOOSING_CLIENTS, Choice, client_weights
from mooring.advice.reporting import contributions
from mooring.advice.reporting.sentences import prior_of_plan, varies_within
from mooring.advice.reporting.tables import loss_scale
from mooring.core.task import with_columns
from mooring.engines.prepare import Job
from mooring.partial_pooling.lambda_path import ridge_mask
from mooring.shapes.column_sets import ColumnSets, on_columns
from mooring.shapes.columns import ShapedColumns


class Explanation(NamedTuple):
    """What explains a choice, from the clients' rows."""

    fit: contributions.PulledFit | None  # with the heaviest pulled setting
    contribution: np.ndarray  # [m], nan without a fit
    varies: Tensor | None  # [features of the prior's columns], whether a column varies within a client


def explain_choice(job: Job, choice: Choice, shape: ShapedColumns | None) -> Explanation:
    """The pulled fit of the training rows, contributions on the validation rows, and which columns vary."""
    task, train, validation = job.task, job.clients.train, job.clients.validation
    if shape is not None and train.x.shape[-1] != shape.width:  # the job has linear columns yet
        task, train, validation = (
            with_columns(task, shape.width),
            train.map_columns(shape),
            validation.map_columns(shape),
        )
    sets = None if shape is None else ColumnSets(task, shape)

    def fit() -> tuple[contributions.PulledFit | None, np.ndarray]:
        nothing = np.full(len(train), np.nan)
        if len(train) > MAX_CHOOSING_CLIENTS or int(train.size.min()) == 0:
            return None, nothing
        p = client_weights(train, job.clients.weighting(job.run.training.weights))
        setting = heaviest_pulled_setting(choice)
        at = on_columns(task, train, sets, setting.columns)
        own_priors = [prior for prior in choice.priors if prior.columns == setting.columns]
        fit = contributions.fit_with_curvature(at.task, at.rows, p, setting, own_priors)
        if fit is None:
            return None, nothing
        if int(validation.size.sum()) == 0:
            return fit, nothing
        held = on_columns(task, validation, sets, setting.columns).rows
        ridge = setting.ridge * ridge_mask(at.task)
        return fit, loss_scale(job) * contributions.estimate_contributions(at.task, fit, p, held, ridge)

    def find_varying() -> Tensor | None:
        prior = prior_of_plan(choice)
        return None if prior is None else varies_within(None, on_columns(task, train, sets, prior.columns).rows).any(0)

    steps: list[Callable[[], Any]] = [fit, find_varying]
    ((pulled, contribution),), (varies,) = train.map_independent(lambda step: [step()], steps)
    return Explanation(pulled, contribution, varies)


def add_explanations(job: Job, frame: pd.DataFrame, choice: Choice, explanation: Explanation) -> pd.DataFrame:
    """The clients' table with outliers, the rows that local models would need and contributions."""
    m, fit, contribution = len(job.clients), explanation.fit, explanation.contribution
    needs = np.full(m, np.nan)
    if fit is not None:
        needs = contributions.rows_to_match(fit, job.clients.train) * (frame["rows"] / frame["train"]).to_numpy()
    outlier = contributions.find_outliers(choice.priors[0], m) if choice.priors else np.zeros(m, bool)
    others = contributions.mean_loss_of_others(frame)
    share = np.divide(contribution, others, out=np.full(m, np.nan), where=others > 0)
    return frame.assign(
        is_outlier=outlier,
        rows_to_match=needs,
        others_held_out=np.where(np.isnan(contribution), np.nan, others),
        contribution=contribution,
        contribution_pct=100 * share,
    )


def heaviest_pulled_setting(choice: Choice) -> Setting:
    """The setting that explains the models: only of pulled models it is known how far they follow which rows."""
    pulled = [setting for setting in choice.mix if setting.family in (GLOBAL, *PULLED_FAMILIES)]
    return max(pulled, key=choice.mix.__getitem__, default=choice.plan)
