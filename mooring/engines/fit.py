"""`fit`: one method on one federation, with the two referees beside it, in memory or as a run directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import pandas as pd
import torch
from torch import Tensor, nn

from mooring.algorithms.base import Algorithm, build
from mooring.core.cohort import Round
from mooring.core.errors import RequestError
from mooring.data.clients import REGRESSION
from mooring.engines import saving
from mooring.engines.loop import Evaluation, Outcome, Plan, Progress, at_chosen, check_participation, run
from mooring.engines.prepare import Job, prepare, settle
from mooring.engines.request import fields_of, request
from mooring.engines.simulator import Simulator
from mooring.runs.directory import (
    CLIENTS_FILE,
    ROUNDS_FILE,
    RUN,
    SCHEMA,
    SPLIT,
    SUMMARY,
    Models,
    RunDir,
    create,
    open_run,
)
from mooring.runs.files import json_bytes, parquet_bytes, write_json, write_parquet
from mooring.runs.records import clients_table, rounds_table
from mooring.runs.runfile import RunFile, run_bytes
from mooring.runs.sections import Options

Tell = Callable[[str, int, int], None]  # (what is running, rounds done, rounds in all)


def silent(what: str, done: int, rounds: int) -> None:
    """The progress bar of those who want none."""


@dataclass(frozen=True)
class Trained:
    """A method's result: deployed models and losses, in the target's own units."""

    algorithm: Any
    outcome: Outcome
    common: Tensor  # [d]
    models: Tensor  # [m, d]
    validation: Tensor  # [m]
    test: Tensor  # [m]
    alpha: list[float]  # [m], the share of the own model in a mixture; nan elsewhere


@dataclass(frozen=True)
class Result:
    """What `fit` returns. Losses are averages over test rows of the models that clients would deploy."""

    job: Job
    trained: Trained
    summary: dict[str, Any]  # metric, alone, common, personal
    clients: pd.DataFrame
    rounds: pd.DataFrame
    run: Path | None

    @property
    def models(self) -> dict[str, Tensor]:
        """Every client's parameter vector by name."""
        return dict(zip(self.job.clients.names, self.trained.models))

    def predict(self, x: Any, client: str | None = None) -> Tensor:
        """Predictions at rows x by a client's model (default: the common one); a regression in the target's units."""
        names = self.job.clients.names
        if client is not None and client not in names:
            raise RequestError(f"unknown client {client!r}; the run has {len(names)}, such as {', '.join(names[:5])}.")
        w = self.trained.common if client is None else self.trained.models[names.index(client)]
        inputs = torch.as_tensor(x).to(self.job.clients.train.x.dtype)
        return in_units(self.job.clients, self.job.task.predict(w[None], inputs[None])[0])

    def module(self, client: str | None = None) -> nn.Module:
        """A client's network (default: the common one) with its weights loaded."""
        names = self.job.clients.names
        w = self.trained.common if client is None else self.trained.models[names.index(client)]
        net = self.job.task.make()
        with torch.no_grad():
            for part, value in zip(net.parameters(), self.job.task.layers(w[None]).values()):
                part.copy_(value[0])
        return net


def in_units(clients: Any, prediction: Tensor) -> Tensor:
    """A standardised prediction in the target's own units; probabilities as they are."""
    if clients.kind != REGRESSION:
        return prediction
    return prediction * clients.target_scale + clients.target_mean


def fit(
    source: Any,
    second: Any = None,
    *,
    algorithm: str | Algorithm | None = None,
    out: str | Path | None = None,
    model: Any = None,
    settings: Mapping[str, Any] | None = None,
    tell: Tell = silent,
    **options: Unpack[Options],
) -> Result:
    """Train one method on a federation and compare it with training alone and with one common model.

    `source` is a table's path, a data frame, (X, y, groups), `Clients`, each client's own data by name, or a run file;
    a network comes as `model`, or first as in `fit(model, clients)`. `algorithm` is a name (its fields in `settings`)
    or an algorithm; without one it is the run file's, or fedprox_one_stage. `options` are those of the run file's
    sections [data], [task] and [training], and override what the run file says. With `out` the run is written there
    and can be resumed; without, nothing is written.
    """
    if isinstance(source, nn.Module) or (second is not None and callable(source)):
        source, model = second, source
    asked = request(source, purpose="fit", algorithm=algorithm, settings=settings, model=model, **options)
    job = prepare(asked, None if isinstance(source, str | Path) else source, model)
    return start(job, out, tell)


def start(job: Job, out: str | Path | None, tell: Tell = silent) -> Result:
    """Settle and run a new fit."""
    asked = job.algorithms()[0]
    check_participation(asked, job.plan, len(job.clients))
    ready, exchange, server = settle(asked, job)
    job = Job(with_settled(job.run, ready), job.clients, job.task)
    directory = None if out is None else create(out, opening(job))
    return finish(job, ready, exchange, Progress(server), directory, tell)


def resume(path: str | Path, tell: Tell = silent, source: Any = None, model: Any = None) -> tuple[Result, str | None]:
    """Continue an interrupted fit to the very bytes it would have had; a finished one is only read again."""
    directory = open_run(path)
    job = prepare(directory.run, source, model)
    check_same_data(directory, job)
    ready, exchange, server = settle(job.algorithms()[0], job)
    progress, note = saving.restore(directory, server, exchange.states)
    return finish(job, ready, exchange, progress, directory, tell), note


def check_same_data(directory: RunDir, job: Job) -> None:
    """The rows must be those that the run began with."""
    if job.clients.schema is None or not (directory.path / SCHEMA).exists():
        return
    if directory.schema.get("digest") != job.clients.schema.digest:
        raise RequestError(f"{directory.path}: {job.run.data.source} has changed since the run began; start a new run.")


def finish(
    job: Job, ready: Any, exchange: Simulator, progress: Progress, directory: RunDir | None, tell: Tell
) -> Result:
    """Run what is left, judge it beside the referees, write what is not yet written."""
    trained = train(job, ready, exchange, progress, directory, tell)
    alone = trained if ready.name == "local" else referee("local", job, tell)
    common = trained if ready.name == "global" else referee("global", job, tell)
    clients = clients_frame(job, alone.test, common.test, trained)
    rounds = rounds_frame(job, progress.records)
    sizes = job.clients.test.size.double()
    summary = {"metric": job.task.metric} | {
        name: mean_over_rows(result.test, sizes)
        for name, result in (("alone", alone), ("common", common), ("personal", trained))
    }
    if directory is not None and not directory.finished:
        write_parquet(directory.path / ROUNDS_FILE, rounds_table(rounds.to_dict("records")))
        write_parquet(directory.path / CLIENTS_FILE, clients_table(clients.to_dict("records")))
        write_json(directory.path / SUMMARY, in_short(job, trained, summary))
        directory.write_models(Models(trained.common, trained.models, job.clients.names, *task_facts(job)))
    return Result(job, trained, summary, clients, rounds, directory.path if directory else None)


def train(
    job: Job, ready: Any, exchange: Simulator, progress: Progress, directory: RunDir | None = None, tell: Tell = silent
) -> Trained:
    """Run the rounds that are left; the models are the chosen round's, or the last one's if the plan says so."""
    outcome = run(
        ready,
        exchange,
        job.plan,
        progress,
        save=lambda now: saving.save(directory, now, exchange.states) if directory else None,
        tell=lambda now, rounds: tell(ready.name, now.t, rounds),
    )
    unit = job.clients.target_scale**job.task.unit_power
    shown, server, models = deployed(outcome, exchange, job.plan)
    alpha = per_client_alpha(outcome, exchange)
    return Trained(ready, outcome, server.w, models, shown.validation * unit, shown.test * unit, alpha)


def deployed(outcome: Outcome, exchange: Simulator, plan: Plan) -> tuple[Evaluation, Any, Tensor]:
    """What the plan keeps, the chosen round or the last: its evaluation, the server's state, every client's model."""
    progress, m = outcome.progress, len(exchange.clients)
    if plan.keep == "last" or progress.chosen_server is None:
        turn = Round(outcome.last.t, plan.rounds, m, m, 1.0, plan.seed)
        return outcome.last, progress.server, exchange.all_models(progress.server, turn)
    turn = Round(outcome.chosen.t, plan.rounds, m, m, 1.0, plan.seed)
    with at_chosen(progress, exchange):
        return outcome.chosen, progress.chosen_server, exchange.all_models(progress.chosen_server, turn)


def referee(name: str, job: Job, tell: Tell = silent) -> Trained:
    """Train a referee on the same data, with everyone in every round."""
    run = job.run.model_copy(update={"training": job.run.training.model_copy(update={"participation": 1.0})})
    beside = Job(run, job.clients, job.task)
    ready, exchange, server = settle(build(name, {}), beside)
    return train(beside, ready, exchange, Progress(server), None, tell)


def mean_over_rows(risk: Tensor, sizes: Tensor) -> float:
    return float((risk * sizes).nansum() / sizes[torch.isfinite(risk)].sum())


def in_short(job: Job, trained: Trained, summary: dict[str, Any]) -> dict[str, Any]:
    """What a report says of a fit before any table."""
    rounds = {"rounds": trained.outcome.last.t, "chosen_round": trained.outcome.chosen.t}
    about = {"title": job.clients.title, "algorithm": trained.algorithm.name, "notes": list(job.clients.notes)}
    return summary | about | rounds


def clients_frame(job: Job, alone: Tensor, common: Tensor, trained: Trained) -> pd.DataFrame:
    """A row a client; gain is what its own model saves over training alone, as a loss."""
    sizes = {part: getattr(job.clients, part).size.numpy() for part in ("train", "validation", "test")}
    personal = trained.test
    return pd.DataFrame(
        {
            "client": job.clients.names,
            "rows": sum(sizes.values()),
            **sizes,
            "alone": alone.numpy(),
            "common": common.numpy(),
            "personal": personal.numpy(),
            "gain": (alone - personal).numpy(),
            "lam": per_client_lam(trained.algorithm, len(job.clients)),
            "alpha": trained.alpha,
        }
    )


def per_client_lam(algorithm: Any, m: int) -> list[float]:
    lam = getattr(algorithm, "lam", float("nan"))
    if isinstance(lam, int | float):
        return [float(lam)] * m
    return list(lam.per_client) if getattr(lam, "per_client", None) else [float("nan")] * m


def per_client_alpha(outcome: Outcome, exchange: Simulator) -> list[float]:
    """The share of the own model in what each client deploys, where that is a mixture; who was never asked has none."""
    states = outcome.progress.chosen_states or exchange.states
    if not hasattr(states.first, "alpha"):
        return [float("nan")] * len(states.merged)
    alpha = states.take(torch.arange(len(states.merged))).alpha.double()
    return torch.where(states.merged > 0, alpha, 0.0).tolist()


def rounds_frame(job: Job, records: list[dict[str, Any]]) -> pd.DataFrame:
    """The records in the target's own units."""
    frame = pd.DataFrame(records).rename(columns={"round": "t"})
    for column in ("train_loss", "validation_loss", "test_loss"):
        frame[column] = frame[column].astype(float) * job.clients.target_scale**job.task.unit_power
    return frame


def with_settled(run: RunFile, ready: Any) -> RunFile:
    """The run file with the numbers that "auto" and the like became."""
    asked = run.algorithm
    settled = {k: v for k, v in fields_of(ready).items() if asked.fields.get(k) != v}
    return run.model_copy(update={"algorithm": asked.model_copy(update={"settled": settled})})


def opening(job: Job) -> dict[str, bytes]:
    """The files that a run directory appears with."""
    files = {RUN: run_bytes(job.run)}
    if job.clients.schema is not None:
        files[SCHEMA] = json_bytes(job.clients.schema.model_dump(mode="json"))
    if job.clients.placement is not None:
        files[SPLIT] = parquet_bytes(job.clients.placement)
    return files


def task_facts(job: Job) -> tuple[dict[str, Any], Any]:
    """How a models file describes its task and the order of its parameters."""
    task = job.task
    about = {"name": task.name, "metric": task.metric, "kind": job.clients.kind, "classes": list(job.clients.classes)}
    about |= {"features": list(job.clients.features), "settings": task.describe()}
    return about, [{"name": part.name, "shape": list(part.shape), "start": part.start} for part in task.layout]
