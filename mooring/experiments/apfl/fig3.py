"""Figure 3 of `apfl`: APFL that learns its mixtures against localized FedAvg on three synthetic sets."""

from mooring.experiments.apfl._methods import (
    ACCURACY,
    ADAPTIVE,
    FEDAVG,
    FEDAVG_LOCAL,
    LOSS,
    algorithm,
    curve,
    final,
    has_common,
    percent,
    points_above,
    runs,
)
from mooring.experiments.apfl._synthetic import TASK, synthetic
from mooring.experiments.base.claims import Claim, alike, every, higher, lower
from mooring.experiments.base.experiment import Cell, Experiment, Panel, Preset, Table, grid
from mooring.experiments.base.results import of
from mooring.experiments.federated import follow

SPREADS = (0.0, 0.5, 1.0)
ROUND, STEP = f"{ADAPTIVE}, once a round", f"{ADAPTIVE}, every step"
METHODS = (STEP, ROUND, FEDAVG_LOCAL, FEDAVG)
POINTS = grid(spread=SPREADS, run=runs(*METHODS))
FREED = (
    "With 30 clients the order of the means is the paper's on every set: APFL has the lower training loss and 3 to 4 "
    "points more accuracy; accuracies within 5 % of each other are not shown beyond the interval. With 100 clients it "
    "has 2 to 3 points more accuracy, but no lower training loss on (0, 0). A gap of 10 points does not show against "
    "localized FedAvg, which personalises too; against FedAvg's global model it does with 100 clients (by 14 to 19)."
)
STUCK = (
    "From alpha = 0.01 one update a round hardly moves the mixtures of 30 clients in 60 rounds: the own model is "
    "driven by alpha times the gradient, stays near its start, and Eq. 6 then sends alpha to 0, which it never leaves. "
    "With 100 clients of up to 1,000 rows mixtures reach 0.5, accuracies are alike and 1 to 4 points above those of "
    "localized FedAvg, not 10; the training loss is not lower beyond the interval on (1, 1)."
)


def trial(seed: int, spread: float, run: str, clients: int, most: int, rounds: int, every: int) -> dict:
    federation = synthetic(seed, spread, clients, most)
    method = algorithm(run, first_alpha=0.01, adapt="step" if run == STEP else "round")
    return follow(method, TASK, federation, rounds=rounds, every=every, seed=seed, common=has_common(run))


def claims(name: str, method: str, note: str) -> list[Claim]:
    return [
        Claim(
            f"apfl-trains-better-{name}",
            f"{method}: a lower training loss than localized FedAvg on each set",
            lower(final(method, LOSS), final(FEDAVG_LOCAL, LOSS)),
            note,
        ),
        Claim(
            f"apfl-accuracies-alike-{name}",
            f"{method}: almost the same validation accuracy on the three sets (within 5 %)",
            alike([final(method, ACCURACY, spread=s) for s in SPREADS], 0.05),
            note,
        ),
        Claim(
            f"fedavg-far-below-{name}",
            f"{method}: FedAvg is far below in validation accuracy (10 points) on each set",
            every(
                **{
                    f"({s}, {s})": higher(final(method, ACCURACY, spread=s), points_above(FEDAVG_LOCAL, 10, spread=s))
                    for s in SPREADS
                }
            ),
            note,
        ),
    ]


EXPERIMENT = Experiment(
    title="APFL with adaptive mixtures against localized FedAvg on synthetic(gamma, beta)",
    trial=trial,
    presets={
        "smoke": Preset(POINTS, 1, {"clients": 10, "most": 100, "rounds": 3, "every": 1}),
        "quick": Preset(POINTS, 4, {"clients": 30, "most": 300, "rounds": 60, "every": 15}),
        "paper": Preset(POINTS, 4, {"clients": 100, "most": 1000, "rounds": 100, "every": 5}),
    },
    claims=[*claims("every-step", STEP, FREED), *claims("once-a-round", ROUND, STUCK)],
    panels=[
        *(
            Panel(
                "round",
                {m: curve(m, LOSS, spread=s) for m in METHODS},
                "rounds",
                "training loss",
                f"({s}, {s})",
                log="y",
            )
            for s in SPREADS
        ),
        *(
            Panel(
                "round",
                {m: curve(m, ACCURACY, spread=s) for m in METHODS},
                "rounds",
                "validation accuracy",
                f"({s}, {s})",
            )
            for s in SPREADS
        ),
    ],
    tables=[
        Table(
            "Validation accuracy in the last round, %",
            tuple(f"({s}, {s})" for s in SPREADS),
            {m: [Cell(percent(m, spread=s)) for s in SPREADS] for m in METHODS},
        ),
        Table(
            "Mean mixture in the last round",
            tuple(f"({s}, {s})" for s in SPREADS),
            {m: [Cell(of("alpha", -1, run=m, spread=s)) for s in SPREADS] for m in (STEP, ROUND)},
        ),
    ],
    reads="The text updates alpha every communication round, the superscripts of Eq. 6 at every iteration: both are "
    "run, each with claims of its own, from alpha = 0.01. Synthetic(0, 0) is not IID as the paper calls it: its "
    "clients' models and inputs still differ by unit variances. Dimensions (60 inputs, 10 classes) and sizes are those "
    "in wide use.",
)
