"""Figure 1 (c, f) of `effect`: FedProx between LocalTrain and GlobalTrain, a network on images."""

from mooring.experiments.base.claims import Claim, every, higher, ordered
from mooring.experiments.base.experiment import Experiment
from mooring.experiments.base.results import of
from mooring.experiments.effect._images import trial
from mooring.experiments.effect._points import NAMES, NETWORK, START, line, presets
from mooring.experiments.effect._rounds import rounds_to
from mooring.experiments.effect.fig1_softmax import panels

ACCURACY = line("P2", NETWORK)


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
        {"repeats": 3, "rounds": 30, "clients": 10},
        {"repeats": 2, "rounds": 20, "clients": 20},
        "; a perceptron with 50 hidden units instead of CNN2",
    ),
    claims=[
        Claim(
            "c-global-best",
            "GlobalTrain performs best (P2, at every number of classes)",
            every(**{name: higher(ACCURACY["GlobalTrain"], ACCURACY[name]) for name in ("LocalTrain", *NAMES)}),
            note="On the stand-in GlobalTrain has the highest mean everywhere; with 10 classes its lead over FedProx, "
            "1 to 3 points, is within the interval of three repeats.",
        ),
        Claim(
            "c-moves-towards-global",
            "with increasing lambda FedProx moves from LocalTrain closer to GlobalTrain's accuracy (P2, every number "
            "of classes)",
            ordered([ACCURACY[name] for name in ("LocalTrain", *NAMES)]),
            note="On the stand-in it does with 2 classes. With 10 classes lambda = 2.5 is below the smaller ones after "
            "30 rounds, since it converges more slowly (see the last claim), not because it personalises less.",
        ),
        Claim(
            "f-larger-lambda-more-rounds",
            "larger lambda converges in more rounds (training loss within 5 % of its way, at every number of classes)",
            ordered([arrival(lam) for lam in NETWORK]),
        ),
    ],
    panels=panels(NETWORK, "cf"),
    reads="As effect-fig1-softmax, with batches of 16. Widths of the two convolutions are ours: 16 and 32.",
)
