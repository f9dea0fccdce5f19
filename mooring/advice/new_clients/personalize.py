"""`personalize`: personal models for new clients of a finished run, and whether they are better than local ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from scipy.special import ndtri
from torch import Tensor

from mooring.advice.evaluation.loss_sums import ModelTriple, add_sums, mean_losses, sum_losses
from mooring.advice.inference.recommendation import DEFAULT_LEVEL, recommend
from mooring.advice.new_clients.model_average import average_models
from mooring.advice.reporting.tables import pick_models, recommendation_columns
from mooring.algorithms.base import build
from mooring.core.cohort import Round
from mooring.core.errors import RequestError
from mooring.core.task import Task
from mooring.data.clients import PARTS, Clients
from mooring.data.folds import (
    concatenate_rows,
    has_test_rows,
    iterate_client_folds,
    replace_client_rows,
    row_clients,
    row_losses,
    usable_rows,
)
from mooring.data.loading import load
from mooring.data.tables import count_phrase, quote_list
from mooring.engines.adaptation import adapt_models
from mooring.engines.local_update import extend_model
from mooring.engines.personal_parts import keep_personal_parts
from mooring.engines.predict import choose_method, read_schema
from mooring.engines.prepare import read_trained_task
from mooring.engines.simulate import simulate
from mooring.engines.training_state import TrainingPlan
from mooring.runs.atomic_files import Stream, json_bytes, parquet_bytes
from mooring.runs.directory import (
    CLIENTS_FILE,
    MODELS_FILE,
    RUN_FILE,
    SCHEMA_FILE,
    SPLIT_FILE,
    SUMMARY_FILE,
    RunDirectory,
    create_run,
    models_file,
)
from mooring.runs.runfile import run_bytes
from mooring.runs.table_schemas import CLIENTS_SCHEMA, clients_table
from mooring.shapes.columns import ShapedColumns
from mooring.tasks.linear_losses import Poisson
from mooring.theory.federation_gain import risk_ratio

INTERVAL_Z = float(ndtri((1 + DEFAULT_LEVEL) / 2))
AVERAGE_METHOD = "average"  # of new clients of an advice: the average of its settings
MIN_RATIO_ROWS = 10  # held-out rows below which no ratio of losses is reported


class Personalized(NamedTuple):
    """One row per new client, in the target's own units, their models, and how the models were made."""

    clients: pd.DataFrame  # as in an advice, and ratio: local loss over personal loss, with its interval
    models: Tensor  # [C, d], the recommended models
    metric: str
    way: str
    notes: list[str]
    run: Path | None


def personalize(
    path: str | Path,
    source: object,
    *,
    how: str = "auto",
    method: str | None = None,
    out: str | Path | None = None,
    seed: int = 0,
    min_rows: int = 5,
    drop_small: bool = False,
) -> Personalized:
    """Personal models for the clients in `source`, from the global model of the run at `path`.

    For an advice that is solved exactly they are the average of all settings, as for its clients (`model_average.py`).
    `how` sets another method (`adaptation.py`), and other runs have their algorithm's own. A table without the run's
    client column is one new client. Held-out rows show the recommended model (personal, global or local), improvements
    with intervals and probabilities, and the ratio of local to personal loss (the federation gain). With `out` a new
    run directory has the models of the run and of the new clients, and serves `predict`. `method` chooses among those
    of a comparison.
    """
    if out is not None and Path(out).exists():
        raise RequestError(f"{out} already exists; choose another --out.")
    directory, notes = choose_method(path, method)
    models, asked = directory.models, directory.run.algorithm
    if asked is None:
        raise RequestError(f"{path} has no algorithm that new clients could join.")
    trained_task, schema = read_trained_task(directory), read_schema(directory)
    new_clients = load(
        source, schema=schema, seed=seed, dtype=trained_task.dtype, min_rows=min_rows, drop_small=drop_small
    )
    trained_task = raise_max_count(trained_task, new_clients)
    known = [name for name in new_clients.names if name in set(models.clients)]
    if known:
        taken = f"in the run already, {quote_list(known, 3)}: their rows are taken as those of new clients"
        notes.append(
            f"{count_phrase(len(known), 'client')} {taken}{'' if out is None else ', and their models replaced'}."
        )
    algorithm = build(asked.name, asked.fields | (asked.resolved or {}), directory.path)
    algorithm = keep_personal_parts(algorithm, trained_task)
    task = algorithm.deployed_task(trained_task)
    centre = models.common if models.centre is None else models.centre
    server = algorithm.init(trained_task, centre[: trained_task.dim])[0]
    mix = models.mix if how == "auto" else None
    shape = None if schema.shape is None else ShapedColumns.from_json(schema.shape)

    def fit_personal(clients: Clients) -> Tensor:
        if mix is not None:
            return average_models(task, usable_rows(clients), mix, shape)
        m = len(clients)
        turn = Round(1, 1, m, m, 1.0, seed)
        adapted = adapt_models(algorithm, server, trained_task, clients.cohort(), turn, how=how)
        return extend_model(adapted, task.dim)

    def train_models(clients: Clients) -> ModelTriple:
        local = extend_model(fit_locally(trained_task, clients, seed), task.dim)
        return ModelTriple(local, models.common, fit_personal(clients), centre[None])

    frame, recommended = evaluate_new_clients(task, new_clients, train_models, seed)
    way = AVERAGE_METHOD if mix is not None else algorithm.new_client_method if how == "auto" else how
    result = Personalized(
        frame, recommended, task.metric, way, [*notes, *new_clients.notes], None if out is None else Path(out)
    )
    if out is not None:
        join_run(out, directory, new_clients, result, task)
    return result


def raise_max_count(task: Task, clients: Clients) -> Task:
    """The task of counts whose predictions may be as large as any count of these clients."""
    if not isinstance(task, Poisson) or task.max_count is None:
        return task
    return replace(task, max_count=max(task.max_count, float(usable_rows(clients).y.max())))


def join_run(out: str | Path, before: RunDirectory, new_clients: Clients, result: Personalized, task: Task) -> None:
    """Write a run directory with the models of a run and of its new clients; it appears complete, or not at all."""
    run = before.run.model_copy(update={"mooring": before.run.mooring.model_copy(update={"purpose": "personalize"})})
    files: dict[str, bytes | Stream] = {RUN_FILE: run_bytes(run), SCHEMA_FILE: json_bytes(before.schema)}
    if new_clients.placement is not None:
        files[SPLIT_FILE] = parquet_bytes(new_clients.placement)
    counts = {part: getattr(new_clients, part).size.numpy() for part in PARTS}
    table = result.clients.assign(**counts)
    rows = table[[name for name in CLIENTS_SCHEMA.names if name in table]].to_dict("records")
    if (before.path / CLIENTS_FILE).exists():
        old = before.clients.astype(object).where(lambda known: known.notna(), None)
        rows = [*old[~old["client"].isin(new_clients.names)].to_dict("records"), *rows]
    files[CLIENTS_FILE] = parquet_bytes(clients_table(rows))
    about = {
        "title": new_clients.title,
        "metric": result.metric,
        "algorithm": run.algorithm and run.algorithm.name,
        "way": result.way,
    }
    newly = {"new_clients": result.clients.to_dict("records"), "notes": result.notes, "joined": str(before.path)}
    files[SUMMARY_FILE] = json_bytes(about | newly)
    models = before.models
    others = [] if models.personal is None else [i for i, n in enumerate(models.clients) if n not in new_clients.names]
    personal = result.models if models.personal is None else torch.cat([models.personal[others], result.models])
    names = (*(models.clients[i] for i in others), *new_clients.names)
    description = models.task | {"settings": task.describe()}
    files[MODELS_FILE] = models_file(models._replace(personal=personal, clients=names, task=description))
    create_run(out, files)


def fit_locally(task: Task, clients: Clients, seed: int) -> Tensor:
    """[C, d]: each new client's own fit, as the baseline `local` makes it."""
    plan = TrainingPlan(seed=seed)
    return simulate(build("local", {}), task, clients, plan).models(plan.checkpoint)


def evaluate_new_clients(
    task: Task, clients: Clients, train: Callable[[Clients], ModelTriple], seed: int = 0
) -> tuple[pd.DataFrame, Tensor]:
    """One row per new client, and the model that each is recommended, fitted on all its rows.

    Held-out rows decide: fold by fold, or, where the table has its own split, its test rows.
    """
    complete = (
        clients
        if has_test_rows(clients)
        else replace_client_rows(clients, concatenate_rows(clients.train, clients.test), clients.validation)
    )
    models, parts, seen = train(complete), [], []
    for part, held in [(complete, clients.test)] if has_test_rows(clients) else iterate_client_folds(complete, seed):
        fold_models = models if part is complete else train(part)
        parts.append(sum_losses(task, held, fold_models))
        seen.append(
            (row_clients(held), *(row_losses(task, w, held) for w in (fold_models.local, fold_models.personal)))
        )
    sums, unit = add_sums(parts), clients.target_scale**task.unit_power
    recommendations = recommend(sums, sum_losses(task, usable_rows(clients), models))
    owner, local, personal = (torch.cat(columns).numpy() for columns in zip(*seen))
    return pd.DataFrame(
        {
            "client": clients.names,
            "rows": sum(getattr(clients, part).size for part in PARTS).numpy(),
            **recommendation_columns(recommendations, unit),
            **{f"{name}_held_out": unit * part.numpy() for name, part in mean_losses(sums).items()},
            "held_out_rows": sums.rows.numpy().astype(int),
            **loss_ratios(owner, local, personal, len(clients)),
        }
    ), pick_models(models, recommendations.recommended)


def loss_ratios(owner: np.ndarray, local: np.ndarray, personal: np.ndarray, m: int) -> dict[str, list[float]]:
    """The federation gain of each new client, local over personal loss, with its interval; nan with few rows."""
    out: dict[str, list[float]] = {"ratio": [], "ratio_low": [], "ratio_high": []}
    for i in range(m):
        own = owner == i
        ratio = risk_ratio(local[own], personal[own], INTERVAL_Z) if own.sum() >= MIN_RATIO_ROWS else None
        for name, value in zip(out, (nan, nan, nan) if ratio is None else (ratio.value, ratio.low, ratio.high)):
            out[name].append(value)
    return out
