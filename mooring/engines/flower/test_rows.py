"""What a client's own test rows show: how much lower its loss is with its personal model. Nobody else sees them.

    d_k = loss of row k with the local model - loss of row k with the personal model

The improvement is the mean of d, with Student's interval. Test rows took no part in training or choice.
"""

from __future__ import annotations

from typing import Any

import torch
from scipy.stats import t
from torch import Tensor

from mooring.core.cohort import Rows

CONFIDENCE_LEVEL = 0.95
MIN_ROWS = 2  # rows that have a spread


def improvement_on_test_rows(task: Any, personal: Tensor, local: Tensor, rows: Rows, unit: float) -> dict[str, Any]:
    """Of models [1, d] on one client's rows; `unit` turns losses into those of the target's own units."""
    n = int(rows.size[0])
    if torch.equal(personal, local):
        return {"improvement_over_local_ci_low": 0.0, "improvement_over_local_ci_high": 0.0}
    if n < MIN_ROWS:
        return {"improvement_over_local_ci_low": None, "improvement_over_local_ci_high": None}
    batch = rows.padded()
    gain = unit * (task.row_risk(local, batch) - task.row_risk(personal, batch))[0].double()
    mean, error = float(gain.mean()), float(gain.std()) / n**0.5
    reach = float(t.ppf((1 + CONFIDENCE_LEVEL) / 2, n - 1)) * error
    return {"improvement_over_local_ci_low": mean - reach, "improvement_over_local_ci_high": mean + reach}
