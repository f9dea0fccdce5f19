"""The terms of the commands, the report and the documentation, from glossary.toml.

`python -m mooring.report.glossary > docs/glossary.md` writes the page that lists them.
"""

from __future__ import annotations

import sys
import tomllib
from importlib.resources import files
from typing import NamedTuple

HEADER = """# Glossary

Each term in two sentences; `mooring explain TERM` prints the same, and the headings of the report show it.

This page is written by `python -m mooring.report.glossary > docs/glossary.md` from `mooring/report/glossary.toml`.
"""


class Term(NamedTuple):
    """A term in two sentences, the page that explains it, and its other names."""

    text: str
    page: str  # of the documentation, without its ending
    also: tuple[str, ...] = ()


def load_terms() -> dict[str, Term]:
    """Return all terms by name, in the order of the file."""
    table = tomllib.loads(files("mooring.report").joinpath("glossary.toml").read_text(encoding="utf-8"))
    return {name: Term(entry["text"], entry["page"], tuple(entry.get("also", ()))) for name, entry in table.items()}


TERMS = load_terms()


def find_term(name_or_alias: str) -> Term | None:
    """Return a term by any of its names, in any case; None if there is none."""
    name = " ".join(name_or_alias.replace("_", " ").casefold().split())
    return next((term for key, term in TERMS.items() if name in (key, *term.also)), None)


def explain_label(label: str) -> str:
    """Return the text of a label's term; for "vs. local, CI low" that of the part before the comma; "" if unknown."""
    term = find_term(label) or find_term(label.split(",")[0])
    return "" if term is None else term.text


def list_names() -> list[str]:
    """Return every name that `find_term` recognizes."""
    return [name for key, term in TERMS.items() for name in (key, *term.also)]


def format_glossary() -> str:
    """Return docs/glossary.md: every term in alphabetical order with a link to its page."""
    entries = []
    for name, term in sorted(TERMS.items()):
        aliases = f" (also: {', '.join(term.also)})" if term.also else ""
        entries.append(f"**{name}**{aliases}\n:   {term.text} [More]({term.page}.md)\n")
    return "\n".join([HEADER, *entries])


if __name__ == "__main__":
    sys.stdout.write(format_glossary())
