import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooring.core.errors import RequestError
from mooring.theory import kernel_operator as op

UPDATES = [op.fedavg(0.1), op.fedavg(0.1, 2), op.fedavg(0.1, 7), op.fedprox(0.1), op.fedprox(3.0)]
IDS = ["gd", "fedavg2", "fedavg7", "fedprox", "fedprox-long"]
SIZES = [3, 8, 5]
every_update = pytest.mark.parametrize("update", UPDATES, ids=IDS)


def problem(dim=4, sizes=SIZES, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    xs = [scale * rng.standard_normal((n, dim)) for n in sizes]
    return xs, rng.standard_normal(sum(sizes)), rng.standard_normal(dim)


def naive_p(x, update):
    """Eq. 12, power by power."""
    k = x @ x.T / len(x)
    if update.prox:
        return np.linalg.inv(np.eye(len(x)) + update.eta * k)
    return sum(np.linalg.matrix_power(np.eye(len(x)) - update.eta * k, tau) for tau in range(update.steps))


def naive_round(theta, xs, y, update):
    """FedAvg's loop of gradient steps, or FedProx's normal equations, then the average by sizes."""
    total, new, first = len(y), 0.0, 0
    for x in xs:
        yi, local, n = y[first : first + len(x)], theta, len(x)
        first += n
        if update.prox:
            local = np.linalg.solve(x.T @ x / n + np.eye(x.shape[1]) / update.eta, x.T @ yi / n + theta / update.eta)
        else:
            for _ in range(update.steps):
                local = local - update.eta * x.T @ (x @ local - yi) / n
        new = new + n / total * local
    return new


@settings(deadline=None)
@given(st.floats(0, 1.9), st.integers(0, 40))
def test_geometric_sum_equals_its_terms(x, terms):
    assert op.geometric_sum(x, terms) == pytest.approx(sum((1 - x) ** k for k in range(terms)), rel=1e-9, abs=1e-12)


def test_geometric_sum_is_exact_for_tiny_arguments():
    assert op.geometric_sum(1e-14, 10**6) == pytest.approx(10**6 - 1e-14 * 10**6 * (10**6 - 1) / 2, rel=1e-12)


@every_update
def test_blocks_of_p_are_the_sums_of_equation_12(update):
    xs, _, _ = problem()
    x = np.concatenate(xs)
    flow = op.kernel_flow(x @ x.T, SIZES, update)
    expected = np.zeros((16, 16))
    for end, n, xi in zip(np.cumsum(SIZES), SIZES, xs):
        expected[end - n : end, end - n : end] = naive_p(xi, update)
    np.testing.assert_allclose(flow.p, expected, atol=1e-12)


@every_update
def test_lemma_2_and_proposition_3(update):
    """The operator built from the clients' own operators acts as I - eta K_x P on predictions."""
    xs, y, theta = problem()
    x, total, eye = np.concatenate(xs), 16, np.eye(4)
    moments = [xi.T @ xi / len(xi) for xi in xs]
    if update.prox:
        parts = [np.linalg.inv(eye + update.eta * h) for h in moments]
    else:
        parts = [np.linalg.matrix_power(eye - update.eta * h, update.steps) for h in moments]
    operator = sum(n / total * part for n, part in zip(SIZES, parts))
    flow, kernel = op.theta_flow(xs, update), op.kernel_flow(x @ x.T, SIZES, update)
    psi = update.eta / total * kernel.p @ x  # rows: coefficients of Psi = (eta/N) P k_x
    np.testing.assert_allclose(operator, eye - flow.matrix, atol=1e-12)
    np.testing.assert_allclose(psi.T, flow.drive, atol=1e-12)
    np.testing.assert_allclose(psi.T @ (x @ theta), theta - operator @ theta, atol=1e-12)
    round_matrix = np.eye(total) - update.eta * x @ x.T / total @ kernel.p
    np.testing.assert_allclose(x @ operator @ theta, round_matrix @ (x @ theta), atol=1e-12)
    np.testing.assert_allclose(x @ naive_round(theta, xs, y, update), round_matrix @ (x @ theta - y) + y, atol=1e-12)


@every_update
@pytest.mark.parametrize("rounds", [0, 1, 2, 9])
def test_any_round_at_once_equals_the_rounds_one_by_one(update, rounds):
    xs, y, start = problem()
    x, theta = np.concatenate(xs), start
    for _ in range(rounds):
        theta = naive_round(theta, xs, y, update)
    np.testing.assert_allclose(op.theta_at(op.theta_flow(xs, update), y, rounds, start), theta, atol=1e-11)
    kernel = op.kernel_flow(x @ x.T, SIZES, update)
    np.testing.assert_allclose(op.predictions(kernel, y, rounds, x @ start), x @ theta, atol=1e-10)
    moved = x.T @ op.coefficients(kernel, y, rounds, x @ start)
    np.testing.assert_allclose(start + moved, theta, atol=1e-10)


@every_update
def test_the_limit_point_is_the_iterate_after_a_million_rounds_and_a_fixed_point(update):
    xs, y, start = problem()
    flow = op.theta_flow(xs, update)
    limit = op.limit_point(flow, y)
    np.testing.assert_allclose(op.theta_at(flow, y, 10**6, start), limit, atol=1e-9)
    np.testing.assert_allclose(naive_round(limit, xs, y, update), limit, atol=1e-12)
    ps = [naive_p(x, update) for x in xs]
    ys = np.split(y, np.cumsum(SIZES)[:-1])
    left = sum(x.T @ p @ x for x, p in zip(xs, ps))
    np.testing.assert_allclose(
        limit, np.linalg.solve(left, sum(x.T @ p @ b for x, p, b in zip(xs, ps, ys))), atol=1e-11
    )


def test_one_local_step_reaches_least_squares_and_more_do_not():
    xs, y, _ = problem()
    ols = np.linalg.lstsq(np.concatenate(xs), y, rcond=None)[0]
    np.testing.assert_allclose(op.limit_point(op.theta_flow(xs, op.fedavg(0.1)), y), ols, atol=1e-11)
    many = op.limit_point(op.theta_flow(xs, op.fedavg(0.1, 7)), y)
    assert np.linalg.norm(op.risk_gradient(xs, y, ols)) < 1e-12 < np.linalg.norm(op.risk_gradient(xs, y, many))


@every_update
def test_in_the_singular_case_the_limit_keeps_what_the_data_do_not_see(update):
    xs, y, start = problem(dim=30, scale=0.5)
    flow = op.theta_flow(xs, update)
    x = np.concatenate(xs)
    unseen = np.eye(30) - np.linalg.pinv(x) @ x
    for begin, expected in [(None, np.zeros(30)), (start, unseen @ start)]:
        limit = op.limit_point(flow, y, begin)
        np.testing.assert_allclose(unseen @ limit, expected, atol=1e-10)
        np.testing.assert_allclose(x @ limit, y, atol=1e-9)  # Remark 6: K_x positive definite, no training error


@every_update
@pytest.mark.parametrize("seed", range(5))
def test_eigenvalues_lie_in_the_unit_interval_and_in_the_sandwich(update, seed):
    xs, _, _ = problem(dim=6, sizes=[2, 9, 4, 1], seed=seed, scale=0.7)
    x = np.concatenate(xs)
    flow = op.kernel_flow(x @ x.T, [2, 9, 4, 1], update)
    pooled = np.maximum(np.linalg.eigvalsh(x @ x.T / 16)[::-1], 0)
    direct = np.sort(np.linalg.eigvals(x @ x.T / 16 @ flow.p).real)[::-1]
    np.testing.assert_allclose(flow.eigenvalues, direct, atol=1e-10)
    assert np.all((update.eta * flow.eigenvalues >= 0) & (update.eta * flow.eigenvalues <= 1 + 1e-12))
    low, high = op.eigenvalue_sandwich(pooled, flow.gamma, update)
    assert np.all((low - 1e-10 <= flow.eigenvalues) & (flow.eigenvalues <= high + 1e-10))
    assert np.linalg.cond(flow.p) <= op.kappa_p(flow.gamma, update) * (1 + 1e-9)
    assert flow.gamma == pytest.approx(op.gamma_k([xi @ xi.T / len(xi) for xi in xs], update.eta))
    assert flow.gamma == pytest.approx(op.theta_flow(xs, update).gamma)


def test_kappa_has_its_limits():
    assert op.kappa_p(0.5, op.fedavg(0.1)) == pytest.approx(1)
    assert op.kappa_p(0.0, op.fedavg(0.1, 10)) == 1
    assert op.kappa_p(0.5, op.fedavg(0.1, 3)) == pytest.approx(0.5 * 3 / (1 - 0.5**3))
    assert op.kappa_p(0.5, op.fedprox(0.1)) == 1.5


def test_too_long_a_step_is_refused_for_fedavg_only():
    xs, _, _ = problem()
    with pytest.raises(RequestError, match="below 1"):
        op.theta_flow(xs, op.fedavg(5.0))
    with pytest.raises(RequestError, match="below 1"):
        op.kernel_flow(np.concatenate(xs) @ np.concatenate(xs).T, SIZES, op.fedavg(5.0, 2))
    assert op.theta_flow(xs, op.fedprox(5.0)).gamma > 1
    with pytest.raises(RequestError, match="16 x 16"):
        op.kernel_flow(np.eye(5), SIZES, op.fedprox(1.0))


@every_update
def test_the_limit_is_unbiased_for_the_balancing_model(update):
    xs, _, _ = problem()
    rng = np.random.default_rng(5)
    truths = rng.standard_normal((3, 4))
    flow = op.theta_flow(xs, update)
    balance = op.balancing_model(flow, xs, truths)
    signal = np.concatenate([x @ w for x, w in zip(xs, truths)])
    limits = op.limit_point(flow, signal[:, None] + rng.standard_normal((16, 2000)))
    standard_error = limits.std(axis=1) / np.sqrt(2000)
    assert np.all(np.abs(limits.mean(axis=1) - balance) < 4 * standard_error)
    shared = op.balancing_model(flow, xs, np.tile(truths[0], (3, 1)))
    np.testing.assert_allclose(shared, truths[0], atol=1e-11)


@pytest.mark.parametrize("update", [op.fedavg(0.1, 3), op.fedprox(0.1)], ids=["fedavg", "fedprox"])
def test_a_minibatch_round_equals_its_loop(update):
    xs, y, theta = problem()
    x, yi = xs[1], y[3:11]
    local = theta
    for _ in range(update.steps):
        for first in (0, 3, 6):
            xb, yb = x[first : first + 3], yi[first : first + 3]
            if update.prox:
                left = xb.T @ xb / 8 + np.eye(4) / update.eta
                local = np.linalg.solve(left, xb.T @ yb / 8 + local / update.eta)
            else:
                local = local - update.eta * xb.T @ (xb @ local - yb) / 8
    matrix, offset = op.minibatch_map(x, yi, update, 3)
    np.testing.assert_allclose(matrix @ theta + offset, local, atol=1e-12)
    matrix, offset = op.minibatch_map(x, yi, update, 8)
    np.testing.assert_allclose(matrix @ theta + offset, naive_round(theta, [x], yi, update), atol=1e-12)


@pytest.fixture(scope="module")
def section_7_1():
    rng = np.random.default_rng(0)
    xs = [rng.standard_normal((500, 100)) for _ in range(25)]
    truth = rng.standard_normal(100)
    clean = np.concatenate(xs) @ truth
    return xs, truth, clean[:, None] + 0.5 * rng.standard_normal((12500, 20))


@pytest.mark.parametrize(
    ("update", "kappa", "error", "gradient"),
    [
        (op.fedavg(0.1), 1.0, 0.0467, 0.0),
        (op.fedavg(0.1, 5), 1.53, 0.0470, 4.1e-3),
        (op.fedavg(0.1, 10), 2.35, 0.0476, 8.0e-3),
        (op.fedprox(0.1), 1.21, 0.0468, 1.8e-3),
    ],
    ids=["s=1", "s=5", "s=10", "fedprox"],
)
def test_section_7_1_reaches_the_truth_without_reaching_stationarity(section_7_1, update, kappa, error, gradient):
    xs, truth, y = section_7_1
    flow = op.theta_flow(xs, update)
    assert flow.gamma == pytest.approx(0.214, rel=0.03)
    assert op.kappa_p(flow.gamma, update) == pytest.approx(kappa, rel=0.02)
    limits = op.limit_point(flow, y)
    errors = np.linalg.norm(limits - truth[:, None], axis=0)
    gradients = np.linalg.norm(op.risk_gradient(xs, y, limits), axis=0)
    assert abs(errors.mean() - error) < 3 * errors.std()  # one draw's value, among 20 draws
    assert errors.std() < 0.1 * error
    assert abs(gradients.mean() - gradient) < max(3 * gradients.std(), 1e-12)
    assert gradients.std() <= 0.1 * gradient + 1e-12


def test_section_7_1_more_local_steps_save_rounds_but_no_accuracy(section_7_1):
    xs, truth, y = section_7_1

    def rounds_to_limit(update):
        flow = op.theta_flow(xs, update)
        goal = 1.05 * np.linalg.norm(op.limit_point(flow, y[:, 0]) - truth)
        return next(t for t in range(1, 200) if np.linalg.norm(op.theta_at(flow, y[:, 0], t) - truth) <= goal)

    one = rounds_to_limit(op.fedavg(0.1))
    assert 40 < one < 90
    assert rounds_to_limit(op.fedavg(0.1, 5)) == pytest.approx(one / 5, abs=2)
    assert rounds_to_limit(op.fedavg(0.1, 10)) == pytest.approx(one / 10, abs=2)
    assert one <= rounds_to_limit(op.fedprox(0.1)) < 1.2 * one


def test_section_7_1_minibatches_move_the_gradient_but_not_the_error(section_7_1):
    xs, truth, draws = section_7_1

    def minibatch_limit(update, y):
        maps = [op.minibatch_map(x, yi, update, 20) for x, yi in zip(xs, np.split(y, 25))]
        matrix, offset = np.mean([m for m, _ in maps], axis=0), np.mean([c for _, c in maps], axis=0)
        return np.linalg.solve(np.eye(100) - matrix, offset)

    gradients = {}
    for update in (op.fedavg(0.1), op.fedprox(0.1)):
        limits = [(y, minibatch_limit(update, y)) for y in draws.T[:2]]
        gradients[update.prox] = np.mean([np.linalg.norm(op.risk_gradient(xs, y, w)) for y, w in limits])
        for y, limit in limits[:1]:
            whole = op.limit_point(op.theta_flow(xs, update), y)
            assert np.linalg.norm(limit - truth) == pytest.approx(np.linalg.norm(whole - truth), rel=0.02)
    assert gradients[False] == pytest.approx(2.1e-3, rel=0.2)
    assert gradients[True] == pytest.approx(gradients[False], rel=0.05)


@pytest.mark.parametrize(
    ("update", "mse"),
    [(op.fedavg(0.1), 0.0142), (op.fedavg(0.1, 10), 0.0166), (op.fedprox(0.1), 0.0156)],
    ids=["s=1", "s=10", "fedprox"],
)
def test_section_7_4_chebyshev_error_in_expectation(update, mse):
    grid = -1 + np.arange(200) / 100
    xs = [np.vander(part, 6, increasing=True) for part in np.split(grid, 20)]
    flow = op.theta_flow(xs, update)
    moments = np.array([[(1 + (-1) ** (a + b)) / (a + b + 1) for a in range(6)] for b in range(6)])
    spread = op.limit_point(flow, 0.5 * np.eye(200))  # the limit's response to each row's noise
    assert np.trace(moments @ spread @ spread.T) == pytest.approx(mse, rel=0.08)
    truth = np.array([0, 6, 0, -32, 0, 32.0])
    np.testing.assert_allclose(op.balancing_model(flow, xs, np.tile(truth, (20, 1))), truth, atol=1e-8)
