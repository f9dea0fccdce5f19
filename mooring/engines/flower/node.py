"""A client's node in this process: it asks the SuperLink for messages and answers them itself.

Flower's own node starts a process for every message and runs the code that comes with the run. This one runs nothing
but what is installed here, and keeps the client's rows in memory. It uses parts of Flower that are not its public
interface, so it refuses any other version than the one that it was tried with.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flwr
import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Message, RecordDict
from flwr.proto.fleet_pb2 import DeactivateNodeRequest
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.retry import http_retry
from flwr.supercore.run import RunNotRunningException
from flwr.supernode import fleet_http_connection as connection
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from mooring.core.errors import RequestError
from mooring.engines.flower import lost_answers
from mooring.engines.flower.home import Home
from mooring.engines.flower.replies import reply_of
from mooring.runs.files import make_folder

VERSION = "1.41.0"
PAUSE, LONGER_PAUSE = 0.1, 0.8  # seconds between looks into an empty letter box: shortest after a letter
OF_THE_WAIT, LONGEST_PAUSE = 0.1, 3.0  # who has waited long may wait longer: looks of many clients keep a server busy
NODE = "node"  # file with the number of the client's node, in its folder
LINGER = 5.0  # seconds after the end: the SuperLink does not pass on the replies of a node that has left
FIRST_BACKOFF, LONGEST_BACKOFF = 1.0, 15.0
IN_USE = "[code: 2004]"  # Flower's word for a node that cannot be activated


class NoConnection(Exception):
    """The SuperLink could not be reached, or refused us."""


def live(
    home: Home,
    server: str,
    *,
    ca: Path | None,
    key: Path | None,
    say: Callable[[str], None],
    until: Callable[[], bool],
) -> None:
    """Answer until `until` says that all is done; a lost connection is made again, with longer and longer pauses."""
    if flwr.__version__ != VERSION:
        raise RequestError(f"the embedded node was tried with flwr {VERSION}, not {flwr.__version__}; leave it out.")
    tame(until)
    backoff = FIRST_BACKOFF
    say(f"looking for {server}")
    while not until():
        begun = time.monotonic()
        try:
            take_leave(home, server, ca, key)
            answer_letters(home, server, ca, key, until, say)
        except (NoConnection, httpx.HTTPError, OSError, RuntimeError) as error:
            if until():
                return  # the server has ended, too
            said = in_words(error)
            if time.monotonic() - begun > LONGEST_BACKOFF:
                backoff = FIRST_BACKOFF
            say(f"no connection to {server} ({said}); trying again in {backoff:g} s")
            time.sleep(backoff)
            backoff = min(2 * backoff, LONGEST_BACKOFF)


def tame(until: Callable[[], bool]) -> None:
    """Flower ends its process where a connection fails, and interrupts it where a signature is refused (401): here only
    the connection ends. What it would log is told in our own words, and nothing is tried again once all is done."""
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    lost_answers.end_connections(until)
    connection.flwr_exit = give_up  # type: ignore[assignment]
    for module in (connection, http_retry):
        module.os = Refused()  # type: ignore[attr-defined]


class Refused:
    """The module `os` for Flower's connection: whoever interrupts the process gets an error instead."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def kill(self, process: int, signal: int) -> None:
        raise NoConnection("401: the SuperLink refused our signature")


def in_words(error: Exception) -> str:
    """Why there is no connection, in a few words."""
    text = str(error).strip()
    if "401" in text:
        return "it does not accept our signature: is this machine's clock right, and the key the one enrolled?"
    if IN_USE in text:
        return "this key is not enrolled there yet, or a client with it was connected less than a minute ago"
    return text.split("\n")[-1] or type(error).__name__


def give_up(code: int, message: str | None = None, *rest: Any, **more: Any) -> None:
    """What Flower calls to end the process: here only the connection ends."""
    raise NoConnection(message or f"Flower's exit code {code}")


def answer_letters(
    home: Home, server: str, ca: Path | None, key: Path | None, until: Callable[[], bool], say: Callable[[str], None]
) -> None:
    lost: Exception | None = None
    with connection.http_request_response(server, ca is None, read(ca), keys_of(key), 5, 20.0) as talk:
        remember_node(home, talk[0])
        say(f"connected to {server}; waiting for what it asks")
        try:
            answer_until(home, talk, until)
        except Exception as error:
            lost = error  # Flower's own connection would swallow it
    if lost is not None:
        raise lost


def answer_until(home: Home, talk: Any, until: Callable[[], bool]) -> None:
    _, receive, send, _, _, pull_object, push_object, confirm = talk
    leaving, pause, memory = None, PAUSE, SimpleNamespace(state=RecordDict())
    latest = time.monotonic()  # when a letter came
    while leaving is None or time.monotonic() < leaving:
        if leaving is None and until():
            leaving = time.monotonic() + LINGER
        try:
            if (got := receive()) is None:
                time.sleep(pause)
                pause = next_pause(pause, time.monotonic() - latest)
                continue
            head, tree = got
            run, number = head.metadata.run_id, head.metadata.message_id
            ids = [part.object_id for part in iterate_object_tree(tree)]
            contents = pull_objects(ids, pull_object_fn=partial(pull_object, run))
            confirm(run, number)
            message: Any = inflate_object_from_contents(number, contents)
            message.metadata.__dict__["_message_id"] = number
            begun = time.monotonic()
            reply = reply_of(home, message, memory)
            post(reply, run, send, push_object, time.monotonic() - begun)
            pause, latest = PAUSE, time.monotonic()
        except RunNotRunningException:
            continue  # the server was started anew and asks again


def next_pause(pause: float, waited: float) -> float:
    """Twice as long as the last one up to a limit, and beyond it a share of the wait so far."""
    return min(max(min(2 * pause, LONGER_PAUSE), OF_THE_WAIT * waited), LONGEST_PAUSE)


def read(path: Path | None) -> bytes | None:
    return None if path is None else path.read_bytes()


def remember_node(home: Home, number: int) -> None:
    make_folder(home.folder)
    (home.folder / NODE).write_text(str(number))


def take_leave(home: Home, server: str, ca: Path | None, key: Path | None) -> None:
    """Of the node of this client that was killed, if so: the SuperLink would take it for alive, and refuse this one,
    until it has missed two heartbeats."""
    former, pair = home.folder / NODE, keys_of(key)
    if pair is None or not former.exists():
        return
    signed: list[Any] = [RuntimeVersionHttpInterceptor(component_name="SuperNode"), NodeAuthHttpInterceptor(*pair)]
    with (
        suppress(httpx.HTTPStatusError, ValueError),  # it has left, or the SuperLink is a new one
        FleetHttpClient.from_server_address(server, ca is None, read(ca), interceptors=signed) as fleet,
    ):
        fleet.DeactivateNode(DeactivateNodeRequest(node_id=int(former.read_text())))


def post(reply: Message, run: int, send: Any, push_object: Any, seconds: float) -> None:
    with no_object_id_recompute():
        reply.metadata.__dict__["_message_id"] = reply.object_id
        objects = get_all_nested_objects(reply)
        wanted, session = send(reply, get_object_tree(reply), seconds)
        for part in wanted:
            push_object(run, session, part, objects[part].deflate())


def keys_of(path: Path | None) -> tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey] | None:
    """The client's key pair; None: it enrols itself, where the server lets it."""
    if path is None:
        return None
    try:
        private = load_ssh_private_key(path.read_bytes(), None)
    except (OSError, ValueError) as error:
        raise RequestError(f"{path} is not a client's key: {error}.") from error
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise RequestError(f"{path} is not a client's key: `mooring keys init` makes them.")
    return private, private.public_key()
