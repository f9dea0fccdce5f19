"""Table 2 of `apfl`: APFL against other ways to personalise; an MLP on MNIST with two classes a client."""

from mooring.experiments.apfl._images import DIGITS, MNIST
from mooring.experiments.apfl._methods import (
    ACCURACY,
    ADAPTIVE,
    FEDAVG,
    FEDAVG_LOCAL,
    FIXED,
    LOSS,
    PER_FEDAVG,
    PFEDME,
    all_better,
    best,
    better,
    result_table,
    runs,
)
from mooring.experiments.apfl._perceptrons import perceptron_run
from mooring.experiments.base.claims import Claim, every
from mooring.experiments.base.experiment import Experiment, Preset, grid

PRINTED = {
    FIXED[0]: (0.011, 98.07),
    FIXED[1]: (0.004, 98.04),
    FIXED[2]: (0.002, 97.86),
    ADAPTIVE: (0.004, 98.10),
    FEDAVG: (0.240, 93.81),
    FEDAVG_LOCAL: (0.041, 97.75),
    PER_FEDAVG: (0.039, 97.83),
    PFEDME: (0.182, 95.92),
}
APFLS, OTHERS = (*FIXED, ADAPTIVE), (FEDAVG, FEDAVG_LOCAL, PER_FEDAVG, PFEDME)
POINTS = grid(run=runs(*PRINTED))
SHORT = f"{MNIST}; 6 rounds instead of 100"


def trial(seed: int, run: str, data: str, clients: int, hidden: list[int], rounds: int) -> dict:
    """tau = 20 steps of 20 rows a round."""
    deal = {"partition": "classes", "classes_per_client": 2}
    return perceptron_run(seed, run, data, clients, hidden, rounds, deal, steps=20)


EXPERIMENT = Experiment(
    title="APFL against other personalisation methods: an MLP on MNIST with two classes a client",
    trial=trial,
    presets={
        "smoke": Preset(POINTS, 1, {"data": "digits", "clients": 10, "hidden": [16], "rounds": 2}, DIGITS),
        "quick": Preset(POINTS, 3, {"data": "digits", "clients": 20, "hidden": [32], "rounds": 40}, DIGITS),
        "paper": Preset(
            POINTS, 3, {"data": "mnist", "clients": 100, "hidden": [200, 200], "rounds": 6}, SHORT, ("mnist",)
        ),
    },
    claims=[
        Claim(
            "apfl-best-in-both",
            "every APFL model is better than all other models in training loss and validation accuracy",
            all_better(APFLS, OTHERS),
            note="On MNIST, after 6 of 100 rounds, the mixtures 0.5, 0.75 and adaptive are best in both; 0.25, which "
            "trains slowly, still has a higher loss than localized FedAvg. On the stand-in every APFL model has the "
            "lower loss beyond the interval, and the higher mean accuracy, but 99.1 against 98.7 % of localized FedAvg "
            "is within it.",
        ),
        Claim(
            "localized-better-than-global",
            "localized FedAvg is better than its global model",
            better(FEDAVG_LOCAL, FEDAVG),
        ),
        Claim(
            "alpha-075-lowest-loss",
            "alpha = 0.75 has the lowest training loss",
            best(LOSS, FIXED[2], PRINTED),
            note="The adaptive mixture, started at 0.5 (the start is not printed), ends near 1 and is level with 0.75 "
            "or slightly lower.",
        ),
        Claim(
            "adaptive-best-accuracy",
            "adaptive alpha has the best validation accuracy",
            best(ACCURACY, ADAPTIVE, PRINTED),
            note="It is among the best, but level with alpha = 0.75 (98.0 % both on MNIST), as the printed accuracies "
            "(97.86 to 98.10, plus or minus 0.1) nearly are.",
        ),
        Claim(
            "perfedavg-slightly-above-localized",
            "perFedAvg is better than localized FedAvg",
            better(PER_FEDAVG, FEDAVG_LOCAL),
            note="With the printed step 0.001 its common model has barely moved from its start when the rounds end: a "
            "hundredth of FedAvg's steps.",
        ),
        Claim(
            "pfedme-between",
            "pFedMe is better than FedAvg's global model and worse than the localized one",
            every(above=better(PFEDME, FEDAVG), below=better(FEDAVG_LOCAL, PFEDME)),
            note="On the stand-in the means are in this order in loss and in accuracy, within the interval of the "
            "repeats. On MNIST, after 6 of 100 rounds, its loss is between the two and its accuracy level with that of "
            "the global model.",
        ),
    ],
    tables=[result_table("Table 2", PRINTED)],
    reads="perFedAvg has the printed step sizes 0.01 and 0.001 and deploys its model after 20 inner steps; its "
    "meta-update draws from all training rows instead of a tenth. pFedMe has lam = 15 and eta = 0.01 as printed, 5 "
    "inner steps of a size that follows the curvature, and deploys its personal models. The adaptive mixture starts at "
    "0.5 and is updated once a round. P1.",
)
