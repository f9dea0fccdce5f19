"""How much lower a client's risk is under one model than under another, given what is known of its truth.

All losses here come from a canonical likelihood: a row's reported loss is kappa (A(z) - y z) plus what no model
changes, z = x'v the score and A' the mean of y. With p instead of o a client whose truth is w_i gains, on average over
its x,

    kappa mean [ A(z_o) - A(z_p) - A'(z_w) (z_o - z_p) ]        z_w = x'w_i

    squared loss   kappa = 2, A = z^2/2: with S the second moments of x and q = S (o - p), w_i ~ N(v, C):
                   mean (o + p)'q - 2 q'v,  variance 4 q'C q: exact
    log-loss       kappa = 1, A = log(1 + e^z) or log sum e^z; the mean of A'(z_w) by `glm.py`
    deviance       kappa = 2, A = e^z

For the last two the variance is that of the gain made linear in w_i: q'C q, q = kappa mean x A''(z_w) (z_o - z_p).

`x` is where the models will be used. At future rows of client i it stands for a mixture of its own rows and of
everybody's, put at the client's mean: own rows alone flatter a model that was fitted to them. Everybody's are normal
points with the clients' pooled covariance, which takes sums to know and nobody's rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mooring.advice import glm
from mooring.advice.asking import at_hand, doing, question
from mooring.advice.posterior import Truths, along, cov_at, mean_at, means_along
from mooring.core.cohort import Batch, Rows
from mooring.core.seeds import uniforms
from mooring.tasks.linear import Linear
from mooring.tasks.poisson import Poisson

REFERENCES = 64  # points that stand for everybody's x
LIGHT = 0.002  # mean weight of a scale below which the next heavier one speaks for it
BY_CLIENT = ("weight", "mean", "variance", "noise", "doubt")

Pair = tuple[Tensor, Tensor]  # the other model and the one it is compared with, each [m, d] or [d]


class Gain(NamedTuple):
    """The gain at each scale of the spread."""

    weight: Tensor  # [c, m]
    mean: Tensor  # [c, m]
    variance: Tensor  # [c, m]
    noise: Tensor  # [m], variance of a mean over the given rows around that gain; 0 at future rows
    overall: Tensor  # [c], the scales' weights for the federation
    shared: Tensor  # [c], variance of the clients' weighted mean that their common centre adds
    doubt: Tensor  # [m], relative variance of the gain's size, not of its sign: future x are not known exactly

    @property
    def expected(self) -> Tensor:
        """[m]."""
        return (self.weight * self.mean).sum(0)

    @property
    def spread(self) -> Tensor:
        """[m]: the standard deviation, scales included."""
        variance = self.variance + self.doubt * self.mean**2
        return (self.weight * (variance + (self.mean - self.expected) ** 2)).sum(0).clamp(min=0).sqrt()

    def total(self, share: Tensor, phi: float = 1.0) -> tuple[float, float]:
        """Mean and variance of the clients' mean with these weights."""
        at_scales = self.mean @ share
        between = (at_scales - self.overall @ at_scales) ** 2
        own = phi * (share**2 @ self.spread**2)
        return float(share @ self.expected), float(own + self.overall @ (self.shared + between))


def joined_gains(parts: Sequence[Gain]) -> Gain:
    """The gains of several blocks of clients, whose centres are independent."""
    first = parts[0]
    if len(parts) == 1:
        return first
    by_client = {name: torch.cat([getattr(g, name) for g in parts], -1) for name in BY_CLIENT}
    overall = torch.stack([g.overall for g in parts]).mean(0)
    return first._replace(**by_client, overall=overall, shared=torch.stack([g.shared for g in parts]).sum(0))


def gain_of(gain: Gain, clients: Tensor) -> Gain:
    """The gains of some of the clients."""
    return gain._replace(**{name: getattr(gain, name)[..., clients] for name in BY_CLIENT})


class Places(NamedTuple):
    """Where gains are wanted: at rows, or at a mixture of them with everybody's."""

    rows: Any  # `Rows`, or clients elsewhere
    count: Tensor  # type: ignore[assignment]  # [m], rows; infinite for future rows
    doubt: Tensor  # [m], relative variance of x's second moment along a direction
    mixed: tuple[Tensor, ...] = ()  # everybody's share [m], and each client's mean [m, features]
    reference: Tensor | None = None  # [r, features], everybody's rows around their client's mean


def at_rows(task: Any, rows: Rows) -> Places:
    """At these very rows."""
    return Places(rows, rows.size.double(), torch.zeros(len(rows), dtype=torch.float64))


def at_future(task: Any, rows: Rows) -> Places:
    """At rows to come: the client's own and everybody's, moved to the client's mean."""
    n, some = rows.size.double(), rows.size > 0
    with at_hand(rows):
        total = totals(task, rows)
        whole = total.sum(0) / n.sum()
        mean = torch.where(some[:, None], total / n.clamp(min=1)[:, None], whole)
        scattered = scatter(task, rows, mean)
        within = scattered.sum(0) / max(int(n.sum()) - int(some.sum()), 1)
        root = _root(within, -0.5)
        fourth = fourth_moments(task, rows, mean, root=root)
    between = (mean - whole)[some].square().sum() / max(int(some.sum()) - 1, 1)
    sampled = within.trace() * (1 / n[some]).mean()
    pull = within.trace() / (between - sampled).clamp(min=1e-9 * within.trace() + 1e-300)
    mean = whole + (n / (n + pull))[:, None] * (mean - whole)
    share, doubt = shared_share(root @ scattered @ root, fourth, int(torch.linalg.matrix_rank(within)), n)
    return Places(rows, torch.full_like(n, torch.inf), doubt, (share, mean), spread_like(within))


@question
def totals(task: Any, batch: Batch) -> Tensor:
    """[C, features]: sums of x."""
    return (batch.x.double() * (batch.weight > 0)[..., None]).sum(1)


@question
def scatter(task: Any, batch: Batch, mean: Tensor) -> Tensor:
    """[C, features, features]: sums of (x - mean)(x - mean)'."""
    away = _away(batch, mean)
    return away.mT @ away


@question
def fourth_moments(task: Any, batch: Batch, mean: Tensor, *, root: Tensor) -> Tensor:
    """[C]: sums of |root (x - mean)|^4."""
    return (_away(batch, mean) @ root).square().sum(-1).square().sum(1)


def _away(batch: Batch, mean: Tensor) -> Tensor:
    return (batch.x.double() - mean[:, None]) * (batch.weight > 0)[..., None]


def spread_like(within: Tensor) -> Tensor:
    """[r, features]: normal points whose mean is 0 and whose covariance is `within`, always the same ones."""
    features = len(within)
    half = max(REFERENCES, 4 * features) // 2
    drawn = uniforms(0, "data", np.arange(half)[:, None], np.arange(features))
    some = torch.special.ndtri(torch.from_numpy((drawn + 2.0**-54).clip(max=1 - 2.0**-53)))
    found = torch.cat([some, -some])
    return found @ _root(found.T @ found / len(found), -0.5) @ _root(within, 0.5)


def _root(matrix: Tensor, power: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    seen = values > 1e-10 * values[-1].clamp(min=torch.finfo(values.dtype).tiny)
    return (vectors[:, seen] * values[seen] ** power) @ vectors[:, seen].T


def shared_share(second: Tensor, fourth: Tensor, d: int, n: Tensor) -> tuple[Tensor, Tensor]:
    """[m]: how much of everybody's x stands for a client's: all where clients' covariances differ by chance only.

    And the relative variance of the second moment along a direction that remains.

    From sums over each client's rows around its mean, in units of the clients' pooled covariance of rank d: of outer
    products `second` [m, features, features], and of fourth powers of lengths [m]. Own second moments are off by
    d (d + 1) / n in squared norm through sampling; what they differ by beyond that, on average over clients, is told by
    their fourth moments. At least 2 d rows' worth.
    """
    known = n > 1
    second = second / (n - 1).clamp(min=1)[:, None, None]
    gap = (second - torch.eye(second.shape[1], dtype=second.dtype)).square().sum((1, 2))
    sampling = ((fourth / n.clamp(min=1) - second.square().sum((1, 2))) / n.clamp(min=1)).clamp(min=0)
    weight = n[known] / n[known].sum() if bool(known.any()) else n[known]
    differ = float((weight * (gap - sampling)[known]).sum().clamp(min=0)) if bool(known.any()) else 0.0
    typical = d * (d + 1) / n.clamp(min=1)
    share = torch.maximum(typical / (typical + differ), 2 * (d + 1) / (n + 2 * (d + 1)))
    left = typical * differ / (typical + differ)
    return share, 2 * left / max(d * (d + 1), 1)


def points(task: Any, batch: Batch, mixed: tuple[Tensor, ...], reference: Tensor | None) -> tuple[Tensor, Tensor]:
    """Design rows [C, b, d] and weights [C, b] that sum to 1, where gains are wanted."""
    if reference is None:
        return glm.design(task, batch.x), batch.weight.double()
    share, mean = mixed
    part = share[:, None]
    both = torch.cat([batch.x.double(), mean[:, None] + reference], 1)
    weight = torch.cat([(1 - part) * batch.weight.double(), part.expand(-1, len(reference)) / len(reference)], 1)
    return glm.design(task, both), weight / weight.sum(1, keepdim=True)


def gains(task: Any, found: Truths, places: Places, pairs: Sequence[Pair], share: Tensor) -> list[Gain]:
    """For every pair (o, p) the gain of p over o; `share` [m], of sum 1, weighs the clients in their total."""
    m, scales = len(found.data.b), len(found.overall)
    o, p = (torch.stack([pair[side].double().expand(m, -1) for pair in pairs], 1) for side in (0, 1))  # [m, pairs, d]
    best = int(found.overall.argmax())
    at = _squared if isinstance(task, Linear) else _canonical
    with at_hand(places.rows):
        told = at(task, found, places, o, p)
        parts = []
        for j, (value, q, spill) in enumerate(told):
            wide, leant = along(found, j, q)
            parts.append((value.T, wide.T, torch.einsum("c,ckd->kd", share, leant)))
            if j == best:
                around = (spill / places.count.clamp(min=1)[:, None]).T
    mean, variance, pull = (torch.stack(column, 1) for column in zip(*parts))  # [pairs, scales, ...]
    together = torch.einsum("kci,cij,kcj->kc", pull, found.centre_cov, pull)
    assert len(parts) == scales
    return [
        Gain(found.weight, mean[k], variance[k].clamp(min=0), around[k], found.overall, together[k], places.doubt)
        for k in range(len(pairs))
    ]


Told = Iterator[tuple[Tensor, Tensor, Tensor]]  # a scale's gains [m, pairs], slopes in w [m, pairs, d], noise of a row


def _squared(task: Any, found: Truths, places: Places, o: Tensor, p: Tensor) -> Told:
    """Squared loss: the second moments of x are all that gains see."""
    s = weighted_moments(task, places.rows, *places.mixed, reference=places.reference)
    q = (o - p) @ s  # S is symmetric
    constant = ((o + p) * q).sum(-1)
    spill = 4 * found.data.noise[:, None] * ((o - p) * q).sum(-1)
    for mean in means_along(found, q).unbind(-1):
        yield constant - 2 * mean, 2 * q, spill


@question
def weighted_moments(task: Any, batch: Batch, *mixed: Tensor, reference: Tensor | None) -> Tensor:
    """[C, d, d]: the second moments of x. Those of everybody's points around a mean need no points, as theirs is 0."""
    if reference is None or task.lift is not None:
        x, weight = points(task, batch, mixed, reference)
        return x.mT @ (weight[..., None] * x)
    share, mean = mixed
    own, weight, centre = glm.design(task, batch.x), batch.weight.double(), glm.design(task, mean)
    around = torch.zeros(task.dim, task.dim, dtype=own.dtype)
    around[: mean.shape[1], : mean.shape[1]] = reference.T @ reference / len(reference)
    part = share[:, None, None]
    both = (1 - part) * (own.mT @ (weight[..., None] * own)) + part * (around + centre[..., None] * centre[:, None])
    return both / ((1 - share) * weight.sum(1) + share)[:, None, None]


def _canonical(task: Any, found: Truths, places: Places, o: Tensor, p: Tensor) -> Told:
    """Log-loss and deviance: responses at every x are uncertain as the scores are."""

    def at(j: int) -> list[Any]:
        where = places.rows, mean_at(found, j), cov_at(found, j), o, p, *places.mixed
        return [responses(task, *where, reference=places.reference)]

    share = found.weight.mean(1)
    asked = torch.nonzero(share >= min(LIGHT, float(share.max())))[:, 0].tolist()
    told = dict(zip(asked, (one for (one,) in doing(places.rows)(at, asked))))
    for j in range(len(share)):
        yield tuple(told[min(asked, key=lambda k: abs(k - j))])  # type: ignore[misc]


class Responses(NamedTuple):
    gain: Tensor  # [C, pairs]
    slope: Tensor  # [C, pairs, d], in w
    spill: Tensor  # [C, pairs], the variance that one row's noise adds


@question
def responses(
    task: Any, batch: Batch, v: Tensor, cov: Tensor, o: Tensor, p: Tensor, *mixed: Tensor, reference: Tensor | None
) -> Responses:
    """Of a canonical likelihood, for pairs o and p [C, pairs, d], the truth being N(v, cov)."""
    x, weight = points(task, batch, mixed, reference)
    kappa = 2.0 if isinstance(task, Poisson) else 1.0
    mean, flat = glm.response(task, glm.scores(x, v), glm.blurs(x, cov))
    flatless, weigh, out = torch.ones_like(flat), weight[..., None], []
    for k in range(o.shape[1]):
        zo, zp = glm.scores(x, o[:, k]), glm.scores(x, p[:, k])
        gap = zo - zp
        constant = (weight * (glm.potential(task, zo) - glm.potential(task, zp))).sum(1)
        value = kappa * (constant - (weigh * mean * gap).sum((1, 2)))
        q = kappa * (x.mT @ (weigh * glm.bent(task, mean, flat, gap))).flatten(1)
        spill = kappa**2 * (weigh * glm.bent(task, mean, flatless, gap) * gap).sum((1, 2))
        out.append((value, q, spill))
    return Responses(*(torch.stack(column, 1) for column in zip(*out)))
