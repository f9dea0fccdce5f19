"""Named data sets: partition, protocol and scaling on the digits that need no file, on small files of the original
formats, and on the real data where MOORING_DATA names them."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from mooring.core.errors import RequestError
from mooring.core.seeds import generator
from mooring.data.benchmark_datasets import BENCHMARKS, EMNIST_CLASSES, load_benchmark
from mooring.data.image_datasets import PARTITIONS, interleave_classes, load_image_dataset
from tests.data.test_benchmark_file_formats import cifar_bytes, idx_bytes, leaf, write


def classes_of(rows, i):
    return set(rows.of(i)[1].tolist())


def images(n, seed=0, side=28):
    return np.random.default_rng(seed).integers(0, 256, (n, side, side), dtype=np.uint8)


def write_idx(folder, prefix, test, classes, first=0, n=40):
    folder.mkdir(parents=True, exist_ok=True)
    stored = {}
    for k, part in enumerate(("train", test)):
        x, y = images(n, k), (np.arange(n) % classes + first).astype(np.uint8)
        write(folder / f"{prefix}{part}-images-idx3-ubyte.gz", idx_bytes(x, 0x08))
        write(folder / f"{prefix}{part}-labels-idx1-ubyte", idx_bytes(y, 0x08))
        stored[part] = (x, y)
    return stored


@pytest.mark.parametrize("partition", [p for p in PARTITIONS if p != "group"])
@pytest.mark.parametrize("protocol", ["P1", "P2"])
def test_digits_are_all_used_once(partition, protocol):
    clients = load_image_dataset("digits", partition=partition, clients=10, protocol=protocol, validation=0.1)
    used = len(clients.train.y) + len(clients.validation.y) + len(clients.test.y)
    assert used == 1797 or (partition == "dirichlet_equal" and used > 1797 - 10)
    rows = torch.cat([clients.train.x, clients.validation.x, clients.test.x])
    assert len(rows.unique(dim=0)) == used  # no two digits are alike
    assert clients.kind == "classes" and clients.classes == tuple("0123456789") and rows.dtype == torch.float32
    assert protocol in clients.title


def test_p1_tests_on_the_clients_own_proportions():
    clients = load_image_dataset("digits", clients=12, classes_per_client=3)
    for i in range(12):
        own, seen = clients.train.of(i)[1], clients.test.of(i)[1]
        assert len(classes_of(clients.train, i)) == 3 and classes_of(clients.test, i) <= classes_of(clients.train, i)
        share = torch.bincount(own, minlength=10) / len(own)
        assert (torch.bincount(seen, minlength=10) - share * len(seen)).abs().max() < 2
        assert len(seen) == pytest.approx(0.2 * (len(seen) + len(own)), abs=0.6)


def test_p2_shares_one_test_set_that_is_stored_once():
    clients = load_image_dataset("digits", clients=12, protocol="P2", test_samples=200)
    assert len(clients.test.y) == 200 and clients.test.size.tolist() == [200] * 12
    assert clients.test.of(0)[0].data_ptr() == clients.test.of(11)[0].data_ptr()
    assert torch.bincount(clients.test.y).tolist() == pytest.approx([20] * 10, abs=1)
    batch = clients.test.select(torch.tensor([3, 7])).padded()
    assert torch.equal(batch.x[0], batch.x[1]) and torch.equal(batch.x[0], clients.test.x)


def test_pixels_are_standardised_by_constants():
    flat, image = (load_image_dataset("digits", clients=5, flat=flat, dtype=torch.float64) for flat in (True, False))
    assert image.train.x.shape[1:] == (1, 8, 8) and torch.equal(image.train.x.flatten(1), flat.train.x)
    pixels = flat.train.x * 0.3760 + 0.3053
    assert torch.allclose(pixels * 16, (pixels * 16).round(), atol=1e-9) and pixels.max() == pytest.approx(1)
    everything = torch.cat([flat.train.x, flat.test.x])
    assert abs(everything.mean()) < 1e-3 and everything.std() == pytest.approx(1, abs=1e-3)


def test_seeds_samples_and_classes():
    def digits(**options):
        return load_image_dataset("digits", clients=6, **options)

    assert torch.equal(digits(seed=1).train.x, digits(seed=1).train.x)
    assert not torch.equal(digits(seed=1).train.x[:50], digits(seed=2).train.x[:50])
    small = digits(samples_per_client=30, validation=0.2)
    assert [part.size.tolist() for part in (small.train, small.validation, small.test)] == [[18] * 6, [6] * 6, [6] * 6]
    some = digits(only=("7", "1"), partition="iid")
    assert some.classes == ("7", "1") and set(some.train.y.tolist()) == {0, 1}
    sevens = load_benchmark("digits").x[load_benchmark("digits").y == 7]
    assert (some.train.y == 0).sum() + (some.test.y == 0).sum() == len(sevens)


def test_spread_keeps_proportions_in_every_stretch():
    y = np.repeat([0, 1, 2], [600, 300, 100])
    order = interleave_classes(y, generator(0, "split"))
    assert sorted(order) == list(range(1000))
    for start in range(0, 1000, 100):
        assert np.bincount(y[order[start : start + 100]], minlength=3) == pytest.approx([60, 30, 10], abs=3)


def test_mnist_from_original_files(tmp_path):
    stored = write_idx(tmp_path, "", "t10k", 10)
    clients = load_image_dataset("mnist", data_dir=tmp_path, clients=4, classes_per_client=5, protocol="P2", least=2)
    assert "original IDX" in clients.title
    pixels = (clients.test.x * 0.3081 + 0.1307) * 255
    assert np.allclose(pixels.view(-1, 28, 28), stored["t10k"][0], atol=1e-3)
    assert clients.test.y.tolist() == stored["t10k"][1].tolist() and len(clients.train.y) == 40
    assert (
        len(load_image_dataset("mnist", data_dir=tmp_path, clients=4, partition="iid").train.y) == 64
    )  # P1: 80 % of all


def test_fashion_originals_need_their_own_folder(tmp_path):
    write_idx(tmp_path, "", "t10k", 10)
    with pytest.raises(RequestError, match="fashion_mnist/train-images"):
        load_benchmark("fashion_mnist", tmp_path)
    write_idx(tmp_path / "fashion_mnist", "", "t10k", 10)
    assert load_benchmark("fashion-mnist", tmp_path).classes[9] == "Ankle boot"


def test_emnist_is_upright_and_letters_start_at_one(tmp_path):
    stored = write_idx(tmp_path / "emnist", "emnist-letters-", "test", 26, first=1, n=52)
    pool = load_benchmark("emnist_letters", tmp_path)
    assert np.array_equal(pool.x, stored["train"][0].transpose(0, 2, 1))
    assert pool.y.min() == 0 and pool.y.max() == 25 and pool.classes[25] == "z"
    assert {name: len(classes) for name, classes in EMNIST_CLASSES.items()} == {
        "balanced": 47,
        "digits": 10,
        "letters": 26,
    }
    clients = load_image_dataset(
        "emnist_letters", tmp_path, only=tuple("abcdefghij"), clients=5, classes_per_client=3, least=2
    )
    assert all(len(classes_of(clients.train, i)) == 3 for i in range(5))


def test_labels_must_fit(tmp_path):
    write_idx(tmp_path, "", "t10k", 11)
    with pytest.raises(RequestError, match="labels 0 to 10"):
        load_benchmark("mnist", tmp_path)
    write(tmp_path / "train-labels-idx1-ubyte", idx_bytes(np.zeros(3, dtype=np.uint8), 0x08))
    with pytest.raises(RequestError, match="3 labels for 40 images"):
        load_benchmark("mnist", tmp_path)


def test_cifar_from_binary_batches(tmp_path):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    x = np.random.default_rng(0).integers(0, 256, (30, 32, 32, 3), dtype=np.uint8)
    for k in (1, 2):
        write(folder / f"data_batch_{k}.bin", cifar_bytes(x, np.arange(30) % 10))
    write(folder / "test_batch.bin.gz", cifar_bytes(x[:10], range(10)))
    clients = load_image_dataset("cifar10", tmp_path, partition="iid", clients=3, protocol="P2", flat=False)
    assert clients.train.x.shape == (60, 3, 32, 32) and "2 binary batches" in clients.title
    red = (clients.test.x[:, 0] * 0.2470 + 0.4914) * 255
    assert np.allclose(red, x[:10, :, :, 0], atol=1e-3)


def test_pickled_cifar_is_refused(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    write(folder / "data_batch_1", b"\x80\x02}q\x01" + bytes(100) + b".")
    with pytest.raises(RequestError, match="download the binary version"):
        load_benchmark("cifar10", tmp_path)


def test_leaf_users_are_clients(tmp_path):
    rng = np.random.default_rng(0)
    users = {
        f"f{k:04d}": {"x": rng.random((6 + k, 784)).round(3).tolist(), "y": (36 + rng.integers(0, 3, 6 + k)).tolist()}
        for k in range(3)
    }
    (tmp_path / "femnist" / "train").mkdir(parents=True)
    write(tmp_path / "femnist" / "train" / "all_data_0.json", json.dumps(leaf(users)).encode())
    clients = load_image_dataset("femnist", tmp_path)
    assert clients.names == tuple(users) and (clients.train.size + clients.test.size).tolist() == [6, 7, 8]
    assert {clients.classes[k] for k in clients.train.y.tolist()} <= set("abc")
    pooled = load_image_dataset("femnist", tmp_path, partition="iid", clients=2, only=tuple("abc"))
    assert len(pooled.train.y) + len(pooled.test.y) == 21

    users["f0000"]["y"][0] = 62
    write(tmp_path / "femnist" / "train" / "all_data_0.json", json.dumps(leaf(users)).encode())
    with pytest.raises(RequestError, match="femnist: label 62 found; expected 0 to 61"):
        load_benchmark("femnist", tmp_path)


def test_sent140_becomes_tokens(tmp_path):
    rows = [["1", "Mon", "NO_QUERY", "ann", f"good day number {k}", "training"] for k in range(6)]
    (tmp_path / "sent140").mkdir()
    content = leaf({"ann": {"x": rows, "y": [1, 0] * 3}, "bob": {"x": rows[:2], "y": [1, 0]}})
    write(tmp_path / "sent140" / "all_data.json.gz", json.dumps(content).encode())
    clients = load_image_dataset("sent140", tmp_path)
    assert clients.names == ("ann",)  # bob has fewer than 5 tweets
    assert clients.train.x.dtype == torch.int64 and clients.train.x.shape[1] == 25
    with_bob = load_image_dataset("sent140", tmp_path, least=2, protocol="P2")
    assert with_bob.test.size.tolist() == [2, 2]  # one held-out tweet of each, common to both


def test_a_missing_data_set_says_where_it_was_looked_for(tmp_path, monkeypatch):
    for name in set(BENCHMARKS) - {"digits"}:
        with pytest.raises(RequestError, match=f"'{name}' was not found in {tmp_path}: put .* there"):
            load_benchmark(name, tmp_path)
    monkeypatch.setenv("MOORING_DATA", str(tmp_path / "elsewhere"))
    with pytest.raises(RequestError, match="elsewhere"):
        load_benchmark("mnist")
    monkeypatch.delenv("MOORING_DATA")
    with pytest.raises(RequestError, match=r"put mnist\.npz .* in a folder and name it with data_dir or MOORING_DATA"):
        load_benchmark("mnist")


def test_broken_npz_files_are_named(tmp_path):
    path = tmp_path / "mnist.npz"
    path.write_bytes(b"no zip")
    with pytest.raises(RequestError, match=r"mnist\.npz: not an npz file"):
        load_benchmark("mnist", tmp_path)
    np.savez(path, x_train=np.zeros(3))
    with pytest.raises(RequestError, match="expected the arrays x_train, y_train"):
        load_benchmark("mnist", tmp_path)
    np.savez(path, x_train=np.array([{}], dtype=object))  # stored as a pickle
    with pytest.raises(RequestError, match="cannot be read"):
        load_benchmark("mnist", tmp_path)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"name": "minst"}, "unknown data set 'minst'; known are digits, mnist"),
        ({"partition": "random"}, "unknown partition 'random'; known: classes"),
        ({"partition": "group"}, "does not know who made its rows"),
        ({"protocol": "P3"}, r"protocol must be P1 \(own test rows\) or P2"),
        ({"test": 0.0, "protocol": "P2"}, "needs a test share above 0"),
        ({"test": 0.7, "validation": 0.4}, "leave some rows to train"),
        ({"only": ("7", "x")}, "class 'x' is not in the data; known are 0, 1"),
        ({"clients": 600, "partition": "iid"}, "leaves a client of 600 with 2 rows; at least 5 are needed"),
        ({"clients": 1000}, "class 1 has|rows but|leaves a client"),
        ({"clients": 10, "samples_per_client": 2, "validation": 0.3}, "client 'client 0' has 2 rows; too few"),
    ],
)
def test_wrong_requests_are_named(options, says):
    with pytest.raises(RequestError, match=says):
        load_image_dataset(**{"name": "digits", **options})


DATA = Path(os.environ.get("MOORING_DATA", ""))


def real(file):
    here = bool(os.environ.get("MOORING_DATA")) and (DATA / file).is_file()
    return pytest.mark.skipif(not here, reason=f"{file} is not in the folder that MOORING_DATA names")


@real("mnist.npz")
def test_mnist_gives_the_counts_of_001():
    """Table 2 of `mspp`: 100 devices, 63,000 images, 56,700 of them to train; 567 is also its SGD batch."""
    clients = load_image_dataset("mnist", samples_per_client=630, test=0.1)
    assert clients.train.size.tolist() == [567] * 100 and len(clients.test.y) == 6300
    assert all(len(classes_of(clients.train, i)) == 2 for i in range(100))
    assert clients.train.x.mean() == pytest.approx(0, abs=0.01) and clients.train.x.std() == pytest.approx(1, abs=0.01)


@real("mnist_writers.npz")
def test_mnist_writers():
    clients = load_image_dataset("mnist_writers")
    assert len(clients) == 539 and len(clients.train.y) + len(clients.test.y) == 60_000
    some = load_image_dataset("mnist_writers", clients=50, protocol="P2", test_samples=500)
    assert set(some.names) <= set(clients.names) and some.test.size.tolist() == [500] * 50


@real("airline_tweets.npz")
def test_tweets():
    clients = load_image_dataset("tweets")
    assert len(clients) == 474 and clients.train.x.dtype == torch.int64 and clients.train.x.shape[1] == 32
    assert clients.classes == ("negative", "neutral", "positive") and clients.train.x.max() < 4000


@real("shakespeare_roles.npz")
def test_shakespeare_windows_are_consecutive_text():
    pool = load_benchmark("shakespeare")
    with np.load(DATA / "shakespeare_roles.npz") as npz:
        text = bytes(npz["text_bytes"][: npz["text_offsets"][1]]).decode()
    first = "".join(pool.classes[k] for k in pool.x[0]) + pool.classes[pool.y[0]]
    second = "".join(pool.classes[k] for k in pool.x[1]) + pool.classes[pool.y[1]]
    assert first == text[:81] and second == text[81:162] and len(pool.classes) == 77
    assert (pool.group == pool.group[0]).sum() == len(text) // 81


@real("fashion_mnist.npz")
@real("cifar10_25k.npz")
def test_fashion_and_cifar_are_standardised():
    for name, shape in (("fashion_mnist", (1, 28, 28)), ("cifar10", (3, 32, 32))):
        clients = load_image_dataset(name, clients=20, samples_per_client=100, partition="iid", flat=False)
        assert clients.train.x.shape[1:] == shape and clients.classes[0] in ("T-shirt/top", "airplane")
        assert abs(clients.train.x.mean()) < 0.05 and clients.train.x.std() == pytest.approx(1, abs=0.05)
