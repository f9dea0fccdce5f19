"""`check_federated`: does an algorithm stand every odd client that a federation may have?

Each case is a small federation with something odd in it: a client without rows, with one class, with a cell of 1e30, a
thousand times as large as the others, and so on. An algorithm passes a case when it ends with finite models for
everyone, or when it is refused in one sentence that names the odd client. Whoever adds an algorithm runs

    from mooring.engines.odd_clients import check_federated
    check_federated(MyAlgorithm())

and gets a row per case; a failure says which case and how.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from mooring.core.errors import RequestError, WorkError
from mooring.data.clients import BINARY, CLASSES, REGRESSION, Clients, from_arrays
from mooring.engines.loop import Plan
from mooring.engines.simulate import simulate
from mooring.tasks.linear import Linear
from mooring.tasks.logistic import Logistic

ODD = "odd one"
NAMES = ("a", "b", "c", ODD)
ROWS, FEATURES, ROUNDS = 12, 3, 3
FINITE, REFUSED = "finite", "refused"
RIDGE = 0.01


class Home(NamedTuple):
    """One client's rows, and the part of each."""

    x: np.ndarray
    y: np.ndarray
    parts: np.ndarray


class Case(NamedTuple):
    name: str
    kind: str
    clients: Callable[[], Clients]
    named: bool  # whether a refusal has to name the odd client


class Verdict(NamedTuple):
    case: str
    outcome: str  # "finite" or "refused"
    sentence: str  # of a refusal


Change = Callable[[Home], Home]


def parts_of(train: int, validation: int, test: int) -> np.ndarray:
    return np.repeat(["train", "validation", "test"], [train, validation, test])


def cell(value: float, row: int = 0) -> Change:
    def change(home: Home) -> Home:
        x = home.x.copy()
        x[row, 0] = value
        return home._replace(x=x)

    return change


def target(value: float, row: int = 0) -> Change:
    def change(home: Home) -> Home:
        y = home.y.astype(float)
        y[row] = value
        return home._replace(y=y)

    return change


def inputs(work: Callable[[np.ndarray], np.ndarray]) -> Change:
    return lambda home: home._replace(x=work(home.x))


def targets(work: Callable[[np.ndarray], np.ndarray]) -> Change:
    return lambda home: home._replace(y=work(home.y))


def rows(train: int, validation: int, test: int) -> Change:
    def change(home: Home) -> Home:
        take = np.arange(train + validation + test) % len(home.y)
        return Home(home.x[take], home.y[take], parts_of(train, validation, test))

    return change


def column(k: int, values: Any) -> Change:
    def change(home: Home) -> Home:
        x = home.x.copy()
        x[:, k] = values
        return home._replace(x=x)

    return change


SIZES: dict[str, Change] = {
    "no rows": rows(0, 0, 0),
    "one row to train": rows(1, 0, 0),
    "one row to validate": rows(0, 1, 0),
    "one row to test": rows(0, 0, 1),
    "one row of each": rows(1, 1, 1),
    "two rows to train": rows(2, 1, 1),
    "nothing to validate": rows(8, 0, 4),
    "nothing to test": rows(8, 4, 0),
    "nothing to train": rows(0, 6, 6),
    "a hundred times the rows": rows(600, 300, 300),
    "the same row again and again": lambda home: home._replace(x=home.x[[0] * ROWS], y=home.y[[0] * ROWS]),
}
INPUTS: dict[str, Change] = {
    "a constant column": column(0, 1.0),
    "a column of zeros": column(0, 0.0),
    "all inputs zero": inputs(np.zeros_like),
    "all inputs equal": inputs(np.ones_like),
    "two equal columns": inputs(lambda x: x[:, [0, 0, 2]]),
    "inputs times 1e6": inputs(lambda x: 1e6 * x),
    "inputs times 1e-9": inputs(lambda x: 1e-9 * x),
    "inputs moved by 1e6": inputs(lambda x: x + 1e6),
    "denormal inputs": inputs(lambda x: 1e-310 * x),
    "whole numbers": inputs(lambda x: x.round()),
    "a cell of 1e8": cell(1e8),
    "a cell of 1e15": cell(1e15),
    "a cell of 1e30": cell(1e30),
    "a cell of 1e200": cell(1e200),
    "a cell of 1e308": cell(1e308),
    "a cell of nan": cell(np.nan),
    "a cell of infinity": cell(np.inf),
    "a cell of minus infinity": cell(-np.inf),
    "a cell of 1e30 among the rows to validate": cell(1e30, 9),
    "a cell of 1e200 among the rows to test": cell(1e200, 11),
    "a cell of nan among the rows to test": cell(np.nan, 11),
}
NUMBERS: dict[str, Change] = {
    "a constant target": targets(np.ones_like),
    "all targets zero": targets(np.zeros_like),
    "the opposite target": targets(np.negative),
    "targets times 1e6": targets(lambda y: 1e6 * y),
    "targets times 1e-300": targets(lambda y: 1e-300 * y),
    "a target of 1e6": target(1e6),
    "a target of 1e30": target(1e30),
    "a target of 1e300": target(1e300),
    "a target of nan": target(np.nan),
    "a target of infinity": target(np.inf),
}
LABELS: dict[str, Change] = {
    "one class only": targets(np.zeros_like),
    "the other labels": targets(lambda y: 1 - y),
    "labels that a line separates": lambda home: home._replace(y=(home.x[:, 0] > 0).astype(int)),
    "labels without any sense": targets(lambda y: np.arange(len(y)) % 2),
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


def homes(kind: str) -> list[Home]:
    rng = np.random.default_rng(0)
    out = []
    for k in range(len(NAMES)):
        x = rng.normal(size=(ROWS, FEATURES))
        score = x @ (1 + 0.3 * rng.normal(size=FEATURES)) + 0.3 * rng.normal(size=ROWS) + 0.1 * k
        y = score if kind == REGRESSION else (score > 0).astype(int)
        out.append(Home(x, y, parts_of(8, 2, 2)))
    return out


def federation(
    kind: str, change: Change | None = None, names: tuple[str, ...] = NAMES, everyone: bool = False
) -> Clients:
    """Four clients, the last of which (or everyone) is changed."""
    who = homes(kind)
    if change is not None:
        who = [change(home) for home in who] if everyone else [*who[:-1], change(who[-1])]
    return from_arrays([h.x for h in who], [h.y for h in who], names=names, parts=[h.parts for h in who], kind=kind)


def cases() -> Iterator[Case]:
    """All of them."""
    for kind, own in ((REGRESSION, NUMBERS), (BINARY, LABELS)):
        for name, change in (SIZES | INPUTS | own).items():
            yield Case(name, kind, lambda kind=kind, change=change: federation(kind, change), True)  # type: ignore[misc]
        for name in ("no rows", "nothing to train", "nothing to validate", "nothing to test", "all inputs zero"):
            change = (SIZES | INPUTS)[name]
            yield Case(
                f"everyone: {name}",
                kind,
                lambda kind=kind, change=change: federation(kind, change, everyone=True),  # type: ignore[misc]
                False,
            )
    for title, name in TITLES.items():
        names = (*NAMES[:-1], name)
        yield Case(title, REGRESSION, lambda names=names: federation(REGRESSION, names=names), False)  # type: ignore[misc]
    yield Case("two clients of one name", REGRESSION, lambda: federation(REGRESSION, names=("a", ODD, "c", ODD)), True)
    yield Case("the rows of another client", REGRESSION, twins, True)
    yield Case("a label that others never saw", CLASSES, third_label, True)


def twins() -> Clients:
    other = homes(REGRESSION)[0]
    return federation(REGRESSION, lambda _: other)


def third_label() -> Clients:
    return federation(CLASSES, targets(lambda y: np.where(np.arange(len(y)) % 3 == 2, 2, y)))


def task_of(kind: str) -> Any:
    if kind == REGRESSION:
        return Linear(FEATURES, ridge=RIDGE)
    return Logistic(FEATURES, classes=2 if kind == BINARY else 3, ridge=RIDGE)


def check_case(algorithm: Any, case: Case) -> Verdict:
    """AssertionError unless the algorithm stands this case."""
    told = f"{algorithm.name} on {case.kind} with '{case.name}'"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            clients = case.clients()
            found = simulate(algorithm, task_of(case.kind), clients, Plan(rounds=ROUNDS))
        except (RequestError, WorkError) as refusal:
            sentence = str(refusal)
            if case.named and ODD not in sentence and "all clients" not in sentence:
                raise AssertionError(f"{told}: the refusal does not name the client: {sentence}") from refusal
            return Verdict(case.name, REFUSED, sentence)
        except Exception as error:
            raise AssertionError(f"{told}: {type(error).__name__}: {error}") from error
    if not bool(torch.isfinite(found.models()).all()):
        raise AssertionError(f"{told}: a model is not finite")
    return Verdict(case.name, FINITE, "")


def serves(algorithm: Any, kind: str) -> bool:
    """Whether the algorithm takes this kind of targets at all: nobody is odd. AssertionError where it does not stand
    that either."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            simulate(algorithm, task_of(kind), federation(kind), Plan(rounds=ROUNDS))
        except RequestError:
            return False
        except Exception as error:
            told = f"{algorithm.name} on {kind} fails where nobody is odd"
            raise AssertionError(f"{told}: {type(error).__name__}: {error}") from error
    return True


def check_federated(algorithm: Any, some: slice = slice(None)) -> list[Verdict]:
    """Run an algorithm on every case (or some of them) of the targets that it serves; AssertionError at the first that
    it does not stand."""
    kinds = [kind for kind in (REGRESSION, BINARY, CLASSES) if serves(algorithm, kind)]
    assert kinds, f"{algorithm.name} is refused where nobody is odd"
    return [check_case(algorithm, case) for case in list(cases())[some] if case.kind in kinds]
