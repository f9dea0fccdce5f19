"""Planted federations for the tests of estimates: truths with an exact radius around a common model."""

import numpy as np
import torch

from mooring.core.cohort import Rows


def truths(m, d, radius, p, rng):
    """[m, d] with sum_i p_i |w_i - wbar|^2 = radius^2."""
    w = rng.normal(size=(m, d))
    w -= p @ w
    return 0.5 + w * radius / np.sqrt(p @ (w**2).sum(1))


def rows_of(xs, ys):
    return Rows.stack([torch.from_numpy(x) for x in xs], [torch.from_numpy(y) for y in ys])


def linear_rows(n, w, rng, noise=1.0):
    """(rows, xs, ys) of clients with n_i rows each and truths w [m, d]."""
    xs = [rng.normal(size=(k, w.shape[1])) for k in n]
    ys = [x @ v + noise * rng.normal(size=len(x)) for x, v in zip(xs, w)]
    return rows_of(xs, ys), xs, ys


def logistic_rows(n, w, rng):
    xs = [rng.normal(size=(k, w.shape[1])) for k in n]
    ys = [(rng.random(len(x)) < 1 / (1 + np.exp(-x @ v))).astype(float) for x, v in zip(xs, w)]
    return rows_of(xs, ys), xs, ys
