"""Figure 1 of `apfl`: the more the clients' data differ, the worse one global model is for each of them."""

from mooring_papers.apfl._images import CLASSES, DIGITS, MNIST, run_softmax
from mooring_papers.apfl._methods import FEDAVG, SCAFFOLD, final, name_run, runs
from mooring_papers.base.claims import Claim, lower, rising
from mooring_papers.base.experiment import Experiment, Panel, Preset, grid
from mooring_papers.base.results import between

PERSONAL, GLOBAL = "APFL 0.5", (FEDAVG, SCAFFOLD)
METHODS = (PERSONAL, *GLOBAL)
LOSSES = {"training": "train loss", "generalization": "test loss"}
POINTS = grid(missing=[0, 4, 6, 8], run=runs(*METHODS))
DIVERSE = between(low=1)


def trial(seed: int, missing: int, run: str, data: str, clients: int, rounds: int) -> dict:
    """Losses in the last round when every client lacks `missing` of the ten classes; 0 is IID."""
    return run_softmax(seed, run, CLASSES - missing, data, clients, rounds, every=rounds)


EXPERIMENT = Experiment(
    title="Losses of the global and the personalized models against the diversity of the clients' data",
    trial=trial,
    presets={
        "smoke": Preset(
            grid(missing=[0, 8], run=runs(*METHODS)), 2, {"data": "digits", "clients": 20, "rounds": 5}, DIGITS
        ),
        "quick": Preset(POINTS, 4, {"data": "digits", "clients": 20, "rounds": 80}, DIGITS),
        "paper": Preset(POINTS, 5, {"data": "mnist", "clients": 100, "rounds": 100}, MNIST, ("mnist",)),
    },
    claims=[
        *(
            Claim(
                f"{name_run(m).lower()}-{kind}-loss-grows",
                f"the {kind} loss of {m} in the last round rises from each diversity (0, 4, 6, 8 of 10 classes that a "
                "client lacks) to the next",
                rising(final(m, series), "missing"),
            )
            for m in GLOBAL
            for kind, series in LOSSES.items()
        ),
        *(
            Claim(
                f"apfl-generalizes-better-than-{name_run(m).lower()}",
                f"the generalization loss of APFL in the last round is below that of {m} at every diversity above 0",
                lower(final(PERSONAL, "test loss", missing=DIVERSE), final(m, "test loss", missing=DIVERSE)),
            )
            for m in GLOBAL
        ),
    ],
    panels=[
        Panel("missing", {m: final(m, series) for m in METHODS}, "classes that a client lacks", f"{kind} loss")
        for kind, series in LOSSES.items()
    ],
    reads="The mixture, batches, ridge and rounds are not printed: alpha = 0.5, 20 rows, 1e-4 and 100; tau = 10, as in "
    "Figure 2. Every client is tested on classes of its own (P1), so that its task gets easier with fewer classes. The "
    "clients of a round are evaluated right after it, each mixing with its own copy of the global model.",
)
