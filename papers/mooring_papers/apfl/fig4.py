"""Figure 4 of `apfl`: the effect of sampling clients on APFL and on localized FedAvg."""

from functools import partial
from itertools import pairwise

import numpy as np

from mooring_papers.apfl._images import DIGITS, MNIST, run_softmax
from mooring_papers.apfl._methods import ACCURACY, FEDAVG_LOCAL, FIXED, LOSS, curve, late, percent, runs
from mooring_papers.base.claims import Claim, every, falling, higher, lower, measured, rising
from mooring_papers.base.experiment import Cell, Experiment, Panel, Preset, Table, grid
from mooring_papers.base.results import Results

RATES = (0.3, 0.5, 0.7)
METHODS = (*FIXED, FEDAVG_LOCAL)
POINTS = grid(participation=RATES, run=runs(*METHODS))


def trial(seed: int, participation: float, run: str, data: str, clients: int, rounds: int, every: int) -> dict:
    return run_softmax(seed, run, 2, data, clients, rounds, every, participation)


def harm(results: Results, method: str, series: str) -> tuple[np.ndarray, ...]:
    """Return the decrease in the late rounds if 30% instead of 70% of the clients take part."""
    small_cohort, large_cohort = (results.repeats(late(method, series, participation=rate)) for rate in (0.3, 0.7))
    return (1 if series == LOSS else -1) * (small_cohort - large_cohort), small_cohort, large_cohort


def change_of_harm(results: Results, less: str, more: str, series: str) -> tuple[np.ndarray, ...]:
    small, large = harm(results, less, series), harm(results, more, series)
    return large[0] - small[0], *small[1:], *large[1:]


def damped(series: str):
    """The harm falls from each alpha to the next."""
    return every(
        **{
            f"{b} less than {a}": measured(partial(change_of_harm, less=a, more=b, series=series), high=0.0)
            for a, b in pairwise(FIXED)
        }
    )


EXPERIMENT = Experiment(
    title="Sampling of clients: APFL against localized FedAvg, 2 classes per client, softmax regression",
    trial=trial,
    presets={
        "smoke": Preset(POINTS, 1, {"data": "digits", "clients": 10, "rounds": 3, "every": 1}, DIGITS),
        "quick": Preset(POINTS, 5, {"data": "digits", "clients": 20, "rounds": 100, "every": 5}, DIGITS),
        "paper": Preset(POINTS, 10, {"data": "mnist", "clients": 100, "rounds": 100, "every": 5}, MNIST, ("mnist",)),
    },
    claims=[
        Claim(
            "sampling-hurts-fedavg-in-training",
            "the training loss of localized FedAvg, averaged over the evaluated rounds, falls from 30 to 50 to 70 % of "
            "the clients in a round",
            falling(curve(FEDAVG_LOCAL, LOSS, np.mean), "participation"),
        ),
        Claim(
            "sampling-hurts-fedavg-in-generalization",
            "its validation accuracy, averaged over the evaluated rounds, rises from 30 to 50 to 70 %",
            rising(curve(FEDAVG_LOCAL, ACCURACY, np.mean), "participation"),
        ),
        Claim(
            "apfl-better-in-training",
            "at every share and every alpha the training loss of APFL is below that of localized FedAvg (last five "
            "evaluated rounds)",
            every(**{m: lower(late(m, LOSS), late(FEDAVG_LOCAL, LOSS)) for m in FIXED}),
        ),
        Claim(
            "apfl-better-in-generalization",
            "at every share and every alpha the validation accuracy of APFL is above that of localized FedAvg (last "
            "five evaluated rounds)",
            every(**{m: higher(late(m, ACCURACY), late(FEDAVG_LOCAL, ACCURACY)) for m in FIXED}),
        ),
        Claim(
            "larger-alpha-damps-in-training",
            "the training loss that 30 instead of 70 % of the clients add falls from alpha = 0.25 to 0.5 to 0.75",
            damped(LOSS),
        ),
        Claim(
            "larger-alpha-damps-in-generalization",
            "the validation accuracy that 30 instead of 70 % of the clients cost falls from alpha = 0.25 to 0.5 to "
            "0.75",
            damped(ACCURACY),
        ),
    ],
    panels=[
        Panel(
            "round",
            {f"{m}, {r:.0%}": curve(m, series, participation=r) for m in (method, FEDAVG_LOCAL) for r in RATES},
            "rounds",
            "training loss" if series == LOSS else "validation accuracy",
            method,
            log="y" if series == LOSS else "",
        )
        for series in (LOSS, ACCURACY)
        for method in FIXED
    ],
    tables=[
        Table(
            "Validation accuracy in the last round, %",
            tuple(f"{r:.0%} take part" for r in RATES),
            {m: [Cell(percent(m, participation=r)) for r in RATES] for m in METHODS},
        )
    ],
    reads="P1. Claims are on the mean of the last five evaluated rounds. The clients of a round are evaluated right "
    "after it, each mixing with its own copy of the global model.",
)
