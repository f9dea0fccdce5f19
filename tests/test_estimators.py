"""The estimators pass scikit-learn's own checks, and use `groups` as promised.

`check_estimator` never passes groups, so it exercises the estimator with a single client; what groups do is tested
below. Nothing else is skipped.
"""

import numpy as np
import pandas as pd
import pytest
import sklearn
from sklearn.base import clone
from sklearn.compose import make_column_transformer
from sklearn.linear_model import LinearRegression
from sklearn.metrics import accuracy_score, r2_score
from sklearn.model_selection import GridSearchCV, KFold, cross_val_predict, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from mooring import TablePreprocessor
from mooring.core.errors import RequestError
from mooring.estimators import PersonalizedClassifier, PersonalizedRegressor


@pytest.mark.usefixtures("unpickled")  # scikit-learn's checks themselves pickle estimators and arrays
@pytest.mark.filterwarnings("ignore:no client is given")
@parametrize_with_checks([PersonalizedRegressor(), PersonalizedClassifier()])
def test_scikit_learn_checks(estimator, check):
    check(estimator)


def federation(spread, seed=0, m=12, n=40, d=3):
    rng = np.random.default_rng(seed)
    common = rng.normal(size=d)
    x = rng.normal(size=(m * n, d))
    groups = np.repeat([f"c{i}" for i in range(m)], n)
    truth = np.repeat(common + spread * rng.normal(size=(m, d)), n, axis=0)
    return x, (x * truth).sum(1) + 0.3 * rng.normal(size=m * n), groups


def test_groups_matter_when_clients_differ():
    x, y, groups = federation(spread=2.0)
    fresh_x, fresh_y, _ = federation(spread=2.0)
    model = PersonalizedRegressor(rounds=30).fit(x, y, groups=groups)
    own = np.mean((model.predict(fresh_x, groups=groups) - fresh_y) ** 2)
    pooled = np.mean((LinearRegression().fit(x, y).predict(fresh_x) - fresh_y) ** 2)
    assert own < 0.2 * pooled


def test_unknown_clients_get_the_common_model():
    x, y, groups = federation(spread=0.1)
    model = PersonalizedRegressor(rounds=30).fit(x, y, groups=groups)
    with pytest.warns(UserWarning, match="fitted on 12 clients, but these rows have no client"):
        common = model.predict(x)
    np.testing.assert_array_equal(model.predict(x, groups=["new"] * len(x)), common)


def test_classes_keep_their_names():
    x, y, groups = federation(spread=0.5)
    labels = np.where(y > 0, "up", "down")
    model = PersonalizedClassifier(rounds=10).fit(x, labels, groups=groups)
    assert set(model.predict(x, groups=groups)) == {"up", "down"}
    assert np.mean(model.predict(x, groups=groups) == labels) > 0.8


def test_groups_of_the_wrong_length_are_refused():
    x, y, groups = federation(spread=0.5)
    with pytest.raises(RequestError, match="groups must name the client of each of the 480 rows"):
        PersonalizedRegressor().fit(x, y, groups=groups[:-1])


LAMS = [0.01, 1.0, 100.0]
QUICK = {"lam": 0.1, "rounds": 5}  # where it does not matter how the models were chosen
FOLDS = KFold(4, shuffle=True, random_state=0)


def with_column(spread=1.0):
    """A data frame whose client column holds numbers, and the target."""
    x, y, groups = federation(spread=spread)
    frame = pd.DataFrame(x, columns=["size", "age", "rooms"])
    return frame.assign(town=[int(name[1:]) for name in groups]), y, groups


def test_the_client_as_a_column_is_the_same_as_groups():
    frame, y, _groups = with_column()
    plain = frame[["size", "age", "rooms"]]
    beside = PersonalizedRegressor(**QUICK).fit(plain, y, groups=frame["town"])
    inside = PersonalizedRegressor(client="town", **QUICK).fit(frame, y)
    np.testing.assert_array_equal(inside.predict(frame), beside.predict(plain, groups=frame["town"]))
    numbered = PersonalizedRegressor(client=3, **QUICK).fit(frame.to_numpy(), y)
    np.testing.assert_array_equal(numbered.predict(frame.to_numpy()), inside.predict(frame))
    assert list(inside.feature_names_in_) == ["size", "age", "rooms"]


def test_a_client_may_be_written_as_a_number_in_any_way():
    frame, y, _ = with_column()
    model = PersonalizedRegressor(client="town", **QUICK).fit(frame, y)
    expected = model.predict(frame)
    for town in (frame["town"].astype(float), frame["town"].astype(str), frame["town"].map(lambda t: f"{t}.0")):
        np.testing.assert_array_equal(model.predict(frame.assign(town=town)), expected)
    beside = PersonalizedRegressor(**QUICK).fit(frame.drop(columns="town"), y, groups=frame["town"].to_numpy(float))
    np.testing.assert_array_equal(beside.predict(frame.drop(columns="town"), groups=frame["town"].tolist()), expected)


def test_rows_without_a_client_are_refused_in_fit_and_said_in_predict():
    frame, y, _groups = with_column()
    gap = frame["town"].where(frame.index != 7)
    with pytest.raises(RequestError, match="row 8 has no client"):
        PersonalizedRegressor(client="town").fit(frame.assign(town=gap), y)
    model = PersonalizedRegressor(client="town", **QUICK).fit(frame, y)
    with pytest.warns(UserWarning, match="1 row without a client: predicted with the global model"):
        found = model.predict(frame.assign(town=gap))
    with pytest.warns(UserWarning, match="480 rows without"):
        common = model.predict(frame.assign(town=np.nan))
    assert found[7] == common[7] != model.predict(frame)[7]


@pytest.mark.parametrize(
    ("client", "rows", "message"),
    [
        ("twon", None, "X has no client column 'twon'; its columns are 'size', 'age', 'rooms', 'town'"),
        ("town", lambda frame: frame.to_numpy(), "X is no data frame"),
        (9, lambda frame: frame.to_numpy(), "X has no client column 9"),
    ],
)
def test_a_client_column_that_is_not_there_is_refused(client, rows, message):
    frame, y, _ = with_column()
    with pytest.raises(RequestError, match=message):
        PersonalizedRegressor(client=client).fit(frame if rows is None else rows(frame), y)


def test_clients_are_said_once():
    frame, y, groups = with_column()
    with pytest.raises(RequestError, match="said twice"):
        PersonalizedRegressor(client="town").fit(frame, y, groups=groups)


def by_hand(frame, y, lam):
    """The mean score over the folds, each row by its own client's model, without scikit-learn's tools."""
    scores = []
    for train, test in FOLDS.split(frame):
        model = PersonalizedRegressor(lam=lam, rounds=20).fit(
            frame.iloc[train].drop(columns="town"), y[train], groups=frame["town"].iloc[train]
        )
        predicted = model.predict(frame.iloc[test].drop(columns="town"), groups=frame["town"].iloc[test])
        scores.append(r2_score(y[test], predicted))
    return np.mean(scores)


def test_a_grid_over_lam_picks_what_a_grouped_search_by_hand_picks():
    frame, y, _ = with_column()
    search = GridSearchCV(PersonalizedRegressor(client="town", rounds=20), {"lam": LAMS}, cv=FOLDS).fit(frame, y)
    expected = [by_hand(frame, y, lam) for lam in LAMS]
    np.testing.assert_allclose(search.cv_results_["mean_test_score"], expected, rtol=1e-12)
    assert search.best_params_["lam"] == LAMS[int(np.argmax(expected))] != 100.0
    values = cross_val_score(PersonalizedRegressor(client="town", lam=LAMS[0], rounds=20), frame, y, cv=FOLDS)
    assert np.mean(values) == pytest.approx(expected[0], rel=1e-12)


def test_cross_val_predict_and_pipelines_of_data_frames():
    frame, y, _ = with_column()
    model = PersonalizedRegressor(client="town", lam=0.1, rounds=20)
    scaled = make_column_transformer(
        (StandardScaler(), ["size", "age", "rooms"]), remainder="passthrough", verbose_feature_names_out=False
    ).set_output(transform="pandas")
    alone = r2_score(y, cross_val_predict(model, frame, y, cv=FOLDS))
    piped = r2_score(y, cross_val_predict(make_pipeline(scaled, model), frame, y, cv=FOLDS))
    pooled = r2_score(y, cross_val_predict(LinearRegression(), frame.drop(columns="town"), y, cv=FOLDS))
    assert piped == pytest.approx(alone, rel=1e-6) and alone > pooled + 0.2


def test_groups_are_passed_on_by_metadata_routing():
    frame, y, _groups = with_column()
    plain = frame.drop(columns="town")
    with sklearn.config_context(enable_metadata_routing=True):
        model = PersonalizedRegressor(rounds=20).set_fit_request(groups=True).set_score_request(groups=True)
        search = GridSearchCV(model, {"lam": LAMS}, cv=FOLDS).fit(plain, y, groups=frame["town"])
    np.testing.assert_allclose(
        search.cv_results_["mean_test_score"], [by_hand(frame, y, lam) for lam in LAMS], rtol=1e-12
    )


def test_scores_are_of_the_clients_own_models():
    frame, y, groups = with_column()
    plain = frame.drop(columns="town")
    model = PersonalizedRegressor(**QUICK).fit(plain, y, groups=groups)
    assert model.score(plain, y, groups=groups) == r2_score(y, model.predict(plain, groups=groups))
    with pytest.warns(UserWarning, match="these rows have no client"):
        assert model.score(plain, y) < model.score(plain, y, groups=groups)
    labels = np.where(y > 0, "up", "down")
    classifier = PersonalizedClassifier(**QUICK).fit(plain, labels, groups=groups)
    weight = np.linspace(0, 1, len(y))
    assert classifier.score(plain, labels, groups, sample_weight=weight) == accuracy_score(
        labels, classifier.predict(plain, groups), sample_weight=weight
    )


def test_coefficients_predict():
    frame, y, _ = with_column()
    model = PersonalizedRegressor(client="town", rounds=10).fit(frame, 1000 + 50 * y)
    assert model.coef_.shape == (12, 3) and model.intercept_.shape == (12,)
    place = pd.Index(model.clients_).get_indexer(frame["town"].astype(str))
    x = frame.drop(columns="town").to_numpy()
    by_coefficients = (x * model.coef_[place]).sum(1) + model.intercept_[place]
    np.testing.assert_allclose(model.predict(frame), by_coefficients, rtol=1e-10)
    unknown = model.predict(frame.assign(town="nowhere"))
    np.testing.assert_allclose(unknown, x @ model.common_coef_ + model.common_intercept_, rtol=1e-10)
    table = model.coefficients_
    assert list(table["term"][:4]) == ["(intercept)", "size", "age", "rooms"]
    np.testing.assert_allclose(table["coefficient"][1:4], model.coef_[0])
    bands = np.digitize(y, [-1, 1])
    classes = PersonalizedClassifier(client="town", **QUICK).fit(frame, bands)
    assert classes.coef_.shape == (12, 3, 3) and classes.intercept_.shape == (12, 3)
    score = np.einsum("nq,nkq->nk", x, classes.coef_[place]) + classes.intercept_[place]
    np.testing.assert_array_equal(score.argmax(1), classes.predict(frame))
    two = PersonalizedClassifier(client="town", **QUICK).fit(frame, y > 0)
    odds = (x * two.coef_[place]).sum(1) + two.intercept_[place]
    np.testing.assert_allclose(two.predict_proba(frame)[:, 1], 1 / (1 + np.exp(-odds)), rtol=1e-9)


def test_lam_is_a_parameter_and_goes_from_alone_to_common():
    frame, y, _ = with_column()

    def deviation(lam):
        model = PersonalizedRegressor(client="town", lam=lam, rounds=20).fit(frame, y)
        assert model.algorithm_.lam == lam
        return np.abs(model.coef_ - model.common_coef_).mean()

    assert deviation(0.01) > deviation(10.0) > deviation(1000.0)
    with pytest.raises(RequestError, match="unknown hyperparameter 'lam'"):
        PersonalizedRegressor(algorithm="local", client="town", lam=1.0).fit(frame, y)


def test_random_state_is_the_seed():
    frame, y, _ = with_column()
    method = {"algorithm": "fedavg_finetune", "settings": {"batch": 8}, "rounds": 5, "client": "town"}

    def coef(state):
        return clone(PersonalizedRegressor(random_state=state, **method)).fit(frame, y).coef_

    np.testing.assert_array_equal(coef(1), coef(1))
    np.testing.assert_array_equal(coef(np.random.RandomState(3)), coef(np.random.RandomState(3)))
    assert not np.array_equal(coef(1), coef(2))


@pytest.mark.parametrize("settings", [{"algorithm": "local"}, {"lam": 1.0}, {"algorithm": "pooled"}])
def test_whole_weights_are_repeated_rows(settings):
    x, y, groups = federation(spread=0.5)
    weight = np.random.default_rng(0).integers(0, 4, len(y))
    for estimator, target in ((PersonalizedRegressor, y), (PersonalizedClassifier, (y > 0).astype(int))):
        weighted = estimator(validation=0, **settings).fit(x, target, groups=groups, sample_weight=weight)
        often = np.repeat(np.arange(len(y)), weight)
        repeated = estimator(validation=0, **settings).fit(x[often], target[often], groups=np.array(groups)[often])
        np.testing.assert_allclose(weighted.coef_, repeated.coef_, atol=1e-9)
        np.testing.assert_allclose(weighted.intercept_, repeated.intercept_, atol=1e-9)


def test_repeated_rows_are_held_out_together():
    """Advised models must not be chosen on copies of rows that they were fitted to."""
    x, y, groups = federation(spread=0.5)
    once = PersonalizedRegressor().fit(x, y, groups=groups)
    thrice = PersonalizedRegressor().fit(x, y, groups=groups, sample_weight=np.full(len(y), 3))
    np.testing.assert_allclose(thrice.residual_sd_.mean(), once.residual_sd_.mean(), rtol=0.1)


def test_weights_that_are_no_counts_are_refused():
    x, y, groups = federation(spread=0.5)
    with pytest.raises(RequestError, match=r"in whole numbers; row 2 has 0\.5"):
        PersonalizedRegressor().fit(x, y, groups=groups, sample_weight=np.where(np.arange(len(y)) == 1, 0.5, 1.0))
    with pytest.raises(ValueError, match="at least one non-zero"):
        PersonalizedRegressor().fit(x, y, groups=groups, sample_weight=np.zeros(len(y)))


def test_balanced_classes_are_those_of_scikit_learn():
    from sklearn.linear_model import LogisticRegression

    rng = np.random.default_rng(1)
    x = rng.normal(size=(400, 3))
    y = (x[:, 0] + rng.normal(size=400) > 1.2).astype(int)
    groups = np.repeat(["a", "b"], 200)
    ours = PersonalizedClassifier(algorithm="pooled", class_weight="balanced", validation=0)
    ours.fit(x, y, groups=groups)
    peer = LogisticRegression(C=1 / (400 * 1e-4), class_weight="balanced", tol=1e-10, max_iter=1000).fit(x, y)
    np.testing.assert_allclose(ours.common_coef_, peer.coef_[0], rtol=2e-2)
    np.testing.assert_allclose(ours.predict_proba(x, groups=groups)[:, 1], peer.predict_proba(x)[:, 1], atol=5e-3)
    plain = PersonalizedClassifier().fit(x, y, groups=groups).predict(x, groups=groups).mean()
    balanced = PersonalizedClassifier(class_weight="balanced").fit(x, y, groups=groups).predict(x, groups=groups).mean()
    assert balanced > plain + 0.05
    twice = PersonalizedClassifier(class_weight={0: 1, 1: 2}, algorithm="local", validation=0)
    often = np.repeat(np.arange(400), 1 + y)
    same = PersonalizedClassifier(algorithm="local", validation=0).fit(x[often], y[often], groups=groups[often])
    assert np.abs(twice.fit(x, y, groups=groups).coef_ - same.coef_).max() < 0.02


@pytest.mark.parametrize("cls", [PersonalizedRegressor, PersonalizedClassifier])
def test_every_parameter_is_documented(cls):
    for name in cls().get_params():
        assert f"    {name} : " in cls.__doc__


def test_the_default_is_the_advised_plan():
    x, y, groups = federation(0.5)
    test = np.arange(len(y)) % 4 == 0
    advised = PersonalizedRegressor().fit(x[~test], y[~test], groups=groups[~test])
    assert advised.algorithm_ is None and advised.coef_.shape == (12, 3)
    score = advised.score(x[test], y[test], groups=groups[test])
    for lam in (0.0, 100.0):
        other = PersonalizedRegressor(lam=lam).fit(x[~test], y[~test], groups=groups[~test])
        assert score > other.score(x[test], y[test], groups=groups[test]) - 0.005
        assert other.algorithm_ is not None


def test_standard_deviations_of_predictions():
    x, y, groups = federation(0.5)
    model = PersonalizedRegressor().fit(x, y, groups=groups)
    known, sd = model.predict(x, groups=groups, return_std=True)
    assert known.shape == sd.shape and sd.mean() == pytest.approx(0.3, rel=0.2)
    _, new = model.predict(x[:5], groups=["nobody"] * 5, return_std=True)
    assert (new > 1.5 * sd.max()).all()
    with pytest.raises(RequestError, match="return_std needs advised models"):
        PersonalizedRegressor(lam=1.0).fit(x, y, groups=groups).predict(x, groups=groups, return_std=True)


def test_log_probabilities_and_decisions():
    x, y, groups = federation(0.5)
    for classes in (2, 3):
        label = np.digitize(y, np.quantile(y, np.arange(1, classes) / classes))
        model = PersonalizedClassifier(lam=1.0, rounds=5).fit(x, label, groups=groups)
        log = model.predict_log_proba(x, groups=groups)
        np.testing.assert_allclose(np.exp(log), model.predict_proba(x, groups=groups))
        decision = model.decision_function(x, groups=groups)
        best = (decision > 0).astype(int) if classes == 2 else decision.argmax(1)
        np.testing.assert_array_equal(model.classes_[best], model.predict(x, groups=groups))


def test_polars_frames_and_sparse_matrices():
    polars = pytest.importorskip("polars")
    from scipy.sparse import csr_matrix

    x, y, groups = federation(0.5)
    frame = pd.DataFrame(x, columns=["a", "b", "c"]).assign(site=groups)
    expected = PersonalizedRegressor(client="site", **QUICK).fit(frame, y).predict(frame)
    native = polars.DataFrame({name: frame[name].to_list() for name in frame})
    np.testing.assert_array_equal(
        PersonalizedRegressor(client="site", **QUICK).fit(native, y).predict(native), expected
    )
    sparse = PersonalizedRegressor(**QUICK).fit(csr_matrix(x), y, groups=groups).predict(csr_matrix(x), groups=groups)
    np.testing.assert_allclose(sparse, expected)


def test_a_fit_without_clients_warns_and_a_wrong_share_is_refused():
    x, y, groups = federation(0.5)
    with pytest.warns(UserWarning, match="no client is given"):
        PersonalizedRegressor().fit(x, y)
    with pytest.raises(RequestError, match=r"validation must be a share from 0 to below 1, got 1\.5"):
        PersonalizedRegressor(validation=1.5).fit(x, y, groups=groups)


def test_a_preprocessor_reads_tables_as_advice_does():
    x, y, groups = federation(0.5)
    frame = pd.DataFrame({"site": groups, "a": x[:, 0], "b": [f"{v:.4f}".replace(".", ",") for v in x[:, 1]]})
    frame["c"] = np.where(x[:, 2] > 0, "high", "low")
    frame.loc[3, "a"] = np.nan
    prepared = TablePreprocessor(client="site").fit(frame)
    out = prepared.transform(frame)
    assert list(out.columns) == ["site", "a", "a missing", "b", "c=low"] == list(prepared.get_feature_names_out())
    assert out[["a", "b"]].mean().abs().max() < 1e-9 and out["a missing"].iloc[3] > 1
    model = make_pipeline(TablePreprocessor(client="site"), PersonalizedRegressor(client="site")).fit(frame, y)
    assert model.score(frame, y) > 0.6
    with pytest.raises(RequestError, match="takes a data frame"):
        TablePreprocessor().fit(x)
