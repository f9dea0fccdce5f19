"""A run directory is written by one process at a time; pipes do not hang a command; packed files have a limit."""

import io
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import mooring
from mooring.cli import main
from mooring.core import size_limits
from mooring.core.errors import RequestError
from mooring.data import file_readers
from mooring.data.clients import from_arrays
from mooring.engines.compare import resume_comparison
from mooring.engines.fit import resume_fit
from mooring.runs import checkpoint
from mooring.runs.atomic_files import (
    LOCK_FILE,
    DamagedFile,
    directory_lock,
    parquet_bytes,
    read_bytes,
    read_table,
    remove_leftovers,
)
from mooring.runs.directory import MODELS_FILE, check_writable, open_run
from tests.support.faults import DONE, fork, wait


@pytest.fixture
def rows(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"client": [f"c{k % 4}" for k in range(80)], "x": rng.normal(size=80)})
    frame.assign(target=frame["x"] + rng.normal(size=80)).to_csv(tmp_path / "rows.csv", index=False)
    monkeypatch.chdir(tmp_path)
    return "rows.csv"


def said(capsys, *argv):
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in argv])
    return left.value.code, capsys.readouterr().err


def test_a_locked_run_names_the_process_that_holds_it(tmp_path):
    ready, done = os.pipe(), os.pipe()

    def hold():
        with directory_lock(tmp_path):
            os.write(ready[1], b"x")
            os.read(done[0], 1)

    child = fork(hold)
    os.read(ready[0], 1)
    with pytest.raises(RequestError, match=rf"is in use by process {child} on .+; wait"), directory_lock(tmp_path):
        pass
    os.write(done[1], b"x")
    assert wait(child) == DONE
    with directory_lock(tmp_path):
        assert (tmp_path / LOCK_FILE).read_text().startswith(f"process {os.getpid()} on ")
    assert not (tmp_path / LOCK_FILE).exists()


def test_the_lock_of_a_killed_process_is_gone(tmp_path):
    ready = os.pipe()

    def hold():
        with directory_lock(tmp_path):
            os.write(ready[1], b"x")
            time.sleep(60)

    child = fork(hold)
    os.read(ready[0], 1)
    os.kill(child, signal.SIGKILL)
    assert wait(child) == -signal.SIGKILL and (tmp_path / LOCK_FILE).exists()
    with directory_lock(tmp_path):
        pass


def test_where_nothing_can_be_locked_there_is_no_lock(tmp_path, monkeypatch):
    import fcntl

    def refuse(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with directory_lock(tmp_path):
        pass


def test_two_resumes_at_once(rows, tmp_path):
    mooring.fit(rows, algorithm="fedavg", rounds=3, threads=1, out="run")
    mooring.compare(rows, ["local", "fedavg"], rounds=3, threads=1, out="many")
    for run, again in (("run", resume_fit), ("many", resume_comparison)):
        with (
            directory_lock(tmp_path / run),
            pytest.raises(RequestError, match=f"{run} is in use by process {os.getpid()}"),
        ):
            again(run)
        again(run)
        assert not (tmp_path / run / LOCK_FILE).exists()


def test_a_pipe_named_like_a_temporary_does_not_hang(tmp_path):
    pipe = tmp_path / ".mooring-0123456789abcdef.tmp"
    os.mkfifo(pipe)
    os.mkfifo(tmp_path / "run.toml")
    (tmp_path / ".mooring-link.tmp").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    remove_leftovers(tmp_path)
    assert not pipe.exists() and (tmp_path / "elsewhere").exists()
    with pytest.raises(RequestError, match="is not a file"):
        read_bytes(tmp_path / "run.toml")


def test_a_small_file_that_unpacks_to_gigabytes_is_refused(tmp_path, monkeypatch):
    """Equal cells pack to almost nothing: what counts is how many there are."""
    sink = io.BytesIO()
    count = 2**20
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), pa.array(["x"])).cast(pa.string())
    table = pa.table({"a": np.zeros(count), "b": column})
    with pq.ParquetWriter(sink, table.schema) as writer:
        for _ in range(8):
            writer.write_table(table)
    path = tmp_path / "bomb.parquet"
    path.write_bytes(sink.getvalue())
    assert path.stat().st_size < 100_000
    assert len(file_readers.read_parquet(path)) == 8 * count
    monkeypatch.setattr(size_limits, "MAX_UNPACKED_BYTES", 16 * 8 * count - 1)
    with pytest.raises(RequestError, match=r"bomb\.parquet: unpacks to more than"):
        file_readers.read_parquet(path)
    long = pa.table({"a": pa.DictionaryArray.from_arrays(pa.array(np.zeros(1000, np.int32)), pa.array(["x" * 10**5]))})
    (tmp_path / "texts").write_bytes(parquet_bytes(long.cast(pa.schema([("a", pa.string())]))))
    monkeypatch.setattr(size_limits, "MAX_UNPACKED_BYTES", 10**7)
    with pytest.raises(RequestError, match="texts: unpacks to more than"):
        read_table(tmp_path / "texts")


def test_an_out_that_cannot_be_written_is_noticed_at_once(rows, tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    for command in (
        ["fit", rows, "--out", "file/run"],
        ["compare", rows, "--out", "file/run"],
        ["advise", rows, "--out", "file/run"],
        ["predict", "run", rows, "--out", "file/p.csv"],
        ["personalize", "run", rows, "--out", "file/m.safetensors"],
    ):
        code, err = said(capsys, *command)
        assert code == 2 and "file is not a folder" in err, command
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(RequestError, match="does not allow it"):
        check_writable("run")


def test_arrays_that_changed_are_refused(rows):
    xs = [np.random.default_rng(k).normal(size=(12, 2)) for k in range(4)]
    parts = [np.array(["train"] * 8 + ["validation"] * 2 + ["test"] * 2)] * 4
    make = lambda: from_arrays(xs, [x.sum(1) for x in xs], parts=parts)  # noqa: E731
    mooring.fit(make(), algorithm="fedavg", rounds=2, threads=1, out="run")
    resume_fit("run", source=make())
    xs[2][5, 1] += 1e-9
    with pytest.raises(RequestError, match="has changed since the run began"):
        resume_fit("run", source=make())


def test_a_model_file_that_changed_is_refused(rows, tmp_path):
    net = tmp_path / "net.py"
    net.write_text("from torch import nn\n\ndef make(features):\n    return nn.Linear(features, 1)\n")
    mooring.fit(rows, model="net.py:make", algorithm="fedavg", rounds=2, threads=1, out="run")
    resume_fit("run")
    before = mooring.predict("run", rows)[0]
    net.write_text(net.read_text().replace("return", "return nn.Sequential(nn.Tanh()) and"))
    with pytest.raises(RequestError, match=r"net\.py has changed since the run began"):
        resume_fit("run", trust_code=True)
    assert mooring.predict("run", rows)[0].equals(before)  # by the copy that the run keeps


def test_a_finished_run_with_damaged_models_says_so(rows, capsys, tmp_path):
    mooring.fit(rows, algorithm="fedavg", rounds=3, threads=1, out="run")
    path = tmp_path / "run" / MODELS_FILE
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    code, err = said(capsys, "resume", "run")
    assert code != 0 and "models.safetensors is damaged" in err and "Remove it and resume" in err
    path.unlink()
    assert said(capsys, "resume", "run")[0] == 0
    assert path.read_bytes() == whole


def test_the_checkpoint_before_a_damaged_one_is_used(rows, tmp_path):
    mooring.fit(rows, algorithm="fedavg", rounds=6, checkpoint_every=2, threads=1, out="run")
    path = tmp_path / "run" / MODELS_FILE
    whole = path.read_bytes()
    path.unlink()
    newest = checkpoint.list_checkpoints("run")[0][1]
    newest.write_bytes(newest.read_bytes()[:-3])
    _, note = resume_fit("run")
    assert "Resuming from round 4 instead" in note and path.read_bytes() == whole


def test_predicting_with_a_comparison_names_the_method(rows, capsys):
    mooring.compare(rows, ["local", "fedavg"], rounds=2, threads=1, out="many")
    code, err = said(capsys, "predict", "many", rows)
    assert code == 0 and "the models are those of" in err
    assert len(mooring.predict("many/methods/fedavg", rows)[0]) == 80


@pytest.mark.processes
def test_control_c_names_the_command_that_resumes(rows, tmp_path):
    words = [sys.executable, "-m", "mooring", "fit", rows, "--rounds", "100000", "--checkpoint-every", "1",
             "--evaluate-every", "1", "--algorithm", "fedavg", "--out", "long run"]  # fmt: skip
    where = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(mooring.__file__))}
    child = subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=where, text=True)
    for _ in range(600):
        if list(tmp_path.glob("long run/checkpoint/*.safetensors")):
            break
        time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130 and "continue with `mooring resume 'long run'`" in err
    assert not open_run("long run").finished


def test_a_damaged_checkpoint_is_named(rows):
    mooring.fit(rows, algorithm="fedavg", rounds=2, threads=1, out="run")
    os.unlink("run/models.safetensors")
    for _, path in checkpoint.list_checkpoints("run"):
        path.write_bytes(b"")
    with pytest.raises(DamagedFile, match=r"round-0*2\.safetensors is damaged"):
        resume_fit("run")
