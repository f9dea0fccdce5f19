"""The output of `mooring advise` for three tables, as the page of examples shows it.

    python -m benchmarks.advice_answers [--write]

With --write the outputs are written to docs/advice-examples.md, between its two marks.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path

from rich.console import Console

from mooring.advice.advise import advise
from mooring.report.terminal import Display
from mooring.report.terminal_results import show_advice
from mooring.runs.atomic_files import to_plain
from tests.support.tables import TABLES

PAGE = Path(__file__).parent.parent / "docs" / "advice-examples.md"
BEGIN, END = "<!-- answers: python -m benchmarks.advice_answers --write -->", "<!-- end of answers -->"
WIDTH = 100
SOURCES = {
    "exam": ("Exam: pupils' scores in 65 schools (squared loss)", TABLES["exam"]),
    "contraception": ("Contraception: its use in 60 districts (two classes)", TABLES["contraception"]),
    "parkinsons": ("parkinsons: the symptoms of 42 patients (squared loss)", None),
}


def print_answer(name: str) -> str:
    """Return the terminal's output for one table, in lines of WIDTH characters."""
    title, classic = SOURCES[name]
    source, columns = (name, {}) if classic is None else classic
    advice = advise(source, **columns, threads=1)
    with tempfile.TemporaryFile("w+") as sink:
        display = Display()
        display.out = Console(file=sink, width=WIDTH, highlight=False, emoji=False, markup=False)
        show_advice(display, to_plain(advice.record))
        sink.seek(0)
        lines = [line.rstrip() for line in sink.read().splitlines()]
    text = "\n".join(lines).strip()
    return f"**{title}**\n\n```text\n{text}\n```\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    answers = "\n".join(print_answer(name) for name in SOURCES)
    if options.write:
        text = PAGE.read_text()
        part = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.S)
        PAGE.write_text(part.sub(lambda _: f"{BEGIN}\n\n{answers}\n{END}", text))
    else:
        print(answers)


if __name__ == "__main__":
    main()
