"""Numbers in sentences: a loss, a percentage with its direction, an interval, a list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite

from mooring.core.types import NamedValues

ASK_ADVISE = "`mooring advise` uses all rows, and tries nonlinear columns, to recommend a model for each client."
BASELINES = {"local": "local models", "pooled": "the pooled model"}


def direction(pct: float) -> str:
    """An improvement in percent as a person reads it: "2.6% lower"."""
    return f"{format_percent(abs(pct))}% {'lower' if pct >= 0 else 'higher'}"


def format_percent(value: float) -> str:
    """One decimal; two where it would round to 100, none beyond."""
    if not isfinite(value):
        return "?"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) < 99.95 else f"{min(value, 99.99):.2f}"


def format_loss(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def describe_change(line: Mapping[str, float], level: float) -> str:
    """An improvement with its interval: "2.6% lower (95% CI: 2.8% higher to 8.0% lower)"."""
    mean, low, high = (line[name] for name in ("pct", "pct_ci_low", "pct_ci_high"))
    if not (isfinite(low) and isfinite(high)):
        return direction(mean)
    return f"{direction(mean)} ({100 * level:g}% CI: {direction(low)} to {direction(high)})"


def describe_scores(summary: NamedValues) -> list[str]:
    """A fit's test loss beside those of its baselines with intervals over clients, and what they leave open."""
    metric, score, rows, level = (summary[name] for name in ("metric", "personal", "test_rows", "level"))
    sides, close = [], []
    for name, description in BASELINES.items():
        line = summary.get(f"improvement_over_{name}")
        if line is None or (line["ci_low"] == 0 and line["ci_high"] == 0):  # unknown, or the very same models
            continue
        sides.append(f"{describe_change(line, level)} than with {description} ({format_loss(summary[name])})")
        if not line["ci_low"] > 0 and not line["ci_high"] < 0:
            close.append(description)
    text = f"Test {metric} is {format_loss(score)}{': ' if sides else ''}{' and '.join(sides)}, on {rows:,} test rows."
    if not close:
        return [text]
    return [text, f"These test rows cannot separate it from {' or '.join(close)}. {ASK_ADVISE}"]


def join_words(parts: Sequence[str]) -> str:
    """ "a, b and c"."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else "nothing"
