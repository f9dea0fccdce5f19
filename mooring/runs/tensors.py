"""Tensors in a file that cannot execute code: safetensors, sealed, equal contents in equal bytes.

The file's metadata is one key that holds sorted JSON: safetensors orders several keys at random. That JSON keeps NaN
and Infinity as Python's own reader knows them, so that the records of a resumed run are exactly what they were.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from mooring.core.errors import RequestError
from mooring.runs.files import UNSEALED, DamagedFile, plain, read_sealed, sealed, write_whole

_KEY = "mooring"
_NOTHING = "=None"  # ends the name of a state's field that is None; no field's own name can


def tensor_bytes(tensors: Mapping[str, Tensor], meta: dict[str, Any]) -> bytes:
    """The file for tensors and JSON metadata (no time or path in it, so that equal runs give equal bytes)."""
    held: dict[str, Tensor] = {}
    seen = set()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        where = tensor.untyped_storage().data_ptr()
        held[name] = tensor.clone() if where in seen else tensor  # safetensors refuses tensors that share memory
        seen.add(where)
    text = json.dumps(plain({"meta": meta, "seal": UNSEALED}), sort_keys=True, ensure_ascii=False)
    return sealed(save(held, {_KEY: text}))


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor], meta: dict[str, Any]) -> None:
    write_whole(path, tensor_bytes(tensors, meta))


def read_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the metadata of a file; DamagedFile when a single bit differs from what was written."""
    data = read_sealed(path)
    try:
        tensors = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        meta = json.loads(header["__metadata__"][_KEY])["meta"]
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise DamagedFile(f"{path} is not a tensor file of Mooring's: {error}.") from error
    return tensors, meta


def flatten(prefix: str, state: Any) -> dict[str, Tensor]:
    """A tree of NamedTuples, tensors and None as named tensors: `server/w`, `server/opt/m`; None keeps its name too."""
    if state is None:
        return {prefix + _NOTHING: torch.empty(0, dtype=torch.uint8)}
    if isinstance(state, Tensor):
        return {prefix: state}
    if not _is_named(state):
        raise TypeError(f"{prefix}: a state is made of NamedTuples, tensors and None, got {type(state).__name__}")
    flat: dict[str, Tensor] = {}
    for field, part in zip(state._fields, state):
        flat |= flatten(f"{prefix}/{field}", part)
    return flat


def unflatten(template: Any, prefix: str, tensors: Mapping[str, Tensor]) -> Any:
    """The state that `flatten` named; `template`, such as a first state, says which NamedTuples it is made of."""
    if prefix + _NOTHING in tensors:
        return None
    if prefix in tensors:
        return tensors[prefix]
    if not _is_named(template):
        known = ", ".join(sorted(tensors)) or "nothing"
        raise RequestError(f"the saved state has no '{prefix}'; it holds {known}, so another algorithm made it.")
    return type(template)(
        *(unflatten(part, f"{prefix}/{field}", tensors) for field, part in zip(template._fields, template))
    )


def _is_named(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")
