"""`advise`: what every client should deploy and how sure that is, in memory or as a run directory."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Unpack

import pandas as pd
import torch
from torch import nn

from mooring.advice.evaluation.cross_fitting import Evidence
from mooring.advice.evaluation.evidence import advice_options, gather_evidence
from mooring.advice.evaluation.setting_choice import Choice
from mooring.advice.inference.recommendation import recommend
from mooring.advice.new_clients.model_average import describe_average
from mooring.advice.reporting.column_effects import measure_effects
from mooring.advice.reporting.explanations import Explanation, add_explanations, explain_choice
from mooring.advice.reporting.learning_curve import LearningCurve, estimate_learning_curve
from mooring.advice.reporting.sentences import write_sentences
from mooring.advice.reporting.setting_summary import as_algorithm
from mooring.advice.reporting.tables import (
    RecommendedModels,
    client_paths,
    clients_frame,
    curve_as_lists,
    evaluate_test_rows,
    lambda_path_table,
    loss_scale,
    recommended_models,
    summarize,
    summarize_theory,
)
from mooring.advice.reporting.target_units import measure_held_out, score_intervals
from mooring.advice.result import AdviceMethods
from mooring.core.errors import RequestError
from mooring.core.task import HasProx
from mooring.core.types import JsonObject, NamedValues
from mooring.data.client_arrays import is_client_arrays
from mooring.data.clients import Clients
from mooring.engines.fit_files import InMemoryInputs, initial_files, reopen
from mooring.engines.model_store import describe_task
from mooring.engines.prediction_intervals import IntervalScores
from mooring.engines.prepare import Job, is_pooled, prepare
from mooring.engines.progress import OnProgress, ignore_progress, progress_function
from mooring.engines.request import request
from mooring.engines.theory_report import TheoryReport, find_theory, theory_as_json
from mooring.runs import checkpoint
from mooring.runs.atomic_files import directory_lock, write_atomically, write_json, write_parquet
from mooring.runs.directory import (
    ADVICE_FILE,
    CLIENTS_FILE,
    RUN_FILE,
    SCHEMA_FILE,
    THEORY_FILE,
    RunDirectory,
    StoredModels,
    create_run,
)
from mooring.runs.option_types import AdviceOptions
from mooring.runs.runfile import RunFile, run_bytes
from mooring.runs.table_schemas import CLIENTS_SCHEMA, clients_table
from mooring.shapes.column_sets import ColumnSets

UNUSED_OPTIONS = ("checkpoint", "checkpoint_every")
ROUND_OPTIONS = ("rounds", "participation", "evaluate_every", "patience", "chunk", "select_by")
PRINTED_KEYS = ("headline", "summary", "clients", "run")  # what `mooring advise --json` prints


@dataclass(frozen=True, repr=False)
class AdviceResult(AdviceMethods):
    """What `advise` returns. Losses and improvements are in the target's own units."""

    job: Job
    summary: JsonObject
    clients: pd.DataFrame  # one row per client, in the columns of clients.parquet
    models: RecommendedModels
    choice: Choice
    evidence: Evidence
    path: pd.DataFrame  # family, lam and held-out loss of the path, with its two ends
    theory: TheoryReport | None
    column_effects: list[JsonObject]  # partial dependence on columns whose effects are not linear
    learning_curve: LearningCurve | None  # a typical client's losses with more rows; None where local models do as well
    headline: str  # the answer in a sentence
    words: dict[str, str]  # the sentences behind it, by what they are about
    run: Path | None

    @property
    def record(self) -> JsonObject:
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
            "learning_curve": curve_as_lists(self.learning_curve),
            "column_effects": self.column_effects,
            "candidates": table.to_dict("records"),
            "run": None,
            "intervals": None if self.intervals is None else self.intervals.model_dump(mode="json"),
        }

    @cached_property
    def intervals(self) -> IntervalScores | None:
        """Held-out residuals that prediction intervals are made from; None where the target is not a number."""
        return score_intervals(self.job.clients, self.evidence.predictions, self.clients["recommended"].to_numpy())

    def save(self, path: str | Path) -> Path:
        """Write the run directory, as `advise(..., out=path)` does."""
        directory = create_run(path, initial_files(self.job))
        write_run(directory, self)
        return directory.path

    @cached_property
    def saved(self) -> StoredModels:
        """The models as a run directory contains them: of a client its recommended one."""
        job, models, choice = self.job, self.models, self.choice
        shares = torch.tensor(list(choice.mix.values()), dtype=models.centers.dtype)
        center = shares @ models.centers
        return StoredModels(
            models.global_,
            models.recommended,
            job.clients.names,
            *describe_task(job),
            centre=None if torch.equal(center, models.global_) else center,
            mix=describe_average(choice, models.centers) if isinstance(job.task, HasProx) else None,
        )


def advise(
    data: object,
    second: object = None,
    *,
    out: str | Path | None = None,
    model: object = None,
    settings: NamedValues | None = None,
    progress: bool | OnProgress = False,
    trust_code: bool = False,
    **options: Unpack[AdviceOptions],
) -> AdviceResult:
    """Which model every client should use (local, global or personal), how much better it is, and with what confidence.

    `data`, `model`, `trust_code` and `options` are those of `fit`; options of training apply to networks only, as do
    `settings`, the step size, epochs, batch and optimizer of local training: what is not given is chosen. With
    `out` the run directory with its tables and models is written there; `resume` continues an interrupted run.
    `progress` is True for a line on stderr, or a function of (step, done, total).
    """
    source = data
    if isinstance(source, nn.Module) or (second is not None and callable(source)):
        source, model = second, source
    if out is not None and os.path.lexists(out):
        raise RequestError(f"{out} already exists; choose another --out, or resume it.")
    asked = request(source, purpose="advise", model=model, settings=settings, trust_code=trust_code, **options)
    as_it_is = (
        isinstance(source, Clients) or is_pooled(asked.data.source) or (model is not None and is_client_arrays(source))
    )
    if options.get("drop_missing_target") is None and not as_it_is:
        # Advice is for a first look: rows without a target are left out, and a note has their number.
        asked = asked.model_copy(update={"data": asked.data.model_copy(update={"drop_missing_target": True})})
    in_memory, loss = None if isinstance(source, str | Path) else source, options.get("loss")
    job = prepare(asked, in_memory, model, loss if callable(loss) else None)
    refuse_unused(job, [name for name, value in options.items() if value is not None])
    directory = None if out is None else create_run(out, initial_files(job))
    with nullcontext() if directory is None else directory_lock(directory.path):
        return run_advice(job, directory, progress_function(progress))


def resume(
    path: str | Path,
    tell: OnProgress = ignore_progress,
    source: object = None,
    model: object = None,
    loss: object = None,
    trust_code: bool = False,
) -> AdviceResult:
    """Continue an interrupted advice to the same bytes as without it: finished folds are not fitted again."""
    with reopen(path, "advise", InMemoryInputs(source, model, loss, {}), trust_code) as (directory, job):
        return run_advice(job, directory, tell)


def refuse_unused(job: Job, given: list[str]) -> None:
    """Refuse options that do not apply, by name."""
    for name in given:
        if name in UNUSED_OPTIONS:
            raise RequestError(f"{name} does not apply: advise stores what its choice needs, and every fold.")
        if name in ROUND_OPTIONS and isinstance(job.task, HasProx):
            raise RequestError(
                f"{name} does not apply: models of task '{job.task.name}' are solved exactly, without rounds; it is "
                "for networks."
            )


def run_advice(
    job: Job,
    directory: RunDirectory | None = None,
    tell: OnProgress = ignore_progress,
) -> AdviceResult:
    """Choose, refit, evaluate, explain; folds are stored in the run directory, and the answer is written there last."""
    options = advice_options(job)
    job, choice, evidence = gather_evidence(job, directory, tell)
    task, theory = job.task, None
    tell("explaining", 0, 2)
    recommendations = recommend(evidence.held, evidence.own, options.margin, options.level, evidence.fitted)
    models = recommended_models(choice, evidence.models, recommendations.recommended)
    frame = clients_frame(job, models, choice, evidence, recommendations)
    explanation: Explanation | None = None
    if isinstance(task, HasProx):
        explanation = explain_choice(job, choice, evidence.shape)
        frame = add_explanations(job, frame, choice, explanation)
        theory = find_theory(job) if options.theory else None
    tell("explaining", 1, 2)
    summary = (
        summarize(job, frame, evidence, recommendations)
        | summarize_theory(theory)
        | evaluate_test_rows(job, evidence.models, models)
        | {"held_out_measures": measure_held_out(task, job.clients, evidence.predictions, recommendations.recommended)}
    )
    fit, varies = (None, None) if explanation is None else (explanation.fit, explanation.varies)
    curve = estimate_learning_curve(fit, frame, summary) if fit is not None else None
    effects = measure_effects(job, evidence.shape, models.global_)
    headline, words = write_sentences(job, frame, summary, choice, evidence.shape, theory, curve, effects, varies)
    table = lambda_path_table(choice, loss_scale(job))
    run = None if directory is None else directory.path
    advice = AdviceResult(
        job, summary, frame, models, choice, evidence, table, theory, effects, curve, headline, words, run
    )
    if directory is not None:
        write_run(directory, advice)
    return advice


def as_json(advice: AdviceResult) -> JsonObject:
    """The object that `mooring advise --json` prints."""
    rows = advice.clients.to_dict("records")
    return dict(zip(PRINTED_KEYS, (advice.headline, advice.summary, rows, str(advice.run) if advice.run else None)))


def write_run(directory: RunDirectory, advice: AdviceResult) -> None:
    """The plan as an algorithm in run.toml, the tables, and last the models; then the stored folds are deleted."""
    job, frame = advice.job, advice.clients
    shape = advice.evidence.shape
    table = as_algorithm(
        advice.choice, advice.evidence.own.rows, None if shape is None else ColumnSets(job.task, shape)
    )
    plan = job.run.model_dump(exclude_none=True) | {"algorithm": table}
    write_atomically(directory.path / RUN_FILE, run_bytes(RunFile.model_validate(plan)))
    write_json(directory.path / ADVICE_FILE, advice.record)
    if advice.theory is not None:
        write_json(directory.path / THEORY_FILE, theory_as_json(advice.theory))
    if shape is not None:
        write_json(directory.path / SCHEMA_FILE, job.clients.schema.model_dump(mode="json"))
    known = frame[[name for name in CLIENTS_SCHEMA.names if name in frame]]
    write_parquet(directory.path / CLIENTS_FILE, clients_table(known.to_dict("records")))
    directory.write_models(advice.saved)
    checkpoint.remove_folds(directory.path)
