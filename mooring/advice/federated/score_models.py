"""Models on linear scores, fitted to one client's rows: what each client computes for itself.

A row has K scores z = J v, one for regression, two classes and counts, one per class otherwise. J [n, K, D] is made of
the row's columns and an intercept, in the order of the task's coefficients. A personal model is v = w + S b, where S
picks the coefficients that may differ from the center w, and

    b = arg min  sum_j nll(J_j w + J_j S b; y_j) / phi + 1/2 b' L b

with phi the dispersion (the noise variance of a regression). Without a block of rows B, by one Newton step from the fit
of all rows,

    z_B without B = z_B + J_B u + (I - H W)^-1 (H g - J_B S M^-1 C u + H W J_B u)

    M = sum_j S'J_j'W_j J_j S + L,   C = sum_j S'J_j'W_j J_j,   H = J_B S M^-1 S'J_B',   g, W: slopes, curvatures of B

where u is what the center moves by if it does without B, u = G J_B' (I - W0 h)^-1 g0 with h = J_B G J_B' and slopes and
curvatures at the center, G being the inverse of all clients' curvature. For squared losses this is exact: no model
needs a second fit, and nothing but G and w has to be known of the other clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from scipy.special import expit, log_expit, log_softmax, xlogy

from mooring.core.errors import RequestError
from mooring.core.task import Task
from mooring.tasks.linear import Linear
from mooring.tasks.linear_losses import Poisson
from mooring.tasks.logistic import Logistic

MAX_NEWTON_STEPS, MAX_HALVINGS = 30, 12
NEWTON_TOLERANCE = 1e-10  # of the decrease that a step promises, against the objective
MAX_LOG_COUNT = 30.0  # scores of counts beyond are not told apart: exp of them is no count
MAX_MOVE = 4.0  # of a score by its own block, and twice the score: logits, logarithms of counts
MIN_UNUSED_SHARE_OF_CENTER = 0.2  # of a block in the center's move
MIN_UNUSED_SHARE = 1e-3  # eigenvalues of I - HW: what a block keeps of itself, at least


class Family(NamedTuple):
    """A loss on scores z [n, K] of targets y [n]: all of negative log-likelihood, but `risk`, which users see."""

    scores: int
    nll: Callable[[np.ndarray, np.ndarray], np.ndarray]  # [n]
    slope: Callable[[np.ndarray, np.ndarray], np.ndarray]  # [n, K]
    bend: Callable[[np.ndarray, np.ndarray], np.ndarray]  # [n, K, K]
    risk: Callable[[np.ndarray, np.ndarray], np.ndarray]  # [n]
    divergence: Callable[[np.ndarray, np.ndarray], np.ndarray]  # [n]: of scores z from true ones, in units of risk
    bound: float | None  # of the curvature; None where it has none
    has_noise: bool = False  # whether each client has a noise variance of its own
    is_dispersed: bool = False  # whether targets may vary more than the likelihood implies


def family_of(task: Task) -> Family:
    """Return the family of a task; others than linear, logistic and Poisson regression are refused."""
    if isinstance(task, Linear):
        return Family(
            1,
            lambda z, y: (z[:, 0] - y) ** 2 / 2,
            lambda z, y: z - y[:, None],
            lambda z, y: np.ones((len(y), 1, 1)),
            lambda z, y: (z[:, 0] - y) ** 2,
            lambda z, true: (z - true)[:, 0] ** 2,
            1.0,
            has_noise=True,
        )
    if isinstance(task, Logistic):
        return _two_classes() if task.scores == 1 else _more_classes(task.scores)
    if isinstance(task, Poisson):
        return _counts(task.max_prediction)
    raise RequestError(
        f"recommendations across machines are for linear, logistic and Poisson tasks; for task '{task.name}' use "
        "`mooring advise` where the rows are in one place."
    )


def _two_classes() -> Family:
    def nll(z: np.ndarray, y: np.ndarray) -> np.ndarray:
        return -log_expit(np.where(y == 1, z[:, 0], -z[:, 0]))

    def bend(z: np.ndarray, y: np.ndarray) -> np.ndarray:
        p = expit(z)
        return (p * (1 - p))[:, :, None]

    def divergence(z: np.ndarray, true: np.ndarray) -> np.ndarray:
        p = expit(true)
        gap = p * (log_expit(true) - log_expit(z)) + (1 - p) * (log_expit(-true) - log_expit(-z))
        return np.maximum(gap[:, 0], 0.0)

    return Family(1, nll, lambda z, y: expit(z) - (y == 1)[:, None], bend, nll, divergence, 0.25)


def _more_classes(classes: int) -> Family:
    def nll(z: np.ndarray, y: np.ndarray) -> np.ndarray:
        return -np.take_along_axis(log_softmax(z, 1), y.astype(int)[:, None], 1)[:, 0]

    def slope(z: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.exp(log_softmax(z, 1)) - np.eye(classes)[y.astype(int)]

    def bend(z: np.ndarray, y: np.ndarray) -> np.ndarray:
        p = np.exp(log_softmax(z, 1))
        return p[:, :, None] * np.eye(classes) - p[:, :, None] * p[:, None, :]

    def divergence(z: np.ndarray, true: np.ndarray) -> np.ndarray:
        log_p = log_softmax(true, 1)
        return np.maximum((np.exp(log_p) * (log_p - log_softmax(z, 1))).sum(1), 0.0)

    return Family(classes, nll, slope, bend, nll, divergence, 0.5)


def _counts(largest: float | None) -> Family:
    top = MAX_LOG_COUNT if largest is None else np.log(largest)

    def mean(z: np.ndarray) -> np.ndarray:
        return np.exp(np.minimum(z[:, 0], MAX_LOG_COUNT))

    def risk(z: np.ndarray, y: np.ndarray) -> np.ndarray:
        z = np.minimum(z[:, 0], top)
        return 2 * (xlogy(y, y) - y * z - y + np.exp(z))

    def divergence(z: np.ndarray, true: np.ndarray) -> np.ndarray:
        z, true = np.minimum(z[:, 0], top), np.minimum(true[:, 0], top)
        return np.maximum(2 * (np.exp(true) * (true - z) - np.exp(true) + np.exp(z)), 0.0)

    return Family(
        1,
        lambda z, y: mean(z) - y * z[:, 0],
        lambda z, y: (mean(z) - y)[:, None],
        lambda z, y: mean(z)[:, None, None],
        risk,
        divergence,
        None,
        is_dispersed=True,
    )


def design(x: np.ndarray, scores: int, intercept: bool) -> np.ndarray:
    """Return J [n, K, D] of rows x [n, features]."""
    columns = np.concatenate([x, np.ones((len(x), 1))], 1) if intercept else x
    if scores == 1:
        return columns[:, None, :]
    n, p = columns.shape
    return np.einsum("np,kl->nkpl", columns, np.eye(scores)).reshape(n, scores, p * scores)


class HomeRows(NamedTuple):
    """A client's rows as its models need them."""

    jacobian: np.ndarray  # J [n, K, D]
    y: np.ndarray  # [n]
    family: Family
    blocks: tuple[np.ndarray, ...]  # [rows of a block] each: rows that are left out together; all other rows alone

    @property
    def dim(self) -> int:
        return self.jacobian.shape[2]

    def features(self, count: int) -> np.ndarray:
        """[n, count]: the first columns, which are no intercept."""
        return self.jacobian[:, 0, :: self.family.scores][:, :count]

    def select(self, place: np.ndarray) -> HomeRows:
        """The rows for models of these coefficients only."""
        return self._replace(jacobian=np.ascontiguousarray(self.jacobian[:, :, place]))

    def scores(self, v: np.ndarray) -> np.ndarray:
        """[n, K]."""
        return self.jacobian @ v

    def gram(self, weight: np.ndarray, other: np.ndarray | None = None) -> np.ndarray:
        """Return sum_j J_j' W_j J_j; with `other` [n, K, D] in place of the second J."""
        right = self.jacobian if other is None else other
        weighted = np.einsum("nkl,nld->nkd", weight, right)
        return np.tensordot(self.jacobian, weighted, ((0, 1), (0, 1)))

    def pull_back(self, values: np.ndarray) -> np.ndarray:
        """Return sum_j J_j' g_j of values [n, K]."""
        return np.tensordot(self.jacobian, values, ((0, 1), (0, 1)))


class Center(NamedTuple):
    """What all clients know of the global model."""

    w: np.ndarray  # [D]
    inverse: np.ndarray  # G [D, D], of the curvature of all rows' losses
    is_pulled: bool = False  # whether it is the center of pulled models, and G its covariance, instead


class HomeFit(NamedTuple):
    """A model fitted to a client's rows, and its scores with and without each row."""

    v: np.ndarray  # [D]
    z: np.ndarray  # [n, K]
    without: np.ndarray  # [n, K], of each row by models that have not seen its block


def minimize(
    rows: HomeRows, offset: np.ndarray, free: np.ndarray, precision: np.ndarray, dispersion: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return b [q] and M [q, q]: the minimizer by Newton's method with halving, and the curvature there.

    `offset` [n, K] are the scores of the center, `free` the coefficients that may differ, and `precision` L is [q] or
    [q, q].
    """
    family, y, part = rows.family, rows.y, rows.jacobian[:, :, free]
    pull = np.diag(precision) if precision.ndim == 1 else precision
    own = rows._replace(jacobian=part)

    def value(b: np.ndarray) -> float:
        return float(family.nll(offset + part @ b, y).sum() / dispersion + b @ pull @ b / 2)

    b = np.zeros(part.shape[2])
    now = value(b)
    for _ in range(MAX_NEWTON_STEPS):
        z = offset + part @ b
        curvature = own.gram(family.bend(z, y) / dispersion) + pull
        gradient = own.pull_back(family.slope(z, y)) / dispersion + pull @ b
        step = solve(curvature, gradient)
        promise, size = float(gradient @ step), 1.0
        if not promise > NEWTON_TOLERANCE * max(abs(now), 1.0):
            break
        for _ in range(MAX_HALVINGS):
            tried = value(b - size * step)
            if tried <= now - 1e-4 * size * promise:
                break
            size /= 2
        else:
            break
        b, now = b - size * step, tried
    z = offset + part @ b
    return b, own.gram(family.bend(z, y) / dispersion) + pull


def solve(matrix: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the solution of a symmetric system; that of least norm where it is singular."""
    try:
        factor = np.linalg.cholesky(matrix)
    except np.linalg.LinAlgError:
        return np.linalg.lstsq(matrix, right, rcond=1e-12)[0]
    half = np.linalg.solve(factor, right)
    return np.linalg.solve(factor.T, half)


def fit_pulled(
    rows: HomeRows, center: Center, variance: np.ndarray, dispersion: float, moves: np.ndarray | None = None
) -> HomeFit:
    """Return the model that is pulled to the center with variances [D]; where these are 0, its coefficient is the
    center's. `moves` are those of `center_moves`."""
    free = variance > 0
    z0 = rows.scores(center.w)
    b, curvature = minimize(rows, z0, free, 1 / variance[free], dispersion)
    v = center.w.copy()
    v[free] += b
    if center.is_pulled:
        moves = pulled_moves(rows, center, v, free, curvature, 1 / variance[free], dispersion)
    elif moves is None:
        moves = center_moves(rows, center)
    return HomeFit(v, rows.scores(v), leave_out(rows, v, free, curvature, dispersion, moves))


def fit_local(rows: HomeRows, precision: np.ndarray, dispersion: float) -> HomeFit:
    """Return the client's own model with a ridge [D] towards 0."""
    free = np.ones(rows.dim, bool)
    v, curvature = minimize(rows, np.zeros((len(rows.y), rows.family.scores)), free, precision, dispersion)
    return HomeFit(v, rows.scores(v), leave_out(rows, v, free, curvature, dispersion, None))


def _iterate_blocks(rows: HomeRows) -> Iterator[np.ndarray]:
    """Yield [blocks, rows of each]: blocks of the same size together."""
    alone = np.ones(len(rows.y), bool)
    sizes: dict[int, list[np.ndarray]] = {}
    for block in rows.blocks:
        if len(block) > 1:
            alone[block] = False
            sizes.setdefault(len(block), []).append(block)
    if alone.any():
        yield np.flatnonzero(alone)[:, None]
    for blocks in sizes.values():
        yield np.stack(blocks)


def _block_diagonal(parts: np.ndarray) -> np.ndarray:
    """[r, b K, b K] of parts [r, b, K, K]."""
    r, b, k, _ = parts.shape
    out = np.zeros((r, b, k, b, k))
    for i in range(b):
        out[:, i, :, i, :] = parts[:, i]
    return out.reshape(r, b * k, b * k)


def center_moves(rows: HomeRows, center: Center) -> np.ndarray:
    """Return u [n, D]: what the center moves by without each row's block."""
    z, out = rows.scores(center.w), np.zeros((len(rows.y), rows.dim))
    slope, bend = rows.family.slope(z, rows.y), rows.family.bend(z, rows.y)
    for place in _iterate_blocks(rows):
        r, s = len(place), place.shape[1] * rows.family.scores
        j = rows.jacobian[place].reshape(r, s, -1)
        through = j @ center.inverse
        keep = np.eye(s) - _block_diagonal(bend[place]) @ (through @ j.transpose(0, 2, 1))
        pulled = _divide(keep, slope[place].reshape(r, s))
        out[place] = np.einsum("rsd,rs->rd", through, pulled)[:, None, :]
    return out


def pulled_moves(
    rows: HomeRows,
    center: Center,
    v: np.ndarray,
    free: np.ndarray,
    curvature: np.ndarray,
    precision: np.ndarray,
    dispersion: float,
) -> np.ndarray:
    """Return u [n, D]: what a center of pulled models moves by without each row's block,

        G Z' (I - W (H + Z G Z'))^-1 g,   Z = J_B M^-1 L

    with slopes and curvatures at the client's model.
    """
    z, out, family = rows.scores(v), np.zeros((len(rows.y), rows.dim)), rows.family
    slope, bend = family.slope(z, rows.y) / dispersion, family.bend(z, rows.y) / dispersion
    inverse = solve(curvature, np.eye(len(curvature)))
    spread, part = center.inverse[:, free], rows.jacobian[:, :, free]
    for place in _iterate_blocks(rows):
        r, s = len(place), place.shape[1] * family.scores
        own = part[place].reshape(r, s, -1)
        through = own @ inverse
        seen = through * precision
        used = through @ own.transpose(0, 2, 1) + seen @ spread[free] @ seen.transpose(0, 2, 1)
        least = MIN_UNUSED_SHARE_OF_CENTER  # G is that of equal clients
        pulled = _divide(np.eye(s) - _block_diagonal(bend[place]) @ used, slope[place].reshape(r, s), least)
        out[place] = (np.einsum("rsd,rs->rd", seen, pulled) @ spread.T)[:, None, :]
    return out


def leave_out(
    rows: HomeRows,
    v: np.ndarray,
    free: np.ndarray,
    curvature: np.ndarray,
    dispersion: float,
    moves: np.ndarray | None,
) -> np.ndarray:
    """Return [n, K]: the scores of every row by the model without its block; without `moves` the center stays."""
    z, family = rows.scores(v), rows.family
    slope, bend = family.slope(z, rows.y) / dispersion, family.bend(z, rows.y) / dispersion
    part = rows.jacobian[:, :, free]
    crossed = rows._replace(jacobian=part).gram(bend, rows.jacobian) if moves is not None else None
    inverse = solve(curvature, np.eye(len(curvature)))
    out = z.copy()
    for place in _iterate_blocks(rows):
        r, s = len(place), place.shape[1] * family.scores
        own = part[place].reshape(r, s, -1)
        through = own @ inverse
        hat, w = through @ own.transpose(0, 2, 1), _block_diagonal(bend[place])
        change = np.einsum("rst,rt->rs", hat, slope[place].reshape(r, s))
        shift = np.zeros((r, s))
        if moves is not None and crossed is not None:
            u = moves[place[:, 0]]
            shift = np.einsum("rsd,rd->rs", rows.jacobian[place].reshape(r, s, -1), u)
            change += np.einsum("rst,rtk,rk->rs", hat, w, shift) - np.einsum("rsq,rq->rs", through, u @ crossed.T)
        change = (shift + _divide(np.eye(s) - hat @ w, change)).reshape(r, place.shape[1], -1)
        if not family.has_noise:  # one Newton step is far off where a block alone decides a coefficient
            reach = MAX_MOVE + 2 * np.abs(z[place])
            change = np.clip(change, -reach, reach)
        out[place] += change
    return out


def _divide(keep: np.ndarray, right: np.ndarray, least: float = MIN_UNUSED_SHARE) -> np.ndarray:
    """Return the solutions [r, s] of systems [r, s, s] whose eigenvalues lie between 0 and 1; those below `least` count
    as that."""
    if keep.shape[1] == 1:
        return right / np.maximum(keep[:, :, 0], least)
    values, vectors = np.linalg.eig(keep)
    values = np.maximum(values.real, least)
    coordinates = np.linalg.solve(vectors, right[..., None].astype(vectors.dtype))[..., 0]
    return np.einsum("rst,rt->rs", vectors, coordinates / values).real
