"""`mooring join`: a client's part in one run or several, until they are finished."""

from __future__ import annotations

import ipaddress
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType

from mooring.core.errors import RequestError
from mooring.core.types import JsonObject
from mooring.engines.request import read_federation_request
from mooring.remote import secure_client
from mooring.remote.client_node import ClientNode
from mooring.remote.client_requests import DISMISSED_FILE, DONE_FILE, RESULT_DIR
from mooring.remote.disclosure import SENT_FILE, read_policy
from mooring.remote.keys import load_identity
from mooring.remote.memory import answer_bytes
from mooring.remote.messages import Payload
from mooring.remote.secure_rule import PLAIN, decide_secure, explain_visibility, sums_of
from mooring.runs.atomic_files import read_json

DEFAULT_PORT = 9092
PARENT_VARIABLE = "MOORING_PARENT"  # the number of the process that this one ends with
PARENT_SECONDS = 0.5  # between looks at it
CLIENT_KINDS: Mapping[str, type[ClientNode]] = MappingProxyType({"fit": ClientNode})  # by the purpose of a run


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
    trust: bool = False,
    policy: Path | None = None,
    again: bool = False,
    kinds: Mapping[str, type[ClientNode]] = CLIENT_KINDS,
    report: Callable[[str], None],
) -> list[JsonObject]:
    """Take part with one client's table until its runs are finished; return each run's losses and the model's path.

    Of several runs, those that this client has finished are not repeated. With `again` its operator agrees that the
    same rows are added up with another cohort than before. `kinds` are clients by the purpose of a run.
    """
    from mooring.remote.http.client import ServerAddress, answer_until, split_address

    end_with_parent()
    host, _ = split_address(server)
    if (ca is None or key is None) and not insecure:
        raise RequestError("joining needs TLS: give --ca and --key, as `mooring keys init` makes them, or --insecure.")
    if insecure and not is_loopback(host):
        raise RequestError(f"--insecure is for this machine only, and {host} is another; give --ca and --key.")
    files = [paths] if isinstance(paths, str | Path) else list(paths)
    rules = None if policy is None else read_policy(policy)
    clients: list[ClientNode] = []
    for file in files:
        run = decide_secure(read_federation_request(file, trust))
        is_secure = sums_of(run) != PLAIN
        if is_secure and (key is None or peers is None) and not insecure:
            raise RequestError(
                "secure sums need this client's key and its peers' keys: give --key and --peers, or set secure = false "
                "in [federation] of every party's run file."
            )
        if rules is not None:
            rules.check_run(run)
        identity = load_identity(key, peers, ca)
        kind = kinds[run.mooring.purpose]
        client = kind(run, Path(data).resolve(), Path(state).resolve(), name, report, identity=identity, policy=rules)
        client.again, client.unsigned = again, insecure
        if is_secure and identity is None:
            report("secure sums without enrolled keys: a dishonest server could take the place of clients.")
        if sentence := explain_visibility(run):
            report(sentence)
        if len(files) > 1:
            report(f"run {len(clients) + 1} of {len(files)}: {Path(file).name}")
        _announce(client, keep_result=len(files) > 1)
        clients.append(client)
    runs = ClientRuns(clients)
    if not runs.are_finished():
        answer_until(partial(answer_bytes, runs), ServerAddress(server, ca, key), runs.are_finished, report)
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


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def end_with_parent() -> None:
    """End this process when the one that started it ends, where that asked for it."""
    parent = os.environ.get(PARENT_VARIABLE, "")

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(PARENT_SECONDS)
        os._exit(1)

    if parent.isdigit():
        threading.Thread(target=watch, daemon=True).start()
