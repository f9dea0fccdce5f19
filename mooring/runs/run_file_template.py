"""A run file with a comment on everything that could be said in it: what `mooring init` writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tomli_w

from mooring.core.types import NamedValues
from mooring.runs.sections import DEFAULT_ALGORITHM, OPTIONS, Option

HEAD = """# A run of Mooring: `mooring advise {name}`, `mooring fit {name}` and `mooring compare {name}` read it.
# Lines that begin with # say what would hold without them; take the # away to change it.
"""
METHOD = f"""[algorithm]                       # of `mooring fit`; `mooring list algorithms` names all
name = "{DEFAULT_ALGORITHM}"
# lam = "auto"                    # how stiff the lines are: a number, "auto", or a rule of `mooring theory`
"""
WIDTH = 34


def render_run_file(given: Mapping[str, NamedValues], name: str) -> str:
    """The text of a run file with these values in its sections, and all other options as comments."""
    parts = [HEAD.format(name=name)]
    for section in dict.fromkeys(option.section for option in OPTIONS.values()):
        said = dict(given.get(section, {}))
        lines = [f"[{section}]"] + [assigned(field, said.pop(field)) for field in ("source",) if field in said]
        for option in OPTIONS.values():
            if option.section == section:
                lines.append(line_of(option, said))
        parts.append("\n".join(lines) + "\n")
        if section == "task":
            parts.append(METHOD)
    return "\n".join(parts)


def line_of(option: Option, said: NamedValues) -> str:
    about = f"# {option.info.title} [{option.default}]"
    if option.field in said:
        return f"{assigned(option.field, said[option.field]):<{WIDTH}}{about}"
    value = option.info.default
    shown = f"# {assigned(option.field, value)}" if value is not None else f"# {option.field} ="
    return f"{shown:<{WIDTH}}{about}"


def assigned(field: str, value: Any) -> str:
    return tomli_w.dumps({field: value}).strip() if not isinstance(value, list) else f"{field} = {json.dumps(value)}"
