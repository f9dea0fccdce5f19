"""Figure 6 of `apfl`: three clients join after the training and personalize the global model on their own rows."""

from collections import deque
from collections.abc import Iterator

import numpy as np
import torch

from mooring.algorithms.apfl import APFL, Mixture, mix_models
from mooring.algorithms.fedavg import FedAvg
from mooring.core.cohort import Round
from mooring.core.types import JsonObject
from mooring.data.clients import Clients
from mooring.engines.simulate import simulate
from mooring.engines.training_state import TrainingPlan
from mooring.tasks.compiled_steps import compile_steps, is_numba_available
from mooring_papers.apfl._methods import ALPHAS, BATCH, DECAY, EQUATION, ETA, FADING, PROGRAM
from mooring_papers.apfl._synthetic import TASK, synthetic
from mooring_papers.base.claims import Claim, every, higher, lower
from mooring_papers.base.experiment import Cell, Experiment, Panel, Preset, Table, grid
from mooring_papers.base.results import Ref, of
from mooring_papers.training_curves import loss_and_accuracy

SPREADS = (0.0, 0.5)
EPOCHS = 5
NEW_CLIENTS = 3
LONG = 50  # rounds from which compiled steps pay for their compilation
TUNED, ADAPTIVE = "FedAvg, fine-tuned", "APFL adaptive"
VARIANT = "APFL adaptive, program's variant"
WAYS: dict[str, JsonObject] = {
    ADAPTIVE: {"alpha": 0.5, "adapt": "round", **EQUATION},
    VARIANT: {"alpha": 0.5, "adapt": "round", **PROGRAM},
    **{f"APFL {alpha}": {"alpha": alpha, "adapt": "no"} for alpha in ALPHAS},
}


def part(clients: Clients, position: torch.Tensor) -> Clients:
    names = tuple(clients.names[i] for i in position.tolist())
    train, validation, test = (rows.select(position) for rows in (clients.train, clients.validation, clients.test))
    return Clients(names, train, validation, test, kind=clients.kind, classes=clients.classes)


def trial(seed: int, spread: float, clients: int, samples: int, rounds: int) -> dict:
    """Losses and accuracies of the new clients after 0 to 5 epochs. FedAvg's global model is APFL's as well."""
    federation = synthetic(seed, spread, clients + NEW_CLIENTS, samples)
    trained, new = part(federation, torch.arange(clients)), part(federation, torch.arange(clients, len(federation)))
    work: JsonObject = {"eta": ETA, "decay": DECAY, "eta_schedule": FADING, "epochs": 1, "batch": BATCH}
    plan = TrainingPlan(rounds, seed=seed, evaluate_every=rounds)
    task = compile_steps(TASK) if rounds >= LONG and is_numba_available() else TASK
    server = simulate(FedAvg(**work), task, trained, plan, weights="uniform", resolved=True).server
    out: dict = {"epoch": list(range(EPOCHS + 1))}
    for way, fields in WAYS.items():
        models = joining(APFL(adapt_on="train", **fields, **work), server.w, new, rounds, seed)
        out |= name_series(way, [worths(new, mix_models(model.alpha, model.v, model.w)) for model in models])
    tuning = joining(APFL(alpha=0.5, adapt="no", **work), server.w, new, rounds, seed, moves_w=True)
    return out | name_series(TUNED, [worths(new, model.w) for model in tuning])


def joining(
    method: APFL, w: torch.Tensor, new: Clients, rounds: int, seed: int, moves_w: bool = False
) -> Iterator[Mixture]:
    """Yield the new clients' models before and after each epoch; w is fixed for APFL (Eq. 7), and the model that FedAvg
    fine-tunes."""
    count = len(new)
    alpha = torch.tensor(method.alpha, dtype=w.dtype).expand(count)
    model = Mixture(w.expand(count, -1), w.expand(count, -1), alpha)
    yield model
    for epoch in range(EPOCHS):
        turn = Round(rounds + 1 + epoch, rounds + EPOCHS, count, count, 1.0, seed)
        memory = torch.full((count, 1), float(epoch), dtype=w.dtype)  # the rounds of a client so far
        steps = method.local_steps(model, TASK, new.cohort(), turn, memory, moves_w=moves_w)
        model = deque(steps, maxlen=1).pop()
        yield model


def name_series(way: str, curve: list[tuple[float, float]]) -> dict:
    loss, accuracy = (list(values) for values in zip(*curve))
    return {f"{way} loss": loss, f"{way} accuracy": accuracy}


def worths(clients: Clients, models: torch.Tensor) -> tuple[float, float]:
    """Training loss and validation accuracy."""
    return loss_and_accuracy(TASK, models, clients.train)[0], loss_and_accuracy(TASK, models, clients.test)[1]


def during(way: str, kind: str, **fixed: object) -> Ref:
    """Return the mean over the epochs, without the value before them."""
    return of(f"{way} {kind}", mean_after_the_start, **fixed)


def mean_after_the_start(values: np.ndarray) -> float:
    return float(np.mean(values[1:]))


EXPERIMENT = Experiment(
    title="Clients that join after the training: APFL's mixture against FedAvg's fine-tuning",
    trial=trial,
    presets={
        "smoke": Preset(grid(spread=SPREADS), 1, {"clients": 7, "samples": 100, "rounds": 3}),
        "quick": Preset(grid(spread=SPREADS), 20, {"clients": 27, "samples": 625, "rounds": 20}),
        "paper": Preset(grid(spread=SPREADS), 10, {"clients": 97, "samples": 1000, "rounds": 100}),
    },
    claims=[
        Claim(
            "apfl-trains-better",
            "the new clients' training loss, averaged over the 5 epochs, is lower with APFL (adaptive, Eqs. 6 and 7) "
            "than with FedAvg's fine-tuning, on both sets",
            lower(during(ADAPTIVE, "loss"), during(TUNED, "loss")),
        ),
        Claim(
            "apfl-generalizes-better",
            "their validation accuracy, averaged over the 5 epochs, is higher with APFL, on both sets",
            higher(during(ADAPTIVE, "accuracy"), during(TUNED, "accuracy")),
        ),
        Claim(
            "diversity-makes-it-harder",
            "averaged over the 5 epochs, the new clients' training losses with FedAvg and with APFL are higher on "
            "synthetic(0.5, 0.5) than on synthetic(0, 0), and their validation accuracies lower",
            every(
                **{
                    f"{way} {kind}": compare(during(way, kind, spread=0.5), during(way, kind, spread=0.0))
                    for way in (TUNED, ADAPTIVE)
                    for kind, compare in (("loss", higher), ("accuracy", lower))
                }
            ),
        ),
    ],
    panels=[
        Panel(
            "epoch",
            {way: of(f"{way} {kind}", spread=s) for way in (TUNED, *WAYS)},
            "epochs",
            label,
            f"({s}, {s})",
            log="y" if kind == "loss" else "",
        )
        for kind, label in (("loss", "training loss"), ("accuracy", "validation accuracy"))
        for s in SPREADS
    ],
    tables=[
        Table(
            "The new clients after 5 epochs",
            tuple(f"({s}, {s}): {kind}" for s in SPREADS for kind in ("training loss", "validation accuracy")),
            {
                way: [Cell(of(f"{way} {kind}", -1, spread=s)) for s in SPREADS for kind in ("loss", "accuracy")]
                for way in (TUNED, *WAYS)
            },
        )
    ],
    reads="alpha is not printed: it starts at 0.5 and adapts once per epoch by Eq. 6; the rule of the authors' "
    "program and fixed values are shown beside. A new client keeps the global model fixed in its mixture (Eq. 7); "
    "FedAvg fine-tunes a copy of it. Step sizes are those of the training; all clients have 1,000 rows, 800 of them "
    "for training. The figure is of all five epochs, and so are the claims; the table shows the last one.",
)
