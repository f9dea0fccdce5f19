"""Order of names that contain numbers: fig2 before fig10, client 7 before client 29."""

from __future__ import annotations

import re


def natural_key(name: str) -> list[int | str]:
    """The parts of a name, its numbers as numbers: a key for `sorted`."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
