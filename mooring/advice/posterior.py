"""What is known of a client's true coefficients: their posterior, the spread's own uncertainty included.

    w_i ~ N(w, c T),  T = diag(tau^2)        n_i L_i ~ 1/2 v'K_i v - b_i'v  (linear: exact; others: fitted)

    V_i = c T^1/2 (1 + c T^1/2 K_i T^1/2)^-1 T^1/2      P_i = K_i - K_i V_i K_i      A = sum_i P_i
    w   = A^-1 sum_i (1 - K_i V_i) b_i
    w_i given all rows:  mean        w + V_i (b_i - K_i w)
                         covariance  V_i + V_i (M_i - K_i) V_i + (1 - V_i K_i) A^-1 (1 - V_i K_i)'

M_i is the covariance of b_i where noise is not what K_i says (noise that depends on x): residuals
against leverages over all clients (HC2) turn K_i into it. The scale c of the spread has a prior, one half at 0 (all
alike) and flat in tau elsewhere, and weights by restricted likelihood: nothing here rests on one estimated spread.

Each client's noise is steadied by all (`own_noise`): s_i^2 = (nu s^2 + rss_i) / (nu + f_i), f_i = n_i - tr V_i K_i, nu
by moments; with heavy tails f_i rows tell as much as fewer normal ones. A client without rows has K_i = 0, and its
posterior is the prior.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mooring.advice import glm
from mooring.advice.asking import at_hand, question
from mooring.advice.path import BLOCK
from mooring.advice.weighted import weighted_squares
from mooring.core.cohort import Batch, Rows
from mooring.estimates.client_spread import MOST_SPREADS
from mooring.tasks.linear import Linear
from mooring.tasks.logistic import Logistic
from mooring.tasks.poisson import Poisson
from mooring.tasks.proximal import is_dense

SCALES = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0)
ALIKE = 0.5  # prior chance of no spread at all
NULL = 1e-12  # share of the largest eigenvalue below which a direction counts as seen by no row
OUTLIERS = (0.02, 0.05, 0.1, 0.2, 0.4)  # shares of clients with a scale of their own that are tried
ROUNDS = 8  # of the posterior's approximation, at most
SETTLED = 1e-3  # relative change of its means at which it stays put
SLACK = SCALES[-1]  # of the spread under which noise is estimated
LEAST_NOISE = 1e-12  # share of the targets' mean square: rows without noise are told apart by rounding alone
LEAST_LEFT = 1e-3  # 1 - leverage, at least


Basis = tuple[Tensor, Tensor]


class Likelihood(NamedTuple):
    """Every client's log-likelihood as a quadratic."""

    k: Tensor  # [m, d, d]
    b: Tensor  # [m, d]
    square: Tensor  # [m], y'y / s_i^2; 0 where the noise is known
    rows: float | None  # all rows, where the noise's scale is profiled; None where it is known
    noise: Tensor  # [m], s_i^2; 1 where the loss is a whole likelihood
    excess: Tensor | None = None  # [d, d], E: M = K + (K E + E'K) / 2


class Truths(NamedTuple):
    """The clients' truths at every scale of the spread; see `mean_at`, `along` and `cov_at`."""

    overall: Tensor  # [c], the weights of the scales
    weight: Tensor  # [c, m], the same for each client, which may be an outlier
    scales: Tensor  # [c]
    root: Tensor  # [d], T^1/2
    values: Tensor  # [m, d], eigenvalues of T^1/2 K T^1/2
    turned: Tensor  # [m, d, d], T^1/2 times its eigenvectors U
    seen: Tensor  # [m, d, d], U'T^1/2 K
    told: Tensor  # [m, d], U'T^1/2 b
    data: Likelihood
    centre: Tensor  # [c, d], w
    centre_cov: Tensor  # [c, d, d], A^-1


def has_posterior(task: Any) -> bool:
    """Whether the losses are likelihoods with few enough coefficients for all this."""
    return is_dense(task) and isinstance(task, Linear | Logistic | Poisson) and task.dim <= MOST_SPREADS


def eigen(k: Tensor, root: Tensor) -> Basis:
    """Eigenvalues of T^1/2 K T^1/2, and T^1/2 times its eigenvectors."""
    values, vectors = torch.linalg.eigh(root[:, None] * k * root)
    return values.clamp(min=0), root[:, None] * vectors


def halves(k: Tensor, root: Tensor) -> Basis:
    """A basis that serves scale 1 only, several times as fast: V = B B', which is `turned` with eigenvalues of 0."""
    eye = torch.eye(k.shape[-1], dtype=k.dtype)
    factor = torch.linalg.cholesky(eye + root[:, None] * k * root)
    return torch.zeros_like(k[:, 0]), root[:, None] * torch.linalg.solve_triangular(factor, eye, upper=False).mT


def truths(data: Likelihood, variance: Tensor, basis: Basis | None = None) -> Truths:
    """The posterior under spreads c `variance` [d]; `basis` where it is known already."""
    root = variance.double().clamp(min=0).sqrt()
    values, turned = basis or eigen(data.k, root)
    seen, told = turned.mT @ data.k, along_basis(turned, data.b)
    whole, moment = data.k.sum(0), data.b.sum(0)
    scales = torch.tensor(SCALES if bool((root > 0).any()) else SCALES[:1], dtype=torch.float64)
    gain, logs_of = gains_at(values, scales), (1 + scales * values[..., None]).log().sum((0, 1))
    shares, sums, squares = without_own(seen, told, gain)
    centres, covs, deviances = [], [], []
    for share, total, square, log in zip(shares, sums, squares, logs_of):
        a, r = whole - share, moment - total
        e, q = torch.linalg.eigh((a + a.T) / 2)
        known = e > NULL * torch.linalg.matrix_norm(whole, 2).clamp(min=torch.finfo(e.dtype).tiny)
        cov = (q[:, known] / e[known]) @ q[:, known].T
        left = float(data.square.sum() - square - r @ cov @ r)
        logs = float(log + e[known].log().sum())
        if data.rows is None:
            deviances.append(left + logs)
        else:
            freedom = max(data.rows - int(known.sum()), 1.0)
            deviances.append(freedom * torch.tensor(max(left, 1e-300)).log().item() + logs)
        centres.append(cov @ r)
        covs.append(cov)
    deviance = torch.tensor(deviances, dtype=torch.float64)
    overall = torch.softmax(scale_prior(scales).log() - (deviance - deviance.min()) / 2, 0)
    centre = torch.stack(centres)
    # Each client's log-likelihood at every scale around its centre, up to what no scale changes.
    own = 0.5 * (gain * (told[..., None] - seen @ centre.T) ** 2 - (1 + scales * values[..., None]).log()).sum(1).T
    weight = with_outliers(overall, own, scales)
    return Truths(overall, weight, scales, root, values, turned, seen, told, data, centre, torch.stack(covs))


def along_basis(turned: Tensor, b: Tensor) -> Tensor:
    """[m, d]: turned'b."""
    return (turned.mT @ b[..., None])[..., 0]


def gains_at(values: Tensor, scales: Tensor) -> Tensor:
    """[m, d, c]: V at the scales, in the basis of its eigenvectors: V = turned diag(c / (1 + c values)) turned'."""
    return scales / (1 + scales * values[..., None])


def without_own(seen: Tensor, told: Tensor, gain: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over the clients, at every scale, of K V K [c, d, d], K V b [c, d] and b'V b [c]."""
    flat, weight, b = seen.flatten(0, 1), gain.flatten(0, 1), told.reshape(-1, 1)
    return weighted_squares(flat, weight), (b * weight).T @ flat, (b**2 * weight).sum(0)


def with_outliers(overall: Tensor, own: Tensor, scales: Tensor) -> Tensor:
    """[c, m]: the scales' weights for each client, a share of the clients having a scale of their own.

    own [c, m] are log-likelihoods. Given the common scale a client keeps it with chance 1 - a, or draws another one; a
    is averaged over OUTLIERS by likelihood. Heavy tails, groups and skewed spreads are mixtures of this kind.
    """
    prior = torch.cat([torch.zeros(1, dtype=own.dtype), scale_prior(scales)[1:]]) if len(scales) > 1 else overall
    prior = prior / prior.sum()
    fit = (own - own.max(0).values).exp()  # [c, m]
    drawn = prior[:, None] * fit
    level, total = [], torch.zeros_like(own)
    found = []
    for a in OUTLIERS:
        chance = (1 - a) * fit + a * drawn.sum(0)  # [c, m], of a client's rows given the common scale
        level.append((overall.clamp(min=1e-300).log() + chance.clamp(min=1e-300).log().sum(1)).logsumexp(0))
        kept = overall[:, None] * (1 - a) * fit / chance
        found.append(kept + (overall[:, None] / chance).sum(0) * a * drawn)
    trust = torch.softmax(torch.stack(level), 0)
    for share, weights in zip(trust, found):
        total = total + share * weights
    return total / total.sum(0)


def scale_prior(scales: Tensor) -> Tensor:
    """One half at 0, the rest flat in the root of the scale."""
    if len(scales) == 1:
        return torch.ones_like(scales)
    tau = scales.sqrt()
    edges = torch.cat([tau[:1], (tau[1:-1] + tau[2:]) / 2, tau[-1:]])
    width = edges[1:] - edges[:-1]
    return torch.cat([torch.full_like(tau[:1], ALIKE), (1 - ALIKE) * width / width.sum()])


def mean_at(found: Truths, j: int, block: Tensor | slice = slice(None)) -> Tensor:
    """[m, d]: the means of a block's clients at the j-th scale."""
    c, w = found.scales[j], found.centre[j]
    left = found.told[block] - found.seen[block] @ w
    return w + (found.turned[block] @ (c / (1 + c * found.values[block]) * left)[..., None])[..., 0]


def means_along(found: Truths, q: Tensor) -> Tensor:
    """[m, k, c]: the means of q'w_i at every scale, for directions q [m, k, d]."""
    left = gains_at(found.values, found.scales) * (found.told[..., None] - found.seen @ found.centre.T)
    return q @ found.centre.T + (q @ found.turned) @ left


def along(found: Truths, j: int, q: Tensor, block: Tensor | slice = slice(None)) -> tuple[Tensor, Tensor]:
    """For directions q [m, k, d]: the variances of q'w_i [m, k], and how q'w_i follows the centre, (1 - V K)'q."""
    c, turned = found.scales[j], found.turned[block]
    inside = (q @ turned) * (c / (1 + c * found.values[block]))[:, None]  # [m, k, d]
    vq = inside @ turned.mT
    kvq = inside @ found.seen[block]
    leant = q - kvq
    variance = (q * vq).sum(-1) + ((leant @ found.centre_cov[j]) * leant).sum(-1)
    if found.data.excess is not None:
        variance = variance + ((kvq @ found.data.excess) * vq).sum(-1)
    return variance.clamp(min=0), leant


def cov_at(found: Truths, j: int, block: Tensor | slice = slice(None)) -> Tensor:
    """[m, d, d]: the covariances of a block's clients at the j-th scale."""
    turned, c = found.turned[block], found.scales[j]
    half = turned * (c / (1 + c * found.values[block]))[:, None]
    v, vk = half @ turned.mT, half @ found.seen[block]
    left = torch.eye(v.shape[-1], dtype=v.dtype) - vk
    cov = v + left @ found.centre_cov[j] @ left.mT
    if found.data.excess is not None:
        cov = cov + vk @ found.data.excess @ v
    return (cov + cov.mT) / 2


def linear_truths(task: Linear, rows: Rows, variance: Tensor, noise: Tensor) -> Truths:
    """The posterior of a linear task: exact, with each client's noise [m]."""
    found, variance = sums(task, rows), variance.double()
    noise = noise.double().clamp(min=least_noise(found, rows.size))
    data = scaled(found, rows.size, noise)
    values, turned = eigen(found.gram, variance.clamp(min=0).sqrt())
    basis = values / noise[:, None], turned
    total = meat(task, rows, mean_at(_at_scale(data, basis), 0), *basis, noise).sum(0)
    return truths(data._replace(excess=excess_of(data.k, total)), variance, basis)


def own_noise(task: Linear, rows: Rows, variance: Tensor, noise: Tensor) -> tuple[Tensor, Noises]:
    """[m]: each client's noise, steadied by all, and by what law; `noise` [m] is a start.

    Residuals are those of posterior means under spreads SLACK times `variance` [d]: a client that is unlike the others
    would leave more of them under the spread itself, take that for noise, and be pulled to the others all the more.
    Of very many clients each BLOCK has its own centre.
    """
    root, parts, least = (SLACK * variance.double().clamp(min=0)).sqrt(), [], 0.0
    for block in torch.arange(len(rows)).split(BLOCK):
        some = rows if len(block) == len(rows) else rows.select(block)
        with at_hand(some):
            found = sums(task, some)
            least = max(least, least_noise(found, some.size))
            data = scaled(found, some.size, noise[block].double().clamp(min=least))
            known = _at_scale(data, halves(data.k, root))
            rss, fourth = powers(task, some, mean_at(known, 0))
        used = (known.seen * known.turned.mT).sum((1, 2))  # tr V K
        parts.append((rss, fourth, (some.size - used).clamp(min=0)))
    rss, fourth, freedom = (torch.cat(column) for column in zip(*parts))
    law = law_of_noises(rss, freedom, tails_of(fourth, rss, rows.size.double()))
    return steadied(rss, freedom, law).clamp(min=least), law


def scaled(found: Sums, n: Tensor, noise: Tensor) -> Likelihood:
    parts = found.gram / noise[:, None, None], found.moment / noise[:, None], found.square / noise
    return Likelihood(*parts, float(n.sum()), noise)


def least_noise(found: Sums, n: Tensor) -> float:
    return LEAST_NOISE * float((found.square.sum() / n.sum()).clamp(min=1e-100))


def _at_scale(data: Likelihood, basis: Basis) -> Truths:
    """The posterior at scale 1 only."""
    values, turned = basis
    seen, told = turned.mT @ data.k, along_basis(turned, data.b)
    one = torch.ones(1, dtype=torch.float64)
    (share,), (total,), _ = without_own(seen, told, gains_at(values, one))
    a = data.k.sum(0) - share
    cov = torch.linalg.pinv((a + a.T) / 2, rtol=NULL, hermitian=True)
    w = cov @ (data.b.sum(0) - total)
    weight = one[:, None].expand(1, len(data.b))
    return Truths(one, weight, one, one, values, turned, seen, told, data, w[None], cov[None])


class Sums(NamedTuple):
    gram: Tensor  # [C, d, d], X'X
    moment: Tensor  # [C, d], X'y
    square: Tensor  # [C], y'y


@question
def sums(task: Linear, batch: Batch) -> Sums:
    """All that squared losses see of the rows."""
    x, y = designed(task, batch)
    return Sums(x.mT @ x, (x.mT @ y[..., None])[..., 0], y.square().sum(1))


class Powers(NamedTuple):
    """[C] each: sums of squares and of fourth powers of residuals."""

    square: Tensor
    fourth: Tensor


@question
def powers(task: Linear, batch: Batch, models: Tensor) -> Powers:
    x, y = designed(task, batch)
    square = (y - (x @ models[..., None])[..., 0]).square()
    return Powers(square.sum(1), square.square().sum(1))


@question
def meat(task: Linear, batch: Batch, models: Tensor, values: Tensor, turned: Tensor, noise: Tensor) -> Tensor:
    """[C, d, d]: sum x x' e^2 / (1 - h) / s^4 over the rows (HC2), h under the posterior: E e^2 = s^2 (1 - h)."""
    x, y = designed(task, batch)
    inside = x @ turned
    leverage = (inside.square() / (1 + values)[:, None]).sum(-1) / noise[:, None]
    residual = y - (x @ models[..., None])[..., 0]
    weight = residual.square() / (1 - leverage).clamp(min=LEAST_LEFT) / noise[:, None] ** 2
    return x.mT @ (weight[..., None] * x)


def designed(task: Linear, batch: Batch) -> tuple[Tensor, Tensor]:
    """Design rows [C, B, d] and targets in float64, zero on padding."""
    real = (batch.weight > 0).double()
    return task.design(batch.x).double() * real[..., None], batch.y.double() * real


def excess_of(k: Tensor, total: Tensor) -> Tensor:
    """[d, d]: E = (sum K)^-1 M - 1: the pooled surplus of M over K, shared out by K_i."""
    ratio = torch.linalg.pinv(k.sum(0), rtol=NULL, hermitian=True) @ total
    return ratio - torch.eye(len(ratio), dtype=ratio.dtype)


def tails_of(fourth: Tensor, rss: Tensor, n: Tensor) -> float:
    """The kurtosis of residuals within clients, from sums of fourth powers and of squares; 3 for normal ones."""
    total = (rss**2 / (n + 2)).sum()
    return max(float(fourth.sum() / total), 1.5) if float(total) > 0 else 3.0


class Noises(NamedTuple):
    """How clients' noises vary."""

    typical: float
    strength: float  # rows' worth that each client's own noise is steadied by; infinite if all have the same
    tails: float = 3.0  # kurtosis of residuals


def law_of_noises(rss: Tensor, freedom: Tensor, tails: float = 3.0) -> Noises:
    """From sums of squared residuals and their degrees of freedom, [m] each."""
    typical = (rss.sum() / freedom.sum().clamp(min=1e-12)).clamp(min=torch.finfo(rss.dtype).tiny)
    known = freedom > 1
    f, u = freedom[known] * 2 / (tails - 1), rss[known] / freedom[known] / typical
    # Var u = cv^2 + 2 (1 + cv^2) / f: cv^2 by weighted moments, weights that of the case cv = 0.
    excess = float((f * ((u - 1) ** 2 - 2 / f)).sum() / (f + 2).sum()) if len(f) > 2 else 0.0
    return Noises(float(typical), 2 / excess + 2 if excess > 1e-6 else torch.inf, tails)


def steadied(rss: Tensor, freedom: Tensor, law: Noises) -> Tensor:
    """[m]: noise variances; a client of few rows, or of rows with heavy tails, has nearly everyone's."""
    if law.strength == torch.inf:
        return torch.full_like(rss, law.typical)
    worth = freedom * 2 / (law.tails - 1)  # normal rows that would tell the variance as well
    ratio = torch.where(freedom > 1, rss / freedom.clamp(min=1e-12) / law.typical, 1.0)
    return law.typical * (law.strength + worth * ratio) / (law.strength + worth)


def generalised_truths(task: Any, rows: Rows, models: Tensor, variance: Tensor) -> Truths:
    """The posterior of a logistic or Poisson task, from models [m, d] near it.

    The best Gaussian in the sense of Kullback and Leibler, at scale 1: responses and curvatures are means over the
    posterior itself, in a few rounds. At the mode alone, curvatures of nearly separable rows vanish, and the posterior
    would be far too wide.
    """
    variance = variance.double()
    root = variance.clamp(min=0).sqrt()
    cov = torch.zeros(len(rows), task.dim, task.dim, dtype=torch.float64)
    mean = models.double()
    with at_hand(rows):
        for _ in range(ROUNDS):
            data = quadratic_at(task, rows, mean, cov)
            now = _at_scale(data, halves(data.k, root))
            new = mean_at(now, 0)
            cov, moved = cov_at(now, 0), float((new - mean).abs().max())
            mean = new
            if moved < SETTLED * float(mean.abs().max() + 1e-12):
                break
        return truths(quadratic_at(task, rows, mean, cov), variance)


def quadratic_at(task: Any, rows: Rows, mean: Tensor, cov: Tensor) -> Likelihood:
    """-log-likelihoods to second order around N(mean, cov): slope and bend are averages over it."""
    k, b = blurred(task, rows, mean, cov)
    one = torch.ones(len(mean), dtype=torch.float64)
    return Likelihood(k, b, torch.zeros_like(one), None, one)


class Blurred(NamedTuple):
    k: Tensor  # [C, d, d]
    b: Tensor  # [C, d]


@question
def blurred(task: Any, batch: Batch, mean: Tensor, cov: Tensor) -> Blurred:
    """K and b of `Likelihood`, from the rows."""
    m, d = mean.shape
    x, real = glm.design(task, batch.x), (batch.weight > 0).double()[..., None]
    z = glm.scores(x, mean)
    width, outputs = x.shape[-1], z.shape[-1]
    found, flat = glm.response(task, z, glm.blurs(x, cov))
    left = real * (glm.targets(task, batch.y, outputs) - found)
    columns = []
    for one in torch.eye(outputs, dtype=z.dtype):
        bent = real * glm.bent(task, found, flat, one.expand_as(z))
        columns.append(((x[..., None] * bent[..., None, :]).flatten(2).mT @ x).view(m, width, outputs, width))
    # [C, width, i, width, j]: coefficients run over inputs first and scores second.
    k = torch.stack(columns, -1).reshape(m, d, d)
    return Blurred(k, (k @ mean[..., None])[..., 0] + (x.mT @ left).flatten(1))
