"""A server that does not follow the protocol: a client refuses in one sentence, or sends the bytes that it has sent
before; an honest server then gets the same answers as ever."""

import copy
import resource
import shutil
import time

import numpy as np
import pytest
import torch

from mooring.advice.federated.client import AdviceClientNode
from mooring.core.errors import RequestError, WorkError
from mooring.remote.client_node import ClientNode
from mooring.remote.messages import Payload, pack, unpack
from mooring.remote.requests import MAX_SCHEMA_VALUES, REQUESTS
from mooring.remote.transcript import Journal
from mooring.runs.runfile import RunFile
from tests.remote.masked_runs import NAMES, Watched, clock, identities, run, write_run, write_tables

__all__ = ["clock"]  # a fixture
OWN, PLACE = "bob", 5  # the client that is asked; the step that comes next
MAX_CPU_SECONDS, MAX_MEGABYTES = 1.0, 100
JUNK = (None, True, -1, 2**63, 1e308, "", "\x1b[2J", "x" * 100_000, [], {}, [[[[]]]], {"a": [1]}, "ann")


class Honest:
    """A run of five clients as one of them has seen it, and its files after some steps."""

    def __init__(self, folder):
        self.folder, tables = folder, write_tables(folder)
        self.run, self.table, self.count = write_run(tables), tables / f"{OWN}.csv", 0
        self.identities = identities(NAMES)
        self.seen = []  # requests to this client, and its replies, as bytes
        nodes = [
            AdviceClientNode(self.run, file, folder / "state" / file.stem, identity=self.identities[file.stem])
            for file in sorted(tables.iterdir())
        ]
        place = NAMES.index(OWN)
        answer = nodes[place].answer

        def keep(what, payload):
            reply = answer(what, payload)
            self.seen.append((what, payload, pack(reply)))
            for name, number in (("cohort", 0), ("step", PLACE - 1), ("declare", 0)):
                if what == name and payload.fields.get("number", 0) == number:
                    shutil.copytree(folder / "state" / OWN, folder / name)
            if what == "hello":
                (folder / "fresh").mkdir(exist_ok=True)
            return reply

        nodes[place].answer = keep
        self.transport = Watched(nodes)
        run(self.run, nodes, folder / "run", transport=self.transport)

    def client(self, state):
        """The client after a restart, with the files that it had at some time."""
        self.count += 1
        place, said = self.folder / "trials" / str(self.count), []
        shutil.copytree(self.folder / state, place)
        return AdviceClientNode(self.run, self.table, place, report=said.append, identity=self.identities[OWN])

    def request(self, what, number=0):
        found = [payload for asked, payload, _ in self.seen if asked == what]
        return copy.deepcopy(found[number])

    def reply(self, what, number=0):
        return [reply for asked, _, reply in self.seen if asked == what][number]


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    return Honest(tmp_path_factory.mktemp("honest"))


def fields(**changes):
    return lambda request: request._replace(fields=request.fields | changes)


def without(name):
    return lambda request: request._replace(fields={k: v for k, v in request.fields.items() if k != name})


def total(change):
    return lambda request: request._replace(tensors={"total": change(request.tensors["total"])})


def statements(change):
    def changed(request):
        known = copy.deepcopy(request.fields["statements"]["list"])
        return request._replace(fields=request.fields | {"statements": {"list": change(known)}})

    return changed


def replaced(name, **changes):
    return statements(lambda known: [one | changes if one["name"] == name else one for one in known])


def add_to(place, number):
    def changed(tensor):
        tensor = tensor.clone()
        tensor[place] += number
        return tensor

    return total(changed)


def is_for_advice(name):
    return "advise" in REQUESTS[name].purposes


CASES = [  # what the client has done before, the request, which one of these, label, change
    *(("cohort", "step", PLACE, f"as {name}", fields(what=name)) for name in REQUESTS if not is_for_advice(name)),
    *(("cohort", "step", 0, f"as {name!r}", fields(what=name)) for name in ("", "eval", "../run", "\x1b[2J", "step ")),
    *(("step", "step", PLACE, f"run {k}", fields(run=value)) for k, value in enumerate(JUNK)),
    ("step", "step", PLACE, "run of another digest", fields(run="0" * 16)),
    *(
        ("step", "step", PLACE, f"number {value}", fields(number=value))
        for value in (-1, 0, 1, 3, 4, 6, 7, 1000, 2**31, 2**63, -(2**63), 2**200)
    ),
    *(
        ("step", "step", PLACE, f"number of another type {k}", fields(number=value))
        for k, value in enumerate(JUNK)
        if not isinstance(value, int)
    ),
    ("step", "step", PLACE, "no number", without("number")),
    ("step", "step", PLACE, "a field more", fields(more=1)),
    ("step", "step", PLACE, "no total", lambda request: request._replace(tensors={})),
    ("step", "step", PLACE, "shorter", total(lambda t: t[1:])),
    ("step", "step", PLACE, "longer", total(lambda t: torch.cat([t, t]))),
    ("step", "step", PLACE, "empty", total(lambda t: t[:0])),
    ("step", "step", PLACE, "a matrix", total(lambda t: t[None])),
    ("step", "step", PLACE, "a scalar", total(lambda t: t[0])),
    ("step", "step", PLACE, "10 million numbers", total(lambda t: torch.ones(10_000_000, dtype=torch.int64))),
    *(
        ("step", "step", PLACE, f"of {kind}", total(lambda t, kind=kind: t.to(kind)))
        for kind in (torch.int8, torch.int32, torch.uint8, torch.float32, torch.bfloat16, torch.bool, torch.complex64)
    ),
    ("step", "step", PLACE, "nan", total(lambda t: t.double() * np.nan)),
    ("step", "step", PLACE, "bits of nan", total(lambda t: (t.double() * np.nan).view(torch.int64))),
    ("step", "step", PLACE, "zeros", total(torch.zeros_like)),
    ("step", "step", PLACE, "largest", total(lambda t: torch.full_like(t, 2**63 - 1))),
    ("step", "step", PLACE, "smallest", total(lambda t: torch.full_like(t, -(2**63)))),
    ("step", "step", PLACE, "twice", total(lambda t: 2 * t)),
    ("step", "step", PLACE, "reversed", total(lambda t: t.flip(0))),
    *(("step", "step", PLACE, f"changed at {k}", add_to(k, 1)) for k in (0, 1, -1, -4, -5, -6)),
    *(("step", "step", PLACE, f"bit {bit}", add_to(2, 2**bit)) for bit in (20, 40, 62)),
    ("step", "step", PLACE - 1, "the last step with another total", add_to(0, 1)),
    ("step", "step", 2, "an old step with another total", add_to(0, 1)),
    ("step", "step", PLACE + 1, "a later step", lambda request: request),
    ("cohort", "step", 0, "no secret", without("secret")),
    ("cohort", "step", 0, "an empty secret", fields(secret="")),
    ("cohort", "step", 0, "another secret", fields(secret="ab" * 48)),
    ("cohort", "step", 0, "a secret of escapes", fields(secret="\x1b[2J")),
    ("cohort", "step", 0, "a secret of a megabyte", fields(secret="ab" * 500_000)),
    *(
        ("cohort", "step", 0, f"a secret of another type {k}", fields(secret=value))
        for k, value in enumerate(JUNK)
        if not isinstance(value, str)
    ),
    (
        "cohort",
        "step",
        0,
        "a total before the first step",
        lambda r: r._replace(tensors={"total": torch.zeros(9).long()}),
    ),
    ("cohort", "declare", 0, "before any step", lambda request: request),
    ("step", "declare", 0, "before the end", lambda request: request),
    ("fresh", "step", 0, "before a cohort", lambda request: request),
    ("fresh", "cohort", 0, "a key that has gone", lambda request: request),
    ("declare", "step", -1, "the end with another total", add_to(0, 1)),
    ("declare", "step", -1, "a step after the end", fields(number=1000)),
    *(
        (state, "cohort", 0, label, change)
        for state in ("cohort", "step")
        for label, change in {
            "without itself": statements(lambda s: [one for one in s if one["name"] != OWN]),
            "of two": statements(lambda s: s[:2]),
            "of three": statements(lambda s: s[:3]),
            "of none": statements(lambda s: []),
            "twice the same": statements(lambda s: [*s, s[-1]]),
            "in another order": statements(lambda s: s[::-1]),
            "with a stranger": statements(lambda s: [*s, s[-1] | {"name": "zoe", "public": "ab" * 32}]),
            "another key of a peer": replaced("ann", public="ab" * 32),
            "a low key of a peer": replaced("ann", public="00" * 32),
            "its own key changed": replaced(OWN, public="ab" * 32),
            "another plan": replaced("ann", plan="0" * 32),
            "another run": replaced("ann", run="0" * 16),
            "other columns": replaced("ann", columns=["x0", "y"]),
            "all of other columns": statements(lambda s: [one | {"columns": ["x0", "y"]} for one in s]),
            "numbers": statements(lambda s: [1, 2, 3]),
            "nested": statements(lambda s: [[[s]]]),
            "no signatures": fields(signatures={}),
            "signatures of another": lambda r: r._replace(
                fields=r.fields | {"signatures": dict.fromkeys(NAMES, r.fields["signatures"]["ann"])}
            ),
            "signatures of numbers": fields(signatures=dict.fromkeys(NAMES, 7)),
            "signatures as a list": fields(signatures=[]),
            "no list": fields(statements={}),
            "a list of text": fields(statements={"list": "ann"}),
            "another type": fields(statements=[]),
        }.items()
    ),
]


@pytest.mark.parametrize(
    "state,what,number,label,change", CASES, ids=[f"{state}-{what}-{label}" for state, what, _, label, _ in CASES]
)
def test_a_request_outside_the_protocol_gets_nothing_new(state, what, number, label, change, honest, clock):
    client, said = honest.client(state), []
    request = change(honest.request(what, number))
    before, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reply = client.answer(str(request.fields.get("what", what)), unpack(pack(request), 10 * MAX_SCHEMA_VALUES))
    size = 8 * sum(tensor.numel() for tensor in request.tensors.values()) / 1e6
    assert time.process_time() - before < MAX_CPU_SECONDS
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1000 < MAX_MEGABYTES + 3 * size
    if "refused" in reply.fields:
        sentence = reply.fields["refused"]
        assert set(reply.fields) == {"refused"} and not reply.tensors
        assert "Traceback" not in sentence and "unexpected" not in sentence and sentence.endswith(".")
    else:
        assert pack(reply) in [sent for _, _, sent in honest.seen], "it has sent something new"
    assert not said
    if state == "step":  # the next honest request is answered as ever
        after = client.answer("step", honest.request("step", PLACE))
        assert pack(after) == honest.reply("step", PLACE)


def test_there_are_enough_requests():
    assert len(CASES) >= 60


def test_an_advice_client_answers_no_request_of_fits(honest):
    """In particular none about its columns alone: extremes, medians and levels are of `mooring fit`."""
    client = honest.client("declare")
    for name in REQUESTS:
        if name not in ("hello", "dismissed", "roll_call", "cohort", "step", "declare"):
            asked = {key: {} for key in REQUESTS[name].fields.replace("?", "").split()}
            reply = client.answer(name, Payload({**asked, "run": client.digest}))
            assert "does not belong to its run" in reply.fields["refused"], name


def test_a_client_of_a_fit_answers_no_request_of_advice(honest, tmp_path):
    content = honest.run.model_dump(mode="json", exclude_none=True)
    content["mooring"]["purpose"] = "fit"
    content.pop("advice", None)
    content["algorithm"] = {"name": "fedavg"}
    client = ClientNode(RunFile.model_validate(content), honest.table, tmp_path)
    for name in ("roll_call", "cohort", "step", "declare"):
        request = honest.request(name)
        reply = client.answer(name, request._replace(fields=request.fields | {"run": client.digest}))
        assert "does not belong to its run" in reply.fields["refused"]


def test_why_a_client_refuses_a_total_is_for_its_operator(honest, clock):
    """A sentence with a cell stays at the client, and a total that was refused is refused for ever, as any other is."""
    client, said = honest.client("step"), []
    client.report, program = said.append, client.program

    def refusing(secret):
        steps = program(secret)
        part = next(steps)
        for _ in range(PLACE - 1):
            part = steps.send((yield part))
        yield part
        raise RequestError("column 'x0' has 12.345 in row 7.")

    client.program = refusing
    asked = honest.request("step", PLACE)
    sentence = f"client '{OWN}' does not continue after the total of step {PLACE - 1}; its operator reads why."
    assert client.answer("step", asked).fields == {"refused": sentence}
    assert said == ["column 'x0' has 12.345 in row 7."]
    again = AdviceClientNode(honest.run, honest.table, client.folder.parent, identity=honest.identities[OWN])
    assert again.answer("step", asked).fields == {"refused": sentence}
    other = again.answer("step", add_to(0, 1)(asked)).fields
    assert "answers each step once" in other["refused"]


def test_a_full_disk_is_tried_again(honest, clock, monkeypatch):
    client, write = honest.client("step"), Journal.write

    def full(self, number, record):
        raise WorkError("the disk is full.")

    monkeypatch.setattr(Journal, "write", full)
    asked = honest.request("step", PLACE)
    assert client.answer("step", asked).fields == {"refused": "the disk is full."}
    monkeypatch.setattr(Journal, "write", write)
    assert pack(client.answer("step", asked)) == honest.reply("step", PLACE)
