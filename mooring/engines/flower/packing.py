"""A parcel as Flower records, and back: its words are one JSON text, its tensors one `ArrayRecord`.

Nothing that is unpacked can execute code.
"""

from __future__ import annotations

import json

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from mooring.core.errors import RequestError
from mooring.engines.flower.parcels import Parcel
from mooring.runs.files import plain

WORDS, TENSORS, ORDER = "words", "tensors", "order"


def pack(parcel: Parcel) -> RecordDict:
    """The parcel as records; numbers are written so that they read back to the same bits."""
    text = json.dumps(plain(parcel.words))
    arrays = {name: Array(np.ascontiguousarray(tensor.detach().numpy())) for name, tensor in parcel.tensors.items()}
    words = ConfigRecord({WORDS: text, ORDER: list(parcel.tensors)})
    return RecordDict({WORDS: words, TENSORS: ArrayRecord(arrays)})


def unpack(content: RecordDict) -> Parcel:
    """The parcel of a message; anything else is refused in one sentence."""
    try:
        words = content.config_records[WORDS]
        arrays = content.array_records[TENSORS]
        told = json.loads(str(words[WORDS]))
        if not isinstance(told, dict):
            raise ValueError("its words are no table")
        order = words[ORDER]
        tensors = {str(name): torch.from_numpy(arrays[str(name)].numpy().copy()) for name in order}  # type: ignore
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise RequestError(f"a message cannot be read: {type(error).__name__} {error}.") from error
    return Parcel(told, tensors)
