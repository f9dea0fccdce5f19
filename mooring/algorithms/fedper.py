"""FedPer: clients share the body of the model, each keeps a head of its own.

Arivazhagan, Aggarwal, Singh, Choudhary. Federated learning with personalization layers. 2019, Algorithms 1 and 2.

    (w_i, h_i) = (w, h_i) after `steps` local SGD steps on L_i
    w  <- sum_i p_i w_i / sum_i p_i                       over the cohort; h_i is not sent

FedAvg with a personal part, which the engine keeps at clients (`engines/personal_parts.py`).

Symbols  w: Server.w but for its personal part, which stays as it started    h_i: the client's copy of that part
         personal: which part h is
Limits   personal = "*" is Local by SGD
Departs  the personal part may be any named part of the model
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mooring.algorithms.fedavg import FedAvg


@dataclass(frozen=True)
class FedPer(FedAvg):
    personal: str | tuple[str, ...] = "head"

    paper: ClassVar[str] = "fedper, Algorithms 1 and 2"
    group: ClassVar[str] = "personal"
    reveals: ClassVar[str] = "each client's change of the shared part; its personal part stays with it"
    new_client_method: ClassVar[str] = "local"
