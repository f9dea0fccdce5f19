"""LG-FedAvg: clients keep representations of their own and share the head.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency. Think locally, act globally: federated learning with
local and global representations. 2020, Algorithm 1.

    (h_i, w_i) = (h_i, w) after `steps` local SGD steps on L_i
    w  <- sum_i p_i w_i / sum_i p_i                       over the cohort; h_i, the body, is not sent

Symbols  w: Server.w but for its personal part, which stays as it started    h_i: the client's copy of that part
Limits   with personal = "head" it is FedPer; personal = "*" is Local by SGD
Departs  all clients start from w0 (the paper's experiments start from a model of FedAvg), and L_i has no auxiliary loss
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mooring.algorithms.fedper import FedPer


@dataclass(frozen=True)
class LGFedAvg(FedPer):
    personal: str | tuple[str, ...] = "body"

    paper: ClassVar[str] = "lg-fedavg, Algorithm 1"
