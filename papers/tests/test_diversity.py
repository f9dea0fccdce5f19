from itertools import product
from math import inf, sqrt

import numpy as np
import pytest
from scipy.optimize import minimize

from mooring_papers.theory import diversity as theory

RNG = np.random.default_rng(10)


def random_truths():
    m, d = int(RNG.integers(2, 12)), int(RNG.integers(1, 6))
    return RNG.normal(size=(m, d)) * RNG.uniform(0, 3, (m, 1)), RNG.dirichlet(np.ones(m))


def test_radii_equal_loops_and_obey_the_chain():
    for _ in range(200):
        truths, p = random_truths()
        average = sum(w * t for w, t in zip(p, truths))
        gaps = [np.linalg.norm(t - average) for t in truths]
        rms, largest, gamma = theory.radius_rms(truths, p), theory.radius_max(truths, p), theory.pairwise_spread(truths)
        assert rms == pytest.approx(sqrt(sum(w * g**2 for w, g in zip(p, gaps))))
        assert largest == pytest.approx(max(gaps))
        assert gamma == pytest.approx(max(np.linalg.norm(a - b) for a, b in product(truths, truths)))
        assert rms <= largest * (1 + 1e-12)
        assert largest <= (1 - p.min()) * gamma * (1 + 1e-12)
        assert gamma <= 2 * largest * (1 + 1e-12)
    assert theory.pairwise_spread([[1.0, 2.0]]) == 0.0


def test_average_is_the_best_centre():
    truths, p = random_truths()
    found = minimize(lambda c: p @ np.sum((truths - c) ** 2, axis=1), np.zeros(truths.shape[1]), tol=1e-12)
    assert theory.radius_rms(truths, p) ** 2 == pytest.approx(found.fun, rel=1e-6)


def random_quadratics(m, d):
    root = RNG.normal(size=(m, d, d))
    return np.einsum("iab,icb->iac", root, root), RNG.normal(size=(m, d))


def test_minimiser_gaps():
    h, c = random_quadratics(5, 3)
    common = np.linalg.solve(h.sum(0), np.einsum("iab,ib->a", h, c))
    assert theory.minimizer_gaps(c, common) == pytest.approx([sum((v - common) ** 2) for v in c])


def test_gradient_diversity_against_a_grid_on_the_circle():
    """The maximum of a convex function over a disc lies on its rim: search the rim."""
    angle = np.linspace(0, 2 * np.pi, 20_000)
    rim = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    for radius in (0.0, 0.1, 1.0, 30.0):
        h, c = random_quadratics(4, 2)
        start = RNG.normal(size=2)
        w = start + radius * rim
        grads = np.einsum("iab,sib->sia", h, w[:, None] - c)
        searched = np.sum((grads.mean(1, keepdims=True) - grads) ** 2, axis=2).max(0)
        assert theory.gradient_diversity(h, c, radius, start) == pytest.approx(searched, rel=1e-6)


def test_gradient_diversity_special_cases():
    h, c = random_quadratics(6, 4)
    same = np.repeat(h[:1], 6, axis=0)
    grads = -np.einsum("iab,ib->ia", same, c)  # at 0; the differences do not depend on w
    expected = np.sum((grads.mean(0) - grads) ** 2, axis=1)
    assert theory.gradient_diversity(same, c, 5.0) == pytest.approx(expected)
    # no linear part: the top eigenvalue times r^2
    slopes = h.mean(0) - h
    expected = [np.linalg.norm(s, ord=2) ** 2 * 9.0 for s in slopes]
    assert theory.gradient_diversity(h, np.zeros((6, 4)), 3.0) == pytest.approx(expected)
    # hard case: the linear part is orthogonal to the top direction, A = diag(4, 1), g = (0, 1), r = 2
    hard = np.array([np.diag([5.0, 2.0]), np.diag([1.0, 0.0])])
    centers = np.array([[0.0, 1.0], [0.0, 0.0]])
    angle = np.linspace(0, 2 * np.pi, 200_001)
    w = 2 * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    grads = np.einsum("iab,sib->sia", hard, w[:, None] - centers)
    searched = np.sum((grads.mean(1, keepdims=True) - grads) ** 2, axis=2).max(0)
    assert theory.gradient_diversity(hard, centers, 2.0) == pytest.approx(searched, rel=1e-6)


def test_gradient_diversity_is_reached_and_never_exceeded_in_higher_dimension():
    h, c = random_quadratics(5, 6)
    bound = theory.gradient_diversity(h, c, 1.5)
    w = RNG.normal(size=(5000, 6))
    w *= 1.5 / np.linalg.norm(w, axis=1, keepdims=True)
    slope, offset = h.mean(0) - h[0], np.mean(np.einsum("iab,ib->ia", h, -c), axis=0) + h[0] @ c[0]
    for _ in range(100):  # climb: a convex function grows by jumping to the maximiser of its linearisation
        direction = (w @ slope.T + offset) @ slope
        w = 1.5 * direction / np.linalg.norm(direction, axis=1, keepdims=True)
    reached = np.sum((w @ slope.T + offset) ** 2, axis=1).max()
    assert 0.999 * bound[0] <= reached <= bound[0] * (1 + 1e-9)


def test_dissimilarity_of_equal_clients_is_one_and_zero():
    grads = np.repeat(RNG.normal(size=(7, 1, 3)), 5, axis=1)
    assert theory.smallest_b(grads) == pytest.approx(1.0)
    assert theory.smallest_h(grads, 1.0) == pytest.approx(0.0, abs=1e-7)


def test_dissimilarity_is_the_smallest_that_holds():
    grads = RNG.normal(size=(20, 4, 3)) + 1
    mean_square = [np.mean([g @ g for g in point]) for point in grads]
    square_mean = [point.mean(0) @ point.mean(0) for point in grads]
    for b in (0.0, 1.0, 2.0, 5.0):
        h = theory.smallest_h(grads, b)
        slack = [b**2 * t + h**2 - s for s, t in zip(mean_square, square_mean)]
        assert min(slack) >= -1e-9
        assert h == 0 or min(slack) <= 1e-9
    b = theory.smallest_b(grads)
    slack = [b**2 * t - s for s, t in zip(mean_square, square_mean)]
    assert min(slack) == pytest.approx(0.0, abs=1e-9)


def test_dissimilarity_at_a_stationary_point():
    grads = np.array([[[1.0, 0.0], [-1.0, 0.0]]])
    assert theory.smallest_b(grads) == inf
    assert theory.smallest_h(grads, 5.0) == pytest.approx(1.0)
    assert theory.smallest_b(np.zeros((1, 2, 2))) == 0.0


def test_dissimilarity_grows_with_the_dimension_for_single_records():
    """kernel, Section 2.1: one Gaussian record per client, no noise, one truth: B is of order sqrt(d)."""
    for dim in (10, 40, 160):
        x = RNG.normal(size=(20_000, dim))
        delta = np.ones(dim) / sqrt(dim)
        grads = (x * (x @ delta)[:, None])[None]
        assert 0.9 < theory.smallest_b(grads) / sqrt(dim) < 1.2


def test_disagreement_between_its_bounds():
    """Exact value by enumeration: max_u mean |x'u| = max over sign vectors of |mean s_j x_j|."""
    for n, d in ((8, 2), (11, 3), (9, 5)):
        x, radius = RNG.normal(size=(n, d)) + 0.5, 1.7
        signs = np.array(list(product((-1, 1), repeat=n)))
        exact = 2 * radius * np.linalg.norm(signs @ x / n, axis=1).max()
        lower = theory.disagreement_lower(x, radius)
        assert lower <= exact * (1 + 1e-12) <= theory.hypothesis_disagreement_upper(x, radius) * (1 + 1e-12)
        assert lower == pytest.approx(exact)
    assert theory.disagreement_lower(np.zeros((4, 2)), 1.0) == 0.0
    line = np.array([[1.0], [-3.0]])
    assert theory.disagreement_lower(line, 1.0) == pytest.approx(4.0)
    assert theory.hypothesis_disagreement_upper(line, 1.0) == pytest.approx(2 * sqrt(5))


def test_label_skew():
    assert theory.label_skew(np.eye(4) * 10) == pytest.approx([2 * (1 - 1 / 4)] * 4)
    assert theory.label_skew([[5, 15], [10, 30]]) == pytest.approx([0, 0])
    counts = RNG.integers(1, 50, (6, 3))
    shares = [row / row.sum() for row in counts]
    mean = sum(shares) / 6
    assert theory.label_skew(counts) == pytest.approx([np.abs(mean - s).sum() for s in shares])
