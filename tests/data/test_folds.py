"""Folds: rows of one unit lie in one of them, sizes are even, and progress is told while they are fitted."""

import numpy as np
import pandas as pd
import torch

import mooring
from mooring.advice.evaluation import cross_fitting
from mooring.core.cohort import Rows
from mooring.data.folds import (
    DEFAULT_FOLDS,
    FEW_ROWS_FOLDS,
    MAX_FOLDS,
    TIME_FOLDS,
    assign_folds,
    assign_time_blocks,
    count_folds,
    drop_copies,
    iterate_folds,
    number_distinct_rows,
    row_clients,
    row_groups,
    row_times,
    usable_rows,
)
from mooring.data.loading import load
from mooring.tasks.linear import Linear
from mooring.tasks.linear_losses import Absolute
from mooring.tasks.logistic import Logistic
from tests.support.problems import logistic_clients


def visits(patients: int = 8, each: int = 12, rows: int = 3, seed: int = 0) -> pd.DataFrame:
    """Patients' visits, of several rows each; `who` tells a visit."""
    rng = np.random.default_rng(seed)
    who = np.repeat(np.arange(patients * each), rows)
    patient = who // each
    order = rng.permutation(len(who))
    x = rng.normal(size=patients * each)[who]
    y = x + patient / 4 + rng.normal(size=len(who))
    return pd.DataFrame({"patient": [f"p{i}" for i in patient], "visit": who, "x": x, "y": y}).iloc[order]


def test_units_lie_in_the_order_of_the_rows():
    clients = load(visits(), client="patient", target="y", group="visit")
    rows, units = usable_rows(clients), row_groups(clients)
    told = pd.DataFrame({"owner": row_clients(rows), "unit": units, "x": rows.compact().x[:, 0]})
    assert (told.groupby(["owner", "unit"])["x"].nunique() == 1).all()  # x is the visit's
    assert told["x"].nunique() == len(told.groupby(["owner", "unit"]))


def test_no_fold_tears_a_unit_apart():
    clients = load(visits(), client="patient", target="y", group="visit")
    rows, units = usable_rows(clients).compact(), row_groups(clients)
    fold = assign_folds(rows, clients.keys, 5, 0, units)
    told = pd.DataFrame({"owner": row_clients(rows), "unit": units, "fold": fold})
    assert (told.groupby(["owner", "unit"])["fold"].nunique() == 1).all()
    count = told.drop_duplicates(["owner", "unit"]).groupby(["owner", "fold"]).size().unstack(fill_value=0)
    assert (count.max(axis=1) - count.min(axis=1)).max() <= 1
    torn = pd.DataFrame({"owner": row_clients(rows), "unit": units, "fold": assign_folds(rows, clients.keys, 5, 0)})
    assert (torn.groupby(["owner", "unit"])["fold"].nunique() > 1).any()
    held = [part.place for part in iterate_folds(rows, clients.keys, 0, 5, units)]
    assert sorted(torch.cat(held).tolist()) == list(range(len(rows.y)))


def test_rows_that_are_units_of_their_own_are_dealt_as_without():
    clients = load(visits(), client="patient", target="y", drop=["visit"])
    rows = usable_rows(clients).compact()
    alone = assign_folds(rows, clients.keys, 5, 3, torch.arange(len(rows.y)))
    assert row_groups(clients) is None and torch.equal(alone, assign_folds(rows, clients.keys, 5, 3))


def test_advice_heeds_the_units(monkeypatch):
    seen = []
    monkeypatch.setattr(cross_fitting, "iterate_folds", lambda *given: seen.append(given[4]) or iterate_folds(*given))
    mooring.advise(visits(), client="patient", target="y", group="visit", folds=4, shape="linear", theory=False)
    assert seen[0] is not None and len(torch.unique(seen[0])) > 50


def test_progress_rises_to_its_end_while_folds_are_fitted():
    steps = []
    mooring.advise(
        visits(4), client="patient", target="y", folds=3, theory=False, progress=lambda *step: steps.append(step)
    )
    done = [step[1:] for step in steps if step[0] == "holding rows out"]
    assert done == [(0, 3), (1, 3), (2, 3)]
    assert [step[1:] for step in steps if step[0] == "evaluating on held-out rows"] == [(1, 3), (2, 3), (3, 3)]


def test_a_slow_choice_from_one_fold_is_nearly_that_of_all(monkeypatch):
    """The candidates are compared in one fold; evidence still comes from every row."""
    clients = logistic_clients(m=8, sizes=[40] * 8, seed=1)
    task = Logistic(3)
    whole, everything = cross_fitting.cross_fit(task, clients.train, clients.keys, folds=3)
    monkeypatch.setattr(cross_fitting, "SLOW_FIT_OPERATIONS", 0.0)
    part, seen = cross_fitting.cross_fit(task, clients.train, clients.keys, folds=3)
    assert part.plan.family in {setting.family for setting in whole.mix}
    assert torch.equal(seen.held.rows, everything.held.rows) and torch.equal(
        seen.held.rows, clients.train.size.double()
    )


def rows_of_sizes(*sizes, seed=0, columns=2):
    rng = np.random.default_rng(seed)
    x = [torch.from_numpy(rng.standard_normal((n, columns))) for n in sizes]
    return Rows.stack(x, [torch.from_numpy(rng.standard_normal(n)) for n in sizes])


def test_how_many_folds_there_are_by_rows_and_by_the_size_of_clients():
    assert count_folds(rows_of_sizes(*[30] * 50)) == DEFAULT_FOLDS
    assert count_folds(rows_of_sizes(*[30] * 10)) == FEW_ROWS_FOLDS
    assert count_folds(rows_of_sizes(*[8] * 5, *[200] * 10)) == MAX_FOLDS
    assert count_folds(rows_of_sizes(*[8] * 5, *[12] * 10)) == 12  # no client has more rows to leave out
    assert count_folds(rows_of_sizes(8, *[200] * 20)) == DEFAULT_FOLDS  # one small client among many
    assert count_folds(rows_of_sizes(*[8] * 5), in_time_order=True) == TIME_FOLDS
    small = rows_of_sizes(*[8] * 3)
    assert (
        cross_fitting.count_task_folds(Linear(2), small, None) == 8
        and cross_fitting.count_task_folds(Linear(2), small, 3) == 3
    )
    assert cross_fitting.count_task_folds(Logistic(2), rows_of_sizes(*[15] * 3), None) == FEW_ROWS_FOLDS
    assert cross_fitting.count_task_folds(Absolute(2), rows_of_sizes(*[15] * 3), None) == DEFAULT_FOLDS


def test_clients_of_up_to_20_rows_are_left_out_one_row_at_a_time():
    rows, keys = rows_of_sizes(7, 20, 14, 300), np.arange(4, dtype=np.uint64)
    count = cross_fitting.count_task_folds(Linear(2), rows, None)
    assert count == 20
    fold = assign_folds(rows, keys, count, 0)
    for i in range(3):
        assert int(torch.bincount(fold[row_clients(rows) == i]).max()) == 1
    for part in iterate_folds(rows, keys, 0, count):
        assert int(part.held.size[:3].max()) <= 1


def test_repeated_rows_of_a_client_share_a_fold():
    rows = rows_of_sizes(6, 9)
    again = torch.tensor([0, 1, 2, 3, 4, 5, 0, 0, 3, *range(6, 15), 8])
    twice = Rows(rows.x[again], rows.y[again], torch.tensor([0, 9]), torch.tensor([9, 10]))
    number = number_distinct_rows(twice)
    assert len(number.unique()) == 15
    for seed in range(5):
        fold = assign_folds(twice, np.arange(2, dtype=np.uint64), 5, seed, number)
        for one in number.unique():
            assert len(fold[number == one].unique()) == 1
    assert number_distinct_rows(rows) is None
    other = Rows(rows.x, rows.y, rows.start, rows.size)
    other.x[0], other.y[0] = other.x[7], other.y[7]  # equal rows of different clients
    assert number_distinct_rows(other) is None
    coarse = Rows(twice.x.sign(), twice.y.sign(), twice.start, twice.size)
    assert number_distinct_rows(coarse) is None  # equal by nature: different observations


def test_advice_keeps_repeated_rows_in_one_fold(monkeypatch):
    seen = []
    monkeypatch.setattr(cross_fitting, "iterate_folds", lambda *given: seen.append(given[4]) or iterate_folds(*given))
    frame = visits(4).drop(columns="visit").reset_index(drop=True)
    frame = pd.concat([frame, frame.iloc[::3]], ignore_index=True)
    mooring.advise(frame, client="patient", target="y", folds=2, shape="linear", theory=False)
    assert len(seen[0]) == len(frame) and len(seen[0].unique()) == len(frame) - len(frame) // 4


def test_rows_that_all_appear_equally_often_are_counted_once():
    rows = rows_of_sizes(6, 9)
    order = torch.tensor([0, 1, 2, 3, 4, 5] * 3 + [*range(6, 15)] * 6)
    copied = Rows(rows.x[order], rows.y[order], torch.tensor([0, 18]), torch.tensor([18, 54]))
    units = number_distinct_rows(copied)
    few, left, keep = drop_copies(copied, units)
    assert few.size.tolist() == [6, 18] and int(keep.sum()) == 24  # 3 and 6 times: thrice each is once and twice
    torch.testing.assert_close(few.of(0)[0], rows.of(0)[0])
    assert len(left) == 24 and len(left.unique()) == 15
    same, units, keep = drop_copies(rows, None)
    assert same is rows and units is None and bool(keep.all())
    uneven = Rows(rows.x[order[:-1]], rows.y[order[:-1]], torch.tensor([0, 18]), torch.tensor([18, 53]))
    assert bool(drop_copies(uneven, number_distinct_rows(uneven))[2].all())


def test_forward_chaining_never_trains_on_later_rows():
    rows, keys = rows_of_sizes(11, 24, 6, columns=1), np.arange(3, dtype=np.uint64)
    rng = np.random.default_rng(0)
    time = torch.from_numpy(rng.integers(0, 12, 41).astype(float))  # with ties
    rows.x[:, 0] = time
    held = []
    for part in iterate_folds(rows, keys, 0, 4, None, time):
        held.append(part.place)
        for i in range(3):
            before, after = part.train.of(i)[0], part.held.of(i)[0]
            assert not len(after) or (len(before) and float(before.max()) < float(after.min()))
        torch.testing.assert_close(rows.x[part.place], part.held.x)
    places = torch.cat(held)
    early = assign_time_blocks(rows, time, 8) < 4
    assert sorted(places.tolist()) == torch.nonzero(~early)[:, 0].tolist()  # the earlier half only trains


def test_blocks_in_time_are_alike_and_equal_times_share_one():
    rows = rows_of_sizes(10, 10)
    time = torch.cat([torch.arange(10).flip(0), torch.tensor([0, 0, 0, 1, 1, 2, 3, 4, 5, 6])]).double()
    found = assign_time_blocks(rows, time, 5)
    assert found[:10].tolist() == [4, 4, 3, 3, 2, 2, 1, 1, 0, 0]
    assert found[10:].tolist() == [0, 0, 0, 1, 1, 2, 3, 3, 4, 4]


def test_advice_with_a_time_column_goes_forward_in_time():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"who": np.repeat(["a", "b", "c"], 30), "day": np.tile(np.arange(30), 3)})
    frame["x"], frame["y"] = rng.normal(size=90), rng.normal(size=90)
    frame = frame.sample(frac=1, random_state=0)
    clients = load(frame, client="who", target="y", time_column="day")
    time = row_times(clients)
    rows = usable_rows(clients).compact()
    assert sorted(time[row_clients(rows) == 1].tolist()) == list(range(30))
    advice = mooring.advise(frame, client="who", target="y", time_column="day", theory=False, folds=4, shape="linear")
    assert (advice.clients["held_out_rows"] == 15).all()  # the earlier half only trains
