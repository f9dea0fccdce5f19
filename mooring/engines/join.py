"""`personalize`: newcomers to a finished run get models of their own, and learn whether joining pays."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor

from mooring.algorithms.base import build
from mooring.core.cohort import Round, Rows
from mooring.core.errors import RequestError
from mooring.data.clients import Clients
from mooring.data.sources import load
from mooring.engines.loop import Plan
from mooring.engines.newcomer import personalize, way_of
from mooring.engines.predict import task_of
from mooring.engines.simulate import simulate
from mooring.runs.directory import Models, open_run, write_models

LEAST_TEST_ROWS = 10  # with fewer held-out rows a difference of losses says nothing
CONFIDENT = 1.96


class Joined(NamedTuple):
    """What newcomers get: a row each, in the target's own units, their models, and how the models were made."""

    clients: pd.DataFrame  # client, rows, alone, common, personal, gain, gain_low, gain_high, pays
    models: Tensor  # [C, d]
    metric: str
    way: str
    notes: list[str]


def join(
    path: str | Path, source: Any, *, how: str = "auto", out: str | Path | None = None, seed: int = 0, min_rows: int = 5
) -> Joined:
    """Personal models for the clients in `source`, from the common model of the run at `path`.

    A table without the run's client column is one newcomer. Whether joining pays is judged on rows that took no part in
    training: the loss alone less the loss of the personal model, with a 95 % interval.
    """
    if out is not None and Path(out).exists():
        raise RequestError(f"{out} already exists; choose another --out.")
    directory = open_run(path)
    models, asked = directory.models, directory.run.algorithm
    if asked is None:
        raise RequestError(f"{path} holds several methods; give one of them, such as {path}/methods/fedavg.")
    task, schema = task_of(directory)
    newcomers = load(source, schema=schema, seed=seed, dtype=task.dtype, min_rows=min_rows)
    algorithm = build(asked.name, asked.fields | (asked.settled or {}))
    server = algorithm.start(task, models.common)[0]
    m = len(newcomers)
    found = personalize(algorithm, server, task, newcomers.cohort(), Round(1, 1, m, m, 1.0, seed), how=how)
    frame = judged(task, newcomers, train_alone(task, newcomers, seed), models.common, found)
    if out is not None:
        write_models(out, Models(models.common, found, newcomers.names, models.task, models.layout))
    return Joined(frame, found, task.metric, way_of(algorithm) if how == "auto" else how, newcomers.notes)


def train_alone(task: Any, clients: Clients, seed: int) -> Tensor:
    """[C, d]: each newcomer's own fit, as the referee `local` makes it."""
    plan = Plan(seed=seed)
    return simulate(build("local", {}), task, clients, plan).models(plan.keep)


def judged(task: Any, clients: Clients, alone: Tensor, common: Tensor, personal: Tensor) -> pd.DataFrame:
    """A row a newcomer; `pays` is "yes", "no" or "undecided"."""
    unit = clients.target_scale**task.unit_power
    rows = []
    for i, name in enumerate(clients.names):
        mine = clients.test.select(torch.tensor([i]))
        count = int(mine.size[0])
        known = {who: row_risks(task, w, mine) * unit for who, w in _models(alone, common, personal, i)}
        gain = known["alone"] - known["personal"]
        width = CONFIDENT * float(gain.std()) / count**0.5 if count >= LEAST_TEST_ROWS else float("nan")
        low, high = float(gain.mean()) - width, float(gain.mean()) + width
        rows.append(
            {
                "client": name,
                "rows": sum(int(getattr(clients, part).size[i]) for part in ("train", "validation", "test")),
                **{who: float(risk.mean()) for who, risk in known.items()},
                "gain": float(gain.mean()),
                "gain_low": low,
                "gain_high": high,
                "pays": "yes" if low > 0 else "no" if high < 0 else "undecided",
            }
        )
    return pd.DataFrame(rows)


def _models(alone: Tensor, common: Tensor, personal: Tensor, i: int) -> list[tuple[str, Tensor]]:
    return [("alone", alone[i : i + 1]), ("common", common[None]), ("personal", personal[i : i + 1])]


def row_risks(task: Any, w: Tensor, rows: Rows) -> Tensor:
    """[n]: the reported loss of each of one client's rows; nan for a client without rows."""
    if int(rows.size[0]) == 0:
        return torch.full((1,), torch.nan, dtype=torch.float64)
    return task.row_risk(w, rows.padded())[0].double()
