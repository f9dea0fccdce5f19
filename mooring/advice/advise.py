"""`advise`: a verdict per client, with evidence, in memory or as a run directory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from mooring.advice import figures
from mooring.advice.choice import MOST_CLIENTS, Choice, choose, prior_of, weights_of
from mooring.advice.evidence import compare, verdicts
from mooring.advice.families import ALONE, COMMON, DIAGONAL, LAMBDA, MIXTURE, SIZE, Models, Setting, fitted
from mooring.advice.folds import joined, row_losses
from mooring.advice.networks import choose_network
from mooring.advice.survey import Survey, survey
from mooring.core.cohort import Rows
from mooring.core.errors import RequestError
from mooring.data.clients import PARTS
from mooring.engines.fit import Tell, opening, silent, task_facts
from mooring.engines.prepare import Job, prepare, request
from mooring.runs.directory import CLIENTS_FILE, RunDir, create
from mooring.runs.directory import Models as Saved
from mooring.runs.files import write_json, write_parquet, write_whole
from mooring.runs.records import clients_table

ADVICE_FILE = "advice.json"


@dataclass(frozen=True)
class Deployed:
    """The models that are judged: everyone's alone, common, best single lambda's and advised one."""

    alone: Tensor  # [m, d]
    common: Tensor  # [d]
    shared: Tensor  # [m, d]
    personal: Tensor  # [m, d]
    plan: list[str]  # each client's plan in a word
    lam: list[float]  # each client's stiffness: inf common, 0 alone, nan a mixture
    alpha: list[float]


@dataclass(frozen=True)
class Advice:
    """What `advise` returns. Losses are averages over test rows, in the target's own units."""

    job: Job
    summary: dict[str, Any]
    clients: pd.DataFrame  # client, rows, verdict, plan, lambda, alone, common, personal, gain, gain_low, gain_high
    models: Deployed
    choice: Choice | None  # None for networks
    path: pd.DataFrame  # lambda and validation loss of the path, with its two ends
    theory: Survey | None
    run: Path | None

    def plot(self, what: str = "gains") -> Any:
        """A matplotlib figure: "gains" of every client, or the "path" of lambdas."""
        if what == "gains":
            return figures.gains_figure(self.clients, self.summary["metric"])
        if what == "path":
            ends = self.path.set_index("family")["loss"]
            moored = self.path[self.path["family"] == LAMBDA].sort_values("lambda")
            best = float(moored.loc[moored["loss"].idxmin(), "lambda"])
            alone, common = float(ends[ALONE]), float(ends[COMMON])
            return figures.path_figure(moored["lambda"], moored["loss"], alone, common, best, self.summary["metric"])
        raise RequestError(f"plot knows 'gains' and 'path', got {what!r}.")


def advise(
    source: Any,
    second: Any = None,
    *,
    out: str | Path | None = None,
    model: Any = None,
    tell: Tell = silent,
    **options: Any,
) -> Advice:
    """Who should be moored how tightly: a plan chosen on train and validation rows, judged on test rows.

    `source`, `model` and `options` are those of `fit`. With `out` the run directory, the models and two figures are
    written there.
    """
    if isinstance(source, nn.Module) or (second is not None and callable(source)):
        source, model = second, source
    asked = request(source, purpose="advise", model=model, **options)
    job = prepare(asked, None if isinstance(source, str | Path) else source, model)
    if int(job.clients.test.size.sum()) == 0:
        raise RequestError(f"{job.clients.title}: there are no test rows to judge any advice by.")
    directory = None if out is None else create(out, opening(job))
    return finish(job, directory, tell)


def finish(job: Job, directory: RunDir | None, tell: Tell = silent) -> Advice:
    """Choose, refit, judge, explain, write."""
    task, clients, how = job.task, job.clients, job.run.training
    choice, theory = None, None
    if task.prox is None:
        deployed, path = choose_network(job, tell)
    else:
        rows = joined(clients.train, clients.validation)
        tell("choosing a plan", 0, 3)
        choice = choose(task, rows, clients.keys, how.weights, how.seed)
        tell("fitting it", 1, 3)
        deployed = deploy(task, rows, choice, how.weights)
        path = path_table(choice, clients.target_scale**task.unit_power)
        tell("asking the theory", 2, 3)
        theory = theory_of(job)
        tell("judging", 3, 3)
    frame, losses = judged(job, deployed)
    summary = summarise(job, frame, losses, theory)
    advice = Advice(job, summary, frame, deployed, choice, path, theory, directory.path if directory else None)
    if directory is not None:
        write(directory, advice)
    return advice


def deploy(task: Any, rows: Rows, choice: Choice, weights: str) -> Deployed:
    """Every chosen setting fitted on train and validation rows together, and each client's own of them."""
    wanted = list(dict.fromkeys([choice.alone, choice.common, choice.shared, choice.plan, *choice.own.values()]))
    everyone = torch.arange(len(rows))
    found = prior_of(choice.prior, everyone)
    models: dict[Setting, Models] = {}
    for setting in sorted(wanted):
        models |= {m.setting: m for m in fitted(task, rows, weights_of(rows, weights), [setting], found)}
    personal = models[choice.plan].v.clone()
    taken = [choice.own.get(i, choice.plan) for i in range(len(rows))]
    for i, setting in choice.own.items():
        personal[i] = models[setting].v[i]
    return Deployed(
        models[choice.alone].v,
        models[choice.common].w,
        models[choice.shared].v,
        personal,
        [setting.family for setting in taken],
        [stiffness_of(setting, choice, rows, i) for i, setting in enumerate(taken)],
        [setting.value if setting.family == MIXTURE else float("nan") for setting in taken],
    )


def stiffness_of(setting: Setting, choice: Choice, rows: Rows, i: int) -> float:
    """lambda of client i: one number also where each coefficient has its own (their geometric mean)."""
    if setting.family in (COMMON, ALONE):
        return float("inf") if setting.family == COMMON else 0.0
    if setting.family == LAMBDA:
        return setting.value
    if setting.family in (SIZE, DIAGONAL) and choice.prior is not None:
        free = choice.prior.variance[choice.prior.variance > 0]
        if len(free) == 0:
            return float("inf")
        own = float(choice.prior.noise[i]) / max(int(rows.size[i]), 1)
        return setting.value * own * float((-free.log()).mean().exp())
    return float("nan")


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


def judged(job: Job, deployed: Deployed) -> tuple[pd.DataFrame, dict[str, float]]:
    """Test losses of the three models for every client, gains with intervals, verdicts."""
    clients, task = job.clients, job.task
    unit, test, m = clients.target_scale**task.unit_power, clients.test, len(clients)
    losses = {
        name: row_losses(task, models, test, unit)
        for name, models in vars(deployed).items()
        if isinstance(models, Tensor)
    }
    seed, keys = job.run.training.seed, clients.keys
    gain = compare(losses["alone"], losses["personal"], test.size, keys, seed)
    over_common = compare(losses["common"], losses["personal"], test.size, keys, seed)
    ends = compare(losses["alone"], losses["common"], test.size, keys, seed)
    owner = np.repeat(np.arange(m), test.size.numpy())

    def mean(name: str) -> np.ndarray:
        total = np.bincount(owner, losses[name].numpy(), m)
        return np.where(test.size.numpy() > 0, total / np.maximum(test.size.numpy(), 1), np.nan)

    frame = pd.DataFrame(
        {
            "client": clients.names,
            "rows": (clients.train.size + clients.validation.size + test.size).numpy(),
            "verdict": verdicts(gain, over_common, ends),
            "plan": deployed.plan,
            "lambda": deployed.lam,
            "alpha": deployed.alpha,
            **{name: mean(name) for name in ("alone", "common", "personal")},
            "gain": gain.mean,
            "gain_low": gain.low,
            "gain_high": gain.high,
            "helped": gain.better,
            "harmed": gain.worse,
        }
    )
    return frame, {name: float(values.mean()) for name, values in losses.items()}


def theory_of(job: Job) -> Survey | None:
    """What the theorems say, of a part of very many clients; None where they do not apply."""
    clients = job.clients
    if len(clients) > MOST_CLIENTS:
        some = torch.linspace(0, len(clients) - 1, MOST_CLIENTS).long()
        parts = {part: getattr(clients, part).select(some) for part in PARTS}
        clients = replace(clients, names=tuple(clients.names[i] for i in some.tolist()), **parts)
    try:
        return survey(job.task, clients, job.run.training.weights)
    except RequestError:
        return None


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


def as_json(advice: Advice) -> dict[str, Any]:
    """The object that `mooring advise --json` prints."""
    columns = ["client", "rows", "verdict", "plan", "lambda", "alone", "common", "personal"]
    columns += ["gain", "gain_low", "gain_high"]
    return {
        "summary": advice.summary,
        "clients": advice.clients[columns].to_dict("records"),
        "run": str(advice.run) if advice.run else None,
    }


def write(directory: RunDir, advice: Advice) -> None:
    """Figures, tables, and last the models."""
    for what in ("path", "gains"):
        figure = advice.plot(what)
        for form in ("png", "svg"):
            write_whole(directory.path / f"{what}.{form}", figures.image(figure, form))
    write_json(directory.path / ADVICE_FILE, as_json(advice) | {"run": None})
    sizes = {part: getattr(advice.job.clients, part).size.numpy() for part in ("train", "validation", "test")}
    frame = advice.clients.rename(columns={"lambda": "lam"}).drop(columns=["plan", "helped", "harmed"]).assign(**sizes)
    write_parquet(directory.path / CLIENTS_FILE, clients_table(frame.to_dict("records")))
    names = advice.job.clients.names
    directory.write_models(Saved(advice.models.common, advice.models.personal, names, *task_facts(advice.job)))
