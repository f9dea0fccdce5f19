"""Sizes, points and series that the experiments with images share."""

from mooring_papers.base.experiment import Preset, grid
from mooring_papers.base.results import of

NAMES = ("small", "medium", "large")
SOFTMAX = (0.5, 1.5, 2.5)  # lambda, as printed
NETWORK = (0.2, 0.5, 2.5)
DIGITS = {"data": "digits", "clients": 20, "samples": 90, "tested": 360, "eta": 0.1}
MNIST = {"data": "mnist", "clients": 20, "samples": 100, "tested": 10_000, "eta": 0.01}
START = 2.302585  # log 10: the loss of uniform probabilities
STAND_IN = "digits of scikit-learn, 8x8, instead of MNIST; P1 and P2"


def methods(lams, classes, **coordinates):
    """Points: both baselines, and FedProx with each lambda."""
    baselines = grid(method=["LocalTrain", "GlobalTrain"], classes=classes, **coordinates)
    return baselines + grid(method=["FedProx"], classes=classes, lam=list(lams), **coordinates)


def fedprox(series, lam: float, at=None, **fixed):
    return of(series, at, method="FedProx", lam=lam, **fixed)


def line(series, lams, at=None, **fixed) -> dict:
    """References to a series of every method, from LocalTrain over growing lambda to GlobalTrain."""
    refs = {"LocalTrain": of(series, at, method="LocalTrain", **fixed)}
    refs |= {name: fedprox(series, lam, at, **fixed) for name, lam in zip(NAMES, lams)}
    return refs | {"GlobalTrain": of(series, at, method="GlobalTrain", **fixed)}


def labels(refs: dict, lams) -> dict:
    label_by_name = {name: rf"FedProx, $\lambda$ = {lam:g}" for name, lam in zip(NAMES, lams)}
    return {label_by_name.get(name, name): ref for name, ref in refs.items()}


def presets(lams, model: str, batch: int, quick: dict, paper: dict) -> dict[str, Preset]:
    """Figures 1b, 1e and 4: methods against classes per client; `quick` and `paper` contain their sizes."""
    work = {"epochs": 5, "batch": batch, "model": model}

    def sized(base: dict, size: dict) -> dict:
        return base | work | {name: value for name, value in size.items() if name != "repeats"}

    smoke = sized(DIGITS, {"clients": 5, "rounds": 2, "tested": 100})
    all_points = methods(lams, [2, 6, 10])
    return {
        "smoke": Preset(methods(lams, [2, 10]), 1, smoke, STAND_IN, swept=("lam",)),
        "quick": Preset(all_points, quick["repeats"], sized(DIGITS, quick), STAND_IN, swept=("lam",)),
        "paper": Preset(
            all_points, paper["repeats"], sized(MNIST, paper), "MNIST; P1 and P2", ("mnist",), swept=("lam",)
        ),
    }
