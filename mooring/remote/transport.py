"""What carries messages between a server and its clients: a protocol, with implementations beside it.

memory.py   in one process, for tests: messages may be lost, late, repeated
http/       HTTPS: the default
flower.py   Flower's SuperLink and SuperNodes, or its simulation

A message is bytes (`messages.py`). A transport may deliver a message twice or lose it; it never changes one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from cryptography.hazmat.primitives.asymmetric import ec


class Node(NamedTuple):
    """A client's process that is connected."""

    id: str  # of its key, or of its place
    name: str = ""  # that its key was enrolled for; empty where keys have no names
    session: str = ""  # another one after a restart: messages to the former one are lost


class Transport(Protocol):
    revoked: frozenset[str]  # names of clients whose keys were revoked while the server runs

    @property
    def public_keys(self) -> Mapping[str, ec.EllipticCurvePublicKey]:
        """The enrolled keys by client, where the transport knows them."""

    def nodes(self) -> Iterable[Node]:
        """Return the nodes that are connected."""

    def push(self, messages: Iterable[tuple[str, bytes]]) -> list[str]:
        """Send messages, each with the id of its node; return their numbers, "" for a node that is not there."""

    def pull(self, numbers: Iterable[str]) -> Mapping[str, bytes | str]:
        """Return the replies that have arrived, by number of the message; a text is the reason why none will come.

        It may wait for a moment."""
