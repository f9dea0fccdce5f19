"""`predict`: predictions of a finished run's models for new rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from mooring.core.errors import RequestError
from mooring.core.task import Task
from mooring.data.clients import BINARY, REGRESSION
from mooring.data.column_types import client_name, to_client_names
from mooring.data.loading import read_by_schema
from mooring.data.schema import Schema, encode_table
from mooring.data.tables import count_phrase, quote_list, suggest_name
from mooring.engines.prediction_intervals import IntervalScores
from mooring.engines.prepare import read_task
from mooring.engines.request import check_trusted_run
from mooring.runs.directory import (
    ADVICE_FILE,
    CLIENTS_FILE,
    SUMMARY_FILE,
    RunDirectory,
    StoredModels,
    explain_contents,
    open_run,
)
from mooring.runs.purposes import PURPOSES

NO_CLIENT = ""  # the owner of a row whose client cell is empty


def read_task_and_schema(directory: RunDirectory) -> tuple[Task, Schema]:
    """The task and the schema of a run that was made from a table."""
    return read_task(directory), read_schema(directory)


def read_schema(directory: RunDirectory) -> Schema:
    """Return the encoding of a run's table."""
    return Schema.from_content(directory.schema)


def choose_method(path: str | Path, method: str | None = None) -> tuple[RunDirectory, list[str]]:
    """Return the run with the models, and notes: of a comparison, `method`, or else the best on validation rows."""
    directory = open_run(path)
    if PURPOSES[directory.run.mooring.purpose].methods != "several":
        if method is not None:
            raise RequestError(f"{path} is no comparison; there is no method to choose, and {method!r} was asked for.")
        return directory, []
    losses = {row["method"]: row["validation_loss"] for row in directory.comparison["methods"]}
    if method is not None and method not in losses:
        raise RequestError(
            f"{path}: unknown method '{method}'; it compares {', '.join(losses)}.{suggest_name(method, losses)}"
        )
    known_losses = {name: loss for name, loss in losses.items() if loss is not None and loss == loss}
    best = method or min(known_losses or losses, key=lambda name: known_losses.get(name, 0.0))
    notes = [] if method else [f"A comparison: the models are those of {best}, the best on validation rows."]
    return directory.of_method(best), notes


def predict(
    path: str | Path,
    source: object,
    client: object = None,
    method: str | None = None,
    trust_code: bool = False,
    interval: float | None = None,
) -> tuple[pd.DataFrame, list[str]]:
    """One row per row of `source`: its own columns, the prediction (regression) or the class and its probabilities, and
    the model that predicted it; and notes.

    `interval` is the level of prediction intervals, such as 0.9, which runs of `advise` and `fit` with a numeric target
    have: the columns `<target>_low` and `<target>_high`. A target column of the source is called `<target> (actual)`.

    With `client` that client's model predicts every row. Otherwise, in a table with the client column, each client's
    own model predicts its rows, and the global one rows of unknown clients and rows without a client;
    a table without it is predicted by the only client of a run with one client.
    Of a comparison, `method` names the models (default: the best on validation rows). `trust_code` lets a run
    from an untrusted source use the model file that it names.
    """
    with explain_contents(path):
        directory, method_notes = choose_method(path, method)
        if trust_code:
            check_trusted_run(directory.run, directory.path, trust_code)
        task, schema = read_task_and_schema(directory)
        scores = None if interval is None else stored_intervals(directory)
        models, kinds = directory.models, stored_recommendations(directory)
        frame, notes = predict_rows(task, schema, models, source, client, directory.path, scores, interval, kinds)
        return frame, [*method_notes, *notes]


def stored_recommendations(directory: RunDirectory) -> dict[str, str]:
    """Each client's recommended model, local, global or personal; empty if the run has no recommendations."""
    if not (directory.path / CLIENTS_FILE).is_file():
        return {}
    return name_recommendations(directory.clients)


def name_recommendations(clients: pd.DataFrame) -> dict[str, str]:
    """The recommended models of a clients' table by client."""
    return dict(clients[["client", "recommended"]].dropna().astype(str).values) if "recommended" in clients else {}


def stored_intervals(directory: RunDirectory) -> IntervalScores | None:
    """Return the stored scores of prediction intervals."""
    if (directory.path / ADVICE_FILE).is_file():
        intervals = directory.advice.get("intervals")
    else:
        intervals = directory.summary.get("intervals") if (directory.path / SUMMARY_FILE).is_file() else None
    return None if intervals is None else IntervalScores.model_validate(intervals)


def predict_rows(
    task: Task,
    schema: Schema,
    models: StoredModels,
    source: object,
    client: object,
    path: str | Path,
    scores: IntervalScores | None = None,
    interval: float | None = None,
    kinds: Mapping[str, str] | None = None,
) -> tuple[pd.DataFrame, list[str]]:
    """Return predictions of a table's rows in the target's own units and classes, and notes; `kinds` are recommended
    models."""
    table = read_by_schema(source, schema)
    x, notes = encode_table(table.frame, schema, table.place)
    owners = row_clients(table.frame, schema, client, models.clients, path)
    has_no_client = owners == NO_CLIENT
    if has_no_client.any():
        rows = count_phrase(int(has_no_client.sum()), "row")
        notes.append(f"{rows} with an empty cell in column '{schema.client}': predicted with the global model.")
    unknown = sorted(set(owners[~has_no_client]) - set(models.clients))
    if unknown:
        notes.append(
            f"{count_phrase(len(unknown), 'unknown client')}, {quote_list(unknown, 3)}: predicted with the "
            "global model."
        )
    position = pd.Index(models.clients).get_indexer(owners) if models.personal is not None else np.full(len(owners), -1)
    output = np.zeros(0)
    for client_position in np.unique(position):
        place_rows = np.flatnonzero(position == client_position)
        w = models.common if client_position < 0 or models.personal is None else models.personal[int(client_position)]
        part = task.predict(w[None], torch.as_tensor(x[place_rows]).to(task.dtype)[None])[0].detach().double().numpy()
        output = np.full((len(owners), *part.shape[1:]), np.nan) if not len(output) else output
        output[place_rows] = part
    if schema.kind == BINARY and output.ndim == 1 and task.predicts_probabilities:  # a network with one logit
        output = np.stack([1 - output, output], 1)
    table_out = prediction_table(output, owners, schema)
    if interval is not None:
        table_out = table_out.assign(**interval_columns(table_out[schema.target], owners, schema, scores, interval))
        without = int(table_out[f"{schema.target}_low"].isna().sum())
        if without:
            notes.append(
                f"{count_phrase(without, 'row')} of unknown clients have no interval: a fit has no models without a "
                "client to measure by; a run of `mooring advise` has."
            )
    own_kinds = np.array([(kinds or {}).get(str(name), "personal") for name in owners], dtype=object)
    answering = np.where(
        position >= 0, own_kinds, np.where(has_no_client, "global (no client)", "global (unknown client)")
    )
    if models.personal is None:
        answering = np.full(len(owners), "global", dtype=object)
    source_columns = table.frame.rename(columns={schema.target: f"{schema.target} (actual)"})
    predicted = table_out.assign(model=answering)
    source_columns = source_columns.drop(columns=[name for name in source_columns.columns if name in predicted.columns])
    return pd.concat([source_columns.reset_index(drop=True), predicted], axis=1), notes


def interval_columns(
    prediction: pd.Series, owners: np.ndarray, schema: Schema, scores: IntervalScores | None, level: float
) -> dict[str, np.ndarray]:
    """Return the ends of each row's prediction interval."""
    if not 0 < level < 1:
        raise RequestError(f"the level of an interval is a share above 0 and below 1, got {level:g}.")
    if scores is None:
        raise RequestError(
            "this run has no prediction intervals; runs of `mooring advise` and `mooring fit` with a numeric target "
            "have them."
        )
    half = {name: scores.half_width(name, level) for name in set(owners)}
    reach = np.array([half[name] for name in owners])
    return {f"{schema.target}_low": prediction - reach, f"{schema.target}_high": prediction + reach}


def row_clients(
    frame: pd.DataFrame, schema: Schema, client: object, client_names: tuple[str, ...], path: str | Path
) -> np.ndarray:
    """Return the client whose model predicts each row; 3, 3.0 and "3" are one client."""
    if client is not None:
        name = client_name(client)
        if name not in client_names:
            examples = f"it has {len(client_names)}, such as {', '.join(client_names[:5])}"
            raise RequestError(f"{path}: unknown client {str(client)!r}; {examples}.{suggest_name(name, client_names)}")
        return np.full(len(frame), name, dtype=object)
    if schema.client in frame.columns:
        names = to_client_names(frame[schema.client])
        return np.array([*names.categories, NO_CLIENT], dtype=object)[names.codes]
    if len(client_names) == 1:  # a client of a deployment has only its own model
        return np.full(len(frame), client_names[0], dtype=object)
    raise RequestError(f"the rows have no column '{schema.client}' that identifies the client; name one with --client.")


def prediction_table(output: np.ndarray, owners: np.ndarray, schema: Schema) -> pd.DataFrame:
    """Return predictions as a table, in the target's own units and classes."""
    frame = pd.DataFrame({"client": owners})
    if schema.kind == REGRESSION:
        return frame.assign(**{schema.target: output * schema.target_scale + schema.target_mean})
    if output.ndim == 1:
        return frame.assign(**{schema.target: output})
    frame[schema.target] = np.array(schema.classes, dtype=object)[output.argmax(1)]
    return frame.assign(**{f"p({name})": output[:, k] for k, name in enumerate(schema.classes)})
