"""Faster local steps of networks: of perceptrons and convolutions, client by client, or stacked and in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mooring.core.cohort import Batch, Rows
from mooring.core.sgd_step import StepTerms
from mooring.tasks.fused import per_client, perceptron_numba, perceptron_per_client
from mooring.tasks.fused.perceptron_stacked import gradient_at, perceptron_step
from mooring.tasks.network_losses import RowLoss

if TYPE_CHECKING:
    from mooring.tasks.network import NetworkTask


def can_compile(task: NetworkTask) -> bool:
    """Whether local steps of a large perceptron can be compiled."""
    large = task.is_perceptron and task.steps_by_client
    return large and perceptron_numba.can_compile(perceptron_of(task), task.dtype)


def step_by_client(task: NetworkTask, v: Tensor, *how: Any) -> None:
    """Take many local steps (`core.task.LocalSteps`)."""
    if _uses_compiled_steps(task, how[1]):
        perceptron_numba.run_local_steps(perceptron_of(task), v, *how, ridge=task.ridge)
    elif task.is_perceptron:
        net = perceptron_of(task)
        with net.quick():
            per_client.run_local_steps(
                perceptron_per_client.make_client_update(net), net.labels, v, *how, ridge=task.ridge
            )
    else:
        work = per_client.make_module_update(task.module, _places(task), _client_loss(task), task.frozen)
        per_client.run_local_steps(work, per_client.identity, v, *how, ridge=task.ridge)


def mix_by_client(task: NetworkTask, *how: Any) -> None:
    """Take many steps of a perceptron and its mixture with a second one (`core.task.MixtureSteps`)."""
    net, rows, update = perceptron_of(task), how[4], how[8]
    if _uses_compiled_steps(task, rows) and update.rows is None:
        perceptron_numba.run_mixture_steps(net, *how)
        return
    with net.quick():
        per_client.run_mixture_steps(perceptron_per_client.make_mixture_update(net), net.labels, *how)


def _uses_compiled_steps(task: NetworkTask, rows: Rows) -> bool:
    return task.kernels == "numba" and task.compiles and perceptron_numba.can_read(rows)


def perceptron_of(task: NetworkTask) -> perceptron_per_client.Perceptron:
    assert isinstance(task.module, nn.Sequential)  # what is_perceptron says
    return perceptron_per_client.Perceptron(task.module, _places(task), _client_loss(task), task.classifies)


def _places(task: NetworkTask) -> dict[str, slice]:
    return {part.name: part.place for part in task.layout}


def _client_loss(task: NetworkTask) -> RowLoss:
    """The losses [B] of one client's outputs and targets."""
    return lambda output, y: task.each_loss(output[None], y[None])[0]


def step_perceptron(task: NetworkTask, v: Tensor, batch: Batch, move: StepTerms) -> None:
    """Take one local step of stacked perceptrons in place."""
    weight = batch.weight * move.rate

    def slope(output: Tensor) -> Tensor:
        if not task.classifies:
            return gradient_at(lambda out: (weight * task.each_loss(out, batch.y)).sum(), output)
        residual = torch.softmax(output, -1)
        residual.scatter_add_(-1, batch.y[..., None], residual.new_full((), -1).expand_as(batch.y)[..., None])
        return residual.mul_(weight[..., None])

    assert isinstance(task.module, nn.Sequential)  # what is_perceptron says
    perceptron_step(task.module, task.layers(v), batch.x, slope, move, task.ridge, _places(task))


def grad_by_client(task: NetworkTask, w: Tensor, batch: Batch, out: Tensor) -> None:
    """Put the clients' gradients into out [C, d], one after another by a module that is made for speed."""
    module, losses = per_client.FastModule(task.module, _places(task), task.frozen), _client_loss(task)
    for c in range(len(w)):
        module.load(w[c])
        with torch.enable_grad():
            loss = (batch.weight[c] * losses(task.call_module(module.module, batch.x[c]), batch.y[c])).sum()
            module.write_gradient(loss, out[c])
