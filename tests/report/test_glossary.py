"""The glossary: complete, explained by `mooring explain`, listed in the documentation, shown by the report."""

import re

from mooring.report.glossary import TERMS, explain_label, find_term, format_glossary, list_names
from mooring.report.html_report import CARD_LABELS
from mooring.report.report_contents import COLUMN_LABELS
from tests.support.repository import ROOT

AGREED = """client; local model; global model; pooled model; personal model; lambda; alpha; recommendation; margin;
confidence; improvement; contribution; outlier; baseline; held-out rows; test rows; hyperparameters; options; rows;
samples; heterogeneity; between-client standard deviation; participation; cohort; report; deployment; message; node;
client statistics; resolve; local update; checkpoint; record"""


def test_agreed_terms_are_explained():
    missing = [name for name in " ".join(AGREED.split()).split("; ") if name not in TERMS]
    assert missing == []


def test_terms_have_two_sentences_a_page_and_names_of_their_own():
    assert len(list_names()) == len(set(list_names()))
    for name, term in TERMS.items():
        assert len(re.findall(r"[.!?](?= |$)", term.text)) == 2, name
        assert (ROOT / "docs" / f"{term.page}.md").is_file(), name
        assert find_term(name.upper()) == term


def test_the_page_is_current():
    assert (ROOT / "docs" / "glossary.md").read_text() == format_glossary(), (
        "run `python -m mooring.report.glossary > docs/glossary.md`"
    )


def test_labels_of_the_report_are_explained():
    missing = [label for label in (*COLUMN_LABELS.values(), *CARD_LABELS) if not explain_label(label)]
    assert missing == []
