"""Figure 1 of `apfl`: the more the clients' data differ, the worse one common model is for each of them."""

from mooring.experiments.apfl._images import CLASSES, DIGITS, MNIST, softmax_run
from mooring.experiments.apfl._methods import FEDAVG, SCAFFOLD, final, runs
from mooring.experiments.base.claims import Claim, every, lower, rising
from mooring.experiments.base.experiment import Experiment, Panel, Preset, grid

PERSONAL, GLOBAL = "APFL 0.5", (FEDAVG, SCAFFOLD)
METHODS = (PERSONAL, *GLOBAL)
LOSSES = {"training": "train loss", "generalisation": "test loss"}
POINTS = grid(missing=[0, 4, 6, 8], run=runs(*METHODS))


def trial(seed: int, missing: int, run: str, data: str, clients: int, rounds: int) -> dict:
    """Losses in the last round when every client lacks `missing` of the ten classes; 0 is IID."""
    return softmax_run(seed, run, CLASSES - missing, data, clients, rounds, every=rounds)


EXPERIMENT = Experiment(
    title="Losses of the common and the personalised models against the diversity of the clients' data",
    trial=trial,
    presets={
        "smoke": Preset(
            grid(missing=[0, 8], run=runs(*METHODS)), 2, {"data": "digits", "clients": 20, "rounds": 5}, DIGITS
        ),
        "quick": Preset(POINTS, 4, {"data": "digits", "clients": 20, "rounds": 80}, DIGITS),
        "paper": Preset(POINTS, 5, {"data": "mnist", "clients": 100, "rounds": 100}, MNIST, ("mnist",)),
    },
    claims=[
        Claim(
            "global-losses-grow",
            "training and generalisation losses of the global models of FedAvg and SCAFFOLD grow with the diversity",
            every(**{f"{m}, {k}": rising(final(m, LOSSES[k]), "missing") for m in GLOBAL for k in LOSSES}),
            note="FedAvg's losses are higher on the most diverse data than on IID ones, by 31 and 20 %, but do not "
            "rise beyond chance at every step on the way. SCAFFOLD's do not rise at all after 80 rounds: its control "
            "variates take away the drift, and one linear rule fits all ten digits of the stand-in.",
        ),
        Claim(
            "apfl-losses-do-not",
            "those of the personalised models do not: at every diversity they are at most 5 % above those on IID data",
            every(
                **{
                    k: lower(
                        final(PERSONAL, LOSSES[k], missing=lambda n: n > 0), final(PERSONAL, LOSSES[k], missing=0), 1.05
                    )
                    for k in LOSSES
                }
            ),
        ),
        Claim(
            "apfl-generalises-better",
            "on diverse data (4 or fewer classes a client) the personalised models generalise better than both global "
            "ones",
            every(
                **{
                    m: lower(
                        final(PERSONAL, "test loss", missing=lambda n: n >= 6),
                        final(m, "test loss", missing=lambda n: n >= 6),
                    )
                    for m in GLOBAL
                }
            ),
        ),
    ],
    panels=[
        Panel("missing", {m: final(m, series) for m in METHODS}, "classes that a client lacks", f"{kind} loss")
        for kind, series in LOSSES.items()
    ],
    reads="The mixture, batches and ridge are not printed: alpha = 0.5, 20 rows and 1e-4; tau = 10, as in Figure 2. "
    "Every client is tested on classes of its own (P1), so that its task gets easier with fewer classes.",
)
