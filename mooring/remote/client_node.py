"""A client of a federation: a run file, its own table, and a folder for its state.

A request names the run file by its digest, and a client answers requests of its own run file only (`requests.py` has
the table of them, `client_requests.py` the answers). The state of an algorithm is one safetensors file, replaced by one
rename, so that it survives a kill at any moment. A process may answer one request and end, as with Flower's nodes, or
answer all of them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

import pandas as pd
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from torch import Tensor

from mooring.algorithms.base import build, describe
from mooring.core.cohort import CohortData, Round, StateTree
from mooring.core.errors import RequestError, WorkError
from mooring.core.task import Task
from mooring.core.types import JsonObject
from mooring.data.clients import Clients
from mooring.data.file_readers import file_stem
from mooring.data.formulas import FormulaState
from mooring.data.load_options import LoadOptions
from mooring.data.loading import load, read_client_table
from mooring.data.schema import Schema
from mooring.data.schema_client import ClientTable
from mooring.data.table_sources import read_source
from mooring.engines import local_update
from mooring.engines.personal_parts import keep_personal_parts, personal_coefficients, restore_personal_entries
from mooring.engines.prepare import load_options, make_task
from mooring.remote import secure_client
from mooring.remote.client_requests import (
    ADOPTED_SCHEMA_FILE,
    BASELINES,
    StateHistory,
    client_table_digest,
    select_prefix,
)
from mooring.remote.cohorts import COHORT_FILE, KEY_FILE, SUMS_FOLDER
from mooring.remote.disclosure import SENT_FILE, append_record, describe_reply
from mooring.remote.fixed_sums import ANSWERS_FOLDER, StoredAnswers
from mooring.remote.messages import Payload, printable
from mooring.remote.requests import check_fields, check_request, max_repeats
from mooring.remote.secure_rule import decide_secure, sums_of
from mooring.remote.transcript import Cohort, pair_secrets
from mooring.runs.atomic_files import make_synced_folder, read_json, write_json
from mooring.runs.runfile import RunFile
from mooring.runs.sections import FederationSection
from mooring.runs.tensor_files import flatten, read_tensors, unflatten, write_tensors

if TYPE_CHECKING:
    from mooring.remote.disclosure import Policy
    from mooring.remote.keys import Identity


def run_digest(run: RunFile) -> str:
    """Return a digest of what server and clients must have in common: the run file without locations and speed."""
    run = decide_secure(run)
    table = run.model_dump(mode="json", exclude_none=True, exclude={"mooring"})
    for section, names in (
        ("data", ("source", "data_dir")),
        ("algorithm", ("resolved",)),
        ("training", ("threads", "chunk", "checkpoint_every")),
    ):
        for name in names:
            table.get(section, {}).pop(name, None)
    options = run.federation or FederationSection()
    known = options.model_dump(include={"share_models", "secure", "secure_range", "compress"})
    known |= {"sums": sums_of(run), "max_rows": options.max_rows} if options.secure else {}
    table["federation"] = known  # the other options concern the server only
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:16]


class AnswersRequests(Protocol):
    """A client, or a client's runs."""

    folder: Path

    def answer(self, what: str, payload: Payload) -> Payload: ...


class ClientNode:
    """A client: a run file, its own table, and a folder for its state."""

    own_answers: ClassVar[Mapping[str, Callable[..., Payload]]] = {}  # to requests whose row has none
    unsigned = False  # whether masks need no enrolled keys, in a trial on one machine
    again = False  # whether its operator agreed that the same rows take part with another cohort
    of_schema: ClassVar[tuple[str, ...]] = ("schema", "clients", "task")  # attributes that depend on the schema
    of_cohort: ClassVar[tuple[str, ...]] = ("cohort", "secrets", "stored_answers")  # on the cohort of masked sums

    def __init__(
        self,
        run: RunFile,
        data: str | Path,
        state: str | Path,
        name: str | None = None,
        report: Callable[[str], None] = lambda sentence: None,
        identity: Identity | None = None,
        policy: Policy | None = None,
    ):
        """`report` prints for this client's operator; `identity` has its key and its peers', for secure sums."""
        self.run, self.path, self.given = decide_secure(run), Path(data), name
        self.report = lambda sentence: report(printable(sentence))  # some of it is the server's
        self.identity, self.policy = identity, policy
        self.federation = self.run.federation or FederationSection()
        self.sums_kind = sums_of(self.run)
        self.digest = run_digest(run)
        self.answered = Counter[str]()  # how often each request was answered
        self._began_again = False
        self.starts: dict[str, str] = {}  # by algorithm: a digest of what its first state was made of
        self._formula_member: tuple[str, ClientTable] | None = None
        self.folder = Path(state) / self.digest
        if run.training.threads:
            torch.set_num_threads(run.training.threads)

    def answer(self, what: str, payload: Payload) -> Payload:
        """Return the reply to a request, and record it; "refused" has a sentence where it cannot be answered."""
        reply = self._answer(what, payload)
        with suppress(OSError):  # a full disk: the next state that is written reports it
            make_synced_folder(self.folder)
            append_record(self.folder / SENT_FILE, describe_reply(what, payload, reply))
        return reply

    def _answer(self, what: str, payload: Payload) -> Payload:
        try:
            request = check_request(self, what)
            if self.policy is not None:
                self.policy.check_request(what, payload.fields, self.name)
            if request.awaited:
                self.check_run(payload)
            check_fields(self, what, payload.fields)
            if self.federation.secure:
                secure_client.check_schema_request(self, what, payload)
            self.answered[what] += 1
            if self.answered[what] > max_repeats(what, self.run):
                raise RequestError(f"client '{self.name}' was asked for {what!r} more often than a run needs it.")
            return (request.answer or self.own_answers[what])(self, payload)
        except Exception as error:
            foreseen = isinstance(error, RequestError | WorkError)
            return Payload({"refused": str(error) if foreseen else f"unexpected {type(error).__name__}: {error}"})

    def check_run(self, payload: Payload) -> None:
        if payload.fields.get("run") != self.digest:
            raise RequestError(f"client '{self.name}' has another run file than the server; both need the same.")

    @property
    def what(self) -> str:
        """The algorithm that it takes part in."""
        return self._own

    @property
    def reveals(self) -> str:
        """What a curious server sees of it."""
        return str(describe(self._own)["reveals"])

    # its rows

    @cached_property
    def _source(self) -> tuple[str, pd.DataFrame | dict[str, pd.DataFrame]]:
        """Its name, by the client column of the run file or the name of the table's file, and its table."""
        options = LoadOptions.make(load_options(self.run))
        column = options.client
        table = read_source(self.path, options.reading())
        if column is not None and column in table.frame.columns:
            names = table.frame[column].astype(str).unique()
            if len(names) != 1:
                raise RequestError(f"{self.path.name}: column '{column}' names {len(names)} clients; a client has one.")
            if self.given is not None and self.given != names[0]:
                raise RequestError(f"{self.path.name} holds the rows of client '{names[0]}', not '{self.given}'.")
            return str(names[0]), table.frame
        name = self.given or file_stem(self.path)
        if self.run.data.formula is not None and column is not None:  # the formula names a column that is not here
            return name, table.frame.assign(**{column: name})
        return name, {name: table.frame}

    @property
    def name(self) -> str:
        return self._source[0]

    @cached_property
    def member(self) -> ClientTable:
        """Its table, with the columns that a formula names where there is one."""
        return self._read_member(None)

    def member_for(self, payload: Payload) -> ClientTable:
        """Its table, with the columns of the formula whose categories the server states."""
        content = payload.fields.get("formula")
        if content is None or self.run.data.formula is None:
            return self.member
        key = json.dumps(content, sort_keys=True)
        if self._formula_member is None or self._formula_member[0] != key:
            self._formula_member = key, self._read_member(FormulaState.model_validate(content))
        return self._formula_member[1]

    def _read_member(self, state: FormulaState | None) -> ClientTable:
        options = load_options(self.run)
        options.pop("min_category_rows", None)
        member, _, _ = read_client_table(
            self._source[1], LoadOptions.make(options), formula_state=state, learns_formula=False
        )
        if len(member.clients) != 1:
            raise RequestError(f"{self.path.name} holds the rows of {len(member.clients)} clients; a client has one.")
        return member

    @cached_property
    def schema(self) -> Schema:
        if not (self.folder / ADOPTED_SCHEMA_FILE).exists():
            raise RequestError(f"client '{self.name}' has not received the schema yet.")
        return Schema.from_json(json.dumps(read_json(self.folder / ADOPTED_SCHEMA_FILE)["schema"]))

    @cached_property
    def clients(self) -> Clients:
        """Its rows, encoded by the schema."""
        wide = self.run.task.model is None and self.run.task.name != "module"
        kind = torch.float64 if wide else torch.float32
        options = load_options(self.run) | {"schema": self.schema, "dtype": kind}
        return load(self._source[1], **options)

    @cached_property
    def task(self) -> Task:
        return make_task(self.run, self.clients)

    def data(self, fields: JsonObject) -> CohortData:
        """Return this client as a cohort of one, with the index and the weight that the server states."""
        p = torch.tensor([fields["p"]], dtype=torch.float64)
        index = torch.tensor([fields["index"]])
        return CohortData(self.clients.keys, index, p, self.clients.train, self.clients.validation)

    # masked sums of a fixed cohort

    @property
    def sums(self) -> Path:
        return self.folder / SUMS_FOLDER

    @cached_property
    def private(self) -> X25519PrivateKey:
        """The key of this run, made once and stored."""
        make_synced_folder(self.sums)
        path, rows = self.sums / KEY_FILE, client_table_digest(self)
        if not path.exists():
            write_json(path, {"private": X25519PrivateKey.generate().private_bytes_raw().hex(), "rows": rows})
        known = read_json(path)
        if known["rows"] != rows:
            raise RequestError(
                f"{self.path.name} has changed since the run began; bring it back, or join with --again."
            )
        return X25519PrivateKey.from_private_bytes(bytes.fromhex(str(known["private"])))

    @cached_property
    def cohort(self) -> Cohort:
        """The cohort that was agreed on."""
        path = self.sums / COHORT_FILE
        if not path.exists():
            raise RequestError(f"client '{self.name}' has not agreed on a cohort yet.")
        return Cohort(tuple(read_json(path)["statements"]))

    @cached_property
    def secrets(self) -> dict[str, bytes]:
        return pair_secrets(self.private, self.cohort, self.name)

    @cached_property
    def stored_answers(self) -> StoredAnswers:
        return StoredAnswers(self.cohort, self.name, self.secrets, self.sums / ANSWERS_FOLDER)

    def begin_again(self) -> None:
        """Forget key, cohort and answers of an earlier attempt, once, where the operator has agreed."""
        if self.again and (self.sums / KEY_FILE).exists() and not self._began_again:
            self.forget_sums()
        self._began_again = True

    def forget_sums(self) -> None:
        shutil.rmtree(self.sums, ignore_errors=True)
        self.__dict__.pop("private", None)
        self.forget_cohort()

    def forget_cohort(self) -> None:
        for name in self.of_cohort:
            self.__dict__.pop(name, None)

    # its state

    def history(self, fields: JsonObject) -> StateHistory:
        """Return the stored states of the algorithm that a request names."""
        path = self._file(fields["label"])
        if not path.exists():
            raise RequestError(
                f"client '{self.name}' has no state of '{fields['label']}'; it was lost, or never began."
            )
        tensors, meta = read_tensors(path)
        algorithm = keep_personal_parts(build(fields["label"], meta["hyperparameters"]), self.task)
        server, _ = algorithm.init(self.task, tensors["w0"])
        first = local_update.initial_states(algorithm, self.task, tensors["w0"], 1)
        states = {t: unflatten(first, str(t), tensors) for t in meta["rounds"]}
        residuals = {t: select_prefix(f"residual {t}/", tensors) for t in meta["rounds"]}
        about = meta["start"], meta["hyperparameters"], algorithm, server, first, tensors["w0"]
        return StateHistory(*about, states, residuals)

    def keep(self, label: str, history: StateHistory) -> None:
        """Replace the state file, by one rename."""
        tensors = {"w0": history.w0}
        for t, state in history.states.items():
            tensors |= flatten(str(t), state)
            tensors |= {f"residual {t}/{name}": part for name, part in history.residuals.get(t, {}).items()}
        about = {"start": history.start, "hyperparameters": history.hyperparameters, "rounds": sorted(history.states)}
        write_tensors(self._file(label), tensors, about)

    def _file(self, label: str) -> Path:
        if label not in (*BASELINES, self._own):
            raise RequestError(f"client '{self.name}' takes part in {self._own}, not in {label!r}.")
        return self.folder / f"{label}.safetensors"

    @property
    def _own(self) -> str:
        assert self.run.algorithm is not None
        return self.run.algorithm.name

    def server_state(self, history: StateHistory, payload: Payload) -> StateTree:
        """Return the server's state of a message."""
        tensors, mask = payload.tensors, personal_coefficients(history.algorithm)
        if mask is not None:
            tensors = restore_personal_entries(tensors, flatten("server", history.server), mask)
        return unflatten(history.server, "server", tensors)

    def personal_model(self, payload: Payload) -> tuple[StateHistory, Tensor, Round]:
        fields = payload.fields
        history, turn = self.history(fields), Round(*fields["round"])
        server = self.server_state(history, payload)
        state, merged = history.at(fields["base"], f"client '{self.name}'"), torch.tensor([fields["base"]])
        w = local_update.personal_models(history.algorithm, self.task, server, state, merged, self.data(fields), turn)
        return history, w, turn
