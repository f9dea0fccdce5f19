import numpy as np
import pytest
import statsmodels.api as sm
import torch
from scipy.optimize import minimize, minimize_scalar
from statsmodels.regression.mixed_linear_model import MixedLMParams

from mooring.core.errors import RequestError
from mooring.estimates.client_queries import fit_penalized
from mooring.estimates.client_summaries import compute_linear_stats, fit_from_stats
from mooring.estimates.random_effects import (
    VARIANCE_PROBE_SHARE,
    _quadratic,
    _tilt,
    deviance_gain,
    fit_laplace,
    fit_reml,
    fit_reml_to_fits,
    pooled_dispersion,
)
from mooring.estimates.reml import (
    GaussianLikelihoods,
    _scoring_step,
    evaluate_deviance,
    factor_likelihoods,
    score_terms,
)
from mooring.tasks.linear import Linear
from mooring.tasks.logistic import Logistic

from .planted import linear_rows, logistic_rows, rows_of

SIZES = [2, 5, 9, 30, 14, 3]  # some below d = 3


def federation(m=6, d=3, tau=0.8, n=None, noise=1.0, seed=0):
    rng = np.random.default_rng(seed)
    w = 1 + tau * rng.normal(size=(m, d))
    rows, xs, ys = linear_rows(SIZES if n is None else n, w, rng, noise)
    return compute_linear_stats(rows), xs, ys, w


def dense_deviance(tau2, sigma2, xs, ys):
    """-2 restricted log-likelihood from the full covariance of each client's rows."""
    a, b, parts = 0.0, 0.0, []
    for x, y in zip(xs, ys):
        v = x @ np.diag(tau2) @ x.T + sigma2 * np.eye(len(x))
        inverse = np.linalg.inv(v)
        a, b = a + x.T @ inverse @ x, b + x.T @ inverse @ y
        parts.append((x, y, inverse, np.linalg.slogdet(v)[1]))
    w = np.linalg.solve(a, b)
    quad = sum((y - x @ w) @ inverse @ (y - x @ w) for x, y, inverse, _ in parts)
    return quad + sum(part[3] for part in parts) + np.linalg.slogdet(a)[1], w


def as_normal(stats, rows=True):
    n = stats.n
    k, b = n[:, None, None] * stats.gram, n[:, None] * stats.moment
    return factor_likelihoods(k, b, n * stats.yy, float(n.sum()) if rows else None)


def test_deviance_is_that_of_the_rows_up_to_a_constant():
    stats, xs, ys, _ = federation(d=8)
    data = as_normal(stats)
    values = []
    for tau2 in ([0.5] * 8, [0.0] * 8, [0.0, 0.3] * 4, [*[0.0] * 6, 0.3, 2.0], [*[0.0] * 7, 0.4], [1e-3, 7.0] * 4):
        at = evaluate_deviance(data, torch.tensor(tau2, dtype=torch.float64))
        sigma2 = at.noise
        expected, w = dense_deviance(sigma2 * np.array(tau2), sigma2, xs, ys)
        np.testing.assert_allclose(at.w, w, atol=1e-9)
        values.append(at.deviance - expected)
        lower, higher = (dense_deviance(s * np.array(tau2), s, xs, ys)[0] for s in (0.9 * sigma2, 1.1 * sigma2))
        assert expected < min(lower, higher)  # sigma^2 is profiled out
    assert np.ptp(values) < 1e-8


@pytest.mark.parametrize("sizes", [[9, 20, 14], [2, 20, 14]])  # Cholesky's factors, and those of singular K_i
def test_roots_without_orthogonal_rows_give_the_same_likelihoods(sizes):
    stats = federation(m=3, n=sizes)[0]
    n, k = stats.n, stats.n[:, None, None] * stats.gram
    b = n[:, None] * stats.moment
    orthogonal, other = (factor_likelihoods(k, b, n * stats.yy, None, choice) for choice in (True, False))
    for t in ([0.5] * 3, [0.0, 0.3, 2.0]):
        a, c = (evaluate_deviance(data, torch.tensor(t, dtype=torch.float64)) for data in (orthogonal, other))
        assert a.deviance == pytest.approx(c.deviance, rel=1e-10)
        torch.testing.assert_close(a.models, c.models)
        torch.testing.assert_close(a.covs, c.covs)


@pytest.mark.parametrize("rows", [True, False])
def test_slope_equals_finite_differences(rows):
    data = as_normal(federation()[0], rows)
    t = torch.tensor([0.3, 1.2, 0.05]).double()
    expected, observed, _ = score_terms(data, evaluate_deviance(data, t))
    for j in range(3):
        step = torch.zeros(3).double()
        step[j] = 1e-6
        slope = (evaluate_deviance(data, t + step).deviance - evaluate_deviance(data, t - step).deviance) / 2e-6
        assert float((expected - observed)[j]) == pytest.approx(slope, rel=1e-4)


@pytest.mark.parametrize("pattern", [None, torch.ones(6).double(), torch.tensor([0.0] * 4 + [1.0] * 2).double()])
def test_scoring_steps_are_solved_for_where_they_keep_spreads_above_0(pattern):
    rng = np.random.default_rng(5)
    for _ in range(20):
        root = rng.normal(size=(6, 6))
        t, slope, hessian = np.abs(rng.normal(size=6)), 3 * rng.normal(size=6), root @ root.T
        t = t if pattern is None else t[0] * pattern.numpy()
        step, predicted = _scoring_step(*(torch.from_numpy(part) for part in (t, slope, hessian)), pattern)
        step, basis = step.numpy(), np.eye(6) if pattern is None else pattern.numpy()[None]
        moved = basis @ (t + step)
        assert (t + step >= -1e-12).all()
        np.testing.assert_allclose((basis @ (slope + hessian @ step))[moved > 1e-9], 0, atol=1e-8)
        assert predicted == pytest.approx(-(slope @ step + step @ hessian @ step / 2))


@pytest.mark.parametrize("form", ["scalar", "diagonal"])
def test_likelihood_estimate_is_scipys(form):
    stats, xs, ys, _ = federation(m=12, n=[2, 5, 9, 30, 14, 3] * 2, seed=3)
    found = fit_reml(stats, form)
    many = 1 if form == "scalar" else 3

    def deviance(theta):
        return dense_deviance(np.resize(np.exp(theta[:-1]), 3), np.exp(theta[-1]), xs, ys)[0]

    best = minimize(deviance, np.zeros(many + 1), method="L-BFGS-B", bounds=[(-12, 5)] * (many + 1))
    ours = dense_deviance(found.variance.numpy(), float(found.noise[0]), xs, ys)[0]
    assert ours <= best.fun + 1e-6
    np.testing.assert_allclose(found.variance[:many], np.exp(best.x[:-1]), rtol=0.01, atol=1e-3)
    assert float(found.noise[0]) == pytest.approx(np.exp(best.x[-1]), rel=0.01)


@pytest.mark.parametrize("tau", [0.0, 0.8])
def test_above_none_is_the_likelihood_ratio_of_the_rows(tau):
    stats, xs, ys, _ = federation(m=12, n=[4, 5, 9, 30, 14, 6] * 2, tau=tau, seed=5)
    found = fit_reml(stats, "scalar")
    none = minimize_scalar(
        lambda s: dense_deviance(np.zeros(3), np.exp(s), xs, ys)[0], bounds=(-3, 3), method="bounded"
    )
    ours = dense_deviance(found.variance.numpy(), float(found.noise[0]), xs, ys)[0]
    assert deviance_gain(found) == pytest.approx(none.fun - ours, abs=1e-6)
    assert deviance_gain(found) > 20 if tau else 0 <= deviance_gain(found) < 4


def test_diagonal_estimate_is_that_of_statsmodels():
    stats, xs, ys, _ = federation(m=30, d=2, n=[8] * 30, seed=4)
    x = np.concatenate(xs)
    model = sm.MixedLM(np.concatenate(ys), x, groups=np.repeat(np.arange(30), 8), exog_re=x)
    free = MixedLMParams.from_components(fe_params=np.ones(2), cov_re=np.eye(2))
    reference = model.fit(reml=True, free=free)
    found = fit_reml(stats, "diagonal")
    np.testing.assert_allclose(found.variance, np.diag(reference.cov_re), rtol=1e-3)
    assert float(found.noise[0]) == pytest.approx(reference.scale, rel=1e-3)
    np.testing.assert_allclose(found.center, reference.fe_params, atol=1e-4)
    np.testing.assert_allclose(found.center_cov.diagonal().sqrt(), reference.bse_fe, rtol=2e-3)
    effects = np.stack([reference.random_effects[i] for i in range(30)])
    np.testing.assert_allclose(found.models - found.center, effects, atol=1e-3)


def test_models_are_the_moored_minimisers():
    """v_i = arg min L_i + 1/2 sum_j lam_ij (v_j - w_j)^2 with lam_ij = sigma^2/(n_i tau_j^2)."""
    rng = np.random.default_rng(5)
    rows, _, _ = linear_rows(SIZES, rng.normal(size=(6, 3)), rng)
    found = fit_reml(compute_linear_stats(rows), "diagonal")
    lam = found.noise[:, None] / (rows.size[:, None] * found.variance)
    task = Linear(3, intercept=False)
    free = found.variance > 0
    moored = task.prox(found.center[None], lam.clamp(max=1e9), rows.padded())
    torch.testing.assert_close(found.models[:, free], moored[:, free], atol=1e-5, rtol=1e-5)


def test_limits_are_global_and_local_models():
    stats, xs, ys, _ = federation(m=8, tau=0.0, n=[20] * 8, seed=2)
    found = fit_reml(stats)
    pooled = np.linalg.lstsq(np.concatenate(xs), np.concatenate(ys), rcond=None)[0]
    assert float(found.variance.max()) == 0 and any("spread is 0" in text for text in found.warnings)
    np.testing.assert_allclose(found.models, np.tile(pooled, (8, 1)), atol=1e-8)
    stats, xs, ys, _ = federation(m=8, tau=100.0, n=[20] * 8, noise=0.01)
    own = [np.linalg.lstsq(x, y, rcond=None)[0] for x, y in zip(xs, ys)]
    np.testing.assert_allclose(fit_reml(stats).models, own, atol=1e-6)


def test_large_federation_recovers_the_truth():
    rng = np.random.default_rng(6)
    m, tau = 10_000, np.array([0.0, 0.2, 1.0])
    xs = rng.normal(size=(m, 4, 3))
    ys = np.einsum("mnd,md->mn", xs, 1 + tau * rng.normal(size=(m, 3))) + 0.5 * rng.normal(size=(m, 4))
    found = fit_reml(compute_linear_stats(rows_of(list(xs), list(ys))), "diagonal")
    se = found.variance_cov.diagonal().sqrt().numpy()
    assert np.all(np.abs(found.variance.numpy() - tau**2) < 4 * se + 1e-3)
    np.testing.assert_allclose(found.center, 1, atol=0.05)
    assert float(found.noise[0]) == pytest.approx(0.25, rel=0.03)


def test_variance_cov_is_the_scatter_of_the_estimates():
    found = [fit_reml(federation(m=40, n=[10] * 40, seed=seed)[0]) for seed in range(100, 160)]
    scatter = np.std([float(f.variance[0]) for f in found])
    assert np.mean([float(f.variance_cov[0, 0]) for f in found]) ** 0.5 == pytest.approx(scatter, rel=0.35)


def test_hard_cases():
    rng = np.random.default_rng(7)
    xs = [rng.normal(size=(k, 3)) for k in (4, 4, 1)]
    xs[1][:, 1] = 0
    xs[2][:, 1] = 0
    ys = [rng.normal(size=len(x)) for x in xs]
    for form in ("scalar", "diagonal", "auto"):
        found = fit_reml(compute_linear_stats(rows_of(xs, ys)), form)
        assert torch.isfinite(found.models).all() and torch.isfinite(found.variance).all()
    nobody = [x * np.array([1, 0, 1]) for x in xs]  # a column that no client has
    assert torch.isfinite(fit_reml(compute_linear_stats(rows_of(nobody, ys))).models).all()
    two = federation(m=2, n=[10, 12])[0]
    assert torch.isfinite(fit_reml(two, "diagonal").models).all()


def test_auto_is_diagonal_only_where_spreads_differ():
    assert fit_reml(federation(m=100, n=[10] * 100)[0], "auto").form == "scalar"
    rng = np.random.default_rng(8)
    w = np.array([0.1, 1.0, 3.0]) * rng.normal(size=(100, 3))
    assert fit_reml(compute_linear_stats(linear_rows([10] * 100, w, rng)[0]), "auto").form == "diagonal"


def test_fits_as_observations_agree_with_rows_where_they_are_many():
    stats = federation(m=30, n=[80] * 30)[0]
    fits = fit_from_stats(stats)
    a, b = fit_reml_to_fits(fits, "diagonal"), fit_reml(stats, "diagonal")
    torch.testing.assert_close(a.variance, b.variance, rtol=0.02, atol=0.01)
    torch.testing.assert_close(a.models, b.models, rtol=0.01, atol=0.02)
    assert float(pooled_dispersion(fits)[0]) == pytest.approx(float(b.noise[0]), rel=0.02)


def test_laplace_is_exact_for_quadratic_losses():
    stats, _, _, _ = federation(m=12, n=[2, 5, 9, 30, 14, 3] * 2, seed=3)

    def refit(center, lam):
        gram, moment = stats.gram[:, None], stats.moment[:, None]
        modes = torch.linalg.solve(gram + torch.diag_embed(lam), (moment + lam * center)[..., None])
        return modes[..., 0], gram.expand(-1, lam.shape[1], -1, -1)

    found = fit_laplace(stats.n, refit, torch.zeros(3).double())
    data = as_normal(stats, rows=False)
    best = minimize_scalar(
        lambda s: evaluate_deviance(data, torch.full((3,), np.exp(s)).double()).deviance, bounds=(-8, 4)
    )
    assert float(found.variance[0]) == pytest.approx(np.exp(best.x), rel=1e-3)


def logistic_refit(rows, task):
    def refit(center, lam):
        return fit_penalized(task, rows, lam, torch.zeros(len(rows), task.dim).double(), center=center)

    return refit


def test_laplace_recovers_a_logistic_spread_with_separable_clients():
    rng = np.random.default_rng(10)
    n = [40] * 60 + [4] * 20
    w = np.array([1.0, 0.0]) + 0.7 * rng.normal(size=(80, 2))
    rows, _, ys = logistic_rows(n, w, rng)
    assert any(y.min() == y.max() for y in ys)  # one class only: no fit of its own
    task = Logistic(2, intercept=False, ridge=0.0)
    found = fit_laplace(rows.size, logistic_refit(rows, task), torch.zeros(2).double())
    assert float(found.variance[0]) == pytest.approx(0.49, abs=0.2)
    np.testing.assert_allclose(found.center, [1, 0], atol=0.3)
    lam = 1 / (rows.size[:, None] * found.variance)
    torch.testing.assert_close(found.models, task.prox(found.center[None], lam, rows.padded()), atol=1e-3, rtol=1e-3)


def test_laplace_counts_how_hessians_move_with_the_spread():
    """The tilt is the derivative of sum_i log|1 + T n_i H_i| at fixed T, the fits being those of a wider spread."""
    rng = np.random.default_rng(13)
    rows, _, _ = logistic_rows([25] * 10, 0.5 + 0.7 * rng.normal(size=(10, 2)), rng)
    refit = logistic_refit(rows, Logistic(2, intercept=False, ridge=0.0))
    n, center, t = rows.size.double(), torch.full((2,), 0.5).double(), torch.full((2,), 0.4).double()

    def logs(wider):
        hessians = refit(center, 1 / (n[:, None, None] * wider * t))[1][:, 0]
        return float(torch.linalg.slogdet(torch.eye(2).double() + t[:, None] * n[:, None, None] * hessians)[1].sum())

    lam = 1 / (n[:, None] * t)
    modes, hessians = refit(center, torch.stack([lam, lam / (1 + VARIANCE_PROBE_SHARE)], 1))
    state = evaluate_deviance(_quadratic(n, modes[:, 0], hessians[:, 0], lam, center), t)
    tilt = _tilt(state, n, hessians[:, 0], hessians[:, 1])
    assert float(tilt.sum()) == pytest.approx((logs(np.exp(1e-3)) - logs(np.exp(-1e-3))) / 2e-3, rel=0.1)


@pytest.mark.parametrize("form", ["scalar", "diagonal"])
def test_laplace_has_little_bias_at_six_rows_per_coefficient(form):
    rng = np.random.default_rng(11)
    rows, _, _ = logistic_rows([30] * 300, 0.5 + 0.7 * rng.normal(size=(300, 5)), rng)
    found = fit_laplace(
        rows.size, logistic_refit(rows, Logistic(5, intercept=False, ridge=0.0)), torch.zeros(5).double(), form
    )
    assert float(found.variance.mean()) == pytest.approx(0.49, rel=0.2)


def test_laplace_auto_is_diagonal_only_where_spreads_differ():
    rng = np.random.default_rng(15)
    for scale, form in (((0.8, 0.8), "scalar"), ((0.05, 1.5), "diagonal")):
        rows, _, _ = logistic_rows([40] * 60, np.array(scale) * rng.normal(size=(60, 2)), rng)
        refit = logistic_refit(rows, Logistic(2, intercept=False, ridge=0.0))
        assert fit_laplace(rows.size, refit, torch.zeros(2).double(), "auto").form == form


def test_laplace_of_equal_clients_ends_at_one_model():
    rng = np.random.default_rng(11)
    rows, _, _ = logistic_rows([100] * 10, np.full((10, 2), 0.5), rng)
    task = Logistic(2, intercept=False, ridge=0.0)
    found = fit_laplace(rows.size, logistic_refit(rows, task), torch.zeros(2).double(), "diagonal")
    assert float(found.variance.max()) < 0.05
    assert float((found.models - found.center).abs().max()) < 0.3


def test_wrong_requests():
    stats = federation()[0]
    with pytest.raises(RequestError, match="'scalar', 'diagonal', 'intercept', 'auto', got 'full'"):
        fit_reml(stats, "full")
    with pytest.raises(RequestError, match="at least 2 clients need"):
        fit_reml_to_fits(fit_from_stats(federation(m=3, n=[2, 2, 9])[0]))
    with pytest.raises(RequestError, match="more than d = 3 rows"):
        fit_reml(federation(m=2, n=[1, 2])[0])


def test_likelihoods_of_very_different_sizes_are_evaluated():
    """I + C diag(t) C' is positive definite, but not to rounding errors."""
    c = torch.tensor([[[3e9, 1e9]] * 3, [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]], dtype=torch.float64)
    data = GaussianLikelihoods(c, torch.ones(2, 3, dtype=torch.float64), 0.0, None)
    with pytest.raises(RuntimeError):
        torch.linalg.cholesky(torch.eye(3, dtype=torch.float64) + c @ c.mT)
    at = evaluate_deviance(data, torch.ones(2, dtype=torch.float64))
    assert np.isfinite(at.deviance) and bool(torch.isfinite(at.w_cov).all())
