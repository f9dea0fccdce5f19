"""effect: every row of its catalogue has claims, and what its experiments measure is what they say."""

import numpy as np
import pytest
import torch

from mooring.engines.loop import run_steps
from mooring_papers import exact_minimum
from mooring_papers.base import catalog
from mooring_papers.base.claims import every
from mooring_papers.base.results import Results, Trial
from mooring_papers.effect import _images, _rounds, _synthetic, _tables, fig3, tab2

SMALL = {
    "data": "digits", "clients": 5, "samples": 40, "tested": 60, "rounds": 1, "epochs": 1, "batch": 16, "eta": 0.1,
}  # fmt: skip


def test_results_on_other_data_say_so():
    """Experiments with images name what they ran on, and what stands in for what."""
    images = [
        entry.experiment for entry in catalog.select_experiments("effect") if entry.experiment.presets["paper"].needs
    ]
    assert len(images) == 7
    for experiment in images:
        quick = experiment.presets["quick"].data
        assert "digits of scikit-learn" in quick and "P1 and P2" in quick
        assert "MNIST" in experiment.presets["paper"].data


@pytest.mark.parametrize("lam", [2e-4, 0.1, 1e4])
def test_joint_newton_is_the_minimiser(lam):
    given = _synthetic.problem(3, 0.6, clients=5, samples=60)
    ours = _synthetic.minimize_jointly(given.task, lam, given.p, given.clients.train)
    theirs = exact_minimum.minimize_objective(given.task, lam, given.p, given.clients.train)
    torch.testing.assert_close(ours.w, theirs.w, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(ours.v, theirs.v, rtol=1e-6, atol=1e-7)


def test_statistical_errors_by_hand():
    """LocalTrain's and GlobalTrain's errors from their own definitions; FedProx tends to both."""
    out = _synthetic.statistical_errors(0, 0.6, clients=4, samples=80)
    given = _synthetic.problem(0, 0.6, 4, 80)
    rows, truths = given.clients.train, given.clients.truth.w
    alone = [given.task.solve(rows.select(torch.tensor([i])).padded())[0] for i in range(4)]
    assert np.isclose(out["LocalTrain"], np.mean([float(((v - w) ** 2).sum()) for v, w in zip(alone, truths)]))
    assert out["LocalTrain to LocalTrain"] < 1e-12 and out["GlobalTrain to GlobalTrain"] == 0
    assert out["small to LocalTrain"] < out["large to LocalTrain"] < out["GlobalTrain to LocalTrain"]


def test_iterates_reach_the_minimiser():
    curves = run_steps(_synthetic.total_errors(0, 0.6, 0.02, rounds=40, clients=5, samples=80))
    assert curves["t"] == list(range(41))
    assert curves["gap"][0] == 1 and curves["gap"][-1] < 1e-2
    assert sorted(curves["gap"], reverse=True) == curves["gap"]
    inexact = run_steps(_synthetic.total_errors(0, 0.6, 0.02, rounds=40, steps=1, clients=5, samples=80))
    assert inexact["gap"][5] > curves["gap"][5]


def test_protocols_by_hand():
    """P1 and P2 from a loop over rows: P1 weighs a class as the client's own rows do."""
    given = _images.federation(0, "digits", 2, 5, 40, 80, True)
    task = _images.make_task("softmax", given)
    v = torch.randn(5, task.dim, generator=torch.Generator().manual_seed(1))
    found = _images.accuracies(task, v[0], v, given)
    p1, p2 = [], []
    for i in range(5):
        hit = (task.predict(v[i][None], given.x[None])[0].argmax(1) == given.y).double()
        labels = given.clients.train.of(i)[1]
        weight = sum(
            float((labels == c).double().mean()) / max(int((given.y == c).sum()), 1) * (given.y == c).double()
            for c in range(10)
        )
        p1.append(float((weight * hit).sum()))
        p2.append(float(hit.mean()))
    assert np.isclose(found["P1"], np.mean(p1)) and np.isclose(found["P2"], np.mean(p2))
    assert given.clients.test.size.sum() == 0
    assert all(len(set(given.clients.train.of(i)[1].tolist())) == 2 for i in range(5))


def test_prototypes_test_rows_have_all_classes():
    given = _images.federation(0, "proto", 3, 4, 40, 100, True)
    assert len(given.y) == 100 and len(set(given.y.tolist())) == 10
    assert all(len(set(given.clients.train.of(i)[1].tolist())) <= 3 for i in range(4))


@pytest.mark.parametrize("model", ["cnn2", "cnn3", "cnn5"])
def test_networks_run(model):
    given = _images.federation(0, "digits", 2, 5, 20, 20, False)
    task = _images.make_task(model, given)
    convolutions = [layer for layer in task.module if isinstance(layer, torch.nn.Conv2d)]
    assert len(convolutions) == int(model[-1])
    out = run_steps(_images.trial(0, model=model, classes=2, method="FedProx", lam=0.5, **SMALL | {"samples": 20}))
    assert 0 <= out["P2"] <= 1 and len(out["loss"]) == 1


def test_dichotomous_on_full_data_chooses_between_the_baselines():
    def run(method):
        return run_steps(_images.trial(0, model="softmax", classes=2, method=method, **SMALL))

    both = [run(name) for name in ("LocalTrain", "GlobalTrain")]
    full, split = run("dichotomous, full data"), run("dichotomous")
    for protocol in ("P1", "P2"):
        assert full[f"leaky {protocol}"] >= max(one[protocol] for one in both) - 1e-12
        assert full[f"leaky {protocol}"] >= full[protocol] - 1e-12
    assert split["P1"] != full["P1"]


def test_pfedme_takes_as_many_gradients():
    given = _images.federation(0, "digits", 2, 5, 40, 60, True)
    work = {"eta": 0.1, "epochs": 3, "batch": 8}
    one, other = (_images.algorithm(name, 0.5, given.clients, **work) for name in ("FedProx", "pFedMe"))
    batches = -(-int(given.clients.train.size.max()) // 8)
    assert other.steps * other.inner_steps == one.epochs * batches


def curves(**by_lam):
    """Results with one curve for each (lam, steps)."""
    return Results(
        [
            Trial({"lam": key[0], "steps": int(key[1:])}, seed, {"t": list(range(len(v))), "gap": v})
            for key, v in by_lam.items()
            for seed in range(2)
        ]
    )


def test_speed_ups():
    slow, fast = [1.0, 0.5, 0.25, 0.125, 0.0625], [1.0, 0.0625, 0.0, 0.0, 0.0]
    results = curves(a1=slow, a20=fast, b1=slow, b20=slow)
    few, many = {"steps": 1}, {"steps": 20}
    assert _rounds.speed_up(results, "gap", few | {"lam": "a"}, many | {"lam": "a"}).tolist() == [4, 4]
    right = _rounds.work_claims("gap", few, many, {"lam": "a"}, {"lam": "b"}, "gap")
    assert [claim.check(results).outcome for claim in right] == ["held"] * 3
    wrong = _rounds.work_claims("gap", few, many, {"lam": "b"}, {"lam": "a"}, "gap")
    assert [claim.check(results).outcome for claim in wrong] == ["open", "contradicted", "contradicted"]
    assert _rounds.rounds_to("gap", 0.2)({"gap": slow, "t": range(5)}) == 2


def test_claims_of_their_own_can_fail():
    def tab(rounds):
        values = [{"cond_g": float(k), "rounds": r} for k, r in enumerate(rounds, 1)]
        return Results([Trial({"lam": k}, seed, value) for k, value in enumerate(values) for seed in (0, 1)])

    linear = tab2.EXPERIMENT.claims[0].check
    assert linear(tab([3.0, 5.0, 7.0])).outcome == "held"
    assert linear(tab([7.0, 5.0, 3.0])).outcome == "contradicted"
    assert linear(tab([3.0, np.nan, 7.0])).outcome == "open"

    def spread(adaptive):
        values = {"LocalTrain": 2.0, "GlobalTrain": 3.0}
        made = [Trial({"spread": k}, s, values | {fig3.THEOREM: a}) for k, a in enumerate(adaptive) for s in (0, 1)]
        return Results(made)

    lowest = fig3.lowest_in_most(fig3.THEOREM)
    assert lowest(spread([1.0, 1.0, 2.5])).outcome == "held"
    assert lowest(spread([1.0, 2.5, 2.5])).outcome == "contradicted"
    assert lowest(spread([-1.0, -1.0, -1.0])).outcome == "contradicted"


def test_approach_to_both_ends():
    local, common, small, large = ("LocalTrain", ""), ("GlobalTrain", ""), ("FedProx", "small"), ("FedProx", "large")
    check = every(
        local=_tables.approaches("P2", (large, small), local), common=_tables.approaches("P2", (small, large), common)
    )

    def results(accuracy):
        made = _tables.points(["MNIST CNN2"], [small, large, local, common])
        values = [(p, {"P2": accuracy[p["method"] + p.get("size", "")]}) for p in made]
        return Results([Trial(p, seed, value) for p, value in values for seed in (0, 1)])

    right = {"LocalTrain": 0.2, "GlobalTrain": 0.9, "FedProxsmall": 0.3, "FedProxlarge": 0.8}
    assert check(results(right)).is_held
    assert not check(results(right | {"FedProxsmall": 0.8, "FedProxlarge": 0.3})).is_held
    assert not check(results({name: -value for name, value in right.items()})).is_held


def test_rows_of_the_tables_are_as_printed():
    assert [len(row.table3) for row in _tables.ROWS.values()] == [3, 3, 3, 3]
    assert all(len(values) == 8 for row in _tables.ROWS.values() for values in row.table3.values())
    shifted = _tables.ROWS["MNIST CNN2"]
    assert all(shifted.table4[c][0] == shifted.table3[c][1] for c in (2, 6, 10))  # "small" is the medium of Table 3
