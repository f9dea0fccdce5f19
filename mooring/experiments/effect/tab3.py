"""Table 3 of `effect`: accuracy of FedProx, GlobalTrain, LocalTrain and pFedMe by data set, classes and lambda."""

from mooring.experiments.base.claims import Claim, every, ordered
from mooring.experiments.base.experiment import Experiment, Table
from mooring.experiments.effect._points import NAMES
from mooring.experiments.effect._tables import ROWS, approaches, cell, each_row, presets, ref, trial

LOCAL, COMMON = ("LocalTrain", ""), ("GlobalTrain", "")
FEDPROX = [("FedProx", size) for size in NAMES]
PFEDME = [("pFedMe", size) for size in NAMES]
COLUMNS = [*FEDPROX, COMMON, LOCAL, *PFEDME]


def homogeneity(row: str, classes: list[int]):
    return every(**{" ".join(m).strip(): ordered([ref("P2", m, row=row, classes=c) for c in classes]) for m in COLUMNS})


EXPERIMENT = Experiment(
    title="Accuracy of FedProx, GlobalTrain, LocalTrain and pFedMe by classes per client and lambda",
    trial=trial,
    presets=presets(COLUMNS, list(ROWS)),
    claims=[
        Claim(
            "fedprox-interpolates",
            "as lambda decreases FedProx's accuracy approaches LocalTrain's, as it increases GlobalTrain's, "
            "consistently (P2)",
            approaches("P2", FEDPROX[0], FEDPROX[-1], LOCAL, COMMON),
            note="On the stand-ins it does with 2 classes and for the prototypes. With 6 and 10 classes of digits "
            "lambda = 2.5 has not converged after 20 rounds and is less accurate than lambda = 0.2; the printed table "
            "is not monotone either (EMNIST, 30 classes).",
        ),
        Claim(
            "homogeneity-helps",
            "as homogeneity increases (more classes per client) the accuracy of all methods improves (P2)",
            each_row(homogeneity),
            note="The means of LocalTrain, FedProx and pFedMe rise. GlobalTrain does not depend on the classes of a "
            "client where these are many (prototypes: .79, .79, .80), and three repeats do not separate 8 of 10 "
            "classes from all 10.",
        ),
        Claim(
            "pfedme-interpolates",
            "pFedMe also interpolates between local and global learning: as for FedProx (P2)",
            approaches("P2", PFEDME[0], PFEDME[-1], LOCAL, COMMON),
            note="As for FedProx: on the stand-ins the largest lambda has not converged after 20 rounds where clients "
            "have many classes, and three repeats leave wide intervals with 2 classes.",
        ),
    ],
    tables=[
        Table(
            f"Test accuracy, {protocol}: {what}",
            [" ".join(method).strip() for method in COLUMNS],
            {
                f"{name}, {c} classes": [
                    cell(protocol, method, name, c, printed if protocol == "P2" else None)
                    for method, printed in zip(COLUMNS, row.table3[c])
                ]
                for name, row in ROWS.items()
                for c in row.classes
            },
        )
        for protocol, what in (("P2", "common test rows with all classes"), ("P1", "rows like the client's own"))
    ],
    reads="The paper's protocol is unclear: accuracy that rises with the number of classes means a test on all classes "
    "(P2), but LocalTrain's .30 and .65 at 2 classes lie above the .20 that is possible there. P2 is tested, both are "
    "shown, and the printed numbers stand beside P2. lambda = .2, .5, 2.5 for both MNIST networks and .1, .5, 1 for "
    "the others. Clients, rows per client and repeats are not printed. pFedMe takes as many gradients a round as the "
    "others.",
)
