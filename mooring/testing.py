"""`check_federated`: whether an algorithm handles the unusual clients that a federation may have.

Each case is a small federation with an unusual client: one without rows, with one class, with a cell of 1e30, a
thousand times as large as the others, and so on. An algorithm passes a case when it ends with finite models for
every client, or when it refuses in one sentence that names the unusual client. After adding an algorithm, run

    from mooring.testing import check_federated
    check_federated(MyAlgorithm())

which returns a row per case; a failure names the case and the error.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from mooring.algorithms.base import AnyAlgorithm
from mooring.core.errors import RequestError, WorkError
from mooring.data.clients import BINARY, CLASSES, REGRESSION, Clients, from_arrays
from mooring.engines.simulate import simulate
from mooring.engines.training_state import TrainingPlan
from mooring.tasks.linear import Linear
from mooring.tasks.logistic import Logistic

ODD_CLIENT = "odd one"
NAMES = ("a", "b", "c", ODD_CLIENT)
ROWS, FEATURES, ROUNDS = 12, 3, 3
FINITE, REFUSED = "finite", "refused"
RIDGE = 0.01


class OddClientData(NamedTuple):
    """One client's rows, and the part of each."""

    x: np.ndarray
    y: np.ndarray
    parts: np.ndarray


class OddClientCase(NamedTuple):
    name: str
    kind: str
    clients: Callable[[], Clients]
    named: bool  # whether a refusal has to name the odd client


class CaseResult(NamedTuple):
    case: str
    outcome: str  # "finite" or "refused"
    sentence: str  # of a refusal


Change = Callable[[OddClientData], OddClientData]


def part_labels(train: int, validation: int, test: int) -> np.ndarray:
    return np.repeat(["train", "validation", "test"], [train, validation, test])


def set_input(value: float, row: int = 0) -> Change:
    def change(home: OddClientData) -> OddClientData:
        x = home.x.copy()
        x[row, 0] = value
        return home._replace(x=x)

    return change


def set_target(value: float, row: int = 0) -> Change:
    def change(home: OddClientData) -> OddClientData:
        y = home.y.astype(float)
        y[row] = value
        return home._replace(y=y)

    return change


def change_inputs(work: Callable[[np.ndarray], np.ndarray]) -> Change:
    return lambda home: home._replace(x=work(home.x))


def change_targets(work: Callable[[np.ndarray], np.ndarray]) -> Change:
    return lambda home: home._replace(y=work(home.y))


def change_sizes(train: int, validation: int, test: int) -> Change:
    def change(home: OddClientData) -> OddClientData:
        take = np.arange(train + validation + test) % len(home.y)
        return OddClientData(home.x[take], home.y[take], part_labels(train, validation, test))

    return change


def set_column(k: int, values: object) -> Change:
    def change(home: OddClientData) -> OddClientData:
        x = home.x.copy()
        x[:, k] = values
        return home._replace(x=x)

    return change


SIZES: dict[str, Change] = {
    "no rows": change_sizes(0, 0, 0),
    "one row to train": change_sizes(1, 0, 0),
    "one row to validate": change_sizes(0, 1, 0),
    "one row to test": change_sizes(0, 0, 1),
    "one row of each": change_sizes(1, 1, 1),
    "two rows to train": change_sizes(2, 1, 1),
    "nothing to validate": change_sizes(8, 0, 4),
    "nothing to test": change_sizes(8, 4, 0),
    "nothing to train": change_sizes(0, 6, 6),
    "a hundred times the rows": change_sizes(600, 300, 300),
    "the same row again and again": lambda home: home._replace(x=home.x[[0] * ROWS], y=home.y[[0] * ROWS]),
}
INPUTS: dict[str, Change] = {
    "a constant column": set_column(0, 1.0),
    "a column of zeros": set_column(0, 0.0),
    "all inputs zero": change_inputs(np.zeros_like),
    "all inputs equal": change_inputs(np.ones_like),
    "two equal columns": change_inputs(lambda x: x[:, [0, 0, 2]]),
    "inputs times 1e6": change_inputs(lambda x: 1e6 * x),
    "inputs times 1e-9": change_inputs(lambda x: 1e-9 * x),
    "inputs moved by 1e6": change_inputs(lambda x: x + 1e6),
    "denormal inputs": change_inputs(lambda x: 1e-310 * x),
    "whole numbers": change_inputs(lambda x: x.round()),
    "a cell of 1e8": set_input(1e8),
    "a cell of 1e15": set_input(1e15),
    "a cell of 1e30": set_input(1e30),
    "a cell of 1e200": set_input(1e200),
    "a cell of 1e308": set_input(1e308),
    "a cell of nan": set_input(np.nan),
    "a cell of infinity": set_input(np.inf),
    "a cell of minus infinity": set_input(-np.inf),
    "a cell of 1e30 among the rows to validate": set_input(1e30, 9),
    "a cell of 1e200 among the rows to test": set_input(1e200, 11),
    "a cell of nan among the rows to test": set_input(np.nan, 11),
}
NUMBERS: dict[str, Change] = {
    "a constant target": change_targets(np.ones_like),
    "all targets zero": change_targets(np.zeros_like),
    "the opposite target": change_targets(np.negative),
    "targets times 1e6": change_targets(lambda y: 1e6 * y),
    "targets times 1e-300": change_targets(lambda y: 1e-300 * y),
    "a target of 1e6": set_target(1e6),
    "a target of 1e30": set_target(1e30),
    "a target of 1e300": set_target(1e300),
    "a target of nan": set_target(np.nan),
    "a target of infinity": set_target(np.inf),
}
LABELS: dict[str, Change] = {
    "one class only": change_targets(np.zeros_like),
    "the other labels": change_targets(lambda y: 1 - y),
    "labels that a line separates": lambda home: home._replace(y=(home.x[:, 0] > 0).astype(int)),
    "labels without any sense": change_targets(lambda y: np.arange(len(y)) % 2),
}
TITLES = {
    "an empty name": "",
    "a name in mark-up": "[/red] [link=x]",
    "a name of 10,000 letters": "n" * 10_000,
    "a name that is no number": "nan",
    "a name of control characters": "\x1b[31m\r\n\t",
    "a name in other letters": "ñ\u202e\U0001f600",
    "a name like a path": "../../etc",
    "a name like a formula": "=1+1",
}


def usual_clients(kind: str) -> list[OddClientData]:
    rng = np.random.default_rng(0)
    out = []
    for k in range(len(NAMES)):
        x = rng.normal(size=(ROWS, FEATURES))
        score = x @ (1 + 0.3 * rng.normal(size=FEATURES)) + 0.3 * rng.normal(size=ROWS) + 0.1 * k
        y = score if kind == REGRESSION else (score > 0).astype(int)
        out.append(OddClientData(x, y, part_labels(8, 2, 2)))
    return out


def federation(
    kind: str, change: Change | None = None, names: tuple[str, ...] = NAMES, everyone: bool = False
) -> Clients:
    """Four clients, the last of which (or everyone) is changed."""
    clients = usual_clients(kind)
    if change is not None:
        clients = [change(rows) for rows in clients] if everyone else [*clients[:-1], change(clients[-1])]
    xs, ys = [rows.x for rows in clients], [rows.y for rows in clients]
    return from_arrays(xs, ys, names=names, parts=[rows.parts for rows in clients], kind=kind)


def cases() -> Iterator[OddClientCase]:
    """All of them."""
    for kind, own in ((REGRESSION, NUMBERS), (BINARY, LABELS)):
        for name, change in (SIZES | INPUTS | own).items():
            yield OddClientCase(name, kind, lambda kind=kind, change=change: federation(kind, change), True)  # type: ignore[misc]
        for name in ("no rows", "nothing to train", "nothing to validate", "nothing to test", "all inputs zero"):
            change = (SIZES | INPUTS)[name]
            yield OddClientCase(
                f"everyone: {name}",
                kind,
                lambda kind=kind, change=change: federation(kind, change, everyone=True),  # type: ignore[misc]
                False,
            )
    for title, name in TITLES.items():
        names = (*NAMES[:-1], name)
        yield OddClientCase(title, REGRESSION, lambda names=names: federation(REGRESSION, names=names), False)  # type: ignore[misc]
    yield OddClientCase(
        "two clients of one name",
        REGRESSION,
        lambda: federation(REGRESSION, names=("a", ODD_CLIENT, "c", ODD_CLIENT)),
        True,
    )
    yield OddClientCase("the rows of another client", REGRESSION, identical_clients, True)
    yield OddClientCase("a label that others never saw", CLASSES, third_label, True)


def identical_clients() -> Clients:
    other = usual_clients(REGRESSION)[0]
    return federation(REGRESSION, lambda _: other)


def third_label() -> Clients:
    return federation(CLASSES, change_targets(lambda y: np.where(np.arange(len(y)) % 3 == 2, 2, y)))


def task_of(kind: str) -> Any:
    if kind == REGRESSION:
        return Linear(FEATURES, ridge=RIDGE)
    return Logistic(FEATURES, classes=2 if kind == BINARY else 3, ridge=RIDGE)


def check_case(algorithm: AnyAlgorithm, case: OddClientCase) -> CaseResult:
    """AssertionError unless the algorithm stands this case."""
    title = f"{algorithm.name} on {case.kind} with '{case.name}'"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            clients = case.clients()
            result = simulate(algorithm, task_of(case.kind), clients, TrainingPlan(rounds=ROUNDS))
        except (RequestError, WorkError) as refusal:
            sentence = str(refusal)
            if case.named and ODD_CLIENT not in sentence and "all clients" not in sentence:
                raise AssertionError(f"{title}: the refusal does not name the client: {sentence}") from refusal
            return CaseResult(case.name, REFUSED, sentence)
        except Exception as error:
            raise AssertionError(f"{title}: {type(error).__name__}: {error}") from error
    if not bool(torch.isfinite(result.models()).all()):
        raise AssertionError(f"{title}: a model is not finite")
    return CaseResult(case.name, FINITE, "")


def supports_target(algorithm: AnyAlgorithm, kind: str) -> bool:
    """Whether the algorithm takes this kind of targets at all: nobody is odd. AssertionError where it does not stand
    that either."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            simulate(algorithm, task_of(kind), federation(kind), TrainingPlan(rounds=ROUNDS))
        except RequestError:
            return False
        except Exception as error:
            title = f"{algorithm.name} on {kind} fails where nobody is odd"
            raise AssertionError(f"{title}: {type(error).__name__}: {error}") from error
    return True


def check_federated(algorithm: AnyAlgorithm, some: slice = slice(None)) -> list[CaseResult]:
    """Run an algorithm on every case (or some of them) of the targets that it serves; AssertionError at the first that
    it does not stand."""
    kinds = [kind for kind in (REGRESSION, BINARY, CLASSES) if supports_target(algorithm, kind)]
    assert kinds, f"{algorithm.name} is refused where nobody is odd"
    return [check_case(algorithm, case) for case in list(cases())[some] if case.kind in kinds]
