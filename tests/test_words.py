"""Words that must not appear in what users read: documentation, help, sentences, report templates, glossary."""

import ast
import re
from functools import cache

import click
import pytest
import typer

from mooring import cli
from tests.support.repository import ROOT

FORBIDDEN = {  # pattern -> what to write instead
    r"whoever|those who": "name the actor: a client, the server, you",
    r"newcomers?": "new client",
    r"common (model|one)s?": "global model",
    r"(train\w*|fit\w*|models?|rows?) alone|alone (and|or|will)": "local, or only",
    r"referees?|rivals?": "baseline",
    r"verdicts?|an advice|advices|will do|will_do": "recommendation",
    r"witness\w*|judged?": "held-out, evaluated",
    r"stiffness|tautness|moored|boats?|buoys?": "lambda, personal model, global model",
    r"own share": "alpha",
    r"harmed|helped|undecided": "confidence",
    r"brings|saves|pays|loses": "improvement or contribution, with its direction",
    r"letters?|parcels?|by post|at home": "message, deployment",
    r"tells?|told|says|speaks": "data show, a run reports, a file contains",
    r"settled?|settles": "resolve",
    r"liars?|strangers?": "malicious client, untrusted file",
    r"dealt|deals?|dealing": "partition",
    r"goes on|go on|begins? again": "resume, restart, retry",
    r"an? (row|column|line|number|lambda) an? [a-z]+": "one row per client",
    r"\d %": "no space before %",
    r"pip install mooring(?!-fl)": "the distribution is mooring-fl",
    r"(colour|behaviour|favour|neighbour)\w*": "US spelling",
    r"\w*(ardis|cognis|nimis|ximis|ptimis|laris|rmalis|toris)(e[ds]?|ing|er)": "US spelling",
}
PICTURE = ("buoy", "boat", "boats")  # of the report's figure and of its descriptions
ALLOWED = {  # where -> phrases that are right as they stand; "" is everywhere
    "": (
        "how tightly should each client be moored to the others",
        *("letters a to j", "handwritten letters", "letters of EMNIST", "10,000 letters", "other letters"),
        *("is a boat moored to a buoy", "a boat's distance from the buoy"),
    ),
    "README.md": PICTURE,
    "docs/concepts.md": PICTURE,
    "docs/reading-the-report.md": PICTURE,
    "page.js": PICTURE,
    "docs/maths.md": ("the same letter", "the paper's letters"),
}
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
MIN_WORDS = 3  # from which on a string of the package is read as a sentence
SKIPPED = ("mooring/theory",)  # statements of the papers


def find_forbidden(text: str, where: str = "") -> list[str]:
    """The forbidden phrases of a text, each with what to write instead."""
    text = " ".join(text.split())
    for key in {"", where} & ALLOWED.keys():
        for phrase in ALLOWED[key]:
            text = re.sub(re.escape(phrase), "", text, flags=re.I)
    found = []
    for pattern, instead in FORBIDDEN.items():
        for match in re.finditer(rf"(?<![\w`-])(?:{pattern})(?![\w`=-])", text, re.I):
            found.append(f"'{match[0]}' ({instead}): ...{text[max(0, match.start() - 30) : match.end() + 30]}...")
    return found


def remove_code(page: str) -> str:
    """A page of Markdown without code blocks, code spans and links' targets."""
    page = re.sub(r"^(```|~~~).*?^\1", "", page, flags=re.S | re.M)
    page = re.sub(r"^    .*$", "", page, flags=re.M) if "```" not in page else page
    return re.sub(r"`[^`]*`|\]\([^)]*\)", " code ", page)


@cache
def list_sentences(package: str = "mooring") -> list[tuple[str, str]]:
    """(file, sentence) of every string constant of a package that is not a docstring and has several words."""
    sentences = []
    for path in sorted((ROOT / package).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(SKIPPED):
            continue
        tree = ast.parse(path.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings | inside:
                text = node.value
            else:
                continue
            if len(text.split()) >= MIN_WORDS:
                sentences.append((name, text))
    return sentences


def list_help(command: click.Command, path: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """(command, text) of the help of a command and of those below it."""
    options = [option.help for option in command.params if isinstance(option, click.Option) and option.help]
    texts = [(" ".join(path), text) for text in (command.help, command.epilog, *options) if text]
    for name, child in getattr(command, "commands", {}).items():
        texts += list_help(child, (*path, name))
    return texts


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_pages_use_the_vocabulary(page):
    assert find_forbidden(remove_code(page.read_text()), page.relative_to(ROOT).as_posix()) == []


def test_sentences_of_the_package_use_the_vocabulary():
    assert [f"{name}: {found}" for name, text in list_sentences() for found in find_forbidden(text, name)] == []


def test_help_uses_the_vocabulary():
    top = typer.main.get_command(cli.app)
    assert [f"{name}: {found}" for name, text in list_help(top) for found in find_forbidden(text, name)] == []


def test_templates_and_glossary_use_the_vocabulary():
    files = [*(ROOT / "mooring").glob("*/templates/*.html"), ROOT / "mooring" / "report" / "glossary.toml"]
    texts = [(path.name, re.sub(r"\{%.*?%\}|\{\{.*?\}\}", "", path.read_text())) for path in files]
    for path in (ROOT / "mooring").glob("*/templates/*.js"):
        texts.append((path.name, re.sub(r"(^|\s)//.*", "", path.read_text())))
    assert [f"{name}: {found}" for name, text in texts for found in find_forbidden(text, name)] == []


def test_the_test_finds_what_it_looks_for():
    text = "Train alone: the verdict says 5 % for whoever brings a row a client. A newcomer is standardised."
    assert len(find_forbidden(text)) == 9
    assert find_forbidden("Use the global model at 3 of 4 clients.") == []
