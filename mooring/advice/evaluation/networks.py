"""Advice for networks: no exact path, so candidates are trained, each from where the one before ended.

    global   FedAvg
    tuned    FedAvg, then local steps of each client: `value` times as many as a round has
    lambda   one-stage FedProx from FedAvg's model on, a few rounds per lambda, from the largest to the smallest
    local    Local

Validation rows choose. The plan, the global and the local models are then trained again, for as many rounds as
validation found best, without each fold of the other rows (where training is slow, without one fold) and evaluated on
it. The models that clients use are trained on all rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mooring.advice.candidates.families import GLOBAL, LAMBDA, LOCAL, TUNED, Setting, SettingModels
from mooring.advice.evaluation.cross_fitting import Evidence, assemble_triple
from mooring.advice.evaluation.held_out_losses import LossesByRow
from mooring.advice.evaluation.loss_sums import LossSums, ModelTriple, add_sums, sum_losses
from mooring.advice.evaluation.setting_choice import Choice, choose_settings
from mooring.advice.folds import (
    DEFAULT_FOLDS,
    assign_folds,
    concatenate_rows,
    iterate_folds,
    row_clients,
    row_groups,
    row_losses,
    usable_rows,
)
from mooring.algorithms.base import build
from mooring.core.cohort import Round, Rows
from mooring.core.errors import RequestError
from mooring.data.clients import PARTS, Clients
from mooring.engines.loop import resolve
from mooring.engines.prepare import Job, make_simulator
from mooring.engines.progress import OnProgress
from mooring.engines.simulator import Simulator
from mooring.engines.training import train
from mooring.engines.training_state import TrainingState

LAMBDA_FACTORS = (10.0, 3.0, 1.0, 0.3, 0.1)  # lambdas, as multiples of what "auto" proposes
FINETUNE_ROUNDS = (1, 5, 20)  # rounds' worth of local steps
LAMBDA_ROUND_DIVISOR = 10  # a lambda gets so many times fewer rounds than FedAvg, since it begins where another ended
MIN_LAMBDA_ROUNDS = 3
MAX_CHEAP_TRAINING_OPERATIONS = 5e8  # parameters times rows times rounds: above it one fold is trained


class NetworkCheckpoint(NamedTuple):
    """What an interrupted run need not compute again."""

    tensors: dict[str, Tensor]
    known: dict[str, Any]


@dataclass
class TrainingSchedule:
    """What the first training determined and the second one repeats."""

    rounds: dict[str, int] = field(default_factory=dict)  # of FedAvg and Local
    lams: list[float] = field(default_factory=list)


def network_folds(job: Job, asked: int | None) -> int:
    """How many folds are held out: those asked for, else FOLDS where training is cheap, and one of them where it is
    not."""
    rows = sum(int(getattr(job.clients, part).size.sum()) for part in PARTS)
    cheap = job.task.dim * float(rows) * job.run.training.rounds <= MAX_CHEAP_TRAINING_OPERATIONS
    return asked or (DEFAULT_FOLDS if cheap else 1)


def network_evidence(
    job: Job,
    folds: int,
    tell: OnProgress,
    done: Mapping[int, NetworkCheckpoint] | None = None,
    save: Callable[[int, NetworkCheckpoint], None] | None = None,
) -> tuple[Choice, Evidence]:
    """The choice, all clients' models trained on all usable rows, and what held-out rows show.

    The plan is chosen by training on the clients' training rows and evaluating on their validation rows. The three
    models are then trained without each fold of the other rows and evaluated on it; with `folds` = 1 on the first of
    FOLDS only. `done` and `save` are those of `cross_fit`: number 0 is the choice.
    """
    checkpoints, save = dict(done or {}), save or (lambda number, what: None)
    if 0 not in checkpoints:
        checkpoints[0] = evaluate_candidates(job, tell)
        save(0, checkpoints[0])
    choice, work = choose_from_checkpoint(job, checkpoints[0])
    rows = usable_rows(job.clients)
    models = train_triple(job, rows, choice, work, tell, "all rows")
    parts, (others, units) = [], rows_without_validation(job.clients)
    splits = iterate_folds(others, job.clients.keys, job.run.training.seed, max(folds, DEFAULT_FOLDS), units)
    for k, part in enumerate(splits, 1):
        if k > 1 and folds == 1:
            break
        if k not in checkpoints:
            train = concatenate_rows(part.train, job.clients.validation)
            fold_models = train_triple(job, train, choice, work, tell, f"fold {k} of {folds}")
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


def evaluate_candidates(job: Job, tell: OnProgress) -> NetworkCheckpoint:
    """Every candidate's losses on validation rows, and what is needed to train it again."""
    clients = job.clients
    if int(clients.validation.size.sum()) == 0:
        raise RequestError(f"{clients.title}: there are no validation rows to choose a plan by.")
    held, work, settings, losses = clients.validation.compact(), TrainingSchedule(), [], []
    for models in iterate_candidates(job, work, tell):
        settings.append(models.setting)
        losses.append(row_losses(job.task, models.v, held))
    known = {"settings": [list(setting) for setting in settings], "rounds": work.rounds, "lams": work.lams}
    return NetworkCheckpoint({"loss": torch.stack(losses).float()}, known)


def choose_from_checkpoint(job: Job, checkpoint: NetworkCheckpoint) -> tuple[Choice, TrainingSchedule]:
    loss, held = checkpoint.tensors["loss"], job.clients.validation.compact()
    settings = [Setting(*given) for given in checkpoint.known["settings"]]
    fold = assign_folds(held, job.clients.keys, DEFAULT_FOLDS, job.run.training.seed)
    best = settings[int(loss.mean(1).argmin())]
    choice = choose_settings(job.task, settings, LossesByRow(loss, fold, row_clients(held), len(held)), [best])
    return choice, TrainingSchedule(checkpoint.known["rounds"], checkpoint.known["lams"])


def train_triple(
    job: Job, rows: Rows, choice: Choice, work: TrainingSchedule, tell: OnProgress, where: str
) -> ModelTriple:
    """The three models of a choice, trained on these rows for as many rounds as its validation found best."""
    wanted = {choice.plan, choice.local, choice.global_, *choice.own.values()}
    training_job = replace_training(replace_rows(job, rows), checkpoint="last", evaluate_every=job.run.training.rounds)
    candidates = iterate_candidates(training_job, work, lambda what, *done: tell(f"{what}, {where}", *done), wanted)
    return assemble_triple(choice, {models.setting: models for models in candidates if models.setting in wanted})


def replace_rows(job: Job, rows: Rows) -> Job:
    """The same job with these rows to train on, and none to validate by."""
    none = torch.zeros(len(rows), dtype=torch.long)
    empty = Rows(rows.x[:0], rows.y[:0], none, none)
    return Job(job.run, replace(job.clients, train=rows, validation=empty, units=None), job.task)


def replace_training(job: Job, **changes: Any) -> Job:
    training = job.run.training.model_copy(update=changes)
    return Job(job.run.model_copy(update={"training": training}), job.clients, job.task)


def iterate_candidates(
    job: Job, work: TrainingSchedule, tell: OnProgress, wanted: set[Setting] | None = None
) -> Iterator[SettingModels]:
    """Every setting's models; with `wanted`, only those, what they begin from, and FedAvg's.

    An empty `work` is filled in; a filled one is repeated.
    """
    w = train_baseline(job, "fedavg", work, tell)[0]
    yield SettingModels(Setting(GLOBAL, 0.0), w, w.expand(len(job.clients), -1))
    for times in FINETUNE_ROUNDS:
        setting = Setting(TUNED, float(times))
        if wanted is None or setting in wanted:
            yield SettingModels(setting, w, finetune_locally(job, w, times))
    yield from train_lambda_path(job, w, work, tell, wanted)
    if wanted is None or any(setting.family == LOCAL for setting in wanted):
        yield SettingModels(Setting(LOCAL, 0.0), w, train_baseline(job, "local", work, tell)[1])


def train_baseline(job: Job, name: str, work: TrainingSchedule, tell: OnProgress) -> tuple[Tensor, Tensor]:
    """The global model and all clients' models, of the best round or after as many rounds as `work` has."""
    job = replace_training(job, rounds=work.rounds.get(name, job.run.training.rounds))
    ready, exchange, server = resolve_for_job(build(name, {}), job)
    result = train(job, ready, exchange, TrainingState(server), None, tell)
    work.rounds.setdefault(name, max(result.outcome.best.t, 1))
    return result.common, result.models


def finetune_locally(job: Job, w: Tensor, times: int) -> Tensor:
    """[m, d]: w after each client's own local steps."""
    plain: Any = build("fedavg_finetune", {})
    _, exchange, server = resolve_for_job(replace(plain, tune_steps=times * plain.steps), job)
    m = len(job.clients)
    return exchange.models(server._replace(w=w), Round(1, 1, m, m, 1.0, job.run.training.seed))


def resolve_for_job(algorithm: Any, job: Job) -> tuple[Any, Simulator, Any]:
    """The algorithm in numbers, the job's clients ready to be asked, and the server's first state."""
    exchange = make_simulator(job)
    ready, server = resolve(algorithm, job.task, exchange, job.run.training.seed)
    return ready, exchange, server


def train_lambda_path(
    job: Job, w: Tensor, work: TrainingSchedule, tell: OnProgress, wanted: set[Setting] | None = None
) -> Iterator[SettingModels]:
    """The path of networks: each lambda goes on from the models of the tauter one, up to the last that is wanted."""
    slackest = min((s.value for s in wanted or () if s.family == LAMBDA), default=0.0 if wanted is None else math.inf)
    if not work.lams:
        auto = resolve_for_job(build("fedprox_personal", {}), job)[0].lam
        work.lams = [factor * auto for factor in LAMBDA_FACTORS]
    job = replace_training(
        job, rounds=max(MIN_LAMBDA_ROUNDS, work.rounds["fedavg"] // LAMBDA_ROUND_DIVISOR), checkpoint="last"
    )
    clients = torch.arange(len(job.clients))
    v = w.expand(len(clients), -1)
    for lam in (lam for lam in work.lams if lam >= slackest):
        ready, exchange, server = resolve_for_job(build("fedprox_personal", {"lam": lam}), job)
        exchange.states.store(clients, exchange.states.take(clients)._replace(v=v), 1)
        result = train(job, ready, exchange, TrainingState(server._replace(w=w)), None, tell)
        w, v = result.common, result.models
        yield SettingModels(Setting(LAMBDA, lam), w, v)
