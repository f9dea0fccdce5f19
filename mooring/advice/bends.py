"""Gains where losses are no likelihoods, or coefficients too many for a posterior: how the loss bends tells.

Let o be another model, p the personal one, both linear scores, and 2p - o the mirror image of o behind p. A client's
mean loss L falls from o to p by an even and an odd part:

    L(o) - L(p) = q + odd        q = (L(o) + L(2p - o)) / 2 - L(p)        odd = (L(o) - L(2p - o)) / 2

q is how much the loss bends on that line, odd its slope at p. A personal model is the best guess of where its client's
loss is least: on average the slope is 0, and q is the gain to expect. How far off the guess may be, rows tell as well:
n of them know the lowest point on the line up to what makes the mean of n odd parts vary. With squared loss and
residuals of variance s^2, q = (o - p)'S(o - p), S being the second moments of x, and both the variance of that mean and
of the gain under a posterior of a flat prior are 4 s^2 q / n: a prior only makes it smaller.

Rows that were held out tell q, the odd parts' variance, and whether gains are what q says (`calibrate.py`), with models
of fewer rows; what they tell of a client is steadied by everyone's, in the shape of A = (o - p)'S(o - p) over
everybody's x. With models of all rows both change as A does, and the variance with one over the rows, too. What the
common model gains over alone is the difference of what p gains over the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mooring.advice import glm
from mooring.advice.asking import each_batch, question
from mooring.advice.calibrate import Witness
from mooring.advice.gain import Gain
from mooring.advice.tally import PAIRS, Trio
from mooring.core.cohort import Batch, Rows

STEADY = 10.0  # rows' worth of everyone's that a client's own numbers are steadied by
OTHERS = {"personal over alone": "alone", "personal over common": "common"}
LEAST = torch.finfo(torch.float64).tiny


class Bent(NamedTuple):
    """Sums over each client's held-out rows; against alone and against common [m, 2]."""

    rows: Tensor  # [m]
    trained: Tensor  # [m], of how many rows their models were fitted on
    even: Tensor  # [m, 2]
    odd: Tensor  # [m, 2]
    square: Tensor  # [m, 2], of odd parts
    wide: Tensor  # [m, 2], of A


class Line(NamedTuple):
    """What is known of the line from one other model to the personal one, of every client: [m] each."""

    bend: Tensor  # q over A
    noise: Tensor  # variance of a row's odd part, over A


class Sides(NamedTuple):
    even: Tensor  # [C, 2], sums over the rows
    odd: Tensor  # [C, 2]
    square: Tensor  # [C, 2], of odd parts


@question
def sides(task: Any, batch: Batch, *models: Tensor) -> Sides:
    """Even and odd parts of rows' losses, between each of alone and common and the personal models, all [C, d]."""
    real = batch.weight > 0

    def risk(w: Tensor) -> Tensor:
        return torch.where(real, task.row_risk(w, batch).double(), 0.0)

    *others, personal = models
    middle, parts = risk(personal), []
    for other in others:
        here, mirrored = risk(other), risk(2 * personal - other)
        odd = (here - mirrored) / 2
        parts.append((((here + mirrored) / 2 - middle).sum(1), odd.sum(1), odd.square().sum(1)))
    return Sides(*(torch.stack(column, 1) for column in zip(*parts)))


@question
def own_moments(task: Any, batch: Batch) -> Tensor:
    """[C, inputs, inputs]: sums of x x', x being what coefficients multiply."""
    x = inputs(task, batch)
    return x.mT @ x


def inputs(task: Any, batch: Batch) -> Tensor:
    return glm.design(task, batch.x) * (batch.weight > 0)[..., None]


def everyones_moments(task: Any, rows: Any) -> Tensor:
    """[inputs, inputs]: the second moments of all clients' x."""
    if not isinstance(rows, Rows):
        total = own_moments(task, rows).sum(0)
    else:
        flat = (inputs(task, batch).flatten(0, 1) for _, batch in each_batch(rows))
        total = sum(x.T @ x for x in flat)
    return total / rows.size.sum()


def widths(trio: Trio, moments: Tensor) -> Tensor:
    """[m, 2]: A, from alone and from common to the personal models; of several scores their sum."""
    out = []
    for other in OTHERS.values():
        gap = (getattr(trio, other) - trio.personal).double().view(len(trio.personal), len(moments), -1)
        out.append((gap * (moments @ gap)).sum((1, 2)))
    return torch.stack(out, 1)


def bent_of(task: Any, held: Any, trained: Tensor, trio: Trio, moments: Tensor) -> Bent:
    """What held-out rows say of models that were fitted on so many others [m]."""
    n = held.size.double()
    told = sides(task, held, trio.alone, trio.common.expand_as(trio.alone), trio.personal)
    return Bent(n, n * trained.double(), told.even, told.odd, told.square, n[:, None] * widths(trio, moments))


def total_bends(parts: Iterable[Bent]) -> Bent:
    """The sums of several folds."""
    return Bent(*(torch.stack(column).sum(0) for column in zip(*parts)))


def lines_of(found: Bent) -> dict[str, Line]:
    """By pair: every client's own, steadied by everyone's."""
    n, out = found.rows, {}
    for k, name in enumerate(OTHERS):
        wide = found.wide[:, k]
        scatter = (found.square[:, k] - found.odd[:, k].square() / n.clamp(min=1)).clamp(min=0)
        freedom = ((n - 1) / n.clamp(min=1)).clamp(min=0)
        out[name] = Line(steadied(found.even[:, k], wide, n).clamp(min=0), steadied(scatter, freedom * wide, n))
    return out


def steadied(own: Tensor, wide: Tensor, n: Tensor) -> Tensor:
    """[m]: ratios of two sums over n rows, STEADY rows of everyone's ratio counting beside a client's own."""
    typical = own.sum() / wide.sum().clamp(min=LEAST)
    more = STEADY * wide / n.clamp(min=1)
    return torch.where(wide > 0, (own + more * typical) / (wide + more).clamp(min=LEAST), typical)


def with_bends(seen: Mapping[str, Witness], found: Bent) -> dict[str, Witness]:
    """What held-out rows say of the gains, with what was to be expected of them and the errors of both."""
    n, lines, out = found.rows, lines_of(found), dict(seen)
    for k, (name, line) in enumerate(lines.items()):
        wide, trained = found.wide[:, k] / n, found.trained / n
        error, sd = ((line.noise * wide / rows).sqrt() for rows in (n, trained.clamp(min=1)))
        out[name] = seen[name]._replace(error=error, predicted=line.bend * wide, sd=sd)
    alone, common = (out[name] for name in OTHERS)
    return out | {
        name: seen[name]._replace(predicted=alone.predicted - common.predicted, sd=alone.sd.hypot(common.sd))
        for name in PAIRS
        if name not in OTHERS
    }


def bent_gains(found: Bent, asked: Tensor, trio: Trio, moments: Tensor, size: Tensor) -> dict[str, Gain]:
    """Everyone's gains with models of all their rows `size` [m], by pair; whoever was not `asked` bends as all do."""
    wide, n = widths(trio, moments), size.double().clamp(min=1)
    whole = Bent(*(torch.zeros(len(n), *part.shape[1:], dtype=part.dtype).index_copy(0, asked, part) for part in found))
    lines = lines_of(whole)
    mean = {name: line.bend * wide[:, k] for k, (name, line) in enumerate(lines.items())}
    variance = {name: line.noise * wide[:, k] / n for k, (name, line) in enumerate(lines.items())}
    alone, common = OTHERS
    rest = dict.fromkeys(PAIRS, (mean[alone] - mean[common], variance[alone] + variance[common]))
    told = rest | {name: (mean[name], variance[name]) for name in OTHERS}
    one, nothing = torch.ones(1, dtype=torch.float64), torch.zeros_like(n)
    weight = one[:, None].expand(1, len(n))
    return {
        name: Gain(weight, m[None], v[None], nothing, one, torch.zeros_like(one), nothing)
        for name, (m, v) in told.items()
    }
