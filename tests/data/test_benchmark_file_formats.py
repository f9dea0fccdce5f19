"""Readers of original formats, on small files written here byte by byte."""

import gzip
import json
import struct

import numpy as np
import pytest

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


def write(path, content):
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def idx_bytes(array, code):
    array = np.asarray(array)
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, code, array.ndim, *array.shape) + array.tobytes()


def cifar_bytes(images, labels):
    return b"".join(bytes([y]) + x.transpose(2, 0, 1).tobytes() for x, y in zip(images, labels))


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_round_trip(tmp_path, suffix):
    images = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
    path = write(tmp_path / f"train-images-idx3-ubyte{suffix}", idx_bytes(images, 0x08))
    assert np.array_equal(read_idx(path), images)
    wide = np.array([[1, -2, 300000]], dtype=">i4")
    assert read_idx(write(tmp_path / "wide", idx_bytes(wide, 0x0C))).tolist() == [[1, -2, 300000]]
    real = np.array([0.5, -1.25], dtype=">f8")
    assert read_idx(write(tmp_path / f"real{suffix}", idx_bytes(real, 0x0E))).tolist() == [0.5, -1.25]


def test_idx_refuses_what_is_not_idx_or_has_the_wrong_length(tmp_path):
    good = idx_bytes(np.zeros((2, 3), dtype=np.uint8), 0x08)
    for name, content, says in [
        ("text", b"hello world", "not an IDX file"),
        ("empty", b"", "not an IDX file"),
        ("short", good[:-1], r"17 bytes, but its header of shape \(2, 3\) asks for 18"),
        ("long", good + b"x", "asks for 18"),
        ("cut", good[:7], "asks for"),
    ]:
        with pytest.raises(RequestError, match=says):
            read_idx(write(tmp_path / name, content))


def test_damaged_gzip_is_named(tmp_path):
    path = tmp_path / "images.gz"
    whole = gzip.compress(np.random.default_rng(0).bytes(1000))
    for content in (b"not gzip at all", whole[:-20], whole[:100] + b"\xff" * 50 + whole[150:]):
        path.write_bytes(content)
        with pytest.raises(RequestError, match=r"images\.gz: cannot be read"):
            read_idx(path)


def test_emnist_images_are_turned_upright(tmp_path):
    upright = np.arange(2 * 28 * 28, dtype=np.uint32).astype(np.uint8).reshape(2, 28, 28)
    stored = np.ascontiguousarray(upright.transpose(0, 2, 1))  # EMNIST writes column after column
    path = write(tmp_path / "emnist-balanced-train-images-idx3-ubyte.gz", idx_bytes(stored, 0x08))
    assert np.array_equal(read_emnist_images(path), upright)


@pytest.mark.parametrize("name", ["data_batch_1.bin", "data_batch_1.bin.gz"])
def test_cifar_binary_batch(tmp_path, name):
    images = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    x, y = read_cifar(write(tmp_path / name, cifar_bytes(images, [6, 0, 9])))
    assert np.array_equal(x, images) and y.tolist() == [6, 0, 9]


def test_cifar_refuses_pickles_and_broken_batches(tmp_path):
    opening = b"\x80\x02}q\x01U\x0bbatch_labelq\x02"  # how the python version's files start; its end is "."
    with pytest.raises(RequestError, match="pickled and could run code when opened; download the binary version"):
        read_cifar(write(tmp_path / "data_batch_1", opening + bytes(5000) + b"u."))
    with pytest.raises(RequestError, match="3073 bytes an image"):
        read_cifar(write(tmp_path / "short.bin", bytes(100)))
    with pytest.raises(RequestError, match="label 77 found"):
        read_cifar(write(tmp_path / "label.bin", bytes([77]) + bytes(3072)))


def leaf(users):
    return {
        "users": list(users),
        "num_samples": [len(rows["y"]) for rows in users.values()],
        "user_data": users,
    }


def test_leaf_joins_a_users_rows_over_files(tmp_path):
    train = leaf({"ann": {"x": [[0.0] * 4], "y": [3]}, "bob": {"x": [[1.0] * 4, [0.5] * 4], "y": [0, 1]}})
    test = leaf({"ann": {"x": [[0.25] * 4], "y": [4]}})
    paths = [
        write(tmp_path / "train.json", json.dumps(train).encode()),
        write(tmp_path / "test.json.gz", json.dumps(test).encode()),
    ]
    rows = read_leaf(paths)
    assert list(rows) == ["ann", "bob"]
    assert rows["ann"] == ([[0.0] * 4, [0.25] * 4], [3, 4])
    # LEAF's paper is 1 and its ink 0; ours is the reverse, in 0..255
    assert parse_leaf_images(rows["bob"][0]).tolist() == [[[0, 0], [0, 0]], [[128, 128], [128, 128]]]


def test_leaf_texts_are_the_fifth_column():
    row = ["1467", "Mon Apr 06", "NO_QUERY", "ann", "so happy :)", "training"]
    assert parse_leaf_texts([row]) == ["so happy :)"]
    with pytest.raises(RequestError, match="id, date, query, user, text"):
        parse_leaf_texts([["too", "short"]])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "not a LEAF file"),
        (b"[1]", "not a LEAF file"),
        (b'{"users": ["a"]}', "num_samples"),
        (json.dumps({**leaf({"a": {"x": [1], "y": [1]}}), "num_samples": [2]}).encode(), "user 'a' has 1 x and 1 y"),
        (json.dumps({**leaf({"a": {"x": [1], "y": [1]}}), "num_samples": []}).encode(), "1 users but 0 entries"),
    ],
)
def test_leaf_errors_name_the_file(tmp_path, content, says):
    with pytest.raises(RequestError, match=says) as caught:
        read_leaf([write(tmp_path / "users.json", content)])
    assert "users.json" in str(caught.value)


def test_leaf_images_must_be_square():
    with pytest.raises(RequestError, match="square"):
        parse_leaf_images([[0.0] * 5])
    with pytest.raises(RequestError, match="square"):
        parse_leaf_images([[0.0] * 4, [0.0] * 9])


def test_tokens_are_the_most_frequent_words():
    tokens, words = tokenize(["The cat, the dog!", "the END", ""], vocabulary=5, length=4)
    assert words == ("<pad>", "<unk>", "the", "!", ",")  # ties by alphabet
    assert tokens.tolist() == [[2, 1, 4, 2], [2, 1, 0, 0], [0, 0, 0, 0]]
