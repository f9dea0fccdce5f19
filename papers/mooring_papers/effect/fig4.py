"""Figure 4 of `effect`: accuracy of the clients' own models on their own classes, and losses by rounds."""

from functools import partial

import numpy as np

from mooring_papers.base.claims import Claim, every, falling, higher, ordered
from mooring_papers.base.experiment import Experiment, Panel
from mooring_papers.base.results import of
from mooring_papers.effect._image_settings import NAMES, SOFTMAX, START, labels, line
from mooring_papers.effect._images import trial
from mooring_papers.effect._rounds import sound
from mooring_papers.effect.fig1_softmax import EXPERIMENT as FIG1

EARLY = 2
FEW, ALL = 2, 10
ACCURACY = line("P1", SOFTMAX)
LAST = {c: line("P1", SOFTMAX, classes=c) for c in (FEW, ALL)}


def share_of_way(values: dict, series: str) -> float:
    """Return the share of a curve's way, from uniform probabilities to its end, after the first rounds."""
    curve = np.asarray(values[series])
    if not sound(curve):
        return -1.0
    return float((START - curve[list(values["t"]).index(EARLY)]) / (START - curve[-1]))


def share_after_first_rounds(series: str, lam: float):
    return of(partial(share_of_way, series=series), method="FedProx", lam=lam)


EXPERIMENT = Experiment(
    title="Accuracy of the personal models on the clients' classes, and losses by rounds (softmax regression)",
    trial=trial,
    presets=FIG1.presets,
    claims=[
        Claim(
            "a-fewer-classes-easier",
            "the test accuracy on a client's own classes (P1) of LocalTrain, FedProx with every lambda and GlobalTrain "
            "rises from 10 to 6 and from 6 to 2 classes per client",
            every(**{name: falling(ref, "classes") for name, ref in ACCURACY.items()}),
            evidence="Under P1 a client is tested on its own classes, but the global model still chooses among all "
            "ten: its task does not become simpler, and training on two classes per client makes it slightly worse. In "
            "every row of the paper's own Table 3 GlobalTrain is less accurate with the fewest classes than with the "
            "most.",
        ),
        Claim(
            "a-global-and-large-lambda-at-low-heterogeneity",
            "with 10 classes per client the accuracy (P1) rises from LocalTrain over the small and the medium to the "
            "large lambda, and GlobalTrain's is above that of the small lambda",
            every(
                fedprox=ordered([LAST[ALL][name] for name in ("LocalTrain", *NAMES)]),
                globaltrain=higher(LAST[ALL]["GlobalTrain"], LAST[ALL]["small"]),
            ),
        ),
        Claim(
            "a-local-and-small-lambda-at-high-heterogeneity",
            "with 2 classes per client the accuracy (P1) rises from GlobalTrain over the large and the medium to the "
            "small lambda, and LocalTrain's is above that of the large lambda",
            every(
                fedprox=ordered([LAST[FEW][name] for name in ("GlobalTrain", *NAMES[::-1])]),
                localtrain=higher(LAST[FEW]["LocalTrain"], LAST[FEW]["large"]),
            ),
        ),
        *(
            Claim(
                f"b-small-lambda-faster-early-{name}",
                f"at every number of classes the share of the way of the {what} that 2 rounds take rises from the "
                "large over the medium to the small lambda",
                ordered([share_after_first_rounds(series, lam) for lam in SOFTMAX[::-1]]),
            )
            for name, what, series in (("caption", "training loss", "loss"), ("text", "test loss", "test loss"))
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
