"""Figure 6 of `effect`: speed-ups from more local epochs, for a model and the series that shows it."""

from mooring.experiments.base.claims import Claim
from mooring.experiments.base.experiment import Panel, grid
from mooring.experiments.effect._points import NAMES, fedprox
from mooring.experiments.effect._rounds import gains_more

EPOCHS = [2, 5, 10]
CLASSES = 6


def points(lams):
    return grid(method=["FedProx"], classes=[CLASSES], lam=list(lams), epochs=EPOCHS)


def claim(series: str, lams, what: str, note: str = "") -> Claim:
    small, large = ({"method": "FedProx", "classes": CLASSES, "lam": lam} for lam in (lams[0], lams[-1]))
    return Claim(
        "small-lambda-gains",
        f"{what}: with smaller lambda more local updates notably reduce the need for communication, with larger "
        f"lambda the benefit is minimal: 10 epochs instead of 2 save lambda = {lams[0]:g} over 2 times the rounds, "
        f"and lambda = {lams[-1]:g} at most 1.5 times",
        gains_more(series, {"epochs": EPOCHS[0]}, {"epochs": EPOCHS[-1]}, small, large, 2, 1.5),
        note=note,
    )


def panels(series: str, lams, ylabel: str) -> list[Panel]:
    return [
        Panel(
            "t",
            {f"{k} epochs": fedprox(series, lam, classes=CLASSES, epochs=k) for k in EPOCHS},
            "communication rounds",
            ylabel,
            rf"{name}: $\lambda$ = {lam:g}",
            log="y",
        )
        for name, lam in zip(NAMES, lams)
    ]
