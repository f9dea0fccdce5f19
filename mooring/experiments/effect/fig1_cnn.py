"""Figure 1 (c, f) of `effect`: FedProx between LocalTrain and GlobalTrain, a network on images."""

from mooring.experiments.base.claims import Claim, every, higher, ordered
from mooring.experiments.base.experiment import Experiment
from mooring.experiments.base.results import of
from mooring.experiments.effect._images import trial
from mooring.experiments.effect._points import NAMES, NETWORK, START, line, presets
from mooring.experiments.effect._rounds import rounds_to
from mooring.experiments.effect.fig1_softmax import nearer, panels

ACCURACY = line("common P2", NETWORK)


def arrival(lam: float):
    return of(rounds_to("loss", 0.05, START), method="FedProx", lam=lam)


EXPERIMENT = Experiment(
    title="Test accuracy and training loss of a network between LocalTrain and GlobalTrain",
    trial=trial,
    presets=presets(
        NETWORK,
        "cnn2",
        "mlp",
        16,
        {"repeats": 4, "rounds": 160, "clients": 10},
        {"repeats": 3, "rounds": 20, "clients": 10, "samples": 300},
        "; a perceptron with 50 hidden units instead of CNN2",
    ),
    claims=[
        Claim(
            "c-global-best",
            "GlobalTrain performs best (common models, all classes, at every number of classes a client)",
            every(**{name: higher(ACCURACY["GlobalTrain"], ACCURACY[name]) for name in ("LocalTrain", *NAMES)}),
        ),
        Claim(
            "c-moves-towards-global",
            "with increasing lambda FedProx moves closer to GlobalTrain's accuracy: the largest is nearer to it than "
            "the smallest (common models, every number of classes)",
            nearer(ACCURACY),
        ),
        Claim(
            "f-larger-lambda-more-rounds",
            "larger lambda converges in more rounds (training loss within 5 % of its way, at every number of classes)",
            ordered([arrival(lam) for lam in NETWORK]),
        ),
    ],
    panels=panels(NETWORK, "cf"),
    reads="As effect-fig1-softmax, with batches of 16. Widths of the two convolutions are ours: 16 and 32. Clients and "
    "rows are not printed: 10 with 300 each, as for Table 3.",
)
