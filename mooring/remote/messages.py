"""What server and clients send each other, as bytes.

A `Payload` has fields (JSON) and tensors. It travels as one line of JSON and safetensors bytes after it. Nothing that
is unpacked can execute code.

A NamedTuple of tensors travels as named tensors (`runs/tensor_files.py`). A receiver with a template of it, such as a
first state, gets the same NamedTuple back; other receivers get one with the same fields in the same order.
"""

from __future__ import annotations

import hashlib
import json
from collections import namedtuple
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from mooring.core.cohort import StateTree
from mooring.core.errors import ClientError, RequestError
from mooring.core.types import JsonObject
from mooring.runs.atomic_files import to_plain

PROTOCOL_VERSION = 7  # of requests and replies: a server and a client of different ones do not work together
MAX_DEPTH = 8
NONE_SUFFIX = "=None"  # ends the name of a part that is None, as in `runs/tensor_files.py`; only its name is sent
NOTHING = torch.zeros(0, dtype=torch.uint8)  # the part itself
COMPACT = (",", ":")  # of JSON
MAX_VALUES = 200_000  # of a message's fields, where its request states no other number
HEADER_VALUES = 8  # of safetensors' header, for each tensor of up to four dimensions
SECURE_KEYS, SECURE_PEERS, SECURE_CONFIRM, SECURE_UNMASK, SECURE_RECOVER = (
    "secure_keys", "secure_peers", "secure_confirm", "secure_unmask", "secure_recover"
)  # fmt: skip
SECURE_UPDATE, SECURE_EVALUATE = "secure_update", "secure_evaluate"
FIXED_KEYS, FIXED_COHORT, FIXED_UPDATE, FIXED_EVALUATE = (
    "fixed_keys", "fixed_cohort", "fixed_update", "fixed_evaluate"
)  # fmt: skip
MAX_SENTENCE_CHARACTERS = 500  # characters of a sentence that a client sends


class Payload(NamedTuple):
    """The content of a message in either direction."""

    fields: JsonObject
    tensors: Mapping[str, Tensor] = {}


class ClientFailedError(ClientError):
    """One or more clients cannot take part; the others can."""

    def __init__(self, client: str, why: str, others: Mapping[str, str] = MappingProxyType({})):
        reasons = {client: why} | dict(others)
        super().__init__(
            {name: text if f"'{name}'" in text else f"client '{name}': {text}" for name, text in reasons.items()}
        )


def rebuild_tree(prefix: str, tensors: Mapping[str, Tensor]) -> StateTree:
    """The tree that `flatten` named, without a template: its NamedTuples have the same fields in the same order."""
    if prefix + NONE_SUFFIX in tensors:
        return None
    if prefix in tensors:
        return tensors[prefix]
    fields: JsonObject = {}
    if prefix.count("/") > MAX_DEPTH:
        raise RequestError("a message is nested too deeply.")
    for name in tensors:
        if name.startswith(prefix + "/"):
            field = name[len(prefix) + 1 :].split("/")[0].removesuffix(NONE_SUFFIX)
            fields.setdefault(field, rebuild_tree(f"{prefix}/{field}", tensors))
    if not fields:
        raise RequestError(f"a message has no '{prefix}'.")
    try:
        return namedtuple("Received", fields)(**fields)  # type: ignore[misc]
    except ValueError as error:
        raise RequestError(f"a message names its parts wrongly: {error}.") from error


def count_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def payload_bytes(payload: Payload) -> int:
    """Return the bytes of a payload: of its tensors, and of its fields as JSON."""
    return count_bytes(payload.tensors) + len(json.dumps(to_plain(payload.fields), separators=COMPACT, default=str))


def pack(payload: Payload) -> bytes:
    """The payload as bytes; numbers are written so that they read back to the same bits."""
    head = {"fields": to_plain(payload.fields), "order": list(payload.tensors)}
    sent = {
        name: tensor.detach().contiguous().clone()
        for name, tensor in payload.tensors.items()
        if not name.endswith(NONE_SUFFIX)
    }
    return json.dumps(head, separators=COMPACT).encode() + b"\n" + safetensors.torch.save(sent)


def unpack(content: bytes, max_values: int = MAX_VALUES) -> Payload:
    """The payload of bytes that anybody may have sent; anything else is refused in one sentence.

    What bounds the work of parsing is counted first: the values of the fields, and the entries of the tensors' header.
    """
    try:
        end = content.find(b"\n")
        head, begin = content[:end], end + 9  # safetensors: eight bytes, which state the length of a header in JSON
        header = content[begin : begin + int.from_bytes(content[end + 1 : begin], "little")]
        if end < 0 or max(count_values(head), count_values(header) // HEADER_VALUES) > max_values:
            raise ValueError(f"it has more than {max_values} fields")
        about, tensors = json.loads(head), safetensors.torch.load(content[end + 1 :])
        fields, order = about["fields"], [str(name) for name in about["order"]]
        if not isinstance(fields, dict):
            raise ValueError("its fields are no table")
        return Payload(fields, {name: NOTHING if name.endswith(NONE_SUFFIX) else tensors[name] for name in order})
    except Exception as error:  # untrusted bytes: a shape too large for any memory, fields that are nested too deeply
        raise RequestError(f"a message cannot be read: {type(error).__name__} {error}.") from error


def count_values(text: bytes) -> int:
    """A bound of the number of values in JSON."""
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def printable(text: str, limit: int = MAX_SENTENCE_CHARACTERS) -> str:
    """Text of a client for a terminal or a log: one line, without control characters, of bounded length."""
    clean = "".join(c if c.isprintable() else " " for c in text[: 4 * limit])
    clean = " ".join(clean.split())
    return clean if len(clean) <= limit else clean[: limit - 3] + "..."


def commit_to_share(owner: str, holder: str, share: str) -> str:
    """Return a digest that binds a client to the share of its key that it sends a peer; shares are random numbers of
    256 bits, of which it shows nothing."""
    return hashlib.sha256(json.dumps([owner, holder, share], separators=COMPACT).encode()).hexdigest()
