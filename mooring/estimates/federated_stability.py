"""An empirical estimate of federated stability (alternative, Definition 4.3): replace a record, refit, compare losses.

    gamma_i = sup over records j, replacements z' and places z of |ell(w_i(S), z) - ell(w_i(S'), z)|

where S' has z' in place of client i's record j and w_i is client i's deployed model. Trying some records, replacements
and places gives a lower estimate: a stability bound that lies below it is wrong. A ridge is part of the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from mooring.core.cohort import Batch, Rows
from mooring.core.task import Task

Fit = Callable[[Rows], Tensor]  # every client's deployed model [m, d] from the clients' rows


def federated_stability(task: Task, rows: Rows, fit: Fit, tries: int = 10, seed: int = 0) -> Tensor:
    """[m]: the largest change of a loss that `tries` replacements per client caused.

    Replacements are records of other clients, or of the same where there is one; losses are compared at all records.
    """
    before = fit(rows)
    rng = np.random.default_rng(seed)
    total, largest = len(rows.y), torch.zeros(len(rows), dtype=torch.float64)
    for i in range(len(rows)):
        start, size = int(rows.start[i]), int(rows.size[i])
        candidates = [k for k in range(total) if not start <= k < start + size] or list(range(total))
        for _ in range(tries if size else 0):
            place, source = start + int(rng.integers(size)), int(rng.choice(candidates))
            x, y = rows.x.clone(), rows.y.clone()
            x[place], y[place] = rows.x[source], rows.y[source]
            after = fit(replace(rows, x=x, y=y, cache={}))
            change = (record_losses(task, before[i], rows) - record_losses(task, after[i], rows)).abs().max()
            largest[i] = torch.maximum(largest[i], change.double())
    return largest


def record_losses(task: Task, w: Tensor, rows: Rows) -> Tensor:
    """[N]: one model's loss at every record."""
    records = Batch(rows.x[:, None], rows.y[:, None], torch.ones(len(rows.y), 1, dtype=w.dtype))
    return task.loss(w.expand(len(rows.y), -1), records)
