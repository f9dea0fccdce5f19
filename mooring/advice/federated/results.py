"""The results of a recommendation across machines as tables: what the server writes, and what each client writes."""

from __future__ import annotations

import numpy as np

from mooring.advice.evaluation.loss_sums import ALTERNATIVES, MODEL_KINDS
from mooring.advice.federated.estimate import DIAGONAL, INTERCEPT, LOCAL, SCALAR, Candidate
from mooring.advice.federated.program import ClientResult, FederationResult
from mooring.advice.inference.recommendation import CLIENT_LEVEL
from mooring.advice.reporting.tables import HELD_OUT, difference_record, recommendation_columns
from mooring.core.task import Task
from mooring.core.types import JsonObject
from mooring.data.clients import Clients
from mooring.data.folds import usable_rows
from mooring.runs.sections import AdviceSection

PLAN_NAMES = {SCALAR: "size", INTERCEPT: "intercept", DIAGONAL: "diagonal", LOCAL: "local"}  # as on one machine
COUNT_PHRASES = {"local": "local models", "global": "the global model", "personal": "personal models"}


def scale_of(task: Task, clients: Clients) -> float:
    """Return what turns losses of the task into those in the target's own units."""
    return clients.target_scale**task.unit_power


def pick_model(own: ClientResult) -> np.ndarray:
    """Return the coefficients of the recommended model."""
    kind = str(own.recommendations.recommended[0])
    return {"local": own.models.local.v, "global": own.models.global_.v}.get(kind, own.models.personal.v)


def client_row(task: Task, clients: Clients, result: FederationResult, own: ClientResult) -> JsonObject:
    """Return a client's row, in the columns of clients.parquet."""
    unit, rows = scale_of(task, clients), int(usable_rows(clients).size[0])
    columns = {name: values[0] for name, values in recommendation_columns(own.recommendations, unit).items()}
    held = (unit * own.held.loss[0] / own.held.rows[0]).tolist()
    kind, _, _ = max(own.models.weights, key=own.models.weights.__getitem__)
    sizes = {part: int(getattr(clients, part).size[0]) for part in ("train", "validation", "test")}
    return {
        "client": clients.names[0],
        "rows": rows,
        **sizes,
        **{name: item.item() if isinstance(item, np.generic) else item for name, item in columns.items()},
        **{f"{name}_held_out": loss for name, loss in zip(MODEL_KINDS, held)},
        "held_out_rows": int(own.held.rows[0]),
        "plan": PLAN_NAMES.get(kind, kind),
        "lam": None,
        "alpha": None,
    }


def federation_record(task: Task, clients: Clients, result: FederationResult, advice: AdviceSection) -> JsonObject:
    """Return what everybody learns, as `advice.json` has it; the rows of clients are added by those that have them."""
    unit, federation = scale_of(task, clients), result.federation
    headline = headline_of(result)
    losses = {"global": unit * federation.global_loss}
    lines: JsonObject = {f"improvement_over_{other}": None for other in ALTERNATIVES}
    personal: JsonObject = dict(lines)
    if result.line is not None:
        losses = {name: unit * loss for name, loss in result.line.loss.items()}
        for other in ALTERNATIVES:
            lines[f"improvement_over_{other}"] = difference_record(result.line.line[other], unit, losses[other])
            personal[f"improvement_over_{other}"] = difference_record(
                result.line.personal_line[other], unit, losses[other]
            )
    summary = {
        **losses,
        "metric": task.metric,
        "evaluated_on": HELD_OUT,
        "held_out_rows": federation.rows,
        **lines,
        "personal_models": personal,
        "with_all_rows": None,
        "recommended_counts": {name: count for name, count in result.recommended.items() if count},
        "confidence_counts": {name: count for name, count in result.confidence.items() if count},
        "margin": advice.margin,
        "level": advice.level,
        "client_level": CLIENT_LEVEL,
        "heterogeneity": None,
        "threshold": None,
        "test": None,
        "measures": {},
        "held_out_measures": {},
    }
    candidates = [
        {
            "family": PLAN_NAMES.get(kind, kind),
            "columns": columns,
            "value": value,
            "ridge": 0.0,
            "loss": unit * loss,
            "weight": (federation.weights or {}).get(Candidate(kind, value, columns), 0.0),
            "plan": False,
        }
        for (kind, value, columns), loss in (federation.losses or {}).items()
    ]
    plan = None
    if candidates:
        heaviest = max(candidates, key=lambda candidate: float(str(candidate["weight"])))
        heaviest["plan"] = True
        plan = {name: heaviest[name] for name in ("family", "columns", "value", "loss")}
    return {
        "headline": headline,
        "summary": summary,
        "title": clients.title,
        "notes": [],
        "words": {"recommendation": headline, "losses": describe_losses(task, losses)},
        "plan": plan,
        "path": [],
        "client_paths": None,
        "learning_curve": None,
        "column_effects": [],
        "candidates": candidates,
        "run": None,
        "intervals": None,
        "clients": [],
    }


def headline_of(result: FederationResult) -> str:
    """Return the answer in a sentence."""
    counts = sorted(((count, name) for name, count in result.recommended.items() if count), reverse=True)
    total = sum(count for count, _ in counts)
    parts = [f"{COUNT_PHRASES[name]} for {count} of {total} clients" for count, name in counts]
    return f"Recommended: {', '.join(parts[:-1])} and {parts[-1]}." if len(parts) > 1 else f"Recommended: {parts[0]}."


def describe_losses(task: Task, losses: JsonObject) -> str:
    parts = [f"{losses[name]:.4g} ({name})" for name in MODEL_KINDS if name in losses]
    return f"The mean {task.metric} on rows that the models have not seen is {', '.join(parts)}."
