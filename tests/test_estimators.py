"""The estimators pass scikit-learn's own checks, and use `groups` as promised.

`check_estimator` never passes groups, so it exercises the estimator with a single client; what groups do is tested
below. Nothing else is skipped.
"""

import numpy as np
import pytest
from sklearn.linear_model import LinearRegression
from sklearn.utils.estimator_checks import parametrize_with_checks

from mooring.core.errors import RequestError
from mooring.estimators import PersonalizedClassifier, PersonalizedRegressor


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
    np.testing.assert_array_equal(model.predict(x, groups=["new"] * len(x)), model.predict(x))


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
