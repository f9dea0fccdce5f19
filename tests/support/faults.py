"""Faults: a disk that fails, or a process that dies, at the k-th call that changes the disk."""

from __future__ import annotations

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import contextmanager

import numpy as np

CALLS = ("open", "write", "fsync", "rename", "unlink", "mkdir")
KILLED, DONE, BROKEN = 77, 0, 1
_children: set[int] = set()


@contextmanager
def striking(strike: Callable[[int, str, Callable, tuple], object]):
    """Every call of CALLS first asks `strike(k, name, real, args)`; what it returns, if not None, is the result."""
    real = {name: getattr(os, name) for name in CALLS}
    log: list[str] = []

    def wrap(name):
        def call(*args, **kwargs):
            log.append(name)
            result = strike(len(log), name, real[name], args)
            return real[name](*args, **kwargs) if result is None else result

        return call

    try:
        for name in CALLS:
            setattr(os, name, wrap(name))
        yield log
    finally:
        for name in CALLS:
            setattr(os, name, real[name])


def calls_of(action: Callable[[], object]) -> list[str]:
    """The calls that an action makes when nothing fails."""
    with striking(lambda *_: None) as log:
        action()
    return log


def failing_at(k: int, code: int, action: Callable[[], object]) -> None:
    """Run the action with its k-th call failing."""

    def strike(at, name, real, args):
        if at == k:
            raise OSError(code, os.strerror(code))

    with striking(strike):
        action()


def fork(action: Callable[[], object]) -> int:
    """Start the action in a process of its own; its pid."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)  # children only touch files
        pid = os.fork()
    if pid == 0:
        code = BROKEN
        try:
            action()
            code = DONE
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(code)
    _children.add(pid)
    return pid


def wait(pid: int) -> int:
    """How a process ended: DONE, KILLED, BROKEN by an exception, or minus the signal that ended it."""
    _children.discard(pid)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_at(k: int, action: Callable[[], object], *, midway: bool = False) -> int:
    """Run the action in a process that dies at its k-th call: before it, or (a write, `midway`) half done."""

    def strike(at, name, real, args):
        if at == k:
            if midway:
                real(args[0], args[1][: len(args[1]) // 2])
            os._exit(KILLED)

    def doomed():
        with striking(strike):
            action()

    return wait(fork(doomed))


def kills(log: list[str]) -> list[tuple[int, bool]]:
    """Every place to die at: before each call, and halfway through each write."""
    return [(k, midway) for k, name in enumerate(log, 1) for midway in ((False, True) if name == "write" else (False,))]


def damages(data: bytes, flips: int, seed: int = 0):
    """Cuts at every 64th byte, an appended byte, and random single flipped bits."""
    yield from (data[:end] for end in range(0, len(data), 64))
    yield data + b"\0"
    draw = np.random.default_rng(seed)
    for place, bit in zip(draw.integers(len(data), size=flips), draw.integers(8, size=flips)):
        flipped = bytearray(data)
        flipped[place] ^= 1 << bit
        yield bytes(flipped)


def end_children() -> None:
    """End the processes that a failed test left behind."""
    for pid in list(_children):
        os.kill(pid, signal.SIGKILL)
        wait(pid)
