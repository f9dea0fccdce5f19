"""Checkpoints of a run: everything that changes during a run.

The cost of a round must not grow with the rounds before it: records of rounds are written once, RECORDS_PER_FILE to a
file beside the checkpoints, and a checkpoint contains only those that do not fill a file yet.
"""

from __future__ import annotations

from pathlib import Path

from mooring.core.cohort import StateTree
from mooring.core.types import JsonObject
from mooring.engines.exchange import Exchange
from mooring.engines.training_state import TrainingState
from mooring.runs import checkpoint
from mooring.runs.atomic_files import DamagedFile, make_synced_folder, write_json
from mooring.runs.directory import SECONDS_FILE, RunDirectory
from mooring.runs.tensor_files import flatten, read_tensors, unflatten, write_tensors

PLAIN_FIELDS = ("t", "best_round", "evaluations_since_best", "rounds_without_reply", "first_loss", "stopped")
CLIENT_FIELDS = ("offenders", "left_out")
RECORDS_PER_FILE = 50
CLIENT_PREFIX = "clients."  # prefix of the names of the clients' tensors


def save_training(directory: RunDirectory, progress: TrainingState, exchange: Exchange) -> None:
    """Write the checkpoint of the round that has just ended."""
    tensors = flatten("server", progress.server)
    if progress.best_server is not None:
        tensors |= flatten("best_server", progress.best_server)
    tensors |= {CLIENT_PREFIX + name: tensor for name, tensor in exchange.snapshot().items()}
    meta: JsonObject = {name: getattr(progress, name) for name in PLAIN_FIELDS}
    meta["records"] = save_records(directory, progress.records)
    meta["best"] = None if progress.best == float("inf") else progress.best
    for name in CLIENT_FIELDS:
        meta[name] = {str(client): value for client, value in getattr(progress, name).items()}
    checkpoint.write_checkpoint(directory.path, progress.t, tensors, meta)
    if len(progress.records) <= RECORDS_PER_FILE or len(progress.records) % RECORDS_PER_FILE == 0:
        save_seconds(directory, progress)


def save_records(directory: RunDirectory, records: list[JsonObject]) -> list[JsonObject]:
    """Write the files of records that are full and not there yet; return the records that are in none."""

    def without_seconds(part: list[JsonObject]) -> list[JsonObject]:
        return [{k: v for k, v in record.items() if k != "seconds"} for record in part]

    full = len(records) // RECORDS_PER_FILE
    for number in range(full, 0, -1):
        path = records_file(directory, number)
        if path.exists():
            break
        part = records[(number - 1) * RECORDS_PER_FILE : number * RECORDS_PER_FILE]
        make_synced_folder(path.parent)
        write_tensors(path, {}, {"records": without_seconds(part)})
    return without_seconds(records[full * RECORDS_PER_FILE :])


def load_records(directory: RunDirectory, rest: list[JsonObject], rounds: int) -> list[JsonObject]:
    """Return the records of the first `rounds` rounds, of which a checkpoint has the `rest`; delete files of later
    ones, which another course of the run may replace."""
    full = (rounds - len(rest)) // RECORDS_PER_FILE
    records = [record for k in range(full) for record in read_tensors(records_file(directory, k + 1))[1]["records"]]
    number = full + 1
    while (path := records_file(directory, number)).exists():
        path.unlink()
        number += 1
    return records + rest


def records_file(directory: RunDirectory, number: int) -> Path:
    return directory.path / checkpoint.CHECKPOINT_FOLDER / f"records-{number:06d}.safetensors"


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
    progress.records = add_seconds(load_records(directory, meta["records"], stored.round), directory)
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
