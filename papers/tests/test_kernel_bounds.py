import math

import numpy as np
import pytest

from mooring.theory import kernel_operator as op
from mooring.theory import kernel_stopping as ks
from mooring_papers.theory import kernel_bounds as kb

UPDATES = [op.fedavg(0.2), op.fedavg(0.2, 6), op.fedprox(0.2), op.fedprox(5.0)]
every_update = pytest.mark.parametrize("update", UPDATES, ids=["gd", "fedavg6", "fedprox", "fedprox-long"])
ROUNDS = [1, 3, 10, 100, 3000]
SIGMA = 0.4


class Sobolev:
    """k(x, z) = min(x, z); truths and the global model are sums of a few representers, the clients' truths differ."""

    def __init__(self, update, spread=0.3):
        rng = np.random.default_rng(0)
        self.sizes, self.update = [4, 10, 6, 20], update
        x = np.concatenate([np.sort(rng.uniform(i / 4, i / 4 + 0.5, n)) for i, n in enumerate(self.sizes)])
        knots = np.array([0.2, 0.5, 0.9, 1.3])
        section = np.minimum.outer(x, knots)
        gram_knots = np.minimum.outer(knots, knots)
        weights = np.array([2.0, -3.0, 2.0, -1.0])
        self.start_sq = weights @ gram_knots @ weights  # f_0 = 0
        self.model = section @ weights
        shifts = spread * rng.standard_normal((4, 4))
        own = [section[e - n : e] @ (weights + shift) for e, n, shift in zip(np.cumsum(self.sizes), self.sizes, shifts)]
        self.truth, self.samples = np.concatenate(own), 40
        self.gram = np.minimum.outer(x, x)
        self.flow = op.kernel_flow(self.gram, self.sizes, update)
        self.kappa = op.kappa_p(self.flow.gamma, update)
        self.pooled = np.maximum(np.linalg.eigvalsh(self.gram / 40)[::-1], 0)
        self.gap = kb.heterogeneity_gap(self.truth, self.model)

    def expected_error(self, rounds):
        """E|f_t - f|_N^2 for noise of variance SIGMA^2, exactly."""
        mean = op.predictions(self.flow, self.truth, rounds) - self.model
        modes = 1 - (1 - self.update.eta * self.flow.eigenvalues) ** rounds
        spread = self.flow.from_modes * modes @ self.flow.to_modes
        return (mean @ mean + SIGMA**2 * (spread**2).sum()) / self.samples


@every_update
@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_proposition_7_covers_the_exact_error(update, spread):
    p = Sobolev(update, spread)
    for rounds in ROUNDS:
        args = (p.flow.eigenvalues, update, rounds, p.samples, p.kappa, p.start_sq, SIGMA, p.gap)
        assert p.expected_error(rounds) <= kb.prediction_bound(*args)


@every_update
def test_the_caps_on_both_factors(update):
    p = Sobolev(update)
    for rounds in ROUNDS:
        assert kb.bias_factor(p.flow.eigenvalues, update, rounds) <= kb.bias_factor_cap(update, rounds)
        variance = kb.variance_factor(p.flow.eigenvalues, update, rounds, p.samples)
        middle = np.minimum(1, update.eta * rounds * p.flow.eigenvalues).mean()
        assert variance <= middle <= kb.variance_factor_cap(p.pooled, update, rounds, p.samples) * (1 + 1e-9)
    factors = [kb.variance_factor(p.flow.eigenvalues, update, t, p.samples) for t in ROUNDS]
    assert factors == sorted(factors)


def test_the_cap_on_the_bias_needs_its_e():
    """At the worst eigenvalue the bias factor is within 3% of 1/(2 e eta t s); the printed cap is e times that."""
    update, rounds = op.fedavg(0.2), 20
    worst = np.array([1 / (0.2 * (2 * rounds + 1))])
    assert kb.bias_factor(worst, update, rounds) == pytest.approx(kb.bias_factor_cap(update, rounds), rel=0.03)


@every_update
@pytest.mark.parametrize("norm", [1.0, 4.0])
def test_theorem_8_holds_up_to_the_stopping_time(update, norm):
    p = Sobolev(update)
    last = ks.stopping_time(p.pooled, p.samples, update, SIGMA, norm)
    assert last >= 3
    for rounds in {1, 2, last // 2, last}:
        assert p.expected_error(rounds) <= kb.stopped_bound(update, rounds, p.kappa, p.start_sq, p.gap, norm)
        variance = SIGMA**2 * kb.variance_factor_cap(p.pooled, update, rounds, p.samples)
        assert variance <= kb.bias_factor_cap(update, rounds) * norm**2 * (1 + 1e-9)  # what stopping is for


@every_update
def test_theorem_10_rarely_fails(update):
    p = Sobolev(update)
    rng = np.random.default_rng(2)
    rounds = ks.stopping_time(p.pooled, p.samples, update, SIGMA) - 1
    bound = kb.likely_stopped_bound(update, rounds, p.kappa, p.start_sq, p.gap)
    assert bound > kb.stopped_bound(update, rounds, p.kappa, p.start_sq, p.gap)
    noisy = p.truth[:, None] + SIGMA * rng.standard_normal((40, 500))
    errors = np.mean((op.predictions(p.flow, noisy, rounds) - p.model[:, None]) ** 2, axis=0)
    assert np.mean(errors > bound) < 0.01


@every_update
def test_lemma_27_bounds_the_rkhs_norm_up_to_the_stopping_time(update):
    p = Sobolev(update)
    rng = np.random.default_rng(4)
    rounds = ks.stopping_time(p.pooled, p.samples, update, SIGMA)
    model = np.linalg.lstsq(p.gram, p.model, rcond=None)[0]  # the global model as a sum of k(., x_j): its projection
    norm = math.sqrt(model @ p.gram @ model)
    for _ in range(20):
        a = op.coefficients(p.flow, p.truth + SIGMA * rng.standard_normal(40), rounds)
        distance = math.sqrt((a - model) @ p.gram @ (a - model))
        assert distance <= kb.rkhs_norm_bound(norm, update, rounds, p.gap)


def test_the_bounds_at_one_point():
    update = op.fedavg(0.1, 2)
    values = np.array([2.0, 0.5])
    bias = max(0.8**6 * 2.0, 0.95**6 * 0.5) / 2
    variance = ((1 - 0.8**3) ** 2 + (1 - 0.95**3) ** 2) / 7
    expected = 3 * 1.4 * (bias * 5.0 + variance * 0.09 + 0.2)
    assert kb.prediction_bound(values, update, 3, 7, 1.4, 5.0, 0.3, 0.2) == pytest.approx(expected)
    cap = 1 / (2 * math.e * 0.1 * 3 * 2)
    assert kb.stopped_bound(update, 3, 1.4, 5.0, 0.2) == pytest.approx(3 * 1.4 * (cap * 6 + 0.2))
    assert kb.likely_stopped_bound(update, 3, 1.4, 5.0, 0.2) == pytest.approx(3 * 1.4 * (cap * 8 + 0.2))
    decay = 3 * 1.4 / 0.2 * 5.0 * math.exp(-2 * 0.2 / 1.4 * 0.5 * 3)
    rank = kb.finite_rank_bound(0.5, 2, update, 3, 7, 1.4, 5.0, 0.3, 0.2)
    assert rank == pytest.approx(decay + 3 * 1.4 * 0.09 * 2 / 7 + 3 * 1.4 * 0.2)
    assert kb.rkhs_norm_bound(2.0, update, 3, 0.2) == pytest.approx(3 + math.sqrt(0.6 * 0.2))


def test_failure_probabilities():
    update = op.fedavg(0.1, 5)
    assert kb.failure_sub_gaussian(update, 20, 1000, 0.5) == pytest.approx(math.exp(-1000 / (0.25 * 10)))
    assert kb.failure_heavy_tail(update, 20, 1000, 0.5, 3.0, 4) == pytest.approx(3 * 10 / (1000 * 0.25))
    small, large = (kb.failure_heavy_tail(update, 20, n, 0.5, 3.0, 8) for n in (1000, 2000))
    assert small / large == pytest.approx(4)


class Linear:
    def __init__(self, update, seed=0, dim=5, spread=0.5):
        rng = np.random.default_rng(seed)
        self.sizes, self.update, self.dim = [2, 12, 6, 30], update, dim
        self.xs = [0.8 * rng.standard_normal((n, dim)) for n in self.sizes]
        self.x, self.samples = np.concatenate(self.xs), 50
        self.flow = op.theta_flow(self.xs, update)
        self.kappa = op.kappa_p(self.flow.gamma, update)
        centre = rng.standard_normal(dim)
        self.truths = centre + spread * rng.standard_normal((4, dim))
        self.signal = np.concatenate([x @ w for x, w in zip(self.xs, self.truths)])
        self.balance = op.balancing_model(self.flow, self.xs, self.truths)
        self.start = rng.standard_normal(dim)
        self.rho = np.linalg.eigvalsh(self.x.T @ self.x / 50)[0]

    def expected_distance(self, rounds):
        """E|theta_t - thetabar|^2 for noise of variance SIGMA^2, exactly."""
        mean = op.theta_at(self.flow, self.signal, rounds, self.start) - self.balance
        response = op.theta_at(self.flow, np.eye(self.samples), rounds)
        return mean @ mean + SIGMA**2 * (response**2).sum()


@every_update
@pytest.mark.parametrize("seed", [0, 1])
def test_theorem_12_covers_the_exact_error_and_the_bias_of_every_client(update, seed):
    p = Linear(update, seed)
    start_sq = np.sum((p.start - p.balance) ** 2)
    for rounds in ROUNDS:
        bound = kb.coefficient_bound(p.rho, update, rounds, p.samples, p.dim, p.kappa, start_sq, SIGMA)
        assert p.expected_distance(rounds) <= bound
    for truth in p.truths:
        gap = kb.heterogeneity_gap(p.signal, p.x @ truth)
        assert np.linalg.norm(p.balance - truth) <= kb.balance_bound(gap, p.rho, p.kappa)
    assert kb.balance_bound(1.0, 0.0, 2.0) == math.inf
    assert kb.coefficient_bound(0.0, update, 1, 50, 5, 1.0, 1.0, 1.0) == math.inf


@every_update
def test_theorem_11_covers_the_exact_prediction_error(update):
    p = Linear(update)
    model = p.truths.mean(0)
    gap, start_sq = kb.heterogeneity_gap(p.signal, p.x @ model), np.sum((p.start - model) ** 2)
    for rounds in ROUNDS:
        mean = p.x @ (op.theta_at(p.flow, p.signal, rounds, p.start) - model)
        response = p.x @ op.theta_at(p.flow, np.eye(50), rounds)
        error = (mean @ mean + SIGMA**2 * (response**2).sum()) / 50
        args = (p.rho, p.dim, update, rounds, 50, p.kappa, start_sq, SIGMA, gap)
        assert error <= kb.finite_rank_bound(*args)
    assert kb.finite_rank_bound(*args) == pytest.approx(3 * p.kappa * (SIGMA**2 * 5 / 50 + gap), rel=1e-6)


def test_corollary_13_is_theorem_12_at_half_the_smallest_moment():
    update = op.fedavg(0.1, 4)
    corollary = kb.random_design_bound(0.6, update, 30, 1000, 10, 1.3, 2.0, 0.5)
    contraction = (1 - 4 * 0.1 * 0.6 / (2 * 1.3)) ** 60
    assert corollary == pytest.approx(contraction * 2.0 + 0.25 * 2 * 1.3 * 10 / (1000 * 0.6))
    assert kb.moment_balance_bound(0.5, 4.0, 3.0) == 3.0


def test_corollary_14_covers_clients_in_random_subspaces():
    rng = np.random.default_rng(0)
    clients, dim, rank, rows = 60, 8, 3, 30
    update = op.fedprox(0.1)
    xs, spectra = [], []
    for _ in range(clients):
        basis = np.linalg.qr(rng.standard_normal((dim, rank)))[0]
        factor = rng.standard_normal((rows, rank))
        spectra.append(np.linalg.eigvalsh(factor.T @ factor / rows))
        xs.append(math.sqrt(dim / rank) * factor @ basis.T)
    alpha, beta = np.min(spectra), np.max(spectra)
    truths = 0.2 * rng.standard_normal((clients, dim))
    flow = op.theta_flow(xs, update)
    kappa, total = op.kappa_p(flow.gamma, update), clients * rows
    assert total >= kb.subspace_samples(rows / rank, dim, constant=5.0)
    assert np.linalg.eigvalsh(sum(x.T @ x for x in xs) / total)[0] >= alpha / 2
    spread = max(np.linalg.norm(a - b) for a in truths for b in truths)
    bound = kb.subspace_balance_bound(spread, kappa, alpha, beta, rows / rank, clients, dim, total)
    balance = op.balancing_model(flow, xs, truths)
    assert max(np.linalg.norm(balance - truth) for truth in truths) <= bound


def test_critical_radius_solves_its_equation_and_mirrors_the_stopping_time():
    eigenvalues, samples, sigma = np.arange(1, 5001) ** -2.0, 300, 0.7
    radius = kb.critical_radius(eigenvalues, samples, sigma)
    assert ks.rademacher(eigenvalues, radius, samples) == pytest.approx(radius**2 / (math.sqrt(2 * math.e) * sigma))
    update = op.fedavg(1e-4)
    stop = ks.stopping_time(eigenvalues, samples, update, sigma)
    assert 1 / math.sqrt(update.eta * stop) == pytest.approx(radius, rel=1e-2)
    assert kb.critical_radius(eigenvalues, samples, 0.0) == 0.0
    huge = kb.critical_radius(np.array([1e-6]), 5, 100.0)
    assert ks.rademacher(np.array([1e-6]), huge, 5) == pytest.approx(huge**2 / (math.sqrt(2 * math.e) * 100))


def test_rates_follow_from_the_critical_radius():
    """Corollaries 23 and 24: radius^2 scales as sigma^2 r/N and as (sigma^2/N)^(2 beta/(2 beta + 1))."""
    flat = np.ones(7)
    radius = kb.critical_radius(flat, 10_000, 0.5)
    assert radius**2 == pytest.approx(2 * math.e * kb.finite_rank_rate(7, 10_000, 0.5))
    decaying = np.arange(1, 200_001) ** -2.0
    one, two = (kb.critical_radius(decaying, n, 0.5) ** 2 for n in (10_000, 80_000))
    ratio = kb.polynomial_decay_rate(1.0, 10_000, 0.5) / kb.polynomial_decay_rate(1.0, 80_000, 0.5)
    assert ratio == pytest.approx(4)
    assert one / two == pytest.approx(ratio, rel=0.03)
    assert kb.new_rows_bound(radius, 2.0, 3.0, 0.1) == pytest.approx(2 * (radius**2 * 4 + 0.1))
