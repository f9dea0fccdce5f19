"""The code that a function can reach: the definitions of the package that it names, that those name, and so on.

A definition is a function, a class (whole) or an assignment at a module's top; what else stands at the top of a reached
module counts as well. Names are followed through imports, also those inside functions, and through `module.name`.
Wherever a name cannot be followed, all of its module is reached; a function that imports by name may reach all modules
of its folder. Docstrings, comments, annotations of arguments and the modules of `experiments/base` do not count.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

PACKAGE = "mooring"
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
NO_NUMBERS = f"{PACKAGE}.experiments.base"
WHOLE = "*"  # in place of a name: all of a module
LOOSE = ""  # statements at the top that define nothing

Place = tuple[str, str]  # module, name in it


class Module(NamedTuple):
    definitions: dict[str, list[ast.stmt]]  # by name; several where it is defined again
    imports: dict[str, Place]  # what a name at the top stands for
    loose: list[ast.stmt]
    folder: Path


def digest_code(module: str, name: str) -> str:
    """Of all code that the function reaches."""
    return hashlib.sha256(json.dumps(reachable_definitions(module, name), sort_keys=True).encode()).hexdigest()


def reachable_definitions(module: str, name: str) -> dict[str, str]:
    """All definitions that the function reaches, as `module:name`, without their prose."""
    found: dict[str, str] = {}
    seen: set[Place] = set()
    waiting: list[Place] = [(module, name)]
    while waiting:
        place = waiting.pop()
        if place in seen or place[0].startswith(NO_NUMBERS):
            continue
        seen.add(place)
        text, next_ = _look(*place)
        if text:
            found[":".join(place)] = text
        waiting += next_
    return found


def clear_caches() -> None:
    """Read all files anew."""
    for kept in (parsed, _look, exists):
        kept.cache_clear()


@cache
def _look(module: str, name: str) -> tuple[str, list[Place]]:
    """What stands at a place, and where it leads."""
    here = parsed(module)
    if name == WHOLE:
        return "", [(module, one) for one in [*here.definitions, LOOSE]]
    if name == LOOSE:
        nodes = here.loose
    elif name in here.definitions:
        nodes = here.definitions[name]
    elif name in here.imports:
        target, wanted = here.imports[name]
        if wanted == WHOLE:
            return "", [(target, WHOLE)]
        return "", [(target, wanted), (module, LOOSE)]
    else:
        return "", [(module, WHOLE)]  # made on the fly
    leads: list[Place] = [] if name == LOOSE else [(module, LOOSE)]
    for node in nodes:
        leads += _leads(node, module, here)
    return json.dumps([ast.dump(node) for node in nodes]), leads


def _leads(node: ast.stmt, module: str, here: Module) -> Iterator[Place]:
    """Places that a statement names."""
    inner = dict(_imported(node, module))
    known = here.imports | inner
    owners = {id(part.value) for part in ast.walk(node) if isinstance(part, ast.Attribute)}
    for part in _named(node):
        if isinstance(part, ast.Call) and ast.unparse(part.func).endswith("import_module"):
            yield from _folder(module, here)
        elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
            target = known.get(part.value.id)
            if target is not None and target[1] == WHOLE:
                yield _resolved(target[0], part.attr)
        elif isinstance(part, ast.Name) and part.id in inner:
            yield inner[part.id]
        elif isinstance(part, ast.Name) and part.id in here.definitions:
            yield module, part.id
        elif isinstance(part, ast.Name) and part.id in here.imports:
            target = here.imports[part.id]
            if target[1] != WHOLE or id(part) not in owners:
                yield target


def _named(node: ast.AST) -> Iterator[ast.AST]:
    """All parts of a statement but the annotations of arguments and results."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns"):
            continue
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.AST):
                yield part
                yield from _named(part)


def _folder(module: str, here: Module) -> Iterator[Place]:
    package = module if exists(f"{module}.__init__") else module.rpartition(".")[0]
    for file in here.folder.glob("*.py"):
        if file.stem != "__init__":
            yield f"{package}.{file.stem}", WHOLE


@cache
def parsed(module: str) -> Module:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, module
    path = Path(spec.origin)
    tree = bare(ast.parse(path.read_text()))
    definitions: dict[str, list[ast.stmt]] = {}
    imports: dict[str, Place] = {}
    loose = []
    for node in tree.body:
        names = list(_defines(node))
        for name in names:
            definitions.setdefault(name, []).append(node)
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports |= dict(_imported(node, module))
        elif not names:
            imports |= dict(_imported(node, module))
            loose.append(node)
    return Module(definitions, imports, loose, path.parent)


def _defines(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    for target in targets:
        for part in target.elts if isinstance(target, ast.Tuple) else [target]:
            if isinstance(part, ast.Name):
                yield part.id


def _imported(node: ast.AST, module: str) -> Iterator[tuple[str, Place]]:
    """Names that a statement imports from the package, and what they stand for."""
    for part in ast.walk(node):
        if isinstance(part, ast.Import):
            for alias in part.names:
                if _ours(alias.name):
                    yield alias.asname or alias.name, (alias.name, WHOLE)
        elif isinstance(part, ast.ImportFrom) and part.module and not part.level and _ours(part.module):
            for alias in part.names:
                yield alias.asname or alias.name, _resolved(part.module, alias.name)


def _resolved(module: str, name: str) -> Place:
    """`name` in `module`: a module of its own, or a thing."""
    return (f"{module}.{name}", WHOLE) if exists(f"{module}.{name}") else (module, name)


def _ours(module: str) -> bool:
    return module.split(".")[0] == PACKAGE


@cache
def exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent is a module, not a package: it is a thing in it
        return False


def bare(tree: ast.Module) -> ast.Module:
    """The code without docstrings and without the declaration of an experiment."""
    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EXPERIMENT")
    ]
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return tree
