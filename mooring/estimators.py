"""scikit-learn style estimators: fit(X, y, groups=...), predict(X, groups=...).

`groups` names each row's client. Without groups all rows belong to one client, and the estimator is the plain model;
that is what scikit-learn's own checks exercise.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from mooring.algorithms.base import build
from mooring.core.errors import RequestError
from mooring.core.seeds import client_key, uniforms
from mooring.data.clients import BINARY, CLASSES, REGRESSION, from_arrays
from mooring.engines.loop import plan_of
from mooring.engines.simulate import simulate
from mooring.runs.runfile import make_training
from mooring.tasks.linear import Linear
from mooring.tasks.logistic import Logistic

LEAST_FOR_VALIDATION = 5  # a client with fewer rows trains on all of them
LONE_RIDGE = 1e-6  # a single client has nobody to be moored to: nearly unpenalised


class _Personalized(BaseEstimator):
    """Shared by the two estimators: scaling, splitting, training, looking up a row's client."""

    def __init__(
        self,
        algorithm: str = "fedprox_one_stage",
        settings: dict | None = None,
        rounds: int = 100,
        seed: int = 0,
        validation: float = 0.2,
    ):
        self.algorithm = algorithm
        self.settings = settings
        self.rounds = rounds
        self.seed = seed
        self.validation = validation

    def _train(self, x: np.ndarray, y: np.ndarray, groups: Any, kind: str) -> None:
        names = np.full(len(y), "all") if groups is None else np.asarray(groups).astype(str)
        if len(names) != len(y):
            raise RequestError(f"groups must name the client of each of the {len(y)} rows, got {len(names)} names.")
        self.mean_ = x.mean(0)
        scale = x.std(0)
        self.scale_ = np.where(scale > 0, scale, 1.0)
        self.clients_ = np.unique(names)
        members = [np.flatnonzero(names == name) for name in self.clients_]
        scaled = self._scaled(x)
        clients = from_arrays(
            [scaled[rows] for rows in members],
            [y[rows] for rows in members],
            names=list(self.clients_),
            parts=[self._parts(str(name), len(rows)) for name, rows in zip(self.clients_, members)],
            kind=kind,
        )
        self.task_ = self._task(x.shape[1])
        if len(clients) == 1:
            algorithm = build("local", {"ridge": LONE_RIDGE})
        else:
            algorithm = build(self.algorithm, dict(self.settings or {}))
        plan = plan_of(make_training(type(self).__name__, rounds=self.rounds, seed=self.seed))
        done = simulate(algorithm, self.task_, clients, plan)
        self.models_ = done.models(plan.keep)
        self.common_ = self.models_[0] if len(clients) == 1 else done.outcome.at(plan.keep)[1].w
        self.algorithm_ = done.algorithm
        self.n_iter_ = done.outcome.progress.t

    def _parts(self, name: str, n: int) -> np.ndarray:
        parts = np.full(n, "train", dtype="<U10")
        if len(self.clients_) > 1 and n >= LEAST_FOR_VALIDATION:
            order = np.argsort(uniforms(self.seed, "split", client_key(name), np.arange(n)))
            parts[order[: max(1, round(self.validation * n))]] = "validation"
        return parts

    def _scaled(self, x: np.ndarray) -> np.ndarray:
        return (x - self.mean_) / self.scale_

    def _answer(self, x: Any, groups: Any) -> np.ndarray:
        """Raw predictions; a row of an unknown client, or without groups, is answered by the common model."""
        check_is_fitted(self)
        x = self._scaled(validate_data(self, x, reset=False, dtype=np.float64))
        place = {str(name): i for i, name in enumerate(self.clients_)}
        names = np.full(len(x), "") if groups is None else np.asarray(groups).astype(str)
        if len(names) != len(x):
            raise RequestError(f"groups must name the client of each of the {len(x)} rows, got {len(names)} names.")
        w = torch.stack([self.models_[place[name]] if name in place else self.common_ for name in names])
        return self.task_.predict(w, torch.from_numpy(x)[:, None])[:, 0].numpy()


class PersonalizedRegressor(RegressorMixin, _Personalized):
    """Linear regression with one model per client, moored to a common one."""

    def _task(self, features: int) -> Linear:
        return Linear(features)

    def fit(self, X: Any, y: Any, groups: Any = None) -> PersonalizedRegressor:
        """Train on rows X with targets y; `groups` says whose each row is."""
        X, y = validate_data(self, X, y, y_numeric=True, dtype=np.float64)
        y = column_or_1d(y).astype(float)
        self.target_mean_ = float(y.mean())
        self.target_scale_ = float(y.std()) or 1.0
        self._train(X, (y - self.target_mean_) / self.target_scale_, groups, REGRESSION)
        return self

    def predict(self, X: Any, groups: Any = None) -> np.ndarray:
        """Each row's prediction by its client's own model."""
        return self._answer(X, groups) * self.target_scale_ + self.target_mean_


class PersonalizedClassifier(ClassifierMixin, _Personalized):
    """Logistic regression with one model per client, moored to a common one."""

    def _task(self, features: int) -> Logistic:
        return Logistic(features, classes=max(2, len(self.classes_)))

    def fit(self, X: Any, y: Any, groups: Any = None) -> PersonalizedClassifier:
        """Train on rows X with class labels y; `groups` says whose each row is."""
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_, codes = np.unique(column_or_1d(y), return_inverse=True)
        if len(self.classes_) < 2:
            raise RequestError(f"y has one class only, {self.classes_[0]!r}; a classifier needs two classes or more.")
        self._train(X, codes, groups, BINARY if len(self.classes_) == 2 else CLASSES)
        return self

    def predict_proba(self, X: Any, groups: Any = None) -> np.ndarray:
        """Probabilities of the classes, in the order of `classes_`."""
        return self._answer(X, groups)

    def predict(self, X: Any, groups: Any = None) -> np.ndarray:
        """The most probable class of each row by its client's own model."""
        best = self.predict_proba(X, groups).argmax(1)
        return self.classes_[best]
