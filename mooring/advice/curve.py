"""The learning curve: what a typical client would lose with more rows of its own, alone and moored to the others.

Losses are anchored at what was seen; theory gives their course. With Lam the moor and H the curvature, a moored model
of n rows has an excess loss of noise df(n) / (2 n), df(n) = tr (H + Lam now/n)^-1 H, since a moor of empirical Bayes
slackens as rows come in; training alone has noise d / (2 n), d directions that the rows see. Both have one floor:

    personal(n) = floor + e df(n)/df(now) now/n        alone(n) = floor + e match/n        common(n) as now

e, the personal models' excess now, follows from what they gain over alone now, e (match/now - 1); `match` are the rows
at which training alone loses what personal models lose now (`why.rows_to_match`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from mooring.advice.why import Moored, freedom

POINTS = 41
BEYOND = 2.0  # the curve begins at now / BEYOND and ends at match * BEYOND


class LearningCurve(NamedTuple):
    table: pd.DataFrame  # rows, alone, personal, common: expected losses in the target's own units
    now: float  # rows of a typical client
    match: float  # rows at which it would do as well alone


def learning_curve(fit: Moored, frame: pd.DataFrame, summary: Mapping[str, Any]) -> LearningCurve | None:
    """The curve of the median client; None where nothing is gained over alone, or no rows would do."""
    gap, at = summary["gain_over_alone"]["mean"], summary["personal"]
    now, match = float(frame["rows"].median()), float(frame["rows_to_match"].median())
    if not (gap > 0 and np.isfinite(match) and match > now):
        return None
    rows = np.geomspace(now / BEYOND, match * BEYOND, POINTS)
    excess = gap / (match / now - 1)
    free = np.array([freedom(fit, n / now) for n in rows]) / freedom(fit)
    table = pd.DataFrame(
        {
            "rows": rows,
            "alone": at + excess * (match / rows - 1),
            "personal": at + excess * (free * now / rows - 1),
            "common": at + summary["gain_over_common"]["mean"],
        }
    )
    return LearningCurve(table, now, match)
