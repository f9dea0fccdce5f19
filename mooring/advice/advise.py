"""`advise`: what every client should deploy and how sure that is, in memory or as a run directory."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from mooring.advice.candidates.client_prior import average_kinds, estimate_global_ridge, estimate_priors
from mooring.advice.candidates.column_sets import (
    BOOSTED,
    LINEAR,
    MIN_ROWS_FOR_AUTO,
    USED,
    ColumnSets,
    Shaper,
    add_columns,
    can_shape,
    make_shaper,
    numeric_columns,
    prune_columns,
    used_columns,
)
from mooring.advice.candidates.families import LAMBDA, Setting, make_offset
from mooring.advice.evaluation import fold_checkpoints
from mooring.advice.evaluation.cross_fitting import Evidence, FoldResult, cross_fit
from mooring.advice.evaluation.loss_sums import (
    ALTERNATIVES,
    GLOBAL,
    LOCAL,
    MODEL_KINDS,
    PERSONAL,
    ModelTriple,
    mean_losses,
    pooled_losses,
    sum_losses,
)
from mooring.advice.evaluation.networks import NetworkCheckpoint, network_evidence, network_folds
from mooring.advice.evaluation.setting_choice import Choice
from mooring.advice.folds import compact_rows, drop_copies, number_distinct_rows, row_groups, row_times, usable_rows
from mooring.advice.inference.recommendation import (
    CLIENT_LEVEL,
    MeanDifference,
    Recommendations,
    describe_probability,
    recommend,
)
from mooring.advice.new_clients.model_average import describe_average
from mooring.advice.reporting.explanations import add_explanations, find_theory
from mooring.advice.reporting.learning_curve import LearningCurve, estimate_learning_curve
from mooring.advice.reporting.sentences import write_sentences
from mooring.advice.reporting.setting_summary import as_algorithm, client_lams, effective_family, setting_alpha
from mooring.advice.reporting.theory_report import TheoryReport, theory_as_json
from mooring.advice.result import AdviceMethods
from mooring.core.cohort import Rows
from mooring.core.errors import RequestError
from mooring.data.client_arrays import is_client_arrays
from mooring.data.clients import PARTS, Clients
from mooring.engines.fit import (
    OnProgress,
    check_same_data,
    describe_task,
    ignore_progress,
    initial_files,
    progress_function,
)
from mooring.engines.metrics import compute_metrics
from mooring.engines.prepare import Job, is_pooled, prepare
from mooring.engines.request import check_trusted_run, request
from mooring.runs.atomic_files import directory_lock, write_atomically, write_json, write_parquet
from mooring.runs.directory import (
    ADVICE_FILE,
    CLIENTS_FILE,
    RUN_FILE,
    SCHEMA_FILE,
    THEORY_FILE,
    RunDirectory,
    create_run,
    open_run,
)
from mooring.runs.directory import StoredModels as Saved
from mooring.runs.runfile import RunFile, run_bytes
from mooring.runs.sections import AdviceOptions, AdviceSection
from mooring.runs.table_schemas import CLIENTS_SCHEMA, clients_table
from mooring.shapes.boosting import MISSING_XGBOOST, has_boosting
from mooring.tasks.proximal import is_dense

UNUSED_OPTIONS = ("checkpoint", "checkpoint_every")
ROUND_OPTIONS = ("rounds", "participation", "evaluate_every", "patience", "chunk")
PRINTED_KEYS = ("headline", "summary", "clients", "run")  # what `mooring advise --json` prints
HELD_OUT = "held-out rows"


class RecommendedModels(NamedTuple):
    """Everyone's models: the three that are compared, and the recommended one."""

    local: Tensor  # [m, d]
    global_: Tensor  # [d]
    personal: Tensor  # [m, d]
    recommended: Tensor  # [m, d]
    centers: Tensor  # [k, d], the global model inside each averaged setting: what new clients are pulled to
    plan: list[Setting]  # each client's, of the recommended model


@dataclass(frozen=True, repr=False)
class AdviceResult(AdviceMethods):
    """What `advise` returns. Losses and improvements are in the target's own units."""

    job: Job
    summary: dict[str, Any]
    clients: pd.DataFrame  # client, rows, recommended, improvement_over_local_pct, confidence, ..., see docs/advice.md
    models: RecommendedModels
    choice: Choice
    evidence: Evidence
    path: pd.DataFrame  # family, lam and held-out loss of the path, with its two ends
    theory: TheoryReport | None
    learning_curve: LearningCurve | None  # a typical client's losses with more rows; None where local models do as well
    headline: str  # the answer in a sentence
    words: dict[str, str]  # the sentences behind it, by what they are about
    run: Path | None

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
            "learning_curve": curve_as_lists(self.learning_curve),
            "candidates": table.to_dict("records"),
            "run": None,
        }

    def save(self, path: str | Path) -> Path:
        """Write the run directory, as `advise(..., out=path)` does."""
        directory = create_run(path, initial_files(self.job))
        write_run(directory, self)
        return directory.path

    def saved_models(self) -> Saved:
        """The models as a run directory holds them."""
        job, models, choice = self.job, self.models, self.choice
        shares = torch.tensor(list(choice.mix.values()), dtype=models.centers.dtype)
        center = shares @ models.centers
        remote = not isinstance(job.clients.train, Rows)  # then each client keeps its own
        shared = models.recommended if not remote or (job.run.federation and job.run.federation.share_models) else None
        return Saved(
            models.global_,
            shared,
            job.clients.names,
            *describe_task(job),
            centre=None if torch.equal(center, models.global_) else center,
            mix=None if job.task.prox is None else describe_average(choice, models.centers),
        )


def advise(
    data: Any,
    second: Any = None,
    *,
    out: str | Path | None = None,
    model: Any = None,
    progress: bool | OnProgress = False,
    trust_code: bool = False,
    **options: Unpack[AdviceOptions],
) -> AdviceResult:
    """Which model every client should use (local, global or personal), how much better it is, and with what confidence.

    `data`, `model`, `trust_code` and `options` are those of `fit`; options of training apply to networks only. With
    `out` the run directory with its tables and models is written there; `resume` continues an interrupted run.
    `progress` is True for a line on stderr, or a function of (step, done, total).
    """
    source = data
    if isinstance(source, nn.Module) or (second is not None and callable(source)):
        source, model = second, source
    if out is not None and os.path.lexists(out):
        raise RequestError(f"{out} already exists; choose another --out, or resume it.")
    asked = request(source, purpose="advise", model=model, trust_code=trust_code, **options)
    as_it_is = (
        isinstance(source, Clients) or is_pooled(asked.data.source) or (model is not None and is_client_arrays(source))
    )
    if options.get("drop_missing_target") is None and not as_it_is:
        # Advice is for a first look: rows without a target are left out, and a note says how many.
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
    source: Any = None,
    model: Any = None,
    trust_code: bool = False,
) -> AdviceResult:
    """Continue an interrupted advice to the very bytes it would have had: folds that are done are not fitted again."""
    directory = open_run(path)
    with directory_lock(directory.path):
        check_trusted_run(directory.run, directory.path, trust_code)
        job = prepare(directory.run, source, model)
        check_same_data(directory, job)
        return run_advice(job, directory, tell)


def refuse_unused(job: Job, given: list[str]) -> None:
    """Options that this advice would not heed are refused by name."""
    for name in given:
        if name in UNUSED_OPTIONS:
            raise RequestError(f"{name} does not apply: advise keeps what its choice needs, and every fold is kept.")
        if name in ROUND_OPTIONS and job.task.prox is not None:
            raise RequestError(
                f"{name} does not apply: models of task '{job.task.name}' are solved exactly, without rounds; it is "
                "for networks."
            )


def run_advice(job: Job, directory: RunDirectory | None = None, tell: OnProgress = ignore_progress) -> AdviceResult:
    """Choose, refit, evaluate, explain; folds are stored in the run directory, and the answer is written there last."""
    options = advice_options(job)
    job, choice, evidence = gather_evidence(job, directory, tell)
    task = job.task
    tell("explaining", 0, 2)
    found = recommend(evidence.held, evidence.own, options.margin, options.level, evidence.fitted)
    models = recommended_models(choice, evidence.models, found.recommended)
    frame = clients_frame(job, models, choice, evidence, found)
    theory, fit = None, None
    if task.prox is not None:
        frame, fit = add_explanations(job, frame, choice, evidence.shape)
        theory = find_theory(job) if options.theory else None
    tell("explaining", 1, 2)
    summary = (
        summarize(job, frame, evidence, found)
        | summarize_theory(theory)
        | evaluate_test_rows(job, evidence.models, models)
    )
    curve = estimate_learning_curve(fit, frame, summary) if fit is not None else None
    headline, words = write_sentences(job, frame, summary, choice, evidence.shape, theory, curve)
    table = lambda_path_table(choice, loss_unit(job))
    run = None if directory is None else directory.path
    advice = AdviceResult(job, summary, frame, models, choice, evidence, table, theory, curve, headline, words, run)
    if directory is not None:
        write_run(directory, advice)
    return advice


def advice_options(job: Job) -> AdviceSection:
    return job.run.advice or AdviceSection()


def loss_unit(job: Job) -> float:
    """What turns losses of the task into those in the target's own units."""
    return job.clients.target_scale**job.task.unit_power


def gather_evidence(job: Job, directory: RunDirectory | None, tell: OnProgress) -> tuple[Job, Choice, Evidence]:
    """The choice and the evidence, from folds that were stored or are fitted now, and the job with the columns that the
    models use. Test rows take no part."""
    task, clients, training, folds = job.task, job.clients, job.run.training, advice_options(job).folds
    done = fold_checkpoints.read_folds(directory)
    if task.prox is None:
        parts = {k: NetworkCheckpoint(*part) for k, part in done.items()}
        count = network_folds(job, folds)
        return job, *network_evidence(
            job, count, tell, parts, lambda k, part: fold_checkpoints.save_fold(directory, k, *part)
        )

    def keep(number: int, fold: FoldResult) -> None:
        fold_checkpoints.save_fold(directory, number, fold._asdict(), {})

    stored = {k: FoldResult(**tensors) for k, (tensors, _) in done.items()}
    rows, units, time = usable_rows(clients), row_groups(clients), row_times(clients)
    if units is None and time is None and isinstance(rows, Rows):
        before = len(rows.y)
        rows, units, _ = drop_copies(rows, number_distinct_rows(rows))
        if len(rows.y) < before:
            clients.notes.append(f"Every row appears {before // len(rows.y)} times; each is used once.")
    weights, shaper = clients.weighting(training.weights), choose_shaper(job, rows, units)
    choice, evidence = cross_fit(
        task, rows, clients.keys, weights, training.seed, folds, stored, keep, tell, units, time, shaper
    )
    return apply_shape(job, choice, evidence)


def choose_shaper(job: Job, rows: Any, units: Tensor | None) -> Shaper | None:
    """How extra columns are made, if the run asks for any that serve its task."""
    wanted, clients = advice_options(job).shape, job.clients
    if wanted == LINEAR or not can_shape(job.task) or not isinstance(rows, Rows) or clients.schema is None:
        if wanted not in (LINEAR, "auto"):
            raise RequestError(f"--shape {wanted} needs a table and a task that is linear in its columns.")
        return None
    if wanted == "auto" and (len(rows.y) < MIN_ROWS_FOR_AUTO or not is_dense(job.task)):
        return None
    if wanted == BOOSTED and not has_boosting():
        raise RequestError(MISSING_XGBOOST)
    rows, seed = compact_rows(rows), job.run.training.seed
    found = average_kinds(estimate_priors(job.task, rows))
    ridge = estimate_global_ridge(job.task, found[0], len(rows.y)) if found else 0.0
    offset = make_offset(job.task, found[0], ridge) if found else None
    return make_shaper(job.task, rows, clients.keys, wanted, numeric_columns(clients), offset, seed, units)


def apply_shape(job: Job, choice: Choice, evidence: Evidence) -> tuple[Job, Choice, Evidence]:
    """The job, the models and the schema with the extra columns that the choice uses, and no others."""
    if evidence.shape is None:
        return job, choice, evidence
    used = {s.columns for s in (*choice.mix, choice.local, choice.global_, *choice.own.values())}
    shape = prune_columns(evidence.shape, used)
    sets = ColumnSets(replace(job.task, features=evidence.shape.width), evidence.shape)
    sets.columns[USED] = used_columns(evidence.shape, shape)
    models = ModelTriple(*(sets.extract(USED, part) for part in evidence.models))
    evidence = evidence._replace(models=models, shape=shape)
    if shape is None:
        return job, choice, evidence
    clients = job.clients
    parts = {part: add_columns(getattr(clients, part), shape) for part in PARTS}
    schema = clients.schema.model_copy(update={"shape": shape.as_json()})
    clients = replace(clients, **parts, features=schema.features, schema=schema)  # type: ignore[arg-type]
    return replace(job, clients=clients, task=sets.task_on(USED)), choice, evidence


def recommended_models(choice: Choice, models: ModelTriple, kinds: np.ndarray) -> RecommendedModels:
    """Each client's model of the recommended kind."""
    simple = {LOCAL: choice.local, GLOBAL: choice.global_}
    plan = [simple.get(kind, choice.own.get(i, choice.plan)) for i, kind in enumerate(kinds)]
    return RecommendedModels(*models[:3], pick_models(models, kinds), models.centers, plan)


def pick_models(models: ModelTriple, kinds: np.ndarray) -> Tensor:
    """[m, d]: each client's model of the kind that it is recommended."""
    out = models.personal.clone()
    for kind, mine in zip(MODEL_KINDS, models.each()):
        chosen = torch.from_numpy(kinds == kind)
        out[chosen] = mine[chosen]
    return out


def lambda_path_table(choice: Choice, unit: float) -> pd.DataFrame:
    """The held-out losses along the path of single lambdas with the plan's columns, and the best of its two ends."""
    table = choice.table[choice.table["columns"] == choice.plan.columns]
    pulled = table[table["family"] == LAMBDA][["family", "value", "loss"]].rename(columns={"value": "lam"})
    ends = [
        {"family": family, "lam": lam, "loss": float(table[table["family"] == family]["loss"].min())}
        for family, lam in ((GLOBAL, np.inf), (LOCAL, 0.0))
        if (table["family"] == family).any()
    ]
    out = pd.concat([pd.DataFrame(ends), pulled], ignore_index=True)
    return out.assign(loss=out["loss"] * unit)


def client_paths(choice: Choice, clients: int, unit: float) -> list[list[float]] | None:
    """Each client's held-out losses along the path, by rising lambda; None where only some clients were asked."""
    table = choice.table[choice.table["columns"] == choice.plan.columns]
    moored = table[table["family"] == LAMBDA].sort_values("value").index
    if len(choice.losses) != clients:
        return None
    return (unit * choice.losses[:, moored.tolist()]).tolist()


def curve_as_lists(curve: LearningCurve | None) -> dict[str, Any] | None:
    """A learning curve as `advice.json` keeps it: `now`, `match`, and a list for each column."""
    return None if curve is None else {"now": curve.now, "match": curve.match, **curve.table.to_dict("list")}


def clients_frame(
    job: Job, models: RecommendedModels, choice: Choice, evidence: Evidence, found: Recommendations
) -> pd.DataFrame:
    """One row per client: the recommendation, its improvements with intervals, losses, the plan in numbers."""
    clients, unit = job.clients, loss_unit(job)
    sizes = {part: getattr(clients, part).size.numpy() for part in PARTS}
    rows = sum(sizes.values())
    kinds = {setting: effective_family(setting, choice.priors) for setting in set(models.plan)}
    return pd.DataFrame(
        {
            "client": clients.names,
            "rows": rows,
            **sizes,
            **recommendation_columns(found, unit),
            **{f"{name}_held_out": unit * part.numpy() for name, part in mean_losses(evidence.held).items()},
            "held_out_rows": evidence.held.rows.numpy().astype(int),
            "plan": [kinds[setting] for setting in models.plan],
            "lam": client_lams(models.plan, choice.priors, rows),
            "alpha": [setting_alpha(setting) for setting in models.plan],
        }
    )


def recommendation_columns(found: Recommendations, unit: float) -> dict[str, np.ndarray]:
    """What the clients' table has of recommendations: expected losses, and improvements that follow from them."""
    out: dict[str, np.ndarray] = {"recommended": found.recommended}
    out |= {name: unit * found.expected[name] for name in MODEL_KINDS}
    probabilities = {}
    for other in ALTERNATIVES:
        side = found.over[other]
        low, high = (unit * end.numpy() for end in side.interval(CLIENT_LEVEL))
        ends = {"": out[other] - expected_loss(found, out), "_ci_low": low, "_ci_high": high}
        ends[""] = np.where(found.is_same[other], 0.0, ends[""])
        out |= {f"improvement_over_{other}{end}": value for end, value in ends.items()}
        out |= {f"improvement_over_{other}_pct{end}": as_percent(value, out[other]) for end, value in ends.items()}
        probabilities[f"probability_better_than_{other}"] = side.probability.numpy()
    least = np.min(
        [np.where(found.is_same[o], 1.0, found.over[o].probability.numpy()) for o in ALTERNATIVES], axis=0
    )  # where all three are one model, nothing can be better
    return out | probabilities | {"confidence": describe_probability(least)}


def expected_loss(found: Recommendations, losses: dict[str, np.ndarray]) -> np.ndarray:
    """[m]: of the recommended models."""
    return np.select([found.recommended == name for name in MODEL_KINDS], [losses[name] for name in MODEL_KINDS])


def as_percent(improvement: Any, loss: Any) -> Any:
    """An improvement in percent of the other model's loss, at most all of it."""
    loss = np.asarray(loss, dtype=float)
    shape = np.broadcast(improvement, loss).shape
    return np.minimum(100 * np.divide(improvement, loss, out=np.zeros(shape), where=loss > 0), 100.0)


def summarize(job: Job, frame: pd.DataFrame, evidence: Evidence, found: Recommendations) -> dict[str, Any]:
    """The federation in numbers: held-out losses, improvements of the recommended models, who should use what."""
    options, unit = advice_options(job), loss_unit(job)
    losses = {name: unit * loss for name, loss in found.loss.items()}
    return {
        **losses,
        "metric": job.task.metric,
        "evaluated_on": HELD_OUT,
        "held_out_rows": int(evidence.held.rows.sum()),
        **{f"improvement_over_{o}": difference_record(found.line[o], unit, losses[o]) for o in ALTERNATIVES},
        "personal_models": {
            f"improvement_over_{o}": difference_record(found.personal_line[o], unit, losses[o]) for o in ALTERNATIVES
        },
        "with_all_rows": None
        if found.full_line is None
        else {f"improvement_over_{o}": difference_record(found.full_line[o], unit, losses[o]) for o in ALTERNATIVES},
        "recommended_counts": count_values(frame["recommended"]),
        "confidence_counts": count_values(frame["confidence"]),
        "margin": options.margin,
        "level": options.level,
        "client_level": CLIENT_LEVEL,
    }


def difference_record(line: MeanDifference, unit: float, loss: float) -> dict[str, float]:
    """A mean improvement with its interval, in units of the loss and in percent of `loss`."""
    values = np.array(line) * unit
    ends = ("mean", "ci_low", "ci_high"), ("pct", "pct_ci_low", "pct_ci_high")
    return dict(zip(ends[0], values.tolist())) | dict(zip(ends[1], as_percent(values, loss).tolist()))


def evaluate_test_rows(job: Job, compared: ModelTriple, models: RecommendedModels) -> dict[str, Any]:
    """What a table's own test rows show of the models: reported, never used to decide."""
    clients = job.clients
    if clients.has_random_parts or int(clients.test.size.sum()) == 0:
        return {"test": None, "measures": {}}
    sums, unit = sum_losses(job.task, clients.test, compared), loss_unit(job)
    mine = sum_losses(job.task, clients.test, compared._replace(personal=models.recommended))
    losses = pooled_losses(sums) | {"recommended": pooled_losses(mine)[PERSONAL]}
    here = isinstance(clients.test, Rows)  # else each client has its own rows, and their measures
    return {
        "test": {"rows": int(sums.rows.sum())} | {name: unit * loss for name, loss in losses.items()},
        "measures": known_measures(job, models) if here else {},
    }


def summarize_theory(theory: TheoryReport | None) -> dict[str, Any]:
    if theory is None:
        return {"heterogeneity": None, "threshold": None}
    return {"heterogeneity": theory.heterogeneity, "threshold": theory.thresholds["bayes"]["R"]}


def count_values(column: pd.Series) -> dict[str, int]:
    """How often each word stands there, the most frequent first."""
    return {str(word): int(count) for word, count in column.value_counts().items()}


def known_measures(job: Job, models: RecommendedModels) -> dict[str, dict[str, float]]:
    """Measures that people know of everyone's models on test rows, which took no part in them."""
    mine = dict(zip((*MODEL_KINDS, "recommended"), models[:4]))
    return {name: compute_metrics(job.task, job.clients, w).overall for name, w in mine.items()}


def as_json(advice: AdviceResult) -> dict[str, Any]:
    """The object that `mooring advise --json` prints."""
    rows = advice.clients.to_dict("records")
    return dict(zip(PRINTED_KEYS, (advice.headline, advice.summary, rows, str(advice.run) if advice.run else None)))


def write_run(directory: RunDirectory, advice: AdviceResult) -> None:
    """The plan as an algorithm in run.toml, the tables, and last the models; what was kept of folds goes."""
    job, frame = advice.job, advice.clients
    shape = advice.evidence.shape
    table = as_algorithm(
        advice.choice, usable_rows(job.clients), None if shape is None else ColumnSets(job.task, shape)
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
    directory.write_models(advice.saved_models())
    fold_checkpoints.remove_folds(directory)
