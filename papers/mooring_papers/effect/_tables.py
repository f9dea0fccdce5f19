"""Tables 3 and 4 of `effect`: their rows, their stand-ins, and claims on the rows that were run.

The printed Table 4 is shifted against Table 3 ("small" is at places its "medium", two dichotomous entries are its
FedProx): its numbers are shown but are not targets.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from mooring.core.types import JsonObject
from mooring.engines.loop import TrainingSteps
from mooring_papers.base.claims import Check, Verdict, check_maker, every, measured
from mooring_papers.base.experiment import Cell, Preset
from mooring_papers.base.results import Results, interval, of
from mooring_papers.effect import _images
from mooring_papers.effect._image_settings import NAMES


class Row(NamedTuple):
    data: str
    model: str
    stand_in: str  # data of the quick preset, where the model is a perceptron
    lams: tuple[float, float, float]
    epochs: int
    rounds: int
    classes: dict[int, int]  # as printed -> of the ten classes of the available data
    table3: dict[int, tuple[float, ...]]  # FedProx small, medium, large, GlobalTrain, LocalTrain, pFedMe small, ...
    table4: dict[int, tuple[float, ...]]  # FedProx small, large, dichotomous


SAME = {2: 2, 6: 6, 10: 10}
ROWS = {
    "MNIST CNN2": Row(
        "mnist", "cnn2", "digits", (0.2, 0.5, 2.5), 5, 20, SAME,
        {
            2: (0.3567, 0.4721, 0.6019, 0.6123, 0.3019, 0.3973, 0.5828, 0.6172),
            6: (0.7001, 0.7833, 0.7843, 0.8092, 0.6231, 0.7918, 0.8093, 0.8312),
            10: (0.8753, 0.8893, 0.9032, 0.9098, 0.8194, 0.8756, 0.8771, 0.8749),
        },
        {2: (0.4721, 0.6019, 0.2567), 6: (0.7833, 0.7843, 0.7001), 10: (0.8893, 0.9032, 0.8753)},
    ),
    "MNIST CNN5": Row(
        "mnist", "cnn5", "digits", (0.2, 0.5, 2.5), 10, 50, SAME,
        {
            2: (0.8891, 0.9000, 0.9333, 0.9377, 0.6536, 0.9000, 0.9003, 0.9380),
            6: (0.8451, 0.8941, 0.9392, 0.9446, 0.7333, 0.9288, 0.9186, 0.9306),
            10: (0.9091, 0.9102, 0.9421, 0.9433, 0.7633, 0.9340, 0.9385, 0.9440),
        },
        {2: (0.8891, 0.9333, 0.7032), 6: (0.8451, 0.8941, 0.7941), 10: (0.9091, 0.9102, 0.8922)},
    ),
    "EMNIST CNN5": Row(
        "fashion_mnist", "cnn5", "proto", (0.1, 0.5, 1.0), 10, 50, {30: 6, 40: 8, 47: 10},
        {
            30: (0.6084, 0.6089, 0.6011, 0.6102, 0.5583, 0.6133, 0.6129, 0.6122),
            40: (0.6097, 0.6123, 0.6357, 0.6423, 0.5644, 0.6012, 0.6102, 0.6134),
            47: (0.6278, 0.6415, 0.6672, 0.6611, 0.6111, 0.6345, 0.6532, 0.6717),
        },
        {30: (0.6084, 0.6089, 0.5291), 40: (0.6097, 0.6123, 0.5732), 47: (0.6278, 0.6415, 0.5856)},
    ),
    "CIFAR10 CNN3": Row(
        "cifar10", "cnn3", "proto", (0.1, 0.5, 1.0), 10, 50, SAME,
        {
            2: (0.6101, 0.6292, 0.6340, 0.6444, 0.5801, 0.6056, 0.6012, 0.6033),
            6: (0.6211, 0.6311, 0.6712, 0.6949, 0.5623, 0.6163, 0.6163, 0.6439),
            10: (0.6102, 0.6712, 0.7302, 0.8041, 0.6238, 0.6744, 0.7443, 0.7732),
        },
        {},
    ),
}  # fmt: skip
FIRST = "MNIST CNN2"  # of the quick preset; Figure 1 (c, f) draws its curves
SEEN = 100  # test rows on which they are followed
SMALL: JsonObject = {"clients": 10, "samples": 90, "tested": 300, "batch": 16, "eta": 0.1}
LARGE: JsonObject = {"clients": 10, "samples": 100, "tested": 10_000, "batch": 16, "eta": 0.01}
STAND_IN = (
    "digits of scikit-learn for MNIST, the other data sets left out; a perceptron with 50 hidden units for CNN2; P1 "
    "and P2"
)
SMOKE, QUICK, PAPER = {"rounds": 1}, {"rounds": 160}, {"rounds": 0}  # 0: the row's own; fewer and large lambda lags

Method = tuple[str, str]  # method and size of lambda ("" where it has none)


def trial(
    seed: int, row: str, classes: int, method: str, rounds: int, size: str = "", real: bool = False
) -> TrainingSteps[dict]:
    """One cell; with `real`, on the paper's data and networks if they are available."""
    settings = ROWS[row]
    lam = settings.lams[NAMES.index(size)] if size else 0.0
    work: JsonObject = (
        {"epochs": settings.epochs, "rounds": rounds or settings.rounds} if real else {"epochs": 5, "rounds": rounds}
    )
    data, model, sizes = (settings.data, settings.model, LARGE) if real else (settings.stand_in, "mlp", SMALL)
    sizes = sizes | {"followed": SEEN if row == FIRST else 0}
    return _images.trial(seed, data, model, method, settings.classes[classes], lam=lam, **work, **sizes)


def points(rows: Sequence[str], methods: Sequence[Method]) -> list[dict]:
    return [
        {"row": row, "classes": c, "method": method} | ({"size": size} if size else {})
        for row in rows
        for c in ROWS[row].classes
        for method, size in methods
    ]


def presets(methods: Sequence[Method]) -> dict[str, Preset]:
    return {
        "smoke": Preset(points([FIRST], methods), 1, SMOKE, STAND_IN, swept=("size",)),
        "quick": Preset(points([FIRST], methods), 4, QUICK, STAND_IN, swept=("size",)),
        "paper": Preset(points([FIRST], methods), 5, PAPER | {"real": True}, "MNIST; P1 and P2", ("mnist",)),
    }


def ref(series: str, method: Method, **fixed: Any):
    fixed |= {"size": method[1]} if method[1] else {}
    return of(series, method=method[0], **fixed)


def values(results: Results, series: str, method: Method) -> dict[tuple, np.ndarray]:
    """[repeats] of a method by (row, classes)."""
    return {
        (dict(point)["row"], dict(point)["classes"]): repeats
        for point, repeats in results.take(ref(series, method)).items()
    }


@check_maker
def each_row(make: Callable[..., Check]):
    """Return a check for every row that was run, made from its name and its numbers of classes."""

    def check(results: Results) -> Verdict:
        rows: dict[str, list[int]] = {}
        for trial_ in results.trials:
            class_counts = rows.setdefault(trial_.point["row"], [])
            if trial_.point["classes"] not in class_counts:
                class_counts.append(trial_.point["classes"])
        return every(**{row: make(row=row, classes=sorted(classes)) for row, classes in rows.items()})(results)

    return check


@check_maker
def approaches(series: str, methods: Sequence[Method], end: Method):
    """In every cell each method, from the first to the last, is nearer to `end` than the one before."""

    def nearer(cell: tuple, method: Method, reference: Method) -> Check:
        def gap(results: Results) -> tuple[np.ndarray, ...]:
            values_method, values_reference, goal = (values(results, series, m)[cell] for m in (method, reference, end))
            return np.abs(values_method - goal) - np.abs(values_reference - goal), values_method, values_reference, goal

        return measured(gap, high=0.0)

    def check(results: Results) -> Verdict:
        checks = {
            f"{cell[0]}, {cell[1]} classes, {method[1]} nearer than {reference[1]}": nearer(cell, method, reference)
            for cell in values(results, series, end)
            for reference, method in pairwise(methods)
        }
        return every(**checks)(results)

    return check


def cell(series: str, method: Method, row: str, classes: int, printed: float | None) -> Cell:
    """Return a cell with our number if the row was run."""

    def ours(results: Results) -> float | str:
        try:
            mean, low, high = (
                float(part) for part in interval(results.repeats(ref(series, method, row=row, classes=classes)))
            )
        except KeyError:
            return "not run"
        return f"{mean:.4g} ± {(high - low) / 2:.4g}"

    return Cell(ours, printed)
