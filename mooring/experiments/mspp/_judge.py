"""Claims on medians over repeats, presets and panels that Figures 1 and 2 of `mspp` share."""

from collections.abc import Mapping
from functools import partial

import numpy as np

from mooring.experiments.base.claims import Check, Verdict, margins, most
from mooring.experiments.base.experiment import Panel, Preset, grid
from mooring.experiments.base.results import Results, bootstrap, of
from mooring.experiments.mspp._speed import METHODS

PANELS = {"a": "MNIST", "b": "FEMNIST", "c": "Sent140"}
POINTS = grid(panel=list(PANELS))
STAND_INS = "digits with 2 and with 3 classes a device and generated word counts instead of MNIST, FEMNIST and Sent140"
REAL = (
    "MNIST; Fashion-MNIST, 3 classes and 1,101 rows a device, instead of FEMNIST; Shakespeare by role instead of "
    "Sent140"
)
PRESETS = {
    "smoke": Preset(POINTS, 1, {"size": "tiny"}, STAND_INS),
    "quick": Preset(POINTS, 10, {"size": "small"}, STAND_INS),
    "paper": Preset(POINTS, 2, {"size": "large"}, REAL, ("mnist", "fashion", "shakespeare")),
}


def _median(values: np.ndarray, draw: np.ndarray) -> float:
    return float(np.median(values[draw]))


def medians(results: Results, quantity: str) -> dict[str, list[tuple[float, float, float]]]:
    """By panel: at each target the median over repeats, and the ends of its bootstrap interval."""
    return {
        dict(point)["panel"]: [bootstrap(partial(_median, column), len(column)) for column in values.T]
        for point, values in results.take(quantity).items()
    }


def median_below(quantities: Mapping[str, str], limit: float, cases: float = 1.0) -> Check:
    """The medians of all quantities at all targets are below the limit with their intervals, in this share of cases."""

    def check(results: Results) -> Verdict:
        found = {}
        for name, quantity in quantities.items():
            repeats = len(next(iter(results.take(quantity).values())))
            for panel, targets in medians(results, quantity).items():
                for k, (middle, low, high) in enumerate(targets):
                    numbers = {"value": middle, "low": low, "high": high, "range": [0.0, limit]}
                    margin = -np.inf if middle < 0 else float(margins(middle, low, high, most=limit))
                    found[f"{name}, ({panel}), target {k + 1}"] = Verdict(margin, numbers, repeats)
        return most(cases, **{name: lambda _, one=one: one for name, one in found.items()})(results)

    return check


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
