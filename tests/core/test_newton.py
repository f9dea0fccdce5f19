"""Newton's method and conjugate gradients on several problems at once, against closed forms and scipy."""

import numpy as np
import torch
from scipy.optimize import minimize

from mooring.core.newton import conjugate_gradient, damped_newton

RNG = np.random.default_rng(3)


def tensor(x):
    return torch.as_tensor(x, dtype=torch.float64)


def positive(c, d, least=0.1):
    root = RNG.normal(size=(c, d, d))
    return tensor(root @ root.transpose(0, 2, 1) + least * np.eye(d))


def test_a_quadratic_takes_one_step_and_a_closed_form():
    a, b = positive(3, 4), tensor(RNG.normal(size=(3, 4)))
    calls = []

    def direction(w, g):
        calls.append(1)
        return torch.linalg.solve(a, g)

    def value(w):
        return 0.5 * torch.einsum("ci,cij,cj->c", w, a, w) - (b * w).sum(1)

    def grad(w):
        return torch.einsum("cij,cj->ci", a, w) - b

    found = damped_newton(value, grad, direction, torch.zeros(3, 4, dtype=torch.float64))
    torch.testing.assert_close(found, torch.linalg.solve(a, b), rtol=1e-10, atol=1e-12)
    assert len(calls) == 2  # the step, and the one that polishes


def sums(w, t, k):
    """sum_j log(1 + exp(-t_j k_j'w)) + |w|^2/20, its gradient and its Hessian, for C clients."""
    z = torch.einsum("cnd,cd->cn", k, w) * t
    s = torch.sigmoid(-z)
    value = torch.nn.functional.softplus(-z).sum(1) + 0.05 * (w**2).sum(1)
    grad = -torch.einsum("cn,cnd->cd", s * t, k) + 0.1 * w
    bend = torch.einsum("cn,cnd,cne->cde", s * (1 - s), k, k) + 0.1 * torch.eye(w.shape[1], dtype=w.dtype)
    return value, grad, bend


def test_each_problem_ends_at_scipys_minimum_from_a_start_far_away():
    c, n, d = 4, 12, 3
    k, t = tensor(RNG.normal(size=(c, n, d))), tensor(RNG.choice([-1.0, 1.0], size=(c, n)))
    far = tensor(RNG.normal(size=(c, d)) * 60)  # full steps overshoot from here: the search must shorten them
    found = damped_newton(
        lambda w: sums(w, t, k)[0],
        lambda w: sums(w, t, k)[1],
        lambda w, g: torch.linalg.solve(sums(w, t, k)[2], g),
        far,
    )
    assert bool((sums(found, t, k)[1].norm(dim=1) < 1e-10).all())
    for i in range(c):

        def one(flat, i=i):
            value, grad, _ = sums(tensor(flat)[None], t[i : i + 1], k[i : i + 1])
            return float(value), grad[0].numpy()

        expected = minimize(one, np.zeros(d), jac=True, method="BFGS", options={"gtol": 1e-10}).x
        np.testing.assert_allclose(found[i].numpy(), expected, rtol=1e-6, atol=1e-7)
        alone = damped_newton(
            lambda w, i=i: sums(w, t[i : i + 1], k[i : i + 1])[0],
            lambda w, i=i: sums(w, t[i : i + 1], k[i : i + 1])[1],
            lambda w, g, i=i: torch.linalg.solve(sums(w, t[i : i + 1], k[i : i + 1])[2], g),
            far[i : i + 1],
        )
        torch.testing.assert_close(alone, found[i : i + 1], rtol=1e-9, atol=1e-11)


def test_a_direction_uphill_is_replaced_by_the_gradient():
    """The descent goes on where a direction is not one; it is slow, so a loose goal is what it must meet."""
    a = tensor([[[2.0, 0.0], [0.0, 1.0]]])
    b = tensor([[1.0, -1.0]])
    found = damped_newton(
        lambda w: 0.5 * torch.einsum("ci,cij,cj->c", w, a, w) - (b * w).sum(1),
        lambda w: torch.einsum("cij,cj->ci", a, w) - b,
        lambda w, g: -g,
        tensor([[5.0, 5.0]]),
        tol=1e-6,
    )
    torch.testing.assert_close(found, tensor([[0.5, -1.0]]), rtol=0, atol=1e-4)


def test_conjugate_gradients_solve_in_as_many_steps_as_there_are_dimensions():
    a, b = positive(3, 5, least=1.0), tensor(RNG.normal(size=(3, 5)))
    b[1] = 0

    def product(q):
        return torch.einsum("cij,cj->ci", a, q)

    exact = torch.linalg.solve(a, b)
    torch.testing.assert_close(conjugate_gradient(product, b, tol=1e-12, most=10), exact, rtol=1e-8, atol=1e-9)
    loose = conjugate_gradient(product, b, tol=0.3, most=50)
    residual = (product(loose) - b).norm(dim=1)
    assert bool((residual <= 0.3 * b.norm(dim=1) + 1e-15).all())
    assert float((loose - exact).norm()) > 1e-3  # it rested as soon as it might
    assert torch.equal(loose[1], torch.zeros(5, dtype=torch.float64))
    own = conjugate_gradient(product, b, tol=tensor([1e-12, 1e-12, 0.3]), most=50)
    torch.testing.assert_close(own[0], exact[0], rtol=1e-8, atol=1e-9)
    assert float((own[2] - exact[2]).norm()) > 1e-3
