"""docs/papers.md, the bibliography as a page: python -m mooring.report.bibliography_page > docs/papers.md"""

from __future__ import annotations

import sys

from mooring.core.papers import PAPERS, Paper

HEAD = """# Papers

Docstrings, messages and experiments cite papers by a short key and a place: `apfl, Theorem 2`.

Figures, tables and claims of the first five are reproduced by a distribution of its own, `papers/` in the repository.
`pip install 'mooring-fl[papers]'` adds the commands `mooring reproduce` and `mooring theorem`. The results are in
`papers/docs/reproduction.md`, and `papers/docs/experiments.md` shows how an experiment is added. A paper's alias is
understood wherever an experiment is named: `004-fig1` is `kernel-fig1`.

| key | paper | about | alias |
|---|---|---|---|
"""


def format_bibliography() -> str:
    return HEAD + "".join(_row(paper) for paper in PAPERS)


def _row(paper: Paper) -> str:
    names = ", ".join(paper.authors) or "Anonymous"
    year = "under review" if paper.year is None else str(paper.year)
    venue = ", ".join(part for part in (paper.where, year) if part)
    return f"| `{paper.key}` | {names}. {paper.title}. {venue}. | {paper.about} | {paper.alias} |\n"


if __name__ == "__main__":
    sys.stdout.write(format_bibliography())
