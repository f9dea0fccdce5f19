"""Figure 5 of `apfl`: natural heterogeneity, one client per author; adaptive APFL against localized FedAvg."""

from mooring.core.types import JsonObject
from mooring.data.clients import Clients
from mooring.data.image_datasets import load_image_dataset
from mooring_papers.apfl._images import perceptron
from mooring_papers.apfl._methods import (
    ACCURACY,
    ADAPTIVE,
    FEDAVG,
    FEDAVG_LOCAL,
    LOSS,
    VARIANT,
    algorithm,
    curve,
    has_global_model,
    late,
    result_table,
    runs,
)
from mooring_papers.base.claims import Claim, higher, near
from mooring_papers.base.experiment import Experiment, Panel, Preset, grid
from mooring_papers.generators import Prototypes
from mooring_papers.training_curves import to_single_precision, train_and_evaluate

METHODS = (ADAPTIVE, VARIANT, FEDAVG_LOCAL, FEDAVG)
SAME_LOSS = 0.0023  # the largest error of a training loss that the paper prints for these networks (Table 3)
POINTS = grid(run=runs(*METHODS))
STYLE = 0.7  # of the generated authors, against noise of 1: classes are 5 apart


def authors(seed: int, data: str, clients: int) -> Clients:
    """`clients` authors of real digits (0: all with at least 20), or generated ones."""
    if data == "prototypes":
        return to_single_precision(Prototypes(clients, samples=60, style=STYLE).make(seed))
    return load_image_dataset(data, clients=clients or None, least=20, protocol="P1", seed=seed)


def trial(seed: int, run: str, data: str, clients: int, hidden: list[int], rounds: int, every: int) -> dict:
    """A tenth of the clients per round, one epoch each."""
    federation = authors(seed, data, clients)
    task, method = perceptron(federation, tuple(hidden)), algorithm(run, first_alpha=0.5, epochs=1)
    options: JsonObject = {"rounds": rounds, "every": every, "seed": seed, "participation": 0.1, "online": True}
    return train_and_evaluate(method, task, federation, common=has_global_model(run), **options)


GENERATED = "generated authors (class prototypes with a style each) instead of EMNIST digits by author; P1"
EXPERIMENT = Experiment(
    title="APFL with adaptive mixtures against localized FedAvg on digits by author, MLP",
    trial=trial,
    presets={
        "smoke": Preset(
            POINTS, 2, {"data": "prototypes", "clients": 20, "hidden": [16], "rounds": 4, "every": 2}, GENERATED
        ),
        "quick": Preset(
            POINTS, 5, {"data": "prototypes", "clients": 100, "hidden": [32, 32], "rounds": 250, "every": 10}, GENERATED
        ),
        "paper": Preset(
            POINTS,
            5,
            {"data": "mnist_writers", "clients": 0, "hidden": [200, 200], "rounds": 250, "every": 10},
            "MNIST by its 539 writers; P1",
            ("mnist",),
        ),
    },
    claims=[
        Claim(
            "same-training-loss",
            f"the training losses of APFL with adaptive alpha (Eq. 6) and of localized FedAvg are within {SAME_LOSS} "
            "of each other (last five evaluated rounds)",
            near(late(ADAPTIVE, LOSS), late(FEDAVG_LOCAL, LOSS), SAME_LOSS),
        ),
        Claim(
            "better-validation",
            "the validation accuracy of APFL with adaptive alpha (Eq. 6) is above that of localized FedAvg (last five "
            "evaluated rounds)",
            higher(late(ADAPTIVE, ACCURACY), late(FEDAVG_LOCAL, ACCURACY)),
        ),
    ],
    panels=[
        Panel("round", {m: curve(m, LOSS) for m in METHODS}, "rounds", "training loss", "", log="y"),
        Panel("round", {m: curve(m, ACCURACY) for m in METHODS}, "rounds", "validation accuracy"),
    ],
    tables=[result_table("The last of all rounds, over its clients", dict.fromkeys(METHODS, (None, None)))],
    reads="Step sizes and batches are not printed: 0.1/(1 + k/100) in local step k, and 20 rows, as "
    "elsewhere. alpha starts at 0.5 and is updated once per round by Eq. 6 on training rows; a "
    "second row has the rule of the authors' program. P1. Claims are on the mean "
    "of the last five evaluated rounds. The clients of a round are evaluated right after it, each mixing with its own "
    "copy of the global model.",
)
