"""Secure sums: the server learns the weighted sum of the clients' vectors, and no single one of them.

    session   every client signs fresh X25519 and Ed25519 keys, its weight and its numbers of rows with its enrolled
              key; every client checks the signatures of all others against the keys that it was given (`peers.json`)
    masked    y_i = q(p_i x_i) + G(b_i) + sum_{j > i} G(k_ij) - sum_{j < i} G(k_ij)        modulo 2^64
    confirm   every client signs the list U of clients whose y arrived. It also encrypts what it will reveal (b_i, and
              k_ij for the clients j outside U) with a fresh key, and sends every peer of U a share of that key, with a
              commitment to it for the server
    unmask    with the signatures of more than two thirds of the cohort under the same U, client i of U reveals b_i, and
              k_ij for the clients j outside U
    recover   for clients of U that went away after they confirmed, their peers reveal the shares, under the same
              conditions; |U| - |U|//3 shares give the key back, fewer show nothing (Shamir 1979). A peer whose share
              does not fit the commitment is named, and so is a client whose committed shares give no key
    sum       sum_U y_i - sum_U G(b_i) - (the masks shared with clients outside U) = sum_U q(p_i x_i)

k_ij = HKDF(X25519 secret of i and j, session, attempt, digest of the request) and b_i are 32 random bytes; G is the
ChaCha20 key stream. The digest covers the model: where the server sends clients different ones, the masks that they
share do not cancel. A client reveals one sum for each round, whatever the server asks. q rounds to steps of range /
2^BITS.

Bonawitz, Ivanov, Kreuter, Marcedone, McMahan, Patel, Ramage, Segal, Seth. Practical secure aggregation for
privacy-preserving machine learning. CCS 2017 (the protocol for active servers). Departs: what is shared is not the
private key but the client's answer to unmask, after U is known, so that keys serve a whole session.

`SecureAggregator` is the server's part; `secure_client.py` has the client's.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import secrets
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from torch import Tensor

from mooring.core.errors import WorkError
from mooring.core.types import JsonObject, NamedValues
from mooring.remote.messages import (
    SECURE_CONFIRM,
    SECURE_EVALUATE,
    SECURE_KEYS,
    SECURE_PEERS,
    SECURE_RECOVER,
    SECURE_UNMASK,
    SECURE_UPDATE,
    ClientFailedError,
    Payload,
)
from mooring.runs.sections import FederationSection

if TYPE_CHECKING:
    from mooring.remote.messenger import Messenger

PROTOCOL_NAME = "mooring secure sum 4"
MIN_COHORT = 3  # with two, each learns the other's vector from the sum
MAX_BITS = 52  # of a rounded entry: float64 holds no more
SHARE_PRIME = 2**256 + 297  # the smallest prime above 2^256, so that a key of 32 bytes is an element of its field
NONCE_BYTES = 12
UNMASK_SECONDS = 30.0  # for clients to unmask a sum, where the run file has no deadline; then their peers are asked
LOSS_RANGE = 2.0**20  # losses are clamped to it, so that one client's divergence looks like that of all clients


def min_survivors(cohort: int) -> int:
    """More than two thirds of the cohort, and at least MIN_COHORT: two different lists cannot both be confirmed."""
    return max(MIN_COHORT, 2 * cohort // 3 + 1)


def share_threshold(survivors: int) -> int:
    """Return the shares that give a key back: a third of the survivors may go away after they confirmed."""
    return survivors - survivors // 3


def split_secret(secret: bytes, threshold: int, holders: int) -> list[int]:
    """Return the shares of a secret of 32 bytes: values of a random polynomial at 1, 2, ..., `holders`."""
    coefficients = [int.from_bytes(secret, "big")]
    coefficients += [secrets.randbelow(SHARE_PRIME) for _ in range(threshold - 1)]
    shares = []
    for x in range(1, holders + 1):
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * x + coefficient) % SHARE_PRIME
        shares.append(value)
    return shares


def join_shares(shares: Mapping[int, int]) -> bytes:
    """Return the secret of shares by place, by Lagrange interpolation at 0; ValueError where they do not fit."""
    total = 0
    for x, share in shares.items():
        numerator = denominator = 1
        for other in shares:
            if other != x:
                numerator = numerator * -other % SHARE_PRIME
                denominator = denominator * (x - other) % SHARE_PRIME
        total = (total + share * numerator * pow(denominator, -1, SHARE_PRIME)) % SHARE_PRIME
    if total >= 2**256:
        raise ValueError("the shares do not fit together")
    return total.to_bytes(32, "big")


def encrypt(key: bytes, content: bytes, context: object) -> str:
    nonce = secrets.token_bytes(NONCE_BYTES)
    return (nonce + ChaCha20Poly1305(key).encrypt(nonce, content, canonical_bytes(context))).hex()


def decrypt(key: bytes, text: str, context: object) -> bytes:
    """Return the content; ValueError where it was encrypted with another key or in another context."""
    data = bytes.fromhex(text)
    try:
        return ChaCha20Poly1305(key).decrypt(data[:NONCE_BYTES], data[NONCE_BYTES:], canonical_bytes(context))
    except InvalidTag as error:
        raise ValueError("encrypted with another key") from error


def share_places(survivors: Iterable[str], owner: str) -> dict[str, int]:
    """Return the place of each peer's share of the owner's key."""
    return {name: place for place, name in enumerate((n for n in sorted(survivors) if n != owner), start=1)}


def steps_per_unit(range_: float, cohort: int) -> float:
    """Steps of a rounded entry: entries up to `range_` fit, and so does the sum of a cohort."""
    bits = min(MAX_BITS, 62 - cohort.bit_length())
    return 2.0**bits / range_


def quantize(vector: np.ndarray, range_: float, cohort: int) -> np.ndarray:
    """[d] uint64: entries as whole numbers of steps, negative ones modulo 2^64."""
    return np.rint(vector * steps_per_unit(range_, cohort)).astype(np.int64).view(np.uint64)


def dequantize(total: np.ndarray, range_: float, cohort: int) -> np.ndarray:
    return total.view(np.int64).astype(np.float64) / steps_per_unit(range_, cohort)


def key_stream(seed: bytes, size: int) -> np.ndarray:
    """[size] uint64: the ChaCha20 key stream of a seed of 32 bytes."""
    encryptor = Cipher(algorithms.ChaCha20(seed, bytes(16)), mode=None).encryptor()
    return np.frombuffer(encryptor.update(bytes(8 * size)), dtype="<u8").astype(np.uint64)


def pair_seed(
    private: bytes, public: bytes, session: str, attempt: int, request: str, first: str, second: str
) -> bytes:
    """Return the 32 bytes that two clients share in one attempt, where both were sent the same request; those of other
    attempts and requests do not follow from them."""
    return _derive(private, public, session, {"pair": sorted((first, second)), "attempt": attempt, "request": request})


def share_key(private: bytes, public: bytes, session: str, attempt: int, sender: str, receiver: str) -> bytes:
    """Return the key that encrypts a share on its way from one client to another."""
    return _derive(private, public, session, {"share": [sender, receiver], "attempt": attempt})


def _derive(private: bytes, public: bytes, session: str, purpose: JsonObject) -> bytes:
    secret = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    info = canonical_bytes(purpose | {"protocol": PROTOCOL_NAME})
    return HKDF(hashes.SHA256(), 32, salt=bytes.fromhex(session), info=info).derive(secret)


def mask(values: np.ndarray, own: str, seed: bytes, pairs: Mapping[str, bytes]) -> np.ndarray:
    """[d] uint64: the values of client `own` under its own mask and those that it shares with its peers."""
    out = values + key_stream(seed, len(values))
    for other, shared in pairs.items():
        stream = key_stream(shared, len(values))
        out = out + stream if own < other else out - stream
    return out


def unmask(
    masked: Mapping[str, np.ndarray], seeds: Mapping[str, bytes], pairs: Mapping[str, Mapping[str, bytes]]
) -> np.ndarray:
    """[d] uint64: the sum of the survivors' values; `pairs[i][j]` is what i shares with j, which did not survive."""
    names = sorted(masked)
    total = np.zeros_like(masked[names[0]])
    for name in names:
        total = total + masked[name] - key_stream(seeds[name], len(total))
        for other, shared in pairs[name].items():
            stream = key_stream(shared, len(total))
            total = total - stream if name < other else total + stream
    return total


def canonical_bytes(value: object) -> bytes:
    """The bytes that are signed: sorted JSON."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def sign_survivors(private: bytes, value: object) -> str:
    """A signature under a list of survivors by a session's Ed25519 key: there is one per client and sum."""
    return base64.b64encode(Ed25519PrivateKey.from_private_bytes(private).sign(canonical_bytes(value))).decode()


def is_signed_by_session_key(public: bytes, value: object, signature: object) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(
            base64.b64decode(str(signature), validate=True), canonical_bytes(value)
        )
    except (InvalidSignature, ValueError):
        return False
    return True


def sign(private: ec.EllipticCurvePrivateKey, value: object) -> str:
    return base64.b64encode(private.sign(canonical_bytes(value), ec.ECDSA(hashes.SHA384()))).decode()


def is_signed(public: ec.EllipticCurvePublicKey, value: object, signature: object) -> bool:
    try:
        public.verify(
            base64.b64decode(str(signature), validate=True), canonical_bytes(value), ec.ECDSA(hashes.SHA384())
        )
    except (InvalidSignature, ValueError):
        return False
    return True


def survivor_list(run: str, session: str, attempt: int, survivors: Iterable[str]) -> JsonObject:
    """The statement that a client signs to confirm the clients of a sum."""
    return {
        "protocol": PROTOCOL_NAME,
        "run": run,
        "session": session,
        "attempt": attempt,
        "survivors": sorted(survivors),
    }


def request_digest(fields: NamedValues, tensors: Mapping[str, Tensor]) -> str:
    """What decides a client's vector: the same digest gives the same vector."""
    known = {name: fields.get(name) for name in ("label", "round", "base", "parts", "p", "index")}
    return digest_tensors(known, tensors)


def digest_tensors(about: object, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(canonical_bytes(about))
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().contiguous().numpy().data)
    return digest.hexdigest()


def common_digest(
    fields: NamedValues, tensors: Mapping[str, Tensor], cohort: list[str], start: NamedValues, w0: Tensor
) -> str:
    """Return a digest of what all clients of a sum must have been sent alike: another model for one of them changes the
    masks that it shares with the others."""
    known = {name: fields.get(name) for name in ("label", "round", "parts")}
    return digest_tensors([known, cohort, start], {**tensors, "w0": w0})


def bounded_loss(loss: float) -> float:
    """Return a loss as it is added up: a client's divergence looks like that of all clients."""
    return min(max(loss, 0.0), LOSS_RANGE) if math.isfinite(loss) else LOSS_RANGE


def flatten_message(tensors: Mapping[str, Tensor]) -> np.ndarray:
    """All entries of a message in one vector, in the order of its parts."""
    parts = [tensor.reshape(-1).double() for tensor in tensors.values()]
    return torch.cat(parts).numpy() if parts else np.zeros(0)


def split_vector(vector: np.ndarray, pattern: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The vector's entries as the parts of a message that looks like the pattern."""
    remaining, out = torch.from_numpy(np.array(vector)), {}
    for name, like in pattern.items():
        out[name] = remaining[: like.numel()].reshape(like.shape).to(like.dtype)
        remaining = remaining[like.numel() :]
    return out


MAX_ATTEMPTS = 10  # at a secure sum, for clients that went away to come back


class SecureSum(NamedTuple):
    """The sum over the clients that stayed to the end, and what each of them reports of its work."""

    total: np.ndarray
    survivors: tuple[str, ...]
    fields: dict[str, JsonObject]


class SecureAggregator:
    """Sums over the clients of one federation; `open` agrees on keys, once for each start of the server."""

    update, evaluate = SECURE_UPDATE, SECURE_EVALUATE

    def __init__(self, messenger: Messenger, names: tuple[str, ...], options: FederationSection):
        self.messenger, self.names, self.options = messenger, names, options
        self.session, self.number = "", 0
        self.weights: dict[str, float] = {}

    def open(self) -> None:
        """Let every client sign a key, and show every client what all have signed."""
        if self.session:
            return
        session = secrets.token_hex(16)
        about = {"session": session, "cohort": list(self.names)}
        replies = self.messenger.ask_all(SECURE_KEYS, {name: Payload(about) for name in self.names})
        statements = {}
        for name, reply in replies.items():
            statements[name] = {key: reply.fields[key] for key in ("statement", "signature")}
            self.weights[name] = float(reply.fields["statement"]["weight"])
        message = Payload({"session": session, "statements": statements})
        self.messenger.ask_all(SECURE_PEERS, dict.fromkeys(self.names, message))
        self.session = session

    def ask(self, what: str, requests: Mapping[str, Payload], range_: float, size: int, title: str) -> SecureSum:
        """The sum of what these clients answer, `size` numbers each; attempts that too few clients finish are
        repeated."""
        self.open()
        deadline = self.options.deadline
        why = "too few clients answered"
        for _ in range(MAX_ATTEMPTS):
            outcome = self._attempt(what, requests, range_, size, deadline, title)
            if not isinstance(outcome, str):
                return outcome
            why = outcome or why
            self.messenger.look_again()
        raise WorkError(f"{title}: no secure sum after {MAX_ATTEMPTS} attempts: {why}")

    def _attempt(
        self, what: str, requests: Mapping[str, Payload], range_: float, size: int, deadline: float, title: str
    ) -> SecureSum | str:
        self.number += 1
        cohort = sorted(requests)
        about = {"session": self.session, "attempt": self.number}
        enough = min_survivors(len(cohort))
        messages = {
            name: payload._replace(fields=payload.fields | about | {"cohort": cohort})
            for name, payload in requests.items()
        }
        answered = self.messenger.ask(what, messages, deadline=deadline, quorum=enough)
        masked = {name: masked_vector(name, reply) for name, reply in answered.replies.items()}
        for name, vector in sorted(masked.items()):
            if len(vector) != size:
                why = f"client '{name}' sent {len(vector)} numbers under masks, where {size} are right"
                self.messenger.dismiss(name, why)
                del masked[name]
        if len(masked) < enough:
            return next(iter(answered.missing.values()), "")
        survivors, confirmed = self._confirm(about, sorted(masked), enough, deadline)
        if unsigned := [name for name in survivors if name not in confirmed]:
            return f"client '{unsigned[0]}' did not confirm the clients of the sum"
        signatures = {name: str(reply.fields["signature"]) for name, reply in confirmed.items()}
        about |= {"survivors": survivors, "signatures": signatures}
        revealed = self._unmask(about, survivors, confirmed, title)
        masked = {name: masked[name] for name in survivors}
        seeds = {name: parse_seed(name, answer.get("seed")) for name, answer in revealed.items()}
        outside = [name for name in cohort if name not in survivors]
        pairs = {
            name: {other: parse_seed(name, answer.get("pairs", {}).get(other)) for other in outside}
            for name, answer in revealed.items()
        }
        total = dequantize(unmask(masked, seeds, pairs), range_, len(cohort))
        return SecureSum(total, tuple(survivors), {name: answered.replies[name].fields for name in survivors})

    def _confirm(
        self, about: JsonObject, survivors: list[str], enough: int, deadline: float
    ) -> tuple[list[str], dict[str, Payload]]:
        """Return the confirmations of a list of survivors. Clients that confirmed an earlier list for the same sum,
        before the server was restarted, confirm that one only."""
        for _ in range(2):
            asked = Payload(about | {"survivors": survivors})
            answered = self.messenger.ask(
                SECURE_CONFIRM, dict.fromkeys(survivors, asked), deadline=deadline, quorum=enough
            )
            earlier = [reply.fields["confirmed"] for reply in answered.replies.values() if "confirmed" in reply.fields]
            if not earlier:
                return survivors, answered.replies
            known = sorted(str(name) for name in earlier[0])
            if not set(known) <= set(survivors):
                return survivors, {}
            survivors = known
        return survivors, {}

    def _unmask(
        self, about: JsonObject, survivors: list[str], confirmed: Mapping[str, Payload], title: str
    ) -> dict[str, NamedValues]:
        """Return what each survivor reveals; what those reveal that went away is recovered from their peers' shares."""
        threshold = share_threshold(len(survivors))
        deadline = min(UNMASK_SECONDS, self.options.deadline)
        opened = self.messenger.ask(
            SECURE_UNMASK, dict.fromkeys(survivors, Payload(about)), deadline=deadline, quorum=threshold
        )
        revealed: dict[str, NamedValues] = {name: reply.fields for name, reply in opened.replies.items()}
        absent = [name for name in survivors if name not in revealed]
        if not absent:
            return revealed
        self.messenger.report(f"recovering the masks of {', '.join(absent)} from the shares of {len(revealed)} clients")
        requests = {
            holder: Payload(
                about
                | {
                    key: {name: confirmed[name].fields[key][holder] for name in absent}
                    for key in ("shares", "commitments")
                }
            )
            for holder in revealed
        }
        answered = self.messenger.ask(SECURE_RECOVER, requests, deadline=deadline, quorum=threshold)
        for name in absent:
            returned = {holder: reply.fields["shares"][name] for holder, reply in answered.replies.items()}
            shares = {holder: int(share, 16) for holder, share in returned.items() if share is not None}
            answer = recover_answer(str(confirmed[name].fields["sealed"]), shares, survivors, name)
            if answer is None:
                false = [holder for holder, share in returned.items() if share is None]
                why = (
                    f"{len(shares)} clients returned shares of its key, and {threshold} are needed"
                    if len(shares) < threshold
                    else "the shares of its key that it committed to are false"
                )
                why += f"; it sent {', '.join(false)} shares other than those that it committed to" if false else ""
                raise WorkError(
                    f"{title}: client '{name}' confirmed a secure sum and left, and its masks cannot be recovered: "
                    f"{why}. Restart the client with the state that it had, or start a new run without it."
                )
            revealed[name] = answer
        return revealed


def recover_answer(sealed: str, shares: Mapping[str, int], survivors: list[str], owner: str) -> NamedValues | None:
    """Return the owner's answer to unmask from its peers' shares, which fit its commitments; None where they are too
    few or give no key."""
    places, threshold = share_places(survivors, owner), share_threshold(len(survivors))
    if len(shares) < threshold:
        return None
    try:
        key = join_shares({places[holder]: shares[holder] for holder in sorted(shares)[:threshold]})
        answer = json.loads(decrypt(key, sealed, owner))
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


def masked_vector(name: str, reply: Payload) -> np.ndarray:
    vector = reply.tensors.get("masked")
    if vector is None or vector.dim() != 1:
        raise ClientFailedError(name, f"client '{name}' sends no masked vector.")
    return vector.numpy().astype(np.int64).view(np.uint64)


def parse_seed(name: str, value: object) -> bytes:
    try:
        seed = bytes.fromhex(str(value))
    except ValueError:
        seed = b""
    if len(seed) != 32:
        raise ClientFailedError(name, f"client '{name}' does not reveal the seed of a mask that it confirmed.")
    return seed
