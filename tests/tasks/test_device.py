"""Mixed precision and torch.compile on the processor, against plain loops of torch."""

import shutil

import pytest
import torch
from torch import nn

import mooring
from mooring.core.cohort import Round
from mooring.core.errors import RequestError
from mooring.core.optimizers import Optimizer
from mooring.core.solvers import train
from mooring.tasks.device import Device
from mooring.tasks.network import NetworkTask
from tests.tasks.test_network_freeze import clients, cohort

ETA, STEPS = 0.1, 4


def make():
    body = (nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 16), nn.Tanh())
    return nn.Sequential(*body, nn.Linear(16, 4))


def plain_update(w, x, y, precision, momentum=0.0):
    net = make()
    nn.utils.vector_to_parameters(w.clone(), net.parameters())
    optimizer = torch.optim.SGD(net.parameters(), lr=ETA, momentum=momentum)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            output = net(x.float())
        nn.functional.cross_entropy(output.float(), y).backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(net.parameters()).detach()


def updates(task, momentum=0.0):
    data = cohort()
    w = task.start(1)
    rule = Optimizer(momentum=momentum)
    return w, train(task, w, data, Round(1, 1, 3, 3, 1.0, 0), ETA, batch=None, steps=STEPS, rule=rule)[0]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_mixed_precision_equals_a_loop_with_autocast(momentum):
    task = NetworkTask(make, precision="bf16")
    w, after = updates(task, momentum)
    assert after.dtype == torch.float32
    gap = 0.0
    for i in range(3):
        x, y = clients().train.of(i)
        torch.testing.assert_close(after[i], plain_update(w, x, y.long(), "bf16", momentum), rtol=0, atol=1e-6)
        gap = max(gap, float((after[i] - plain_update(w, x, y.long(), "full", momentum)).abs().max()))
    assert 1e-5 < gap < 1e-2  # the precision is another, but not far off


def test_predictions_in_mixed_precision_are_near_those_in_full_precision():
    x = clients().train.of(0)[0].float()[None]
    mixed, full = NetworkTask(make, precision="bf16"), NetworkTask(make)
    w = full.start()[None]
    assert mixed.predict(w, x).dtype == torch.float32
    gap = (mixed.predict(w, x) - full.predict(w, x)).abs().max()
    assert 0 < gap < 0.01


COMPILE = torch.compile
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # in torch's own compiler
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, needs_compiler])]
)  # the first traces both passes without compiling them
def test_compiled_training_equals_eager_training(monkeypatch, backend):
    calls = []

    def compile_once(module):
        calls.append(module)
        return COMPILE(module, backend=backend)

    monkeypatch.setattr(torch, "compile", compile_once)
    w, after = updates(NetworkTask(make, compile=True))
    assert len(calls) == 1  # for all clients
    for i in range(3):
        x, y = clients().train.of(i)
        torch.testing.assert_close(after[i], plain_update(w, x, y.long(), "full"), rtol=0, atol=1e-5)


def test_a_failing_compiler_is_reported_in_one_sentence(monkeypatch):
    def fail(module):
        raise torch._dynamo.exc.TorchDynamoException("no compiler\nsecond line")

    monkeypatch.setattr(torch, "compile", lambda module: fail)
    with pytest.raises(RequestError, match=r"torch.compile fails .*\(no compiler\); set compile = false"):
        updates(NetworkTask(make, compile=True))


def test_unknown_precisions_and_devices_are_refused():
    with pytest.raises(RequestError, match="precision must be one of full, bf16, got 'fp8'"):
        Device(precision="fp8")
    with pytest.raises(RequestError, match="device 'warp' is not there; this machine has cpu"):
        Device("warp")


def test_mixed_precision_is_a_setting_of_the_task():
    generator = torch.Generator().manual_seed(0)
    data = {f"c{i}": (torch.randn(30, 1, 6, 6, generator=generator), torch.arange(30) % 4) for i in range(3)}
    settings = {"eta": 0.1, "batch": 10, "steps": 2}
    results = [
        mooring.fit(make, data, algorithm="fedavg", settings=settings, task=task, rounds=2, seed=0, baselines=False)
        for task in ({"precision": "bf16"}, {"precision": "bf16"}, {})
    ]
    models = [torch.as_tensor(result.models["c0"]) for result in results]
    assert torch.equal(models[0], models[1]) and not torch.equal(models[0], models[2])
