import errno
import fcntl
import os
import resource
import signal
import time

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mooring.core.errors import RequestError, WorkError
from mooring.core.penalty import PerClientPenalty
from mooring.runs.atomic_files import (
    DamagedFile,
    json_bytes,
    parquet_bytes,
    read_checked,
    read_json,
    read_parquet,
    remove_leftovers,
    replace_file,
    to_plain,
    with_checksum,
    write_atomically,
    write_json,
    write_parquet,
)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_writes_sync_before_rename_and_directory_after(tmp_path, faults):
    log = faults.calls_of(lambda: write_atomically(tmp_path / "a", b"x" * 10))
    assert log == ["open", "write", "fsync", "rename", "open", "fsync"]
    assert names(tmp_path) == ["a"]


def test_short_writes_are_continued(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:7]))
    write_atomically(tmp_path / "a", bytes(range(100)))
    assert (tmp_path / "a").read_bytes() == bytes(range(100))


@pytest.mark.parametrize("old", [None, b"old content"])
def test_killed_anywhere_leaves_old_or_new_and_cleans_up(tmp_path, faults, old):
    path, new = tmp_path / "a", b"new" * 1000
    log = faults.calls_of(lambda: write_atomically(path, new))
    for k, midway in faults.kills(log):
        for left in tmp_path.iterdir():
            left.unlink()
        if old is not None:
            path.write_bytes(old)
        assert faults.killed_at(k, lambda: write_atomically(path, new), midway=midway) == faults.KILLED
        found = path.read_bytes() if path.exists() else None
        assert found == (new if k > log.index("rename") + 1 else old)
        assert len(remove_leftovers(tmp_path)) == (1 if log.index("open") + 1 < k <= log.index("rename") + 1 else 0)
        assert names(tmp_path) == (["a"] if found is not None else [])


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_failing_disk_keeps_a_whole_file_and_says_so(tmp_path, faults, code):
    path = tmp_path / "a"
    log = faults.calls_of(lambda: write_atomically(path, b"old"))
    for k, _ in enumerate(log, 1):
        write_atomically(path, b"old")
        with pytest.raises(WorkError) as error:
            faults.failing_at(k, code, lambda: write_atomically(path, b"new"))
        assert str(path) in str(error.value) and os.strerror(code) in str(error.value)
        assert path.read_bytes() == (b"new" if k > log.index("rename") + 1 else b"old")
        assert names(tmp_path) == ["a"]


def test_a_real_limit_on_file_size_keeps_the_old_file(tmp_path, faults):
    path = tmp_path / "a"
    write_atomically(path, b"old")

    def too_large():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with pytest.raises(WorkError, match="File too large"):
            write_atomically(path, b"x" * 5000)

    assert faults.wait(faults.fork(too_large)) == faults.DONE
    assert path.read_bytes() == b"old" and names(tmp_path) == ["a"]


def test_a_child_tells_failure_from_success(faults):
    assert faults.wait(faults.fork(lambda: 1 / 0)) == faults.BROKEN


def test_a_living_writer_keeps_its_temporary(tmp_path, faults):
    ready, go = os.pipe(), os.pipe()

    def slow():
        real = os.rename

        def rename(*args):
            os.write(ready[1], b"x")
            os.read(go[0], 1)
            real(*args)

        os.rename = rename
        replace_file(tmp_path / "a", b"data")

    pid = faults.fork(slow)
    os.read(ready[0], 1)
    assert remove_leftovers(tmp_path) == []
    os.write(go[1], b"x")
    assert faults.wait(pid) == faults.DONE
    assert (tmp_path / "a").read_bytes() == b"data"


def test_a_file_swept_between_creation_and_lock_is_made_again(tmp_path, monkeypatch):
    opened = os.open
    swept = []

    def open_then_clean(path, flags, *args):
        handle = opened(path, flags, *args)
        if flags & os.O_CREAT and not swept:
            swept.extend(remove_leftovers(tmp_path))
        return handle

    monkeypatch.setattr(os, "open", open_then_clean)
    write_atomically(tmp_path / "a", b"data")
    assert len(swept) == 1 and names(tmp_path) == ["a"] and (tmp_path / "a").read_bytes() == b"data"


def test_only_our_temporaries_are_removed(tmp_path):
    for name in (".mooring-0.tmp", "mine.tmp", ".other.tmp", ".mooring-notes"):
        (tmp_path / name).write_text("x")
    remove_leftovers(tmp_path)
    assert names(tmp_path) == [".mooring-notes", ".other.tmp", "mine.tmp"]


def test_a_locked_temporary_is_released_by_a_kill(tmp_path, faults):
    temp = tmp_path / ".mooring-1.tmp"
    temp.write_text("x")
    ready = os.pipe()

    def hold():
        fcntl.flock(os.open(temp, os.O_RDONLY), fcntl.LOCK_EX)
        os.write(ready[1], b"x")
        time.sleep(60)

    pid = faults.fork(hold)
    os.read(ready[0], 1)
    assert remove_leftovers(tmp_path) == []
    os.kill(pid, signal.SIGKILL)
    assert faults.wait(pid) == -signal.SIGKILL
    assert remove_leftovers(tmp_path) == [temp]


SCHEMA = {"columns": ["é", "b"], "mean": np.float64(0.1), "scale": np.array([1.5, np.nan]), "n": 3, "ok": True}


def test_json_policy(tmp_path):
    path = tmp_path / "schema.json"
    write_json(path, SCHEMA | {"most": float("inf"), "least": -np.inf, "t": torch.tensor([1.0, 2.0]), "none": None})
    assert read_json(path) == {
        "columns": ["é", "b"],
        "mean": 0.1,
        "scale": [1.5, None],
        "n": 3,
        "ok": True,
        "most": "Infinity",
        "least": "-Infinity",
        "t": [1.0, 2.0],
        "none": None,
    }
    assert "NaN" not in path.read_text() and '"é"' in path.read_text()


def test_equal_json_is_equal_bytes():
    shuffled = dict(reversed(SCHEMA.items()))
    assert json_bytes(SCHEMA) == json_bytes(shuffled)


def test_plain_refuses_what_it_cannot_store():
    assert to_plain(PerClientPenalty((1.0, 2.0))) == {"per_client": [1.0, 2.0]}
    for value in (object(), {1: "a"}, {"a": b"x"}, PerClientPenalty):
        with pytest.raises(TypeError, match="cannot be stored"):
            to_plain(value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=15,
)


@settings(max_examples=50, deadline=None)
@given(value=st.dictionaries(st.text().filter(lambda key: key != "seal"), json_values, max_size=5))
def test_json_round_trip(tmp_path_factory, value):
    path = tmp_path_factory.getbasetemp() / "round_trip.json"
    path.write_bytes(json_bytes(value))
    assert read_json(path) == value


FRAME = pd.DataFrame(
    {
        "client": ["a", "b", None],
        "row": [1, 2, 3],
        "loss": [0.1, np.nan, 3.0],
        "part": pd.Categorical(["train", "test", "train"]),
    }
)


def test_parquet_round_trip_and_equal_bytes(tmp_path):
    write_parquet(tmp_path / "a.parquet", FRAME)
    found = read_parquet(tmp_path / "a.parquet")
    pd.testing.assert_frame_equal(found, FRAME.astype({"part": FRAME["part"].cat.categories.dtype}))
    relabelled = FRAME.set_axis([7, 8, 9]).assign(part=pd.Categorical(FRAME["part"], ["train", "test"]))
    assert len({parquet_bytes(FRAME), parquet_bytes(FRAME.copy()), parquet_bytes(relabelled)}) == 1
    assert pq.read_table(tmp_path / "a.parquet").num_rows == 3  # other tools can read it


@pytest.mark.parametrize(
    "name, data, read",
    [("a.json", json_bytes(SCHEMA), read_json), ("a.parquet", parquet_bytes(FRAME), read_parquet)],
)
def test_damage_is_never_read(tmp_path, faults, name, data, read):
    path = tmp_path / name
    for damaged in faults.damages(data, 300):
        path.write_bytes(damaged)
        with pytest.raises(DamagedFile) as error:
            read(path)
        assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("read", [read_json, read_parquet, read_checked])
def test_missing_and_unreadable_files_are_one_sentence(tmp_path, read):
    with pytest.raises(RequestError, match=r"nowhere does not exist\.$"):
        read(tmp_path / "nowhere")
    with pytest.raises(RequestError, match="is not a file"):
        read(tmp_path)
    (tmp_path / "garbage").write_bytes(os.urandom(500))
    with pytest.raises(DamagedFile, match="not written by Mooring"):
        read(tmp_path / "garbage")


def test_a_sealed_file_of_another_format_is_refused(tmp_path):
    (tmp_path / "a").write_bytes(json_bytes(SCHEMA))
    with pytest.raises(DamagedFile, match="not a Parquet file"):
        read_parquet(tmp_path / "a")
    (tmp_path / "a").write_bytes(parquet_bytes(FRAME))
    with pytest.raises(DamagedFile, match="not a JSON file"):
        read_json(tmp_path / "a")


def test_text_that_looks_like_a_seal_is_refused():
    with pytest.raises(RequestError, match="mooring-sha256:"):
        json_bytes({"client": "mooring-sha256:"})
    with pytest.raises(RequestError, match="mooring-sha256:"):
        with_checksum(b"no place for a seal")
