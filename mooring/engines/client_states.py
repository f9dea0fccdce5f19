"""Every client's state between rounds: in memory, or on disk if they are large.

A model of ten million numbers at fifty clients is 2 GB, and a round needs it three times: the states before and after,
and the messages. States that are not in use are in an unnamed file, from which only requested rows are read.
"""

from __future__ import annotations

from collections import namedtuple
from functools import cache

import torch
from torch import Tensor

from mooring.core.cohort import StateTree
from mooring.core.errors import RequestError
from mooring.runs.disk_matrix import DiskMatrix
from mooring.runs.tensor_files import StoredTensor, flatten, unflatten

MIN_DISK_BYTES = 1_000_000_000  # bytes of one field of all clients' states from which it is on disk


def extend_state(state: StateTree, **added: Tensor) -> StateTree:
    """An algorithm's client state with fields of the engine behind its own."""
    return _extended_type(type(state), tuple(added))(*state, *added.values())  # type: ignore[arg-type]


def split_state(state: StateTree) -> tuple[StateTree, dict[str, Tensor]]:
    """The state that `extend_state` extended, and the added fields."""
    kind = type(state).extends
    size = len(kind._fields)
    return kind(*state[:size]), dict(zip(state._fields[size:], state[size:]))


@cache
def _extended_type(kind: StateTree, added: tuple[str, ...]) -> StateTree:
    """A NamedTuple with the fields of a client's state and the added ones."""
    for name in added:
        if name in kind._fields:
            raise RequestError(f"a client's state has a field {name!r}, which the engine adds itself; rename it.")
    extended = namedtuple(kind.__name__, (*kind._fields, *added))  # type: ignore[misc]
    extended.extends = kind  # type: ignore[attr-defined]
    return extended


class ClientStates:
    """Every client's state, stacked; those that were never merged still have the first state."""

    def __init__(self, first: StateTree, clients: int):
        self.first = first
        self.merged = torch.zeros(clients, dtype=torch.long)  # the round of each client's last merged reply
        self.fields: StateTree = None  # allocated when the first reply is merged

    def take(self, position: Tensor) -> StateTree:
        if self.fields is None:
            return type(self.first)(*(part.expand(len(position), *part.shape) for part in self.first))  # nothing copied
        return type(self.first)(*(part[position] for part in self.fields))

    def field(self, name: str) -> Tensor:
        """[m, ...]: one part of every client's state."""
        positions = torch.arange(len(self.merged))
        if self.fields is None:
            return getattr(self.first, name).expand(len(positions), *getattr(self.first, name).shape)
        return getattr(self.fields, name)[positions]

    def store(self, position: Tensor, states: StateTree, t: int) -> None:
        if self.fields is None:
            self.fields = type(self.first)(*(allocate_states(part, len(self.merged)) for part in self.first))
        for stored, part in zip(self.fields, states):
            stored[position] = part
        self.merged[position] = t

    def copy(self) -> ClientStates:
        twin = ClientStates(self.first, len(self.merged))
        twin.merged = self.merged.clone()
        if self.fields is not None:
            twin.fields = type(self.fields)(*(part.clone() for part in self.fields))
        return twin

    def to_snapshot(self, prefix: str) -> dict[str, StoredTensor]:
        """Return the tensors of a snapshot, which share memory with the states: write them before these change."""
        merged: dict[str, StoredTensor] = {f"{prefix}_merged": self.merged}
        return merged if self.fields is None else merged | flatten(prefix, self.fields)

    @classmethod
    def from_snapshot(cls, first: StateTree, prefix: str, snapshot: dict[str, Tensor]) -> ClientStates:
        """Return the states in a snapshot of `to_snapshot`."""
        merged = snapshot[f"{prefix}_merged"]
        states = cls(first, len(merged))
        if any(name.startswith(prefix + "/") for name in snapshot):
            states.store(torch.arange(len(merged)), unflatten(first, prefix, snapshot), 0)
        states.merged = merged
        return states


def allocate_states(first: Tensor, clients: int) -> StoredTensor:
    """Return all clients' initial state, on disk if it is large."""
    if clients * first.numel() * first.element_size() < MIN_DISK_BYTES or first.device.type != "cpu":
        return first.expand(clients, *first.shape).clone()
    return DiskMatrix(first, clients)
