"""Digest of the code that a function can reach: the definitions that it uses, that those use, and so on.

A definition is a function, a class or an assignment at the top level of a module; other top-level statements of a
reached module are included. Names are followed through imports, including those inside functions, and through
`module.name`. If a name cannot be resolved, its whole module is included; a function that imports by name may reach all
modules of its folder. Docstrings, comments, annotations of arguments and the modules of `experiments/base` are
excluded.

Renaming a module or a function changes the digest although no number changes. A record therefore contains the version
and commit of the code that made it besides the digest.
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
EXCLUDED_PACKAGE = f"{PACKAGE}.experiments.base"
WHOLE_MODULE = "*"  # in place of a name
TOP_LEVEL = ""  # in place of a name: top-level statements that define nothing

Place = tuple[str, str]  # module, name in it


class ParsedModule(NamedTuple):
    definitions: dict[str, list[ast.stmt]]  # by name; several if it is defined again
    imports: dict[str, Place]  # the places that imported names refer to
    statements: list[ast.stmt]  # top-level statements that define nothing
    folder: Path


def digest_code(module: str, name: str) -> str:
    """Return the digest of all code that the function can reach."""
    return hashlib.sha256(json.dumps(reachable_definitions(module, name), sort_keys=True).encode()).hexdigest()


def reachable_definitions(module: str, name: str) -> dict[str, str]:
    """Return all definitions that the function can reach, by `module:name`, without docstrings and comments."""
    definitions: dict[str, str] = {}
    seen: set[Place] = set()
    waiting: list[Place] = [(module, name)]
    while waiting:
        place = waiting.pop()
        if place in seen or place[0].startswith(EXCLUDED_PACKAGE):
            continue
        seen.add(place)
        text, references = _inspect(*place)
        if text:
            definitions[":".join(place)] = text
        waiting += references
    return definitions


def clear_caches() -> None:
    """Make the next call read all files again."""
    for function in (_parse, _inspect, _is_module):
        function.cache_clear()


@cache
def _inspect(module: str, name: str) -> tuple[str, list[Place]]:
    """Return the code at a place, and the places that it refers to."""
    parsed = _parse(module)
    if name == WHOLE_MODULE:
        return "", [(module, definition) for definition in [*parsed.definitions, TOP_LEVEL]]
    if name == TOP_LEVEL:
        nodes = parsed.statements
    elif name in parsed.definitions:
        nodes = parsed.definitions[name]
    elif name in parsed.imports:
        target, imported = parsed.imports[name]
        if imported == WHOLE_MODULE:
            return "", [(target, WHOLE_MODULE)]
        return "", [(target, imported), (module, TOP_LEVEL)]
    else:
        return "", [(module, WHOLE_MODULE)]  # defined dynamically
    references: list[Place] = [] if name == TOP_LEVEL else [(module, TOP_LEVEL)]
    for node in nodes:
        references += _references(node, module, parsed)
    return json.dumps([ast.dump(node) for node in nodes]), references


def _references(node: ast.stmt, module: str, parsed: ParsedModule) -> Iterator[Place]:
    """Yield the places that a statement refers to."""
    inner = dict(_imported_names(node, module))
    imports = parsed.imports | inner
    owners = {id(part.value) for part in ast.walk(node) if isinstance(part, ast.Attribute)}
    for part in _without_annotations(node):
        if isinstance(part, ast.Call) and ast.unparse(part.func).endswith("import_module"):
            yield from _folder_modules(module, parsed)
        elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
            target = imports.get(part.value.id)
            if target is not None and target[1] == WHOLE_MODULE:
                yield _resolve(target[0], part.attr)
        elif isinstance(part, ast.Name) and part.id in inner:
            yield inner[part.id]
        elif isinstance(part, ast.Name) and part.id in parsed.definitions:
            yield module, part.id
        elif isinstance(part, ast.Name) and part.id in parsed.imports:
            target = parsed.imports[part.id]
            if target[1] != WHOLE_MODULE or id(part) not in owners:
                yield target


def _without_annotations(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all parts of a statement except the annotations of arguments and results."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns"):
            continue
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.AST):
                yield part
                yield from _without_annotations(part)


def _folder_modules(module: str, parsed: ParsedModule) -> Iterator[Place]:
    package = module if _is_module(f"{module}.__init__") else module.rpartition(".")[0]
    for file in parsed.folder.glob("*.py"):
        if file.stem != "__init__":
            yield f"{package}.{file.stem}", WHOLE_MODULE


@cache
def _parse(module: str) -> ParsedModule:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, module
    path = Path(spec.origin)
    tree = _strip(ast.parse(path.read_text()))
    definitions: dict[str, list[ast.stmt]] = {}
    imports: dict[str, Place] = {}
    statements = []
    for node in tree.body:
        names = list(_defined_names(node))
        for name in names:
            definitions.setdefault(name, []).append(node)
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports |= dict(_imported_names(node, module))
        elif not names:
            imports |= dict(_imported_names(node, module))
            statements.append(node)
    return ParsedModule(definitions, imports, statements, path.parent)


def _defined_names(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    for target in targets:
        for part in target.elts if isinstance(target, ast.Tuple) else [target]:
            if isinstance(part, ast.Name):
                yield part.id


def _imported_names(node: ast.AST, module: str) -> Iterator[tuple[str, Place]]:
    """Yield the names that a statement imports from the package, and the places that they refer to."""
    for part in ast.walk(node):
        if isinstance(part, ast.Import):
            for alias in part.names:
                if _is_in_package(alias.name):
                    yield alias.asname or alias.name, (alias.name, WHOLE_MODULE)
        elif isinstance(part, ast.ImportFrom) and part.module and not part.level and _is_in_package(part.module):
            for alias in part.names:
                yield alias.asname or alias.name, _resolve(part.module, alias.name)


def _resolve(module: str, name: str) -> Place:
    """Return the place of `name` in `module`: a submodule, or a definition."""
    return (f"{module}.{name}", WHOLE_MODULE) if _is_module(f"{module}.{name}") else (module, name)


def _is_in_package(module: str) -> bool:
    return module.split(".")[0] == PACKAGE


@cache
def _is_module(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent is a module, not a package
        return False


def _strip(tree: ast.Module) -> ast.Module:
    """Remove docstrings and the declaration of an experiment."""
    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EXPERIMENT")
    ]
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return tree
