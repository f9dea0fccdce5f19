"""`mooring join`: a client's node, embedded or Flower's own, until its runs are finished.

Flower's own node starts a process for every message and executes the code that comes with the run. The embedded node
executes only what is installed here, and keeps the client's rows in memory. Behind Mooring's gateway one request
carries the last reply and waits for the next message; a SuperLink without the gateway is polled as Flower does it.
"""

from __future__ import annotations

import json
import re
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import httpx

from mooring.core.errors import RequestError
from mooring.core.types import JsonObject
from mooring.engines.flower import secure_client
from mooring.engines.flower.child_process import (
    CHILD_MODULE,
    DEFAULT_PORT,
    TERMINATE_SECONDS,
    Report,
    find_free_port,
    is_loopback,
    start_process,
)
from mooring.engines.flower.client_app import SOCKET_KEY, listen_for_messages
from mooring.engines.flower.client_node import AnswersRequests, ClientNode, answer_message
from mooring.engines.flower.client_requests import DISMISSED_FILE, DONE_FILE, RESULT_DIR
from mooring.engines.flower.disclosure import SENT_FILE, read_policy
from mooring.engines.flower.flower_patches import (
    CONNECTION_ERRORS,
    ConnectionLostError,
    KeyPair,
    NodeConnection,
    check_flower,
    contain_connection_failures,
    deactivate_node,
    generate_key_pair,
    message_from_bytes,
    message_to_bytes,
    register_node,
    sign_request,
)
from mooring.engines.flower.gateway import EXCHANGE, OPEN_CHANNEL, POLL_SECONDS, SESSION
from mooring.engines.flower.keys import load_identity, read_private
from mooring.engines.flower.mailbox import FLOWER_MESSAGE_PREFIX
from mooring.engines.flower.messages import Payload, join_frames, split_frames
from mooring.engines.request import read_federation_request
from mooring.runs.atomic_files import make_synced_folder, read_json

FIRST_POLL_SECONDS, USUAL_POLL_SECONDS = 0.1, 0.8  # of a SuperLink without the gateway
POLL_SHARE_OF_WAIT, MAX_POLL_SECONDS = 0.1, 3.0  # after a long wait polls are rarer: many clients keep a server busy
NODE_FILE = "node"  # with the number of the client's Flower node, in its folder
LINGER_SECONDS = 5.0  # after the end: a SuperLink does not pass on the replies of a node that has left
FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 1.0, 15.0
FIRST_RESTART_SECONDS, MAX_RESTART_SECONDS = 1.0, 30.0  # before Flower's own node is started again
RECONNECT_SECONDS = 10.0  # of lost connections to the mailbox, before the node is activated again
NODE_IN_USE_CODE = "[code: 2004]"  # Flower's code for a node that cannot be activated
CLIENT_KINDS: Mapping[str, type[ClientNode]] = MappingProxyType({"fit": ClientNode})  # by the purpose of a run


class ServerAddress(NamedTuple):
    """A server, the certificate to check it by, and this client's private key."""

    address: str
    ca: Path | None
    key: Path | None


class ClientRuns:
    """A client's part in several runs: a request is answered by the client of the run that it names."""

    def __init__(self, clients: Sequence[ClientNode]):
        self.clients, self.folder = {client.digest: client for client in clients}, clients[0].folder

    def answer(self, what: str, payload: Payload) -> Payload:
        client = self.clients.get(str(payload.fields.get("run")))
        if client is None and what == "dismissed" and len(self.clients) > 1:
            return Payload({})  # of a run that this client was not given: it waits for its own
        unfinished = (other for other in self.clients.values() if not is_finished(other))
        return (client or next(unfinished, next(iter(self.clients.values())))).answer(what, payload)

    def are_finished(self) -> bool:
        return all(map(is_finished, self.clients.values()))


def is_finished(client: ClientNode) -> bool:
    return (client.folder / DONE_FILE).exists() or (client.folder / DISMISSED_FILE).exists()


def join(
    paths: str | Path | Sequence[str | Path],
    data: str | Path,
    state: str | Path,
    *,
    server: str = f"127.0.0.1:{DEFAULT_PORT}",
    name: str | None = None,
    ca: Path | None = None,
    key: Path | None = None,
    peers: Path | None = None,
    insecure: bool = False,
    embedded: bool = False,
    trust: bool = False,
    policy: Path | None = None,
    kinds: Mapping[str, type[ClientNode]] = CLIENT_KINDS,
    report: Report,
) -> list[JsonObject]:
    """Take part with one client's table until its runs are finished; return each run's losses and the model's path.

    Of several runs, those that this client has finished are not repeated. `kinds` are clients by the purpose of a run.
    """
    host = server.rsplit(":", 1)[0].strip("[]")
    if (ca is None or key is None) and not insecure:
        raise RequestError("joining needs TLS: give --ca and --key, as `mooring keys init` makes them, or --insecure.")
    if insecure and not is_loopback(host):
        raise RequestError(f"--insecure is for this machine only, and {host} is another; give --ca and --key.")
    files = [paths] if isinstance(paths, str | Path) else list(paths)
    rules = None if policy is None else read_policy(policy)
    clients: list[ClientNode] = []
    for file in files:
        run = read_federation_request(file, trust)
        if run.federation is not None and run.federation.secure and (key is None or peers is None):
            raise RequestError("secure = true needs this client's key and its peers' keys: give --key and --peers.")
        if rules is not None:
            rules.check_run(run)
        identity = load_identity(key, peers, ca)
        kind = kinds[run.mooring.purpose]
        client = kind(run, Path(data).resolve(), Path(state).resolve(), name, report, identity=identity, policy=rules)
        if len(files) > 1:
            report(f"run {len(clients) + 1} of {len(files)}: {Path(file).name}")
        _announce(client, keep_result=len(files) > 1)
        clients.append(client)
    runs, address = ClientRuns(clients), ServerAddress(server, ca, key)
    if not runs.are_finished():
        (run_embedded_node if embedded else run_stock_node)(runs, address, runs.are_finished, report)
    return [_read_result(client) for client in clients if len(clients) == 1 or (client.folder / DONE_FILE).exists()]


def _announce(client: ClientNode, keep_result: bool) -> None:
    """Check the client's table, and report what it takes part in and what leaves this machine."""
    secure_client.delete_state(client)  # this command is the consent to take part once
    client.member  # noqa: B018 - problems of the table are reported before anything is sent
    client.report(f"client '{client.name}' takes part in {client.what}. A curious server sees {client.reveals}.")
    client.report(f"what leaves this machine is recorded in {client.folder / SENT_FILE}")
    if not keep_result:
        for file in (DONE_FILE, DISMISSED_FILE):
            (client.folder / file).unlink(missing_ok=True)


def _read_result(client: ClientNode) -> JsonObject:
    if (client.folder / DISMISSED_FILE).exists():
        raise RequestError(
            f"the server continues without this client: {read_json(client.folder / DISMISSED_FILE)['why']}"
        )
    return read_json(client.folder / DONE_FILE) | {"result": str(client.folder / RESULT_DIR)}


def run_stock_node(
    client: AnswersRequests, server: ServerAddress, is_finished: Callable[[], bool], report: Report
) -> None:
    """Run Flower's own node, restarted with longer and longer pauses where it ends; this process answers."""
    with listen_for_messages(lambda message: answer_message(client, message)) as socket:
        make_synced_folder(client.folder)
        pause, log = FIRST_RESTART_SECONDS, client.folder / "supernode.log"
        report(f"connecting to {server.address} with Flower's own node, which writes to {log}")
        while not is_finished():
            if log.exists() and (numbers := re.findall(r"SuperNode ID: (\d+)", log.read_text(errors="replace"))):
                remember_node(client, int(numbers[-1]))
            with suppress(httpx.HTTPError):  # the node itself reports problems of the connection
                deactivate_former_node(client, server)
            config = f"{SOCKET_KEY}={json.dumps(socket)}"
            arguments = [CHILD_MODULE, "supernode", "--superlink", server.address, "--node-config", config]
            arguments += ["--host", "127.0.0.1", "--port", str(find_free_port())]
            arguments += ["--insecure"] if server.ca is None else ["--root-certificates", str(server.ca)]
            arguments += [] if server.key is None else ["--auth-supernode-private-key", str(server.key)]
            with start_process(arguments, client.folder / "home", log) as started:
                while started.poll() is None and not is_finished():
                    time.sleep(0.3)
                if is_finished():
                    time.sleep(2 * TERMINATE_SECONDS)  # for the last reply to be sent
                    return
            report(f"Flower's node ended (see {log}); it is restarted in {pause:g} s")
            time.sleep(pause)
            pause = min(2 * pause, MAX_RESTART_SECONDS)


def run_embedded_node(
    client: AnswersRequests, server: ServerAddress, is_finished: Callable[[], bool], report: Report
) -> None:
    """Answer messages in this process; a lost connection is made again, with longer and longer pauses."""
    check_flower()
    contain_connection_failures(is_finished)
    backoff = FIRST_BACKOFF_SECONDS
    report(f"connecting to {server.address}")
    while not is_finished():
        started_at = time.monotonic()
        try:
            deactivate_former_node(client, server)
            _answer_messages(client, server, is_finished, report)
        except CONNECTION_ERRORS as error:
            if is_finished():
                return  # the server has ended, too
            if time.monotonic() - started_at > MAX_BACKOFF_SECONDS:
                backoff = FIRST_BACKOFF_SECONDS
            report(f"no connection to {server.address} ({describe_error(error)}); next attempt in {backoff:g} s")
            time.sleep(backoff)
            backoff = min(2 * backoff, MAX_BACKOFF_SECONDS)


def describe_error(error: Exception) -> str:
    """Return why there is no connection, in one clause."""
    text = str(error).strip()
    if "401" in text:
        return "it does not accept our signature: is this machine's clock right, and the key enrolled and not revoked?"
    if NODE_IN_USE_CODE in text:
        return "this key is not enrolled there yet, or a client with it was connected less than a minute ago"
    return text.split("\n")[-1] or type(error).__name__


def _answer_messages(
    client: AnswersRequests, server: ServerAddress, is_finished: Callable[[], bool], report: Report
) -> None:
    pair = load_key_pair(server.key) or generate_key_pair()
    if server.key is None:
        register_node(server.address, server.ca, pair)
    error: Exception | None = None
    with NodeConnection(server.address, server.ca, pair) as node:
        remember_node(client, node.number)
        report(f"connected to {server.address}; waiting for requests")
        try:
            with GatewaySession(server, pair) as session:
                if session.token:
                    _answer_inline(client, node, session, is_finished)
                else:
                    _answer_by_polling(client, node, is_finished)
        except Exception as problem:
            error = problem  # Flower's own connection would swallow it
    if error is not None:
        raise error


class GatewaySession:
    """A session with the mailbox behind the gateway; `token` is empty where the SuperLink has none."""

    def __init__(self, server: ServerAddress, pair: KeyPair):
        check: ssl.SSLContext | bool = True if server.ca is None else ssl.create_default_context(cafile=str(server.ca))
        url = f"{'http' if server.ca is None else 'https'}://{server.address}"
        self.client = httpx.Client(base_url=url, verify=check, timeout=POLL_SECONDS + 10, trust_env=False)
        self.client.headers.clear()  # 100 bytes of every message
        self.pair, self.token = pair, ""

    def __enter__(self) -> GatewaySession:
        response = self.client.post(OPEN_CHANNEL, headers=sign_request(self.pair))
        if response.status_code == httpx.codes.OK:
            self.token = str(json.loads(response.content)["session"])
        elif response.status_code != httpx.codes.NOT_FOUND:
            raise ConnectionLostError(f"{response.status_code}: no session")
        return self

    def __exit__(self, *error: object) -> None:
        self.client.close()

    def exchange(self, body: bytes) -> tuple[str, bytes] | None:
        """Send a reply, if there is one, and wait for the next message; a lost response is requested again."""
        started_at, pause = time.monotonic(), 0.05
        while True:
            try:
                response = self.client.post(EXCHANGE, content=body, headers={SESSION: self.token})
                break
            except httpx.TransportError:
                if time.monotonic() - started_at > RECONNECT_SECONDS:
                    raise
                time.sleep(pause)
                pause = min(2 * pause, 1.0)
        if response.status_code == httpx.codes.NO_CONTENT:
            return None
        if response.status_code != httpx.codes.OK:
            raise ConnectionLostError(f"{response.status_code}: {response.text[:100].strip()}")
        about, (content,) = split_frames(response.content)
        return str(about["message"]), content


def _answer_inline(
    client: AnswersRequests, node: NodeConnection, session: GatewaySession, is_finished: Callable[[], bool]
) -> None:
    """Answer messages of the gateway's mailbox, and before them those that Flower has: the server may have seen this
    node before its session was open."""
    while node.answer_next(lambda message: answer_message(client, message)):
        pass
    body = b""
    while True:
        finished = is_finished()
        if finished and body:
            about, contents = split_frames(body)
            body = join_frames(about | {"leave": True}, contents)
        received = session.exchange(body) if body or not finished else None
        if finished:
            return
        body = b""
        if received is None:
            continue
        number, content = received
        if number.startswith(FLOWER_MESSAGE_PREFIX):
            node.answer_next(lambda message: answer_message(client, message))
            body = join_frames({"message": number}, [b""])
            continue
        message = message_from_bytes(content)
        message.metadata.__dict__["_message_id"] = number
        body = join_frames({"message": number}, [message_to_bytes(answer_message(client, message))])


def _answer_by_polling(client: AnswersRequests, node: NodeConnection, is_finished: Callable[[], bool]) -> None:
    """Answer messages of a SuperLink without the gateway."""
    leave_at, pause = None, FIRST_POLL_SECONDS
    last_message = time.monotonic()
    while leave_at is None or time.monotonic() < leave_at:
        if leave_at is None and is_finished():
            leave_at = time.monotonic() + LINGER_SECONDS
        if node.answer_next(lambda message: answer_message(client, message)):
            pause, last_message = FIRST_POLL_SECONDS, time.monotonic()
        else:
            time.sleep(pause)
            pause = next_pause(pause, time.monotonic() - last_message)


def next_pause(pause: float, waited: float) -> float:
    """Return twice the last pause up to a limit, and beyond it a share of the wait so far."""
    return min(max(min(2 * pause, USUAL_POLL_SECONDS), POLL_SHARE_OF_WAIT * waited), MAX_POLL_SECONDS)


def remember_node(client: AnswersRequests, number: int) -> None:
    make_synced_folder(client.folder)
    (client.folder / NODE_FILE).write_text(str(number))


def deactivate_former_node(client: AnswersRequests, server: ServerAddress) -> None:
    """Deactivate the node of this client that was killed: the SuperLink would refuse a new one until the former has
    missed two heartbeats."""
    former, pair = client.folder / NODE_FILE, load_key_pair(server.key)
    if pair is not None and former.exists():
        with suppress(ValueError):
            deactivate_node(server.address, server.ca, pair, int(former.read_text()))


def load_key_pair(path: Path | None) -> KeyPair | None:
    """Return the client's key pair; None where it registers itself (--insecure)."""
    if path is None:
        return None
    private = read_private(path)
    return private, private.public_key()
