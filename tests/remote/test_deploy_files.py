"""The container and unit files: they parse, and every option that they use exists."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("yaml", reason="PyYAML is not installed")

import typer
import yaml

from mooring.cli import app
from mooring.remote.disclosure import read_policy

DEPLOY = Path(__file__).parents[2] / "deploy"


def commands():
    """The command lines of the files, without the program."""
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    found = {f"compose {name}": about["command"] for name, about in services.items()}
    for path in DEPLOY.glob("*.service"):
        line = re.search(r"^ExecStart=\S+/mooring (.*)$", path.read_text(), re.M)
        found[path.name] = line.group(1)
    return {name: shlex.split(line) for name, line in found.items()}


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_option_exists(name):
    what, *words = commands()[name]
    command = typer.main.get_command(app).commands[what]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known


def test_every_client_has_its_own_key_table_and_state():
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for name in ("north", "south", "west"):
        mounted = services[name]["volumes"]
        assert f"../keys/clients/{name}:/data/key:ro" in mounted and f"{name}:/data/state" in mounted
        assert not any("server.key" in one or "ca.key" in one for one in mounted)
        assert services[name]["command"].split("--name ")[1].startswith(name)


def test_the_policy_is_one():
    assert read_policy(DEPLOY / "policy.toml").min_clients == 3
    assert tomllib.loads((DEPLOY / "policy.toml").read_text())["purposes"] == ["fit"]


def test_the_image_runs_as_a_user_without_telemetry():
    lines = (DEPLOY / "Dockerfile").read_text()
    assert "USER mooring" in lines and "FLWR_TELEMETRY_ENABLED=0" in lines
