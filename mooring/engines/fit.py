"""`fit`: one method on one federation, with the two referees beside it, in memory or as a run directory."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import pandas as pd
import torch
from torch import Tensor, nn

from mooring.algorithms.base import Algorithm, build
from mooring.core.averages import MEAN
from mooring.core.errors import RequestError
from mooring.data.clients import PARTS, REGRESSION
from mooring.engines import saving
from mooring.engines.divergence import remedy
from mooring.engines.exchange import BEST, LAST, Exchange, Roster, Scores
from mooring.engines.loop import (
    LOSSES,
    Diverged,
    Outcome,
    Progress,
    check_participation,
    deployed,
    mean_over_rows,
    run,
    settle,
)
from mooring.engines.prepare import Job, exchange_of, model_digest, prepare
from mooring.engines.request import admit_run, fields_of, request
from mooring.runs.directory import (
    CLIENTS_FILE,
    INPUTS,
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
from mooring.runs.files import DamagedFile, held, json_bytes, parquet_bytes, write_json, write_parquet
from mooring.runs.records import clients_table, rounds_table
from mooring.runs.runfile import RunFile, run_bytes
from mooring.runs.sections import Options

Tell = Callable[[str, int, int], None]  # (what is running, rounds done, rounds in all)


def silent(what: str, done: int, rounds: int) -> None:
    """The progress bar of those who want none."""


@dataclass(frozen=True)
class Deployed:
    """What a federation uses after a round: its models, and their losses in the target's own units."""

    t: int
    common: Tensor  # [d]
    models: Tensor | None  # [m, d]; None where each client keeps its own
    validation: Tensor  # [m]
    test: Tensor  # [m]
    alpha: Tensor | None  # [m], the own model's share in a mixture; None for methods without one


@dataclass(frozen=True)
class Trained:
    """A method's result after its last round and after its best, which may be the same, and which of them is kept."""

    algorithm: Any
    outcome: Outcome
    keep: str
    last: Deployed
    best: Deployed

    @property
    def kept(self) -> Deployed:
        return self.best if self.keep == BEST else self.last

    @property
    def common(self) -> Tensor:
        return self.kept.common

    @property
    def models(self) -> Any:
        return self.kept.models

    @property
    def validation(self) -> Tensor:
        return self.kept.validation

    @property
    def test(self) -> Tensor:
        return self.kept.test


@dataclass(frozen=True)
class Result:
    """What `fit` returns. Losses are averages over test rows of the models that clients would deploy."""

    job: Job
    trained: Trained
    summary: dict[str, Any]  # metric; alone, common, personal: losses; kept: "best" or "last"; best_round, last_round
    clients: pd.DataFrame
    rounds: pd.DataFrame
    run: Path | None

    @property
    def models(self) -> dict[str, Tensor]:
        """Every client's parameter vector by name."""
        return {name: self._model(name) for name in self.clients["client"]}

    def _model(self, client: str | None) -> Tensor:
        """A client's parameter vector, or the common one."""
        if client is None:
            return self.trained.common
        names = list(self.clients["client"])
        if client not in names:
            raise RequestError(f"unknown client {client!r}; the run has {len(names)}, such as {', '.join(names[:5])}.")
        if self.trained.models is None:
            raise RequestError(f"client {client!r} keeps its own model; only the common one is here.")
        return self.trained.models[names.index(client)]

    def predict(self, x: Any, client: str | None = None) -> Tensor:
        """Predictions at rows x by a client's model (default: the common one); a regression in the target's units."""
        w = self._model(client)
        inputs = torch.as_tensor(x).to(self.job.task.dtype)
        return in_units(self.job.clients, self.job.task.predict(w[None], inputs[None])[0])

    def module(self, client: str | None = None) -> nn.Module:
        """A client's network (default: the common one) with its weights loaded."""
        w = self._model(client)
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
    trust: bool = False,
    **options: Unpack[Options],
) -> Result:
    """Train one method on a federation and compare it with training alone and with one common model.

    `source` is a table's path, a data frame, (X, y, groups), `Clients`, each client's own data by name, or a run file;
    a network comes as `model`, or first as in `fit(model, clients)`. `algorithm` is a name (its fields in `settings`)
    or an algorithm; without one it is the run file's, or fedprox_one_stage. `options` are those of the run file's
    sections [data], [task] and [training], and override what the run file says. With `out` the run is written there
    and can be resumed; without, nothing is written. `trust` lets a stranger's run file run the code that it names.
    """
    if isinstance(source, nn.Module) or (second is not None and callable(source)):
        source, model = second, source
    asked = request(source, purpose="fit", algorithm=algorithm, settings=settings, model=model, trust=trust, **options)
    job = prepare(asked, None if isinstance(source, str | Path) else source, model)
    return start(job, out, tell)


def start(job: Job, out: str | Path | None, tell: Tell = silent, exchange: Exchange | None = None) -> Result:
    """Settle and run a new fit, with clients in this process unless they are reached by another exchange."""
    exchange = exchange_of(job) if exchange is None else exchange
    asked = job.algorithms()[0]
    check_participation(asked, job.plan, len(exchange.roster))
    ready, server = settle(asked, job.task, exchange, job.plan.seed)
    job = Job(with_settled(job.run, ready), job.clients, job.task)
    directory = None if out is None else create(out, opening(job))
    with nullcontext() if directory is None else held(directory.path):
        return finish(job, ready, exchange, Progress(server), directory, tell)


def resume(
    path: str | Path, tell: Tell = silent, source: Any = None, model: Any = None, trust: bool = False
) -> tuple[Result, str | None]:
    """Continue an interrupted fit to the very bytes it would have had; a finished one is only read again."""
    directory = open_run(path)
    with held(directory.path):
        admit_run(directory.run, directory.path, trust)
        job = prepare(directory.run, source, model)
        check_same_data(directory, job)
        return go_on(job, directory, exchange_of(job), tell)


def go_on(job: Job, directory: RunDir, exchange: Exchange, tell: Tell = silent) -> tuple[Result, str | None]:
    """The rest of a run from its latest checkpoint, and a note if a newer one was damaged."""
    ready, server = settle(job.algorithms()[0], job.task, exchange, job.plan.seed)
    progress, note = saving.restore(directory, server, exchange)
    return finish(job, ready, exchange, progress, directory, tell), note


def check_same_data(directory: RunDir, job: Job) -> None:
    """The rows and the model's file must be those that the run began with; a finished run must be whole."""
    changed = "has changed since the run began; start a new run"
    mine = job.clients.schema
    if mine is not None and (directory.path / SCHEMA).exists() and directory.schema.get("digest") != mine.digest:
        raise RequestError(f"{directory.path}: {job.run.data.source} {changed}.")
    was, now = directory.inputs, inputs_of(job)
    for what, name in (("rows", job.run.data.source), ("model", job.run.task.model)):
        if was and was.get(what) != now.get(what):
            raise RequestError(f"{directory.path}: {name} {changed}.")
    if directory.finished:
        try:
            _ = directory.models
        except DamagedFile as error:
            raise DamagedFile(f"{error} Remove it and resume: the checkpoints make it again.") from None


def inputs_of(job: Job) -> dict[str, Any]:
    """Digests of what a schema does not tell: rows that came as arrays or images, and the file of a model."""
    out: dict[str, Any] = {}
    if job.clients.schema is None:
        digest = hashlib.sha256(json_bytes({"names": job.clients.names}))
        for part in PARTS:
            rows = getattr(job.clients, part)
            for tensor in (rows.x, rows.y, rows.start, rows.size):
                digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(tensor.contiguous().numpy().data)
        out["rows"] = digest.hexdigest()
    if job.run.task.model is not None:
        out["model"] = model_digest(job.run.task.model)
    return out


def finish(
    job: Job, ready: Any, exchange: Exchange, progress: Progress, directory: RunDir | None, tell: Tell
) -> Result:
    """Run what is left, judge it beside the referees, write what is not yet written."""
    trained = train(job, ready, exchange, progress, directory, tell)
    alone = trained if ready.name == "local" else referee("local", job, exchange, tell)
    common = trained if ready.name == "global" else referee("global", job, exchange, tell)
    roster = exchange.roster
    losses = {name: losses_of(who, roster) for name, who in (("alone", alone), ("common", common))}
    losses["personal"] = trained.test
    clients = clients_frame(roster, losses, trained)
    rounds = rounds_frame(job, progress.records)
    rows = roster.sizes["test"]
    summary = {"metric": job.task.metric} | {name: known_mean(loss, rows) for name, loss in losses.items()}
    summary |= {"kept": trained.keep, "best_round": trained.best.t, "last_round": trained.last.t}
    if directory is not None and not directory.finished:
        write_parquet(directory.path / CLIENTS_FILE, clients_table(clients.to_dict("records")))
        write_json(directory.path / SUMMARY, in_short(job, trained, summary))
        write_trained(directory, job, roster, trained, rounds)
    return Result(job, trained, summary, clients, rounds, directory.path if directory else None)


def write_trained(directory: RunDir, job: Job, roster: Roster, trained: Trained, rounds: pd.DataFrame) -> None:
    """The rounds, the models of the round that was not kept where it is another one, and last the models kept."""
    write_parquet(directory.path / ROUNDS_FILE, rounds_table(rounds.to_dict("records")))

    def models(which: Deployed) -> Models:
        return Models(which.common, which.models, roster.names, *task_facts(job))

    if trained.best.t != trained.last.t:
        if trained.keep == BEST:
            directory.write_other_models(LAST, models(trained.last))
        else:
            directory.write_other_models(BEST, models(trained.best))
    directory.write_models(models(trained.kept))


def train(
    job: Job, ready: Any, exchange: Exchange, progress: Progress, directory: RunDir | None = None, tell: Tell = silent
) -> Trained:
    """Run the rounds that are left; what the best and the last of them deploy."""
    try:
        outcome = run(
            ready,
            exchange,
            job.plan,
            progress,
            save=lambda now: saving.save(directory, now, exchange) if directory else None,
            tell=lambda now, rounds: tell(ready.name, now.t, rounds),
        )
    except Diverged as error:
        raise Diverged(f"{error} {remedy(ready, job.task, exchange, job.plan, progress.t + 1)}") from error
    unit = job.clients.target_scale**job.task.unit_power

    def after(which: str) -> Deployed:
        shown, server = outcome.at(which)
        models, alpha = deployed(outcome, exchange, job.plan, which), exchange.numbers("alpha", which)
        return Deployed(shown.t, server.w, models, shown.validation * unit, shown.test * unit, alpha)

    last = after(LAST)
    return Trained(ready, outcome, job.plan.keep, last, last if outcome.best.t == last.t else after(BEST))


def referee(name: str, job: Job, exchange: Exchange, tell: Tell = silent) -> Trained | None:
    """Train a referee at the same clients, everyone honest and in every round; None where that cannot be done."""
    plain = {"participation": 1.0, "average": MEAN, "clip": None, "weight_cap": None, "attack": None}
    run = job.run.model_copy(update={"training": job.run.training.model_copy(update=plain)})
    beside, asked = Job(run, job.clients, job.task), build(name, {})
    apart = exchange.beside(asked)
    if apart is None:
        return None
    ready, server = settle(asked, job.task, apart, job.plan.seed)
    try:
        return train(beside, ready, apart, Progress(server), None, tell)
    except Diverged as error:
        warnings.warn(f"without the referee '{name}': {error}")
        return None


def losses_of(trained: Trained | None, roster: Roster) -> Tensor:
    """[m]: nan for a referee that could not be trained."""
    return torch.full((len(roster),), torch.nan, dtype=torch.float64) if trained is None else trained.test


def in_short(job: Job, trained: Trained, summary: dict[str, Any]) -> dict[str, Any]:
    """What a report says of a fit before any table."""
    about = {"title": job.clients.title, "algorithm": trained.algorithm.name, "notes": list(job.clients.notes)}
    return summary | about


def known_mean(risk: Tensor, sizes: Tensor) -> float:
    """The mean over rows of the clients whose loss is known."""
    return mean_over_rows(Scores(risk, torch.where(risk.isnan(), 0, sizes)))


def clients_frame(roster: Roster, losses: dict[str, Tensor], trained: Trained) -> pd.DataFrame:
    """A row a client; gain is what its own model saves over training alone, as a loss."""
    sizes = {part: size.numpy() for part, size in roster.sizes.items()}
    return pd.DataFrame(
        {
            "client": roster.names,
            "rows": sum(sizes.values()),
            **sizes,
            **{name: loss.numpy() for name, loss in losses.items()},
            "gain": (losses["alone"] - losses["personal"]).numpy(),
            "lam": per_client_lam(trained.algorithm, len(roster)),
            "alpha": torch.nan if trained.kept.alpha is None else trained.kept.alpha.numpy(),
            "left_out": left_out(trained.outcome.progress, len(roster)),
        }
    )


def left_out(progress: Progress, m: int) -> list[str | None]:
    """Of each client whose replies could not all be used: in how many rounds, and why in the last of them."""
    rounds = {place: f"{count} round{'s' * (count > 1)}" for place, count in progress.left_out.items()}
    return [f"{rounds[i]}: {progress.offenders[i]}" if i in rounds else None for i in range(m)]


def per_client_lam(algorithm: Any, m: int) -> list[float]:
    lam = getattr(algorithm, "lam", float("nan"))
    if isinstance(lam, int | float):
        return [float(lam)] * m
    return list(lam.per_client) if getattr(lam, "per_client", None) else [float("nan")] * m


def rounds_frame(job: Job, records: list[dict[str, Any]]) -> pd.DataFrame:
    """The records in the target's own units."""
    frame = pd.DataFrame(records).rename(columns={"round": "t"})
    for column in LOSSES:
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
    if inputs := inputs_of(job):
        files[INPUTS] = json_bytes(inputs)
    return files


def task_facts(job: Job) -> tuple[dict[str, Any], Any]:
    """How a models file describes its task and the order of its parameters."""
    task = job.task
    about = {"name": task.name, "metric": task.metric, "kind": job.clients.kind, "classes": list(job.clients.classes)}
    about |= {"features": list(job.clients.features), "settings": task.describe()}
    return about, [{"name": part.name, "shape": list(part.shape), "start": part.start} for part in task.layout]
