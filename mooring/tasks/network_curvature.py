"""The curvature of a network's loss, from which step sizes are resolved."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mooring.core.cohort import Batch
from mooring.core.task import Constants

if TYPE_CHECKING:
    from mooring.tasks.network import NetworkTask

ROW_CURVATURE = 5.0  # a network's Hessian has a few large eigenvalues: its trace is taken as this many of the largest
FLAT_STEP, NEGLIGIBLE = 0.1, 1e-6  # the first step where a loss has no curvature, and what counts as none
NUDGE = 1e-3  # how far w is moved, as a share of its size, where curvature is a difference of gradients


def curvature_constants(task: NetworkTask, batch: Batch, w: Tensor | None, rounds: int) -> Constants:
    """smooth: the largest curvature at w, by power iteration on Hessian products, or what stands for it where the
    loss has none there; convexity is unknown (nan), and a single row's curvature a guess from `smooth`."""
    w = task.start()[None].expand(len(batch.y), -1) if w is None else w
    w, batch = task.to_device(w, batch)
    v = task.device.load(torch.randn(w.shape, generator=torch.Generator().manual_seed(0), dtype=w.dtype))
    try:
        v = _largest_curvature(task, w, batch, v, rounds)
    except RuntimeError:  # a layer of the network has no second derivative in torch
        for _ in range(rounds):
            v = curve_by_difference(task, w, batch, v / v.norm(dim=1, keepdim=True).clamp(min=1e-30))
    smooth = _or_by_slope(task, task.device.unload(v.norm(dim=1)), w, batch) + task.ridge
    nan = torch.full_like(smooth, torch.nan)
    return Constants(smooth, nan, nan, ROW_CURVATURE * smooth, nan, (1 + ROW_CURVATURE) * smooth)


def _largest_curvature(task: NetworkTask, w: Tensor, batch: Batch, v: Tensor, rounds: int) -> Tensor:
    leaf = w[:, : task.parameter_dim].detach().clone().requires_grad_()
    fixed, v = w[:, task.parameter_dim :].detach(), v[:, : task.parameter_dim]
    with torch.enable_grad():
        layers = task.layers(torch.cat([leaf, fixed], 1))
        layers |= {name: layers[name].detach() for name in task.buffer_shapes}
        total = (batch.weight * task.row_losses(layers, batch)).sum()
        (g,) = torch.autograd.grad(total, leaf, create_graph=True)
        for _ in range(rounds):
            v = v / v.norm(dim=1, keepdim=True).clamp(min=1e-30)
            (v,) = torch.autograd.grad(g, leaf, v, retain_graph=True)
    return v


def _or_by_slope(task: NetworkTask, smooth: Tensor, w: Tensor, batch: Batch) -> Tensor:
    """The curvature [C]; where the loss is flat at w (absolute errors, the arms of Huber's loss), what makes a step
    of 1 / curvature take off the share FLAT_STEP of the loss, as its slope has it."""
    slope, height = task.grad(w, batch).square().sum(1), task.loss(w, batch)
    full = slope / height.clamp(min=torch.finfo(w.dtype).tiny)
    flat = smooth <= NEGLIGIBLE * full
    return torch.where(flat & (full > 0), full / FLAT_STEP, torch.where(smooth > 0, smooth, 1.0))


def curve_by_difference(task: NetworkTask, w: Tensor, batch: Batch, v: Tensor) -> Tensor:
    """The Hessian times v, |v| = 1, as a central difference of gradients."""
    far = NUDGE * w.norm(dim=1, keepdim=True).clamp(min=1)
    v[:, task.parameter_dim :] = 0
    ahead, behind = torch.zeros_like(v), torch.zeros_like(v)
    task.grad_by_autograd(w + far * v, batch, task.layers(ahead))
    task.grad_by_autograd(w - far * v, batch, task.layers(behind))
    return (ahead - behind) / (2 * far)
