"""What a client answers where a federation is advised: questions about its rows, from its own table.

asked      some of `asking.QUESTIONS`, or what spreads are estimated from (`estimates/answers.py`)
advised    the end: it writes its verdict and its model as a run directory that `mooring predict` reads
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from mooring.advice.advise import Advice  # with it come all modules that have questions
from mooring.advice.asking import QUESTIONS
from mooring.advice.folds import compact, deal, repeated_rows, subset, time_blocks, times_of, units_of, usable
from mooring.advice.loss_sums import OTHERS
from mooring.advice.words import KINDS, WITH
from mooring.core.cohort import Rows
from mooring.core.errors import RequestError
from mooring.engines.fit import task_facts
from mooring.engines.flower.home import ANSWERS, DONE, RESULT, Home
from mooring.engines.flower.parcels import Parcel
from mooring.engines.prepare import Job
from mooring.estimates.answers import Here
from mooring.runs.directory import ADVICE, CLIENTS_FILE, RUN, SCHEMA, Models, create
from mooring.runs.files import json_bytes, parquet_bytes, plain, write_json
from mooring.runs.records import CLIENTS, clients_table
from mooring.runs.runfile import run_bytes
from mooring.runs.tensors import flatten

LEFT = "advised"
REVEALS = (
    "sums over its rows: for a linear task all first and second moments of its columns and its target, for others its "
    "loss, gradient and Hessian at the models that it is sent; for every candidate the sum of its losses on held-out "
    "rows. From these its own models follow, and more where it has few rows; no row is sent"
)


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class AdvisedHome(Home):
    """A client of a federation that is advised."""

    answers: ClassVar[dict[str, Callable[[Any, Parcel], Parcel]]] = {}
    of_schema: ClassVar[tuple[str, ...]] = (*Home.of_schema, "parts")
    reveals = REVEALS
    what = "an advice"

    def rows(self, part: tuple[Any, ...]) -> Rows:
        """Some of its rows, in a pool of their own; where there are none, one that does not count."""
        if part not in self.parts:
            self.parts[part] = solid(self._rows(part), self.clients.train)
        return self.parts[part]

    @cached_property
    def parts(self) -> dict[tuple[Any, ...], Rows]:
        return {}

    def _rows(self, part: tuple[Any, ...]) -> Rows:
        name, *fold = part
        if name in ("train", "validation", "test"):
            return compact(getattr(self.clients, name))
        whole = compact(usable(self.clients))
        if name == "usable":
            return whole
        if name not in ("held", "without"):
            raise RequestError(f"client '{self.name}' has no rows called {name!r}.")
        assigned = self.assigned(int(fold[1]))
        mine = assigned == int(fold[0])
        if times_of(self.clients) is not None and name == "without":
            return subset(whole, assigned < int(fold[0]))
        return subset(whole, mine if name == "held" else ~mine)

    def assigned(self, folds: int) -> Tensor:
        """[N]: the fold of each usable row; -1 for rows that only train."""
        rows, time = self.rows(("usable",)), times_of(self.clients)
        if time is not None:
            return time_blocks(rows, time, folds + 1) - 1
        units = units_of(self.clients)
        units = repeated_rows(rows) if units is None else units
        return deal(rows, self.clients.keys, folds, self.run.training.seed, units)


def solid(rows: Rows, like: Rows) -> Rows:
    if len(rows.y):
        return rows
    return Rows(torch.zeros_like(like.x[:1]), torch.zeros_like(like.y[:1]), rows.start, rows.size)


def give_answers(home: AdvisedHome, parcel: Parcel) -> Parcel:
    out: dict[str, Tensor] = {}
    for k, about in parcel.words["asked"].items():
        own = [parcel.tensors[f"{k}/own/{i}"] for i in range(int(about["own"]))]
        shared = {
            name: parcel.tensors[f"{k}/shared/{name}"] if given else None for name, given in about["shared"].items()
        }
        out |= flatten(k, one_answer(home, str(about["name"]), tuple(about["part"]), own, shared))
    return Parcel({}, out)


def one_answer(home: AdvisedHome, name: str, part: tuple[Any, ...], own: list[Tensor], shared: dict[str, Any]) -> Any:
    rows = home.rows(part)
    if name == "fold_sizes":
        fold = home.assigned(int(shared["count"]))
        return torch.bincount(fold[fold >= 0], minlength=int(shared["count"]))[None]
    here = Here(home.task, rows)
    if name == "summary":
        return here.summary()
    if name == "pearson":
        return Pair(*here.pearson(*own))
    if name == "slope":
        return Pair(*here.slope(shared["w"]))
    if name == "refit":
        return Pair(*here.refit(shared["center"], *own))
    if name not in QUESTIONS:
        raise RequestError(f"client '{home.name}' does not know the question {name!r}.")
    return QUESTIONS[name](home.task, rows.padded(), *own, **shared)


def own_record(advice: Advice, row: Any) -> dict[str, Any]:
    """What a client receives: the federation's numbers, and its own row; no other client's."""
    record, mine = advice.record, plain(row.to_dict())
    shared = {name: record[name] for name in ("headline", "summary", "title", "plan", "path", "candidates", "run")}
    return shared | {
        "clients": [mine],
        "notes": [],
        "words": {"recommendation": describe_recommendation(mine)},
        "learning_curve": record["learning_curve"],
    }


def describe_recommendation(row: dict[str, Any]) -> str:
    """A client's recommendation in a sentence."""
    sides = [
        f"better than {WITH[other]} with probability {row[f'probability_better_than_{other}']:.2f}"
        for other in OTHERS
        if row["recommended"] != other and row[f"improvement_over_{other}"] != 0
    ]
    return f"Use {KINDS[row['recommended']]}{': ' + ' and '.join(sides) if sides else ''}."


def leave(home: AdvisedHome, parcel: Parcel) -> Parcel:
    """Write verdict and model as a run directory."""
    record = parcel.words["record"]
    row = record["clients"][0]
    run = home.run.model_copy(
        update={"data": home.run.data.model_copy(update={"source": str(home.path)}), "federation": None}
    )
    files = {
        RUN: run_bytes(run),
        SCHEMA: json_bytes(home.schema.model_dump(mode="json")),
        CLIENTS_FILE: parquet_bytes(clients_table([{name: row[name] for name in CLIENTS.names if name in row}])),
        ADVICE: json_bytes(record),
    }
    path = home.folder / RESULT
    shutil.rmtree(path, ignore_errors=True)
    about, layout = task_facts(Job(run, home.clients, home.task))
    saved = Models(parcel.tensors["common"], parcel.tensors["own"], (home.name,), about, layout)
    create(path, files).write_models(saved)
    write_json(
        home.folder / DONE, row | {"metric": record["summary"]["metric"], "said": record["words"]["recommendation"]}
    )
    return Parcel({"result": True})


AdvisedHome.answers = {
    name: ANSWERS[name] for name in ("hello", "survey", "tally", "names", "spread", "adopt", "dismissed")
} | {
    "asked": give_answers,
    LEFT: leave,
}
