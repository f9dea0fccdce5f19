"""What Python did while data were read: code that ran, modules that were imported, files and processes."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

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
            seen.append(f"{event}: {str(arguments)[:200]}")


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
