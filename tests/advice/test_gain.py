"""Predicted gains: means and variances by Monte Carlo, smoothed means by quadrature, where models will be used."""

import numpy as np
import pytest
import torch

from mooring.advice.gain import at_future, at_rows, gains, points, spread_like, weighted_moments
from mooring.advice.posterior import Likelihood, along, cov_at, mean_at, truths
from mooring.core.cohort import Rows
from mooring.tasks.linear import Linear
from mooring.tasks.logistic import Logistic
from mooring.tasks.poisson import Poisson

DRAWS = 200_000


def problem(task, sizes=(12, 5, 8), seed=0, tight=40.0):
    """Rows, a posterior at one scale that is not degenerate, and two models per client."""
    rng = np.random.default_rng(seed)
    x = [torch.from_numpy(rng.standard_normal((n, 2))) for n in sizes]
    kind = torch.float64 if isinstance(task, Linear | Poisson) else torch.long
    y = [torch.from_numpy(rng.integers(0, 2, n)).to(kind) for n in sizes]
    d, m = task.dim, len(sizes)
    root = torch.from_numpy(rng.standard_normal((m, d, d)))
    k = tight * (root @ root.mT + torch.eye(d))
    b = (k @ torch.from_numpy(0.5 * rng.standard_normal((m, d, 1))))[..., 0]
    data = Likelihood(k, b, torch.zeros(m, dtype=torch.float64), None, torch.full((m,), 0.7, dtype=torch.float64))
    models = [torch.from_numpy(0.5 * rng.standard_normal((m, d))) for _ in range(2)]
    return Rows.stack(x, y), truths(data, torch.full((d,), 0.2, dtype=torch.float64)), models


def true_gain(task, x, w, o, p):
    """[draws]: the gain of p over o on rows x for truths w [draws, d], from the loss's own definition."""
    design = torch.cat([x, torch.ones_like(x[:, :1])], 1).double()

    def scores(v):
        return torch.einsum("bi,sik->sbk", design, v.view(len(v), design.shape[1], -1))

    zw, zo, zp = scores(w), scores(o[None]), scores(p[None])
    if isinstance(task, Linear):  # E (y - z)^2 = noise + (z_w - z)^2
        return ((zw - zo) ** 2 - (zw - zp) ** 2).sum(-1).mean(1)
    if isinstance(task, Poisson):  # E deviance = 2 (e^z - mu z) + ...
        return 2 * ((zo.exp() - zw.exp() * zo) - (zp.exp() - zw.exp() * zp)).sum(-1).mean(1)
    if zw.shape[-1] == 1:
        zw, zo, zp = (torch.cat([torch.zeros_like(z), z], -1) for z in (zw, zo, zp))
    truth = torch.softmax(zw, -1)
    return (truth * (torch.log_softmax(zp, -1) - torch.log_softmax(zo, -1))).sum(-1).mean(1)


@pytest.mark.parametrize("task", [Linear(2), Logistic(2), Logistic(2, classes=3), Poisson(2)])
def test_mean_and_variance_of_the_gain_are_those_of_draws_from_the_posterior(task):
    rows, found, (o, p) = problem(task)
    gain = gains(task, found, at_rows(task, rows), [(o, p)], torch.full((3,), 1 / 3, dtype=torch.float64))[0]
    rng = np.random.default_rng(5)
    j = 5  # c = 1
    for i in range(3):
        one = torch.tensor([i])
        factor = torch.linalg.cholesky(cov_at(found, j, one)[0])
        w = mean_at(found, j, one)[0] + torch.from_numpy(rng.standard_normal((DRAWS, task.dim))) @ factor.T
        drawn = true_gain(task, rows.of(i)[0], w, o[i], p[i])
        error = float(drawn.std()) / DRAWS**0.5
        exact = isinstance(task, Linear)
        # Beyond linear tasks the mean is smoothed by an approximation good to some percent of the gain's own spread,
        # and the variance is that of a linear form.
        slack = 4 * error + (0 if exact else 0.03 * float(drawn.std()))
        assert float(gain.mean[j, i]) == pytest.approx(float(drawn.mean()), abs=slack)
        assert float(gain.variance[j, i]) == pytest.approx(float(drawn.var()), rel=0.02 if exact else 0.12)


@pytest.mark.parametrize("blur", [0.05, 0.5, 3.0])
@pytest.mark.parametrize("z", [-3.0, -0.4, 1.5])
def test_smoothed_probabilities_are_the_integral_to_two_digits(z, blur):
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    exact = (weights / weights.sum()) @ (1 / (1 + np.exp(-(z + blur**0.5 * nodes))))
    task = Logistic(1, intercept=False)
    rows = Rows.stack([torch.ones(1, 1, dtype=torch.float64)], [torch.tensor([1])])
    # No prior pull: the posterior is N(z, blur) through a likelihood of that precision and an endless spread.
    k = torch.tensor([[[1 / blur]]], dtype=torch.float64)
    zero = torch.zeros(1, dtype=torch.float64)
    data = Likelihood(k, z * k[:, 0], zero, None, torch.ones(1, dtype=torch.float64))
    found = truths(data, zero)  # one client, no spread: its truth is the centre
    o, p = torch.tensor([[1.0]]), torch.tensor([[0.0]])
    gain = gains(task, found, at_rows(task, rows), [(o, p)], torch.ones(1, dtype=torch.float64))[0]
    # The gain is A(1) - A(0) - E sigma(z_w).
    mean = float(np.log1p(np.e) - np.log(2) - gain.mean[0, 0])
    assert mean == pytest.approx(exact, abs=0.015)


def test_the_noise_of_an_observed_difference_is_that_of_its_rows():
    task = Linear(2)
    rows, found, (o, p) = problem(task)
    gain = gains(task, found, at_rows(task, rows), [(o, p)], torch.full((3,), 1 / 3, dtype=torch.float64))[0]
    for i in range(3):
        x = torch.cat([rows.of(i)[0], torch.ones(len(rows.of(i)[0]), 1)], 1)
        gap = x @ (o[i] - p[i])
        assert float(gain.noise[i]) == pytest.approx(float(4 * 0.7 * (gap**2).sum() / len(x) ** 2))


def test_the_federations_variance_counts_the_common_centre_once():
    task, m = Linear(2), 3
    rows, found, (o, p) = problem(task, tight=0.5)
    share = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    gain = gains(task, found, at_rows(task, rows), [(o, p)], share)[0]
    for j in (0, 5):
        x = [torch.cat([rows.of(i)[0], torch.ones(len(rows.of(i)[0]), 1)], 1) for i in range(m)]
        q = torch.stack([2 * x[i].T @ (x[i] @ (o[i] - p[i])) / len(x[i]) for i in range(m)])
        pull = share @ along(found, j, q[:, None])[1][:, 0]
        assert float(gain.shared[j]) == pytest.approx(float(pull @ found.centre_cov[j] @ pull))
    mean, variance = gain.total(share)
    assert mean == pytest.approx(float(share @ gain.expected)) and variance > 0


def test_rows_to_come_have_the_covariance_of_all_clients_around_each_ones_mean():
    rng = np.random.default_rng(2)
    cov = np.array([[1.0, 0.6], [0.6, 2.0]])
    mean = np.array([[0.0, 3.0], [5.0, -2.0], [1.0, 1.0]])
    x = [m + rng.standard_normal((40, 2)) @ np.linalg.cholesky(cov).T for m in mean]
    rows = Rows.stack([torch.from_numpy(a) for a in x], [torch.zeros(40, dtype=torch.float64)] * 3)
    places = at_future(Linear(2), rows)
    found, weight = points(Linear(2), rows.padded(), places.mixed, places.reference)
    torch.testing.assert_close(weight.sum(1), torch.ones(3, dtype=torch.float64))
    pooled = np.mean([np.cov(a.T) for a in x], 0)
    for c in range(3):
        average = weight[c] @ found[c]
        away = found[c] - average
        spread = (weight[c][:, None] * away).T @ away
        np.testing.assert_allclose(average[:2], x[c].mean(0), atol=0.1)
        # All clients have one covariance, so most of what stands for a client's is everybody's.
        np.testing.assert_allclose(spread[:2, :2], pooled, atol=0.25)
    second = weighted_moments(Linear(2), rows, *places.mixed, reference=places.reference)
    torch.testing.assert_close(second, found.mT @ (weight[..., None] * found))


def test_own_rows_count_where_clients_inputs_differ_in_scale():
    rng = np.random.default_rng(4)
    owner = torch.arange(30).repeat_interleave(100)
    n = torch.full((30,), 100.0, dtype=torch.float64)
    same = torch.from_numpy(rng.standard_normal((3000, 3)))
    scaled = same * torch.exp(torch.from_numpy(rng.standard_normal(30)))[owner][:, None]
    share = {}
    for name, z in (("same", same), ("not", scaled)):
        rows = Rows(z, torch.zeros(3000, dtype=torch.float64), 100 * torch.arange(30), n.long())
        share[name] = float(at_future(Linear(3), rows).mixed[0].mean())
    assert share["same"] > 0.6 and share["not"] < 0.2
    within = same.T @ same / 2970
    some = spread_like(within)
    torch.testing.assert_close(some.mean(0), torch.zeros(3, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(some.T @ some / len(some), within)


def test_a_shift_of_all_classes_scores_changes_nothing():
    """However uncertain it is: three classes whose covariance has a huge common shift."""
    from mooring.advice import glm
    from mooring.tasks.logistic import Logistic

    task, rng = Logistic(2, classes=3), torch.Generator().manual_seed(0)
    x = glm.design(task, torch.randn(1, 5, 2, dtype=torch.float64, generator=rng))
    root = torch.randn(9, 9, dtype=torch.float64, generator=rng) / 3
    cov = (root @ root.T)[None]
    shift = torch.kron(torch.eye(3, dtype=torch.float64), torch.ones(3, 3, dtype=torch.float64))[None]
    z = torch.randn(1, 5, 3, dtype=torch.float64, generator=rng)
    blur = glm.blurs(x, cov)
    torch.testing.assert_close(glm.blurs(x, cov + 1e4 * shift), blur, rtol=1e-6, atol=1e-6)
    found, flat = glm.response(task, z, blur)
    torch.testing.assert_close(glm.response(task, z + 7.0, blur)[0], found)
    torch.testing.assert_close(glm.bent(task, found, flat, torch.ones_like(z)), torch.zeros_like(z))
