"""Figure 2 of `apfl`: APFL with fixed mixtures against FedAvg and SCAFFOLD, from two classes a client to IID data."""

from functools import partial

import numpy as np

from mooring.experiments.apfl._images import CLASSES, DIGITS, MNIST, softmax_run
from mooring.experiments.apfl._methods import (
    ACCURACY,
    FEDAVG,
    FEDAVG_LOCAL,
    FIXED,
    LOSS,
    SCAFFOLD,
    SCAFFOLD_LOCAL,
    curve,
    final,
    percent,
    runs,
)
from mooring.experiments.base.claims import Claim, every, higher, lower, measured, most, not_worse, ordered
from mooring.experiments.base.experiment import Cell, Experiment, Panel, Preset, Table, grid
from mooring.experiments.base.results import Results

METHODS = (*FIXED, FEDAVG, FEDAVG_LOCAL, SCAFFOLD, SCAFFOLD_LOCAL)
OTHERS = (FEDAVG, FEDAVG_LOCAL, SCAFFOLD, SCAFFOLD_LOCAL)
SPLITS = {2: "2 classes a client", 4: "4 classes a client", CLASSES: "IID"}
POINTS = grid(classes=list(SPLITS), run=runs(*METHODS))


def trial(seed: int, classes: int, run: str, data: str, clients: int, rounds: int, every: int) -> dict:
    return softmax_run(seed, run, classes, data, clients, rounds, every)


def unequal(check):
    """On the two unequal splits."""
    return every(**{SPLITS[k]: check(k) for k in (2, 4)})


def loses(results: Results, method: str) -> tuple[np.ndarray, ...]:
    """What a method's lead over FedAvg's global model loses from 2 classes a client to IID data."""
    found = [results.one(final(m, ACCURACY, classes=k)) for k in (2, CLASSES) for m in (method, FEDAVG)]
    return (found[0] - found[1]) - (found[2] - found[3]), *found


EXPERIMENT = Experiment(
    title="APFL with fixed mixtures against FedAvg (alpha = 0) and SCAFFOLD, softmax regression",
    trial=trial,
    presets={
        "smoke": Preset(POINTS, 1, {"data": "digits", "clients": 10, "rounds": 2, "every": 1}, DIGITS),
        "quick": Preset(POINTS, 8, {"data": "digits", "clients": 20, "rounds": 100, "every": 20}, DIGITS),
        "paper": Preset(POINTS, 3, {"data": "mnist", "clients": 100, "rounds": 100, "every": 10}, MNIST, ("mnist",)),
    },
    claims=[
        Claim(
            "larger-alpha-lower-loss",
            "the larger alpha, the lower the training loss; with smaller alpha it nears that of FedAvg's global model",
            every(
                **{SPLITS[k]: ordered([final(m, LOSS, classes=k) for m in (*reversed(FIXED), FEDAVG)]) for k in SPLITS}
            ),
        ),
        Claim(
            "global-losses-high",
            "on unequal data the global models have higher training losses than every APFL model",
            unequal(
                lambda k: every(
                    **{
                        f"{m} below {g}": lower(final(m, LOSS, classes=k), final(g, LOSS, classes=k))
                        for m in FIXED
                        for g in (FEDAVG, SCAFFOLD)
                    }
                )
            ),
        ),
        Claim(
            "alpha-025-generalises-best",
            "with 2 and with 4 classes a client the best validation accuracy is that of alpha = 0.25, above the global "
            "models and their localized versions (no other alpha is better beyond the interval)",
            unequal(
                lambda k: every(
                    **{m: higher(final(FIXED[0], ACCURACY, classes=k), final(m, ACCURACY, classes=k)) for m in OTHERS},
                    **{
                        m: not_worse(higher(final(FIXED[0], ACCURACY, classes=k), final(m, ACCURACY, classes=k)))
                        for m in FIXED[1:]
                    },
                )
            ),
            evidence="For the same data Appendix B.2 says that larger alpha are preferred.",
        ),
        Claim(
            "validation-not-monotone",
            "validation accuracy is not monotone in alpha: on one of the unequal splits it rises from 0 to 0.25 and "
            "falls from there to 0.75",
            most(
                0.5,
                **{
                    SPLITS[k]: every(
                        rises=higher(final(FIXED[0], ACCURACY, classes=k), final(FEDAVG, ACCURACY, classes=k)),
                        falls=higher(final(FIXED[0], ACCURACY, classes=k), final(FIXED[-1], ACCURACY, classes=k)),
                    )
                    for k in (2, 4)
                },
            ),
        ),
        Claim(
            "gap-at-two-classes",
            "one benefits most where data are unequal: with 2 classes a client every APFL model is more accurate than "
            "FedAvg's global model",
            every(**{m: higher(final(m, ACCURACY, classes=2), final(FEDAVG, ACCURACY, classes=2)) for m in FIXED}),
        ),
        Claim(
            "advantage-vanishes-at-iid",
            "towards IID data the advantage vanishes: every APFL model gains less over FedAvg's global model than with "
            "2 classes a client, and on IID data none is more accurate than FedAvg's localized model beyond the "
            "interval",
            every(
                **{f"{m} gains less": measured(partial(loses, method=m), low=0.0) for m in FIXED},
                **{
                    f"{m} not above": not_worse(
                        higher(final(FEDAVG_LOCAL, ACCURACY, classes=CLASSES), final(m, ACCURACY, classes=CLASSES))
                    )
                    for m in FIXED
                },
            ),
        ),
        Claim(
            "localized-preferable-at-iid",
            "on IID data the localized models of FedAvg or of SCAFFOLD are more accurate than each of APFL's",
            every(
                **{
                    m: most(
                        0.5,
                        **{
                            local: higher(final(local, ACCURACY, classes=CLASSES), final(m, ACCURACY, classes=CLASSES))
                            for local in (FEDAVG_LOCAL, SCAFFOLD_LOCAL)
                        },
                    )
                    for m in FIXED
                }
            ),
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
    "rounds (without either, every mixture tends to the client's own fit). Batches of 20 rows and ridge 1e-4 are ours; "
    "the step size is 0.1, 1 % less after every epoch of a client. The clients of a round are evaluated right after "
    "it, each mixing with its own copy of the common model.",
)
