"""Table 4 of `effect`: FedProx against the dichotomous strategy that splits each client's samples."""

from typing import NamedTuple

from mooring_papers.base.claims import Claim, every, higher
from mooring_papers.base.experiment import Experiment, Table
from mooring_papers.effect._image_settings import NAMES
from mooring_papers.effect._tables import ROWS, cell, presets, ref, trial

SMALL, MEDIUM, LARGE = (("FedProx", size) for size in NAMES)
SPLIT, FULL = ("dichotomous", ""), ("dichotomous, full data", "")
SHOWN = [name for name, row in ROWS.items() if row.table4]


class Judged(NamedTuple):
    """How FedProx is judged beside the strategy under a protocol."""

    series: str
    methods: dict[str, tuple[str, str]]  # by column


JUDGED = {
    "P2": Judged("common P2", {"FedProx medium, common": MEDIUM, "FedProx large, common": LARGE}),
    "P1": Judged("P1", {"FedProx small": SMALL, "FedProx large": LARGE}),
}


def row_of(protocol: str, name: str, classes: int):
    how, printed = JUDGED[protocol], ROWS[name].table4[classes] if protocol == "P2" else (None, None, None)
    return [
        *(cell(how.series, method, name, classes, value) for method, value in zip(how.methods.values(), printed)),
        cell(protocol, SPLIT, name, classes, printed[-1]),
        cell(f"leaky {protocol}", SPLIT, name, classes, None),
        cell(protocol, FULL, name, classes, None),
        cell(f"leaky {protocol}", FULL, name, classes, None),
    ]


EXPERIMENT = Experiment(
    title="Accuracy of FedProx and of the dichotomous strategy with sample splitting",
    trial=trial,
    presets=presets([SMALL, MEDIUM, LARGE, SPLIT, FULL]),
    claims=[
        Claim(
            "above-sample-split",
            "MNIST CNN2: at every number of classes the test accuracy of FedProx with the small and with the large "
            "lambda (global models, all classes) is above that of the sample-split strategy, each client reporting the "
            "better model on the test set",
            every(
                **{" ".join(m): higher(ref("common P2", m), ref("leaky P2", SPLIT)) for m in (SMALL, LARGE)},
            ),
        ),
    ],
    tables=[
        Table(
            f"Test accuracy, {protocol}",
            (*JUDGED[protocol].methods, "sample split", "sample split, leaky", "full data", "full data, leaky"),
            {f"{name}, {c} classes": row_of(protocol, name, c) for name in SHOWN for c in ROWS[name].classes},
        )
        for protocol in ("P2", "P1")
    ],
    reads="Clients choose between the two models on validation rows of their own; 'leaky' means on the test rows "
    "themselves, as in the paper. Splits are half and half. The printed columns are shifted against Table 3 (small is "
    "its medium for CNN2, large its medium for CNN5 and EMNIST, two dichotomous entries are its FedProx small) and are "
    "no targets. Table 3's are global models on all classes: FedProx is judged so under P2. The strategy without "
    "splitting, which the paper calls hypothetical, is shown as well.",
)
