"""Which candidate columns (splines, products of two columns) explain residuals, by sums that clients may send.

With the residuals r of a model on the columns z, and 1, a candidate q lowers the residual sum of squares by

    (q_z'r_z)^2 / |q_z|^2,      q_z, r_z: what z and 1 do not explain of q and of r

if it is added. All parts of it follow from z'z, z'r, r'r, z'q, q'q and q'r. A candidate passes if this is more than
chance gives the best of all candidates (a Bonferroni test) and worth `min_share` of r_z'r_z.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from operator import add
from typing import NamedTuple

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor

Pairs = Sequence[tuple[int, int]]
PRODUCT_LIMIT = (
    4.0  # standardized columns are clipped here in products, so that a few far values do not dominate the column
)
MAX_PRODUCTS = 5
MAX_PAIRS = 500
TEST_LEVEL = 0.01  # chance that a candidate passes if none has an effect
MIN_PRODUCT_SHARE = 0.005  # of the residual sum of squares
MIN_UNEXPLAINED = 0.05  # share of a candidate that z must leave unexplained


class CandidateSums(NamedTuple):
    """Sums over rows; those of clients may be added."""

    rows: float
    zz: np.ndarray  # [c + 1, c + 1], of z and 1
    zr: np.ndarray  # [c + 1]
    rr: float
    zq: np.ndarray  # [c + 1, P]
    qq: np.ndarray  # [P]
    qr: np.ndarray  # [P]

    def __add__(self, other: CandidateSums) -> CandidateSums:  # type: ignore[override]
        return CandidateSums(*map(add, self, other))


def sum_candidates(z: Tensor, q: Tensor, residual: Tensor) -> CandidateSums:
    """A client's sums: columns z [N, c] of the model, candidates q [N, P], residuals [N]."""
    z = torch.cat([z, torch.ones_like(z[:, :1])], 1).double()
    q, r = q.double(), residual.double()
    zz, zr, zq = ((z.T @ part).numpy() for part in (z, r, q))
    return CandidateSums(len(z), zz, zr, float(r @ r), zq, (q**2).sum(0).numpy(), (q.T @ r).numpy())


def explained_share(sums: CandidateSums) -> tuple[np.ndarray, float]:
    """The share of the residual sum of squares that each candidate explains [P], and the share that chance explains."""
    inverse = np.linalg.pinv(sums.zz, hermitian=True)
    residual = sums.rr - sums.zr @ inverse @ sums.zr
    length = sums.qq - np.einsum("cp,cd,dp->p", sums.zq, inverse, sums.zq)
    inner = sums.qr - sums.zq.T @ (inverse @ sums.zr)
    usable = (length > MIN_UNEXPLAINED * sums.qq) & (sums.qq > 0)
    freedom = sums.rows - len(sums.zz)
    if residual <= 0 or freedom <= 0 or not usable.any():
        return np.zeros(len(sums.qq)), np.inf
    share = np.where(usable, inner**2 / np.where(usable, length, 1), 0) / residual
    return share, float(ndtri(TEST_LEVEL / 2 / len(share)) ** 2 / freedom)


def list_pairs(numeric: Sequence[int]) -> list[tuple[int, int]]:
    """All pairs of numeric columns, or the first MAX_PAIRS of them."""
    return list(combinations(numeric, 2))[:MAX_PAIRS]


def multiply_columns(x: Tensor, pairs: Pairs) -> Tensor:
    """Products of pairs of the columns of x [..., f], clipped at PRODUCT_LIMIT: [..., P]."""
    x = x.clamp(-PRODUCT_LIMIT, PRODUCT_LIMIT)
    left, right = ([pair[side] for pair in pairs] for side in (0, 1))
    return x[..., left] * x[..., right]


def screen_products(sums: CandidateSums, pairs: Pairs, at_most: int = MAX_PRODUCTS) -> tuple[tuple[int, int], ...]:
    """The pairs whose products (the candidates of the sums) explain most of the residuals, best first."""
    share, chance = explained_share(sums)
    order = np.argsort(-share, kind="stable")[:at_most]
    return tuple(pairs[k] for k in order if share[k] > max(chance, MIN_PRODUCT_SHARE))


def screen_splines(
    sums: CandidateSums, splines: Sequence[tuple[int, tuple[float, ...]]]
) -> tuple[tuple[int, tuple[float, ...]], ...]:
    """The splines of which at least one column (the candidates of the sums, in order) explains residuals."""
    share, chance = explained_share(sums)
    ends = np.cumsum([len(knots) - 2 for _, knots in splines])
    parts = np.split(share, ends[:-1]) if len(splines) else []
    return tuple(spline for spline, part in zip(splines, parts) if part.max() > chance)
