"""A run's progress as a checkpoint and back: exactly what changes during a run."""

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
CLIENT_PREFIX = "clients."  # begins the names of what the exchange remembers of its clients


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
        meta[name] = {str(client): what for client, what in getattr(progress, name).items()}
    checkpoint.write_checkpoint(directory.path, progress.t, tensors, meta)
    save_seconds(directory, progress)


def save_seconds(directory: RunDirectory, progress: TrainingState) -> None:
    """How long each round took, in a file of its own: no other file may differ between equal runs."""
    write_json(directory.path / SECONDS_FILE, {"rounds": [record["seconds"] for record in progress.records]})


def add_seconds(records: list[JsonObject], directory: RunDirectory) -> list[JsonObject]:
    """The records with their seconds, as far as those were saved and are whole."""
    try:
        known = directory.seconds.get("rounds", [])
    except DamagedFile:
        known = []
    took = [float("nan") if second is None else second for second in known]
    return [{**record, "seconds": took[k] if k < len(took) else float("nan")} for k, record in enumerate(records)]


def restore_training(
    directory: RunDirectory, server: StateTree, exchange: Exchange
) -> tuple[TrainingState, str | None]:
    """The progress of the latest whole checkpoint, clients included, and a note if a newer one was damaged."""
    stored = checkpoint.read_latest_checkpoint(directory.path)
    if stored is None:
        return TrainingState(server), None
    checkpoint.drop_old(directory.path)
    meta = stored.meta
    known = {name: meta[name] for name in PLAIN_FIELDS if name in meta}  # earlier versions knew fewer
    progress = TrainingState(unflatten(server, "server", stored.tensors), **known)
    progress.records = add_seconds(meta["records"], directory)
    progress.best = float("inf") if meta["best"] is None else meta["best"]
    for name in CLIENT_FIELDS:
        setattr(progress, name, {int(client): what for client, what in meta.get(name, {}).items()})
    if progress.best_round:
        progress.best_server = unflatten(server, "best_server", stored.tensors)
    named = {
        name[len(CLIENT_PREFIX) :]: tensor for name, tensor in stored.tensors.items() if name.startswith(CLIENT_PREFIX)
    }
    exchange.restore(named)
    return progress, stored.note
