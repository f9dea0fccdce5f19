"""`compare`: several methods on the same data, splits and cohorts; each is a run of its own inside one directory."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from typing import Unpack

import pandas as pd
from torch import Tensor

from mooring.algorithms.base import AnyAlgorithm
from mooring.core.types import JsonObject, NamedValues
from mooring.engines import training_checkpoint
from mooring.engines.fit_files import InMemoryInputs, initial_files, reopen, with_resolved, write_trained
from mooring.engines.fit_result import TrainedModels
from mooring.engines.fit_tables import mean_known_loss, rounds_frame
from mooring.engines.loop import TrainingSteps, resolve
from mooring.engines.metrics import compute_metrics, mean_improvement
from mooring.engines.participation import cohort_size, refuse_partial_participation
from mooring.engines.personal_parts import name_personal_parts
from mooring.engines.prepare import Job, make_simulator, prepare
from mooring.engines.progress import OnProgress, ignore_progress, progress_function
from mooring.engines.request import hyperparameters, request, user_classes
from mooring.engines.simulator import StatisticsCache
from mooring.engines.sweep import group_methods, max_runs_per_cohort, run_together
from mooring.engines.training import train_steps
from mooring.engines.training_state import LOSS_COLUMNS, TrainingState
from mooring.runs.atomic_files import csv_bytes, directory_lock, write_atomically, write_json
from mooring.runs.directory import (
    CLIENTS_CSV,
    COMPARISON_FILE,
    CURVES_CSV,
    METHODS_CSV,
    SECONDS_FILE,
    SEED_FOLDER,
    SEEDS_CSV,
    RunDirectory,
    create_run,
    method_folder,
    open_run,
)
from mooring.runs.option_types import Options
from mooring.runs.runfile import RunFile

REPEATED_COLUMNS = ("test_loss", "validation_loss", "last_test_loss")  # columns with a deviation over repetitions
SUMMED_COLUMNS = ("seconds", "bytes")
ACCURACY = "accuracy"  # ends the name of a column of the clients' table: "fedavg accuracy"
MAX_LABEL_VALUE_LENGTH = 12  # characters of a field's value in a label


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`: one row per method, and each client's test loss by method, in the target's own units.

    `above_best_pct` is the difference of a method's test loss from the lowest one in percent, with an interval over
    clients. With several seeds numbers are means over them, `..._sd` their deviations (seconds and bytes: sums), and
    `behind` the difference from the best method (of least mean loss) under the same seeds, with `behind_sd`.
    """

    metric: str
    methods: pd.DataFrame  # method, test_loss, validation_loss, seconds, rounds, bytes, ...
    clients: pd.DataFrame  # client, rows, test rows, then one column per method; of classes also "METHOD accuracy"
    run: Path | None
    notes: list[str]  # notes on dropped, imputed or clipped values
    curves: pd.DataFrame  # method, seed, round and the losses of every evaluated round
    seeds: pd.DataFrame  # one row per method and seed, as `methods`

    def __repr__(self) -> str:
        """A few lines: the methods from the best to the worst."""
        table = self.methods.sort_values("test_loss")
        spread = "test_loss_sd" in table
        lines = [
            f"  {row['method']}: {row['test_loss']:.4g}" + (f" (sd {row['test_loss_sd']:.2g})" if spread else "")
            for row in table.head(7).to_dict("records")
        ]
        location = f"run: {self.run}" if self.run else "not written; give out= to keep it"
        return "\n".join([f"test {self.metric} of {len(table)} methods, {len(self.clients)} clients", *lines, location])


def compare(
    data: object,
    methods: Sequence[str | AnyAlgorithm] | None = None,
    *,
    out: str | Path | None = None,
    model: object = None,
    settings: Mapping[str, NamedValues] | None = None,
    progress: bool | OnProgress = False,
    trust_code: bool = False,
    **options: Unpack[Options],
) -> Comparison:
    """Train every method on the same federation; `methods` are names, names with fields ("ditto lam=0.1"),
    "my_file.py:MyAlgorithm" or algorithms, `settings` fields by name.

    `data`, `progress`, `model`, `trust_code` and `options` are those of `fit`. Without `methods` they are the run
    file's. With `seeds` above 1 everything is repeated with the seeds that follow `seed`: splits, partitions and
    training, or only training where `split_seed` fixes the data.
    """
    settings = {name: name_personal_parts(fields, model) for name, fields in (settings or {}).items()}
    run = request(
        data, purpose="compare", methods=methods, settings=settings, model=model, trust_code=trust_code, **options
    )
    loss = options.get("loss")
    inputs = InMemoryInputs(
        None if isinstance(data, str | Path) else data,
        model,
        loss if callable(loss) else None,
        user_classes(methods or []),
    )
    job = prepare(run, *inputs)
    for algorithm in job.algorithms():
        refuse_partial_participation(algorithm, job.plan, len(job.clients))
    directory = None if out is None else create_run(out, initial_files(job))
    with nullcontext() if directory is None else directory_lock(directory.path):
        return run_comparison(job, inputs, directory, progress_function(progress))


def resume_comparison(
    path: str | Path,
    on_progress: OnProgress = ignore_progress,
    source: object = None,
    model: object = None,
    loss: object = None,
    methods: Sequence[AnyAlgorithm] = (),
    trust_code: bool = False,
) -> Comparison:
    """Finish an interrupted comparison: finished methods are kept, others resume from their checkpoints."""
    inputs = InMemoryInputs(source, model, loss, user_classes(methods))
    with reopen(path, "compare", inputs, trust_code) as (directory, job):
        return run_comparison(job, inputs, directory, on_progress)


def run_comparison(
    job: Job, inputs: InMemoryInputs, directory: RunDirectory | None, on_progress: OnProgress
) -> Comparison:
    """Run every method with every seed; write the tables at the end."""
    training = job.run.training
    results = []
    for seed in range(training.seed, training.seed + training.seeds):
        seed_job, label, folder = job, "", directory.path if directory else None
        if training.seeds > 1:
            run = job.run.model_copy(update={"training": training.model_copy(update={"seed": seed, "seeds": 1})})
            seed_job = job if seed == training.seed else prepare(run, *inputs, job.copies)
            seed_job, label = replace(seed_job, run=run), f", seed {seed}"
            folder = folder / SEED_FOLDER.format(seed) if folder else None
        results.append(run_methods(seed_job, folder, lambda step, *done, label=label: on_progress(step + label, *done)))
    rows = pd.concat(
        [frame.assign(seed=training.seed + k) for k, (frame, _, _) in enumerate(results)], ignore_index=True
    )
    curves = pd.concat(
        [frame.assign(seed=training.seed + k) for k, (_, _, frame) in enumerate(results)], ignore_index=True
    )
    curves = curves[["method", "seed", *(name for name in curves if name not in ("method", "seed"))]]
    clients = results[0][1] if training.seeds == 1 else mean_client_table([frame for _, frame, _ in results])
    methods = difference_from_best(rows.drop(columns="seed"), clients) if training.seeds == 1 else summarize_seeds(rows)
    path = directory.path if directory else None
    result = Comparison(job.task.metric, methods, clients, path, job.clients.notes, curves, rows)
    if directory is not None:
        metadata = {"title": job.clients.title, "notes": list(job.clients.notes), "run": None}
        timeless, seed_rows = methods.drop(columns="seconds"), rows.drop(columns="seconds")
        for name, table in (
            (METHODS_CSV, timeless),
            (SEEDS_CSV, seed_rows),
            (CURVES_CSV, curves),
            (CLIENTS_CSV, clients),
        ):
            write_atomically(directory.path / name, csv_bytes(table))
        write_json(directory.path / SECONDS_FILE, {"methods": dict(zip(methods["method"], methods["seconds"]))})
        write_json(
            directory.path / COMPARISON_FILE, as_json(result) | {"methods": timeless.to_dict("records")} | metadata
        )
    return result


def difference_from_best(methods: pd.DataFrame, clients: pd.DataFrame) -> pd.DataFrame:
    """Add the difference of each method's test loss from the lowest one in percent, with intervals over clients."""
    best = methods.loc[methods["test_loss"].idxmin(), "method"]
    lines = [mean_improvement(clients["test"], clients[best], clients[name]) for name in methods["method"]]
    keys_by_end = {"": "pct", "_ci_low": "pct_ci_high", "_ci_high": "pct_ci_low"}
    columns = {
        f"above_best_pct{end}": [-line[key] if line else nan for line in lines] for end, key in keys_by_end.items()
    }
    at = methods.columns.get_loc("test_loss") + 1
    for k, (name, values) in enumerate(columns.items()):
        methods.insert(at + k, name, values)
    return methods


def summarize_seeds(rows: pd.DataFrame) -> pd.DataFrame:
    """Return one row per method: means and deviations over seeds, and paired differences from the best method."""
    best = rows.groupby("method")["test_loss"].mean().idxmin()
    reference = rows[rows["method"] == best].set_index("seed")["test_loss"]
    rows = rows.assign(behind=rows["test_loss"] - rows["seed"].map(reference))
    groups = rows.groupby("method", sort=False)
    out = groups[[name for name in rows if name not in ("method", "seed", *SUMMED_COLUMNS)]].mean()
    for name in (*REPEATED_COLUMNS, "behind"):
        out.insert(out.columns.get_loc(name) + 1, f"{name}_sd", groups[name].std())
    return out.join(groups[list(SUMMED_COLUMNS)].sum()).reset_index()


def mean_client_table(tables: list[pd.DataFrame]) -> pd.DataFrame:
    """Return each client's loss by method, averaged over the seeds in which it occurs."""
    stacked = pd.concat(tables, ignore_index=True)
    return stacked.groupby("client", sort=False).mean().reset_index().astype({"rows": int})


def run_methods(
    job: Job, folder: Path | None, on_progress: OnProgress
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Run every method once; return one row per method, one row per client, and the learning curves.

    Methods that differ only in fields of `per_client_fields` are trained as one cohort, if they are small.
    """
    statistics: StatisticsCache = {}
    methods = dict(label_methods(job))
    sections = dict(zip(methods, job.run.algorithms or []))
    rows, columns, curves, accuracy = {}, {}, {}, {}
    max_group = max_runs_per_cohort(
        job.task, job.clients, cohort_size(job.plan, len(job.clients)), job.run.training.chunk or 0
    )
    for group in group_methods(methods, max_group):
        runs = [run_method(job, label, sections[label], folder, on_progress, statistics) for label in group]
        for label, ((trained, records), seconds) in zip(group, run_together(runs, filled=True)):
            frame = rounds_frame(job, records)
            measures = compute_metrics(trained.algorithm.deployed_task(job.task), job.clients, trained.models)
            rows[label] = {
                "method": label,
                "test_loss": mean_known_loss(trained.test, job.clients.test.size),
                "validation_loss": mean_known_loss(trained.validation, job.clients.validation.size),
                **measures.overall,
                "seconds": max(seconds, float(frame["seconds"].sum())),
                "rounds": int(frame["round"].max()),
                "used_round": trained.used.t,
                "last_test_loss": float(frame["test_loss"].dropna().iloc[-1]),
                "bytes": int(frame["bytes_up"].sum() + frame["bytes_down"].sum()),
            }
            columns[label] = trained.test.numpy()
            if "accuracy" in measures.by_client:
                accuracy[label] = measures.by_client["accuracy"]
            curve_columns = [
                "round",
                *LOSS_COLUMNS,
                *(name for name in frame if name.startswith("test_") and name not in LOSS_COLUMNS),
            ]
            curves[label] = frame.loc[frame["test_loss"].notna(), curve_columns].assign(method=label)
    losses = {label: columns[label] for label in methods}
    sizes = {"rows": total_rows(job).numpy(), "test": job.clients.test.size.numpy()}
    accuracies = {f"{label} {ACCURACY}": accuracy[label] for label in methods if label in accuracy}
    clients = pd.DataFrame({"client": job.clients.names, **sizes, **losses, **accuracies})
    ordered = pd.concat([curves[label] for label in methods], ignore_index=True)
    return pd.DataFrame([rows[label] for label in methods]), clients, ordered


def label_methods(job: Job) -> list[tuple[str, AnyAlgorithm]]:
    """Return each method with its name; if a name occurs twice, with the fields in which its settings differ."""
    algorithms = job.algorithms()
    names = [a.name for a in algorithms]
    labels = []
    for algorithm in algorithms:
        same_name_settings = [
            hyperparameters(candidate) for candidate in algorithms if candidate.name == algorithm.name
        ]
        fields = hyperparameters(algorithm)
        differ = [
            key for key, value in fields.items() if any(settings.get(key) != value for settings in same_name_settings)
        ]
        labels.append(" ".join([algorithm.name, *(f"{key}={shorten_value(fields[key])}" for key in differ)]))
    unique_labels = [
        label if labels.count(label) == 1 else f"{label} {labels[: i + 1].count(label)}"
        for i, label in enumerate(labels)
    ]
    return list(zip(unique_labels if len(set(names)) < len(names) else names, algorithms))


def shorten_value(value: object) -> str:
    text = re.sub(r"[^\w.+-]+", "-", f"{value:g}" if isinstance(value, float) else str(value))
    return text if len(text) <= MAX_LABEL_VALUE_LENGTH else text[:MAX_LABEL_VALUE_LENGTH] + "..."


def run_method(
    job: Job, label: str, section: object, folder: Path | None, on_progress: OnProgress, statistics: StatisticsCache
) -> TrainingSteps[tuple[TrainedModels, list[JsonObject]]]:
    """Train one method, from the start or from the checkpoint of its own run directory."""
    method_run = job.run.model_copy(
        update={
            "mooring": job.run.mooring.model_copy(update={"purpose": "fit"}),
            "algorithm": section,
            "algorithms": None,
        }
    )
    inner, method_path = None, None if folder is None else method_folder(folder, label)
    if method_path is not None and method_path.exists():
        inner = open_run(method_path)
        method_run = inner.run
    beside = replace(job, run=RunFile.model_validate(method_run))
    exchange = make_simulator(beside, statistics)
    algorithm, server = resolve(beside.algorithms()[0], job.task, exchange, beside.plan.seed)
    progress: TrainingState = TrainingState(server)
    if inner is not None:
        progress, _ = training_checkpoint.restore_training(inner, server, exchange)
    elif method_path is not None:
        inner = create_run(method_path, initial_files(replace(beside, run=with_resolved(method_run, algorithm))))
    trained = yield from train_steps(
        beside, algorithm, exchange, progress, inner, lambda _, done, rounds: on_progress(label, done, rounds)
    )
    if inner is not None and not inner.finished:
        write_trained(inner, job.deploy(algorithm), exchange.roster, trained, rounds_frame(job, progress.records))
    return trained, progress.records


def total_rows(job: Job) -> Tensor:
    """[m]: the rows of each client."""
    return job.clients.train.size + job.clients.validation.size + job.clients.test.size


def as_json(result: Comparison) -> JsonObject:
    """The object that `mooring compare --json` prints."""
    return {
        "metric": result.metric,
        "methods": result.methods.to_dict("records"),
        "clients": result.clients.to_dict("records"),
        "run": str(result.run) if result.run else None,
    }
