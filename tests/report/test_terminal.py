"""Tables at 80 columns: no number is cut, names are told as they are, and nothing in them reaches the terminal."""

import io
import re
import sys
import warnings

import numpy as np
import pandas as pd
import pytest

from mooring.cli import confirm, main
from mooring.commands.common import print_json, write_data
from mooring.commands.event_log import EventLog
from mooring.core.process import replace_control_characters
from mooring.engines.progress import print_progress
from mooring.report.terminal import (
    Display,
    assign_widths,
    format_cell,
    is_number,
    shorten_name,
)
from mooring.report.terminal import TableColumn as Part

BIG = {"rows": 1_234_567, "alone": 7654321.4, "common": -1234567.8, "gain": 1898234.5, "low": -2.345678e-05, "p": 1e13}
SEEN = ["1,234,567", "7,654,321", "-1,234,568", "1,898,234", "-2.346e-05", "1.000e+13"]


@pytest.fixture
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def printed(capsys, rows, columns, **more):
    Display().table("Title", rows, columns, **more)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    return out


def words(text):
    return re.findall(r"[^\s]+", text)


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_numbers_are_never_cut(narrow, capsys, copies):
    """With one copy the columns fit, with more they do not, and each row has lines of its own."""
    row = {"client": "school", **{f"{name}{k}": value for k in range(copies) for name, value in BIG.items()}}
    out = printed(capsys, [row, row], {key: key for key in row})
    for number in SEEN:
        assert words(out).count(number) == 2 * copies, number


def test_spare_columns_go_first_and_are_named(narrow, capsys):
    row = {"client": "school", **BIG, "verdict": "undecided", "more": 7e6, "far": 5.0}
    out = printed(capsys, [row], {key: key for key in row}, spare=("p", "low", "alone"), caption="Said.")
    assert "Left out at this width: p, low." in out and "1.000e+13" not in out
    assert {"7,654,321", "1,898,234", "undecided", "Said."} <= set(words(out))


def test_names_are_shortened_only_when_no_number_can_be_left_out(narrow, capsys):
    row = {"client": "a-very-long-name-without-a-blank-in-it", **BIG}
    rows, columns = [row, {**row, "client": "b"}], {key: key for key in row}
    out = printed(capsys, rows, columns, spare=("p", "low", "gain"))
    assert row["client"] in out and "…" not in out and "Left out at this width: p, low" in out
    out = printed(capsys, rows, columns, spare=("p",))
    assert "Left out at this width: p." in out and "…" in out and set(SEEN[:5]) <= set(words(out))


def test_a_column_can_be_replaced_by_a_shorter_one(narrow, capsys):
    rows = [{"client": "a" * 30, "wide": "1.0% lower (-10,000 to 20,000)", "short": "1.0% lower", "more": "y" * 20}]
    columns = {"client": "client", "wide": "vs.", "short": "vs.", "more": "more"}
    out = printed(capsys, rows, columns, spare=("wide",), shorter={"wide": "short"})
    assert "1.0% lower" in out and "(-10,000" not in out and "Left out at this width: interval vs." in out
    assert shorten_name("abcdefghij", 5) == "ab…ij" and shorten_name("abc", 5) == "abc"
    assert shorten_name("x" * 30 + "1", 8).endswith("x1") and len(shorten_name("学校" * 20, 9)) <= 9


def test_sentences_are_wrapped_between_words(narrow, capsys):
    sentence = "A sentence with 1,234,567.89 and 0.000012345 in it, which goes on for much longer than a line can hold."
    out = printed(capsys, [{"name": "x", "what": sentence, **BIG}], {"name": "", "what": "what", "rows": "rows"})
    assert {"1,234,567.89", "0.000012345", "1,234,567"} <= set(words(out))


def test_names_are_no_markup_and_no_control_characters(narrow, capsys):
    names = ["[a]", "[bold red]x[/]", "\x1b[31mred\x1b[0m", "two\nlines", "a\u202eb", ":smile:", "tab\there"]
    out = printed(capsys, [{"client": name, "rows": 1} for name in names], {"client": "client", "rows": "rows"})
    for name in ("[a]", "[bold red]x[/]", "[31mred", "two lines", "a b", ":smile:", "tab here"):
        assert name in out
    assert not set(out) & {"\x1b", "\u202e", "\t"}
    display = Display()
    display.print_line("[a] \x1b[31m :smile:")
    display.notes(["client '[b]\x07' is small"])
    out, err = capsys.readouterr()
    assert out == "[a]  [31m :smile:\n" and err == "note: client '[b] ' is small\n"
    assert replace_control_characters("a\x9bb\u2028") == "a b "


def test_cells():
    cells = (None, float("nan"), True, 3, 1234567, 0.00012345, 86440.0, 1e12, float("inf"))
    assert [format_cell(v) for v in cells] == [
        "-", "-", "yes", "3", "1,234,567", "0.0001234", "86,440", "1.000e+12", "inf",
    ]  # fmt: skip
    assert format_cell(["a", 1]) == "a, 1"
    assert all(map(is_number, ("1,234", "-2e-3", "inf", "-", "", "12 %".replace(" ", ""))))
    assert not any(map(is_number, ("a 0.3", "12/100", "school", "nothing")))


def test_columns_share_what_is_left():
    columns = [Part("n", ["1,234"]), Part("what", ["word " * 30]), Part("why", ["word " * 30])]
    given = assign_widths(columns, 80, 1)
    assert given[0] == 5 and sum(given) + 2 == 80 and abs(given[1] - given[2]) <= 1


HOSTILE = "\x1b[31m\x1b]0;title\x07[red]\x9b2J\u202e[/]"
NEUTRAL = " [31m ]0;title [red] 2J [/]"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    "write",
    [
        lambda: write_data(HOSTILE),
        lambda: print_json({"client": HOSTILE}),
        lambda: EventLog("text").write_message(HOSTILE),
        lambda: print_progress(HOSTILE, 1, 2),
        lambda: Display().table(HOSTILE, [{"a": HOSTILE, HOSTILE: 1}], {"a": HOSTILE, HOSTILE: HOSTILE}, HOSTILE),
        lambda: Display().heading(HOSTILE),
        lambda: Display().paragraph(HOSTILE),
        lambda: Display().notes([HOSTILE]),
    ],
    ids=["data", "json", "event", "progress", "table", "heading", "paragraph", "note"],
)
def test_no_escape_sequence_reaches_a_terminal(write, monkeypatch):
    """What mooring writes itself (styles, cleared lines) apart."""
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    write()
    text = out.getvalue().replace("\r\x1b[K", "")
    assert NEUTRAL.split()[0] in text and "[red]" in text
    assert not [c for c in re.sub(r"\x1b\[[012]?m", "", text) if not c.isprintable() and c not in "\n"]


def test_data_in_a_file_stay_as_they_are(capsys):
    write_data(HOSTILE)
    assert capsys.readouterr().out == HOSTILE


def test_a_question_is_one_line(monkeypatch):
    asked = []
    monkeypatch.setattr("typer.confirm", lambda question, err: asked.append(question) or False)
    assert not confirm(f"run {HOSTILE}\nRun it? [y/N]: y\n")
    assert asked == [f"run {NEUTRAL} Run it? [y/N]: y "]


def test_a_run_with_hostile_names_prints_plain_text(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    who = np.repeat([f"{HOSTILE} {i}" for i in range(4)], 30)
    frame = pd.DataFrame({"who": who, "x": rng.normal(size=120), HOSTILE: rng.choice([HOSTILE, "b"], 120)})
    frame.assign(y=frame["x"] + rng.normal(size=120)).to_csv("table.csv", index=False)
    commands = (
        ["advise", "table.csv", "--client", "who", "--target", "y", "--out", "run", "--per-client"],
        ["predict", "run", "table.csv", "--client", HOSTILE],
        ["fit", "table.csv", "--client", HOSTILE, "--target", "nothing"],
        ["personalize", "run", "table.csv"],
        ["fit", f"{HOSTILE}.csv"],
        [HOSTILE],
    )
    for command in commands:
        with pytest.raises(SystemExit), warnings.catch_warnings():
            main(command)
        out, err = capsys.readouterr()
        assert out + err and all(c.isprintable() or c == "\n" for c in out + err), command
