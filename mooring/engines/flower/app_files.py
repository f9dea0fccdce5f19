"""The Flower app of a run: the few files that `serve` submits, and that `flwr run` starts."""

from __future__ import annotations

import json
from pathlib import Path

from mooring.core.errors import RequestError
from mooring.engines.request import read_federation_request
from mooring.runs.runfile import RunFile

APP_PYPROJECT = """[project]
name = "mooring-app"
version = "1.0.0"
description = "A Mooring run"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "mooring"

[tool.flwr.app.components]
serverapp = "mooring_app.server:app"
clientapp = "mooring_app.client:app"

[tool.flwr.app.config]
run = ""
out = ""
progress = ""
clients = ""
revoked = ""
trust = ""
audit = ""
"""
APP_OBJECTS = {  # by purpose: where Flower finds the two apps
    "fit": ("mooring.engines.flower.client_app.app", "mooring.engines.flower.server_app.app"),
    "advise": ("mooring.advice.remote.flower_app.client", "mooring.advice.remote.flower_app.server"),
}


def make_app_files(run: RunFile) -> dict[str, str]:
    """The files of the Flower app that runs this."""
    files = {"pyproject.toml": APP_PYPROJECT, "mooring_app/__init__.py": ""}
    for name, place in zip(("client", "server"), APP_OBJECTS[run.mooring.purpose]):
        module, _, what = place.rpartition(".")
        files[f"mooring_app/{name}.py"] = f"import {module}\n\napp = {module}.{what}\n"
    return files


def write_app(path: str | Path, folder: str | Path) -> Path:
    """The Flower app of a run file as a folder that `flwr run` starts; `run` is filled in, the rest is for
    --run-config."""
    run, folder = read_federation_request(path), Path(folder)
    if folder.exists():
        raise RequestError(f"{folder} already exists; choose another folder for the app.")
    for name, text in make_app_files(run).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text.replace('run = ""', f"run = {json.dumps(str(Path(path).resolve()))}"))
    return folder
