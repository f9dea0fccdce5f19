"""Figure 6 of `effect`: speed-ups from more local epochs, for a model and the series that shows it."""

from mooring_papers.base.claims import Claim
from mooring_papers.base.experiment import Panel, grid
from mooring_papers.effect._image_settings import NAMES, fedprox
from mooring_papers.effect._rounds import work_claims

EPOCHS = [2, 5, 10]
CLASSES = 6


def points(lams):
    return grid(method=["FedProx"], classes=[CLASSES], lam=list(lams), epochs=EPOCHS)


def claims(series: str, lams, what: str) -> list[Claim]:
    small, large = ({"method": "FedProx", "classes": CLASSES, "lam": lam} for lam in (lams[0], lams[-1]))
    return work_claims(series, {"epochs": EPOCHS[0]}, {"epochs": EPOCHS[-1]}, small, large, what)


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
