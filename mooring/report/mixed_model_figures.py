"""Figures of a mixed model: random effects with their intervals, shrinkage, residuals and their quantiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.stats import norm

from mooring.core.errors import RequestError
from mooring.report.figure_style import MODEL_COLORS, STYLE, create_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MixedModel = Any  # of `mooring.mixed_models`, which reports do not import
CONFIDENCE_LEVEL = 0.95  # of the intervals of random effects
MAX_NAMED_CLIENTS = 60  # clients up to which each is named
INCHES_PER_CLIENT = 0.16


def draw_caterpillar(model: MixedModel) -> Figure:
    """Each client's random effects in the order of the first, with intervals of 95%."""
    import matplotlib as mpl

    terms = _random_terms(model)
    has_names = len(model.clients) <= MAX_NAMED_CLIENTS
    place = np.arange(len(model.clients))
    reach = norm.ppf((1 + CONFIDENCE_LEVEL) / 2) * model.effects_sd
    with mpl.rc_context(STYLE):
        figure = create_figure(3.2 * len(terms) + 1.2, max(3.0, INCHES_PER_CLIENT * len(place)) if has_names else 5.0)
        order = np.argsort(model.effects[:, 0])
        for j, term in enumerate(terms):
            axes = figure.add_subplot(1, len(terms), j + 1)
            axes.axvline(0, color="0.6", linewidth=0.8)
            axes.errorbar(
                model.effects[order, j], place, xerr=reach[order, j], fmt="o", markersize=3, linewidth=0.8,
                color=MODEL_COLORS["personal"],
            )  # fmt: skip
            axes.set_xlabel(f"deviation of {term}")
            axes.set_yticks(place if has_names and j == 0 else [])
            if has_names and j == 0:
                axes.set_yticklabels([model.clients[i] for i in order], fontsize=7)
    return figure


def draw_shrinkage(model: MixedModel) -> Figure:
    """Lines from each client's local deviation to its personal one; the global model is at 0."""
    import matplotlib as mpl

    terms = _random_terms(model)
    local, personal = model.local_effects().to_numpy(), model.effects
    if len(terms) == 1:
        place = np.argsort(np.argsort(personal[:, 0])).astype(float)
        local, personal = np.column_stack([local, place]), np.column_stack([personal, place])
    with mpl.rc_context(STYLE):
        figure = create_figure(6.0, 4.6)
        axes = figure.add_subplot()
        axes.plot(
            np.stack([local[:, 0], personal[:, 0]]), np.stack([local[:, 1], personal[:, 1]]), color="0.8", zorder=1
        )
        for points, name in ((local, "local"), (personal, "personal")):
            axes.scatter(points[:, 0], points[:, 1], s=14, color=MODEL_COLORS[name], label=name, zorder=2)
        if len(terms) == 1:
            axes.axvline(0, color=MODEL_COLORS["global"], label="global")
        else:
            axes.scatter([0], [0], marker="+", s=120, color=MODEL_COLORS["global"], label="global", zorder=3)
        axes.set_xlabel(f"deviation of {terms[0]}")
        axes.set_ylabel("clients, by personal deviation" if len(terms) == 1 else f"deviation of {terms[1]}")
        axes.legend(fontsize=8)
    return figure


def draw_residuals(model: MixedModel) -> Figure:
    """Residuals against fitted values."""
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        figure = create_figure(6.0, 4.0)
        axes = figure.add_subplot()
        axes.axhline(0, color="0.6", linewidth=0.8)
        axes.plot(model.fitted, model.residuals, ".", markersize=3, color=MODEL_COLORS["personal"], rasterized=True)
        axes.set_xlabel(f"fitted {model.formula.target}")
        axes.set_ylabel("residual")
    return figure


def draw_quantiles(model: MixedModel) -> Figure:
    """Ordered residuals, in residual standard deviations, against quantiles of the normal distribution."""
    import matplotlib as mpl

    ordered = np.sort(model.residuals) / model.residual_sd
    expected = norm.ppf((np.arange(len(ordered)) + 0.5) / len(ordered))
    with mpl.rc_context(STYLE):
        figure = create_figure(4.6, 4.6)
        axes = figure.add_subplot()
        axes.plot(expected, expected, color="0.6", linewidth=0.8)
        axes.plot(expected, ordered, ".", markersize=3, color=MODEL_COLORS["personal"], rasterized=True)
        axes.set_xlabel("quantile of the normal distribution")
        axes.set_ylabel("residual in standard deviations")
    return figure


def _random_terms(model: MixedModel) -> list[str]:
    terms = list(model.covariance.columns)
    if not terms:
        raise RequestError("the model has no random effects to draw; add a term such as (1 | client).")
    return terms


MIXED_MODEL_FIGURES = {
    "caterpillar": draw_caterpillar,
    "shrinkage": draw_shrinkage,
    "residuals": draw_residuals,
    "qq": draw_quantiles,
}
