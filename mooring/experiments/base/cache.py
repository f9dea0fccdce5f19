"""Finished trials on disk, each a file of its own, kept under what its numbers depend on.

The key of a trial: its function, its arguments, its seed, the code it can reach, the array libraries' versions, and
the sizes of the data files it needs. The code is all modules of the package that the function's module imports,
directly or not, without comments, docstrings and the declaration EXPERIMENT: rewording a claim repeats no trial. A
module that imports by name may reach its whole folder. Modules of `experiments/base` never change a trial's numbers
and do not count.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mooring.data.pools import ENVIRONMENT
from mooring.runs.files import DamagedFile, make_folder, plain, read_json, unwritten, write_json

PACKAGE = "mooring"
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
NO_NUMBERS = f"{PACKAGE}.experiments.base"
CACHE_ENVIRONMENT = "MOORING_CACHE"


def default_folder() -> Path:
    """Where trials are kept: what MOORING_CACHE names, else `mooring` in the user's cache folder."""
    if given := os.environ.get(CACHE_ENVIRONMENT):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mooring" / "trials"


def key(trial: Callable[..., Any], arguments: Mapping[str, Any], seed: int, needs: tuple[str, ...] = ()) -> str:
    what = {
        "trial": f"{trial.__module__}.{trial.__qualname__}",
        "arguments": plain(dict(arguments)),
        "seed": seed,
        "code": code(trial.__module__),
        "libraries": [np.__version__, torch.__version__],
        "data": data_files(needs),
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def load(folder: Path, name: str) -> dict[str, Any] | None:
    """A finished trial, or None; a damaged file counts as absent and is written anew."""
    path = _place(folder, name)
    if not path.exists():
        return None
    try:
        kept = read_json(path)
    except DamagedFile:
        return None
    return kept | {"values": {series: _numbers(value) for series, value in kept["values"].items()}}


def save(folder: Path, name: str, values: Mapping[str, Any], seconds: float, what: Mapping[str, Any]) -> None:
    path = _place(folder, name)
    try:
        make_folder(path.parent)
    except OSError as error:
        raise unwritten(path, error) from error
    write_json(path, {"values": dict(values), "seconds": seconds, "what": dict(what)})


def data_files(needs: tuple[str, ...]) -> list[list[Any]]:
    """Name and size of the files in the data folder whose names begin with one of `needs`."""
    folder = os.environ.get(ENVIRONMENT)
    if not needs or folder is None or not Path(folder).is_dir():
        return []
    files = sorted(path for path in Path(folder).iterdir() if path.name.startswith(needs))
    return [[path.name, path.stat().st_size] for path in files]


@lru_cache
def code(module: str) -> str:
    """A digest of all code of the package that `module` can reach."""
    reached: dict[str, str] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in reached or name.startswith(NO_NUMBERS):
            continue
        tree, path = _parsed(name)
        reached[name] = ast.dump(_bare(tree))
        waiting += _imports(tree, name, path)
    return hashlib.sha256(json.dumps(reached, sort_keys=True).encode()).hexdigest()


def _parsed(name: str) -> tuple[ast.Module, Path]:
    path = Path(_found(name).origin)
    return ast.parse(path.read_text()), path


def _found(name: str) -> Any:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError:  # the parent is a module, not a package: `name` is a thing in it
        return None


def _imports(tree: ast.Module, name: str, path: Path) -> Iterator[str]:
    """Modules of the package that a module imports, itself or by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            wanted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            wanted = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            package = name if path.stem == "__init__" else name.rpartition(".")[0]
            wanted = [f"{package}.{file.stem}" for file in path.parent.glob("*.py") if file.stem != "__init__"]
        else:
            continue
        yield from (one for one in wanted if one.split(".")[0] == PACKAGE and one != PACKAGE and _found(one))


def _bare(tree: ast.Module) -> ast.Module:
    """The code without docstrings and without the declaration of the experiment."""
    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EXPERIMENT")
    ]
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return tree


def _place(folder: Path, name: str) -> Path:
    return folder / name[:2] / f"{name}.json"


def _numbers(value: Any) -> Any:
    """Numbers as they were before JSON: null was nan, a text an infinity."""
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return float("nan") if value is None else float(value)
