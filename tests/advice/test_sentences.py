"""The answer in sentences: each number with its unit and direction, and none that contradicts another."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from mooring.advice.evaluation.setting_choice import Choice
from mooring.advice.reporting import sentences
from mooring.advice.reporting.learning_curve import LearningCurve
from mooring.data.clients import from_arrays


def frame(*kinds, **columns):
    return pd.DataFrame({"client": [f"c{i}" for i in range(len(kinds))], "recommended": kinds} | columns)


@pytest.mark.parametrize(
    ("kinds", "wanted"),
    [
        (["global"] * 4, "Use the global model at all 4 clients."),
        (["personal"] * 2, "Use a personal model at both clients."),
        (["local"], "Use a local model at the one client."),
        (
            ["global", "global", "personal", "global"],
            "Use the global model at 3 of 4 clients and a personal model at c2.",
        ),
        (
            ["global"] * 6 + ["personal"] * 3 + ["local"] * 2,
            "Use the global model at 6 of 11 clients, a personal model at 3 and a local model at c9 and c10.",
        ),
    ],
)
def test_the_headline_names_what_is_recommended_to_whom(kinds, wanted):
    assert sentences.write_headline(frame(*kinds)) == wanted


def line(pct, low, high):
    return {"pct": pct, "pct_ci_low": low, "pct_ci_high": high}


def summary(**more):
    known = {
        "metric": "mse",
        "local": 1.25,
        "global": 1.1,
        "personal": 0.98,
        "recommended": 1.0,
        "level": 0.95,
        "margin": 0.01,
        "held_out_rows": 12_345,
        "improvement_over_local": line(20.0, 12.34, 27.66),
        "improvement_over_global": line(9.09, -2.8, 20.98),
        "recommended_counts": {"personal": 3, "global": 1},
        "confidence_counts": {"high": 1, "moderate": 3},
    }
    return known | more


def test_losses_are_compared_in_percent_with_a_direction():
    assert sentences.describe_losses(summary()) == (
        "With the recommended models, mse is 1: 20.0% lower (95% CI: 12.3% lower to 27.7% lower) than with local "
        "models (1.25) and 9.1% lower (95% CI: 2.8% higher to 21.0% lower) than with the global model (1.1), on 12,345 "
        "held-out rows."
    )


def test_models_that_all_clients_use_are_not_compared_with_themselves():
    told = sentences.describe_losses(summary(recommended_counts={"global": 4}))
    assert "local models" in told and "the global model (" not in told
    told = sentences.describe_losses(summary(recommended_counts={"local": 4}))
    assert "with the global model (1.1)" in told and "local models (" not in told


def test_a_change_reads_as_people_write_it():
    assert sentences.describe_change(line(-2.0, -3.0, 1.0), 0.9) == "2.0% higher (90% CI: 3.0% higher to 1.0% lower)"
    assert sentences.describe_change(line(97.7, 65.8, 100.0), 0.95) == "97.7% lower (95% CI: 65.8% lower to 100% lower)"
    assert sentences.describe_change(line(3.0, -np.inf, np.inf), 0.95) == "3.0% lower"  # one client has no error
    assert sentences.format_loss(123456.7) == "123,457" and sentences.format_loss(0.123456) == "0.1235"


def test_confidence_has_its_counts_and_their_whole():
    assert sentences.describe_confidence(summary(), 4) == (
        "Confidence that it is better than the alternatives: high for 1 and moderate for 3 of 4 clients."
    )


def survey(side, r=0.5, border=2.0):
    spread = {"R": r, "low": r / 2, "high": 2 * r}
    return SimpleNamespace(thresholds={"alternative": {"R": border, "side": side}}, heterogeneity=spread)


def test_theory_has_a_way_out_where_held_out_data_differ():
    assert sentences.describe_theory(summary(), survey("global")) == (
        "The theorem of the alternative favors the global model (R = 0.5 < 2), and so do held-out data "
        "(1.25 local, 1.1 global)."
    )
    assert sentences.describe_theory(summary(), survey("local", 5.0)) == (
        "The theorem of the alternative favors local models (R = 5 > 2), held-out data favor the global model "
        "(1.25 local, 1.1 global). Go with the data: the theorem is a worst-case bound."
    )
    assert sentences.describe_theory(summary(), survey("neither", 2.5)) == (
        "The theorem of the alternative favors neither a global model nor local ones (R = 2.5, between 1.2 and 5, "
        "threshold 2); held-out data favor the global model (1.25 local, 1.1 global)."
    )
    for loss in (1.1, 1.105, 1.095):
        close = sentences.describe_theory(summary(local=loss), survey("global"))
        assert "held-out data show hardly any difference" in close and "Go with the data" in close
    assert sentences.describe_theory(summary(), None) == ""


def test_an_estimate_of_no_heterogeneity_is_described_by_how_large_it_can_be():
    nothing = survey("global", 0.0)
    nothing.heterogeneity["high"] = 1.46
    assert "(R at most 1.5 < 2)" in sentences.describe_theory(summary(), nothing)


def choice_with(variance, columns=()):
    prior = SimpleNamespace(variance=torch.tensor(variance, dtype=torch.float64), kind="diagonal", columns="linear")
    plan = SimpleNamespace(family="diagonal", columns="linear")
    return Choice(plan, {}, plan, plan, plan, {}, pd.DataFrame(columns), [prior], torch.zeros(0))


def test_columns_that_do_not_vary_within_clients_count_as_the_intercept():
    rng = np.random.default_rng(0)
    x = [np.column_stack([rng.normal(size=6), np.full(6, i)]) for i in range(3)]
    clients = from_arrays(x, [rng.normal(size=6) for _ in range(3)], features=("age", "town size"))
    job = SimpleNamespace(task=None, clients=clients)
    varies = sentences.varies_within(None, clients.train).any(0)
    found = sentences.describe_differences(job, choice_with([3.0, 4.0, 3.0]), None, varies)
    assert found == "Clients differ mostly in the intercept (70%) and the effect of age (30%)."
    assert sentences.describe_differences(job, choice_with([0.0, 0.0, 0.0]), None, varies) == ""
    assert sentences.describe_differences(job, choice_with([1.0])._replace(priors=[]), None, varies) == ""


def candidates(*rows):
    return pd.DataFrame(rows, columns=["columns", "weight", "loss"])


def test_columns_that_bend_are_named_with_what_they_gain_on_held_out_rows():
    table = candidates(("linear", 0.0, 2.0), ("linear", 0.0, 2.5), ("spline", 0.6, 1.5), ("both", 0.4, 1.6))
    choice = choice_with([1.0])._replace(table=table)
    assert sentences.describe_shape(choice, "mse", 10.0) == (
        "Effects are not linear: the best candidate with splines and a boosted score has a held-out mse that is 25.0% "
        "lower than that of the best one with linear columns (15 instead of 20)."
    )
    for columns, wanted in (("spline", "with splines has"), ("boosted", "with a boosted score has")):
        only = choice._replace(table=candidates(("linear", 0.1, 2.0), (columns, 0.9, 1.5)))
        assert wanted in sentences.describe_shape(only, "mse", 1.0)
    none = choice._replace(table=candidates(("linear", 1.0, 2.0), ("spline", 0.0, 1.9)))
    assert sentences.describe_shape(none, "mse", 1.0) == ""
    worse = choice._replace(table=candidates(("linear", 0.6, 2.0), ("spline", 0.4, 2.01)))
    assert sentences.describe_shape(worse, "mse", 1.0) == ""


def test_names_that_read_as_counts_follow_the_word_client():
    some = frame(*["personal"] * 5, "local").assign(client=[str(i) for i in range(6)])
    assert sentences.write_headline(some) == "Use a personal model at 5 of 6 clients and a local model at client 5."
    assert sentences.name_clients(["3", "7"]) == "clients 3 and 7"
    assert sentences.name_clients(["Zurich and Basel"]) == "Zurich and Basel"


def test_the_largest_contribution_is_told_with_both_losses():
    columns = {"contribution": [0.01, 0.0196, np.nan], "contribution_pct": [1.0, 2.0, np.nan]}
    some = frame("personal", "personal", "global", others_held_out=[1.0, 0.98, 1.0], **columns)
    assert sentences.describe_contributions(some, summary()) == (
        "Without c1, the other clients' mse with personal models would be 2.0% higher (0.9996 instead of 0.98)."
    )
    for none in (
        frame("global"), frame("global", contribution_pct=[np.nan]), frame("global", contribution_pct=[-0.1])
    ):  # fmt: skip
        assert sentences.describe_contributions(none, summary()) == ""


def test_outliers_and_rows_needed():
    some = frame(*["global"] * 6, is_outlier=[True] * 5 + [False])
    assert sentences.describe_outliers(some) == "Outliers, far from the other clients: c0, c1, c2, c3 and 1 more."
    assert sentences.describe_outliers(frame("global", is_outlier=[False])) == ""
    found = sentences.describe_rows_needed(LearningCurve(pd.DataFrame(), 50.0, 1_200.0))
    assert found == "A typical client would need about 1,200 rows of its own (it has 50) to do as well locally."
    assert sentences.describe_rows_needed(None) == ""
    assert sentences.join_words(["a", "b", "c"]) == "a, b and c" and sentences.join_words(["a"]) == "a"
