"""`compare`: several methods on the same data, splits and cohorts; each is a run of its own inside one directory."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import pandas as pd

from mooring.algorithms.base import Algorithm
from mooring.engines import saving
from mooring.engines.fit import (
    Tell,
    Trained,
    check_same_data,
    known_mean,
    opening,
    rounds_frame,
    silent,
    train,
    with_settled,
    write_trained,
)
from mooring.engines.loop import Progress, check_participation, settle
from mooring.engines.prepare import Job, exchange_of, prepare
from mooring.engines.request import admit_run, request
from mooring.engines.scores import known_scores
from mooring.runs.directory import COMPARISON, METHODS, RunDir, create, open_run
from mooring.runs.files import held, write_json
from mooring.runs.runfile import RunFile
from mooring.runs.sections import Options


@dataclass(frozen=True)
class Comparison:
    """What `compare` returns: a row a method, and each client's test loss by method, in the target's own units."""

    metric: str
    methods: pd.DataFrame  # method, test_loss, validation_loss, seconds, rounds, bytes, ...
    clients: pd.DataFrame  # client, rows, then a column a method
    run: Path | None
    notes: list[str]  # what was dropped, imputed or moved in the data


def compare(
    source: Any,
    methods: Sequence[str | Algorithm] | None = None,
    *,
    out: str | Path | None = None,
    model: Any = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    tell: Tell = silent,
    trust: bool = False,
    **options: Unpack[Options],
) -> Comparison:
    """Train every method on the same federation; `methods` are names or algorithms, `settings` fields by name.

    `source`, `model`, `trust` and `options` are those of `fit`. A run file says the methods too, unless they are given.
    """
    asked = request(source, purpose="compare", methods=methods, settings=settings, model=model, trust=trust, **options)
    job = prepare(asked, None if isinstance(source, str | Path) else source, model)
    for algorithm in job.algorithms():
        check_participation(algorithm, job.plan, len(job.clients))
    directory = None if out is None else create(out, opening(job))
    with nullcontext() if directory is None else held(directory.path):
        return run_methods(job, directory, tell)


def resume(
    path: str | Path, tell: Tell = silent, source: Any = None, model: Any = None, trust: bool = False
) -> Comparison:
    """Finish an interrupted comparison: methods that are done are kept, the current one goes on from its checkpoint."""
    directory = open_run(path)
    with held(directory.path):
        admit_run(directory.run, directory.path, trust)
        job = prepare(directory.run, source, model)
        check_same_data(directory, job)
        return run_methods(job, directory, tell)


def run_methods(job: Job, directory: RunDir | None, tell: Tell) -> Comparison:
    rows, columns = [], {}
    for label, algorithm in labelled(job):
        begin = time.perf_counter()
        trained, records = run_one(job, label, algorithm, directory, tell)
        frame = rounds_frame(job, records)
        rows.append(
            {
                "method": label,
                "test_loss": known_mean(trained.test, job.clients.test.size),
                "validation_loss": known_mean(trained.validation, job.clients.validation.size),
                **known_scores(job.task, job.clients, trained.models).overall,
                "seconds": max(time.perf_counter() - begin, float(frame["seconds"].sum())),
                "rounds": int(frame["t"].max()),
                "kept_round": trained.kept.t,
                "last_test_loss": float(frame["test_loss"].dropna().iloc[-1]),
                "bytes": int(frame["bytes_up"].sum() + frame["bytes_down"].sum()),
            }
        )
        columns[label] = trained.test.numpy()
    clients = pd.DataFrame({"client": job.clients.names, "rows": total_rows(job), **columns})
    where = directory.path if directory else None
    result = Comparison(job.task.metric, pd.DataFrame(rows), clients, where, job.clients.notes)
    if directory is not None:
        about = {"title": job.clients.title, "notes": list(job.clients.notes), "run": None}
        write_json(directory.path / COMPARISON, as_json(result) | about)
    return result


def labelled(job: Job) -> list[tuple[str, Any]]:
    """Each method under its name, numbered where a name comes twice."""
    algorithms = job.algorithms()
    names = [a.name for a in algorithms]
    labels = [n if names.count(n) == 1 else f"{n}-{names[: i + 1].count(n)}" for i, n in enumerate(names)]
    return list(zip(labels, algorithms))


def run_one(job: Job, label: str, algorithm: Any, directory: RunDir | None, tell: Tell) -> tuple[Trained, list[dict]]:
    """One method, fresh or from where its own run directory stands."""
    one = job.run.model_copy(
        update={
            "mooring": job.run.mooring.model_copy(update={"purpose": "fit"}),
            "algorithm": next(a for (other, _), a in zip(labelled(job), job.run.algorithms or []) if other == label),
            "algorithms": None,
        }
    )
    inner = None
    if directory is not None and (directory.path / METHODS / label).exists():
        inner = open_run(directory.path / METHODS / label)
        one = inner.run
    beside = Job(RunFile.model_validate(one), job.clients, job.task)
    exchange = exchange_of(beside)
    ready, server = settle(beside.algorithms()[0], job.task, exchange, beside.plan.seed)
    progress: Progress = Progress(server)
    if inner is not None:
        progress, _ = saving.restore(inner, server, exchange)
    elif directory is not None:
        inner = create(directory.path / METHODS / label, opening(Job(with_settled(one, ready), job.clients, job.task)))
    trained = train(beside, ready, exchange, progress, inner, lambda _, done, rounds: tell(label, done, rounds))
    if inner is not None and not inner.finished:
        write_trained(inner, job, exchange.roster, trained, rounds_frame(job, progress.records))
    return trained, progress.records


def total_rows(job: Job) -> Any:
    return sum(getattr(job.clients, part).size for part in ("train", "validation", "test")).numpy()


def as_json(result: Comparison) -> dict[str, Any]:
    """The object that `mooring compare --json` prints."""
    return {
        "metric": result.metric,
        "methods": result.methods.to_dict("records"),
        "clients": result.clients.to_dict("records"),
        "run": str(result.run) if result.run else None,
    }
