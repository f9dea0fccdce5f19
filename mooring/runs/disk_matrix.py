"""A matrix on disk; only requested rows are in memory."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from threading import Lock
from weakref import finalize

import torch
from torch import Tensor

from mooring.core.errors import RequestError


class DiskMatrix:
    """A matrix [m, ...] in an unnamed file; every row is `first` until it is set."""

    def __init__(self, first: Tensor, rows: int):
        self.first, self.is_set = first, torch.zeros(rows, dtype=torch.bool)
        self.file = tempfile.TemporaryFile()  # noqa: SIM115  # it lives as long as the matrix
        finalize(self, self.file.close)
        self.lock = Lock()  # chunks of a round are processed in parallel

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.is_set), *self.first.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.first.dtype

    @property
    def _bytes(self) -> int:
        return self.first.numel() * self.first.element_size()

    def __iter__(self) -> Iterator[Tensor]:
        return (self[torch.tensor([place])][0] for place in range(len(self.is_set)))

    def __getitem__(self, position: Tensor) -> Tensor:
        out = self.first.new_empty(len(position), *self.first.shape)
        for row, place in zip(out, position.tolist()):
            if bool(self.is_set[place]):
                with self.lock:
                    self.file.seek(place * self._bytes)
                    self.file.readinto(tensor_bytes(row))
            else:
                row.copy_(self.first)
        return out

    def __setitem__(self, position: Tensor, part: Tensor) -> None:
        try:
            for place, row in zip(position.tolist(), part):
                with self.lock:
                    self.file.seek(place * self._bytes)
                    self.file.write(tensor_bytes(row.detach().contiguous()))
            self.file.flush()
        except OSError as error:
            folder = tempfile.gettempdir()
            raise RequestError(
                f"{folder} has no room for the clients' models ({error}); set TMPDIR to a folder that has."
            ) from error
        self.is_set[position] = True

    def clone(self) -> DiskMatrix:
        twin = DiskMatrix(self.first, len(self.is_set))
        twin.is_set = self.is_set.clone()
        self.file.seek(0)
        shutil.copyfileobj(self.file, twin.file, 1 << 24)
        return twin


def tensor_bytes(part: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor; `view` would refuse a single entry with an unusual stride."""
    return part.as_strided((part.numel(),), (1,)).view(torch.uint8).numpy().data
