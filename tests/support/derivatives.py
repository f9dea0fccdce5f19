"""Derivatives of a task against finite differences."""

import torch

STEP = 1e-6


def assert_derivatives_equal_differences(task, w, rows):
    """Gradient and Hessian at w [C, d] equal central differences of loss and gradient, and those of `derivatives`."""
    grad, hessian = task.grad(w, rows), task.hessian(w, rows)
    for together, apart in zip(task.derivatives(w, rows), (task.loss(w, rows), grad, hessian), strict=True):
        torch.testing.assert_close(together, apart)
    for j in range(task.dim):
        shift = torch.zeros_like(w)
        shift[:, j] = STEP
        slope = (task.loss(w + shift, rows) - task.loss(w - shift, rows)) / (2 * STEP)
        torch.testing.assert_close(slope, grad[:, j], rtol=1e-6, atol=1e-8)
        bend = (task.grad(w + shift, rows) - task.grad(w - shift, rows)) / (2 * STEP)
        torch.testing.assert_close(bend, hessian[:, :, j], rtol=1e-6, atol=1e-7)
