"""Masked sums of a fixed cohort, bound to everything that was said before.

    statement   each client signs the run, the plan, its name, its columns and a fresh X25519 key with its enrolled key
    cohort      the statements of all clients, in the order of their names; every client checks all signatures
    digest      d_0 = H(cohort),  d_s = H(d_{s-1}, step s, the total of step s - 1)
    part        x_i = the client's numbers, 1, and their tag sum_k r_k x_ik modulo 2^128, in words of 32 bits
    answer      y_i = x_i + sum_{j > i} G(k_ij, d_s) - sum_{j < i} G(k_ij, d_s)          modulo 2^64
    total       sum_i y_i = sum_i x_i

k_ij is what X25519 gives the clients i and j, and G the ChaCha20 key stream under HKDF(k_ij; i, j, d_s). Masks cancel
only where all clients have the same digest: if the server shows two clients different cohorts or totals, or leaves one
out, what it adds up is random. The weights r of tags are a key stream of a secret that the clients share and the server
does not have, another one at each step: a total that the server has changed, even if in the same way for all clients,
has a wrong tag (with the right one by chance once in 2^64 / m cases), and clients refuse it. No key is ever revealed:
there is no step in which clients unmask others, so that a client that goes away ends the run. A client answers each
step once. Its answer, or that it cannot answer, is stored before it is sent; asked for the same step with the same
total it sends the same bytes, and with another total it refuses.

What this does not do: a client can spoil every total by random numbers, and nobody can name it; all clients but one
together learn the last one's part; a client and the server together can change totals.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from mooring.core.errors import RequestError
from mooring.core.summing import Sum, to_integers
from mooring.core.types import JsonObject
from mooring.remote.messages import printable
from mooring.runs.atomic_files import make_synced_folder, read_json, write_json

PROTOCOL = "mooring masked sums 1"
WEIGHT_KEYS = {"sizes", "weight"}  # of statements of fits
MIN_CLIENTS = 3  # with two, each learns the other's part from the total
NONCE_BYTES, SECRET_BYTES, KEY_BYTES = 12, 32, 32
TAG_WORDS, WORD_BITS = 4, 32  # of a tag: their sums over clients stay below 2^64
PUBLIC_KEY = re.compile(f"[0-9a-f]{{{2 * KEY_BYTES}}}")


def canonical_bytes(value: object) -> bytes:
    """Return the one JSON text of a value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


class Cohort(NamedTuple):
    """The clients of a run, as all of them have signed it."""

    statements: tuple[JsonObject, ...]

    @property
    def names(self) -> list[str]:
        return [str(statement["name"]) for statement in self.statements]

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(canonical_bytes([PROTOCOL, *self.statements])).digest()


def make_statement(run: str, plan: str, name: str, columns: Sequence[str], public: bytes) -> JsonObject:
    """Return what a client signs."""
    return {
        "protocol": PROTOCOL,
        "run": run,
        "plan": plan,
        "name": name,
        "columns": list(columns),
        "public": public.hex(),
    }


def is_statement(value: object) -> bool:
    """Return whether a value has the form of a statement."""
    keys = {"protocol", "run", "plan", "name", "columns", "public"}
    if not isinstance(value, dict) or set(value) not in (keys, keys | WEIGHT_KEYS):
        return False
    columns = value["columns"]
    texts = [text for key, text in value.items() if key in keys - {"columns"}]
    if not isinstance(columns, list) or not all(isinstance(text, str) for text in [*texts, *columns]):
        return False
    return PUBLIC_KEY.fullmatch(value["public"]) is not None


def check_cohort(statements: Sequence[JsonObject], own: JsonObject, min_clients: int) -> Cohort:
    """Return the cohort; refuse one without this client, with a name twice, or of other runs, plans or columns."""
    if not all(map(is_statement, statements)):
        raise RequestError("the cohort has something that is not a client's statement.")
    names = [statement["name"] for statement in statements]
    if names != sorted(set(names)):
        raise RequestError("the cohort must name every client once, in the order of the names.")
    if own not in statements:
        raise RequestError("the cohort does not have this client's own statement.")
    if len(names) < max(min_clients, MIN_CLIENTS):
        raise RequestError(
            f"the cohort has {len(names)} clients, and at least {max(min_clients, MIN_CLIENTS)} must be in it."
        )
    for statement in statements:
        if set(statement) != set(own):
            raise RequestError(f"client '{statement['name']}' has signed another kind of statement.")
        for what in ("protocol", "run", "plan"):
            if statement[what] != own[what]:
                raise RequestError(f"client '{statement['name']}' takes part with another {what} than this client.")
        if statement["columns"] != own["columns"]:
            raise RequestError(describe_other_columns(statement, own))
    if len({statement["public"] for statement in statements}) < len(names):
        raise RequestError("two clients of the cohort have the same key.")
    return Cohort(tuple(statements))


def describe_other_columns(statement: JsonObject, own: JsonObject) -> str:
    """Return how the columns of a client differ from this client's."""
    theirs, ours = list(statement["columns"]), list(own["columns"])
    extra, missing = [c for c in theirs if c not in ours], [c for c in ours if c not in theirs]
    what = "has its columns in another order"
    if extra or missing:
        parts = [f"has column '{c}'" for c in extra[:1]] + [f"lacks column '{c}'" for c in missing[:1]]
        what = printable(" and ".join(parts), 200)
    return f"client '{statement['name']}' {what}, unlike client '{own['name']}'; all must have the same columns."


class Transcript:
    """A client's or the server's view of what was said: its digest after each total."""

    def __init__(self, cohort: Cohort):
        self.cohort, self.digest, self.steps = cohort, cohort.digest, 0

    def add(self, step: str, size: int, last_total: np.ndarray | None) -> bytes:
        """Return the digest of the next step, of `size` numbers, after the total of the step before."""
        before = b"" if last_total is None else np.ascontiguousarray(last_total, dtype="<u8").tobytes()
        about = canonical_bytes([self.steps, step, size, len(before)])
        self.digest = hashlib.sha256(self.digest + about + before).digest()
        self.steps += 1
        return self.digest


def key_stream(key: bytes, size: int) -> np.ndarray:
    """Return [size] uint64."""
    stream = np.zeros(size, dtype="<u8")  # encrypted in place: vectors may be long
    buffer = stream.view(np.uint8).data
    Cipher(algorithms.ChaCha20(key, bytes(16)), None).encryptor().update_into(buffer, buffer)
    return stream


def derive(secret: bytes, purpose: bytes) -> bytes:
    return HKDF(hashes.SHA256(), SECRET_BYTES, None, purpose).derive(secret)


def pair_secrets(private: X25519PrivateKey, cohort: Cohort, name: str) -> dict[str, bytes]:
    """Return what this client shares with each other client."""
    out = {}
    for statement in cohort.statements:
        if statement["name"] == name:
            continue
        try:
            peer = X25519PublicKey.from_public_bytes(bytes.fromhex(str(statement["public"])))
            out[str(statement["name"])] = private.exchange(peer)
        except ValueError as error:
            raise RequestError(f"the key of client '{statement['name']}' is no X25519 key.") from error
    return out


def derive_for_pair(secret: bytes, purpose: str, name: str, peer: str, digest: bytes) -> bytes:
    """Return a key of two clients by their names: two peers with the same X25519 key in two spellings have two."""
    return derive(secret, canonical_bytes([purpose, *sorted([name, peer])]) + digest)


def mask(values: np.ndarray, name: str, secrets_by_peer: Mapping[str, bytes], digest: bytes) -> np.ndarray:
    """Return [k] uint64: the values with the masks of all pairs under this digest."""
    out = values.astype(np.uint64)
    for peer, secret in secrets_by_peer.items():
        stream = key_stream(derive_for_pair(secret, "mask", name, peer, digest), len(out))
        (np.add if peer > name else np.subtract)(out, stream, out=out)
    return out


def make_tag(values: np.ndarray, common: bytes, digest: bytes) -> int:
    """Return the weighted sum of whole numbers modulo 2^128, with the weights of a step."""
    bits = TAG_WORDS * WORD_BITS
    weights = key_stream(derive(common, b"tag" + digest), 2 * len(values)).reshape(-1, 2)
    used = np.flatnonzero(values)
    signed = values.astype(np.uint64).view(np.int64)[used].tolist()
    return sum(x * (high << 64 | low) for x, (high, low) in zip(signed, weights[used].tolist())) % 2**bits


def add_tag(values: np.ndarray, common: bytes, digest: bytes) -> np.ndarray:
    """Return the values with the words of their tag."""
    tag = make_tag(values, common, digest)
    words = [tag >> WORD_BITS * k & 2**WORD_BITS - 1 for k in range(TAG_WORDS)]
    return np.concatenate([values, np.array(words, np.uint64)])


def remove_tag(total: np.ndarray) -> np.ndarray:
    """Return a total as the server has it, which cannot check the tag."""
    return total[:-TAG_WORDS]


def check_tag(total: np.ndarray, common: bytes, digest: bytes) -> np.ndarray:
    """Return the total without its tag; refuse one that is not the sum of the clients' parts."""
    values, words = remove_tag(total), total[-TAG_WORDS:].tolist()
    tag = sum(word << WORD_BITS * k for k, word in enumerate(words)) % 2 ** (TAG_WORDS * WORD_BITS)
    if tag != make_tag(values, common, digest):
        raise RequestError("a total is not the sum of what the clients have sent: it was changed on its way.")
    return values


def seal(secret: bytes, name: str, secrets_by_peer: Mapping[str, bytes], cohort: Cohort) -> dict[str, str]:
    """Return the cohort's common secret, encrypted for each peer; the server cannot read it."""
    out = {}
    for peer, shared in secrets_by_peer.items():
        cipher = ChaCha20Poly1305(derive_for_pair(shared, "seal", name, peer, cohort.digest))
        out[peer] = cipher.encrypt(bytes(NONCE_BYTES), secret, cohort.digest).hex()  # the key serves once
    return out


def unseal(text: str, name: str, sender: str, shared: bytes, cohort: Cohort) -> bytes:
    """Return the common secret; refuse a text that another key has encrypted."""
    try:
        cipher = ChaCha20Poly1305(derive_for_pair(shared, "seal", name, sender, cohort.digest))
        return cipher.decrypt(bytes(NONCE_BYTES), bytes.fromhex(text), cohort.digest)
    except Exception as error:  # untrusted bytes
        raise RequestError(
            f"the common secret of client '{sender}' cannot be read: that client has sent another one, or it was "
            "changed on its way."
        ) from error


class Journal:
    """What a client has answered: a folder with a file for each step, written before the answer is sent."""

    def __init__(self, folder: Path):
        self.folder = folder
        make_synced_folder(folder)

    def read(self, number: int) -> JsonObject | None:
        path = self.folder / f"{number}.json"
        return read_json(path) if path.exists() else None

    def write(self, number: int, record: JsonObject) -> None:
        write_json(self.folder / f"{number}.json", record)


class MaskedAnswers:
    """A client's part in masked sums: it answers each step once."""

    def __init__(
        self, cohort: Cohort, name: str, secrets_by_peer: Mapping[str, bytes], common: bytes, journal: Journal
    ):
        self.cohort, self.name, self.secrets, self.common = cohort, name, dict(secrets_by_peer), common
        self.journal, self.transcript = journal, Transcript(cohort)

    def recall(self, number: int, total: np.ndarray | None) -> JsonObject | None:
        """Return what was stored of a step; refuse the same step after another total."""
        known = self.journal.read(number)
        if known is not None and known["total"] != to_text(total):
            raise RequestError(
                f"client '{self.name}' has answered step {number} after another total; it answers each step once."
            )
        return known

    def check_total(self, total: np.ndarray) -> np.ndarray:
        """Return the total of the last step without its tag."""
        return check_tag(total, self.common, self.transcript.digest)

    def answer(self, number: int, part: Sum, total: np.ndarray | None) -> np.ndarray:
        """Return the masked part of the next step; the stored one, if it was answered before a restart."""
        if number != self.transcript.steps:
            raise RequestError(f"client '{self.name}' is at step {self.transcript.steps}, not at step {number}.")
        values = to_integers(part)
        digest = self.transcript.add(part.step.name, len(values), total)
        if (known := self.recall(number, total)) is not None:
            return from_text(str(known["answer"]))
        out = mask(add_tag(values, self.common, digest), self.name, self.secrets, digest)
        self.journal.write(number, {"step": part.step.name, "total": to_text(total), "answer": to_text(out)})
        return out


def to_text(numbers: np.ndarray | None) -> str:
    return "" if numbers is None else numbers.astype("<u8").tobytes().hex()


def from_text(text: str) -> np.ndarray:
    return np.frombuffer(bytes.fromhex(text), dtype="<u8")
