"""The learning curve: a typical client's expected loss with more rows of its own, by a local and a personal model.

At today's rows the losses are those measured on held-out rows; theory predicts their course. With Lam the pull and H
the curvature, a personal model of n rows has an excess loss of noise df(n) / (2 n), df(n) = tr (H + Lam now/n)^-1 H,
since a pull by empirical Bayes weakens with more rows; a local model has noise d / (2 n), d directions that rows see.
Both have one floor:

    personal(n) = floor + e df(n)/df(now) now/n        local(n) = floor + e match/n        global(n) as now

e, the personal models' excess now, follows from the measured difference, local - personal = e (match/now - 1); `match`
are the rows at which a local model has the loss that the personal one has now (`contributions.rows_to_match`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

from mooring.advice.reporting.contributions import PulledFit, mean_degrees_of_freedom
from mooring.core.types import NamedValues

CURVE_POINTS = 41
CURVE_RANGE_FACTOR = 2.0  # the curve begins at now / BEYOND and ends at match * BEYOND


class LearningCurve(NamedTuple):
    table: pd.DataFrame  # rows, local, personal, global: expected losses in the target's own units
    now: float  # rows of a typical client
    match: float  # rows at which it would do as well locally


def estimate_learning_curve(fit: PulledFit, frame: pd.DataFrame, summary: NamedValues) -> LearningCurve | None:
    """The curve of the median client; None where local models do as well, or no number of rows would do."""
    at = summary["personal"]
    gap = summary["local"] - at
    now, match = float(frame["rows"].median()), float(frame["rows_to_match"].median())
    if not (gap > 0 and np.isfinite(match) and match > now):
        return None
    rows = np.geomspace(now / CURVE_RANGE_FACTOR, match * CURVE_RANGE_FACTOR, CURVE_POINTS)
    excess = gap / (match / now - 1)
    free = np.array([mean_degrees_of_freedom(fit, n / now) for n in rows]) / mean_degrees_of_freedom(fit)
    table = pd.DataFrame(
        {
            "rows": rows,
            "local": at + excess * (match / rows - 1),
            "personal": at + excess * (free * now / rows - 1),
            "global": summary["global"],
        }
    )
    return LearningCurve(table, now, match)
