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
everybody's, put at the client's mean: own rows alone flatter a model that was fitted to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mooring.advice import glm
from mooring.advice.folds import owners
from mooring.advice.posterior import Truths, along, cov_at, mean_at
from mooring.core.cohort import Rows, batches_of
from mooring.tasks.linear import Linear
from mooring.tasks.poisson import Poisson

REFERENCES = 64  # rows that stand for everybody's x
BY_CLIENT = ("weight", "mean", "variance", "noise", "doubt")
ROWS = 4_096  # rows whose outer products are held at a time

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


class Places(NamedTuple):
    """Where gains are wanted: blocks of clients with design rows [c, b, d] and weights [c, b] that sum to 1."""

    blocks: list[tuple[Tensor, Tensor, Tensor]]
    count: Tensor  # type: ignore[assignment]  # [m], rows; infinite for future rows
    doubt: Tensor  # [m], relative variance of x's second moment along a direction


def at_rows(task: Any, rows: Rows) -> Places:
    """At these very rows."""
    blocks = [(block, glm.design(task, batch.x), batch.weight.double()) for block, batch in batches_of(rows)]
    return Places(blocks, rows.size.double(), torch.zeros(len(rows), dtype=torch.float64))


def at_future(task: Any, rows: Rows) -> Places:
    """At rows to come: the client's own and everybody's, moved to the client's mean."""
    n, x = rows.size.double(), flat_inputs(rows)
    owner, some = owners(rows), rows.size > 0
    total = torch.zeros(len(rows), x.shape[1], dtype=torch.float64).index_add_(0, owner, x)
    whole = x.mean(0)
    mean = torch.where(some[:, None], total / n.clamp(min=1)[:, None], whole)
    away = x - mean[owner]
    freedom = max(len(x) - int(some.sum()), 1)
    within = away.T @ away / freedom
    between = (mean - whole)[some].square().sum() / max(int(some.sum()) - 1, 1)
    sampled = within.trace() * (1 / n[some]).mean()
    pull = within.trace() / (between - sampled).clamp(min=1e-9 * within.trace() + 1e-300)
    mean = whole + (n / (n + pull))[:, None] * (mean - whole)
    reference = spread_like(away, within)
    borrowed, doubt = shared_share(away, owner, within, n)
    blocks = []
    for block, batch in batches_of(rows):
        points = torch.cat([batch.x.double(), mean[block][:, None] + reference], 1)
        part = borrowed[block][:, None]
        weight = torch.cat([(1 - part) * batch.weight.double(), part.expand(-1, len(reference)) / len(reference)], 1)
        blocks.append((block, glm.design(task, points), weight / weight.sum(1, keepdim=True)))
    return Places(blocks, torch.full_like(n, torch.inf), doubt)


def spread_like(away: Tensor, within: Tensor) -> Tensor:
    """[r, features]: some of the rows, turned and scaled so that their mean is 0 and their covariance `within`."""
    pick = torch.linspace(0, len(away) - 1, min(max(REFERENCES, 4 * away.shape[1]), len(away))).long()
    found = away[pick] - away[pick].mean(0)
    return found @ _root(found.T @ found / len(pick), -0.5) @ _root(within, 0.5)


def _root(matrix: Tensor, power: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    seen = values > 1e-10 * values[-1].clamp(min=torch.finfo(values.dtype).tiny)
    return (vectors[:, seen] * values[seen] ** power) @ vectors[:, seen].T


def shared_share(away: Tensor, owner: Tensor, within: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """[m]: how much of everybody's x stands for a client's: all where clients' covariances differ by chance only.

    And the relative variance of the second moment along a direction that remains.

    In units of `within`, own second moments are off by d (d + 1) / n in squared norm through sampling; what they differ
    by beyond that, on average over clients, is told by their fourth moments. At least 2 d rows' worth.
    """
    z = away @ _root(within, -0.5)
    d = int(torch.linalg.matrix_rank(within))
    known = n > 1
    second = torch.zeros(len(n), z.shape[1], z.shape[1], dtype=z.dtype)
    for block in torch.arange(len(z)).split(ROWS):
        second.index_add_(0, owner[block], z[block][:, :, None] * z[block][:, None])
    second = second / (n - 1).clamp(min=1)[:, None, None]
    eye = torch.eye(z.shape[1], dtype=z.dtype)
    gap = (second - eye).square().sum((1, 2))
    fourth = torch.zeros(len(n), dtype=z.dtype).index_add_(0, owner, z.square().sum(1) ** 2)
    sampling = ((fourth / n.clamp(min=1) - second.square().sum((1, 2))) / n.clamp(min=1)).clamp(min=0)
    weight = n[known] / n[known].sum() if bool(known.any()) else n[known]
    differ = float((weight * (gap - sampling)[known]).sum().clamp(min=0)) if bool(known.any()) else 0.0
    typical = d * (d + 1) / n.clamp(min=1)
    share = torch.maximum(typical / (typical + differ), 2 * (d + 1) / (n + 2 * (d + 1)))
    left = typical * differ / (typical + differ)
    return share, 2 * left / max(d * (d + 1), 1)


def flat_inputs(rows: Rows) -> Tensor:
    """[N, features]: all rows, client after client."""
    begin = torch.cumsum(rows.size, 0) - rows.size
    index = torch.repeat_interleave(rows.start - begin, rows.size) + torch.arange(int(rows.size.sum()))
    return rows.x[index].double()


def gains(task: Any, found: Truths, places: Places, pairs: Sequence[Pair], share: Tensor) -> list[Gain]:
    """For every pair (o, p) the gain of p over o; `share` [m], of sum 1, weighs the clients in their total."""
    m, scales, dim = len(found.data.b), len(found.overall), found.data.b.shape[1]
    mean = torch.zeros(len(pairs), scales, m, dtype=torch.float64)
    variance, around = torch.zeros_like(mean), torch.zeros(len(pairs), m, dtype=torch.float64)
    pull = torch.zeros(len(pairs), scales, dim, dtype=torch.float64)
    models = [(o.double().expand(m, -1), p.double().expand(m, -1)) for o, p in pairs]
    linear, best = isinstance(task, Linear), int(found.overall.argmax())
    for block, x, weight in places.blocks:
        compare = _squared if linear else _canonical
        prepared = [compare(task, x, weight, o[block], p[block], found.data.noise[block]) for o, p in models]
        for j in range(scales):
            v = mean_at(found, j, block)
            blur = None if linear else glm.blurs(x, cov_at(found, j, block))
            value, q, spill = (torch.stack(part, 1) for part in zip(*(one(v, blur) for one in prepared)))
            wide, leant = along(found, j, q, block)
            mean[:, j, block], variance[:, j, block] = value.T, wide.T
            pull[:, j] += torch.einsum("c,ckd->kd", share[block], leant)
            if j == best:
                around[:, block] = (spill / places.count[block].clamp(min=1)[:, None]).T
    together = torch.einsum("kci,cij,kcj->kc", pull, found.centre_cov, pull)
    return [
        Gain(found.weight, mean[k], variance[k].clamp(min=0), around[k], found.overall, together[k], places.doubt)
        for k in range(len(pairs))
    ]


def _squared(task: Any, x: Tensor, weight: Tensor, o: Tensor, p: Tensor, noise: Tensor) -> Any:
    """Squared loss: (v, _) -> the gain's mean, its slope in w and the variance that one row's noise adds."""
    q = (x.mT @ (weight * (x @ (o - p)[..., None])[..., 0])[..., None])[..., 0]
    constant = ((o + p) * q).sum(1)
    spill = 4 * noise * ((o - p) * q).sum(1)

    def gain(v: Tensor, blur: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        return constant - 2 * (q * v).sum(1), 2 * q, spill

    return gain


def _canonical(task: Any, x: Tensor, weight: Tensor, o: Tensor, p: Tensor, noise: Tensor) -> Any:
    """The same for log-loss and deviance, from v and the variances of its scores."""
    kappa = 2.0 if isinstance(task, Poisson) else 1.0
    zo, zp = glm.scores(x, o), glm.scores(x, p)
    gap = zo - zp
    constant = (weight * (glm.potential(task, zo) - glm.potential(task, zp))).sum(1)

    def gain(v: Tensor, blur: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, flat = glm.response(task, glm.scores(x, v), blur)
        slope = glm.bent(task, mean, flat, gap)
        q = kappa * (x.mT @ (weight[..., None] * slope)).flatten(1)
        value = kappa * (constant - (weight[..., None] * mean * gap).sum((1, 2)))
        spill = kappa**2 * (weight[..., None] * glm.bent(task, mean, torch.ones_like(flat), gap) * gap).sum((1, 2))
        return value, q, spill

    return gain
