"""Table 3 of `apfl`: an MLP on MNIST partitioned by a Dirichlet distribution."""

from mooring_papers.apfl._images import CLASSES, DIGITS, MNIST
from mooring_papers.apfl._methods import ACCURACY, FEDAVG, FEDAVG_LOCAL, FIXED, every_pair, result_table, runs
from mooring_papers.apfl._perceptrons import run_perceptron
from mooring_papers.base.claims import Claim
from mooring_papers.base.experiment import Experiment, Preset, grid

PRINTED = {
    FIXED[0]: (0.004, 98.43),
    FIXED[1]: (0.001, 98.52),
    FIXED[2]: (0.001, 98.34),
    FEDAVG: (0.1946, 93.71),
    FEDAVG_LOCAL: (0.022, 98.04),
}
POINTS = grid(run=runs(*PRINTED))


def trial(seed: int, run: str, data: str, clients: int, hidden: list[int], rounds: int) -> dict:
    """One epoch of batches of 20 per round."""
    partition = {"partition": "dirichlet_equal", "alpha": 1.0 / CLASSES}
    return run_perceptron(seed, run, data, clients, hidden, rounds, partition, epochs=1)


EXPERIMENT = Experiment(
    title="An MLP on MNIST partitioned by Dirichlet(1)",
    trial=trial,
    presets={
        "smoke": Preset(POINTS, 1, {"data": "digits", "clients": 10, "hidden": [16], "rounds": 2}, DIGITS),
        "quick": Preset(POINTS, 5, {"data": "digits", "clients": 20, "hidden": [32], "rounds": 100}, DIGITS),
        "paper": Preset(
            POINTS, 5, {"data": "mnist", "clients": 100, "hidden": [200, 200], "rounds": 100}, MNIST, ("mnist",)
        ),
    },
    claims=[
        Claim(
            f"apfl-generalizes-better-than-{name}",
            f"every APFL model has a higher validation accuracy than FedAvg's {name} model",
            every_pair(ACCURACY, FIXED, (baseline,)),
        )
        for name, baseline in (("localized", FEDAVG_LOCAL), ("global", FEDAVG))
    ],
    tables=[result_table("Table 3", PRINTED)],
    reads="Every client draws its classes' proportions from a Dirichlet distribution whose parameter, 1.0, is divided "
    "by the number of classes, as in the authors' program. Step sizes and batches are not printed: 0.1/(1 + k/100) in "
    "local step k, and 20 rows, as elsewhere. The clients of a round are evaluated right after it, each mixing with "
    "its own copy of the global model. P1.",
)
