"""Catalog of the experiments: the module `kernel/fig1.py` is the experiment kernel-fig1.

Modules that start with an underscore contain code that several experiments of a paper use. The packages are named by
the keys of the bibliography (`core/papers.py`); a paper's number can replace its key, as in 004-fig1.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from mooring.core.errors import RequestError
from mooring.core.field_checks import describe_unknown
from mooring.core.natural_order import natural_key
from mooring.core.papers import PAPERS
from mooring.core.types import NamedValues
from mooring_papers.base.experiment import PRESETS, Experiment, Preset

ALL = "all"
ROOT = "mooring_papers"


class CatalogEntry(NamedTuple):
    id: str
    paper: str
    experiment: Experiment


def list_experiments() -> list[str]:
    """Return the ids of all experiments, by paper in the order of the bibliography, then by number."""
    return [f"{paper}-{name.replace('_', '-')}" for paper in list_papers() for name in _module_names(paper)]


def list_papers() -> list[str]:
    """Return the keys of the papers that have a package of experiments."""
    packages = {folder.name for folder in pkgutil.iter_modules(importlib.import_module(ROOT).__path__) if folder.ispkg}
    return [paper.key for paper in PAPERS if paper.key in packages]


def _module_names(paper: str) -> list[str]:
    paths = importlib.import_module(f"{ROOT}.{paper}").__path__
    names = [module.name for module in pkgutil.iter_modules(paths) if not module.name.startswith("_")]
    return sorted(names, key=natural_key)


def load_experiment(name: str) -> CatalogEntry:
    """Return the experiment with this id."""
    if name not in list_experiments():
        names = [*list_papers(), *list_experiments(), ALL]
        raise RequestError(f"{describe_unknown('experiment', name, names, 'mooring list experiments')}.")
    paper, experiment = name.split("-", 1)
    module = importlib.import_module(f"{ROOT}.{paper}.{experiment.replace('-', '_')}")
    return CatalogEntry(name, paper, module.EXPERIMENT)


def select_experiments(selection: str) -> list[CatalogEntry]:
    """Return the experiments that `selection` names: an experiment's id, a paper's key, or `all`."""
    if selection not in (ALL, *list_papers()):
        return [load_experiment(selection)]
    return [load_experiment(id_) for id_ in list_experiments() if selection == ALL or id_.split("-")[0] == selection]


def get_preset(entry: CatalogEntry, name: str) -> Preset:
    """Return a preset by name; an unknown name is refused."""
    if name not in PRESETS:
        raise RequestError(f"--preset must be one of {', '.join(PRESETS)}, got {name!r}.")
    return entry.experiment.presets[name]


def restrict_experiment(entry: CatalogEntry, name: str, only: Sequence[str], repeats: int | None) -> CatalogEntry:
    """Return the experiment with a subset of a preset's points, such as only = ["row=MNIST CNN2"], and with another
    number of repeats; the description of its data states the restriction."""
    full = get_preset(entry, name)
    points = list(full.points)
    for condition in only:
        key, _, value = condition.partition("=")
        selected = [point for point in points if str(point.get(key)) == value]
        if not selected:
            available = "; ".join(f"{key} = {', '.join(values)}" for key, values in _coordinate_values(points).items())
            raise RequestError(
                f"--only {condition}: {entry.id} has no such point; it has {available or 'a single point'}."
            )
        points = selected
    if repeats is not None and repeats < 1:
        raise RequestError(f"--repeats must be a whole number >= 1, got {repeats}.")
    data = "; ".join(filter(None, [full.data, *(f"only {condition.replace('=', ' = ')}" for condition in only)]))
    size = replace(full, points=points, repeats=repeats or full.repeats, data=data)
    return entry._replace(experiment=replace(entry.experiment, presets={**entry.experiment.presets, name: size}))


def _coordinate_values(points: Sequence[NamedValues]) -> dict[str, list[str]]:
    """Return the values of each coordinate of the points."""
    values_by_key: dict[str, dict[str, None]] = {}
    for point in points:
        for key, value in point.items():
            values_by_key.setdefault(key, {})[str(value)] = None
    return {key: list(values) for key, values in values_by_key.items()}


def describe_experiment(name: str) -> dict[str, object]:
    """Return the row of `mooring list experiments`."""
    entry = load_experiment(name)
    claims = [claim.id for claim in entry.experiment.claims]
    return {"id": name, "paper": entry.paper, "title": entry.experiment.title, "claims": claims}
