"""Several pieces of bytes in one HTTP body: a line of JSON with their lengths, then the pieces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


def join_frames(about: dict[str, Any], pieces: Sequence[bytes] = ()) -> bytes:
    head = json.dumps(about | {"lengths": [len(piece) for piece in pieces]}).encode()
    return b"\n".join((head, b"".join(pieces)))


def split_frames(body: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """The first line and the pieces; ValueError for anything else."""
    head, _, rest = body.partition(b"\n")
    about = json.loads(head)
    if not isinstance(about, dict) or not isinstance(about.get("lengths"), list):
        raise ValueError("no frame")
    pieces, begin = [], 0
    for length in about["lengths"]:
        if not isinstance(length, int) or length < 0:
            raise ValueError("a length must be a whole number")
        pieces.append(rest[begin : begin + length])
        begin += length
    if begin != len(rest):
        raise ValueError("the lengths do not add up")
    return about, pieces
