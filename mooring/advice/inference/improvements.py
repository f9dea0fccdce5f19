"""How much lower a client's loss is with one model than with another, as one joint distribution per client.

Let d be the mean difference of losses between another model o and the personal model p on held-out rows, and D the mean
divergence of o from p there: the difference to expect if p were the truth. p is the best guess of the truth, so the
true difference is b D plus what p misses,

    difference_o ~ N(b D,  s u D / n  +  c^2 D^2  +  v b^2 D^2 / n)

    b    slope of d on D over the clients (sum of d over sum of D, clustered errors), shrunk to 1
    u    variance of a row's deviation from D per unit of D: 4 sigma^2 for squared loss; a client's own, shrunk to all
         clients'. Deviations from the global model are the client's noise, whose variances may differ by orders of
         magnitude: they are shrunk on the log scale (Smyth 2004). Those from the local model are mostly those of a
         few rows at which it extrapolates: own rows show little of their variance
    s    how far the client's rows moved its model from the global one, 0 to 1: with normal truths and squared loss
         s u D / n is the posterior variance, exactly so for one coefficient. With several, each has a share s_j, and
         the two differences average them differently: the local model differs from the personal one where s_j is
         small, the global model where it is large. With V_j the divergence of the global from the local model along
         coefficient j, D_l = sum (1 - s_j)^2 V_j, D_g = sum s_j^2 V_j, and their sum falls short of sum V_j by 2 B,
         B = sum s_j (1 - s_j) V_j. B / (B + D_l) and D_g / (D_g + B) are averages of s_j with weights (1 - s_j) V_j
         and s_j V_j
    c^2  what varies in proportion to D beyond chance (u D / n) and that: models that are wrong. Only this part
         of the held-out residual d - b D is information beyond the personal model, which has seen the rows itself
    v    variance of a row's divergence per squared mean: how little n rows show of the mean divergence of all. That
         from a local model is mostly that of few rows at which it extrapolates. For the same reason D is shrunk, on
         the log scale, to the divergence over the client's own rows times the ratio of the two over all clients

The first two parts of the variance are estimates, with the degrees of freedom of the client's rows and of the clients:
the distribution is Student's, with degrees of freedom by Satterthwaite's rule. The two differences (local, global) have
the correlation of their rows' deviations and the smaller degrees of freedom, so that all three comparisons follow from
one bivariate distribution: they are transitive, and an interval and a probability never disagree. Nothing here depends
on the kind of task.

Source   Smyth. Linear models and empirical Bayes methods for assessing differential expression. 2004.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from scipy.special import stdtr, stdtrit
from torch import Tensor

from mooring.advice.evaluation.loss_sums import GLOBAL, LOCAL, PERSONAL, LossSums
from mooring.core.summing import Program, Step, add, run_alone
from mooring.estimates.random_effects import variance_log_sums, variance_prior

SLOPE_PRIOR_SD = 0.5  # prior standard deviation of b around 1
SHRINKAGE_ROWS = 10.0  # rows' worth of all clients' variance that a client's own is shrunk by
DEVIATION_KURTOSIS = 9.0  # of rows' deviations: the median over tables with withheld rows; 3 for normal ones
MIN_CLIENTS_FOR_PRIOR = 3  # whose variances show how much these differ
SHARE_FLOOR = 4.0  # the square of s is at least this over the number of clients: how well s itself is known
MAX_SQUARED_RESIDUAL = 9.0  # in units of its variance, that counts towards c^2
MAX_SIGNAL = 1e4  # of one client: squared divergence in units of its variance, that counts towards c^2
MAX_FREEDOM = 1e6  # degrees of freedom from which on Student's distribution is the normal one
MAX_EXCESS = 1.0  # c^2 at most
TINY = torch.finfo(torch.float64).tiny
SUM_QUANTUM = 1e-9  # of losses and divergences
IMPROVEMENT_MOMENTS = Step("improvement moments", "slope and noise of held-out differences", SUM_QUANTUM, linear=False)
IMPROVEMENT_EXCESS = Step("improvement excess", "differences beyond chance", SUM_QUANTUM, linear=False)
IMPROVEMENT_SCALE = Step("improvement scale", "scale of shrunk divergences", SUM_QUANTUM, linear=False)

# Differences (local less personal, global less personal) as contrasts: loss of `other` less loss of `model`.
_CONTRASTS = {
    (PERSONAL, LOCAL): (1.0, 0.0),
    (PERSONAL, GLOBAL): (0.0, 1.0),
    (GLOBAL, LOCAL): (1.0, -1.0),
    (LOCAL, GLOBAL): (-1.0, 1.0),
}


class Improvements(NamedTuple):
    """Every client's differences of loss, of its local and of the global model less its personal one."""

    mean: Tensor  # [m, 2]
    covariance: Tensor  # [m, 2, 2]
    freedom: Tensor  # [m], degrees of freedom of Student's distribution
    slope: Tensor  # [2], b
    excess: Tensor  # [2], c^2


def estimate_improvements(held: LossSums, own: LossSums) -> Improvements:
    """The joint distribution of every client's differences, where all clients' sums are at hand."""
    return run_alone(improvements_program(held, own))


def improvements_program(held: LossSums, own: LossSums) -> Program[Improvements]:
    """The joint distribution of the differences of a cohort's clients, from sums over all clients.

    `held` are sums over held-out rows with models that have not seen them, `own` those over all of a client's rows with
    the models that it would use. Where no row of a client was held out, the divergences of the latter stand in.
    """
    seen, size = held.rows > 0, own.rows.clamp(min=1)
    count = torch.where(seen, held.rows, size)
    divergence, square, apart = (
        torch.where(seen[:, None] if part.ndim == 2 else seen, part, other)
        for part, other in zip(*((sums.divergence, sums.divergence_square, sums.apart) for sums in (held, own)))
    )
    sides = [_Side(held, own, k, divergence[:, k] / count, count) for k in range(2)]
    shared = torch.cat([torch.ones_like(count)[:, None], seen.double()[:, None], held.rows[:, None], held.deviation], 1)
    first = torch.cat([shared, *(side.first_sums(square[:, k]) for k, side in enumerate(sides))], 1)
    total = yield from add(IMPROVEMENT_MOMENTS, first)
    m, clients, rows, deviation = max(float(total[0]), 1.0), int(total[1]), total[2], total[3:6]
    shares = shares_of_own_rows(divergence, apart, m)
    for k, (side, part) in enumerate(zip(sides, total[6:].chunk(2))):
        side.use_first(part, clients, shares[:, k], size)
    total = yield from add(IMPROVEMENT_EXCESS, torch.cat([side.second_sums() for side in sides], 1))
    for side, part in zip(sides, total.chunk(2)):
        side.use_second(part)
    total = yield from add(IMPROVEMENT_SCALE, torch.stack([side.scaled for side in sides], 1))
    columns = [side.finish(float(part), clients) for side, part in zip(sides, total)]
    mean, variance, freedom, slope, excess = (torch.stack(parts, -1) for parts in zip(*columns))
    shrunk = held.deviation + SHRINKAGE_ROWS * deviation / rows.clamp(min=1)
    correlation = shrunk[:, 2] / (shrunk[:, 0] * shrunk[:, 1]).clamp(min=TINY).sqrt()
    covariance = torch.diag_embed(variance)
    covariance[:, 0, 1] = covariance[:, 1, 0] = correlation.clamp(-1, 1) * variance.prod(1).sqrt()
    return Improvements(mean, covariance, freedom.amin(1), slope, excess)


class UnitVariances(NamedTuple):
    """Variances of rows' deviations per unit of divergence, with their degrees of freedom: [m] each."""

    value: Tensor
    freedom: Tensor


def _own_freedom(rows: Tensor) -> Tensor:
    """[m]: degrees of freedom of a variance of that many rows, which are worth fewer normal ones."""
    return rows * 2 / (DEVIATION_KURTOSIS - 1)


class _Side:
    """How one alternative, k = 0 (local) or 1 (global), differs from the personal model, of a cohort's clients."""

    def __init__(self, held: LossSums, own: LossSums, k: int, divergence: Tensor, count: Tensor):
        self.k, self.rows, self.count = k, held.rows, count
        self.seen, self.n = held.rows > 0, held.rows.clamp(min=1)
        self.difference, self.deviation, self.total = held.difference[:, k], held.deviation[:, k], held.divergence[:, k]
        self.divergence = divergence  # the mean, D
        self.own = own.divergence[:, k] / own.rows.clamp(min=1)
        known = (held.rows > 1) & (self.deviation > 0) & (self.total > 0)
        ratio = torch.where(self.total > 0, self.deviation / self.total.clamp(min=TINY), 0.0)
        freedom = torch.where(self.total > 0, _own_freedom(held.rows), 0.0)
        self.own_unit = UnitVariances(ratio, freedom)
        self.logs = variance_log_sums(ratio, freedom, known)

    def first_sums(self, square: Tensor) -> Tensor:
        moved, d = (
            torch.where(self.seen, self.rows * self.divergence, 0.0),
            torch.where(self.seen, self.difference, 0.0),
        )
        pairs = (moved, d, moved**2, moved * d, d**2)
        spread = (square, self.count * self.divergence**2)
        typical = (self.deviation, self.total, self.divergence * self.count, self.own * self.count)
        return torch.cat([torch.stack([*pairs, *spread, *typical], 1), self.logs], 1)

    def use_first(self, total: Tensor, clients: int, share: Tensor, size: Tensor) -> None:
        self.slope, self.slope_error = _slope(total[:5], clients)
        self.spread = (total[5] / total[6].clamp(min=TINY) - 1).clamp(min=0)  # v
        typical = total[7] / total[8].clamp(min=TINY)
        self.unit, self.size, self.share = self._unit_variances(typical, total[11:]), size, share
        self.posterior = share * self.unit.value * self.divergence / size
        self.base = (self.unit.value * self.divergence / self.n + self.posterior).clamp(min=TINY)
        residual = self.difference / self.n - self.slope * self.divergence
        self.residual = torch.where(self.seen, residual, 0.0)
        held, own = self.divergence, self.own
        self.known = (held > 0) & (own > 0)
        expected = own * total[9] / total[10].clamp(min=TINY)
        self.gap = torch.where(self.known, held, 1.0).log() - torch.where(self.known, expected, 1.0).log()
        self.error = torch.log1p(self.spread / size)
        self.held_total = total[9]

    def _unit_variances(self, typical: Tensor, logs: Tensor) -> UnitVariances:
        """Of deviations from the local model a client's own and SHRINKAGE_ROWS rows of all clients'; from the global
        model, shrunk on the log scale to a prior whose scale is at most all clients' mean."""
        if self.k == 0 or logs[0] < MIN_CLIENTS_FOR_PRIOR:
            prior = SHRINKAGE_ROWS * self.total / self.n
            value = (self.deviation + prior * typical) / (self.total + prior).clamp(min=TINY)
            return UnitVariances(torch.where(self.total > 0, value, typical), SHRINKAGE_ROWS + _own_freedom(self.rows))
        strength, center = variance_prior(logs)
        center, (own, freedom) = torch.minimum(center, typical), self.own_unit
        return UnitVariances((strength * center + freedom * own) / (strength + freedom), strength + freedom)

    def second_sums(self) -> Tensor:
        signal = torch.where(self.seen, self.divergence**2 / self.base, 0.0).clamp(max=MAX_SIGNAL)
        strange = (self.residual**2 / self.base).clamp(max=MAX_SQUARED_RESIDUAL) - 1
        beyond = torch.where(self.seen & (self.divergence > 0), strange, 0.0)
        between = torch.where(self.known, self.gap.square() - self.error, 0.0)
        return torch.stack([signal**2, signal * beyond, self.known.double(), between], 1)

    def use_second(self, total: Tensor) -> None:
        weight = total[0].clamp(min=TINY)
        # One standard error is taken off: an excess that chance explains counts as 0.
        self.excess = ((total[1] - (2 * weight).sqrt()) / weight).clamp(0, MAX_EXCESS)
        if total[2] > 0:
            between = (total[3] / total[2]).clamp(min=0)
            weight = between / (between + self.error).clamp(min=TINY)
            self.ratio = torch.where(self.known, ((weight - 1) * self.gap).exp(), 1.0)
        else:
            self.ratio = torch.ones_like(self.divergence)
        self.scaled = self.ratio * self.divergence * self.count

    def finish(self, scaled: float, clients: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Mean, variance and degrees of freedom [m], the slope and the excess."""
        ratio = self.ratio * (float(self.held_total) / scaled if scaled > 0 else 1.0)
        wrong = self.excess * self.divergence**2
        weight_of_residual = torch.where(self.seen, wrong / (wrong + self.base), 0.0)
        between = (1 - weight_of_residual) * wrong + (self.slope_error * self.divergence) ** 2
        variance, others = self.posterior + between, max(clients - 1, 1)
        freedom = variance**2 / (self.posterior**2 / self.unit.freedom + between**2 / others).clamp(min=TINY)
        freedom = torch.where(variance > 0, freedom, MAX_FREEDOM).clamp(max=MAX_FREEDOM)
        mean = self.slope * self.divergence + weight_of_residual * self.residual
        unknown = self.spread / self.size * (self.slope * ratio * self.divergence) ** 2
        return ratio * mean, ratio * variance + unknown, freedom, self.slope, self.excess


def estimate_unit_variances(held: LossSums, k: int) -> UnitVariances:
    """Of deviations from the local (k = 0) or from the global model (k = 1), where all clients' sums are at hand."""
    side = _Side(held, held, k, held.divergence[:, k] / held.rows.clamp(min=1), held.rows)
    typical = held.deviation[:, k].sum() / held.divergence[:, k].sum().clamp(min=TINY)
    return side._unit_variances(typical, side.logs.sum(0))


def shares_of_own_rows(divergence: Tensor, apart: Tensor, clients: float | None = None) -> Tensor:
    """[m, 2]: s for the differences of the local and of the global model from the personal one.

    `divergence` [m, 2] is D_l and D_g, `apart` [m] the divergence of the global from the local model; `clients` is the
    number of all clients, where these are some of them.
    """
    local, global_ = divergence.unbind(1)
    between = ((apart - local - global_) / 2).clamp(min=0)  # B
    share = torch.stack([_share(between, local), _share(global_, between)], 1)
    return (share.square() + SHARE_FLOOR / (len(share) if clients is None else clients)).clamp(max=1).sqrt()


def _share(part: Tensor, other: Tensor) -> Tensor:
    return part / (part + other).clamp(min=TINY)


def _slope(sums: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """Sum over sum with its error clustered by client, shrunk to 1, from the sums [5] of x, y, x^2, x y and y^2."""
    x, y, xx, xy, yy = sums.tolist()
    if m < 2 or not x**2 > 0:  # no client, or models that are the same, show nothing of it
        return torch.ones((), dtype=torch.float64), torch.tensor(SLOPE_PRIOR_SD, dtype=torch.float64)
    raw = y / x
    square = max(yy - 2 * raw * xy + raw**2 * xx, 0.0) * m / (m - 1) / x**2
    weight = 1 / (1 + square / SLOPE_PRIOR_SD**2)
    return torch.tensor(weight * raw + (1 - weight)).double(), torch.tensor((weight * square) ** 0.5).double()


class Comparison(NamedTuple):
    """One model against another, every client's: [m] each."""

    mean: Tensor  # loss of the other model less that of this one
    sd: Tensor
    freedom: Tensor  # degrees of freedom of Student's distribution, of which `sd` is the scale
    probability: Tensor  # that this model's loss is lower; one half where both are the same model

    def interval(self, level: float) -> tuple[Tensor, Tensor]:
        reach = torch.from_numpy(stdtrit(self.freedom.numpy(), (1 + level) / 2)) * self.sd
        return self.mean - reach, self.mean + reach


def compare_models(improvements: Improvements, model: str, other: str) -> Comparison:
    """Every client's loss with `other` less its loss with `model`."""
    if model == other:
        nothing = torch.zeros(len(improvements.mean), dtype=torch.float64)
        return Comparison(nothing, nothing, improvements.freedom, nothing + 0.5)
    contrast = torch.tensor(_CONTRASTS[model, other], dtype=torch.float64)
    mean = improvements.mean @ contrast
    sd = torch.einsum("i,mij,j->m", contrast, improvements.covariance, contrast).clamp(min=0).sqrt()
    same = (mean == 0) & (sd == 0)
    freedom = improvements.freedom
    probability = torch.from_numpy(stdtr(freedom.numpy(), (mean / sd.clamp(min=TINY)).numpy()))
    return Comparison(mean, sd, freedom, torch.where(same, 0.5, probability))
