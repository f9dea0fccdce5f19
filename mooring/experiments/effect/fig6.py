"""Figure 6 of `effect`, first part: local epochs and rounds for clients' own models, softmax regression on images."""

from mooring.experiments.base.experiment import Experiment, Preset
from mooring.experiments.effect._images import trial
from mooring.experiments.effect._points import DIGITS, MNIST, SOFTMAX, STAND_IN
from mooring.experiments.effect._work import claim, panels, points

WORK = {"model": "softmax", "batch": 32}
SWEPT = ("lam",)

EXPERIMENT = Experiment(
    title="Rounds against local epochs for the clients' own models (softmax regression)",
    trial=trial,
    presets={
        "smoke": Preset(
            points(SOFTMAX), 1, settings=DIGITS | WORK | {"clients": 5, "rounds": 2}, data=STAND_IN, swept=SWEPT
        ),
        "quick": Preset(points(SOFTMAX), 4, settings=DIGITS | WORK | {"rounds": 30}, data=STAND_IN, swept=SWEPT),
        "paper": Preset(
            points(SOFTMAX), 2, settings=MNIST | WORK | {"rounds": 20}, data="MNIST", needs=("mnist",), swept=SWEPT
        ),
    },
    claims=[
        claim(
            "loss",
            SOFTMAX,
            "training loss of the clients' own models",
        )
    ],
    panels=panels("loss", SOFTMAX, "training loss of the clients' own models"),
    reads="Six classes per client; local work is 2, 5 or 10 epochs. The speed-up is how many times fewer rounds 10 "
    "epochs take to the loss that 2 epochs reach at the end; 2 and 1.5 times are ours. The second part is "
    "effect-fig6-cnn.",
)
