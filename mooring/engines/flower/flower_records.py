"""A parcel as Flower records, and back: its words are one JSON text, its tensors safetensors bytes or an `ArrayRecord`.

Flower moves every record, array and piece of an array by a request of its own, which costs more than a small model
weighs: small tensors travel inside the words' record, large ones as arrays, which Flower cuts into pieces. Nothing that
is unpacked can execute code.
"""

from __future__ import annotations

import json

import numpy as np
import safetensors.torch
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from safetensors import SafetensorError

from mooring.core.errors import RequestError
from mooring.engines.flower.messages import Payload
from mooring.runs.atomic_files import to_plain

WORDS, ORDER, SMALL, LARGE = "words", "order", "small", "large"
MAX_INLINE_TENSOR_BYTES = 1_000_000  # bytes of tensors that travel inside the words' record


def to_records(parcel: Payload) -> RecordDict:
    """The parcel as records; numbers are written so that they read back to the same bits."""
    tensors = {name: tensor.detach().contiguous() for name, tensor in parcel.tensors.items()}
    record = ConfigRecord({WORDS: json.dumps(to_plain(parcel.words)), ORDER: list(tensors)})
    if sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) <= MAX_INLINE_TENSOR_BYTES:
        record[SMALL] = safetensors.torch.save({name: tensor.clone() for name, tensor in tensors.items()})
        return RecordDict({WORDS: record})
    arrays = {name: Array(np.asarray(tensor.numpy())) for name, tensor in tensors.items()}
    return RecordDict({WORDS: record, LARGE: ArrayRecord(arrays)})


def from_records(content: RecordDict) -> Payload:
    """The parcel of a message; anything else is refused in one sentence."""
    try:
        record = content.config_records[WORDS]
        words = json.loads(str(record[WORDS]))
        if not isinstance(words, dict):
            raise ValueError("its words are no table")
        if SMALL in record:
            found = safetensors.torch.load(record[SMALL])  # type: ignore[arg-type]
        else:
            arrays = content.array_records[LARGE]
            found = {name: torch.from_numpy(array.numpy().copy()) for name, array in arrays.items()}
        tensors = {str(name): found[str(name)] for name in record[ORDER]}  # type: ignore[union-attr]
    except (KeyError, ValueError, TypeError, RecursionError, SafetensorError) as error:
        raise RequestError(f"a message cannot be read: {type(error).__name__} {error}.") from error
    return Payload(words, tensors)
