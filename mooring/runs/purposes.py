"""Purposes of runs, and what their run files may contain."""

from __future__ import annotations

from typing import Literal, NamedTuple

PurposeName = Literal["fit", "compare", "advise", "personalize"]


class Purpose(NamedTuple):
    """What a run file of this purpose may contain."""

    methods: Literal["one", "several", "none"]  # [algorithm], [[algorithms]], neither
    has_advice_section: bool = False
    can_be_federated: bool = False


PURPOSES: dict[str, Purpose] = {
    "fit": Purpose("one", can_be_federated=True),
    "compare": Purpose("several"),
    "advise": Purpose("none", has_advice_section=True, can_be_federated=True),
    "personalize": Purpose("none"),
}
