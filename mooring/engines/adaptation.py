"""A client that joins after the training: a personal model from the global one, without another round.

    mixture   v <- v - eta alpha grad L_k(alpha v + (1 - alpha) w) from v = w;  alpha v + (1 - alpha) w    APFL
    prox      arg min_v L_k(v) + lam/2 |v - w|^2                                  methods of personal models on a pull
    finetune  the method's own last stage                                         methods that fine-tune before use
    local     the method's own local updates                                      Local, whose w is not trained
    tune      w after local SGD steps                                             methods of one shared model

Each algorithm declares its way in `Algorithm.new_client_method`; new clients of an exactly solved advice get what its
clients got (`model_average.py`).

Source   apfl, Eq. 7 (mixture).
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from mooring.algorithms.apfl import APFL, Mixture, mix_models
from mooring.algorithms.base import AnyAlgorithm
from mooring.algorithms.fedavg import FedAvg
from mooring.algorithms.hyperparameters import auto_eta
from mooring.core.cohort import CohortData, Round, StateTree
from mooring.core.errors import RequestError
from mooring.core.local_training import LocalTraining
from mooring.core.local_work import LocalWork
from mooring.core.penalty import PerClientPenalty, penalty_rows
from mooring.core.task import HasProx, HasSolve, Task
from mooring.engines import local_update
from mooring.estimates.client_statistics import collect_statistics

ADAPTATION_METHODS = ("mixture", "prox", "finetune", "local", "tune")
LOCAL_WORK_FIELDS = (
    *(field.name for field in fields(LocalWork) if field.name not in ("eta", "optimizer_state")),
    "alpha",
    "adapt",
    "adapt_on",
    "alpha_pull",
    "alpha_by",
    "radius",
)
ADAPTATION_ROUNDS = 5  # of local work by a new client: 5 passes where a round is one (apfl, Figure 6)


def adapt_models(
    algorithm: AnyAlgorithm,
    server: StateTree,
    task: Task,
    data: CohortData,
    round: Round,
    *,
    how: str = "auto",
    rounds: int = ADAPTATION_ROUNDS,
) -> Tensor:
    """[C, d]: models of new clients with these data, given a finished run's resolved algorithm and server state.

    Step sizes are the run's, on convex tasks at most what the new client's own curvature allows; an exact prox is used
    where the task has one. A lam or alpha per client has no value for a new client: the median is used.
    """
    how = algorithm.new_client_method if how == "auto" else how
    if how not in ADAPTATION_METHODS:
        raise RequestError(f"how must be one of {', '.join(ADAPTATION_METHODS)} or auto, got {how!r}.")
    if how == "prox" and not hasattr(algorithm, "lam"):
        raise RequestError(f"{algorithm.name} has no lam to pull a new client's model by; use how = 'tune'.")
    separate = [data.select(torch.tensor([i])) for i in range(len(data))]
    return torch.cat(
        [_adapt_client(algorithm, server, task, client_data, round, how, rounds) for client_data in separate]
    )


def _adapt_client(
    algorithm: Any, server: StateTree, task: Task, data: CohortData, round: Round, how: str, rounds: int
) -> Tensor:
    """[1, d]: the model of a single new client, which depends on no other."""
    w = server.w[None]
    rounds_of_work = [round._replace(t=t) for t in range(1, rounds + 1)]
    if how in ("finetune", "local"):
        client = local_update.initial_states(algorithm, task, server.w, 1)
        for turn in rounds_of_work if how == "local" else []:
            client = local_update.client_update(algorithm, task, server, client, data, turn)[0]
        final = local_update.finetune(algorithm, task, server, client, data, round)
        return algorithm.personal_model(server, final).expand(1, -1)
    if how == "mixture":
        mixer = make_local_algorithm(APFL, algorithm, task, data, w)
        state = Mixture(w, w, torch.full((1,), float(mixer.alpha), dtype=w.dtype))
        for turn in rounds_of_work:
            state = deque(
                mixer.local_steps(state, LocalTraining(mixer, task, data, turn), moves_w=False), maxlen=1
            ).pop()
        return mix_models(state.alpha, state.v, w)
    lam = new_client_lam(algorithm.lam, w) if how == "prox" else 0.0
    if how == "prox" and isinstance(task, HasProx):
        return task.prox(w, lam, data.train.full(task), w)
    v, tuner = w, make_local_algorithm(FedAvg, algorithm, task, data, w, float(torch.as_tensor(lam).max()))
    for turn in rounds_of_work:
        v = LocalTraining(tuner, task, data, turn).train(v, pull=(lam, w))
    return v


def make_local_algorithm(kind: Any, algorithm: Any, task: Task, data: CohortData, w: Tensor, pull: float = 0.0) -> Any:
    """An algorithm of that kind, for its local steps, with the run's fields where it has the same."""
    same = [f.name for f in fields(kind) if f.name in LOCAL_WORK_FIELDS and hasattr(algorithm, f.name)]
    shared = {name: getattr(algorithm, name) for name in same}
    if shared.get("adapt_on") == "validation":
        shared["adapt_on"] = "auto"  # the new client may have no validation rows
    if isinstance(shared.get("alpha"), tuple):
        shared["alpha"] = statistics.median(shared["alpha"])
    facts = collect_statistics(task, data, w[0], ())
    ready = kind(**shared).resolve(task, facts)
    # The step of the personal model, where the method has two.
    known = [getattr(algorithm, name, "auto") for name in ("personal_eta", "inner_eta", "eta")]
    given = next((eta for eta in known if not isinstance(eta, str)), None)
    safe = auto_eta(task, facts, ready.batch, pull)
    if given is not None and isinstance(task, HasSolve):
        given = min(given, safe)
    return replace(ready, eta=safe if given is None else given)


def new_client_lam(lam: Any, w: Tensor) -> Tensor:
    """lam as [1, 1] or [1, d]."""
    if isinstance(lam, PerClientPenalty) and lam.per_client is not None:
        lam = replace(lam, per_client=(statistics.median(lam.per_client),))
    return penalty_rows(lam, torch.zeros(len(w), dtype=torch.long), w)
