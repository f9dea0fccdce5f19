"""Checkpoints of a run: everything that changes during a run."""

from __future__ import annotations

from mooring.core.cohort import StateTree
from mooring.core.types import JsonObject
from mooring.engines.exchange import Exchange
from mooring.engines.training_state import TrainingState
from mooring.runs import checkpoint
from mooring.runs.atomic_files import DamagedFile, write_json
from mooring.runs.directory import SECONDS_FILE, RunDirectory
from mooring.runs.tensor_files import flatten, unflatten

PLAIN_FIELDS = ("t", "best_round", "evaluations_since_best", "rounds_without_reply", "first_loss", "stopped")
CLIENT_FIELDS = ("offenders", "left_out")
CLIENT_PREFIX = "clients."  # prefix of the names of the clients' tensors


def save_training(directory: RunDirectory, progress: TrainingState, exchange: Exchange) -> None:
    """Write the checkpoint of the round that has just ended."""
    tensors = flatten("server", progress.server)
    if progress.best_server is not None:
        tensors |= flatten("best_server", progress.best_server)
    tensors |= {CLIENT_PREFIX + name: tensor for name, tensor in exchange.snapshot().items()}
    meta: JsonObject = {name: getattr(progress, name) for name in PLAIN_FIELDS}
    meta["records"] = [{k: v for k, v in record.items() if k != "seconds"} for record in progress.records]
    meta["best"] = None if progress.best == float("inf") else progress.best
    for name in CLIENT_FIELDS:
        meta[name] = {str(client): value for client, value in getattr(progress, name).items()}
    checkpoint.write_checkpoint(directory.path, progress.t, tensors, meta)
    save_seconds(directory, progress)


def save_seconds(directory: RunDirectory, progress: TrainingState) -> None:
    """Write the seconds of each round to a separate file: all other files are equal for equal runs."""
    write_json(directory.path / SECONDS_FILE, {"rounds": [record["seconds"] for record in progress.records]})


def add_seconds(records: list[JsonObject], directory: RunDirectory) -> list[JsonObject]:
    """Return the records with their seconds, as far as these were saved and are intact."""
    try:
        seconds = directory.seconds.get("rounds", [])
    except DamagedFile:
        seconds = []
    took = [float("nan") if second is None else second for second in seconds]
    return [{**record, "seconds": took[k] if k < len(took) else float("nan")} for k, record in enumerate(records)]


def restore_training(
    directory: RunDirectory, server: StateTree, exchange: Exchange
) -> tuple[TrainingState, str | None]:
    """Return the state of the latest intact checkpoint, including the clients, and a note if a newer one was
    damaged."""
    stored = checkpoint.read_latest_checkpoint(directory.path)
    if stored is None:
        return TrainingState(server), None
    checkpoint.drop_old(directory.path)
    meta = stored.meta
    plain_values = {name: meta[name] for name in PLAIN_FIELDS if name in meta}  # earlier versions had fewer
    progress = TrainingState(unflatten(server, "server", stored.tensors), **plain_values)
    progress.records = add_seconds(meta["records"], directory)
    progress.best = float("inf") if meta["best"] is None else meta["best"]
    for name in CLIENT_FIELDS:
        setattr(progress, name, {int(client): value for client, value in meta.get(name, {}).items()})
    if progress.best_round:
        progress.best_server = unflatten(server, "best_server", stored.tensors)
    client_tensors = {
        name[len(CLIENT_PREFIX) :]: tensor for name, tensor in stored.tensors.items() if name.startswith(CLIENT_PREFIX)
    }
    exchange.restore(client_tensors)
    return progress, stored.note
