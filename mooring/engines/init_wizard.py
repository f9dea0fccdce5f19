"""Questions of `mooring init` about a table, and the resulting run file."""

from __future__ import annotations

from collections.abc import Callable

from mooring.core.errors import RequestError
from mooring.core.types import NamedValues
from mooring.data.role_guesses import describe_columns, guess_client_columns, guess_target_columns
from mooring.data.table_sources import read_source
from mooring.data.tables import require_column
from mooring.runs.run_file_template import render_run_file

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
