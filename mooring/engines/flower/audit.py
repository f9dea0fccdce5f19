"""Records of what was asked and what was sent: one line of JSON each, in a file that only its owner can read.

server   OUT.federation/audit.jsonl     who joined, was refused or dismissed; each request with its clients and bytes
client   STATE/RUN/sent.jsonl           what left this machine, in words and numbers: for a data protection officer
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mooring.engines.flower.messages import Payload

SENT_FILE = "sent.jsonl"
AUDIT_FILE = "audit.jsonl"
SENT_DESCRIPTIONS = {
    "hello": "its name, version and a digest of its run file",
    "survey": "for every column: counts of values, rounded extremes, median and quartiles; classes of the target",
    "tally": "for every column: sums of values, and how many rows have each level of a category",
    "names": "names of levels that are rare here and common over all clients",
    "spread": "for every column: the sum of squares about the mean of all clients",
    "adopt": "numbers of rows",
    "facts": "a few numbers about the curvature and noise of the loss",
    "told": "sums, gradients or fits that settings such as lam are resolved from",
    "begin": "nothing but that the algorithm can begin",
    "visit": "the message of a local update",
    "evaluate": "mean losses of its model",
    "models": "its personal model",
    "numbers": "a number of its personal state",
    "done": "nothing but that the result was written",
    "dismissed": "nothing",
    "asked": "sums over its rows, or fits, that advice is made of",
    "advised": "nothing but that the result was written",
    "secure_keys": "a public key, its weight and its numbers of rows, signed",
    "secure_peers": "nothing",
    "secure_update": "the message of a local update under masks",
    "secure_evaluate": "its part of the mean loss under masks",
    "secure_confirm": "a signature under the list of clients of a sum",
    "secure_unmask": "seeds of masks, of a sum that was confirmed",
}


def timestamp() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def append_record(path: Path, line: Mapping[str, Any]) -> None:
    """Add a line; a file that does not exist is made for its owner only."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(json.dumps({"time": timestamp(), **line}) + "\n")


def describe_reply(what: str, asked: Payload, reply: Payload) -> dict[str, Any]:
    """What leaves a client: in words, and the size of each part."""
    parts = {name: list(tensor.shape) for name, tensor in reply.tensors.items()}
    size = sum(tensor.numel() * tensor.element_size() for tensor in reply.tensors.values())
    line: dict[str, Any] = {"request": what, "sent": SENT_DESCRIPTIONS.get(what, "an answer to an unknown request")}
    if "refused" in reply.words:
        line["sent"] = "a refusal"
        line["why"] = str(reply.words["refused"])[:500]
    turn = asked.words.get("round")
    if isinstance(turn, list) and turn:
        line["round"] = turn[0]
    words = len(json.dumps(reply.words, default=str))
    return line | {"arrays": parts, "bytes": size + words}
