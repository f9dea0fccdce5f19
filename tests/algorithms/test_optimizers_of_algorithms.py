"""Algorithms with optimizers equal a plain loop of torch.optim, or refuse them in one sentence."""

import pytest
import torch
from torch import nn

from mooring.algorithms.base import build, builtin_names, find
from mooring.core.errors import RequestError
from mooring.core.local_work import LocalWork
from mooring.engines.simulate import simulate
from mooring.engines.training_state import TrainingPlan
from mooring.tasks.linear import Linear
from mooring.tasks.network import NetworkTask
from tests.algorithms import naive_optimizers as naive
from tests.support.problems import linear_clients, logistic_clients, settled_simulator

ETA = 0.05
SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
OPTIMIZERS = {
    "momentum": ({"momentum": 0.9}, lambda p: SGD(p, ETA, momentum=0.9)),
    "nesterov": ({"momentum": 0.8, "nesterov": True}, lambda p: SGD(p, ETA, 0.8, nesterov=True)),
    "weight decay": ({"weight_decay": 0.1}, lambda p: SGD(p, ETA, weight_decay=0.1)),
    "clipped": ({"clip_grad": 0.1, "weight_decay": 0.1}, lambda p: SGD(p, ETA, weight_decay=0.1)),
    "adam": ({"optimizer": "adam", "weight_decay": 0.1}, lambda p: ADAM(p, ETA, weight_decay=0.1)),
    "adamw": ({"optimizer": "adamw", "weight_decay": 0.1}, lambda p: ADAMW(p, ETA, weight_decay=0.1)),
    "clipped adamw": ({"optimizer": "adamw", "clip_grad": 0.1}, lambda p: ADAMW(p, ETA, weight_decay=0.0)),
    "kept momentum": ({"momentum": 0.9, "optimizer_state": "keep"}, lambda p: SGD(p, ETA, momentum=0.9)),
    "kept adam": ({"optimizer": "adam", "optimizer_state": "keep"}, lambda p: ADAM(p, ETA)),
}
FIELDS = {
    "apfl": {"alpha": 0.4, "adapt": "no", "decay": 0.0},
    "dichotomous": {"variant": "known_r", "radius": 1e6, "mu": 1.0, "ell_max": 1.0, "ridge": 0.1, "inner": "sgd"},
    "ditto": {"lam": 0.3, "personal_eta": ETA},
    "fedala": {"first_passes": 2, "sample": 1.0},
    "fedavg_finetune": {"tune_steps": 2},
    "fedbabu": {"tune_steps": 2},
    "fedbn": {"personal": "0"},
    "feddyn": {"lam": 0.3},
    "fedprox": {"lam": 0.3},
    "fedprox_personal": {"lam": 0.3, "gamma": 0.5},
    "fedprox_two_stage": {"lam": 0.3, "gamma": 0.5, "radius": 0, "final_steps": 2},
    "fedrep": {"head_steps": 2},
    "ifca": {"clusters": 1},
    "knn_per": {"alpha": 0.4},
    "local": {"ridge": 0.1},
    "moon": {"mu": 2.0, "tau": 0.3},
    "per_fedavg": {"inner_eta": 0.1, "variant": "first-order"},
    "pfedme": {"lam": 0.3, "inner_eta": ETA, "inner_steps": 2},
    "scaffold_finetune": {"tune_steps": 2},
}
STEPPING = [name for name in builtin_names() if issubclass(find(name), LocalWork)]
OWN_STEPS = [name for name in builtin_names() if name not in STEPPING]
REFUSED = {name: set(OPTIMIZERS) - {"weight decay"} for name in ("scaffold", "scaffold_finetune")}
# That each optimizer is torch's is tested in tests/tasks/test_network_list.py. An algorithm decides where its steps and
# states begin and which gradients they get: momentum, decay, clipping and kept states with all, the others with some.
FOR_ALL = {"momentum", "weight decay", "clipped adamw", "kept adam"}
WITH_EVERY_OPTIMIZER = {"fedavg", "ditto", "apfl", *REFUSED}
PAIRS = [(name, optimizer) for name in STEPPING for optimizer in OPTIMIZERS]
PAIRS = [(name, optimizer) for name, optimizer in PAIRS if optimizer in FOR_ALL or name in WITH_EVERY_OPTIMIZER]


def network():
    return nn.Sequential(nn.Linear(3, naive.HIDDEN), nn.Tanh(), nn.Linear(naive.HIDDEN, naive.CLASSES)).double()


def expected(name, settings, make, clients, w0, rate):
    rows = [clients.train.of(i) for i in range(len(clients))]
    p = clients.weights("size").double()
    federation = naive.Federation(
        [(x, y.long()) for x, y in rows], p / p.sum(), w0, make, settings.get("clip_grad", 0.0),
        settings.get("optimizer_state") == "keep", rate, FIELDS.get(name, {}),
    )  # fmt: skip
    return getattr(naive, name)(federation)


def check(name, settings, make, rate=lambda t: ETA):
    clients, task = logistic_clients(m=3, classes=3), NetworkTask(network)
    w0 = task.start(3)
    fields = {"eta": ETA, "steps": 3, "batch": 0, **FIELDS.get(name, {}), **settings}
    plan = TrainingPlan(rounds=2, evaluate_every=2, checkpoint="last")
    done = simulate(build(name, fields), task, clients, plan, w0=w0)
    w, models = expected(name, settings, make, clients, w0, rate)
    torch.testing.assert_close(done.models(), models, rtol=1e-7, atol=1e-9)
    if name != "ifca":
        torch.testing.assert_close(done.server.w, w, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name,optimizer", PAIRS)
def test_two_rounds_equal_a_plain_loop_of_torch(name, optimizer):
    settings, make = OPTIMIZERS[optimizer]
    if optimizer in REFUSED.get(name, ()):
        with pytest.raises(RequestError, match=r"its control variates are mean gradients.*or fedavg or feddyn"):
            build(name, settings)
        return
    check(name, settings, make)


@pytest.mark.parametrize("name", [name for name in STEPPING if name not in REFUSED])
def test_schedules_hold_for_optimizers(name):
    settings = {"momentum": 0.9, "eta_schedule": "rounds", "decay": 0.5}
    fields = {"personal_eta": ETA} if name == "ditto" else {}
    make = OPTIMIZERS["momentum"][1]
    check(name, settings | fields, make, lambda t: ETA * 0.5 ** (t - 1))


@pytest.mark.parametrize("setting", [{"optimizer": "adamw"}, {"momentum": 0.9}, {"optimizer_state": "keep"}])
@pytest.mark.parametrize("name", OWN_STEPS)
def test_algorithms_without_local_steps_say_why_they_take_no_optimizer(name, setting):
    with pytest.raises(
        RequestError, match=f"{name}: '{next(iter(setting))}' does not apply, since .*; use an algorithm"
    ):
        build(name, setting)


@pytest.mark.parametrize("name", ["fedprox", "fedprox_personal", "feddyn", "local", "pooled", "dichotomous"])
def test_an_optimizer_is_not_replaced_by_an_exact_solver(name):
    """A table has exact solvers, which "auto" would choose."""
    known = {"variant": "known_r", "radius": 1.0, "mu": 1.0, "ell_max": 1.0} if name == "dichotomous" else {}
    task, clients = Linear(3, ridge=0.1), linear_clients()
    plain, _, _ = settled_simulator(build(name, known), task, clients)
    adam, _, _ = settled_simulator(build(name, {"optimizer": "adam", **known}), task, clients)
    assert (plain.inner, adam.inner, adam.eta) == ("exact", "sgd", 1e-3)
    with pytest.raises(RequestError, match=r"inner = 'exact' takes no steps of an optimizer; .* or set inner = 'sgd'"):
        settled_simulator(build(name, {"optimizer": "adam", "inner": "exact", **known}), task, clients)
