"""The personal part of a model: which coefficients stay with the client, by name.

    "head"             the last layer: a network's output layer, a table's intercepts
    "body"             all but the last layer
    "norm"             normalization layers: modules whose class name ends in Norm, Norm1d, Norm2d or Norm3d
    "fc", "*.lora_*"   parameters or layers whose names match; several names are separated by commas

`resolve` turns such a name into ranges of coefficients (start, end), which are written to the run file.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mooring.core.errors import RequestError
from mooring.core.task import Layout, Task, head_mask

Ranges = tuple[tuple[int, int], ...]
PersonalPart = Any  # of a field: a name, or Ranges once it is resolved
NORM_CLASS = re.compile(r"Norm([123]d)?$")


def parse_personal(algorithm: Any) -> None:
    """Bring the field `personal` of a frozen dataclass into one form: a name, or ranges as tuples."""
    value = algorithm.personal
    if isinstance(value, str):
        return
    ranges = tuple((int(start), int(end)) for start, end in value)
    if any(not 0 <= start < end for start, end in ranges):
        raise RequestError(f"{type(algorithm).__name__}: personal has an empty range: {ranges}.")
    object.__setattr__(algorithm, "personal", ranges)


def find_ranges(owner: str, task: Task, personal: str | Ranges) -> Ranges:
    """The ranges of coefficients that `personal` names."""
    if not isinstance(personal, str):
        return personal
    mask = _named_mask(task, personal)
    if not bool(mask.any()):
        names = ", ".join(dict.fromkeys(block.name for block in task.layout))
        raise RequestError(f"{owner}: personal = {personal!r} matches no parameter; the model has {names}.")
    edges = torch.nonzero(torch.diff(torch.cat([mask.new_zeros(1), mask, mask.new_zeros(1)]).int())).flatten()
    return tuple((int(start), int(end)) for start, end in edges.reshape(-1, 2))


def head_coefficients(task: Task, layers: int = 1) -> Tensor:
    """[d] bool: the parameters of the last layers; buffers, which are behind all parameters, are not among them."""
    mask = torch.zeros(task.dim, dtype=torch.bool)
    mask[: task.gradient_dim] = head_mask(trained_blocks(task), layers)
    return mask


def trained_blocks(task: Task) -> Layout:
    """The blocks of the layout that gradients move."""
    return tuple(block for block in task.layout if block.start < task.gradient_dim)


def _named_mask(task: Task, personal: str) -> Tensor:
    """[d] bool: the coefficients that a name stands for."""
    head = head_coefficients(task)
    if personal == "head":
        return head
    if personal == "body":
        return ~head
    mask = torch.zeros_like(head)
    if personal == "norm":
        module = getattr(task, "module", None)
        layers = {} if module is None else dict(module.named_modules())
        patterns = [name for name, layer in layers.items() if NORM_CLASS.search(type(layer).__name__)]
    else:
        patterns = [name.strip() for name in personal.split(",")]
    for block in task.layout:
        mask[block.place] = any(fnmatchcase(name, p) for p in patterns for name in (block.name, block.layer))
    return mask


@lru_cache(maxsize=64)
def personal_mask(ranges: Ranges, dim: int) -> Tensor:
    """[d] bool: the coefficients in the ranges."""
    mask = torch.zeros(dim, dtype=torch.bool)
    for start, end in ranges:
        mask[start:end] = True
    return mask


def split_model(w: Tensor, ranges: Ranges) -> tuple[Tensor, Tensor]:
    """The shared and the personal coefficients of w, [d] or [C, d]."""
    mask = personal_mask(ranges, w.shape[-1])
    return w[..., ~mask], w[..., mask]


def join_model(shared: Tensor, personal: Tensor, ranges: Ranges) -> Tensor:
    """[C, d]: the model of shared coefficients, one [k] for all clients or [C, k], and personal ones [C, d - k]."""
    mask = personal_mask(ranges, shared.shape[-1] + personal.shape[-1])
    w = personal.new_empty(len(personal), len(mask))
    w[:, mask], w[:, ~mask] = personal, shared
    return w
