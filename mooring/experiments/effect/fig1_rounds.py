"""Figure 1 (d) of `effect`: total error round by round on synthetic data; larger lambda takes more rounds."""

from mooring.experiments.base.claims import Claim, every, ordered
from mooring.experiments.base.experiment import Experiment, Panel, Preset, grid
from mooring.experiments.base.results import of
from mooring.experiments.effect._rounds import rounds_to
from mooring.experiments.effect._synthetic import FEDPROX, LABELS, LAMS, iterated

SPREADS = [0.05, 0.6, 2.0]
POINTS = grid(spread=SPREADS, lam=list(LAMS.values()))


def converged(name: str, spread: float):
    return of(rounds_to("total", 0.05), lam=LAMS[name], spread=spread)


def final(name: str, spread: float):
    return of("total", at=-1, lam=LAMS[name], spread=spread)


EXPERIMENT = Experiment(
    title="Total error of FedProx by rounds (synthetic)",
    trial=iterated,
    presets={
        "smoke": Preset(POINTS, repeats=1, settings={"rounds": 4, "clients": 5, "samples": 100}),
        "quick": Preset(POINTS, repeats=5, settings={"rounds": 160}),
        "paper": Preset(POINTS, repeats=20, settings={"rounds": 300}),
    },
    claims=[
        Claim(
            "larger-lambda-more-rounds",
            "as lambda increases, convergence takes more rounds (to within 5 % of the total error's way), at every R",
            every(**{f"R = {r}": ordered([converged(name, r) for name in FEDPROX]) for r in SPREADS}),
        ),
        Claim(
            "small-r-large-lambda",
            "when heterogeneity is low (R = 0.05), larger lambda leads to the smallest total error",
            ordered([final(name, SPREADS[0]) for name in FEDPROX[::-1]]),
        ),
        Claim(
            "large-r-small-lambda",
            "as R increases (R = 2), smaller lambda leads to the smallest total error",
            ordered([final(name, SPREADS[-1]) for name in FEDPROX]),
        ),
    ],
    panels=[
        Panel(
            "t",
            {LABELS[name]: of(series, lam=lam, spread=r) for name, lam in LAMS.items()},
            "communication rounds",
            f"{what} total error",
            f"(d) R = {r}",
            log="y",
        )
        for series, what in (("total", "local"), ("global total", "global"))
        for r in SPREADS
    ],
    reads="Data as in effect-fig1. Inner problems are solved exactly, gamma = 1/L_g as printed.",
)
