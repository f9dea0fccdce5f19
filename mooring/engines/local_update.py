"""The clients' work: local updates, personal models and scores, on a cohort of any size.

The simulator calls these on chunks of hundreds, a client of a deployment on itself, a cohort of one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mooring.algorithms.base import AnyAlgorithm
from mooring.core.cohort import CohortData, Round, Rows, StateTree
from mooring.core.costs import CostMeter, count_costs
from mooring.core.task import Task

NOT_FINITE = "its own model is no longer finite"


def initial_states(algorithm: AnyAlgorithm, task: Task, w0: Tensor, clients: int) -> StateTree:
    """The states [C, ...] of clients that were never merged."""
    first = algorithm.init(task, w0)[1]
    return type(first)(*(part.expand(clients, *part.shape).clone() for part in first))


def client_update(
    algorithm: AnyAlgorithm,
    task: Task,
    server: StateTree,
    client: StateTree,
    data: CohortData,
    round: Round,
    meter: CostMeter,
) -> tuple[StateTree, StateTree]:
    """Run a local update: return new states and messages; `meter` counts the work."""
    return algorithm.client_update(server, client, count_costs(task, meter), data, round)


def finite_states(states: StateTree) -> Tensor:
    """[C]: whether each client's new state is finite; otherwise a client keeps the old one."""
    finite = torch.ones(len(states[0]) if len(states) else 0, dtype=torch.bool)
    for part in states:
        if part.dtype.is_floating_point and part[:1].numel():
            flat = part.reshape(len(part), -1)
            suspect = ~torch.isfinite(flat.sum(1))  # a finite sum has finite parts; large ones may add up to infinity
            finite[suspect] &= torch.isfinite(flat[suspect]).all(1)
    return finite


def personal_models(
    algorithm: AnyAlgorithm,
    task: Task,
    server: StateTree,
    client: StateTree,
    merged: Tensor,
    data: CohortData,
    round: Round,
) -> Tensor:
    """[C, d]: the models that these clients use, `merged` being the rounds of their last merged replies (0: none).

    Fine-tuning is for every client that has rows, sampled before or not. Without it, a client that was never merged
    uses the global model, and so does a client without rows.
    """
    final = algorithm.finetune(server, client, task, data, round)
    personal = algorithm.personal_model(server, final).expand(len(data), -1)
    shared = extend_model(algorithm.global_model(server), personal.shape[1])
    uses_global = data.train.size == 0
    if not algorithm.finetunes:
        uses_global = uses_global | (merged == 0)
    return torch.where(uses_global[:, None], shared, personal)


def extend_model(w: Tensor, dim: int) -> Tensor:
    """[..., dim]: a model as one of the task that is deployed, with zeros behind it (`Algorithm.deployed_task`)."""
    return w if w.shape[-1] == dim else F.pad(w, (0, dim - w.shape[-1]))


def mean_risk(task: Task, w: Tensor, rows: Rows) -> Tensor:
    """[C] in float64: the mean reported loss of each client's model on its rows; nan for a client without rows."""
    out = torch.full((len(rows),), torch.nan, dtype=torch.float64)
    for block in rows.blocks():
        part = rows.select(block)
        if int(part.size.max()) > 0:
            out[block] = task.risk(w[block], part.padded()).double()
    return out
