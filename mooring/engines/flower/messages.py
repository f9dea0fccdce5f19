"""What server and clients send each other, and how Flower carries it.

A `Payload` has fields (JSON) and tensors. It travels as Flower records: the fields are one JSON text; small tensors are
safetensors bytes beside it, large ones an `ArrayRecord`, which Flower cuts into pieces. Flower moves every record and
array by a request of its own, which costs more than a small model. Nothing that is unpacked can execute code.

A NamedTuple of tensors travels as named tensors (`runs/tensor_files.py`). A receiver with a template of it, such as a
first state, gets the same NamedTuple back; other receivers get one with the same fields in the same order.
"""

from __future__ import annotations

import hashlib
import json
from collections import namedtuple
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import safetensors.torch
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from mooring.core.cohort import StateTree
from mooring.core.errors import RequestError
from mooring.core.types import JsonObject
from mooring.runs.atomic_files import to_plain

PROTOCOL_VERSION = 5  # of requests and replies: a server and a client of different ones do not work together
MAX_DEPTH = 8
NONE_SUFFIX = "=None"  # ends the name of a part that is None, as in `runs/tensor_files.py`; only its name is sent
NOTHING = torch.zeros(0, dtype=torch.uint8)  # the part itself
COMPACT = (",", ":")  # of JSON
FIELDS, ORDER, SMALL, LARGE = "fields", "order", "small", "large"
MAX_INLINE_TENSOR_BYTES = 1_000_000  # of tensors that travel beside the fields
SECURE_KEYS, SECURE_PEERS, SECURE_CONFIRM, SECURE_UNMASK, SECURE_RECOVER = (
    "secure_keys", "secure_peers", "secure_confirm", "secure_unmask", "secure_recover"
)  # fmt: skip
SECURE_UPDATE, SECURE_EVALUATE = "secure_update", "secure_evaluate"
MAX_SENTENCE_CHARACTERS = 500  # characters of a sentence that a client sends


class Payload(NamedTuple):
    """The content of a message in either direction."""

    fields: JsonObject
    tensors: Mapping[str, Tensor] = {}


def payload_bytes(payload: Payload) -> int:
    """Return the bytes of a payload: of its tensors, and of its fields as JSON."""
    tensors = sum(tensor.numel() * tensor.element_size() for tensor in payload.tensors.values())
    return tensors + len(json.dumps(to_plain(payload.fields), separators=COMPACT, default=str))


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


def join_frames(about: JsonObject, contents: Sequence[bytes] = ()) -> bytes:
    head = json.dumps(about | {"lengths": [len(content) for content in contents]}, separators=COMPACT).encode()
    return b"\n".join((head, b"".join(contents)))


def split_frames(body: bytes) -> tuple[JsonObject, list[bytes]]:
    """The first line and the pieces; ValueError for anything else."""
    head, _, content = body.partition(b"\n")
    about = json.loads(head)
    if not isinstance(about, dict) or not isinstance(about.get("lengths"), list):
        raise ValueError("no frame")
    contents, begin = [], 0
    for length in about["lengths"]:
        if not isinstance(length, int) or length < 0:
            raise ValueError("a length must be a whole number")
        contents.append(content[begin : begin + length])
        begin += length
    if begin != len(content):
        raise ValueError("the lengths do not add up")
    return about, contents


def to_records(payload: Payload) -> RecordDict:
    """The payload as records; numbers are written so that they read back to the same bits."""
    tensors = {name: tensor.detach().contiguous() for name, tensor in payload.tensors.items()}
    record = ConfigRecord({FIELDS: json.dumps(to_plain(payload.fields), separators=COMPACT)})
    if list(tensors) != sorted(tensors) or any(name.endswith(NONE_SUFFIX) for name in tensors):
        record[ORDER] = list(tensors)
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(NONE_SUFFIX)}
    if sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) <= MAX_INLINE_TENSOR_BYTES:
        record[SMALL] = safetensors.torch.save({name: tensor.clone() for name, tensor in tensors.items()})
        return RecordDict({FIELDS: record})
    arrays = {name: Array(np.asarray(tensor.numpy())) for name, tensor in tensors.items()}
    return RecordDict({FIELDS: record, LARGE: ArrayRecord(arrays)})


def from_records(content: RecordDict) -> Payload:
    """The payload of a message; anything else is refused in one sentence."""
    try:
        record = content.config_records[FIELDS]
        fields = json.loads(str(record[FIELDS]))
        if not isinstance(fields, dict):
            raise ValueError("its words are no table")
        if SMALL in record:
            tensors_by_name = safetensors.torch.load(record[SMALL])  # type: ignore[arg-type]
        else:
            arrays = content.array_records[LARGE]
            tensors_by_name = {name: torch.from_numpy(array.numpy().copy()) for name, array in arrays.items()}
        order = list(map(str, record[ORDER] if ORDER in record else sorted(tensors_by_name)))  # type: ignore[arg-type]
        tensors = {name: NOTHING if name.endswith(NONE_SUFFIX) else tensors_by_name[name] for name in order}
    except Exception as error:  # untrusted bytes: a shape too large for any memory, an archive, ...
        raise RequestError(f"a message cannot be read: {type(error).__name__} {error}.") from error
    return Payload(fields, tensors)


def printable(text: str, limit: int = MAX_SENTENCE_CHARACTERS) -> str:
    """Text of a client for a terminal or a log: one line, without control characters, of bounded length."""
    clean = "".join(c if c.isprintable() else " " for c in text[: 4 * limit])
    clean = " ".join(clean.split())
    return clean if len(clean) <= limit else clean[: limit - 3] + "..."


def commit_to_share(owner: str, holder: str, share: str) -> str:
    """Return a digest that binds a client to the share of its key that it sends a peer; shares are random numbers of
    256 bits, of which it shows nothing."""
    return hashlib.sha256(json.dumps([owner, holder, share], separators=COMPACT).encode()).hexdigest()
