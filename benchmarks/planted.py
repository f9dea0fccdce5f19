"""Federations with known true models, well specified and misspecified in eight ways, for scoring advice.

Sizes, dimension, noise and spread are drawn for each federation, so that shares over many of them are averages
over a grid: 20 to 100 clients of 12 to 150 rows (equal or lognormal; twice that for two classes), 4 to 20 features (at
most 10 for two classes) with correlations, in half of the federations stretched by client, and between-client variances
from 0 to 30 times a client's own sampling variance.

    linear          y = x'w_i + noise, w_i ~ N(w, diag(tau^2)), noise N(0, 1)
    heavy tails     noise is Student's t with three degrees of freedom
    noise by x      noise grows with |x_1|
    noise by client noise differs by client, by a factor of four between the tenths
    clusters        the w_i take three values
    skewed spread   w_i - w exponential in every coefficient
    correlated      w_i - w along few directions
    nonlinear       a sine of x_1 and a product of two inputs are added, which no model contains
    outliers        one client of eight lies four times as far from the center as the others
    logistic        two classes, log-odds x'w_i
    absolute        absolute loss; the noise of heavy tails
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from mooring.core.seeds import generator
from mooring.data.clients import BINARY, REGRESSION, Clients, from_arrays
from mooring.tasks.linear import Linear
from mooring.tasks.linear_losses import Absolute
from mooring.tasks.logistic import Logistic

WELL = "linear"
MISSPECIFIED = (
    "heavy tails",
    "noise by x",
    "noise by client",
    "clusters",
    "skewed spread",
    "correlated",
    "nonlinear",
    "outliers",
)
LOGISTIC = "logistic"
ABSOLUTE = "absolute"
KINDS = (WELL, *MISSPECIFIED, LOGISTIC, ABSOLUTE)
SIGNALS = (0.0, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)  # tau^2 over a typical client's sampling variance
FRESH = 2_000  # rows on which a client's true risk is measured
TAILS = stats.t(3, scale=3**-0.5)  # noise with heavy tails, of variance 1
NOISES = torch.from_numpy(TAILS.ppf((np.arange(100) + 0.5) / 100))  # the same, as a mean over points


@dataclass(frozen=True)
class Planted:
    """A federation and the true risk of its models."""

    clients: Clients
    task: Linear | Logistic | Absolute
    x: Tensor  # [m, FRESH, features]
    truth: Tensor  # [m, FRESH], the mean of y there, or its log-odds

    def risk(self, models: Tensor) -> Tensor:
        """Return [m]: each client's true risk, up to the irreducible part; one model [d] is used for all clients."""
        w = models.double().expand(len(self.x), -1)
        z = torch.einsum("cbq,cq->cb", self.x, w[:, :-1]) + w[:, -1:]
        if isinstance(self.task, Linear):
            return ((z - self.truth) ** 2).mean(1)
        if isinstance(self.task, Absolute):
            return torch.stack([(z - self.truth - noise).abs().mean(1) for noise in NOISES]).mean(0)
        return (torch.nn.functional.softplus(z) - torch.sigmoid(self.truth) * z).mean(1)


def planted(kind: str, seed: int, *, signal: float | None = None) -> Planted:
    """Return federation number `seed` of that kind."""
    rng = generator(seed, "data", KINDS.index(kind))
    m = int(rng.integers(20, 101))
    d, n = int(rng.choice((4, 8, 12, 20))), int(rng.choice((12, 20, 40, 80, 150)))
    if kind == LOGISTIC:
        d, n = min(d, 10), 2 * n
    size = np.full(m, n) if rng.random() < 0.5 else np.clip(n * rng.lognormal(0, 0.7, m), 5, 4 * n).astype(int)
    signal = SIGNALS[(seed + KINDS.index(kind)) % len(SIGNALS)] if signal is None else signal
    noise = 5.0 if kind == LOGISTIC else 1.0  # of a row's score: one over p (1 - p)
    share = rng.dirichlet(np.ones(d + 1)) * (d + 1) if rng.random() < 0.5 else np.ones(d + 1)
    tau = np.sqrt(signal * noise / n * share)
    if kind == LOGISTIC:
        tau = np.minimum(tau, 1.0)  # beyond that every client's classes are nearly separable
    mix = np.linalg.cholesky(0.4 * np.ones((d, d)) + 0.6 * np.eye(d))
    shift = 0.5 * rng.standard_normal((m, d))
    stretch = np.exp(0.3 * rng.standard_normal((m, 1, d))) if rng.random() < 0.5 else np.ones((m, 1, d))
    scale = rng.choice([0.5, 1.0, 1.5], (m, 1)) if kind == "noise by client" else np.ones((m, 1))
    w = rng.standard_normal(d + 1) * (1.2 / (d + 1) ** 0.5 if kind == LOGISTIC else 1.0)
    w_clients = w + tau * draw_deviations(kind, rng, m, d + 1)

    def inputs(count: int) -> np.ndarray:
        return shift[:, None] + stretch * (rng.standard_normal((m, count, d)) @ mix.T)

    def mean(x: np.ndarray) -> np.ndarray:
        z = np.einsum("cbq,cq->cb", x, w_clients[:, :-1]) + w_clients[:, -1:]
        return z + 0.5 * np.sin(2 * x[..., 0]) + 0.3 * x[..., 0] * x[..., 1] if kind == "nonlinear" else z

    x = inputs(int(size.max()))
    z = mean(x)
    if kind == LOGISTIC:
        y = (rng.random(z.shape) < 1 / (1 + np.exp(-z))).astype(int)
    else:
        y = z + scale * noise_of(kind, rng, x)
    fresh = inputs(FRESH)
    clients = from_arrays(
        [a[:k] for a, k in zip(x, size)],
        [b[:k] for b, k in zip(y, size)],
        kind=BINARY if kind == LOGISTIC else REGRESSION,
    )
    task = {LOGISTIC: Logistic, ABSOLUTE: Absolute}.get(kind, Linear)(d)
    return Planted(clients, task, torch.from_numpy(fresh), torch.from_numpy(mean(fresh)))


def draw_deviations(kind: str, rng: np.random.Generator, m: int, d: int) -> np.ndarray:
    """Return [m, d]: deviations of the clients' coefficients from their center, with variance 1."""
    if kind == "clusters":
        return rng.standard_normal((3, d))[rng.integers(0, 3, m)]
    if kind == "skewed spread":
        return rng.exponential(1.0, (m, d)) - 1
    if kind == "correlated":
        rank = max(1, d // 3)
        return rng.standard_normal((m, rank)) @ rng.standard_normal((rank, d)) / rank**0.5
    out = rng.standard_normal((m, d))
    return np.where(rng.random((m, 1)) < 1 / 8, 4 * out, 0.6 * out) if kind == "outliers" else out


def noise_of(kind: str, rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    """Return [m, rows]: noise of about variance 1."""
    if kind in ("heavy tails", ABSOLUTE):
        return rng.standard_t(3, x.shape[:2]) / 3**0.5
    out = rng.standard_normal(x.shape[:2])
    return out * np.sqrt(0.2 + 0.65 * x[..., 0] ** 2) if kind == "noise by x" else out
