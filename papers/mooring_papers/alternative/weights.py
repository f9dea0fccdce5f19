"""Client weights (alternative, Theorem 4.3 at R = 0): weights by size beat equal weights by the ratio of their S2."""

import numpy as np

from mooring.theory.weights import s2, size_weights, uniform_weights
from mooring_papers.base.claims import NEARLY, Claim, close, higher
from mooring_papers.base.experiment import Experiment, Panel, Preset, grid
from mooring_papers.base.results import between, of
from mooring_papers.generators import LinearFederation

CLIENTS, SAMPLES, DIM, LEAST = 50, 100, 10, 10


def trial(seed: int, exponent: float, draws: int) -> dict:
    """The global model's excess risk under both weights: mean over `draws` noise vectors on one design.

    The weighted least squares fit misses the truth by (sum_i p_i X_i'X_i/n_i)^-1 sum_i p_i X_i'e_i/n_i.
    """
    make = LinearFederation(CLIENTS, SAMPLES, DIM, spread=0.0, sizes="powerlaw", exponent=exponent, least=LEAST)
    data = make.make(seed)
    x, n = data.train.x.numpy(), data.train.size.numpy()
    noise = data.truth.noise * np.random.default_rng([seed, 0]).standard_normal((len(x), draws))
    out = {}
    for name, p in {"size": size_weights(n), "uniform": uniform_weights(CLIENTS)}.items():
        weighted = x * np.repeat(p / n, n)[:, None]
        gap = np.linalg.solve(weighted.T @ x, weighted.T @ noise)
        out[name] = float(0.5 * np.mean(np.sum(gap**2, axis=0)))  # E[x x'] = I
    out["predicted"] = s2(uniform_weights(CLIENTS), n) / s2(size_weights(n), n)
    return out | {"ratio": out["uniform"] / out["size"]}


def predicted(values: dict) -> float:
    return values["size"] * values["predicted"]


UNEVEN = between(low=0.5)
EXPONENTS = [0.0, 0.5, 1.0, 1.5, 2.0]

EXPERIMENT = Experiment(
    title="Weights by size against equal weights if all clients have the same true model",
    trial=trial,
    presets={
        "smoke": Preset(grid(exponent=EXPONENTS[::2]), repeats=4, settings={"draws": 100}),
        "quick": Preset(grid(exponent=EXPONENTS), repeats=10, settings={"draws": 100}),
        "paper": Preset(grid(exponent=EXPONENTS), repeats=50, settings={"draws": 100}),
    },
    claims=[
        Claim(
            "size-weights-better",
            "with every uneven size distribution the average excess risk with equal weights is above that with "
            "weights by size",
            higher(of("uniform", exponent=UNEVEN), of("size", exponent=UNEVEN)),
        ),
        Claim(
            "factor-is-s2-ratio",
            "the average excess risk with equal weights is within 10 % of that with weights by size times the ratio "
            "of the two sums of p_i^2/n_i",
            close("uniform", of(predicted), NEARLY),
        ),
    ],
    panels=[
        Panel(
            "exponent",
            {"risk with equal weights / risk with weights by size": "ratio", "S2 ratio": "predicted"},
            "exponent of the power law of sizes",
            "ratio of average excess risks",
            dashed=("S2 ratio",),
        )
    ],
    reads="Rows are Gaussian, so the loss is unbounded: an illustration, not an instance of Theorem 4.3.",
)
