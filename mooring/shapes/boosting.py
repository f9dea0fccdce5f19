"""A global boosted-tree score: one column that carries what linear columns miss, fitted by XGBoost's histogram method.

    score(x) = base + sum_t tree_t(x)         on the link scale: mean, log odds, log of a mean, quantile

A score of rows that its trees have seen is too good, and a model fitted on it relies on it too much. Rows that train a
model therefore get scores of boosters that did not see their fold (`out_of_fold_scores`, stacking); other rows get
those of the booster of all rows. The number of trees is where the held-out loss of all folds is lowest.

With an `offset` (scores of another model, such as each client's personal linear model, out of fold) the trees add to
that model instead of to a constant: they learn what it misses, and not the level of each client again.

XGBoost is needed to fit, not to score: the trees are plain arrays (`trees.py`). One thread and a fixed seed make the
trees the same in every run.

Source   Friedman. Greedy function approximation: a gradient boosting machine. Annals of Statistics 2001.
         Chen, Guestrin. XGBoost: a scalable tree boosting system. KDD 2016. Wolpert. Stacked generalization. 1992.
"""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from mooring.core.errors import RequestError
from mooring.core.types import JsonObject
from mooring.shapes.trees import MAX_DEPTH, Trees

MISSING_XGBOOST = "Boosted columns need XGBoost, which is not installed: pip install 'mooring-fl[trees]'."
OBJECTIVES = {
    "squared": "reg:squarederror",
    "logistic": "binary:logistic",
    "softmax": "multi:softprob",
    "poisson": "count:poisson",
    "absolute": "reg:absoluteerror",
    "quantile": "reg:quantileerror",
}
TREES_PER_CHECK = 5  # trees between two evaluations of the held-out loss
PSEUDO_COUNT = 0.5  # added to the rows of each class, and to the sum of the counts, in the constant score


@dataclass(frozen=True)
class Boosting:
    """How a booster is fitted. `max_trees` bounds the number that the held-out loss chooses."""

    loss: str = "squared"
    classes: int = 1  # softmax: K scores
    level: float = 0.5  # quantile: its level
    max_trees: int = 500
    depth: int = 4
    rate: float = 0.1
    row_share: float = 0.8  # rows drawn for each tree
    column_share: float = 1.0  # columns drawn for each tree
    ridge: float = 1.0  # on leaf values
    min_leaf: float = 5.0  # least sum of second derivatives in a leaf: rows, for squared error
    bins: int = 64
    patience: int = 30  # trees without a lower held-out loss
    seed: int = 0

    def __post_init__(self) -> None:
        if self.loss not in OBJECTIVES:
            raise RequestError(f"boosting: loss must be one of {', '.join(OBJECTIVES)}, got {self.loss!r}.")
        if not 1 <= self.depth <= MAX_DEPTH:
            raise RequestError(f"boosting: depth must be from 1 to {MAX_DEPTH}, got {self.depth!r}.")
        if (self.loss == "softmax") != (self.classes > 1):
            raise RequestError(f"boosting: softmax needs classes > 1, other losses 1, got {self.loss}, {self.classes}.")
        if not 0 < self.level < 1:
            raise RequestError(f"boosting: level must be between 0 and 1, got {self.level!r}.")


class OutOfFold(NamedTuple):
    """Held-out scores of the rows, and the booster of all rows with as many trees."""

    scores: np.ndarray  # [N, K]
    booster: Trees
    loss: np.ndarray  # held-out loss without trees, then after every CHECK_EVERY trees


def has_boosting() -> bool:
    """Whether XGBoost is installed."""
    return find_spec("xgboost") is not None


def fit_booster(
    x: np.ndarray,
    y: np.ndarray,
    settings: Boosting,
    trees: int,
    weight: np.ndarray | None = None,
    offset: np.ndarray | None = None,
    binned: Any = None,
) -> Trees:
    """A booster with this many trees (per class), fitted on all rows x [N, f], y [N], with an offset [N, K] if given.

    The score leaves the offset out: it is what the trees add to it. `binned` are the rows in XGBoost's form, if they
    are known.
    """
    xgboost = _import_xgboost()
    target, scale = _prepare_target(y, settings)
    margin = _start_scores(target, settings, weight, offset, scale)
    base = _restore_scale(margin[0], scale) if offset is None else np.zeros(settings.classes)
    features = np.asarray(x).shape[1]
    if not trees or features == 0:
        return _describe({}, settings, base, features, scale)
    matrix = _make_matrix(xgboost, x, target, settings, weight) if binned is None else binned
    matrix.set_base_margin(_as_margin(margin, settings))
    booster = xgboost.Booster(_parameters(settings), [matrix])
    for step in range(trees):
        booster.update(matrix, step)
    return _describe(json.loads(booster.save_raw("json")), settings, base, features, scale)


def out_of_fold_scores(
    x: np.ndarray,
    y: np.ndarray,
    fold: np.ndarray,
    settings: Boosting,
    weight: np.ndarray | None = None,
    offset: np.ndarray | None = None,
) -> OutOfFold:
    """Scores of each row from a booster that did not see its fold [N], and the booster of all rows.

    Rows that belong together (repeated measurements, twins) must share a fold: nothing else keeps them apart. An
    offset [N, K] must be out of fold, too.
    """
    xgboost = _import_xgboost()
    x, fold = np.asarray(x), np.asarray(fold)
    target, scale = _prepare_target(y, settings)
    labels = np.unique(fold)
    if len(labels) < 2:
        raise RequestError(f"boosting: rows must be in at least 2 folds, got {len(labels)}.")
    full = _make_matrix(xgboost, x, target, settings, weight)
    parts = []
    start = np.empty((len(target), settings.classes))
    for label in labels:
        held = fold == label
        train = ~held
        inner, other = (None if part is None else part[train] for part in (weight, offset))
        margin = _start_scores(target[train], settings, inner, other, scale)
        start[held] = margin[0] if offset is None else _start_scores(target[held], settings, None, offset[held], scale)
        matrix = _make_matrix(xgboost, x[train], target[train], settings, inner, full)
        matrix.set_base_margin(_as_margin(margin, settings))
        held_rows = _make_matrix(xgboost, x[held], target[held], settings, None, full)
        held_rows.set_base_margin(_as_margin(start[held], settings))
        parts.append((held, xgboost.Booster(_parameters(settings), [matrix, held_rows]), matrix, held_rows))
    scores = start.copy()
    curve = [average_loss(target, scores, settings, weight)]
    best, best_trees = scores.copy(), 0
    for step in range(settings.max_trees if x.shape[1] else 0):
        for _, booster, matrix, _ in parts:
            booster.update(matrix, step)
        if (step + 1) % TREES_PER_CHECK:
            continue
        for held, booster, _, held_rows in parts:
            scores[held] = booster.predict(held_rows, output_margin=True).reshape(-1, settings.classes)
        curve.append(average_loss(target, scores, settings, weight))
        if curve[-1] < min(curve[:-1]):
            best, best_trees = scores.copy(), step + 1
        elif step + 1 - best_trees >= settings.patience:
            break
    booster = fit_booster(x, y, settings, best_trees, weight, offset, full)
    if not booster.has_splits:  # constants, which tell no rows apart: their rounding must not make a column
        best, booster = start, fit_booster(x, y, settings, 0, weight, offset, full)
    best = _restore_scale(best, scale) if offset is None else (best - start) * scale[1]
    return OutOfFold(best, booster, np.array(curve) * scale[2])


def constant_score(y: np.ndarray, settings: Boosting, weight: np.ndarray | None = None) -> np.ndarray:
    """The best score that is the same for all rows: [K]."""
    w = np.ones(len(y)) if weight is None else weight
    if settings.loss in ("absolute", "quantile"):
        order = np.argsort(y, kind="stable")
        share = np.cumsum(w[order]) / w.sum()
        level = settings.level if settings.loss == "quantile" else 0.5
        return y[order][[min(int(np.searchsorted(share, level)), len(y) - 1)]]
    if settings.loss == "squared":
        return np.array([w @ y / w.sum()])
    count = np.bincount(y.astype(int), w, max(settings.classes, 2)) + PSEUDO_COUNT
    if settings.loss == "poisson":
        return np.array([np.log((w @ y + PSEUDO_COUNT) / w.sum())])
    return np.log(count[1:] / count[:1]) if settings.loss == "logistic" else np.log(count / count.sum())


def measure_loss(y: np.ndarray, scores: np.ndarray, settings: Boosting) -> np.ndarray:
    """The loss of each row at scores [N, K] on the link scale: [N]."""
    s = scores[:, 0]
    if settings.loss == "squared":
        return (y - s) ** 2 / 2
    if settings.loss == "logistic":
        return np.logaddexp(0, s) - y * s
    if settings.loss == "poisson":
        return np.exp(s) - y * s
    if settings.loss == "softmax":
        return np.logaddexp.reduce(scores, axis=1) - scores[np.arange(len(y)), y.astype(int)]
    level = settings.level if settings.loss == "quantile" else 0.5
    return np.maximum(level * (y - s), (level - 1) * (y - s))


def differentiate_loss(y: np.ndarray, scores: np.ndarray, settings: Boosting) -> np.ndarray:
    """The derivative of the loss of each row by its scores [N, K] on the link scale: [N, K]."""
    y = y[:, None]
    if settings.loss == "squared":
        return scores - y
    if settings.loss == "logistic":
        return 1 / (1 + np.exp(-scores)) - y
    if settings.loss == "poisson":
        return np.exp(scores) - y
    if settings.loss == "softmax":
        return np.exp(scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)) - (y == np.arange(settings.classes))
    level = settings.level if settings.loss == "quantile" else 0.5
    return np.where(scores > y, 1 - level, -level)


def average_loss(y: np.ndarray, scores: np.ndarray, settings: Boosting, weight: np.ndarray | None = None) -> float:
    """The mean loss of scores [N, K]."""
    return float(np.average(measure_loss(y, scores, settings), weights=weight))


def _import_xgboost() -> Any:
    """XGBoost; in the main thread of a command without its estimators for scikit-learn, whose import takes a second."""
    if not has_boosting():
        raise RequestError(MISSING_XGBOOST)
    is_command = "mooring.cli" in sys.modules and threading.current_thread() is threading.main_thread()
    is_hidden = is_command and "sklearn" not in sys.modules
    if is_hidden:
        sys.modules["sklearn"] = None  # type: ignore[assignment]
    try:
        import xgboost
    finally:
        if is_hidden:
            del sys.modules["sklearn"]
    return xgboost


def _parameters(settings: Boosting) -> JsonObject:
    return {
        "objective": OBJECTIVES[settings.loss],
        "tree_method": "hist",
        "max_bin": settings.bins,
        "max_depth": settings.depth,
        "eta": settings.rate,
        "subsample": settings.row_share,
        "colsample_bytree": settings.column_share,
        "lambda": settings.ridge,
        "min_child_weight": settings.min_leaf,
        "seed": settings.seed % 2**31,
        "nthread": 1,
        "verbosity": 0,
        "base_score": 0.5,
        **({"num_class": settings.classes} if settings.loss == "softmax" else {}),
        **({"quantile_alpha": settings.level} if settings.loss == "quantile" else {}),
    }


def _prepare_target(y: np.ndarray, settings: Boosting) -> tuple[np.ndarray, tuple[float, float, float]]:
    """The target as float64, of mean 0 and standard deviation 1 where the loss has a scale: XGBoost keeps 32 bits.

    With it (center, scale of scores, scale of losses).
    """
    y = np.asarray(y, dtype=np.float64)
    if not (len(y) and np.isfinite(y).all()):
        raise RequestError("boosting: the target must have rows, all of them finite.")
    if settings.loss in ("logistic", "softmax"):
        top = max(settings.classes, 2) - 1
        if not (np.equal(y, np.round(y)).all() and y.min() >= 0 and y.max() <= top):
            raise RequestError(f"boosting: the target must be a class from 0 to {top}, got {y.min():g} to {y.max():g}.")
        return y, (0.0, 1.0, 1.0)
    if settings.loss == "poisson":
        if y.min() < 0:
            raise RequestError(f"boosting: counts must be >= 0, got {y.min():g}.")
        return y, (0.0, 1.0, 1.0)
    center, spread = float(y.mean()), float(y.std())
    spread = spread if spread > 0 else 1.0
    return (y - center) / spread, (center, spread, spread**2 if settings.loss == "squared" else spread)


def _restore_scale(scores: np.ndarray, scale: tuple[float, float, float]) -> np.ndarray:
    return scale[0] + scale[1] * scores


def _start_scores(
    y: np.ndarray,
    settings: Boosting,
    weight: np.ndarray | None,
    offset: np.ndarray | None,
    scale: tuple[float, float, float],
) -> np.ndarray:
    """What the trees add to, on the scale of the prepared target: the offset, or the constant score: [N, K]."""
    if offset is None:
        return np.tile(constant_score(y, settings, weight), (len(y), 1))
    offset = np.asarray(offset, dtype=np.float64).reshape(len(y), settings.classes)
    return (offset - scale[0]) / scale[1]


def _make_matrix(
    xgboost: Any,
    x: np.ndarray,
    y: np.ndarray,
    settings: Boosting,
    weight: np.ndarray | None,
    reference: Any = None,
) -> Any:
    """Binned rows."""
    return xgboost.QuantileDMatrix(
        np.asarray(x, dtype=np.float32),
        y,
        weight=weight,
        max_bin=settings.bins,
        ref=reference,
        nthread=1,
    )


def _as_margin(scores: np.ndarray, settings: Boosting) -> np.ndarray:
    """Scores [N, K], which boosting starts from, as XGBoost takes them."""
    return scores.astype(np.float32) if settings.classes > 1 else scores[:, 0].astype(np.float32)


def _describe(
    model: JsonObject, settings: Boosting, base: np.ndarray, features: int, scale: tuple[float, float, float]
) -> Trees:
    """XGBoost's trees as arrays of complete trees."""
    content = model["learner"]["gradient_booster"]["model"] if model else {"trees": [], "tree_info": []}
    count, nodes = len(content["trees"]), 2**settings.depth - 1
    feature, leaf = np.zeros((count, nodes), np.int64), np.zeros((count, nodes + 1))
    threshold, gain = np.full((count, nodes), np.inf, np.float32), np.zeros(features)
    for t, tree in enumerate(content["trees"]):
        left, right, value = tree["left_children"], tree["right_children"], tree["split_conditions"]
        places = [(0, 0, 0)]  # (node of XGBoost, level, place in the level)
        for node, level, place in places:
            if left[node] < 0:
                below = 2 ** (settings.depth - level)
                leaf[t, place * below : (place + 1) * below] = value[node] * scale[1]
                continue
            feature[t, 2**level - 1 + place] = tree["split_indices"][node]
            threshold[t, 2**level - 1 + place] = value[node]
            gain[tree["split_indices"][node]] += tree["loss_changes"][node]
            places += [(left[node], level + 1, 2 * place), (right[node], level + 1, 2 * place + 1)]
    output = np.array(content["tree_info"], dtype=np.int64)
    return Trees(features, base, feature, threshold, leaf, output, gain)
