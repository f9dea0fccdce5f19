"""Claims on ratios, presets and panels that Figures 1 and 2 of `mspp` share."""

from collections.abc import Iterable, Mapping
from functools import partial

import numpy as np

from mooring_papers.base.claims import Check, measured, most
from mooring_papers.base.experiment import Panel, Preset, grid
from mooring_papers.base.results import Results, of
from mooring_papers.mspp._accuracy_targets import METHODS

PANELS = {"a": "MNIST", "b": "FEMNIST", "c": "Sent140"}
POINTS = grid(panel=list(PANELS))
TARGETS = 3
OVER_HALF = 0.51  # share of cases that are "most" of them
STAND_INS = "digits with 2 and with 3 classes a device and generated word counts instead of MNIST, FEMNIST and Sent140"
PRESETS = {
    "smoke": Preset(POINTS, 1, {"size": "tiny"}, STAND_INS),
    "quick": Preset(POINTS, 10, {"size": "small"}, STAND_INS),
    "paper": Preset(grid(panel=["a"]), 3, {"size": "large"}, "MNIST", ("mnist",)),
}


def medians(results: Results, quantity: str) -> dict[str, list[float]]:
    """By panel: at each target the median over repeats; nan where half of them do not reach it."""
    return {
        dict(point)["panel"]: [float(np.median(column)) for column in values.T]
        for point, values in results.take(quantity).items()
    }


def log_ratio(results: Results, quantity: str, panel: str, target: int) -> tuple[np.ndarray, ...]:
    """By repeat: the logarithm of a ratio of data points or rounds to one target; nan where it is not reached."""
    ratio = results.repeats(of(quantity, panel=panel))[:, target]
    with np.errstate(invalid="ignore"):
        return np.log(ratio), ratio


def ratio_below(quantities: Mapping[str, str], panels: Iterable[str], limit: float = 1.0, cases: float = 1.0) -> Check:
    """The ratios of all quantities at all targets are below the limit, in this share of the cases: means of logarithms
    over repeats with their intervals."""
    checks = {
        f"{name}, ({panel}), target {k + 1}": measured(
            partial(log_ratio, quantity=quantity, panel=panel, target=k), high=float(np.log(limit))
        )
        for name, quantity in quantities.items()
        for panel in panels
        for k in range(TARGETS)
    }
    return most(cases, **checks)


def panels(kind: str, label: str) -> list[Panel]:
    """One plot per data set."""
    return [
        Panel(
            "target",
            {m: of(f"{kind} {m}", panel=panel) for m in METHODS},
            "target accuracy (or share of FedProx's)",
            label,
            f"({panel}) {name}",
            log="y",
        )
        for panel, name in PANELS.items()
    ]
