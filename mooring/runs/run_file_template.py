"""The run file that `mooring init` writes, with a comment on every option."""

from __future__ import annotations

import json
from collections.abc import Mapping

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
COMMENT_COLUMN = 34


def render_run_file(values: Mapping[str, NamedValues], name: str) -> str:
    """Return the text of a run file with these values in its sections, and all other options as comments."""
    parts = [HEAD.format(name=name)]
    for section in dict.fromkeys(option.section for option in OPTIONS.values()):
        section_values = dict(values.get(section, {}))
        lines = [f"[{section}]"] + [
            render_assignment(field, section_values.pop(field)) for field in ("source",) if field in section_values
        ]
        for option in OPTIONS.values():
            if option.section == section:
                lines.append(render_line(option, section_values))
        parts.append("\n".join(lines) + "\n")
        if section == "task":
            parts.append(METHOD)
    return "\n".join(parts)


def render_line(option: Option, section_values: NamedValues) -> str:
    comment = f"# {option.info.title} [{option.default}]"
    if option.field in section_values:
        return f"{render_assignment(option.field, section_values[option.field]):<{COMMENT_COLUMN}}{comment}"
    value = option.info.default
    line = f"# {render_assignment(option.field, value)}" if value is not None else f"# {option.field} ="
    return f"{line:<{COMMENT_COLUMN}}{comment}"


def render_assignment(field: str, value: object) -> str:
    return tomli_w.dumps({field: value}).strip() if not isinstance(value, list) else f"{field} = {json.dumps(value)}"
