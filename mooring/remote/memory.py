"""A transport in one process: every message is turned into bytes and back, on both ways.

Nodes answer when replies are pulled. For trials of faults, a node may be deaf, and `fate` decides what becomes of each
reply.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from cryptography.hazmat.primitives.asymmetric import ec

from mooring.core.errors import RequestError
from mooring.remote.messages import Payload, pack, unpack
from mooring.remote.requests import MAX_SCHEMA_VALUES
from mooring.remote.transport import Node

FINE, LOST, LATE, TWICE = "fine", "lost", "late", "twice"  # LATE: after the server's next message


class AnswersRequests(Protocol):
    """A client, or a client's runs."""

    def answer(self, what: str, payload: Payload) -> Payload: ...


def answer_bytes(client: AnswersRequests, content: bytes) -> bytes:
    """Return a client's reply to a message."""
    try:
        payload = unpack(content, MAX_SCHEMA_VALUES)
        reply = client.answer(str(payload.fields.get("what")), payload)
    except RequestError as error:  # the message is not a request
        reply = Payload({"refused": str(error)})
    return pack(reply)


class MemoryTransport:
    """Clients of this process, by node: "101", "102", ..."""

    def __init__(self, clients: Sequence[AnswersRequests]):
        self.clients = {str(number): client for number, client in enumerate(clients, start=101)}
        self.revoked: frozenset[str] = frozenset()
        self.public_keys: dict[str, ec.EllipticCurvePublicKey] = {}  # by client
        self.deaf: set[str] = set()  # nodes that receive nothing
        self.enrolled: dict[str, str] = {}  # by node: the name that its key was enrolled for
        self.sessions: dict[str, str] = {}  # by node
        self.fate: Callable[[Payload, str, int], str] = lambda request, node, number: FINE
        self.log: list[tuple[str, str]] = []
        self._waiting: list[tuple[str, str, bytes]] = []  # number, node, message
        self._later: list[tuple[int, str, bytes]] = []  # the last message when it was sent, number, reply
        self._count, self._pushed = itertools.count(1), 0

    def nodes(self) -> list[Node]:
        return [Node(node, self.enrolled.get(node, ""), self.sessions.get(node, "")) for node in self.clients]

    def push(self, messages: Iterable[tuple[str, bytes]]) -> list[str]:
        numbers = []
        for node, content in messages:
            self._pushed = next(self._count)
            numbers.append(f"m{self._pushed}")
            self._waiting.append((numbers[-1], node, content))
        return numbers

    def pull(self, numbers: Iterable[str]) -> dict[str, bytes | str]:
        out: dict[str, bytes | str] = {number: reply for k, number, reply in self._later if k < self._pushed}
        self._later = [late for late in self._later if late[0] >= self._pushed]
        for number, node, content in self._waiting:
            if node in self.deaf or node not in self.clients:
                continue
            reply = answer_bytes(self.clients[node], content)
            fate = self.fate(unpack(content), node, len(self.log))
            self.log.append((node, fate))
            if fate in (FINE, TWICE):
                out[number] = reply
            if fate in (LATE, TWICE):
                self._later.append((self._pushed, number, reply))
        self._waiting = [message for message in self._waiting if message[1] in self.deaf]
        return out
