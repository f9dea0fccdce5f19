"""Parts that stay with their client: equal to a loop in which every client has its own copy of them."""

import pytest
import torch
from torch import nn

import mooring
from mooring.algorithms.base import build
from mooring.core.cohort import Round
from mooring.core.errors import RequestError
from mooring.core.task import personal_mask
from mooring.engines.personal_parts import keep_personal_parts
from mooring.engines.simulator import Simulator
from mooring.tasks.network import NetworkTask
from tests.support.problems import logistic_clients


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(torch.tanh(self.body(x)))


def federation(clients=3, rows=12):
    rng = torch.Generator().manual_seed(0)
    return {
        f"site {i}": (torch.randn(rows, 3, generator=rng), torch.randint(0, 3, (rows,), generator=rng))
        for i in range(clients)
    }


def test_names_patterns_and_the_head_select_parts():
    task = NetworkTask(Body)
    size = {name: part.numel() for name, part in Body().named_parameters()}
    head = size["fc.weight"] + size["fc.bias"]
    for named in ("fc", "head", ("fc.weight", "fc.bias"), "fc.*"):
        assert int(personal_mask(task, named).sum()) == head
    assert int(personal_mask(task, ("*.bias",)).sum()) == size["fc.bias"] + size["body.bias"]
    assert not bool(personal_mask(task, ()).any())
    with pytest.raises(RequestError, match="no part of the model is called 'encoder'"):
        personal_mask(task, "encoder")


@pytest.mark.parametrize("name", ["fedavg", "fedprox"])
def test_a_personal_head_is_a_loop_with_heads_apart(name):
    """FedPer: two rounds of full-batch steps; the head of every client is trained and kept, the body is averaged."""
    data, lam = federation(), 0.3 if name == "fedprox" else 0.0
    settings = {"eta": 0.1, "steps": 3, "batch": 0, "personal": "fc"}
    settings |= {"lam": lam, "inner": "sgd"} if name == "fedprox" else {}
    result = mooring.fit(
        data, model=Body, algorithm=name, settings=settings, rounds=2, baselines=False, seed=0, checkpoint="last"
    )
    clients, task = result.job.clients, result.job.task
    start, bodies = task.start(0), None
    nets = [Body() for _ in data]
    for net in nets:
        nn.utils.vector_to_parameters(start.clone(), net.parameters())
    weights = clients.weights("size")
    for _ in range(2):
        if bodies is not None:
            for net in nets:
                net.body.load_state_dict(bodies)
        for i, net in enumerate(nets):
            x, y = clients.train.of(i)
            center = [part.detach().clone() for part in net.parameters()]
            for _ in range(3):
                loss = nn.functional.cross_entropy(net(x), y)
                loss = loss + lam / 2 * sum(((p - c) ** 2).sum() for p, c in zip(net.parameters(), center))
                net.zero_grad()
                loss.backward()
                with torch.no_grad():
                    for part in net.parameters():
                        part -= 0.1 * part.grad
        bodies = {
            key: sum(p * net.body.state_dict()[key] for p, net in zip(weights.float(), nets))
            for key in nets[0].body.state_dict()
        }
    for client, net in zip(data, nets):
        net.body.load_state_dict(bodies)
        torch.testing.assert_close(
            result.models[client], nn.utils.parameters_to_vector(net.parameters()).detach(), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize(
    "name", ["fedavg", "fedprox", "ditto", "apfl", "scaffold", "fedavg_finetune", "fedprox_personal"]
)
def test_the_personal_part_is_not_sent_and_does_not_reach_others(name):
    task, clients = NetworkTask(lambda: Body().double()), logistic_clients(classes=3)
    settings = {"eta": 0.1, "batch": 0, "steps": 2, "personal": "fc"}
    settings |= {"lam": 0.1} if "prox" in name or name == "ditto" else {}
    settings |= {"gamma": 10.0, "inner": "sgd"} if name == "fedprox_personal" else {}
    settings |= {"personal_eta": 0.1} if name == "ditto" else {}
    settings |= {"adapt_on": "train"} if name == "apfl" else {}
    algorithm = keep_personal_parts(build(name, settings), task)
    exchange = Simulator(task, clients, clients.weights())
    w0, turn = task.start(0), Round(1, 2, len(clients), len(clients), 1.0, 0)
    server, _ = algorithm.init(task, w0)
    exchange.begin(algorithm, w0)
    reply = exchange.ask(server, torch.arange(len(clients)), turn)
    message = reply.message
    change = message if isinstance(message, torch.Tensor) else message[0]
    mask = personal_mask(task, "fc")
    assert change.shape[1] == int((~mask).sum())
    mean = change.mean(0)
    if change is not message:
        mean = type(message)(*(None if part is None else part.mean(0) for part in message))
    after = algorithm.server_update(server, mean, turn)
    assert torch.equal(after.w[mask], w0[mask]) and not torch.equal(after.w[~mask], w0[~mask])
    exchange.accept(torch.arange(len(clients)), turn)
    models = exchange.models(after, turn)
    assert not torch.allclose(models[0, mask], models[1, mask])


def test_a_resumed_run_has_the_same_bytes(tmp_path):
    data = federation()
    options = {"model": Body, "algorithm": "fedavg", "rounds": 4, "baselines": False, "seed": 1}
    options["settings"] = {"eta": 0.1, "steps": 2, "batch": 4, "personal": "fc", "optimizer": "adamw"}
    options["settings"] |= {"optimizer_state": "keep"}
    whole = mooring.fit(data, out=tmp_path / "whole", checkpoint_every=2, **options)
    again = mooring.fit(data, out=tmp_path / "again", checkpoint_every=2, **options)
    for name in data:
        assert torch.equal(whole.models[name], again.models[name])


def test_a_function_of_parameter_names_is_the_list_of_those_names():
    data, settings = federation(), {"eta": 0.1, "steps": 2, "batch": 0}
    results = [
        mooring.fit(Body, data, algorithm=name, settings=settings | {"personal": personal}, rounds=2, baselines=False)
        for name in ("fedavg", "fedper")
        for personal in (lambda name: name.startswith("fc."), "fc")
    ]
    for by_function, by_name in (results[:2], results[2:]):
        for client, model in by_name.models.items():
            assert torch.equal(torch.as_tensor(by_function.models[client]), torch.as_tensor(model))
    with pytest.raises(RequestError, match="the function chooses none of the parameters body"):
        mooring.fit(Body, data, algorithm="fedavg", settings={"personal": lambda name: False}, rounds=1)
    with pytest.raises(RequestError, match="needs the network as `model`"):
        mooring.fit("heart", algorithm="fedavg", settings={"personal": lambda name: True}, rounds=1)
