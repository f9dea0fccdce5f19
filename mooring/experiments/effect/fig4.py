"""Figure 4 of `effect`: accuracy of the clients' own models on their own classes, and losses by rounds."""

import numpy as np

from mooring.experiments.base.claims import Claim, every, falling, higher, ordered
from mooring.experiments.base.experiment import Experiment, Panel
from mooring.experiments.base.results import of
from mooring.experiments.effect._images import trial
from mooring.experiments.effect._points import SOFTMAX, START, labels, line
from mooring.experiments.effect._rounds import sound
from mooring.experiments.effect.fig1_softmax import EXPERIMENT as FIG1

EARLY = 2
FEW, ALL = 2, 10
ACCURACY = line("P1", SOFTMAX)
LAST = {c: line("P1", SOFTMAX, classes=c) for c in (FEW, ALL)}


def gone(series: str, lam: float):
    """The share of a curve's way, from a blind guess to its end, that is behind it after the first rounds."""

    def share(values: dict) -> float:
        curve = np.asarray(values[series])
        if not sound(curve):
            return -1.0
        return float((START - curve[list(values["t"]).index(EARLY)]) / (START - curve[-1]))

    return of(share, method="FedProx", lam=lam)


EXPERIMENT = Experiment(
    title="Accuracy of the clients' own models on their own classes, and losses by rounds (softmax regression)",
    trial=trial,
    presets=FIG1.presets,
    claims=[
        Claim(
            "a-fewer-classes-easier",
            "the accuracy of all methods improves as the number of classes falls (P1)",
            every(**{name: falling(ref, "classes") for name, ref in ACCURACY.items()}),
            evidence="LocalTrain and FedProx improve at every lambda; GlobalTrain does not. Under P1 a client is "
            "tested on its own classes, but the common model still chooses among all ten: its task does not become "
            "simpler, and training on two classes per client makes it slightly worse. In every row of the paper's own "
            "Table 3 GlobalTrain is less accurate with the fewest classes than with the most.",
        ),
        Claim(
            "a-global-and-large-lambda-at-low-heterogeneity",
            "GlobalTrain and FedProx with larger lambda perform better at low heterogeneity (10 classes): both are "
            "above LocalTrain, and GlobalTrain is above the smallest lambda",
            every(
                globaltrain=higher(LAST[ALL]["GlobalTrain"], LAST[ALL]["LocalTrain"]),
                large=higher(LAST[ALL]["large"], LAST[ALL]["LocalTrain"]),
                smallest=higher(LAST[ALL]["GlobalTrain"], LAST[ALL]["small"]),
            ),
        ),
        Claim(
            "a-local-and-small-lambda-at-high-heterogeneity",
            "LocalTrain and FedProx with smaller lambda perform better as heterogeneity increases: at 2 classes both "
            "are above GlobalTrain, and the smallest lambda above the largest",
            every(
                localtrain=higher(LAST[FEW]["LocalTrain"], LAST[FEW]["GlobalTrain"]),
                small=higher(LAST[FEW]["small"], LAST[FEW]["GlobalTrain"]),
                smallest=higher(LAST[FEW]["small"], LAST[FEW]["large"]),
            ),
        ),
        Claim(
            "b-small-lambda-faster-early",
            "smaller lambda converges faster at the early stages: after 2 rounds a larger share of its way is behind "
            "it, in training loss (caption) and in test loss (text), at every number of classes",
            every(**{what: ordered([gone(what, lam) for lam in SOFTMAX[::-1]]) for what in ("loss", "test loss")}),
        ),
    ],
    panels=[
        Panel(
            "classes", labels(line(series, SOFTMAX), SOFTMAX), "classes per client", f"test accuracy, {series}", "(a)"
        )
        for series in ("P1", "P2")
    ]
    + [
        Panel(
            "t",
            labels(line(series, SOFTMAX, classes=c), SOFTMAX),
            "communication rounds",
            what,
            f"(b) {c} classes",
            log="y",
        )
        for series, what in (("loss", "training loss"), ("test loss", "test loss, P1"))
        for c in (FEW, ALL)
    ],
    reads="The runs of effect-fig1-softmax. Only a test on the client's own classes (P1) can make accuracy rise when "
    "classes fall; P2 is drawn beside it. The text of (b) speaks of testing loss, its caption of training loss: both "
    "are tested.",
)
