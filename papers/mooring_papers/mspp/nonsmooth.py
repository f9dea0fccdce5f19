"""Theorems 2 and 4 of `mspp` as an experiment: non-smooth losses, and bounds without local dissimilarity.

Part "rate": the mean over t < T of |grad F_rho(w_t)|^2, F_rho the Moreau envelope of the mean empirical risk, with the
step rho/sqrt(T) of the theorems, on absolute, hinge and phase losses. Records of a minibatch are drawn with replacement
from the devices' rows, so that F is what the theorems speak of (Remark 8). Part "dissimilarity": the smooth problem of
Table 1 with devices that differ more and more.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mooring.algorithms.fedmspp import FedMSPP
from mooring.algorithms.fedprox import FedProx
from mooring.core.task import HasProx, Task, require
from mooring.core.types import JsonObject
from mooring.data.clients import BINARY, REGRESSION, Clients, from_arrays
from mooring.engines.simulate import RoundSnapshot, simulate
from mooring.engines.training_state import TrainingPlan
from mooring.tasks.linear_losses import Absolute, Hinge
from mooring.theory.fedprox_shared_rate import moreau_gradient_norm, weakly_convex_bound
from mooring_papers.base.claims import Claim, every, lower, slope
from mooring_papers.base.experiment import Cell, Experiment, Panel, Preset, Table, grid
from mooring_papers.base.results import of
from mooring_papers.mspp import tab1
from mooring_papers.phase_retrieval import PhaseRetrieval

DEVICES, SAMPLES, DIM = 20, 20, 3
BATCH = 5
LOSSES = ("absolute", "hinge", "phase")
METHODS = ("FedProx", "FedMSPP")
SAMPLED = (4, 20)  # devices per round
MEASURED = 12  # rounds of a horizon at which the envelope is evaluated
TURNS = (0.0, 1.0, 3.0, 9.0)  # how far the two kinds of devices of Table 1's problem are apart
HORIZON = 128


def problem(seed: int, loss: str) -> tuple[Task, Clients]:
    """Devices with different truths: rows of length 1, so that absolute and hinge losses are 1-Lipschitz."""
    rng = np.random.default_rng([seed, LOSSES.index(loss)])
    x = rng.standard_normal((DEVICES, SAMPLES, DIM))
    x /= np.linalg.norm(x, axis=2, keepdims=True)
    truth = 1 + rng.standard_normal((DEVICES, DIM))
    z, noise = np.einsum("mnd,md->mn", x, truth), rng.standard_normal((DEVICES, SAMPLES))
    if loss == "absolute":
        return Absolute(DIM, intercept=False, ridge=0.0), from_arrays(list(x), list(z + 0.5 * noise), kind=REGRESSION)
    if loss == "hinge":
        y = (z + 0.5 * noise > 0).astype(np.int64)
        return Hinge(DIM, intercept=False, ridge=0.0), from_arrays(list(x), list(y), kind=BINARY)
    return PhaseRetrieval(DIM, exact=True), from_arrays(list(x), list(z**2 + 0.1 * np.abs(noise)), kind=REGRESSION)


def weak_convexity(task: Task, clients: Clients) -> float:
    """nu of a record's loss: rows have length 1."""
    return 2.0 if isinstance(task, PhaseRetrieval) else 0.0


def envelope(seed: int, loss: str, method: str, sampled: int, horizons: list[int]) -> dict:
    """Means of |grad F_rho(w_t)|^2 over t < T and Theorem 2's bound for each horizon T."""
    task, clients = problem(seed, loss)
    weak = weak_convexity(task, clients)
    rho = 1.0 if weak == 0 else 0.4 / weak  # below 1/(2 nu)
    p = clients.weights("uniform")
    pooled = clients.train.pooled(p)
    common: JsonObject = {"lam": 1 / rho, "growth": "kinked", "inner": "exact", "eta": 1.0}  # eta: not used
    algorithm = FedMSPP(batch=BATCH, replacement=True, **common) if method == "FedMSPP" else FedProx(**common)
    out: dict[str, list[float]] = {"T": [], "envelope": [], "bound": []}
    for rounds in horizons:
        squares: list[float] = []
        interval = max(1, rounds // MEASURED)

        def note(w: torch.Tensor, squares: list[float] = squares) -> None:
            proximal_point = require(task, HasProx).prox(w[None], 1 / rho, pooled)[0]
            squares.append(moreau_gradient_norm(w.numpy(), proximal_point.numpy(), rho) ** 2)

        def watch(
            now: RoundSnapshot,
            rounds: int = rounds,
            interval: int = interval,
            note: Callable[[torch.Tensor], None] = note,
        ) -> None:
            if now.t < rounds and now.t % interval == 0:
                note(now.server.w)

        w0 = task.start(seed) if loss == "phase" else task.start()
        note(w0)
        plan = TrainingPlan(rounds, float(sampled) if sampled < DEVICES else 1.0, seed, evaluate_every=rounds)
        simulate(algorithm, task, clients, plan, weights="uniform", resolved=True, w0=w0, watch=watch)
        gap = float(task.loss(w0[None], pooled)[0])
        out["T"].append(rounds)
        out["envelope"].append(float(np.mean(squares)))
        out["bound"].append(weakly_convex_bound(gap, 1.0, rho, rounds, weak))
    return out


def dissimilarity(seed: int, turn: float) -> dict:
    """Theorem 1's step at T = HORIZON, ten devices per round; turn 0: all devices have equal rows."""
    clients = tab1.federation(seed, turn or 1.0, alike=turn == 0)
    start = tab1.TASK.start()
    squares = tab1.squared_gradients(tab1.TASK, tab1.theory(10, 0), clients, 10, HORIZON, seed, start)
    rows = clients.train.full(tab1.TASK)
    local = tab1.TASK.grad(start.expand(len(clients), -1), rows).square().sum(1)
    global_ = tab1.TASK.grad(start[None], clients.train.pooled(clients.weights("uniform"))).square().sum()
    return {
        "gradient": float(squares.mean()),
        "smooth bound": tab1.bound(clients, 10, 0, HORIZON),
        "ratio of gradients": float(local.mean() / global_),
    }


def trial(
    seed: int,
    part: str,
    horizons: list[int],
    loss: str = "",
    method: str = "",
    sampled: int = 0,
    turn: float = 0.0,
) -> dict:
    return envelope(seed, loss, method, sampled, horizons) if part == "rate" else dissimilarity(seed, turn)


def rate(series: str, **fixed: Any):
    return of(series, part="rate", **fixed)


POINTS = grid(part=["rate"], loss=LOSSES, method=METHODS, sampled=SAMPLED) + grid(part=["dissimilarity"], turn=TURNS)
LIPSCHITZ = ("absolute", "hinge")  # the losses that are G-Lipschitz everywhere

EXPERIMENT = Experiment(
    title="Rates of FedProx and FedMSPP on non-smooth losses, and bounds without local dissimilarity",
    trial=trial,
    presets={
        "smoke": Preset(POINTS, 1, {"horizons": [4, 8]}),
        "quick": Preset(POINTS, 10, {"horizons": [9, 36, 144]}),
        "paper": Preset(POINTS, 10, {"horizons": [16, 64, 256, 1024]}),
    },
    claims=[
        *(
            Claim(
                f"{method.lower()}-rate-{loss}",
                f"{method}, {loss} loss: the exponent in T of the mean over t < T of the squared gradient of the "
                "Moreau envelope is at most -1/2, with 4 and with 20 of 20 devices in a round",
                every(
                    **{
                        f"{i} devices": slope(
                            rate("envelope", loss=loss, method=method, sampled=i), "T", -np.inf, -1 / 2
                        )
                        for i in SAMPLED
                    }
                ),
            )
            for method in METHODS
            for loss in LOSSES
        ),
        *(
            Claim(
                f"{method.lower()}-below-the-bound",
                f"{method}: on absolute and hinge losses the mean over t < T of the squared gradient of the Moreau "
                "envelope is below the bound of Theorem 2 with its constants, at every T and number of devices",
                every(
                    **{
                        loss: lower(rate("envelope", loss=loss, method=method), rate("bound", loss=loss, method=method))
                        for loss in LIPSCHITZ
                    }
                ),
            )
            for method in METHODS
        ),
        Claim(
            "bound-holds-at-every-dissimilarity",
            "FedProx on sigmoid losses: with devices of equal rows and with turns of 1, 3 and 9 the mean squared "
            "gradient over t < 128 is below the bound of Theorem 1, which contains no dissimilarity",
            lower(of("gradient", part="dissimilarity"), of("smooth bound", part="dissimilarity")),
        ),
    ],
    panels=[
        Panel(
            "T",
            {
                f"{method}, {i} devices": rate("envelope", loss=loss, method=method, sampled=i)
                for method in METHODS
                for i in SAMPLED
            }
            | {"Theorem 2": rate("bound", loss=loss, method="FedProx", sampled=SAMPLED[0])},
            "T",
            "mean squared gradient of the envelope",
            f"{loss} loss",
            log="xy",
            dashed=("Theorem 2",),
        )
        for loss in LOSSES
    ],
    tables=[
        Table(
            "Sigmoid losses, T = 128",
            (
                "mean squared gradient",
                "bound of Theorem 1",
                "ratio of devices' to the mean risk's, at first",
            ),
            {
                f"turn {turn:g}" if turn else "equal rows": [
                    Cell(of(name, part="dissimilarity", turn=turn))
                    for name in ("gradient", "smooth bound", "ratio of gradients")
                ]
                for turn in TURNS
            },
        )
    ],
    reads="The paper has no experiment on these theorems. Phase losses are Lipschitz on bounded sets only: their rate "
    "is tested, not the bound. The gap in the bounds is F(w_0), since losses are not below 0.",
)
