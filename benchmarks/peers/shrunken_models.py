"""Generalized linear models of many clients, each pulled towards a center, by Newton's method on all of them at once.

    min over v, w   sum_i [ sum_j ell(v_i; x_ij, y_ij) / noise + 1/2 |v_i - w|^2_{pull_i} ] + 1/2 |w|^2_{ridge}

with |u|^2_q = sum_k q_k u_k^2. Limits: a fixed center w = 0 is training locally with a ridge; pull_i = lam n_i is
one-stage FedProx; a constant pull is the mode of a mixed-effects model with variances 1 / pull; a very large pull on
the slopes leaves one intercept per client. The Hessian is an arrow, so a step costs one small system per client.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import expit, logsumexp, softmax

from benchmarks.tables_catalog import BINARY, COUNT, MULTICLASS, REGRESSION

POOLED_PULL = 1e6  # as good as infinite, with columns of variance 1
MIN_PULL = 1e-6
MAX_SCORE = 40.0


@dataclass
class Fit:
    w: np.ndarray  # [D]
    v: np.ndarray  # [m, D], D = scores x columns
    hessian: np.ndarray  # [m, D, D], with the pull


@dataclass(frozen=True)
class ClientRows:
    """Rows sorted by client; x has the intercept as its last column."""

    kind: str
    scores: int
    x: np.ndarray
    y: np.ndarray
    client: np.ndarray
    clients: int

    @property
    def width(self) -> int:
        return self.scores * self.x.shape[1]

    @property
    def sizes(self) -> np.ndarray:
        return np.bincount(self.client, minlength=self.clients)


def client_rows(kind: str, classes: int, x: np.ndarray, y: np.ndarray, client: np.ndarray, clients: int) -> ClientRows:
    order = np.argsort(client, kind="stable")
    return ClientRows(kind, classes, with_intercept(x)[order], y[order], client[order], clients)


def with_intercept(x: np.ndarray) -> np.ndarray:
    return np.column_stack([x, np.ones(len(x))])


def score(v: np.ndarray, x: np.ndarray, client: np.ndarray, scores: int) -> np.ndarray:
    """[n, scores] of each row under its client's parameters."""
    return np.einsum("nd,nkd->nk", x, v.reshape(len(v), scores, -1)[client])


def predict(kind: str, z: np.ndarray) -> np.ndarray:
    if kind == MULTICLASS:
        return softmax(z, 1)
    if kind == COUNT:
        return np.exp(z[:, 0].clip(-MAX_SCORE, MAX_SCORE))
    return expit(z[:, 0]) if kind == BINARY else z[:, 0]


def total_loss(rows: ClientRows, z: np.ndarray) -> float:
    if rows.kind == REGRESSION:
        return float(((rows.y - z[:, 0]) ** 2).sum() / 2)
    if rows.kind == BINARY:
        return float(np.logaddexp(0, np.where(rows.y == 1, -z[:, 0], z[:, 0])).sum())
    if rows.kind == COUNT:
        return float((np.exp(z[:, 0].clip(max=700)) - rows.y * z[:, 0]).sum())
    return float((logsumexp(z, 1) - z[np.arange(len(z)), rows.y]).sum())


def residuals_and_weights(rows: ClientRows, z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First [n, K] and second [n, K, K] derivatives of each row's loss in its scores."""
    if rows.kind == MULTICLASS:
        p = softmax(z, 1)
        residual = p.copy()
        residual[np.arange(len(z)), rows.y] -= 1
        return residual, p[:, :, None] * (np.eye(p.shape[1]) - p[:, None, :])
    mean = predict(rows.kind, z)
    weight = {REGRESSION: np.ones_like(mean), BINARY: mean * (1 - mean), COUNT: mean}[rows.kind]
    return (mean - rows.y)[:, None], weight[:, None, None]


def derivatives(rows: ClientRows, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Gradients [m, D] and Hessians [m, D, D] of each client's summed loss."""
    residual, weight = residuals_and_weights(rows, score(v, rows.x, rows.client, rows.scores))
    d, scores = rows.x.shape[1], rows.scores
    gradient, hessian = np.zeros((rows.clients, scores, d)), np.zeros((rows.clients, scores, d, scores, d))
    start = 0
    for i, size in enumerate(rows.sizes):
        x = rows.x[start : start + size]
        gradient[i] = residual[start : start + size].T @ x
        for a in range(scores):
            for b in range(a, scores):
                block = (x * weight[start : start + size, a, b, None]).T @ x
                hessian[i, a, :, b], hessian[i, b, :, a] = block, block
        start += size
    return gradient.reshape(rows.clients, -1), hessian.reshape(rows.clients, rows.width, rows.width)


def objective(rows: ClientRows, v: np.ndarray, w: np.ndarray, pull, ridge, noise: float) -> float:
    loss = total_loss(rows, score(v, rows.x, rows.client, rows.scores)) / noise
    return loss + float((pull * (v - w) ** 2).sum() + (ridge * w**2).sum()) / 2


def fit_shrunken(
    rows: ClientRows,
    pull: np.ndarray,
    ridge: np.ndarray | None,
    noise: float = 1.0,
    start: Fit | None = None,
    steps: int = 60,
) -> Fit:
    """The minimizer above; the center stays at 0 if `ridge` is None. `pull` is [m, D] or [D], at least MIN_PULL."""
    pull = np.broadcast_to(np.maximum(pull, MIN_PULL), (rows.clients, rows.width))
    fixed, ridge = ridge is None, np.zeros(rows.width) if ridge is None else ridge
    w, v = (start.w, start.v) if start else starting_values(rows, fixed)
    value = objective(rows, v, w, pull, ridge, noise)
    diagonal = np.arange(rows.width)
    for _ in range(steps):
        gradient, hessian = derivatives(rows, v)
        gradient, hessian = gradient / noise + pull * (v - w), hessian / noise
        hessian[:, diagonal, diagonal] += pull
        if fixed:
            step_w = np.zeros_like(w)
            step_v = -np.linalg.solve(hessian, gradient[..., None])[..., 0]
            slope = float((gradient * step_v).sum())
        else:
            pulls = np.zeros_like(hessian)
            pulls[:, diagonal, diagonal] = pull
            solved = np.linalg.solve(hessian, np.concatenate([gradient[..., None], pulls], 2))
            gradient_w = ridge * w - (pull * (v - w)).sum(0)
            schur = np.diag(pull.sum(0) + ridge) - (pull[..., None] * solved[..., 1:]).sum(0)
            right = -gradient_w - (pull * solved[..., 0]).sum(0)
            step_w = np.linalg.solve(schur + 1e-9 * np.eye(rows.width), right)
            step_v = -solved[..., 0] + (solved[..., 1:] @ step_w)
            slope = float((gradient * step_v).sum() + gradient_w @ step_w)
        length = 1.0
        while length > 1e-6:
            trial_value = objective(rows, v + length * step_v, w + length * step_w, pull, ridge, noise)
            if trial_value <= value + 1e-4 * length * min(slope, 0):
                break
            length /= 2
        else:
            break
        w, v = w + length * step_w, v + length * step_v
        gained, value = value - trial_value, trial_value
        if gained < 1e-7 * (abs(value) + 1):
            break
    return Fit(w, v, hessian)


def starting_values(rows: ClientRows, fixed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Zeros; for counts the intercepts are the logarithms of mean counts."""
    w, v = np.zeros(rows.width), np.zeros((rows.clients, rows.width))
    if rows.kind == COUNT:
        mean_count = rows.y.mean() + 1e-3
        client_means = (np.bincount(rows.client, rows.y, rows.clients) + 0.5 * mean_count) / (rows.sizes + 0.5)
        v[:, -1] = np.log(client_means)
        w[-1] = 0.0 if fixed else np.log(mean_count)
    return w, v


def fit_mixed_effects(
    rows: ClientRows, random: np.ndarray, rounds: int = 60, tolerance: float = 0.01
) -> tuple[Fit, np.ndarray]:
    """Diagonal random effects for the columns in `random`, by EM around the mode (exact for Gaussian noise).

    Variances: the mean over clients of (v_i - w)^2 + the posterior variance; noise likewise from the residuals.
    """
    variance, noise, fit = np.where(random, 0.1, 1 / POOLED_PULL), 1.0, None
    squares = derivatives(rows, np.zeros((rows.clients, rows.width)))[1] if rows.kind == REGRESSION else None
    ridge = np.full(rows.width, 1e-4)
    for _ in range(rounds):
        fit = fit_shrunken(rows, 1 / variance, ridge, noise, fit, steps=1 if rows.kind == REGRESSION else 4)
        posterior = np.linalg.inv(fit.hessian)
        updated = ((fit.v - fit.w) ** 2 + np.diagonal(posterior, axis1=1, axis2=2)).mean(0).clip(1e-6, 1e3)
        updated = np.where(random, updated, variance)
        if squares is not None:
            residual = rows.y - score(fit.v, rows.x, rows.client, 1)[:, 0]
            noise = float(((residual**2).sum() + (squares * posterior).sum()) / len(rows.y)) + 1e-9
        change, variance = np.abs(np.log(updated / variance)).max(), updated
        if change < tolerance:
            break
    return fit_shrunken(rows, 1 / variance, ridge, noise, fit), variance
