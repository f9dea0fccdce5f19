"""`mooring cite`: one entry of BibTeX per paper, from the bibliography that docstrings cite."""

import re

import pytest

from mooring.algorithms.base import algorithm_names
from mooring.cli import main
from mooring.commands.reference import list_citations
from mooring.core.errors import RequestError
from mooring.core.papers import PAPERS, format_bibtex


def test_ditto_is_cited_after_mooring(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["cite", "ditto"])
    out = capsys.readouterr().out
    assert re.findall(r"^@(\w+)\{(\S+),$", out, re.M) == [("software", "mooring"), ("inproceedings", "ditto")]
    assert "author = {Li and Hu and Beirami and Smith}" in out and "year = {2021}" in out


@pytest.mark.parametrize("name", algorithm_names())
def test_every_algorithm_has_a_paper(name):
    assert len(list_citations([name])) > 1


def test_entries_are_balanced_and_papers_appear_once():
    for paper in PAPERS:
        entry = format_bibtex(paper)
        assert entry.count("{") == entry.count("}") and f"{{{paper.key}," in entry
    assert len(list_citations(["ditto", "ditto", "pfedme"])) == 3
    assert "McMahan" in list_citations(["fedavg"])[1]


def test_unknown_names_are_refused():
    with pytest.raises(RequestError, match="unknown algorithm 'dito'"):
        list_citations(["dito"])
