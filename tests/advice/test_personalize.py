"""`personalize`: newcomers are judged as advice judges."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

import mooring
from mooring.advice.evaluation.loss_sums import ModelTriple, sum_losses
from mooring.advice.inference.recommendation import recommend
from mooring.advice.new_clients.personalize import evaluate_new_clients, fit_locally, personalize
from mooring.cli import main
from mooring.data.clients import PARTS, from_arrays
from mooring.data.folds import usable_rows
from mooring.engines.export import export
from mooring.engines.predict import predict
from mooring.estimates.client_statistics import RIDGE_GRID
from mooring.tasks.linear import Linear

RNG = np.random.default_rng(0)
TRUTH = np.array([1.0, -2.0, 0.5])


def newcomers(sizes, noise=0.3):
    xs = [RNG.normal(size=(n, 3)) for n in sizes]
    ys = [x @ TRUTH + noise * RNG.normal(size=len(x)) for x in xs]
    parts = [np.array(["train"] * 6 + ["validation"] * 2 + ["test"] * (n - 8)) for n in sizes]
    return from_arrays(xs, ys, parts=parts, kind="regression", target_scale=3.0)


def fixed(alone, common, personal):
    """Newcomers' models that no rows change."""
    return lambda clients: ModelTriple(alone, common, personal, common[None])


def test_new_clients_are_recommended_models_by_the_same_path_as_advice():
    """Test rows of a table's own split show the losses; improvements and probabilities are those of `recommend`."""
    clients, task = newcomers([60, 80, 12, 8]), Linear(3)
    alone, common = torch.zeros(4, 4, dtype=torch.float64), torch.tensor([*TRUTH, 0.0], dtype=torch.float64)
    train = fixed(alone, common, common.repeat(4, 1))
    frame, models = evaluate_new_clients(task, clients, train, seed=3)
    whole = train(clients)
    found = recommend(sum_losses(task, clients.test, whole), sum_losses(task, usable_rows(clients), whole))
    np.testing.assert_allclose(frame["improvement_over_local_ci_low"], 9 * found.over["local"].interval(0.9)[0])
    np.testing.assert_array_equal(frame["probability_better_than_local"], found.over["local"].probability)
    assert set(frame["recommended"]) == {"global"}  # of equal models the simpler one
    assert torch.equal(models, common.repeat(4, 1))
    assert frame["confidence"].tolist()[:2] == ["high", "high"]
    assert frame["rows"].tolist() == [60, 80, 12, 8] and np.isnan(frame["local_held_out"][3])  # without test rows
    y = clients.test.of(0)[1].numpy()
    assert frame["local_held_out"][0] == pytest.approx(9 * float((y**2).mean()), rel=1e-12)


def test_every_row_judges_once_where_parts_are_by_chance():
    clients, task = replace(newcomers([30, 17]), has_random_parts=True), Linear(3)
    seen = []

    def train(part):
        seen.append([getattr(part, name).size.tolist() for name in ("train", "validation", "test")])
        w = torch.zeros(4, dtype=torch.float64)
        return ModelTriple(w.expand(2, -1), w, w.expand(2, -1), w[None])

    frame, _ = evaluate_new_clients(task, clients, train)
    assert seen[0] == [[28, 15], [2, 2], [0, 0]] and len(seen) == 6  # all rows, then five folds
    for fold in seen[1:]:
        assert all(27 - 5 <= n <= 28 - 5 + 1 or 15 - 4 <= n <= 15 - 2 for n in fold[0])
    whole = torch.cat([torch.cat([getattr(clients, part).of(0)[1] for part in PARTS])])
    assert frame["personal_held_out"][0] == pytest.approx(9 * float((whole**2).mean()))


def test_a_personal_model_that_is_worse_than_the_local_one_is_reported_so():
    clients, task = newcomers([200, 200]), Linear(3)
    good = torch.tensor([[*TRUTH, 0.0]], dtype=torch.float64).repeat(2, 1)
    bad = torch.zeros(2, 4, dtype=torch.float64)
    frame, _ = evaluate_new_clients(task, clients, fixed(good, bad[0], bad))
    assert (frame["ratio_high"] < 1).all() and (frame["local_held_out"] < 0.1 * frame["personal_held_out"]).all()


def test_alone_is_the_referee():
    """Both newcomers' models are ridge fits, with one ridge for both."""
    clients, task = newcomers([40, 50]), Linear(3)
    models, zero = fit_locally(task, clients, 0), torch.zeros(1, 4, dtype=torch.float64)
    fits = torch.stack([task.prox(zero, float(ridge), clients.train.full(task)) for ridge in RIDGE_GRID])
    assert float((fits - models).abs().amax((1, 2)).min()) < 1e-12


def towns(names, seed=0, n=40):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"town": np.repeat(names, n), "x": rng.normal(5, 2, n * len(names))})
    own = frame["town"].map({name: k for k, name in enumerate(names)})
    return frame.assign(y=3 * frame["x"] + 10 * own + rng.normal(size=len(frame)))


def test_newcomers_join_the_run_and_are_served(tmp_path):
    mooring.fit(towns(["a", "b", "c"]), client="town", target="y", rounds=3, threads=1, out=tmp_path / "run")
    rows = towns(["d", "e"], seed=1)
    told = personalize(tmp_path / "run", rows, out=tmp_path / "joined")
    assert told.notes == [] and told.run == tmp_path / "joined"
    before, after = mooring.open(tmp_path / "run"), mooring.open(tmp_path / "joined")
    assert after.purpose == "personalize" and after.names == ("a", "b", "c", "d", "e")
    assert list(after.clients["client"]) == list(after.names)
    for name in "abc":
        assert torch.equal(before.models[name], after.models[name])
    assert torch.equal(torch.stack([after.models["d"], after.models["e"]]), told.models)
    served, notes = mooring.predict(tmp_path / "joined", rows)
    assert notes == [] and ((served["y"] - rows["y"]) ** 2).mean() < 3
    assert mooring.predict(tmp_path / "run", rows)[1] == [
        "2 unknown clients, 'd', 'e': predicted with the global model."
    ]
    again = personalize(tmp_path / "joined", towns(["f"], seed=2), out=tmp_path / "third")  # and so on
    assert mooring.open(again.run).names == ("a", "b", "c", "d", "e", "f")
    with pytest.raises(SystemExit) as left:
        main(["resume", str(tmp_path / "joined")])
    assert left.value.code == 2


def visits(names, level, seed=0, n=12):
    """Counts of clients whose means grow with the root of a column with a long tail."""
    rng = np.random.default_rng(seed)
    x = np.exp(rng.normal(0, 1, len(names) * n))
    return pd.DataFrame({"town": np.repeat(names, n), "x": x, "visits": rng.poisson(level * np.sqrt(x))})


def test_no_count_far_beyond_all_those_of_a_run_is_predicted(tmp_path):
    """exp of an extrapolated score is, without a limit, 1e10 and more."""
    table = visits([f"town {i}" for i in range(12)], 3.0)
    advice = mooring.advise(
        table, client="town", target="visits", target_type="count", out=tmp_path / "run", shape="linear"
    )
    far = pd.DataFrame({"town": ["town 1", "town 2", "nowhere"], "x": [3000.0, 9000.0, 5000.0]})
    limit = advice.job.task.max_prediction
    assert table["visits"].max() <= limit <= 2.2 * table["visits"].max()
    found = predict(tmp_path / "run", far)[0]["visits"]
    np.testing.assert_allclose(found, limit)
    np.testing.assert_allclose(advice.predict(far[:2])["visits"], limit)
    assert json.loads(export(tmp_path / "run", "json")[0])["max_prediction"] == limit
    busy = visits(["busy"], 300.0, seed=1, n=30)
    personalize(tmp_path / "run", busy, out=tmp_path / "joined")
    again = predict(tmp_path / "joined", far.assign(town="busy"))[0]["visits"]
    np.testing.assert_allclose(again, 2 * busy["visits"].max())
    assert predict(tmp_path / "joined", busy)[0]["visits"].mean() == pytest.approx(busy["visits"].mean(), rel=0.2)


def test_a_known_client_is_noticed(tmp_path):
    mooring.fit(towns(["a", "b"]), client="town", target="y", rounds=3, threads=1, out=tmp_path / "run")
    told = personalize(tmp_path / "run", towns(["b", "new"], seed=1), out=tmp_path / "joined")
    assert told.notes[0] == (
        "1 client in the run already, 'b': their rows are taken as those of new clients, and their models replaced."
    )
    joined = mooring.open(tmp_path / "joined")
    assert joined.names == ("a", "b", "new") and torch.equal(joined.models["b"], told.models[0])
