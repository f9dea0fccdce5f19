"""The families that a plan is chosen from: what each setting gives every client, fitted on given rows.

    common     one model for all                               value: its ridge
    alone      everyone's own model                            value: its ridge, one for all clients
    lambda     moored with one lam for all                     value: lam
    size       moored with lam_i = noise_i / (n_i tau^2)       value: a factor on that stiffness
    diagonal   moored with lam_ij = noise_i / (n_i tau_j^2)    value: a factor on that stiffness
    mixture    alpha v_alone + (1 - alpha) w_common            value: alpha (APFL's, with both ends exact)

tau and the noise come from the prior (`prior.py`). The common model inside moored families and mixtures has the ridge of
the best common one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mooring.advice.path import path
from mooring.advice.prior import Prior
from mooring.core.cohort import Rows

COMMON, ALONE, LAMBDA, SIZE, DIAGONAL, MIXTURE = "common", "alone", "lambda", "size", "diagonal", "mixture"
OF_PRIOR = {"scalar": SIZE, "diagonal": DIAGONAL}
MOORED = (LAMBDA, SIZE, DIAGONAL)
CHUNK = 20_000  # clients whose own fits are solved at once


class Setting(NamedTuple):
    family: str
    value: float
    ridge: float = 0.0  # of the common model inside moored families and mixtures
    own_ridge: float = 0.0  # of the models alone inside mixtures


class Models(NamedTuple):
    setting: Setting
    w: Tensor  # [d], the common model of this setting
    v: Tensor  # [m, d], what each client gets


def fitted(task: Any, rows: Rows, p: Tensor, settings: Iterable[Setting], found: Iterable[Prior] = ()) -> Iterator[Models]:
    """Every setting's models on these rows; settings that lie on one path are solved together."""
    by_family = {OF_PRIOR[prior.kind]: prior for prior in found}
    key = lambda s: (s.family, s.ridge, s.own_ridge)  # noqa: E731
    for (family, ridge, own), group in groupby(settings, key):
        members = list(group)
        values = [s.value for s in members]
        if family == COMMON:
            for setting in members:
                w = common_model(task, rows, p, setting.value)
                yield Models(setting, w, w.expand(len(rows), -1))
        elif family == ALONE:
            for setting in members:
                v = alone_models(task, rows, setting.value)
                yield Models(setting, (p.to(v.dtype) / p.sum()) @ v, v)
        elif family == MIXTURE:
            w, v = common_model(task, rows, p, ridge), alone_models(task, rows, own)
            for setting in members:
                yield Models(setting, w, setting.value * v + (1 - setting.value) * w)
        else:
            shape = by_family[family].shape(rows.size) if family in by_family else None
            for setting, point in zip(members, path(task, rows, p, values, shape, ridge)):
                yield Models(setting, point.w, point.v)


def common_model(task: Any, rows: Rows, p: Tensor, ridge: float) -> Tensor:
    """[d]: one model for all rows, client i's rows weighing p_i."""
    return next(path(task, rows, p, [torch.inf], ridge=ridge)).w


def alone_models(task: Any, rows: Rows, ridge: float) -> Tensor:
    """[m, d]: everyone's own model with a ridge; a client without rows gets 0."""
    zero = torch.zeros(1, task.dim, dtype=task.dtype)
    out = torch.zeros(len(rows), task.dim, dtype=task.dtype)
    for block in rows.blocks(CHUNK):
        part = rows.select(block)
        if int(part.size.max()) > 0:
            out[block] = task.prox(zero, ridge, part.full(task))
    return out
