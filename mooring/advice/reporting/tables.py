"""The numbers of an advice as tables: one row per client, the federation's summary, the path of lambdas."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from mooring.advice.candidates.families import LAMBDA, Setting
from mooring.advice.evaluation.cross_fitting import Evidence
from mooring.advice.evaluation.evidence import advice_options
from mooring.advice.evaluation.loss_sums import (
    ALTERNATIVES,
    GLOBAL,
    LOCAL,
    MODEL_KINDS,
    PERSONAL,
    ModelTriple,
    mean_losses,
    pooled_losses,
    sum_losses,
)
from mooring.advice.evaluation.setting_choice import Choice
from mooring.advice.inference.recommendation import (
    CLIENT_LEVEL,
    Recommendations,
    describe_probability,
)
from mooring.advice.reporting.learning_curve import LearningCurve
from mooring.advice.reporting.setting_summary import client_lams, effective_family, setting_alpha
from mooring.core.types import JsonObject
from mooring.data.clients import PARTS
from mooring.engines.metrics import compute_metrics
from mooring.engines.prepare import Job
from mooring.engines.theory_report import TheoryReport
from mooring.estimates.clustered_mean import MeanDifference

HELD_OUT = "held-out rows"


class RecommendedModels(NamedTuple):
    """All clients' models: the three that are compared, and the recommended one."""

    local: Tensor  # [m, d]
    global_: Tensor  # [d]
    personal: Tensor  # [m, d]
    recommended: Tensor  # [m, d]
    centers: Tensor  # [k, d], the global model inside each averaged setting: what new clients are pulled to
    plan: list[Setting]  # each client's, of the recommended model


def loss_scale(job: Job) -> float:
    """What turns losses of the task into those in the target's own units."""
    return job.clients.target_scale**job.task.unit_power


def recommended_models(choice: Choice, models: ModelTriple, kinds: np.ndarray) -> RecommendedModels:
    """Each client's model of the recommended kind."""
    simple = {LOCAL: choice.local, GLOBAL: choice.global_}
    plan = [simple.get(kind, choice.own.get(i, choice.plan)) for i, kind in enumerate(kinds)]
    return RecommendedModels(*models[:3], pick_models(models, kinds), models.centers, plan)


def pick_models(models: ModelTriple, kinds: np.ndarray) -> Tensor:
    """[m, d]: each client's model of the kind that it is recommended."""
    out = models.personal.clone()
    for kind, of_kind in zip(MODEL_KINDS, models.each()):
        chosen = torch.from_numpy(kinds == kind)
        out[chosen] = of_kind[chosen]
    return out


def lambda_path_table(choice: Choice, unit: float) -> pd.DataFrame:
    """The held-out losses along the path of single lambdas with the plan's columns, and the best of its two ends."""
    table = choice.table[choice.table["columns"] == choice.plan.columns]
    pulled = table[table["family"] == LAMBDA][["family", "value", "loss"]].rename(columns={"value": "lam"})
    ends = [
        {"family": family, "lam": lam, "loss": float(table[table["family"] == family]["loss"].min())}
        for family, lam in ((GLOBAL, np.inf), (LOCAL, 0.0))
        if (table["family"] == family).any()
    ]
    out = pd.concat([pd.DataFrame(ends), pulled], ignore_index=True)
    return out.assign(loss=out["loss"] * unit)


def client_paths(choice: Choice, clients: int, unit: float) -> list[list[float]] | None:
    """Each client's held-out losses along the path, by rising lambda; None where only some clients were asked."""
    table = choice.table[choice.table["columns"] == choice.plan.columns]
    pulled = table[table["family"] == LAMBDA].sort_values("value").index
    if len(choice.losses) != clients:
        return None
    return (unit * choice.losses[:, pulled.tolist()]).tolist()


def curve_as_lists(curve: LearningCurve | None) -> JsonObject | None:
    """A learning curve as `advice.json` keeps it: `now`, `match`, and a list for each column."""
    return None if curve is None else {"now": curve.now, "match": curve.match, **curve.table.to_dict("list")}


def clients_frame(
    job: Job, models: RecommendedModels, choice: Choice, evidence: Evidence, recommendations: Recommendations
) -> pd.DataFrame:
    """One row per client: the recommendation, its improvements with intervals, losses, the plan in numbers."""
    clients, unit = job.clients, loss_scale(job)
    sizes = {part: getattr(clients, part).size.numpy() for part in PARTS}
    rows = sum(sizes.values())
    kinds = {setting: effective_family(setting, choice.priors) for setting in set(models.plan)}
    return pd.DataFrame(
        {
            "client": clients.names,
            "rows": rows,
            **sizes,
            **recommendation_columns(recommendations, unit),
            **{f"{name}_held_out": unit * part.numpy() for name, part in mean_losses(evidence.held).items()},
            "held_out_rows": evidence.held.rows.numpy().astype(int),
            "plan": [kinds[setting] for setting in models.plan],
            "lam": client_lams(models.plan, choice.priors, rows),
            "alpha": [setting_alpha(setting) for setting in models.plan],
        }
    )


def recommendation_columns(recommendations: Recommendations, unit: float) -> dict[str, np.ndarray]:
    """What the clients' table has of recommendations: expected losses, and improvements that follow from them."""
    out: dict[str, np.ndarray] = {"recommended": recommendations.recommended}
    out |= {name: unit * recommendations.expected[name] for name in MODEL_KINDS}
    probabilities = {}
    for other in ALTERNATIVES:
        side = recommendations.over[other]
        low, high = (unit * end.numpy() for end in side.interval(CLIENT_LEVEL))
        ends = {"": out[other] - expected_loss(recommendations, out), "_ci_low": low, "_ci_high": high}
        ends[""] = np.where(recommendations.is_same[other], 0.0, ends[""])
        out |= {f"improvement_over_{other}{end}": value for end, value in ends.items()}
        out |= {f"improvement_over_{other}_pct{end}": as_percent(value, out[other]) for end, value in ends.items()}
        probabilities[f"probability_better_than_{other}"] = side.probability.numpy()
    least = np.min(
        [np.where(recommendations.is_same[o], 1.0, recommendations.over[o].probability.numpy()) for o in ALTERNATIVES],
        axis=0,
    )  # where all three are one model, nothing can be better
    return out | probabilities | {"confidence": describe_probability(least)}


def expected_loss(recommendations: Recommendations, losses: dict[str, np.ndarray]) -> np.ndarray:
    """[m]: of the recommended models."""
    return np.select(
        [recommendations.recommended == name for name in MODEL_KINDS], [losses[name] for name in MODEL_KINDS]
    )


def as_percent(improvement: Any, loss: Any) -> Any:
    """An improvement in percent of the other model's loss, at most all of it."""
    loss = np.asarray(loss, dtype=float)
    shape = np.broadcast(improvement, loss).shape
    return np.minimum(100 * np.divide(improvement, loss, out=np.zeros(shape), where=loss > 0), 100.0)


def summarize(job: Job, frame: pd.DataFrame, evidence: Evidence, recommendations: Recommendations) -> JsonObject:
    """The federation in numbers: held-out losses, improvements of the recommended models, who should use what."""
    options, unit = advice_options(job), loss_scale(job)
    losses = {name: unit * loss for name, loss in recommendations.loss.items()}
    return {
        **losses,
        "metric": job.task.metric,
        "evaluated_on": HELD_OUT,
        "held_out_rows": int(evidence.held.rows.sum()),
        **{f"improvement_over_{o}": difference_record(recommendations.line[o], unit, losses[o]) for o in ALTERNATIVES},
        "personal_models": {
            f"improvement_over_{o}": difference_record(recommendations.personal_line[o], unit, losses[o])
            for o in ALTERNATIVES
        },
        "with_all_rows": None
        if recommendations.full_line is None
        else {
            f"improvement_over_{o}": difference_record(recommendations.full_line[o], unit, losses[o])
            for o in ALTERNATIVES
        },
        "recommended_counts": count_values(frame["recommended"]),
        "confidence_counts": count_values(frame["confidence"]),
        "margin": options.margin,
        "level": options.level,
        "client_level": CLIENT_LEVEL,
    }


def difference_record(line: MeanDifference, unit: float, loss: float) -> dict[str, float]:
    """A mean improvement with its interval, in units of the loss and in percent of `loss`."""
    values = np.array(line) * unit
    ends = ("mean", "ci_low", "ci_high"), ("pct", "pct_ci_low", "pct_ci_high")
    return dict(zip(ends[0], values.tolist())) | dict(zip(ends[1], as_percent(values, loss).tolist()))


def evaluate_test_rows(job: Job, compared: ModelTriple, models: RecommendedModels) -> JsonObject:
    """What a table's own test rows show of the models: reported, never used to decide."""
    clients = job.clients
    if clients.has_random_parts or int(clients.test.size.sum()) == 0:
        return {"test": None, "measures": {}}
    sums, unit = sum_losses(job.task, clients.test, compared), loss_scale(job)
    recommended = sum_losses(job.task, clients.test, compared._replace(personal=models.recommended))
    losses = pooled_losses(sums) | {"recommended": pooled_losses(recommended)[PERSONAL]}
    return {
        "test": {"rows": int(sums.rows.sum())} | {name: unit * loss for name, loss in losses.items()},
        "measures": {
            name: compute_metrics(job.task, clients, w).overall
            for name, w in zip((*MODEL_KINDS, "recommended"), models[:4])
        },
    }


def summarize_theory(theory: TheoryReport | None) -> JsonObject:
    if theory is None:
        return {"heterogeneity": None, "threshold": None}
    return {"heterogeneity": theory.heterogeneity, "threshold": theory.thresholds["bayes"]["R"]}


def count_values(column: pd.Series) -> dict[str, int]:
    """How often each value occurs, the most frequent first."""
    return {str(word): int(count) for word, count in column.value_counts().items()}
