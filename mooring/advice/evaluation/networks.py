"""Advice for networks: no exact path, so candidates are trained (`network_candidates.py`).

Validation rows choose, by loss or by accuracy. The plan, the global and the local models are then trained again without
each fold of the other rows (where training is slow, without one fold) and evaluated on it. The models that clients use
are trained on all rows. Each of these trainings takes as many rounds as validation found best, scaled to its rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import NamedTuple

import torch
from torch import Tensor

from mooring.advice.candidates.families import Setting
from mooring.advice.candidates.network_candidates import (
    NetworkPlan,
    Progress,
    choose_local_training,
    iterate_candidates,
    list_settings,
    replace_training,
    train_settings,
)
from mooring.advice.evaluation.cross_fitting import Evidence, assemble_triple
from mooring.advice.evaluation.held_out_losses import HeldOutLosses
from mooring.advice.evaluation.loss_sums import LossSums, ModelTriple, add_sums, sum_losses
from mooring.advice.evaluation.setting_choice import Choice, choose_settings
from mooring.core.cohort import Rows
from mooring.core.errors import RequestError
from mooring.core.types import JsonObject, NamedValues
from mooring.data.clients import PARTS, Clients
from mooring.data.folds import (
    DEFAULT_FOLDS,
    assign_folds,
    concatenate_rows,
    iterate_folds,
    row_clients,
    row_groups,
    row_losses,
    usable_rows,
)
from mooring.engines.metrics import CLASS_TARGETS, row_errors
from mooring.engines.prepare import Job
from mooring.engines.progress import OnProgress

MAX_CHEAP_TRAINING_OPERATIONS = 5e8  # parameters times rows times rounds: above it one fold is trained
SELECTION_MEASURES = ("loss", "accuracy")
LOSS_SHARE_AMONG_ERRORS = 1e-3  # of a row's loss, added to its error: candidates of equal accuracy differ by their loss
TRAININGS_PER_TRIPLE = 3  # plan, global, local: for the estimate of the time left


class NetworkCheckpoint(NamedTuple):
    """What an interrupted run need not compute again."""

    tensors: dict[str, Tensor]
    known: JsonObject


def network_folds(job: Job, asked: int | None) -> int:
    """How many folds are held out: those asked for, else FOLDS where training is cheap, and one of them where it is
    not."""
    rows = sum(int(getattr(job.clients, part).size.sum()) for part in PARTS)
    cheap = job.task.dim * float(rows) * job.run.training.rounds <= MAX_CHEAP_TRAINING_OPERATIONS
    return asked or (DEFAULT_FOLDS if cheap else 1)


def network_evidence(
    job: Job,
    folds: int,
    given: NamedValues,
    tell: OnProgress,
    done: Mapping[int, NetworkCheckpoint] | None = None,
    save: Callable[[int, NetworkCheckpoint], None] | None = None,
) -> tuple[Choice, Evidence]:
    """The choice, all clients' models trained on all usable rows, and what held-out rows show.

    `given` are fields of local training. The plan is chosen by training on the clients' training rows and evaluating on
    their validation rows. The three models are then trained without each fold of the other rows and evaluated on it;
    with `folds` = 1 on the first of FOLDS only. `done` and `save` are those of `cross_fit`: number 0 is the choice.
    """
    checkpoints, save = dict(done or {}), save or (lambda number, what: None)
    trainings = (0 if 0 in checkpoints else 4 + len(list_settings(0.0))) + TRAININGS_PER_TRIPLE * (1 + folds)
    progress = Progress(tell, trainings, time.perf_counter)
    if 0 not in checkpoints:
        checkpoints[0] = evaluate_candidates(job, given, progress)
        save(0, checkpoints[0])
    choice, plan = choose_from_checkpoint(job, checkpoints[0])
    rows = usable_rows(job.clients)
    models = train_triple(job, rows, choice, plan, progress)
    parts, (others, units) = [], rows_without_validation(job.clients)
    splits = iterate_folds(others, job.clients.keys, job.run.training.seed, max(folds, DEFAULT_FOLDS), units)
    for k, part in enumerate(splits, 1):
        if k > 1 and folds == 1:
            break
        if k not in checkpoints:
            train = concatenate_rows(part.train, job.clients.validation)
            fold_models = train_triple(job, train, choice, plan, progress)
            checkpoints[k] = NetworkCheckpoint(sum_losses(job.task, part.held, fold_models)._asdict(), {})
            save(k, checkpoints[k])
        parts.append(LossSums(**checkpoints[k].tensors))
    held = add_sums(parts)
    # On its own training rows a network agrees with any other that fits them: divergences are those of held-out rows.
    scale = (rows.size.double() / held.rows.clamp(min=1))[:, None]
    own = LossSums(rows.size.double(), *(part * (scale if part.ndim == 2 else scale[:, 0]) for part in held[1:]))
    return choice, Evidence(models, held, own)


def rows_without_validation(clients: Clients) -> tuple[Rows, Tensor | None]:
    """The rows that a plan may be evaluated on, and their units: validation rows chose it, and would flatter it."""
    none = torch.zeros(len(clients), dtype=torch.long)
    left = replace(clients, validation=Rows(clients.train.x[:0], clients.train.y[:0], none, none))
    if clients.units is not None:
        left = replace(left, units={**clients.units, "validation": torch.empty(0, dtype=torch.long)})
    return usable_rows(left), row_groups(left)


def evaluate_candidates(job: Job, given: NamedValues, progress: Progress) -> NetworkCheckpoint:
    """Every candidate's losses on validation rows, and what is needed to train it again."""
    clients = job.clients
    if int(clients.validation.size.sum()) == 0:
        raise RequestError(f"{clients.title}: there are no validation rows to choose a plan by.")
    held, settings, losses, errors = clients.validation.compact(), [], [], []
    plan, first = choose_local_training(job, given, progress, {})
    for models in iterate_candidates(job, given, plan, first, progress):
        settings.append(models.setting)
        losses.append(row_losses(job.task, models.v, held))
        if selects_by_accuracy(job):
            errors.append(row_errors(job.task, models.v, held))
    known = {"settings": [list(setting) for setting in settings], "plan": asdict(plan)}
    tensors = {"loss": torch.stack(losses).float()}
    return NetworkCheckpoint(tensors | ({"error": torch.stack(errors).float()} if errors else {}), known)


def selects_by_accuracy(job: Job) -> bool:
    """Whether the plan is chosen by accuracy; refuses what is neither that nor the loss."""
    by = job.run.training.select_by
    has_classes = job.clients.kind in CLASS_TARGETS and job.task.predicts_probabilities
    if by not in SELECTION_MEASURES or (by == "accuracy" and not has_classes):
        raise RequestError(f"select_by = {by!r} does not apply: advise selects by loss, or by the accuracy of classes.")
    return by == "accuracy"


def choose_from_checkpoint(job: Job, checkpoint: NetworkCheckpoint) -> tuple[Choice, NetworkPlan]:
    """The plan among the candidates, and how they are trained."""
    loss, held = checkpoint.tensors["loss"], job.clients.validation.compact()
    settings = [Setting(*given) for given in checkpoint.known["settings"]]
    fold = assign_folds(held, job.clients.keys, DEFAULT_FOLDS, job.run.training.seed)
    score = loss
    if "error" in checkpoint.tensors:
        score = checkpoint.tensors["error"] + LOSS_SHARE_AMONG_ERRORS * loss
    best = settings[int(score.mean(1).argmin())]
    owner = row_clients(held)
    choice = choose_settings(job.task, settings, HeldOutLosses(score, fold, owner, len(held)), [best])
    plan = NetworkPlan(**checkpoint.known["plan"])
    if score is not loss:  # what is reported are losses
        mean = loss.double().mean(1).numpy()
        chosen = mean[choice.table["plan"].to_numpy()].item()
        sums = HeldOutLosses(loss, fold, owner, len(held))
        choice = choice._replace(
            table=choice.table.assign(loss=mean, worse=mean - chosen),
            losses=sums.sums.sum(0) / sums.count.sum(0)[:, None],
        )
    return choice._replace(local_training=plan.work), plan


def train_triple(job: Job, rows: Rows, choice: Choice, plan: NetworkPlan, progress: Progress) -> ModelTriple:
    """The three models of a choice, trained on these rows for as many rounds as validation found best."""
    wanted = {choice.plan, choice.local, choice.global_, *choice.own.values()}
    rounds = job.run.training.rounds
    training_job = replace_training(replace_rows(job, rows), checkpoint="last", evaluate_every=rounds, patience=None)
    models = {one.setting: one for one in train_settings(training_job, plan, wanted, progress)}
    return assemble_triple(choice, models)


def replace_rows(job: Job, rows: Rows) -> Job:
    """The same job with these rows to train on, and none to validate by."""
    none = torch.zeros(len(rows), dtype=torch.long)
    empty = Rows(rows.x[:0], rows.y[:0], none, none)
    return Job(job.run, replace(job.clients, train=rows, validation=empty, units=None), job.task)
