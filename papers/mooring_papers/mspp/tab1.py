"""Table 1 of `mspp` as an experiment: rates of FedProx and FedMSPP on a smooth non-convex problem, steps by theorem.

Mean over t < T of |grad F(w_t)|^2 with the step sizes of Theorems 1 and 3 for the horizon T, and the plateau that a
fixed step leaves, for several numbers I of sampled devices and b of minibatch rows. Records are drawn with replacement
from the devices' rows, so that F, the mean empirical risk, is what the theorems speak of (Remark 8).
"""

from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from mooring.algorithms.base import AnyAlgorithm
from mooring.algorithms.fedmspp import FedMSPP
from mooring.algorithms.fedprox import FedProx
from mooring.core.types import JsonObject
from mooring.data.clients import BINARY, Clients, from_arrays
from mooring.engines.simulate import simulate
from mooring.engines.training_state import TrainingPlan
from mooring.tasks.linear_losses import Sigmoid
from mooring.theory.fedmspp_rate import smooth_bound as fedmspp_bound
from mooring.theory.fedmspp_rate import step_size as fedmspp_step
from mooring.theory.fedprox_shared_rate import smooth_bound as fedprox_bound
from mooring.theory.fedprox_shared_rate import step_size as fedprox_step
from mooring_papers.base.claims import Claim, every, lower, slope
from mooring_papers.base.experiment import Cell, Experiment, Panel, Preset, Table
from mooring_papers.base.results import of
from mooring_papers.theory.communication import COMPLEXITIES, rounds_order

CLIENTS, SAMPLES, DIM = 50, 40, 10
TASK = Sigmoid(DIM, intercept=False, ridge=0.0)
RIDGED = Sigmoid(DIM, intercept=False, ridge=0.02)  # has a stationary point to stay at
SMOOTH, LIPSCHITZ = TASK.bend, 0.25  # of the loss at rows of length 1
MAIN, MINOR, FLIPPED = 3.0, 0.2, 0.2  # standard deviations of x_1 and of x_3, x_4, ... beside that of x_2; wrong labels
MOST, NEARLY = 50, 1e-4  # steps and gradient of a solve at a fixed step
STEADY = ((2, 2), (8, 2), (2, 8))  # (I, b)
SETTINGS = {"FedProx, I = 10": (10, 0), "FedMSPP, I = 10, b = 4": (10, 4), "FedMSPP, I = 1, b = 1": (1, 1)}
LATER = {"FedMSPP, I = 1, b = 1": 2}  # its small steps need longer horizons to show their rate
KINDS = {"unlike": 3.0, "alike": 1.0}  # the turn below


def federation(seed: int, turn: float, alike: bool = False) -> Clients:
    """Two kinds of devices, labels sign(x_1 + turn x_2) or sign(x_1 - turn x_2), some wrong; or all with equal rows."""
    rng = np.random.default_rng([seed, SAMPLES])
    scale = np.array([MAIN, 1.0, *[MINOR] * (DIM - 2)])
    x = rng.standard_normal((CLIENTS, SAMPLES, DIM)) * scale
    x /= np.linalg.norm(x, axis=2, keepdims=True)
    signed = np.where(np.arange(CLIENTS) % 2, turn, -turn)[:, None]
    y = (x[..., 0] + signed * x[..., 1] > 0) ^ (rng.random((CLIENTS, SAMPLES)) < FLIPPED)
    if alike:
        x, y = np.broadcast_to(x[:1], x.shape), np.broadcast_to(y[:1], y.shape)
    return from_arrays(list(x), list(y.astype(np.int64)), kind=BINARY)


def squared_gradients(
    task: Sigmoid, method: object, clients: Clients, sampled: int, rounds: int, seed: int, w0: Tensor
) -> np.ndarray:
    """[T]: |grad F(w_t)|^2 for t = 0, ..., T - 1."""
    pooled = clients.train.pooled(clients.weights("uniform"))

    def measure(w):
        return float(task.grad(w[None], pooled).square().sum())

    squares = [measure(w0)]
    plan = TrainingPlan(rounds, float(sampled) if sampled > 1 else 1 / CLIENTS, seed, evaluate_every=rounds)
    options: JsonObject = {"weights": "uniform", "resolved": True, "w0": w0}
    simulate(method, task, clients, plan, watch=lambda now: squares.append(measure(now.server.w)), **options)
    return np.array(squares[:-1])


def stationary(clients: Clients) -> Tensor:
    """A stationary point of F with the ridge, from 0."""
    pooled = clients.train.pooled(clients.weights("uniform"))

    def value(w: np.ndarray) -> tuple[float, np.ndarray]:
        point = torch.from_numpy(w)[None]
        return float(RIDGED.loss(point, pooled)[0]), RIDGED.grad(point, pooled)[0].numpy()

    return torch.from_numpy(minimize(value, np.zeros(DIM), jac=True, method="BFGS").x)


def fedmspp(batch: int, **overrides: Any) -> FedMSPP:
    return FedMSPP(batch=batch, replacement=True, inner="descent", steps=MOST, eta=1 / (9 * SMOOTH), **overrides)


def theory(sampled: int, batch: int) -> AnyAlgorithm:
    """The algorithm with the step of Theorem 1 (batch 0: all rows) or 3, whatever the horizon."""
    if batch:
        return fedmspp(batch, lam=8 * SMOOTH, growth="smooth", lipschitz=LIPSCHITZ)
    return FedProx(
        lam=3 * SMOOTH,
        growth="smooth",
        lipschitz=LIPSCHITZ,
        inner="descent",
        steps=MOST,
        eta=1 / (4 * SMOOTH),
        batch=0,
    )


def stated(value: float | str) -> Cell:
    """A cell that rests on no trial."""
    return Cell(lambda results: value)


def bound(clients: Clients, sampled: int, batch: int, rounds: int) -> float:
    """The theorem's bound with its constants; the gap is at most F(w_0), for losses are above 0."""
    gap = float(TASK.loss(TASK.start()[None], clients.train.pooled(clients.weights("uniform")))[0])
    if batch:
        eta = fedmspp_step(SMOOTH, rounds, sampled, batch)
        return fedmspp_bound(gap, LIPSCHITZ, SMOOTH, eta, rounds, sampled, batch)
    return fedprox_bound(gap, LIPSCHITZ, SMOOTH, fedprox_step(SMOOTH, rounds, sampled), rounds, sampled)


def trial(seed: int, part: str, name: str, horizons: list[int], rounds: int) -> dict:
    """Part "rate": means and bounds at each horizon. Part "plateau": the mean at a fixed step, from a stationary "
    "point."""
    if part == "rate":
        sampled, batch = SETTINGS[name]
        clients = federation(seed, turn=1.0)
        method, horizons = theory(sampled, batch), [LATER.get(name, 1) * t for t in horizons]
        means = [
            float(squared_gradients(TASK, method, clients, sampled, t, seed, TASK.start()).mean()) for t in horizons
        ]
        return {"T": horizons, "gradient": means, "bound": [bound(clients, sampled, batch, t) for t in horizons]}
    clients, out = federation(seed, KINDS[name], alike=name == "alike"), {}
    begin = stationary(clients)
    for sampled, batch in STEADY:
        path = squared_gradients(
            RIDGED, fedmspp(batch, lam=8 * SMOOTH, tol=NEARLY), clients, sampled, rounds, seed, begin
        )
        out[f"plateau {sampled} {batch}"] = float(path[1:].mean())
    return out


def plateau(sampled: int, batch: int, **fixed: Any):
    return of(f"plateau {sampled} {batch}", part="plateau", **fixed)


def rate(name: str, series: str):
    return of(series, part="rate", name=name)


POINTS = [
    *({"part": "rate", "name": name} for name in SETTINGS),
    *({"part": "plateau", "name": kind} for kind in KINDS),
]

EXPERIMENT = Experiment(
    title="Rates of FedProx and FedMSPP on a smooth non-convex problem",
    trial=trial,
    presets={
        "smoke": Preset(POINTS, 1, {"horizons": [8, 16, 32], "rounds": 10}),
        "quick": Preset(POINTS, 10, {"horizons": [128, 512, 2048], "rounds": 1500}),
        "paper": Preset(POINTS, 10, {"horizons": [2**k for k in range(6, 13)], "rounds": 4000}),
    },
    claims=[
        Claim(
            "below-the-bounds",
            "the mean squared gradient over t < T is below the bounds of Theorems 1 and 3, at every T",
            every(**{name: lower(rate(name, "gradient"), rate(name, "bound")) for name in SETTINGS}),
        ),
        Claim(
            "rate-two-thirds",
            "for T < (bI)^3 the mean squared gradient over t < T falls as T^(-2/3) or faster: its slope in log T is at "
            "most -2/3",
            every(
                **{
                    name: slope(rate(name, "gradient"), "T", -np.inf, -2 / 3)
                    for name in ("FedProx, I = 10", "FedMSPP, I = 10, b = 4")
                }
            ),
        ),
        Claim(
            "rate-one-half",
            "for T >= (bI)^3 the mean squared gradient over t < T falls as T^(-1/2) or faster: its slope in log T is "
            "at most -1/2 (I = b = 1)",
            slope(rate("FedMSPP, I = 1, b = 1", "gradient"), "T", -np.inf, -1 / 2),
        ),
        Claim(
            "more-devices-lower-plateau",
            "at a fixed step the plateau of the squared gradient falls with the number of sampled devices (I = 8 below "
            "I = 2), where devices are alike and where they are not",
            every(**{kind: lower(plateau(8, 2, name=kind), plateau(2, 2, name=kind)) for kind in KINDS}),
        ),
        Claim(
            "larger-minibatch-lower-plateau",
            "at a fixed step the plateau of the squared gradient falls with the rows of a minibatch (b = 8 below "
            "b = 2), where devices are alike and where they are not",
            every(**{kind: lower(plateau(2, 8, name=kind), plateau(2, 2, name=kind)) for kind in KINDS}),
        ),
    ],
    panels=[
        Panel(
            "T",
            {name: rate(name, "gradient") for name in SETTINGS} | {f"bound, {n}": rate(n, "bound") for n in SETTINGS},
            "T",
            "mean squared gradient over t < T",
            "",
            log="xy",
            dashed=tuple(f"bound, {name}" for name in SETTINGS),
        )
    ],
    tables=[
        Table(
            "Plateau of the squared gradient at a fixed step",
            tuple(f"I = {i}, b = {b}" for i, b in STEADY),
            {kind: [Cell(plateau(i, b, name=kind)) for i, b in STEADY] for kind in KINDS},
        ),
        Table(
            "Table 1: order of the rounds until eps, here for eps = 0.01, I = 10, b = 4, M = 50, and what it rests on",
            ("rounds", "any heterogeneity", "non-smooth", "sampling"),
            {
                method: [
                    stated(rounds_order(method, 0.01, 10, 4, CLIENTS)),
                    *(
                        stated("yes" if yes else "no")
                        for yes in (order.any_heterogeneity, order.non_smooth, order.sampling)
                    ),
                ]
                for method, order in COMPLEXITIES.items()
            },
        ),
    ],
    reads="Theorems 1 and 3 bound means over rounds, not the last iterate. Solves are certified by their gradient. The "
    "table of orders is evaluated, not measured.",
)
