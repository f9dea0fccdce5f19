"""How much a command prints beside its result, as the level of the logger "mooring": --quiet, nothing, --verbose."""

import logging

LOGGER = logging.getLogger("mooring")


def is_quiet() -> bool:
    """Whether notes and progress are left out."""
    return LOGGER.level >= logging.WARNING


def is_verbose() -> bool:
    """Whether every step is a line with its time."""
    return LOGGER.level == logging.DEBUG
