"""Public data sets by name, each as one pool of rows, from npz files or the originals in a data folder."""

from __future__ import annotations

import os
import string
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
from sklearn.datasets import load_digits

from mooring.core.errors import RequestError
from mooring.data.benchmark_file_formats import (
    parse_leaf_images,
    parse_leaf_texts,
    read_cifar,
    read_emnist_images,
    read_idx,
    read_leaf,
    tokenize,
)

DATA_DIR_VARIABLE = "MOORING_DATA"
SHAKESPEARE_WINDOW = 80  # characters from which Shakespeare's next one is predicted
SENT140_WORDS, SENT140_LENGTH = 4000, 25

DIGITS = tuple(string.digits)
EMNIST_CLASSES = {
    "balanced": tuple(string.digits + string.ascii_uppercase + "abdefghnqrt"),  # similar cases merged
    "digits": DIGITS,
    "letters": tuple(string.ascii_lowercase),  # both cases merged
}
FEMNIST_CLASSES = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
FASHION_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


class PixelScale(NamedTuple):
    """Pixels become (pixel / top - mean) / std, each channel by constants of the training images, never of the rows at
    hand, so that every client and every partition sees the same transformation."""

    top: float
    mean: tuple[float, ...]
    std: tuple[float, ...]


DIGITS_SCALE = PixelScale(16, (0.3053,), (0.3760,))
MNIST_SCALE = PixelScale(255, (0.1307,), (0.3081,))  # also for EMNIST and FEMNIST, drawn in the same manner
FASHION_SCALE = PixelScale(255, (0.2860,), (0.3530,))
CIFAR_SCALE = PixelScale(255, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


class BenchmarkDataset(NamedTuple):
    x: np.ndarray  # images [N, H, W] or [N, H, W, 3] uint8, or token codes [N, length] int64
    y: np.ndarray  # [N] int64, codes of `classes`
    classes: tuple[str, ...]
    source: str  # origin of the files
    scale: PixelScale | None = None  # of images
    x_test: np.ndarray | None = None  # the data set's own test part
    y_test: np.ndarray | None = None
    group: np.ndarray | None = None  # [N]: the writer of each row, by name


def load_benchmark(name: str, data_dir: str | Path | None = None) -> BenchmarkDataset:
    """Return the pool called `name` from `data_dir`, or else from the folder in MOORING_DATA."""
    key = name.replace("-", "_")
    if key not in BENCHMARKS:
        raise RequestError(f"unknown data set {name!r}; known are {', '.join(BENCHMARKS)}.")
    folder = data_dir if data_dir is not None else os.environ.get(DATA_DIR_VARIABLE)
    return BENCHMARKS[key](None if folder is None else Path(folder))


def _digits(folder: Path | None) -> BenchmarkDataset:
    data = load_digits()
    return BenchmarkDataset(
        data.images.astype(np.uint8), data.target.astype(np.int64), DIGITS, "scikit-learn", DIGITS_SCALE
    )


def _mnist(folder: Path | None) -> BenchmarkDataset:
    pool = _standard(folder, "mnist.npz", DIGITS, MNIST_SCALE)
    pool = pool or _idx_pool(folder, ("mnist", "MNIST/raw", "."), "", "t10k", DIGITS, MNIST_SCALE)
    return pool or _missing("mnist", folder, "mnist.npz or train-images-idx3-ubyte(.gz) and its three companions")


def _mnist_writers(folder: Path | None) -> BenchmarkDataset:
    arrays = _npz(folder, "mnist_writers.npz", ("writer_train",))
    if arrays is None:
        _missing("mnist_writers", folder, "mnist_writers.npz and mnist.npz (or MNIST's original files)")
    pool = _mnist(folder)
    names = np.char.mod("writer %04d", arrays[0])
    if len(names) != len(pool.y):
        raise RequestError(f"mnist_writers.npz names {len(names)} writers for {len(pool.y)} images of {pool.source}.")
    return pool._replace(group=names, source=f"{pool.source} and mnist_writers.npz")


def _fashion(folder: Path | None) -> BenchmarkDataset:
    pool = _standard(folder, "fashion_mnist.npz", FASHION_CLASSES, FASHION_SCALE)
    # Not from the folder itself: MNIST's files have the same names.
    pool = pool or _idx_pool(folder, ("fashion_mnist", "FashionMNIST/raw"), "", "t10k", FASHION_CLASSES, FASHION_SCALE)
    required_files = "fashion_mnist.npz or fashion_mnist/train-images-idx3-ubyte(.gz) and its three companions"
    return pool or _missing("fashion_mnist", folder, required_files)


def _emnist(split: str) -> Callable[[Path | None], BenchmarkDataset]:
    def load(folder: Path | None) -> BenchmarkDataset:
        prefix = f"emnist-{split}-"
        pool = _idx_pool(
            folder, ("emnist", "EMNIST/raw", "gzip", "."), prefix, "test", EMNIST_CLASSES[split], MNIST_SCALE
        )
        return pool or _missing(f"emnist_{split}", folder, f"{prefix}train-images-idx3-ubyte(.gz) and its companions")

    return load


def _cifar10(folder: Path | None) -> BenchmarkDataset:
    for file in ("cifar10.npz", "cifar10_25k.npz"):
        pool = _standard(folder, file, CIFAR_CLASSES, CIFAR_SCALE)
        if pool is not None:
            return pool
    for place in _places(folder, ("cifar-10-batches-bin", "cifar10", ".")):
        train = [path for k in range(1, 6) if (path := _find(place, f"data_batch_{k}.bin"))]
        test = _find(place, "test_batch.bin")
        if train and test:
            xs, ys = zip(*(read_cifar(path) for path in train))
            x_test, y_test = read_cifar(test)
            source = f"{len(train)} binary batches"
            return BenchmarkDataset(
                np.concatenate(xs), np.concatenate(ys), CIFAR_CLASSES, source, CIFAR_SCALE, x_test, y_test
            )
    for place in _places(folder, ("cifar-10-batches-py", "cifar10", ".")):
        if (place / "data_batch_1").exists():
            read_cifar(place / "data_batch_1")  # raises an error: it is pickled
    return _missing("cifar10", folder, "cifar10.npz or the binary version's data_batch_1.bin ... and test_batch.bin")


def _femnist(folder: Path | None) -> BenchmarkDataset:
    rows = _leaf(folder, "femnist")
    x = np.concatenate([parse_leaf_images(x) for x, _ in rows.values()])
    y = _labels("femnist", rows, FEMNIST_CLASSES)
    return BenchmarkDataset(x, y, FEMNIST_CLASSES, "LEAF FEMNIST", MNIST_SCALE, group=_owners(rows))


def _sent140(folder: Path | None) -> BenchmarkDataset:
    rows = _leaf(folder, "sent140")
    texts = [text for x, _ in rows.values() for text in parse_leaf_texts(x)]
    tokens, _ = tokenize(texts, vocabulary=SENT140_WORDS, length=SENT140_LENGTH)
    classes = ("negative", "positive")
    return BenchmarkDataset(tokens, _labels("sent140", rows, classes), classes, "LEAF Sent140", group=_owners(rows))


def _tweets(folder: Path | None) -> BenchmarkDataset:
    arrays = _npz(folder, "airline_tweets.npz", ("tokens", "y", "user", "class_names"))
    if arrays is None:
        _missing("tweets", folder, "airline_tweets.npz")
    tokens, y, user, names = arrays
    classes = tuple(str(name) for name in names)
    owner = np.char.mod("user %05d", user)
    return BenchmarkDataset(tokens.astype(np.int64), y.astype(np.int64), classes, "airline_tweets.npz", group=owner)


def _shakespeare(folder: Path | None) -> BenchmarkDataset:
    """Windows of WINDOW characters and the character after each; a role's windows do not overlap."""
    keys = ("text_bytes", "text_offsets", "play", "play_names", "role_names")
    arrays = _npz(folder, "shakespeare_roles.npz", keys)
    if arrays is None:
        _missing("shakespeare", folder, "shakespeare_roles.npz")
    text, offsets, play, plays, roles = arrays
    alphabet, code = np.unique(text, return_inverse=True)
    start, end = offsets[:-1], offsets[1:]
    windows = (end - start) // (SHAKESPEARE_WINDOW + 1)
    role = np.repeat(np.arange(len(windows)), windows)
    place = np.arange(len(role)) - np.repeat(np.cumsum(windows) - windows, windows)
    cut = code[(start[role] + (SHAKESPEARE_WINDOW + 1) * place)[:, None] + np.arange(SHAKESPEARE_WINDOW + 1)].astype(
        np.int64
    )
    names = np.array([f"{plays[p]}: {name}" for p, name in zip(play, roles)])
    classes = tuple(chr(byte) for byte in alphabet)
    return BenchmarkDataset(cut[:, :-1], cut[:, -1], classes, "shakespeare_roles.npz", group=names[role])


BENCHMARKS: dict[str, Callable[[Path | None], BenchmarkDataset]] = {
    "digits": _digits,
    "mnist": _mnist,
    "mnist_writers": _mnist_writers,
    "fashion_mnist": _fashion,
    "emnist_balanced": _emnist("balanced"),
    "emnist_digits": _emnist("digits"),
    "emnist_letters": _emnist("letters"),
    "femnist": _femnist,
    "cifar10": _cifar10,
    "tweets": _tweets,
    "sent140": _sent140,
    "shakespeare": _shakespeare,
}


def _missing(name: str, folder: Path | None, required_files: str) -> NoReturn:
    if folder is None:
        raise RequestError(
            f"data set '{name}': put {required_files} in a folder and name it with data_dir or {DATA_DIR_VARIABLE}."
        )
    raise RequestError(
        f"data set '{name}' was not found in {folder}: put {required_files} there, or name another folder "
        f"with data_dir or {DATA_DIR_VARIABLE}."
    )


def _npz(folder: Path | None, file: str, keys: Sequence[str]) -> list[np.ndarray] | None:
    """The named arrays of an npz file, None if there is no such file."""
    if folder is None or not (folder / file).is_file():
        return None
    path = folder / file
    if not zipfile.is_zipfile(path):
        raise RequestError(f"{path}: not an npz file; fetch it again.")
    try:
        with np.load(path) as content:
            return [content[key] for key in keys]
    except (ValueError, KeyError, OSError, zipfile.BadZipFile, EOFError) as error:
        raise RequestError(f"{path}: cannot be read ({error}); expected the arrays {', '.join(keys)}.") from error


def _standard(folder: Path | None, file: str, classes: tuple[str, ...], scale: PixelScale) -> BenchmarkDataset | None:
    """Images from an npz file with a training and a test part."""
    arrays = _npz(folder, file, ("x_train", "y_train", "x_test", "y_test"))
    if arrays is None:
        return None
    x, y, x_test, y_test = arrays
    return BenchmarkDataset(x, y.astype(np.int64), classes, file, scale, x_test, y_test.astype(np.int64))


def _find(place: Path, file: str) -> Path | None:
    """Return the file, or its gzipped version."""
    return next((path for path in (place / file, place / f"{file}.gz") if path.is_file()), None)


def _places(folder: Path | None, names: Sequence[str]) -> list[Path]:
    return [] if folder is None else [folder / name for name in names if (folder / name).is_dir()]


def _idx_pool(
    folder: Path | None, places: Sequence[str], prefix: str, test: str, classes: tuple[str, ...], scale: PixelScale
) -> BenchmarkDataset | None:
    """The four IDX files of a data set from the first of the places that has them; None if no place has."""
    files = [
        f"{prefix}{part}-{contents}-ubyte" for part in ("train", test) for contents in ("images-idx3", "labels-idx1")
    ]
    for place in _places(folder, places):
        paths = [path for file in files if (path := _find(place, file)) is not None]
        if len(paths) < len(files):
            continue
        images = read_emnist_images if prefix else read_idx
        x, x_test = images(paths[0]), images(paths[2])
        y, y_test = (read_idx(path).astype(np.int64) for path in paths[1::2])
        for path, labels, rows in ((paths[1], y, x), (paths[3], y_test, x_test)):
            if len(labels) != len(rows):
                raise RequestError(f"{path}: {len(labels)} labels for {len(rows)} images.")
        first = 1 if prefix == "emnist-letters-" else 0  # EMNIST letters are numbered from 1
        for path, labels in ((paths[1], y), (paths[3], y_test)):
            if labels.min() < first or labels.max() >= first + len(classes):
                raise RequestError(f"{path}: labels {labels.min()} to {labels.max()}; expected {first} onwards.")
        return BenchmarkDataset(x, y - first, classes, "original IDX files", scale, x_test, y_test - first)
    return None


def _leaf(folder: Path | None, name: str) -> dict[str, tuple[list, list]]:
    paths = (
        [] if folder is None else sorted(p for end in ("json", "json.gz") for p in (folder / name).glob(f"**/*.{end}"))
    )
    if not paths:
        _missing(name, folder, f"LEAF's {name} as {name}/*.json")
    return read_leaf(paths)


def _labels(name: str, rows: dict[str, tuple[list, list]], classes: tuple[str, ...]) -> np.ndarray:
    unknown = {label for _, y in rows.values() for label in y} - set(range(len(classes)))
    if unknown:
        raise RequestError(f"{name}: label {min(unknown, key=str)!r} found; expected 0 to {len(classes) - 1}.")
    return np.array([label for _, y in rows.values() for label in y], dtype=np.int64)


def _owners(rows: dict[str, tuple[list, list]]) -> np.ndarray:
    return np.repeat(list(rows), [len(y) for _, y in rows.values()])
