"""Table 3, limits: with certain settings one algorithm is another, draw for draw."""

import pytest
import torch

from mooring.algorithms.base import build
from mooring.core.cohort import Round
from tests.problems import PROBLEMS, simulate

SGD = {"eta": 0.1, "batch": 4, "steps": 3}
FULL = {"eta": 0.1, "batch": 0, "steps": 3}
ALONE = {"inner": "sgd", "ridge": 0.0}
EXACT = {"inner": "exact", "lam": 0.6}
DESCENT = {"inner": "descent", "lam": 0.6, "tol": 0.05, "steps": 100}
UNWEIGHTED = {"gamma": 1 / 0.6, "aggregation": "average", "radius": 0, "final_steps": 0}
TWIN = {**FULL, "inner": "sgd", "lam": 0.6, "gamma": 1 / 0.6}

# what is the same ("common" model, deployed "models" or both), one algorithm, the other, rounds, tolerance
LIMITS = [
    ("both", ("apfl", {**SGD, "alpha": 0, "adapt": "no", "decay": 0.1}), ("fedavg", {**SGD, "decay": 0.1}), 3, 0),
    ("models", ("apfl", {**SGD, "alpha": 1, "adapt": "no", "decay": 0.0}), ("local", {**SGD, **ALONE}), 3, 0),
    ("models", ("ditto", {**SGD, "lam": 0, "personal_eta": 0.1}), ("local", {**SGD, **ALONE}), 3, 0),
    ("common", ("ditto", {**SGD, "lam": 2.0}), ("fedavg", SGD), 3, 0),
    ("both", ("fedavg_localized", {**SGD, "tune_steps": 0}), ("fedavg", SGD), 3, 0),
    ("both", ("scaffold_localized", {**SGD, "tune_steps": 0}), ("scaffold", SGD), 3, 0),
    ("both", ("scaffold", SGD), ("fedavg", SGD), 1, 0),  # zero variates
    ("both", ("per_fedavg", {**FULL, "inner_eta": 0}), ("fedavg", FULL), 3, 1e-12),
    ("common", ("pfedme", {**FULL, "inner": "exact", "lam": 1e7}), ("fedavg", FULL), 3, 1e-5),
    ("models", ("pfedme", {"inner": "exact", "lam": 1e-9}), ("local", {"inner": "exact", "ridge": 0.0}), 3, 1e-6),
    ("both", ("pfedme", {**EXACT, "steps": 1, "eta": 1.1}), ("fedprox_one_stage", {**EXACT, "gamma": 1.1}), 3, 1e-9),
    ("both", ("fedprox_shared", {**SGD, "lam": 0, "inner": "sgd"}), ("fedavg", SGD), 3, 0),
    ("models", ("fedprox_one_stage", {**SGD, "lam": 0, "inner": "sgd"}), ("local", {**SGD, **ALONE}), 3, 0),
    ("models", ("fedprox_one_stage", {"lam": 0}), ("local", {"inner": "exact", "ridge": 0.0}), 3, 1e-9),
    ("models", ("fedprox_two_stage", {**FULL, "lam": 0, "final_steps": 0}), ("local", {**FULL, **ALONE}), 3, 1e-12),
    ("both", ("fedmspp", {**EXACT, "batch": 0}), ("fedprox_shared", EXACT), 3, 0),
    ("both", ("fedmspp", {**EXACT, "batch": 1000}), ("fedprox_shared", EXACT), 3, 1e-9),
    ("both", ("fedmspp", {**FULL, **DESCENT}), ("fedprox_shared", {**FULL, **DESCENT}), 3, 0),
    ("common", ("fedprox_one_stage", {**EXACT, "gamma": 1 / 0.6}), ("fedprox_shared", EXACT), 3, 1e-9),
    ("common", ("fedprox_two_stage", {**EXACT, **UNWEIGHTED}), ("fedprox_shared", EXACT), 3, 1e-9),
    ("both", ("fedprox_two_stage", {**FULL, **UNWEIGHTED, "lam": 0.6}), ("fedprox_one_stage", TWIN), 3, 1e-12),
]


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
