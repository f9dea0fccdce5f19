"""An advice in words for somebody who has never heard of lambda: one sentence, then what is behind it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from mooring.advice.asking import question
from mooring.advice.choice import Choice
from mooring.advice.curve import LearningCurve
from mooring.advice.survey import Survey
from mooring.core.cohort import Batch
from mooring.data.clients import Clients

KINDS = {"personal": "a personal model", "common": "the common model", "alone": "a model trained alone"}
ENDS = {"common": "one common model", "alone": "training alone"}
WORTH_NAMING = 0.1  # share of the spread that a coefficient must have to be named
MOST_NAMED = 4
BARS = "▇▆▅▄▃▂▁"


def in_words(
    clients: Clients,
    frame: pd.DataFrame,
    summary: Mapping[str, Any],
    choice: Choice,
    theory: Survey | None,
    curve: LearningCurve | None,
) -> tuple[str, list[str]]:
    """The headline, and the sentences behind it."""
    said = [
        who_deploys_what(summary, len(frame)),
        " ".join(how_sure(summary, other) for other in ("alone", "common")),
        what_differs(clients, choice),
        what_it_takes(curve),
        " ".join(part for part in (who_brings_most(frame, summary), who_is_unlike(frame)) if part),
        what_theory_says(summary, theory),
    ]
    return headline(summary), [sentence for sentence in said if sentence]


def headline(summary: Mapping[str, Any]) -> str:
    """What personal models gain over the two ends, with intervals, and what that means."""
    alone, common = summary["gain_over_alone"], summary["gain_over_common"]
    for end, gain, other in (("alone", common, "with one common model"), ("common", alone, "alone")):
        if set(summary.get(f"sure_over_{end}", {})) == {"same"}:
            better = f"{summary['metric']} is {change(gain)} than {other}"
            return f"No personal model does better than {ENDS[end]}, whose {better}."
    told = f"{summary['metric']} is {change(alone)} than alone and {change(common)} than with one common model"
    most = max(("common", "alone", "personal"), key=lambda kind: summary["will_do"].get(kind, 0))
    if most != "personal":
        count, m = summary["will_do"][most], sum(summary["will_do"].values())
        whom = "most" if 2 * count > m else f"{count:,} of {m:,}"
        return f"{ENDS[most].capitalize()} will do for {whom} clients. With personal models the {told}."
    sure = min(alone["low"], common["low"]) > 0
    return f"Personal models {'pay' if sure else 'are the best guess'}: their {told}."


def better_end(summary: Mapping[str, Any]) -> str:
    """Of the two ends the one over which personal models gain less."""
    return "common" if summary["gain_over_alone"]["mean"] >= summary["gain_over_common"]["mean"] else "alone"


def change(gain: Mapping[str, float]) -> str:
    """A gain in per cent with its interval: "3.7 % [2.7, 4.8] lower"."""
    mean, low, high = (gain[f"percent_{end}"] for end in ("mean", "low", "high"))
    word = "lower" if mean >= 0 else "higher"
    if mean < 0:
        mean, low, high = -mean, -high, -low
    return f"{number(mean)} % [{number(low)}, {number(high)}] {word}"


def number(value: float) -> str:
    """A percentage as people write it."""
    if not np.isfinite(value):
        return "?"
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.1f}".replace("-0.0", "0.0")


def who_deploys_what(summary: Mapping[str, Any], m: int) -> str:
    """Counts of what to deploy, and of whom something simpler would serve as well."""
    kinds = [f"{what} at {summary['deploy'][kind]:,}" for kind, what in KINDS.items() if summary["deploy"].get(kind)]
    simple = [f"{kind} will do at {summary['will_do'][kind]:,}" for kind in ENDS if summary["will_do"].get(kind)]
    within = f" Within {100 * summary['practical']:g} % of the loss {listed(simple)}." if simple else ""
    return f"Deploy {listed(kinds)} of {m:,} clients.{within}"


def how_sure(summary: Mapping[str, Any], other: str) -> str:
    count = summary[f"sure_over_{other}"]
    parts = [f"{word} at {count[word]:,}" for word in ("sure", "likely", "open") if count.get(word)]
    same = [f"the same at {count['same']:,}"] if count.get("same") else []
    return f"Better than {other}: {', '.join([*parts, *same])}."


def what_differs(clients: Clients, choice: Choice) -> str:
    """The coefficients that make up most of the clients' spread; standardised columns make them comparable.

    A column that does not vary within clients moves a client's level only, and counts as that.
    """
    variance = None if choice.prior is None else choice.prior.variance.numpy()
    if variance is None or len(variance) != len(clients.features) + 1:
        return ""
    inside = varying(None, clients.train).any(0).numpy()
    share = variance / max(variance.sum(), 1e-300)
    parts = {f"the effect of {name}": share[j] for j, name in enumerate(clients.features) if inside[j]}
    parts["the level"] = 1 - sum(parts.values())
    # Equal shares keep their order, whatever rounding says.
    top = sorted((pair for pair in parts.items() if pair[1] >= WORTH_NAMING), key=lambda pair: -round(pair[1], 9))
    told = [f"{name} ({100 * part:.0f} %)" for name, part in top[:MOST_NAMED]]
    return f"What differs: mostly {listed(told)}." if told and variance.sum() > 0 else ""


@question
def varying(task: Any, batch: Batch) -> Tensor:
    """[C, features] bool: whether a column takes several values at a client."""
    real = (batch.weight > 0)[..., None]
    x = torch.where(real, batch.x.double(), 0.0)
    away = torch.where(real, x - (x.sum(1) / real.sum(1).clamp(min=1))[:, None], 0.0)
    return away.abs().amax(1) > 1e-9 * x.abs().amax(1)


def who_is_unlike(frame: pd.DataFrame) -> str:
    if "unlike" not in frame or not frame["unlike"].any():
        return ""
    names = frame.loc[frame["unlike"], "client"].astype(str).tolist()
    more = f" and {len(names) - MOST_NAMED:,} more" if len(names) > MOST_NAMED else ""
    return f"Unlike the rest: {', '.join(names[:MOST_NAMED])}{more}."


def what_it_takes(curve: LearningCurve | None) -> str:
    """How many rows training alone would need to match, and how the gap closes on the way there."""
    if curve is None:
        return ""
    places = np.linspace(curve.now, curve.match, len(BARS))
    left = (1 / places - 1 / curve.match) / (1 / curve.now - 1 / curve.match)  # of the gap: it falls as one over rows
    drawn = "".join(BARS[min(int((1 - part) * len(BARS)), len(BARS) - 1)] for part in left)
    told = f"{curve.match:,.0f} rows instead of {curve.now:,.0f}"
    return f"To do as well alone, a typical client needs {told} (the gap: {drawn})."


def who_brings_most(frame: pd.DataFrame, summary: Mapping[str, Any]) -> str:
    if "brings" not in frame or not frame["brings"].notna().any():
        return ""
    most = frame.loc[frame["brings"].idxmax()]
    share = 100 * most["brings"] / summary["advised"] if summary["advised"] else 0.0
    if not share > 0:
        return ""
    return f"Client {most['client']} brings most: without it the others would lose {share:.2g} % more."


def what_theory_says(summary: Mapping[str, Any], theory: Survey | None) -> str:
    """The theorem's view beside the evidence, and why they may differ."""
    if theory is None:
        return ""
    line, r = theory.thresholds["alternative"], theory.heterogeneity["R"]
    low, high = theory.heterogeneity["low"], theory.heterogeneity["high"]
    seen, side, says = better_end(summary), line["side"], "The theorem of the alternative"
    border = f"{line['R']:.2g}" if line["R"] < 99.5 else f"{line['R']:,.0f}"
    if side not in ENDS:
        return (
            f"{says} leaves it open, because R = {r:.2g} [{low:.2g}, {high:.2g}] straddles {border}; of "
            f"its two ends the rows prefer {ENDS[seen]}."
        )
    # An estimate of 0 says that chance explains what was seen, not that nothing differs.
    far = f"R = {r:.2g}" if r > 0 else f"R, at most {high:.2g},"
    other, way = ("alone", "below") if side == "common" else ("common", "above")
    told = f"{says} says {side} rather than {other}, because {far} is {way} {border}"
    if side == seen:
        return f"{told}; so do the rows."
    return f"{told}; the rows say the opposite: trust them, it is for worst cases."


def listed(parts: list[str]) -> str:
    """ "a, b and c"."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else "nothing"
