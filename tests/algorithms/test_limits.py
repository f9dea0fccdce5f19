"""Table 3, limits: with certain settings one algorithm is another, draw for draw."""

from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch

from mooring.algorithms.base import build
from mooring.core.cohort import Round
from mooring.data.clients import from_arrays
from mooring.engines import local_update
from mooring.tasks.linear import Linear
from mooring.tasks.linear_losses import Absolute, Hinge
from mooring.tasks.logistic import Logistic
from tests.support.problems import PROBLEMS, settled_simulator, simulate

SGD = {"eta": 0.1, "batch": 4, "steps": 3}
FULL = {"eta": 0.1, "batch": 0, "steps": 3}
ALONE = {"inner": "sgd", "ridge": 0.0}
EXACT = {"inner": "exact", "lam": 0.6}
DESCENT = {"inner": "descent", "lam": 0.6, "tol": 0.05, "steps": 100}
UNWEIGHTED = {"gamma": 1 / 0.6, "aggregation": "average", "radius": 0, "final_steps": 0}
TWIN = {**FULL, "inner": "sgd", "lam": 0.6, "gamma": 1 / 0.6}

# what is the same ("common" model, deployed "models" or both), one algorithm, the other, rounds, tolerance
ULPS = 1e-13  # local SGD takes its steps in place, APFL along gradients
LIMITS = [
    (
        "both",
        ("apfl", {**SGD, "alpha": 0, "adapt": "no", "decay": 0.1}),
        ("fedavg", {**SGD, "decay": 0.1}),
        3,
        ULPS,
    ),
    ("models", ("apfl", {**SGD, "alpha": 1, "adapt": "no", "decay": 0.0}), ("local", {**SGD, **ALONE}), 3, ULPS),
    ("models", ("ditto", {**SGD, "lam": 0, "personal_eta": 0.1}), ("local", {**SGD, **ALONE}), 3, 0),
    ("common", ("ditto", {**SGD, "lam": 2.0}), ("fedavg", SGD), 3, 0),
    ("both", ("fedavg_finetune", {**SGD, "tune_steps": 0}), ("fedavg", SGD), 3, 0),
    (
        "both",
        ("fedavg_finetune", {**SGD, "output": "own"}),
        ("apfl", {**SGD, "alpha": 0, "adapt": "no", "decay": 0.0, "output": "own"}),
        3,
        ULPS,
    ),
    ("both", ("scaffold_finetune", {**SGD, "tune_steps": 0}), ("scaffold", SGD), 3, 0),
    ("both", ("scaffold", SGD), ("fedavg", SGD), 1, 0),  # zero variates
    ("both", ("per_fedavg", {**FULL, "inner_eta": 0}), ("fedavg", FULL), 3, 1e-12),
    ("common", ("pfedme", {**FULL, "inner": "exact", "lam": 1e7}), ("fedavg", FULL), 3, 1e-5),
    ("models", ("pfedme", {"inner": "exact", "lam": 1e-9}), ("local", {"inner": "exact", "ridge": 0.0}), 3, 1e-6),
    ("both", ("pfedme", {**EXACT, "steps": 1, "eta": 1.1}), ("fedprox_personal", {**EXACT, "gamma": 1.1}), 3, 1e-9),
    ("both", ("fedprox", {**SGD, "lam": 0, "inner": "sgd"}), ("fedavg", SGD), 3, 0),
    ("models", ("fedprox_personal", {**SGD, "lam": 0, "inner": "sgd"}), ("local", {**SGD, **ALONE}), 3, 0),
    ("models", ("fedprox_personal", {"lam": 0}), ("local", {"inner": "exact", "ridge": 0.0}), 3, 1e-9),
    ("models", ("fedprox_two_stage", {**FULL, "lam": 0, "final_steps": 0}), ("local", {**FULL, **ALONE}), 3, 1e-12),
    ("both", ("fedmspp", {**EXACT, "batch": 0}), ("fedprox", EXACT), 3, 0),
    ("both", ("fedmspp", {**EXACT, "batch": 1000}), ("fedprox", EXACT), 3, 1e-9),
    ("both", ("fedmspp", {**FULL, **DESCENT}), ("fedprox", {**FULL, **DESCENT}), 3, 0),
    ("common", ("fedprox_personal", {**EXACT, "gamma": 1 / 0.6}), ("fedprox", EXACT), 3, 1e-9),
    ("common", ("fedprox_two_stage", {**EXACT, **UNWEIGHTED}), ("fedprox", EXACT), 3, 1e-9),
    ("both", ("fedprox_two_stage", {**FULL, **UNWEIGHTED, "lam": 0.6}), ("fedprox_personal", TWIN), 3, 1e-12),
    # A client's copy is w + (v - w), which rounds once.
    ("models", ("fedper", {**SGD, "personal": "*"}), ("local", {**SGD, **ALONE}), 3, 1e-15),
    ("both", ("lg_fedavg", {**SGD, "personal": "head"}), ("fedper", SGD), 3, 0),
    ("both", ("fedbn", {**SGD, "personal": "head"}), ("fedper", SGD), 3, 0),
    ("common", ("fedrep", {**SGD, "head_steps": 0}), ("fedbabu", SGD), 3, 0),
    ("both", ("fedala", {**SGD, "layers": 0}), ("fedavg_finetune", {**SGD, "output": "own"}), 3, ULPS),
    ("common", ("fedrod", {**SGD, "balanced": False}), ("fedavg", SGD), 3, ULPS),
    ("both", ("ifca", {**SGD, "clusters": 1}), ("fedavg", SGD), 3, ULPS),
]


FEW = {
    "linear": lambda: (Linear(6), few_rows("regression")),
    "logistic": lambda: (Logistic(6, ridge=0.0), few_rows("binary")),
    "absolute": lambda: (Absolute(6, ridge=0.0), few_rows("regression")),
    "hinge": lambda: (Hinge(6, ridge=0.0), few_rows("binary")),
}


def few_rows(kind):
    """Clients whose rows do not determine seven coefficients, and separate the classes; no validation rows at all."""
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(n, 6)) for n in (3, 4, 12, 2)]
    ys = [x @ np.arange(6.0) + 0.1 * rng.normal(size=len(x)) for x in xs]
    return from_arrays(xs, [(y > 0).astype(int) for y in ys] if kind == "binary" else ys, kind=kind)


@pytest.mark.parametrize("problem", FEW)
def test_without_a_pull_few_rows_give_the_local_fit(problem):
    """Also where the rows leave much open: the minimiser of least norm, not what the global model would fill in."""
    task, clients = FEW[problem]()
    _, alone, _ = simulate(build("local", {"ridge": 0.0}), task, clients)
    _, moored, _ = simulate(build("fedprox_personal", {"lam": 0, "inner": "exact"}), task, clients)
    _, either, exchange = simulate(
        build("dichotomous", {"ridge": 0.0, "variant": "known_r", "radius": 1e9, "mu": 1.0, "ell_max": 1.0}),
        task,
        clients,
    )
    assert bool(torch.isfinite(alone).all()) and bool(exchange.states.fields.uses_local.all())
    torch.testing.assert_close(moored, alone, rtol=0, atol=1e-4 if problem == "logistic" else 1e-9)
    torch.testing.assert_close(either, alone, rtol=0, atol=1e-4 if problem == "logistic" else 1e-9)
    for i in (0, 1, 3):
        x, y = clients.train.of(i)
        x = torch.cat([x, torch.ones_like(x[:, :1])], 1)
        if problem in ("linear", "absolute"):  # fewer rows than coefficients: all losses vanish
            torch.testing.assert_close(alone[i], torch.linalg.pinv(x) @ y, rtol=0, atol=1e-9)
        if problem == "hinge":  # the least norm that leaves no loss is in the span of the rows, and at a margin
            margin = (2 * y - 1) * (x @ alone[i])
            assert float(margin.min()) == pytest.approx(1, abs=1e-9)
            torch.testing.assert_close(torch.linalg.pinv(x) @ (x @ alone[i]), alone[i], rtol=0, atol=1e-9)


@pytest.mark.parametrize("problem", ["linear", "logistic"])
@pytest.mark.parametrize("name", ["local", "pooled", "fedprox_personal"])
def test_baselines_need_no_validation_rows(name, problem):
    task, clients = FEW[problem]()
    _, models, exchange = simulate(build(name, {}), task, clients)
    assert bool(torch.isfinite(models).all())
    if name == "local":
        assert exchange.algorithm.ridge == 0


@pytest.mark.parametrize("batch", [0, 8])
@pytest.mark.parametrize("weights", ["size", "uniform"])
def test_global_by_sgd_minimises_the_weighted_risk(weights, batch):
    """All rows: gradient descent to rounding. Batches: 3,000 steps that decay, nearer to the right minimiser."""
    task, clients = PROBLEMS["linear"]()
    exact = {how: simulate(build("pooled", {}), task, clients, weights=how)[0].w for how in ("size", "uniform")}
    work = {"steps": 2000} if batch == 0 else {"steps": 100, "eta": 0.02, "decay": 0.006}
    rounds = 1 if batch == 0 else 30
    found = simulate(build("pooled", {"inner": "sgd", "batch": batch, **work}), task, clients, rounds, weights=weights)
    error = {how: float((found[0].w - w).norm()) for how, w in exact.items()}
    other = "size" if weights == "uniform" else "uniform"
    assert error[weights] < (1e-9 if batch == 0 else error[other] / 3)


def test_places_of_the_pool_are_rows_at_their_weights():
    """Over shifts each row of client i has N p_i/n_i of the N places; a round's count is that rounded up or down."""
    _, clients = PROBLEMS["linear"]()
    data = clients.cohort(clients.weights("uniform"))
    pooled = import_module("mooring.algorithms.pooled").pool_clients(data, Round(1, 1, 5, 5, 1.0, 0)).train
    n = len(pooled.y)
    everything, valid = torch.arange(n)[None], torch.ones(1, n, dtype=torch.bool)
    expected = n * torch.repeat_interleave(data.p / data.train.size, data.train.size)
    shifts = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    counts = torch.zeros(1000, n, dtype=torch.float64)
    for k, shift in enumerate(shifts):
        drawn = replace(pooled, shift=float(shift)).take(everything, valid)
        counts[k] = (drawn.y[0][:, None] == pooled.y[None]).sum(0)
    assert bool(((counts >= expected.floor()) & (counts <= expected.ceil())).all())
    torch.testing.assert_close(counts.mean(0), expected, rtol=0, atol=2 / 1000)  # a row is met or left at two shifts
    torch.testing.assert_close(pooled.padded().weight[0], expected / n)


@pytest.mark.parametrize("problem", ["linear", "logistic"])
@pytest.mark.parametrize("same,one,other,rounds,tolerance", LIMITS, ids=[f"{a[0]}-{b[0]}" for _, a, b, *_ in LIMITS])
def test_limit(same, one, other, rounds, tolerance, problem):
    task, clients = PROBLEMS[problem]()
    results = []
    for name, fields in (one, other):
        partial = 1.0 if build(name, fields).one_shot else 0.6
        server, models, exchange = simulate(build(name, fields), task, clients, rounds, participation=partial)
        results.append((server.w, models, exchange.states.merged))
    (w, models, merged), (other_w, other_models, other_merged) = results
    met = (merged > 0) & (other_merged > 0)
    if same in ("both", "common"):
        torch.testing.assert_close(w, other_w, rtol=tolerance, atol=tolerance)
    if same in ("both", "models"):
        torch.testing.assert_close(models[met], other_models[met], rtol=tolerance, atol=tolerance)


def test_apfls_common_model_does_not_depend_on_the_mixture():
    task, clients = PROBLEMS["logistic"]()
    mixtures = ({"alpha": 0}, {"alpha": 0.3}, {"alpha": 1}, {"adapt": "step"}, {"adapt": "round", "adapt_on": "train"})
    common = [
        simulate(build("apfl", {**SGD, "adapt": "no", **mixture}), task, clients, participation=0.6)[0].w
        for mixture in mixtures
    ]
    for w in common[1:]:
        assert torch.equal(w, common[0])


def test_l2gd_without_a_pull_is_local():
    """As many full-gradient steps as there were tails."""
    task, clients = PROBLEMS["linear"]()
    algorithm = build("l2gd", {"lam": 0, "q": 0.5, "eta": 0.05})
    _, models, _ = simulate(algorithm, task, clients, rounds=6)
    turns = [Round(t, 6, 5, 5, 1.0, 0) for t in range(1, 7)]
    steps = sum(algorithm.run_lengths(turn)[1] for turn in turns)
    _, alone, _ = simulate(build("local", {**ALONE, "eta": 0.1, "steps": steps}), task, clients, rounds=1)
    torch.testing.assert_close(models, alone, rtol=1e-12, atol=1e-12)


def test_pfedme_without_a_pull_leaves_the_common_model():
    task, clients = PROBLEMS["linear"]()
    server, _, _ = simulate(build("pfedme", {"inner": "exact", "lam": 1e-9, "eta": 1.0}), task, clients)
    assert float((server.w - task.start()).norm()) < 1e-6


@pytest.mark.parametrize("fields", [{"inner": "exact"}, {"inner": "sgd", "steps": 5, "batch": 0}], ids=["exact", "sgd"])
def test_feddyn_ends_at_the_pooled_minimizer(fields):
    task, clients = PROBLEMS["linear"]()
    server, _, _ = simulate(build("feddyn", {"lam": 0.5, **fields}), task, clients, rounds=200)
    right = simulate(build("pooled", {}), task, clients)[0].w
    torch.testing.assert_close(server.w, right, rtol=0, atol=1e-8)


def test_ifca_finds_planted_clusters():
    """Two kinds of clients with opposite slopes: each kind ends with a model of its own, near the truth."""
    rng = np.random.default_rng(3)
    kind = rng.permutation(np.arange(12) % 2)
    xs = [rng.normal(size=(40, 3)) for _ in kind]
    ys = [x @ np.array([1.0, -2.0, 0.5]) * (2 * k - 1) + 0.1 * rng.normal(size=len(x)) for x, k in zip(xs, kind)]
    task, clients = Linear(3), from_arrays(xs, ys, kind="regression")
    _, models, exchange = simulate(build("ifca", {"clusters": 2}), task, clients, rounds=30)
    first = exchange.states.field("cluster")[int(np.flatnonzero(kind == 0)[0])]
    assert ((exchange.states.field("cluster") == first).numpy() == (kind == 0)).all()
    right = np.outer(2 * kind - 1, [1.0, -2.0, 0.5])
    np.testing.assert_allclose(models[:, :3].numpy(), right, atol=0.1)


def test_the_generic_head_of_fedrod_learns_from_balanced_classes():
    """Its gradient is that of the cross-entropy of scores plus log(rows of the class), written out row by row."""
    task, clients = PROBLEMS["softmax"]()
    algorithm, exchange, server = settled_simulator(
        build("fedrod", {"eta": 0.1, "steps": 1, "batch": 0}), task, clients
    )
    client = exchange.states.take(torch.arange(len(clients)))
    turn = Round(1, 1, len(clients), len(clients), 1.0, 0)
    _, change = local_update.client_update(algorithm, task, server, client, exchange.data, turn)
    for i in range(len(clients)):
        x, y = (part.numpy() for part in clients.train.of(i))
        counts = np.maximum(np.bincount(y.astype(int), minlength=3), 1e-9)
        g = np.zeros((4, 3))
        for row, label in zip(np.hstack([x, np.ones((len(x), 1))]), y.astype(int)):
            chance = counts / counts.sum()  # all scores are 0 at the start
            g += np.outer(row, chance - np.eye(3)[label]) / len(y)
        np.testing.assert_allclose(change[i].numpy(), -0.1 * g.reshape(-1), atol=1e-12)
