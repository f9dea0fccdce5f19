"""Requests that are signed by enrolled keys, each accepted once.

A request has two headers beside its body:

    x-mooring-signed      PUBLIC_KEY SESSION NUMBER TIME MESSAGE DIGEST
    x-mooring-signature   of the method, the path and that line, by ECDSA on the curve P-384

PUBLIC_KEY is the client's, SESSION a random name of its process, NUMBER rises with every request of the session, TIME
is in seconds, MESSAGE names the message that the body answers ("-": none), and DIGEST is the SHA-256 of the body.
The line is checked before the body is read; the body is then compared with its digest. A session ends when its key
begins another one, and does not begin again.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from mooring.remote.keys import public_bytes, public_keys

EXCHANGE, LAST = "/v1/exchange", "/v1/last"
SIGNED, SIGNATURE = "x-mooring-signed", "x-mooring-signature"
MESSAGE = "x-mooring-message"  # the number of the message in a response
POLL_SECONDS = 20.0  # the longest wait for a message; clients wait 30 for an answer
NO_MESSAGE = "-"
MAX_CLOCK_SKEW_SECONDS = 60.0  # between a client's clock and the server's
MAX_FORMER_SESSIONS = 10_000  # of a key, after which it must be replaced: a client begins one per process
SIGNED_WITH = ec.ECDSA(hashes.SHA384())


class Refusal(Exception):
    """A request that is not accepted: a status of HTTP, a clause, and the public key that it states."""

    def __init__(self, status: int, why: str, key: bytes = b""):
        super().__init__(why)
        self.status, self.why, self.key = status, why, key


class SignedRequest(NamedTuple):
    key: bytes
    session: str
    number: int
    message: str  # that the body answers; empty where there is none
    digest: str


class Signer:
    """Signs the requests of one process."""

    def __init__(self, private: ec.EllipticCurvePrivateKey, clock: Callable[[], float] = time.time):
        self.private, self.clock = private, clock
        self.public = base64.b64encode(public_bytes(private.public_key())).decode()
        self.session, self.number = secrets.token_hex(8), 0

    def headers(self, method: str, path: str, body: bytes, message: str = "") -> dict[str, str]:
        self.number += 1
        digest = encode_digest(hashlib.sha256(body))
        line = f"{self.public} {self.session} {self.number} {self.clock():.3f} {message or NO_MESSAGE} {digest}"
        signature = self.private.sign(signed_bytes(method, path, line), SIGNED_WITH)
        return {SIGNED: line, SIGNATURE: base64.b64encode(signature).decode()}


def encode_digest(digest: hashlib._Hash) -> str:
    return base64.b64encode(digest.digest()).decode().rstrip("=")


def signed_bytes(method: str, path: str, line: str) -> bytes:
    return f"{method} {path}\n{line}".encode("ascii")


@dataclass
class KeyUse:
    """What the server remembers of a key: its session, the last number in it, and its former sessions."""

    session: str = ""
    number: int = 0
    former: set[str] = field(default_factory=set)


class Verifier:
    """Checks signatures; `allows` decides on public keys."""

    def __init__(self, allows: Callable[[bytes], bool], clock: Callable[[], float] = time.time):
        self.allows, self.clock, self.started_at = allows, clock, clock()
        self.used: dict[bytes, KeyUse] = {}

    def verify(self, method: str, path: str, line: str, signature: str) -> SignedRequest:
        """Return the request that a line describes. The cheap checks come first: a stranger costs no arithmetic."""
        key = b""
        try:
            public, session, number_text, when, message, digest = line.split(" ")
            key, number, age = base64.b64decode(public, validate=True), int(number_text), self.clock() - float(when)
            if not self.allows(key):
                raise Refusal(401, "this key is not enrolled", key)
            if not abs(age) <= MAX_CLOCK_SKEW_SECONDS:
                direction = "behind" if age > 0 else "ahead of"
                raise Refusal(401, f"its clock is {abs(age):.0f} s {direction} the server's", key)
            if float(when) < self.started_at - MAX_CLOCK_SKEW_SECONDS / 2:
                raise Refusal(401, "the request was signed before the server started", key)
            loaded = serialization.load_der_public_key(key)
            if not isinstance(loaded, ec.EllipticCurvePublicKey) or not isinstance(loaded.curve, ec.SECP384R1):
                raise Refusal(401, "the key is of another kind", key)
            loaded.verify(base64.b64decode(signature, validate=True), signed_bytes(method, path, line), SIGNED_WITH)
        except (ValueError, TypeError, binascii.Error, InvalidSignature, UnicodeError) as error:
            raise Refusal(401, "a request needs the signature of an enrolled key", key) from error
        self._count(key, session, number)
        return SignedRequest(key, session, number, "" if message == NO_MESSAGE else message, digest)

    def _count(self, key: bytes, session: str, number: int) -> None:
        """Accept each number of a session once, in rising order."""
        use = self.used.setdefault(key, KeyUse())
        if session in use.former or len(use.former) >= MAX_FORMER_SESSIONS:
            raise Refusal(401, "another connection with this key has begun", key)
        if session == use.session and number <= use.number:
            raise Refusal(401, "the request was sent before", key)
        if session != use.session:
            if use.session:
                use.former.add(use.session)
            use.session = session
        use.number = number


class EnrolledKeys:
    """The public keys that may join, by their bytes, from the keys' folder; without a folder, any key may."""

    def __init__(self, folder: Path | None):
        self.folder = folder
        self.stamp: tuple[tuple[str, int], ...] | None = None
        self.names: dict[bytes, str] = {}
        self.former: dict[bytes, str] = {}  # names of keys that were revoked since this process started
        self.scan()

    def scan(self) -> bool:
        """Read the folder again; return whether it has changed."""
        if self.folder is None:
            return False
        files = (self.folder / "clients").glob("*.pub")
        try:
            stamp = tuple(sorted((path.name, path.stat().st_mtime_ns) for path in files))
            if stamp == self.stamp:
                return False
            names = {public_bytes(key): name for name, key in public_keys(self.folder).items()}
        except (OSError, ValueError):
            return False  # a file is being written: the next scan reads it
        self.former |= {key: name for key, name in self.names.items() if key not in names}
        self.names, self.stamp = names, stamp
        return True

    def allows(self, key: bytes) -> bool:
        return self.folder is None or key in self.names

    @property
    def revoked(self) -> frozenset[str]:
        """Names whose key was revoked, and not replaced."""
        return frozenset(self.former.values()) - frozenset(self.names.values())

    def describe(self, refusal: Refusal) -> str:
        """Return a sentence about a client that was refused."""
        name = self.names.get(refusal.key)
        if name is not None:
            return f"client '{name}' was refused: {refusal.why}"
        if refusal.key in self.former:
            return f"client '{self.former[refusal.key]}' was refused: its key was revoked"
        return "a client whose key is not enrolled was refused"
