"""Messages of local updates in fewer bytes, with error feedback.

    float16   entries over the largest of their tensor, as 16-bit floats
    int8      entries in blocks of BLOCK_ENTRIES, as whole numbers of steps of (largest of the block) / 127

What rounding takes away from a message, the client adds to its next one (error feedback), so that errors do not add up
over rounds.

Seide, Fu, Droppo, Li, Yu. 1-bit stochastic gradient descent. Interspeech 2014.
Karimireddy, Rebjock, Stich, Jaggi. Error feedback fixes SignSGD. ICML 2019.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

FLOAT16, INT8 = "float16", "int8"
BLOCK_ENTRIES = 256
MAX_STEP = 127
SCALE_PREFIX = "scale/"


def compress(tensors: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    """Return floating-point tensors in fewer bytes, each beside its scales; others as they are."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not tensor.dtype.is_floating_point or not tensor.numel():
            out[name] = tensor
            continue
        blocks = _split(tensor, kind)
        largest = blocks.abs().amax(1, keepdim=True)
        scale = torch.where(largest > 0, largest, torch.ones_like(largest))
        units = blocks / scale
        small = units.half() if kind == FLOAT16 else (units * MAX_STEP).round().to(torch.int8)
        out[name] = small.reshape(-1)[: tensor.numel()].reshape(tensor.shape)
        out[SCALE_PREFIX + name] = scale.reshape(-1)
    return out


def decompress(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that `compress` made smaller, in their former type; ValueError where they do not fit."""
    out = {}
    for name, tensor in tensors.items():
        if name.startswith(SCALE_PREFIX):
            continue
        scale = tensors.get(SCALE_PREFIX + name)
        if scale is None:
            out[name] = tensor
            continue
        kind = {torch.float16: FLOAT16, torch.int8: INT8}.get(tensor.dtype)
        if kind is None or not scale.dtype.is_floating_point:
            raise ValueError(f"'{name}' is neither in 16-bit floats nor in 8-bit integers")
        blocks = _split(tensor.to(scale.dtype), kind)
        if scale.shape != blocks.shape[:1]:
            raise ValueError(f"'{name}' has {scale.numel()} scales for {blocks.shape[0]} blocks")
        units = blocks if kind == FLOAT16 else blocks / MAX_STEP
        out[name] = (units * scale[:, None]).reshape(-1)[: tensor.numel()].reshape(tensor.shape)
    return out


def compress_with_feedback(
    tensors: Mapping[str, Tensor], residual: Mapping[str, Tensor], kind: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the message plus the residual of the last one, compressed, and the residual that is left."""
    corrected = {name: tensor + residual[name] if name in residual else tensor for name, tensor in tensors.items()}
    sent = compress(corrected, kind)
    received = decompress(sent)
    left = {name: corrected[name] - received[name] for name in corrected if SCALE_PREFIX + name in sent}
    return sent, left


def _split(tensor: Tensor, kind: str) -> Tensor:
    """Return the entries in rows that share a scale, the last one padded with zeros."""
    flat = tensor.reshape(-1)
    if kind == FLOAT16:
        return flat[None]
    padding = -len(flat) % BLOCK_ENTRIES
    return torch.cat([flat, flat.new_zeros(padding)]).reshape(-1, BLOCK_ENTRIES)
