"""A run's progress as a checkpoint and back: exactly what changes during a run."""

from __future__ import annotations

from typing import Any

from mooring.engines.loop import Progress
from mooring.engines.simulator import States
from mooring.runs import checkpoint
from mooring.runs.directory import RunDir
from mooring.runs.tensors import flatten, unflatten

PLAIN = ("t", "records", "best_round", "waited", "stopped")


def save(directory: RunDir, progress: Progress, states: States) -> None:
    """Write the checkpoint of the round that has just ended."""
    tensors = flatten("server", progress.server) | _states("clients", states)
    if progress.chosen_server is not None:
        tensors |= flatten("chosen_server", progress.chosen_server) | _states("chosen", progress.chosen_states)
    meta: dict[str, Any] = {name: getattr(progress, name) for name in PLAIN}
    meta["best"] = None if progress.best == float("inf") else progress.best
    meta["offenders"] = {str(client): why for client, why in progress.offenders.items()}
    checkpoint.save(directory.path, progress.t, tensors, meta)


def restore(directory: RunDir, server: Any, states: States) -> tuple[Progress, str | None]:
    """The progress of the latest whole checkpoint, states included, and a note if a newer one was damaged."""
    found = checkpoint.latest(directory.path)
    if found is None:
        return Progress(server), None
    meta = found.meta
    progress = Progress(unflatten(server, "server", found.tensors), **{name: meta[name] for name in PLAIN})
    progress.best = float("inf") if meta["best"] is None else meta["best"]
    progress.offenders = {int(client): why for client, why in meta["offenders"].items()}
    _load(states, "clients", found.tensors)
    if "chosen_merged" in found.tensors:
        progress.chosen_server = unflatten(server, "chosen_server", found.tensors)
        progress.chosen_states = States(states.first, len(states.merged))
        _load(progress.chosen_states, "chosen", found.tensors)
    return progress, found.note


def _states(prefix: str, states: States) -> dict[str, Any]:
    merged = {f"{prefix}_merged": states.merged}
    return merged if states.fields is None else merged | flatten(prefix, states.fields)


def _load(states: States, prefix: str, tensors: dict[str, Any]) -> None:
    states.merged = tensors[f"{prefix}_merged"]
    if any(name.startswith(prefix + "/") for name in tensors):
        states.fields = unflatten(states.first, prefix, tensors)
