"""Things of a user's own, named as "my_file.py:thing" or offered by an installed package as an entry point: models,
losses, tasks, algorithms, partitions.

A run directory keeps a copy of every such file, and of those beside it that it imports, so that the run works from
another folder. `load_python` is the only place where a file that a run names is executed, and only if this user has
given it; so it is with the files that it imports.
"""

from __future__ import annotations

import ast
import glob
import hashlib
import inspect
import re
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, TypeGuard, TypeVar

from mooring.core.errors import RequestError
from mooring.core.trusted_files import read_trusted_code

T = TypeVar("T")
SPEC_PATTERN = re.compile(r"^.+\.py:[A-Za-z_]\w*$")
COPY_PREFIX = "code-"  # begins the name of a copy in a run directory
COPY_DIGEST_DIGITS = 16  # of a copy's digest in its name


def is_spec(text: object) -> TypeGuard[str]:
    return isinstance(text, str) and SPEC_PATTERN.match(text) is not None


def load_python(spec: str, what: str, copies: Path | None = None) -> Any:
    """The thing that "my_file.py:thing" names, from the run's own copy where `copies`, a run directory, has one.

    `what` is it called in errors.
    """
    path, name = spec.rsplit(":", 1)
    file = find_copy(copies, spec) or Path(path)
    if not file.is_file():
        raise RequestError(f"{what} {spec!r}: there is no file {path}.")
    title = f"{_begins(spec)}{Path(path).stem}"  # a name that no module imports
    module, source = ModuleType(title), read_trusted_code(file)
    module.__file__ = str(file)
    sys.modules[title] = module  # dataclasses look their module up
    beside = SiblingImporter(Path(path).resolve().parent, copies)
    sys.meta_path.append(beside)  # last: no file of a folder stands in for an installed package
    try:
        exec(compile(source, str(file), "exec"), vars(module))
    except RequestError:
        raise
    except Exception as error:
        raise RequestError(f"{what} {spec!r}: {path} fails with {type(error).__name__}: {error}.") from error
    finally:
        sys.meta_path.remove(beside)
        for loaded in beside.loaded:  # another folder may have a file of the same name
            sys.modules.pop(loaded, None)
    if not callable(getattr(module, name, None)):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise RequestError(f"{what} {spec!r}: {path} has no function {name!r}; it has {', '.join(names) or 'none'}.")
    return getattr(module, name)


def plugin_names(group: str) -> list[str]:
    """The names that installed packages offer in a group of entry points, such as "mooring.tasks"."""
    return sorted(point.name for point in entry_points(group=group))


def load_plugin(group: str, name: str) -> Any:
    """The thing that an installed package offers under this name; None if there is none."""
    offered = next(iter(entry_points(group=group, name=name)), None)
    return None if offered is None else offered.load()


def find_plugin_name(group: str, thing: type) -> str | None:
    """The name under which an installed package offers a class; None if there is none."""
    value = f"{thing.__module__}:{thing.__name__}"
    return next((point.name for point in entry_points(group=group) if point.value == value), None)


class SiblingImporter(MetaPathFinder, Loader):
    """Imports the Python files in a folder, from the run directory `copies` where it has them; only given ones run."""

    def __init__(self, folder: Path, copies: Path | None):
        self.folder, self.copies = folder, copies
        self.loaded: list[str] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = None if path is not None or "." in fullname else _beside(self.folder, fullname, self.copies)
        return None if file is None else ModuleSpec(fullname, self, origin=str(file))

    def exec_module(self, module: ModuleType) -> None:
        file = _beside(self.folder, module.__name__, self.copies)
        assert file is not None  # found a moment ago
        self.loaded.append(module.__name__)
        module.__file__ = str(file)
        exec(compile(read_trusted_code(file), str(file), "exec"), vars(module))


def _beside(folder: Path, name: str, copies: Path | None) -> Path | None:
    file = folder / f"{name}.py"
    return find_copy(copies, f"{file}:_") or (file if file.is_file() else None)


def add_imported_files(specs: Iterable[str], copies: Path | None = None) -> list[str]:
    """These specs, and one for each file beside theirs that they import, directly or through others."""
    out: list[str] = []
    waiting = list(specs)
    while waiting:
        spec = waiting.pop(0)
        if spec in out:
            continue
        out.append(spec)
        folder = Path(spec.rsplit(":", 1)[0]).resolve().parent
        waiting += [f"{folder / name}.py:_" for name in imported_files(spec, copies) if _beside(folder, name, copies)]
    return out


def imported_files(spec: str, copies: Path | None) -> list[str]:
    """The top-level names that a spec's file imports; none of a file that cannot be read or parsed."""
    file = find_copy(copies, spec) or Path(spec.rsplit(":", 1)[0])
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.append(node.module.partition(".")[0])
    return names


def spec_of(thing: object) -> str | None:
    """ "my_file.py:thing" for a function or a class that an imported file defines; None for all that is only in memory.

    A script that is running is no such file: loading it again would run it again.
    """
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "")
    module_object = sys.modules.get(module or "")
    if (
        thing is None
        or module in (None, "__main__")
        or module_object is None
        or getattr(module_object, name, None) is not thing
    ):
        return None
    try:
        file = inspect.getsourcefile(thing)  # type: ignore[arg-type]
    except TypeError:
        return None
    spec = f"{Path(file).resolve()}:{name}" if file and Path(file).is_file() else ""
    return spec if is_spec(spec) else None


def absolute_spec(spec: T) -> T | str:
    """A spec with its file's full path, where the file is there; anything else as it is."""
    if not is_spec(spec):
        return spec
    path, name = spec.rsplit(":", 1)
    return f"{Path(path).resolve()}:{name}" if Path(path).is_file() else spec


def copy_name(spec: str, content: bytes) -> str:
    """The name of the copy of a spec's file: the file, its folder and a digest of its content."""
    return f"{_begins(spec)}{hashlib.sha256(content).hexdigest()[:COPY_DIGEST_DIGITS]}.py"


def _begins(spec: str) -> str:
    path = Path(spec.rsplit(":", 1)[0])
    return f"{COPY_PREFIX}{path.stem}-{hashlib.sha256(str(path.parent).encode()).hexdigest()[:4]}-"


def find_copy(copies: Path | None, spec: str) -> Path | None:
    """The run's copy of a spec's file, if it has one; a damaged one is refused."""
    files = [] if copies is None else sorted(copies.glob(glob.escape(_begins(spec)) + "*.py"))
    if not files:
        return None
    if copy_name(spec, files[0].read_bytes()) != files[0].name:
        raise RequestError(f"{files[0]} is damaged: it is not the file that the run was begun with.")
    return files[0]


def copy_files(specs: Iterable[str], copies: Path | None = None) -> dict[str, bytes]:
    """The files of these specs by the names of their copies, from the copies in `copies` where there are some."""
    out = {}
    for spec in add_imported_files(specs, copies):
        file = find_copy(copies, spec) or Path(spec.rsplit(":", 1)[0])
        if file.is_file():
            content = file.read_bytes()
            out[copy_name(spec, content)] = content
    return out


def check_unchanged(specs: Iterable[str], copies: Path) -> None:
    """Refuse files that are no longer what the run began with; for one that is gone there is its copy in the run."""
    for spec in add_imported_files(specs, copies):
        file, copy = Path(spec.rsplit(":", 1)[0]), find_copy(copies, spec)
        if copy is not None and file.is_file() and file.read_bytes() != copy.read_bytes():
            raise RequestError(
                f"{copies}: {file} has changed since the run began; start a new run, or bring back {copy.name}."
            )
