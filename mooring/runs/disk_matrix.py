"""A matrix on disk, of which only those rows are in memory that are asked for."""

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
    """A matrix [m, ...] in a file without a name, every row of which is `first` until it is put there."""

    def __init__(self, first: Tensor, rows: int):
        self.first, self.known = first, torch.zeros(rows, dtype=torch.bool)
        self.file = tempfile.TemporaryFile()  # noqa: SIM115  # it lives as long as the shelf
        finalize(self, self.file.close)
        self.turn = Lock()  # chunks of a round are worked on side by side

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.known), *self.first.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.first.dtype

    @property
    def _bytes(self) -> int:
        return self.first.numel() * self.first.element_size()

    def __iter__(self) -> Iterator[Tensor]:
        return (self[torch.tensor([place])][0] for place in range(len(self.known)))

    def __getitem__(self, position: Tensor) -> Tensor:
        out = self.first.new_empty(len(position), *self.first.shape)
        for row, place in zip(out, position.tolist()):
            if bool(self.known[place]):
                with self.turn:
                    self.file.seek(place * self._bytes)
                    self.file.readinto(tensor_bytes(row))
            else:
                row.copy_(self.first)
        return out

    def __setitem__(self, position: Tensor, part: Tensor) -> None:
        try:
            for place, row in zip(position.tolist(), part):
                with self.turn:
                    self.file.seek(place * self._bytes)
                    self.file.write(tensor_bytes(row.detach().contiguous()))
            self.file.flush()
        except OSError as error:
            where = tempfile.gettempdir()
            raise RequestError(
                f"{where} has no room for the clients' models ({error}); set TMPDIR to a folder that has."
            ) from error
        self.known[position] = True

    def clone(self) -> DiskMatrix:
        twin = DiskMatrix(self.first, len(self.known))
        twin.known = self.known.clone()
        self.file.seek(0)
        shutil.copyfileobj(self.file, twin.file, 1 << 24)
        return twin


def tensor_bytes(part: Tensor) -> memoryview:
    """A contiguous tensor's own memory; one entry is contiguous whatever its stride, which `view` does not take."""
    return part.as_strided((part.numel(),), (1,)).view(torch.uint8).numpy().data
