"""Table 1 of `apfl`: a small CNN on CIFAR-10 with two classes per client."""

from mooring.data.clients import Clients
from mooring.tasks.network import NetworkTask
from mooring_papers.apfl._images import CLASSES, partition_images
from mooring_papers.apfl._methods import (
    ACCURACY,
    ADAPTIVE,
    FEDAVG,
    FEDAVG_LOCAL,
    FIXED,
    LOSS,
    SCAFFOLD,
    SCAFFOLD_LOCAL,
    VARIANT,
    algorithm,
    best,
    every_pair,
    final,
    has_global_model,
    result_table,
    runs,
)
from mooring_papers.base.claims import Claim, higher
from mooring_papers.base.experiment import Experiment, Preset, grid
from mooring_papers.generators import Prototypes
from mooring_papers.networks import cnn, mlp
from mooring_papers.training_curves import to_single_precision, train_and_evaluate

PRINTED = {
    FIXED[0]: (0.154, 89.33),
    FIXED[1]: (0.113, 88.74),
    FIXED[2]: (0.103, 89.04),
    ADAPTIVE: (0.101, 88.87),
    FEDAVG: (1.789, 32.51),
    FEDAVG_LOCAL: (0.369, 83.16),
    SCAFFOLD: (1.70, 37.16),
    SCAFFOLD_LOCAL: (0.593, 85.25),
}
APFLS, LOCALIZED, GLOBAL = (*FIXED, ADAPTIVE), (FEDAVG_LOCAL, SCAFFOLD_LOCAL), (FEDAVG, SCAFFOLD)
POINTS = grid(run=runs(*PRINTED, VARIANT))


def problem(seed: int, data: str, clients: int, samples: int) -> tuple[Clients, NetworkTask]:
    if data == "prototypes":
        federation = to_single_precision(
            Prototypes(clients, samples, dim=64, classes_per_client=2, distance=4.0).make(seed)
        )
        return federation, NetworkTask(mlp(64, 32, 32, CLASSES))
    federation = partition_images(seed, data, clients, 2, flat=False, samples_per_client=samples)
    return federation, NetworkTask(cnn(3, 32, CLASSES))


def trial(seed: int, run: str, data: str, clients: int, samples: int, rounds: int) -> dict:
    federation, task = problem(seed, data, clients, samples)
    method = algorithm(run, scaffold={"eta": 0.05, "decay": 0.05})
    return train_and_evaluate(
        method, task, federation, rounds=rounds, every=rounds, seed=seed, common=has_global_model(run), online=True
    )


PROTOTYPES = "class prototypes and an MLP instead of CIFAR-10 and a CNN; P1"

EXPERIMENT = Experiment(
    title="A CNN on CIFAR-10 with two classes per client",
    trial=trial,
    presets={
        "smoke": Preset(POINTS, 1, {"data": "prototypes", "clients": 10, "samples": 50, "rounds": 3}, PROTOTYPES),
        "quick": Preset(POINTS, 8, {"data": "prototypes", "clients": 20, "samples": 250, "rounds": 50}, PROTOTYPES),
        "paper": Preset(
            POINTS,
            3,
            {"data": "cifar10", "clients": 100, "samples": 250, "rounds": 100},
            "25,000 images of CIFAR-10; P1",
            ("cifar",),
        ),
    },
    claims=[
        *(
            Claim(
                f"apfl-outperforms-{kind}-{part}",
                f"every APFL model has a {comparison} than the {kind} models of FedAvg and SCAFFOLD",
                every_pair(series, APFLS, baselines),
            )
            for kind, baselines in (("localized", LOCALIZED), ("global", GLOBAL))
            for part, series, comparison in (
                ("in-training", LOSS, "lower training loss"),
                ("in-generalization", ACCURACY, "higher validation accuracy"),
            )
        ),
        Claim(
            "adaptive-best-loss",
            "adaptive alpha (Eq. 6) has the lowest training loss of all models",
            best(LOSS, ADAPTIVE, PRINTED),
        ),
        Claim(
            "alpha-025-best-accuracy",
            "alpha = 0.25 has the highest validation accuracy of all models",
            best(ACCURACY, FIXED[0], PRINTED),
        ),
        Claim(
            "scaffold-localized-above-fedavg-localized",
            "localized SCAFFOLD has a higher validation accuracy than localized FedAvg",
            higher(final(SCAFFOLD_LOCAL, ACCURACY), final(FEDAVG_LOCAL, ACCURACY)),
        ),
    ],
    tables=[result_table("Table 1", PRINTED | {VARIANT: (None, None)})],
    reads="Rounds, batches and the CNN's widths are not printed: 100 rounds, 20 rows, 5x5 convolutions with 8 and 16 "
    "channels and 64 hidden units. The adaptive mixture starts at 0.5 and is updated once per round by Eq. 6; a second "
    "row has the rule of the authors' program. The clients of a "
    "round are evaluated right after it, each mixing with its own copy of the global model.",
)
