"""FedMSPP: fresh minibatches, what sets it apart from shared-model FedProx, and its rate on a loss with kinks."""

from itertools import combinations, combinations_with_replacement

import numpy as np
import pytest
import torch

from mooring.algorithms.base import build
from mooring.core.cohort import Batch, Round, weighted_mean
from mooring.core.minibatches import minibatches
from mooring.engines import local_update
from mooring.estimates.client_statistics import collect_statistics
from mooring.tasks.linear_losses import Absolute, Sigmoid
from mooring.theory.fedmspp_rate import weakly_convex_bound
from mooring.theory.fedprox_shared_rate import moreau_gradient_norm
from tests.support.problems import PROBLEMS, linear_clients, logistic_clients, settled_simulator, simulate


class Spy:
    """A task that remembers the batches of its prox."""

    def __init__(self, task):
        self.task, self.seen = task, []

    def __getattr__(self, name):
        return getattr(self.task, name)

    def prox(self, center, lam, batch, start=None):
        self.seen.append(batch)
        return self.task.prox(center, lam, batch, start)


@pytest.mark.parametrize("replacement", [False, True])
def test_every_round_draws_fresh_records(replacement):
    task, clients = PROBLEMS["logistic"]()
    fields = {"lam": 1.0, "batch": 4, "replacement": replacement}
    ready, exchange, server = settled_simulator(build("fedmspp", fields), task, clients)
    spy = Spy(task)
    for t in (1, 2, 1):
        local_update.client_update(ready, spy, server, None, exchange.data, Round(t, 2, 5, 5, 1.0, 0))
    first, second, again = spy.seen
    assert first.x.shape == (5, 4, 3) and bool((first.weight == 0.25).all())
    assert torch.equal(first.x, again.x) and not torch.equal(first.x, second.x)
    for i in range(5):
        own = clients.train.of(i)[0]
        assert all(bool((own == row).all(1).any()) for row in first.x[i])
        if not replacement:
            assert len(torch.unique(first.x[i], dim=0)) == 4


def test_drawing_all_records_with_replacement_is_another_method():
    task, clients = PROBLEMS["linear"]()
    every = simulate(build("fedmspp", {"lam": 1.0, "batch": 0}), task, clients)[0].w
    drawn = simulate(build("fedmspp", {"lam": 1.0, "batch": 13, "replacement": True}), task, clients)[0].w
    shared = simulate(build("fedprox", {"lam": 1.0}), task, clients)[0].w
    assert torch.equal(every, shared) and float((drawn - shared).norm()) > 1e-3


def test_the_default_is_no_other_method():
    ready, *_ = settled_simulator(build("fedmspp", {}), *PROBLEMS["linear"]())
    assert 0 < ready.batch < 13


def test_theory_certifies_minibatch_solves_of_a_non_convex_loss():
    task, clients = Sigmoid(3, ridge=0.01), logistic_clients()
    ready, exchange, server = settled_simulator(build("fedmspp", {"lam": "theory", "batch": 4}), task, clients)
    assert ready.inner == "descent" and ready.growth == "smooth"
    turn = Round(1, 64, 5, 3, 0.5, 0)
    now = ready.at(turn)
    facts = collect_statistics(task, exchange.data, server.w)
    smooth = float(torch.minimum(facts.largest, facts.n / 4 * facts.smooth).max())
    assert now.lam == pytest.approx(8 * smooth * max(64 ** (1 / 3), (64 / 12) ** 0.5))
    lipschitz, step = float(facts.noise.max()), 1 / now.lam
    terms = (lipschitz, smooth * lipschitz * step / 12, lipschitz / 8 * (1 - step * smooth) ** 0.5)
    assert now.tol == pytest.approx(min(terms))
    w = torch.full((5, 4), 0.5, dtype=torch.float64)
    change = local_update.client_update(ready, task, server._replace(w=w[0]), None, exchange.data, turn)[1]
    batch = next(minibatches(task, exchange.data, turn, batch=4, steps=1, slot=0)).batch
    certificate = (task.grad(w + change, batch) + now.lam * change).norm(dim=1)
    assert bool((certificate <= now.tol).all()) and float(change.norm()) > 0


@pytest.mark.parametrize("problem", ["linear", "logistic", "softmax", "kernel"])
@pytest.mark.parametrize("replacement", [False, True])
def test_no_batch_is_steeper_than_the_theory_takes_it(problem, replacement):
    """lam = 8 L: L is at least the largest curvature of any batch of 1, 2 or 3 rows, found by trying them all."""
    task, clients = PROBLEMS[problem]()
    data = clients.cohort()
    facts = collect_statistics(task, data, task.start())
    for batch in (1, 2, 3):
        fields = {"lam": "theory", "batch": batch, "replacement": replacement}
        smooth = build("fedmspp", fields).resolve(task, facts).lam / 8
        pick = combinations_with_replacement if replacement else combinations
        for i in range(len(clients)):
            x, y = clients.train.of(i)
            index = torch.tensor(list(pick(range(min(len(y), 7)), batch)))
            rows = Batch(x[index], y[index], torch.full(index.shape, 1 / batch, dtype=torch.float64))
            for scale in (0.0, 1.0):  # at 0 classes are least certain and curvature is largest
                w = torch.full((len(index), task.dim), scale, dtype=torch.float64)
                assert float(torch.linalg.eigvalsh(task.hessian(w, rows)).max()) <= smooth * (1 + 1e-9)


def test_on_absolute_regression_the_envelopes_gradient_decays_like_one_over_root_t():
    """mspp, Theorem 4: the mean over rounds of |grad F_rho(w_t)|^2 is below its bound and falls about as T^-1/2."""
    task, clients = Absolute(3, ridge=0.0), linear_clients(m=4, sizes=[30] * 4, spread=2.0)
    p, means = clients.weights("uniform"), []
    horizons = (9, 36, 144)
    for rounds in horizons:
        fields = {"lam": 1.0, "growth": "kinked", "batch": 6, "replacement": True}
        ready, exchange, server = settled_simulator(build("fedmspp", fields), task, clients, weights="uniform")
        rho, squares = 1 / ready.lam, []
        start = float(p @ task.loss(server.w.expand(4, -1), clients.train.full(task)))
        for t in range(1, rounds + 1):
            if t % max(1, rounds // 18) == 0:
                near = task.prox(server.w[None], 1 / rho, clients.train.pooled(p))
                squares.append(moreau_gradient_norm(server.w.numpy(), near[0].numpy(), rho) ** 2)
            turn = Round(t, rounds, 4, 4, 1.0, 0)
            message = exchange.ask(server, torch.arange(4), turn).message
            server = ready.server_update(server, weighted_mean(message, p), turn)
        lipschitz = float(torch.cat([clients.train.of(i)[0] for i in range(4)]).square().sum(1).add(1).sqrt().max())
        means.append(np.mean(squares))
        assert means[-1] <= weakly_convex_bound(start, lipschitz, rho, rounds, 0.0)
    slope = np.polyfit(np.log(horizons), np.log(means), 1)[0]
    assert -0.9 < slope <= -0.45
