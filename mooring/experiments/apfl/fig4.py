"""Figure 4 of `apfl`: the effect of sampling clients on APFL and on localized FedAvg."""

from functools import partial
from itertools import pairwise

import numpy as np

from mooring.experiments.apfl._images import DIGITS, MNIST, softmax_run
from mooring.experiments.apfl._methods import ACCURACY, FEDAVG_LOCAL, FIXED, LOSS, curve, late, percent, runs
from mooring.experiments.base.claims import Claim, every, falling, higher, lower, measured, rising
from mooring.experiments.base.experiment import Cell, Experiment, Panel, Preset, Table, grid
from mooring.experiments.base.results import Results

RATES = (0.3, 0.5, 0.7)
METHODS = (*FIXED, FEDAVG_LOCAL)
POINTS = grid(participation=RATES, run=runs(*METHODS))


def trial(seed: int, participation: float, run: str, data: str, clients: int, rounds: int, every: int) -> dict:
    return softmax_run(seed, run, 2, data, clients, rounds, every, participation)


def damped(series: str):
    """What the late rounds lose when 30 % instead of 70 % take part falls from each alpha to the next."""
    sign = 1 if series == LOSS else -1

    def harm(results: Results, method: str) -> tuple[np.ndarray, ...]:
        few, many = (results.one(late(method, series, participation=rate)) for rate in (0.3, 0.7))
        return sign * (few - many), few, many

    def change(results: Results, less: str, more: str) -> tuple[np.ndarray, ...]:
        small, large = harm(results, less), harm(results, more)
        return large[0] - small[0], *small[1:], *large[1:]

    return every(
        **{f"{b} less than {a}": measured(partial(change, less=a, more=b), high=0.0) for a, b in pairwise(FIXED)}
    )


EXPERIMENT = Experiment(
    title="Sampling of clients: APFL against localized FedAvg, 2 classes a client, softmax regression",
    trial=trial,
    presets={
        "smoke": Preset(POINTS, 1, {"data": "digits", "clients": 10, "rounds": 3, "every": 1}, DIGITS),
        "quick": Preset(POINTS, 5, {"data": "digits", "clients": 20, "rounds": 100, "every": 5}, DIGITS),
        "paper": Preset(POINTS, 12, {"data": "mnist", "clients": 100, "rounds": 100, "every": 5}, MNIST, ("mnist",)),
    },
    claims=[
        Claim(
            "sampling-hurts-fedavg",
            "the smaller the share that takes part, the worse localized FedAvg's training loss and validation "
            "accuracy (means over the run)",
            every(
                loss=falling(curve(FEDAVG_LOCAL, LOSS, np.mean), "participation"),
                accuracy=rising(curve(FEDAVG_LOCAL, ACCURACY, np.mean), "participation"),
            ),
        ),
        Claim(
            "apfl-better-at-every-rate",
            "whatever the share, APFL is better than localized FedAvg in training loss and validation accuracy, at "
            "every alpha",
            every(
                **{
                    f"{m}, {part}": compare(late(m, series), late(FEDAVG_LOCAL, series))
                    for m in FIXED
                    for part, series, compare in (("loss", LOSS, lower), ("accuracy", ACCURACY, higher))
                }
            ),
        ),
        Claim(
            "larger-alpha-damps-in-training",
            "larger alpha diminishes the harm of sampling in training: less loss is added by 30 % instead of 70 %",
            damped(LOSS),
        ),
        Claim(
            "larger-alpha-damps-in-validation",
            "larger alpha diminishes the harm of sampling in generalisation: less accuracy is lost by 30 % instead of "
            "70 %",
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
    "after it, each mixing with its own copy of the common model.",
)
