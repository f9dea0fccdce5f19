"""A run's directory, in readable formats. It appears complete; `models.safetensors` is written last and marks the
end."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
from torch import Tensor

from mooring.core.errors import RequestError, WorkError
from mooring.core.types import JsonObject
from mooring.runs import checkpoint
from mooring.runs.atomic_files import (
    DamagedFile,
    Stream,
    lock_handle,
    make_synced_folder,
    read_checked,
    read_json,
    read_parquet,
    remove_leftovers,
    replace_file,
    sync_directory,
    temporary_path,
    write_atomically,
    write_error,
)
from mooring.runs.runfile import RunFile, parse_run
from mooring.runs.table_schemas import CLIENTS_SCHEMA, ROUNDS_SCHEMA, read_records
from mooring.runs.tensor_files import read_tensors, tensor_file

RUN_FILE, SCHEMA_FILE, SPLIT_FILE, INPUTS_FILE = "run.toml", "schema.json", "split.parquet", "inputs.json"
ROUNDS_FILE, CLIENTS_FILE, MODELS_FILE = "rounds.parquet", "clients.parquet", "models.safetensors"
SUMMARY_FILE, COMPARISON_FILE, ADVICE_FILE, THEORY_FILE = "summary.json", "compare.json", "advice.json", "theory.json"
SECONDS_FILE = "seconds.json"  # run times: separate, because equal runs give equal bytes in all other files
REPORT_FILE = "report.html"
METHODS_FOLDER = "methods"  # the folder of a comparison's runs, one per method
SEED_FOLDER = "seed-{}"  # the folder of one repetition inside a repeated comparison's directory
PATH_FIGURE, IMPROVEMENTS_FIGURE, ROWS_FIGURE = "path", "improvements", "rows"  # of a recommendation, as .png and .svg
CURVES_FIGURE = "curves"  # of a comparison, as .png and .svg
METHODS_CSV, SEEDS_CSV, CURVES_CSV, CLIENTS_CSV = "methods.csv", "seeds.csv", "curves.csv", "clients.csv"
OTHER_MODELS = {which: f"models-{which}.safetensors" for which in ("best", "last")}  # of the round that is not used


class StoredMixture(NamedTuple):
    """The settings whose models `advise` averages, from which the models of new clients are computed."""

    settings: list[JsonObject]  # parameters and weight of each
    centres: Tensor  # [k, d], the global model of each
    slack: dict[str, Tensor]  # by columns and family: [d], tau^2 over their typical noise
    noises: dict[str, list[float]] | None = None  # by columns: variation of the clients' noise; None if there is none


class StoredModels(NamedTuple):
    """The result of a finished run: the global model and every client's personal model."""

    common: Tensor  # [d]
    personal: Tensor | None  # [m, d], in the order of `clients`; None if each client stores its own
    clients: tuple[str, ...]
    task: JsonObject  # description from which the task can be rebuilt
    layout: list[JsonObject]  # how the d parameters split into the task's parts
    centre: Tensor | None = None  # [d], center of the pull on new clients, if it is not the global model
    mix: StoredMixture | None = (
        None  # of advice that is solved exactly: new clients get the same average as its clients
    )


def default_run_path(name: str, root: str | Path = "runs") -> Path:
    """Return `runs/NAME-1`, or the first of `-2`, `-3`, ... that does not exist."""
    name = re.sub(r"[^\w.-]+", "-", name).strip(".-") or "run"
    number = 1
    while os.path.lexists(Path(root) / f"{name}-{number}"):
        number += 1
    return Path(root) / f"{name}-{number}"


def create_run(path: str | Path, files: Mapping[str, bytes | Stream]) -> RunDirectory:
    """Create a run directory with these files, including run.toml; it appears by one rename, or not at all."""
    path = Path(path)
    if RUN_FILE not in files:
        raise ValueError(f"a run directory begins with {RUN_FILE}")
    exists_error = RequestError(f"{path} already exists; choose another --out, or resume it.")
    if os.path.lexists(path):
        raise exists_error
    hidden, handle = temporary_path(path.parent), None
    try:
        make_synced_folder(path.parent)
        remove_leftovers(path.parent)
        while handle is None:
            os.mkdir(hidden, 0o700)
            handle = _lock_directory(hidden)
        try:
            for name, data in files.items():
                replace_file(hidden / name, data)
            os.rename(hidden, path)
        finally:
            os.close(handle)
        sync_directory(path.parent)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # another run took the name meanwhile
            raise exists_error from error
        raise write_error(path, error) from error
    finally:
        with suppress(OSError):
            shutil.rmtree(hidden)
    return RunDirectory(path)


def check_writable(path: str | Path) -> None:
    """Refuse an --out that cannot be written, before anything is computed."""
    place = next(folder for folder in Path(path).absolute().parents if os.path.lexists(folder))
    if not place.is_dir():
        raise RequestError(f"{path} cannot be written: {place} is not a folder.")
    if not os.access(place, os.W_OK | os.X_OK):
        raise RequestError(f"{path} cannot be written: {place} does not allow it; choose another --out.")


def _lock_directory(hidden: Path) -> int | None:
    """Lock a new directory; None if another process has already removed it as a leftover."""
    with suppress(FileNotFoundError):
        handle = os.open(hidden, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        lock_handle(handle)
        if hidden.exists():
            return handle
        os.close(handle)
    return None


def open_run(path: str | Path) -> RunDirectory:
    """Open an existing run; temporary files of killed processes are removed."""
    path = Path(path)
    if not path.is_dir():
        state = "is a file" if path.exists() else "does not exist"
        raise RequestError(f"{path} {state}; give the directory of a run.")
    if not (path / RUN_FILE).is_file():
        raise RequestError(f"{path} is not a run: it has no {RUN_FILE}.")
    remove_leftovers(path)
    remove_leftovers(path / checkpoint.CHECKPOINT_FOLDER)
    return RunDirectory(path)


@contextmanager
def explain_contents(path: str | Path) -> Iterator[None]:
    """Turn what goes wrong while the files of a run are used into one sentence.

    A checksum only shows that a file was not damaged: another person's may hold anything in place of a number."""
    try:
        yield
    except (RequestError, WorkError):
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        why = " ".join(str(error).split())[:200]
        raise DamagedFile(
            f"{path} cannot be used: its files do not have the contents of a run ({type(error).__name__}: {why}); "
            "--debug shows the details."
        ) from error


@dataclass(frozen=True)
class RunDirectory:
    """The contents of a run's files; each is checked when it is read."""

    path: Path

    @property
    def finished(self) -> bool:
        return (self.path / MODELS_FILE).is_file()

    @property
    def run(self) -> RunFile:
        path = self.path / RUN_FILE
        try:
            return parse_run(read_checked(path), str(path))
        except DamagedFile as error:
            raise DamagedFile(f"{error} To run an edited copy, start a new run with it.") from None

    @property
    def schema(self) -> JsonObject:
        """Columns, kinds, scaling, vocabularies: the input of predictions."""
        return read_json(self._at(SCHEMA_FILE, "the run was not made from a table"))

    @property
    def split(self) -> pd.DataFrame:
        """The part of each row."""
        return read_parquet(self._at(SPLIT_FILE, "the run was not made from a table"))

    @property
    def inputs(self) -> JsonObject:
        """Digests of what the run was made from, beyond its table; empty for runs of earlier versions."""
        return read_json(self.path / INPUTS_FILE) if (self.path / INPUTS_FILE).exists() else {}

    @property
    def summary(self) -> JsonObject:
        """Summary of a fit: title, metric, losses of the three models, algorithm, rounds, notes on the data."""
        return read_json(self._at(SUMMARY_FILE, self._purpose_hint("fit")))

    @property
    def comparison(self) -> JsonObject:
        """A comparison: title, metric, one row per method, one row per client, notes on the data."""
        content = read_json(self._at(COMPARISON_FILE, self._purpose_hint("compare")))
        for row in content["methods"]:
            row["seconds"] = self.seconds.get("methods", {}).get(row["method"])
        return content

    @property
    def curves(self) -> pd.DataFrame:
        """The learning curves of a comparison: method, seed, round, and the losses of every evaluated round."""
        return pd.read_csv(self._at(CURVES_CSV, self._purpose_hint("compare")), dtype={"method": str})

    @property
    def advice(self) -> JsonObject:
        """Recommendations: title, summary, plan, candidates, path, clients, words, notes on the data."""
        return read_json(self._at(ADVICE_FILE, self._purpose_hint("advise")))

    @property
    def theory(self) -> JsonObject | None:
        """What the theorems state for the clients of `advise`; None if no theorem applies."""
        return read_json(self.path / THEORY_FILE) if (self.path / THEORY_FILE).exists() else None

    @property
    def rounds(self) -> pd.DataFrame:
        """One row per round; `seconds` are read from a separate file."""
        frame = self._records(ROUNDS_FILE, ROUNDS_SCHEMA)
        seconds = self.seconds.get("rounds", [])
        took = [seconds[t - 1] if t <= len(seconds) else None for t in frame["round"]]
        return frame.assign(seconds=np.array(took, dtype=float))

    @property
    def seconds(self) -> JsonObject:
        """Run times: "rounds", one number each, or of a comparison "methods", by name; empty if they are not
        known."""
        return read_json(self.path / SECONDS_FILE) if (self.path / SECONDS_FILE).exists() else {}

    @property
    def clients(self) -> pd.DataFrame:
        return self._records(CLIENTS_FILE, CLIENTS_SCHEMA)

    @property
    def models(self) -> StoredModels:
        tensors, meta = read_tensors(
            self._at(MODELS_FILE, self._unfinished if self.run.algorithms is None else self._method_hint)
        )
        metadata = tuple(meta["clients"]), meta["task"], meta["layout"]
        mix = None
        if "mix" in meta:
            slack = {name.removeprefix("slack."): part for name, part in tensors.items() if name.startswith("slack.")}
            mix = StoredMixture(meta["mix"], tensors["centers"], slack, meta.get("noises"))
        return StoredModels(
            tensors["global"], tensors.get("personal"), *metadata, centre=tensors.get("center"), mix=mix
        )

    def write_models(self, models: StoredModels) -> None:
        """Mark the run as finished: this file must be written last."""
        write_models(self.path / MODELS_FILE, models)

    def write_other_models(self, which: str, models: StoredModels) -> None:
        """The models of the "best" or the "last" round, whichever the run does not use."""
        write_models(self.path / OTHER_MODELS[which], models)

    def of_method(self, label: str) -> RunDirectory:
        """The run of one method of a comparison; of a repeated one, under its first seed."""
        return open_run(method_folder(self._first, label))

    @property
    def _first(self) -> Path:
        training = self.run.training
        return self.path if training.seeds == 1 else self.path / SEED_FOLDER.format(training.seed)

    @property
    def _unfinished(self) -> str:
        return f"the run has not finished; resume it with `mooring resume {self.path}`"

    @property
    def _method_hint(self) -> str:
        finished = sorted(path for path in (self._first / METHODS_FOLDER).glob("*") if (path / MODELS_FILE).is_file())
        if not finished:
            return self._unfinished
        return f"it compares methods, each a run of its own; give one, such as {finished[0]}"

    def _purpose_hint(self, purpose: str) -> str:
        own_purpose = self.run.mooring.purpose
        if own_purpose != purpose:
            return f"that belongs to runs of '{purpose}', and this one is of '{own_purpose}'"
        return "it is missing from a finished run" if self.finished else self._unfinished

    def _records(self, name: str, columns: pa.Schema) -> pd.DataFrame:
        reason = "it is missing from a finished run" if self.finished else self._unfinished
        return read_records(self._at(name, reason), columns)

    def _at(self, name: str, reason: str) -> Path:
        if not (self.path / name).exists():
            raise RequestError(f"{self.path} has no {name}: {reason}.")
        return self.path / name


def method_folder(folder: Path, label: str) -> Path:
    """Return the folder of the run of one method of a comparison."""
    return folder / METHODS_FOLDER / label.replace(" ", "-")


def write_models(path: str | Path, models: StoredModels) -> None:
    """Write a models file, for a run or for one client of a deployment."""
    write_atomically(path, models_file(models))


def models_file(models: StoredModels) -> Stream:
    shape = (len(models.clients), *models.common.shape)
    if models.personal is not None and models.personal.shape != shape:
        raise ValueError(f"personal models must have the shape {shape}, got {tuple(models.personal.shape)}")
    parts = {"global": models.common, "personal": models.personal, "center": models.centre}
    meta = {"clients": models.clients, "task": models.task, "layout": models.layout}
    if models.mix is not None:
        parts |= {"centers": models.mix.centres} | {f"slack.{k}": part for k, part in models.mix.slack.items()}
        meta |= {"mix": models.mix.settings} | ({"noises": models.mix.noises} if models.mix.noises else {})
    return tensor_file({name: part for name, part in parts.items() if part is not None}, meta)
