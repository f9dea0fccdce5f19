"""Natural cubic spline columns: curves in one numeric column, for models that are linear in their columns.

A natural cubic spline with knots t_1 < ... < t_K is cubic between the knots, linear outside of them, and given by its
values g at the knots: its second derivatives there are gamma = R^-1 Q'g (0 at both ends), and its roughness is

    integral f''^2 = g' (Q R^-1 Q') g

The columns are the K - 2 eigenvectors of Q R^-1 Q' with positive eigenvalues, smoothest first (the basis of Demmler
and Reinsch on the knots). They are orthonormal at the knots and orthogonal there to 1 and to t, so that they add
curvature to the linear column instead of repeating it.

Source   Green, Silverman. Nonparametric regression and generalized linear models. 1994, Section 2.1-2.3 (Q, R).
         Harrell. Regression modeling strategies. 2015, Table 2.3 (quantile levels of the knots).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

KNOT_LEVELS = {
    3: (0.10, 0.50, 0.90),
    4: (0.05, 0.35, 0.65, 0.95),
    5: (0.05, 0.275, 0.50, 0.725, 0.95),
    6: (0.05, 0.23, 0.41, 0.59, 0.77, 0.95),
}
ROWS_PER_COLUMN = {3: 20, 4: 50, 5: 100, 6: 500}  # least rows of all clients per numeric column for so many knots
VALUES_PER_KNOT = 2  # a column with fewer distinct values than this per knot gets fewer knots
MIN_KNOT_GAP = 0.01  # of the range of the knots; closer knots are merged


def choose_knot_count(rows_per_column: float, distinct: int) -> int:
    """How many knots a column gets: 0, or 3 to 6 by the rows per numeric column and its number of distinct values."""
    enough = (k for k, n in ROWS_PER_COLUMN.items() if rows_per_column >= n and distinct >= VALUES_PER_KNOT * k)
    return max(enough, default=0)


def place_knots(values: np.ndarray, counts: np.ndarray, number: int) -> tuple[float, ...]:
    """Knots at quantiles of a column given as rising distinct values and their counts; empty if fewer than 3 are left.

    A value that holds many rows (such as 0 in amounts) would take several knots at once. Its count is capped, so that
    the other knots spread over the other rows; knots that still meet are merged.
    """
    values, counts = values[counts > 0], counts[counts > 0].astype(float)
    if number not in KNOT_LEVELS or len(values) < 3:
        return ()
    counts = np.minimum(counts, counts.sum() / (number + 1))
    middle = (np.cumsum(counts) - counts / 2) / counts.sum()
    places = np.interp(KNOT_LEVELS[number], middle, values)
    chosen = [places[0]]
    for place in places[1:]:
        if place - chosen[-1] > MIN_KNOT_GAP * (places[-1] - places[0]):
            chosen.append(place)
    return tuple(float(place) for place in chosen) if len(chosen) >= 3 else ()


def spline_basis(x: Tensor, knots: Sequence[float]) -> Tensor:
    """The K - 2 spline columns of x [...], without the linear one: [..., K - 2]."""
    left, pieces = _piece_polynomials(tuple(knots))
    left, pieces = left.to(x), pieces.to(x)
    piece = torch.bucketize(x.detach().contiguous(), left[1:])
    step, pieces = (x - left[piece])[..., None], pieces[:, piece]
    return pieces[0] + step * (pieces[1] + step * (pieces[2] + step * pieces[3]))


@lru_cache(maxsize=4096)
def _piece_polynomials(knots: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """Where each of the K + 1 pieces is expanded [K + 1], and its coefficients of powers 0 to 3: [4, K + 1, K - 2]."""
    t = np.array(knots)
    gap = np.diff(t)
    inner = len(t) - 2
    q = np.zeros((len(t), inner))
    r = np.zeros((inner, inner))
    for j in range(inner):
        q[j : j + 3, j] = 1 / gap[j], -1 / gap[j] - 1 / gap[j + 1], 1 / gap[j + 1]
        r[j, j] = (gap[j] + gap[j + 1]) / 3
        if j + 1 < inner:
            r[j, j + 1] = r[j + 1, j] = gap[j + 1] / 6
    curvature = np.linalg.solve(r, q.T)  # g -> gamma at the inner knots
    g = np.linalg.eigh(q @ curvature)[1][:, 2:]
    g = g * np.sign(g[-1])  # rising at the right end, whatever sign the eigenvectors came with
    gamma = np.zeros_like(g)
    gamma[1:-1] = curvature @ g
    slope = np.diff(g, axis=0) / gap[:, None]
    begin = slope - gap[:, None] * (2 * gamma[:-1] + gamma[1:]) / 6
    end = slope[-1] + gap[-1] * gamma[-2] / 6
    flat = np.zeros_like(end)
    coefficients = [
        np.stack([g[0], begin[0], flat, flat]),
        *(np.stack([g[j], begin[j], gamma[j] / 2, (gamma[j + 1] - gamma[j]) / (6 * gap[j])]) for j in range(len(gap))),
        np.stack([g[-1], end, flat, flat]),
    ]
    left = np.concatenate([t[:1], t])
    return torch.from_numpy(left), torch.from_numpy(np.stack(coefficients, axis=1))
