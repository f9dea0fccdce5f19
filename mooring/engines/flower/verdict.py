"""What a client can say by its own test rows: is its own model better than training alone? Nobody else sees them.

    d_k = loss of row k alone - loss of row k with its own model       gain: mean of d, with Student's interval

Test rows took no part in training or choice. The verdict is "better" or "worse" where the interval leaves 0 out, else
"undecided".
"""

from __future__ import annotations

from typing import Any

import torch
from scipy.stats import t
from torch import Tensor

from mooring.core.cohort import Rows

LEVEL = 0.95
FEWEST = 2  # rows that have a spread


def verdict(task: Any, own: Tensor, alone: Tensor, rows: Rows, unit: float) -> dict[str, Any]:
    """Of models [1, d] on one client's rows; `unit` turns losses into those of the target's own units."""
    n = int(rows.size[0])
    if torch.equal(own, alone):
        return {"verdict": "the same", "gain_low": 0.0, "gain_high": 0.0}
    if n < FEWEST:
        return {"verdict": "undecided", "gain_low": None, "gain_high": None}
    batch = rows.padded()
    gain = unit * (task.row_risk(alone, batch) - task.row_risk(own, batch))[0].double()
    mean, error = float(gain.mean()), float(gain.std()) / n**0.5
    reach = float(t.ppf((1 + LEVEL) / 2, n - 1)) * error
    low, high = mean - reach, mean + reach
    return {
        "verdict": "better" if low > 0 else "worse" if high < 0 else "undecided",
        "gain_low": low,
        "gain_high": high,
    }
