"""Tree baselines: LightGBM with the client as a category, per client and without it, GPBoost, random forest.

Numbers of trees and settings are chosen by validation rows and the model is refitted on train and validation rows.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from operator import itemgetter

import gpboost
import lightgbm
import numpy as np
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.preprocessing import TargetEncoder

from benchmarks.peers.baseline_rows import Problem, row_losses, select_and_refit
from benchmarks.peers.linear_baselines import LIKELIHOOD
from benchmarks.tables_catalog import BINARY, COUNT, MULTICLASS, REGRESSION

OBJECTIVE = {REGRESSION: "regression", BINARY: "binary", COUNT: "poisson", MULTICLASS: "multiclass"}
MAX_TREES, PATIENCE = 1000, 50
MANY_ROWS = 8000  # above this, steps are larger and settings fewer
COMMON = {"num_threads": 1, "verbosity": -1, "seed": 1, "deterministic": True, "force_row_wise": True}
LOCAL_TREES = (1, 3, 6, 12, 25, 50, 100)
SILENT = lightgbm.log_evaluation(0)


def boosting_settings(problem: Problem) -> list[dict]:
    has_many_rows = problem.fitted.sum() > MANY_ROWS
    leaves = (4, 16, 64) if has_many_rows else (3, 6, 16)
    return [
        {
            "learning_rate": 0.1 if has_many_rows else 0.05,
            "num_leaves": n,
            "min_data_in_leaf": rows,
            "cat_smooth": smooth,
        }
        for n, rows, smooth in product(leaves, (20,) if has_many_rows else (5, 20), (10,) if has_many_rows else (1, 10))
    ]


def shared_parameters(problem: Problem) -> dict:
    classes = {"num_class": problem.classes} if problem.kind == MULTICLASS else {}
    return COMMON | classes | {"objective": OBJECTIVE[problem.kind], "min_data_per_group": 3, "max_cat_threshold": 256}


def fit_lightgbm(problem: Problem, with_client: bool):
    columns = np.column_stack([problem.columns, problem.client]) if with_client else problem.columns
    categorical = [*problem.categorical, *([columns.shape[1] - 1] if with_client else [])]

    def dataset(rows, reference=None):
        return lightgbm.Dataset(
            columns[rows], problem.y[rows], categorical_feature=categorical, reference=reference, free_raw_data=False
        )

    best, lowest = ({}, 1), np.inf
    for setting in boosting_settings(problem):
        parameters = shared_parameters(problem) | setting
        stop = lightgbm.early_stopping(PATIENCE, verbose=False)
        # A setting that belongs to the data set, such as min_data_in_leaf, needs a data set of its own
        train = dataset(problem.train)
        model = lightgbm.train(
            parameters,
            train,
            MAX_TREES,
            valid_sets=[dataset(problem.validation, train)],
            callbacks=[stop, SILENT],
        )
        prediction = model.predict(columns[problem.validation], num_iteration=model.best_iteration)
        loss = row_losses(problem.kind, problem.y[problem.validation], prediction).mean()
        if loss < lowest:
            best, lowest = (parameters, model.best_iteration), loss
    parameters, trees = best
    model = lightgbm.train(parameters, dataset(problem.fitted), trees)
    chosen = {name: parameters[name] for name in ("num_leaves", "min_data_in_leaf", "cat_smooth")} | {"trees": trees}
    return model.predict(columns[problem.test]), chosen


def fit_lightgbm_client(problem: Problem):
    return fit_lightgbm(problem, with_client=True)


def fit_lightgbm_pooled(problem: Problem):
    return fit_lightgbm(problem, with_client=False)


def smoothed_constant(problem: Problem, y: np.ndarray) -> np.ndarray | float:
    """Return the prediction of a client with a single outcome."""
    if problem.kind == MULTICLASS:
        counts = np.bincount(y, minlength=problem.classes) + 0.5
        return counts / counts.sum()
    return (y.sum() + 0.5) / (len(y) + 1)


def fit_lightgbm_local(problem: Problem):
    """A model per client; the number of trees and the size of leaves are the same for all clients."""

    def predict_each(min_leaf_rows: int, numbers, fitted, predicted) -> list[np.ndarray]:
        shape = (len(problem.y), problem.classes) if problem.kind == MULTICLASS else (len(problem.y),)
        outputs = [np.zeros(shape) for _ in numbers]
        parameters = shared_parameters(problem) | {
            "num_leaves": 4,
            "min_data_in_leaf": min_leaf_rows,
            "min_data_in_bin": 1,
        }
        for i in range(problem.clients):
            rows, is_predicted = fitted & (problem.client == i), predicted & (problem.client == i)
            if not is_predicted.any():
                continue
            y = problem.y[rows]
            if problem.kind != REGRESSION and len(set(y)) == 1:
                for output in outputs:
                    output[is_predicted] = smoothed_constant(problem, y)
                continue
            data = lightgbm.Dataset(problem.columns[rows], y, categorical_feature=problem.categorical)
            model = lightgbm.train(parameters, data, max(numbers))
            for output, number in zip(outputs, numbers):
                output[is_predicted] = model.predict(problem.columns[is_predicted], num_iteration=number)
        return [output[predicted] for output in outputs]

    best, lowest = (5, LOCAL_TREES[0]), np.inf
    for min_leaf_rows in (2, 5):
        outputs = predict_each(min_leaf_rows, LOCAL_TREES, problem.train, problem.validation)
        for number, prediction in zip(LOCAL_TREES, outputs):
            loss = row_losses(problem.kind, problem.y[problem.validation], prediction).mean()
            if loss < lowest:
                best, lowest = (min_leaf_rows, number), loss
    min_leaf_rows, number = best
    chosen = {"min_data_in_leaf": min_leaf_rows, "trees": number}
    return predict_each(min_leaf_rows, (number,), problem.fitted, problem.test)[0], chosen


def fit_gpboost_trees(problem: Problem):
    """Boosted trees with a random intercept per client."""
    x, client = problem.x, problem.client
    shift, scale = 0.0, 1.0
    if problem.kind == REGRESSION:
        shift, scale = problem.y[problem.fitted].mean(), problem.y[problem.fitted].std()
    y = (problem.y - shift) / scale

    def train(setting, trees, rows, held_out=None):
        effects = gpboost.GPModel(group_data=client[rows], likelihood=LIKELIHOOD[problem.kind])
        # The default measure is a likelihood, which depends on the variances as well as on the predictions
        metric = {"metric": "l2"} if problem.kind == REGRESSION else {}
        parameters = {"verbose": -1, "num_threads": 1, "seed": 1, **metric, **setting}
        data, stopping = gpboost.Dataset(x[rows], y[rows]), {}
        if held_out is not None:
            effects.set_prediction_data(group_data_pred=client[held_out])
            stopping = {
                "valid_sets": data.create_valid(x[held_out], y[held_out]),
                "early_stopping_rounds": PATIENCE,
                "use_gp_model_for_validation": True,
                "verbose_eval": False,
            }
        return gpboost.train(parameters, data, num_boost_round=trees, gp_model=effects, **stopping)

    def predict(model, rows):
        output = model.predict(data=x[rows], group_data_pred=client[rows], predict_var=False, pred_latent=False)
        return shift + scale * np.asarray(output["response_mean"])

    candidates, failure = [], None
    for leaves, rate in product((4, 16), (0.1, 0.02)):
        setting = {"num_leaves": leaves, "min_data_in_leaf": 10, "learning_rate": rate, "max_depth": 6}
        try:
            trees = max(train(setting, 400, problem.train, problem.validation).best_iteration, 1)
            prediction = predict(train(setting, trees, problem.train), problem.validation)
        except gpboost.basic.GPBoostError as error:  # the Laplace approximation diverges with some learning rates
            failure = error
            continue
        loss = row_losses(problem.kind, problem.y[problem.validation], prediction).mean()
        candidates.append((loss, setting | {"trees": trees}))
    for _, chosen in sorted(candidates, key=itemgetter(0)):
        setting = {name: value for name, value in chosen.items() if name != "trees"}
        try:
            return predict(train(setting, chosen["trees"], problem.fitted), problem.test), chosen
        except gpboost.basic.GPBoostError as error:
            failure = error
    raise failure


def fit_random_forest(problem: Problem):
    """A forest on the columns, the client's number and its cross-fitted target encoding."""
    has_few_rows = problem.fitted.sum() <= MANY_ROWS
    settings = list(product((1, 3, 10), (0.33, 1.0))) if has_few_rows else [(5, 0.33), (20, 0.33)]
    target_type = {BINARY: "binary", MULTICLASS: "multiclass"}.get(problem.kind, "continuous")

    def fit_and_predict(setting, fitted, predicted):
        encoder = TargetEncoder(target_type=target_type, random_state=1)
        client = problem.client[:, None].astype(float)
        encoded = encoder.fit_transform(client[fitted], problem.y[fitted])
        x = np.column_stack([problem.columns[fitted], client[fitted], encoded])
        kind = RandomForestRegressor if problem.kind in (REGRESSION, COUNT) else RandomForestClassifier
        forest = kind(
            n_estimators=300 if has_few_rows else 100,
            min_samples_leaf=setting[0],
            max_features=setting[1],
            random_state=1,
        )
        forest.fit(x, problem.y[fitted])
        z = np.column_stack([problem.columns[predicted], client[predicted], encoder.transform(client[predicted])])
        if problem.kind == REGRESSION:
            return forest.predict(z)
        if problem.kind == COUNT:
            return forest.predict(z).clip(1e-3 * problem.y[fitted].mean())
        trees = len(forest.estimators_)
        classes = max(problem.classes, 2)
        probability = np.zeros((predicted.sum(), classes))
        probability[:, forest.classes_.astype(int)] = forest.predict_proba(z)
        probability = (probability * trees + 1 / classes) / (trees + 1)
        return probability[:, 1] if problem.kind == BINARY else probability

    return select_and_refit(problem, settings, fit_and_predict)


def list_tree_baselines(problem: Problem) -> dict[str, Callable]:
    baselines: dict[str, Callable] = {
        "trees.lightgbm_client": fit_lightgbm_client,
        "trees.lightgbm_pooled": fit_lightgbm_pooled,
        "trees.lightgbm_local": fit_lightgbm_local,
        "trees.random_forest": fit_random_forest,
    }
    if problem.kind != MULTICLASS:
        baselines["trees.gpboost"] = fit_gpboost_trees
    return baselines
