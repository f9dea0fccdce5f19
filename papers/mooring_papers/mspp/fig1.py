"""Figure 1 of `mspp`, with Tables 2 and 3: data points that each method accesses until a test accuracy is reached."""

from itertools import pairwise

from mooring_papers.base.claims import Claim
from mooring_papers.base.experiment import Cell, Experiment, Table
from mooring_papers.base.results import of
from mooring_papers.mspp._accuracy_targets import FEDAVG, FEDPROX, METHODS, MINIBATCHES, ratio_series, trial
from mooring_papers.mspp._ratio_claims import OVER_HALF, PANELS, PRESETS, medians, panels, ratio_below

SIZES = {"a": (100, 63000, 56700), "b": (50, 55050, 49545), "c": (261, 21546, 17237)}  # Table 2
HYPER = {  # Table 3
    "communication rounds": ("200", "300", "300"),
    "local SGD epochs": ("2", "5", "10"),
    "local SGD minibatch": ("567", "512", "100"),
    "local SGD learning rate": ("0.25", "0.06", "0.1"),
    "strength of regularisation": ("0.1", "0.1", "0.001"),
}
SETTINGS = ("rounds", "epochs", "batch", "eta", "mu")


def median(method: str, panel: str, target: int):
    """A cell of the table of medians; nan where half of the repeats do not reach the target."""
    return lambda results: float(medians(results, f"points {method}")[panel][target])


def setting_cell(setting: str, panel: str):
    """A cell with a setting, equal in all repeats."""
    return lambda results: float(results.repeats(of(setting, panel=panel))[0])


EXPERIMENT = Experiment(
    title="Data points to a test accuracy: FedMSPP, FedProx and FedAvg",
    trial=trial,
    presets=PRESETS,
    claims=[
        *(
            Claim(
                f"a-fewer-samples-than-{baseline.lower()}",
                f"MNIST: every minibatch of FedMSPP needs fewer data points than {baseline} to each of the three "
                "targets (mean logarithm of the ratio below 0)",
                ratio_below({m: ratio_series("points", m, baseline) for m in MINIBATCHES}, ["a"]),
            )
            for baseline in (FEDPROX, FEDAVG)
        ),
        Claim(
            "a-smaller-minibatch-fewer-samples",
            "MNIST: from each minibatch to the next smaller one the data points to a target fall, in more than half of "
            "the six cases",
            ratio_below(
                {f"{b} over {a}": ratio_series("points", b, a) for a, b in pairwise(MINIBATCHES)},
                ["a"],
                cases=OVER_HALF,
            ),
        ),
    ],
    panels=panels("points", "data points"),
    tables=[
        Table(
            "Median of data points until the three targets",
            tuple(f"({panel}) target {k + 1}" for panel in PANELS for k in range(3)),
            {m: [Cell(median(m, panel, k)) for panel in PANELS for k in range(3)] for m in METHODS},
        ),
        Table(
            "Table 2: devices, samples and training samples",
            tuple(f"({panel}) {name}" for panel, name in PANELS.items()),
            {
                series: [Cell(of(series, panel=panel), SIZES[panel][k]) for panel in PANELS]
                for k, series in enumerate(("devices", "samples", "training samples"))
            },
        ),
        Table(
            "Table 3: hyper-parameters",
            tuple(f"({panel}) {name}" for panel, name in PANELS.items()),
            {
                label: [Cell(setting_cell(setting, panel), printed) for panel, printed in zip(PANELS, HYPER[label])]
                for label, setting in zip(HYPER, SETTINGS)
            },
        ),
    ],
    reads="A data point is one row's gradient in one local step; counted as rows drawn a round, all numbers are "
    "divided by the epochs. The strength of regularisation is read as 1/eta_t. The number of sampled devices is not "
    "printed: 10 (quick: 5). Accuracy is that of the last global model on all devices' test rows. Targets are the "
    "paper's on MNIST, and shares of FedProx's final accuracy elsewhere. Minibatches of stand-ins are the paper's "
    "shares of a device's rows. The CNN has the 32 and 64 channels that are usual with these data. Sent140 is not at "
    "hand: the LSTM predicts Shakespeare's next character, a device per role.",
)
