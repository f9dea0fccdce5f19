"""The figures of `advise`: losses along the path of lambdas, every client's improvement, and the rows a local model
needs; and of `compare`: its learning curves. All are drawn from the run directory, those of `advise` in memory as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mooring.core.errors import RequestError
from mooring.core.field_checks import describe_unknown
from mooring.core.process import replace_control_characters
from mooring.core.types import JsonObject, NamedValues
from mooring.report.figure_style import COLORS, MARKERS, MODEL_COLORS, STYLE, create_figure, encode_images
from mooring.report.mixed_model_figures import MIXED_MODEL_FIGURES
from mooring.report.terminal_results import PLAN_DESCRIPTIONS
from mooring.runs.atomic_files import frame_from_rows, write_atomically
from mooring.runs.directory import CURVES_FIGURE, IMPROVEMENTS_FIGURE, PATH_FIGURE, ROWS_FIGURE, RunDirectory, open_run

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_MARKED_ROUNDS = 50  # evaluated rounds up to which a curve marks each one
LINE_STYLES = ("-", "--", "-.", ":")  # of further methods, once the colors are used up
MAX_NAMED_CLIENTS = 80  # clients up to which a figure names each one; beyond, they are drawn side by side without names
MAX_DEVIATIONS_ON_AXIS = 8.0  # typical deviations from the median beyond which an improvement is an arrow at the edge
LAMBDA_PLANS = ("lambda", "size", "diagonal", "intercept")  # plans
LOG_AXIS_FACTOR = 5.0  # factor between the largest and the smallest loss from which their axis is logarithmic
COLUMN = "improvement_over_local_pct"
MAX_VECTOR_CLIENTS = 1_000  # clients beyond which an SVG contains their marks as pixels


def plot(source: Any, what: str = "improvements") -> Figure:
    """Return a matplotlib figure of the result of `advise` or of its run directory: "improvements" of every client, the
    "path" of lambdas, or the "rows" that a local model needs; of a comparison's directory, its learning "curves"; of a
    mixed model its "caterpillar", "shrinkage", "residuals" and "qq" plots."""
    if hasattr(source, "random_effects"):
        if what not in MIXED_MODEL_FIGURES:
            raise RequestError(f"plot: {describe_unknown('figure of a mixed model', what, MIXED_MODEL_FIGURES)}.")
        return MIXED_MODEL_FIGURES[what](source)
    drawings = {"improvements": draw_improvements, "path": draw_path, "rows": draw_rows_needed}
    if what == CURVES_FIGURE and isinstance(source, str | Path):
        return draw_curves(open_run(source))
    if what not in drawings:
        names = [*drawings, CURVES_FIGURE]
        raise RequestError(
            f"plot: {describe_unknown('figure', what, names)}; '{CURVES_FIGURE}' is of a comparison's directory."
        )
    return drawings[what](open_run(source).advice if isinstance(source, str | Path) else source.record)


def draw_images(run: str | Path) -> list[Path]:
    """Write the figures of `advise` or `compare` as PNG and SVG files into the run directory; returns their paths."""
    directory = open_run(run)
    purpose = directory.run.mooring.purpose
    if purpose == "advise":
        advice = directory.advice
        figures = {PATH_FIGURE: draw_path(advice), IMPROVEMENTS_FIGURE: draw_improvements(advice)}
        if advice.get("learning_curve"):
            figures[ROWS_FIGURE] = draw_rows_needed(advice)
    elif purpose == "compare":
        figures = {CURVES_FIGURE: draw_curves(directory)}
    else:
        raise RequestError(f"{run} is a run of '{purpose}'; images are drawn of runs of 'advise' and 'compare'.")
    out = []
    for name, figure in figures.items():
        for form, file in encode_images(figure).items():
            out.append(directory.path / f"{name}.{form}")
            write_atomically(out[-1], file)
    return out


def draw_curves(directory: RunDirectory) -> Figure:
    """Draw test loss against rounds, one line per method; over several seeds their mean with a band of one deviation.

    A method of one round, such as an exact baseline, is a line across.
    """
    import matplotlib as mpl

    metric, table = directory.comparison["metric"], directory.curves
    longest = int(table["round"].max())
    with mpl.rc_context(STYLE):
        figure = create_figure(6.4 if table["method"].nunique() <= len(COLORS) else 8.4, 4.0)
        axes = figure.add_subplot()
        for k, (method, method_rows) in enumerate(table.groupby("method", sort=False)):
            colour, rounds = COLORS[k % len(COLORS)], method_rows.groupby("round")["test_loss"]
            mean, deviation = rounds.mean(), rounds.std().fillna(0.0)
            t = mean.index.to_numpy(float)
            line_style: JsonObject = {"color": colour, "label": replace_control_characters(str(method))}
            line_style |= {"linestyle": LINE_STYLES[k // len(COLORS) % len(LINE_STYLES)]}
            if len(t) == 1 and longest > 1:
                t, mean, deviation = np.array([0.0, longest]), mean.repeat(2), deviation.repeat(2)
                line_style |= {"linestyle": "--"}
            elif len(t) < MAX_MARKED_ROUNDS:
                line_style |= {"marker": MARKERS[k % len(MARKERS)], "markersize": 3}
            axes.plot(t, mean.to_numpy(), **line_style)
            if bool((deviation > 0).any()):
                axes.fill_between(t, mean - deviation, mean + deviation, color=colour, alpha=0.15, linewidth=0)
        seeds = table["seed"].nunique()
        axes.set_xlabel("round" if seeds == 1 else f"round; mean and deviation over {seeds} seeds")
        axes.set_ylabel(f"test {metric}")
        count = table["method"].nunique()
        if count > len(COLORS):  # beside the lines, which would be hidden
            axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5), ncols=1 + count // 25)
        else:
            axes.legend(fontsize=8)
    return figure


def draw_critical_differences(ranks: pd.Series, difference: float, blocks: str) -> Figure:
    """One line per method: its mean rank with half of Nemenyi's critical difference to either side. Methods whose bars
    overlap do not differ."""
    import matplotlib as mpl

    mean, names = ranks["mean_rank"].to_numpy(float), [str(name) for name in ranks["method"]]
    place = np.arange(len(names))
    with mpl.rc_context(STYLE):
        figure = create_figure(6.4, 1.2 + 0.26 * len(names))
        axes = figure.add_subplot()
        axes.errorbar(mean, place, xerr=difference / 2, fmt="o", color=COLORS[0], markersize=4, linewidth=1.5)
        axes.axvspan(mean[0] - difference / 2, mean[0] + difference / 2, color="0.92", zorder=0)
        axes.set_yticks(place)
        axes.set_yticklabels(names, fontsize=8)
        axes.invert_yaxis()
        axes.set_xlim(0.5, len(names) + 0.5)  # ranks; a bar may leave them where blocks are few
        axes.set_xlabel(f"mean rank over {blocks}\nmethods whose bars overlap do not differ (Nemenyi, 5%)")
    return figure


def draw_path(advice: NamedValues) -> Figure:
    """Draw held-out loss against lambda, with local and global models as lines, and the plan at its clients'
    lambdas."""
    import matplotlib as mpl

    path, clients = frame_from_rows(advice["path"]), frame_from_rows(advice["clients"])
    baselines = path[path["family"] != "lambda"].set_index("family")["loss"]
    pulled = path[path["family"] == "lambda"].sort_values("lam")
    with mpl.rc_context(STYLE):
        figure = create_figure(6.4, 4.0)
        axes = figure.add_subplot()
        axes.semilogx(pulled["lam"], pulled["loss"], marker="o", markersize=3, color="0.35", label="one lambda for all")
        for name, line, label in (("local", "--", "local models"), ("global", ":", "global model")):
            if name in baselines:
                axes.axhline(baselines[name], color=MODEL_COLORS[name], linestyle=line, label=label)
        _mark_plan(axes, advice["plan"], clients["lam"].to_numpy(float), pulled["lam"].to_numpy(float))
        if needs_log_axis([*path["loss"], advice["plan"]["loss"]]):
            axes.set_yscale("log")
        axes.set_xlabel("lambda: small (close to local models) to large (close to the global model)")
        axes.set_ylabel(f"held-out {advice['summary']['metric']}")
        axes.legend(fontsize=8)
    return figure


def needs_log_axis(losses: Iterable[float]) -> bool:
    """Return whether losses span a factor of LOG_AXIS_FACTOR or more, so that a linear axis would flatten small
    ones."""
    finite = [loss for loss in losses if np.isfinite(loss)]
    return bool(finite) and min(finite) > 0 and max(finite) >= LOG_AXIS_FACTOR * min(finite)


def _mark_plan(axes: Axes, plan: NamedValues, lams: np.ndarray, grid: np.ndarray) -> None:
    """Draw the plan's held-out loss at its clients' lambdas; a horizontal line if they have none."""
    lams = np.sort(lams[np.isfinite(lams) & (lams > 0)])
    if plan["family"] not in LAMBDA_PLANS or not len(lams):
        description = PLAN_DESCRIPTIONS.get(plan["family"], str(plan["family"])).split(",")[0]
        axes.axhline(plan["loss"], color=MODEL_COLORS["personal"], linewidth=1, label=f"plan: {description}")
        return
    low, middle, high = lams[0], lams[len(lams) // 2], lams[-1]
    label = f"plan: lambda = {middle:.3g}"
    if high > 1.001 * low:
        label = f"plan: lambda {low:.3g} to {high:.3g} by client, median {middle:.3g}"
    elif plan["family"] == "lambda" and len(grid) and not grid[0] < middle < grid[-1]:
        label += ", at the edge of what was tried"
    axes.plot([low, high], [plan["loss"]] * 2, color=MODEL_COLORS["personal"], linewidth=3, solid_capstyle="butt")
    axes.plot([middle], [plan["loss"]], "D", markersize=7, color=MODEL_COLORS["personal"], label=label)


def draw_rows_needed(advice: NamedValues) -> Figure:
    """Draw expected losses of a typical client by its rows, and how many rows a local model needs to do as well."""
    import matplotlib as mpl

    curve = advice.get("learning_curve")
    if not curve:
        raise RequestError("there is no learning curve: local models do as well, or no number of rows would do.")
    rows = np.array(curve["rows"], dtype=float)
    with mpl.rc_context(STYLE):
        figure = create_figure(6.4, 4.0)
        axes = figure.add_subplot()
        axes.set_xscale("log")
        edge = 2 * max(curve["local"]) - min(curve["personal"])  # larger losses would flatten the others
        for name, line in (("local", "--"), ("personal", "-"), ("global", ":")):
            if name != "global" or curve[name][0] < edge:
                axes.plot(rows, curve[name], color=MODEL_COLORS[name], linestyle=line, label=name)
        level = float(np.interp(np.log(curve["now"]), np.log(rows), curve["personal"]))
        axes.plot([curve["now"], curve["match"]], [level] * 2, color="0.3", linestyle=(0, (1, 3)))
        axes.plot([curve["now"]], [level], "^", markersize=8, color=MODEL_COLORS["personal"])
        axes.plot([curve["match"]], [level], "s", markersize=7, color=MODEL_COLORS["local"])
        ticks = {curve["now"]: f"{curve['now']:,.0f} now", curve["match"]: f"{curve['match']:,.0f} to match"}
        axes.set_xticks(list(ticks), list(ticks.values()))
        axes.minorticks_off()
        axes.set_xlabel("rows of a typical client")
        axes.set_ylabel(f"expected {advice['summary']['metric']}")
        axes.legend(fontsize=8)
    return figure


def draw_improvements(advice: NamedValues) -> Figure:
    """Draw every client's improvement over its local model, in percent of the expected loss, with its interval, in
    order.

    All clients are drawn. A value far from the others is an arrow at the edge with its number, so that it does not
    flatten them. Colors show the recommended model.
    """
    import matplotlib as mpl

    frame = frame_from_rows(advice["clients"])
    names = {f"{COLUMN}{end}": f"value{end.removeprefix('_ci')}" for end in ("", "_ci_low", "_ci_high")}
    table = frame.rename(columns=names).sort_values("value", ignore_index=True)
    has_names = len(table) <= MAX_NAMED_CLIENTS
    with mpl.rc_context(STYLE):
        figure = create_figure(6.4, min(max(2.5, 0.16 * len(table) + 1.2), 14.0) if has_names else 6.0)
        axes = figure.add_subplot()
        low, high = _span(table)
        axes.set_xlim(low, high)
        axes.set_ylim(-1, len(table))
        place = np.arange(len(table))
        for kind, colour in MODEL_COLORS.items():
            is_kind = (table["recommended"] == kind).to_numpy()
            if is_kind.any():
                _client_marks(axes, table[is_kind], place[is_kind], colour, f"{kind} ({is_kind.sum():,})", has_names)
        num_arrows = _arrows(axes, table, place, low, high, has_names)
        axes.axvline(0, color="0.4", linewidth=1)
        if has_names:
            axes.set_yticks(
                place, [replace_control_characters(str(name)) for name in table["client"]], fontsize=6, parse_math=False
            )
            axes.grid(visible=False, axis="y")
        else:
            axes.set_yticks([])
        axes.set_ylabel(f"{len(table):,} clients")
        arrows = f"; arrows: {num_arrows:,} beyond the edge" if num_arrows else ""
        metric = advice["summary"]["metric"]
        axes.set_xlabel(f"{metric} of the recommended model: % lower than the local model's{arrows}")
        figure.legend(loc="outside upper left", ncols=len(MODEL_COLORS), fontsize=8)  # beside the marks, not on them
    return figure


def _span(table: pd.DataFrame) -> tuple[float, float]:
    """Return the axis: 0, and the values and intervals within MAX_DEVIATIONS_ON_AXIS typical deviations of the
    median."""
    if table.empty:
        return -1.0, 1.0
    value = table["value"].to_numpy(float)
    middle = float(np.median(value))
    half = np.nan_to_num((table["value_high"] - table["value_low"]).to_numpy(float) / 2)
    max_distance = MAX_DEVIATIONS_ON_AXIS * max(
        float(np.median(np.abs(value - middle))), float(np.median(half)) / 2, 1e-3
    )
    inner = table[np.abs(value - middle) <= max_distance]
    low = max(float(inner[["value", "value_low"]].min().min()), middle - max_distance)
    high = min(float(inner[["value", "value_high"]].max().max()), middle + max_distance)
    low, high = min(low, 0.0), max(high, 0.0)
    padding = 0.04 * (high - low) or 1.0
    return low - padding, high + padding


def _client_marks(axes: Axes, part: pd.DataFrame, place: np.ndarray, colour: str, label: str, has_names: bool) -> None:
    value = part["value"].to_numpy(float)
    width = np.nan_to_num(np.abs(np.vstack([value - part["value_low"], part["value_high"] - value])))
    style: JsonObject = {"fmt": "o", "markersize": 3}
    if not has_names:  # pale intervals, so that the improvements stand out
        style = {"fmt": ".", "markersize": 3, "elinewidth": 0.5, "ecolor": (colour, 0.3)}
    axes.errorbar(
        value, place, xerr=width, color=colour, label=label, rasterized=len(place) > MAX_VECTOR_CLIENTS, **style
    )


def _arrows(axes: Axes, table: pd.DataFrame, place: np.ndarray, low: float, high: float, has_names: bool) -> int:
    """Draw arrows for improvements beyond the axis, with their values if clients are named; return their number."""
    count = 0
    for side, edge, marker in ((table["value"] < low, low, "<"), (table["value"] > high, high, ">")):
        for k in np.flatnonzero(side.to_numpy()):
            count += 1
            colour = MODEL_COLORS.get(table["recommended"][k], "0.5")
            axes.plot([edge], [place[k]], marker, color=colour, markersize=6, clip_on=False)
            if has_names:
                align, offset = ("left", 6) if marker == "<" else ("right", -6)
                text = f"{table['value'][k]:,.0f}%"
                axes.annotate(
                    text, (edge, place[k]), (offset, 0), textcoords="offset points", ha=align, va="center", fontsize=6
                )
    return count
