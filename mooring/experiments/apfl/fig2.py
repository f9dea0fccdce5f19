"""Figure 2 of `apfl`: APFL with fixed mixtures against FedAvg and SCAFFOLD, from two classes a client to IID data."""

from mooring.experiments.apfl._images import CLASSES, DIGITS, MNIST, softmax_run
from mooring.experiments.apfl._methods import (
    ACCURACY,
    FEDAVG,
    FEDAVG_LOCAL,
    FIXED,
    LOSS,
    SCAFFOLD,
    SCAFFOLD_LOCAL,
    best,
    curve,
    final,
    percent,
    points_above,
    runs,
)
from mooring.experiments.base.claims import Claim, every, higher, lower, ordered
from mooring.experiments.base.experiment import Cell, Experiment, Panel, Preset, Table, grid

METHODS = (*FIXED, FEDAVG, FEDAVG_LOCAL, SCAFFOLD, SCAFFOLD_LOCAL)
SPLITS = {2: "2 classes a client", 4: "4 classes a client", CLASSES: "IID"}
SHORT = f"{MNIST}; 50 rounds instead of 100"
POINTS = grid(classes=list(SPLITS), run=runs(*METHODS))


def trial(seed: int, classes: int, run: str, data: str, clients: int, rounds: int, every: int) -> dict:
    return softmax_run(seed, run, classes, data, clients, rounds, every)


def unequal(check):
    """On the two unequal splits."""
    return every(**{SPLITS[k]: check(k) for k in (2, 4)})


EXPERIMENT = Experiment(
    title="APFL with fixed mixtures against FedAvg (alpha = 0) and SCAFFOLD, softmax regression",
    trial=trial,
    presets={
        "smoke": Preset(POINTS, 1, {"data": "digits", "clients": 10, "rounds": 2, "every": 1}, DIGITS),
        "quick": Preset(POINTS, 4, {"data": "digits", "clients": 20, "rounds": 100, "every": 20}, DIGITS),
        "paper": Preset(POINTS, 3, {"data": "mnist", "clients": 100, "rounds": 50, "every": 10}, SHORT, ("mnist",)),
    },
    claims=[
        Claim(
            "larger-alpha-lower-loss",
            "the larger alpha, the lower the training loss; with smaller alpha it nears that of FedAvg's global model",
            every(
                **{SPLITS[k]: ordered([final(m, LOSS, classes=k) for m in (*reversed(FIXED), FEDAVG)]) for k in SPLITS}
            ),
            note="It holds with 2 and with 4 classes a client. On IID data alpha = 0.25 ends slightly above FedAvg: "
            "there the common model is the better fit, and the mixture trains by alpha squared of a step only.",
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
            "with 2 and with 4 classes a client alpha = 0.25 has the best validation accuracy of all, localized "
            "models too",
            unequal(lambda k: best(ACCURACY, FIXED[0], METHODS, classes=k)),
            note="On MNIST alpha = 0.25 is the most accurate mixture with 4 classes a client (94.7, then 94.5 and 94.1 "
            "%), with 2 classes 0.5 is, by a fifth of a point. On the stand-in no alpha is the best beyond chance. The "
            "paper itself prefers larger ones for the same data in its Appendix B.2.",
        ),
        Claim(
            "validation-not-monotone",
            "validation accuracy is not monotone in alpha: on unequal data it rises from 0 to 0.25 and falls from "
            "there to 0.75",
            unequal(
                lambda k: every(
                    rises=higher(final(FIXED[0], ACCURACY, classes=k), final(FEDAVG, ACCURACY, classes=k)),
                    falls=higher(final(FIXED[0], ACCURACY, classes=k), final(FIXED[-1], ACCURACY, classes=k)),
                )
            ),
            note="It rises from 0 to 0.25 beyond chance, by 8 points on MNIST and 4 on the stand-in with 2 classes. "
            "From there to 0.75 it falls beyond chance with 4 classes on MNIST and on IID data; with 2 classes it is "
            "level within the interval.",
        ),
        Claim(
            "large-gap-at-two-classes",
            "with 2 classes a client every APFL model is more than 10 points more accurate than FedAvg's global model",
            every(**{m: higher(final(m, ACCURACY, classes=2), points_above(FEDAVG, 10, classes=2)) for m in FIXED}),
            note="FedAvg is at 90 % on MNIST and at 95 % on the stand-in even with 2 classes a client, which leaves 10 "
            "and 5 points to gain; every APFL model gains 8 and 4 of them.",
        ),
        Claim(
            "no-gap-at-iid",
            "the advantage vanishes on IID data: no APFL model is 2 points more accurate than FedAvg's global model",
            every(
                **{
                    m: lower(final(m, ACCURACY, classes=CLASSES), points_above(FEDAVG, 2, classes=CLASSES))
                    for m in FIXED
                }
            ),
        ),
        Claim(
            "localized-preferable-at-iid",
            "on IID data the localized models of FedAvg and SCAFFOLD are more accurate than APFL's",
            every(
                **{
                    f"{local} above {m}": higher(
                        final(local, ACCURACY, classes=CLASSES), final(m, ACCURACY, classes=CLASSES)
                    )
                    for local in (FEDAVG_LOCAL, SCAFFOLD_LOCAL)
                    for m in FIXED
                }
            ),
            note="They are more accurate than alpha = 0.5 and 0.75, by 2 and 4 points; than alpha = 0.25 by a third of "
            "a point on MNIST and half a point on the stand-in, which is within the interval.",
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
    "the step size falls as 0.1/(1 + 0.01 k).",
)
