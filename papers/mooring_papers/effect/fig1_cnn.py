"""Figure 1 (c, f) of `effect`: FedProx between LocalTrain and GlobalTrain, a network on images."""

from mooring_papers.base.claims import Claim, every, higher, ordered
from mooring_papers.base.experiment import Experiment
from mooring_papers.base.results import of
from mooring_papers.effect._image_settings import NAMES, NETWORK, START
from mooring_papers.effect._rounds import rounds_to
from mooring_papers.effect._tables import FIRST, presets, ref, trial
from mooring_papers.effect.fig1_softmax import NEAR, nearer, panels

METHODS = {"LocalTrain": ("LocalTrain", ""), **{name: ("FedProx", name) for name in NAMES}}
METHODS |= {"GlobalTrain": ("GlobalTrain", "")}


def line(series: str, **fixed) -> dict:
    """References to a series of every method, from LocalTrain over growing lambda to GlobalTrain."""
    return {name: ref(series, method, row=FIRST, **fixed) for name, method in METHODS.items()}


def arrival(size: str):
    return of(rounds_to("loss", NEAR, START), row=FIRST, method="FedProx", size=size)


ACCURACY = line("common P2")
EXPERIMENT = Experiment(
    title="Test accuracy and training loss of a network between LocalTrain and GlobalTrain",
    trial=trial,
    presets=presets(list(METHODS.values())),
    claims=[
        Claim(
            "c-global-best",
            "at every number of classes per client (2, 6, 10) the test accuracy of GlobalTrain on all classes is above "
            "that of LocalTrain and of FedProx with every lambda (global models)",
            every(**{name: higher(ACCURACY["GlobalTrain"], ACCURACY[name]) for name in ("LocalTrain", *NAMES)}),
        ),
        Claim(
            "c-moves-towards-global",
            "at every number of classes the test accuracy of FedProx comes nearer to GlobalTrain's from the small to "
            "the medium and from the medium to the large lambda (global models)",
            nearer(ACCURACY),
        ),
        Claim(
            "f-larger-lambda-more-rounds",
            "at every number of classes the rounds until the training loss is within 1 % of its way to its end rise "
            "from the small over the medium to the large lambda",
            ordered([arrival(size) for size in NAMES]),
        ),
    ],
    panels=panels(line, NETWORK, "cf"),
    reads="As effect-fig1-softmax, with batches of 16: the runs of Table 3's first row. Widths of the two convolutions "
    "are ours: 16 and 32. Clients and rows are not printed: 10 with 100 rows each.",
)
