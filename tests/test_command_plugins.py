"""Commands of other distributions are loaded by entry points; those of the papers explain how to install them."""

from importlib import metadata
from importlib.metadata import EntryPoint

import pytest
import typer

from mooring.cli import main
from mooring.commands import common, reference
from mooring.commands.plugins import ENTRY_POINT_GROUP, PAPERS_COMMANDS, load_commands
from mooring.core.errors import RequestError


@pytest.fixture
def offer(monkeypatch):
    """Make these modules of commands the only installed ones."""

    def set_entries(**modules):
        entries = [EntryPoint(name, module, ENTRY_POINT_GROUP) for name, module in modules.items()]
        monkeypatch.setattr(metadata, "entry_points", lambda group: entries if group == ENTRY_POINT_GROUP else [])

    return set_entries


@pytest.mark.parametrize("words", [["reproduce", "all", "--preset", "quick"], ["theorem"], ["theorem", "a", "mu=1"]])
def test_without_the_papers_their_commands_say_how_to_install_them(words, offer):
    offer()
    app = typer.Typer()
    load_commands(app)
    with pytest.raises(RequestError) as error:
        app(words, standalone_mode=False)
    assert str(error.value) == (
        f"mooring {words[0]} is part of the papers' reproduction: pip install 'mooring-fl[papers]'."
    )
    assert all(command.hidden for command in app.registered_commands)


def test_without_the_papers_their_list_says_how_to_install_it(offer, monkeypatch, capsys):
    offer()
    monkeypatch.delitem(reference.LISTS, "experiments", raising=False)
    with pytest.raises(SystemExit) as left:
        main(["list", "experiments"])
    assert left.value.code == 2 and "pip install 'mooring-fl[papers]'" in capsys.readouterr().err


def test_commands_of_an_installed_module_are_added(offer, tmp_path, monkeypatch):
    app = typer.Typer()
    monkeypatch.setattr(common, "app", app)
    monkeypatch.syspath_prepend(tmp_path)
    body = "from mooring.commands.common import app\n@app.command()\ndef theorem(): pass\n"
    (tmp_path / "other_commands.py").write_text(body)
    offer(other="other_commands")
    load_commands(app)
    assert [command.hidden for command in app.registered_commands] == [False, True]  # theorem, and no reproduce
    assert set(PAPERS_COMMANDS) == {"reproduce", "theorem"}


def test_commands_of_the_product_look_for_no_packages(monkeypatch, capsys):
    monkeypatch.setattr(metadata, "entry_points", None)
    with pytest.raises(SystemExit) as left:
        main(["list", "datasets"])
    assert left.value.code == 0


def test_a_module_that_cannot_be_imported_is_left_out(offer):
    offer(broken="no_such_module")
    with pytest.warns(UserWarning, match=r"The commands of 'broken' \(no_such_module\) are left out: No module named"):
        load_commands(typer.Typer())
