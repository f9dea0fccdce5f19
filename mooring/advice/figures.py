"""The two figures of an advice: the path from one common model to everyone alone, and the gain of every client."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np

MOST_BARS = 80  # clients that a figure can show one by one
COLOURS = {"personal": "#1b7837", "common": "#2166ac", "alone": "#b2182b", "undecided": "#878787"}


def path_figure(
    lams: Sequence[float], losses: Sequence[float], alone: float, common: float, chosen: float, metric: str
):
    """Validation loss against lambda, with the two ends as lines and the chosen lambda marked."""
    figure, axes = _canvas(6.4, 4.0)
    axes.semilogx(lams, losses, marker="o", markersize=3, color=COLOURS["personal"], label="moored by lambda")
    axes.axhline(alone, color=COLOURS["alone"], linestyle="--", label="alone")
    axes.axhline(common, color=COLOURS["common"], linestyle=":", label="common")
    if np.isfinite(chosen) and chosen > 0:
        axes.axvline(chosen, color="0.6", linewidth=1, label=f"chosen: {chosen:.3g}")
    axes.set_xlabel("lambda: slack (everyone alone) to taut (one common model)")
    axes.set_ylabel(f"validation {metric}")
    axes.legend(frameon=False)
    return figure


def gains_figure(frame: Any, metric: str):
    """Each client's gain over training alone with its interval, in order; colours tell the verdict."""
    shown = frame.dropna(subset=["gain"]).sort_values("gain")
    if len(shown) > MOST_BARS:
        shown = shown.iloc[np.linspace(0, len(shown) - 1, MOST_BARS).astype(int)]
    figure, axes = _canvas(6.4, max(2.5, 0.16 * len(shown) + 1.2))
    place = np.arange(len(shown))
    for verdict, colour in COLOURS.items():
        mine = (shown["verdict"] == verdict).to_numpy()
        if mine.any():
            part = shown[mine]
            width = np.abs(np.vstack([part["gain"] - part["gain_low"], part["gain_high"] - part["gain"]]))
            axes.errorbar(part["gain"], place[mine], xerr=width, fmt="o", markersize=3, color=colour, label=verdict)
    axes.axvline(0, color="0.6", linewidth=1)
    axes.set_yticks(place, shown["client"].astype(str), fontsize=6)
    axes.set_ylim(-1, len(shown))
    axes.set_xlabel(f"gain over training alone (test {metric}; right: the federation helps)")
    axes.legend(frameon=False, loc="lower right")
    return figure


def image(figure: Any, form: str) -> bytes:
    """The figure as PNG or SVG bytes, the same for the same figure."""
    buffer = io.BytesIO()
    meta = {"Software": None} if form == "png" else {"Date": None, "Creator": None}
    figure.savefig(buffer, format=form, dpi=150, metadata=meta)
    return buffer.getvalue()


def _canvas(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()
