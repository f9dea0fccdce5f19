"""Kernels: positive semidefinite functions k(x, z) that define which functions are simple.

    linear       x'z
    polynomial   (1 + x'z)^degree
    rbf          exp(-|x - z|_2^2 / (2 bandwidth^2))
    laplace      exp(-|x - z|_1 / bandwidth)
    sobolev      (|x| + |z| - |x - z|)/2, which is min(x, z) for numbers x, z >= 0
    ntk          x'z (pi - a)/pi + |x| |z| (sin a + (pi - a) cos a)/pi,  a the angle between x and z

A kernel takes x [..., n, q] and z [..., l, q] to [..., n, l]; leading dimensions broadcast.

The functions of `sobolev` are those with f(0) = 0 and square-integrable derivatives of order (q + 1)/2: the first one
for numbers. `ntk` is the tangent kernel of sqrt(2/h) sum_j a_j relu(w_j'x), h -> infinity, all a_j and w_j standard
normal and trained.

Departs  `kernel` prints the ntk of the first layer alone, and that without its factor x'z.

Source   kernel, Sections 4 and 7.4, Remark 6, Appendix B.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from mooring.core.errors import RequestError

Kernel = Callable[[Tensor, Tensor], Tensor]


def linear(x: Tensor, z: Tensor) -> Tensor:
    return x @ z.mT


def polynomial(x: Tensor, z: Tensor, degree: int = 2) -> Tensor:
    return (1 + x @ z.mT) ** degree


def rbf(x: Tensor, z: Tensor, bandwidth: float = 1.0) -> Tensor:
    return torch.exp(-0.5 * (_distance(x, z, 2) / bandwidth) ** 2)


def laplace(x: Tensor, z: Tensor, bandwidth: float = 1.0) -> Tensor:
    return torch.exp(-_distance(x, z, 1) / bandwidth)


def sobolev(x: Tensor, z: Tensor) -> Tensor:
    return 0.5 * (x.norm(dim=-1)[..., :, None] + z.norm(dim=-1)[..., None, :] - _distance(x, z, 2))


def ntk(x: Tensor, z: Tensor) -> Tensor:
    size = x.norm(dim=-1)[..., :, None] * z.norm(dim=-1)[..., None, :]
    cosine = (x @ z.mT / size.clamp(min=torch.finfo(size.dtype).tiny)).clamp(-1, 1)
    a = torch.arccos(cosine)
    return size / math.pi * (2 * cosine * (math.pi - a) + torch.sin(a))


KERNELS: dict[str, Callable[..., Tensor]] = {
    "linear": linear,
    "polynomial": polynomial,
    "rbf": rbf,
    "laplace": laplace,
    "sobolev": sobolev,
    "ntk": ntk,
}
SETTINGS = {"polynomial": ("degree",), "rbf": ("bandwidth",), "laplace": ("bandwidth",)}  # of each kernel


def find(kernel: str | Kernel, **settings: float) -> Kernel:
    """The kernel of that name with its settings among these; a function is returned unchanged."""
    if callable(kernel):
        return kernel
    if kernel not in KERNELS:
        raise RequestError(f"unknown kernel {kernel!r}; known: {', '.join(KERNELS)}, or a function of (x, z).")
    return partial(KERNELS[kernel], **{k: v for k, v in settings.items() if k in SETTINGS.get(kernel, ())})


def gram(kernel: str | Kernel, x: Tensor, z: Tensor | None = None, **settings: float) -> Tensor:
    """[..., n, l]: k(x, z), or k(x, x)."""
    return find(kernel, **settings)(x, x if z is None else z)


def _distance(x: Tensor, z: Tensor, power: int) -> Tensor:
    """Without the expansion |x|^2 - 2 x'z + |z|^2, which loses the distances of near points."""
    return torch.cdist(x, z, p=power, compute_mode="donot_use_mm_for_euclid_dist")
