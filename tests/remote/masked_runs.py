"""Federations that ask for recommendations, for tests of attacks: tables, clients, and transports that watch or change
what is sent."""

import os

import numpy as np
import pandas as pd
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from mooring.advice.federated.client import AdviceClientNode
from mooring.advice.federated.server import advise_federation
from mooring.engines.request import read_federation_request
from mooring.remote import messenger
from mooring.remote.keys import Identity
from mooring.remote.memory import MemoryTransport
from mooring.remote.messages import Payload, pack, unpack
from mooring.remote.requests import MAX_SCHEMA_VALUES

NAMES = ("ann", "bob", "cleo", "dora", "emil")


def write_tables(folder, sizes=(30, 30, 30, 30, 30), columns=2, classes=False, seed=0, names=NAMES):
    """One table of `columns` numbers and a target for each client."""
    rng, folder = np.random.default_rng(seed), folder / "clients"
    folder.mkdir(parents=True)
    for k, (name, rows) in enumerate(zip(names, sizes)):
        frame = pd.DataFrame(rng.normal(size=(rows, columns)).round(3), columns=[f"x{j}" for j in range(columns)])
        score = frame.sum(axis=1) + 0.3 * k * frame["x0"] + 0.5 * rng.normal(size=rows)
        frame["y"] = np.where(score > 0, "yes", "no") if classes else score.round(3)
        frame.to_csv(folder / f"{name}.csv", index=False)
    return folder


def write_run(folder, data="", advice="", clients=None):
    """The run file of the tables in `folder`."""
    many = clients or len(list(folder.iterdir()))
    path = folder.parent / "run.toml"
    path.write_text(
        f'[mooring]\npurpose = "advise"\n[data]\nsource = "{folder}"\ntarget = "y"\n{data}\n[training]\nthreads = 1\n'
        f"[advice]\n{advice}\n[federation]\nclients = {many}\nwait = 20\ndeadline = 5\n"
    )
    return read_federation_request(path)


def identities(names):
    keys = {name: ec.generate_private_key(ec.SECP384R1()) for name in names}
    public = {name: key.public_key() for name, key in keys.items()}
    return {name: Identity(key, public) for name, key in keys.items()}


def make_nodes(run, folder, state, report=lambda sentence: None, **more):
    files = sorted(folder.iterdir())
    known = identities([file.stem for file in files])
    return [
        AdviceClientNode(run, file, state / file.stem, report=report, identity=known[file.stem], **more)
        for file in files
    ]


class Watched(MemoryTransport):
    """A transport that keeps all that clients send, as bytes, and may change it.

    `spoil(name, what, request, reply)` returns the payload or the bytes that a client sends in place of its reply.
    """

    def __init__(self, clients, spoil=None, ask=None):
        super().__init__(clients)
        self.spoil, self.ask, self.asked, self.sent = spoil, ask, {}, []  # sent: name, request, reply, bytes of it

    def push(self, messages):
        messages = [(node, content if self.ask is None else self.change(node, content)) for node, content in messages]
        numbers = super().push(messages)
        self.asked |= dict(zip(numbers, messages))
        return numbers

    def change(self, node, content):
        """What a server that does not follow the protocol sends in place of its request."""
        return pack(self.ask(self.clients[node].name, unpack(content, MAX_SCHEMA_VALUES)))

    def pull(self, numbers):
        out = super().pull(numbers)
        for number, content in list(out.items()):
            node, asked = self.asked[number]
            name, request = self.clients[node].name, unpack(asked, MAX_SCHEMA_VALUES)
            what = str(request.fields["what"])
            if self.spoil is not None:
                changed = self.spoil(name, what, request, unpack(content, MAX_SCHEMA_VALUES))
                out[number] = pack(changed) if isinstance(changed, Payload) else changed
            self.sent.append((name, what, request, out[number]))
        return out

    def totals(self, name=NAMES[0]):
        """What one client was told of each step: whole numbers, without tags."""
        steps = [request for who, what, request, _ in self.sent if (who, what) == (name, "step")]
        return [request.tensors["total"].numpy().view("<u8") for request in steps if "total" in request.tensors]


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only while the server sleeps, and files without waiting for the disk."""
    fake, init = Clock(), messenger.Messenger.__init__
    monkeypatch.setattr(
        messenger.Messenger, "__init__", lambda self, *a, **k: init(self, *a, **k, clock=fake, sleep=fake.sleep)
    )
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    return fake


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def run(federation, nodes, out, spoil=None, report=lambda sentence: None, transport=None):
    """Return what the server learns, and the transport."""
    transport = transport or Watched(nodes, spoil)
    return advise_federation(federation, transport, out, report=report), transport
