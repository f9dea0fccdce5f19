"""Advice for networks: no exact path, so the candidates are trained, and validation rows choose.

common      FedAvg                               alone       Local
localized   FedAvg, fine-tuned by each client    lambda      one-stage FedProx at a few lambdas
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from mooring.algorithms.base import build
from mooring.core.errors import RequestError
from mooring.engines.fit import Tell, Trained, train
from mooring.engines.loop import Progress
from mooring.engines.prepare import Job, settle

if TYPE_CHECKING:
    from mooring.advice.advise import Deployed

FACTORS = (10.0, 1.0, 0.1)  # on the pull that "auto" proposes
CLOSE = 1.0  # standard errors within which the simpler plan is taken


def choose_network(job: Job, tell: Tell) -> tuple[Deployed, pd.DataFrame]:
    """The candidate with the lowest validation loss over all clients; ties within an error go to the simpler one."""
    from mooring.advice.advise import Deployed

    if int(job.clients.validation.size.sum()) == 0:
        raise RequestError(f"{job.clients.title}: there are no validation rows to choose a plan by.")
    auto = settle(build("fedprox_one_stage", {}), job)[0].lam
    candidates: list[tuple[str, float, str, dict[str, Any]]] = [
        ("common", np.inf, "fedavg", {}),
        ("localized", np.nan, "fedavg_localized", {}),
        *[("lambda", f * auto, "fedprox_one_stage", {"lam": f * auto}) for f in FACTORS],
        ("alone", 0.0, "local", {}),
    ]
    trained = [trial(job, label, name, fields, tell) for label, _, name, fields in candidates]
    size = job.clients.validation.size.double()
    losses = [float((t.validation * size).nansum() / size.sum()) for t in trained]
    pick = simplest(trained, losses, size)
    shared = min((k for k, c in enumerate(candidates) if c[0] == "lambda"), key=lambda k: losses[k])
    m = len(job.clients)
    label, lam, *_ = candidates[pick]
    path = pd.DataFrame([{"family": c[0], "lambda": c[1], "loss": loss} for c, loss in zip(candidates, losses)])
    deployed = Deployed(
        trained[-1].models,
        trained[0].common,
        trained[shared].models,
        trained[pick].models,
        [label] * m,
        [float(lam)] * m,
        [float("nan")] * m,
    )
    return deployed, path


def trial(job: Job, label: str, name: str, fields: dict[str, Any], tell: Tell) -> Trained:
    ready, exchange, server = settle(build(name, fields), job)
    return train(job, ready, exchange, Progress(server), None, lambda _, done, rounds: tell(label, done, rounds))


def simplest(trained: list[Trained], losses: list[float], size: Tensor) -> int:
    """The first candidate whose loss is within CLOSE standard errors of the best one's, clients being the units."""
    best = int(np.argmin(losses))
    weight = size / size.sum()
    for k, one in enumerate(trained):
        difference = torch.nan_to_num(one.validation - trained[best].validation)
        spread = float(((weight * (difference - (weight * difference).sum())) ** 2).sum().sqrt())
        if losses[k] - losses[best] <= CLOSE * spread:
            return k
    return best
