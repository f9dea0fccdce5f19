"""The representation of rows by a network: what its last layer takes as input."""

from __future__ import annotations

import torch
from torch import Tensor

from mooring.core.task import Task
from mooring.tasks.network import CALLING, NetworkTask
from mooring.tasks.network_training import RANDOM_LOCK


def has_representation(task: Task) -> bool:
    """Whether the task is a network with more than one layer."""
    task.check_head()
    return hasattr(task, "module") and len({block.layer for block in task.layout}) > 1


def represent(task: NetworkTask | Task, w: Tensor, x: Tensor, key: int = 0) -> Tensor:
    """[B, k]: the representations of rows x [B, ...], or of the items that x numbers, by the network with parameters w
    [d], in evaluation mode; data sets that draw random numbers follow `key`, as in a local step."""
    network: NetworkTask = task  # type: ignore[assignment]  # a metered network is one, too
    device = network.device
    layers = {name: part[0] for name, part in network.layers(device.load(w)[None]).items()}
    layers |= {name: layers[name].detach() for name in network.buffer_shapes}
    last = [block.layer for block in network.layout if block.start < network.gradient_dim][-1]
    seen: list[Tensor] = []
    with CALLING, RANDOM_LOCK, device.fork_random_state():
        torch.manual_seed(int(key) >> 1)
        hook = network.module.get_submodule(last).register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        try:
            network.call_module(lambda *args, **named: network.call_with(layers, *args, **named), device.load(x))
        finally:
            hook.remove()
    return device.unload(seen[-1].flatten(1))
