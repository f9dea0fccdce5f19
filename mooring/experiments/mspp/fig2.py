"""Figure 2 of `mspp`: rounds that each method needs until a test accuracy is reached, in the runs of Figure 1."""

from mooring.experiments.base.claims import Claim
from mooring.experiments.base.experiment import Cell, Experiment, Table
from mooring.experiments.mspp._judge import PANELS, PRESETS, median_below, medians, panels
from mooring.experiments.mspp._speed import FEDPROX, METHODS, MINIBATCHES, over, trial


def median(method: str, panel: str, target: int):
    """A cell of the table of medians; nan where half of the repeats do not reach the target."""
    return lambda results: float(medians(results, f"rounds {method}")[panel][target][0])


EXPERIMENT = Experiment(
    title="Rounds until a test accuracy: FedMSPP, FedProx and FedAvg",
    trial=trial,
    presets=PRESETS,
    claims=[
        Claim(
            "slightly-more-rounds",
            "in most cases FedMSPP needs only slightly more rounds than FedProx: the median ratio is at most 2 (which "
            "is ours) in more than half of the cases of minibatch, target and data set",
            median_below({m: over("rounds", m, FEDPROX) for m in MINIBATCHES}, 2.0, cases=0.51),
        ),
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
