"""A network with a second, personal head on its body: both are trained by one pass through the body.

A model is (parameters w, personal head h, buffers). The personal scores are those of the head w + h at the same
representation; the body and w do not see the personal head's loss, and h does not see the loss of w.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mooring.core.cohort import Rows
from mooring.core.errors import RequestError
from mooring.core.task import Task, head_coefficients, trained_blocks
from mooring.tasks.network import NetworkTask
from mooring.tasks.network_losses import FORWARD_ERRORS, main_output


class TwoHeads(nn.Module):
    """A linear layer and a personal one: outputs [2 B, ...], those of the layer and then those of both together."""

    def __init__(self, head: nn.Linear):
        super().__init__()
        self.weight, self.bias = head.weight, head.bias
        self.personal_weight = nn.Parameter(torch.zeros_like(head.weight))
        self.personal_bias = None if head.bias is None else nn.Parameter(torch.zeros_like(head.bias))

    def forward(self, z: Tensor) -> Tensor:
        scores = F.linear(z, self.weight, self.bias)
        personal = F.linear(z.detach(), self.personal_weight, self.personal_bias)
        return torch.cat([scores, scores.detach() + personal])


class TwoHeadedTask(NetworkTask):
    """The task of a network with a second head; its loss is the sum of both heads' losses."""

    def __init__(self, task: NetworkTask):
        self.copy_settings(task)
        self.module = copy.deepcopy(task.module)
        layer = trained_blocks(task)[-1].layer
        self.module.set_submodule(layer, TwoHeads(self.module.get_submodule(layer)))  # type: ignore[arg-type]
        self.head = head_coefficients(task)[: task.parameter_dim]
        self.shapes = {name: p.shape for name, p in self.module.named_parameters() if p.requires_grad}
        self.parameter_dim = sum(shape.numel() for shape in self.shapes.values())
        self.sizes = [shape.numel() for shape in (self.shapes | self.buffer_shapes).values()]
        self.dim = sum(self.sizes)
        self.is_large_perceptron = False

    def join(self, w: Tensor, h: Tensor) -> Tensor:
        """[C, dim]: models w [C, d] with personal heads h [C, d], which are 0 elsewhere."""
        size = len(self.head)
        return torch.cat([w[:, :size], h[:, :size][:, self.head], w[:, size:]], 1)

    def split(self, joint: Tensor) -> tuple[Tensor, Tensor]:
        """What `join` made one."""
        size = len(self.head)
        w = torch.cat([joint[:, :size], joint[:, self.parameter_dim :]], 1)
        h = torch.zeros_like(w)
        h[:, :size][:, self.head] = joint[:, size : self.parameter_dim]
        return w, h

    def _probe(self, x: Tensor, y: Tensor) -> None:
        """The network with one head was probed (`add_personal_head`)."""

    def output_loss(self, output: object, y: Tensor) -> Tensor:
        generic, personal = self.main_output(output).chunk(2)
        return super().output_loss(generic, y) + super().output_loss(personal, y)

    def each_loss(self, output: Tensor, y: Tensor) -> Tensor:
        if output.shape[1] == y.shape[1]:  # of one head
            return super().each_loss(output, y)
        generic, personal = output.chunk(2, 1)
        return super().each_loss(generic, y) + super().each_loss(personal, y)


def add_personal_head(task: Task, rows: Rows) -> TwoHeadedTask | None:
    """The task with a second head, its work counted like the task's; None where one pass does not serve both heads:
    the last trained layer is no linear one, or its output is not the network's."""
    if not isinstance(task, NetworkTask) or task.ridge or not len(rows.y):
        return None
    layer = trained_blocks(task)[-1].layer
    head = task.module.get_submodule(layer)
    if not layer or type(head) is not nn.Linear or not all(p.requires_grad for p in head.parameters()):
        return None
    seen: list[Tensor] = []
    try:
        task.training_steps(rows)  # sees how the network with one head is trained
        output = task.try_forward(rows, lambda module, given, scores: seen.append(scores), head)
    except (*FORWARD_ERRORS, RequestError):
        return None  # explained where training fails
    reads_whole_output = task.has_own_loss and not isinstance(output, Tensor)
    if reads_whole_output or len(seen) != 1 or main_output(output) is not seen[0]:
        return None
    return task.derive(lambda network: network.variant("two heads", lambda: TwoHeadedTask(network)))  # type: ignore
