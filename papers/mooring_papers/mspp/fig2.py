"""Figure 2 of `mspp`: rounds that each method needs until a test accuracy is reached, in the runs of Figure 1."""

from mooring_papers.base.claims import NEARLY, Claim
from mooring_papers.base.experiment import Cell, Experiment, Table
from mooring_papers.mspp._accuracy_targets import FEDAVG, FEDPROX, METHODS, MINIBATCHES, ratio_series, trial
from mooring_papers.mspp._ratio_claims import OVER_HALF, PANELS, PRESETS, medians, panels, ratio_below

SLIGHTLY = 1 + NEARLY


def median(method: str, panel: str, target: int):
    """A cell of the table of medians; nan where half of the repeats do not reach the target."""
    return lambda results: float(medians(results, f"rounds {method}")[panel][target])


EXPERIMENT = Experiment(
    title="Rounds to a test accuracy: FedMSPP, FedProx and FedAvg",
    trial=trial,
    presets=PRESETS,
    claims=[
        Claim(
            f"a-slightly-more-rounds-than-{baseline.lower()}",
            f"MNIST: in more than half of the nine cases of minibatch and target FedMSPP needs at most {SLIGHTLY} "
            f"times the rounds of {baseline}",
            ratio_below({m: ratio_series("rounds", m, baseline) for m in MINIBATCHES}, ["a"], SLIGHTLY, OVER_HALF),
        )
        for baseline in (FEDPROX, FEDAVG)
    ],
    panels=panels("rounds", "rounds"),
    tables=[
        Table(
            "Median of rounds until the three targets",
            tuple(f"({panel}) target {k + 1}" for panel in PANELS for k in range(3)),
            {m: [Cell(median(m, panel, k)) for panel in PANELS for k in range(3)] for m in METHODS},
        )
    ],
    reads="As in Figure 1.",
)
