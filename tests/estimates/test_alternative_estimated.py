"""The theorem of the alternative in use: crossing where it should, and decided right from estimated heterogeneity.

Linear regression with exact minimisers; the average excess risk of one common model and of everyone's own fit.
"""

import numpy as np
import pytest

from mooring.estimates.client_summaries import compute_linear_stats
from mooring.estimates.constants import estimate_constants
from mooring.estimates.heterogeneity import estimate_radius
from mooring.tasks.linear import Linear
from mooring.theory.alternative import crossing_radius
from tests.support.linear_federation import LinearFederation

CLIENTS, ROWS, DIM, NOISE = 30, 60, 5, 1.0
RADII = np.array([0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.6, 1.0, 2.0])


def draw(r, seed):
    """A federation whose realised R is about r, and the excess risks of the global model and of training alone."""
    made = LinearFederation(clients=CLIENTS, samples=ROWS, dim=DIM, spread=r / DIM**0.5, noise=NOISE).make(seed)
    task = Linear(DIM, intercept=False)
    alone = task.solve(made.train.full(task))
    common = task.solve(made.train.pooled(made.weights())).expand(CLIENTS, -1)
    p = made.weights()
    return made, *(float((p * made.truth.excess_risk(v)).sum()) for v in (common, alone))


@pytest.fixture(scope="module")
def draws():
    return {r: [draw(r, seed) for seed in range(20)] for r in RADII}


def crossing(draws):
    """The R at which both risks are equal, between the grid's points on a logarithmic scale."""
    gap = np.array([np.mean([np.log(common / alone) for _, common, alone in draws[r]]) for r in RADII])
    assert gap[0] < 0 < gap[-1] and np.all(np.diff(gap) > 0)
    return float(np.exp(np.interp(0, gap, np.log(RADII))))


def test_common_and_alone_cross_within_a_factor_of_three(draws):
    """noise/(mu sqrt n), with a record's gradient noise sigma sqrt(d) and mu = 1 for standard normal rows."""
    expected = float(crossing_radius(1.0, NOISE * DIM**0.5, ROWS))
    assert expected / 3 <= crossing(draws) <= 3 * expected


def test_the_estimated_radius_picks_the_better_of_the_two(draws):
    border = crossing(draws)
    right = []
    for r in RADII[(border / 2 > RADII) | (2 * border < RADII)]:
        for made, common, alone in draws[r]:
            stats = compute_linear_stats(made.train)
            known = estimate_constants(stats)
            mu = float(np.mean(np.linalg.eigvalsh(stats.gram.numpy())))  # typical: a single client's is noisy
            picks_common = estimate_radius(stats).value <= crossing_radius(mu, known.noise.value, ROWS)
            right.append(picks_common == (common < alone))
    assert len(right) >= 80 and np.mean(right) >= 0.9
