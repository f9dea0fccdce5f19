"""The files of a fit: those of a new run directory, and those written after the training."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from mooring.algorithms.base import AnyAlgorithm
from mooring.core.errors import RequestError
from mooring.core.types import JsonObject
from mooring.core.user_code import copy_files
from mooring.data.clients import PARTS
from mooring.engines import training_checkpoint
from mooring.engines.exchange import BEST, LAST, ClientRoster
from mooring.engines.fit_result import RoundModels, TrainedModels
from mooring.engines.metrics import Metric
from mooring.engines.model_store import describe_task
from mooring.engines.prediction_intervals import score_fit
from mooring.engines.prepare import Job, prepare
from mooring.engines.request import check_trusted_run, hyperparameters, user_code_specs
from mooring.runs.atomic_files import DamagedFile, directory_lock, json_bytes, parquet_bytes, write_parquet
from mooring.runs.directory import (
    INPUTS_FILE,
    ROUNDS_FILE,
    RUN_FILE,
    SCHEMA_FILE,
    SPLIT_FILE,
    RunDirectory,
    StoredModels,
    open_run,
)
from mooring.runs.runfile import RunFile, run_bytes
from mooring.runs.table_schemas import rounds_table


def initial_files(job: Job) -> dict[str, bytes]:
    """Return the files of a new run directory."""
    files = {RUN_FILE: run_bytes(job.run), **copy_files(user_code_specs(job.run), job.copies)}
    if job.clients.schema is not None:
        files[SCHEMA_FILE] = json_bytes(job.clients.schema.model_dump(mode="json"))
    if job.clients.placement is not None:
        files[SPLIT_FILE] = parquet_bytes(job.clients.placement)
    if inputs := digest_inputs(job):
        files[INPUTS_FILE] = json_bytes(inputs)
    return files


def with_resolved(run: RunFile, algorithm: AnyAlgorithm) -> RunFile:
    """Return the run file with the resolved numbers of "auto" and the like."""
    section = run.algorithm
    assert section is not None
    resolved = {k: v for k, v in hyperparameters(algorithm).items() if section.fields.get(k) != v}
    return run.model_copy(update={"algorithm": section.model_copy(update={"resolved": resolved})})


def digest_inputs(job: Job) -> JsonObject:
    """Return the digest of rows that are arrays or images, which have no schema."""
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


class InMemoryInputs(NamedTuple):
    """Inputs of `prepare` that a run file cannot contain."""

    source: object
    model: object
    loss: object
    algorithms: Mapping[str, type[AnyAlgorithm]]  # by their names in run files


@contextmanager
def reopen(
    path: str | Path,
    purpose: str,
    inputs: InMemoryInputs,
    trust_code: bool = False,
    metrics: Mapping[str, Metric] | None = None,
) -> Iterator[tuple[RunDirectory, Job]]:
    """Lock an interrupted run of this purpose, and prepare its job again. Runs of other purposes, untrusted code
    and changed data are refused."""
    directory = open_run(path)
    own_purpose = directory.run.mooring.purpose
    if own_purpose != purpose:
        raise RequestError(f"{path} is a run of '{own_purpose}', not of '{purpose}': resume it with `mooring.resume`.")
    with directory_lock(directory.path):
        check_trusted_run(directory.run, directory.path, trust_code)
        job = prepare(directory.run, *inputs, directory.path, metrics)
        check_same_data(directory, job)
        yield directory, job


def check_same_data(directory: RunDirectory, job: Job) -> None:
    """Refuse changed rows, and a damaged finished run."""
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
    """Write the rounds, the models of the unused round if it is another one, and last the models in use."""
    write_parquet(directory.path / ROUNDS_FILE, rounds_table(rounds.drop(columns="seconds").to_dict("records")))
    training_checkpoint.save_seconds(directory, trained.outcome.state)

    def models(round_models: RoundModels) -> StoredModels:
        return StoredModels(round_models.common, round_models.models, roster.names, *describe_task(job))

    if trained.best.t != trained.last.t:
        if trained.checkpoint == BEST:
            directory.write_other_models(LAST, models(trained.last))
        else:
            directory.write_other_models(BEST, models(trained.best))
    directory.write_models(models(trained.used))


def summarize_fit(job: Job, trained: TrainedModels, summary: JsonObject) -> JsonObject:
    """Return the summary of a fit for reports."""
    metadata = {"title": job.clients.title, "algorithm": trained.algorithm.name, "notes": list(job.clients.notes)}
    scores = (
        None if getattr(job.clients, "train", None) is None else score_fit(job.task, job.clients, trained.used.models)
    )
    return summary | metadata | ({} if scores is None else {"intervals": scores.model_dump(mode="json")})
