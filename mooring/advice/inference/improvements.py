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
from mooring.estimates.random_effects import fit_variance_prior

SLOPE_PRIOR_SD = 0.5  # prior standard deviation of b around 1
SHRINKAGE_ROWS = 10.0  # rows' worth of all clients' variance that a client's own is shrunk by
DEVIATION_KURTOSIS = 9.0  # of rows' deviations: the median over tables with withheld rows; 3 for normal ones
MIN_CLIENTS_FOR_PRIOR = 3  # whose variances show how much these differ
SHARE_FLOOR = 4.0  # the square of s is at least this over the number of clients: how well s itself is known
MAX_SQUARED_RESIDUAL = 9.0  # in units of its variance, that counts towards c^2
MAX_FREEDOM = 1e6  # degrees of freedom from which on Student's distribution is the normal one
MAX_EXCESS = 1.0  # c^2 at most
TINY = torch.finfo(torch.float64).tiny

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
    """The joint distribution of every client's differences.

    `held` are sums over held-out rows with models that have not seen them, `own` those over all of a client's rows with
    the models that it would use. Where no row of a client was held out, the divergences of the latter stand in.
    """
    seen, size = held.rows > 0, own.rows.clamp(min=1)
    count = torch.where(seen, held.rows, size)
    divergence, square, apart = (
        torch.where(seen[:, None] if part.ndim == 2 else seen, part, other)
        for part, other in zip(*((sums.divergence, sums.divergence_square, sums.apart) for sums in (held, own)))
    )
    shares = shares_of_own_rows(divergence, apart)
    columns = []
    for k in range(2):
        mean_divergence = divergence[:, k] / count
        spread = (square[:, k].sum() / (count * mean_divergence**2).sum().clamp(min=TINY) - 1).clamp(min=0)  # v
        unit = estimate_unit_variances(held, k)
        mean, variance, freedom, slope, excess = _one_side(
            held.rows, held.difference[:, k], mean_divergence, unit, shares[:, k], size
        )
        ratio = _shrink_divergence(mean_divergence, own.divergence[:, k] / size, count, spread / size)
        unknown = spread / size * (slope * ratio * mean_divergence) ** 2
        columns.append((ratio * mean, ratio * variance + unknown, freedom, slope, excess))
    mean, variance, freedom, slope, excess = (torch.stack(parts, -1) for parts in zip(*columns))
    shrunk = held.deviation + SHRINKAGE_ROWS * held.deviation.sum(0) / held.rows.sum().clamp(min=1)
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


def _shrink_to_mean(rows: Tensor, deviation: Tensor, divergence: Tensor) -> UnitVariances:
    """A client's variance of SHRINKAGE_ROWS rows of all clients' and its own; arguments are sums over `rows` rows."""
    typical = deviation.sum() / divergence.sum().clamp(min=TINY)
    prior = SHRINKAGE_ROWS * divergence / rows.clamp(min=1)
    value = torch.where(divergence > 0, (deviation + prior * typical) / (divergence + prior).clamp(min=TINY), typical)
    return UnitVariances(value, SHRINKAGE_ROWS + _own_freedom(rows))


def _shrink_on_log_scale(rows: Tensor, deviation: Tensor, divergence: Tensor) -> UnitVariances:
    """A client's variance shrunk to a scaled inverse chi-square prior, whose scale is at most all clients' mean."""
    known = (rows > 1) & (deviation > 0) & (divergence > 0)
    if int(known.sum()) < MIN_CLIENTS_FOR_PRIOR:
        return _shrink_to_mean(rows, deviation, divergence)
    own = torch.where(divergence > 0, deviation / divergence.clamp(min=TINY), 0.0)
    freedom = torch.where(divergence > 0, _own_freedom(rows), 0.0)
    strength, typical = fit_variance_prior(own[known], freedom[known])
    typical = torch.minimum(typical, deviation.sum() / divergence.sum())
    return UnitVariances((strength * typical + freedom * own) / (strength + freedom), strength + freedom)


def estimate_unit_variances(held: LossSums, k: int) -> UnitVariances:
    """Of deviations from the local (k = 0) or from the global model (k = 1)."""
    shrink = (_shrink_to_mean, _shrink_on_log_scale)[k]
    return shrink(held.rows, held.deviation[:, k], held.divergence[:, k])


def shares_of_own_rows(divergence: Tensor, apart: Tensor) -> Tensor:
    """[m, 2]: s for the differences of the local and of the global model from the personal one.

    `divergence` [m, 2] is D_l and D_g, `apart` [m] the divergence of the global from the local model.
    """
    local, global_ = divergence.unbind(1)
    between = ((apart - local - global_) / 2).clamp(min=0)  # B
    share = torch.stack([_share(between, local), _share(global_, between)], 1)
    return (share.square() + SHARE_FLOOR / len(share)).clamp(max=1).sqrt()


def _share(part: Tensor, other: Tensor) -> Tensor:
    return part / (part + other).clamp(min=TINY)


def _shrink_divergence(held: Tensor, own: Tensor, rows: Tensor, variance: Tensor) -> Tensor:
    """[m]: the shrunk mean divergence over that of held-out rows; `variance` is the latter's, in units of its square.

    What all clients' sum to, with `rows` rows each, stays.
    """
    known = (held > 0) & (own > 0)
    if not bool(known.any()):
        return torch.ones_like(held)
    typical = own * (held * rows).sum() / (own * rows).sum()
    logs = torch.where(known, held, 1.0).log() - torch.where(known, typical, 1.0).log()
    error = torch.log1p(variance)
    between = (logs.square() - error)[known].mean().clamp(min=0)
    weight = between / (between + error).clamp(min=TINY)
    ratio = torch.where(known, ((weight - 1) * logs).exp(), 1.0)
    return ratio * (held * rows).sum() / (ratio * held * rows).sum()


def _one_side(
    rows: Tensor, difference: Tensor, divergence: Tensor, unit: UnitVariances, share: Tensor, size: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Mean, variance and degrees of freedom [m] of one difference, the slope and the excess.

    `difference` is a sum over `rows` held-out rows, `divergence` is D, `size` are all of a client's rows.
    """
    seen, n = rows > 0, rows.clamp(min=1)
    slope, slope_error = _slope(difference[seen], (rows * divergence)[seen])
    posterior = share * unit.value * divergence / size
    base = (unit.value * divergence / n + posterior).clamp(min=TINY)  # variance of the mean over held-out rows
    residual = torch.where(seen, difference / n - slope * divergence, 0.0)
    signal = torch.where(seen, divergence**2 / base, 0.0)
    beyond = torch.where(seen & (divergence > 0), (residual**2 / base).clamp(max=MAX_SQUARED_RESIDUAL) - 1, 0.0)
    weight = signal.square().sum().clamp(min=TINY)
    # One standard error is taken off: an excess that chance explains counts as 0.
    excess = (((signal * beyond).sum() - (2 * weight).sqrt()) / weight).clamp(0, MAX_EXCESS)
    wrong = excess * divergence**2
    weight_of_residual = torch.where(seen, wrong / (wrong + base), 0.0)
    between = (1 - weight_of_residual) * wrong + (slope_error * divergence) ** 2
    variance, clients = posterior + between, max(int(seen.sum()) - 1, 1)
    freedom = variance**2 / (posterior**2 / unit.freedom + between**2 / clients).clamp(min=TINY)
    freedom = torch.where(variance > 0, freedom, MAX_FREEDOM).clamp(max=MAX_FREEDOM)
    return slope * divergence + weight_of_residual * residual, variance, freedom, slope, excess


def _slope(difference: Tensor, divergence: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over sum with its error clustered by client, shrunk to 1."""
    m, total = len(difference), divergence.sum()
    if m < 2 or not float(total) ** 2 > 0:  # no client, or models that are the same, show nothing of it
        return torch.ones((), dtype=torch.float64), torch.tensor(SLOPE_PRIOR_SD, dtype=torch.float64)
    raw = difference.sum() / total
    residual = difference - raw * divergence
    square = residual.square().sum() * m / (m - 1) / total**2
    weight = 1 / (1 + square / SLOPE_PRIOR_SD**2)
    return weight * raw + (1 - weight), (weight * square).sqrt()


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
