import numpy as np
import patsy
import pytest
import torch
from scipy.interpolate import CubicSpline

from mooring.shapes.splines import KNOT_LEVELS, choose_knot_count, place_knots, spline_basis

RNG = np.random.default_rng(0)
KNOTS = {3: (-1.3, 0.1, 1.2), 4: (-1.5, -0.4, 0.5, 1.7), 6: (-1.6, -0.7, -0.2, 0.2, 0.8, 3.0)}


def count(x):
    return np.unique(x, return_counts=True)


@pytest.mark.parametrize("knots", KNOTS.values())
def test_the_columns_span_the_natural_splines_of_patsy(knots):
    x = np.linspace(knots[0], knots[-1], 200)
    ours = np.column_stack([np.ones_like(x), x, spline_basis(torch.from_numpy(x), knots)])
    bounds = {"lower_bound": knots[0], "upper_bound": knots[-1]}
    theirs = np.asarray(patsy.cr(x, knots=knots[1:-1], **bounds))
    assert ours.shape[1] == theirs.shape[1] == len(knots)
    for a, b in ((ours, theirs), (theirs, ours)):
        np.testing.assert_allclose(a @ np.linalg.lstsq(a, b, rcond=None)[0], b, atol=1e-9)


@pytest.mark.parametrize("knots", KNOTS.values())
def test_each_column_is_the_natural_spline_of_scipy_through_its_values_at_the_knots(knots):
    x = np.linspace(knots[0], knots[-1], 101)
    at_knots = spline_basis(torch.tensor(knots, dtype=torch.float64), knots).numpy()
    theirs = CubicSpline(knots, at_knots, bc_type="natural")(x)
    np.testing.assert_allclose(spline_basis(torch.from_numpy(x), knots), theirs, atol=1e-12)


@pytest.mark.parametrize("knots", KNOTS.values())
def test_columns_are_orthonormal_at_the_knots_and_linear_outside(knots):
    t = torch.tensor(knots, dtype=torch.float64)
    basis = spline_basis(t, knots)
    np.testing.assert_allclose(basis.T @ basis, np.eye(len(knots) - 2), atol=1e-10)
    np.testing.assert_allclose(basis.T @ torch.stack([torch.ones_like(t), t], 1), 0, atol=1e-10)
    for far in (torch.arange(10.0).double() - 60, torch.arange(10.0).double() + 50):
        values = spline_basis(far, knots)
        np.testing.assert_allclose(values.diff(dim=0).diff(dim=0), 0, atol=1e-9)


def test_columns_get_rougher_and_have_one_bend_more_each():
    x = torch.linspace(-1.6, 3.0, 2001, dtype=torch.float64)
    basis = spline_basis(x, KNOTS[6])
    roughness = (basis.diff(dim=0).diff(dim=0) ** 2).sum(0)
    assert (roughness.diff() > 0).all()
    signs = torch.sign(basis)
    assert [(int((signs[1:, j] * signs[:-1, j] < 0).sum())) for j in range(4)] == [2, 3, 4, 5]


def test_knots_are_merged_where_rows_are_at_one_value():
    x = np.concatenate([np.zeros(700), RNG.exponential(size=300)])
    knots = place_knots(*count(x), 6)
    assert len(knots) >= 3 and 0 <= knots[0] < knots[1] and knots[-1] > 1
    assert place_knots(*count(np.concatenate([np.zeros(999), [1.0]])), 6) == ()


def test_knots_are_at_the_quantiles_of_the_rows():
    x = RNG.standard_normal(5000)
    np.testing.assert_allclose(place_knots(*count(x), 6), np.quantile(x, KNOT_LEVELS[6]), atol=0.01)
    assert len(place_knots(*count(x), 4)) == 4


@pytest.mark.parametrize("x", [np.zeros(50), np.arange(50) % 2, np.zeros(0)])
def test_columns_of_few_values_get_no_knots(x):
    assert place_knots(*count(x), 3) == ()


def test_more_rows_give_more_knots_and_few_values_none():
    chosen = [choose_knot_count(n, 10**6) for n in (10, 20, 50, 100, 500, 10**6)]
    assert chosen == [0, 3, 4, 5, 6, 6]
    assert choose_knot_count(10**6, 6) == 3 and choose_knot_count(10**6, 5) == 0


def test_shapes_dtypes_and_gradients():
    x = torch.zeros(2, 5, 3, requires_grad=True)
    basis = spline_basis(x, KNOTS[4])
    assert basis.shape == (2, 5, 3, 2) and basis.dtype == torch.float32
    basis.sum().backward()
    step = torch.tensor([-1e-6, 1e-6], dtype=torch.float64)
    slope = spline_basis(step, KNOTS[4]).sum(1).diff() / 2e-6
    np.testing.assert_allclose(x.grad.ravel(), float(slope) * np.ones(30), rtol=1e-5)
