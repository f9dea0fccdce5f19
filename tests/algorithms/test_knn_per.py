"""kNN-Per: predictions equal loops over rows, known limits, what is sent, and what cannot be done."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import mooring
from mooring.algorithms.base import build
from mooring.core.cohort import Round
from mooring.core.errors import RequestError
from mooring.data.clients import from_arrays
from mooring.engines.export import export
from mooring.tasks.linear_losses import Hinge
from mooring.tasks.logistic import Logistic
from mooring.tasks.network import NetworkTask
from tests.support.problems import PROBLEMS, logistic_clients, settled_simulator, simulate

SIGMA, NEIGHBORS = 0.7, 4


def make():
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def make_single():
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def network_run(fields, clients=None, net=make, loss="cross_entropy"):
    clients = logistic_clients(classes=3) if clients is None else clients
    fields = {"eta": 0.1, "steps": 2, "batch": 0, "neighbors": NEIGHBORS, "sigma": SIGMA} | fields
    server, models, exchange = simulate(build("knn_per", fields), NetworkTask(net, loss), clients)
    return server, models, exchange, clients


def naive_probabilities(module, stored, x, alpha, classes):
    """[rows, classes]: the paper's mixture, one row and one neighbor at a time."""
    keys, labels = module[:2](stored[0]), stored[1].tolist()
    out = []
    for row in x:
        z = module[:2](row[None])[0]
        distance = [math.sqrt(float(((z - key) ** 2).sum())) for key in keys]
        nearest = sorted(range(len(labels)), key=lambda j: distance[j])[:NEIGHBORS]
        weight = [0.0] * classes
        for j in nearest:
            weight[int(labels[j])] += math.exp(-distance[j] / SIGMA)
        scores = module[2](z)
        own = (
            torch.softmax(scores, 0) if len(scores) > 1 else torch.stack([1 - scores.sigmoid(), scores.sigmoid()])[:, 0]
        )
        own = own.tolist()
        out.append([alpha * weight[c] / sum(weight) + (1 - alpha) * own[c] for c in range(classes)])
    return torch.tensor(out, dtype=torch.float64)


def module_of(w, net=make):
    module = net()
    nn.utils.vector_to_parameters(w.clone(), module.parameters())
    return module.requires_grad_(False)


def test_predictions_of_classes_are_the_papers_mixture():
    server, models, exchange, clients = network_run({"alpha": 0.3})
    for i in range(len(clients)):
        x = clients.test.of(i)[0]
        expected = naive_probabilities(module_of(server.w), clients.train.of(i), x, 0.3, 3)
        torch.testing.assert_close(exchange.deployed_task.predict(models[i : i + 1], x[None])[0], expected)


def test_predictions_of_one_logit_are_the_papers_mixture():
    clients = logistic_clients()
    server, models, exchange, _ = network_run({"alpha": 0.3}, clients, make_single, "binary_cross_entropy")
    x = clients.test.of(0)[0]
    expected = naive_probabilities(module_of(server.w, make_single), clients.train.of(0), x, 0.3, 2)[:, 1]
    torch.testing.assert_close(exchange.deployed_task.predict(models[:1], x[None])[0], expected)


def test_each_client_chooses_the_weight_of_least_loss_on_its_validation_rows():
    server, models, exchange, clients = network_run({})
    place, chosen = exchange.task.dim, set()
    for i in range(len(clients)):
        x, y = clients.validation.of(i)
        losses = []
        for alpha in (k / 10 for k in range(10)):
            p = naive_probabilities(module_of(server.w), clients.train.of(i), x, alpha, 3)
            losses.append(sum(-math.log(p[j, int(y[j])]) for j in range(len(y))))
        assert float(models[i, place]) == np.argmin(losses) / 10
        chosen.add(float(models[i, place]))
    assert len(chosen) > 1


def test_without_validation_rows_the_stored_ones_choose_without_themselves():
    rng = np.random.default_rng(0)
    xs, ys = [rng.normal(size=(9, 3)) for _ in range(3)], [rng.integers(0, 3, 9) for _ in range(3)]
    clients = from_arrays(xs, ys, parts=[np.array(["train"] * 7 + ["test"] * 2)] * 3, kind="classes")
    server, models, exchange, _ = network_run({}, clients)
    for i in range(3):
        x, y = clients.train.of(i)
        losses = np.zeros(10)
        for j in range(len(y)):
            others = torch.arange(len(y)) != j
            for k in range(10):
                p = naive_probabilities(module_of(server.w), (x[others], y[others]), x[j : j + 1], k / 10, 3)
                losses[k] -= math.log(p[0, int(y[j])])
        assert float(models[i, exchange.task.dim]) == np.argmin(losses) / 10


@pytest.mark.parametrize("problem", ["linear", "logistic", "softmax"])
def test_without_neighbors_weight_it_is_fedavg(problem):
    task, clients = PROBLEMS[problem]()
    work = {"eta": 0.05, "steps": 3, "batch": 4}
    server, models, exchange = simulate(build("knn_per", {**work, "alpha": 0.0}), task, clients)
    plain, shared, _ = simulate(build("fedavg", work), task, clients)
    assert torch.equal(server.w, plain.w)
    batch = clients.test.padded()
    torch.testing.assert_close(exchange.deployed_task.row_risk(models, batch), task.row_risk(shared, batch))
    torch.testing.assert_close(exchange.deployed_task.predict(models, batch.x), task.predict(shared, batch.x))


def test_all_neighbors_with_equal_weights_are_the_shares_of_the_classes():
    clients = logistic_clients(classes=3)
    fields = {"alpha": 1.0, "neighbors": 99, "sigma": math.inf, "eta": 0.1}
    _, models, exchange = simulate(build("knn_per", fields), Logistic(3, classes=3), clients)
    for i in range(len(clients)):
        x, y = clients.test.of(i)[0], clients.train.of(i)[1]
        shares = torch.bincount(y.long(), minlength=3) / len(y)
        answer = exchange.deployed_task.predict(models[i : i + 1], x[None])[0]
        torch.testing.assert_close(answer, shares.double().expand_as(answer), rtol=0, atol=2e-6)


def test_of_more_rows_than_fit_evenly_spread_ones_are_stored():
    _, models, exchange, clients = network_run({"capacity": 3, "alpha": 0.5})
    for i in range(len(clients)):
        y = clients.train.of(i)[1]
        assert models[i, -3:].tolist() == [float(y[j * len(y) // 3]) for j in range(3)]
        assert float(models[i, exchange.task.dim + 1]) == 3


def test_only_the_change_of_the_network_is_sent():
    """The message and the server's state have the size of the network, before and after memories are made."""
    task, clients = NetworkTask(make), logistic_clients(classes=3)
    _, exchange, server = settled_simulator(build("knn_per", {"eta": 0.1}), task, clients)
    everyone, turn = torch.arange(len(clients)), Round(1, 3, 5, 5, 1.0, 0)
    replies = exchange.ask(server, everyone, turn)
    assert replies.message.shape == (5, task.dim)
    _, other, start = settled_simulator(build("fedavg", {"eta": 0.1}), task, clients)
    assert torch.equal(replies.message, other.ask(start, everyone, turn).message)
    exchange.accept(everyone, turn)
    assert exchange.models(server, turn).shape[1] > task.dim
    assert all(part.numel() <= 2 for part in exchange.states.take(torch.tensor([0])))  # no memory between rounds


@pytest.mark.parametrize(
    "net,loss,reason",
    [
        (make, lambda out, y: (out[:, 0] - y) ** 2, "which a loss of your own does not define; use loss ="),
        (lambda: nn.Sequential(make(), nn.Softplus()), "cross_entropy", "output is that of a last nn.Linear layer"),
    ],
)
def test_networks_without_probabilities_are_refused(net, loss, reason):
    clients = logistic_clients(classes=3)
    task = NetworkTask(net, loss, sample=clients.train.x[:2])
    with pytest.raises(RequestError, match=reason):
        settled_simulator(build("knn_per", {"eta": 0.1}), task, clients)


def test_other_tasks_are_refused():
    with pytest.raises(RequestError, match="not for task 'hinge'; use ditto or fedprox_personal"):
        settled_simulator(build("knn_per", {}), Hinge(3, ridge=0.1), logistic_clients())


@pytest.fixture
def run(tmp_path):
    rng = np.random.default_rng(1)
    x, owner = rng.normal(size=(160, 2)), np.arange(160) % 4
    frame = pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "site": [f"s{i}" for i in owner]})
    frame["y"] = np.where(x[:, 0] + (owner - 1.5) * x[:, 1] > 0, "yes", "no")
    how = {"client": "site", "target": "y", "algorithm": "knn_per", "rounds": 3, "threads": 1}
    how["settings"] = {"alpha": 0.5}
    return frame, mooring.fit(frame, out=tmp_path / "run", **how)


def test_a_saved_run_predicts_as_the_fit_does(run):
    frame, result = run
    saved = mooring.open(result.run)
    for name, model in result.models.items():
        assert torch.equal(saved.models[name], model)
    scaled = (saved.inputs(frame).values - saved.schema.mean) / saved.schema.scale
    mine = (frame["site"] == "s1").values
    answer = saved.predict(frame).loc[mine, ["p(no)", "p(yes)"]].values
    np.testing.assert_allclose(answer, result.predict(scaled[mine], "s1"), rtol=1e-9)
    assert np.abs(answer - np.asarray(result.predict(scaled[mine]))).max() > 0.01  # the global model's are others


def test_a_network_with_its_memory_is_exported(run, tmp_path):
    from safetensors.torch import load

    _, result = run
    content, _ = export(result.run, "torch", "s2")
    stored = load(content)
    assert stored["keys"].shape == (int(result.trained.algorithm.capacity), 2) and stored["size"] > 0
    module = result.module("s2")
    rows = torch.zeros(3, 2, dtype=torch.float64)
    expected = result.job.task.predict(result.models["s2"][None], rows[None])[0]
    torch.testing.assert_close(torch.softmax(module(rows), 1), expected)
    with pytest.raises(RequestError, match="task 'memory' has no coefficients of columns"):
        export(result.run, "sklearn")


def test_a_new_client_remembers_its_own_rows(run):
    frame, result = run
    new = frame[frame["site"] == "s3"].assign(site="new")
    found = mooring.personalize(result.run, new)
    assert found.clients["client"].tolist() == ["new"] and found.way == "finetune"
    assert found.models.shape[1] == len(result.models["s3"])
    assert np.isfinite(found.clients["personal_held_out"]).all()
