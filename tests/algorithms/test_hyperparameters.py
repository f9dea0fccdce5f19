"""The rules behind "auto": the pull that a Bayesian would take, and the schedule that fields describe."""

import numpy as np
import pytest
import torch

from mooring.algorithms.base import build
from mooring.algorithms.hyperparameters import (
    MAX_LOSS_SHARE_OF_OTHERS,
    NETWORK_LAM_PER_CURVATURE,
    auto_lam,
    auto_ridge,
)
from mooring.core.cohort import Round
from mooring.core.errors import RequestError
from mooring.core.local_training import schedule
from mooring.data.clients import from_arrays
from mooring.engines.local_update import first_states
from mooring.estimates.client_statistics import RIDGE_GRID, collect_statistics
from mooring.tasks.linear import Linear
from mooring.tasks.logistic import Logistic
from tests.support.problems import settled_simulator, simulate


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
    return auto_lam(task, collect_statistics(task, clients.cohort(), task.start(), ("spread",)))


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
    facts = collect_statistics(task, clients.cohort(), task.start(), ("spread",))
    assert auto_lam(task, facts) == pytest.approx(NETWORK_LAM_PER_CURVATURE * float(facts.smooth.mean()))


def test_schedule_counts_steps_and_decays_over_the_rounds():
    clients = planted(m=2, n=10)
    data, turn = clients.cohort(), Round(3, 9, 2, 2, 1.0, 0)
    batch, count, eta = schedule(build("fedavg", {"eta": 0.5, "decay": 0.1, "batch": 4, "epochs": 2}), data, turn)
    assert batch == 4 and count.tolist() == [6, 6]
    torch.testing.assert_close(eta(1), torch.full((2,), 0.5 / (1 + 0.1 * 13), dtype=torch.float64))
    batch, count, eta = schedule(build("fedavg", {"eta": 0.5, "batch": 0, "steps": 7}), data, turn)
    assert batch is None and count.tolist() == [7, 7] and eta == 0.5


@pytest.mark.parametrize("eta_schedule,expected", [("steps", 0.9**13), ("rounds", 0.9**2), ("epochs", 0.9**4)])
def test_other_schedules(eta_schedule, expected):
    """The second step of round 3, of 6 steps a stay and 3 a pass: 13 steps, 2 rounds, 4 passes before it."""
    data, turn = planted(m=2, n=10).cohort(), Round(3, 9, 2, 2, 1.0, 0)
    fields = {"eta": 0.5, "decay": 0.1, "eta_schedule": eta_schedule, "batch": 4, "epochs": 2}
    eta = schedule(build("fedavg", fields), data, turn)[2]
    taken = torch.as_tensor(eta(1) if callable(eta) else eta, dtype=torch.float64).expand(2).tolist()
    assert taken == pytest.approx([0.5 * expected] * 2, rel=1e-14)


def test_own_epochs_count_own_visits():
    data, turn = planted(m=2, n=10).cohort(), Round(3, 9, 2, 2, 1.0, 0)
    fields = {"eta": 0.5, "decay": 0.1, "eta_schedule": "epochs", "batch": 4, "epochs": 2}
    eta = schedule(build("fedavg", fields), data, turn, torch.tensor([[0.0], [1.0]]))[2]
    assert eta(4).tolist() == pytest.approx([0.5 * 0.9, 0.5 * 0.9**3], rel=1e-14)


def test_the_counter_is_kept_only_where_it_is_asked_for():
    task = Linear(3)
    for eta_schedule, shape in (("epochs", (1,)), ("inverse", (0,))):
        for name in ("fedavg", "local", "ditto", "scaffold", "apfl", "pfedme", "per_fedavg", "fedprox_two_stage"):
            assert (
                first_states(build(name, {"eta_schedule": eta_schedule}), task, task.start())[1].memory.shape == shape
            )


@pytest.mark.parametrize(
    "fields,sentence",
    [
        (
            {"eta_schedule": "linear"},
            "FedAvg: eta_schedule must be one of 'inverse', 'steps', 'rounds', 'epochs',",
        ),
        ({"eta_schedule": "rounds", "decay": 1.5}, "FedAvg: decay must be between 0 and 1, got 1.5."),
        ({"draws": "all"}, "FedAvg: draws must be one of 'passes', 'independent', 'replacement', got 'all'."),
    ],
)
def test_wrong_schedules_are_one_sentence(fields, sentence):
    with pytest.raises(RequestError) as error:
        build("fedavg", fields)
    assert str(error.value).startswith(sentence)


@pytest.mark.parametrize("draws", ["independent", "replacement"])
@pytest.mark.parametrize("name", ["fedavg", "ditto", "scaffold", "apfl", "pfedme", "per_fedavg", "fedprox_two_stage"])
def test_draws_reach_every_methods_minibatches(name, draws):
    clients = planted(m=2, n=12)
    fields = {"batch": 4, "steps": 6, "eta": 0.05}
    ends = [
        simulate(build(name, {**fields, **how}), Linear(3), clients, rounds=1)[0].w for how in ({}, {"draws": draws})
    ]
    assert not torch.allclose(*ends, rtol=1e-6)


@pytest.mark.parametrize("inner,share", [("exact", 1.0), ("descent", 0.5), ("sgd", 0.5)])
def test_the_servers_step_is_one_over_the_envelopes_smoothness_or_half_of_it(inner, share):
    """effect, Corollary 1: 1/L_g = 1/lam + 1/L; half of it with inexact solves; one per coefficient for many lam."""
    task, clients = Linear(3, intercept=False), planted(m=4, n=20)
    _, exchange, _ = settled_simulator(build("fedavg", {}), task, clients)
    smooth = float(exchange.client_statistics(task.start()).smooth.max())
    one = settled_simulator(build("fedprox_personal", {"lam": 0.4, "inner": inner}), task, clients)[0]
    assert one.gamma == pytest.approx(share * (1 / 0.4 + 1 / smooth))
    moor = {"per_client": [0.1, 0.2, 0.3, 0.4], "per_coefficient": [1.0, 2.0, 3.0]}
    many = settled_simulator(build("fedprox_personal", {"lam": moor, "inner": inner}), task, clients)[0]
    lam = np.outer(moor["per_client"], moor["per_coefficient"])
    expected = share * lam.sum(0) / (lam * smooth / (lam + smooth)).sum(0)  # equal weights cancel
    assert many.gamma == pytest.approx(tuple(expected))


def alone_facts(rows, cells=(), targets=()):
    """Facts on 10 clients, 12 rows to train and 8 to validate; the last one's first rows to validate are changed."""
    clients = planted(m=10, n=20)
    homes = [[part.numpy().copy() for part in clients.train.of(i)] for i in range(10)]
    x, y = homes[-1]
    x[12 : 12 + len(cells), 0], y[12 : 12 + len(targets)] = cells, targets
    parts = [np.repeat(["train", "validation"], [12, 8])] * rows
    spoilt = from_arrays(*zip(*homes[-rows:]), parts=parts, kind="regression")
    task = Linear(3)
    return collect_statistics(task, spoilt.cohort(), task.start(), ("alone",))


def test_the_common_ridge_is_the_best_on_all_validation_rows():
    facts = alone_facts(10)
    assert auto_ridge(facts) == RIDGE_GRID[(facts.validation[:, None] * facts.alone).sum(0).argmin()]


@pytest.mark.parametrize("bad", [{"cells": [100]}, {"cells": [1e6]}, {"cells": [1e160]}, {"targets": [1e6]}])
def test_one_bad_cell_does_not_choose_the_ridge_of_the_others(bad):
    """The others lose no more by its say than SWAY of what they lose anyway."""
    facts = alone_facts(10, **bad)
    best = facts.alone[:-1].sum(0)
    chosen = best[RIDGE_GRID.tolist().index(auto_ridge(facts))]
    assert chosen <= (1 + MAX_LOSS_SHARE_OF_OTHERS) * best.min()
    if bad.get("cells", [0])[0] in (100, 1e6):  # by the plain sum they would
        assert best[facts.alone.sum(0).argmin()] > (1 + MAX_LOSS_SHARE_OF_OTHERS) * best.min()
