"""Figure 6 of `effect`, second part: local epochs and rounds for the global model, a network on images."""

from mooring_papers.base.experiment import Experiment, Preset
from mooring_papers.effect._image_settings import DIGITS, MNIST, NETWORK, STAND_IN
from mooring_papers.effect._images import trial
from mooring_papers.effect._local_epochs import claims, panels, points

QUICK = DIGITS | {"model": "mlp", "batch": 16, "clients": 10}
SWEPT = ("lam",)
DATA = STAND_IN + "; a perceptron with 50 hidden units instead of CNN2"

EXPERIMENT = Experiment(
    title="Rounds against local epochs for the global model (network)",
    trial=trial,
    presets={
        "smoke": Preset(
            points(NETWORK), repeats=1, settings=QUICK | {"rounds": 2, "clients": 5}, data=DATA, swept=SWEPT
        ),
        "quick": Preset(points(NETWORK), repeats=3, settings=QUICK | {"rounds": 30}, data=DATA, swept=SWEPT),
        "paper": Preset(
            points(NETWORK),
            repeats=5,
            settings=MNIST | {"model": "cnn2", "batch": 16, "clients": 20, "rounds": 20},
            data="MNIST",
            needs=("mnist",),
        ),
    },
    claims=claims("common loss", NETWORK, "training loss of the global model"),
    panels=panels("common loss", NETWORK, "training loss of the global model"),
    reads="As effect-fig6, for the global model of a network.",
)
