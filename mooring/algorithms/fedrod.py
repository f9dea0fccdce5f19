"""FedRoD: a generic head learns from balanced classes, a personal head on the same body adds what is the client's own.

Chen, Chao. On bridging generic and personalized federated learning for image classification. ICLR 2022, Section 4.

    w_i <- w_i - eta grad B_i(w_i)                        body and generic head, `steps` times from w
    h_i <- h_i - eta grad_h L_i(w_i + h_i)                personal head, in the same steps on the same minibatches
    w   <- sum_i p_i w_i / sum_i p_i                      over the cohort; h_i is not sent
    v_i  = w + h_i                                        what client i deploys: the sum of both heads' scores

B_i is L_i with log(n_ic) added to the score of class c, n_ic the client's rows of that class (balanced softmax).

Symbols  w: Server.w    h_i: Client.v, added to the coefficients of the head
Limits   the global model is FedAvg's where classes are balanced, or with balanced = false
Departs  the heads are linear, so that the sum of their scores is the score of their sum. Losses other than log-loss and
         heads without an intercept per class, are not balanced (B_i = L_i). A class without rows counts as 1e-9 rows.
         w_i and h_i have an optimizer each: gradients are clipped apart
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from mooring.algorithms.base import Algorithm
from mooring.algorithms.server_optimizers import GlobalServer, GlobalState
from mooring.core.cohort import Rows
from mooring.core.local_training import LocalStep, LocalTraining
from mooring.core.local_work import LocalWork
from mooring.core.task import Task, head_coefficients, trained_blocks
from mooring.tasks.two_heads import TwoHeadedTask, add_personal_head

ROWS_OF_ABSENT_CLASS = 1e-9


class Client(NamedTuple):
    v: Tensor  # [C, d], h_i; 0 but for the head


@dataclass(frozen=True)
class FedRoD(LocalWork, GlobalServer, Algorithm[GlobalState, Client, Tensor]):
    balanced: bool = True

    paper: ClassVar[str] = "fedrod, Section 4"
    reveals: ClassVar[str] = "each client's change of the body and the generic head; its personal head stays with it"
    new_client_method: ClassVar[str] = "local"
    trained_models: ClassVar[int] = 2

    def init(self, task: Task, w0: Tensor) -> tuple[GlobalState, Client]:
        return self.init_server(w0), Client(torch.zeros_like(w0))

    def client_update(self, server: GlobalState, client: Client, local: LocalTraining) -> tuple[Client, Tensor]:
        task, rows = local.task, local.data.train
        prior = class_scores(task, rows) if self.balanced else torch.zeros(())
        w, h, joint = local.expand(server.w), client.v, add_personal_head(task, rows)
        if joint is not None and self._moves_by_coefficient:
            start = joint.join(w + prior, h - prior)  # the personal head takes the prior back
            w, h = joint.split(local.train(start, task=joint, fresh=True))
            return Client(h + prior), w - prior - server.w
        for step in local.steps():
            slope, own = two_head_gradients(step, task, joint, w, h, prior)
            w, h = step.move(w, slope), step.move(h, own)
        return Client(h), w - server.w

    @property
    def _moves_by_coefficient(self) -> bool:
        """Whether a step of w and h is that of w + prior and h - prior, both being one model to the optimizer."""
        rule = self.rule
        return not (rule.weight_decay or rule.clip_grad or (rule.moments and self.optimizer_state == "keep"))

    def personal_model(self, server: GlobalState, client: Client) -> Tensor:
        return server.w + client.v


def two_head_gradients(
    step: LocalStep, task: Task, joint: TwoHeadedTask | None, w: Tensor, h: Tensor, prior: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients [C, d] of B_i in w and of L_i(w + h) in h; by one pass of the network with two heads, `joint`,
    where there is one. The last pass is that of w."""
    if joint is not None:
        return joint.split(step.grad(joint.join(w + prior, h - prior), task=joint))
    own = torch.where(head_coefficients(task), step.grad(w + h), 0.0)
    return step.grad(w + prior) - task.ridge * prior, own  # the ridge is on w only


def class_scores(task: Task, rows: Rows) -> Tensor:
    """[C, d]: log(n_ic) at the intercept of class c, 0 elsewhere; 0 where the task has no such intercepts.

    A single score is that of the second of two classes: log(n_i1 / n_i0).
    """
    block = trained_blocks(task)[-1]
    is_class_per_row = task.metric == "log-loss" and rows.y.ndim == 1
    if not is_class_per_row or not (block.name == "intercept" or block.name.endswith("bias")):
        return torch.zeros(())
    classes = max(block.size, 2)
    counts = torch.stack([torch.bincount(rows.of(c)[1].long(), minlength=classes) for c in range(len(rows))])
    scores = counts.to(task.dtype).clamp(min=ROWS_OF_ABSENT_CLASS).log()
    out = torch.zeros(len(rows), task.dim, dtype=task.dtype)
    out[:, block.place] = scores[:, 1:] - scores[:, :1] if block.size == 1 else scores
    return out
