"""The personal part of a model: which coefficients stay with the client.

`resolve` turns the names of parts (`core.task.part_mask`) into ranges of coefficients (start, end), which are written
to the run file.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mooring.algorithms.server_optimizers import GlobalServer, GlobalState, apply_change
from mooring.core.errors import RequestError
from mooring.core.local_work import LocalWork
from mooring.core.task import Task, part_mask

Ranges = tuple[tuple[int, int], ...]
PersonalPart = Any  # of a field: names, or Ranges once it is resolved


def parse_personal(algorithm: LocalWork) -> None:
    """Bring the field `personal` of a frozen dataclass into one form: a name, or ranges as tuples."""
    value: PersonalPart = algorithm.personal
    if isinstance(value, str):
        return
    ranges = tuple((int(start), int(end)) for start, end in value)
    if any(not 0 <= start < end for start, end in ranges):
        raise RequestError(f"{type(algorithm).__name__}: personal has an empty range: {ranges}.")
    object.__setattr__(algorithm, "personal", ranges)


def find_ranges(task: Task, personal: str | Ranges) -> Ranges:
    """The ranges of coefficients that `personal` names."""
    if not isinstance(personal, str):
        return personal
    mask = part_mask(task, personal)
    edges = torch.nonzero(torch.diff(torch.cat([mask.new_zeros(1), mask, mask.new_zeros(1)]).int())).flatten()
    return tuple((int(start), int(end)) for start, end in edges.reshape(-1, 2))


def add_local_buffers(ranges: Ranges, task: Task) -> Ranges:
    """The ranges with the buffers of a network, where each client keeps its own."""
    if not task.local_buffers or any(end == task.dim for _, end in ranges):
        return ranges
    return (*ranges, (task.gradient_dim, task.dim))


@lru_cache(maxsize=64)
def range_mask(ranges: Ranges, dim: int) -> Tensor:
    """[d] bool: the coefficients in the ranges."""
    mask = torch.zeros(dim, dtype=torch.bool)
    for start, end in ranges:
        mask[start:end] = True
    return mask


def split_model(w: Tensor, ranges: Ranges) -> tuple[Tensor, Tensor]:
    """The shared and the personal coefficients of w, [d] or [C, d]."""
    mask = range_mask(ranges, w.shape[-1])
    return w[..., ~mask], w[..., mask]


def join_model(shared: Tensor, personal: Tensor, ranges: Ranges) -> Tensor:
    """[C, d] or [d]: the model of shared coefficients, [k] or [C, k], and personal ones, [d - k] or [C, d - k]."""
    mask = range_mask(ranges, shared.shape[-1] + personal.shape[-1])
    leading = torch.broadcast_shapes(shared.shape[:-1], personal.shape[:-1])
    w = personal.new_empty(*leading, len(mask))
    w[..., mask], w[..., ~mask] = personal, shared
    return w


def update_shared(algorithm: GlobalServer, server: GlobalState, mean: Tensor, personal: PersonalPart) -> GlobalState:
    """The server's state after the mean change of the coefficients that are not personal."""
    shared, own = split_model(server.w, personal)
    shared, moments = apply_change(algorithm, shared, server.moments, mean)
    return GlobalState(join_model(shared, own, personal), moments)
