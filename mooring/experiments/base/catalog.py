"""Experiments, found by folder: `kernel/fig1.py` is kernel-fig1. Files that begin with _ hold what a paper's share.

Folders are the keys of the bibliography (`core/papers.py`); a paper's number works wherever its key does: 004-fig1.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from mooring.core.errors import RequestError
from mooring.core.papers import PAPERS, paper_key
from mooring.experiments.base.experiment import PRESETS, Experiment, Preset

ALL = "all"
ROOT = "mooring.experiments"


class CatalogEntry(NamedTuple):
    id: str
    paper: str
    experiment: Experiment


def list_experiments() -> list[str]:
    """All experiments by paper in the bibliography's order, figures and tables in the order of their numbers."""
    return [f"{paper}-{name.replace('_', '-')}" for paper in papers() for name in _files(paper)]


def papers() -> list[str]:
    """Keys of the papers that have a folder."""
    there = {folder.name for folder in pkgutil.iter_modules(importlib.import_module(ROOT).__path__) if folder.ispkg}
    return [paper.key for paper in PAPERS if paper.key in there]


def _files(paper: str) -> list[str]:
    paths = importlib.import_module(f"{ROOT}.{paper}").__path__
    names = [module.name for module in pkgutil.iter_modules(paths) if not module.name.startswith("_")]
    return sorted(names, key=lambda text: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", text)])


def load_experiment(one: str) -> CatalogEntry:
    """The experiment with this id."""
    found = paper_key(one)
    if found not in list_experiments():
        raise RequestError(
            f"unknown experiment {one!r}; known: {', '.join(list_experiments())}; or a paper or '{ALL}'."
        )
    paper, name = found.split("-", 1)
    module = importlib.import_module(f"{ROOT}.{paper}.{name.replace('-', '_')}")
    return CatalogEntry(found, paper, module.EXPERIMENT)


def select_experiments(what: str) -> list[CatalogEntry]:
    """An experiment's id, a paper's key for all of its experiments, or `all`."""
    wanted = paper_key(what)
    if what != ALL and wanted not in papers():
        return [load_experiment(what)]
    return [load_experiment(one) for one in list_experiments() if what == ALL or one.split("-")[0] == wanted]


def preset(entry: CatalogEntry, name: str) -> Preset:
    if name not in PRESETS:
        raise RequestError(f"--preset must be one of {', '.join(PRESETS)}, got {name!r}.")
    return entry.experiment.presets[name]


def part(entry: CatalogEntry, name: str, only: Sequence[str], repeats: int | None) -> CatalogEntry:
    """The experiment with those points of a preset alone that `only` names, such as ["row=MNIST CNN2"], and with as
    many repeats; its record says so."""
    whole = preset(entry, name)
    points = list(whole.points)
    for word in only:
        key, _, value = word.partition("=")
        kept = [point for point in points if str(point.get(key)) == value]
        if not kept:
            known = "; ".join(f"{key} = {', '.join(values)}" for key, values in coordinates(points).items())
            raise RequestError(f"--only {word}: {entry.id} has no such point; it has {known or 'one point alone'}.")
        points = kept
    if repeats is not None and repeats < 1:
        raise RequestError(f"--repeats must be a whole number >= 1, got {repeats}.")
    said = "; ".join(filter(None, [whole.data, *(f"only {word.replace('=', ' = ')}" for word in only)]))
    size = replace(whole, points=points, repeats=repeats or whole.repeats, data=said)
    return entry._replace(experiment=replace(entry.experiment, presets={**entry.experiment.presets, name: size}))


def coordinates(points: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """What the points vary, and its values."""
    found: dict[str, dict[str, None]] = {}
    for point in points:
        for key, value in point.items():
            found.setdefault(key, {})[str(value)] = None
    return {key: list(values) for key, values in found.items()}


def describe_experiment(one: str) -> dict[str, object]:
    """What `mooring list experiments` tells."""
    entry = load_experiment(one)
    claims = [claim.id for claim in entry.experiment.claims]
    return {"id": one, "paper": entry.paper, "title": entry.experiment.title, "claims": claims}
