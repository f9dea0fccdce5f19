"""A client's node in this process: it asks the SuperLink for messages and answers them itself.

Flower's own node starts a process for every message and runs the code that comes with the run. This one runs nothing
but what is installed here, and keeps the client's rows in memory. Behind Mooring's gateway one request brings the last
reply and waits for the next message; a SuperLink without the gateway is asked in Flower's own way.
"""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from flwr.proto.fleet_pb2 import DeactivateNodeRequest
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectPushError,
    inflate_object_from_contents,
    pull_objects,
)
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.run import RunNotRunningException
from flwr.supernode import fleet_http_connection as connection
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from mooring.engines.flower.client_node import ClientNode
from mooring.engines.flower.flower_patches import FIRST_PULL_SECONDS as FIRST_PULL
from mooring.engines.flower.flower_patches import MAX_PULL_SECONDS as LONGEST_PULL
from mooring.engines.flower.flower_patches import ConnectionLostError, check_flower, contain_connection_failures
from mooring.engines.flower.frames import join_frames, split_frames
from mooring.engines.flower.gateway import EXCHANGE, OPEN_CHANNEL, POLL_SECONDS, SESSION
from mooring.engines.flower.keys import read_private
from mooring.engines.flower.local_socket import message_from_bytes, message_to_bytes
from mooring.engines.flower.mailbox import FLOWER_MESSAGE_PREFIX
from mooring.engines.flower.message_replies import answer_message
from mooring.runs.atomic_files import make_synced_folder

FIRST_POLL_SECONDS, USUAL_POLL_SECONDS = (
    0.1,
    0.8,
)  # seconds between looks for messages of a SuperLink without the gateway
POLL_SHARE_OF_WAIT, MAX_POLL_SECONDS = (
    0.1,
    3.0,
)  # after a long wait looks are rarer: those of many clients keep a server busy
NODE_FILE = "node"  # file with the number of the client's node, in its folder
LINGER_SECONDS = 5.0  # seconds after the end: a SuperLink does not pass on the replies of a node that has left
FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 1.0, 15.0
RECONNECT_SECONDS = 10.0  # of lost lines to the mailbox, before the node is activated again
NODE_IN_USE_CODE = "[code: 2004]"  # Flower's code for a node that cannot be activated
CONNECTION_ERRORS = (ConnectionLostError, httpx.HTTPError, OSError, RuntimeError, ObjectPushError, ObjectPullError)


def run_embedded_node(
    home: ClientNode,
    server: str,
    *,
    ca: Path | None,
    key: Path | None,
    say: Callable[[str], None],
    until: Callable[[], bool],
) -> None:
    """Answer until `until` says that all is done; a lost connection is made again, with longer and longer pauses."""
    check_flower()
    contain_connection_failures(until)
    backoff = FIRST_BACKOFF_SECONDS
    say(f"looking for {server}")
    while not until():
        begun = time.monotonic()
        try:
            deactivate_former_node(home, server, ca, key)
            answer_messages(home, server, ca, key, until, say)
        except CONNECTION_ERRORS as error:
            if until():
                return  # the server has ended, too
            reason = describe_error(error)
            if time.monotonic() - begun > MAX_BACKOFF_SECONDS:
                backoff = FIRST_BACKOFF_SECONDS
            say(f"no connection to {server} ({reason}); trying again in {backoff:g} s")
            time.sleep(backoff)
            backoff = min(2 * backoff, MAX_BACKOFF_SECONDS)


def describe_error(error: Exception) -> str:
    """Why there is no connection, in a few words."""
    text = str(error).strip()
    if "401" in text:
        return "it does not accept our signature: is this machine's clock right, and the key the one enrolled?"
    if NODE_IN_USE_CODE in text:
        return "this key is not enrolled there yet, or a client with it was connected less than a minute ago"
    return text.split("\n")[-1] or type(error).__name__


def answer_messages(
    home: ClientNode,
    server: str,
    ca: Path | None,
    key: Path | None,
    until: Callable[[], bool],
    say: Callable[[str], None],
) -> None:
    lost: Exception | None = None
    pair = load_key_pair(key) or connection.generate_key_pairs()
    if key is None:
        register(server, ca, pair)
    with connection.http_request_response(server, ca is None, read_optional(ca), pair, 5, 20.0) as talk:
        remember_node(home, talk[0])
        say(f"connected to {server}; waiting for what it asks")
        try:
            with GatewaySession(server, ca, pair) as line:
                if line.session:
                    answer_inline(home, talk, line, until)
                else:
                    answer_until(home, talk, until)
        except Exception as error:
            lost = error  # Flower's own connection would swallow it
    if lost is not None:
        raise lost


def register(server: str, ca: Path | None, pair: Any) -> None:
    """A node without an enrolled key registers itself, where the server lets it (--insecure)."""
    from flwr.proto.fleet_pb2 import RegisterNodeFleetRequest
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    try:
        with fleet_client(server, ca, pair) as fleet:
            fleet.RegisterNode(RegisterNodeFleetRequest(public_key=public_key_to_bytes(pair[1])))
    except httpx.HTTPStatusError as error:
        raise ConnectionLostError(f"{error.response.status_code}: the server did not register this node") from error


def fleet_client(server: str, ca: Path | None, pair: Any) -> Any:
    signed: list[Any] = [RuntimeVersionHttpInterceptor(component_name="SuperNode"), NodeAuthHttpInterceptor(*pair)]
    return FleetHttpClient.from_server_address(server, ca is None, read_optional(ca), interceptors=signed)


class GatewaySession:
    """The way to the mailbox behind the gateway; `session` is empty where the SuperLink has none."""

    def __init__(self, server: str, ca: Path | None, pair: Any):
        check: Any = True if ca is None else ssl.create_default_context(cafile=str(ca))
        url = f"{'http' if ca is None else 'https'}://{server}"
        self.client = httpx.Client(base_url=url, verify=check, timeout=POLL_SECONDS + 10, trust_env=False)
        self.pair, self.session = pair, ""

    def __enter__(self) -> GatewaySession:
        response = self.client.post(OPEN_CHANNEL, headers=signed_headers(self.pair))
        if response.status_code == httpx.codes.OK:
            self.session = str(json.loads(response.content)["session"])
        elif response.status_code != httpx.codes.NOT_FOUND:
            raise ConnectionLostError(f"{response.status_code}: no session")
        return self

    def __exit__(self, *rest: Any) -> None:
        self.client.close()

    def exchange(self, body: bytes) -> tuple[str, bytes] | None:
        """Send a reply, if there is one, and wait for the next message; a lost answer is asked for again."""
        begun, pause = time.monotonic(), 0.05
        while True:
            try:
                response = self.client.post(EXCHANGE, content=body, headers={SESSION: self.session})
                break
            except httpx.TransportError:
                if time.monotonic() - begun > RECONNECT_SECONDS:
                    raise
                time.sleep(pause)
                pause = min(2 * pause, 1.0)
        if response.status_code == httpx.codes.NO_CONTENT:
            return None
        if response.status_code != httpx.codes.OK:
            raise ConnectionLostError(f"{response.status_code}: {response.text[:100].strip()}")
        about, (content,) = split_frames(response.content)
        return str(about["message"]), content


def signed_headers(pair: Any) -> dict[str, str]:
    """As Flower signs a request."""
    request = httpx.Request("POST", "http://unused")
    context: Any = connection_context(request)
    NodeAuthHttpInterceptor(*pair).intercept(context, lambda _: httpx.Response(200))
    return {name: value for name, value in request.headers.items() if name.startswith("flwr-")}


def connection_context(request: httpx.Request) -> Any:
    from flwr.supercore.protobuf.client import ProtobufRequestContext

    return ProtobufRequestContext(rpc_method="", message=DeactivateNodeRequest(), request=request)


def answer_inline(home: ClientNode, talk: Any, line: GatewaySession, until: Callable[[], bool]) -> None:
    body = b""
    while True:
        done = until()
        if done and body:
            about, pieces = split_frames(body)
            body = join_frames(about | {"leave": True}, pieces)
        found = line.exchange(body) if body or not done else None
        if done:
            return
        body = b""
        if found is None:
            continue
        number, content = found
        if number.startswith(FLOWER_MESSAGE_PREFIX):
            answer_next(home, talk)
            body = join_frames({"message": number}, [b""])
            continue
        message = message_from_bytes(content)
        message.metadata.__dict__["_message_id"] = number
        body = join_frames({"message": number}, [message_to_bytes(answer_message(home, message))])


def answer_until(home: ClientNode, talk: Any, until: Callable[[], bool]) -> None:
    """Flower's own way: the SuperLink is asked again and again."""
    leaving, pause = None, FIRST_POLL_SECONDS
    latest = time.monotonic()  # when a message came
    while leaving is None or time.monotonic() < leaving:
        if leaving is None and until():
            leaving = time.monotonic() + LINGER_SECONDS
        if answer_next(home, talk):
            pause, latest = FIRST_POLL_SECONDS, time.monotonic()
        else:
            time.sleep(pause)
            pause = next_pause(pause, time.monotonic() - latest)


def answer_next(home: ClientNode, talk: Any) -> bool:
    """Whether Flower had a message, which is answered."""
    _, receive, send, _, _, pull_object, push_object, confirm = talk
    try:
        if (got := receive()) is None:
            return False
        head, tree = got
        run, number = head.metadata.run_id, head.metadata.message_id
        ids = [part.object_id for part in iterate_object_tree(tree)]
        contents = pull_objects(
            ids,
            pull_object_fn=partial(pull_object, run),
            initial_backoff=FIRST_PULL,
            backoff_cap=LONGEST_PULL,
            max_tries_per_object=None,
        )
        confirm(run, number)
        message: Any = inflate_object_from_contents(number, contents)
        message.metadata.__dict__["_message_id"] = number
        begun = time.monotonic()
        reply = answer_message(home, message)
        send_reply(reply, run, send, push_object, time.monotonic() - begun)
    except RunNotRunningException:
        pass  # the server was started anew and asks again
    return True


def next_pause(pause: float, waited: float) -> float:
    """Twice as long as the last one up to a limit, and beyond it a share of the wait so far."""
    return min(max(min(2 * pause, USUAL_POLL_SECONDS), POLL_SHARE_OF_WAIT * waited), MAX_POLL_SECONDS)


def read_optional(path: Path | None) -> bytes | None:
    return None if path is None else path.read_bytes()


def remember_node(home: ClientNode, number: int) -> None:
    make_synced_folder(home.folder)
    (home.folder / NODE_FILE).write_text(str(number))


def deactivate_former_node(home: ClientNode, server: str, ca: Path | None, key: Path | None) -> None:
    """Of the node of this client that was killed, if so: the SuperLink would take it for alive, and refuse this one,
    until it has missed two heartbeats."""
    former, pair = home.folder / NODE_FILE, load_key_pair(key)
    if pair is None or not former.exists():
        return
    with (
        suppress(httpx.HTTPStatusError, ValueError),  # it has left, or the SuperLink is a new one
        fleet_client(server, ca, pair) as fleet,
    ):
        fleet.DeactivateNode(DeactivateNodeRequest(node_id=int(former.read_text())))


def send_reply(reply: Message, run: int, send: Any, push_object: Any, seconds: float) -> None:
    with no_object_id_recompute():
        reply.metadata.__dict__["_message_id"] = reply.object_id
        objects = get_all_nested_objects(reply)
        wanted, session = send(reply, get_object_tree(reply), seconds)
        for part in wanted:
            push_object(run, session, part, objects[part].deflate())


def load_key_pair(path: Path | None) -> tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey] | None:
    """The client's key pair; None: it registers itself, where the server lets it."""
    if path is None:
        return None
    private = read_private(path)
    return private, private.public_key()
