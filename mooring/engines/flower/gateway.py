"""The SuperLink's gateway: an ASGI application that decides, from a request's headers, whether it is read at all.

    /health, /healthz        open
    /v1/fleet/...            clients: a signature by an enrolled key, or the session that such a signature opened
    /metrics                 with the token of the file metrics.token
    all others               the server's own processes: with the secret that `mooring serve` gave them

The origin of a request decides nothing: behind a port forwarder every request is local. A request without a signature
or a secret is refused before its body is read. The enrolled keys are those of the keys' folder, read again every
second, so that a revoked key is refused at once. Embedded nodes exchange messages here (`mailbox.py`); all others are
Flower's.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import datetime
import hmac
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as HttpMessage

from mooring.core.types import JsonObject
from mooring.engines.flower.mailbox import Channel, Mailbox
from mooring.engines.flower.messages import join_frames, split_frames

FLEET, OWN = "/v1/fleet/", "/v1/mooring/"
HEALTH = ("/health", "/healthz")
METRICS = "/metrics"
OPEN_CHANNEL, EXCHANGE = "/v1/fleet/mooring/open", "/v1/fleet/mooring/exchange"
SECRET, SESSION = "x-mooring-secret", "x-mooring-session"
MAX_BODY_BYTES = 64_000_000  # Flower cuts models into pieces of 5 MiB
MAX_BYTES_PER_KEY = 2 * MAX_BODY_BYTES  # of all bodies that are being read, so that a client cannot fill the memory
MAX_CONNECTIONS = 1_024
FIRST_REQUEST_SECONDS = 20.0  # a connection that has sent no request by then is closed
POLL_SECONDS = 20.0  # the longest wait for a message; clients wait 30 for an answer
RESCAN_SECONDS = 1.0
CLOCK_AHEAD, CLOCK_BEHIND = 5.0, 305.0  # seconds that a client's clock may be off, as Flower has it
KEY, WHEN, SIGNATURE = "flwr-public-key", "flwr-timestamp", "flwr-signature"


class EnrolledKeys:
    """The public keys that may join, by their PEM bytes, from the keys' folder; without a folder, any key may."""

    def __init__(self, folder: Path | None):
        self.folder = folder
        self.stamp: tuple[tuple[str, int], ...] | None = None
        self.names: dict[bytes, str] = {}
        self.scan()

    def scan(self) -> bool:
        """Read the folder again; return whether it has changed."""
        from mooring.engines.flower.keys import enrolled_keys

        if self.folder is None:
            return False
        stamp = tuple(sorted((path.name, path.stat().st_mtime_ns) for path in (self.folder / "clients").glob("*.pub")))
        if stamp == self.stamp:
            return False
        try:
            self.names = {key: name for name, key in enrolled_keys(self.folder).items()}
        except (OSError, ValueError):
            return False  # a file is being written: the next scan reads it
        self.stamp = stamp
        return True

    def allows(self, key: bytes) -> bool:
        return self.folder is None or key in self.names


def is_equal(given: str, secret: str) -> bool:
    """Compare two texts in a time that does not depend on where they differ."""
    return hmac.compare_digest(given.encode(), secret.encode())


class Refusal(Exception):
    def __init__(self, status: int, why: str):
        super().__init__(why)
        self.status, self.why = status, why


def header(scope: Scope, name: str) -> str:
    wanted = name.encode()
    return next((value.decode("latin-1") for key, value in scope.get("headers", ()) if key == wanted), "")


def signed_key(scope: Scope, allows: Callable[[bytes], bool], now: float) -> bytes:
    """The public key that signed the request's time; Refusal where it is not enrolled, or the signature is not right.

    The cheap checks come first: a stranger costs no arithmetic."""
    try:
        key = base64.b64decode(header(scope, KEY)[:2000], validate=True)
        signature = base64.b64decode(header(scope, SIGNATURE)[:2000], validate=True)
        when = header(scope, WHEN)[:64]
        age = now - datetime.datetime.fromisoformat(when).timestamp()
        if not key or not allows(key):
            raise Refusal(401, "this key is not enrolled")
        if not -CLOCK_AHEAD < age < CLOCK_BEHIND:
            raise Refusal(401, "the time of the signature is too far from the server's")
        public = serialization.load_pem_public_key(key)
        if not isinstance(public, ec.EllipticCurvePublicKey):
            raise Refusal(401, "the key is of another kind")
        public.verify(signature, when.encode("ascii"), ec.ECDSA(hashes.SHA256()))
    except (ValueError, TypeError, binascii.Error, InvalidSignature, UnicodeError) as error:
        raise Refusal(401, "a request needs the signature of an enrolled key") from error
    return key


class Gateway:
    """`node_of` gives the node of a public key, `note` is called for refused keys (key, time)."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        secret: str,
        keys: EnrolledKeys,
        node_of: Callable[[bytes], int | None],
        note: Callable[[str, str], None] = lambda key, when: None,
        metrics_token: str = "",
        max_body: int = MAX_BODY_BYTES,
    ):
        if not secret:
            raise ValueError("the gateway needs a secret")
        self.app, self.secret, self.keys, self.node_of, self.note = app, secret, keys, node_of, note
        self.metrics_token, self.max_body = metrics_token, max_body
        self.mailbox = Mailbox()
        self.counts: Counter[str] = Counter()
        self.gauges: dict[str, float] = {}
        self.reading: Counter[bytes] = Counter()  # bytes of bodies that are being read, by key
        self.scanning: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            self.scanning = asyncio.create_task(self.scan_forever())
            await self.app(scope, receive, send)
            self.scanning.cancel()
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        self.counts["requests"] += 1
        try:
            await self.route(scope, receive, send)
        except Refusal as refusal:
            self.counts[f"refused {refusal.status}"] += 1
            if refusal.status == 401:
                self.note(header(scope, KEY), header(scope, WHEN))
            await respond(send, refusal.status, refusal.why.encode() + b"\n", kind="text/plain", close=True)

    async def route(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path in HEALTH:
            await respond(send, 200, b'{"status":"ok"}\n', kind="application/json")
        elif path == METRICS:
            self.check_token(scope)
            await respond(send, 200, self.metrics().encode(), kind="text/plain; version=0.0.4")
        elif path.startswith(FLEET) and ".." not in path:
            if path == EXCHANGE:
                channel = self.session_of(scope)
                self.check_length(scope)
                with self.limit_body(receive, channel.key) as piece:
                    body = await self.body_of(piece)
                await self.exchange(channel, body, send)
                return
            key = signed_key(scope, self.keys.allows, time.time())
            self.check_length(scope)
            if path == OPEN_CHANNEL:
                await self.open_channel(key, send)
                return
            with self.limit_body(receive, key) as piece:
                await self.app(scope, piece, self.note_refusals(scope, send))
        elif not is_equal(header(scope, SECRET), self.secret):
            raise Refusal(403, "this interface is for the server's own processes")
        elif path.startswith(OWN):
            await self.own_request(path.removeprefix(OWN), await self.body_of(receive), send)
        else:
            await self.app(scope, receive, send)

    def session_of(self, scope: Scope) -> Channel:
        channel = self.mailbox.sessions.get(header(scope, SESSION))
        if channel is None or not self.keys.allows(channel.key):
            raise Refusal(401, "this session is over")
        return channel

    def check_length(self, scope: Scope) -> None:
        length = header(scope, "content-length")
        if length and (not length.isdigit() or int(length) > self.max_body):
            raise Refusal(413, "too large")

    def check_token(self, scope: Scope) -> None:
        given = header(scope, "authorization").removeprefix("Bearer ")
        if not self.metrics_token or not is_equal(given, self.metrics_token):
            raise Refusal(403, "metrics need the token of the file metrics.token")

    @contextmanager
    def limit_body(self, receive: Receive, key: bytes) -> Iterator[Receive]:
        """Yield a request's pieces, cut off as if its sender had gone where they are too large, or all that its key
        sends at once is: not every request states a length."""
        total = 0

        async def piece() -> HttpMessage:
            nonlocal total
            message = await receive()
            size = len(message.get("body", b""))
            total += size
            self.reading[key] += size
            is_small = total <= self.max_body and self.reading[key] <= max(MAX_BYTES_PER_KEY, self.max_body)
            return message if is_small else {"type": "http.disconnect"}

        try:
            yield piece
        finally:
            self.reading[key] -= total

    async def body_of(self, receive: Receive) -> bytes:
        pieces = []
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise Refusal(413, "too large, or cut off")
            pieces.append(message.get("body", b""))
            if not message.get("more_body"):
                return b"".join(pieces)

    def note_refusals(self, scope: Scope, send: Send) -> Send:
        """Notes which signatures Flower refuses."""

        async def pass_on(message: HttpMessage) -> None:
            if message.get("status") == 401:
                self.note(header(scope, KEY), header(scope, WHEN))
            await send(message)

        return pass_on

    async def open_channel(self, key: bytes, send: Send) -> None:
        node = await run_in_threadpool(self.node_of, key)
        if node is None:
            raise Refusal(401, "this key has no node")
        session = self.mailbox.open(node, key)
        await respond(send, 200, json.dumps({"session": session}).encode(), kind="application/json")

    async def exchange(self, channel: Channel, body: bytes, send: Send) -> None:
        """Take a node's reply, and give it its next message."""
        leaving = False
        if body:
            try:
                about, (reply,) = split_frames(body)
                leaving = bool(about.get("leave"))
                self.mailbox.answer(channel, str(about["message"]), reply)
            except (ValueError, KeyError, RecursionError) as error:
                raise Refusal(400, "a reply must be one frame") from error
            self.counts["bytes received"] += len(body)
        next_message = await self.mailbox.next_message(channel, 0.0 if leaving else POLL_SECONDS)
        if channel.closed:
            raise Refusal(401, "this session is over")
        if next_message is None:
            await respond(send, 204, b"")
            return
        out = join_frames({"message": next_message[0]}, [next_message[1]])
        self.counts["bytes sent"] += len(out)
        await respond(send, 200, out)

    async def own_request(self, what: str, body: bytes, send: Send) -> None:
        """The server's app pushes messages and pulls replies; `mooring serve` reports numbers for /metrics."""
        about, pieces = split_frames(body)
        out: JsonObject = {}
        contents: list[bytes] = []
        if what == "push":
            reached = [
                self.mailbox.push(int(node), message, piece)
                for node, message, piece in zip(about["nodes"], about["messages"], pieces, strict=True)
            ]
            out["reached"] = reached
        elif what == "pull":
            replies = await self.mailbox.pull(list(about["messages"]), min(float(about["wait"]), POLL_SECONDS))
            out["messages"], contents = list(replies), list(replies.values())
        elif what == "forget":
            self.mailbox.forget(about["messages"])
        elif what == "gauges":
            self.gauges |= {str(name): float(value) for name, value in about["gauges"].items()}
        else:
            raise Refusal(404, "unknown")
        await respond(send, 200, join_frames(out, contents))

    async def scan_forever(self) -> None:
        """Read the enrolled keys again, and end the sessions of those that are gone."""
        while True:
            await asyncio.sleep(RESCAN_SECONDS)
            if await run_in_threadpool(self.keys.scan):
                self.mailbox.keep_keys(self.keys.names)

    def metrics(self) -> str:
        """Return all counts and gauges in Prometheus' text format, with all of their digits."""
        known = {f"mooring_gateway_{name.replace(' ', '_')}_total": float(n) for name, n in self.counts.items()}
        known |= {"mooring_gateway_sessions": float(len(self.mailbox.sessions))}
        known |= {f"mooring_{name}": value for name, value in self.gauges.items()}
        lines = []
        for name, value in sorted(known.items()):
            kind = "counter" if name.endswith("_total") else "gauge"
            lines.append(f"# TYPE {name} {kind}\n{name} {value:.15g}\n")
        return "".join(lines)


async def respond(send: Send, status: int, body: bytes, *, kind: str = "", close: bool = False) -> None:
    headers = [(b"content-length", str(len(body)).encode())]
    headers += [(b"content-type", kind.encode())] if kind else []
    headers += [(b"connection", b"close")] if close else []
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def make_timeout_protocol() -> type[asyncio.Protocol]:
    """Uvicorn's protocol, which closes a connection that has sent no request after FIRST_REQUEST_SECONDS."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class TimeoutProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        def connection_made(self, transport: object) -> None:
            super().connection_made(transport)
            self.loop.call_later(FIRST_REQUEST_SECONDS, self.close_silent)

        def close_silent(self) -> None:
            if self.cycle is None and not self.transport.is_closing():
                self.transport.close()

    return TimeoutProtocol
