"""The latest target of each client, averaged into its local and personal models where rows are in the order of time.

Linear models continue a trend, and trees do not know the client: no candidate stays where a client was last. With a
time column, local and personal models v_i of numeric targets are therefore averaged with an intercept l_i,

    (1 - a) v_i + a l_i,    a = 1 / (1 + 3 exp(-4 g))

l_i is the target of the client's latest row, whose step from the one before is at most twice the client's median step:
one odd row must not decide. g is the mean over clients of the log ratio of both held-out losses; the second fold counts
twice. All rows of a fold share what has changed since the fitted ones, so it counts as few observations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mooring.advice.evaluation.fold_fits import FoldedRows
from mooring.advice.evaluation.held_out_losses import HeldOutLosses
from mooring.core.task import Task
from mooring.data.folds import row_clients, row_losses

PRIOR_ODDS, RATIO_POWER = 1 / 3, 4.0  # of the latest targets to the models, and of the ratio of losses
SMALL_LOSS_SHARE = 0.1  # of the mean loss, added to each client's
MAX_LATEST_STEP = 2.0  # in units of a client's median step
MIN_SHARE = 0.01  # below which the latest targets are left out


def fit_latest_targets(task: Task, rows: Any) -> Tensor:
    """[m, d]: models of an intercept only, from rows in the order of time; 0 for a client without rows."""
    out = torch.zeros(len(rows), task.dim, dtype=task.dtype)
    for i in torch.nonzero(rows.size)[:, 0].tolist():
        y = rows.of(i)[1].double()
        steps = y.diff() if len(y) > 1 else torch.zeros_like(y)
        limit = MAX_LATEST_STEP * float(steps.abs().quantile(0.5))
        out[i, -1] = y[-1] - steps[-1] + steps[-1].clamp(-limit, limit)
    return out


def latest_target_share(data: FoldedRows, losses: HeldOutLosses, weight: Tensor) -> float:
    """a; `weight` [settings] is that of the settings in personal models, `losses` are theirs."""
    own, count = losses.sums @ weight, losses.count
    if len(data.parts) == 1:  # whose rows are cut further, for the clients' own choices
        own, count = own.sum(0, keepdim=True), count.sum(0, keepdim=True)
    latest, clients = torch.zeros_like(own), (count > 0).sum(1)
    for total, part in zip(latest, data.parts):
        by_row = row_losses(data.task, fit_latest_targets(data.task, part.train), part.held)
        total.index_add_(0, row_clients(part.held), by_row.to(total.dtype))
    pair = torch.stack([own, latest]) / count.clamp(min=1)  # [2, folds, m]
    small = SMALL_LOSS_SHARE * (pair.sum(2) / clients).prod(0).sqrt() + torch.finfo(pair.dtype).tiny
    ratio = ((pair[0] + small[:, None]) / (pair[1] + small[:, None])).log()
    gain = torch.where(count > 0, ratio, 0.0).sum(1) / clients  # [folds]
    turn = torch.arange(1.0, 1 + len(gain), dtype=gain.dtype)
    odds = PRIOR_ODDS * float((RATIO_POWER * gain @ turn / turn.sum()).exp())
    share = odds / (1 + odds) if odds < torch.inf else 1.0
    return share if share >= MIN_SHARE else 0.0
