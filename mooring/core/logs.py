"""How much a command prints beside its result, as the level of the logger "mooring": --quiet, nothing, --verbose; and
how text from data is printed."""

import logging

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
