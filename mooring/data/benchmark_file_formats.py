"""Readers of the original files of public data sets: IDX, CIFAR-10 binary, LEAF JSON; each may be gzipped (.gz).

Pickled files are never opened.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from mooring.core.errors import RequestError

IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
CIFAR_SIDE, CIFAR_CLASSES = 32, 10
CIFAR_RECORD = 1 + 3 * CIFAR_SIDE**2  # the label, then the red, green and blue planes
SENT140_TEXT = 4  # a row of LEAF's Sent140 is (id, date, query, user, text, part)
PAD, UNKNOWN = "<pad>", "<unk>"  # codes 0 and 1
TOKEN = re.compile(r"[a-z']+|[0-9]+|[^\sa-z0-9']")


def read_bytes(path: Path) -> bytes:
    """Return the file's bytes, unpacked if its name ends in .gz."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                return file.read()
        return path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise RequestError(f"{path}: cannot be read ({error}); fetch the file again.") from error


def read_idx(path: Path) -> np.ndarray:
    """Read an array in the IDX format of MNIST: 0, 0, type, dimensions, the sizes as big-endian int32, the numbers."""
    raw = read_bytes(path)
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in IDX_TYPES:
        raise RequestError(f"{path}: not an IDX file, it starts with bytes {list(raw[:4])}; expected 0, 0, type, rank.")
    header = 4 + 4 * raw[3]
    shape = tuple(int(size) for size in np.frombuffer(raw[4:header][: len(raw[4:header]) // 4 * 4], ">u4"))
    dtype = np.dtype(IDX_TYPES[raw[2]])
    expected = header + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if len(shape) != raw[3] or len(raw) != expected:
        raise RequestError(f"{path}: {len(raw)} bytes, but its header of shape {shape} asks for {expected}.")
    return np.frombuffer(raw, dtype, offset=header).reshape(shape).astype(dtype.newbyteorder("="))


def read_emnist_images(path: Path) -> np.ndarray:
    """Images of an EMNIST file [N, 28, 28], which stores them with rows and columns exchanged, upright."""
    return np.ascontiguousarray(read_idx(path).transpose(0, 2, 1))


def read_cifar(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images [N, 32, 32, 3] and labels [N] of a batch of CIFAR-10's binary version."""
    raw = read_bytes(path)
    if raw[:1] == b"\x80" and raw[-1:] == b".":  # how pickles of protocol 2 and later begin and end
        raise RequestError(
            f"{path}: a batch of CIFAR-10's python version, which is pickled and could run code when opened; "
            f"download the binary version (data_batch_1.bin, ...)."
        )
    if not raw or len(raw) % CIFAR_RECORD:
        raise RequestError(f"{path}: {len(raw)} bytes; a CIFAR-10 binary batch has {CIFAR_RECORD} bytes an image.")
    record = np.frombuffer(raw, np.uint8).reshape(-1, CIFAR_RECORD)
    label = record[:, 0].astype(np.int64)
    if label.max() >= CIFAR_CLASSES:
        raise RequestError(f"{path}: label {label.max()} found; CIFAR-10 has labels 0 to {CIFAR_CLASSES - 1}.")
    planes = record[:, 1:].reshape(-1, 3, CIFAR_SIDE, CIFAR_SIDE)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), label


def read_leaf(paths: Iterable[Path]) -> dict[str, tuple[list[object], list[object]]]:
    """Each user's rows (x, y) from LEAF's JSON files; rows of a user in several files (train, test) are joined."""
    rows: dict[str, tuple[list[object], list[object]]] = {}
    for path in paths:
        try:
            content = json.loads(read_bytes(path))
            users, counts, data = (content[key] for key in ("users", "num_samples", "user_data"))
            users_rows = [(user, list(data[user]["x"]), list(data[user]["y"])) for user in users]
        except (ValueError, KeyError, TypeError) as error:
            raise RequestError(
                f"{path}: not a LEAF file ({type(error).__name__}: {error}); expected JSON with users, num_samples "
                f"and user_data, where each user has x and y."
            ) from error
        if len(counts) != len(users_rows):
            raise RequestError(f"{path}: {len(users_rows)} users but {len(counts)} entries in num_samples.")
        for (user, x, y), count in zip(users_rows, counts):
            if not len(x) == len(y) == count:
                raise RequestError(f"{path}: user '{user}' has {len(x)} x and {len(y)} y; num_samples is {count}.")
            stored = rows.setdefault(str(user), ([], []))
            stored[0].extend(x)
            stored[1].extend(y)
    return rows


def parse_leaf_images(x: Sequence[object]) -> np.ndarray:
    """LEAF's FEMNIST pixels, 1 = paper, 0 = ink, as images [N, side, side] uint8 with bright ink like MNIST's."""
    try:
        pixels = np.array(x, dtype=float)
        side = round(pixels.shape[1] ** 0.5)
        pixels = pixels.reshape(-1, side, side)
    except (ValueError, TypeError, IndexError) as error:
        raise RequestError("LEAF images must be square and flattened, all of one size.") from error
    return np.round(255 * (1 - pixels)).astype(np.uint8)


def parse_leaf_texts(x: Sequence[Sequence[object]]) -> list[str]:
    """The texts of LEAF's Sent140 rows."""
    try:
        return [str(row[SENT140_TEXT]) for row in x]
    except (IndexError, TypeError) as error:
        raise RequestError("LEAF's Sent140 rows must be lists (id, date, query, user, text, ...).") from error


def tokenize(texts: Sequence[str], *, vocabulary: int, length: int) -> tuple[np.ndarray, tuple[str, ...]]:
    """Token codes [N, length] int64 and the vocabulary: the most frequent words, ties by alphabet.

    Words, numbers and single signs in lower case; 0 pads short texts at the end, 1 stands for words left out.
    """
    split = [TOKEN.findall(text.lower()) for text in texts]
    counts = Counter(word for words in split for word in words)
    vocabulary_words = sorted(counts, key=lambda word: (-counts[word], word))[: vocabulary - 2]
    code = {word: k for k, word in enumerate(vocabulary_words, start=2)}
    tokens = np.zeros((len(texts), length), dtype=np.int64)
    for row, words in zip(tokens, split):
        codes = [code.get(word, 1) for word in words[:length]]
        row[: len(codes)] = codes
    return tokens, (PAD, UNKNOWN, *vocabulary_words)
