import numpy as np
import pytest

from mooring.core.errors import RequestError
from mooring.theory import kernel_operator as op
from mooring.theory import kernel_rounds as kr
from mooring.theory.kernel_stopping import sigma_from_residuals


def client(n=8, d=3, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, d)), rng.standard_normal(n)


@pytest.mark.parametrize("update", [op.fedavg(0.1, 3), op.fedprox(0.7)], ids=["fedavg", "fedprox"])
def test_a_single_batch_is_the_full_round(update):
    x, y = client()
    flow = op.theta_flow([x], update)
    for batch in (8, 50):
        for per in kr.BATCH_LOSS_SCALES:
            matrix, push = kr.minibatch_round(x, y, update, batch, per)
            np.testing.assert_allclose(matrix, flow.matrix, atol=1e-12)
            np.testing.assert_allclose(push, flow.drive @ y, atol=1e-12)


@pytest.mark.parametrize("update", [op.fedavg(0.1, 3), op.fedprox(0.7)], ids=["fedavg", "fedprox"])
def test_without_rows_nothing_moves(update):
    matrix, push = kr.minibatch_round(np.zeros((0, 3)), np.zeros(0), update, 4, ridge=0.2)
    assert not matrix.any() and not push.any()


def test_rounds_by_squaring_equal_rounds_one_by_one():
    rng = np.random.default_rng(0)
    matrix, push, start = (
        0.2 * rng.standard_normal((4, 4)) + np.eye(4) / 2,
        rng.standard_normal(4),
        rng.standard_normal(4),
    )
    v = start
    for t in range(12):
        np.testing.assert_allclose(kr.propagate(matrix, push, t, start), v, atol=1e-12)
        v = v - matrix @ v + push
    np.testing.assert_allclose(kr.propagate(matrix, push, np.inf, start), np.linalg.solve(matrix, push), atol=1e-12)


def test_the_limit_keeps_what_no_row_sees():
    """5 rows, 9 coefficients, minibatches: the rounds' own limit."""
    x, y = client(n=5, d=9)
    matrix, push = kr.minibatch_round(x, y, op.fedavg(0.1, 2), 2)
    start = np.random.default_rng(4).standard_normal(9)
    limit = kr.propagate(matrix, push, np.inf, start)
    np.testing.assert_allclose(limit, kr.propagate(matrix, push, 10**5, start), atol=1e-8)
    unseen = np.eye(9) - np.linalg.pinv(x) @ x
    np.testing.assert_allclose(unseen @ limit, unseen @ start, atol=1e-9)


def test_rounds_that_grow_have_no_limit():
    with pytest.raises(RequestError, match="no limit"):
        kr.propagate(np.array([[2.5]]), np.ones(1), np.inf)


def test_a_newcomer_is_averaged_in_and_moves_the_limit():
    update = op.fedavg(0.1, 3)
    rows = [client(n, seed=n) for n in (6, 9, 4)]

    def limit(some):
        flows = [op.theta_flow([x], update) for x, _ in some]
        p = np.array([len(y) for _, y in some]) / sum(len(y) for _, y in some)
        matrix = sum(q * flow.matrix for q, flow in zip(p, flows))
        push = sum(q * flow.drive @ y for q, flow, (_, y) in zip(p, flows, some))
        return op.limit_point(kr.make_theta_flow(matrix, push, update), np.ones(1))

    for some in (rows, rows[:2]):
        direct = op.limit_point(op.theta_flow([x for x, _ in some], update), np.concatenate([y for _, y in some]))
        np.testing.assert_allclose(limit(some), direct, atol=1e-11)
    assert np.linalg.norm(limit(rows) - limit(rows[:2])) > 0.01


@pytest.mark.parametrize("n", [1, 5, 6, 40])
def test_residual_variance_is_that_of_one_client(n):
    x, y = client(n)
    assert kr.residual_variance(x, y) == pytest.approx(sigma_from_residuals([x @ x.T], [y]) ** 2)
    assert kr.residual_variance(x[:0], y[:0]) == 0
