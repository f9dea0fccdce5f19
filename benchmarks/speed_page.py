"""The table of speeds on docs/performance.md, and the plot beside it."""

from __future__ import annotations

from pathlib import Path

from benchmarks.speed_measure import Row

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
BEGIN, END = "<!-- written by python -m benchmarks.speed --write -->", "<!-- until here -->"


def write(text: str, rows: list[Row]) -> None:
    """Put the table into the page, and draw the plot beside it."""
    before, _, remainder = PAGE.read_text().partition(BEGIN)
    _, _, after = remainder.partition(END)
    plot = PAGE.with_suffix(".svg")
    draw(rows, plot)
    image = f"![How many times faster, and what is wanted]({plot.name})"
    PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{image}\n\n{END}{after}")


def draw(rows: list[Row], path: Path) -> None:
    """Draw the ratios with their ranges and targets."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    compared_rows = [row for row in rows if row.rival_times is not None][::-1]
    figure, axes = plt.subplots(figsize=(9, 0.32 * len(compared_rows) + 1.2))
    for y, row in enumerate(compared_rows):
        colour = {True: "tab:green", False: "tab:red", None: "tab:grey"}[row.is_held]
        axes.plot([min(row.ratios), max(row.ratios)], [y, y], color=colour, linewidth=2)
        axes.plot(row.ratio, y, "o", color=colour)
        if row.target is not None:
            axes.plot(row.target, y, "|", color="black", markersize=12)
    axes.set_xscale("log")
    axes.set_yticks(range(len(compared_rows)), [f"{row.work} / {row.rival}" for row in compared_rows], fontsize=8)
    axes.set_xlabel("ratio of processor times and its range; black: what is wanted; red: missed", fontsize=8)
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
