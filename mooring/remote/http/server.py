"""The server's HTTP service. It runs in a thread; the run is in the main thread, and messages stay in memory.

    POST /v1/exchange    the reply to the last message, if there is one; returns the next message, or nothing (204)
                         after POLL_SECONDS
    POST /v1/last        a reply after which the client leaves
    GET  /healthz        open
    GET  /metrics        with the token of the file metrics.token

Where a request comes from decides nothing: behind a port forwarder all come from this machine. The two POST requests
need a signature by an enrolled key (`signatures.py`), which is checked before the body is read; a body must answer a
message that this key was sent, and is bounded by the size of that message. The folder of enrolled keys is read again
every second, so that a revoked key is refused at once.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import hmac
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from cryptography.hazmat.primitives.asymmetric import ec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from mooring.core.errors import RequestError, WorkError
from mooring.remote import keys
from mooring.remote.http.mailbox import Channel, Mailbox
from mooring.remote.http.signatures import (
    EXCHANGE,
    LAST,
    MESSAGE,
    POLL_SECONDS,
    SIGNATURE,
    SIGNED,
    EnrolledKeys,
    Refusal,
    SignedRequest,
    Verifier,
    encode_digest,
)
from mooring.remote.transport import Node

HEALTH, METRICS = "/healthz", "/metrics"
MAX_CONNECTIONS = 1_024
MAX_HEADER_BYTES = 16_384
MAX_WAITING = 4  # requests of a key that wait for messages: the present one, and some whose connection was lost
FIRST_REQUEST_SECONDS = 20.0  # a connection that has sent no request by then is closed
KEEP_ALIVE_SECONDS = 75
PULL_SECONDS = 0.25  # for a first reply; then the caller looks for new nodes
RESCAN_SECONDS = 1.0
BODY_SECONDS, MIN_BODY_RATE = 30.0, 10_000  # a body may take so many seconds, and longer at that many bytes per second
SHUTDOWN_SECONDS = 2
MAX_REPORTED_REFUSALS = 100  # of each server


class HttpTransport:
    """The HTTP application, and the transport that the run uses from its own thread."""

    def __init__(self, enrolled: EnrolledKeys, metrics_token: str = "", report: Callable[[str], None] = print):
        self.enrolled, self.metrics_token, self.report = enrolled, metrics_token, report
        self.mailbox, self.verifier = Mailbox(), Verifier(enrolled.allows)
        self.counts: Counter[str] = Counter()
        self.gauges: dict[str, float] = {}
        self.refusals: queue.SimpleQueue[str] = queue.SimpleQueue()  # sentences for the operator
        self.described: set[tuple[bytes, str]] = set()
        self.revoked: frozenset[str] = frozenset()
        routes = [
            Route(EXCHANGE, self.exchange, methods=["POST"]),
            Route(LAST, self.exchange, methods=["POST"]),
            Route(HEALTH, self.health),
            Route(METRICS, self.metrics),
        ]
        handlers: dict[Any, Any] = {Refusal: self.refuse, HTTPException: self.refuse_path}
        self.app = Starlette(routes=routes, lifespan=self.lifespan, exception_handlers=handlers)

    # in the event loop

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.mailbox.loop = asyncio.get_running_loop()
        scanning = asyncio.create_task(self.scan_forever())
        yield
        scanning.cancel()
        for channel in list(self.mailbox.channels.values()):  # so that their requests end
            self.mailbox.close(channel)

    async def scan_forever(self) -> None:
        """Read the enrolled keys again, and end the sessions of those that are gone."""
        while True:
            await asyncio.sleep(RESCAN_SECONDS)
            if await asyncio.to_thread(self.enrolled.scan):
                self.mailbox.keep_keys(self.enrolled.names)

    async def refuse(self, request: Request, refusal: Any) -> Response:
        self.counts[f"refused_{refusal.status}"] += 1
        described = (refusal.key if refusal.key in self.enrolled.names else b"", refusal.why.split(":")[0][:20])
        if refusal.status == 401 and described not in self.described and len(self.described) < MAX_REPORTED_REFUSALS:
            self.described.add(described)
            self.refusals.put(self.enrolled.describe(refusal))
        return PlainTextResponse(refusal.why + "\n", refusal.status, {"connection": "close"})

    async def refuse_path(self, request: Request, error: Any) -> Response:
        return PlainTextResponse(f"{error.detail}\n", error.status_code, {"connection": "close"})

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"}, headers={"connection": "close"})

    async def metrics(self, request: Request) -> Response:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not self.metrics_token or not hmac.compare_digest(given.encode(), self.metrics_token.encode()):
            raise Refusal(403, "metrics need the token of the file metrics.token")
        return PlainTextResponse(self.format_metrics(), headers={"connection": "close"})

    def format_metrics(self) -> str:
        """Return all counts and gauges in Prometheus' text format, with all of their digits."""
        known = {f"mooring_http_{name}_total": float(n) for name, n in self.counts.items()}
        known |= {"mooring_connected_clients": float(len(self.mailbox.connected()))}
        known |= {f"mooring_{name}": value for name, value in self.gauges.items()}
        lines = []
        for name, value in sorted(known.items()):
            kind = "counter" if name.endswith("_total") else "gauge"
            lines.append(f"# TYPE {name} {kind}\n{name} {value:.15g}\n")
        return "".join(lines)

    async def exchange(self, request: Request) -> Response:
        """Take a node's reply, and give it its next message."""
        self.counts["requests"] += 1
        line, signature = request.headers.get(SIGNED, ""), request.headers.get(SIGNATURE, "")
        signed = self.verifier.verify(request.method, request.url.path, line, signature)
        channel = self.mailbox.open(hashlib.sha256(signed.key).hexdigest(), signed.key, signed.session)
        if channel.waiting >= MAX_WAITING:
            raise Refusal(429, "too many requests of this client wait")
        if signed.message:
            self.mailbox.answer(channel, signed.message, await self.read(request, channel, signed))
        elif request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers:
            raise Refusal(400, "a body must answer a message")
        if request.url.path == LAST:
            return Response(status_code=204, headers={"connection": "close"})
        received = await self.mailbox.next_message(channel, POLL_SECONDS)
        if channel.closed:
            raise Refusal(401, "this session is over", signed.key)
        if received is None:
            return Response(status_code=204)
        number, content = received
        self.counts["sent_bytes"] += len(content)
        return Response(content, headers={MESSAGE: number})

    async def read(self, request: Request, channel: Channel, signed: SignedRequest) -> bytes:
        """The body of a reply to a message of this channel: of bounded size and time, and one at a time."""
        if (message := channel.outbox.get(signed.message)) is None:
            raise Refusal(409, "this message is not waiting for a reply")
        if channel.reading:
            raise Refusal(429, "another reply of this client is being read")
        length = request.headers.get("content-length", "")
        if not length.isdigit() or int(length) > message.max_reply:
            raise Refusal(413, f"a reply states its length, of at most {message.max_reply} bytes")
        pieces, digest = [], hashlib.sha256()
        channel.reading = True
        try:
            async with asyncio.timeout(BODY_SECONDS + int(length) / MIN_BODY_RATE):
                async for piece in request.stream():
                    pieces.append(piece)
                    digest.update(piece)
        except (TimeoutError, ClientDisconnect) as error:
            raise Refusal(408, "the reply did not arrive in time") from error
        finally:
            channel.reading = False
        if encode_digest(digest) != signed.digest:
            raise Refusal(400, "the body is another one than the signed one")
        self.counts["received_bytes"] += int(length)
        return b"".join(pieces)

    # in the run's thread

    def nodes(self) -> list[Node]:
        """The connected nodes; the operator learns who was refused since the last call, and whose key was revoked."""
        for name in sorted(self.enrolled.revoked - self.revoked):
            self.report(f"the key of client '{name}' was revoked")
        self.revoked = self.enrolled.revoked
        while not self.refusals.empty():
            self.report(self.refusals.get())
        return [
            Node(channel.node, self.enrolled.names.get(channel.key, ""), channel.session)
            for channel in self.mailbox.connected()
        ]

    @property
    def public_keys(self) -> dict[str, ec.EllipticCurvePublicKey]:
        return {} if self.enrolled.folder is None else keys.public_keys(self.enrolled.folder)

    def push(self, messages: Iterable[tuple[str, bytes]]) -> list[str]:
        return [self.mailbox.push(node, content) for node, content in messages]

    def pull(self, numbers: Iterable[str]) -> dict[str, bytes]:
        return self.mailbox.pull(list(numbers), PULL_SECONDS)


class TimeoutProtocol(H11Protocol):
    """Closes a connection that has sent no request after FIRST_REQUEST_SECONDS."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.loop.call_later(FIRST_REQUEST_SECONDS, self.close_silent)

    def close_silent(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.close()


def open_socket(host: str, port: int) -> socket.socket:
    """A socket that listens; one sentence where the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, dualstack_ipv6=host == "::", backlog=MAX_CONNECTIONS)
    except OSError as error:
        why = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror or error})"
        raise RequestError(f"port {port} of {host} {why}; choose --port.") from error


@contextmanager
def listen(transport: HttpTransport, host: str, port: int, key_folder: Path | None) -> Iterator[None]:
    """Serve HTTP in a thread until the block ends."""
    with open_socket(host, port) as listening:
        config = uvicorn.Config(
            transport.app,
            http=TimeoutProtocol,
            ws="none",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            limit_concurrency=MAX_CONNECTIONS,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
            ssl_certfile=None if key_folder is None else key_folder / keys.SERVER,
            ssl_keyfile=None if key_folder is None else key_folder / keys.SERVER_KEY,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="http", daemon=True)
        thread.start()
        try:
            while not server.started:
                if not thread.is_alive():
                    raise WorkError(f"the server cannot listen on port {port} of {host}.")
                time.sleep(0.01)
            yield
        finally:
            server.should_exit = True
            thread.join(2 * SHUTDOWN_SECONDS)
