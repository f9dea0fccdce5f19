"""Formulas: the columns that they make, what they refuse, and the runs that follow from them."""

import numpy as np
import pandas as pd
import pytest
import torch

import mooring
from mooring.core.errors import RequestError
from mooring.data.formula_parser import parse_formula
from mooring.data.formulas import apply_formula, learn_formula, refuse_stateful_terms
from mooring.data.schema import Schema
from tests.support.planted_table import planted


def place(position):
    return f"row {position + 1}"


@pytest.fixture(scope="module")
def exam():
    rng = np.random.default_rng(0)
    school = np.repeat([f"school {i}" for i in range(12)], 25)
    lrt, gender = rng.normal(size=300), rng.choice(["F", "M"], 300)
    own = np.repeat(rng.normal(0, 0.6, 12), 25)
    score = own + 0.5 * lrt + 0.3 * (gender == "M") - 0.2 * lrt * (gender == "M") + rng.normal(0, 0.5, 300)
    return pd.DataFrame({"school": school, "lrt": lrt, "gender": gender, "score": score})


def test_columns_of_a_formula(exam):
    formula = parse_formula("score ~ lrt * gender + (1 + lrt | school)")
    state, columns, present = learn_formula(formula, exam, place, "exam")
    assert list(columns) == ["lrt", "gender[T.M]", "lrt:gender[T.M]"]
    assert present.all() and set(state.varying) == {"Intercept", "lrt"} and not state.all_vary
    is_male = (exam["gender"] == "M").to_numpy(float)
    assert np.allclose(columns["lrt:gender[T.M]"], exam["lrt"] * is_male)


@pytest.mark.parametrize(
    "terms", ["bs(lrt, df=4)", "cr(lrt, df=4)", "poly(lrt, 2)", "center(lrt) + scale(lrt)", "np.exp(lrt) * C(gender)"]
)
def test_later_rows_get_the_same_columns_after_json(exam, terms):
    state, columns, _ = learn_formula(parse_formula(f"score ~ {terms} + (1 | school)"), exam, place, "exam")
    again = type(state).model_validate_json(state.model_dump_json())
    later, notes = apply_formula(again, exam.iloc[7:19].reset_index(drop=True), place)
    assert np.allclose(later, columns.iloc[7:19]) and not notes


def test_splines_stay_at_their_ends(exam):
    state, _, _ = learn_formula(parse_formula("score ~ bs(lrt, df=4) + (1 | school)"), exam, place, "exam")
    rows = pd.DataFrame({"lrt": [exam["lrt"].max(), 99.0]})
    later, _ = apply_formula(state, rows, place)
    assert np.allclose(later.iloc[0], later.iloc[1])


@pytest.mark.parametrize(
    ("formula", "sentence"),
    [
        ("score ~ lrt + (1 | school/room)", "nested random effects are not supported"),
        ("score ~ lrt + (1 | school) + (1 | gender)", "crossed random effects .gender and school. are not supported"),
        ("score ~ 0 + lrt + (1 | school)", "models have an intercept"),
        ("score ~ lrd + (1 | school)", "there is no feature column 'lrd'.* Did you mean 'lrt'"),
        ("score ~ 1 + (1 | school)", "no feature column is left"),
        ("score ~ np.log(lrt) + (1 | school)", "row 1: 'np.log.lrt.' of the formula is not a finite number"),
        ("score ~ open('x') + (1 | school)", "'open' cannot be used in a formula"),
        ("score ~ lrt.__class__ + (1 | school)", "there is no feature column 'lrt.__class__'"),
        ("score ~ I((lambda: 1)()) + (1 | school)", "cannot be"),
        ("score ~ score + lrt + (1 | school)", "the target and the client's column cannot be terms"),
        ("lrt + (1 | school)", "a formula reads 'target ~ terms"),
    ],
)
def test_what_a_formula_cannot_be_is_one_sentence(exam, formula, sentence):
    exam = exam.assign(lrt=np.where(np.arange(len(exam)) == 0, -1.0, np.abs(exam["lrt"]) + 0.1))
    with pytest.raises(RequestError, match=sentence) as error:
        mooring.load(exam, formula=formula)
    assert "\n" not in str(error.value)


def test_roles_are_given_once(exam):
    with pytest.raises(RequestError, match="the client column is given twice: 'gender', and 'school'"):
        mooring.load(exam, formula="score ~ lrt + (1 | school)", client="gender")
    with pytest.raises(RequestError, match="leave --features and --drop out"):
        mooring.load(exam, formula="score ~ lrt + (1 | school)", drop=["gender"])
    same = mooring.load(exam, formula="score ~ lrt + gender", client="school")
    assert same.features == ("lrt", "gender[T.M]") and same.schema.formula.all_vary


def test_rows_without_a_value_are_left_out_and_later_ones_filled(exam):
    table = exam.copy()
    table.loc[[3, 60], "lrt"] = np.nan
    clients = mooring.load(table, formula="score ~ lrt * gender + (1 | school)")
    assert any("2 rows left out: a column of the formula is missing there." in note for note in clients.notes)
    schema = Schema.from_json(clients.schema.to_json())
    rows = pd.DataFrame({"lrt": [np.nan, 1.0], "gender": ["M", "X"]})
    later, notes = apply_formula(schema.formula, rows, place)
    assert later["lrt"].iloc[0] == pytest.approx(table["lrt"].mean())
    assert "1 rows have no value" in " ".join(notes) and "('X'); they count as" in " ".join(notes)


def test_advice_keeps_fixed_effects_the_same(exam, tmp_path):
    advice = mooring.advise(exam, formula="score ~ lrt * gender + (1 + lrt | school)", out=tmp_path / "run")
    personal = advice.evidence.models.personal
    assert personal[:, 1:3].std(0).max() == 0 and personal[:, 3].std() > 0.1
    assert advice.job.clients.schema.client == "school"
    predicted, _ = mooring.predict(tmp_path / "run", exam.drop(columns="score").head(3))
    assert predicted["score"].notna().all()
    newcomer = mooring.personalize(tmp_path / "run", exam[exam["school"] == "school 3"].drop(columns="school"))
    assert newcomer is not None
    terms = mooring.open(tmp_path / "run").coefficients["term"]
    assert "lrt:gender[T.M]" in set(terms)


def test_the_random_intercept_model_is_that_of_the_mixed_model(exam):
    """With (1 | school) the personal models are near the BLUPs of the same formula."""
    formula = "score ~ lrt * gender + (1 | school)"
    advice = mooring.advise(exam, formula=formula)
    schema, personal = advice.job.clients.schema, advice.evidence.models.personal
    slope = torch.tensor(schema.scale)
    intercepts = schema.target_mean + schema.target_scale * (
        personal[:, -1] - (personal[:, :-1] * torch.tensor(schema.mean) / slope).sum(1)
    )
    model = mooring.fit_mixed_model(formula, exam)
    expected = model.coefficients["Intercept"].loc[list(advice.job.clients.names)]
    assert np.abs(intercepts.numpy() - expected.to_numpy()).max() < 0.12
    assert np.corrcoef(intercepts, expected)[0, 1] > 0.99


def test_fixed_terms_need_a_smooth_loss(exam):
    with pytest.raises(RequestError, match="fixes some coefficients for all clients"):
        mooring.advise(exam, formula="score ~ lrt + gender + (1 | school)", task="absolute")


def test_algorithms_say_that_they_train_fixed_terms_too(exam):
    for formula, count in (("score ~ lrt + (1 | school)", 1), ("score ~ lrt + (1 + lrt | school)", 0)):
        notes = mooring.fit(exam, formula=formula, algorithm="fedavg", rounds=1).notes
        assert sum("train all coefficients" in note for note in notes) == count


def test_advice_says_when_fixed_terms_should_vary():
    table = planted(spread=2.0, clients=6, samples=40, seed=3)
    fixed, free = (mooring.advise(table, formula=f"y ~ x1 + x2 + ({terms} | who)") for terms in ("1", "1 + x1 + x2"))
    assert "as in (1 + x | who)" in fixed.words["fixed_terms"] and "fixed_terms" not in free.words


def test_check_reports_formula_errors(exam, tmp_path):
    from mooring.data.data_checks import check

    findings = check(exam, formula="score ~ lrd + (1 | school)")
    assert any("names column 'lrd'" in finding.sentence for finding in findings if finding.severity == "error")
    assert not [f for f in check(exam, formula="score ~ lrt + (1 | school)") if f.severity == "error"]


def test_federations_refuse_terms_that_learn_from_all_rows():
    for text, term in (
        ("score ~ bs(lrt, df=4) + (1 | school)", r"bs\(lrt, df=4"),
        ("score ~ np.log(center(lrt) + 9) + gender", r"np.log\(center\(lrt\)"),
        ("score ~ lrt + (1 + poly(lrt, 2) | school)", r"poly\(lrt, 2\)"),
        ("score ~ bs(lrt, knots=[0, 1])", r"bs\(lrt, knots"),
    ):
        with pytest.raises(RequestError, match=rf"'{term}.*' learns from the rows of all clients"):
            refuse_stateful_terms(text)
    refuse_stateful_terms("score ~ lrt * C(gender) + I(lrt**2) + np.log(size) + (1 + lrt | school)")
    refuse_stateful_terms("score ~ bs(lrt, knots=[0, 1], lower_bound=-3, upper_bound=3)")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("text", "score ~ open('x')"),
        ("transforms", {"bs(lrt, df=4)": [0, 1]}),
        ("transforms", {"bs(lrt, df=4)": [2, 1, 0]}),
        ("transforms", {"poly(lrt, 2)": [0, 0, 1, 1, 1], "__import__('os')": [1]}),
        ("transforms", {"bs(lrt, df=4)": "open('x')"}),
        ("transforms", {"bs(lrt, df=4)": [0, float("inf"), 2]}),
        ("levels", {"gender": ["F", "F", "M"]}),
        ("levels", {"gender": ["F"], "other": ["a"]}),
        ("levels", {}),
        ("dates", ["gender"]),
        ("fills", {"lrt": 0.0}),
        ("fills", {"lrt": "text", "gender": "F"}),
        ("fills", {"lrt": 0.0, "gender": "neither"}),
    ],
)
def test_a_state_that_no_table_teaches_is_refused(exam, field, value):
    text = "score ~ bs(lrt, df=4) + C(gender) + (1 | school)"
    state, _, _ = learn_formula(parse_formula(text), exam, place, "exam")
    content = state.model_dump(mode="json")
    assert type(state).model_validate(content) == state
    with pytest.raises((RequestError, ValueError)):
        type(state).model_validate(content | {field: value})
