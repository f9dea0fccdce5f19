"""`fit`: one method on one federation, with the two baselines beside it, in memory or as a run directory."""

from __future__ import annotations

import hashlib
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import pandas as pd
import torch
from torch import Tensor, nn

from mooring.algorithms.base import Algorithm, build
from mooring.core.aggregation import MEAN
from mooring.core.errors import ClientError, RequestError
from mooring.core.score_sentences import describe_scores
from mooring.core.user_code import copy_files
from mooring.data.clients import PARTS, REGRESSION
from mooring.engines import training_checkpoint
from mooring.engines.coefficients import coefficient_table, read_scaling
from mooring.engines.divergence import suggest_step_sizes
from mooring.engines.exchange import BEST, LAST, ClientRoster, Exchange, Scores
from mooring.engines.exported_models import make_estimator
from mooring.engines.loop import (
    LOSS_COLUMNS,
    Asking,
    Diverged,
    TrainingOutcome,
    TrainingState,
    answered,
    check_participation,
    collect_models,
    mean_over_rows,
    resolve,
    rounds_of,
)
from mooring.engines.metrics import CONFIDENCE_LEVEL, compute_metrics, improvement_pct, mean_improvement
from mooring.engines.prepare import Job, make_simulator, prepare
from mooring.engines.privacy import DEFAULT_DELTA, make_private_mean
from mooring.engines.request import check_trusted_run, hyperparameters, request, user_classes, user_code_specs
from mooring.runs.atomic_files import DamagedFile, directory_lock, json_bytes, parquet_bytes, write_json, write_parquet
from mooring.runs.directory import (
    CLIENTS_FILE,
    INPUTS_FILE,
    ROUNDS_FILE,
    RUN_FILE,
    SCHEMA_FILE,
    SPLIT_FILE,
    SUMMARY_FILE,
    RunDirectory,
    StoredModels,
    create_run,
    open_run,
)
from mooring.runs.runfile import RunFile, run_bytes
from mooring.runs.sections import Options
from mooring.runs.table_schemas import clients_table, rounds_table
from mooring.tasks.network import NetworkTask, build_module

BASELINE_ALGORITHMS = {"local": "local", "pooled": "pooled"}  # by column: the algorithm that is trained beside
MAX_SHOWN_CLIENTS = 4  # clients that a result shows when it is printed

OnProgress = Callable[[str, int, int], None]  # (what is running, rounds done, rounds in all)


def ignore_progress(what: str, done: int, rounds: int) -> None:
    """No progress is shown."""


def print_progress(what: str, done: int, rounds: int) -> None:
    """The step and how much of it is done, in one line on stderr."""
    sys.stderr.write(f"\r\033[K{what}: {done} of {rounds}" + ("\n" if done == rounds else ""))
    sys.stderr.flush()


def progress_function(progress: bool | OnProgress) -> OnProgress:
    """The function that is called with (step, done, total)."""
    return progress if callable(progress) else print_progress if progress else ignore_progress


@dataclass(frozen=True)
class RoundModels:
    """What a federation uses after a round: its models, and their losses in the target's own units."""

    t: int
    common: Tensor  # [d]
    models: Tensor | None  # [m, d]; None where each client keeps its own
    validation: Tensor  # [m]
    test: Tensor  # [m]
    alpha: Tensor | None  # [m], the own model's share in a mixture; None for methods without one


@dataclass(frozen=True)
class TrainedModels:
    """A method's result after its last round and after its best, which may be the same, and which of them is kept."""

    algorithm: Any
    outcome: TrainingOutcome
    checkpoint: str
    last: RoundModels
    best: RoundModels

    @property
    def used(self) -> RoundModels:
        return self.best if self.checkpoint == BEST else self.last

    @property
    def common(self) -> Tensor:
        return self.used.common

    @property
    def models(self) -> Any:
        return self.used.models

    @property
    def validation(self) -> Tensor:
        return self.used.validation

    @property
    def test(self) -> Tensor:
        return self.used.test


@dataclass(frozen=True)
class FitResult:
    """What `fit` returns. Losses are averages over test rows of the models that clients would deploy."""

    job: Job
    trained: TrainedModels
    summary: dict[
        str, Any
    ]  # metric; local, pooled, personal: test losses; improvement_over_local, ...; checkpoint; rounds
    clients: pd.DataFrame
    rounds: pd.DataFrame
    run: Path | None

    @property
    def notes(self) -> list[str]:
        """What was done to the data."""
        return list(self.job.clients.notes)

    def __repr__(self) -> str:
        """Ten lines at most: what was trained, its scores, some clients, where it lies."""
        summary, clients = self.summary, self.clients
        kept = summary[f"{summary['checkpoint']}_round"]
        lines = [
            f"{self.trained.algorithm.name} on {self.job.clients.title or 'clients'}: {len(clients)} clients, "
            f"{summary['last_round']} rounds (kept: {kept})",
            *describe_scores(summary),
            *(f"  {row['client']}: {row['rows']} rows, {row['personal']:.4g}" for row in self._few()),
            *(
                [f"  ... and {len(clients) - MAX_SHOWN_CLIENTS} more in .clients"]
                if len(clients) > MAX_SHOWN_CLIENTS
                else []
            ),
            f"run: {self.run}" if self.run else "not written; give out= to keep it",
        ]
        return "\n".join(lines)

    def _few(self) -> list[Any]:
        return self.clients.head(MAX_SHOWN_CLIENTS).to_dict("records")

    @property
    def models(self) -> dict[str, Tensor]:
        """Every client's parameter vector by name."""
        return {name: self._model(name) for name in self.clients["client"]}

    def _model(self, client: str | None) -> Tensor:
        """A client's parameter vector, or the global one."""
        if client is None:
            return self.trained.common
        names = list(self.clients["client"])
        if client not in names:
            raise RequestError(f"unknown client {client!r}; the run has {len(names)}, such as {', '.join(names[:5])}.")
        if self.trained.models is None:
            raise RequestError(f"client {client!r} keeps its own model; only the global one is here.")
        return self.trained.models[names.index(client)]

    def predict(self, x: Any, client: str | None = None) -> Tensor:
        """Predictions at rows x by a client's model (default: the global one); a regression in the target's units."""
        w = self._model(client)
        inputs = torch.as_tensor(x)
        inputs = inputs.to(self.job.task.dtype) if inputs.dtype.is_floating_point else inputs
        return to_target_units(self.job.clients, self.job.task.predict(w[None], inputs[None])[0])

    def module(self, client: str | None = None) -> nn.Module:
        """A client's network (default: the global one), ready to be used: in evaluation mode, and answering in the
        target's own units; classes and labels come as logits."""
        clients = self.job.clients
        return build_module(self.job.task, self._model(client), clients.target_mean, clients.target_scale)

    def model(self, client: str | None = None) -> Any:
        """A client's model (default: the global one), ready to be used: a network, or for linear and logistic tasks an
        estimator of scikit-learn's on the encoded columns in the units of the data."""
        if isinstance(self.job.task, NetworkTask):
            return self.module(client)
        clients = self.job.clients
        return make_estimator(self.job.task, self._model(client), read_scaling(clients), clients.kind)

    @property
    def coefficients(self) -> pd.DataFrame:
        """One row per client and term in the units of the data: coefficient, global, deviation."""
        names = list(self.clients["client"])
        scaling = read_scaling(self.job.clients)
        return coefficient_table(self.job.task, scaling, self.trained.common, self.trained.models, names)


def as_json(result: FitResult | RunDirectory) -> dict[str, Any]:
    """The object that `mooring fit --json` prints, of a fit or of the run directory of one."""
    path = result.path if isinstance(result, RunDirectory) else result.run
    clients = result.clients.dropna(axis="columns", how="all") if isinstance(result, RunDirectory) else result.clients
    return {"summary": result.summary, "clients": clients.to_dict("records"), "run": str(path)}


def to_target_units(clients: Any, prediction: Tensor) -> Tensor:
    """A standardised prediction in the target's own units; probabilities as they are."""
    if clients.kind != REGRESSION:
        return prediction
    return prediction * clients.target_scale + clients.target_mean


def fit(
    data: Any,
    second: Any = None,
    *,
    algorithm: str | Algorithm | None = None,
    out: str | Path | None = None,
    model: Any = None,
    settings: Mapping[str, Any] | None = None,
    lam: Any = None,
    eta: Any = None,
    lr: Any = None,
    progress: bool | OnProgress = False,
    trust_code: bool = False,
    **options: Unpack[Options],
) -> FitResult:
    """Train one algorithm on a federation and report its test scores beside local models and the pooled model.

    `data` is a table's path, a data frame, (X, y, groups), `Clients`, each client's own data by name, or a run file;
    a network comes as `model`, or first as in `fit(model, clients)`: the weights of a module are the start, a function
    makes a fresh one. `algorithm` is a name (its fields in `settings`), "my_file.py:MyAlgorithm", or an algorithm;
    without one it is the run file's, or fedprox_personal, for networks fedavg_finetune. `options` are those of the
    run file's sections [data], [task] and [training], and override what the run file says; `loss` may be a function.
    With `out` the run is written there and can be resumed; without, nothing is written. `trust_code` lets an untrusted
    run file run the code that it names.
    """
    source = data
    given = {"lam": lam, "eta": eta, "lr": lr}
    settings = dict(settings or {}) | {name: value for name, value in given.items() if value is not None}
    if isinstance(source, nn.Module) or (second is not None and callable(source)):
        source, model = second, source
    asked = request(
        source, purpose="fit", algorithm=algorithm, settings=settings, model=model, trust_code=trust_code, **options
    )
    if asked.training.seeds > 1:
        raise RequestError("seeds does not apply: fit trains once; compare repeats.")
    in_memory = None if isinstance(source, str | Path) else source
    loss = options.get("loss")
    job = prepare(asked, in_memory, model, loss if callable(loss) else None, user_classes([algorithm]))
    return start_fit(job, out, progress_function(progress))


def start_fit(
    job: Job, out: str | Path | None, tell: OnProgress = ignore_progress, exchange: Exchange | None = None
) -> FitResult:
    """Settle and run a new fit, with clients in this process unless they are reached by another exchange."""
    exchange = make_simulator(job) if exchange is None else exchange
    asked = job.algorithms()[0]
    check_participation(asked, job.plan, len(exchange.roster))
    ready, server = resolve(asked, job.task, exchange, job.plan.seed)
    job = replace(job, run=with_resolved(job.run, ready))
    directory = None if out is None else create_run(out, initial_files(job))
    with nullcontext() if directory is None else directory_lock(directory.path):
        return complete_fit(job, ready, exchange, TrainingState(server), directory, tell)


def resume_fit(
    path: str | Path,
    tell: OnProgress = ignore_progress,
    source: Any = None,
    model: Any = None,
    loss: Any = None,
    algorithm: Algorithm | None = None,
    trust_code: bool = False,
) -> tuple[FitResult, str | None]:
    """Continue an interrupted fit to the very bytes it would have had; a finished one is only read again.

    Data, model, loss and algorithm that were in memory are passed again.
    """
    directory = open_run(path)
    with directory_lock(directory.path):
        check_trusted_run(directory.run, directory.path, trust_code)
        job = prepare(directory.run, source, model, loss, user_classes([algorithm]), directory.path)
        check_same_data(directory, job)
        return continue_fit(job, directory, make_simulator(job), tell)


def continue_fit(
    job: Job, directory: RunDirectory, exchange: Exchange, tell: OnProgress = ignore_progress
) -> tuple[FitResult, str | None]:
    """The rest of a run from its latest checkpoint, and a note if a newer one was damaged."""
    ready, server = resolve(job.algorithms()[0], job.task, exchange, job.plan.seed)
    progress, note = training_checkpoint.restore_training(directory, server, exchange)
    return complete_fit(job, ready, exchange, progress, directory, tell), note


def check_same_data(directory: RunDirectory, job: Job) -> None:
    """The rows must be those that the run began with; a finished run must be whole."""
    changed = "has changed since the run began; start a new run"
    mine = job.clients.schema
    if mine is not None and (directory.path / SCHEMA_FILE).exists() and directory.schema.get("digest") != mine.digest:
        raise RequestError(f"{directory.path}: {job.run.data.source} {changed}.")
    was = directory.inputs
    if was and was.get("rows") != digest_inputs(job).get("rows"):
        raise RequestError(f"{directory.path}: {job.run.data.source} {changed}.")
    if directory.finished:
        try:
            _ = directory.models
        except DamagedFile as error:
            raise DamagedFile(f"{error} Remove it and resume: the checkpoints make it again.") from None


def digest_inputs(job: Job) -> dict[str, Any]:
    """The digest of what a schema does not tell: rows that came as arrays or images."""
    out: dict[str, Any] = {}
    if job.clients.schema is None:
        digest = hashlib.sha256(json_bytes({"names": job.clients.names}))
        for part in PARTS:
            rows = getattr(job.clients, part)
            for tensor in (rows.x, rows.y, rows.start, rows.size):
                digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(tensor.contiguous().numpy().data)
        out["rows"] = digest.hexdigest()
    return out


def complete_fit(
    job: Job, ready: Any, exchange: Exchange, progress: TrainingState, directory: RunDirectory | None, tell: OnProgress
) -> FitResult:
    """Run the remaining rounds, evaluate them beside the baselines, write what is not yet written."""
    trained = train(job, ready, exchange, progress, directory, tell)
    beside = job.run.training.baselines
    who = {
        column: trained if ready.name == name else train_baseline(name, job, exchange, tell) if beside else None
        for column, name in BASELINE_ALGORITHMS.items()
    } | {"personal": trained}
    roster = exchange.roster
    losses = {name: test_losses(one, roster) for name, one in who.items()}
    known = {name: compute_metrics(job.task, job.clients, None if w is None else w.models) for name, w in who.items()}
    clients = clients_frame(roster, losses, trained).assign(**known["personal"].by_client)
    rounds = rounds_frame(job, progress.records)
    rows = roster.sizes["test"]
    summary: dict[str, Any] = {"metric": job.task.metric, "test_rows": int(rows.sum()), "level": CONFIDENCE_LEVEL}
    summary |= {name: overall_loss(who[name], loss, rows, job) for name, loss in losses.items()}
    for name in BASELINE_ALGORITHMS:
        summary[f"improvement_over_{name}"] = mean_improvement(rows, losses[name], losses["personal"])
    summary["measures"] = {name: scores.overall for name, scores in known.items()}
    if "epsilon" in progress.records[-1]:
        plan = job.plan
        summary["privacy"] = {"epsilon": progress.records[-1]["epsilon"], "delta": plan.delta or DEFAULT_DELTA}
        summary["privacy"] |= {"clip": plan.clip, "noise": plan.noise}
    summary |= {"checkpoint": trained.checkpoint, "best_round": trained.best.t, "last_round": trained.last.t}
    if directory is not None and not directory.finished:
        write_parquet(directory.path / CLIENTS_FILE, clients_table(clients.to_dict("records")))
        write_json(directory.path / SUMMARY_FILE, summarize_fit(job, trained, summary))
        write_trained(directory, job, roster, trained, rounds)
    return FitResult(job, trained, summary, clients, rounds, directory.path if directory else None)


def write_trained(
    directory: RunDirectory, job: Job, roster: ClientRoster, trained: TrainedModels, rounds: pd.DataFrame
) -> None:
    """The rounds, the models of the round that was not kept where it is another one, and last the models kept."""
    write_parquet(directory.path / ROUNDS_FILE, rounds_table(rounds.drop(columns="seconds").to_dict("records")))
    training_checkpoint.save_seconds(directory, trained.outcome.progress)

    def models(which: RoundModels) -> StoredModels:
        return StoredModels(which.common, which.models, roster.names, *describe_task(job))

    if trained.best.t != trained.last.t:
        if trained.checkpoint == BEST:
            directory.write_other_models(LAST, models(trained.last))
        else:
            directory.write_other_models(BEST, models(trained.best))
    directory.write_models(models(trained.used))


def train(
    job: Job,
    ready: Any,
    exchange: Exchange,
    progress: TrainingState,
    directory: RunDirectory | None = None,
    tell: OnProgress = ignore_progress,
) -> TrainedModels:
    """Run the rounds that are left; what the best and the last of them deploy."""
    return answered(training(job, ready, exchange, progress, directory, tell))


def training(
    job: Job,
    ready: Any,
    exchange: Exchange,
    progress: TrainingState,
    directory: RunDirectory | None = None,
    tell: OnProgress = ignore_progress,
) -> Asking[TrainedModels]:
    """`train`, whose questions are answered by others."""
    try:
        outcome = yield from rounds_of(
            ready,
            exchange,
            job.plan,
            progress,
            save=lambda now: training_checkpoint.save_training(directory, now, exchange) if directory else None,
            tell=lambda now, rounds: tell(ready.name + describe_epsilon(now), now.t, rounds),
            private=make_private_mean(job.plan, len(exchange.roster), directory.path if directory else None),
        )
    except Diverged as error:
        raise Diverged(f"{error} {suggest_step_sizes(ready, job.task, exchange, job.plan, progress.t + 1)}") from error
    unit = job.clients.target_scale**job.task.unit_power

    def after(which: str) -> RoundModels:
        shown, server = outcome.at(which)
        models, alpha = collect_models(outcome, exchange, job.plan, which), exchange.numbers("alpha", which)
        return RoundModels(
            shown.t, ready.global_model(server), models, shown.validation * unit, shown.test * unit, alpha
        )

    last = after(LAST)
    return TrainedModels(ready, outcome, job.plan.checkpoint, last, last if outcome.best.t == last.t else after(BEST))


def describe_epsilon(progress: TrainingState) -> str:
    """What a private run has spent by now, in words."""
    epsilon = progress.records[-1].get("epsilon")
    return "" if epsilon is None else f": epsilon {epsilon:.3g}"


def train_baseline(name: str, job: Job, exchange: Exchange, tell: OnProgress = ignore_progress) -> TrainedModels | None:
    """Train a baseline at the same clients, all honest and in every round; None where that cannot be done."""
    plain = {"participation": 1.0, "average": MEAN, "clip": None, "weight_cap": None, "attack": None}
    plain |= {"noise": None, "delta": None}
    run = job.run.model_copy(update={"training": job.run.training.model_copy(update=plain)})
    beside, asked = replace(job, run=run), build(name, {})
    apart = exchange.beside(asked)
    if apart is None:
        return None
    try:
        ready, server = resolve(asked, job.task, apart, job.plan.seed)
        return train(beside, ready, apart, TrainingState(server), None, tell)
    except Diverged as error:
        warnings.warn(f"without the baseline '{name}': {error}")
    except ClientError:
        if not getattr(exchange, "is_remote", False):
            raise  # a client that went away from a deployment was named already
    return None


def test_losses(trained: TrainedModels | None, roster: ClientRoster) -> Tensor:
    """[m]: nan for a baseline that could not be trained."""
    return torch.full((len(roster),), torch.nan, dtype=torch.float64) if trained is None else trained.test


def summarize_fit(job: Job, trained: TrainedModels, summary: dict[str, Any]) -> dict[str, Any]:
    """What a report says of a fit before any table."""
    about = {"title": job.clients.title, "algorithm": trained.algorithm.name, "notes": list(job.clients.notes)}
    return summary | about


def mean_known_loss(risk: Tensor, sizes: Tensor) -> float:
    """The mean over rows of the clients whose loss is known."""
    return mean_over_rows(Scores(risk, torch.where(risk.isnan(), 0, sizes)))


def overall_loss(trained: TrainedModels | None, risk: Tensor, sizes: Tensor, job: Job) -> float:
    """The mean over all clients' test rows; of a run that knows no client's own loss, the one that was summed."""
    if trained is None or not bool(risk.isnan().all()):
        return mean_known_loss(risk, sizes)
    return trained.outcome.at(trained.checkpoint)[0].test_loss * job.clients.target_scale**job.task.unit_power


def clients_frame(roster: ClientRoster, losses: dict[str, Tensor], trained: TrainedModels) -> pd.DataFrame:
    """One row per client: sizes, test losses, how much lower the personal model's is than the local one's."""
    sizes = {part: size.numpy() for part, size in roster.sizes.items()}
    return pd.DataFrame(
        {
            "client": roster.names,
            "rows": sum(sizes.values()),
            **sizes,
            **{name: loss.numpy() for name, loss in losses.items()},
            "improvement_over_local": (losses["local"] - losses["personal"]).numpy(),
            "improvement_over_local_pct": improvement_pct(losses["local"].numpy(), losses["personal"].numpy()),
            "lam": per_client_lam(trained.algorithm, len(roster)),
            "alpha": torch.nan if trained.used.alpha is None else trained.used.alpha.numpy(),
            "left_out": describe_left_out(trained.outcome.progress, len(roster)),
        }
    )


def describe_left_out(progress: TrainingState, m: int) -> list[str | None]:
    """Of each client whose replies could not all be used: in how many rounds, and why in the last of them."""
    rounds = {place: f"{count} round{'s' * (count > 1)}" for place, count in progress.left_out.items()}
    return [f"{rounds[i]}: {progress.offenders[i]}" if i in rounds else None for i in range(m)]


def per_client_lam(algorithm: Any, m: int) -> list[float]:
    lam = getattr(algorithm, "lam", float("nan"))
    if isinstance(lam, int | float):
        return [float(lam)] * m
    return list(lam.per_client) if getattr(lam, "per_client", None) else [float("nan")] * m


def rounds_frame(job: Job, records: list[dict[str, Any]]) -> pd.DataFrame:
    """The records in the target's own units."""
    frame = pd.DataFrame(records)
    for column in LOSS_COLUMNS:
        frame[column] = frame[column].astype(float) * job.clients.target_scale**job.task.unit_power
    if job.task.metric == "mse" and job.clients.kind == REGRESSION:
        frame["test_rmse"] = frame["test_loss"] ** 0.5
        rows = getattr(job.clients, "test", None)  # clients apart keep theirs
        variance = 0.0 if rows is None or len(rows.y) == 0 else float(rows.y.double().var(correction=0))
        if variance > 0:
            frame["test_r2"] = 1 - frame["test_loss"] / (variance * job.clients.target_scale**2)
    return frame


def with_resolved(run: RunFile, ready: Any) -> RunFile:
    """The run file with the numbers that "auto" and the like became."""
    asked = run.algorithm
    assert asked is not None
    settled = {k: v for k, v in hyperparameters(ready).items() if asked.fields.get(k) != v}
    return run.model_copy(update={"algorithm": asked.model_copy(update={"settled": settled})})


def initial_files(job: Job) -> dict[str, bytes]:
    """The files that a run directory appears with."""
    files = {RUN_FILE: run_bytes(job.run), **copy_files(user_code_specs(job.run), job.kept)}
    if job.clients.schema is not None:
        files[SCHEMA_FILE] = json_bytes(job.clients.schema.model_dump(mode="json"))
    if job.clients.placement is not None:
        files[SPLIT_FILE] = parquet_bytes(job.clients.placement)
    if inputs := digest_inputs(job):
        files[INPUTS_FILE] = json_bytes(inputs)
    return files


def describe_task(job: Job) -> tuple[dict[str, Any], Any]:
    """How a models file describes its task and the order of its parameters."""
    task = job.task
    about = {"name": task.name, "metric": task.metric, "kind": job.clients.kind, "classes": list(job.clients.classes)}
    about |= {"features": list(job.clients.features), "settings": task.describe()}
    about |= {"target_mean": job.clients.target_mean, "target_scale": job.clients.target_scale}
    rows = getattr(job.clients, "train", None)  # clients apart keep theirs
    if rows is not None:
        about |= {"inputs": list(rows.x.shape[1:]), "outputs": list(rows.y.shape[1:])}
        about |= {"whole": not rows.x.dtype.is_floating_point}
    return about, [{"name": part.name, "shape": list(part.shape), "start": part.start} for part in task.layout]
