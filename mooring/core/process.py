"""The process: how much a command prints beside its result (the level of the logger "mooring": --quiet, nothing,
--verbose), and memory of temporary tensors that the next ones take over."""

import ctypes
import logging
import sys

LOGGER = logging.getLogger("mooring")


def is_quiet() -> bool:
    """Whether notes and progress are left out."""
    return LOGGER.level >= logging.WARNING


def is_verbose() -> bool:
    """Whether every step is a line with its time."""
    return LOGGER.level == logging.DEBUG


def replace_control_characters(text: str) -> str:
    """Return text with control characters replaced by blanks, apart from ends of lines.

    Names, categories, notes and errors come from other parties: no escape sequence of theirs may reach a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text)


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt
MAX_REUSED_BYTES = 2**25  # of a tensor whose memory is taken over: the most that glibc allows
MAX_KEPT_BYTES = 2**28  # free memory of the process beyond which the rest is given back to the system


def keep_freed_memory() -> None:
    """Let new tensors take over the memory of freed ones, where the C library is glibc.

    By default it gives the memory of tensors of some megabytes back to the system at once. Each new one then starts
    with page faults, which take as long as the computation itself where thousands of small matrices are factorized.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAX_REUSED_BYTES)
        mallopt(M_TRIM_THRESHOLD, MAX_KEPT_BYTES)
