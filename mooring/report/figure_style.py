"""Style of figures, and their files: equal figures give equal bytes."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#000000",
    "#8c6d31",
)  # safe for color blindness
MODEL_COLORS = {
    "personal": "#009e73",
    "global": "#0072b2",
    "pooled": "#0072b2",
    "local": "#d55e00",
    "unknown": "#7f7f7f",
}
MARKERS = "osD^v<>P"
STYLE: Any = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "mooring",  # equal figures, equal ids
}
IMAGE_METADATA = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}  # no dates, no versions


def create_figure(width: float, height: float, **layout: Any) -> Figure:
    """Return an empty figure that needs no window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", **layout)
    FigureCanvasAgg(figure)
    return figure


def encode_images(figure: Figure) -> dict[str, bytes]:
    """Return the figure as PNG and SVG files; the layout, which is slow, is computed once."""
    out = {"png": encode_image(figure, "png")}
    figure.set_layout_engine("none")
    return out | {"svg": encode_image(figure, "svg")}


def encode_image(figure: Figure, form: str, dpi: int = 150) -> bytes:
    """Return the figure as a PNG or SVG file."""
    import matplotlib as mpl

    sink = io.BytesIO()
    with mpl.rc_context(STYLE):
        figure.savefig(sink, format=form, dpi=dpi, metadata=IMAGE_METADATA[form])
    return sink.getvalue()
