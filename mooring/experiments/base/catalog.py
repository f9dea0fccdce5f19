"""Experiments, found by folder: `paper004/fig1.py` is 004-fig1. Files that begin with _ hold what a paper's share."""

from __future__ import annotations

import importlib
import pkgutil
import re
from typing import NamedTuple

from mooring.core.errors import RequestError
from mooring.experiments.base.experiment import PRESETS, Experiment, Preset

ALL = "all"


class Entry(NamedTuple):
    id: str
    paper: str
    experiment: Experiment


def ids() -> list[str]:
    """All experiments by paper, figures and tables in the order of their numbers."""
    root = importlib.import_module("mooring.experiments")
    found = []
    for folder in pkgutil.iter_modules(root.__path__):
        if folder.ispkg and folder.name.startswith("paper"):
            paths = importlib.import_module(f"{root.__name__}.{folder.name}").__path__
            names = [m.name for m in pkgutil.iter_modules(paths) if not m.name.startswith("_")]
            found += [f"{folder.name.removeprefix('paper')}-{name.replace('_', '-')}" for name in names]
    return sorted(found, key=lambda text: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", text)])


def papers() -> list[str]:
    return sorted({one.split("-")[0] for one in ids()})


def load(one: str) -> Entry:
    """The experiment with this id."""
    if one not in ids():
        raise RequestError(f"unknown experiment {one!r}; known: {', '.join(ids())}; or a paper or '{ALL}'.")
    paper, name = one.split("-", 1)
    module = importlib.import_module(f"mooring.experiments.paper{paper}.{name.replace('-', '_')}")
    return Entry(one, paper, module.EXPERIMENT)


def select(what: str) -> list[Entry]:
    """An experiment's id, a paper's number for all of its experiments, or `all`."""
    if what != ALL and what not in papers():
        return [load(what)]
    return [load(one) for one in ids() if what in (ALL, one.split("-")[0])]


def preset(entry: Entry, name: str) -> Preset:
    if name not in PRESETS:
        raise RequestError(f"--preset must be one of {', '.join(PRESETS)}, got {name!r}.")
    return entry.experiment.presets[name]


def describe(one: str) -> dict[str, object]:
    """What `mooring list experiments` tells."""
    entry = load(one)
    claims = [claim.id for claim in entry.experiment.claims]
    return {"id": one, "paper": entry.paper, "title": entry.experiment.title, "claims": claims}
