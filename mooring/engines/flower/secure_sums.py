"""Secure sums: the server learns the weighted sum of the clients' vectors, and no single one of them.

    session   every client signs fresh X25519 and Ed25519 keys, its weight and its numbers of rows with its enrolled
              key; every client checks the signatures of all others against the keys that it was given (`peers.json`)
    masked    y_i = q(p_i x_i) + G(b_i) + sum_{j > i} G(k_ij) - sum_{j < i} G(k_ij)        modulo 2^64
    confirm   every client signs the list U of clients whose y arrived
    unmask    with the signatures of more than two thirds of the cohort under the same U, client i of U sends b_i, and
              k_ij for the clients j that are not in U
    sum       sum_U y_i - sum_U G(b_i) - (the masks shared with clients outside U) = sum_U q(p_i x_i)

k_ij = HKDF(X25519 secret of i and j, session, attempt) and b_i are 32 random bytes; G is the ChaCha20 key stream. A
client reveals one sum for each round, whatever the server asks. q rounds to steps of range / 2^BITS.

Bonawitz, Ivanov, Kreuter, Marcedone, McMahan, Patel, Ramage, Segal, Seth. Practical secure aggregation for
privacy-preserving machine learning. CCS 2017 (the protocol for active servers). Departs: no secret sharing; a client
that confirmed and went away is waited for, because its seed is known to nobody else.

This module has the pure functions; `secure_client.py` and `secure_server.py` have the two parties.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from torch import Tensor

PROTOCOL_NAME = "mooring secure sum 1"
MIN_COHORT = 3  # with two, each learns the other's vector from the sum
MAX_BITS = 52  # of a rounded entry: float64 holds no more
LOSS_RANGE = 2.0**20  # losses are clamped to it, so that one client's divergence looks like everybody's
UPDATE, EVALUATE = "secure_update", "secure_evaluate"
KEYS, PEERS, CONFIRM, UNMASK = "secure_keys", "secure_peers", "secure_confirm", "secure_unmask"


def min_survivors(cohort: int) -> int:
    """More than two thirds of the cohort, and at least MIN_COHORT: two different lists cannot both be confirmed."""
    return max(MIN_COHORT, 2 * cohort // 3 + 1)


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


def pair_seed(private: bytes, public: bytes, session: str, attempt: int, one: str, other: str) -> bytes:
    """The 32 bytes that two clients share in one attempt; those of other attempts do not follow from them."""
    secret = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    info = canonical_bytes({"pair": sorted((one, other)), "attempt": attempt, "protocol": PROTOCOL_NAME})
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


def canonical_bytes(value: Any) -> bytes:
    """The bytes that are signed: sorted JSON."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def sign_survivors(private: bytes, value: Any) -> str:
    """A signature under a list of survivors by a session's Ed25519 key: there is one per client and sum."""
    return base64.b64encode(Ed25519PrivateKey.from_private_bytes(private).sign(canonical_bytes(value))).decode()


def is_signed_by_session_key(public: bytes, value: Any, signature: Any) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(
            base64.b64decode(str(signature), validate=True), canonical_bytes(value)
        )
    except (InvalidSignature, ValueError):
        return False
    return True


def sign(private: ec.EllipticCurvePrivateKey, value: Any) -> str:
    return base64.b64encode(private.sign(canonical_bytes(value), ec.ECDSA(hashes.SHA384()))).decode()


def is_signed(public: ec.EllipticCurvePublicKey, value: Any, signature: Any) -> bool:
    try:
        public.verify(
            base64.b64decode(str(signature), validate=True), canonical_bytes(value), ec.ECDSA(hashes.SHA384())
        )
    except (InvalidSignature, ValueError):
        return False
    return True


def survivor_list(run: str, session: str, attempt: int, survivors: Iterable[str]) -> dict[str, Any]:
    """What a client signs when it confirms who is in a sum."""
    return {
        "protocol": PROTOCOL_NAME,
        "run": run,
        "session": session,
        "attempt": attempt,
        "survivors": sorted(survivors),
    }


def request_digest(words: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """What decides a client's vector: the same digest gives the same vector."""
    known = {name: words.get(name) for name in ("label", "round", "base", "parts", "p", "index")}
    digest = hashlib.sha256(canonical_bytes(known))
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def flatten_message(tensors: Mapping[str, Tensor]) -> np.ndarray:
    """All entries of a message in one vector, in the order of its parts."""
    parts = [tensor.reshape(-1).double() for tensor in tensors.values()]
    return torch.cat(parts).numpy() if parts else np.zeros(0)


def split_vector(vector: np.ndarray, pattern: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The vector's entries as the parts of a message that looks like the pattern."""
    rest, out = torch.from_numpy(np.array(vector)), {}
    for name, like in pattern.items():
        out[name] = rest[: like.numel()].reshape(like.shape).to(like.dtype)
        rest = rest[like.numel() :]
    return out
