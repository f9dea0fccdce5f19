"""Figures of an experiment's record: means over repeats with their intervals, as PNG and SVG."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from mooring.core.types import NamedValues
from mooring.report.figure_style import COLORS, MARKERS, STYLE, create_figure, encode_image

PANEL_COLUMNS = {4: 2, 6: 3, 9: 3}  # columns by the number of panels, so that rows are full; else up to four
MAX_MARKED_POINTS = 30  # curves with fewer points mark them
DPI = 90
FILE_ENDINGS = ("png", "svg")
PANEL_WIDTH_INCHES = 4.6  # of a panel, inches
TITLE_LETTERS_PER_INCH = 12  # of a title to an inch


def draw_panels(title: str, panels: Sequence[NamedValues]) -> dict[str, bytes]:
    """Return the figure by file ending: png and svg. Panels without measurements are left out."""
    measured_panels = [panel for panel in panels if any(np.isfinite(_means(curve)).any() for curve in panel["curves"])]
    with mpl.rc_context(STYLE):
        columns = PANEL_COLUMNS.get(len(measured_panels), min(max(len(measured_panels), 1), 4))
        rows = max(-(-len(measured_panels) // columns), 1)
        figure = create_figure(PANEL_WIDTH_INCHES * columns, 3.6 * rows + 0.8)
        figure.suptitle(fill(title, int(TITLE_LETTERS_PER_INCH * PANEL_WIDTH_INCHES * columns)), fontsize=10)
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        for axis, panel, name in zip(axes, measured_panels, name_panels(measured_panels)):
            _panel(axis, panel, name)
        _legends(figure, list(axes[: len(measured_panels)]), rows)
        for axis in axes[len(measured_panels) :]:
            axis.set_axis_off()
        if (engine := figure.get_layout_engine()) is not None:
            engine.execute(figure)
        figure.set_layout_engine("none")  # laid out once for both files
        return {ending: encode_image(figure, ending, DPI) for ending in FILE_ENDINGS}


def name_panels(panels: Sequence[NamedValues]) -> list[str]:
    """Return a distinct name for every panel: its title, with the label of its y axis if titles are missing or
    equal."""
    titles = [panel["title"] for panel in panels]
    if len(set(titles)) == len(titles) and all(titles):
        return titles
    return [": ".join(part for part in (panel["title"], panel["ylabel"]) if part) for panel in panels]


def _means(curve: NamedValues) -> np.ndarray:
    return np.array(curve["mean"], dtype=float)


def log_interval(mean: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a mean's interval on a logarithmic axis: that of its logarithm, by the delta method, which never reaches
    0."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        factor = np.exp((high - low) / 2 / mean)
    return mean / factor, mean * factor


def _panel(axis: Axes, panel: NamedValues, name: str) -> None:
    for side in panel["log"]:
        getattr(axis, f"set_{side}scale")("log")
    for i, curve in enumerate(panel["curves"]):
        x, mean, low, high = (np.array(curve[part], dtype=float) for part in ("x", "mean", "low", "high"))
        if curve["dashed"]:
            axis.plot(x, mean, "--", color="0.4", linewidth=1, label=curve["label"])
            continue
        colour = COLORS[i % len(COLORS)]
        marker = MARKERS[i % len(MARKERS)] if len(x) <= MAX_MARKED_POINTS else None
        axis.plot(x, mean, color=colour, marker=marker, markersize=3.5, linewidth=1.3, label=curve["label"])
        low, high = log_interval(mean, low, high) if "y" in panel["log"] else (low, high)
        axis.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
    for label, value in panel["across"].items():
        axis.axhline(value, color="0.4", linestyle=":", linewidth=1, label=label)
    for label, value in panel["upright"].items():
        axis.axvline(value, color="0.4", linestyle="-.", linewidth=1, label=label)
    for side in panel["log"]:
        _log_ticks(getattr(axis, f"{side}axis"))
    axis.set(xlabel=panel["xlabel"], ylabel=panel["ylabel"])
    axis.set_title(fill(name, int(TITLE_LETTERS_PER_INCH * PANEL_WIDTH_INCHES)), fontsize=9)


def _legends(figure: Figure, axes: Sequence[Axes], rows: int) -> None:
    """Draw the legends beside the curves: one for the figure if all panels have the same labels, else one below each
    panel."""
    legends = [axis.get_legend_handles_labels() for axis in axes]
    if not legends:
        return
    labels = legends[0][1]
    if all(legend[1] == labels for legend in legends):
        columns = max(
            1,
            min(
                len(labels),
                int(len(axes) / rows * PANEL_WIDTH_INCHES * TITLE_LETTERS_PER_INCH / (max(map(len, labels)) + 6)),
            ),
        )
        figure.legend(*legends[0], loc="outside lower center", ncols=columns, fontsize=7.5)
        return
    for axis, (handles, panel_labels) in zip(axes, legends):
        columns = max(1, min(2, int(PANEL_WIDTH_INCHES * TITLE_LETTERS_PER_INCH / (max(map(len, panel_labels)) + 6))))
        axis.legend(handles, panel_labels, loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=columns, fontsize=7.5)


def _log_ticks(axis: Axis) -> None:
    """Set ticks at powers of ten, or at 1, 2, 5 if the axis spans less than two of them; no minor ticks."""
    low, high = axis.get_view_interval()
    axis.set_minor_locator(NullLocator())
    if high < 100 * low:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
