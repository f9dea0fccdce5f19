"""`fit`: one algorithm on one federation, with two baselines beside it, in memory or as a run directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from torch import nn

from mooring.algorithms.base import AnyAlgorithm
from mooring.core.errors import RequestError
from mooring.core.types import JsonObject, NamedValues
from mooring.engines import training_checkpoint
from mooring.engines.callbacks import Callback, TrackRounds
from mooring.engines.exchange import Exchange
from mooring.engines.fit_files import InMemoryInputs, initial_files, reopen, summarize_fit, with_resolved, write_trained
from mooring.engines.fit_result import FitResult
from mooring.engines.fit_tables import clients_frame, overall_loss, rounds_frame, test_losses
from mooring.engines.loop import resolve
from mooring.engines.metrics import CONFIDENCE_LEVEL, Metric, MetricValues, compute_metrics, mean_improvement
from mooring.engines.participation import refuse_partial_participation
from mooring.engines.personal_parts import name_personal_parts
from mooring.engines.prepare import Job, make_simulator, prepare
from mooring.engines.privacy import DEFAULT_DELTA
from mooring.engines.progress import OnProgress, ignore_progress, progress_function
from mooring.engines.request import request, user_classes
from mooring.engines.training import train, train_baseline
from mooring.engines.training_state import TrainingState
from mooring.runs.atomic_files import directory_lock, write_json, write_parquet
from mooring.runs.directory import CLIENTS_FILE, SUMMARY_FILE, RunDirectory, create_run
from mooring.runs.option_types import Options
from mooring.runs.table_schemas import clients_table
from mooring.runs.trackers import open_tracker

BASELINE_ALGORITHMS = {"local": "local", "pooled": "pooled"}  # by column: the algorithm that is trained beside


def fit(
    data: object,
    second: object = None,
    *,
    algorithm: str | AnyAlgorithm | None = None,
    out: str | Path | None = None,
    model: object = None,
    settings: NamedValues | None = None,
    lam: float | str | Sequence[float] | None = None,
    eta: float | str | None = None,
    lr: float | str | None = None,
    progress: bool | OnProgress = False,
    callbacks: Sequence[Callback] = (),
    metrics: Mapping[str, Metric] | None = None,
    track: str | None = None,
    trust_code: bool = False,
    **options: Unpack[Options],
) -> FitResult:
    """Train one algorithm on a federation and report its test scores beside local models and the pooled model.

    `data` is a table's path, a data frame, (X, y, groups), `Clients`, each client's own data by name, or a run file;
    a network comes as `model`, or first as in `fit(model, clients)`: the weights of a module are the start, a function
    makes a fresh one. `algorithm` is a name (its fields in `settings`), "my_file.py:MyAlgorithm", or an algorithm;
    without one it is the run file's, or fedprox_personal, for networks fedavg_finetune. `options` are those of the
    run file's sections [data], [task] and [training], and override the run file; `loss` may be a function.
    With `out` the run is written there and can be resumed; without, nothing is written. `callbacks` are called in the
    round loop (`mooring.engines.callbacks.Callback`). `metrics` are functions of (targets, predictions)
    by name, measured in every evaluated round and by client (`mooring.engines.metrics`). `track` is "mlflow" or
    "tensorboard": every evaluated round is logged there as soon as it ends. `trust_code` lets an untrusted run file
    run the code that it names.
    """
    source = data
    given_settings = {"lam": lam, "eta": eta, "lr": lr}
    settings = dict(settings or {}) | {name: value for name, value in given_settings.items() if value is not None}
    if isinstance(source, nn.Module) or (second is not None and callable(source)):
        source, model = second, source
    settings = name_personal_parts(settings, model)
    run = request(
        source, purpose="fit", algorithm=algorithm, settings=settings, model=model, trust_code=trust_code, **options
    )
    if run.training.seeds > 1:
        raise RequestError("seeds does not apply: fit trains once; compare repeats.")
    in_memory = None if isinstance(source, str | Path) else source
    loss = options.get("loss")
    job = prepare(run, in_memory, model, loss if callable(loss) else None, user_classes([algorithm]), metrics=metrics)
    if track is None:
        return start_fit(job, out, progress_function(progress), callbacks=callbacks)
    name = Path(out).name if out is not None else job.algorithms()[0].name
    tracker = open_tracker(track, name, run.model_dump(exclude_none=True))
    unit = job.clients.target_scale**job.task.unit_power
    try:
        callbacks = [*callbacks, TrackRounds(tracker, unit)]
        result = start_fit(job, out, progress_function(progress), callbacks=callbacks)
    except BaseException:
        tracker.close(failed=True)
        raise
    for name in ("personal", *BASELINE_ALGORITHMS):
        if result.summary.get(name) is not None:
            tracker.log(f"final_{name}", result.summary[name])
    tracker.close()
    return result


def start_fit(
    job: Job,
    out: str | Path | None,
    on_progress: OnProgress = ignore_progress,
    exchange: Exchange | None = None,
    callbacks: Sequence[Callback] = (),
) -> FitResult:
    """Run a new fit, with clients in this process unless another exchange reaches them."""
    exchange = make_simulator(job) if exchange is None else exchange
    requested = job.algorithms()[0]
    refuse_partial_participation(requested, job.plan, len(exchange.roster))
    algorithm, server = resolve(requested, job.task, exchange, job.plan.seed)
    job = replace(job, run=with_resolved(job.run, algorithm))
    directory = None if out is None else create_run(out, initial_files(job))
    with nullcontext() if directory is None else directory_lock(directory.path):
        return complete_fit(job, algorithm, exchange, TrainingState(server), directory, on_progress, callbacks)


def resume_fit(
    path: str | Path,
    on_progress: OnProgress = ignore_progress,
    source: object = None,
    model: object = None,
    loss: object = None,
    algorithm: AnyAlgorithm | None = None,
    callbacks: Sequence[Callback] = (),
    trust_code: bool = False,
    metrics: Mapping[str, Metric] | None = None,
) -> tuple[FitResult, str | None]:
    """Resume an interrupted fit, with bit-for-bit the same result; a finished one is only read.

    Data, model, loss, algorithm and callbacks that were in memory are passed again.
    """
    inputs = InMemoryInputs(source, model, loss, user_classes([algorithm]))
    with reopen(path, "fit", inputs, trust_code, metrics) as (directory, job):
        return continue_fit(job, directory, make_simulator(job), on_progress, callbacks)


def continue_fit(
    job: Job,
    directory: RunDirectory,
    exchange: Exchange,
    on_progress: OnProgress = ignore_progress,
    callbacks: Sequence[Callback] = (),
) -> tuple[FitResult, str | None]:
    """Continue a run from its latest checkpoint; return a note if a newer one was damaged."""
    algorithm, server = resolve(job.algorithms()[0], job.task, exchange, job.plan.seed)
    state, note = training_checkpoint.restore_training(directory, server, exchange)
    return complete_fit(job, algorithm, exchange, state, directory, on_progress, callbacks), note


def complete_fit(
    job: Job,
    algorithm: AnyAlgorithm,
    exchange: Exchange,
    state: TrainingState,
    directory: RunDirectory | None,
    on_progress: OnProgress,
    callbacks: Sequence[Callback] = (),
) -> FitResult:
    """Train for the rounds that are left, then the baselines; write what is not yet written."""
    trained = train(job, algorithm, exchange, state, directory, on_progress, callbacks)
    beside = job.run.training.baselines
    models_by_name = {
        column: trained
        if algorithm.name == name
        else train_baseline(name, job, exchange, on_progress)
        if beside
        else None
        for column, name in BASELINE_ALGORITHMS.items()
    } | {"personal": trained}
    roster = exchange.roster
    losses = {name: test_losses(models, roster) for name, models in models_by_name.items()}
    scores_by_name = {
        name: MetricValues({}, {})
        if w is None
        else compute_metrics(w.algorithm.deployed_task(job.task), job.clients, w.models, metrics=job.metrics)
        for name, w in models_by_name.items()
    }
    clients = clients_frame(roster, losses, trained).assign(
        **{f"test_{n}" if n in job.metrics else n: v for n, v in scores_by_name["personal"].by_client.items()}
    )
    rounds = rounds_frame(job, state.records)
    rows = roster.sizes["test"]
    summary: JsonObject = {"metric": job.task.metric, "test_rows": int(rows.sum()), "level": CONFIDENCE_LEVEL}
    summary |= {name: overall_loss(models_by_name[name], loss, rows, job) for name, loss in losses.items()}
    for name in BASELINE_ALGORITHMS:
        summary[f"improvement_over_{name}"] = mean_improvement(rows, losses[name], losses["personal"])
    summary["measures"] = {name: scores.overall for name, scores in scores_by_name.items()}
    if "epsilon" in state.records[-1]:
        plan = job.plan
        summary["privacy"] = {"epsilon": state.records[-1]["epsilon"], "delta": plan.delta or DEFAULT_DELTA}
        summary["privacy"] |= {"clip": plan.clip, "noise": plan.noise}
    summary |= {"checkpoint": trained.checkpoint, "best_round": trained.best.t, "last_round": trained.last.t}
    job = job.deploy(algorithm)
    if directory is not None and not directory.finished:
        write_parquet(directory.path / CLIENTS_FILE, clients_table(clients.to_dict("records")))
        write_json(directory.path / SUMMARY_FILE, summarize_fit(job, trained, summary))
        write_trained(directory, job, roster, trained, rounds)
    return FitResult(job, trained, summary, clients, rounds, directory.path if directory else None)
