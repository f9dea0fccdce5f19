"""The interior point on kinked losses: conditions of optimality, units, padding."""

import pytest
import torch

from mooring.core.nonsmooth import minimize_nonsmooth

CLIENTS, ROWS, D = 4, 30, 3
EPS = torch.finfo(torch.float64).eps


def problem(scale=1.0, seed=0):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(CLIENTS, ROWS, D, dtype=torch.float64, generator=rng)
    y = scale * torch.randn(CLIENTS, ROWS, dtype=torch.float64, generator=rng)
    return x / ROWS, y / ROWS


def solve(x, y, quad, linear, real, low=-0.3, high=0.7):
    def residuals(v):
        return y - torch.einsum("cbi,ci->cb", x, v), -x

    return minimize_nonsmooth(residuals, low, high, quad, linear, torch.zeros_like(linear), real)


@pytest.mark.parametrize("curvature", [1e-3, 1.0, 1e4])
def test_the_slope_is_balanced_by_weights_inside_the_box(curvature):
    """quad v + linear = X'a with a_j at its bound off the kinks and inside [low, high] on them, all up to rounding."""
    x, y = problem()
    quad, linear = torch.full((CLIENTS, D), curvature, dtype=torch.float64), torch.ones(CLIENTS, D, dtype=torch.float64)
    v = solve(x, y, quad, linear, torch.ones(CLIENTS, ROWS, dtype=torch.bool))
    for c in range(CLIENTS):
        r = y[c] - x[c] @ v[c]
        on = r.abs() < 64 * EPS * y[c].abs().max()
        fixed = 0.2 + 0.5 * torch.sign(r)
        rest = quad[c] * v[c] + linear[c] - x[c][~on].T @ fixed[~on]
        assert int(on.sum()) <= D
        if int(on.sum()):
            a = torch.linalg.lstsq(x[c][on].T, rest[:, None]).solution[:, 0]
            assert float(a.min()) >= -0.3 and float(a.max()) <= 0.7
            rest = rest - x[c][on].T @ a
        forces = float((quad[c] * v[c]).abs().max()) + 1 + 0.7 * float(x[c].abs().sum(0).max())
        torch.testing.assert_close(rest, torch.zeros_like(rest), rtol=0, atol=64 * EPS * forces)


@pytest.mark.parametrize("scale", [1e-8, 1e6])
def test_units_do_not_matter(scale):
    x, y = problem()
    real, quad = torch.ones(CLIENTS, ROWS, dtype=torch.bool), torch.full((CLIENTS, D), 0.1, dtype=torch.float64)
    one = solve(x, y, quad, torch.zeros_like(quad), real)
    scaled = solve(x, scale * y, quad / scale, torch.zeros_like(quad), real)
    torch.testing.assert_close(scaled / scale, one, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("curvature", [1e-5, 1e-2, 1.0])
def test_company_does_not_matter(curvature):
    """Alone, beside problems that take longer, and between rows of padding: eps forces / quad apart at most."""
    x, y = problem()
    y[1:] *= 1e6
    quad, linear = torch.full((CLIENTS, D), curvature, dtype=torch.float64), torch.ones(CLIENTS, D, dtype=torch.float64)
    linear = linear * 0.01
    together = solve(x, y, quad, linear, torch.ones(CLIENTS, ROWS, dtype=torch.bool))
    wide = torch.nn.functional.pad
    for c in range(CLIENTS):
        one = slice(c, c + 1)
        alone = solve(x[one], y[one], quad[one], linear[one], torch.ones(1, ROWS, dtype=torch.bool))
        real = wide(torch.ones(1, ROWS, dtype=torch.bool), (9, 50))
        padded = solve(wide(x[one], (0, 0, 9, 50)), wide(y[one], (9, 50)), quad[one], linear[one], real)
        forces = float((quad[c] * together[c]).abs().max()) + 0.01 + 0.7 * float(x[c].abs().sum(0).max())
        room = 64 * EPS * (forces / curvature + float(y[c].abs().max() / x[c].norm(dim=1).min()))
        assert float((alone[0] - together[c]).abs().max()) <= room
        assert float((padded[0] - together[c]).abs().max()) <= room


def test_padding_and_empty_problems():
    x, y = problem()
    real = torch.ones(CLIENTS, ROWS, dtype=torch.bool)
    real[0, 7:], real[1] = False, False
    x, y = x * real[..., None], y * real
    quad, linear = torch.full((CLIENTS, D), 0.1, dtype=torch.float64), torch.ones(CLIENTS, D, dtype=torch.float64)
    v = solve(x, y, quad, linear, real)
    short = solve(x[:1, :7], y[:1, :7], quad[:1], linear[:1], real[:1, :7])
    torch.testing.assert_close(v[:1], short, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(v[1], -linear[1] / quad[1])


def test_float32_gets_its_digits():
    x, y = problem()
    real, quad = torch.ones(CLIENTS, ROWS, dtype=torch.bool), torch.full((CLIENTS, D), 0.1, dtype=torch.float64)
    exact = solve(x, y, quad, torch.zeros_like(quad), real)
    rough = solve(x.float(), y.float(), quad.float(), torch.zeros_like(quad).float(), real)
    torch.testing.assert_close(rough, exact.float(), rtol=1e-2, atol=1e-2)
