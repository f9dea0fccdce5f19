"""The latest target beside other models: its level, its share, and what a run makes of it."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from mooring.advice.advise import advise
from mooring.advice.evaluation.latest_target import fit_latest_targets, latest_target_share
from mooring.core.cohort import Rows
from mooring.data.folds import FoldSplit
from mooring.tasks.linear import Linear

OPTIONS = {
    "client": "who",
    "target": "y",
    "time_column": "t",
    "features": ["t"],
    "threads": 1,
    "theory": False,
    "shape": "linear",
}


def pool(*targets):
    """Rows of one column of zeros with these targets, client after client."""
    size = torch.tensor([len(part) for part in targets])
    y = torch.tensor([value for part in targets for value in part], dtype=torch.float64)
    return Rows(torch.zeros(len(y), 1, dtype=torch.float64), y, torch.cumsum(size, 0) - size, size)


def test_it_is_the_last_target_with_a_bounded_step():
    models = fit_latest_targets(Linear(1), pool([1.0, 2.0, 3.0, 5.0], [0.0, 1.0, 2.0, 30.0], [7.0], [], [4.0, 4.0]))
    # Steps 1, 1, 2: the last may be 2 at most. Steps 1, 1, 28: it becomes 2. One row or no step: as it is.
    assert models.tolist() == [[0.0, level] for level in (5.0, 4.0, 7.0, 0.0, 4.0)]


def share_of(own, latest, count=4):
    """The share where models have these mean losses [folds, m], and latest targets those."""
    own, latest = torch.tensor(own).double(), torch.tensor(latest).double()
    train = pool(*([0.0, 0.0] for _ in own[0]))  # the latest target is 0
    held = [pool(*([float(loss) ** 0.5] * count for loss in fold)) for fold in latest]
    parts = [FoldSplit(train, part, torch.arange(0)) for part in held]
    losses = SimpleNamespace(sums=count * own[..., None], count=torch.full(own.shape, count))
    return latest_target_share(SimpleNamespace(task=Linear(1), parts=parts), losses, torch.ones(1).double())


def test_its_share_follows_the_typical_ratio_of_losses():
    one = [[1.0, 1.0], [1.0, 1.0]]
    assert share_of(one, one) == pytest.approx(1 / 4)
    ratio = np.log((2 + 0.1 * 2**0.5) / (1 + 0.1 * 2**0.5))
    double = [[2.0, 2.0], [2.0, 2.0]]
    assert share_of(double, one) == pytest.approx(1 / (1 + 3 * np.exp(-4 * ratio)))
    # The second fold counts twice.
    assert share_of([double[0], one[0]], one) == pytest.approx(1 / (1 + 3 * np.exp(-4 * ratio / 3)))
    assert share_of([one[0], double[0]], one) == pytest.approx(1 / (1 + 3 * np.exp(-8 * ratio / 3)))
    assert share_of(one, [[100.0, 100.0], [100.0, 100.0]]) == 0.0
    # A single client with an enormous loss of its latest target does not decide.
    many = [[1.0] * 20, [1.0] * 20]
    odd = [[1.0] * 19 + [1e6], [1.0] * 20]
    assert share_of(many, odd) > 0.1


def drifting_table(levels, seed=0):
    """Clients whose targets rise and then stay, or rise all the time, with noise."""
    rng, parts = np.random.default_rng(seed), []
    for i in range(12):
        t = np.arange(30)
        trend = np.minimum(t, 10) if levels else t
        y = rng.normal(0, 20) + rng.uniform(2, 6) * trend + 0.5 * rng.standard_normal(30)
        parts.append(pd.DataFrame({"who": f"c{i}", "t": t, "y": y}))
    return pd.concat(parts, ignore_index=True)


@pytest.mark.parametrize("levels", [True, False])
def test_clients_that_stay_get_their_latest_level_and_trends_are_continued(levels):
    table = drifting_table(levels)
    late = table["t"] >= 24
    advice = advise(table[~late].sample(frac=1, random_state=3), **OPTIONS)
    predicted = advice.predict(table[late])["y"].to_numpy()
    error = np.mean((predicted - table.loc[late, "y"]) ** 2)
    last = table[table["t"] == 23].set_index("who")["y"]
    stays = np.mean((table.loc[late, "who"].map(last) - table.loc[late, "y"]) ** 2)
    if levels:
        assert advice.choice.latest_share > 0.9 and error < 1.2 * stays and "latest target" in advice.words["time"]
    else:
        assert advice.choice.latest_share == 0 and error < 0.1 * stays and "latest target" not in advice.words["time"]


def test_without_a_time_column_and_for_classes_there_is_none():
    table = drifting_table(True)
    options = {name: value for name, value in OPTIONS.items() if name != "time_column"}
    without = advise(table, **options)
    assert without.choice.latest_share == 0 and "time" not in without.words
    classes = table.assign(y=np.where(table["y"] > table["y"].median(), "high", "low"))
    assert advise(classes, **OPTIONS).choice.latest_share == 0
