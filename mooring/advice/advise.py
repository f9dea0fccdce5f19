"""`advise`: what every client should deploy and how sure that is, in memory or as a run directory."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from mooring.advice import kept
from mooring.advice.answer import Answer, answer
from mooring.advice.choice import Choice
from mooring.advice.crossfit import Evidence, Fold, cross_fit, held_rows
from mooring.advice.curve import LearningCurve, learning_curve
from mooring.advice.decide import Side
from mooring.advice.explain import explained, theory_of
from mooring.advice.families import ALONE, COMMON, LAMBDA, Setting
from mooring.advice.folds import joined, units_of, usable
from mooring.advice.mix import mix_of
from mooring.advice.networks import Kept, network_evidence, network_folds
from mooring.advice.plans import alpha_of, as_algorithm, kind_of, stiffnesses
from mooring.advice.survey import Survey, as_table
from mooring.advice.tally import MODELS, Tally, Trio, mean_losses, tally_of, witnesses_of
from mooring.advice.words import in_words
from mooring.core.cohort import Rows
from mooring.core.errors import RequestError
from mooring.data.clients import PARTS, Clients
from mooring.data.given import is_given
from mooring.engines.coefficients import coefficients, scaling_of
from mooring.engines.fit import Tell, check_same_data, opening, silent, task_facts
from mooring.engines.prepare import Job, is_pooled, prepare
from mooring.engines.request import admit_run, request
from mooring.engines.scores import known_scores
from mooring.runs.directory import ADVICE, CLIENTS_FILE, RUN, THEORY, RunDir, create, open_run
from mooring.runs.directory import Models as Saved
from mooring.runs.files import held, write_json, write_parquet, write_whole
from mooring.runs.records import CLIENTS, clients_table
from mooring.runs.runfile import RunFile, run_bytes
from mooring.runs.sections import AdviceOptions, Advising
from mooring.tasks.module import module_of

UNUSED = ("keep", "checkpoint_every")
OF_ROUNDS = ("rounds", "participation", "evaluate_every", "patience", "chunk")
PRINTED = ("headline", "summary", "clients", "run")  # what `mooring advise --json` prints
HELD, TESTS = "held-out rows", "test rows"  # what losses are averages over


class Deployed(NamedTuple):
    """Everyone's models: the three that are compared, and the one that each client is told to deploy."""

    alone: Tensor  # [m, d]
    common: Tensor  # [d]
    personal: Tensor  # [m, d]
    deployed: Tensor  # [m, d]
    centres: Tensor  # [k, d], the common model inside each setting of the mix: what newcomers are moored to
    plan: list[Setting]  # each client's, of the deployed model


@dataclass(frozen=True)
class Advice:
    """What `advise` returns. Losses and gains are in the target's own units."""

    job: Job
    summary: dict[str, Any]
    clients: pd.DataFrame  # client, rows, deploy, will_do, gain_over_alone, chance_over_alone, ..., see docs/advice.md
    models: Deployed
    choice: Choice
    path: pd.DataFrame  # family, lambda and held-out loss of the path, with its two ends
    theory: Survey | None
    learning_curve: LearningCurve | None  # a typical client's losses with more rows; None where alone gains nothing
    headline: str  # the answer in a sentence
    words: list[str]  # what to make of it
    run: Path | None

    @property
    def coefficients(self) -> pd.DataFrame:
        """A row for each client and term in the units of the data: coefficient, common, deviation."""
        job, models = self.job, self.models
        return coefficients(job.task, scaling_of(job.clients), models.common, models.deployed, job.clients.names)

    def module(self, client: str | None = None) -> nn.Module:
        """The network that a client should deploy (default: the common one), in evaluation mode and in the target's own
        units; classes and labels come as logits."""
        clients, w = self.job.clients, self.models.common
        if client is not None:
            if client not in clients.names:
                some = ", ".join(clients.names[:5])
                raise RequestError(f"unknown client {client!r}; there are {len(clients)}, such as {some}.")
            w = self.models.deployed[clients.names.index(client)]
        return module_of(self.job.task, w, clients.target_mean, clients.target_scale)

    @property
    def record(self) -> dict[str, Any]:
        """All of it as plain tables, as `advice.json` keeps it: what reports are made from."""
        table, unit = self.choice.table, self.job.clients.target_scale**self.job.task.unit_power
        plan = table[table["plan"]].iloc[0]
        return as_json(self) | {
            "title": self.job.clients.title,
            "notes": list(self.job.clients.notes),
            "words": self.words,
            "plan": {"family": plan["family"], "value": float(plan["value"]), "loss": float(plan["loss"]) * unit},
            "path": self.path.to_dict("records"),
            "client_paths": client_paths(self.choice, len(self.clients), unit),
            "learning_curve": as_lists(self.learning_curve),
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
    trust: bool = False,
    **options: Unpack[AdviceOptions],
) -> Advice:
    """What every client should deploy (a personal model, the common one, its own), what it gains, and how sure that is.

    `source`, `model`, `trust` and `options` are those of `fit`; what only rounds of training know is for networks. With
    `out` the run directory with its tables and models is written there; an interrupted one goes on with `resume`.
    """
    if isinstance(source, nn.Module) or (second is not None and callable(source)):
        source, model = second, source
    if out is not None and os.path.lexists(out):
        raise RequestError(f"{out} already exists; choose another --out, or resume it.")
    asked = request(source, purpose="advise", model=model, trust=trust, **options)
    as_it_is = isinstance(source, Clients) or is_pooled(asked.data.source) or (model is not None and is_given(source))
    if options.get("drop_missing_target") is None and not as_it_is:
        # Advice is for a first look: rows without a target are left out, and a note says how many.
        asked = asked.model_copy(update={"data": asked.data.model_copy(update={"drop_missing_target": True})})
    data, loss = None if isinstance(source, str | Path) else source, options.get("loss")
    job = prepare(asked, data, model, loss if callable(loss) else None)
    refuse_unused(job, [name for name, value in options.items() if value is not None])
    directory = None if out is None else create(out, opening(job))
    with nullcontext() if directory is None else held(directory.path):
        return advised(job, directory, tell)


def resume(path: str | Path, tell: Tell = silent, source: Any = None, model: Any = None, trust: bool = False) -> Advice:
    """Continue an interrupted advice to the very bytes it would have had: folds that are done are not fitted again."""
    directory = open_run(path)
    with held(directory.path):
        admit_run(directory.run, directory.path, trust)
        job = prepare(directory.run, source, model)
        check_same_data(directory, job)
        return advised(job, directory, tell)


def refuse_unused(job: Job, given: list[str]) -> None:
    """Options that this advice would not heed are refused by name."""
    for name in given:
        if name in UNUSED:
            raise RequestError(f"{name} has no use here: advise keeps what its choice needs, and every fold is kept.")
        if name in OF_ROUNDS and job.task.prox is not None:
            raise RequestError(
                f"{name} has no use here: advice on task '{job.task.name}' is solved exactly, without rounds; it is "
                "for networks."
            )


class Gathered(NamedTuple):
    """What the rows say, and which of them said it."""

    choice: Choice
    evidence: Evidence
    test: Tally | None  # of test rows that took no part in either
    judges: str  # "held-out rows" or "test rows": what losses are averages over


def advised(job: Job, directory: RunDir | None = None, tell: Tell = silent) -> Advice:
    """Choose, refit, judge, explain; folds are kept in the run directory, and the answer is written there last."""
    task, clients, how = job.task, job.clients, options_of(job)
    known = gathered(job, directory, tell)
    tell("explaining", 0, 2)
    choice, evidence = known.choice, known.evidence
    unit = clients.target_scale**task.unit_power
    size = torch.stack([getattr(clients, part).size for part in PARTS]).sum(0)
    found = answer(
        evidence,
        size,
        unit=unit,
        practical=how.practical,
        level=how.level,
        tests=known.test and witnesses_of(known.test),
    )
    models = deploy(choice, evidence.trio, found.decision.deploy)
    frame = clients_frame(job, models, known, found)
    theory, fit = None, None
    if task.prox is not None:
        frame, fit = explained(job, frame, choice)
        theory = theory_of(job) if how.theory else None
    tell("explaining", 1, 2)
    summary = summarise(job, frame, found, known.judges) | of_theory(theory)
    here = isinstance(clients.test, Rows)  # else each client has its own rows, and their measures
    summary |= {"measures": measures_of(job, models) if known.judges == TESTS and here else {}}
    curve = learning_curve(fit, frame, summary) if fit is not None else None
    headline, words = in_words(job.clients, frame, summary, choice, theory, curve)
    table = path_table(choice, unit)
    run = None if directory is None else directory.path
    advice = Advice(job, summary, frame, models, choice, table, theory, curve, headline, words, run)
    if directory is not None:
        write(directory, advice)
    return advice


def options_of(job: Job) -> Advising:
    return job.run.advice or Advising()


def gathered(job: Job, directory: RunDir | None, tell: Tell) -> Gathered:
    """The choice and the evidence, from folds that were kept or are fitted now."""
    task, clients, how, folds = job.task, job.clients, job.run.training, options_of(job).folds
    done = kept.read(directory)
    apart = not clients.parts_by_chance and int(clients.test.size.sum()) > 0
    if task.prox is None:
        count = network_folds(job, folds)
        rows = usable(clients) if count > 1 else joined(clients.train, clients.validation)
        parts = {k: Kept(*part) for k, part in done.items()}
        found = network_evidence(job, rows, count, tell, parts, lambda k, part: kept.save(directory, k, *part))
        if count == 1:
            return Gathered(*found, None, TESTS)
    else:

        def keep(number: int, fold: Fold) -> None:
            kept.save(directory, number, fold._asdict(), {})

        folded = {k: Fold(**tensors) for k, (tensors, _) in done.items()}
        weights = clients.weighting(how.weights)
        found = cross_fit(
            task, usable(clients), clients.keys, weights, how.seed, folds, folded, keep, tell, units_of(clients)
        )
    if not apart:
        return Gathered(*found, None, HELD)
    return Gathered(*found, tally_of(task, clients.test, found[1].trio), TESTS)


def deploy(choice: Choice, trio: Trio, kinds: np.ndarray) -> Deployed:
    """Each client's model of the kind that it is told to deploy."""
    mine = {"alone": lambda i: choice.alone, "common": lambda i: choice.common}
    plan = [mine.get(kind, lambda i: choice.own.get(i, choice.plan))(i) for i, kind in enumerate(kinds)]
    return Deployed(*trio[:3], deployed_of(trio, kinds), trio.centres, plan)


def deployed_of(trio: Trio, kinds: np.ndarray) -> Tensor:
    """[m, d]: each client's model of the kind that it is told to deploy."""
    out = trio.personal.clone()
    for kind, models in (("alone", trio.alone), ("common", trio.common.expand_as(out))):
        mine = torch.from_numpy(kinds == kind)
        out[mine] = models[mine]
    return out


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


def client_paths(choice: Choice, clients: int, unit: float) -> list[list[float]] | None:
    """Each client's held-out losses along the path, by rising lambda; None where only some clients were asked."""
    moored = choice.table[choice.table["family"] == LAMBDA].sort_values("value").index
    if len(choice.losses) != clients:
        return None
    return (unit * choice.losses[:, moored.tolist()]).tolist()


def as_lists(curve: LearningCurve | None) -> dict[str, Any] | None:
    """A learning curve as `advice.json` keeps it: `now`, `match`, and a list for each column."""
    return None if curve is None else {"now": curve.now, "match": curve.match, **curve.table.to_dict("list")}


def clients_frame(job: Job, models: Deployed, known: Gathered, found: Answer) -> pd.DataFrame:
    """A row a client: what to deploy, what would do, gains with intervals and chances, losses, the plan in numbers."""
    clients, choice, m = job.clients, known.choice, len(job.clients)
    sizes = {part: getattr(clients, part).size.numpy() for part in PARTS}
    rows = sum(sizes.values())
    kinds = {setting: kind_of(setting, choice.prior) for setting in set(models.plan)}
    everyone, judged = torch.arange(m), known.test
    losses = known.evidence.losses if judged is None else mean_losses(judged)
    who, count = (known.evidence.asked, held_rows(known.evidence)) if judged is None else (everyone, judged.rows)
    unit = clients.target_scale**job.task.unit_power

    def of_all(part: Tensor) -> np.ndarray:
        return torch.full((m,), torch.nan, dtype=torch.float64).index_copy_(0, who, part.double()).numpy()

    return pd.DataFrame(
        {
            "client": clients.names,
            "rows": rows,
            **sizes,
            "deploy": found.decision.deploy,
            "will_do": found.decision.will_do,
            **told_of("alone", found.decision.over_alone, found.base["alone"]),
            **told_of("common", found.decision.over_common, found.base["common"]),
            **{name: unit * of_all(part) for name, part in losses.items()},
            "judged_rows": np.nan_to_num(of_all(count)).astype(int),
            "plan": [kinds[setting] for setting in models.plan],
            "lambda": stiffnesses(models.plan, choice.prior, rows),
            "alpha": [alpha_of(setting) for setting in models.plan],
            "helped": found.decision.over_alone.better,
            "harmed": found.decision.over_alone.worse,
        }
    )


def told_of(other: str, side: Side, base: np.ndarray) -> dict[str, np.ndarray]:
    """The columns about one other model: the gain over it with its interval, as a loss and in per cent of the loss."""
    ends = {"": side.gain, "_low": side.low, "_high": side.high}
    out = {f"gain_over_{other}{end}": value for end, value in ends.items()}
    out |= {f"gain_over_{other}_percent{end}": percent(value, base) for end, value in ends.items()}
    return out | {f"chance_over_{other}": side.chance, f"sure_over_{other}": side.sure}


def percent(gain: Any, loss: Any) -> Any:
    """A gain in per cent of the other model's loss, of which nobody can save more than all."""
    loss = np.asarray(loss, dtype=float)
    return np.minimum(100 * np.divide(gain, loss, out=np.zeros(np.broadcast(gain, loss).shape), where=loss > 0), 100.0)


def summarise(job: Job, frame: pd.DataFrame, found: Answer, judges: str) -> dict[str, Any]:
    """The federation in numbers: losses of the three models, what personal ones gain, who should do what, how sure."""
    how, told = options_of(job), frame[frame["judged_rows"] > 0]
    weight = told["judged_rows"] / told["judged_rows"].sum()
    deployed = np.select([told["deploy"] == name for name in MODELS], [told[name] for name in MODELS])
    gains = {}
    for other in ("alone", "common"):
        line, base = found.lines[f"personal over {other}"], found.loss[other]
        ends = dict(zip(("mean", "low", "high"), line))
        gains[f"gain_over_{other}"] = ends | {f"percent_{k}": float(percent(v, base)) for k, v in ends.items()}
    return {
        **{name: float(weight @ told[name]) for name in MODELS},
        "advised": float(weight @ deployed),
        "metric": job.task.metric,
        "judged_on": judges,
        **gains,
        "deploy": counts(frame["deploy"]),
        "will_do": counts(frame["will_do"]),
        **{f"sure_over_{other}": counts(frame[f"sure_over_{other}"]) for other in ("alone", "common")},
        "helped": int(frame["helped"].sum()),
        "harmed": int(frame["harmed"].sum()),
        "practical": how.practical,
        "level": how.level,
    }


def of_theory(theory: Survey | None) -> dict[str, Any]:
    if theory is None:
        return {"heterogeneity": None, "threshold": None}
    return {"heterogeneity": theory.heterogeneity, "threshold": theory.thresholds["bayes"]["R"]}


def counts(column: pd.Series) -> dict[str, int]:
    """How often each word stands there, the most frequent first."""
    return {str(word): int(count) for word, count in column.value_counts().items()}


def measures_of(job: Job, models: Deployed) -> dict[str, dict[str, float]]:
    """Measures that people know of everyone's models on test rows, which took no part in them."""
    mine = {"alone": models.alone, "common": models.common, "personal": models.personal, "advised": models.deployed}
    return {name: known_scores(job.task, job.clients, w).overall for name, w in mine.items()}


def as_json(advice: Advice) -> dict[str, Any]:
    """The object that `mooring advise --json` prints."""
    rows = advice.clients.to_dict("records")
    return dict(zip(PRINTED, (advice.headline, advice.summary, rows, str(advice.run) if advice.run else None)))


def write(directory: RunDir, advice: Advice) -> None:
    """The plan as an algorithm in run.toml, the tables, and last the models; what was kept of folds goes."""
    job, frame = advice.job, advice.clients
    table = as_algorithm(advice.choice, usable(job.clients))
    plan = job.run.model_dump(exclude_none=True) | {"algorithm": table}
    write_whole(directory.path / RUN, run_bytes(RunFile.model_validate(plan)))
    write_json(directory.path / ADVICE, advice.record)
    if advice.theory is not None:
        write_json(directory.path / THEORY, as_table(advice.theory))
    frame = frame.rename(columns={"lambda": "lam"})
    known = frame[[name for name in CLIENTS.names if name in frame]]
    write_parquet(directory.path / CLIENTS_FILE, clients_table(known.to_dict("records")))
    models, choice = advice.models, advice.choice
    moorings = zip(choice.mix.values(), models.centres)
    centre = sum((weight * w for weight, w in moorings), torch.zeros_like(models.common))
    apart = not isinstance(job.clients.train, Rows)  # then each client keeps its own
    shared = models.deployed if not apart or (job.run.federation and job.run.federation.share_models) else None
    saved = Saved(
        models.common,
        shared,
        job.clients.names,
        *task_facts(job),
        centre=None if torch.equal(centre, models.common) else centre,
        mix=None if job.task.prox is None else mix_of(choice, models.centres),
    )
    directory.write_models(saved)
    kept.remove(directory)
