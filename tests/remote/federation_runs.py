"""Runs of federations for tests: tables of clients, run files, clients in this process, and what to compare with."""

from dataclasses import fields, is_dataclass

import numpy as np
import pandas as pd
import pytest
import torch

from mooring.algorithms.base import algorithm_names, find
from mooring.engines.personal_parts import PersonalParts
from mooring.engines.request import request
from mooring.remote.client_node import ClientNode
from mooring.remote.requests import REQUESTS
from mooring.runs.sections import FederationSection
from tests.algorithms.cases import CASES

ALGORITHMS = [name for name in algorithm_names() if not find(name).pooled]


HOW = {"target": "y", "rounds": 4, "evaluate_every": 1, "threads": 1}


ROUNDING = 1e-12  # constants come from decompositions of one client's matrix, or of all clients' at once


def write_clients(folder, binary=False, clients=4):
    """Tables with numbers, a category, holes, and a client-specific slope."""
    rng = np.random.default_rng(5)
    folder.mkdir()
    for i in range(clients):
        n = 24 + 3 * i
        frame = pd.DataFrame(rng.normal(size=(n, 2)) * 3 + 1, columns=["a", "b"])
        frame["colour"] = rng.choice(["red", "green", "blue"], n)
        score = frame["a"] - frame["b"] * (1 + i) / 4 + (frame["colour"] == "red") + rng.normal(size=n)
        frame.loc[rng.random(n) < 0.1, "b"] = None
        frame["y"] = np.where(score > score.median(), "yes", "no") if binary else score
        frame.to_csv(folder / f"site {i}.csv", index=False)
    return folder


def make_run(folder, name="fedprox_personal", fields=None, federation=None, **more):
    asked = request(str(folder), purpose="fit", algorithm=name, settings=fields, **HOW | more)
    known = {"clients": len(list(folder.iterdir())), "share_models": not find(name).keeps_models, "secure": False}
    return asked.model_copy(update={"federation": FederationSection(**known | (federation or {}))})


def make_clients(run, folder, state):
    return [ClientNode(run, file, state / file.stem) for file in sorted(folder.iterdir())]


def valid_settings(name):
    return dict(next(fields for other, fields, problems in CASES if other == name and "linear" in problems))


def is_alike(one, other):
    """The same settings, numbers up to rounding."""
    if isinstance(one, float):
        return one == pytest.approx(other, rel=ROUNDING, nan_ok=True)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_alike, one, other))
    if isinstance(one, PersonalParts):
        return torch.equal(one.mask, other.mask) and is_alike(one._algorithm, other._algorithm)
    if is_dataclass(one):
        same = (is_alike(getattr(one, part.name), getattr(other, part.name)) for part in fields(one))
        return type(one) is type(other) and all(same)
    return one == other


def assert_same(one, other):
    assert is_alike(one.algorithm, other.algorithm), f"{one.algorithm} is not {other.algorithm}"
    for which in ("last", "best"):
        mine, right = getattr(one, which), getattr(other, which)
        assert mine.t == right.t
        pairs = [(mine.common, right.common), (mine.models, right.models), (mine.test, right.test)]
        pairs += [] if right.alpha is None else [(mine.alpha, right.alpha)]
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, rtol=ROUNDING, atol=ROUNDING, equal_nan=True)


def answer_with(patch, what, answer):
    """Let clients answer a request otherwise."""
    patch.setitem(REQUESTS, what, REQUESTS[what]._replace(answer=answer))


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Killed(BaseException):
    """As abrupt as a kill: nobody catches it."""
