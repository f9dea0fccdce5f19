import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import Matern
from sklearn.metrics import pairwise

from mooring.core.errors import RequestError
from mooring.tasks import kernel_functions
from mooring.tasks.kernel_functions import KERNELS, gram


def points(n, q, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((n, q)))


X, Z = points(30, 3), points(40, 3, seed=1)
REFERENCES = [
    ("linear", {}, lambda x, z: pairwise.linear_kernel(x, z)),
    ("polynomial", {"degree": 3}, lambda x, z: pairwise.polynomial_kernel(x, z, degree=3, gamma=1, coef0=1)),
    ("rbf", {"bandwidth": 1.7}, lambda x, z: pairwise.rbf_kernel(x, z, gamma=1 / (2 * 1.7**2))),
    ("laplace", {"bandwidth": 0.6}, lambda x, z: pairwise.laplacian_kernel(x, z, gamma=1 / 0.6)),
]


@pytest.mark.parametrize(("name", "settings", "reference"), REFERENCES, ids=lambda v: v if isinstance(v, str) else "")
def test_equals_the_reference_library(name, settings, reference):
    np.testing.assert_allclose(gram(name, X, Z, **settings), reference(X.numpy(), Z.numpy()), rtol=1e-12, atol=1e-12)


def test_in_one_dimension_laplace_is_the_matern_kernel_of_order_one_half():
    x = points(20, 1)
    np.testing.assert_allclose(gram("laplace", x, bandwidth=0.7), Matern(0.7, nu=0.5)(x.numpy()), atol=1e-12)


def test_the_sobolev_kernel_is_the_minimum_on_the_half_line():
    x = torch.rand(20, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    np.testing.assert_allclose(gram("sobolev", x), np.minimum.outer(x[:, 0], x[:, 0]), atol=1e-15)


def test_the_sobolev_kernel_reproduces_the_inner_product_of_derivatives():
    """|f|_H^2 is the integral of f'^2 for f = sum_j a_j k(., x_j), which is piecewise linear, on both sides of 0."""
    x = torch.tensor([[-1.5], [-0.4], [0.3], [0.9], [2.0]], dtype=torch.float64)
    a = torch.tensor([1.0, -2.0, 0.5, 1.5, -0.7], dtype=torch.float64)
    knots = torch.cat([x, torch.zeros(1, 1, dtype=torch.float64)]).sort(0).values
    f = gram("sobolev", knots, x) @ a
    energy = (f.diff() ** 2 / knots[:, 0].diff()).sum()
    assert float(f[2]) == 0 and float(a @ gram("sobolev", x) @ a) == pytest.approx(float(energy))


def test_the_neural_tangent_kernel_is_the_gradient_product_of_a_wide_network():
    hidden = 200_000
    g = torch.Generator().manual_seed(0)
    x = points(4, 3)
    first = torch.randn(hidden, 3, generator=g, dtype=torch.float64, requires_grad=True)
    last = torch.randn(hidden, generator=g, dtype=torch.float64, requires_grad=True)

    def slope(row):
        """[hidden, 4]: the gradient by hidden unit, so that the kernel is a mean over units."""
        output = (2 / hidden) ** 0.5 * torch.relu(first @ row) @ last
        by_first, by_last = torch.autograd.grad(output, (first, last))
        return torch.cat([by_first, by_last[:, None]], 1)

    slopes = torch.stack([slope(row) for row in x])
    units = hidden * torch.einsum("ahk,bhk->hab", slopes, slopes)
    standard_error = units.std(0) / hidden**0.5
    expected = gram("ntk", x)
    assert bool(((units.mean(0) - expected).abs() <= 4 * standard_error).all())
    assert float(standard_error.max()) < 0.01 * float(expected.max())


def test_the_neural_tangent_kernel_where_rows_are_parallel_opposite_or_zero():
    x = torch.tensor([[3.0, 4.0], [-3.0, -4.0], [0.0, 0.0]], dtype=torch.float64)
    np.testing.assert_allclose(gram("ntk", x), [[50, 0, 0], [0, 50, 0], [0, 0, 0]], atol=1e-6)


@pytest.mark.parametrize("name", KERNELS)
def test_is_positive_semidefinite_symmetric_and_batched(name):
    k = gram(name, X)
    assert torch.equal(k, k.T) or float((k - k.T).abs().max()) < 1e-12
    assert float(torch.linalg.eigvalsh(k)[0]) > -1e-10 * float(k.diagonal().sum())
    cohort = torch.stack([X[:10], X[10:20]])
    np.testing.assert_allclose(gram(name, cohort, Z), torch.stack([gram(name, part, Z) for part in cohort]), atol=1e-12)


def test_near_points_keep_their_distance():
    x = torch.full((30, 2), 1000.0, dtype=torch.float64)
    z = x + 1e-5
    np.testing.assert_allclose(gram("rbf", x, z, bandwidth=1e-5), np.exp(-1), rtol=1e-5)


def test_a_function_is_a_kernel_and_settings_go_to_those_who_know_them():
    assert torch.equal(gram(lambda x, z: 2 * x @ z.mT, X, Z), 2 * gram("linear", X, Z))
    assert torch.equal(gram("linear", X, Z, bandwidth=3.0), gram("linear", X, Z))
    assert torch.equal(kernel_functions.find("rbf", bandwidth=2.0, degree=9)(X, Z), gram("rbf", X, Z, bandwidth=2.0))
    with pytest.raises(RequestError, match="known: linear, polynomial, rbf"):
        gram("gauss", X)
