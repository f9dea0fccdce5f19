"""The table of speeds on docs/performance.md, and the plot beside it."""

from __future__ import annotations

from pathlib import Path

from benchmarks.speed_measure import Row

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
BEGIN, END = "<!-- written by python -m benchmarks.speed --write -->", "<!-- until here -->"


def write(text: str, rows: list[Row]) -> None:
    """Put the table into the page, and draw the plot beside it."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    plot = PAGE.with_suffix(".svg")
    draw(rows, plot)
    shown = f"![How many times faster, and what is wanted]({plot.name})"
    PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{shown}\n\n{END}{after}")


def draw(rows: list[Row], path: Path) -> None:
    """Ratios with their ranges, against what is wanted."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    shown = [row for row in rows if row.theirs is not None][::-1]
    figure, axes = plt.subplots(figsize=(9, 0.32 * len(shown) + 1.2))
    for y, row in enumerate(shown):
        colour = {True: "tab:green", False: "tab:red", None: "tab:grey"}[row.held]
        axes.plot([min(row.ratios), max(row.ratios)], [y, y], color=colour, linewidth=2)
        axes.plot(row.ratio, y, "o", color=colour)
        if row.wanted is not None:
            axes.plot(row.wanted, y, "|", color="black", markersize=12)
    axes.set_xscale("log")
    axes.set_yticks(range(len(shown)), [f"{row.work} / {row.rival}" for row in shown], fontsize=8)
    axes.set_xlabel("ratio of processor times and its range; black: what is wanted; red: missed", fontsize=8)
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
