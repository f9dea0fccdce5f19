"""Figure 1 (d) of `effect`: total error round by round on synthetic data; larger lambda takes more rounds."""

from mooring_papers.base.claims import Claim, every, ordered
from mooring_papers.base.experiment import Experiment, Panel, Preset, grid
from mooring_papers.base.results import of
from mooring_papers.effect._rounds import rounds_to
from mooring_papers.effect._synthetic import FEDPROX, LABELS, LAMS, total_errors

SPREADS = [0.05, 0.6, 2.0]
POINTS = grid(spread=SPREADS, lam=list(LAMS.values()))


def converged(name: str, spread: float):
    return of(rounds_to("total", 0.05), lam=LAMS[name], spread=spread)


def final(name: str, spread: float):
    return of("total", at=-1, lam=LAMS[name], spread=spread)


EXPERIMENT = Experiment(
    title="Total error of FedProx by rounds (synthetic)",
    trial=total_errors,
    presets={
        "smoke": Preset(POINTS, repeats=1, settings={"rounds": 4, "clients": 5, "samples": 100}),
        "quick": Preset(POINTS, repeats=10, settings={"rounds": 160}),
        "paper": Preset(POINTS, repeats=20, settings={"rounds": 300}),
    },
    claims=[
        Claim(
            "larger-lambda-more-rounds",
            "at every R (0.05, 0.6, 2) the rounds until the total error is within 5 % of its way to its end rise from "
            "the small over the medium to the large lambda",
            every(**{f"R = {r}": ordered([converged(name, r) for name in FEDPROX]) for r in SPREADS}),
        ),
        Claim(
            "small-r-large-lambda",
            "at R = 0.05 the final total error falls from the small over the medium to the large lambda",
            ordered([final(name, SPREADS[0]) for name in FEDPROX[::-1]]),
        ),
        Claim(
            "large-r-small-lambda",
            "at R = 2 the final total error falls from the large over the medium to the small lambda",
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
