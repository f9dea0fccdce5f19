"""Figures of an experiment's record: means over repeats with their intervals, as PNG and SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import LogLocator, NullLocator

from mooring.report.style import COLOURS, MARKERS, STYLE, canvas, image

COLUMNS = {4: 2, 6: 3, 9: 3}  # panels side by side that fill their rows; else up to four
MARKED = 30  # curves with fewer places show them
DPI = 90
LETTERS = 12  # of a title to an inch


def draw(title: str, panels: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
    """The figure by file ending: png and svg."""
    with mpl.rc_context(STYLE):
        columns = COLUMNS.get(len(panels), min(len(panels), 4))
        rows = -(-len(panels) // columns)
        figure = canvas(4.6 * columns, 3.6 * rows + 0.4)
        figure.suptitle(fill(title, int(LETTERS * 4.6 * columns)), fontsize=10)
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        for axis, panel in zip(axes, panels):
            _panel(axis, panel)
        for axis in axes[len(panels) :]:
            axis.set_axis_off()
        figure.get_layout_engine().execute(figure)
        figure.set_layout_engine("none")  # laid out once for both files
        return {ending: image(figure, ending, DPI) for ending in ("png", "svg")}


def _panel(axis: Axes, panel: Mapping[str, Any]) -> None:
    for name in panel["log"]:
        getattr(axis, f"set_{name}scale")("log")
    for i, curve in enumerate(panel["curves"]):
        x, mean, low, high = (np.array(curve[name], dtype=float) for name in ("x", "mean", "low", "high"))
        if curve["dashed"]:
            axis.plot(x, mean, "--", color="0.4", linewidth=1, label=curve["label"])
            continue
        colour = COLOURS[i % len(COLOURS)]
        marker = MARKERS[i % len(MARKERS)] if len(x) <= MARKED else None
        axis.plot(x, mean, color=colour, marker=marker, markersize=3.5, linewidth=1.3, label=curve["label"])
        floor = mean / 10 if "y" in panel["log"] else -np.inf  # an interval that reaches 0 has no place on a log axis
        axis.fill_between(x, np.maximum(low, floor), high, color=colour, alpha=0.18, linewidth=0)
    for label, value in panel["across"].items():
        axis.axhline(value, color="0.4", linestyle=":", linewidth=1, label=label)
    for label, value in panel["upright"].items():
        axis.axvline(value, color="0.4", linestyle="-.", linewidth=1, label=label)
    for name in panel["log"]:
        _log_ticks(getattr(axis, f"{name}axis"))
    axis.set(xlabel=panel["xlabel"], ylabel=panel["ylabel"])
    axis.set_title(panel["title"], fontsize=9)
    axis.legend(fontsize=7.5)


def _log_ticks(axis: Axis) -> None:
    """Powers of ten, or 1, 2, 5 where the axis spans less than two of them; no minor ticks."""
    low, high = axis.get_view_interval()
    axis.set_minor_locator(NullLocator())
    if high < 100 * low:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
