"""Records: the results of an experiment as plain data, with claims and their numbers, curves and tables."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from mooring.core.types import JsonObject
from mooring.runs.atomic_files import read_json
from mooring_papers.base import catalog, trial_cache
from mooring_papers.base.catalog import CatalogEntry
from mooring_papers.base.claims import Claim, Verdict
from mooring_papers.base.experiment import Cell, Panel, Table
from mooring_papers.base.registry import Registration
from mooring_papers.base.results import CONFIDENCE, Results, confidence, interval
from mooring_papers.base.runner import ExperimentResults

CURVE_DIGITS = 6  # significant digits of the numbers of a curve


def make_record(
    entry: CatalogEntry,
    preset: str,
    finished: ExperimentResults,
    registrations: Mapping[str, Registration] | None = None,
) -> JsonObject:
    """Return the record of an experiment under a preset; `registrations` are those that it answers, by claim."""
    experiment, results = entry.experiment, finished.results
    size, registrations = experiment.presets[preset], registrations or {}
    verdicts = [(claim, _decide(claim, results, registrations.get(claim.id))) for claim in experiment.claims]
    return {
        "experiment": entry.id,
        "paper": entry.paper,
        "title": experiment.title,
        "preset": preset,
        "data": size.data,
        "label": next((value.run["label"] for value in registrations.values()), ""),
        "repeats": size.repeats,
        "first_seed": size.first_seed,
        "seconds": finished.seconds,
        "made": trial_cache.describe_origin(experiment.version, size.needs) | {"version": code_version()},
        "reads": experiment.reads,
        "panels": [panel_record(panel, results) for panel in experiment.panels],
        "tables": [table_record(table, results) for table in experiment.tables],
        "claims": [_claim_record(claim, verdict, registrations.get(claim.id)) for claim, verdict in verdicts],
    }


def _decide(claim: Claim, results: Results, registration: Registration | None) -> Verdict:
    with confidence(CONFIDENCE if registration is None else registration.level):
        return claim.check(results)


def code_version() -> str:
    """Return the package's version and, in a checkout, its commit; "+" if files are not committed."""
    package = version("mooring-fl")
    folder = Path(__file__).parents[3]
    if not (folder / ".git").exists():
        return package
    git, code = ["git", "-C", str(folder)], ["mooring", "papers/mooring_papers"]
    commit = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
    changed = subprocess.run([*git, "status", "--porcelain", "--", *code], capture_output=True, text=True)
    return f"{package} at {commit.stdout.strip()}{'+' if changed.stdout.strip() else ''}"


def list_outdated(folder: Path) -> list[str]:
    """Return the names of the records in a folder whose trials have a newer version; it is 1 if a record has none."""
    outdated = []
    for path in sorted(folder.glob("*.json")):
        record = read_json(path)
        if record.get("experiment") not in catalog.list_experiments():
            continue
        version = catalog.load_experiment(record["experiment"]).experiment.version
        if record["made"].get("trials", 1) != version:
            outdated.append(path.stem)
    return outdated


def _claim_record(claim: Claim, verdict: Verdict, registration: Registration | None = None) -> JsonObject:
    """Return a claim with its verdict, the numbers of the place that decides it, and all other numbers.

    "registration" is the digest of the registration that it answers; None: the run decides nothing.
    """
    return {
        "registration": None if registration is None else registration.digest,
        "version": None if registration is None else registration.version,
        "claim": claim.id,
        "says": claim.says,
        "word": verdict.outcome,
        "needs": verdict.needs,
        "where": verdict.where,
        "worst": verdict.worst,
        "numbers": verdict.numbers,
        "note": claim.note,
        "evidence": claim.evidence,
    }


def panel_record(panel: Panel, results: Results) -> JsonObject:
    """Return one plot: for each curve its x values, the mean over repeats and the ends of its interval."""
    curves = []
    for label, ref in panel.curves.items():
        x, y = results.curve(ref, panel.x)
        mean, low, high = interval(y)
        numbers = {"x": x, "mean": mean, "low": low, "high": high}
        rounded = {name: [float(f"{value:.{CURVE_DIGITS}g}") for value in values] for name, values in numbers.items()}
        curves.append({"label": label, "dashed": label in panel.dashed, **rounded})
    axes = {name: getattr(panel, name) for name in ("title", "xlabel", "ylabel", "log")}
    return axes | {"curves": curves, "across": dict(panel.across), "upright": dict(panel.upright)}


def table_record(table: Table, results: Results) -> JsonObject:
    """Return one table: for each cell the number, half of its interval and the printed number."""
    rows = [{"label": label, "cells": [_cell(cell, results) for cell in cells]} for label, cells in table.rows.items()]
    return {"title": table.title, "columns": list(table.columns), "rows": rows}


def _cell(cell: Cell, results: Results) -> JsonObject:
    """Return our number, half of its interval (None if it has none), and the paper's number."""
    if callable(cell.ours):
        return {"ours": cell.ours(results), "half": None, "printed": cell.printed}
    mean, low, high = (float(part) for part in interval(results.repeats(cell.ours)))
    half = None if low == high or low != low else (high - low) / 2
    return {"ours": mean, "half": half, "printed": cell.printed}
