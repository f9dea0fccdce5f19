"""An advice in words for somebody who has never heard of lambda: one sentence, then what is behind it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch

from mooring.advice.choice import Choice
from mooring.advice.folds import compact, owners
from mooring.advice.survey import Survey
from mooring.core.cohort import Rows
from mooring.data.clients import Clients

KINDS = {"personal": "a personal model", "common": "the common model", "alone": "a model of its own"}
WORTH_NAMING = 0.1  # share of the spread that a coefficient must have to be named
MOST_NAMED = 4
BARS = "▇▆▅▄▃▂▁"
PARTS = ("sure", "likely", "open", "same")


def in_words(
    clients: Clients, frame: pd.DataFrame, summary: Mapping[str, Any], choice: Choice, theory: Survey | None
) -> tuple[str, list[str]]:
    """The headline, and the sentences behind it."""
    said = [
        who_deploys_what(summary, len(frame)),
        how_sure(summary, "alone", "training alone"),
        how_sure(summary, "common", "the common model"),
        what_differs(clients, choice),
        who_is_unlike(frame),
        what_it_takes(frame, summary),
        who_brings_most(frame, summary),
        what_theory_says(summary, theory),
    ]
    return headline(summary), [sentence for sentence in said if sentence]


def headline(summary: Mapping[str, Any]) -> str:
    """What personal models gain over the two ends, with intervals, and what that means."""
    metric, practical = summary["metric"], 100 * summary["practical"]
    alone, common = summary["gain_over_alone"], summary["gain_over_common"]
    told = (
        f"their {metric} is {change(alone)} than that of training alone and {change(common)} than that of one common "
        "model"
    )
    better_end = "common" if alone["mean"] >= common["mean"] else "alone"
    if better_end == "common" and common["percent_mean"] < practical:
        return f"One common model will do; personal models hardly change it: {told}."
    if better_end == "alone" and alone["percent_mean"] < practical:
        return f"Training alone will do; personal models hardly change it: {told}."
    sure = min(alone["low"], common["low"]) > 0
    return f"Personal models {'pay' if sure else 'are the best guess'}: {told}."


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
    simple = {kind: summary["will_do"].get(kind, 0) for kind in ("common", "alone")}
    do = [f"{KINDS[kind]} will do at {count:,}" for kind, count in simple.items() if count]
    within = f"{100 * summary['practical']:g} %"
    told = f"Deploy {listed(kinds)} of {m:,} clients."
    return told + (f" Within {within} of the loss, {listed(do)}." if do else "")


def how_sure(summary: Mapping[str, Any], other: str, name: str) -> str:
    count = summary[f"sure_over_{other}"]
    parts = [f"{word} for {count[word]:,}" for word in PARTS[:3] if count.get(word)]
    same = count.get("same", 0)
    told = f"Better than {name}: {', '.join(parts) or 'nobody'}"
    return told + (f"; {same:,} deploy it." if same else ".")


def what_differs(clients: Clients, choice: Choice) -> str:
    """The coefficients that make up most of the clients' spread; standardised columns make them comparable.

    A column that does not vary within clients moves a client's level only, and counts as that.
    """
    variance = None if choice.prior is None else choice.prior.variance.numpy()
    if variance is None or len(variance) != len(clients.features) + 1:
        return ""
    inside = varies_within(clients.train)
    share = variance / max(variance.sum(), 1e-300)
    parts = {f"the effect of {name}": share[j] for j, name in enumerate(clients.features) if inside[j]}
    parts["the level"] = 1 - sum(parts.values())
    top = sorted((pair for pair in parts.items() if pair[1] >= WORTH_NAMING), key=lambda pair: -pair[1])
    told = [f"{name} ({100 * part:.0f} %)" for name, part in top[:MOST_NAMED]]
    return f"What differs between clients: mostly {listed(told)}." if told and variance.sum() > 0 else ""


def varies_within(rows: Rows) -> np.ndarray:
    """[features] bool: whether a column takes several values at one client or another."""
    owner, x = owners(rows), compact(rows).x.double()
    total = torch.zeros(len(rows), x.shape[1], dtype=x.dtype).index_add_(0, owner, x)
    away = x - (total / rows.size.clamp(min=1)[:, None])[owner]
    return (away.abs().amax(0) > 1e-9 * x.abs().amax(0)).numpy()


def who_is_unlike(frame: pd.DataFrame) -> str:
    if "unlike" not in frame or not frame["unlike"].any():
        return ""
    names = frame.loc[frame["unlike"], "client"].astype(str).tolist()
    more = f" and {len(names) - MOST_NAMED:,} more" if len(names) > MOST_NAMED else ""
    return f"Unlike the rest: {', '.join(names[:MOST_NAMED])}{more}."


def what_it_takes(frame: pd.DataFrame, summary: Mapping[str, Any]) -> str:
    """How many rows training alone would need to match, and how the gap closes on the way there."""
    if "rows_to_match" not in frame or not summary["gain_over_alone"]["percent_mean"] > 0:
        return ""
    now, then = float(frame["rows"].median()), float((frame["rows_to_match"]).median())
    if not (np.isfinite(then) and then > now):
        return ""
    gap = summary["gain_over_alone"]["percent_mean"]
    places = np.linspace(now, then, len(BARS))
    left = (1 / places - 1 / then) / (1 / now - 1 / then)  # of the gap, which falls as one over the rows
    drawn = "".join(BARS[min(int((1 - part) * len(BARS)), len(BARS) - 1)] for part in left)
    return (
        f"What it would take: alone, a typical client of {now:,.0f} rows loses {number(gap)} % more; it would match "
        f"with about {then:,.0f} rows ({now:,.0f} {drawn} {then:,.0f})."
    )


def who_brings_most(frame: pd.DataFrame, summary: Mapping[str, Any]) -> str:
    if "brings" not in frame or not frame["brings"].notna().any():
        return ""
    most = frame.loc[frame["brings"].idxmax()]
    share = 100 * most["brings"] / summary["advised"] if summary["advised"] else 0.0
    if not share > 0:
        return ""
    return f"Who brings most: without {most['client']} the others would lose {share:.2g} % more."


def what_theory_says(summary: Mapping[str, Any], theory: Survey | None) -> str:
    """The theorem's view beside the evidence, and why they may differ."""
    if theory is None:
        return ""
    line, r = theory.thresholds["alternative"], theory.heterogeneity["R"]
    low, high = theory.heterogeneity["low"], theory.heterogeneity["high"]
    seen = "common" if summary["common"] <= summary["alone"] else "alone"
    names = {"common": "one common model", "alone": "training alone"}
    side, border = line["side"], line["R"]
    if side not in names:
        return (
            f"Theory: the theorem of the alternative leaves it open, because R = {r:.2g} [{low:.2g}, {high:.2g}] "
            f"straddles its border {border:.2g}; of these two ends the rows prefer {names[seen]}."
        )
    where = "below" if side == "common" else "above"
    told = f"Theory: the theorem of the alternative says {names[side]}, because R = {r:.2g} is {where} {border:.2g}"
    if side == seen:
        return f"{told}; of these two ends the rows say the same."
    why = "the theorem compares two extremes in the worst case, up to constants"
    return f"{told}; the rows prefer {names[seen]}. Trust the rows: {why}."


def listed(parts: list[str]) -> str:
    """ "a, b and c"."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else "nothing"
