"""The evidence for recommendations: from folds that were stored or are fitted now, with the columns that models use."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mooring.advice.candidates.families import make_offset
from mooring.advice.candidates.shaper import MIN_ROWS_FOR_AUTO, Shaper, make_shaper
from mooring.advice.evaluation.cross_fitting import Evidence, cross_fit
from mooring.advice.evaluation.fold_fits import FoldResult
from mooring.advice.evaluation.loss_sums import ModelTriple
from mooring.advice.evaluation.networks import NetworkCheckpoint, network_evidence, network_folds
from mooring.advice.evaluation.row_access import UsableRows, usable
from mooring.advice.evaluation.setting_choice import Choice
from mooring.core.errors import RequestError
from mooring.core.task import HasProx, with_columns
from mooring.core.types import JsonObject
from mooring.data.clients import PARTS
from mooring.data.formula_columns import INTERCEPT
from mooring.engines.prepare import Job
from mooring.engines.progress import OnProgress
from mooring.partial_pooling.client_prior import Prior, average_kinds, estimate_global_ridge, estimate_priors
from mooring.partial_pooling.lambda_path import ridge_mask
from mooring.runs import checkpoint
from mooring.runs.directory import RunDirectory
from mooring.runs.sections import AdviceSection
from mooring.shapes.boosting import MISSING_XGBOOST, has_boosting
from mooring.shapes.column_sets import USED, ColumnSets, count_scores, prune_columns, used_columns
from mooring.shapes.columns import BOOSTED, LINEAR
from mooring.tasks.extra_columns import can_shape
from mooring.tasks.proximal import is_dense


def advice_options(job: Job) -> AdviceSection:
    return job.run.advice or AdviceSection()


def gather_evidence(job: Job, directory: RunDirectory | None, tell: OnProgress) -> tuple[Job, Choice, Evidence]:
    """The job with the columns that the models use, the choice and the evidence. Test rows take no part."""
    task, clients, training, folds = job.task, job.clients, job.run.training, advice_options(job).folds
    stored = checkpoint.read_folds(directory.path) if directory is not None else {}

    def store(number: int, tensors: dict[str, Tensor], known: JsonObject) -> None:
        if directory is not None:
            checkpoint.save_fold(directory.path, number, tensors, known)

    if not isinstance(task, HasProx):
        parts = {k: NetworkCheckpoint(*part) for k, part in stored.items()}
        count = network_folds(job, folds)
        given = advice_options(job).settings or {}
        return job, *network_evidence(job, count, given, tell, parts, lambda k, part: store(k, *part))

    def save(number: int, fold: FoldResult) -> None:
        store(number, fold._asdict(), {})

    done = {k: FoldResult(**tensors) for k, (tensors, _) in stored.items()}
    rows = usable(clients)
    shaper, priors = choose_shaper(job, rows)
    split = rows.groups, rows.times, shaper, varying_coefficients(job), priors
    weights, seed = clients.weighting(training.weights), training.seed
    choice, evidence = cross_fit(task, rows.rows, clients.keys, weights, seed, folds, done, save, tell, *split)
    return apply_shape(job, choice, evidence)


def varying_coefficients(job: Job) -> Tensor | None:
    """[d]: whether a coefficient may differ between clients by the run's formula; None where all may."""
    schema = job.clients.schema
    if schema is None or schema.formula is None or schema.formula.all_vary:
        return None
    names = schema.formula.varying
    slopes = torch.tensor([name in names for name in schema.features])
    is_intercept = ridge_mask(job.task) == 0
    scores = max(int(is_intercept.sum()), 1)
    varying = slopes[:, None].expand(-1, scores).flatten()
    return torch.cat([varying, torch.full((job.task.dim - len(varying),), INTERCEPT in names)])


def choose_shaper(job: Job, usable: UsableRows) -> tuple[Shaper | None, list[Prior]]:
    """How extra columns are made, if the run asks for any that serve its task, and the priors of linear columns."""
    wanted, clients = advice_options(job).shape, job.clients
    if clients.schema is not None and clients.schema.formula is not None:
        if wanted not in (LINEAR, "auto"):
            raise RequestError(f"--shape {wanted} does not apply: the formula names the columns.")
        return None, []
    if wanted == LINEAR or not can_shape(job.task) or clients.schema is None:
        if wanted not in (LINEAR, "auto"):
            raise RequestError(f"--shape {wanted} needs a table and a task that is linear in its columns.")
        return None, []
    rows = usable.rows.compact()
    total = int(rows.size.sum())
    if wanted == "auto" and (total < MIN_ROWS_FOR_AUTO * count_scores(job.task) or not is_dense(job.task)):
        return None, []
    if wanted == BOOSTED and not has_boosting():
        raise RequestError(MISSING_XGBOOST)
    kinds = estimate_priors(job.task, rows)
    priors = average_kinds(kinds)
    ridge = estimate_global_ridge(job.task, priors[0], total) if priors else 0.0
    offset = make_offset(job.task, priors[0], ridge) if priors else None
    split = job.run.training.seed, usable.groups, usable.times is not None
    return make_shaper(job.task, rows, clients.keys, wanted, clients.schema.numeric_places, offset, *split), kinds


def apply_shape(job: Job, choice: Choice, evidence: Evidence) -> tuple[Job, Choice, Evidence]:
    """The job, the models and the schema with the extra columns that the choice uses, and no others."""
    if evidence.shape is None:
        return job, choice, evidence
    used = {s.columns for s in (*choice.mix, choice.local, choice.global_, *choice.own.values())}
    shape = prune_columns(evidence.shape, used)
    sets = ColumnSets(with_columns(job.task, evidence.shape.width), evidence.shape)
    sets.columns[USED] = used_columns(evidence.shape, shape)
    models = ModelTriple(*(sets.extract(USED, part) for part in evidence.models))
    evidence = evidence._replace(models=models, shape=shape)
    if shape is None:
        return job, choice, evidence
    clients = job.clients
    parts = {part: getattr(clients, part).map_columns(shape) for part in PARTS}
    schema = clients.schema.model_copy(update={"shape": shape.as_json()})
    clients = replace(clients, **parts, features=schema.features, schema=schema)  # type: ignore[arg-type]
    return replace(job, clients=clients, task=sets.task_on(USED)), choice, evidence
