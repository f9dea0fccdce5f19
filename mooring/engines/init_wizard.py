"""Questions of `mooring init` about a table, and the resulting run file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import tomli_w

from mooring.core.errors import RequestError
from mooring.core.types import NamedValues
from mooring.data.role_guesses import describe_columns, guess_client_columns, guess_target_columns
from mooring.data.table_sources import read_source
from mooring.data.tables import require_column
from mooring.runs.sections import DEFAULT_ALGORITHM, OPTIONS, Option

MIN_CLIENT_ROWS = 5  # rows below which clients are asked about
Prompt = Callable[..., str]  # (question, default=...) -> answer


def write_run_file(source: str, name: str, options: NamedValues, prompt: Prompt | None) -> str:
    """Return the text of a run file called `name`. `prompt` asks for missing options; without it they are refused."""
    if source.endswith(".toml"):
        raise RequestError(f"{source} is a run file already; give a table.")
    table = read_source(source)
    columns = describe_columns(table.frame)
    client = options["client"] or table.client
    if client is None:
        client = ask_column(
            prompt, "client", "Which column identifies the client?", guess_client_columns(columns, len(table.frame))
        )
    require_column(table.frame, client, "client", table.title)
    target = options["target"] or table.target
    if target is None:
        target = ask_column(
            prompt, "target", "Which column should be predicted?", guess_target_columns(columns, client)
        )
    require_column(table.frame, target, "target", table.title)
    drop_small = options["drop_small"]
    sizes = table.frame[client].value_counts()
    small = int((sizes < MIN_CLIENT_ROWS).sum())
    if drop_small is None and small and prompt is not None:
        question = f"{small} of {len(sizes)} clients have fewer than {MIN_CLIENT_ROWS} rows. Leave them out? (yes, no)"
        drop_small = str(prompt(question, default="yes")).lower().startswith("y")
    data = {"source": source, "client": client, "target": target} | ({"drop_small": True} if drop_small else {})
    return render_run_file({"data": data}, name)


def ask_column(prompt: Prompt | None, flag: str, question: str, guesses: list[str]) -> str:
    """Return a column's name from a person, or raise an error that names the option."""
    guess = guesses[0] if guesses else None
    if prompt is None:
        hint = f" (perhaps --{flag} {guess!r})" if guess else ""
        raise RequestError(f"mooring init: --{flag} is missing, and there is no terminal to ask: {question}{hint}.")
    examples = f" ({', '.join(guesses[:6])}, ...)" if len(guesses) > 1 else ""
    return str(prompt(f"{question}{examples}", default=guess))


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
