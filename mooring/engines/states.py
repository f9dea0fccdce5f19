"""Every client's state between rounds: in memory, or on disk where they are large.

A model of ten million numbers at fifty clients is 2 GB, and a round holds it three times over: the states before and
after, and the messages. States that wait for their turn lie in a file without a name, of which only those rows are read
that are asked for.
"""

from __future__ import annotations

import shutil
import tempfile
from threading import Lock
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from mooring.core.errors import RequestError
from mooring.runs.tensors import flatten, unflatten

LARGE = 1_000_000_000  # bytes of one field of all clients' states from which it lies on disk


class Shelf:
    """A matrix [m, ...] on disk, every row of which is `first` until it is put there."""

    def __init__(self, first: Tensor, clients: int):
        self.first, self.known = first, torch.zeros(clients, dtype=torch.bool)
        self.file = tempfile.TemporaryFile()  # noqa: SIM115  # it lives as long as the shelf
        finalize(self, self.file.close)
        self.turn = Lock()  # chunks of a round are worked on side by side

    @property
    def _bytes(self) -> int:
        return self.first.numel() * self.first.element_size()

    def __getitem__(self, position: Tensor) -> Tensor:
        out = self.first.new_empty(len(position), *self.first.shape)
        for row, place in zip(out, position.tolist()):
            if bool(self.known[place]):
                with self.turn:
                    self.file.seek(place * self._bytes)
                    self.file.readinto(as_bytes(row))  # type: ignore[attr-defined]
            else:
                row.copy_(self.first)
        return out

    def __setitem__(self, position: Tensor, part: Tensor) -> None:
        try:
            for place, row in zip(position.tolist(), part):
                with self.turn:
                    self.file.seek(place * self._bytes)
                    self.file.write(as_bytes(row.detach().contiguous()))
            self.file.flush()
        except OSError as error:
            where = tempfile.gettempdir()
            raise RequestError(
                f"{where} has no room for the clients' models ({error}); set TMPDIR to a folder that has."
            ) from error
        self.known[position] = True

    def copy(self) -> Shelf:
        twin = Shelf(self.first, len(self.known))
        twin.known = self.known.clone()
        self.file.seek(0)
        shutil.copyfileobj(self.file, twin.file, 1 << 24)
        return twin


class States:
    """Every client's state, stacked; those that were never merged still have the first state."""

    def __init__(self, first: Any, clients: int):
        self.first = first
        self.merged = torch.zeros(clients, dtype=torch.long)  # the round of each client's last merged reply
        self.fields: Any = None  # allocated when the first reply is merged

    def take(self, position: Tensor) -> Any:
        if self.fields is None:
            return type(self.first)(*(part.expand(len(position), *part.shape).clone() for part in self.first))
        return type(self.first)(*(part[position] for part in self.fields))

    def put(self, position: Tensor, states: Any, t: int) -> None:
        if self.fields is None:
            self.fields = type(self.first)(*(room_for(part, len(self.merged)) for part in self.first))
        for whole, part in zip(self.fields, states):
            whole[position] = part
        self.merged[position] = t

    def copy(self) -> States:
        twin = States(self.first, len(self.merged))
        twin.merged = self.merged.clone()
        if self.fields is not None:
            twin.fields = type(self.fields)(
                *(part.copy() if isinstance(part, Shelf) else part.clone() for part in self.fields)
            )
        return twin

    def named(self, prefix: str) -> dict[str, Tensor]:
        """As the tensors of a snapshot."""
        merged = {f"{prefix}_merged": self.merged}
        if self.fields is None:
            return merged
        return merged | flatten(prefix, self.take(torch.arange(len(self.merged))))

    @classmethod
    def found(cls, first: Any, prefix: str, snapshot: dict[str, Tensor]) -> States:
        """What `named` put into a snapshot."""
        merged = snapshot[f"{prefix}_merged"]
        states = cls(first, len(merged))
        if any(name.startswith(prefix + "/") for name in snapshot):
            states.put(torch.arange(len(merged)), unflatten(first, prefix, snapshot), 0)
        states.merged = merged
        return states


def as_bytes(row: Tensor) -> memoryview:
    """A contiguous tensor's own memory."""
    return row.reshape(-1).view(torch.uint8).numpy().data


def room_for(first: Tensor, clients: int) -> Any:
    """All clients' first state, on disk if it is large."""
    if clients * first.numel() * first.element_size() < LARGE or first.device.type != "cpu":
        return first.expand(clients, *first.shape).clone()
    return Shelf(first, clients)
