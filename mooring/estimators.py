"""scikit-learn style estimators with one model per client, pulled towards a global one.

Whose a row is, is said in one of two ways:

    PersonalizedRegressor(client="school").fit(X, y)      the client is a column of X: works in every tool as it stands
    PersonalizedRegressor().fit(X, y, groups=schools)     beside X; scikit-learn's tools pass it on by metadata routing

Without either all rows belong to one client, and the estimator is the plain model; that is what scikit-learn's own
checks exercise. Names are read as everywhere: 3, 3.0 and "3" are one client.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from scipy.sparse import issparse
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import check_random_state
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, column_or_1d, validate_data

from mooring.advice.evaluation.cross_fitting import cross_fit
from mooring.advice.evaluation.loss_sums import PERSONAL
from mooring.algorithms.base import AnyAlgorithm, build
from mooring.core.cohort import Batch
from mooring.core.errors import RequestError
from mooring.core.seeds import client_key, uniforms
from mooring.core.task import Constants
from mooring.data.clients import BINARY, CLASSES, REGRESSION, Clients, from_arrays
from mooring.data.column_types import to_client_names
from mooring.data.table_sources import series_to_numpy, to_pandas
from mooring.data.tables import count_phrase, quote_list
from mooring.engines.coefficients import Scaling, coefficient_table, to_data_units
from mooring.engines.prediction_intervals import UnseenPredictions, score_residuals
from mooring.engines.simulate import simulate
from mooring.engines.training_state import make_plan
from mooring.runs.runfile import make_training
from mooring.runs.sections import DEFAULT_ALGORITHM
from mooring.tasks.linear import Linear
from mooring.tasks.logistic import Logistic

if TYPE_CHECKING:
    from sklearn.utils import Tags

MIN_ROWS_FOR_VALIDATION = 5  # a client with fewer rows trains on all of them
SINGLE_CLIENT_RIDGE = 1e-6  # a single client has no others to be pulled to: nearly unpenalized
SINGLE_CLIENT = "all"  # the one client of a fit without clients

PARAMETERS = """

    Parameters
    ----------
    algorithm : str or None, default=None
        The method: a name of `mooring list algorithms`. None: `mooring advise`'s personal models with lam="advised",
        else "fedprox_personal".
    lam : float, "advised", "auto" or None, default="advised"
        Pull towards the global model: 0 gives local models, a large one gives one model for all. "advised" takes the
        personal models of `mooring advise`: candidates of every strength, averaged by what held-out rows show of them
        (with an `algorithm`, it is the same as None). "auto" and None leave it to the algorithm, which resolves it from
        the data; "bayes" and the other rules are those of the algorithm.
    client : str, int or None, default=None
        The column of X that identifies the client: its name in a data frame, or its place in an array. None: there is
        no such column, and `groups` names the clients.
    settings : dict or None, default=None
        Further fields of the algorithm, such as {"steps": 5}.
    rounds : int, default=100
        Communication rounds.
    validation : float, default=0.2
        Share of each client's rows that chooses the round whose models are kept; 0 keeps none back. Advised models
        have no rounds and learn from all rows.
    random_state : int, RandomState instance or None, default=0
        Seed of the split and of every draw; the same number gives the same models.

    Attributes
    ----------
    clients_ : array of the clients' names
    coef_ : array [clients, features] of slopes in the units of X and y, in the order of `clients_`; a classifier of
        three classes or more: [clients, classes, features]
    intercept_ : array [clients], or [clients, classes]
    common_coef_, common_intercept_ : the same of the global model, without the first axis
    coefficients_ : data frame with a row for each client and term: coefficient, common, deviation
    algorithm_ : the algorithm with its resolved hyperparameters; None for advised models
    n_iter_ : int, rounds that were run; 1 for advised models, which are solved exactly
    residual_sd_ : array [clients], standard deviation of each client's held-out residuals (advised regressors)
    """


class _Personalized(BaseEstimator):
    """Shared by the two estimators: clients, scaling, splitting, training, looking up a row's client."""

    def __init__(
        self,
        algorithm: str | None = None,
        lam: float | str | None = "advised",
        client: str | int | None = None,
        settings: dict | None = None,
        rounds: int = 100,
        validation: float = 0.2,
        random_state: object = 0,
    ):
        self.algorithm = algorithm
        self.lam = lam
        self.client = client
        self.settings = settings
        self.rounds = rounds
        self.validation = validation
        self.random_state = random_state

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _separate_groups(self, x: Any, groups: Any) -> tuple[Any, pd.Categorical | None]:
        """X without its client column, and each row's client; None where it is not given."""
        x = to_pandas(x)
        x = x.toarray() if issparse(x) else x
        if self.client is None:
            return x, None if groups is None else to_client_names(
                pd.Series(np.asarray(series_to_numpy(groups), dtype=object))
            )
        if groups is not None:
            raise RequestError(f"whose a row is, is said twice: by column {self.client!r} of X and by groups.")
        if isinstance(x, pd.DataFrame):
            if self.client not in x.columns:
                raise RequestError(f"X has no client column {self.client!r}; its columns are {quote_list(x.columns)}.")
            return x.drop(columns=[self.client]), to_client_names(x[self.client])
        if not isinstance(self.client, int | np.integer):
            raise RequestError(
                f"client={self.client!r} names a column, but X is no data frame; give the column's number, or X as a "
                "data frame (in a pipeline: set_output(transform='pandas'))."
            )
        x = np.asarray(x)
        if x.ndim != 2 or not -x.shape[1] <= self.client < x.shape[1]:
            raise RequestError(f"X has no client column {self.client}; its shape is {x.shape}.")
        return np.delete(x, self.client, axis=1), to_client_names(pd.Series(x[:, self.client]))

    def _repeat(
        self, x: np.ndarray, y: np.ndarray, names: pd.Categorical | None, sample_weight: object
    ) -> tuple[np.ndarray, np.ndarray, pd.Categorical | None]:
        """The rows as often as they count; `_origin` holds each one's place before."""
        count = _count_rows(sample_weight, x)
        if count is None:
            self._origin = None
            return x, y, names
        if names is not None:
            check_length(names, len(y))
        self._origin = np.repeat(np.arange(len(y)), count)
        return (
            x[self._origin],
            y[self._origin],
            None if names is None else names[self._origin].remove_unused_categories(),
        )

    def _train(self, x: np.ndarray, y: np.ndarray, names: pd.Categorical | None, kind: str) -> None:
        if not isinstance(self.validation, int | float) or not 0 <= self.validation < 1:
            raise RequestError(f"validation must be a share from 0 to below 1, got {self.validation!r}.")
        self.with_clients_ = names is not None
        if names is None:
            warnings.warn("no client is given: all rows train one model. Use client= or groups=.", stacklevel=3)
            names = to_client_names(pd.Series([SINGLE_CLIENT] * len(y)))
        check_length(names, len(y))
        if (names.codes < 0).any():
            first = int(np.argmax(names.codes < 0)) + 1
            raise RequestError(f"row {first} has no client; every row that is learnt from needs one.")
        seed = self.random_state
        if not isinstance(seed, int | np.integer):
            seed = check_random_state(seed).randint(2**31)
        self.mean_ = x.mean(0)
        scale = x.std(0)
        self.scale_ = np.where(scale > 0, scale, 1.0)
        self.clients_ = np.array(names.categories, dtype=str)
        members = [np.flatnonzero(names.codes == i) for i in range(len(self.clients_))]
        scaled = self._scale_columns(x)
        clients = from_arrays(
            [scaled[rows] for rows in members],
            [y[rows] for rows in members],
            names=list(map(str, self.clients_)),
            parts=[self._parts(str(name), rows, int(seed)) for name, rows in zip(self.clients_, members)],
            kind=kind,
        )
        self.task_ = self._task(x.shape[1])
        if len(clients) > 1 and self._is_advised():
            groups = None if self._origin is None else torch.from_numpy(self._origin[np.concatenate(members)])
            self._train_advised(clients, int(seed), groups)
        else:
            self._train_rounds(clients, int(seed))
        slopes, intercept = to_data_units(self.task_, torch.cat([self.common_[None], self.models_]), self._units())
        if self.task_.layout[0].shape == (x.shape[1],):  # one score: no axis of classes
            slopes, intercept = slopes[:, 0], intercept[:, 0]
        self.common_coef_, self.coef_ = slopes[0], slopes[1:]
        self.common_intercept_, self.intercept_ = intercept[0], intercept[1:]

    def _is_advised(self) -> bool:
        return self.algorithm is None and self.lam == "advised"

    def _train_advised(self, clients: Clients, seed: int, groups: torch.Tensor | None) -> None:
        """The global model and the personal ones that `advise` would average, fitted to all rows."""
        _, evidence = cross_fit(self.task_, clients.train, clients.keys, "size", seed, groups=groups)
        self.common_, self.models_ = evidence.models.global_, evidence.models.personal
        self.algorithm_: AnyAlgorithm | None = None
        self.n_iter_ = 1
        held = evidence.predictions
        if held is not None and clients.kind == REGRESSION:
            known = UnseenPredictions(held.y, held.by_model[PERSONAL], held.owner)
            new = None if held.new_clients is None else UnseenPredictions(*held.new_clients)
            scores = score_residuals(clients.names, known, new)
            unit = getattr(self, "target_scale_", 1.0)
            self.residual_sd_ = unit * np.array([scores.sd[name] for name in clients.names])
            self.new_client_sd_ = unit * (
                np.nan if new is None else float(np.sqrt(((new.y - new.prediction) ** 2).mean()))
            )

    def _train_rounds(self, clients: Clients, seed: int) -> None:
        """The models of an algorithm, by rounds."""
        if len(clients) == 1:
            algorithm = build("local", {"ridge": SINGLE_CLIENT_RIDGE})
        else:
            own = self.lam is None or self.lam == "advised"
            fields = dict(self.settings or {}) | ({} if own else {"lam": self.lam})
            algorithm = build(self.algorithm or DEFAULT_ALGORITHM, fields)
        plan = make_plan(make_training(type(self).__name__, rounds=self.rounds, seed=seed))
        done = simulate(algorithm, self.task_, clients, plan)
        self.models_ = done.models(plan.checkpoint)
        self.common_ = self.models_[0] if len(clients) == 1 else done.outcome.at(plan.checkpoint)[1].w
        self.algorithm_ = done.algorithm
        self.n_iter_ = done.outcome.state.t

    def _units(self) -> Scaling:
        features = getattr(self, "feature_names_in_", [f"x{j}" for j in range(len(self.mean_))])
        classes = tuple(map(str, getattr(self, "classes_", ())))
        target = getattr(self, "target_mean_", 0.0), getattr(self, "target_scale_", 1.0)
        return Scaling(tuple(features), self.mean_, self.scale_, classes, *target)

    @property
    def coefficients_(self) -> pd.DataFrame:
        """A row for each client and term in the units of X and y: coefficient, common, deviation."""
        check_is_fitted(self)
        return coefficient_table(self.task_, self._units(), self.common_, self.models_, list(map(str, self.clients_)))

    def _parts(self, name: str, rows: np.ndarray, seed: int) -> np.ndarray:
        """The part of each of a client's rows; repetitions of a row are in one part."""
        origin, place = np.unique(rows if self._origin is None else self._origin[rows], return_inverse=True)
        parts = np.full(len(origin), "train", dtype="<U10")
        chooses_round = self.validation > 0 and len(self.clients_) > 1 and not self._is_advised()
        if chooses_round and len(origin) >= MIN_ROWS_FOR_VALIDATION:
            order = np.argsort(uniforms(seed, "split", client_key(name), np.arange(len(origin))))
            parts[order[: max(1, round(self.validation * len(origin)))]] = "validation"
        return parts[place]

    def _scale_columns(self, x: np.ndarray) -> np.ndarray:
        return (x - self.mean_) / self.scale_

    def _answer(self, x: object, groups: object) -> np.ndarray:
        """Raw predictions; a row of an unknown client, or without one, is predicted with the global model."""
        check_is_fitted(self)
        x, names = self._separate_groups(x, groups)
        x = self._scale_columns(validate_data(self, x, reset=False, dtype=np.float64))
        place = np.full(len(x), -1)
        if names is not None:
            check_length(names, len(x))
            place = np.append(pd.Index(self.clients_).get_indexer(names.categories), -1)[names.codes]
            unassigned = int((names.codes < 0).sum())
            if unassigned:
                warnings.warn(
                    f"{count_phrase(unassigned, 'row')} without a client: predicted with the global model.",
                    stacklevel=3,
                )
        elif self.with_clients_:
            warnings.warn(
                f"fitted on {count_phrase(len(self.clients_), 'client')}, but these rows have no client: "
                "they are "
                "predicted with the global model. Pass groups=, or make the client a column of X with client=.",
                stacklevel=3,
            )
        w = torch.cat([self.models_, self.common_[None]])[torch.from_numpy(place)]  # -1: the global one, which is last
        return self.task_.predict(w, torch.from_numpy(x)[:, None])[:, 0].numpy()


def check_length(names: pd.Categorical, rows: int) -> None:
    if len(names) != rows:
        raise RequestError(f"groups must name the client of each of the {rows} rows, got {len(names)} names.")


def _count_rows(sample_weight: object, x: np.ndarray) -> np.ndarray | None:
    """How often each row counts; None: once."""
    if sample_weight is None:
        return None
    weight = _check_sample_weight(sample_weight, x, dtype=np.float64, ensure_non_negative=True)
    if (weight != np.rint(weight)).any():
        first = int(np.argmax(weight != np.rint(weight)))
        raise RequestError(
            f"sample_weight counts how often a row occurs, in whole numbers; row {first + 1} has {weight[first]:g}. "
            "Multiply the weights, or use class_weight."
        )
    return weight.astype(np.int64)


@dataclass(frozen=True)
class _ClassWeightedLogistic(Logistic):
    """Logistic regression in which a row of class k counts class_weight[k] times."""

    class_weight: tuple[float, ...] = ()

    def _row_weight(self, y: torch.Tensor) -> torch.Tensor:
        return torch.tensor(self.class_weight, dtype=self.dtype)[y]

    def _weigh_batch(self, batch: Batch) -> Batch:
        return batch._replace(weight=batch.weight * self._row_weight(batch.y))

    def row_risk(self, w: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self._row_weight(batch.y) * super().row_risk(w, batch)

    def grad(self, w: torch.Tensor, batch: Batch) -> torch.Tensor:
        return super().grad(w, self._weigh_batch(batch))

    def _step(self, v: torch.Tensor, batch: Batch, move: Any) -> None:
        super()._step(v, self._weigh_batch(batch), move)

    def hessian_product(self, w: torch.Tensor, batch: Batch, direction: torch.Tensor) -> torch.Tensor:
        return super().hessian_product(w, self._weigh_batch(batch), direction)

    def hessian(self, w: torch.Tensor, batch: Batch) -> torch.Tensor:
        return super().hessian(w, self._weigh_batch(batch))

    def derivatives(self, w: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return super().derivatives(w, self._weigh_batch(batch))

    def constants(self, batch: Batch, w: torch.Tensor | None = None) -> Constants:
        fit = self.prox(torch.zeros(1, self.dim, dtype=self.dtype), 1e-6, batch) if w is None else w
        return Logistic(self.features, self.classes, self.intercept, self.ridge, self.dtype).constants(
            self._weigh_batch(batch), fit
        )


class PersonalizedRegressor(RegressorMixin, _Personalized):
    __doc__ = "Linear regression with one model per client, pulled towards a global one." + PARAMETERS

    def _task(self, features: int) -> Linear:
        return Linear(features)

    def fit(self, X: Any, y: Any, groups: Any = None, sample_weight: Any = None) -> PersonalizedRegressor:
        """Train on rows X with targets y; the client column of X, or `groups`, identifies each row's client.

        `sample_weight` counts how often each row occurs, in whole numbers: 2 is the same as the row twice.
        """
        X, names = self._separate_groups(X, groups)
        X, y = validate_data(self, X, y, y_numeric=True, dtype=np.float64)
        X, y, names = self._repeat(X, column_or_1d(y).astype(float), names, sample_weight)
        self.target_mean_ = float(y.mean())
        self.target_scale_ = float(y.std()) or 1.0
        self._train(X, (y - self.target_mean_) / self.target_scale_, names, REGRESSION)
        return self

    def predict(self, X: object, groups: object = None, return_std: bool = False) -> Any:
        """Each row's prediction by its client's personal model, or by the global one where the client is unknown.

        With `return_std` also the standard deviation of the prediction's error, from held-out rows: the client's own,
        or that of global models fitted without the client. Only advised models have it.
        """
        prediction = self._answer(X, groups) * self.target_scale_ + self.target_mean_
        if not return_std:
            return prediction
        if not hasattr(self, "residual_sd_"):
            raise RequestError('return_std needs advised models of two clients or more: lam="advised", algorithm=None.')
        _, names = self._separate_groups(X, groups)
        place = np.full(len(prediction), -1)
        if names is not None:
            place = np.append(pd.Index(self.clients_).get_indexer(names.categories), -1)[names.codes]
        return prediction, np.append(self.residual_sd_, self.new_client_sd_)[place]

    def score(self, X: object, y: object, groups: object = None, sample_weight: object = None) -> float:
        """R2 of the predictions, each by its client's own model."""
        return r2_score(y, self.predict(X, groups), sample_weight=sample_weight)


class PersonalizedClassifier(ClassifierMixin, _Personalized):
    __doc__ = "Logistic regression with one model per client, pulled towards a global one." + PARAMETERS.replace(
        """
    Attributes
""",
        """    class_weight : dict, "balanced" or None, default=None
        Weights of the classes in the loss, as in scikit-learn: "balanced" is rows / (classes * rows of the class).

    Attributes
""",
    )

    def _task(self, features: int) -> Logistic:
        classes = max(2, len(self.classes_))
        if self.class_weight is None:
            return Logistic(features, classes=classes)
        return _ClassWeightedLogistic(features, classes=classes, class_weight=self.class_weight_)

    def __init__(
        self,
        algorithm: str | None = None,
        lam: float | str | None = "advised",
        client: str | int | None = None,
        settings: dict | None = None,
        rounds: int = 100,
        validation: float = 0.2,
        random_state: object = 0,
        class_weight: dict | str | None = None,
    ):
        super().__init__(algorithm, lam, client, settings, rounds, validation, random_state)
        self.class_weight = class_weight

    def fit(self, X: Any, y: Any, groups: Any = None, sample_weight: Any = None) -> PersonalizedClassifier:
        """Train on rows X with class labels y; the client column of X, or `groups`, identifies each row's client.

        `sample_weight` counts how often each row occurs, in whole numbers: 2 is the same as the row twice.
        """
        X, names = self._separate_groups(X, groups)
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        X, y, names = self._repeat(X, column_or_1d(y), names, sample_weight)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise RequestError(f"y has one class only, {self.classes_[0]!r}; a classifier needs two classes or more.")
        if self.class_weight is not None:
            weight = compute_class_weight(self.class_weight, classes=self.classes_, y=y)
            self.class_weight_ = tuple(map(float, weight))
        self._train(X, codes, names, BINARY if len(self.classes_) == 2 else CLASSES)
        return self

    def predict_proba(self, X: object, groups: object = None) -> np.ndarray:
        """Probabilities of the classes, in the order of `classes_`."""
        return self._answer(X, groups)

    def predict_log_proba(self, X: object, groups: object = None) -> np.ndarray:
        """Logarithms of the probabilities of the classes."""
        return np.log(np.clip(self.predict_proba(X, groups), np.finfo(float).tiny, 1.0))

    def decision_function(self, X: object, groups: object = None) -> np.ndarray:
        """Of two classes the log-odds of the second; of more, each class's logarithm of its probability."""
        log = self.predict_log_proba(X, groups)
        return log[:, 1] - log[:, 0] if log.shape[1] == 2 else log

    def predict(self, X: object, groups: object = None) -> np.ndarray:
        """The most probable class of each row by its client's own model."""
        best = self.predict_proba(X, groups).argmax(1)
        return self.classes_[best]

    def score(self, X: object, y: object, groups: object = None, sample_weight: object = None) -> float:
        """Accuracy of the predictions, each by its client's own model."""
        return accuracy_score(y, self.predict(X, groups), sample_weight=sample_weight)
