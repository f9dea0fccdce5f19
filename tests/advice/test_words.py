"""The answer in words: the headline follows the gains, theory never contradicts without a way out."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from mooring.advice import words
from mooring.advice.curve import LearningCurve
from mooring.data.clients import from_arrays


def gain(mean, low=None, high=None):
    ends = {"mean": mean, "low": mean - 1 if low is None else low, "high": mean + 1 if high is None else high}
    return ends | {f"percent_{k}": v for k, v in ends.items()}


def summary(alone, common, **more):
    return {"metric": "mse", "practical": 0.01, "gain_over_alone": alone, "gain_over_common": common} | more


@pytest.mark.parametrize(
    ("low", "will_do", "begins"),
    [
        (1.0, {"personal": 5, "common": 2}, "Personal models pay"),
        (-1.0, {"personal": 5, "common": 2}, "Personal models are the best guess"),
        (1.0, {"personal": 1, "common": 2}, "One common model will do for most clients"),
        (1.0, {"alone": 3, "common": 2}, "Training alone will do for most clients"),
        (-1.0, {"personal": 2, "common": 2}, "One common model will do for 2 of 4 clients"),  # of as many the simpler
    ],
)
def test_the_headline_is_what_most_clients_need(low, will_do, begins):
    said = words.headline(summary(gain(3.0, low), gain(5.0), will_do=will_do))
    assert said.startswith(begins) and said.count("[") == 2


def test_where_the_plan_is_one_of_the_ends_nothing_is_compared_with_itself():
    told = summary(
        gain(0.0), gain(5.0), will_do={"alone": 3}, sure_over_alone={"same": 3}, sure_over_common={"sure": 3}
    )
    assert words.headline(told) == (
        "No personal model does better than training alone, whose mse is 5.0 % [4.0, 6.0] lower than with one common "
        "model."
    )
    told = summary(
        gain(5.0), gain(0.0), will_do={"common": 3}, sure_over_alone={"sure": 3}, sure_over_common={"same": 3}
    )
    assert words.headline(told) == (
        "No personal model does better than one common model, whose mse is 5.0 % [4.0, 6.0] lower than alone."
    )


def test_a_gain_reads_as_people_write_it():
    assert words.change(gain(3.72, 2.7, 4.81)) == "3.7 % [2.7, 4.8] lower"
    assert words.change(gain(-2.0, -3.0, 1.0)) == "2.0 % [-1.0, 3.0] higher"
    assert words.change(gain(-0.04, -0.04, 0.04)) == "0.0 % [0.0, 0.0] higher"
    assert words.change(gain(97.7, 65.8, 100.0)) == "97.7 % [65.8, 100] lower"


def test_counts_are_told_and_nobody_is_left_out():
    told = summary(gain(1.0), gain(1.0), deploy={"personal": 5, "alone": 1}, will_do={"common": 2, "personal": 4})
    assert words.who_deploys_what(told, 6) == (
        "Deploy a personal model at 5 and a model trained alone at 1 of 6 clients. Within 1 % of the loss common will "
        "do at 2."
    )
    told["sure_over_alone"] = {"likely": 3, "sure": 2, "same": 1}
    assert words.how_sure(told, "alone") == "Better than alone: sure at 2, likely at 3, the same at 1."


def survey(side, r=0.5, border=2.0):
    spread = {"R": r, "low": r / 2, "high": 2 * r}
    return SimpleNamespace(thresholds={"alternative": {"R": border, "side": side}}, heterogeneity=spread)


def test_theory_has_a_way_out_where_the_rows_differ():
    prefer_common = summary(gain(3.0), gain(1.0))
    same = words.what_theory_says(prefer_common, survey("common"))
    assert same.endswith("says common rather than alone, because R = 0.5 is below 2; so do the rows.")
    other = words.what_theory_says(prefer_common, survey("alone", 5.0))
    assert "says alone rather than common, because R = 5 is above 2; the rows say the opposite" in other
    assert other.endswith("trust them, it is for worst cases.")
    assert "leaves it open" in words.what_theory_says(prefer_common, survey("undecided"))
    assert words.what_theory_says(prefer_common, None) == ""


def test_no_spread_to_be_seen_is_told_by_how_large_it_can_be():
    nothing = survey("common", 0.0)
    nothing.heterogeneity["high"] = 1.46
    said = words.what_theory_says(summary(gain(3.0), gain(1.0)), nothing)
    assert "because R, at most 1.5, is below 2;" in said and "R = 0" not in said


def test_columns_that_clients_do_not_vary_in_count_as_the_level():
    rng = np.random.default_rng(0)
    x = [np.column_stack([rng.normal(size=6), np.full(6, i)]) for i in range(3)]
    clients = from_arrays(x, [rng.normal(size=6) for _ in range(3)], features=("age", "town size"))
    prior = SimpleNamespace(variance=torch.tensor([3.0, 4.0, 3.0], dtype=torch.float64))
    said = words.what_differs(clients, SimpleNamespace(prior=prior))
    assert said == "What differs: mostly the level (70 %) and the effect of age (30 %)."
    assert words.what_differs(clients, SimpleNamespace(prior=None)) == ""


def test_the_gap_is_drawn_as_it_closes():
    said = words.what_it_takes(LearningCurve(pd.DataFrame(), 50.0, 200.0))
    bars = said.split("gap: ")[1][:7]
    left = (1 / np.linspace(50, 200, 7) - 1 / 200) / (1 / 50 - 1 / 200)
    heights = [7 - words.BARS.index(bar) for bar in bars]  # 7 is the whole gap, 1 next to nothing
    assert "200 rows instead of 50" in said and heights == sorted(heights, reverse=True)
    np.testing.assert_allclose(heights, 1 + 6 * left, atol=1)
    assert words.what_it_takes(None) == ""
