"""Which files a run file may name: data beside it, and other data and code only if this user has given them.

A run file or a run directory may come from an untrusted source. Reading it executes nothing: a Python file that it
names ("net.py:make") is run only if this user has given that file, on a command line, as an argument, or by trusting
the run file (`--trust-code`, `trust_code=True`, or yes to a question). Its data are in its own folder, or are given in
the same way.

What was given is remembered, so that the user's own runs need no question: code by the sha256 of its bytes, so that
a changed file is a new one, data by their path. The record is one text file in the user's state folder; where that
cannot be written, it lasts as long as the process.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from platformdirs import user_state_path

from mooring.core.errors import RequestError

CODE, DATA = "code", "data"
HOW_TO_TRUST = "look at it, then repeat with --trust-code (in Python: trust_code=True)"
CONFIRMATIONS: list[Callable[[str], bool]] = []  # the command line puts its question here where a person can answer
_given: set[tuple[str, str]] = set()


def trust_file() -> Path:
    """Where it is remembered what this user has given."""
    return user_state_path("mooring", appauthor=False) / "given"


def trust_code(path: str | Path) -> None:
    """This user gives a Python file, as it is now."""
    if Path(path).is_file():
        _remember(CODE, _digest(_read(path)))


def read_trusted_code(path: str | Path) -> bytes:
    """The bytes of a Python file that may be run. Run these: the file, or a compiled one beside it, may change."""
    data = _read(path)
    if not _is_given(CODE, _digest(data)):
        question = f"{path} is Python that a run file wants to run, and you have not given it on a command line"
        if not _yes(f"{question}. Run it?"):
            raise RequestError(f"{question}: {HOW_TO_TRUST}.")
        _remember(CODE, _digest(data))
    return data


def check_trusted(
    where: str | Path, folder: Path, code: Iterable[str], data: Iterable[str], trust: bool = False
) -> None:
    """The files that a run file names may be used: all of them under `trust`, else as said above, or RequestError."""
    for path in code:
        if trust:
            trust_code(path)
        elif Path(path).is_file():
            read_trusted_code(path)
    for name in data:
        file = Path(name).resolve()
        inside = file.is_relative_to(folder.resolve())
        if not (trust or inside or any(_is_given(DATA, str(place)) for place in (file, *file.parents))):
            question = f"{where} wants to read {file}, which is outside its folder and which you have not given"
            if not _yes(f"{question}. Read it?"):
                raise RequestError(f"{question}: {HOW_TO_TRUST}.")
        _remember(DATA, str(file))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _read(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise RequestError(f"{path} could not be read: {error.strerror or error}.") from error


def _yes(question: str) -> bool:
    return bool(CONFIRMATIONS) and CONFIRMATIONS[-1](question)


def _is_given(kind: str, what: str) -> bool:
    if (kind, what) in _given:
        return True
    with suppress(OSError, UnicodeDecodeError):
        return _line(kind, what) in trust_file().read_text().splitlines()
    return False


def _remember(kind: str, what: str) -> None:
    is_known = _is_given(kind, what)
    _given.add((kind, what))
    if is_known:
        return
    with suppress(OSError):
        trust_file().parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(trust_file(), "a", encoding="utf-8") as file:
            file.write(_line(kind, what) + "\n")


def _line(kind: str, what: str) -> str:
    return json.dumps([kind, what])
