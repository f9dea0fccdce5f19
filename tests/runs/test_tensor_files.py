import json
import tracemalloc
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from mooring.core.errors import RequestError
from mooring.runs.atomic_files import DamagedFile, json_bytes
from mooring.runs.disk_matrix import DiskMatrix
from mooring.runs.tensor_files import flatten, read_tensors, tensor_file, unflatten, write_tensors


class Optimiser(NamedTuple):
    m: Tensor
    step: Tensor | None


class Server(NamedTuple):
    w: Tensor
    c: Tensor | None
    opt: Optimiser | None


class Empty(NamedTuple):
    pass


def tensor_bytes(tensors: dict[str, Any], meta: dict[str, Any]) -> bytes:
    """What `write_tensors` writes, the seal still blank."""
    head, parts = tensor_file(tensors, meta)
    return b"".join([head, *parts])


def bits(a: Tensor) -> bytes:
    return a.reshape(-1).view(torch.uint8).numpy().tobytes()


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    if isinstance(a, tuple):
        return type(a) is type(b) and all(map(same, a, b))
    return a is b


W = torch.tensor([1.0, -0.0, float("nan"), float("inf")])
STATES = [
    Server(W, None, None),
    Server(W, W.double(), Optimiser(W, None)),
    Server(W, None, Optimiser(W, torch.tensor(3))),
    Empty(),
    W,
    None,
]


@pytest.mark.parametrize("state", STATES)
def test_states_survive_a_file(tmp_path, state):
    write_tensors(tmp_path / "a", flatten("server", state) | flatten("client", STATES[1]), {})
    tensors, _ = read_tensors(tmp_path / "a")
    template = state if not isinstance(state, Server) else Server(W, W, Optimiser(W, W))
    assert same(unflatten(template, "server", tensors), state)
    assert same(unflatten(STATES[2], "client", tensors), STATES[1])


def test_names_are_readable():
    assert sorted(flatten("server", STATES[2])) == ["server/c=None", "server/opt/m", "server/opt/step", "server/w"]


def test_a_missing_part_is_named():
    with pytest.raises(RequestError, match=r"no 'server/w'; it holds client/v"):
        unflatten(STATES[0], "server", {"client/v": W})
    with pytest.raises(TypeError, match=r"server/w: .* got float"):
        flatten("server", Server(1.0, None, None))


def test_one_entry_that_was_expanded(tmp_path):
    """A client that is alone in its cohort: one entry is contiguous whatever its stride, even 0."""
    alone = {"a": torch.zeros(2, 1).expand(2, 1)[:1, 0], "n": torch.tensor(7).expand(1), "none": torch.zeros(0)}
    assert alone["n"].stride() == (0,)
    write_tensors(tmp_path / "x.safetensors", alone, {})
    found, _ = read_tensors(tmp_path / "x.safetensors")
    assert all(torch.equal(found[name], right) for name, right in alone.items())


def test_tensors_that_share_memory_or_are_views(tmp_path):
    grid = torch.arange(12.0).reshape(3, 4)
    tensors = {"a": grid, "b": grid, "c": grid.T, "d": grid[1], "e": grid[:0], "f": grid[0].expand(2, 4)}
    write_tensors(tmp_path / "t", tensors, {})
    found, _ = read_tensors(tmp_path / "t")
    assert all(same(found[name], tensors[name].clone()) for name in tensors)


FINITE = st.floats(allow_nan=False, allow_infinity=False)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


@settings(max_examples=40, deadline=None)
@given(
    parts=st.dictionaries(
        st.text(min_size=1, max_size=5).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)),
        max_size=5,
    ),
    meta=st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5) | FINITE, max_size=4),
)
def test_round_trip_and_equal_bytes(tmp_path_factory, parts, meta):
    path = tmp_path_factory.getbasetemp() / "round_trip.safetensors"
    torch.manual_seed(0)
    tensors = {name: (100 * torch.rand(shape)).to(dtype) for name, (dtype, shape) in parts.items()}
    write_tensors(path, tensors, meta)
    found, found_meta = read_tensors(path)
    assert found_meta == meta and found.keys() == tensors.keys()
    assert all(same(found[name], tensors[name]) for name in tensors)
    backwards = dict(reversed(tensors.items())), dict(reversed(meta.items()))
    before = path.read_bytes()
    write_tensors(path, *backwards)
    assert path.read_bytes() == before


TENSORS = {"server/w": torch.arange(5.0), "client/v": torch.ones(2, 3, dtype=torch.float64), "empty": torch.empty(0, 4)}
META = {"records": [{"t": 1, "loss": 0.25}], "algorithm": "Ditto", "ünï": "ü"}


def test_one_metadata_key_of_sorted_json(tmp_path):
    write_tensors(tmp_path / "a", TENSORS, META)
    with safe_open(tmp_path / "a", "pt") as file:
        metadata = file.metadata()
    assert list(metadata) == ["mooring"]
    held = json.loads(metadata["mooring"])
    assert held["meta"] == META and held["seal"].startswith("mooring-sha256:")
    assert list(held["meta"]) == sorted(META)
    assert len({tensor_bytes(TENSORS, META) for _ in range(20)}) == 1


def test_different_contents_have_different_seals(tmp_path):
    def seal(tensors, meta):
        write_tensors(tmp_path / "a", tensors, meta)
        return (tmp_path / "a").read_bytes().split(b"mooring-sha256:")[1][:64]

    w = TENSORS["server/w"]
    others = [
        (TENSORS | {"server/w": w.nextafter(w + 1)}, META),
        (TENSORS | {"server/w": w.view(torch.int32)}, META),
        (TENSORS | {"empty": torch.empty(0, 5)}, META),
        ({name.replace("w", "x"): tensor for name, tensor in TENSORS.items()}, META),
        (TENSORS, META | {"algorithm": "ditto"}),
    ]
    assert len({seal(*each) for each in [(TENSORS, META), *others]}) == len(others) + 1


def test_every_byte_of_a_file_matters(tmp_path):
    path = tmp_path / "a"
    write_tensors(path, {"w": torch.arange(3.0)}, {"ü": 1})
    data = path.read_bytes()
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        with pytest.raises(DamagedFile):
            read_tensors(path)


def test_the_bytes_are_those_of_the_library():
    kinds = [
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.float16,
        torch.bfloat16,
        torch.int32,
        torch.float32,
    ]
    tensors = {
        f"{n}ü": torch.ones(n % 4, 3).to(kind) for n, kind in enumerate([*kinds, torch.float64, torch.int64] * 2)
    }
    ours = tensor_bytes(tensors, META)
    size = int.from_bytes(ours[:8], "little")
    assert ours == save(tensors, json.loads(ours[8 : 8 + size])["__metadata__"])


def test_a_matrix_on_disk_is_written_as_the_same_matrix(tmp_path):
    first, rows = torch.arange(3.0), torch.randn(2, 3)
    shelf, memory = DiskMatrix(first, 4), first.repeat(4, 1)
    place = torch.tensor([3, 1])
    shelf[place], memory[place] = rows, rows
    assert tensor_bytes({"v": shelf}, META) == tensor_bytes({"v": memory}, META)


def test_a_file_is_never_in_memory_as_a_whole(tmp_path):
    """Two matrices of 32 MB are written without bytes of that size."""
    big = {str(n): torch.ones(1 << 20, 4, dtype=torch.float64) for n in range(2)}
    tracemalloc.start()
    write_tensors(tmp_path / "a", big, META)
    written = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert written < 1 << 20
    found, _ = read_tensors(tmp_path / "a")
    assert all(same(found[name], big[name]) for name in big)


def test_metadata_keeps_numbers_exactly(tmp_path):
    numbers = [float("inf"), -float("inf"), -0.0, 0.1 + 0.2, 5e-324, 2**70, 1, 1.0, None]
    write_tensors(tmp_path / "a", {}, {"numbers": numbers, "none": float("nan")})
    meta = read_tensors(tmp_path / "a")[1]
    assert repr(meta["numbers"]) == repr(numbers) and meta["none"] != meta["none"]


def test_not_a_tensor_file(tmp_path):
    (tmp_path / "a").write_bytes(json_bytes({"a": 1}))
    with pytest.raises(DamagedFile, match="not a tensor file"):
        read_tensors(tmp_path / "a")
    with pytest.raises(RequestError, match="does not exist"):
        read_tensors(tmp_path / "b")
