"""Figure 6 of `effect`, first part: local epochs and rounds for clients' own models, softmax regression on images."""

from mooring_papers.base.experiment import Experiment, Preset
from mooring_papers.effect._image_settings import DIGITS, MNIST, SOFTMAX, STAND_IN
from mooring_papers.effect._images import trial
from mooring_papers.effect._local_epochs import claims, panels, points

WORK = {"model": "softmax", "batch": 32}
SWEPT = ("lam",)

EXPERIMENT = Experiment(
    title="Rounds against local epochs for the personal models (softmax regression)",
    trial=trial,
    presets={
        "smoke": Preset(
            points(SOFTMAX), 1, settings=DIGITS | WORK | {"clients": 5, "rounds": 2}, data=STAND_IN, swept=SWEPT
        ),
        "quick": Preset(points(SOFTMAX), 4, settings=DIGITS | WORK | {"rounds": 30}, data=STAND_IN, swept=SWEPT),
        "paper": Preset(
            points(SOFTMAX), 10, settings=MNIST | WORK | {"rounds": 20}, data="MNIST", needs=("mnist",), swept=SWEPT
        ),
    },
    claims=claims("loss", SOFTMAX, "training loss of the personal models"),
    panels=panels("loss", SOFTMAX, "training loss of the personal models"),
    reads="Six classes per client; local work is 2, 5 or 10 epochs. The ratio of rounds is how many times fewer 10 "
    "epochs take to the loss that 2 epochs reach at the end. Clients, rows per client and epochs are not printed: 20 "
    "clients with 100 rows. The second part is effect-fig6-cnn.",
)
