import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from mooring.algorithms.base import build
from mooring.core.cohort import Batch
from mooring.core.errors import RequestError
from mooring.data.clients import from_arrays
from mooring.tasks import catalog, kernel_regression
from mooring.tasks.kernel_functions import gram
from mooring.tasks.kernel_regression import KernelFeatures, KernelRegression
from mooring.tasks.linear import Linear
from tests.support.problems import parts, simulate


def rows(n, q, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((n, q)))


def error(lift, x):
    """Root mean square of phi(x)'phi(z) - k(x, z)."""
    return float(((lift(x) @ lift(x).T - lift.exact(x, x)) ** 2).mean().sqrt())


@pytest.mark.parametrize("kernel", kernel_regression.FOURIER)
def test_fourier_features_approach_their_kernel_at_the_root_rate(kernel):
    x = rows(40, 4)
    mean = {
        width: np.mean([error(KernelFeatures(4, kernel, width, seed=s), x) for s in range(20)]) for width in (64, 1024)
    }
    assert mean[64] / mean[1024] == pytest.approx(4, rel=0.15)  # sqrt(1024/64)
    assert mean[64] < 1 / math.sqrt(64)
    lift = KernelFeatures(4, kernel, 64)
    np.testing.assert_allclose((lift(x) ** 2).sum(1), 1, atol=1e-12)  # k(x, x), exactly


@pytest.mark.parametrize("kernel", kernel_regression.FOURIER)
def test_fourier_features_are_unbiased(kernel):
    x = rows(6, 2)
    draws = torch.stack([lift(x) @ lift(x).T for lift in (KernelFeatures(2, kernel, 50, seed=s) for s in range(400))])
    gap = (draws.mean(0) - KernelFeatures(2, kernel, 50).exact(x, x)).abs()
    assert bool((gap <= 4 * draws.std(0) / 20 + 1e-12).all())


def test_the_default_bandwidth_puts_typical_rows_at_one_over_e():
    for kernel in kernel_regression.FOURIER:
        for q in (2, 50):
            k = gram(KernelFeatures(q, kernel).exact, rows(60, q))
            assert float(k[~torch.eye(60, dtype=bool)].log().mean()) == pytest.approx(-1, abs=0.2)


@pytest.mark.parametrize("landmarks", kernel_regression.LANDMARKS)
def test_nystrom_is_exact_where_the_landmarks_span_the_kernel(landmarks):
    x = rows(15, 3)
    for kernel, width in (("linear", 8), ("polynomial", 12)):  # 3 and 10 dimensions
        lift = KernelFeatures(3, kernel, width, landmarks=landmarks)
        np.testing.assert_allclose(lift(x) @ lift(x).T, lift.exact(x, x), atol=1e-8)


@pytest.mark.parametrize("kernel", ["rbf", "laplace", "sobolev", "ntk", lambda x, z: torch.exp(x @ z.mT / 4)])
def test_nystrom_is_exact_at_its_landmarks_and_never_above_its_kernel(kernel):
    lift = KernelFeatures(2, kernel, 60, method="nystrom")
    z, _ = kernel_regression.draw_landmarks(lift)
    np.testing.assert_allclose(lift(z) @ lift(z).T, lift.exact(z, z), atol=1e-6)
    x = rows(20, 2, seed=5)
    left = lift.exact(x, x) - lift(x) @ lift(x).T
    assert float(torch.linalg.eigvalsh(left)[0]) > -1e-6
    assert float(left.diagonal().mean()) < 0.3 * float(lift.exact(x, x).diagonal().mean())


def test_everyone_with_the_seed_has_the_same_features_and_others_have_others():
    x = rows(5, 3)
    for method in ("fourier", "nystrom"):
        lift = KernelFeatures(3, "rbf", 20, method=method, seed=7)
        once = lift(x)
        kernel_regression.draw_frequencies.cache_clear()
        kernel_regression.draw_landmarks.cache_clear()
        assert torch.equal(once, KernelFeatures(3, "rbf", 20, method=method, seed=7)(x))
        assert not torch.allclose(once, replace(lift, seed=8)(x))
        assert lift(x.float()).dtype == torch.float32
    box, _ = kernel_regression.draw_landmarks(KernelFeatures(3, "ntk", 500, landmarks="box"))
    assert float(box.abs().max()) <= math.sqrt(3) and float(box.std()) == pytest.approx(1, abs=0.05)


def cohort(seed=0):
    rng = np.random.default_rng(seed)
    weight = torch.tensor([[0.25] * 4, [1 / 3] * 3 + [0.0]], dtype=torch.float64)
    return Batch(
        torch.from_numpy(rng.standard_normal((2, 4, 3))), torch.from_numpy(rng.standard_normal((2, 4))), weight
    )


@pytest.mark.parametrize("fields", [{}, {"kernel": "laplace", "intercept": False}, {"kernel": "ntk", "width": 7}])
def test_the_task_is_linear_regression_on_the_features(fields):
    task = KernelRegression(3, **{"width": 8, "ridge": 0.1} | fields)
    plain = Linear(task.width, intercept=task.intercept, ridge=0.1)
    batch = cohort()
    lifted = batch._replace(x=task.lift(batch.x))
    w = rows(2, task.dim, seed=1)
    for mine, theirs in (
        (task.predict(w, batch.x), plain.predict(w, lifted.x)),
        (task.loss(w, batch), plain.loss(w, lifted)),
        (task.grad(w, batch), plain.grad(w, lifted)),
        (task.grad(w, task.condense(batch)), plain.grad(w, lifted)),
        (task.loss(w, task.condense(batch)), plain.loss(w, lifted)),
        (task.solve(batch), plain.solve(lifted)),
        (task.prox(w, 0.3, batch), plain.prox(w, 0.3, lifted)),
        (task.hessian(w, batch), plain.hessian(w, lifted)),
        (task.risk(w, batch), plain.risk(w, lifted)),
        *zip(task.constants(batch), plain.constants(lifted)),
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10)


def test_little_memory_gives_the_same_numbers(monkeypatch):
    task, batch = KernelRegression(3, width=8, ridge=0.1), cohort()
    w = rows(2, 9, seed=1)
    before = task.predict(w, batch.x), task.solve(batch)
    monkeypatch.setattr(kernel_regression, "MAX_PADDED_BYTES", 1)
    torch.testing.assert_close((task.predict(w, batch.x), task.solve(batch)), before, rtol=1e-12, atol=1e-12)


def wavy_clients(m=6, n=40):
    rng = np.random.default_rng(0)
    xs = [rng.standard_normal((n, 1)) for _ in range(m)]
    ys = [np.sin(3 * x[:, 0]) + 0.1 * rng.standard_normal(n) for x in xs]
    return from_arrays(xs, ys, parts=[parts(n)] * m)


@pytest.mark.parametrize("name", ["local", "pooled", "fedavg", "fedprox", "fedprox_personal", "kernel_fedavg"])
@pytest.mark.parametrize("fields", [{}, {"kernel": "sobolev"}], ids=["rbf", "sobolev"])
def test_every_algorithm_fits_a_curve_that_no_line_fits(name, fields):
    clients = wavy_clients()
    task = KernelRegression(1, width=40, **{"bandwidth": 0.5, "ridge": 1e-3} | fields)

    _, models, _ = simulate(build(name, {}), task, clients, rounds=30)
    line = Linear(1).solve(clients.train.full(Linear(1)))  # every client its own
    test = clients.test.padded()
    assert float(task.risk(models, test).mean()) < 0.5 * float(Linear(1).risk(line, test).mean())


def test_the_catalog_knows_it():
    assert "kernel" in catalog.names()
    about = catalog.describe("kernel")
    assert about["exact"] and about["targets"] == ["regression"]
    task = catalog.build("kernel", "regression", 5, 0, {"kernel": "laplace", "width": 30, "seed": 3})
    assert (task.dim, task.lift.inputs, task.lift.scale) == (31, 5, 5.0)
    assert task.describe()["kernel"] == "laplace"
    with pytest.raises(RequestError, match="known: intercept"):
        catalog.build("kernel", "regression", 5, 0, {"gamma": 1.0})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kernel": "gauss"}, "known: linear"),
        ({"width": 7}, "must be even"),
        ({"width": 0}, "width must be a whole number"),
        ({"bandwidth": 0}, "bandwidth must be a number > 0"),
        ({"bandwidth": "wide"}, "bandwidth must be"),
        ({"kernel": "ntk", "method": "fourier"}, "use method = 'nystrom'"),
        ({"method": "magic"}, "method must be one of"),
        ({"landmarks": "rows"}, "landmarks must be one of"),
    ],
)
def test_wrong_settings_are_refused(fields, message):
    with pytest.raises(RequestError, match=message):
        KernelRegression(3, **fields)
