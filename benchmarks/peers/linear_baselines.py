"""Linear baselines: local, pooled, client dummies, random effects, FedProx. Each returns test predictions.

Hyperparameters are chosen by validation rows and the model is refitted on train and validation rows. Targets of
regression are standardized for the fit.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import gpboost
import numpy as np

from benchmarks.peers.baseline_rows import Problem, select_and_refit
from benchmarks.peers.shrunken_models import (
    POOLED_PULL,
    ClientRows,
    client_rows,
    fit_mixed_effects,
    fit_shrunken,
    predict,
    score,
    with_intercept,
)
from benchmarks.tables_catalog import BINARY, COUNT, MULTICLASS, REGRESSION

MAX_GPBOOST_SLOPES = 8
WEAK_RIDGE = 1e-4
CENTER_RIDGES = (WEAK_RIDGE, 1.0, 10.0, 100.0)  # on the slopes of the model that clients are pulled to
# Prior rows that keep the intercept of a client with one class, or with no event, finite
LOCAL_INTERCEPT_RIDGE = {REGRESSION: 1e-6, COUNT: 1e-3, BINARY: 0.05, MULTICLASS: 0.05}
LIKELIHOOD = {REGRESSION: "gaussian", BINARY: "bernoulli_logit", COUNT: "poisson"}


def with_standard_target(
    problem: Problem, fit: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Return fit(y, fitted, predicted) with y standardized for regression, and its predictions on the scale of the
    target.

    Expected counts are bounded by ten times the largest count that was seen.
    """

    def fit_and_predict(fitted: np.ndarray, predicted: np.ndarray) -> np.ndarray:
        if problem.kind == REGRESSION:
            mean, deviation = problem.y[fitted].mean(), problem.y[fitted].std()
            return mean + deviation * fit((problem.y - mean) / deviation, fitted, predicted)
        prediction = fit(problem.y, fitted, predicted)
        if problem.kind == COUNT:
            prediction = prediction.clip(1e-8, 10 * problem.y[fitted].max() + 10)
        return prediction

    return fit_and_predict


def rows_of(problem: Problem, y: np.ndarray, fitted: np.ndarray, pooled: bool = False) -> ClientRows:
    client = np.zeros(fitted.sum(), int) if pooled else problem.client[fitted]
    clients = 1 if pooled else problem.clients
    return client_rows(problem.kind, problem.classes, problem.x[fitted], y[fitted], client, clients)


def predict_rows(problem: Problem, v: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    client = problem.client[predicted] if len(v) > 1 else np.zeros(predicted.sum(), int)
    return predict(problem.kind, score(v, with_intercept(problem.x[predicted]), client, problem.classes))


def by_column(problem: Problem, slopes: float, intercept: float) -> np.ndarray:
    """One number per parameter: the same for all slopes, another for intercepts."""
    return np.tile(np.append(np.full(problem.x.shape[1], slopes), intercept), problem.classes)


def select_shrunken(problem: Problem, settings, penalties, pooled: bool = False):
    """The best of `settings`; penalties(setting, rows) returns the pull and the ridge."""

    def fit_and_predict(setting, fitted, predicted):
        def fit(y, fitted, predicted):
            rows = rows_of(problem, y, fitted, pooled)
            return predict_rows(problem, fit_shrunken(rows, *penalties(setting, rows)).v, predicted)

        return with_standard_target(problem, fit)(fitted, predicted)

    return select_and_refit(problem, settings, fit_and_predict)


def fit_local(problem: Problem):
    """A ridge model per client on its rows only; one ridge for all of them."""
    intercept = LOCAL_INTERCEPT_RIDGE[problem.kind]
    return select_shrunken(
        problem, list(np.logspace(-4, 3, 15)), lambda ridge, rows: (by_column(problem, ridge, intercept), None)
    )


def fit_pooled(problem: Problem):
    """One ridge model on all rows."""
    return select_shrunken(
        problem, list(np.logspace(-2, 4, 13)), lambda ridge, rows: (by_column(problem, ridge, 1e-6), None), pooled=True
    )


def fit_client_dummies(problem: Problem):
    """One model with an intercept per client; ridges on the dummies and on the slopes."""
    return select_shrunken(
        problem,
        list(product(np.logspace(-2, 2.5, 8), (0.01, 1.0, 30.0))),
        lambda ridges, rows: (by_column(problem, POOLED_PULL, ridges[0]), by_column(problem, ridges[1], WEAK_RIDGE)),
    )


def fit_fedprox(problem: Problem):
    """One-stage FedProx with the best single lambda and ridge: client i is pulled by lambda n_i."""
    return select_shrunken(
        problem,
        list(product(np.logspace(3, -5, 17), CENTER_RIDGES)),
        lambda lam_and_ridge, rows: (
            lam_and_ridge[0] * rows.sizes[:, None] * np.ones(rows.width),
            by_column(problem, lam_and_ridge[1], WEAK_RIDGE),
        ),
    )


def fit_constant_pull(problem: Problem):
    """Every client pulled equally however many rows it has: lambda_i = c / n_i."""
    return select_shrunken(
        problem,
        list(product(np.logspace(4, -4, 17), CENTER_RIDGES)),
        lambda pull_and_ridge, rows: (
            np.full(rows.width, pull_and_ridge[0]),
            by_column(problem, pull_and_ridge[1], WEAK_RIDGE),
        ),
    )


def fit_random_effects(problem: Problem, slopes: bool):
    random = by_column(problem, float(slopes), 1.0) > 0

    def fit(y, fitted, predicted):
        return predict_rows(problem, fit_mixed_effects(rows_of(problem, y, fitted), random)[0].v, predicted)

    return with_standard_target(problem, fit)(problem.fitted, problem.test), "variances by EM"


def fit_random_intercepts_em(problem: Problem):
    return fit_random_effects(problem, slopes=False)


def fit_random_slopes_em(problem: Problem):
    return fit_random_effects(problem, slopes=True)


def independent_columns(x: np.ndarray) -> np.ndarray:
    """Positions of columns that are not linear combinations of earlier ones."""
    chosen: list[int] = []
    basis = np.empty((len(x), 0))
    for j in range(x.shape[1]):
        residual = x[:, j] - basis @ (basis.T @ x[:, j])
        residual -= basis @ (basis.T @ residual)
        if np.linalg.norm(residual) > 1e-6 * np.linalg.norm(x[:, j]):
            chosen.append(j)
            basis = np.column_stack([basis, residual / np.linalg.norm(residual)])
    return np.array(chosen)


def fit_gpboost(problem: Problem, slopes: bool):
    """GPBoost's mixed-effects model with a random intercept per client, and random slopes if `slopes`."""

    def fit(y, fitted, predicted):
        design = np.column_stack([np.ones(len(problem.x)), problem.x])
        design = design[:, independent_columns(design[fitted])]
        random, asked_random = {}, {}
        if slopes:
            columns = design[:, 1:]
            random = {
                "group_rand_coef_data": columns[fitted],
                "ind_effect_group_rand_coef": [1] * columns.shape[1],
            }
            asked_random = {"group_rand_coef_data_pred": columns[predicted]}
        model = gpboost.GPModel(group_data=problem.client[fitted], likelihood=LIKELIHOOD[problem.kind], **random)
        model.fit(y=y[fitted], X=design[fitted])
        return model.predict(
            X_pred=design[predicted], group_data_pred=problem.client[predicted], predict_response=True, **asked_random
        )["mu"]

    return with_standard_target(problem, fit)(problem.fitted, problem.test), "maximum likelihood"


def fit_random_intercepts(problem: Problem):
    return fit_gpboost(problem, slopes=False)


def fit_random_slopes(problem: Problem):
    return fit_gpboost(problem, slopes=True)


def list_linear_baselines(problem: Problem) -> dict[str, Callable]:
    baselines: dict[str, Callable] = {
        "linear.local": fit_local,
        "linear.pooled": fit_pooled,
        "linear.client_dummies": fit_client_dummies,
        "linear.fedprox": fit_fedprox,
        "linear.constant_pull": fit_constant_pull,
        "linear.random_intercepts_em": fit_random_intercepts_em,
        "linear.random_slopes_em": fit_random_slopes_em,
    }
    if problem.kind != MULTICLASS:
        baselines["linear.random_intercepts"] = fit_random_intercepts
        if problem.x.shape[1] <= MAX_GPBOOST_SLOPES:
            baselines["linear.random_slopes"] = fit_random_slopes
    return baselines
