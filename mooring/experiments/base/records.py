"""What an experiment gave, as plain data that reports draw from: claims with their numbers, curves, tables."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mooring.experiments.base import trial_cache
from mooring.experiments.base.catalog import CatalogEntry
from mooring.experiments.base.claims import Claim, Verdict
from mooring.experiments.base.experiment import Cell, Panel, Table
from mooring.experiments.base.registry import Registration
from mooring.experiments.base.results import CONFIDENCE, Results, confidence, interval
from mooring.experiments.base.runner import ExperimentResults

DIGITS = 6  # of the numbers of a curve: more than a figure can show


def record(
    entry: CatalogEntry, preset: str, finished: ExperimentResults, known: Mapping[str, Registration] | None = None
) -> dict[str, Any]:
    """The record of an experiment under a preset; `known`: the registrations that it answers, by claim."""
    experiment, results = entry.experiment, finished.results
    size, known = experiment.presets[preset], known or {}
    verdicts = [(claim, decide(claim, results, known.get(claim.id))) for claim in experiment.claims]
    return {
        "experiment": entry.id,
        "paper": entry.paper,
        "title": experiment.title,
        "preset": preset,
        "data": size.data,
        "label": next((one.run["label"] for one in known.values()), ""),
        "repeats": size.repeats,
        "first_seed": size.first_seed,
        "seconds": finished.seconds,
        "made": trial_cache.describe_origin(experiment.trial, size.needs, bool(size.swept))
        | {"version": code_version()},
        "reads": experiment.reads,
        "panels": [panel_record(panel, results) for panel in experiment.panels],
        "tables": [table_record(table, results) for table in experiment.tables],
        "claims": [claim_record(claim, verdict, known.get(claim.id)) for claim, verdict in verdicts],
    }


def decide(claim: Claim, results: Results, one: Registration | None) -> Verdict:
    with confidence(CONFIDENCE if one is None else one.level):
        return claim.check(results)


def code_version() -> str:
    """The package's version and, in a checkout, its commit; "+" for files that are not committed."""
    package = version("mooring-fl")
    folder = Path(__file__).parents[3]
    if not (folder / ".git").exists():
        return package
    ask = ["git", "-C", str(folder)]
    commit = subprocess.run([*ask, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
    changed = subprocess.run([*ask, "status", "--porcelain", "--", "mooring"], capture_output=True, text=True)
    return f"{package} at {commit.stdout.strip()}{'+' if changed.stdout.strip() else ''}"


def claim_record(claim: Claim, verdict: Verdict, one: Registration | None = None) -> dict[str, Any]:
    """A claim with its word, the numbers of the place that decides it, and all others.

    `registration` is the digest of what it answers; None: the run decides nothing.
    """
    return {
        "registration": None if one is None else one.digest,
        "version": None if one is None else one.version,
        "claim": claim.id,
        "says": claim.says,
        "word": verdict.word,
        "needs": verdict.needs,
        "where": verdict.where,
        "worst": verdict.worst,
        "numbers": verdict.numbers,
        "note": claim.note,
        "evidence": claim.evidence,
    }


def panel_record(panel: Panel, results: Results) -> dict[str, Any]:
    """One plot: for each curve its places, the mean over repeats and the ends of its interval."""
    curves = []
    for label, ref in panel.curves.items():
        x, y = results.curve(ref, panel.x)
        mean, low, high = interval(y)
        numbers = {"x": x, "mean": mean, "low": low, "high": high}
        rounded = {name: [float(f"{value:.{DIGITS}g}") for value in values] for name, values in numbers.items()}
        curves.append({"label": label, "dashed": label in panel.dashed, **rounded})
    axes = {name: getattr(panel, name) for name in ("title", "xlabel", "ylabel", "log")}
    return axes | {"curves": curves, "across": dict(panel.across), "upright": dict(panel.upright)}


def table_record(table: Table, results: Results) -> dict[str, Any]:
    rows = [{"label": label, "cells": [_cell(cell, results) for cell in cells]} for label, cells in table.rows.items()]
    return {"title": table.title, "columns": list(table.columns), "rows": rows}


def _cell(cell: Cell, results: Results) -> dict[str, Any]:
    """Our number, half of its interval (None where there is none), and the paper's."""
    if callable(cell.ours):
        return {"ours": cell.ours(results), "half": None, "printed": cell.printed}
    mean, low, high = (float(part) for part in interval(results.one(cell.ours)))
    half = None if low == high or low != low else (high - low) / 2
    return {"ours": mean, "half": half, "printed": cell.printed}
