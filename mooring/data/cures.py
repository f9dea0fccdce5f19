"""Cures: options of `load` that mend what a check of the data reports."""

from __future__ import annotations

from typing import NamedTuple

LABELS = {
    "drop": "Leave out {value}",
    "allow": "Keep {value}: it is known before the target",
    "merge_levels": "Read {value}",
    "na": "Read {value} as missing",
    "categorical": "Read {value} as categories",
    "drop_repeats": "Leave repeated rows out",
    "drop_small": "Leave small clients out",
    "winsorize": "Clip the extreme {value:.0%} of each column",
}


class Cure(NamedTuple):
    option: str
    value: str | float | bool

    @property
    def label(self) -> str:
        """The label of its button."""
        value = str(self.value).replace("=", " as ", 1) if self.option == "merge_levels" else self.value
        return LABELS[self.option].format(value=value)
