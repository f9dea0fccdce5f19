"""`personalize`: newcomers to a finished run get models of their own, and learn whether joining would have paid."""

from __future__ import annotations

from math import nan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from scipy.stats import norm
from torch import Tensor

from mooring.advice.evidence import LEAST, LEVEL, judge
from mooring.advice.folds import row_losses
from mooring.advice.newcomer import models_of_newcomers
from mooring.algorithms.base import build
from mooring.core.cohort import Round
from mooring.core.errors import RequestError
from mooring.data.clients import PARTS, Clients
from mooring.data.sources import load
from mooring.data.tables import counted, listing
from mooring.engines.loop import Plan
from mooring.engines.predict import chosen, task_of
from mooring.engines.simulate import simulate
from mooring.runs.directory import CLIENTS_FILE, RUN, SCHEMA, SPLIT, SUMMARY, RunDir, create
from mooring.runs.files import json_bytes, parquet_bytes, write_json, write_parquet
from mooring.runs.records import CLIENTS, clients_table
from mooring.runs.runfile import run_bytes
from mooring.theory.federation_gain import risk_ratio

CONFIDENT = float(norm.ppf((1 + LEVEL) / 2))


class Personalized(NamedTuple):
    """What newcomers get: a row each, in the target's own units, their models, and how the models were made."""

    clients: pd.DataFrame  # client, rows, alone, common, personal, gain and ratio with _low and _high, pays, verdict
    models: Tensor  # [C, d]
    metric: str
    way: str
    notes: list[str]
    run: Path | None


def personalize(
    path: str | Path,
    source: Any,
    *,
    how: str = "auto",
    method: str | None = None,
    out: str | Path | None = None,
    seed: int = 0,
    min_rows: int = 5,
    drop_small: bool = False,
) -> Personalized:
    """Personal models for the clients in `source`, from the common model of the run at `path`.

    A table without the run's client column is one newcomer. Newcomers are judged as advice judges, on rows that took no
    part in training: the gain of the personal model over training alone and the ratio of the two losses (the federation
    gain), each with its interval, and a verdict. With `out` they join the run: a new run directory has the models of
    both, and serves `predict`. `method` chooses among those of a comparison.
    """
    if out is not None and Path(out).exists():
        raise RequestError(f"{out} already exists; choose another --out.")
    directory, said = chosen(path, method)
    models, asked = directory.models, directory.run.algorithm
    if asked is None:
        raise RequestError(f"{path} has no algorithm that newcomers could join.")
    task, schema = task_of(directory)
    newcomers = load(source, schema=schema, seed=seed, dtype=task.dtype, min_rows=min_rows, drop_small=drop_small)
    known = [name for name in newcomers.names if name in set(models.clients)]
    if known:
        taken = f"in the run already, {listing(known, 3)}: their rows are taken as those of newcomers"
        said.append(f"{counted(len(known), 'client')} {taken}{'' if out is None else ', and their models replaced'}.")
    algorithm = build(asked.name, asked.fields | (asked.settled or {}), directory.path)
    server = algorithm.start(task, models.common)[0]
    m = len(newcomers)
    found = models_of_newcomers(algorithm, server, task, newcomers.cohort(), Round(1, 1, m, m, 1.0, seed), how=how)
    frame = judged(task, newcomers, train_alone(task, newcomers, seed), models.common, found, seed)
    way = algorithm.newcomer if how == "auto" else how
    told = Personalized(frame, found, task.metric, way, [*said, *newcomers.notes], None if out is None else Path(out))
    if out is not None:
        join_run(out, directory, newcomers, told)
    return told


def join_run(out: str | Path, before: RunDir, newcomers: Clients, told: Personalized) -> None:
    """A new run directory with the models of a run and of its newcomers."""
    run = before.run.model_copy(update={"mooring": before.run.mooring.model_copy(update={"purpose": "personalize"})})
    files = {RUN: run_bytes(run), SCHEMA: json_bytes(before.schema)}
    if newcomers.placement is not None:
        files[SPLIT] = parquet_bytes(newcomers.placement)
    directory = create(out, files)
    counts = {part: getattr(newcomers, part).size.numpy() for part in PARTS}
    mine = told.clients.assign(**counts)
    rows = mine[[name for name in CLIENTS.names if name in mine]].to_dict("records")
    if (before.path / CLIENTS_FILE).exists():
        old = before.clients.astype(object).where(lambda known: known.notna(), None)
        rows = [*old[~old["client"].isin(newcomers.names)].to_dict("records"), *rows]
    write_parquet(directory.path / CLIENTS_FILE, clients_table(rows))
    about = {
        "title": newcomers.title,
        "metric": told.metric,
        "algorithm": run.algorithm and run.algorithm.name,
        "way": told.way,
    }
    newly = {"newcomers": told.clients.to_dict("records"), "notes": told.notes, "joined": str(before.path)}
    write_json(directory.path / SUMMARY, about | newly)
    models = before.models
    kept = [] if models.personal is None else [i for i, n in enumerate(models.clients) if n not in newcomers.names]
    personal = told.models if models.personal is None else torch.cat([models.personal[kept], told.models])
    names = (*(models.clients[i] for i in kept), *newcomers.names)
    directory.write_models(models._replace(personal=personal, clients=names))


def train_alone(task: Any, clients: Clients, seed: int) -> Tensor:
    """[C, d]: each newcomer's own fit, as the referee `local` makes it."""
    plan = Plan(seed=seed)
    return simulate(build("local", {}), task, clients, plan).models(plan.keep)


def judged(task: Any, clients: Clients, alone: Tensor, common: Tensor, personal: Tensor, seed: int = 0) -> pd.DataFrame:
    """A row a newcomer; `pays` is "yes", "no" or "undecided": whether the personal model beats training alone."""
    found = judge(task, clients, {"alone": alone, "common": common, "personal": personal}, seed)
    gain = found.gain
    return pd.DataFrame(
        {
            "client": clients.names,
            "rows": sum(getattr(clients, part).size for part in PARTS).numpy(),
            **found.means,
            "gain": gain.mean,
            "gain_low": gain.low,
            "gain_high": gain.high,
            **ratios(task, clients, alone, personal),
            "pays": np.where(gain.better, "yes", np.where(gain.worse, "no", "undecided")),
            "verdict": found.verdict,
        }
    )


def ratios(task: Any, clients: Clients, alone: Tensor, personal: Tensor) -> dict[str, list[float]]:
    """The federation gain of each newcomer, loss alone over personal loss, with its interval; nan with few rows."""
    owner = np.repeat(np.arange(len(clients)), clients.test.size.numpy())
    first, second = (row_losses(task, models, clients.test).numpy() for models in (alone, personal))
    out: dict[str, list[float]] = {"ratio": [], "ratio_low": [], "ratio_high": []}
    for i, count in enumerate(clients.test.size.tolist()):
        found = risk_ratio(first[owner == i], second[owner == i], CONFIDENT) if count >= LEAST else None
        for name, value in zip(out, (nan, nan, nan) if found is None else (found.value, found.low, found.high)):
            out[name].append(value)
    return out
