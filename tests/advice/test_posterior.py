"""The posterior of the clients' truths, against conditioning one joint Gaussian by brute force."""

import numpy as np
import pytest
import torch

from mooring.advice.posterior import (
    SCALES,
    SLACK,
    Likelihood,
    along,
    cov_at,
    generalised_truths,
    law_of_noises,
    linear_truths,
    mean_at,
    means_along,
    own_noise,
    quadratic_at,
    scale_prior,
    steadied,
    truths,
    with_outliers,
)
from mooring.core.cohort import Rows
from mooring.tasks.linear import Linear
from mooring.tasks.logistic import Logistic
from mooring.tasks.poisson import Poisson
from tests.problems import linear_clients

FLAT = 1e7  # prior variance of the centre, next to which everything else is small


def clients(m=5, d=3, sizes=(6, 2, 9, 0, 4), seed=0):
    rng = np.random.default_rng(seed)
    x = [torch.from_numpy(rng.standard_normal((n, d))) for n in sizes[:m]]
    y = [torch.from_numpy(rng.standard_normal(n)) for n in sizes[:m]]
    return x, y


def quadratics(x, y, noise):
    k = torch.stack([a.T @ a / s for a, s in zip(x, noise)])
    b = torch.stack([a.T @ c / s for a, c, s in zip(x, y, noise)])
    square = torch.stack([(c @ c) / s for c, s in zip(y, noise)])
    return Likelihood(k, b, square, None, torch.tensor(noise))


def brute(x, y, noise, variance):
    """Means and covariances of every client's coefficients given all rows, and the rows' log density."""
    m, d = len(x), x[0].shape[1]
    design = torch.block_diag(*x)
    prior = torch.kron(torch.eye(m, dtype=torch.float64), torch.diag(variance))
    prior = prior + torch.kron(torch.ones(m, m, dtype=torch.float64), FLAT * torch.eye(d, dtype=torch.float64))
    noise = torch.cat([torch.full((len(c),), s, dtype=torch.float64) for c, s in zip(y, noise)])
    gram = design @ prior @ design.T + torch.diag(noise)
    gain = torch.linalg.solve(gram, design @ prior).T
    target = torch.cat(y)
    mean, cov = gain @ target, prior - gain @ design @ prior
    density = torch.distributions.MultivariateNormal(torch.zeros_like(target), gram).log_prob(target)
    blocks = [cov[i * d : (i + 1) * d, i * d : (i + 1) * d] for i in range(m)]
    return mean.view(m, d), torch.stack(blocks), float(density)


def test_posterior_is_the_joint_gaussians_at_every_scale_also_without_rows_and_without_spread():
    x, y = clients()
    noise, variance = [0.5, 1.0, 2.0, 1.0, 0.7], torch.tensor([0.3, 0.0, 1.2], dtype=torch.float64)
    found = truths(quadratics(x, y, noise), variance)
    densities = []
    for j, c in enumerate(SCALES):
        mean, cov, density = brute(x, y, noise, c * variance)
        # The flat prior of the centre is a wide one there: relative differences of 1/FLAT, and what inverting costs.
        torch.testing.assert_close(mean_at(found, j), mean, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(cov_at(found, j), cov, rtol=1e-4, atol=1e-4)
        densities.append(density)
    weight = torch.softmax(scale_prior(found.scales).log() + torch.tensor(densities, dtype=torch.float64), 0)
    torch.testing.assert_close(found.overall, weight, rtol=1e-3, atol=1e-4)


def test_variances_along_a_direction_are_those_of_the_covariance():
    x, y = clients()
    data = quadratics(x, y, [1.0] * 5)
    rng = np.random.default_rng(0)
    excess = 0.3 * torch.from_numpy(rng.standard_normal((3, 3)))
    plain, found = (truths(d, torch.tensor([0.3, 0.0, 1.2]).double()) for d in (data, data._replace(excess=excess)))
    q = torch.from_numpy(rng.standard_normal((5, 2, 3)))
    means = means_along(found, q)
    for j in (0, 3, 9):
        torch.testing.assert_close(means[..., j], torch.einsum("mkd,md->mk", q, mean_at(found, j)))
        half = data.k @ excess
        v = (found.turned * (found.scales[j] / (1 + found.scales[j] * found.values))[:, None]) @ found.turned.mT
        torch.testing.assert_close(cov_at(found, j), cov_at(plain, j) + v @ (half + half.mT) / 2 @ v)
        wide, leant = along(found, j, q)
        torch.testing.assert_close(wide, torch.einsum("mki,mij,mkj->mk", q, cov_at(found, j), q))
        # q'w_i moves with the centre as its mean does.
        moved = mean_at(found._replace(centre=found.centre + 1.0), j) - mean_at(found, j)
        torch.testing.assert_close(leant.sum(-1), torch.einsum("mkd,md->mk", q, moved))


def test_scales_have_half_their_prior_at_none_and_the_rest_flat_in_tau():
    prior = scale_prior(torch.tensor(SCALES, dtype=torch.float64))
    assert float(prior[0]) == 0.5 and float(prior.sum()) == pytest.approx(1)
    tau = torch.tensor(SCALES, dtype=torch.float64).sqrt()
    inner = (tau[3:] - tau[1:-2]) / 2  # half the way to both neighbours
    torch.testing.assert_close(prior[2:-1] / inner, (prior[2] / inner[0]).expand(len(inner)))


def test_excess_is_nothing_for_equal_noise_and_the_noise_by_x_otherwise():
    rng = np.random.default_rng(3)
    m, n = 400, 60
    x = rng.standard_normal((m, n, 1))
    for by_x, wanted in ((False, 0.0), (True, 2.0)):
        # Var(b) = E x^2 s(x)^2 against E x^2 E s^2 = 1: with s^2 = x^2 it is E x^4 = 3, an excess of 2.
        y = x[..., 0] * 0.3 + rng.standard_normal((m, n)) * (np.abs(x[..., 0]) if by_x else 1.0)
        rows = Rows.stack([torch.from_numpy(a) for a in x], [torch.from_numpy(b) for b in y])
        task = Linear(1, intercept=False)
        data = linear_truths(task, rows, torch.tensor([0.01]), torch.ones(m)).data
        ratio = float(data.excess)
        # 24,000 rows: e^2 x^2 has a variance below 100 in both cases, so 4 standard errors are 0.26.
        assert ratio == pytest.approx(wanted, abs=0.26)


def test_noise_is_steadied_by_as_much_as_the_clients_are_alike():
    rng = np.random.default_rng(0)
    freedom = torch.full((500,), 10.0, dtype=torch.float64)
    chi = torch.from_numpy(rng.chisquare(10, 500))

    def steady(rss, freedom, tails=3.0):
        return steadied(rss, freedom, law_of_noises(rss, freedom, tails))

    alike = steady(chi, freedom)
    assert float(alike.std() / alike.mean()) < 0.15
    unlike = torch.from_numpy(np.where(np.arange(500) % 2 == 0, 1.0, 2.5))
    off = {
        name: float((estimate - unlike).square().mean())
        for name, estimate in (
            ("steadied", steady(unlike * chi, freedom)),
            ("own", unlike * chi / freedom),
            ("pooled", (unlike * chi).sum() / freedom.sum()),
        )
    }
    assert off["steadied"] < 0.95 * min(off["own"], off["pooled"])
    # Rows with heavy tails tell less of a variance.
    wild = steady(unlike * chi, freedom, tails=6.0)
    assert float(wild.std()) < float(steady(unlike * chi, freedom).std())
    assert float(steady(torch.tensor([3.0, 0.0]), torch.tensor([3.0, 0.0]))[1]) == 1.0  # a client without rows


def test_every_client_has_its_own_noise_and_one_that_is_unlike_the_rest_does_not_take_that_for_noise():
    """Half of the clients have three times the noise; one lies twenty spreads away from the others."""
    rng = np.random.default_rng(1)
    m, n, d = 60, 40, 3
    sd = np.where(np.arange(m) % 2 == 0, 1.0, 3.0)
    w = 0.2 * rng.standard_normal((m, d))
    w[0] += 4.0
    x = rng.standard_normal((m, n, d))
    y = np.einsum("cnq,cq->cn", x, w) + sd[:, None] * rng.standard_normal((m, n))
    rows = Rows.stack([torch.from_numpy(a) for a in x], [torch.from_numpy(b) for b in y])
    task, start = Linear(d, intercept=False), torch.full((m,), 5.0, dtype=torch.float64)
    spread = torch.full((d,), 0.04, dtype=torch.float64)
    found, law = own_noise(task, rows, spread, start)
    # A variance from about 40 normal rows has a relative error of sqrt(2 / 40) = 0.22, and is steadied a little.
    wrong, pooled = ((estimate / torch.from_numpy(sd**2))[1:].log().abs() for estimate in (found, found.mean()))
    assert float(wrong.mean()) < 2 * 0.22 and float(pooled.mean()) > 4 * 0.22 and law.strength < n
    tight = own_noise(task, rows, spread / SLACK, start)[0]
    assert float(found[0]) < float(tight[0])
    alike = Rows.stack([torch.from_numpy(a) for a in x], [torch.from_numpy(b) for b in rng.standard_normal((m, n))])
    same, law = own_noise(task, alike, spread, start)
    assert float(same.std() / same.mean()) < 0.1


def test_noises_of_many_clients_are_found_block_by_block(monkeypatch):
    clients = linear_clients()
    spread, start = torch.full((4,), 0.1, dtype=torch.float64), torch.ones(5, dtype=torch.float64)
    whole = own_noise(Linear(3), clients.train, spread, start)[0]
    monkeypatch.setattr("mooring.advice.posterior.BLOCK", 2)
    parts = own_noise(Linear(3), clients.train, spread, start)[0]
    assert parts.shape == whole.shape and bool((parts > 0).all())  # centres differ, so that numbers do, a little
    torch.testing.assert_close(parts.sum(), whole.sum(), rtol=0.5, atol=0.0)


@pytest.mark.parametrize("task", [Logistic(2), Logistic(2, classes=3), Poisson(2)])
def test_generalised_quadratics_have_the_losses_slope_and_bend_at_the_models(task):
    rng = np.random.default_rng(1)
    x = [torch.from_numpy(rng.standard_normal((n, 2))) for n in (7, 0, 5)]
    top = 3 if getattr(task, "classes", 2) == 3 else 2
    y = [torch.from_numpy(rng.integers(0, top, len(a))) for a in x]
    y = [b.double() for b in y] if isinstance(task, Poisson) else y
    rows = Rows.stack(x, y)
    models = torch.from_numpy(0.3 * rng.standard_normal((3, task.dim)))
    data = quadratic_at(task, rows, models, torch.zeros(3, task.dim, task.dim, dtype=torch.float64))
    for i, n in enumerate((7, 0, 5)):
        one = models[i].clone().requires_grad_(True)

        def total(w, i=i, n=n):
            if n == 0:
                return 0.0 * w.sum()
            batch = rows.select(torch.tensor([i])).padded()
            return n * (task.loss(w[None], batch)[0] - task.ridge / 2 * (w @ w))

        hessian = torch.autograd.functional.hessian(total, one)
        slope = torch.autograd.grad(total(one), one)[0]
        torch.testing.assert_close(data.k[i], hessian, atol=1e-10, rtol=1e-8)
        torch.testing.assert_close(data.b[i], hessian @ models[i] - slope, atol=1e-10, rtol=1e-8)


def test_an_outlier_gets_a_wide_scale_and_the_others_keep_theirs():
    scales = torch.tensor(SCALES, dtype=torch.float64)
    overall = torch.zeros(len(scales), dtype=torch.float64)
    overall[2] = 1.0  # all agree on c = 1/4
    values, square = 4.0, torch.full((30,), 1.0, dtype=torch.float64)
    square[0] = 60.0  # a client's squared distance, whose variance is 1 + c values
    own = -0.5 * (square / (1 + scales[:, None] * values) + (1 + scales[:, None] * values).log())
    weight = with_outliers(overall, own, scales)
    torch.testing.assert_close(weight.sum(0), torch.ones(30, dtype=torch.float64))
    assert float(weight[6:, 0].sum()) > 0.9 and float(weight[2, 1]) > 0.8


def test_the_posterior_of_separable_rows_is_near_the_exact_one():
    """One coefficient, so the exact posterior is an integral on a grid; the mode's own curvature is far off here."""
    x = torch.tensor([[0.5], [1.0], [1.5], [-0.7], [-1.2]], dtype=torch.float64)
    y = torch.tensor([1, 1, 1, 0, 0])
    m = 400  # many such clients, half of them turned round, put the centre at 0 for sure
    rows = Rows.stack([x] * m, [y, 1 - y] * (m // 2))
    task, variance = Logistic(1, intercept=False, ridge=0.0), torch.tensor([4.0])
    found = generalised_truths(task, rows, torch.zeros(m, 1), variance)
    j = SCALES.index(1.0)
    assert abs(float(found.centre[j, 0])) < 1e-6
    grid = np.linspace(-20, 20, 40_001)
    z = np.outer(grid, x[:, 0].numpy())
    log = -np.logaddexp(0, np.where(y.numpy() == 1, -z, z)).sum(1) - grid**2 / 8
    weight = np.exp(log - log.max())
    weight /= weight.sum()
    mean = weight @ grid
    sd = (weight @ (grid - mean) ** 2) ** 0.5
    assert float(mean_at(found, j)[0, 0]) == pytest.approx(mean, abs=0.1 * sd)
    assert float(cov_at(found, j)[0, 0, 0]) ** 0.5 == pytest.approx(sd, rel=0.1)
