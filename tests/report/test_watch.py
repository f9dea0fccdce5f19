"""A running job is told from its directory alone."""

import re
import shutil

import pytest

import mooring
from mooring.cli import main
from mooring.core.errors import RequestError
from mooring.report import watch
from mooring.report.terminal import Display
from mooring.runs import checkpoint
from tests.report.example_runs import federation

HOW = {"client": "who", "target": "y", "threads": 1, "checkpoint_every": 5, "evaluate_every": 5, "baselines": False}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("watched")
    federation().to_csv(folder / "table.csv", index=False)
    mooring.fit(folder / "table.csv", **HOW, rounds=20, out=folder / "run")
    return folder / "run"


@pytest.fixture
def killed(made, tmp_path):
    """The run as a kill after its fifteenth round would have left it."""
    run = tmp_path / "run"
    shutil.copytree(made, run)
    (run / "models.safetensors").unlink()
    newest, path = checkpoint.list_checkpoints(run)[0]
    assert newest == 20
    path.unlink()
    return run


def test_a_look_at_a_run_on_its_way(killed, made):
    (found,) = watch.read_all_status(killed)
    assert (found.name, found.done, found.rounds, found.finished) == ("fedprox_personal", 15, 20, False)
    assert found.cohort == found.accepted == 30 and found.left_out == {}
    rounds = mooring.open(made).directory.rounds
    told = rounds.set_index("round").loc[15]
    ratios = [told[f"{part}_loss"] / found.losses[part] for part in ("train", "validation", "test")]
    assert ratios == pytest.approx([mooring.open(made).schema.target_scale ** 2] * 3)
    spent = rounds[rounds["round"] <= 15]["seconds"].sum()
    assert found.seconds_left == pytest.approx(spent / 15 * 5)
    text = watch.describe_status(found)
    assert (
        text.startswith("fedprox_personal: round 15 of 20; loss as trained: train ")
        and "30 of 30 clients answered" in text
    )
    assert re.search(r"about \d+ s left$", text)
    (whole,) = watch.read_all_status(made)
    assert whole.finished and whole.seconds_left is None and watch.describe_status(whole).endswith("finished")


def test_who_failed_is_named(killed, monkeypatch):
    real = watch.read_latest_checkpoint

    def with_offender(path):
        found = real(path)
        return found._replace(meta={**found.meta, "offenders": {"3": "its reply is not finite"}})

    monkeypatch.setattr(watch, "read_latest_checkpoint", with_offender)
    (found,) = watch.read_all_status(killed)
    assert found.left_out == {"@SUM(A1)": "its reply is not finite"}
    assert "left out: @SUM(A1) (its reply is not finite)" in watch.describe_status(found)


def test_lines_until_it_is_finished(killed, made, capsys):
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 2:
            for name in ("models.safetensors", "checkpoint/round-00000020.safetensors"):
                shutil.copy(made / name, killed / name)

    watch.watch_run(Display(), killed, sleep)
    lines = capsys.readouterr().out.splitlines()
    assert len(waits) == 2 and len(lines) == 2  # nothing is said twice
    assert "round 15 of 20" in lines[0] and lines[1].endswith("finished") and "round 20 of 20" in lines[1]


def test_a_terminal_shows_bars(killed, made):
    from rich.console import Console

    console = Console(force_terminal=True, width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(watch.draw_status(watch.read_all_status(killed)))
    assert "round 15 of 20" in console.export_text()
    console.file.close()


def test_the_methods_of_a_comparison(made, tmp_path, capsys):
    table = made.parent / "table.csv"
    how = HOW | {"rounds": 5}
    del how["baselines"]
    mooring.compare(table, ["fedavg", "ditto"], **how, out=tmp_path / "both")
    with pytest.raises(SystemExit) as left:
        main(["watch", str(tmp_path / "both")])
    out = capsys.readouterr().out
    assert left.value.code == 0 and {line.split(":")[0] for line in out.splitlines()} == {"ditto", "fedavg"}
    with pytest.raises(RequestError, match="is not a run"):
        watch.read_all_status(tmp_path)
    assert [watch.format_duration(s) for s in (5, 119, 600, 9000)] == ["5 s", "119 s", "10 min", "2 h 30 min"]
