"""Recommendations by hand on constructed sums: practical sameness, the guard, clustered errors, expected losses."""

import numpy as np
import pytest
import statsmodels.api as sm
import torch
from scipy.stats import t

from mooring.advice.evaluation.loss_sums import ALTERNATIVES, GLOBAL, LOCAL, MODEL_KINDS, PERSONAL, zero_sums
from mooring.advice.inference.improvements import estimate_improvements
from mooring.advice.inference.recommendation import (
    CLIENT_LEVEL,
    MIN_LOSS_SHARE,
    choose_models,
    describe_probability,
    expected_program,
    full_size_factors,
    recommend,
)
from mooring.advice.reporting.tables import as_percent, recommendation_columns
from mooring.core.summing import run_alone
from mooring.estimates.clustered_mean import clustered_sums, mean_and_error, mean_difference
from tests.advice.loss_sum_cases import make_sums

NEAR, FAR = 0.005, 0.05  # divergences on either side of 1% of a loss of 1


def held_out(differences, rows=50):
    """Sums whose personal losses are 1, and whose other models' losses are higher by `differences` [m, 2]."""
    differences = np.asarray(differences, dtype=float)
    loss = np.concatenate([1 + differences, np.ones((len(differences), 1))], 1)
    return make_sums(np.full(len(loss), rows), loss, np.full_like(differences, 1e-3))


def own(divergence, rows=60):
    return make_sums(np.full(len(divergence), rows), np.ones((len(divergence), 3)), divergence)


def test_the_simplest_model_that_is_practically_the_same_is_recommended():
    mine = own([[NEAR, FAR], [FAR, NEAR], [FAR, FAR], [NEAR, NEAR / 2], [NEAR / 2, NEAR]])
    chosen = choose_models(held_out(np.zeros((5, 2))), mine, margin=0.01)
    assert chosen.tolist() == [LOCAL, GLOBAL, PERSONAL, GLOBAL, LOCAL]
    assert choose_models(held_out(np.zeros((5, 2))), mine, margin=0.001).tolist() == [PERSONAL] * 5
    assert PERSONAL not in choose_models(held_out(np.zeros((5, 2))), mine, margin=0.1)


def test_a_model_must_be_practically_the_same_at_held_out_rows_too():
    """A local fit to two rows agrees at these rows with every model that fits them."""
    held = held_out(np.zeros((3, 2)))._replace(divergence=50 * torch.tensor([[FAR, FAR], [NEAR, FAR], [FAR, NEAR]]))
    assert choose_models(held, own([[0.0, FAR], [0.0, FAR], [FAR, 0.0]])).tolist() == [PERSONAL, LOCAL, GLOBAL]
    unseen = held._replace(rows=0 * held.rows, divergence=0 * held.divergence)  # its own rows decide
    assert choose_models(unseen._replace(loss=held.loss), own([[0.0, FAR]] * 3), margin=1e9).tolist() == [LOCAL] * 3


def test_one_standard_error_is_added_to_a_clients_divergence():
    """Rows of equal divergence have none; of a few that diverge much, others may diverge as well."""
    each = np.array([[0.006] * 8, [0.0] * 7 + [0.048]])  # the same mean; errors 0 and 0.006
    assert np.std(each, axis=1, ddof=1) / 8**0.5 == pytest.approx([0.0, 0.006])
    mine = own([[0.006, FAR]] * 2, rows=8)._replace(
        divergence_square=torch.tensor([[part, FAR**2 * 8] for part in (each**2).sum(1)])
    )
    still = held_out(np.zeros((2, 2)))._replace(divergence=torch.zeros(2, 2), divergence_square=torch.zeros(2, 2))
    assert choose_models(still, mine, margin=0.01).tolist() == [LOCAL, PERSONAL]
    assert choose_models(still, mine, margin=0.0121).tolist() == [LOCAL, LOCAL]
    assert choose_models(still, mine, margin=0.0119).tolist() == [LOCAL, PERSONAL]


def test_the_margin_is_a_share_of_the_pooled_loss_of_personal_models():
    held = make_sums([10, 90], [[9, 9, 6.0], [9, 9, 1.0]], np.full((2, 2), 1e-3))  # 1.5 over all rows
    for divergence, wanted in ((0.0149, LOCAL), (0.0151, PERSONAL)):
        chosen = choose_models(held._replace(difference=0 * held.difference), own([[divergence, 9]] * 2), margin=0.01)
        assert chosen.tolist() == [wanted] * 2


def test_the_guard_keeps_personal_models_where_held_out_rows_contradict():
    """Ten clients would get the global model, five the local one. The global model is seen to be worse by 3%."""
    mine = own([[FAR, NEAR]] * 10 + [[NEAR, FAR]] * 5)
    wobble = 0.002 * np.resize([1, -1], 15)
    differences = np.stack([wobble, wobble + 0.03], 1)
    assert choose_models(held_out(differences), mine).tolist() == [PERSONAL] * 10 + [LOCAL] * 5
    # Worse by less than two margins: within what is practically the same.
    differences = np.stack([wobble, wobble + 0.015], 1)
    assert choose_models(held_out(differences), mine).tolist() == [GLOBAL] * 10 + [LOCAL] * 5
    # Worse by more, but only as one client shows: an error as large as the difference.
    lone = np.stack([wobble, np.where(np.arange(15) == 3, 0.3, 0.0)], 1)
    assert choose_models(held_out(lone), mine).tolist() == [GLOBAL] * 10 + [LOCAL] * 5
    # What other clients show of the global model does not count: they would not get it.
    others = np.stack([wobble, np.where(np.arange(15) < 10, 0.0, 5.0)], 1)
    assert choose_models(held_out(others), mine).tolist() == [GLOBAL] * 10 + [LOCAL] * 5


def test_the_guard_recommends_what_held_out_rows_show_to_be_far_better():
    """Personal models that equal the global one, as where no variation between clients was found."""
    mine = own([[FAR, 0.0]] * 12)
    wobble = 0.002 * np.resize([1, -1], 12)
    assert choose_models(held_out(np.stack([wobble - 0.03, 0 * wobble], 1)), mine).tolist() == [LOCAL] * 12
    # Better by less than two margins, or only as one client shows.
    assert choose_models(held_out(np.stack([wobble - 0.015, 0 * wobble], 1)), mine).tolist() == [GLOBAL] * 12
    lone = np.stack([np.where(np.arange(12) == 3, -0.3, 0.0), 0 * wobble], 1)
    assert choose_models(held_out(lone), mine).tolist() == [GLOBAL] * 12


def test_errors_are_clustered_by_client():
    """Against statsmodels: least squares on a constant with cluster-robust errors, corrected by m / (m - 1)."""
    rng = np.random.default_rng(0)
    size = rng.integers(3, 40, 12)
    owner = np.repeat(np.arange(12), size)
    y = 0.3 + rng.normal(size=12)[owner] + rng.normal(size=len(owner))
    found = sm.OLS(y, np.ones(len(y))).fit(
        cov_type="cluster", cov_kwds={"groups": owner, "use_correction": False}, use_t=True
    )
    sums = torch.from_numpy(np.bincount(owner, y))
    rows = torch.from_numpy(size).double()
    mean, error = mean_and_error(clustered_sums(rows, sums, rows > 0).sum(0))
    assert mean == pytest.approx(found.params[0], rel=1e-12)
    assert error == pytest.approx(found.bse[0] * (12 / 11) ** 0.5, rel=1e-10)
    line = mean_difference(rows, sums, 0.9)
    reach = t.ppf(0.95, 11) * error
    assert line == pytest.approx((mean, mean - reach, mean + reach), rel=1e-9)
    assert mean_difference(torch.cat([rows, torch.zeros(3)]), torch.cat([sums, torch.zeros(3)]), 0.9) == line
    assert mean_and_error(clustered_sums(rows[:1], sums[:1], rows[:1] > 0).sum(0))[1] == np.inf and mean_and_error(
        clustered_sums(rows[:0], sums[:0], rows[:0] > 0).sum(0)
    ) == (0, np.inf)


def noisy_case(m=40, seed=0):
    """Held-out and own sums of clients with all kinds of recommendations."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(3, 60, m)
    divergence = np.exp(rng.normal(-5, 2, (m, 2)))
    loss = np.exp(rng.normal(0, 0.5, (m, 1))) * np.ones((m, 3))
    loss[:, :2] += divergence + 0.3 * divergence * rng.normal(size=(m, 2))
    deviation = np.stack([4 * divergence[:, 0], 4 * divergence[:, 1], 2 * divergence.prod(1) ** 0.5], 1)
    return make_sums(rows, loss, divergence, deviation), make_sums(rows + 1, loss, divergence, deviation)


def test_the_federations_line_is_the_difference_of_the_losses_beside_it():
    held, mine = noisy_case()
    found = recommend(held, mine)
    assert set(found.recommended) == set(MODEL_KINDS)
    loss = (held.loss / held.rows[:, None]).numpy()
    used = loss[np.arange(40), [MODEL_KINDS.index(name) for name in found.recommended]]
    assert found.loss["recommended"] == pytest.approx(np.average(used, weights=held.rows))
    for other in ALTERNATIVES:
        assert found.line[other].mean == pytest.approx(found.loss[other] - found.loss["recommended"])
        assert found.personal_line[other].mean == pytest.approx(found.loss[other] - found.loss[PERSONAL])
        assert found.line[other].low < found.line[other].mean < found.line[other].high
        same = found.recommended == other
        assert found.is_same[other][same].all() and (found.over[other].probability[same] == 0.5).all()


def test_percentages_follow_from_the_losses_in_the_same_row():
    columns = recommendation_columns(recommend(*noisy_case()), unit=9.0)
    losses = np.stack([columns[name] for name in MODEL_KINDS], 1)
    mine = losses[np.arange(40), [MODEL_KINDS.index(name) for name in columns["recommended"]]]
    for k, other in enumerate(ALTERNATIVES):
        better, pct = columns[f"improvement_over_{other}"], columns[f"improvement_over_{other}_pct"]
        apart = columns["recommended"] != other
        np.testing.assert_allclose(better[apart], (losses[:, k] - mine)[apart])
        np.testing.assert_allclose(pct, 100 * (1 - mine / losses[:, k]), atol=1e-9)
        low, high = (columns[f"improvement_over_{other}_ci_{end}"] for end in ("low", "high"))
        probability = columns[f"probability_better_than_{other}"]
        assert ((low > 0) == (probability > (1 + CLIENT_LEVEL) / 2))[apart].all()
        assert (better[~apart] == 0).all() and (probability[~apart] == 0.5).all()
        assert (low <= better + 1e-9).all() and (better <= high + 1e-9).all()
    least = np.min(
        [np.where(columns["recommended"] == o, 1, columns[f"probability_better_than_{o}"]) for o in ALTERNATIVES], 0
    )
    assert (columns["confidence"] == describe_probability(least)).all() and set(columns["confidence"]) >= {
        "high",
        "low",
    }


def test_expected_losses_of_clients_with_few_rows_are_near_that_of_all():
    rng = np.random.default_rng(0)
    rows = np.repeat([6, 2_000], 50)
    truth = np.exp(rng.normal(0, 0.7, 100))
    seen = truth * rng.chisquare(rows) / rows
    held = make_sums(rows, np.stack([seen] * 3, 1), np.full((100, 2), 1e-9), loss_square=3 * seen**2)
    found = recommend(held, held)
    expected, overall = found.expected[PERSONAL], found.loss[PERSONAL]
    many = slice(50, None)
    np.testing.assert_allclose(expected[many], seen[many], rtol=0.02)
    away = np.abs(np.log(expected / overall))[:50] / np.abs(np.log(seen / overall))[:50]
    assert (away < 0.9).all()
    error = [np.mean((np.log(guess / truth) ** 2)[:50]) for guess in (expected, seen, np.full(100, overall))]
    assert error[0] < 0.9 * min(error[1:])


def test_no_model_is_expected_to_have_less_than_a_hundredth_of_the_personal_loss():
    held = held_out(np.full((6, 2), -0.999), rows=1_000)
    found = recommend(held, held)
    pooled = float(held.loss[:, 2].sum() / held.rows.sum())
    expected = run_alone(expected_program(held, estimate_improvements(held, held), pooled))
    for other in ALTERNATIVES:
        assert (found.expected[other] >= MIN_LOSS_SHARE * found.expected[PERSONAL] - 1e-12).all()
        np.testing.assert_allclose(found.expected[other], expected[other])


def test_confidence_and_percentages_in_words():
    assert describe_probability(np.array([0.95, 0.949, 0.8, 0.79, 0.5])).tolist() == [
        "high",
        "moderate",
        "moderate",
        "low",
        "low",
    ]
    np.testing.assert_allclose(
        as_percent(np.array([1.0, -1.0, 5.0, 1.0]), np.array([4.0, 4.0, 4.0, 0.0])), [25, -25, 100, 0]
    )


def test_losses_at_full_size_follow_generalized_cross_validation():
    """Least squares with q coefficients: n' / (n' - q) times the noise from n' rows, n / (n - q) from all n."""
    n, q, folds, m = 40.0, 10.0, 5, 30
    part = n - n / folds
    noise = torch.ones(m, 3, dtype=torch.float64)
    out = noise * part / (part - q)  # a row's held-out loss,
    seen = noise * (part - q) / part  # and its loss where the model was fitted to it
    rows = torch.full((m,), n, dtype=torch.float64)
    held = zero_sums(m)._replace(rows=rows, loss=n * out)
    fitted = zero_sums(m)._replace(rows=(folds - 1) * rows, loss=(folds - 1) * n * seen)
    expected = n / (n - q) * (part - q) / part
    torch.testing.assert_close(full_size_factors(held, fitted), torch.full((m, 3), expected, dtype=torch.float64))
