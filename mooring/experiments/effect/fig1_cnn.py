"""Figure 1 (c, f) of `effect`: FedProx between LocalTrain and GlobalTrain, a network on images."""

from dataclasses import replace

from mooring.experiments.base.claims import Claim, every, higher, ordered
from mooring.experiments.base.experiment import Experiment
from mooring.experiments.base.results import of
from mooring.experiments.effect._points import NAMES, NETWORK, START
from mooring.experiments.effect._rounds import rounds_to
from mooring.experiments.effect._tables import FIRST, presets, ref, trial
from mooring.experiments.effect.fig1_softmax import NEAR, nearer, panels

METHODS = {"LocalTrain": ("LocalTrain", ""), **{name: ("FedProx", name) for name in NAMES}}
METHODS |= {"GlobalTrain": ("GlobalTrain", "")}


def line(series: str, **fixed) -> dict:
    """References to a series of every method, from LocalTrain over growing lambda to GlobalTrain."""
    return {name: ref(series, method, row=FIRST, **fixed) for name, method in METHODS.items()}


def arrival(size: str):
    return of(rounds_to("loss", NEAR, START), row=FIRST, method="FedProx", size=size)


ACCURACY = line("common P2")
SIZES = presets(list(METHODS.values()), [FIRST])
EXPERIMENT = Experiment(
    title="Test accuracy and training loss of a network between LocalTrain and GlobalTrain",
    trial=trial,
    presets=SIZES | {"paper": replace(SIZES["paper"], data="MNIST; P1 and P2")},
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
            "larger lambda converges in more rounds (training loss within 1 % of its way, which is ours, at every "
            "number of classes)",
            ordered([arrival(size) for size in NAMES]),
        ),
    ],
    panels=panels(line, NETWORK, "cf"),
    reads="As effect-fig1-softmax, with batches of 16: the runs of Table 3's first row. Widths of the two convolutions "
    "are ours: 16 and 32. Clients and rows are not printed: 10 with 100 rows each.",
)
