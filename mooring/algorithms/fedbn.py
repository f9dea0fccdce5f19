"""FedBN: clients share all but the normalization layers, which each keeps for itself.

Li, Jiang, Zhang, Kamp, Dou. FedBN: federated learning on non-IID features via local batch normalization. ICLR 2021,
Algorithm 1.

    (w_i, h_i) = (w, h_i) after `steps` local SGD steps on L_i
    w  <- sum_i p_i w_i / sum_i p_i                       over the cohort; h_i, the normalization, is not sent

Symbols  w: Server.w but for its personal part, which stays as it started    h_i: the client's copy of that part
Limits   with personal = "head" it is FedPer; personal = "*" is Local by SGD
Departs  group, layer and instance normalization count as normalization, too; running statistics are part of it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mooring.algorithms.fedper import FedPer


@dataclass(frozen=True)
class FedBN(FedPer):
    personal: str | tuple[str, ...] = "norm"

    paper: ClassVar[str] = "fedbn, Algorithm 1"
