"""Figure 2 of `apfl`: APFL with fixed mixtures against FedAvg and SCAFFOLD, from two classes per client to IID data."""

from functools import partial
from itertools import pairwise

import numpy as np

from mooring_papers.apfl._images import CLASSES, DIGITS, MNIST, run_softmax
from mooring_papers.apfl._methods import (
    ACCURACY,
    ALPHAS,
    FEDAVG,
    FEDAVG_LOCAL,
    FIXED,
    LOSS,
    SCAFFOLD,
    SCAFFOLD_LOCAL,
    best,
    curve,
    every_pair,
    final,
    percent,
    runs,
)
from mooring_papers.base.claims import LINEAR, Claim, every, higher, measured, most, ordered, straightness
from mooring_papers.base.experiment import Cell, Experiment, Panel, Preset, Table, grid
from mooring_papers.base.results import Results

METHODS = (*FIXED, FEDAVG, FEDAVG_LOCAL, SCAFFOLD, SCAFFOLD_LOCAL)
OTHERS = (FEDAVG, FEDAVG_LOCAL, SCAFFOLD, SCAFFOLD_LOCAL)
SPLITS = {2: "2 classes per client", 4: "4 classes per client", CLASSES: "IID"}
PANELS = {2: "a", 4: "b", CLASSES: "c"}
BY_ALPHA = (FEDAVG, *FIXED)  # alpha = 0 is FedAvg
POINTS = grid(classes=list(SPLITS), run=runs(*METHODS))


def trial(seed: int, classes: int, run: str, data: str, clients: int, rounds: int, every: int) -> dict:
    return run_softmax(seed, run, classes, data, clients, rounds, every)


def linearity_in_alpha(results: Results, classes: int) -> tuple[np.ndarray, ...]:
    """By repeat: the squared correlation of 1 - alpha and the training loss, negative where the loss falls with it."""
    losses = np.stack([results.repeats(final(m, LOSS, classes=classes)) for m in BY_ALPHA], 1)
    share = 1 - np.array([0.0, *ALPHAS])
    return np.array([straightness(share, row) for row in losses]), losses


def lost_advantage(results: Results, more: int, less: int) -> tuple[np.ndarray, ...]:
    """By how much the accuracy of alpha = 0.25 above that of FedAvg's global model falls from one split to another."""
    accuracies = [results.repeats(final(m, ACCURACY, classes=k)) for k in (more, less) for m in (FIXED[0], FEDAVG)]
    return (accuracies[0] - accuracies[1]) - (accuracies[2] - accuracies[3]), *accuracies


def rises_and_falls(classes: int):
    """Accuracy rises from one alpha to a larger one, and falls from one to a larger one."""
    pairs = [(a, b) for i, a in enumerate(BY_ALPHA) for b in BY_ALPHA[i + 1 :]]

    def any_pair(first: int, second: int):
        checks = {
            f"{pair[first]} below {pair[second]}": higher(
                final(pair[second], ACCURACY, classes=classes), final(pair[first], ACCURACY, classes=classes)
            )
            for pair in pairs
        }
        return most(1 / len(pairs), **checks)

    return every(rises=any_pair(0, 1), falls=any_pair(1, 0))


EXPERIMENT = Experiment(
    title="APFL with fixed mixtures against FedAvg (alpha = 0) and SCAFFOLD, softmax regression",
    trial=trial,
    presets={
        "smoke": Preset(POINTS, 1, {"data": "digits", "clients": 10, "rounds": 2, "every": 1}, DIGITS),
        "quick": Preset(POINTS, 8, {"data": "digits", "clients": 20, "rounds": 100, "every": 20}, DIGITS),
        "paper": Preset(POINTS, 5, {"data": "mnist", "clients": 100, "rounds": 100, "every": 10}, MNIST, ("mnist",)),
    },
    claims=[
        Claim(
            "global-losses-high",
            "with 2 and with 4 classes per client the training losses of both global models are above that of every "
            "APFL model",
            every(**{SPLITS[k]: every_pair(LOSS, FIXED, (FEDAVG, SCAFFOLD), classes=k) for k in (2, 4)}),
        ),
        *(
            Claim(
                f"{PANELS[k]}-larger-alpha-lower-loss",
                f"{name}: the training loss falls from alpha = 0.25 to 0.5 to 0.75",
                ordered([final(m, LOSS, classes=k) for m in reversed(FIXED)]),
            )
            for k, name in SPLITS.items()
        ),
        *(
            Claim(
                f"{PANELS[k]}-loss-linear-in-alpha",
                f"{name}: training losses of alpha = 0 (FedAvg's global model), 0.25, 0.5 and 0.75 lie on a falling "
                f"line (squared correlation of at least {LINEAR})",
                measured(partial(linearity_in_alpha, classes=k), low=LINEAR),
            )
            for k, name in SPLITS.items()
        ),
        *(
            Claim(
                f"{PANELS[k]}-alpha-025-best",
                f"{SPLITS[k]}: the validation accuracy of alpha = 0.25 is above those of 0.5 and 0.75",
                best(ACCURACY, FIXED[0], FIXED, classes=k),
            )
            for k in (2, 4)
        ),
        *(
            Claim(
                f"{PANELS[k]}-alpha-025-outperforms-others",
                f"{SPLITS[k]}: the validation accuracy of alpha = 0.25 is above those of the global models of FedAvg "
                "and SCAFFOLD and of their localized versions",
                best(ACCURACY, FIXED[0], (FIXED[0], *OTHERS), classes=k),
            )
            for k in (2, 4)
        ),
        Claim(
            "advantage-vanishes",
            "the accuracy of alpha = 0.25 above that of FedAvg's global model falls from 2 to 4 classes per client and "
            "from there to IID data",
            every(
                **{
                    f"{SPLITS[a]} to {SPLITS[b]}": measured(partial(lost_advantage, more=a, less=b), low=0.0)
                    for a, b in pairwise(SPLITS)
                }
            ),
        ),
        Claim(
            "localized-preferable-at-iid",
            "on IID data the validation accuracy of localized FedAvg or of localized SCAFFOLD is above that of every "
            "APFL model",
            most(
                0.5, **{m: every_pair(ACCURACY, (m,), FIXED, classes=CLASSES) for m in (FEDAVG_LOCAL, SCAFFOLD_LOCAL)}
            ),
        ),
        Claim(
            "validation-not-monotone",
            "on at least one of the three splits validation accuracy rises between two values of alpha (0 being "
            "FedAvg's global model) and falls between two others",
            most(1 / 3, **{name: rises_and_falls(k) for k, name in SPLITS.items()}),
        ),
        Claim(
            "larger-alpha-preferred",
            "with 2 classes per client validation accuracy rises from alpha = 0.25 to 0.5 to 0.75",
            ordered([final(m, ACCURACY, classes=2) for m in FIXED]),
        ),
    ],
    panels=[
        *(
            Panel("round", {m: curve(m, LOSS, classes=k) for m in METHODS}, "rounds", "training loss", name, log="y")
            for k, name in SPLITS.items()
        ),
        *(
            Panel("round", {m: curve(m, ACCURACY, classes=k) for m in METHODS}, "rounds", "validation accuracy", name)
            for k, name in SPLITS.items()
        ),
    ],
    tables=[
        Table(
            "Validation accuracy in the last round, %",
            tuple(SPLITS.values()),
            {m: [Cell(percent(m, classes=k)) for k in SPLITS] for m in METHODS},
        )
    ],
    reads="Accuracies are P1: every client is tested on its own classes. Without projection and after finitely many "
    "rounds (without either, every mixture tends to the client's local fit). Batches of 20 rows and ridge 1e-4 are "
    "ours; the step size is 0.1/(1 + k/100) in local step k. The clients of a round are evaluated right after it, each "
    "mixing with its own copy of the global model. Section 5 and Appendix B.2 disagree on which alpha is best with 2 "
    "classes per client: both sentences are claims.",
)
