import errno
import os
import shutil

import pytest
import torch

from mooring.core.errors import WorkError
from mooring.runs import checkpoint
from mooring.runs.atomic_files import DamagedFile, remove_leftovers
from mooring.runs.tensor_files import write_tensors


def state(round: int):
    return {"server/w": torch.full((40,), float(round)), "client/v": torch.arange(20.0) * round}


def save(run, round):
    checkpoint.write_checkpoint(
        run, round, state(round), {"records": [{"t": t, "loss": 1 / t} for t in range(1, round + 1)]}
    )


def rounds(run):
    return [round for round, _ in checkpoint.list_checkpoints(run)]


def is_whole(run, round):
    found = checkpoint.read_latest_checkpoint(run)
    equal = all(torch.equal(found.tensors[name], tensor) for name, tensor in state(round).items())
    return found.round == round and equal and len(found.meta["records"]) == round


def everything(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_keeps_the_two_latest(tmp_path):
    assert checkpoint.read_latest_checkpoint(tmp_path) is None
    for round in (1, 2, 3, 10, 100):
        save(tmp_path, round)
        assert is_whole(tmp_path, round) and checkpoint.read_latest_checkpoint(tmp_path).note is None
    assert rounds(tmp_path) == [100, 10]
    (tmp_path / "checkpoint" / "notes.txt").write_text("mine")
    assert rounds(tmp_path) == [100, 10]


def test_what_a_kill_before_dropping_left_is_dropped_later(tmp_path):
    for round in (1, 2):
        save(tmp_path, round)
    first = checkpoint.list_checkpoints(tmp_path)[-1][1]
    kept = first.read_bytes()
    save(tmp_path, 3)
    first.write_bytes(kept)
    assert rounds(tmp_path) == [3, 2, 1]
    checkpoint.drop_old(tmp_path)
    assert rounds(tmp_path) == [3, 2] and is_whole(tmp_path, 3)


def test_going_back_drops_what_lies_ahead(tmp_path):
    for round in (4, 8):
        save(tmp_path, round)
    (tmp_path / "checkpoint" / "round-00000008.safetensors").write_bytes(b"damaged")
    save(tmp_path, 6)
    assert rounds(tmp_path) == [6, 4] and is_whole(tmp_path, 6)


def test_equal_states_are_equal_bytes(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        save(tmp_path / name, 3)
    assert everything(tmp_path / "a") == everything(tmp_path / "b")


def test_damage_falls_back_and_says_so(tmp_path, faults):
    for round in (1, 2):
        save(tmp_path, round)
    newest = tmp_path / "checkpoint" / "round-00000002.safetensors"
    for damaged in faults.damages(newest.read_bytes(), flips=300):
        newest.write_bytes(damaged)
        found = checkpoint.read_latest_checkpoint(tmp_path)
        assert found.round == 1 and torch.equal(found.tensors["server/w"], state(1)["server/w"])
        assert str(newest) in found.note and found.note.endswith("Resuming from round 1 instead.")


def test_a_renamed_checkpoint_is_not_believed(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    folder = tmp_path / "checkpoint"
    os.rename(folder / "round-00000002.safetensors", folder / "round-00000007.safetensors")
    assert checkpoint.read_latest_checkpoint(tmp_path).round == 1


def test_nothing_whole_is_an_error(tmp_path):
    for round in (1, 2):
        save(tmp_path, round)
    for _, path in checkpoint.list_checkpoints(tmp_path):
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedFile, match="No earlier checkpoint is whole"):
        checkpoint.read_latest_checkpoint(tmp_path)


def resume(run, last=4):
    """A run in small: go on from the latest checkpoint to the end."""
    remove_leftovers(run / "checkpoint")
    found = checkpoint.read_latest_checkpoint(run)
    w = torch.ones(30) if found is None else found.tensors["w"]
    for round in range(1 if found is None else found.round + 1, last + 1):
        w = 0.9 * w + torch.sin(w * round)
        checkpoint.write_checkpoint(run, round, {"w": w}, {"t": round})
    write_tensors(run / "models.safetensors", {"common": w}, {})


@pytest.mark.processes
def test_killed_anywhere_resumes_to_the_same_bytes(tmp_path, faults):
    whole, run = tmp_path / "whole", tmp_path / "run"
    whole.mkdir()
    log = faults.calls_of(lambda: resume(whole))
    assert log.count("rename") == 5 and log.count("unlink") == 2
    for k, midway in faults.kills(log):
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir()
        assert faults.killed_at(k, lambda: resume(run), midway=midway) == faults.KILLED
        renamed = log[: k - 1].count("rename")
        found = checkpoint.read_latest_checkpoint(run)
        assert (found.round if found else 0) == min(renamed, 4) and (found is None or found.note is None)
        resume(run)
        remove_leftovers(run)
        extra = everything(run).keys() - everything(whole).keys()
        assert everything(whole).items() <= everything(run).items()
        assert extra <= {"checkpoint/round-00000002.safetensors"}  # killed between the last save and its tidying


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_failing_disk_never_costs_the_last_good_one(tmp_path, faults, code):
    run, other = tmp_path / "run", tmp_path / "other"
    for folder in (run, other):
        folder.mkdir()
        save(folder, 1)
        save(folder, 2)
    log = faults.calls_of(lambda: save(other, 3))
    for k in range(1, len(log) + 1):
        shutil.rmtree(run / "checkpoint")
        save(run, 1)
        save(run, 2)
        with pytest.raises(WorkError) as error:
            faults.failing_at(k, code, lambda: save(run, 3))
        assert str(run / "checkpoint") in str(error.value) and os.strerror(code) in str(error.value)
        assert is_whole(run, 3 if "rename" in log[: k - 1] else 2)
        save(run, 3)
        assert rounds(run) == [3, 2] and everything(run) == everything(other)


def test_no_room_for_the_first_checkpoint(tmp_path, faults):
    log = faults.calls_of(lambda: save(tmp_path, 1))
    assert log[0] == "mkdir"
    shutil.rmtree(tmp_path / "checkpoint")
    with pytest.raises(WorkError, match="No space left on device"):
        faults.failing_at(1, errno.ENOSPC, lambda: save(tmp_path, 1))
    assert checkpoint.read_latest_checkpoint(tmp_path) is None
