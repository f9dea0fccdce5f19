"""The bibliography, its page, and that nothing calls a paper by its number any more."""

import re
from pathlib import Path

import pytest

from mooring.algorithms.base import algorithm_names, describe, find
from mooring.core.papers import BY_KEY, PAPERS, expand_citations, paper_key
from mooring.report.bibliography_page import format_bibliography

ROOT = Path(__file__).parents[2]
LONE = re.compile(r"(?<![\w.,#\\/])00[0-4](?![\d_A-Za-z])(?!\.\d)(?!,\d)")  # not as a part of 1,000, 0.001, 1_000, #000
ALIASES = ("mooring/core/papers.py", "docs/papers.md")  # where the numbers are defined
EXAMPLE = "004-fig1"  # and the one example by which the other files say that they work


def test_keys_and_aliases_are_unique():
    assert len(BY_KEY) == len(PAPERS)
    assert [paper.alias for paper in PAPERS if paper.alias] == ["000", "001", "002", "003", "004"]


def test_citations_name_their_authors():
    assert expand_citations("apfl, Section 3") == "Deng, Kamani and Mahdavi 2020 (apfl), Section 3"
    assert (
        expand_citations("mspp, Eq. 1.3; effect")
        == "Yuan and Li 2022 (mspp), Eq. 1.3; anonymous, under review (effect)"
    )
    assert expand_citations("Doe 2024, Section 1; apfl") == "Doe 2024, Section 1; Deng, Kamani and Mahdavi 2020 (apfl)"
    assert BY_KEY["ditto"].citation == "Li et al. 2021"


def test_numbers_of_earlier_records_are_read_as_keys():
    assert [paper_key(text) for text in ("004-fig1", "000", "kernel-fig1", "all", "009-fig1")] == [
        "kernel-fig1",
        "alternative",
        "kernel-fig1",
        "all",
        "009-fig1",
    ]


@pytest.mark.parametrize("name", algorithm_names())
def test_every_algorithm_says_who_and_where(name):
    assert all(part.strip().partition(", ")[0] in BY_KEY for part in find(name).paper.split(";"))
    assert describe(name)["paper"] == expand_citations(find(name).paper)


def test_the_page_is_the_data():
    assert (ROOT / "docs" / "papers.md").read_text() == format_bibliography()


def test_no_paper_is_called_by_its_number():
    files = [
        ROOT / "README.md",
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("docs/**/*.json"),
        *ROOT.glob("mooring/**/*.py"),
        *ROOT.glob("papers/docs/**/*.md"),
        *ROOT.glob("papers/docs/**/*.json"),
        *ROOT.glob("papers/mooring_papers/**/*.py"),
    ]
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()[:80]}"
        for path in files
        if str(path.relative_to(ROOT)) not in ALIASES
        for line in path.read_text().splitlines()
        if LONE.search(line.replace(EXAMPLE, ""))
    ]
    assert found == []
