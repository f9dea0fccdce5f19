"""What Python did while data were read: code that ran, modules that were imported, files and processes."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType

CODE_EVENTS = frozenset(
    (
        *("exec", "compile", "import", "open", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork"),
        *("os.forkpty", "subprocess.Popen", "pickle.find_class", "ctypes.dlopen", "socket.connect"),
    )
)
_watchers: list[tuple[frozenset[str], list[str]]] = []
_installed: list[bool] = []


def _record(event: str, arguments: tuple[object, ...]) -> None:
    for events, seen in _watchers:
        if event in events:
            seen.append(f"{event}: {_describe(arguments)}")


def _describe(arguments: tuple[object, ...]) -> str:
    """The arguments of an event without addresses, so that equal events are equal texts."""
    code = arguments[0] if arguments else None
    if isinstance(code, CodeType):
        return f"{code.co_filename} {code.co_name} {code.co_names} {code.co_consts}"[:300]
    return str(arguments)[:300]


@contextmanager
def watch(events: frozenset[str] = CODE_EVENTS) -> Iterator[list[str]]:
    """Yield the list of the events that occur in the block; a hook cannot be removed, so that it stays, idle."""
    if not _installed:
        sys.addaudithook(_record)
        _installed.append(True)
    watcher = events, list[str]()
    _watchers.append(watcher)
    try:
        yield watcher[1]
    finally:
        _watchers.remove(watcher)
