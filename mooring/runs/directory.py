"""A run's directory, which a person can read. It appears whole; `models.safetensors` comes last and marks the end."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
from torch import Tensor

from mooring.core.errors import RequestError
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
SECONDS_FILE = "seconds.json"  # how long it took: apart, because equal runs give equal bytes in all other files
REPORT_FILE = "report.html"
METHODS_FOLDER = "methods"  # the folder of a comparison's runs, one a method
SEED_FOLDER = "seed-{}"  # the folder of one repetition inside a repeated comparison's directory
PATH_FIGURE, IMPROVEMENTS_FIGURE, ROWS_FIGURE = "path", "improvements", "rows"  # of an advice, as .png and .svg
CURVES_FIGURE = "curves"  # of a comparison, as .png and .svg
METHODS_CSV, SEEDS_CSV, CURVES_CSV, CLIENTS_CSV = "methods.csv", "seeds.csv", "curves.csv", "clients.csv"
OTHER_MODELS = {which: f"models-{which}.safetensors" for which in ("best", "last")}  # of the round that is not kept


class StoredMixture(NamedTuple):
    """The settings whose models an advice averages: what the models of newcomers are made from."""

    settings: list[JsonObject]  # of each its numbers and its weight
    centres: Tensor  # [k, d], the common model of each
    slack: dict[str, Tensor]  # by columns and family that goes by how clients vary: [d], tau^2 over their typical noise
    noises: dict[str, list[float]] | None = None  # by columns: how the clients' noises vary; None if they do not


class StoredModels(NamedTuple):
    """What a finished run is for: the common model and every client's own."""

    common: Tensor  # [d]
    personal: Tensor | None  # [m, d], in the order of `clients`; None where each client keeps its own
    clients: tuple[str, ...]
    task: JsonObject  # what the task is, enough to build it again
    layout: Any  # how the d parameters split into the task's parts
    centre: Tensor | None = None  # [d], what newcomers are moored to, where that is not the common model
    mix: StoredMixture | None = (
        None  # of an advice that is solved exactly: newcomers get the average that its clients got
    )


def default_run_path(name: str, root: str | Path = "runs") -> Path:
    """`runs/NAME-1`, or the first of `-2`, `-3`, ... that is free."""
    name = re.sub(r"[^\w.-]+", "-", name).strip(".-") or "run"
    number = 1
    while os.path.lexists(Path(root) / f"{name}-{number}"):
        number += 1
    return Path(root) / f"{name}-{number}"


def create_run(path: str | Path, files: Mapping[str, bytes | Stream]) -> RunDirectory:
    """A new run directory with these files, run.toml among them; it appears by one rename, or not at all."""
    path = Path(path)
    if RUN_FILE not in files:
        raise ValueError(f"a run directory begins with {RUN_FILE}")
    taken = RequestError(f"{path} already exists; choose another --out, or resume it.")
    if os.path.lexists(path):
        raise taken
    hidden, handle = temporary_path(path.parent), None
    try:
        make_synced_folder(path.parent)
        remove_leftovers(path.parent)
        while handle is None:
            os.mkdir(hidden, 0o700)
            handle = _locked(hidden)
        try:
            for name, data in files.items():
                replace_file(hidden / name, data)
            os.rename(hidden, path)
        finally:
            os.close(handle)
        sync_directory(path.parent)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # another run took the name meanwhile
            raise taken from error
        raise write_error(path, error) from error
    finally:
        with suppress(OSError):
            shutil.rmtree(hidden)
    return RunDirectory(path)


def check_writable(path: str | Path) -> None:
    """Refuse an --out that could not be written in the end, before anything is computed."""
    place = next(folder for folder in Path(path).absolute().parents if os.path.lexists(folder))
    if not place.is_dir():
        raise RequestError(f"{path} cannot be written: {place} is not a folder.")
    if not os.access(place, os.W_OK | os.X_OK):
        raise RequestError(f"{path} cannot be written: {place} does not allow it; choose another --out.")


def _locked(hidden: Path) -> int | None:
    """A lock on a new directory; None when another run's `clean` came first and took it for a leftover."""
    with suppress(FileNotFoundError):
        handle = os.open(hidden, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        lock_handle(handle)
        if hidden.exists():
            return handle
        os.close(handle)
    return None


def open_run(path: str | Path) -> RunDirectory:
    """An existing run; what a killed process left half-written is removed."""
    path = Path(path)
    if not path.is_dir():
        state = "is a file" if path.exists() else "does not exist"
        raise RequestError(f"{path} {state}; give the directory of a run.")
    if not (path / RUN_FILE).is_file():
        raise RequestError(f"{path} is not a run: it has no {RUN_FILE}.")
    remove_leftovers(path)
    remove_leftovers(path / checkpoint.CHECKPOINT_FOLDER)
    return RunDirectory(path)


@dataclass(frozen=True)
class RunDirectory:
    """The files of a run by what they hold; each is checked when it is read."""

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
        """Columns, kinds, scaling, vocabularies: what predict needs."""
        return read_json(self._at(SCHEMA_FILE, "the run was not made from a table"))

    @property
    def split(self) -> pd.DataFrame:
        """Which row is in which part."""
        return read_parquet(self._at(SPLIT_FILE, "the run was not made from a table"))

    @property
    def inputs(self) -> JsonObject:
        """Digests of what the run was made from, beyond its table; none in runs of earlier versions."""
        return read_json(self.path / INPUTS_FILE) if (self.path / INPUTS_FILE).exists() else {}

    @property
    def summary(self) -> JsonObject:
        """A fit in short: title, metric, losses of the three models, algorithm, rounds, notes on the data."""
        return read_json(self._at(SUMMARY_FILE, self._other("fit")))

    @property
    def comparison(self) -> JsonObject:
        """A comparison: title, metric, a row a method, a row a client, notes on the data."""
        found = read_json(self._at(COMPARISON_FILE, self._other("compare")))
        for row in found["methods"]:
            row["seconds"] = self.seconds.get("methods", {}).get(row["method"])
        return found

    @property
    def curves(self) -> pd.DataFrame:
        """The learning curves of a comparison: method, seed, round, and the losses of every evaluated round."""
        return pd.read_csv(self._at(CURVES_CSV, self._other("compare")), dtype={"method": str})

    @property
    def advice(self) -> JsonObject:
        """An advice: title, summary, plan, candidates, path, clients, words, notes on the data."""
        return read_json(self._at(ADVICE_FILE, self._other("advise")))

    @property
    def theory(self) -> JsonObject | None:
        """What `mooring theory` says about the clients of an advice; None where no theorem applies."""
        return read_json(self.path / THEORY_FILE) if (self.path / THEORY_FILE).exists() else None

    @property
    def rounds(self) -> pd.DataFrame:
        """A row a round; `seconds` are read from a file of their own."""
        frame = self._records(ROUNDS_FILE, ROUNDS_SCHEMA)
        known = self.seconds.get("rounds", [])
        took = [known[t - 1] if t <= len(known) else None for t in frame["round"]]
        return frame.assign(seconds=np.array(took, dtype=float))

    @property
    def seconds(self) -> JsonObject:
        """How long it took: "rounds", a number each, or of a comparison "methods", by name; nothing where it is not
        known."""
        return read_json(self.path / SECONDS_FILE) if (self.path / SECONDS_FILE).exists() else {}

    @property
    def clients(self) -> pd.DataFrame:
        return self._records(CLIENTS_FILE, CLIENTS_SCHEMA)

    @property
    def models(self) -> StoredModels:
        tensors, meta = read_tensors(
            self._at(MODELS_FILE, self._unfinished if self.run.algorithms is None else self._many)
        )
        about = tuple(meta["clients"]), meta["task"], meta["layout"]
        mix = None
        if "mix" in meta:
            slack = {name.removeprefix("slack."): part for name, part in tensors.items() if name.startswith("slack.")}
            mix = StoredMixture(meta["mix"], tensors["centers"], slack, meta.get("noises"))
        return StoredModels(tensors["global"], tensors.get("personal"), *about, centre=tensors.get("center"), mix=mix)

    def write_models(self, models: StoredModels) -> None:
        """Mark the run finished. The order of the files in time is what makes the mark true: write this one last."""
        write_models(self.path / MODELS_FILE, models)

    def write_other_models(self, which: str, models: StoredModels) -> None:
        """The models of the "best" or the "last" round, whichever the run does not keep."""
        write_models(self.path / OTHER_MODELS[which], models)

    def of_method(self, label: str) -> RunDirectory:
        """The run of one method of a comparison; of a repeated one, under its first seed."""
        return open_run(method_folder(self._first, label))

    @property
    def _first(self) -> Path:
        how = self.run.training
        return self.path if how.seeds == 1 else self.path / SEED_FOLDER.format(how.seed)

    @property
    def _unfinished(self) -> str:
        return f"the run has not finished; resume it with `mooring resume {self.path}`"

    @property
    def _many(self) -> str:
        known = sorted(path for path in (self._first / METHODS_FOLDER).glob("*") if (path / MODELS_FILE).is_file())
        if not known:
            return self._unfinished
        return f"it compares methods, each a run of its own; give one, such as {known[0]}"

    def _other(self, purpose: str) -> str:
        mine = self.run.mooring.purpose
        if mine != purpose:
            return f"that belongs to runs of '{purpose}', and this one is of '{mine}'"
        return "it is missing from a finished run" if self.finished else self._unfinished

    def _records(self, name: str, columns: pa.Schema) -> pd.DataFrame:
        why = "it is missing from a finished run" if self.finished else self._unfinished
        return read_records(self._at(name, why), columns)

    def _at(self, name: str, why: str) -> Path:
        if not (self.path / name).exists():
            raise RequestError(f"{self.path} has no {name}: {why}.")
        return self.path / name


def method_folder(folder: Path, label: str) -> Path:
    """Where a comparison keeps the run of one of its methods."""
    return folder / METHODS_FOLDER / label.replace(" ", "-")


def write_models(path: str | Path, models: StoredModels) -> None:
    """A models file, for a run or for one client of a deployment."""
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
