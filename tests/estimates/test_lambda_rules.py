import numpy as np
import pytest
import torch

from mooring.estimates.client_queries import fit_penalized
from mooring.estimates.client_summaries import compute_linear_stats, fit_from_stats, fit_logistic, trace
from mooring.estimates.constants import gradient_noise, smoothness, strong_convexity
from mooring.estimates.federation_estimates import estimate_federation
from mooring.estimates.heterogeneity import estimate_client_radii, estimate_max_radius, estimate_radius
from mooring.estimates.lambda_rules import (
    MAX_AUTO_LAM_PER_CURVATURE,
    MAX_LAM_PER_SMOOTHNESS,
    lambda_rules,
    minimize_expected_risk,
    resolve_auto_lam,
)
from mooring.estimates.random_effects import client_hessians, fit_laplace, fit_reml
from mooring.estimates.task_random_effects import SampledRandomEffects
from mooring.tasks.linear_losses import Poisson, SquaredHinge
from mooring.tasks.logistic import Logistic
from mooring.theory.lambda_aer import lambda_aer
from mooring.theory.lambda_ier import lambda_ier
from mooring.theory.lambda_one_stage import lambda_one_stage

from .planted import linear_rows, logistic_rows, rows_of, truths


def stats_of(n, tau=0.5, d=3, seed=0):
    rng = np.random.default_rng(seed)
    return compute_linear_stats(linear_rows(n, 1 + tau * rng.normal(size=(len(n), d)), rng)[0])


def test_empirical_bayes_rules_are_noise_over_rows_and_spread():
    n = [20, 30, 80, 40, 25]
    stats = stats_of(n)
    table = lambda_rules(stats)
    scalar, diagonal = fit_reml(stats), fit_reml(stats, "diagonal")
    for i in range(5):
        assert float(table["client"].lam[i]) == pytest.approx(float(scalar.noise[0] / n[i] / scalar.variance[0]))
        for j in range(3):
            expected = float(diagonal.noise[0] / n[i] / diagonal.variance[j])
            assert float(table["client_and_coefficient"].lam[i, j]) == pytest.approx(expected)
    per = np.array([q / k for q, k in zip(np.array(n) / np.sum(n), n)]).sum()
    np.testing.assert_allclose(table["coefficient"].lam, per * diagonal.noise[0] / diagonal.variance)
    assert "restricted likelihood" in table["one"].source


def test_one_lam_is_the_common_one_for_equal_sizes():
    table = lambda_rules(stats_of([30] * 6))
    np.testing.assert_allclose(table["client"].lam, table["one"].lam, rtol=1e-6)


def test_one_lam_has_the_least_risk_of_all():
    """Against the exact expected risk of each client's ridge fit, on a grid."""
    n = torch.tensor([5.0, 20.0, 100.0]).double()
    stats = stats_of([5, 20, 100], seed=2)
    spread = fit_reml(stats)
    p, eye = n / n.sum(), torch.eye(3).double()
    tau2, noise = float(spread.variance[0]), float(spread.noise[0])

    def risk(lam):
        total = 0.0
        for i in range(3):
            h = stats.gram[i]
            inverse = torch.linalg.inv(h + lam * eye)
            error = lam**2 * tau2 * inverse @ inverse + noise / n[i] * inverse @ h @ inverse
            total += float(p[i] * trace(h @ error))
        return total

    best = minimize_expected_risk(spread, stats.gram, n, p)
    grid = best * np.geomspace(0.5, 2, 41)
    assert grid[np.argmin([risk(lam) for lam in grid])] == pytest.approx(best)


def test_theorems_are_evaluated_at_the_estimates():
    n = np.array([40, 60, 50, 90])
    stats = stats_of(n, tau=1.0)
    table, fits = lambda_rules(stats), fit_from_stats(stats)
    p = n / n.sum()
    mu, smooth = strong_convexity(fits.hessian, fits.n).value, smoothness(fits.hessian, fits.n).value
    noise, rms, most = gradient_noise(fits).value, estimate_radius(stats).value, estimate_max_radius(stats).value
    assert table["aer"].lam == pytest.approx(lambda_aer(rms, mu, p, n).lam, rel=1e-7)
    assert table["ier"].lam == pytest.approx(lambda_ier(most, mu, p, n).lam, rel=1e-7)
    assert table["theory"].lam == pytest.approx(
        lambda_one_stage(most, mu, smooth, noise, p, n, cap=MAX_LAM_PER_SMOOTHNESS).lam, rel=1e-7
    )
    assert table["shrinkage_of_all"].lam == pytest.approx(noise**2 * np.sum(p / n) / (mu * rms**2), rel=1e-7)
    own, each = trace(fits.gradient_cov), estimate_client_radii(stats).value
    np.testing.assert_allclose(table["shrinkage"].lam, own / (fits.n * mu * each**2))
    assert table["aer"].source == "alternative, Theorem 4.4"


def test_no_spread_means_infinite_stiffness():
    table = lambda_rules(stats_of([20] * 8, tau=0.0, seed=2))
    assert table["one"].lam == np.inf and bool(torch.isinf(table["client"].lam).all())
    assert any("one global model" in text for text in table["one"].warnings)


def test_clients_of_few_rows_get_the_theorems_under_the_assumed_spread():
    """Nobody's mu_i is above 0 with 2 rows for 3 coefficients: the averaged risk's stands in, and the table says so."""
    table = lambda_rules(stats_of([2] * 30 + [20] * 10))
    assert np.isfinite(table["one"].lam) and bool((table["client"].lam > 0).all())
    for name in ("aer", "ier", "theory", "shrinkage", "shrinkage_of_all"):
        assert np.all(np.asarray(table[name].lam) > 0), name
        assert any("mu of the averaged risk" in said for said in table[name].warnings)
        assert any("assumed spread" in said for said in table[name].warnings)


def test_auto_is_one_but_never_tighter_than_ten_curvatures():
    n = torch.full((8,), 20.0).double()
    equal, apart = stats_of([20] * 8, tau=0.0, seed=2), stats_of([20] * 8, tau=1.0)
    top = np.mean([np.linalg.eigvalsh(g)[-1] for g in equal.gram.numpy()])
    assert lambda_rules(equal)["auto"].lam == pytest.approx(MAX_AUTO_LAM_PER_CURVATURE * top)
    table = lambda_rules(apart)
    assert table["auto"].lam == table["one"].lam
    told = SampledRandomEffects(fit_reml(apart), torch.arange(8))
    assert resolve_auto_lam(told, n, n / n.sum()) == table["auto"].lam


def test_a_part_of_the_clients_speaks_for_all():
    """The spread of some: their lam, and the same sigma^2 / (n_i tau^2) for the others."""
    stats = stats_of([20, 30, 80, 40, 25])
    part = torch.tensor([0, 2, 3])
    some = type(stats)(*(field[part] for field in stats))
    spread = fit_reml(some)
    told = SampledRandomEffects(spread, part)
    table = lambda_rules(stats, scalar=told, diagonal=SampledRandomEffects(fit_reml(some, "diagonal"), part))
    np.testing.assert_allclose(table["client"].lam, spread.noise[0] / stats.n / spread.variance[0])
    assert table["one"].lam == lambda_rules(some)["one"].lam


def test_hessians_of_a_spread_are_those_it_was_made_with():
    stats = stats_of([20, 30, 80])
    torch.testing.assert_close(client_hessians(fit_reml(stats), stats.n), stats.gram)


def test_assumptions_that_fail_are_named():
    table = lambda_rules(stats_of([10] * 5, tau=0.05))
    assert any("fewer than 4 smooth/mu" in text for text in table["aer"].warnings)


def test_logistic_fits_and_a_given_spread():
    rng = np.random.default_rng(3)
    w = truths(20, 2, 1.0, np.full(20, 1 / 20), rng)
    rows, _, _ = logistic_rows([60] * 20, w, rng)
    task = Logistic(2, intercept=False, ridge=0.0)

    def refit(center, lam):
        return fit_penalized(task, rows, lam, torch.zeros(20, 2).double(), center=center)

    spread = fit_laplace(rows.size, refit, torch.zeros(2).double())
    fits = fit_logistic(rows)
    given, own = lambda_rules(fits, scalar=SampledRandomEffects(spread, torch.arange(20))), lambda_rules(fits)
    # A radius of 1 in two coefficients is a variance of 1/2 each; a log-likelihood has noise 1.
    for table in (given, own):
        assert float(table["client"].lam[0]) == pytest.approx(1 / 60 / 0.5, rel=0.5)
    assert given["one"].source == "empirical Bayes, Laplace approximation"


@pytest.mark.parametrize("kind", ["poisson", "softmax", "squared hinge"])
def test_a_ridge_counts_once_in_the_theorems(kind):
    """The theorems' mu and L are eigenvalues of the whole loss, whose Hessian contains the ridge already."""
    rng = np.random.default_rng(4)
    n = np.array([60, 80, 70, 90])
    xs = [0.5 * rng.normal(size=(k, 2)) for k in n]
    scores = [x @ (np.array([0.4, -0.3]) + 0.3 * rng.normal(size=2)) for x in xs]
    if kind == "poisson":
        task, ys = Poisson(2, intercept=False, ridge=2.0), [rng.poisson(np.exp(z)).astype(float) for z in scores]
    elif kind == "softmax":
        task = Logistic(2, classes=3, intercept=False, ridge=2.0)
        ys = [rng.integers(0, 3, len(z)) for z in scores]
    else:
        task = SquaredHinge(2, intercept=False, ridge=2.0)
        ys = [(rng.random(len(z)) < 1 / (1 + np.exp(-z))).astype(float) for z in scores]
    rows = rows_of(xs, ys)
    p = torch.from_numpy(n / n.sum())
    federation = estimate_federation(task, rows, p)
    w = task.solve(rows.full(task))
    mu = float(torch.linalg.eigvalsh(task.hessian(w, rows.full(task)).double()).min())
    found = federation.rules["aer"].lam
    assert found == pytest.approx(lambda_aer(federation.radii.rms.value, mu, p.numpy(), n).lam, rel=1e-6)
