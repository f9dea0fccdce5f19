"""Mixed models against published numbers of lme4 and against statsmodels' MixedLM."""

from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import statsmodels.datasets
import statsmodels.formula.api as smf
from scipy.stats import chi2

import mooring
from mooring import fit_mixed_model
from mooring.data.formula_parser import parse_formula
from tests.mixed_models.sleepstudy import load_sleepstudy

SLEEP = "Reaction ~ Days + (Days | Subject)"


@pytest.fixture(scope="module")
def sleep():
    return load_sleepstudy()


def grouped_table(seed=0, clients=25):
    rng = np.random.default_rng(seed)
    code = np.repeat(np.arange(clients), rng.integers(4, 30, clients))
    x, town = rng.normal(3, 2, len(code)), rng.choice(["a", "b", "c"], len(code))
    deviation = rng.multivariate_normal([0, 0], [[1.0, 0.3], [0.3, 0.5]], clients)[code]
    y = 2 + 0.7 * x + (town == "b") + deviation[:, 0] + deviation[:, 1] * x + rng.normal(0, 1.5, len(code))
    return pd.DataFrame({"y": y, "x": x, "town": town, "site": [f"s{i}" for i in code]})


def test_sleepstudy_by_reml_gives_the_numbers_of_lme4(sleep):
    """summary(): D. J. Barr, lecture 5 of stat-models-2023 (github.io); ranef(): merTools, page of REextract."""
    model = mooring.fit_mixed_model(SLEEP, sleep)
    fixed, parts = model.fixed_effects, model.variance_components
    assert fixed["estimate"].tolist() == pytest.approx([251.405, 10.467], rel=1e-4)
    assert fixed["std_error"].tolist() == pytest.approx([6.825, 1.546], rel=5e-4)
    assert fixed["z"].tolist() == pytest.approx([36.838, 6.771], rel=1e-4)
    assert parts["variance"].tolist() == pytest.approx([612.10, 35.07, 654.94], rel=2e-4)
    assert parts["sd"].tolist() == pytest.approx([24.741, 5.922, 25.592], rel=1e-4)
    assert model.correlations.loc["Intercept", "Days"] == pytest.approx(0.07, abs=5e-3)
    assert -2 * model.log_likelihood == pytest.approx(1743.6, abs=0.05)
    effects = model.random_effects.set_index(["client", "term"])
    assert effects.loc[("308", "Intercept"), "deviation"] == pytest.approx(2.2585, abs=5e-4)
    assert effects.loc[("309", "Days"), "deviation"] == pytest.approx(-8.6197, abs=5e-4)
    assert effects.loc[("308", "Intercept"), "conditional_sd"] == pytest.approx(12.0709, abs=5e-4)
    assert effects.loc[("308", "Days"), "conditional_sd"] == pytest.approx(2.3048, abs=5e-4)


def test_sleepstudy_by_maximum_likelihood_and_without_correlation_gives_published_numbers(sleep):
    """By maximum likelihood: documentation of MixedModels.jl; without correlation: sommer, vignette lme4.vs.sommer."""
    model = mooring.fit_mixed_model(SLEEP, sleep, reml=False)
    assert model.log_likelihood == pytest.approx(-875.9697, abs=5e-4)
    assert (model.aic, model.bic) == (pytest.approx(1763.9393, abs=1e-3), pytest.approx(1783.0971, abs=1e-3))
    assert model.variance_components["sd"].tolist() == pytest.approx([23.780468, 5.716828, 25.591824], rel=1e-4)
    uncorrelated = mooring.fit_mixed_model("Reaction ~ Days + (Days || Subject)", sleep)
    assert uncorrelated.variance_components["variance"].tolist() == pytest.approx([627.57, 35.86, 653.58], rel=2e-4)
    assert -2 * uncorrelated.log_likelihood == pytest.approx(1743.7, abs=0.05)


@pytest.mark.parametrize("reml", [True, False])
@pytest.mark.parametrize("random", ["1", "1 + x"])
def test_estimates_agree_with_statsmodels(reml, random):
    table = grouped_table()
    mine = mooring.fit_mixed_model(f"y ~ C(town) + x + ({random} | site)", table, reml=reml)
    other = smf.mixedlm("y ~ C(town) + x", table, groups=table["site"], re_formula=random).fit(reml=reml)
    assert mine.log_likelihood == pytest.approx(other.llf, abs=1e-3)
    assert sorted(mine.fixed_effects["estimate"]) == pytest.approx(sorted(other.fe_params), rel=1e-3)
    assert mine.covariance.to_numpy() == pytest.approx(other.cov_re.to_numpy(), rel=2e-3)
    assert mine.residual_sd**2 == pytest.approx(other.scale, rel=1e-3)


def test_standard_errors_of_variances_are_those_of_repeated_draws():
    found = [mooring.fit_mixed_model("y ~ x + (1 + x | site)", grouped_table(seed, 40)) for seed in range(25)]
    errors = np.array([model.variance_components["std_error"] for model in found])
    spread = np.std([model.variance_components["variance"] for model in found], axis=0)
    assert errors.mean(0) == pytest.approx(spread, rel=0.4)


def test_shares_of_variance():
    model = mooring.fit_mixed_model("y ~ x + (1 | site)", grouped_table())
    between, residual = model.variance_components["variance"]
    assert model.icc == pytest.approx(between / (between + residual))
    explained = (model.design.x @ model.fixed_effects["estimate"].to_numpy()).var()
    assert model.r2_marginal == pytest.approx(explained / (explained + between + residual))
    assert model.r2_conditional == pytest.approx((explained + between) / (explained + between + residual))


def test_a_likelihood_ratio_test_heeds_the_boundary(sleep):
    models = [
        mooring.fit_mixed_model(f"Reaction ~ Days{term}", sleep)
        for term in ("", " + (1 | Subject)", " + (Days | Subject)")
    ]
    first, second = (mooring.compare_models(a, b) for a, b in pairwise(models))
    assert first.degrees_of_freedom == (0, 1) and second.degrees_of_freedom == (1, 2)
    assert second.statistic == pytest.approx(1786.465 - 1743.628, abs=2e-3)
    expected = (chi2.sf(second.statistic, 1) + chi2.sf(second.statistic, 2)) / 2
    assert second.p_value == pytest.approx(expected) and second.fitted_by == "REML"
    fixed = mooring.compare_models(mooring.fit_mixed_model("Reaction ~ 1 + (1 | Subject)", sleep), models[1])
    assert fixed.fitted_by == "maximum likelihood" and fixed.degrees_of_freedom == (1,)


def test_the_null_distribution_of_a_variance_test_is_the_mixture():
    """Without any variation between clients half of all statistics are 0, and 5 % of the p-values lie below 0.05."""
    rng, clients = np.random.default_rng(1), np.repeat(np.arange(20), 4)
    values = []
    for _ in range(80):
        table = pd.DataFrame({"y": rng.normal(size=80), "site": clients})
        small, large = (mooring.fit_mixed_model(f, table) for f in ("y ~ 1", "y ~ 1 + (1 | site)"))
        values.append(mooring.compare_models(small, large).p_value)
    assert 0.3 < np.mean(np.array(values) > 0.5) < 0.75
    assert np.mean(np.array(values) < 0.05) < 0.11


def test_splines_interactions_and_missing_cells():
    table = grouped_table()
    table.loc[[0, 5], "x"] = np.nan
    model = mooring.fit_mixed_model("y ~ bs(x, df=4) * C(town) + (1 | site)", table)
    assert model.dropped_rows == 2 and model.rows == len(table) - 2
    assert len(model.fixed_effects) == 15
    text = model.summary()
    for word in ("Fixed effects", "std_error", "ICC", "R2 marginal", "AIC", "2 with missing values left out"):
        assert word in text


@pytest.mark.parametrize(
    ("formula", "word"),
    [
        ("y ~ x + (1 | site/town)", "nested"),
        ("y ~ x + (1 | site) + (1 | town)", "crossed"),
        ("y ~ x + (1 | site) + (0 + x | site)", "one pair of parentheses"),
        ("y", "a formula reads"),
        ("y ~ nothing + (1 | site)", "'nothing'"),
        ("town ~ x + (1 | site)", "holds text"),
        ("y ~ x + I(2 * x) + (1 | site)", "linearly dependent"),
    ],
)
def test_what_cannot_be_fitted_is_refused_in_one_sentence(formula, word):
    with pytest.raises(mooring.RequestError, match=word):
        mooring.fit_mixed_model(formula, grouped_table())


def test_formulas_are_taken_apart():
    parts = parse_formula("score ~ lrt * gender + (1 + lrt | school)")
    fixed, random = ([":".join(map(str, term)) for term in terms] for terms in (parts.fixed, parts.random))
    assert fixed == ["", "lrt", "gender", "lrt:gender"] and random == ["", "lrt"]
    assert (parts.target, parts.client, parts.correlated) == ("score", "school", True)
    assert parse_formula("y ~ (1 || g)").fixed == ((),) and not parse_formula("y ~ (1 || g)").correlated


def test_intervals_of_new_clients_include_the_variance_between_clients(sleep):
    model = mooring.fit_mixed_model(SLEEP, sleep)
    rows = pd.DataFrame({"Days": [0.0, 9.0], "Subject": [308, 308]})
    known, new = model.predict(rows), model.predict(rows.assign(Subject="nobody"))
    place = model.clients.index("308")
    fixed = model.fixed_effects["estimate"]
    assert known["prediction"].iloc[1] == pytest.approx(
        fixed["Intercept"] + 9 * fixed["Days"] + model.effects[place] @ [1, 9]
    )
    z, x = np.array([1.0, 9.0]), np.array([1.0, 9.0])
    variance = model.residual_sd**2 + z @ model.covariance.to_numpy() @ z + x @ model.fixed_covariance @ x
    assert (new["high"] - new["prediction"]).iloc[1] == pytest.approx(1.6449 * np.sqrt(variance), rel=1e-4)
    assert np.sqrt(np.diag(model.fixed_covariance)) == pytest.approx(model.fixed_effects["std_error"].to_numpy())
    assert (new["high"] - new["low"] > known["high"] - known["low"]).all() and new["is_new"].all()


def test_intervals_of_new_clients_cover():
    shares = []
    for seed in range(6):
        table = grouped_table(seed, clients=60)
        is_new = table["site"].isin(table["site"].unique()[::5])
        model = mooring.fit_mixed_model("y ~ x + town + (1 + x | site)", table[~is_new])
        predicted = model.predict(table[is_new], level=0.9)
        shares.append(table["y"][is_new].reset_index(drop=True).between(predicted["low"], predicted["high"]).mean())
    assert 0.86 <= np.mean(shares) <= 0.94


def test_predictions_follow_splines_and_categories(sleep):
    table = sleep.assign(group=np.where(sleep["Subject"] % 2, "odd", "even"))
    model = mooring.fit_mixed_model("Reaction ~ bs(Days, df=4) * group + (1 | Subject)", table)
    again = model.predict(table.iloc[[3, 7, 55]])
    assert again["prediction"].to_numpy() == pytest.approx(model.fitted[[3, 7, 55]])
    assert "bs(Days, df=4)[1]" in model.fixed_effects.index
    with pytest.raises(mooring.RequestError, match=r"row 1, column 'group': the value 'new' is in no row"):
        model.predict(table.iloc[[3]].assign(group="new"))


def test_shrinkage_lies_between_local_and_global(sleep):
    model = mooring.fit_mixed_model("Reaction ~ Days + (1 | Subject)", sleep)
    local, personal = model.local_effects()["Intercept"].to_numpy(), model.effects[:, 0]
    share = personal / local
    n, ratio = 10, model.covariance.iloc[0, 0] / model.residual_sd**2
    assert share == pytest.approx(np.full(18, n * ratio / (1 + n * ratio)))


@pytest.mark.parametrize("what", ["caterpillar", "shrinkage", "residuals", "qq"])
@pytest.mark.parametrize("formula", [SLEEP, "Reaction ~ Days + (1 | Subject)"])
def test_figures_of_a_model_show_every_client_or_row(sleep, what, formula):
    model = mooring.fit_mixed_model(formula, sleep)
    axes = mooring.plot(model, what).axes
    points = {"caterpillar": 18, "shrinkage": 18, "residuals": 180, "qq": 180}[what]
    drawn = [len(line.get_xdata()) for line in axes[0].lines] + [
        len(c.get_offsets()) for c in axes[0].collections if hasattr(c, "get_offsets")
    ]
    assert points in drawn
    assert axes[0].get_xlabel()


def test_unknown_figures_are_refused(sleep):
    model = mooring.fit_mixed_model("Reaction ~ Days", sleep)
    with pytest.raises(mooring.RequestError, match="unknown figure of a mixed model 'forest'"):
        mooring.plot(model, "forest")
    with pytest.raises(mooring.RequestError, match="no random effects to draw"):
        mooring.plot(model, "caterpillar")


@pytest.mark.parametrize("reml", [True, False])
def test_shifted_and_scaled_columns_give_the_same_fit(sleep, reml):
    """Calendar years: the same model in other units has the same likelihood, effects and standard errors."""
    plain = fit_mixed_model("Reaction ~ Days + (1 + Days | Subject)", sleep, reml=reml)
    for shift, scale in ((2000, 1), (-300, 0.01), (0, 1e4)):
        moved = sleep.assign(Days=scale * (sleep["Days"] + shift))
        other = fit_mixed_model("Reaction ~ Days + (1 + Days | Subject)", moved, reml=reml)
        change = np.log(scale) if reml else 0.0  # a restricted likelihood depends on the unit of its columns
        assert other.log_likelihood + change == pytest.approx(plain.log_likelihood, abs=1e-6)
        slope, same = (model.fixed_effects.loc["Days"] for model in (other, plain))
        assert scale * slope["estimate"] == pytest.approx(same["estimate"], rel=1e-5)
        assert scale * slope["std_error"] == pytest.approx(same["std_error"], rel=1e-5)
        sd, plain_sd = (model.variance_components["sd"] for model in (other, plain))
        assert scale * sd["Days"] == pytest.approx(plain_sd["Days"], rel=1e-4)
        np.testing.assert_allclose(other.fitted, plain.fitted, rtol=1e-6)


@pytest.mark.parametrize("designs", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_random_designs_in_other_units_have_the_same_likelihood(designs):
    for seed in range(designs):
        rng = np.random.default_rng(seed)
        clients, rows = int(rng.integers(4, 15)), int(rng.integers(4, 12))
        code = np.repeat(np.arange(clients), rows)
        x = rng.normal(size=len(code))
        truth = rng.normal(size=(clients, 2)) * rng.uniform(0.1, 2, 2)
        y = 1 + x + truth[code, 0] + truth[code, 1] * x + rng.normal(size=len(code))
        table = pd.DataFrame({"client": [f"c{k}" for k in code], "x": x, "y": y})
        shift, scale = float(rng.uniform(-3000, 3000)), float(10 ** rng.uniform(-2, 2))
        moved = table.assign(x=scale * (x + shift))
        fits = [fit_mixed_model("y ~ x + (1 + x | client)", part).log_likelihood for part in (table, moved)]
        assert fits[1] + np.log(scale) == pytest.approx(fits[0], abs=1e-6), seed


def test_a_singular_fit_says_so(sleep):
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"client": np.repeat(list("abcdefgh"), 20), "x": rng.normal(size=160)})
    table["y"] = table["x"] + rng.normal(size=160) - rng.normal(size=160).mean()
    model = fit_mixed_model("y ~ x + (1 + x | client)", table)
    assert model.is_singular == ("boundary (singular) fit" in model.summary())
    assert not fit_mixed_model("Reaction ~ Days + (1 + Days | Subject)", sleep).is_singular


def test_calendar_years_of_published_data():
    """Grunfeld's ten firms: -1146.90 is the maximum that others find with years counted from 1935."""
    table = statsmodels.datasets.grunfeld.load_pandas().data
    table = table[table["firm"] != "American Steel"]
    fits = [
        fit_mixed_model("invest ~ year + (1 + year | firm)", table.assign(year=table["year"] - start)).log_likelihood
        for start in (0, 1935)
    ]
    assert fits == pytest.approx([-1146.90, -1146.90], abs=0.005) and fits[0] == pytest.approx(fits[1], abs=1e-6)
