"""The files of a fit: what a run directory appears with, and what is written when the training is done."""

from __future__ import annotations

import hashlib
from typing import Any

import pandas as pd

from mooring.core.errors import RequestError
from mooring.core.types import JsonObject
from mooring.core.user_code import copy_files
from mooring.data.clients import PARTS
from mooring.engines import training_checkpoint
from mooring.engines.exchange import BEST, LAST, ClientRoster
from mooring.engines.fit_result import RoundModels, TrainedModels
from mooring.engines.prediction_intervals import score_fit
from mooring.engines.prepare import Job
from mooring.engines.request import hyperparameters, user_code_specs
from mooring.runs.atomic_files import DamagedFile, json_bytes, parquet_bytes, write_parquet
from mooring.runs.directory import (
    INPUTS_FILE,
    ROUNDS_FILE,
    RUN_FILE,
    SCHEMA_FILE,
    SPLIT_FILE,
    RunDirectory,
    StoredModels,
)
from mooring.runs.runfile import RunFile, run_bytes
from mooring.runs.table_schemas import rounds_table


def initial_files(job: Job) -> dict[str, bytes]:
    """The files that a run directory appears with."""
    files = {RUN_FILE: run_bytes(job.run), **copy_files(user_code_specs(job.run), job.copies)}
    if job.clients.schema is not None:
        files[SCHEMA_FILE] = json_bytes(job.clients.schema.model_dump(mode="json"))
    if job.clients.placement is not None:
        files[SPLIT_FILE] = parquet_bytes(job.clients.placement)
    if inputs := digest_inputs(job):
        files[INPUTS_FILE] = json_bytes(inputs)
    return files


def with_resolved(run: RunFile, ready: Any) -> RunFile:
    """The run file with the numbers that "auto" and the like became."""
    asked = run.algorithm
    assert asked is not None
    resolved = {k: v for k, v in hyperparameters(ready).items() if asked.fields.get(k) != v}
    return run.model_copy(update={"algorithm": asked.model_copy(update={"resolved": resolved})})


def digest_inputs(job: Job) -> JsonObject:
    """The digest of what a schema does not tell: rows that came as arrays or images."""
    out: JsonObject = {}
    if job.clients.schema is None:
        digest = hashlib.sha256(json_bytes({"names": job.clients.names}))
        for part in PARTS:
            rows = getattr(job.clients, part)
            for tensor in (rows.x, rows.y, rows.start, rows.size):
                digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(tensor.contiguous().numpy().data)
        out["rows"] = digest.hexdigest()
    return out


def check_same_data(directory: RunDirectory, job: Job) -> None:
    """The rows must be those that the run began with; a finished run must be whole."""
    changed = "has changed since the run began; start a new run"
    schema = job.clients.schema
    if (
        schema is not None
        and (directory.path / SCHEMA_FILE).exists()
        and directory.schema.get("digest") != schema.digest
    ):
        raise RequestError(f"{directory.path}: {job.run.data.source} {changed}.")
    was = directory.inputs
    if was and was.get("rows") != digest_inputs(job).get("rows"):
        raise RequestError(f"{directory.path}: {job.run.data.source} {changed}.")
    if directory.finished:
        try:
            _ = directory.models
        except DamagedFile as error:
            raise DamagedFile(f"{error} Remove it and resume: the checkpoints make it again.") from None


def write_trained(
    directory: RunDirectory, job: Job, roster: ClientRoster, trained: TrainedModels, rounds: pd.DataFrame
) -> None:
    """The rounds, the models of the round that was not kept where it is another one, and last the models kept."""
    write_parquet(directory.path / ROUNDS_FILE, rounds_table(rounds.drop(columns="seconds").to_dict("records")))
    training_checkpoint.save_seconds(directory, trained.outcome.state)

    def models(which: RoundModels) -> StoredModels:
        return StoredModels(which.common, which.models, roster.names, *describe_task(job))

    if trained.best.t != trained.last.t:
        if trained.checkpoint == BEST:
            directory.write_other_models(LAST, models(trained.last))
        else:
            directory.write_other_models(BEST, models(trained.best))
    directory.write_models(models(trained.used))


def describe_task(job: Job) -> tuple[JsonObject, Any]:
    """How a models file describes its task and the order of its parameters."""
    task = job.task
    about: JsonObject = {
        "name": task.name,
        "metric": task.metric,
        "kind": job.clients.kind,
        "classes": list(job.clients.classes),
    }
    about |= {"features": list(job.clients.features), "settings": task.describe()}
    about |= {"target_mean": job.clients.target_mean, "target_scale": job.clients.target_scale}
    rows = getattr(job.clients, "train", None)  # clients apart keep theirs
    if rows is not None:
        about |= {"inputs": list(rows.x.shape[1:]), "outputs": list(rows.y.shape[1:])}
        about |= {"whole": not rows.x.dtype.is_floating_point}
    return about, [{"name": part.name, "shape": list(part.shape), "start": part.start} for part in task.layout]


def summarize_fit(job: Job, trained: TrainedModels, summary: JsonObject) -> JsonObject:
    """What a report says of a fit before any table."""
    about = {"title": job.clients.title, "algorithm": trained.algorithm.name, "notes": list(job.clients.notes)}
    scores = (
        None if getattr(job.clients, "train", None) is None else score_fit(job.task, job.clients, trained.used.models)
    )
    return summary | about | ({} if scores is None else {"intervals": scores.model_dump(mode="json")})
