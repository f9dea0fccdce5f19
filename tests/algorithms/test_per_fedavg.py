"""Per-FedAvg: the meta-gradient is a gradient, the Hessian product is one, and the three batches are separate."""

import torch

from mooring.algorithms.base import build
from mooring.algorithms.per_fedavg import hessian_product
from mooring.core.cohort import Round
from mooring.engines import local_update
from tests.support.problems import PROBLEMS, settled_simulator


def test_hessian_product_on_a_curved_loss():
    task, clients = PROBLEMS["softmax"]()
    rows = clients.train.full(task)
    draw = torch.Generator().manual_seed(0)
    w, g = (torch.randn(5, task.dim, generator=draw, dtype=torch.float64) for _ in range(2))
    exact = torch.einsum("cij,cj->ci", task.hessian(w, rows), g)
    torch.testing.assert_close(hessian_product(task, w, rows, g), exact, rtol=1e-6, atol=1e-7)
    assert not hessian_product(task, w, rows, torch.zeros_like(g)).any()


def test_a_step_descends_the_loss_after_adaptation():
    """Full batches, one step: the change is -eta times the gradient of F_i(w) = L_i(w - a grad L_i(w))."""
    task, clients = PROBLEMS["logistic"]()
    a, eta, h = 0.8, 0.3, 1e-6
    fields = {"inner_eta": a, "eta": eta, "steps": 1}
    algorithm, exchange, server = settled_simulator(build("per_fedavg", fields), task, clients)
    server = server._replace(w=torch.tensor([0.5, -1.0, 0.3, 0.2], dtype=torch.float64))
    _, change = local_update.client_update(
        algorithm, task, server, exchange.states.take(torch.arange(5)), exchange.data, Round(1, 1, 5, 5, 1.0, 0)
    )
    rows = exchange.data.train.full(task)

    def adapted(w):
        w = w.expand(5, -1)
        return task.loss(w - a * task.grad(w, rows), rows)

    for j, unit in enumerate(torch.eye(4, dtype=torch.float64)):
        slope = (adapted(server.w + h * unit) - adapted(server.w - h * unit)) / (2 * h)
        torch.testing.assert_close(change[:, j], -eta * slope, rtol=1e-6, atol=1e-8)


def test_three_separate_batches():
    task, clients = PROBLEMS["logistic"]()
    seen = []

    class Watched:
        def __getattr__(self, name):
            return getattr(task, name)

        def record_draw(self, batch):
            seen.append(batch.x)

    algorithm, exchange, server = settled_simulator(build("per_fedavg", {"batch": 3, "steps": 2}), task, clients)
    local_update.client_update(
        algorithm, Watched(), server, exchange.states.take(torch.arange(5)), exchange.data, Round(1, 1, 5, 5, 1.0, 0)
    )
    assert len(seen) == 6
    for step in (seen[:3], seen[3:]):
        assert not torch.equal(step[0], step[1]) and not torch.equal(step[1], step[2])
        assert not torch.equal(step[0], step[2])


def test_the_first_order_variant_drops_the_hessian():
    task, clients = PROBLEMS["logistic"]()
    fields = {"inner_eta": 0.8, "eta": 0.3, "steps": 1}
    _, exchange, server = settled_simulator(build("per_fedavg", fields), task, clients)
    first = build("per_fedavg", {**fields, "batch": 0, "variant": "first-order"})
    _, change = local_update.client_update(
        first, task, server, exchange.states.take(torch.arange(5)), exchange.data, Round(1, 1, 5, 5, 1.0, 0)
    )
    rows, w = exchange.data.train.full(task), server.w.expand(5, -1)
    torch.testing.assert_close(change, -0.3 * task.grad(w - 0.8 * task.grad(w, rows), rows))
