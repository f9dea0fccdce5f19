"""Figures: means over repeats with their intervals, as PNG and SVG."""

from __future__ import annotations

import io
from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from mooring.experiments.base.experiment import Panel
from mooring.experiments.base.results import Results, interval

COLUMNS = {4: 2, 6: 3, 9: 3}  # panels side by side that fill their rows; else up to four
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c6d31")  # colour-blind safe
MARKERS = "osD^v<>P"
MARKED = 30  # curves with fewer places show them
STYLE = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "mooring",  # equal figures, equal bytes
}


def draw(title: str, panels: Sequence[Panel], results: Results) -> dict[str, bytes]:
    """The figure by file ending: png and svg."""
    with mpl.rc_context(STYLE):
        columns = COLUMNS.get(len(panels), min(len(panels), 4))
        rows = -(-len(panels) // columns)
        figure = Figure(figsize=(4.6 * columns, 3.6 * rows + 0.4), layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(title, fontsize=10)
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        for axis, panel in zip(axes, panels):
            _panel(axis, panel, results)
        for axis in axes[len(panels) :]:
            axis.set_axis_off()
        figure.get_layout_engine().execute(figure)
        figure.set_layout_engine("none")  # laid out once for both files
        return {ending: _bytes(figure, ending) for ending in ("png", "svg")}


def _panel(axis: Axes, panel: Panel, results: Results) -> None:
    for name in panel.log:
        getattr(axis, f"set_{name}scale")("log")
    for i, (label, ref) in enumerate(panel.curves.items()):
        x, y = results.curve(ref, panel.x)
        mean, low, high = interval(y)
        if label in panel.dashed:
            axis.plot(x, mean, "--", color="0.4", linewidth=1, label=label)
            continue
        colour = COLOURS[i % len(COLOURS)]
        marker = MARKERS[i % len(MARKERS)] if len(x) <= MARKED else None
        axis.plot(x, mean, color=colour, marker=marker, markersize=3.5, linewidth=1.3, label=label)
        floor = mean / 10 if "y" in panel.log else -np.inf  # an interval that reaches 0 has no place on a log axis
        axis.fill_between(x, np.maximum(low, floor), high, color=colour, alpha=0.18, linewidth=0)
    for label, value in panel.across.items():
        axis.axhline(value, color="0.4", linestyle=":", linewidth=1, label=label)
    for label, value in panel.upright.items():
        axis.axvline(value, color="0.4", linestyle="-.", linewidth=1, label=label)
    for name in panel.log:
        _log_ticks(getattr(axis, f"{name}axis"))
    axis.set(xlabel=panel.xlabel, ylabel=panel.ylabel)
    axis.set_title(panel.title, fontsize=9)
    axis.legend(fontsize=7.5)


def _log_ticks(axis: Axis) -> None:
    """Powers of ten, or 1, 2, 5 where the axis spans less than two of them; no minor ticks."""
    low, high = axis.get_view_interval()
    axis.set_minor_locator(NullLocator())
    if high < 100 * low:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")


def _bytes(figure: Figure, ending: str) -> bytes:
    sink = io.BytesIO()
    figure.savefig(sink, format=ending, dpi=90, metadata={"Date": None} if ending == "svg" else {"Software": None})
    return sink.getvalue()
