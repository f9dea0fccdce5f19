"""Sums of weighted outer products, for many sets of weights at once."""

from __future__ import annotations

import torch
from torch import Tensor

CACHE_NUMBERS = 2**17  # that are weighed at a time: they stay in the processor's cache, which is several times as fast


def sum_weighted_squares(rows: Tensor, weight: Tensor) -> Tensor:
    """[c, d, d]: sum_n weight_nc x_n x_n' over rows x [N, d], with weights [N, c]."""
    d, c = rows.shape[1], weight.shape[1]
    out = torch.zeros(d, c * d, dtype=rows.dtype)
    few = max(1, CACHE_NUMBERS // (c * d))
    for x, w in zip(rows.split(few), weight.split(few)):
        out.addmm_(x.T, (w[..., None] * x[:, None]).flatten(1))
    return out.view(d, c, d).transpose(0, 1)
