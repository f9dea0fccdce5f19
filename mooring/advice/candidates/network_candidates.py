"""Candidates for networks: which algorithms are trained, with which local training, and for how long.

    global   FedAvg, with the server's optimizer of the chosen local training (value 0); FedProx (value: lam)
    tuned    FedAvg, then local steps of each client: `value` times as many as a round has
    lambda   one-stage FedProx from FedAvg's model on, a few rounds per lambda, from the largest to the smallest
    ditto    Ditto                                               value: lam
    mixture  APFL with a fixed mixture                           value: alpha
    fedper   a personal head on a shared body                    fedrod: a personal head beside a generic one
    local    Local

Step size, epochs, batch and optimizer are those that the user gives. What is not given is chosen first: FedAvg is
trained with each variant of a small grid, in one sweep, and the variant of the lowest validation loss serves all
candidates. Local models are trained with it and with the defaults, and the lower validation loss decides: what suits
FedAvg may not suit them. A run whose best loss so far is worse than the median of the others at the same round is
stopped early, once a quarter of its rounds is over (the median rule of Golovin et al., Google Vizier, KDD 2017,
Section 3.2.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from mooring.advice.candidates.families import (
    DITTO,
    FEDPER,
    FEDROD,
    GLOBAL,
    LAMBDA,
    LOCAL,
    MIXTURE,
    TUNED,
    Setting,
    SettingModels,
)
from mooring.algorithms.base import AnyAlgorithm, build
from mooring.algorithms.hyperparameters import DEFAULT_BATCH_ROWS
from mooring.algorithms.server_optimizers import SERVER_FIELDS
from mooring.core.cohort import Round, StateTree
from mooring.core.errors import RequestError
from mooring.core.local_work import LocalWork
from mooring.core.types import JsonObject, NamedValues
from mooring.engines.callbacks import Callback
from mooring.engines.fit_result import TrainedModels
from mooring.engines.loop import TrainingSteps, resolve
from mooring.engines.prepare import Job, make_simulator
from mooring.engines.progress import OnProgress
from mooring.engines.simulator import Simulator, StatisticsCache
from mooring.engines.sweep import run_together
from mooring.engines.training import train, train_steps
from mooring.engines.training_state import Diverged, Evaluation, TrainingState

LAMBDA_FACTORS = (10.0, 3.0, 1.0, 0.3, 0.1)  # lambdas, as multiples of what "auto" proposes
DITTO_FACTORS = (1.0, 0.1)
FINETUNE_ROUNDS = (1, 5, 20)  # rounds' worth of local steps
MIXTURE_ALPHA = 0.5
LAMBDA_ROUND_DIVISOR = 10  # a lambda gets so many times fewer rounds than FedAvg, since it begins where another ended
MIN_LAMBDA_ROUNDS = 3
SGD_ETA_FACTORS = (0.5, 1.0, 2.0, 4.0, 8.0)  # of the step size that "auto" proposes
MOMENTUM_ETA_FACTORS = (0.25, 1.0)  # with the server's momentum
ADAPTIVE_ETAS = (1e-3, 3e-3)  # of adam and adamw
GRID_EPOCHS = (1, 5)
EPOCH_STEPS_FACTORS = (1.5, 5.0)  # epochs are tried that take so many times the usual local steps, from and to
GRID_BATCH = 10
FREE_EVALUATIONS_SHARE = 0.25  # of a run, before the median rule may stop it
MIN_RUNS_FOR_MEDIAN = 2
MIN_SECONDS_FOR_ESTIMATE = 2.0  # that passed before the time left is estimated
WORK_FIELDS = tuple(f.name for f in fields(LocalWork))
PULLED = (LAMBDA, DITTO)


@dataclass
class NetworkPlan:
    """What choosing determined, and training on other rows repeats."""

    work: JsonObject = field(default_factory=dict)  # the fields of local training
    server: JsonObject = field(default_factory=dict)  # those of the server's optimizer, of the global model only
    rounds: dict[str, int] = field(default_factory=dict)  # by candidate, on `rows` training rows
    rows: int = 0
    variants: int = 0  # that the grid had
    local: JsonObject = field(default_factory=dict)  # the fields of local training of the local models

    def scaled_rounds(self, setting: Setting, rows: int) -> int:
        """The rounds of a candidate on so many training rows: where a round has a fixed number of steps, as many more
        as there are more rows."""
        most = self.rounds[_key(setting)]
        work = self.local if setting.family == LOCAL else self.work
        return most if work.get("epochs") else max(1, round(most * rows / max(self.rows, 1)))


class Progress:
    """Tells the step, its place among all trainings, and the time left, as far as it can be estimated."""

    def __init__(self, tell: OnProgress, trainings: int, clock: Callable[[], float]):
        self.tell, self.trainings, self.clock = tell, trainings, clock
        self.began, self.done = clock(), 0.0

    def step(self, what: str) -> OnProgress:
        """The function that reports the rounds of the next training."""
        first = self.done
        self.done += 1

        def tell(_: str, done: int, rounds: int) -> None:
            share = (first + done / max(rounds, 1)) / max(self.trainings, self.done)
            self.tell(f"{what} ({int(first) + 1} of about {self.trainings}{self._left(share)})", done, rounds)

        return tell

    def _left(self, share: float) -> str:
        seconds = (self.clock() - self.began) * (1 - share) / max(share, 1e-9)
        if self.clock() - self.began < MIN_SECONDS_FOR_ESTIMATE:
            return ""
        return f", {math.ceil(seconds / 60)} min left" if seconds > 90 else f", {math.ceil(seconds)} s left"


class StopBelowMedian(Callback):
    """Stops a run that is worse than the median of the others at the same round; the first quarter is free."""

    def __init__(self, curves: dict[str, dict[int, float]], name: str):
        self.curves, self.mine = curves, curves.setdefault(name, {})

    def on_evaluation(self, training: Any, evaluation: Evaluation, round: Round) -> None:
        loss = evaluation.validation_loss
        best = min([loss, *self.mine.values()])
        self.mine[round.t] = best
        others = [curve[round.t] for curve in self.curves.values() if curve is not self.mine and round.t in curve]
        late = round.t >= FREE_EVALUATIONS_SHARE * training.rounds
        if late and len(others) >= MIN_RUNS_FOR_MEDIAN and best > median(others):
            training.state.stopped = True


def list_variants(job: Job, given: NamedValues, eta: float) -> list[JsonObject]:
    """The grid around the fields that are `given`: each variant has all fields of local training that differ from the
    defaults; `eta` is the step size that "auto" proposes."""
    free = {name for name in ("eta", "optimizer", "batch", "server_optimizer") if name not in given}
    free |= {"epochs"} if not {"epochs", "steps"} & set(given) else set()
    adaptive = given.get("optimizer", "sgd") != "sgd"
    steps = given.get("steps", LocalWork.steps)
    etas = ADAPTIVE_ETAS if adaptive else [factor * eta for factor in SGD_ETA_FACTORS]
    variants: list[JsonObject] = [{"eta": value} for value in etas] if "eta" in free else [{}]
    usual: JsonObject = {"eta": ADAPTIVE_ETAS[0] if adaptive else eta} if "eta" in free else {}
    if "server_optimizer" in free:
        factors = MOMENTUM_ETA_FACTORS if "eta" in free and not adaptive else (1.0,)
        values = [usual | ({"eta": factor * usual["eta"]} if usual else {}) for factor in factors]
        variants += [value | {"server_optimizer": "momentum"} for value in values]
    if {"optimizer", "eta"} <= free:
        variants += [{"optimizer": "adamw", "eta": value} for value in ADAPTIVE_ETAS]
    if "batch" in free:
        variants += [usual | {"batch": GRID_BATCH}]
    if "epochs" in free:
        batch = given.get("batch") or DEFAULT_BATCH_ROWS
        batches = float((job.clients.train.size.double() / batch).ceil().mean())
        low, high = EPOCH_STEPS_FACTORS
        counts = [epochs for epochs in GRID_EPOCHS if low * steps <= epochs * batches <= high * steps]
        variants += [usual | {"epochs": epochs} for epochs in counts[:1]]
    return [dict(given) | variant for variant in variants]


def choose_local_training(
    job: Job, given: NamedValues, progress: Progress, known: StatisticsCache
) -> tuple[NetworkPlan, TrainedModels]:
    """The local training of the lowest validation loss, and FedAvg trained with it."""
    eta = resolve_for_job(build("fedavg", dict(given)), job, known)[0].eta
    variants = list_variants(job, given, eta)
    curves: dict[str, dict[int, float]] = {}
    tell = progress.step(f"FedAvg with {len(variants)} settings of local training")
    runs = [
        _train_variant(job, variant, known, tell, [StopBelowMedian(curves, str(k))] if len(variants) > 2 else [])
        for k, variant in enumerate(variants)
    ]
    results = [result for result, _ in run_together(runs)]
    trained = {k: result for k, result in enumerate(results) if isinstance(result, TrainedModels)}
    if not trained:
        raise next(result for result in results if isinstance(result, Exception))
    best = min(trained, key=lambda k: trained[k].outcome.state.best)
    server = {name: value for name, value in variants[best].items() if name in SERVER_FIELDS}
    plain = {k for k in trained if k == best or not set(variants[k]) & set(SERVER_FIELDS) - set(given)}
    work_of = best if best in plain and not server else min(plain, key=lambda k: trained[k].outcome.state.best)
    work = {name: value for name, value in variants[work_of].items() if name in WORK_FIELDS}
    ready: Any = trained[work_of].algorithm
    plan = NetworkPlan(work | {"eta": ready.eta, "batch": ready.batch}, server, {}, _count_rows(job), len(variants))
    if server:
        best_ready: Any = trained[best].algorithm
        plan.server |= {"eta": best_ready.eta}
    return plan, trained[best]


def _train_variant(
    job: Job, variant: JsonObject, known: StatisticsCache, tell: OnProgress, callbacks: list[Callback]
) -> TrainingSteps[TrainedModels | Diverged | RequestError]:
    """FedAvg with a variant; the error of one that diverges, or is not for this network, is its result."""
    try:
        ready, exchange, server = resolve_for_job(build("fedavg", variant), job, known)
        return (yield from train_steps(job, ready, exchange, TrainingState(server), None, tell, callbacks))
    except (Diverged, RequestError) as error:
        return error


def list_settings(lam: float) -> list[Setting]:
    """All candidates but FedAvg, what follows from it, and Local; `lam` is what "auto" proposes."""
    return [
        Setting(GLOBAL, lam),
        *(Setting(DITTO, factor * lam) for factor in DITTO_FACTORS),
        Setting(MIXTURE, MIXTURE_ALPHA),
        Setting(FEDPER, 0.0),
        Setting(FEDROD, 0.0),
    ]


def make_algorithm(setting: Setting, plan: NetworkPlan) -> Any:
    """The algorithm of a candidate, with the local training of the plan."""
    work = dict(plan.work)
    if setting.family in PULLED or (setting.family == GLOBAL and setting.value):
        work |= {"lam": setting.value}
        if work.get("optimizer", "sgd") == "sgd":  # the pull adds its curvature
            work["eta"] = 1 / (1 / work["eta"] + setting.value)
    if setting.family == GLOBAL:
        return build("fedprox", work | {"inner": "sgd"}) if setting.value else build("fedavg", work | plan.server)
    if setting.family == MIXTURE:
        return build("apfl", work | {"alpha": setting.value, "adapt": "no", "decay": 0.0})
    if setting.family == LOCAL:
        return build("local", plan.local)
    names = {DITTO: "ditto", LAMBDA: "fedprox_personal", FEDPER: "fedper", FEDROD: "fedrod"}
    return build(names[setting.family], work)


def iterate_candidates(
    job: Job, given: NamedValues, plan: NetworkPlan, first: TrainedModels, progress: Progress
) -> Iterator[SettingModels]:
    """Every candidate's models; `first` is FedAvg's training; `plan.rounds` and `plan.local` are filled in."""
    known: StatisticsCache = {}
    curves: dict[str, dict[int, float]] = {}
    w = first.common
    yield _remember(plan, Setting(GLOBAL, 0.0), first)
    for times in FINETUNE_ROUNDS:
        yield SettingModels(Setting(TUNED, float(times)), w, finetune_locally(job, w, times, plan))
    lam = resolve_for_job(build("fedprox_personal", {}), job, known)[0].lam
    lams = [factor * lam for factor in LAMBDA_FACTORS]
    yield from train_lambda_path(job, w, lams, plan, progress)
    for setting in list_settings(lam):
        callbacks: list[Callback] = [StopBelowMedian(curves, _key(setting))]
        try:
            algorithm = make_algorithm(setting, plan)
            ready, exchange, server = resolve_for_job(algorithm, job, known)
            trained = train(job, ready, exchange, TrainingState(server), None, progress.step(algorithm.name), callbacks)
        except (RequestError, Diverged):
            continue  # this algorithm is not for this network or optimizer
        yield _remember(plan, setting, trained)
    yield _remember(plan, Setting(LOCAL, 0.0), train_local(job, given, plan, progress))


def train_local(job: Job, given: NamedValues, plan: NetworkPlan, progress: Progress) -> TrainedModels:
    """Local models with the local training of the plan or the default one, whichever has the lower validation loss."""
    default = {name: value for name, value in given.items() if name in WORK_FIELDS}
    runs: list[tuple[JsonObject, TrainedModels]] = []
    error: Diverged | None = None
    for work in (plan.work, default):
        ready, exchange, server = resolve_for_job(build("local", work), job)
        try:
            trained = train(job, ready, exchange, TrainingState(server), None, progress.step("local"))
        except Diverged as diverged:
            error = diverged
            continue
        runs.append((work | {"eta": ready.eta, "batch": ready.batch}, trained))
    if not runs:
        assert error is not None
        raise error
    plan.local, best = min(runs, key=lambda run: run[1].outcome.state.best)
    return best


def _remember(plan: NetworkPlan, setting: Setting, trained: TrainedModels) -> SettingModels:
    plan.rounds[_key(setting)] = max(trained.outcome.best.t, 1)
    return SettingModels(setting, trained.common, trained.models)


def train_settings(job: Job, plan: NetworkPlan, wanted: set[Setting], progress: Progress) -> Iterator[SettingModels]:
    """The models of some candidates, trained on the job's rows for the plan's rounds, scaled to the rows."""
    known: StatisticsCache = {}
    rows = _count_rows(job)
    lams = sorted((setting.value for setting in wanted if setting.family == LAMBDA), reverse=True)
    basic = Setting(GLOBAL, 0.0)
    needs_basic = basic in wanted or lams or any(setting.family == TUNED for setting in wanted)
    trainings = [setting for setting in sorted(wanted) if setting.family not in (TUNED, LAMBDA)]
    w: Tensor | None = None
    for setting in [basic] * bool(needs_basic) + [setting for setting in trainings if setting != basic]:
        short = replace_training(job, rounds=plan.scaled_rounds(setting, rows))
        algorithm = make_algorithm(setting, plan)
        ready, exchange, server = resolve_for_job(algorithm, short, known)
        trained = train(short, ready, exchange, TrainingState(server), None, progress.step(algorithm.name))
        w = trained.common if setting == basic else w
        yield SettingModels(setting, trained.common, trained.models)
    if w is None:
        return
    for setting in wanted:
        if setting.family == TUNED:
            yield SettingModels(setting, w, finetune_locally(job, w, int(setting.value), plan))
    if lams:
        path = [lam for lam in _path_lams(plan) if lam >= lams[-1] * (1 - 1e-9)]
        yield from train_lambda_path(job, w, path, plan, progress)


def train_lambda_path(
    job: Job, w: Tensor, lams: list[float], plan: NetworkPlan, progress: Progress
) -> Iterator[SettingModels]:
    """The path of networks: each lambda continues from the models of the larger one before."""
    most = plan.scaled_rounds(Setting(GLOBAL, 0.0), _count_rows(job))
    job = replace_training(job, rounds=max(MIN_LAMBDA_ROUNDS, most // LAMBDA_ROUND_DIVISOR), checkpoint="last")
    clients, known = torch.arange(len(job.clients)), StatisticsCache()
    v = w.expand(len(clients), -1)
    tell = progress.step("FedProx along a path of lambdas")
    for k, lam in enumerate(lams):
        setting = Setting(LAMBDA, lam)
        ready, exchange, server = resolve_for_job(make_algorithm(setting, plan), job, known)
        exchange.states.store(clients, exchange.states.take(clients)._replace(v=v), 1)
        result = train(job, ready, exchange, TrainingState(server._replace(w=w)))
        tell("", k + 1, len(lams))
        w, v = result.common, result.models
        plan.rounds[_key(setting)] = job.run.training.rounds
        yield SettingModels(setting, w, v)


def _path_lams(plan: NetworkPlan) -> list[float]:
    return [float(key.split()[1]) for key in plan.rounds if key.split()[0] == LAMBDA]


def finetune_locally(job: Job, w: Tensor, times: int, plan: NetworkPlan) -> Tensor:
    """[m, d]: w after each client's own local steps."""
    plain: Any = build("fedavg_finetune", dict(plan.work))
    tune = {"tune_epochs": times * plain.epochs} if plain.epochs else {"tune_steps": times * plain.steps}
    _, exchange, server = resolve_for_job(replace(plain, **tune), job)
    m = len(job.clients)
    return exchange.models(server._replace(w=w), Round(1, 1, m, m, 1.0, job.run.training.seed))


def resolve_for_job(
    algorithm: AnyAlgorithm, job: Job, known: StatisticsCache | None = None
) -> tuple[Any, Simulator, StateTree]:
    """The algorithm in numbers, the job's clients ready to be asked, and the server's first state."""
    exchange = make_simulator(job, known)
    ready, server = resolve(algorithm, job.task, exchange, job.run.training.seed)
    return ready, exchange, server


def replace_training(job: Job, **changes: object) -> Job:
    """The same job with other options of training."""
    training = job.run.training.model_copy(update=changes)
    return replace(job, run=job.run.model_copy(update={"training": training}))


def _count_rows(job: Job) -> int:
    return int(job.clients.train.size.sum())


def _key(setting: Setting) -> str:
    return f"{setting.family} {setting.value!r}"
