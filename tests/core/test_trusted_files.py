"""A stranger's run file or run directory executes nothing and reads nothing outside its folder."""

import shutil

import numpy as np
import pandas as pd
import pytest
import tomli_w

import mooring
from mooring.cli import main
from mooring.core import trusted_files
from mooring.core.errors import RequestError
from mooring.core.user_code import load_python
from mooring.engines.compare import resume_comparison
from mooring.engines.fit import resume_fit
from mooring.runs.atomic_files import BLANK_CHECKSUM, with_checksum

NET = """from pathlib import Path
from torch import nn

Path({mark!r}).touch()

def make(features):
    return nn.Linear(features, 1)
"""


@pytest.fixture
def new_user(tmp_path, monkeypatch):
    """Calls make the next command that of another user, who has given nothing yet."""
    count = iter(range(99))

    def become():
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / f"user {next(count)}"))
        monkeypatch.setattr(trusted_files, "_given", set())

    become()
    return become


@pytest.fixture
def here(tmp_path, monkeypatch, new_user):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"client": [f"c{k % 4}" for k in range(80)], "x": rng.normal(size=80)})
    frame.assign(target=frame["x"] + rng.normal(size=80)).to_csv(tmp_path / "rows.csv", index=False)
    (tmp_path / "net.py").write_text(NET.format(mark=str(tmp_path / "ran")))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ran(here):
    """Whether net.py was executed since the last question."""
    mark = here / "ran"
    found = mark.exists()
    mark.unlink(missing_ok=True)
    return found


def write_toml(path, source="rows.csv", model="net.py:make", **more):
    table = {"data": {"source": str(source), **more}, "task": {"model": model}, "algorithm": {"name": "fedavg"}}
    path.write_text(tomli_w.dumps(table | {"training": {"rounds": 1, "threads": 1}}))


def test_a_run_file_runs_no_code_unless_trusted(here):
    write_toml(here / "run.toml")
    for call in (mooring.fit, mooring.advise):
        with pytest.raises(RequestError, match=r"net\.py is Python that a run file wants to run.*--trust-code"):
            call("run.toml")
        assert not ran(here)
    mooring.fit("run.toml", trust_code=True)
    assert ran(here)
    mooring.fit("run.toml")  # the same code was trusted before
    assert ran(here)
    (here / "net.py").write_text((here / "net.py").read_text() + "# changed\n")
    with pytest.raises(RequestError, match="--trust-code"):
        mooring.fit("run.toml")
    assert not ran(here)


def test_what_is_given_on_the_command_line_is_run(here, capsys):
    with pytest.raises(SystemExit) as left:
        main(["fit", "rows.csv", "--model", "net.py:make", "--rounds", "1", "--out", "mine"])
    assert left.value.code == 0 and ran(here)
    resume_fit("mine")
    mooring.predict("mine", "rows.csv")
    assert ran(here)


@pytest.mark.parametrize(
    "command", [["resume", "mine"], ["predict", "mine", "rows.csv"], ["personalize", "mine", "few.csv"]]
)
def test_an_untrusted_run_directory_runs_no_code(here, new_user, capsys, command):
    mooring.fit("rows.csv", model="net.py:make", rounds=1, threads=1, out="mine")
    assert ran(here)
    pd.read_csv("rows.csv").query("client == 'c0'").head(4).to_csv("few.csv", index=False)
    new_user()
    trusted_files._remember(trusted_files.DATA, str(here / "rows.csv"))
    with pytest.raises(SystemExit) as left:
        main(command)
    assert left.value.code == 2 and not ran(here)
    assert "--trust-code" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*command, "--trust-code"])
    assert ran(here)


def test_an_untrusted_comparison_runs_no_code(here, new_user):
    mooring.compare("rows.csv", ["local"], model="net.py:make", rounds=1, threads=1, out="mine")
    assert ran(here)
    new_user()
    trusted_files._remember(trusted_files.DATA, str(here / "rows.csv"))
    with pytest.raises(RequestError, match="--trust-code"):
        resume_comparison("mine")
    assert not ran(here)


def test_evil_code_inside_a_resealed_run_directory(here, new_user):
    """The seal only tells of accidents: whoever edits a run file can seal it again."""
    mooring.fit("rows.csv", rounds=1, threads=1, out="theirs")
    new_user()
    (here / "theirs" / "evil.py").write_text((here / "net.py").read_text())
    text = (
        (here / "theirs" / "run.toml")
        .read_text()
        .replace("[algorithm]", '[task]\nmodel = "theirs/evil.py:make"\n\n[algorithm]')
    )
    text = text.replace("[task]\n\n", "")
    head, _, rest = text.partition("mooring-sha256:")
    (here / "theirs" / "run.toml").write_bytes(with_checksum((head + BLANK_CHECKSUM + rest[64:]).encode()))
    for call in (lambda: resume_fit("theirs"), lambda: mooring.predict("theirs", "rows.csv")):
        with pytest.raises(RequestError, match=r"evil\.py is Python|wants to read"):
            call()
        assert not ran(here)


def test_a_compiled_file_beside_trusted_code_is_not_run(here):
    """Python would take __pycache__/net.*.pyc for net.py by its size and time alone."""
    import importlib.util
    import os
    import py_compile

    source = here / "net.py"
    harmless = "from torch import nn\n\ndef make(features):\n    return nn.Linear(features, 1)\n"
    evil = f"open({str(here / 'ran')!r}, 'w')\ndef make(features): pass\n"
    size = max(len(harmless), len(evil)) + 1
    source.write_text(evil.ljust(size, "#"))
    os.utime(source, (1, 1))
    py_compile.compile(str(source), cfile=importlib.util.cache_from_source(str(source)))
    source.write_text(harmless.ljust(size, "#"))
    os.utime(source, (1, 1))
    trusted_files.trust_code(source)
    load_python("net.py:make", "model")
    assert not ran(here)


def test_data_stay_inside_the_folder_of_a_run_file(here, new_user, tmp_path):
    theirs = here / "theirs"
    theirs.mkdir()
    shutil.copy("rows.csv", theirs / "rows.csv")
    write_toml(theirs / "inside.toml", theirs / "rows.csv", model="net.py:make")
    write_toml(theirs / "outside.toml", here / "rows.csv")
    write_toml(theirs / "up.toml", "theirs/../rows.csv")
    (theirs / "link.csv").symlink_to(here / "rows.csv")
    write_toml(theirs / "linked.toml", "theirs/link.csv")
    new_user()
    trusted_files.trust_code("net.py")
    mooring.fit("theirs/inside.toml")
    for name in ("outside", "up", "linked"):
        with pytest.raises(RequestError, match=rf"{name}\.toml wants to read .*rows\.csv, which is outside its folder"):
            mooring.fit(f"theirs/{name}.toml")
    mooring.fit("theirs/outside.toml", trust_code=True)


def test_a_person_at_a_terminal_is_asked(here, monkeypatch):
    write_toml(here / "run.toml")
    asked = []

    def answer(yes):
        monkeypatch.setattr(trusted_files, "CONFIRMATIONS", [lambda question: asked.append(question) or yes])

    answer(False)
    with pytest.raises(RequestError):
        mooring.fit("run.toml")
    assert not ran(here) and "Run it?" in asked[0]
    answer(True)
    mooring.fit("run.toml")
    assert ran(here) and len(asked) == 2


def test_a_record_that_cannot_be_written_is_no_obstacle(here, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    mooring.fit("rows.csv", model="net.py:make", rounds=1, threads=1)
    assert ran(here)


def test_a_run_file_cannot_trust_itself(here):
    (here / "run.toml").write_text('trust = true\n[data]\nsource = "rows.csv"\n[algorithm]\nname = "fedavg"\n')
    with pytest.raises(RequestError, match="unknown section 'trust'"):
        mooring.fit("run.toml")
