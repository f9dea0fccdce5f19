"""Tensors in a file that cannot execute code: safetensors, sealed, equal contents in equal bytes.

The file's metadata is one key that contains sorted JSON: safetensors orders several keys at random. That JSON keeps NaN
and Infinity as Python's own reader accepts them, so that the records of a resumed run are exactly what they were.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mooring.core.cohort import StateTree
from mooring.core.errors import RequestError
from mooring.core.types import JsonObject
from mooring.runs.atomic_files import (
    BLANK_CHECKSUM,
    DamagedFile,
    Stream,
    check_checksum,
    open_to_read,
    to_plain,
    write_atomically,
)
from mooring.runs.disk_matrix import DiskMatrix, tensor_bytes

StoredTensor = Tensor | DiskMatrix

_KEY = "mooring"
_NOTHING = "=None"  # ends the name of a state's field that is None; no field's own name can
_LONGEST_HEADER = 100_000_000  # bytes; safetensors' own limit
_PIECE = 1 << 24  # bytes that are read at once to check a seal
_CODES = {  # in the order in which safetensors lays them out, backwards
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
}


def tensor_file(tensors: Mapping[str, StoredTensor], meta: JsonObject) -> Stream:
    """Return the file for tensors and JSON metadata (no time or path in it, so that equal runs give equal bytes)."""
    rank = {kind: place for place, kind in enumerate(_CODES)}
    names = sorted(tensors, key=lambda name: (-rank[tensors[name].dtype], name))
    text = json.dumps(to_plain({"meta": meta, "seal": BLANK_CHECKSUM}), sort_keys=True, ensure_ascii=False)
    header: JsonObject = {"__metadata__": {_KEY: text}}
    end = 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + prod(tensor.shape) * tensor.dtype.itemsize
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    head = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    return Stream(len(head).to_bytes(8, "little") + head, _parts(tensors[name] for name in names))


def _parts(tensors: Iterator[StoredTensor]) -> Iterator[memoryview]:
    for tensor in tensors:
        for part in tensor if isinstance(tensor, DiskMatrix) else [tensor]:
            yield tensor_bytes(part.detach().cpu().contiguous())


def write_tensors(
    path: str | Path, tensors: Mapping[str, StoredTensor], meta: JsonObject, *, durable: bool = True
) -> None:
    write_atomically(path, tensor_file(tensors, meta), durable=durable)


def read_tensors(path: str | Path) -> tuple[dict[str, Tensor], JsonObject]:
    """Return the tensors and the metadata of a file; DamagedFile if a single bit differs."""
    with open_to_read(path) as file:
        length = file.read(8)
        size = int.from_bytes(length, "little")
        if size > _LONGEST_HEADER:
            raise DamagedFile(f"{path} is damaged, or not a tensor file of Mooring's.")
        check_checksum(path, length + file.read(size), _read_blocks(file))
    try:
        with safe_open(path, "pt", backend="pread") as archive:
            tensors = {name: archive.get_tensor(name) for name in archive.keys()}  # noqa: SIM118  # it is not a dict
            meta = json.loads(archive.metadata()[_KEY])["meta"]
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise DamagedFile(f"{path} is not a tensor file of Mooring's: {error}.") from error
    return tensors, meta


def _read_blocks(file: BinaryIO) -> Iterator[bytes]:
    while block := file.read(_PIECE):
        yield block


def flatten(prefix: str, state: StateTree) -> JsonObject:
    """Return a tree of NamedTuples, tensors and None as named tensors: `server/w`, `server/opt/m`; None keeps its
    name too."""
    if state is None:
        return {prefix + _NOTHING: torch.empty(0, dtype=torch.uint8)}
    if isinstance(state, StoredTensor):
        return {prefix: state}
    if not _is_named(state):
        raise TypeError(f"{prefix}: a state is made of NamedTuples, tensors and None, got {type(state).__name__}")
    flat: JsonObject = {}
    for field, part in zip(state._fields, state):
        flat |= flatten(f"{prefix}/{field}", part)
    return flat


def unflatten(template: StateTree, prefix: str, tensors: Mapping[str, Tensor]) -> StateTree:
    """Return the state that `flatten` named; `template`, such as an initial state, has the same NamedTuples."""
    if prefix + _NOTHING in tensors:
        return None
    if prefix in tensors:
        return tensors[prefix]
    if not _is_named(template):
        names = ", ".join(sorted(tensors)) or "nothing"
        raise RequestError(f"the saved state has no '{prefix}'; it holds {names}, so another algorithm made it.")
    return type(template)(
        *(unflatten(part, f"{prefix}/{field}", tensors) for field, part in zip(template._fields, template))
    )


def _is_named(value: object) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")
