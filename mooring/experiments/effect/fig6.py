"""Figure 6 of `effect`, first part: local epochs and rounds for clients' own models, softmax regression on images."""

from mooring.experiments.base.experiment import Experiment, Preset
from mooring.experiments.effect._images import trial
from mooring.experiments.effect._points import DIGITS, MNIST, SOFTMAX, STAND_IN
from mooring.experiments.effect._work import claim, panels, points

WORK = {"model": "softmax", "batch": 32}

EXPERIMENT = Experiment(
    title="Rounds against local epochs for the clients' own models (softmax regression)",
    trial=trial,
    presets={
        "smoke": Preset(
            points(SOFTMAX), repeats=1, settings=DIGITS | WORK | {"clients": 5, "rounds": 2}, data=STAND_IN
        ),
        "quick": Preset(points(SOFTMAX), repeats=4, settings=DIGITS | WORK | {"rounds": 30}, data=STAND_IN),
        "paper": Preset(
            points(SOFTMAX), repeats=2, settings=MNIST | WORK | {"rounds": 20}, data="MNIST", needs=("mnist",)
        ),
    },
    claims=[
        claim(
            "loss",
            SOFTMAX,
            "training loss of the clients' own models",
            note="Small lambda gains about twice as much as large lambda (on MNIST 5 against 2.5 times fewer rounds), "
            "but the large one's gain is not minimal: after one epoch even lambda = 2.5 is steps away from having "
            "solved its inner problem.",
        )
    ],
    panels=panels("loss", SOFTMAX, "training loss of the clients' own models"),
    reads="Six classes per client; local work is 1, 2, 5 or 10 epochs, as the paper prints no grid. The speed-up is "
    "how many times fewer rounds 10 epochs take to the loss that one epoch reaches at the end. The second part is "
    "effect-fig6-cnn.",
)
