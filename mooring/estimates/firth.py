"""Logistic regression without the bias of maximum likelihood, many clients at once, and the variance of its estimate.

    w        maximises  sum_j log-likelihood_j + 1/2 log|X'WX|,   W = pi (1 - pi),  h_j = W_j x_j'(X'WX)^-1 x_j
    J        minus the second derivative of that at w; up to a term over pairs of rows it is X'W~X with
             W~_j = W_j (1 + h_j) - h_j (1 - 2 pi_j)^2 / 2
    Cov(w) = phi J^-1,   phi = sum_j s_j^2 / sum_j W~_j (1 - h~_j),   s_j = y_j - pi_j + h_j (1/2 - pi_j)

with h~_j = W~_j x_j'J^-1 x_j. phi compares the score's variance with that of the model, both with the degrees of
freedom that fitting took: for least squares the same expression is RSS/(n - d). At n = 10 d maximum likelihood
overstates w by a tenth and its Fisher information understates the variance as much; w and Cov(w) here are right to
about a hundredth, and w is finite for separable rows.

Source   Firth, Bias reduction of maximum likelihood estimates, Biometrika 1993. phi is the variance of El Karoui and
         others, On robust regression with high-dimensional predictors, PNAS 2013: valid while d/n does not vanish.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from mooring.core.newton import damped_newton

MAX_PAIR_ROWS = 2_000  # up to so many rows a client's curvature includes its term over pairs, which costs n^2 d,
MAX_ROWS_PER_COEFFICIENT = 100  # and up to so many rows per coefficient: its share is of order d/n
RELATIVE_RIDGE = 1e-10  # relative ridge that keeps the algebra finite for clients with too few rows
MIN_CURVATURE_SHARE = 0.25  # J counts only where it is at least this share of the Fisher information
MAX_PHI = 3.0  # phi is 1 up to sampling error: larger values come from small, nearly separable clients
MAX_LOG_ODDS_STEP = 4.0  # no record's log-odds move by more than this in one step


class FirthFit(NamedTuple):
    fit: Tensor  # [m, d]
    curvature: Tensor  # [m, d, d], J
    fisher: Tensor  # [m, d, d], X'WX
    phi: Tensor  # [m]


def fit_firth(x: Tensor, success: Tensor, valid: Tensor) -> FirthFit:
    """Fits for x [m, B, d] and success [m, B]; rows with valid = False are padding and must be zero in x."""
    y, valid = success.double(), valid.double()
    n, d = valid.sum(1), x.shape[2]
    size = (x**2).sum((1, 2)) / n
    floor = RELATIVE_RIDGE * size.clamp(min=RELATIVE_RIDGE)[:, None, None] * torch.eye(d, dtype=x.dtype)

    last: list[tuple[Tensor, ...]] = []  # Newton's method needs value, slope and direction at the same w

    def parts(w: Tensor) -> tuple[Tensor, ...]:
        if not last or not torch.equal(last[0][0], w):
            score = (x @ w[..., None])[..., 0]
            prob = torch.sigmoid(score)
            curve = valid * prob * (1 - prob)
            factor = torch.linalg.cholesky_ex((curve[..., None] * x).mT @ x + floor)[0]
            last[:] = [(w.clone(), score, prob, curve, factor)]
        return last[0][1:]

    def value(w: Tensor) -> Tensor:
        score, _, _, factor = parts(w)
        loss = (valid * (softplus(score) - y * score)).sum(1)
        return (loss - factor.diagonal(dim1=1, dim2=2).log().sum(1)) / n

    def slope(w: Tensor) -> Tensor:
        _, prob, curve, factor = parts(w)
        return -(x.mT @ _score(y, valid, prob, _leverage(x, curve, factor))[..., None])[..., 0] / n[:, None]

    def direction(w: Tensor, g: Tensor) -> Tensor:
        step = n[:, None] * torch.cholesky_solve(g[..., None], parts(w)[3])[..., 0]
        return step * (MAX_LOG_ODDS_STEP / (x @ step[..., None]).abs().amax(1).clamp(min=MAX_LOG_ODDS_STEP))

    w = damped_newton(value, slope, direction, torch.zeros(len(x), d, dtype=x.dtype), tol=1e-9)
    _, prob, curve, factor = parts(w)
    h, tilt = _leverage(x, curve, factor), 1 - 2 * prob
    score_curvature = curve * (1 + h) - h * tilt**2 / 2
    curvature = (score_curvature[..., None] * x).mT @ x
    if x.shape[1] <= min(MAX_PAIR_ROWS, MAX_ROWS_PER_COEFFICIENT * d):
        half = torch.linalg.solve_triangular(factor, x.mT, upper=False)
        slant = tilt * curve
        curvature = curvature + x.mT @ (slant[:, :, None] * (half.mT @ half) ** 2 @ (slant[..., None] * x)) / 2
    fisher = factor @ factor.mT
    # Close to separation the expansion behind J may fail; the Fisher information is then the better curvature.
    half = torch.linalg.solve_triangular(factor, curvature, upper=False)
    relative = torch.linalg.solve_triangular(factor, half.mT, upper=False)
    usable = torch.linalg.eigvalsh((relative + relative.mT) / 2)[:, 0] > MIN_CURVATURE_SHARE
    curvature = torch.where(usable[:, None, None], curvature, fisher)
    score_curvature = torch.where(usable[:, None], score_curvature, curve)
    score_leverage = score_curvature * ((x @ torch.linalg.inv(curvature + floor)) * x).sum(-1)
    expected = (score_curvature * (1 - score_leverage)).sum(1)
    score = _score(y, valid, prob, h)
    phi = (score.square().sum(1) / expected.clamp(min=RELATIVE_RIDGE)).clamp(1 / MAX_PHI, MAX_PHI)
    return FirthFit(w, curvature, fisher, phi)


def _leverage(x: Tensor, curve: Tensor, factor: Tensor) -> Tensor:
    return curve * torch.linalg.solve_triangular(factor, x.mT, upper=False).square().sum(1)


def _score(y: Tensor, valid: Tensor, prob: Tensor, h: Tensor) -> Tensor:
    """[m, B]: each record's part of the derivative of the penalised log-likelihood in its log-odds."""
    return valid * (y - prob + h * (0.5 - prob))
