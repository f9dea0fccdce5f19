"""Words and tensors that travel, whoever carries them.

A NamedTuple of tensors travels as named tensors (`runs/tensor_files.py`); whoever has a template of it, such as a first
state, gets the same NamedTuple back, others get one with the same fields in the same order.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from mooring.core.errors import RequestError

PROTOCOL_VERSION = 2  # of requests and replies: clients and servers of different ones do not work together
MAX_DEPTH = 8
NONE_SUFFIX = "=None"  # ends the name of a part that is None, as `runs/tensor_files.py` has it


class Payload(NamedTuple):
    """What is sent in either direction."""

    words: dict[str, Any]
    tensors: Mapping[str, Tensor] = {}


def rebuild_tree(prefix: str, tensors: Mapping[str, Tensor]) -> Any:
    """The tree that `flatten` named, without a template: its NamedTuples have the same fields in the same order."""
    if prefix + NONE_SUFFIX in tensors:
        return None
    if prefix in tensors:
        return tensors[prefix]
    fields: dict[str, Any] = {}
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
