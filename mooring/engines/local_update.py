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
from mooring.core.local_training import LocalTraining, init_memory
from mooring.core.task import Task
from mooring.engines.client_states import extend_state, split_state

MEMORY = "memory"  # the field of the engine's client states that has what local training keeps between rounds
NOT_FINITE = "its own model is no longer finite"


def first_states(algorithm: AnyAlgorithm, task: Task, w0: Tensor) -> tuple[StateTree, StateTree]:
    """The server's and one client's first state (without the leading [C]), with what local training keeps."""
    server, client = algorithm.init(task, w0)
    work = algorithm.local_work
    if work is None:
        return server, client
    return server, extend_state(client, **{MEMORY: init_memory(work, task, w0)})


def initial_states(algorithm: AnyAlgorithm, task: Task, w0: Tensor, clients: int) -> StateTree:
    """The states [C, ...] of clients that were never merged."""
    first = first_states(algorithm, task, w0)[1]
    return type(first)(*(part.expand(clients, *part.shape).clone() for part in first))


def client_update(
    algorithm: AnyAlgorithm,
    task: Task,
    server: StateTree,
    states: StateTree,
    data: CohortData,
    round: Round,
    meter: CostMeter | None = None,
) -> tuple[StateTree, StateTree]:
    """Run a local update: return new states and messages; `meter` counts the work."""
    task = task if meter is None else count_costs(task, meter)
    client, local = begin_update(algorithm, task, states, data, round)
    client, message = algorithm.client_update(server, client, local)
    if algorithm.local_work is not None:
        client = extend_state(client, **{MEMORY: local.next_memory()})
    return client, message


def finetune(
    algorithm: AnyAlgorithm, task: Task, server: StateTree, states: StateTree, data: CohortData, round: Round
) -> StateTree:
    """The clients' states, without what local training keeps, after their last stage before deployment."""
    client, local = begin_update(algorithm, task, states, data, round)
    return algorithm.finetune(server, client, local)


def begin_update(
    algorithm: AnyAlgorithm, task: Task, states: StateTree, data: CohortData, round: Round
) -> tuple[StateTree, LocalTraining]:
    """The algorithm's part of the states, and local training from what the clients kept."""
    work = algorithm.local_work
    if work is None:
        return states, LocalTraining(None, task, data, round)
    client, kept = split_state(states)
    return client, LocalTraining(work, task, data, round, kept[MEMORY])


def own_state(algorithm: AnyAlgorithm, states: StateTree) -> StateTree:
    """The algorithm's part of the states."""
    return states if algorithm.local_work is None else split_state(states)[0]


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
    final = finetune(algorithm, task, server, client, data, round)
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
