"""What a fit leaves in its directory beside the models: a summary, mixtures, training losses."""

import numpy as np
import pytest

from mooring.engines.fit import fit
from mooring.runs.directory import open_run
from tests.advice.test_advise import planted


def fitted(out, **more):
    return fit(planted(0.5, clients=6), client="who", target="y", rounds=4, threads=1, out=out, **more)


def test_the_summary_says_what_a_report_needs(tmp_path):
    result = fitted(tmp_path / "run", algorithm="fedavg")
    kept = open_run(tmp_path / "run").summary
    assert {name: kept[name] for name in result.summary} == result.summary
    assert kept["algorithm"] == "fedavg" and kept["rounds"] == 4 and 1 <= kept["chosen_round"] <= 4
    assert kept["title"] == result.job.clients.title and kept["notes"] == list(result.job.clients.notes)


def test_every_client_has_its_mixture(tmp_path):
    fixed = fitted(tmp_path / "fixed", algorithm="apfl", settings={"alpha": 0.25, "adapt": "no"})
    assert fixed.clients["alpha"].tolist() == [0.25] * 6
    fitted(tmp_path / "free", algorithm="apfl", settings={"alpha": 0.5, "adapt": "step"})
    learnt = open_run(tmp_path / "free").clients["alpha"]
    assert learnt.between(0, 1).all() and learnt.nunique() > 1
    assert fitted(None, algorithm="fedavg").clients["alpha"].isna().all()


def test_training_losses_are_those_of_the_deployed_models(tmp_path):
    """In the target's units, over training rows, recomputed here from the models of the last round."""
    result = fitted(tmp_path / "run", algorithm="fedprox_one_stage", keep="last")
    rounds, clients = open_run(tmp_path / "run").rounds, result.job.clients
    errors = []
    for i, w in enumerate(result.trained.models.numpy()):
        rows = clients.train.x[clients.train.start[i] : clients.train.start[i] + clients.train.size[i]].numpy()
        y = clients.train.y[clients.train.start[i] : clients.train.start[i] + clients.train.size[i]].numpy()
        errors.append((rows @ w[:-1] + w[-1] - y) ** 2)
    expected = np.concatenate(errors).mean() * clients.target_scale**2
    assert rounds["train_loss"].iloc[-1] == pytest.approx(expected, rel=1e-6)
    assert rounds["train_loss"].notna().sum() == rounds["test_loss"].notna().sum() == 4
