"""Figure 1 of `apfl`: the more the clients' data differ, the worse one common model is for each of them."""

from functools import partial
from itertools import pairwise

import numpy as np

from mooring.experiments.apfl._images import CLASSES, DIGITS, MNIST, softmax_run
from mooring.experiments.apfl._methods import FEDAVG, SCAFFOLD, final, runs
from mooring.experiments.base.claims import Claim, Verdict, every, lower, measured
from mooring.experiments.base.experiment import Experiment, Panel, Preset, grid
from mooring.experiments.base.results import Results

PERSONAL, GLOBAL = "APFL 0.5", (FEDAVG, SCAFFOLD)
METHODS = (PERSONAL, *GLOBAL)
LOSSES = {"training": "train loss", "generalisation": "test loss"}
POINTS = grid(missing=[0, 4, 6, 8], run=runs(*METHODS))


def trial(seed: int, missing: int, run: str, data: str, clients: int, rounds: int) -> dict:
    """Losses in the last round when every client lacks `missing` of the ten classes; 0 is IID."""
    return softmax_run(seed, run, CLASSES - missing, data, clients, rounds, every=rounds)


def diverges(method: str, series: str):
    """How much higher a method's loss is than the personalised models' rises from each diversity to the next."""

    def check(results: Results) -> Verdict:
        places = sorted({trial.point["missing"] for trial in results.trials})

        def rise(results: Results, first: int, second: int) -> tuple[np.ndarray, ...]:
            losses = [results.one(final(m, series, missing=k)) for k in (first, second) for m in (method, PERSONAL)]
            return (losses[2] - losses[3]) - (losses[0] - losses[1]), *losses

        steps = {f"{a} to {b}": measured(partial(rise, first=a, second=b), low=0.0) for a, b in pairwise(places)}
        return every(**steps)(results)

    return check


EXPERIMENT = Experiment(
    title="Losses of the common and the personalised models against the diversity of the clients' data",
    trial=trial,
    presets={
        "smoke": Preset(
            grid(missing=[0, 8], run=runs(*METHODS)), 2, {"data": "digits", "clients": 20, "rounds": 5}, DIGITS
        ),
        "quick": Preset(POINTS, 4, {"data": "digits", "clients": 20, "rounds": 80}, DIGITS),
        "paper": Preset(POINTS, 5, {"data": "mnist", "clients": 100, "rounds": 100}, MNIST, ("mnist",)),
    },
    claims=[
        Claim(
            "global-losses-grow",
            "training and generalisation losses of the global models of FedAvg and SCAFFOLD diverge with the "
            "diversity: on equal tasks their distance from the personalised models' grows from each diversity to the "
            "next",
            every(**{f"{m}, {k}": diverges(m, LOSSES[k]) for m in GLOBAL for k in LOSSES}),
        ),
        Claim(
            "apfl-losses-do-not",
            "those of the personalised models do not: on equal tasks they are below those of both global models, at "
            "every diversity",
            every(
                **{
                    f"{m}, {k}": lower(
                        final(PERSONAL, LOSSES[k], missing=lambda n: n > 0),
                        final(m, LOSSES[k], missing=lambda n: n > 0),
                    )
                    for m in GLOBAL
                    for k in LOSSES
                }
            ),
        ),
    ],
    panels=[
        Panel("missing", {m: final(m, series) for m in METHODS}, "classes that a client lacks", f"{kind} loss")
        for kind, series in LOSSES.items()
    ],
    reads="The mixture, batches and ridge are not printed: alpha = 0.5, 20 rows and 1e-4; tau = 10, as in Figure 2. "
    "Every client is tested on classes of its own (P1), so that its task gets easier with fewer classes: losses are "
    "compared on equal tasks. The clients of a round are evaluated right after it, each mixing with its own copy of "
    "the common model.",
)
