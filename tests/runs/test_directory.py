import errno
import os
from pathlib import Path

import pandas as pd
import pytest
import torch

from mooring.core.errors import RequestError, WorkError
from mooring.runs import checkpoint
from mooring.runs.atomic_files import DamagedFile, json_bytes, parquet_bytes, remove_leftovers, write_parquet
from mooring.runs.directory import StoredMixture, StoredModels, create_run, default_run_path, open_run
from mooring.runs.runfile import make_run, run_bytes
from mooring.runs.table_schemas import clients_table, rounds_table
from mooring.runs.tensor_files import read_tensors

RUN = make_run({"data": {"source": "exam.csv"}, "algorithm": {"name": "Ditto", "lam": 0.5}}, "here")
SPLIT = pd.DataFrame({"client": ["a", "b"], "row": [0, 1], "part": ["train", "test"]})
FILES = {
    "run.toml": run_bytes(RUN),
    "schema.json": json_bytes({"columns": ["age"], "mean": [0.25]}),
    "split.parquet": parquet_bytes(SPLIT),
}
MODELS = StoredModels(
    torch.zeros(3), torch.arange(6.0).reshape(2, 3), ("a", "ü"), {"name": "linear"}, [["weight", [3]]]
)
COUNTS = ("bytes_up", "bytes_down", "samples", "gradients", "promised", "broken", "asked", "accepted")
ROUND = {"round": 1} | dict.fromkeys(COUNTS, 1)
CLIENT = {"client": "a", "rows": 3, "train": 1, "validation": 1, "test": 1}


def finish(run):
    write_parquet(run.path / "rounds.parquet", rounds_table([ROUND]))
    write_parquet(run.path / "clients.parquet", clients_table([CLIENT]))
    run.write_models(MODELS)


def hidden(folder):
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_a_run_reads_back(tmp_path):
    create_run(tmp_path / "deep" / "er" / "run", FILES)
    run = open_run(tmp_path / "deep" / "er" / "run")
    assert run.run == RUN
    assert run.schema == {"columns": ["age"], "mean": [0.25]}
    pd.testing.assert_frame_equal(run.split, SPLIT)
    assert not run.finished
    finish(run)
    assert run.finished
    assert run.rounds["round"].tolist() == [1] and run.clients["client"].tolist() == ["a"]
    found = run.models
    assert torch.equal(found.common, MODELS.common) and torch.equal(found.personal, MODELS.personal)
    assert found[2:] == MODELS[2:]
    assert sorted(os.listdir(run.path)) == sorted([*FILES, "rounds.parquet", "clients.parquet", "models.safetensors"])


def test_models_without_personal_ones_and_of_a_wrong_shape(tmp_path):
    run = create_run(tmp_path / "run", FILES)
    with pytest.raises(ValueError, match=r"shape \(2, 3\), got \(1, 3\)"):
        run.write_models(MODELS._replace(personal=torch.zeros(1, 3)))
    assert not run.finished
    run.write_models(MODELS._replace(personal=None))
    assert run.models.personal is None


def test_what_new_clients_of_a_run_get_reads_back(tmp_path):
    run = create_run(tmp_path / "run", FILES)
    settings = [{"family": "size", "value": 0.1 + 0.2, "weight": 1 / 3}, {"family": "global", "value": 0.0}]
    for slack in ({"size": torch.tensor([0.5, 0.0, 2.0], dtype=torch.float64)}, {}):
        mix = StoredMixture(settings, torch.rand(2, 3), slack)
        run.write_models(MODELS._replace(mix=mix, centre=torch.ones(3)))
        found = run.models.mix
        assert found.settings == settings and torch.equal(found.centres, mix.centres)
        assert set(found.slack) == set(slack) and all(torch.equal(found.slack[name], slack[name]) for name in slack)
    run.write_models(MODELS)
    assert run.models.mix is None
    tensors, meta = read_tensors(run.path / "models.safetensors")  # as before there was such a thing
    assert set(tensors) == {"global", "personal"} and set(meta) == {"clients", "task", "layout"}


@pytest.mark.parametrize("make", [lambda p: p.mkdir(), lambda p: p.write_text("x"), lambda p: p.symlink_to("nowhere")])
def test_existing_files_are_not_changed(tmp_path, make):
    make(tmp_path / "run")
    with pytest.raises(RequestError, match=r"run already exists; choose another --out, or resume it\."):
        create_run(tmp_path / "run", FILES)
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.processes
def test_killed_anywhere_the_directory_is_absent_or_whole(tmp_path, faults):
    log = faults.calls_of(lambda: create_run(tmp_path / "whole" / "run", FILES))
    appears = len(log) - 1 - log[::-1].index("rename")
    swept = 0
    for k, midway in faults.kills(log):
        place = tmp_path / f"at-{k}-{midway}"
        assert faults.killed_at(k, lambda place=place: create_run(place / "run", FILES), midway=midway) == faults.KILLED
        if (place / "run").exists():
            assert k > appears + 1
            run = open_run(place / "run")
            assert run.run == RUN and run.schema and len(run.split) == 2
            assert sorted(os.listdir(run.path)) == sorted(FILES)
        else:
            assert k <= appears + 1
            swept += place.exists() and len(hidden(place))
            create_run(place / "run", FILES)
        assert hidden(place) == []
    assert swept > len(log) / 2


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_failing_disk_leaves_no_trace(tmp_path, faults, code):
    log = faults.calls_of(lambda: create_run(tmp_path / "whole" / "run", FILES))
    appears = len(log) - 1 - log[::-1].index("rename")
    for k in range(1, len(log) + 1):
        path = tmp_path / str(k) / "run"
        with pytest.raises(WorkError) as error:
            faults.failing_at(k, code, lambda path=path: create_run(path, FILES))
        assert f"{path} could not be written ({os.strerror(code)})" in str(error.value)
        assert path.exists() == (k > appears + 1) and not (path.parent.exists() and hidden(path.parent))


@pytest.mark.parametrize("moment", ["mkdir", "open"])
def test_another_run_that_cleans_up_meanwhile_does_no_harm(tmp_path, monkeypatch, moment):
    """At the worst moments, between creation and lock, and again while the files are written."""
    real, fsync = getattr(os, moment), os.fsync
    swept = []

    def then_clean(path, *args, **kwargs):
        result = real(path, *args, **kwargs)
        if not swept and Path(path).parent == tmp_path and Path(path).suffix == ".tmp":
            swept.append(path)  # before `clean`, which opens files itself
            assert remove_leftovers(tmp_path) == [path]
        return result

    def clean_then_fsync(handle):
        assert remove_leftovers(tmp_path) == []
        fsync(handle)

    monkeypatch.setattr(os, moment, then_clean)
    monkeypatch.setattr(os, "fsync", clean_then_fsync)
    assert create_run(tmp_path / "run", FILES).run == RUN
    assert len(swept) == 1 and os.listdir(tmp_path) == ["run"]


def test_a_directory_made_meanwhile_is_not_changed(tmp_path, monkeypatch):
    rename = os.rename

    def too_late(source, target):
        if target == tmp_path / "run":
            target.mkdir()
            (target / "theirs").write_text("x")
        rename(source, target)

    monkeypatch.setattr(os, "rename", too_late)
    with pytest.raises(RequestError, match="run already exists"):
        create_run(tmp_path / "run", FILES)
    assert os.listdir(tmp_path) == ["run"] and os.listdir(tmp_path / "run") == ["theirs"]


def test_open_sweeps_up_after_a_kill(tmp_path, faults):
    run = create_run(tmp_path / "run", FILES)
    checkpoint.write_checkpoint(run.path, 1, {"w": torch.ones(2)}, {})
    for action in (
        lambda: run.write_models(MODELS),
        lambda: checkpoint.write_checkpoint(run.path, 2, {"w": torch.ones(2)}, {}),
    ):
        assert faults.killed_at(3, action) == faults.KILLED
    assert hidden(run.path) and hidden(run.path / "checkpoint")
    open_run(run.path)
    assert not hidden(run.path) and not hidden(run.path / "checkpoint")
    assert checkpoint.read_latest_checkpoint(run.path).round == 1


def test_a_read_only_run_opens(tmp_path):
    run = create_run(tmp_path / "run", FILES)
    run.path.chmod(0o500)
    try:
        assert open_run(run.path).run == RUN
    finally:
        run.path.chmod(0o700)


def test_not_a_run(tmp_path):
    with pytest.raises(RequestError, match=r"nowhere does not exist; give the directory of a run\."):
        open_run(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    with pytest.raises(RequestError, match=r"file is a file; give the directory of a run\."):
        open_run(tmp_path / "file")
    with pytest.raises(RequestError, match=r"is not a run: it has no run\.toml\."):
        open_run(tmp_path)


def test_an_unfinished_run_names_the_command_that_resumes_it(tmp_path):
    run = create_run(tmp_path / "run", {"run.toml": FILES["run.toml"]})
    for name in ("rounds", "clients", "models"):
        with pytest.raises(RequestError, match=rf"no {name}.*not finished; resume it with `mooring resume {run.path}`"):
            getattr(run, name)
    for name in ("schema", "split"):
        with pytest.raises(RequestError, match=rf"has no {name}.*: the run was not made from a table\."):
            getattr(run, name)
    finish(run)
    os.unlink(run.path / "rounds.parquet")
    with pytest.raises(RequestError, match=r"rounds\.parquet: it is missing from a finished run"):
        _ = run.rounds


@pytest.mark.parametrize(
    "name, attribute",
    [
        ("run.toml", "run"),
        ("schema.json", "schema"),
        ("split.parquet", "split"),
        ("rounds.parquet", "rounds"),
        ("clients.parquet", "clients"),
        ("models.safetensors", "models"),
    ],
)
def test_a_damaged_file_is_never_read(tmp_path, faults, name, attribute):
    run = create_run(tmp_path / "run", FILES)
    finish(run)
    data = (run.path / name).read_bytes()
    for damaged in faults.damages(data, flips=100):
        (run.path / name).write_bytes(damaged)
        with pytest.raises(DamagedFile, match=name):
            getattr(run, attribute)


def test_an_edited_run_file_is_not_resumed(tmp_path):
    run = create_run(tmp_path / "run", FILES)
    text = FILES["run.toml"].decode()
    (run.path / "run.toml").write_text(text.replace("lam = 0.5", "lam = 0.7"))
    with pytest.raises(DamagedFile, match="start a new run with it"):
        _ = run.run


def test_nothing_is_unpickled(tmp_path, unpickled):
    run = create_run(tmp_path / "run", FILES)
    finish(run)
    checkpoint.write_checkpoint(run.path, 1, {"w": torch.ones(2)}, {})
    unpickled.clear()
    _ = run.run, run.schema, run.split, run.rounds, run.clients, run.models, checkpoint.read_latest_checkpoint(run.path)
    assert unpickled == []


def test_default_out_is_the_first_free_number(tmp_path):
    assert default_run_path("exam", tmp_path) == tmp_path / "exam-1"
    (tmp_path / "exam-1").mkdir()
    (tmp_path / "exam-3").mkdir()
    assert default_run_path("exam", tmp_path) == tmp_path / "exam-2"
    assert default_run_path("../my exam?.csv", tmp_path) == tmp_path / "my-exam-.csv-1"
    assert default_run_path("", tmp_path) == tmp_path / "run-1"
    assert str(default_run_path("exam")) == "runs/exam-1"
