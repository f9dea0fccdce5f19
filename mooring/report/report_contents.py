"""Contents of the report of a run of `advise`, `fit` or `compare`, as plain tables, from its directory.

All three become the same parts (decision, models, clients, path, rounds, heterogeneity, settings); a part that a run
does not have is empty.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import tomli_w

from mooring.core.errors import RequestError
from mooring.core.score_sentences import BASELINES, describe_scores, format_loss
from mooring.core.types import JsonObject, NamedValues
from mooring.report.terminal_results import (
    EVALUATED_MODELS,
    METRIC_LABELS,
    MODELS,
    PLAN_DESCRIPTIONS,
    describe_comparison,
    describe_kept_round,
    describe_left_out,
    describe_measures,
    describe_privacy,
)
from mooring.runs.atomic_files import frame_from_rows
from mooring.runs.directory import METHODS_FOLDER, RUN_FILE, RunDirectory, open_run
from mooring.runs.directory import MODELS_FILE as SAVED

CERTAINTY_BY_CONFIDENCE = {
    "high": 1.0,
    "moderate": 0.65,
    "low": 0.3,
}  # opacity of a client in figures, by its confidence
MAX_COEFFICIENTS = 300_000  # beyond which a report leaves the clients' models out
MAX_MODEL_BYTES = 2**30  # beyond which their distances are left out
MAX_LISTED_NUMBERS = 12  # numbers of a setting that are written out
MAX_TITLE_WORDS = 12  # of a report's title
COLUMN_LABELS = {
    "client": "client",
    "recommended": "recommended",
    "lowest": "lowest test loss",
    "improvement_over_local_pct": "vs. local",
    "improvement_over_local_pct_ci_low": "vs. local, CI low",
    "improvement_over_local_pct_ci_high": "vs. local, CI high",
    "improvement_over_global_pct": "vs. global",
    "improvement_over_global_pct_ci_low": "vs. global, CI low",
    "improvement_over_global_pct_ci_high": "vs. global, CI high",
    "confidence": "confidence",
    "probability_better_than_local": "P(better than local)",
    "probability_better_than_global": "P(better than global)",
    "rows": "rows",
    "local": "local",
    "global": "global",
    "pooled": "pooled",
    "personal": "personal",
    "local_held_out": "local, held-out",
    "global_held_out": "global, held-out",
    "personal_held_out": "personal, held-out",
    "held_out_rows": "held-out rows",
    "improvement_over_local": "improvement over local",
    "improvement_over_local_ci_low": "improvement over local, CI low",
    "improvement_over_local_ci_high": "improvement over local, CI high",
    "improvement_over_global": "improvement over global",
    "improvement_over_global_ci_low": "improvement over global, CI low",
    "improvement_over_global_ci_high": "improvement over global, CI high",
    "plan": "plan",
    "lam": "lambda",
    "alpha": "alpha",
    "distance": "distance",
    "train": "train rows",
    "validation": "validation rows",
    "test": "test rows",
    "rows_to_match": "rows to match",
    "others_held_out": "other clients, held-out",
    "contribution": "contribution",
    "contribution_pct": "contribution in %",
    "is_outlier": "outlier",
}
EXPECTED_LOSS_LABELS = {name: f"{name} loss" for name in MODELS}  # headings where losses are expected ones


@dataclass
class ReportContents:
    """The report of a run."""

    name: str  # of the directory
    purpose: str  # "advise", "fit" or "compare"
    title: str
    metric: str
    decision: str  # the title of the report, at most MAX_TITLE_WORDS words
    headline: str  # the same in a whole sentence
    summary: list[str]  # sentences below it, with the losses
    details: list[str]  # what else is known, behind a fold
    notes: list[str]
    models: list[JsonObject]  # name, about, loss; the lowest first in a comparison
    losses_of: str  # rows of the models' losses
    clients: pd.DataFrame  # in the columns of LABELS, and one column per method in a comparison
    recommends: bool  # whether the run recommends models, rather than reporting test losses
    commands: list[dict[str, str]]  # about, command
    settings: str
    version: str = ""
    date: str = ""
    digest: str = ""
    level: float = 0.95  # of the federation's interval
    client_level: float | None = None  # of the clients' intervals
    margin: float | None = None
    personal: str = "personal"  # the method whose personal models are shown
    path: JsonObject | None = None
    effects: list[JsonObject] = field(default_factory=list)  # column, values, prediction, linear, ...
    curve: JsonObject | None = None  # of a typical client: rows, local, personal, global; now, match
    rounds: list[JsonObject] = field(default_factory=list)  # name, kept, table
    theory: JsonObject | None = None
    coefficients: JsonObject | None = None  # names, global [d], personal [m, d]

    def loss(self, model: str) -> float | None:
        """The mean loss of "local", "global" or "pooled" models; None if the run has none."""
        return next((row["loss"] for row in self.models if row["name"] == model), None)


def collect_contents(run: str | Path) -> ReportContents:
    """Return the contents of the report of a finished run."""
    directory = open_run(run)
    purpose = directory.run.mooring.purpose
    makers = {"advise": of_advice, "fit": of_fit, "compare": of_comparison}
    if purpose not in makers:
        raise RequestError(f"{run} is a run of '{purpose}'; reports are made of {', '.join(makers)}.")
    return makers[purpose](directory)


def of_advice(directory: RunDirectory) -> ReportContents:
    advice = directory.advice
    summary, sentences = advice["summary"], dict(advice["words"])
    if not advice["clients"] or "recommended" not in summary:
        raise RequestError(
            f"{directory.path} has no report: it is a federation whose clients keep their results, or are too few for "
            "losses of all. Each client has its own result."
        )
    clients = add_certainty(frame_from_rows(advice["clients"]))
    models = [
        {"name": "recommended", "about": "each client's recommended model", "loss": summary["recommended"]},
        {"name": "personal", "about": "a personal model for every client", "loss": summary["personal"]},
        {"name": "local", "about": "every client's local model", "loss": summary["local"]},
        {"name": "global", "about": "one model for all clients", "loss": summary["global"]},
    ]
    measures = summary.get("held_out_measures") or {}
    models = [row | _known_measures(measures, row["name"], measures.get("recommended", {})) for row in models]
    theory = directory.theory
    if theory is not None and "theory" in sentences:
        theory = theory | {"words": [sentences["theory"], *theory["words"]]}
    main = [sentences.pop(name) for name in ("losses", "confidence", "recommendation") if name in sentences]
    sentences.pop("theory", None)
    return ReportContents(
        **_frame(directory, advice, summary["metric"]),
        decision=shorten_headline(advice["headline"], summary["recommended_counts"]),
        headline=advice["headline"],
        summary=[*main, *describe_measures(measures, EVALUATED_MODELS)],
        details=list(sentences.values()),
        models=models,
        losses_of=f"mean over {summary['held_out_rows']:,} {summary['evaluated_on']}",
        clients=add_distance(clients, directory),
        recommends=True,
        level=summary["level"],
        client_level=summary["client_level"],
        margin=summary["margin"],
        path=lambda_path_curve(advice),
        curve=advice.get("learning_curve"),
        effects=advice.get("column_effects") or [],
        theory=theory,
        coefficients=coefficients(directory),
    )


def of_fit(directory: RunDirectory) -> ReportContents:
    summary, clients = directory.summary, add_test_results(directory.clients)
    private = [describe_privacy(summary["privacy"])] if "privacy" in summary else []
    left_out = clients.dropna(subset="left_out") if "left_out" in clients else clients.head(0)
    rounds = {"name": summary["algorithm"], "kept": _used_round(summary), "table": directory.rounds}
    models = [
        {"name": "personal", "about": summary["algorithm"], "loss": summary["personal"]},
        {"name": "local", "about": "every client's local model", "loss": summary["local"]},
        {"name": "pooled", "about": "one model fitted to all rows", "loss": summary["pooled"]},
    ]
    scores = describe_scores(summary)
    return ReportContents(
        **_frame(directory, summary, summary["metric"]),
        decision=f"{summary['algorithm']}: test {summary['metric']} {format_loss(summary['personal'])}",
        headline=scores[0],
        summary=scores[1:],
        details=[describe_kept_round(summary), *private, *([describe_left_out(left_out)] if len(left_out) else [])],
        models=[
            row | _known_measures(summary["measures"], row["name"], summary["measures"].get("personal", {}))
            for row in models
            if row["loss"] is not None
        ],
        losses_of=f"mean over {summary['test_rows']:,} test rows",
        clients=add_distance(clients, directory),
        recommends=False,
        rounds=[rounds],
        coefficients=coefficients(directory),
    )


def of_comparison(directory: RunDirectory) -> ReportContents:
    comparison = directory.comparison
    methods, clients = (
        frame_from_rows(comparison["methods"]).sort_values("test_loss"),
        frame_from_rows(comparison["clients"]),
    )
    names = methods["method"].tolist()
    trained = [name for name in names if name not in BASELINES] or names
    best = trained[0]
    clients = add_test_results(clients.assign(personal=clients[best]))
    clients = clients.assign(kind=clients["lowest"], lowest=clients[names].idxmin(axis=1))
    rounds = [
        {
            "name": row["method"],
            "kept": int(row["used_round"]),
            "table": directory.of_method(row["method"]).rounds,
        }
        for row in methods.to_dict("records")
    ]
    first = methods.iloc[0]
    loss = format_loss(first["test_loss"])
    return ReportContents(
        **_frame(directory, comparison, comparison["metric"]),
        decision=f"Lowest test {comparison['metric']} of {len(methods)} methods: {first['method']} ({loss})",
        headline=f"Of {len(methods)} methods, {first['method']} has the lowest test {comparison['metric']}, {loss}.",
        summary=describe_comparison(methods),
        details=[
            f"Figures and cards show {best}, the method with the lowest test loss among those with personal models.",
            f"Each method's models are in {METHODS_FOLDER}/METHOD/{SAVED}; predict with {METHODS_FOLDER}/{names[0]}.",
        ],
        models=[{"name": row["method"], "about": "", **_costs(row)} for row in methods.to_dict("records")],
        losses_of=f"mean over {int(clients['test'].sum()):,} test rows",
        clients=add_distance(clients, directory.of_method(best)),
        recommends=False,
        personal=best,
        rounds=rounds,
    )


def shorten_headline(headline: str, counts: Mapping[str, int]) -> str:
    """Return the recommendation in at most MAX_TITLE_WORDS words."""
    if len(headline.split()) <= MAX_TITLE_WORDS:
        return headline.rstrip(".")
    m = sum(counts.values())
    (first, first_count), *other_counts = sorted(counts.items(), key=lambda pair: -pair[1])
    other_texts = ", ".join(f"{kind} for {count:,}" for kind, count in other_counts)
    model = " model" if len(other_counts) == 1 else ""
    return f"{first.capitalize()}{model} for {first_count:,} of {m:,} clients, {other_texts}"


def _frame(directory: RunDirectory, record: NamedValues, metric: str) -> JsonObject:
    """Return the contents that all reports share."""
    run, path = directory.run, directory.path
    return {
        "name": path.resolve().name,
        "purpose": run.mooring.purpose,
        "title": str(record["title"]),
        "metric": metric,
        "notes": list(record.get("notes", [])),
        "commands": commands(directory),
        "settings": settings(directory),
        "version": run.mooring.version,
        "date": date_of(directory),
        "digest": digest_of(directory),
    }


def date_of(directory: RunDirectory) -> str:
    """Return the date on which the run was finished, by its last file; UTC."""
    last = directory.path / SAVED
    last = last if last.exists() else directory.path / RUN_FILE
    return datetime.fromtimestamp(last.stat().st_mtime, UTC).strftime("%Y-%m-%d")


def digest_of(directory: RunDirectory) -> str:
    """Return the first digits of the digest of the run's data."""
    try:
        digest = directory.schema.get("digest")
    except RequestError:
        digest = directory.inputs.get("rows")
    return str(digest or "")[:12]


def commands(directory: RunDirectory) -> list[dict[str, str]]:
    """Return commands for the next steps with a run."""
    run, path = directory.run.mooring.purpose, shlex.quote(str(directory.path))
    out = [{"about": "Predict new rows, each with its client's model", "command": f"mooring predict {path} new.csv"}]
    if run != "compare":
        out.append(
            {
                "about": "Recommend a model for a new client",
                "command": f"mooring personalize {path} new_client.csv",
            }
        )
    command = ["mooring", run, str(directory.path / RUN_FILE), "--out", f"{directory.path}-again"]
    return [*out, {"about": "Run it again", "command": shlex.join(command)}]


def add_certainty(frame: pd.DataFrame) -> pd.DataFrame:
    """Return clients with `certainty`, 0 to 1: their opacity in figures."""
    confidence = frame.get("confidence", pd.Series(index=frame.index, dtype=object))  # clients that sent it
    return frame.assign(certainty=confidence.map(CERTAINTY_BY_CONFIDENCE).fillna(1.0))


def add_test_results(frame: pd.DataFrame) -> pd.DataFrame:
    """Return clients of a run without recommendations, with the model with the lowest test loss, and improvements
    over local."""
    losses = frame[[name for name in (*BASELINES, "personal") if name in frame]].dropna(how="all")
    lowest = losses.idxmin(axis=1).reindex(frame.index, fill_value="")
    frame = frame.assign(lowest=lowest, certainty=1.0)
    if "improvement_over_local" not in frame and "local" in frame:
        gap = frame["local"] - frame["personal"]
        base = frame["local"].where(frame["local"] > 0)
        frame = frame.assign(improvement_over_local=gap, improvement_over_local_pct=100 * gap / base)
    return frame.dropna(axis=1, how="all")


def _known_measures(measures: NamedValues, model: str, first: NamedValues) -> dict[str, float | None]:
    """Return a model's measures in the target's unit: those of the first model."""
    names = [name for name in METRIC_LABELS if name in first]
    return {METRIC_LABELS[name]: measures.get(model, {}).get(name) for name in names}


def _costs(row: NamedValues) -> JsonObject:
    costs = {"loss": row["test_loss"], "last round": row["last_test_loss"], "round": row["used_round"]}
    return costs | {"rounds": row["rounds"], "bytes": row["bytes"], "seconds": row["seconds"]}


def _used_round(summary: NamedValues) -> int:
    return int(summary[f"{summary['checkpoint']}_round"])


def add_distance(clients: pd.DataFrame, directory: RunDirectory) -> pd.DataFrame:
    """Return the clients with the distance of each model from the global one, if the run contains both."""
    path = directory.path / SAVED
    if not path.exists() or path.stat().st_size > MAX_MODEL_BYTES:
        return clients
    models = directory.models
    if models.personal is None:
        return clients
    distance = (models.personal - models.common).norm(dim=1).tolist()
    distances = dict(zip(models.clients, distance))
    return clients.assign(distance=[distances.get(str(name), np.nan) for name in clients["client"]])


def coefficients(directory: RunDirectory) -> JsonObject | None:
    """Return every client's coefficients by name, if the model is linear and they are not too many."""
    models = directory.models
    names = [*models.task.get("features", []), "(intercept)"]
    shapes = [part["shape"] for part in models.layout]
    if models.personal is None or models.personal.numel() > MAX_COEFFICIENTS or shapes != [[len(names) - 1], [1]]:
        return None
    return {"names": names, "global": models.common.tolist(), "personal": models.personal.tolist()}


def lambda_path_curve(advice: NamedValues) -> JsonObject | None:
    """Return held-out losses by lambda, of local models and of the global one, of the plan, and of every client if
    known."""
    path = frame_from_rows(advice["path"])
    if path.empty:
        return None
    pulled = path[path["family"] == "lambda"].sort_values("lam")
    if pulled.empty:
        return None
    lams = pd.Series([row.get("lam") for row in advice["clients"]], dtype=object)
    lams = pd.to_numeric(lams, errors="coerce").dropna()
    lams = lams[(lams > 0) & np.isfinite(lams)]
    plan = advice["plan"]
    return {
        "lam": pulled["lam"].tolist(),
        "loss": pulled["loss"].tolist(),
        "local": advice["summary"]["local"],
        "global": advice["summary"]["global"],
        "rows": advice["summary"]["held_out_rows"],
        "plan": {
            "family": plan["family"],
            "about": PLAN_DESCRIPTIONS.get(plan["family"], plan["family"]),
            "loss": plan["loss"],
            "low": float(lams.min()) if len(lams) else None,
            "middle": float(lams.median()) if len(lams) else None,
            "high": float(lams.max()) if len(lams) else None,
        },
        "clients": advice.get("client_paths"),
    }


def settings(directory: RunDirectory) -> str:
    """Return the run file without its seal, with long lists of numbers shortened."""
    table = directory.run.model_dump(exclude_none=True)
    table["mooring"].pop("seal", None)
    return tomli_w.dumps(_shorten(table))


def _shorten(value: object) -> Any:
    if isinstance(value, Mapping):
        return {key: _shorten(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) > MAX_LISTED_NUMBERS and all(isinstance(item, int | float) for item in value):
            return f"{len(value)} numbers from {min(value):.4g} to {max(value):.4g}: see {RUN_FILE}"
        return [_shorten(item) for item in value]
    return value
