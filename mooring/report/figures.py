"""The figures of an advice: the path from one common model to everyone alone, the gain of every client, and the rows
that would do alone; and of a comparison: its learning curves. All are drawn from what the run directory holds, those
of an advice in memory as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mooring.core.errors import RequestError
from mooring.report.answers import PLANS
from mooring.report.style import COLOURS, MARKERS, STYLE, VERDICTS, canvas, images
from mooring.report.terminal import plain
from mooring.runs.directory import CURVES_FIGURE, GAINS_FIGURE, PATH_FIGURE, ROWS_FIGURE, RunDir, open_run
from mooring.runs.files import frame_of, write_whole

MARKED = 50  # evaluated rounds up to which a curve marks each one
NAMED = 80  # clients up to which a figure names each one; beyond, they are drawn side by side without names
FAR = 8.0  # typical deviations from the median beyond which a gain is told by an arrow at the edge
MOORED = ("lambda", "size", "diagonal")  # plans by lambda
RASTER = 1_000  # clients beyond which an SVG holds their marks as pixels


def plot(source: Any, what: str = "gains") -> Any:
    """A matplotlib figure of an advice or of its run directory: "gains" of every client, the "path" of lambdas, or the
    "rows" that would do alone; of a comparison's directory, its learning "curves"."""
    drawings = {"gains": gains_figure, "path": path_figure, "rows": rows_figure}
    if what == CURVES_FIGURE and isinstance(source, str | Path):
        return curves_figure(open_run(source))
    if what not in drawings:
        raise RequestError(f"plot knows {', '.join(map(repr, drawings))} and of a comparison 'curves', got {what!r}.")
    return drawings[what](open_run(source).advice if isinstance(source, str | Path) else source.record)


def draw_images(run: str | Path) -> list[Path]:
    """The figures of an advice or a comparison as PNG and SVG files in its run directory; which files these are."""
    directory = open_run(run)
    purpose = directory.run.mooring.purpose
    if purpose == "advise":
        advice = directory.advice
        drawn = {PATH_FIGURE: path_figure(advice), GAINS_FIGURE: gains_figure(advice)}
        if advice.get("learning_curve"):
            drawn[ROWS_FIGURE] = rows_figure(advice)
    elif purpose == "compare":
        drawn = {CURVES_FIGURE: curves_figure(directory)}
    else:
        raise RequestError(f"{run} is a run of '{purpose}'; images are drawn of an advice or a comparison.")
    out = []
    for name, figure in drawn.items():
        for form, file in images(figure).items():
            out.append(directory.path / f"{name}.{form}")
            write_whole(out[-1], file)
    return out


def curves_figure(directory: RunDir) -> Any:
    """Test loss against rounds, a line a method; over several seeds their mean, and a band one deviation wide each way.

    A method of one round, such as an exact referee, is a line across.
    """
    import matplotlib as mpl

    metric, table = directory.comparison["metric"], directory.curves
    longest = int(table["t"].max())
    with mpl.rc_context(STYLE):
        figure = canvas(6.4, 4.0)
        axes = figure.add_subplot()
        for k, (method, mine) in enumerate(table.groupby("method", sort=False)):
            colour, rounds = COLOURS[k % len(COLOURS)], mine.groupby("t")["test_loss"]
            mean, deviation = rounds.mean(), rounds.std().fillna(0.0)
            t = mean.index.to_numpy(float)
            way: dict[str, Any] = {"color": colour, "label": plain(str(method))}
            if len(t) == 1 and longest > 1:
                t, mean, deviation = np.array([0.0, longest]), mean.repeat(2), deviation.repeat(2)
                way |= {"linestyle": "--"}
            elif len(t) < MARKED:
                way |= {"marker": MARKERS[k % len(MARKERS)], "markersize": 3}
            axes.plot(t, mean.to_numpy(), **way)
            if bool((deviation > 0).any()):
                axes.fill_between(t, mean - deviation, mean + deviation, color=colour, alpha=0.15, linewidth=0)
        seeds = table["seed"].nunique()
        axes.set_xlabel("round" if seeds == 1 else f"round; mean and deviation over {seeds} seeds")
        axes.set_ylabel(f"test {metric}")
        axes.legend(fontsize=8)
    return figure


def path_figure(advice: Mapping[str, Any]) -> Any:
    """Held-out loss against lambda, with the two ends as lines, and the plan: its loss at its clients' lambdas."""
    import matplotlib as mpl

    path, clients = frame_of(advice["path"]), frame_of(advice["clients"])
    ends = path[path["family"] != "lambda"].set_index("family")["loss"]
    moored = path[path["family"] == "lambda"].sort_values("lambda")
    with mpl.rc_context(STYLE):
        figure = canvas(6.4, 4.0)
        axes = figure.add_subplot()
        axes.semilogx(
            moored["lambda"], moored["loss"], marker="o", markersize=3, color="0.35", label="one lambda for all"
        )
        axes.axhline(ends["alone"], color=VERDICTS["alone"], linestyle="--", label="alone")
        axes.axhline(ends["common"], color=VERDICTS["common"], linestyle=":", label="common")
        _mark_plan(axes, advice["plan"], clients["lambda"].to_numpy(float), moored["lambda"].to_numpy(float))
        axes.set_xlabel("lambda: slack (everyone alone) to taut (one common model)")
        axes.set_ylabel(f"held-out {advice['summary']['metric']}")
        axes.legend(fontsize=8)
    return figure


def _mark_plan(axes: Any, plan: Mapping[str, Any], lams: np.ndarray, grid: np.ndarray) -> None:
    """The plan's held-out loss, at the lambdas that its clients have; as a line where they have none."""
    lams = np.sort(lams[np.isfinite(lams) & (lams > 0)])
    if plan["family"] not in MOORED or not len(lams):
        words = PLANS.get(plan["family"], plan["family"]).split(",")[0]
        axes.axhline(plan["loss"], color=VERDICTS["personal"], linewidth=1, label=f"plan: {words}")
        return
    low, middle, high = lams[0], lams[len(lams) // 2], lams[-1]
    words = f"plan: lambda = {middle:.3g}"
    if high > 1.001 * low:
        words = f"plan: lambda {low:.3g} to {high:.3g} by client, median {middle:.3g}"
    elif plan["family"] == "lambda" and len(grid) and not grid[0] < middle < grid[-1]:
        words += ", at the edge of what was tried"
    axes.plot([low, high], [plan["loss"]] * 2, color=VERDICTS["personal"], linewidth=3, solid_capstyle="butt")
    axes.plot([middle], [plan["loss"]], "D", markersize=7, color=VERDICTS["personal"], label=words)


def rows_figure(advice: Mapping[str, Any]) -> Any:
    """Expected losses of a typical client by its rows, and how many rows it would take to do as well alone."""
    import matplotlib as mpl

    curve = advice.get("learning_curve")
    if not curve:
        raise RequestError("this advice has no learning curve: training alone does as well, or no rows would do.")
    rows = np.array(curve["rows"], dtype=float)
    with mpl.rc_context(STYLE):
        figure = canvas(6.4, 4.0)
        axes = figure.add_subplot()
        axes.set_xscale("log")
        edge = 2 * max(curve["alone"]) - min(curve["personal"])  # what lies beyond would flatten the others
        for name, line in (("alone", "--"), ("personal", "-"), ("common", ":")):
            if name != "common" or curve[name][0] < edge:
                axes.plot(rows, curve[name], color=VERDICTS[name], linestyle=line, label=name)
        level = float(np.interp(np.log(curve["now"]), np.log(rows), curve["personal"]))
        axes.plot([curve["now"], curve["match"]], [level] * 2, color="0.3", linestyle=(0, (1, 3)))
        axes.plot([curve["now"]], [level], "^", markersize=8, color=VERDICTS["personal"])
        axes.plot([curve["match"]], [level], "s", markersize=7, color=VERDICTS["alone"])
        told = {curve["now"]: f"{curve['now']:,.0f} now", curve["match"]: f"{curve['match']:,.0f} to match"}
        axes.set_xticks(list(told), list(told.values()))
        axes.minorticks_off()
        axes.set_xlabel("rows of a typical client")
        axes.set_ylabel(f"expected {advice['summary']['metric']}")
        axes.legend(fontsize=8)
    return figure


def gains_figure(advice: Mapping[str, Any]) -> Any:
    """What each client's model saves over training alone, in per cent of its loss alone, with its interval, in order.

    All clients are drawn. One that lies far from the rest is an arrow at the edge with its number, so that it does not
    flatten them. Colours tell what to deploy.
    """
    import matplotlib as mpl

    frame = frame_of(advice["clients"])
    names = {f"gain_over_alone_percent{end}": f"gain{end}" for end in ("", "_low", "_high")}
    told = frame.rename(columns=names).sort_values("gain", ignore_index=True)
    named = len(told) <= NAMED
    with mpl.rc_context(STYLE):
        figure = canvas(6.4, min(max(2.5, 0.16 * len(told) + 1.2), 14.0) if named else 6.0)
        axes = figure.add_subplot()
        low, high = _span(told)
        axes.set_xlim(low, high)
        axes.set_ylim(-1, len(told))
        place = np.arange(len(told))
        for kind, colour in VERDICTS.items():
            mine = (told["deploy"] == kind).to_numpy()
            if mine.any():
                _client_marks(axes, told[mine], place[mine], colour, f"{kind} ({mine.sum():,})", named)
        far = _arrows(axes, told, place, low, high, named)
        axes.axvline(0, color="0.4", linewidth=1)
        if named:
            axes.set_yticks(place, [plain(str(name)) for name in told["client"]], fontsize=6, parse_math=False)
            axes.grid(visible=False, axis="y")
        else:
            axes.set_yticks([])
        axes.set_ylabel(f"{len(told):,} clients")
        arrows = f"; arrows: {far:,} beyond the edge" if far else ""
        axes.set_xlabel(
            f"{advice['summary']['metric']} saved against training alone, per cent (right: it helps{arrows})"
        )
        figure.legend(loc="outside upper left", ncols=len(VERDICTS), fontsize=8)  # beside the marks, not on them
    return figure


def _span(told: Any) -> tuple[float, float]:
    """The axis: 0, and the gains and intervals of all who lie within FAR typical deviations of the median."""
    if told.empty:
        return -1.0, 1.0
    gain = told["gain"].to_numpy(float)
    middle = float(np.median(gain))
    half = np.nan_to_num((told["gain_high"] - told["gain_low"]).to_numpy(float) / 2)
    far = FAR * max(float(np.median(np.abs(gain - middle))), float(np.median(half)) / 2, 1e-3)
    near = told[np.abs(gain - middle) <= far]
    low = max(float(near[["gain", "gain_low"]].min().min()), middle - far)
    high = min(float(near[["gain", "gain_high"]].max().max()), middle + far)
    low, high = min(low, 0.0), max(high, 0.0)
    room = 0.04 * (high - low) or 1.0
    return low - room, high + room


def _client_marks(axes: Any, part: Any, place: np.ndarray, colour: str, label: str, named: bool) -> None:
    gain = part["gain"].to_numpy(float)
    width = np.nan_to_num(np.abs(np.vstack([gain - part["gain_low"], part["gain_high"] - gain])))
    style: dict[str, Any] = {"fmt": "o", "markersize": 3}
    if not named:  # pale intervals, so that the gains stand out
        style = {"fmt": ".", "markersize": 3, "elinewidth": 0.5, "ecolor": (colour, 0.3)}
    axes.errorbar(gain, place, xerr=width, color=colour, label=label, rasterized=len(place) > RASTER, **style)


def _arrows(axes: Any, told: Any, place: np.ndarray, low: float, high: float, named: bool) -> int:
    """Arrows where a gain lies beyond the axis, with the gain beside it where clients are named; how many there are."""
    far = 0
    for side, edge, marker in ((told["gain"] < low, low, "<"), (told["gain"] > high, high, ">")):
        for k in np.flatnonzero(side.to_numpy()):
            far += 1
            colour = VERDICTS.get(told["deploy"][k], "0.5")
            axes.plot([edge], [place[k]], marker, color=colour, markersize=6, clip_on=False)
            if named:
                align, offset = ("left", 6) if marker == "<" else ("right", -6)
                text = f"{told['gain'][k]:,.0f} %"
                axes.annotate(
                    text, (edge, place[k]), (offset, 0), textcoords="offset points", ha=align, va="center", fontsize=6
                )
    return far
