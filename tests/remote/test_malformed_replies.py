"""A client that answers nonsense is named and dismissed; the others finish, with the models of those who stayed."""

import io
import json
import math
import random
from typing import ClassVar

import numpy
import pytest
import torch

from mooring.remote import client_requests, messages
from mooring.remote.client_node import ClientNode
from mooring.remote.memory import MemoryTransport
from mooring.remote.messages import Payload, printable
from mooring.remote.requests import REQUESTS, find_problem
from mooring.remote.server_run import run_federation
from tests.remote.federation_runs import answer_with, make_clients, make_run
from tests.remote.secure_runs import RECOVERING, make_secure_clients

BAD = "site 2"


def words(**changes):
    return lambda reply: reply._replace(fields=reply.fields | changes)


def without_word(name):
    return lambda reply: reply._replace(fields={key: value for key, value in reply.fields.items() if key != name})


def summary(change):
    """The summary with one thing changed, as JSON."""

    def changed(reply):
        found = json.loads(reply.fields["summary"])
        change(found)
        return reply._replace(fields=reply.fields | {"summary": json.dumps(found)})

    return changed


def tensors(**changes):
    named = {name.replace("__", "/"): value for name, value in changes.items()}
    return lambda reply: reply._replace(tensors={**reply.tensors, **named})


def nothing(reply):
    return Payload({})


def first_column(found):
    return found["facts"][next(iter(found["facts"]))]


def set_fact(name, value):
    return lambda found: first_column(found).update({name: [value]})


def one(value):
    return torch.tensor([value], dtype=torch.float64)


CASES = [
    ("survey", "nothing", nothing),
    ("survey", "no text", words(summary=7)),
    ("survey", "no JSON", words(summary="{{")),
    ("survey", "a list", words(summary="[]")),
    ("survey", "another client", summary(lambda found: found.update(clients=["site 0"]))),
    ("survey", "two clients", summary(lambda found: found.update(clients=[BAD, "x"]))),
    ("survey", "no facts", summary(lambda found: found.update(facts={}))),
    ("survey", "a fact is missing", summary(lambda found: first_column(found).pop("distinct"))),
    ("survey", "a negative count", summary(set_fact("present", -5))),
    ("survey", "an absurd count", summary(set_fact("rows", 1e30))),
    ("survey", "low above high", summary(set_fact("low", 1e9))),
    ("survey", "no roles", summary(lambda found: found.update(roles={}))),
    ("survey", "deeply nested", words(summary="[" * 100_000)),
    ("survey", "levels of another", summary(lambda found: found["levels"].update(y={"a": [3, "site 0"]}))),
    ("tally", "nothing", nothing),
    ("tally", "other columns", summary(lambda found: found["facts"].update(extra={"rows": [1]}))),
    ("tally", "no total", summary(lambda found: found["facts"]["a"].pop("total"))),
    ("tally", "no levels", summary(lambda found: found.update(levels={}))),
    ("tally", "an infinite total", words(summary='{"clients": ["site 2"], "facts": {"a": {"total": [1e999]}}}')),
    ("spread", "nothing", nothing),
    ("spread", "negative squares", summary(lambda found: found["facts"]["0"].update(squares=[-1.0]))),
    ("spread", "too few columns", summary(lambda found: found["facts"].pop("0"))),
    ("adopt", "nothing", nothing),
    ("adopt", "no sizes", without_word("sizes")),
    ("adopt", "sizes are text", words(sizes={"train": "many", "validation": 1, "test": 1})),
    ("adopt", "a negative size", words(sizes={"train": -4, "validation": 1, "test": 1})),
    ("adopt", "a part is missing", words(sizes={"train": 4})),
    ("adopt", "nan rows", words(sizes={"train": math.nan, "validation": 1, "test": 1})),
    ("adopt", "1e30 rows", words(sizes={"train": 1e30, "validation": 1, "test": 1})),
    ("adopt", "a negative weight", words(weight=-1.0)),
    ("client_statistics", "nothing", nothing),
    ("client_statistics", "another shape", tensors(facts__smooth=torch.zeros(7).double())),
    ("client_statistics", "infinite", tensors(facts__smooth=one(math.inf))),
    ("client_statistics", "nan", tensors(facts__smooth=one(math.nan))),
    ("client_statistics", "negative", tensors(facts__smooth=one(-3.0))),
    ("client_statistics", "whole numbers", tensors(facts__smooth=torch.tensor([3]))),
    ("client_statistics", "an unknown one", tensors(facts__secret=one(1.0))),
    ("statistics", "nothing", nothing),
    ("statistics", "another shape", tensors(**{"0__gram": torch.zeros(1, 99, 99).double()})),
    ("statistics", "nan", tensors(**{"0__moment": torch.full((1, 7), math.nan).double()})),
    ("local_update", "nothing", nothing),
    ("local_update", "nan", tensors(message=torch.full((1, 7), math.nan).double())),
    ("local_update", "complex", tensors(message=torch.zeros(1, 7, dtype=torch.complex64))),
    ("local_update", "bits", tensors(message=torch.ones(1, 7, dtype=torch.bool))),
    ("local_update", "an odd name", tensors(**{"message/x y": torch.zeros(1)})),
    ("local_update", "a keyword", tensors(**{"message__class": torch.zeros(1)})),
    ("local_update", "meter of text", words(meter={"samples": "x", "gradients": None, "solves": 5})),
    ("evaluate", "nothing", nothing),
    ("evaluate", "another shape", tensors(risk=torch.zeros(9).double())),
    ("evaluate", "nan", tensors(risk=torch.full((3,), math.nan).double())),
    ("evaluate", "absurd", tensors(risk=torch.full((3,), 1e300, dtype=torch.float64))),
    ("models", "nothing", nothing),
    ("models", "another shape", tensors(model=torch.zeros(1, 99).double())),
    ("models", "nan", tensors(model=torch.full((1, 7), math.nan).double())),
    ("numbers", "nothing", nothing),
    ("numbers", "text", words(number="x", known=True)),
    ("numbers", "a number of 400 digits", words(number=10**400, known=True)),
    ("done", "nothing", nothing),
]
CHECKED = ("survey", "tally", "spread", "adopt", "client_statistics")  # requests whose replies `find_problem` knows
# A statistic may be nan, which is checked with those of the other clients (`check_statistics`).
FORMS = [case for case in CASES if case[0] in CHECKED and case[:2] != ("client_statistics", "nan")]
# What happens after a problem was found is the same for all of them: one federation for each of these requests.
IN_FEDERATIONS = [case for case in CASES if case not in FORMS or case[1] == "nothing"]
SPOKEN = {
    "survey",
    "tally",
    "spread",
    "adopt",
    "client_statistics",
    "statistics",
    "models",
    "numbers",
    "local_update",
}  # the sender is named


def run_with(table, tmp_path, monkeypatch, what, spoil, federation=None, name="fedprox_personal"):
    """A federation in which one client's replies to a request are spoiled; the result, and what was reports."""
    run = make_run(table, name, rounds=2, federation=federation or {"wait": 60.0})
    usual, reports = REQUESTS[what].answer, []

    def lie(home, payload):
        reply = usual(home, payload)
        return spoil(reply) if home.name == BAD and payload.fields.get("label") != "local" else reply

    answer_with(monkeypatch, what, lie)
    grid = MemoryTransport(make_clients(run, table, tmp_path / "state"))
    return run_federation(run, grid, tmp_path / "run", report=reports.append), reports


@pytest.fixture(scope="module")
def exchanged(tables, tmp_path_factory):
    """What the server asks one client in a federation, and its correct replies, by request."""
    folder, pairs = tmp_path_factory.mktemp("federation"), {}
    run = make_run(tables["regression"], rounds=2)
    with pytest.MonkeyPatch.context() as patch:
        for what, usual in [(what, row.answer) for what, row in REQUESTS.items() if row.answer]:

            def answer(home, payload, what=what, usual=usual):
                reply = usual(home, payload)
                if home.name == BAD:
                    pairs.setdefault(what, (payload, reply))
                return reply

            answer_with(patch, what, answer)
        run_federation(run, MemoryTransport(make_clients(run, tables["regression"], folder / "state")), folder / "run")
    return pairs


@pytest.mark.parametrize("what,name,spoil", FORMS, ids=[f"{what}-{name}" for what, name, _ in FORMS])
def test_a_malformed_reply_has_a_problem(what, name, spoil, exchanged):
    asked, reply = exchanged[what]
    assert find_problem(what, asked, reply, BAD) is None
    problem = find_problem(what, asked, spoil(reply), BAD)
    assert problem and problem.isprintable()


@pytest.mark.parametrize("what,name,spoil", IN_FEDERATIONS, ids=[f"{what}-{name}" for what, name, _ in IN_FEDERATIONS])
def test_the_other_clients_finish(what, name, spoil, table, tmp_path, clock, monkeypatch):
    algorithm = "apfl" if what == "numbers" else "fedprox_personal"
    result, reports = run_with(table, tmp_path, monkeypatch, what, spoil, name=algorithm)
    assert len(result.rounds) == 2 and bool(torch.isfinite(result.trained.common).all())
    others = result.clients[result.clients["client"] != BAD]
    assert len(others) == 3 and others["personal"].notna().all()
    named = any(BAD in sentence and not sentence.endswith((" connected", " reconnected")) for sentence in reports)
    assert named or what not in SPOKEN or name in ("meter of text", "nan") or result.clients["left_out"].notna().any()


def with_header(**about):
    """A message with one tensor, as safetensors describes it, and 8 bytes of it."""
    header = json.dumps({"message": about}).encode()
    return b'{"fields":{},"order":["message"]}\n' + len(header).to_bytes(8, "little") + header + bytes(8)


def npz_bytes():
    file = io.BytesIO()
    numpy.savez(file, message=numpy.zeros(3))
    return file.getvalue()


RAW = {
    "nothing": b"",
    "no fields": b'{"order":[]}\n' + bytes(8),
    "a shape of 8 TB": with_header(dtype="F64", shape=[10**12], data_offsets=[0, 8 * 10**12]),
    "a shape of other bytes": with_header(dtype="F64", shape=[5], data_offsets=[0, 8]),
    "an archive": b'{"fields":{},"order":["message"]}\n' + npz_bytes(),
    "no tensor": b'{"fields":{},"order":["message"]}\njunk',
    "a million fields": b'{"fields":{' + b",".join(b'"%d":0' % k for k in range(10**6)) + b'},"order":[]}\n' + bytes(8),
}


@pytest.mark.parametrize("content", RAW)
def test_messages_that_are_no_replies(content, table, tmp_path, clock):
    """Bytes without fields, and tensors that are none or claim more than any memory."""
    run, reports = make_run(table, rounds=2, federation={"wait": 60.0, "deadline": 5.0, "quorum": 2}), []

    class Odd(MemoryTransport):
        asked: ClassVar[set] = set()

        def push(self, pushed):
            pushed = list(pushed)
            numbers = super().push(pushed)
            about = zip(numbers, pushed)
            self.asked |= {n for n, (node, sent) in about if node == "103" and b'"local_update"' in sent}
            return numbers

        def pull(self, numbers):
            return {n: RAW[content] if n in self.asked else reply for n, reply in super().pull(numbers).items()}

    result = run_federation(
        run, Odd(make_clients(run, table, tmp_path / "state")), tmp_path / "run", report=reports.append
    )
    assert len(result.rounds) == 2 and any("site 2" in text and "cannot be read" in text for text in reports)


SECURE_CASES = [
    (messages.SECURE_KEYS, nothing),
    (messages.SECURE_KEYS, words(statement={})),
    (messages.SECURE_UPDATE, nothing),
    (messages.SECURE_UPDATE, tensors(masked=torch.zeros(3))),
    (messages.SECURE_EVALUATE, tensors(masked=torch.zeros(9, dtype=torch.int64))),
    (messages.SECURE_CONFIRM, words(signature=5)),
    (messages.SECURE_CONFIRM, words(confirmed="everybody")),
]


@pytest.mark.parametrize("what,spoil", SECURE_CASES, ids=[f"{what}-{k}" for k, (what, _) in enumerate(SECURE_CASES)])
def test_the_others_finish_a_secure_run(what, spoil, table, tmp_path, clock, monkeypatch):
    """Four clients, of which one answers nonsense: three are enough."""
    run = make_run(
        table, "fedavg", {"eta": 0.05}, rounds=2, checkpoint="last", federation=RECOVERING | {"deadline": 5.0}
    )
    usual, reports = REQUESTS[what].answer, []

    def lie(home, payload):
        reply = usual(home, payload)
        return spoil(reply) if home.name == BAD else reply

    answer_with(monkeypatch, what, lie)
    result = run_federation(
        run,
        MemoryTransport(make_secure_clients(run, table, tmp_path / "state")),
        tmp_path / "run",
        report=reports.append,
    )
    assert len(result.rounds) == 2 and bool(torch.isfinite(result.trained.common).all())
    blamed = ("cannot be used", "numbers under masks, where")
    assert any(BAD in sentence and any(words in sentence for words in blamed) for sentence in reports)


JUNK = (
    None,
    True,
    -1,
    1e308,
    -1e308,
    math.nan,
    "",
    "\x1b[31mred\x1b[0m",
    "x" * 5000,
    [],
    {},
    [[[]]],
    {"a": {"b": 1}},
    2**80,
)


def fuzz(rng, value, depth=0):
    """A JSON value with something in it replaced, removed or added."""
    if depth > 4 or rng.random() < 0.15:
        return rng.choice(JUNK)
    if isinstance(value, dict) and value:
        key = rng.choice(list(value))
        out = dict(value)
        action = rng.random()
        if action < 0.2:
            del out[key]
        elif action < 0.3:
            out[rng.choice(["x", "\x1b", "a/b", "=None"])] = rng.choice(JUNK)
        else:
            out[key] = fuzz(rng, value[key], depth + 1)
        return out
    if isinstance(value, list) and value:
        out = list(value)
        out[rng.randrange(len(out))] = fuzz(rng, rng.choice(value), depth + 1)
        return out
    if isinstance(value, str) and value[:1] == "{":
        return json.dumps(fuzz(rng, json.loads(value), depth), allow_nan=True)
    return rng.choice(JUNK)


def fuzz_reply(rng, reply):
    if reply.tensors and rng.random() < 0.5:
        name = rng.choice(list(reply.tensors))
        tensor = reply.tensors[name]
        junk = [tensor[:0], tensor.repeat(*([2] * max(tensor.dim(), 1))) if tensor.dim() else tensor.repeat(2)]
        junk += [tensor.double() * math.nan, tensor.double() * math.inf, tensor.to(torch.int8), torch.zeros(())]
        out = dict(reply.tensors) | {name: rng.choice(junk)}
        if rng.random() < 0.3:
            out.pop(name)
        if rng.random() < 0.2:
            out[rng.choice(["x/y", "message/def", "facts/n/deep", "=None", "\x1b"])] = torch.zeros(2)
        return reply._replace(tensors=out)
    found = fuzz(rng, dict(reply.fields))
    return reply._replace(fields=found if isinstance(found, dict) else {"words": found})


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(k, marks=pytest.mark.slow) for k in range(8, 300))])
def test_fuzzed_replies(seed, table, tmp_path, clock, monkeypatch):
    """Every reply of one client may be changed anywhere."""
    rng, reports = random.Random(seed), []
    name = rng.choice(["fedavg", "fedprox_personal", "apfl", "scaffold"])
    run = make_run(table, name, rounds=2, federation={"wait": 60.0, "share_models": rng.random() < 0.5})
    for what, usual in [(what, row.answer) for what, row in REQUESTS.items() if row.answer]:

        def lie(home, payload, usual=usual):
            reply = usual(home, payload)
            return fuzz_reply(rng, reply) if home.name == BAD and rng.random() < 0.4 else reply

        answer_with(monkeypatch, what, lie)
    grid = MemoryTransport(make_clients(run, table, tmp_path / "state"))
    grid.enrolled = {node: home.name for node, home in grid.clients.items()}
    result = run_federation(run, grid, tmp_path / "run", report=reports.append)
    assert len(result.rounds) == 2 and bool(torch.isfinite(result.trained.common).all())
    assert set(result.clients["client"]) >= {"site 0", "site 1", "site 3"}
    assert not any("\x1b" in sentence for sentence in reports)


def test_escape_sequences_of_a_client_do_not_reach_the_terminal(table, tmp_path, clock, monkeypatch):
    """Escape sequences, line breaks and texts without end in a refusal and in a name."""
    text = "\x1b]0;owned\x07\x1b[2J\nerror: all is lost\r" + "x" * 10_000
    _, reports = run_with(table, tmp_path, monkeypatch, "adopt", lambda reply: Payload({"refused": text}))
    (sentence,) = [text for text in reports if "does not take part" in text]
    assert all(c.isprintable() for c in sentence) and len(sentence) < 700 and "error: all is lost" in sentence
    assert printable("a\x1b[31m\tb\n") == "a [31m b"


def test_escape_sequences_of_a_server_do_not_reach_a_clients_terminal(table, tmp_path, clock):
    """Notes, versions and reasons of the server, as the client reports and stores them."""
    text, run, reports = "\x1b]0;owned\x07\x1b[2J\nall is lost\r", make_run(table), []
    client = ClientNode(run, sorted(table.iterdir())[0], tmp_path / "state", report=reports.append)
    client.answer("hello", Payload({"protocol": 99, "version": text}))
    client.answer("dismissed", Payload({"why": text}))
    stored = json.loads((client.folder / client_requests.DISMISSED_FILE).read_text())["why"]
    assert len(reports) == 1 and all(character.isprintable() for character in reports[0] + stored)
