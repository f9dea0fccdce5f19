"""A client's connection: it asks the server for messages and sends its replies, until its runs are finished."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import httpx
from cryptography.hazmat.primitives.asymmetric import ec

from mooring.core.errors import RequestError
from mooring.remote.http.signatures import EXCHANGE, LAST, MESSAGE, POLL_SECONDS, Signer
from mooring.remote.keys import read_private
from mooring.remote.messages import Payload, pack

FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.2, 15.0
REPORTED_BACKOFF_SECONDS = 1.0  # shorter pauses are not reported: a server that restarts is back soon
ANSWER_SECONDS = POLL_SECONDS + 10  # for an answer of the server


class ServerAddress(NamedTuple):
    """A server, the certificate to check it by, and this client's private key."""

    address: str  # HOST:PORT
    ca: Path | None
    key: Path | None

    @property
    def url(self) -> str:
        host, port = split_address(self.address)
        return f"{'http' if self.ca is None else 'https'}://{f'[{host}]' if ':' in host else host}:{port}"


class ConnectionRefused(Exception):
    """The server refused a request of this client."""


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT; an IPv6 address may have brackets."""
    host, _, port = address.rpartition(":")
    if not host.strip("[]") or not port.isdigit():
        raise RequestError(f"a server is given as HOST:PORT, such as fed.example.org:9092, not {address!r}.")
    return host.strip("[]"), int(port)


def answer_until(
    answer: Callable[[bytes], bytes],
    server: ServerAddress,
    is_finished: Callable[[], bool],
    report: Callable[[str], None],
) -> None:
    """Answer messages; a lost connection is made again, with longer and longer pauses."""
    private = ec.generate_private_key(ec.SECP384R1()) if server.key is None else read_private(server.key)
    check: ssl.SSLContext | bool = True if server.ca is None else ssl.create_default_context(cafile=str(server.ca))
    connection, pause = Connection(Signer(private)), FIRST_BACKOFF_SECONDS
    report(f"connecting to {server.address}")
    with httpx.Client(base_url=server.url, verify=check, timeout=ANSWER_SECONDS, trust_env=False) as http:
        http.headers.clear()  # 100 bytes of every message
        while not is_finished():
            try:
                while not is_finished():
                    connection.exchange(http, answer)
                    if not connection.is_reported:
                        report(f"connected to {server.address}; waiting for requests")
                        connection.is_reported = True
                    pause = FIRST_BACKOFF_SECONDS
                connection.send_last(http)
                return
            except (httpx.HTTPError, ConnectionRefused) as error:
                if is_finished():
                    return  # the server has ended, too
                if isinstance(error, ConnectionRefused):
                    connection = Connection(Signer(private))
                if pause >= REPORTED_BACKOFF_SECONDS or isinstance(error, ConnectionRefused):
                    report(f"no connection to {server.address} ({describe_error(error)}); next attempt in {pause:g} s")
                    connection.is_reported = False
                time.sleep(pause)
                pause = min(2 * pause, MAX_BACKOFF_SECONDS)


class Connection:
    """One session: the number of the message that was answered last, and the reply until the server has it."""

    def __init__(self, signer: Signer):
        self.signer, self.number, self.reply, self.is_reported = signer, "", b"", False

    def post(self, http: httpx.Client, path: str) -> httpx.Response:
        headers = self.signer.headers("POST", path, self.reply, self.number)
        response = http.post(path, content=self.reply, headers=headers)
        if response.status_code == httpx.codes.CONFLICT:  # the server has the reply, or does not wait for it
            self.number, self.reply = "", b""
            return self.post(http, path)
        if response.status_code == httpx.codes.REQUEST_ENTITY_TOO_LARGE:
            self.reply = pack(
                Payload({"refused": f"its reply has {len(self.reply)} bytes, more than the server reads"})
            )
            return self.post(http, path)
        if response.status_code not in (httpx.codes.OK, httpx.codes.NO_CONTENT):
            raise ConnectionRefused(f"{response.status_code}: {response.text[:200].strip()}")
        self.number, self.reply = "", b""
        return response

    def exchange(self, http: httpx.Client, answer: Callable[[bytes], bytes]) -> None:
        """Send the last reply, and answer the next message if there is one."""
        response = self.post(http, EXCHANGE)
        if number := response.headers.get(MESSAGE, ""):
            self.number, self.reply = number, answer(response.content)

    def send_last(self, http: httpx.Client) -> None:
        if self.number:
            self.post(http, LAST)


def describe_error(error: Exception) -> str:
    """Return why there is no connection, in one clause."""
    text = str(error).strip()
    if text.startswith("401: a request needs") or "not enrolled" in text:
        return "it does not accept our signature: is the key enrolled and not revoked?"
    return text.split("\n")[-1] or type(error).__name__
