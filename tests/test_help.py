"""Help that fits a screen, words that are explained, and run files that are written by asking."""

import re
import shlex
import sys
import tomllib
from pathlib import Path

import click
import numpy as np
import pandas as pd
import pytest
import typer

import mooring
from mooring import cli
from mooring.core.errors import RequestError
from mooring.data.datasets import known_datasets
from mooring.engines.init_wizard import write_run_file
from mooring.runs.runfile import read_run
from mooring.runs.sections import OPTIONS

SCREEN, WIDTH = 41, 80  # lines and columns
TOP = typer.main.get_command(cli.app)


def every_command(group=TOP, path=()):
    yield path
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from every_command(command, (*path, name))
        else:
            yield (*path, name)


def call(capsys, *argv):
    with pytest.raises(SystemExit) as left:
        cli.main([str(word) for word in argv])
    told = capsys.readouterr()
    return left.value.code, told.out, told.err


@pytest.mark.parametrize("path", [*every_command()], ids=" ".join)
def test_help_fits_a_screen_with_an_example_and_defaults(path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    code, out, _ = call(capsys, *path, "--help")
    assert code == 0 and len(out.splitlines()) <= SCREEN and max(map(len, out.splitlines())) <= WIDTH
    summaries = out.partition("Commands:")[2].partition("Example:")[0]
    assert not re.search(r"\.\.\.$", summaries, re.M), "a summary is cut"
    assert "\\[" not in out
    shown = re.search(r"Example: (mooring .*(?:\n  .*)*)", out)
    assert shown, "no example"
    argv = shlex.split(" ".join(shown[1].split()))[1:]
    assert tuple(argv[: len(path)]) == path
    command = TOP
    for name in path:
        command = command.commands[name]
    for option in (p for p in command.params if isinstance(p, click.Option) and not p.hidden and not p.is_flag):
        if not option.required and option.name not in ("set_", "install_completion", "show_completion"):
            assert re.search(r"\[.+\]", option.help or "") or option.show_default, f"{option.name}: no default told"


def test_rare_options_work_though_help_leaves_them_out(capsys):
    assert 0 < sum(option.is_rare for option in OPTIONS.values()) < len(OPTIONS)
    _, out, _ = call(capsys, "list", "options", "--json")
    for option in OPTIONS.values():
        assert f'"{option.flag}"' in out
    _, out, _ = call(capsys, "fit", "--help")
    assert "--weight-cap" not in out and "--rounds" in out and "mooring list options" in out
    code, _, err = call(capsys, "fit", "heart", "--weight-cap", "2")
    assert code == 2 and "--weight-cap must be" in err


def test_terms_options_and_algorithms_are_explained(capsys):
    code, out, _ = call(capsys, "explain", "held-out", "rows")
    assert code == 0 and out.count("\n") <= 4 and "held out" in out
    assert call(capsys, "explain", "--json", "lam")[1].count("strength") == 1
    assert "Hyperparameters: " in call(capsys, "explain", "fedavg")[1]
    assert "Without --min-rows it is: 5, for advise 1." in call(capsys, "explain", "--", "--min-rows")[1]
    code, _, err = call(capsys, "explain", "lamda")
    assert code == 2 and "did you mean 'lambda'?" in err


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        ("fit heart --set lamda=3", "(did you mean 'lam'?); see `mooring explain fedprox_personal`."),
        ("fit heart --algorithm fedprx", "(did you mean 'fedprox'?); see `mooring list algorithms`"),
        ("fit heart --lam -1", "--lam must be >= 0, got -1."),
        ("advise hart", "see `mooring list datasets`. Did you mean 'heart'?"),
        ("list experimnts", "(did you mean 'experiments'?)"),
        ("explain lamda", "(did you mean 'lambda'?); see `mooring explain`."),
        ("advise heart --marign 1%", "(did you mean '--margin'?); see `mooring advise --help`."),
        ("avdise heart", "(did you mean 'advise'?); see `mooring --help`."),
    ],
)
def test_unknown_words_get_the_nearest_guess_and_where_the_list_is(argv, wanted, capsys):
    code, _, err = call(capsys, *shlex.split(argv))
    assert code == 2 and wanted in err and len(err.split()) < 30


@pytest.fixture
def visits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    clinic = np.repeat(["north", "south", "west", "tiny"], [20, 20, 20, 3])
    frame = pd.DataFrame({"clinic": clinic, "age": rng.normal(size=63), "score": rng.normal(size=63)})
    frame.to_csv("visits.csv", index=False)


def test_init_asks_little_and_writes_a_run_file_that_works(visits):
    asked = []

    def ask(question, default=None):
        asked.append(question)
        return default

    text = write_run_file("visits.csv", "run.toml", {"client": None, "target": None, "drop_small": None}, ask)
    assert len(asked) == 3 <= 4 and "3 of" not in asked[2] and asked[2].startswith("1 of 4 clients")
    assert tomllib.loads(text)["data"] == {
        "source": "visits.csv", "client": "clinic", "target": "score", "drop_small": True,
    }  # fmt: skip
    for option in OPTIONS.values():
        assert re.search(rf"^(# )?{option.field} =", text, re.M), option.name
    Path("run.toml").write_text(text)
    assert read_run("run.toml").algorithm.name == "fedprox_personal"
    loose = re.sub(r"^# (\w+ = \S[^\n]*?)  +#", r"\1  #", text, flags=re.M)  # what the comments say is the default
    Path("loose.toml").write_text(loose)
    assert read_run("loose.toml").training == read_run("run.toml").training


def test_init_never_asks_in_a_pipe(visits, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    code, _, err = call(capsys, "init", "visits.csv")
    assert code == 2 and "--client is missing" in err and "'clinic'" in err and err.count("\n") == 1
    code, out, _ = call(capsys, "init", "visits.csv", "--client", "clinic", "--target", "score", "--drop-small")
    assert code == 0 and "run.toml" in out
    assert call(capsys, "check", "run.toml")[0] == 0
    code, _, err = call(capsys, "init", "visits.csv", "--client", "clinic", "--target", "score")
    assert code == 2 and "already exists" in err
    with pytest.raises(RequestError, match="Did you mean 'clinic'"):
        write_run_file("visits.csv", "run.toml", {"client": "clnic", "target": "score", "drop_small": None}, None)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[data]\nsource = "v.csv"\nclinet = "a"\n', "unknown field of [data] 'clinet' (did you mean 'client'?)"),
        ('[data]\nsource = "v.csv"\n[trainig]\nrounds = 3\n', "unknown section 'trainig' (did you mean 'training'?)"),
        (
            '[data]\nsource = "v.csv"\n[training]\nrounds = "3"\n',
            "training.rounds must be a whole number >= 1, got '3'",
        ),
        ("[training]\nrounds = 3\n", "data is missing; it must be a table with a source"),
        ('[data]\nsource = "v.csv"\n[algorithm]\nlam = 1\n', "algorithm.name is missing"),
    ],
)
def test_a_bad_run_file_is_answered_with_the_key_and_the_nearest_name(text, told, tmp_path, capsys):
    (tmp_path / "run.toml").write_text(text)
    code, _, err = call(capsys, "fit", tmp_path / "run.toml")
    assert code == 2 and told in err and err.count("\n") == 1


def test_quiet_and_verbose(visits, capsys):
    words = ["fit", "visits.csv", "--client", "clinic", "--target", "score", "--drop-small", "--rounds", "3"]
    _, out, err = call(capsys, *words, "--out", "loud", "--verbose")
    assert re.search(r"^\d+\.\d s: fedprox_personal, 3 of 3$", err, re.M) and "note: " in err
    _, quiet, err = call(capsys, *words, "--out", "mute", "--quiet")
    assert err == "" and quiet.replace("mute", "loud") == out


def test_no_colour_where_it_is_not_wanted(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    _, out, _ = call(capsys, "list", "datasets")
    assert known_datasets()[0] in out and not re.search(r"\x1b\[[\d;]*3\dm", out)


def test_shells_complete_commands(monkeypatch, capsys):
    monkeypatch.setenv("_MOORING_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "mooring per")
    monkeypatch.setenv("COMP_CWORD", "1")
    monkeypatch.setattr(sys, "argv", ["mooring"])
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().out.split() == ["personalize"]


def test_without_a_command_the_help_is_printed(capsys):
    code, out, err = call(capsys)
    assert code == 0 and err == "" and out.startswith("Usage: mooring") and "advise" in out


def test_the_package_has_its_version(capsys):
    assert call(capsys, "--version")[1] == f"mooring {mooring.__version__}\n"
