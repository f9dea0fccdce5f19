"""Commands of reference: explain, list."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated

import typer

from mooring.commands.common import app, print_json
from mooring.commands.plugins import load_commands, papers_missing
from mooring.core.errors import RequestError
from mooring.core.field_checks import describe_unknown
from mooring.options import Json


@app.command(epilog="Example: mooring explain lambda")
def explain(
    term: Annotated[list[str] | None, typer.Argument(hidden=True, metavar="TERM")] = None, json_: Json = False
) -> None:
    """Explain a term, an option or an algorithm.

    Without TERM, all terms are listed.
    """
    from mooring.report.glossary import TERMS
    from mooring.report.terminal import Display

    if not term:
        Display().print_line(", ".join(TERMS))
        return
    text = explain_term(" ".join(term))
    if json_:
        print_json({"term": " ".join(term), "text": text})
    else:
        Display().print_line(text)


def explain_term(word: str) -> str:
    """What a word means."""
    from mooring import options as flags
    from mooring.algorithms import base
    from mooring.report.glossary import find_term, list_names

    if (term := find_term(word)) is not None:
        return term.text
    bare = word.lstrip("-").replace("-", "_")
    if bare in flags.option_names():
        description = flags.describe(bare)
        return f"{description['summary']} Without {description['flag']} it is: {description['default']}."
    if bare in base.algorithm_names():
        return "\n".join([f"{bare}:", *describe_algorithm(bare)]).replace("`", "")
    known = [*list_names(), *flags.option_names(), *base.algorithm_names()]
    raise RequestError(f"mooring explain: {describe_unknown('word', word, known, 'mooring explain')}.")


def describe_algorithm(name: str) -> list[str]:
    """The lines of an algorithm: summary, hyperparameters with their defaults, source, limits, what messages reveal."""
    from mooring.algorithms.base import describe

    entry = describe(name)
    fields = ", ".join(f"`{field} = {value!r}`".replace("'", '"') for field, value in entry["fields"].items())
    listed = {"Hyperparameters": fields or "none", "Source": entry["paper"]}
    listed |= {label: entry[key] for key, label in (("limits", "Limits"), ("reveals", "Messages reveal")) if entry[key]}
    return [
        f"{entry['summary'][0].upper()}{entry['summary'][1:]}\n",
        *(f"- {key}: {text}" for key, text in listed.items()),
    ]


@app.command(epilog="Example: mooring cite ditto")
def cite(names: Annotated[list[str] | None, typer.Argument(hidden=True, metavar="NAME")] = None) -> None:
    """Print BibTeX of Mooring and of algorithms.

    NAME... are algorithms (`mooring list algorithms`) or keys of docs/papers.md. Without NAME, Mooring's own entry.
    """
    typer.echo("\n\n".join(list_citations(names or [])))


def list_citations(names: list[str]) -> list[str]:
    """Mooring's entry, and those of the papers of algorithms, each once."""
    from mooring.algorithms.base import algorithm_names, find
    from mooring.core.papers import BY_KEY, cited_papers, format_bibtex, format_own_bibtex
    from mooring.runs.sections import installed_version

    papers = []
    for name in names:
        if name in algorithm_names():
            papers += cited_papers(name, getattr(find(name), "paper", ""))
        elif name in BY_KEY:
            papers.append(BY_KEY[name])
        else:
            known = [*algorithm_names(), *BY_KEY]
            raise RequestError(
                f"mooring cite: {describe_unknown('algorithm', name, known, 'mooring list algorithms')}."
            )
    return [format_own_bibtex(installed_version()), *(format_bibtex(paper) for paper in dict.fromkeys(papers))]


LISTS: dict[str, tuple[str, str, str, dict[str, str]]] = {  # module, what lists names, what describes one, columns
    "algorithms": (
        "mooring.algorithms.base",
        "names_by_group",
        "describe",
        {
            "group": "group",
            "name": "algorithm",
            "summary": "what",
            "fields": "fields for --set",
            "paper": "source",
            "limits": "limits",
            "reveals": "reveals",
        },
    ),
    "tasks": (
        "mooring.tasks.catalog",
        "names",
        "describe",
        {"name": "task", "summary": "what", "targets": "targets", "exact": "exact prox"},
    ),
    "datasets": (
        "mooring.data.datasets",
        "known_datasets",
        "describe",
        {"name": "data set", "summary": "what", "needs": "needs"},
    ),
    "options": (
        "mooring.options",
        "option_names",
        "describe",
        {"flag": "flag", "file": "run file", "python": "Python", "default": "default", "summary": "what"},
    ),
}
OF_PAPERS = "experiments"  # listed by mooring-fl[papers], which adds its row to LISTS
LIST_NAMES = [*LISTS, OF_PAPERS]


@app.command("list", epilog="Example: mooring list algorithms")
def list_(
    what: Annotated[str, typer.Argument(hidden=True, metavar=f"{'|'.join(LIST_NAMES)}")],
    json_: Json = False,
) -> None:
    """List algorithms, tasks, data sets, options or experiments."""
    from mooring.report.terminal import Display

    if what == OF_PAPERS:
        load_commands(app)
        if what not in LISTS:
            raise papers_missing("mooring list experiments")
    if what not in LISTS:
        raise RequestError(f"mooring list: {describe_unknown('list', what, LIST_NAMES)}.")
    module, names, describe, columns = LISTS[what]
    catalog = import_module(module)
    rows = [getattr(catalog, describe)(name) for name in getattr(catalog, names)()]
    if json_:
        print_json({what: rows})
    else:
        short = [{k: list(v) if isinstance(v, dict) else v for k, v in row.items()} for row in rows]
        caption = "Defaults of the fields: `mooring list algorithms --json`." if what == "algorithms" else ""
        Display().table(what, short, columns, caption, spare=("limits", "reveals", "paper"))
