"""Networks to use elsewhere: a module with the parameters of a trained vector."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from mooring.core.errors import RequestError
from mooring.core.task import Task
from mooring.tasks.network import NetworkTask
from mooring.tasks.network_losses import TARGET_UNITS


class TargetUnitsModule(nn.Module):
    """A network that was trained on (y - mean) / scale, and answers in the units of y."""

    def __init__(self, net: nn.Module, mean: float, scale: float):
        super().__init__()
        self.net = net
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float64))
        self.register_buffer("scale", torch.tensor(scale, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        output = self.net(x)
        return output * self.scale.to(output.dtype) + self.mean.to(output.dtype)


def build_module(task: Task, w: Tensor, mean: float = 0.0, scale: float = 1.0) -> nn.Module:
    """The network with the parameters w [d], ready to be used: evaluation mode, answers in the target's own units.

    `mean` and `scale` are those of the target that the rows were standardised by. Classes and labels come as logits.
    """
    if not isinstance(task, NetworkTask):
        raise RequestError(f"task '{task.name}' is no network; its models are in .models, and in .coefficients.")
    net = task.device.unload_module(copy.deepcopy(task.module))
    values = task.layers(w[None])
    with torch.no_grad():
        for name, part in (*net.named_parameters(), *net.named_buffers()):
            if name in values:
                part.copy_(values[name][0] if part.dtype.is_floating_point else values[name][0].round())
    plain = task.units == TARGET_UNITS or task.metric == "log-loss" or (mean == 0 and scale == 1)
    return (net if plain else TargetUnitsModule(net, mean, scale)).eval()
