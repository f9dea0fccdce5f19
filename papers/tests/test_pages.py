"""The pages of papers/docs: links lead somewhere, every page is in the site, and counts are current."""

import re
from pathlib import Path

import pytest
import yaml

from mooring_papers.base import catalog
from tests.test_words import find_forbidden, list_sentences, remove_code
from tools.papers_commands import format_page

PAPERS = Path(__file__).parents[1]
PAGES = sorted((PAPERS / "docs").rglob("*.md"))


@pytest.mark.parametrize("page", [*PAGES, PAPERS / "README.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)[)#]", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", sorted((PAPERS / "docs").glob("*.md")), ids=lambda page: page.name)
def test_pages_use_the_vocabulary(page):
    assert find_forbidden(remove_code(page.read_text().replace("verdicts", ""))) == []  # of claims: held, open, ...


def test_sentences_use_the_vocabulary():
    quoting = tuple(f"papers/mooring_papers/{part}/" for part in (*catalog.list_papers(), "base", "theory"))
    sentences = [pair for pair in list_sentences("papers/mooring_papers") if not pair[0].startswith(quoting)]
    found = [(name, part) for name, text in sentences for part in find_forbidden(text.replace("verdicts", ""))]
    assert len(sentences) > 50 and found == []


def test_every_page_is_in_the_site():
    listed = yaml.safe_load((PAPERS / "mkdocs.yml").read_text())["nav"]
    assert sorted(listed) == sorted(page.relative_to(PAPERS / "docs").as_posix() for page in PAGES)


def test_the_page_of_commands_is_current():
    assert (PAPERS / "docs" / "commands.md").read_text() == format_page(), "write papers/docs/commands.md again"


def test_the_readme_of_mooring_has_the_counts_of_claims():
    page = (PAPERS / "docs" / "reproduction.md").read_text()
    held, contradicted, unsettled, rest, claims = re.search(
        r"\| all \|  \| " + r" \| ".join([r"(\d+)"] * 5), page
    ).groups()
    counts = f"of {claims} registered claims {held} held, {contradicted} contradicted, {unsettled} open, {rest} not run"
    assert counts in (PAPERS.parent / "README.md").read_text()
