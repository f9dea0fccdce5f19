"""The lam rule of alternative, Theorem 4.4, on quadratics: three cases, from almost local to the strongest pull that
it allows."""

import numpy as np

from mooring.theory.lambda_aer import lambda_aer, regime_borders
from mooring.theory.weights import s1, uniform_weights
from mooring_papers.base.claims import NEARLY, Claim, every, flat, lower, slope
from mooring_papers.base.experiment import Experiment, Panel, Preset, grid
from mooring_papers.base.results import of

SAMPLES, DIM = 100, 10
LEAST, MOST = 1e-5, 10.0  # radii


def trial(seed: int, clients: int, per_decade: int, draws: int) -> dict:
    """Return average excess risks along R for L_i(w) = 1/2 |w - z_i|^2, z_i ~ N(w*_i, I/(d n)): mu = 1, noise = 1.

    Everything is closed form: v_i = (z_i + lam mean(z))/(1 + lam). Risks are means over `draws`.
    """
    rng = np.random.default_rng([seed, clients])
    p, n = uniform_weights(clients), np.full(clients, SAMPLES)
    unit = rng.standard_normal((draws, clients, DIM))
    unit -= unit.mean(1, keepdims=True)
    unit /= np.sqrt((unit**2).sum(2).mean(1))[:, None, None]  # R_rms = 1
    noise = rng.standard_normal((draws, clients, DIM)) / np.sqrt(DIM * SAMPLES)
    lower_border, upper_border = regime_borders(p, n)
    out: dict = {name: [] for name in ("fedprox", "shrinkage", "alone", "common", "lam", "pull")}
    radii = np.geomspace(LEAST, MOST, round(per_decade * np.log10(MOST / LEAST)) + 1)
    for radius in radii:

        def risk(lam, radius=radius):
            z = radius * unit + noise
            v = (z + lam * z.mean(1, keepdims=True)) / (1 + lam)
            return float(0.5 * np.mean(np.sum((v - radius * unit) ** 2, axis=2)))

        lam = lambda_aer(radius, 1.0, p, n).lam
        out["lam"].append(lam)
        out["pull"].append(p.max() * lam)
        out["fedprox"].append(risk(lam))
        out["shrinkage"].append(risk(s1(p, n) / radius**2))  # rho^2/(n mu R^2), the quadratic approximation's own
        out["alone"].append(risk(0.0))
        out["common"].append(risk(1e12))
    out["radius"] = radii.tolist()
    out["case A"] = [r for r, x in zip(out["fedprox"], radii) if x >= upper_border]
    out["case A alone"] = [r for r, x in zip(out["alone"], radii) if x >= upper_border]
    inner = [(r, x) for r, x in zip(out["fedprox"], radii) if lower_border <= x < upper_border]
    out["case B over R/sqrt(n)"] = [r / (x * upper_border) for r, x in inner]
    out["case C times 2N"] = [2 * clients * SAMPLES * r for r, x in zip(out["fedprox"], radii) if x < lower_border]
    out["risk at the lowest R"] = out["fedprox"][0]
    return out


CLIENTS = (20, 100, 500)
POINTS = grid(clients=CLIENTS)


def flat_below_border(m: int):
    return flat(of("fedprox", clients=m), "radius", NEARLY, span=(0, 0.1 / m))


def each(check):
    return every(**{f"m = {m}": check(m) for m in CLIENTS})


EXPERIMENT = Experiment(
    title="FedProx with the lam of Theorem 4.4 on quadratics",
    trial=trial,
    presets={
        "smoke": Preset(POINTS, repeats=3, settings={"per_decade": 2, "draws": 5}),
        "quick": Preset(POINTS, repeats=10, settings={"per_decade": 6, "draws": 20}),
        "paper": Preset(POINTS, repeats=20, settings={"per_decade": 10, "draws": 50}),
    },
    claims=[
        Claim(
            "a-as-local-training",
            "for R >= 1/sqrt(n) the average excess risk of FedProx is at most 10 % above that of local training",
            lower("case A", "case A alone", 1 + NEARLY),
        ),
        Claim(
            "c-independent-of-r",
            "for R <= 1/sqrt(mN) no average excess risk of FedProx is more than 10 % above another",
            each(flat_below_border),
        ),
        Claim(
            "c-of-order-1-over-n",
            "for R <= 1/sqrt(mN) the exponent of the average excess risk of FedProx in the number of clients is within "
            "0.1 of -1 (m = 20, 100, 500)",
            slope(of("risk at the lowest R"), "clients", -1 - NEARLY, -1 + NEARLY),
        ),
        Claim(
            "pull-within-stability",
            "p_max lam is at most mu/16 at every R",
            lower("pull", 1 / 16, 1 + 1e-9),
        ),
    ],
    panels=[
        *(
            Panel(
                "radius",
                {
                    "FedProx, lam of Theorem 4.4": of("fedprox", clients=m),
                    "FedProx, lam = noise²/(n mu R²)": of("shrinkage", clients=m),
                    "alone": of("alone", clients=m),
                    "FedAvg": of("common", clients=m),
                },
                "R",
                "average excess risk",
                f"m = {m}, n = {SAMPLES}",
                log="xy",
                upright={"B to A": 0.1, "C to B": 0.1 / m},
            )
            for m in CLIENTS
        ),
        Panel("radius", {f"m = {m}": of("lam", clients=m) for m in CLIENTS}, "R", "lam of Theorem 4.4", "", log="xy"),
    ],
    reads="The border of the cases B and C is printed as S2/S1; units and the stated regimes need S2/sqrt(S1), used "
    "here. The theorem keeps p_max lam below mu/16, so at 20 clients lam is 1.25 at most and the risk in case C is 4.8 "
    "times that of one global model; the constant falls as m grows. The quadratic approximation's own lam, shown "
    "beside it, has no such cap and follows the lower envelope.",
)
