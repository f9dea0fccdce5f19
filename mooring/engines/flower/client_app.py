"""The Flower app of a client, for Flower's own nodes, which start a process for every message.

Such a process forwards the message through a local socket to the client, which `mooring join` keeps in memory with its
rows, and returns its reply. The socket is in a folder that only this user can open. What this module imports is
imported for every message, so it imports no numerical library.

Nodes that were started by hand have no socket: the client is then created for each message, from the node's
configuration: `--node-config 'run="run.toml" data="north.csv" state="state"'`.
"""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import NamedTuple

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from mooring.engines.flower.flower_patches import message_from_bytes, message_to_bytes

SOCKET_KEY = "socket"  # of a node's configuration: the address of the client's socket


class AppPaths(NamedTuple):
    """Where Flower finds the two apps of a run: dotted paths of objects."""

    client: str
    server: str


app = ClientApp()


@app.train()
@app.query()
def answer(message: Message, context: Context) -> Message:
    """Return the client's reply to a message."""
    if SOCKET_KEY in context.node_config:
        return forward_to_client(message, str(context.node_config[SOCKET_KEY]))
    from mooring.engines.flower.client_node import ClientNode, answer_as  # slow to import

    return answer_as(ClientNode, message, context)


@contextmanager
def listen_for_messages(answer: Callable[[Message], Message]) -> Iterator[str]:
    """Answer messages that arrive at a local socket, one after another, until the block ends; yields its address."""
    with tempfile.TemporaryDirectory(prefix="mooring-") as folder:  # the path of a Unix socket must be short
        has_unix = hasattr(socket, "AF_UNIX")  # Windows has named pipes
        address, family = (str(Path(folder) / SOCKET_KEY), "AF_UNIX") if has_unix else (None, "AF_PIPE")
        with Listener(address, family, backlog=8) as listener:
            threading.Thread(target=_serve_connections, args=(listener, answer), daemon=True).start()
            yield str(listener.address)


def _serve_connections(listener: Listener, answer: Callable[[Message], Message]) -> None:
    while True:
        try:
            connection = listener.accept()
        except OSError:
            return  # the socket was closed
        with connection, suppress(Exception):  # a process without a reply reports an error, and the server asks again
            connection.send_bytes(message_to_bytes(answer(message_from_bytes(connection.recv_bytes()))))


def forward_to_client(message: Message, address: str) -> Message:
    """Return the reply of the client that listens at the address."""
    with Client(address) as client:
        client.send_bytes(message_to_bytes(message))
        reply = message_from_bytes(client.recv_bytes())
    return Message(reply.error if reply.has_error() else reply.content, reply_to=message)
