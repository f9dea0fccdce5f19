"""The pages of the site and the notebooks, as a reader would go through them, in an empty folder."""

import json
import re

import numpy as np
import pandas as pd
import pytest
import yaml

from mooring.algorithms.base import algorithm_names
from tests.journeys.pages import run_page
from tests.support.repository import ROOT
from tools.reference_pages import format_algorithms, format_commands

ELSEWHERE = {  # pages that other tests go through, or that only show what is done elsewhere
    "adding-a-partition.md": "tests/data/test_partition_plugins.py",
    "adding-a-task.md": "tests/tasks/test_plugin_tasks.py",
    "adding-an-algorithm.md": "tests/test_docs.py",
    "advice.md": "tests/journeys/test_analyst.py",
    "coming-from-lme4.md": "tests/journeys/test_statistician.py",
    "deploying.md": "tests/remote/test_processes.py",
    "network-adapters.md": "tests/journeys/test_adapters.py",
    "networks.md": "tests/journeys/test_researcher.py",
    "performance.md": "its commands measure for minutes",
    "reliability.md": "its commands take minutes",
    "scikit-learn.md": "tests/journeys/test_scikit_learn.py",
    "tables.md": "tests/journeys/test_analyst.py",
    "theory.md": "tests/journeys/test_analyst.py",
    "options.md": "tests/test_options.py",
    "output-files.md": "tests/runs/test_output_files.py",
}
HERE = [
    "coming-from-flower.md",
    "coming-from-pfllib.md",
    "comparing.md",
    "hostile-input.md",
    "install.md",
    "differential-privacy.md",
    "quickstart-python.md",
    "quickstart.md",
    "reading-the-report.md",
]
MAX_WORDS = 1_200  # of a page that is no reference
REFERENCE = [
    "adding-an-algorithm",  # the contract of algorithms, as tables
    "algorithms",
    "commands",
    "departures",
    "glossary",
    "options",
    "output-files",
    "papers",
    "python-api",
    "secure-sums",  # a protocol
]


def visits():
    """A table of a reader's own, with the columns that the page names and a clinic that is too small."""
    rng = np.random.default_rng(3)
    clinic = np.repeat(["north", "south", "east", "west", "tiny"], [40, 30, 35, 25, 4])
    frame = pd.DataFrame({"clinic": clinic, "age": rng.normal(50, 10, len(clinic))})
    frame["sex"] = rng.choice(["f", "m"], len(frame))
    return frame.assign(score=frame["age"] / 10 + (frame["clinic"] == "east") + rng.normal(size=len(frame)))


@pytest.mark.parametrize("page", HERE)
def test_a_page_works_in_an_empty_folder(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if page == "quickstart.md":
        visits().to_csv("visits.csv", index=False)
    assert run_page(ROOT / "docs" / page) >= 1
    if page == "quickstart.md":
        assert "Report: run/report.html" in capsys.readouterr().out and (tmp_path / "run/report.html").is_file()
        assert len(pd.read_csv("predictions.csv")) == len(visits())


@pytest.mark.parametrize("book", sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs(book, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(book.read_text())
    assert notebook["nbformat"] == 4 and all(not cell.get("outputs") for cell in notebook["cells"])
    names: dict = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), book.name, "exec"), names)


def test_every_page_is_in_the_site_and_every_command_is_tried():
    listed = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text())
    pages = {path.relative_to(ROOT / "docs").as_posix(): path.read_text() for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(listed) == sorted(pages)
    assert yaml.safe_load((ROOT / "mkdocs.yml").read_text())["theme"]["font"] is False
    shows = {name for name, text in pages.items() if re.search(r"^    mooring |^```python", text, re.M)}
    assert shows <= {*ELSEWHERE, *HERE}, "a page whose commands nobody tries"


def titles():
    """The first heading of every page."""
    return {path.name: path.read_text().partition("\n")[0] for path in (ROOT / "docs").glob("*.md")}


def test_titles_are_unique_and_links_use_them():
    """Navigation takes titles from the pages' first headings; links to whole pages have the same text."""
    names = {page: heading.removeprefix("# ") for page, heading in titles().items()}
    assert all(heading.startswith("# ") for heading in titles().values())
    assert len(set(names.values())) == len(names)
    wrong = [
        f"{path.name}: [{text}]({page}) is called {names[page]}"
        for path in (ROOT / "docs").glob("*.md")
        for text, page in re.findall(r"\[([^\]]+)\]\(([\w-]+\.md)\)", path.read_text())
        if " ".join(text.split()).casefold() != names[page].casefold() and text not in ("More", "one file")
    ]
    assert wrong == []


@pytest.mark.parametrize("page", sorted(titles()))
def test_pages_are_short(page):
    if page.removesuffix(".md") in REFERENCE:
        return
    text = (ROOT / "docs" / page).read_text()
    prose = re.sub(r"<!-- written by .*?<!-- (until here|end of)", "", text, flags=re.S)  # without what commands print
    prose = re.sub(r"```.*?```", "", prose, flags=re.S)  # and without programs
    assert len(prose.split()) <= MAX_WORDS


def test_the_readme_is_short_and_its_counts_are_current():
    text = (ROOT / "README.md").read_text()
    assert 400 <= len(re.sub(r"```text\n.*?```", "", text, flags=re.S).split()) <= 500  # without what commands print
    assert f"\n- {len(algorithm_names())} algorithms" in text


def test_reference_pages_are_current():
    for name, make in {"commands.md": format_commands, "algorithms.md": format_algorithms}.items():
        assert (ROOT / "docs" / name).read_text() == make(), f"write docs/{name} again; its first lines show how"
