"""The theorem of the alternative in practice: rules that choose between the global model and local models."""

from dataclasses import replace

import numpy as np
from torch import Tensor

from mooring.algorithms.dichotomous import Dichotomous
from mooring.core.cohort import Round
from mooring.core.local_training import LocalTraining
from mooring.core.task import HasSolve, require
from mooring.data.clients import Clients
from mooring_papers.alternative._problem import Problem, problem
from mooring_papers.base.claims import NEARLY, Claim, every, lower
from mooring_papers.base.experiment import Experiment, Panel, Preset, grid
from mooring_papers.base.results import of

KNOWN = Dichotomous("known_r", inner="exact", ridge=0.0, mu=1.0, ell_max=1.0)  # in units of noise/mu
FULL = Dichotomous("full_data", inner="exact", unit="system", ridge=0.0)
SPLIT = Dichotomous("sample_split", inner="exact", unit="client", ridge=0.0)
LEAST, MOST = 0.01, 10.0
MANY, FEW = 1000, 100  # validation rows of a client
SPLITS = 4  # random splits of each data set


def trial(seed: int, task: str, clients: int, per_decade: int, samples: int = 100) -> dict:
    """Return average excess risks along R_rms in units of noise/(mu sqrt(n)); validation rows choose, risks are
    exact."""
    relative = np.geomspace(LEAST, MOST, round(per_decade * np.log10(MOST / LEAST)) + 1)
    rows = [risks(problem(seed, task, clients, float(radius), samples, MANY), seed) for radius in relative]
    out = {name: [row[name] for row in rows] for name in rows[0]}
    return out | {"relative": relative.tolist(), "oracle": np.minimum(out["common"], out["alone"]).tolist()}


def risks(federation: Problem, seed: int) -> dict:
    task, data = federation.task, federation.clients
    models = {
        "common": require(task, HasSolve).solve(data.train.pooled(data.weights()))[0],
        "alone": require(task, HasSolve).solve(data.train.full(task)),
        "known R": personal_models(replace(KNOWN, radius=federation.radius), federation, seed),
        "full data": personal_models(FULL, federation, seed),
    }
    few_rows = federation._replace(clients=limit_validation_rows(data))
    splits = range(SPLITS * seed, SPLITS * (seed + 1))
    return {name: federation.risk(v) for name, v in models.items()} | {
        "sample split": float(
            np.mean([federation.risk(personal_models(SPLIT, federation, split)) for split in splits])
        ),
        "sample split, few rows": float(
            np.mean([federation.risk(personal_models(SPLIT, few_rows, split)) for split in splits])
        ),
    }


def limit_validation_rows(data: Clients) -> Clients:
    """Return the same clients with FEW validation rows each."""
    size = data.validation.size.clamp(max=FEW)
    return replace(data, validation=replace(data.validation, size=size, cache={}))


def personal_models(rule: Dichotomous, federation: Problem, seed: int) -> Tensor:
    """Return [m, d]: the model that the rule chooses for every client."""
    m = len(federation.clients)
    server, client = rule.init(federation.task, federation.task.start())
    turn = Round(1, 1, m, m, 1.0, seed)
    local = LocalTraining(rule, federation.task, federation.clients.cohort(), turn)
    return rule.client_update(server, client, local)[0].v


def near_envelope(rule: str, factor: float):
    return every(**{other: lower(rule, other, factor) for other in ("common", "alone")})


def at_both_ends(rule: str):
    ends = {"lowest R": (0, "common"), "highest R": (-1, "alone")}
    return every(
        **{name: lower(of(rule, at=place), of(other, at=place), 1 + NEARLY) for name, (place, other) in ends.items()}
    )


POINTS = grid(task=["linear", "logistic"], clients=[10, 40])
CURVES = {
    "rule that knows R": "known R",
    "full data, all choose as one": "full data",
    f"sample split, {MANY} rows to choose": "sample split",
    f"sample split, {FEW} rows to choose": "sample split, few rows",
    "the better of the two": "oracle",
}

EXPERIMENT = Experiment(
    title="Choosing between the global model and local models",
    trial=trial,
    presets={
        "smoke": Preset(POINTS, repeats=1, settings={"per_decade": 1}),
        "quick": Preset(POINTS, repeats=10, settings={"per_decade": 2}),
        "paper": Preset(POINTS, repeats=50, settings={"per_decade": 5}),
    },
    claims=[
        Claim(
            "known-r-optimal-at-both-ends",
            "the average excess risk of the rule that knows R is at most 10 % above FedAvg's at the lowest R and above "
            "local training's at the highest",
            at_both_ends("known R"),
        ),
        Claim(
            "test-errors-choose-well",
            "the average excess risk of the rule that trains both and deploys the one with the lower error on held-out "
            "rows is at every R at most 10 % above that of either",
            near_envelope("full data", 1 + NEARLY),
        ),
    ],
    panels=[
        Panel(
            "relative",
            {label: of(name, **point) for label, name in CURVES.items()},
            r"$R\,\mu\sqrt{n}/\rho$",
            "average excess risk",
            f"{point['task']}, m = {point['clients']}",
            log="xy",
            dashed=("the better of the two",),
        )
        for point in POINTS
    ],
    reads="The sources compare the two models on a test set; here rows that serve for nothing else choose, and the "
    "planted truth judges. With 1,000 rows per client the choice costs little, and what splitting costs is seen; "
    "with 100 rows clients that choose one by one err more often, and a split costs up to seven times the better risk.",
)
