"""`advise`: a verdict per client, with evidence, in memory or as a run directory."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from mooring.advice.choice import Choice, choose, prior_of, weights_of
from mooring.advice.evidence import judge
from mooring.advice.explain import explained, in_words, theory_of
from mooring.advice.families import ALONE, COMMON, LAMBDA, Models, Setting, fitted
from mooring.advice.folds import joined
from mooring.advice.networks import choose_network
from mooring.advice.plans import alpha_of, as_algorithm, kind_of, stiffness_of
from mooring.advice.prior import may_be_alike
from mooring.advice.survey import Survey, as_table
from mooring.core.cohort import Rows
from mooring.core.errors import RequestError
from mooring.data.clients import PARTS, Clients
from mooring.engines.coefficients import coefficients, scaling_of
from mooring.engines.fit import Tell, opening, silent, task_facts
from mooring.engines.prepare import Job, is_pooled, prepare
from mooring.engines.request import request
from mooring.engines.scores import known_scores
from mooring.runs.directory import ADVICE, CLIENTS_FILE, THEORY, create
from mooring.runs.directory import Models as Saved
from mooring.runs.files import write_json, write_parquet
from mooring.runs.records import CLIENTS, clients_table
from mooring.runs.runfile import RunFile
from mooring.runs.sections import Options

UNUSED = ("keep", "checkpoint_every")
OF_ROUNDS = ("rounds", "participation", "evaluate_every", "patience", "chunk")


@dataclass(frozen=True)
class Deployed:
    """The models that are judged: everyone's alone, common, best single lambda's and advised one."""

    alone: Tensor  # [m, d]
    common: Tensor  # [d]
    shared: Tensor  # [m, d]
    personal: Tensor  # [m, d]
    centre: Tensor  # [d], the common model inside the plan: what newcomers are moored to
    plan: list[Setting]  # each client's


@dataclass(frozen=True)
class Advice:
    """What `advise` returns. Losses are averages over test rows, in the target's own units."""

    job: Job
    summary: dict[str, Any]
    clients: (
        pd.DataFrame
    )  # client, rows, verdict, plan, lambda, alone, common, personal, gain, gain_low, gain_high, ...
    models: Deployed
    choice: Choice
    path: pd.DataFrame  # family, lambda and held-out loss of the path, with its two ends
    theory: Survey | None
    words: list[str]  # what to make of it
    run: Path | None

    @property
    def coefficients(self) -> pd.DataFrame:
        """A row for each client and term in the units of the data: coefficient, common, deviation."""
        job, models = self.job, self.models
        return coefficients(job.task, scaling_of(job.clients), models.centre, models.personal, job.clients.names)

    @property
    def record(self) -> dict[str, Any]:
        """All of it as plain tables, as `advice.json` keeps it: what reports are made from."""
        table, unit = self.choice.table, self.job.clients.target_scale**self.job.task.unit_power
        plan = table[table["plan"]].iloc[0]
        return as_json(self) | {
            "title": self.job.clients.title,
            "notes": list(self.job.clients.notes),
            "words": self.words,
            "clients": self.clients.drop(columns=["helped", "harmed"]).to_dict("records"),
            "plan": {"family": plan["family"], "value": float(plan["value"]), "loss": float(plan["loss"]) * unit},
            "path": self.path.to_dict("records"),
            "candidates": table.to_dict("records"),
            "run": None,
        }


def advise(
    source: Any,
    second: Any = None,
    *,
    out: str | Path | None = None,
    model: Any = None,
    tell: Tell = silent,
    **options: Unpack[Options],
) -> Advice:
    """Who should be moored how tightly: a plan chosen on train and validation rows, judged on test rows.

    `source`, `model` and `options` are those of `fit`; what only rounds of training know is for networks. With `out`
    the run directory with its tables and models is written there; `mooring.plot` draws it.
    """
    if isinstance(source, nn.Module) or (second is not None and callable(source)):
        source, model = second, source
    if out is not None and os.path.lexists(out):
        raise RequestError(f"{out} already exists; choose another --out.")
    asked = request(source, purpose="advise", model=model, **options)
    if options.get("drop_missing_target") is None and not (isinstance(source, Clients) or is_pooled(asked.data.source)):
        # Advice is for a first look: rows without a target are left out, and a note says how many.
        asked = asked.model_copy(update={"data": asked.data.model_copy(update={"drop_missing_target": True})})
    data, loss = None if isinstance(source, str | Path) else source, options.get("loss")
    job = prepare(asked, data, model, loss if callable(loss) else None)
    refuse_unused(job, [name for name, value in options.items() if value is not None])
    if int(job.clients.test.size.sum()) == 0:
        raise RequestError(f"{job.clients.title}: there are no test rows to judge any advice by.")
    advice = advised(job, tell)
    return advice if out is None else replace(advice, run=written(out, advice))


def refuse_unused(job: Job, given: list[str]) -> None:
    """Options that this advice would not heed are refused by name."""
    for name in given:
        if name in UNUSED:
            raise RequestError(f"{name} has no use here: advise keeps what its choice needs, and is written whole.")
        if name in OF_ROUNDS and job.task.prox is not None:
            raise RequestError(
                f"{name} has no use here: advice on task '{job.task.name}' is solved exactly, without rounds; it is "
                "for networks."
            )


def advised(job: Job, tell: Tell = silent) -> Advice:
    """Choose, refit, judge, explain."""
    task, clients, how = job.task, job.clients, job.run.training
    rows = joined(clients.train, clients.validation)
    theory = None
    if task.prox is None:
        choice, models = choose_network(job, tell)
    else:
        tell("choosing a plan", 0, 4)
        weights = clients.weighting(how.weights)
        choice = choose(task, clients, weights, how.seed)
        tell("fitting it", 1, 4)
        models = refitted(task, rows, choice, weights)
        tell("asking the theory", 2, 4)
        theory = theory_of(job)
    deployed = deploy(choice, models, len(clients))
    frame, losses = judged(job, deployed, choice, rows)
    if task.prox is not None:
        tell("asking why", 3, 4)
        frame = explained(job, frame, choice)
        tell("asking why", 4, 4)
    summary = summarise(job, frame, losses, theory) | {"measures": measures_of(job, deployed)}
    words = in_words(frame, summary, choice, theory)
    table = path_table(choice, clients.target_scale**task.unit_power)
    return Advice(job, summary, frame, deployed, choice, table, theory, words, None)


def refitted(task: Any, rows: Rows, choice: Choice, weights: str | Tensor) -> dict[Setting, Models]:
    """Every chosen setting fitted on train and validation rows together."""
    wanted = {choice.alone, choice.common, choice.shared, choice.plan, *choice.own.values()}
    found = prior_of(choice.prior, torch.arange(len(rows)))
    return {m.setting: m for m in fitted(task, rows, weights_of(rows, weights), sorted(wanted), found)}


def deploy(choice: Choice, models: dict[Setting, Models], m: int) -> Deployed:
    """Each client's model of the plan, or of its own choice where it leaves the plan."""
    personal = models[choice.plan].v.clone()
    for i, setting in choice.own.items():
        personal[i] = models[setting].v[i]
    common = models[choice.common].w
    return Deployed(
        models[choice.alone].v,
        common,
        models[choice.shared].v,
        personal,
        common if choice.plan.family == ALONE else models[choice.plan].w,
        [choice.own.get(i, choice.plan) for i in range(m)],
    )


def path_table(choice: Choice, unit: float) -> pd.DataFrame:
    """The held-out losses along the path of single lambdas, and the best of its two ends."""
    table = choice.table
    moored = table[table["family"] == LAMBDA][["family", "value", "loss"]].rename(columns={"value": "lambda"})
    ends = [
        {"family": family, "lambda": lam, "loss": float(table[table["family"] == family]["loss"].min())}
        for family, lam in ((COMMON, np.inf), (ALONE, 0.0))
    ]
    out = pd.concat([pd.DataFrame(ends), moored], ignore_index=True)
    return out.assign(loss=out["loss"] * unit)


def judged(job: Job, deployed: Deployed, choice: Choice, rows: Rows) -> tuple[pd.DataFrame, dict[str, float]]:
    """Test losses of the three models for every client, gains with intervals, verdicts."""
    clients, sizes = job.clients, rows.size.tolist()
    models = {name: getattr(deployed, name) for name in ("alone", "common", "shared", "personal")}
    found = judge(job.task, clients, models, job.run.training.seed, may_be_alike(choice.prior))
    gain = found.gain
    frame = pd.DataFrame(
        {
            "client": clients.names,
            "rows": sum(getattr(clients, part).size for part in PARTS).numpy(),
            **{part: getattr(clients, part).size.numpy() for part in PARTS},
            "verdict": found.verdict,
            "plan": [kind_of(setting, choice.prior) for setting in deployed.plan],
            "lambda": [stiffness_of(s, choice.prior, n, i) for i, (s, n) in enumerate(zip(deployed.plan, sizes))],
            "alpha": [alpha_of(setting) for setting in deployed.plan],
            **{name: found.means[name] for name in ("alone", "common", "personal")},
            "gain": gain.mean,
            "gain_low": gain.low,
            "gain_high": gain.high,
            "helped": gain.better,
            "harmed": gain.worse,
        }
    )
    return frame, {name: float(values.mean()) for name, values in found.losses.items()}


def summarise(job: Job, frame: pd.DataFrame, losses: dict[str, float], theory: Survey | None) -> dict[str, Any]:
    helped, harmed = int(frame["helped"].sum()), int(frame["harmed"].sum())
    return {
        "alone": losses["alone"],
        "common": losses["common"],
        "advised": losses["personal"],
        "shared_lambda": losses["shared"],
        "metric": job.task.metric,
        "helped": helped,
        "harmed": harmed,
        "undecided": len(frame) - helped - harmed,
        "heterogeneity": None if theory is None else theory.heterogeneity,
        "threshold": None if theory is None else theory.thresholds["bayes"]["R"],
    }


def measures_of(job: Job, deployed: Deployed) -> dict[str, dict[str, float]]:
    """Measures that people know of the three models, on all test rows."""
    models = {"alone": deployed.alone, "common": deployed.common, "advised": deployed.personal}
    return {name: known_scores(job.task, job.clients, w).overall for name, w in models.items()}


def as_json(advice: Advice) -> dict[str, Any]:
    """The object that `mooring advise --json` prints."""
    columns = ["client", "rows", "verdict", "plan", "lambda", "alone", "common", "personal"]
    columns += ["gain", "gain_low", "gain_high"]
    return {
        "summary": advice.summary,
        "clients": advice.clients[columns].to_dict("records"),
        "run": str(advice.run) if advice.run else None,
    }


def written(out: str | Path, advice: Advice) -> Path:
    """The run directory: the plan as an algorithm in run.toml, tables, and last the models."""
    job, frame = advice.job, advice.clients
    table = as_algorithm(advice.choice, joined(job.clients.train, job.clients.validation))
    plan = job.run.model_dump(exclude_none=True) | {"algorithm": table}
    directory = create(out, opening(Job(RunFile.model_validate(plan), job.clients, job.task)))
    write_json(directory.path / ADVICE, advice.record)
    if advice.theory is not None:
        write_json(directory.path / THEORY, as_table(advice.theory))
    frame = frame.rename(columns={"lambda": "lam"})
    kept = frame[[name for name in CLIENTS.names if name in frame]]
    write_parquet(directory.path / CLIENTS_FILE, clients_table(kept.to_dict("records")))
    directory.write_models(Saved(advice.models.centre, advice.models.personal, job.clients.names, *task_facts(job)))
    return directory.path
