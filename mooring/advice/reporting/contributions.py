"""Outliers, rows that local models would need, and contributions; all of it from training and validation rows.

outliers  clients whose coefficients lie further from the others than the estimated variance explains: the square of
          v_i - w in units of its covariance tau^2 - Cov(v_i | rows) is chi-square if they do not
rows      how many rows client i would need for a local model to match its pulled model now: n_i d_i / df_i, with
          d_i directions that its rows see and df_i = tr (H_i + Lam_i)^-1 H_i of them left free by the pull; both
          models then have the sampling variance noise df_i / n_i
contribution  the others' validation loss without client i, less what it is. Without i the global model
          moves by one Newton step, (A - p_i P_i)^-1 p_i grad L_i(v_i), P_i = (H_i^-1 + Lam_i^-1)^-1, A = sum_i p_i P_i,
          and each other client's model by (H_k + Lam_k)^-1 Lam_k times that: exact for linear tasks
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from scipy.special import chdtrc
from torch import Tensor

from mooring.advice.candidates.families import GLOBAL, PULLED_FAMILIES, Setting, fit_settings
from mooring.advice.reporting.setting_summary import find_prior
from mooring.core.client_functions import ClientRows
from mooring.core.task import Task
from mooring.partial_pooling.client_fits import differentiate_losses
from mooring.partial_pooling.client_prior import Prior
from mooring.partial_pooling.lambda_path import MAX_HESSIAN_NUMBERS, PullShape
from mooring.tasks.proximal import is_dense

FALSE_DISCOVERY_RATE = 0.05  # expected share of clients wrongly called outliers
UNSEEN_CURVATURE_SHARE = 1e-8  # a direction counts as unseen below this share of a client's largest curvature


class PulledFit(NamedTuple):
    """A pulled fit and its curvature, client by client."""

    v: Tensor  # [m, d]
    free: Tensor  # [m, d, d], (H + Lam)^-1 H: how far a client's model follows its own rows
    bound: Tensor  # [m, d, d], (H + Lam)^-1 Lam: how far it follows the global model
    shared: Tensor  # [m, d, d], P = (H^-1 + Lam^-1)^-1
    slope: Tensor  # [m, d], grad L_i(v_i)
    seen: Tensor  # [m], directions that the rows see
    ratios: Tensor  # [m, d], eigenvalues of Lam^-1/2 H Lam^-1/2: the rows' information over the pull's


def pull_shape_of(setting: Setting, priors: Sequence[Prior], rows: ClientRows) -> PullShape | None:
    """The lambdas of a pulled setting at scale 1; None where clients do not have them."""
    if setting.family == GLOBAL or setting.family == PULLED_FAMILIES[0]:
        return PullShape()
    prior = find_prior(setting, priors)
    return None if prior is None else prior.shape(rows.size)


def fit_with_curvature(
    task: Task, rows: ClientRows, p: Tensor, setting: Setting, priors: Sequence[Prior]
) -> PulledFit | None:
    """The fit of a global or pulled setting with its curvature; None for other families and large models."""
    shape = pull_shape_of(setting, priors, rows)
    if shape is None or not is_dense(task):
        return None
    v = next(fit_settings(task, rows, p, [setting], priors)).v
    d, m = task.dim, len(rows)
    tight = torch.ones(m, dtype=v.dtype) if shape.tight is None else shape.tight.to(v.dtype)
    slack = torch.ones(d, dtype=v.dtype) if shape.slack is None else shape.slack.to(v.dtype)
    s = slack.sqrt() if setting.family != GLOBAL else torch.zeros(d, dtype=v.dtype)
    scale = setting.value if setting.family != GLOBAL else 1.0
    out = [torch.empty(m, d, d, dtype=v.dtype) for _ in range(3)]
    seen, ratios = torch.empty(m, dtype=v.dtype), torch.empty(m, d).double()
    eye = torch.eye(d, dtype=v.dtype)
    _, slope, hessians = differentiate_losses(task, rows, v)
    for block in torch.arange(m).split(max(1, MAX_HESSIAN_NUMBERS // d**2)):
        h = hessians[block]
        sh, stiff = s[:, None] * h, (scale * tight[block])[:, None, None]
        inner = torch.linalg.solve(sh * s + stiff * eye, sh)
        ratios[block] = torch.linalg.eigvalsh((sh * s / stiff).double()).clamp(min=0)
        free = s[:, None] * inner
        out[0][block], out[1][block], out[2][block] = free, eye - free, h - h @ free
        values = torch.linalg.eigvalsh(h)
        seen[block] = (values > UNSEEN_CURVATURE_SHARE * values[:, -1:]).sum(1).to(v.dtype)
    return PulledFit(v, out[0], out[1], out[2], slope, seen, ratios)


def mean_degrees_of_freedom(fit: PulledFit, factor: float = 1.0) -> float:
    """The clients' mean df = tr (H + Lam)^-1 H with `factor` times their rows, and a pull that much weaker."""
    return float((factor * fit.ratios / (1 + factor * fit.ratios)).sum(1).mean())


def rows_to_match(fit: PulledFit, rows: ClientRows) -> np.ndarray:
    """[m]: rows at which a local model would match; infinite where the pulled model takes nothing from the rows."""
    free = fit.free.diagonal(dim1=1, dim2=2).sum(1).clamp(min=0)
    return (rows.size * fit.seen / free).double().numpy()


def estimate_contributions(task: Task, fit: PulledFit, p: Tensor, held: ClientRows, ridge: Tensor) -> np.ndarray:
    """[m]: the others' mean loss on their held-out rows without each client, less with it, in the unit of the risk."""
    p = (p / p.sum()).to(fit.v.dtype)
    rows = held.size.to(fit.v.dtype)
    _, slope, hessians = differentiate_losses(task, held, fit.v)
    gradient = rows[:, None] * (fit.bound.mT @ slope[..., None])[..., 0]
    curvature = rows[:, None, None] * (fit.bound.mT @ hessians @ fit.bound)
    a = torch.einsum("c,cij->ij", p, fit.shared) + torch.diag(ridge.to(fit.v.dtype))
    left = a - p[:, None, None] * fit.shared
    move = (torch.linalg.pinv(left, hermitian=True, rtol=1e-10) @ (p[:, None] * fit.slope)[..., None])[..., 0]
    change = (move * (gradient.sum(0) - gradient)).sum(1)
    change = change + 0.5 * torch.einsum("ci,cij,cj->c", move, curvature.sum(0) - curvature, move)
    others = (rows.sum() - rows).clamp(min=1)
    return (task.risk_per_loss * change / others).double().numpy()


def mean_loss_of_others(frame: pd.DataFrame) -> np.ndarray:
    """[m]: held-out loss of the other clients' personal models, per row; NaN where no other client has rows."""
    rows = frame["held_out_rows"].to_numpy(float)
    total = rows * frame["personal_held_out"].fillna(0.0).to_numpy(float)
    others = rows.sum() - rows
    return np.divide(total.sum() - total, others, out=np.full(len(frame), np.nan), where=others > 0)


def find_outliers(prior: Prior, m: int) -> np.ndarray:
    """[m] bool: outliers, at most FALSE_DISCOVERY_RATE of them wrongly on average (Benjamini, Hochberg)."""
    spread, chance = prior.spread, np.full(m, 1.0)
    varies = spread.variance > 0
    if bool(varies.any()):
        away = (spread.models - spread.center)[:, varies]
        cov = torch.diag(spread.variance[varies]) - spread.covs[:, varies][:, :, varies]
        values, vectors = torch.linalg.eigh((cov + cov.mT) / 2)
        is_seen = values > 1e-6 * values[:, -1:].clamp(min=torch.finfo(values.dtype).tiny)
        along = (vectors.mT @ away[..., None])[..., 0] ** 2
        square = torch.where(is_seen, along / values, 0.0).sum(1)
        chance[prior.clients.numpy()] = chdtrc(is_seen.sum(1).clamp(min=1).numpy(), square.numpy())
    return select_discoveries(chance, FALSE_DISCOVERY_RATE)


def select_discoveries(chance: np.ndarray, rate: float) -> np.ndarray:
    """[m] bool: the k least chances, k the most of which the largest is at most rate k / m (Benjamini, Hochberg)."""
    m, order = len(chance), np.argsort(chance, kind="stable")
    fits = np.flatnonzero(chance[order] * m / np.arange(1, m + 1) <= rate)
    out = np.zeros(m, bool)
    out[order[: fits[-1] + 1 if len(fits) else 0]] = True
    return out
