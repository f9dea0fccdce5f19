"""The rows of one table and split as baselines use them, and the losses that they are compared by.

The losses of a row are Mooring's: squared error, log-loss, and for counts the Poisson deviance
2 (y log(y / mu) - (y - mu)).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import pandas as pd
from scipy.special import xlogy

from benchmarks.tables import TEST, TRAIN, VALIDATION, Entry, read_table, split_of
from benchmarks.tables_catalog import BINARY, COUNT, MULTICLASS, REGRESSION

MIN_PROBABILITY = 1e-6
Setting = TypeVar("Setting")


@dataclass(frozen=True)
class Problem:
    """A table with its split. Columns are encoded with levels, means and deviations of train and validation rows."""

    kind: str
    y: np.ndarray  # [n]; class numbers for multiclass
    classes: int  # 1 unless multiclass
    client: np.ndarray  # [n] numbers from 0
    clients: int
    x: np.ndarray  # [n, d] standardized, categories as dummies without their most frequent level
    columns: np.ndarray  # [n, features] unscaled, categories as numbers, for trees
    categorical: list[int]  # positions of categories in `columns`
    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray

    @property
    def fitted(self) -> np.ndarray:
        return self.train | self.validation


def read_problem(folder: Path, entry: Entry, split: int | str) -> Problem:
    frame = read_table(folder, entry)
    part = split_of(frame, entry, split)
    fitted = part != TEST
    dense, columns, categorical = [], [], []
    for name in entry["features"]:
        column = frame[name]
        if pd.api.types.is_numeric_dtype(column):
            columns.append(column.to_numpy(float))
            dense.append(columns[-1][:, None])
            continue
        levels = column[fitted].value_counts().index.tolist()
        categorical.append(len(columns))
        columns.append(column.map({level: i for i, level in enumerate(levels)}).fillna(-1).to_numpy(float))
        dense += [(column == level).to_numpy(float)[:, None] for level in levels[1:]]
    x = np.concatenate(dense, 1)
    deviation = x[fitted].std(0)
    varies = deviation > 1e-12 * np.abs(x[fitted]).max(0).clip(1e-300)
    x = (x[:, varies] - x[fitted][:, varies].mean(0)) / deviation[varies]
    y, classes = frame[entry["target"]].to_numpy(), 1
    if entry["kind"] == MULTICLASS:
        names = sorted(set(y))
        y, classes = np.array([names.index(value) for value in y]), len(names)
    client, names = pd.factorize(frame[entry["client"]], sort=True)
    return Problem(
        kind=entry["kind"],
        y=y.astype(int) if classes > 1 else y.astype(float),
        classes=classes,
        client=client,
        clients=len(names),
        x=x,
        columns=np.stack(columns, 1),
        categorical=categorical,
        train=part == TRAIN,
        validation=part == VALIDATION,
        test=part == TEST,
    )


def row_losses(kind: str, y: np.ndarray, prediction: np.ndarray) -> np.ndarray:
    """Each row's loss. Predictions: mean [n], probability of class 1 [n], expected count [n], probabilities [n, K]."""
    if kind == REGRESSION:
        return (y - prediction) ** 2
    if kind == COUNT:
        return 2 * (xlogy(y, y) - xlogy(y, prediction) - y + prediction)
    if kind == BINARY:
        prediction = np.stack([1 - prediction, prediction], 1)
    clipped = prediction.clip(MIN_PROBABILITY)
    chosen = clipped[np.arange(len(y)), y.astype(int)]
    return np.log(clipped.sum(1)) - np.log(chosen)


def select_and_refit(
    problem: Problem,
    settings: Sequence[Setting],
    fit_and_predict: Callable[[Setting, np.ndarray, np.ndarray], np.ndarray],
) -> tuple[np.ndarray, Setting]:
    """Test predictions with the setting that has the lowest validation loss, refitted on train and validation rows."""
    best, lowest = settings[0], np.inf
    for setting in settings if len(settings) > 1 else ():
        prediction = fit_and_predict(setting, problem.train, problem.validation)
        loss = row_losses(problem.kind, problem.y[problem.validation], prediction).mean()
        if loss < lowest:
            best, lowest = setting, loss
    return fit_and_predict(best, problem.fitted, problem.test), best
