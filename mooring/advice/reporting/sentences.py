"""The recommendation in sentences: the answer first, then the numbers and reasons behind it."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import torch
from torch import Tensor

from mooring.advice.evaluation.loss_sums import ALTERNATIVES, GLOBAL, LOCAL, MODEL_KINDS, PERSONAL
from mooring.advice.evaluation.setting_choice import Choice
from mooring.advice.reporting.learning_curve import LearningCurve
from mooring.advice.reporting.setting_summary import find_prior
from mooring.core.client_functions import client_function
from mooring.core.cohort import Batch
from mooring.core.natural_order import natural_key
from mooring.core.score_sentences import describe_change, direction, format_loss, join_words
from mooring.core.task import HasProx, Task
from mooring.core.types import NamedValues
from mooring.engines.prepare import Job
from mooring.engines.theory_report import TheoryReport
from mooring.partial_pooling.client_prior import Prior
from mooring.shapes.column_sets import SETS_WITH, ColumnSets
from mooring.shapes.columns import BOOSTED, LINEAR, PRODUCT, SPLINE, ShapedColumns

MODEL_PHRASES = {GLOBAL: "the global model", PERSONAL: "a personal model", LOCAL: "a local model"}
ALTERNATIVE_PHRASES = {LOCAL: "local models", GLOBAL: "the global model"}
COLUMN_PHRASES = {SPLINE: "splines", PRODUCT: "products of columns", BOOSTED: "a boosted score"}
MIN_SHARE_NAMED = 0.1  # of the variation between clients that a coefficient must have to be named
MAX_NAMED = 4
MIN_CONTRIBUTION_PCT = 0.1  # of the loss, below which nobody is named
MAX_CLIENTS_NAMED = 2  # in the headline
MAX_ROWS_RATIO = 100  # rows needed over rows there are, beyond which no number is given


def write_sentences(
    job: Job,
    frame: pd.DataFrame,
    summary: NamedValues,
    choice: Choice,
    shape: ShapedColumns | None,
    theory: TheoryReport | None,
    curve: LearningCurve | None,
    effects: Sequence[NamedValues] = (),
    varies: Tensor | None = None,
) -> tuple[str, dict[str, str]]:
    """The headline, and the sentences behind it by what they are about."""
    sentences = {
        "losses": describe_losses(summary),
        "confidence": describe_confidence(summary, len(frame)),
        "time": describe_time(choice.latest_share) if predicts_ahead(job) else "",
        "rows_needed": describe_rows_needed(curve),
        "contributions": describe_contributions(frame, summary),
        "outliers": describe_outliers(frame),
        "fixed_terms": describe_fixed_terms(job, summary),
        "shape": describe_shape(choice, summary["metric"], job.clients.target_scale**job.task.unit_power),
        "effects": describe_effects(effects),
        "differences": describe_differences(job, choice, shape, varies),
        "test": describe_test_rows(summary),
        "theory": describe_theory(summary, theory),
    }
    return write_headline(frame), {name: sentence for name, sentence in sentences.items() if sentence}


def write_headline(frame: pd.DataFrame) -> str:
    """Which model is recommended to how many clients; a few are named."""
    m, counts = len(frame), frame["recommended"].value_counts()
    if len(counts) == 1:
        only = counts.index[0]
        everywhere = f"at all {m:,} clients" if m > 2 else "at both clients" if m == 2 else "at the one client"
        return f"Use {MODEL_PHRASES[only]} {everywhere}."
    parts: list[str] = []
    for kind, count in counts.items():
        names = frame.loc[frame["recommended"] == kind, "client"].astype(str).tolist()
        of_all = f"{count:,}" if parts else f"{count:,} of {m:,} clients"
        where = name_clients(names) if parts and count <= MAX_CLIENTS_NAMED else of_all
        parts.append(f"{MODEL_PHRASES[str(kind)]} at {where}")
    return f"Use {join_words(parts)}."


def name_clients(names: Sequence[str]) -> str:
    """Names of clients in a sentence, 7 before 29; names such as 2, which read as counts, follow the word "client"."""
    names = sorted(names, key=natural_key)
    if all(any(map(str.isalpha, name)) for name in names):
        return join_words(names)
    return f"client{'s' * (len(names) > 1)} {join_words(names)}"


def describe_losses(summary: NamedValues) -> str:
    """The recommended models' loss and those it is compared with, measured on the same held-out rows."""
    metric, mine = summary["metric"], summary["recommended"]
    sides = [
        f"{describe_change(summary[f'improvement_over_{other}'], summary['level'])} than with "
        f"{ALTERNATIVE_PHRASES[other]} "
        f"({format_loss(summary[other])})"
        for other in ALTERNATIVES
        if set(summary["recommended_counts"]) != {other}
    ]
    rows = f"on {summary['held_out_rows']:,} held-out rows"
    return f"With the recommended models, {metric} is {format_loss(mine)}: {' and '.join(sides)}, {rows}."


def describe_test_rows(summary: NamedValues) -> str:
    """What a table's own test rows show, which took no part in the recommendations."""
    test = summary.get("test")
    if not test:
        return ""
    losses = ", ".join(f"{name} {format_loss(test[name])}" for name in ("recommended", *MODEL_KINDS))
    return f"On the table's own {test['rows']:,} test rows, which decided nothing, {summary['metric']} is: {losses}."


def describe_confidence(summary: NamedValues, m: int) -> str:
    counts = summary["confidence_counts"]
    parts = [f"{word} for {counts[word]:,}" for word in ("high", "moderate", "low") if counts.get(word)]
    return f"Confidence that it is better than the alternatives: {join_words(parts)} of {m:,} clients."


def describe_shape(choice: Choice, metric: str, unit: float) -> str:
    """How much lower the loss is with nonlinear columns, where the personal models use them."""
    table = choice.table
    bent = table[(table["weight"] > 0) & (table["columns"] != LINEAR)]
    if bent.empty or not (table["columns"] == LINEAR).any():
        return ""
    line, best = table.loc[table["columns"] == LINEAR, "loss"].min(), bent["loss"].min()
    parts = set(bent["columns"])
    kinds = [COLUMN_PHRASES[kind] for kind, sets in SETS_WITH.items() if parts & sets]
    if not best < line:
        return ""
    losses = f"{format_loss(unit * best)} instead of {format_loss(unit * line)}"
    return (
        f"Effects are not linear: the best candidate with {join_words(kinds)} has a held-out {metric} that is "
        f"{direction(100 * (1 - best / line))} than that of the best one with linear columns ({losses})."
    )


def predicts_ahead(job: Job) -> bool:
    """Whether held-out rows are later than those that models are fitted to; networks have random folds."""
    return job.run.data.time_column is not None and isinstance(job.task, HasProx)


def describe_time(latest_share: float) -> str:
    """How much models follow each client's latest target, and what intervals ahead in time leave out."""
    weight = f"The latest target of a client has {latest_share:.0%} of the weight in its local and personal models. "
    return (
        f"{weight if latest_share else ''}Intervals and probabilities hold for times like those of held-out rows, the "
        "later half of each client's; further ahead they promise too much."
    )


def describe_effects(effects: Sequence[NamedValues]) -> str:
    """The columns whose effects are farthest from linear."""
    names = [str(effect["column"]) for effect in effects[:MAX_NAMED]]
    if len(names) < 2:
        return f"The effect of {names[0]} is not linear." if names else ""
    return f"The effects of {join_words(names)} are not linear, most of all that of {names[0]}."


def prior_of_plan(choice: Choice) -> Prior | None:
    """The prior that the plan uses, or the preferred one; None where clients do not vary."""
    prior = find_prior(choice.plan, choice.priors) or (choice.priors[0] if choice.priors else None)
    return None if prior is None or not float(prior.variance.sum()) > 0 else prior


def describe_differences(job: Job, choice: Choice, shape: ShapedColumns | None, varies: Tensor | None) -> str:
    """The coefficients that make up most of the variation between clients; standardized columns make them comparable.

    A column that does not vary within clients (`varies`, of the prior's columns) moves a client's intercept only, and
    counts as that.
    """
    prior = prior_of_plan(choice)
    if prior is None or varies is None:
        return ""
    clients, variance = job.clients, prior.variance.numpy()
    features = clients.features
    if shape is not None:
        features = tuple(clients.features[k] for k in ColumnSets(job.task, shape).columns[prior.columns])
    if len(variance) != len(features) + 1:
        return ""
    inside = varies.numpy()
    share = variance / variance.sum()
    parts = {f"the effect of {name}": share[j] for j, name in enumerate(features) if inside[j]}
    parts["the intercept"] = 1 - sum(parts.values())
    # Equal shares keep their order, whatever rounding does to them.
    top = sorted((pair for pair in parts.items() if pair[1] >= MIN_SHARE_NAMED), key=lambda pair: -round(pair[1], 9))
    named = [f"{name} ({100 * part:.0f}%)" for name, part in top[:MAX_NAMED]]
    return f"Clients differ mostly in {join_words(named)}." if named else ""


@client_function
def varies_within(task: Task, batch: Batch) -> Tensor:
    """[C, features] bool: whether a column takes several values at a client."""
    real = (batch.weight > 0)[..., None]
    x = torch.where(real, batch.x.double(), 0.0)
    away = torch.where(real, x - (x.sum(1) / real.sum(1).clamp(min=1))[:, None], 0.0)
    return away.abs().amax(1) > 1e-9 * x.abs().amax(1)


def describe_outliers(frame: pd.DataFrame) -> str:
    if "is_outlier" not in frame or not frame["is_outlier"].any():
        return ""
    names = frame.loc[frame["is_outlier"], "client"].astype(str).tolist()
    others = f" and {len(names) - MAX_NAMED:,} more" if len(names) > MAX_NAMED else ""
    return f"Outliers, far from the other clients: {', '.join(names[:MAX_NAMED])}{others}."


def describe_rows_needed(curve: LearningCurve | None) -> str:
    """How many rows a local model would need to do as well."""
    if curve is None:
        return ""
    has = f"it has {curve.now:,.0f}"
    if curve.match > MAX_ROWS_RATIO * curve.now:
        return f"A typical client would need over {MAX_ROWS_RATIO} times its rows ({has}) to do as well locally."
    needed = f"{float(f'{curve.match:.3g}'):,.0f}"
    return f"A typical client would need about {needed} rows of its own ({has}) to do as well locally."


def describe_fixed_terms(job: Job, summary: NamedValues) -> str:
    """What a user can change where the terms that a formula fixes make personal models worse than local ones."""
    schema = job.clients.schema
    formula = None if schema is None else schema.formula
    if formula is None or formula.all_vary or summary[LOCAL] >= summary[PERSONAL]:
        return ""
    losses = f"({summary['metric']} {format_loss(summary[LOCAL])} local, {format_loss(summary[PERSONAL])} personal)"
    return (
        f"Local models, whose coefficients all differ, do better {losses}: let terms that the formula fixes vary "
        f"between clients, as in (1 + x | {schema.client})."
    )


def describe_contributions(frame: pd.DataFrame, summary: NamedValues) -> str:
    """Whose rows the other clients need most."""
    if "contribution_pct" not in frame or not frame["contribution_pct"].max() >= MIN_CONTRIBUTION_PCT:
        return ""
    most = frame.loc[frame["contribution_pct"].idxmax()]
    now, without = most["others_held_out"], most["others_held_out"] + most["contribution"]
    change = f"{direction(-most['contribution_pct'])} ({format_loss(without)} instead of {format_loss(now)})"
    name = name_clients([str(most["client"])])
    return f"Without {name}, the other clients' {summary['metric']} with personal models would be {change}."


def describe_theory(summary: NamedValues, theory: TheoryReport | None) -> str:
    """What the theorem of the alternative states, beside what the data show."""
    if theory is None:
        return ""
    line, r = theory.thresholds["alternative"], theory.heterogeneity["R"]
    high, side = theory.heterogeneity["high"], line["side"]
    seen = LOCAL if summary[LOCAL] < summary[GLOBAL] else GLOBAL
    losses = f"({format_loss(summary[LOCAL])} local, {format_loss(summary[GLOBAL])} global)"
    is_close = abs(summary[LOCAL] - summary[GLOBAL]) <= summary["margin"] * summary[seen]
    data = f"show hardly any difference {losses}" if is_close else f"favor {ALTERNATIVE_PHRASES[seen]} {losses}"
    border = f"{line['R']:.2g}" if line["R"] < 99.5 else f"{line['R']:,.0f}"
    if side not in ALTERNATIVE_PHRASES:
        low = theory.heterogeneity["low"]
        return (
            f"The theorem of the alternative favors neither a global model nor local ones (R = {r:.2g}, between "
            f"{low:.2g} and {high:.2g}, threshold {border}); held-out data {data}."
        )
    # An estimate of 0 means that chance explains what was seen, not that nothing differs.
    far = f"R = {r:.2g}" if r > 0 else f"R at most {high:.2g}"
    stated = (
        f"The theorem of the alternative favors {ALTERNATIVE_PHRASES[side]} ({far} "
        f"{'<' if side == GLOBAL else '>'} {border})"
    )
    if side == seen and not is_close:
        return f"{stated}, and so do held-out data {losses}."
    return f"{stated}, held-out data {data}. Go with the data: the theorem is a worst-case bound."
