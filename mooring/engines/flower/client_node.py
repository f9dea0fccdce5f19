"""What a client answers. Its rows never leave this file, its personal state lives in its own folder.

    hello                      its name, and which run file it has
    survey, tally, names, spread   counts and sums for the schema (`data/schema_client.py`)
    adopt                      the agreed schema; how many rows it has
    facts, told                what settings such as "auto" are settled from (`estimates/client_statistics.py`,
    `answers.py`)
    begin                      the settled algorithm and the first model
    visit                      a stay: a message, and a new generation of its state
    evaluate, models, numbers  how its deployed model does; the model and numbers of its state, where it shares them
    done                       the end: it writes its own model as a run directory that `mooring predict` reads
    dismissed                  the server does without it, and why

A request names the run file by its digest: whoever joins has read the run file, and does nothing else. Every answer can
be given again: a visit starts from the generation that the request names and drops none that the server may still
name. The state is one safetensors file per algorithm, replaced by one rename, so that it survives a kill at any moment.
A process may answer one request and end (Flower's own nodes do that), or all of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from mooring.algorithms.base import build, describe
from mooring.core.cohort import CohortData, Round
from mooring.core.costs import CostMeter
from mooring.core.errors import RequestError, WorkError
from mooring.data.clients import PARTS, Clients
from mooring.data.column_statistics import ColumnStatistics
from mooring.data.data_warnings import find_suspicious_values
from mooring.data.file_readers import file_stem
from mooring.data.load_options import LoadOptions
from mooring.data.loading import load, read_client_table, table_digest
from mooring.data.rare_categories import hide_rare_levels, reveal_levels
from mooring.data.schema import Schema
from mooring.data.schema_client import ClientTable, count_values, parse_table, sum_squares, survey_table
from mooring.data.schema_server import SchemaPlan
from mooring.data.table_sources import read_source
from mooring.engines import local_update
from mooring.engines.fit_files import describe_task, with_resolved
from mooring.engines.flower import audit, secure_client
from mooring.engines.flower.messages import PROTOCOL_VERSION, Payload
from mooring.engines.flower.remote_rows import answer_calls
from mooring.engines.flower.test_rows import improvement_on_test_rows
from mooring.engines.personal_parts import keep_personal_parts
from mooring.engines.prepare import Job, load_options, make_task
from mooring.estimates.client_queries import STATISTICS
from mooring.estimates.client_statistics import ALL_RESOLVED, compute_statistics
from mooring.runs.atomic_files import json_bytes, make_synced_folder, parquet_bytes, read_json, write_json
from mooring.runs.directory import CLIENTS_FILE, RUN_FILE, SCHEMA_FILE, SUMMARY_FILE, StoredModels, create_run
from mooring.runs.runfile import RunFile, run_bytes
from mooring.runs.sections import FederationSection, installed_version
from mooring.runs.table_schemas import clients_table
from mooring.runs.tensor_files import flatten, read_tensors, unflatten, write_tensors

if TYPE_CHECKING:
    from mooring.engines.flower.keys import Identity
    from mooring.engines.flower.policy import Policy

LOCAL = "local"
HIDDEN_IN_SECURE_RUNS = ("convex", "noise", "trace", "dispersion", "largest")
BASELINES = (LOCAL,)  # what a server may ask for beside the run file's own algorithm
ADOPTED_SCHEMA_FILE, RESULT_DIR, DONE_FILE, DISMISSED_FILE = "adopted.json", "result", "done.json", "dismissed.json"


def run_digest(run: RunFile) -> str:
    """Names what server and clients must have in common: the run file, save where its rows are and how fast it goes."""
    table = run.model_dump(mode="json", exclude_none=True, exclude={"mooring"})
    for section, names in (
        ("data", ("source", "data_dir")),
        ("algorithm", ("settled",)),
        ("training", ("threads", "chunk", "checkpoint_every")),
    ):
        for name in names:
            table.get(section, {}).pop(name, None)
    how = run.federation or FederationSection()
    known = how.model_dump(include={"share_models", "secure", "secure_range"})
    table["federation"] = known  # the rest is the server's own business
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:16]


class AlgorithmState(NamedTuple):
    """An algorithm's run at this client: how it began, and the generations of its state by round."""

    start: str  # the server's word for this beginning
    fields: dict[str, Any]  # the settled algorithm's, as they were sent
    algorithm: Any
    server: Any  # a template
    first: Any  # generation 0
    w0: Tensor
    states: dict[int, Any]

    def at(self, base: int, who: str) -> Any:
        if base == 0:
            return self.first
        if base not in self.states:
            held = ", ".join(map(str, sorted(self.states))) or "none"
            raise RequestError(f"{who} has no state of round {base} any more (it has: {held}); it cannot go back.")
        return self.states[base]


class ClientNode:
    """A client: a run file, its own table, and a folder for what it keeps."""

    answers: ClassVar[dict[str, Callable[[Any, Payload], Payload]]] = {}  # by the request
    of_schema: ClassVar[tuple[str, ...]] = ("schema", "clients", "task")  # what another schema makes anew

    def __init__(
        self,
        run: RunFile,
        data: str | Path,
        state: str | Path,
        name: str | None = None,
        say: Callable[[str], None] = lambda sentence: None,
        identity: Identity | None = None,
        policy: Policy | None = None,
    ):
        """`say` prints for this client's operator; `identity` has its key and its peers', for secure sums."""
        self.run, self.path, self.given, self.say = run, Path(data), name, say
        self.identity, self.policy = identity, policy
        self.federation = run.federation or FederationSection()
        self.digest = run_digest(run)
        self.folder = Path(state) / self.digest
        if run.training.threads:
            torch.set_num_threads(run.training.threads)

    def answer(self, what: str, parcel: Payload) -> Payload:
        """The reply to a request; a sentence under "refused" where it cannot be answered. What is sent is recorded."""
        reply = self._answer(what, parcel)
        with suppress(OSError):  # a full disk: the next state that is written reports it
            make_synced_folder(self.folder)
            audit.append_record(self.folder / audit.SENT_FILE, audit.describe_reply(what, parcel, reply))
        return reply

    def _answer(self, what: str, parcel: Payload) -> Payload:
        try:
            if what not in self.answers:
                raise RequestError(f"client '{self.name}' does not know the request {what!r}.")
            if self.policy is not None:
                self.policy.check_request(what, parcel.words, self.name)
            if self.federation.secure:
                secure_client.check_allowed(self, what, parcel)
            if what not in ("hello", "dismissed"):
                self.check_run(parcel)
            return self.answers[what](self, parcel)
        except Exception as error:
            foreseen = isinstance(error, RequestError | WorkError)
            return Payload({"refused": str(error) if foreseen else f"unexpected {type(error).__name__}: {error}"})

    def check_run(self, parcel: Payload) -> None:
        if parcel.words.get("run") != self.digest:
            raise RequestError(f"client '{self.name}' has another run file than the server; both need the same.")

    @property
    def what(self) -> str:
        """What it takes part in."""
        return self._own

    @property
    def reveals(self) -> str:
        """What a curious server sees of it."""
        return str(describe(self._own)["reveals"])

    # its rows

    @cached_property
    def _source(self) -> tuple[str, Any]:
        """Its name and its table: the client column's one value where the run file names one, else the file's name."""
        column = self.run.data.client
        options = LoadOptions.make(load_options(self.run))
        table = read_source(self.path, options.reading())
        if column is not None and column in table.frame.columns:
            names = table.frame[column].astype(str).unique()
            if len(names) != 1:
                raise RequestError(f"{self.path.name}: column '{column}' names {len(names)} clients; a client has one.")
            if self.given is not None and self.given != names[0]:
                raise RequestError(f"{self.path.name} holds the rows of client '{names[0]}', not '{self.given}'.")
            return str(names[0]), table.frame
        name = self.given or file_stem(self.path)
        return name, {name: table.frame}

    @property
    def name(self) -> str:
        return self._source[0]

    @cached_property
    def member(self) -> ClientTable:
        options = load_options(self.run)
        options.pop("rare", None)
        member, _, _ = read_client_table(self._source[1], LoadOptions.make(options))
        if len(member.clients) != 1:
            raise RequestError(f"{self.path.name} holds the rows of {len(member.clients)} clients; a client has one.")
        return member

    @cached_property
    def schema(self) -> Schema:
        if not (self.folder / ADOPTED_SCHEMA_FILE).exists():
            raise RequestError(f"client '{self.name}' has not been told the schema yet.")
        return Schema.from_json(json.dumps(read_json(self.folder / ADOPTED_SCHEMA_FILE)["schema"]))

    @cached_property
    def clients(self) -> Clients:
        """Its rows in the numbers of the schema."""
        wide = self.run.task.model is None and self.run.task.name != "module"
        kind = torch.float64 if wide else torch.float32
        options = load_options(self.run) | {"schema": self.schema, "dtype": kind}
        return load(self._source[1], **options)

    @cached_property
    def task(self) -> Any:
        return make_task(self.run, self.clients)

    def data(self, words: dict[str, Any]) -> CohortData:
        """Itself as a cohort of one, at the place and with the weight that the server names."""
        p = torch.tensor([words["p"]], dtype=torch.float64)
        index = torch.tensor([words["index"]])
        return CohortData(self.clients.keys, index, p, self.clients.train, self.clients.validation)

    # its state

    def stretch(self, words: dict[str, Any]) -> AlgorithmState:
        """What is on disk of the algorithm that a request names."""
        path = self._file(words["label"])
        if not path.exists():
            raise RequestError(f"client '{self.name}' has no state of '{words['label']}'; it was lost, or never began.")
        tensors, meta = read_tensors(path)
        algorithm = keep_personal_parts(build(words["label"], meta["fields"]), self.task)
        server, _ = algorithm.init(self.task, tensors["w0"])
        first = local_update.initial_states(algorithm, self.task, tensors["w0"], 1)
        states = {t: unflatten(first, str(t), tensors) for t in meta["rounds"]}
        return AlgorithmState(meta["start"], meta["fields"], algorithm, server, first, tensors["w0"], states)

    def keep(self, label: str, stretch: AlgorithmState) -> None:
        """The state file, by one rename."""
        tensors = {"w0": stretch.w0}
        for t, state in stretch.states.items():
            tensors |= flatten(str(t), state)
        about = {"start": stretch.start, "fields": stretch.fields, "rounds": sorted(stretch.states)}
        write_tensors(self._file(label), tensors, about)

    def _file(self, label: str) -> Path:
        if label not in (*BASELINES, self._own):
            raise RequestError(f"client '{self.name}' takes part in {self._own}, not in {label!r}.")
        return self.folder / f"{label}.safetensors"

    @property
    def _own(self) -> str:
        assert self.run.algorithm is not None
        return self.run.algorithm.name

    def deployed(self, parcel: Payload) -> tuple[AlgorithmState, Tensor, Round]:
        words = parcel.words
        stretch, turn = self.stretch(words), Round(*words["round"])
        server = unflatten(stretch.server, "server", parcel.tensors)
        state, merged = stretch.at(words["base"], f"client '{self.name}'"), torch.tensor([words["base"]])
        w = local_update.personal_models(stretch.algorithm, self.task, server, state, merged, self.data(words), turn)
        return stretch, w, turn


def handle_hello(home: ClientNode, parcel: Payload) -> Payload:
    """Its name, run file and version; a server of another version is told to the operator of this client too."""
    theirs = parcel.words.get("protocol")
    if theirs is not None and theirs != PROTOCOL_VERSION:
        home.say(
            f"the server has Mooring {parcel.words.get('version')} (protocol {theirs}), this client "
            f"{installed_version()} "
            f"(protocol {PROTOCOL_VERSION}); install the same version at both."
        )
    return Payload(
        {"name": home.name, "run": home.digest, "version": installed_version(), "protocol": PROTOCOL_VERSION}
    )


def handle_survey(home: ClientNode, parcel: Payload) -> Payload:
    return summary_payload(survey_table(home.member))


def handle_tally(home: ClientNode, parcel: Payload) -> Payload:
    return summary_payload(
        hide_rare_levels(compute_tally(home, parcel), home.run.data.min_category_rows or 1, home.digest)
    )


def handle_names(home: ClientNode, parcel: Payload) -> Payload:
    """Levels that are rare here and not in all."""
    return Payload({"names": reveal_levels(compute_tally(home, parcel), parcel.words["wanted"], home.digest)})


def compute_tally(home: ClientNode, parcel: Payload) -> ColumnStatistics:
    plan = SchemaPlan.model_validate(parcel.words["plan"])
    return count_values(home.member, plan, parse_table(home.member, plan))


def handle_spread(home: ClientNode, parcel: Payload) -> Payload:
    """Its spread to the server; what looks odd in its rows is told at home alone."""
    plan, draft = SchemaPlan.model_validate(parcel.words["plan"]), Schema.model_validate(parcel.words["draft"])
    reading = parse_table(home.member, plan)
    odd = find_suspicious_values(reading.columns, reading.target, home.member.roles.target)
    for sentence in [*parcel.words.get("notes", ()), *(sentence for _, sentence in odd)]:
        home.say(sentence)
    return summary_payload(sum_squares(home.member, draft, reading))


def summary_payload(summary: ColumnStatistics) -> Payload:
    return Payload({"summary": summary.to_json()})


def handle_adopt(home: ClientNode, parcel: Payload) -> Payload:
    """Keep the schema. Rows that are not those of the run's beginning are refused while a state of it is here."""
    make_synced_folder(home.folder)
    path = home.folder / ADOPTED_SCHEMA_FILE
    digest = client_table_digest(home)
    if path.exists() and not parcel.words["fresh"] and read_json(path)["rows"] != digest:
        raise RequestError(f"{home.path.name} has changed since the run began; start a new run, or bring it back.")
    write_json(path, {"schema": parcel.words["schema"], "rows": digest})
    for stale in home.of_schema:
        home.__dict__.pop(stale, None)
    sizes = {part: int(getattr(home.clients, part).size[0]) for part in PARTS}
    own = home.clients.weights_from_column
    about = {"sizes": sizes, "weight": None if own is None else own[home.name]}
    return Payload(about | {"by_chance": home.clients.has_random_parts})


def client_table_digest(home: ClientNode) -> str:
    source = home._source[1]
    return table_digest(source[home.name] if isinstance(source, dict) else source)


def handle_client_statistics(home: ClientNode, parcel: Payload) -> Payload:
    words, asks = parcel.words, tuple(str(name) for name in parcel.words["asks"])
    if home.federation.secure and (
        set(asks) - {ALL_RESOLVED} or (home.task.solve is None and ALL_RESOLVED not in asks)
    ):
        raise RequestError(f"client '{home.name}' tells no {asks}: its run file says secure = true; give numbers.")
    facts = compute_statistics(home.task, home.data(words), parcel.tensors["w0"], asks)
    if home.federation.secure:  # all that is shown of its rows is how steep its loss is, to a power of two
        unknown: Any = {name: torch.full_like(facts.smooth, torch.nan) for name in HIDDEN_IN_SECURE_RUNS}
        smooth = [secure_client.round_up_to_power_of_two(float(value)) for value in facts.smooth]
        facts = facts._replace(smooth=torch.tensor(smooth, dtype=facts.smooth.dtype), **unknown)
    return Payload({}, flatten("facts", facts))


def handle_statistics(home: ClientNode, parcel: Payload) -> Payload:
    """The statistics of its training rows that random effects and rules for lambda are estimated from."""
    return answer_calls(home.name, home.task, parcel, lambda part: home.clients.train, STATISTICS)


def handle_begin(home: ClientNode, parcel: Payload) -> Payload:
    """Make the first state. The same beginning again, and a beginning that goes on with a run, keep what is there."""
    words = parcel.words
    label, fields = words["label"], words["fields"]
    path, algorithm = home._file(label), keep_personal_parts(build(label, fields), home.task)
    if home.federation.secure:
        secure_client.check_begin(home, label, fields, str(words["start"]), bool(words["fresh"]))
    server, _ = algorithm.init(home.task, parcel.tensors["w0"])
    first = local_update.initial_states(algorithm, home.task, parcel.tensors["w0"], 1)
    if path.exists():
        known = home.stretch(words)
        if known.start == words["start"] or not words["fresh"]:
            if known.algorithm != algorithm:
                raise RequestError(f"client '{home.name}' has a state of {label} with other settings; start a new run.")
            return Payload({})
        if known.states:
            os.replace(path, path.with_suffix(".before"))  # another run of the same file: its states are not ours
    home.keep(label, AlgorithmState(words["start"], fields, algorithm, server, first, parcel.tensors["w0"], {}))
    return Payload({})


def handle_update(home: ClientNode, parcel: Payload) -> Payload:
    reply = run_local_update(home, parcel)
    if home.federation.secure and any(tensor.numel() for tensor in reply.tensors.values()):
        raise RequestError(
            f"client '{home.name}' sends no message that is not masked: its run file says secure = true."
        )
    return reply


def run_local_update(home: ClientNode, parcel: Payload) -> Payload:
    """A visit: the message and the work it took; the new state is kept."""
    words = parcel.words
    stretch, turn = home.stretch(words), Round(*words["round"])
    state = stretch.at(words["base"], f"client '{home.name}'")
    server = unflatten(stretch.server, "server", parcel.tensors)
    meter = CostMeter()
    new, message = local_update.client_update(
        stretch.algorithm, home.task, server, state, home.data(words), turn, meter
    )
    if not bool(local_update.finite_states(new).all()):
        raise WorkError(local_update.NOT_FINITE)
    held = {t: known for t, known in stretch.states.items() if t in words["hold"]}
    home.keep(words["label"], stretch._replace(states=held | {turn.t: new}))
    work = {"samples": meter.samples, "gradients": meter.gradients, "solves": list(meter.solves)}
    return Payload({"meter": work}, flatten("message", message))


def handle_evaluate(home: ClientNode, parcel: Payload) -> Payload:
    return Payload({"parts": parcel.words["parts"]}, {"risk": mean_losses(home, parcel)})


def mean_losses(home: ClientNode, parcel: Payload) -> Tensor:
    """[parts]: the mean loss of this client's deployed model over each named part of its rows."""
    _, w, _ = home.deployed(parcel)
    parts = [str(part) for part in parcel.words["parts"]]
    if not set(parts) <= set(PARTS):
        raise RequestError(f"client '{home.name}' has rows to {', '.join(PARTS)}, not {', '.join(parts)}.")
    return torch.cat([local_update.mean_risk(home.task, w, getattr(home.clients, part)) for part in parts])


def handle_model(home: ClientNode, parcel: Payload) -> Payload:
    return Payload({}, {"model": home.deployed(parcel)[1]} if home.federation.share_models else {})


def handle_number(home: ClientNode, parcel: Payload) -> Payload:
    words = parcel.words
    if not home.federation.share_models:
        raise RequestError(f"client '{home.name}' keeps the numbers of its state to itself.")
    state = home.stretch(words).at(words["base"], f"client '{home.name}'")
    found = getattr(state, words["field"], None)
    if found is None or found.numel() != 1 or words["base"] == 0:
        return Payload({"number": None, "known": found is not None and found.numel() == 1})
    return Payload({"number": float(found), "known": True})


def handle_dismissed(home: ClientNode, parcel: Payload) -> Payload:
    """The server does without this client, and says why."""
    make_synced_folder(home.folder)
    write_json(home.folder / DISMISSED_FILE, {"why": str(parcel.words.get("why"))})
    return Payload({})


def handle_done(home: ClientNode, parcel: Payload) -> Payload:
    """Write the client's own model beside the common one, as a run directory."""
    stretch, w, _ = home.deployed(parcel)
    row, summary = parcel.words["row"], parcel.words["summary"]
    if home.federation.secure:  # the server does not know it
        unit = home.clients.target_scale**home.task.unit_power
        row = row | {"personal": float(local_update.mean_risk(home.task, w, home.clients.test)[0]) * unit}
        secure_client.delete_state(home)
    server = unflatten(stretch.server, "server", parcel.tensors)
    run = home.run.model_copy(
        update={"data": home.run.data.model_copy(update={"source": str(home.path)}), "federation": None}
    )
    run = with_resolved(run, stretch.algorithm)
    files = {
        RUN_FILE: run_bytes(run),
        SCHEMA_FILE: json_bytes(home.schema.model_dump(mode="json")),
        CLIENTS_FILE: parquet_bytes(clients_table([row])),
        SUMMARY_FILE: json_bytes(summary),
    }
    path = home.folder / RESULT_DIR
    shutil.rmtree(path, ignore_errors=True)
    about, layout = describe_task(Job(run, home.clients, home.task))
    create_run(path, files).write_models(
        StoredModels(stretch.algorithm.global_model(server), w, (home.name,), about, layout)
    )
    write_json(home.folder / DONE_FILE, row | {"metric": summary["metric"]} | compute_test_improvement(home, w))
    return Payload({"result": True})


def compute_test_improvement(home: ClientNode, w: Tensor) -> dict[str, Any]:
    """Over its local model, where that was trained here."""
    if not home._file(LOCAL).exists():
        return {}
    alone = home.stretch({"label": LOCAL})
    state = alone.at(max(alone.states, default=0), f"client '{home.name}'")
    unit = home.clients.target_scale**home.task.unit_power
    return improvement_on_test_rows(
        home.task, w, alone.algorithm.personal_model(alone.server, state), home.clients.test, unit
    )


REQUEST_HANDLERS: dict[str, Callable[[ClientNode, Payload], Payload]] = {
    "hello": handle_hello,
    "survey": handle_survey,
    "tally": handle_tally,
    "names": handle_names,
    "spread": handle_spread,
    "adopt": handle_adopt,
    "facts": handle_client_statistics,
    "told": handle_statistics,
    "begin": handle_begin,
    "visit": handle_update,
    "evaluate": handle_evaluate,
    "models": handle_model,
    "numbers": handle_number,
    "done": handle_done,
    "dismissed": handle_dismissed,
} | secure_client.REQUEST_HANDLERS
ClientNode.answers = REQUEST_HANDLERS
