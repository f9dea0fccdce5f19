"""Figure 6 of `kernel`: fitting a Chebyshev polynomial from clients that each see one strip of the interval."""

import numpy as np
import torch

from mooring.theory.kernel_operator import limit_point, theta_flow
from mooring_papers.base.claims import LINEAR, NEARLY, Claim, alike, every, lower, straight
from mooring_papers.base.experiment import Cell, Experiment, Panel, Preset, Table
from mooring_papers.base.results import Ref, of
from mooring_papers.generators import Chebyshev
from mooring_papers.generators.chebyshev import U5, squared_distance
from mooring_papers.kernel._gains import METHODS, updates

ETA, NOISE, CLIENTS = 0.1, 0.5, 20
SAMPLES = [CLIENTS * n for n in range(1, 11)]
LABELS = {m: m if m == "FedProx" else f"FedAvg, {m}" for m in METHODS}


def error(method: str) -> str:
    return f"mse {method}"


def reciprocal(method: str) -> str:
    return f"1/mse {method}"


def last_slope(method: str) -> Ref:
    """1 / (MSE N) at the largest N."""
    return of(lambda values: values[reciprocal(method)][-1] / SAMPLES[-1])


def slope(method: str) -> str:
    return f"slope {method}"


def trial(seed: int, draws: int) -> dict:
    """Mean over `draws` noise vectors of the integral of (f - U_5)^2 at each method's limit, for N = 20, ..., 200.

    Besides: the reciprocal of that mean, and its least-squares slope in N.
    """
    out: dict = {"N": SAMPLES} | {error(method): [] for method in METHODS}
    for total in SAMPLES:
        data = Chebyshev(clients=CLIENTS, samples=total // CLIENTS, noise=NOISE).make(seed)
        features = [data.train.of(i)[0].numpy() for i in range(CLIENTS)]
        noise = np.random.default_rng([seed, total]).standard_normal((total, draws))
        y = (np.concatenate(features) @ np.array(U5))[:, None] + NOISE * noise
        for method, update in updates(ETA).items():
            theta = torch.from_numpy(limit_point(theta_flow(features, update), y).T)
            out[error(method)].append(float(squared_distance(theta).mean()))
    for method in METHODS:
        out[reciprocal(method)] = [1 / value for value in out[error(method)]]
        out[slope(method)] = float(np.polyfit(SAMPLES, out[reciprocal(method)], 1)[0])
    return out


EXPERIMENT = Experiment(
    title="Estimation error of a Chebyshev polynomial against the number of samples",
    trial=trial,
    presets={
        "smoke": Preset(repeats=4, settings={"draws": 50}),
        "quick": Preset(repeats=10, settings={"draws": 50}),
        "paper": Preset(repeats=20, settings={"draws": 25}),
    },
    claims=[
        Claim(
            "curves-close",
            "at every N the mean squared errors of the four methods are within 10 % of each other",
            alike([error(m) for m in METHODS], NEARLY),
        ),
        Claim(
            "reciprocal-linear",
            "for each method the reciprocal of the mean squared error is a straight line in N (squared correlation of "
            "at least 0.95)",
            every(**{m: straight(reciprocal(m), "N", LINEAR) for m in METHODS}),
        ),
        Claim(
            "slopes-similar",
            "the slopes of the four reciprocals in N are within 10 % of each other",
            alike([slope(m) for m in METHODS], NEARLY),
        ),
        Claim(
            "s10-slope-smaller",
            "the slope of s = 10 is below those of the other methods",
            every(**{m: lower(slope("s = 10"), slope(m)) for m in METHODS if m != "s = 10"}),
        ),
    ],
    panels=[
        Panel("N", {LABELS[m]: error(m) for m in METHODS}, "N", "MSE", "(a)"),
        Panel("N", {LABELS[m]: reciprocal(m) for m in METHODS}, "N", "1 / MSE", "(b)"),
    ],
    tables=[
        Table(
            "Ten samples a client",
            ("MSE", "1/(MSE N)"),
            {
                LABELS[m]: [
                    Cell(of(error(m), at=-1)),
                    Cell(last_slope(m)),
                ]
                for m in METHODS
            },
        )
    ],
    reads="At s = 1 the error settles only after some 100,000 rounds, so the limits are computed in closed form. The "
    "integral is exact and, as printed, not divided by the interval's length. Points start at each strip's left end. A "
    "repeat is the mean of 50 of the 500 trials.",
)
