"""A client's door. Flower's own node starts a process for every letter: it brings the letter to the door, behind which
the client waits with its rows in memory (`mooring join`), and takes the reply along.

What such a process imports it imports for every letter, so that this file imports nothing that learns. The door is a
socket in a folder that only this user can open; letters pass as Flower's own bytes.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Client, Listener
from pathlib import Path

from flwr.app import Message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as Letter

SOCKET_KEY = "door"  # where a node's configuration says where it is


@contextmanager
def door(answer: Callable[[Message], Message]) -> Iterator[str]:
    """Answer whoever brings a letter, one after another, until the block ends; where the door is."""
    with (
        tempfile.TemporaryDirectory(prefix="mooring-") as folder,  # a socket's path must be short
        Listener(str(Path(folder) / SOCKET_KEY), "AF_UNIX", backlog=8) as listener,
    ):
        threading.Thread(target=serve_connections, args=(listener, answer), daemon=True).start()
        yield str(listener.address)


def serve_connections(listener: Listener, answer: Callable[[Message], Message]) -> None:
    while True:
        try:
            visitor = listener.accept()
        except OSError:
            return  # the door was closed
        with visitor, suppress(Exception):  # whoever gets no reply says so to the server, which asks again
            visitor.send_bytes(message_to_bytes(answer(message_from_bytes(visitor.recv_bytes()))))


def forward_to_client(message: Message, address: str) -> Message:
    """The reply of the client behind the door."""
    with Client(address, "AF_UNIX") as client:
        client.send_bytes(message_to_bytes(message))
        reply = message_from_bytes(client.recv_bytes())
    return Message(reply.error if reply.has_error() else reply.content, reply_to=message)


def message_to_bytes(message: Message) -> bytes:
    return message_to_proto(message).SerializeToString()


def message_from_bytes(letter: bytes) -> Message:
    return message_from_proto(Letter.FromString(letter))
