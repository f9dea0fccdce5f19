"""The rules behind "auto": the pull that a Bayesian would take, and the schedule that fields describe."""

import numpy as np
import pytest
import torch

from mooring.algorithms.base import build
from mooring.algorithms.settings import PULL_OF_NETWORKS, auto_lam, schedule
from mooring.core.cohort import Round
from mooring.data.clients import from_arrays
from mooring.estimates.facts import gather
from mooring.tasks.linear import Linear
from mooring.tasks.logistic import Logistic


def planted(m=300, n=60, d=3, spread=0.3, noise=0.7, scale=1.0, constant=False, seed=0):
    """Linear clients whose truths vary by `spread` around a common one; `constant`: a column that each client fixes."""
    rng = np.random.default_rng(seed)
    xs = [rng.normal(size=(n, d)) for _ in range(m)]
    if constant:
        for x in xs:
            x[:, 0] = rng.normal()
    common = rng.normal(size=d)
    ys = [x @ (common + spread * rng.normal(size=d)) + noise * rng.normal(size=n) for x in xs]
    return from_arrays([scale * x for x in xs], ys, kind="regression")


def lam_of(task, clients):
    return auto_lam(task, gather(task, clients.cohort(), task.start(), ("spread",)))


@pytest.mark.parametrize("spread", [0.1, 0.3, 1.0])
def test_lam_is_the_bayesians(spread):
    """noise^2 / (n spread^2)."""
    lam = lam_of(Linear(3, intercept=False), planted(spread=spread))
    assert lam == pytest.approx(0.7**2 / (60 * spread**2), rel=0.25)


def test_lam_of_logistic_clients():
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(80, 3)) for _ in range(300)]
    ys = [rng.random(80) < 1 / (1 + np.exp(-x @ (1 + 0.8 * rng.normal(size=3)))) for x in xs]
    lam = lam_of(Logistic(3, intercept=False), from_arrays(xs, ys, kind="binary"))
    assert 0.5 < lam * 80 * 0.8**2 < 2


def test_columns_that_a_client_cannot_tell_apart_do_not_loosen_the_pull():
    """A column that is constant within a client is collinear with the intercept: its own fit is not determined."""
    lam = lam_of(Linear(3), planted(constant=True))
    assert 0.5 < lam * 60 * 0.3**2 / 0.7**2 < 3


def test_lam_follows_the_units_of_the_columns():
    """Columns in other units, s x: coefficients vary by spread / s, so lam is s^2 times as large."""
    task = Linear(3, intercept=False)
    assert lam_of(task, planted(scale=10.0)) == pytest.approx(100 * lam_of(task, planted()), rel=1e-6)


def test_equal_clients_are_moored_tightly_but_not_infinitely():
    lam = lam_of(Linear(3, intercept=False), planted(spread=0.0))
    assert 1 < lam < 1e4


@pytest.mark.parametrize(
    "clients", [planted(m=1), planted(m=4, n=2, d=7)], ids=["one client", "hardly a row beyond the columns"]
)
def test_where_nothing_can_be_compared_the_pull_is_a_share_of_the_curvature(clients):
    task = Linear(clients.train.x.shape[1], intercept=False)
    facts = gather(task, clients.cohort(), task.start(), ("spread",))
    assert auto_lam(task, facts) == pytest.approx(PULL_OF_NETWORKS * float(facts.smooth.mean()))


def test_schedule_counts_steps_and_decays_over_the_rounds():
    clients = planted(m=2, n=10)
    data, turn = clients.cohort(), Round(3, 9, 2, 2, 1.0, 0)
    batch, count, eta = schedule(build("fedavg", {"eta": 0.5, "decay": 0.1, "batch": 4, "epochs": 2}), data, turn)
    assert batch == 4 and count.tolist() == [6, 6]
    torch.testing.assert_close(eta(1), torch.full((2,), 0.5 / (1 + 0.1 * 13), dtype=torch.float64))
    batch, count, eta = schedule(build("fedavg", {"eta": 0.5, "batch": 0, "steps": 7}), data, turn)
    assert batch is None and count.tolist() == [7, 7] and eta == 0.5
