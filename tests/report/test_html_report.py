"""The page of a run: whole in itself, true to the run directory, and deaf to what names try to say."""

import base64
import hashlib
import html
import json
import re

import numpy as np
import pandas as pd
import pytest

from mooring.cli import main
from mooring.core.errors import RequestError
from mooring.report.html_report import (
    REPORT_MARKER,
    _digits,
    accumulate_costs,
    encode_for_script,
    list_columns,
    mark_code,
    summarize_heterogeneity,
    write_report,
)
from mooring.report.report_contents import MAX_TITLE_WORDS, collect_contents, shorten_headline
from mooring.runs.atomic_files import to_plain
from mooring.runs.directory import REPORT_FILE, open_run
from tests.report.example_runs import HOSTILE, advised, federation, page_of_many, run_of
from tests.support.html_reader import Reader, data_of


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One run of each kind, on clients with hostile names."""
    return advised(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("kind", ["advise", "fit", "compare"])
def test_the_page_needs_and_asks_for_nothing(runs, kind):
    page = write_report([runs[kind]]).read_text()
    seen = Reader(page)
    assert page.startswith("<!doctype html>\n" + REPORT_MARKER)
    assert not [tag for tag, _ in seen.tags if tag in ("link", "img", "iframe", "object", "embed", "base", "form")]
    refers = [value for _, attrs in seen.tags for name, value in attrs.items() if name in ("src", "href")]
    assert all(value.startswith("#") for value in refers)
    policy = next(attrs["content"] for tag, attrs in seen.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    digest = base64.b64encode(hashlib.sha256(seen.scripts[1].encode()).digest()).decode()
    assert "default-src 'none'" in policy and f"script-src 'sha256-{digest}';" in policy


@pytest.mark.parametrize("kind", ["advise", "fit", "compare"])
def test_names_stay_text(runs, kind):
    page = write_report([runs[kind]]).read_text()
    seen = Reader(page)
    assert len(seen.scripts) == 2 and page.lower().count("<script") == 2 and page.lower().count("</script") == 2
    assert not [attrs for _, attrs in seen.tags if any(name.startswith("on") for name in attrs)]
    assert set(HOSTILE) <= set(data_of(page)[0]["clients"]["client"])


def test_nothing_in_the_data_can_end_their_block():
    text = encode_for_script({"</script><!--": ["&lt;", "\u2028", "]]>"]})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"</script><!--": ["&lt;", "\u2028", "]]>"]}


def test_the_page_tells_what_the_run_holds(runs):
    directory = open_run(runs["advise"])
    told, page = (
        data_of(write_report([runs["advise"]]).read_text())[0],
        Reader(write_report([runs["advise"]]).read_text()),
    )
    clients = directory.clients
    for name in ("local", "global", "personal", "rows", "improvement_over_local_pct"):
        np.testing.assert_allclose(told["clients"][name], clients[name], rtol=1e-5)
    models = directory.models
    apart = np.sqrt(((models.personal.numpy() - models.common.numpy()) ** 2).sum(1))
    assert list(models.clients) == told["clients"]["client"]
    np.testing.assert_allclose(told["clients"]["distance"], apart, rtol=1e-5)
    np.testing.assert_allclose(told["coefficients"]["personal"], models.personal.numpy(), rtol=1e-4, atol=1e-6)
    assert told["coefficients"]["names"] == ["x0", "x1", "x2", "(intercept)"]
    advice = directory.advice
    for words in (*advice["words"].values(), *advice["notes"], "mooring advise", str(directory.path)):
        assert words in page.text
    assert told["spread"]["R"] == pytest.approx(directory.theory["heterogeneity"]["R"], rel=1e-5)
    lams = [row["lam"] for row in directory.advice["path"] if row["family"] == "lambda"]
    assert told["path"]["lam"] == pytest.approx(sorted(lams), rel=1e-5)


def test_rounds_are_shown_with_their_cumulative_costs(runs):
    rounds = open_run(runs["fit"]).rounds
    told = data_of(write_report([runs["fit"]]).read_text())[0]["rounds"]
    assert [one["name"] for one in told] == ["fedprox_personal"]
    assert told[0]["table"]["round"] == rounds["round"].tolist()
    sent = [sum(rounds["bytes_up"][: k + 1]) + sum(rounds["bytes_down"][: k + 1]) for k in range(len(rounds))]
    assert told[0]["table"]["bytes"] == sent and accumulate_costs(rounds)["bytes"] == sent
    methods = data_of(write_report([runs["compare"]]).read_text())[0]["rounds"]
    assert {one["name"] for one in methods} == {"local", "pooled", "fedprox_personal"}


def test_several_runs_share_a_page(runs, tmp_path):
    page = write_report(list(runs.values()), tmp_path / "all.html").read_text()
    seen = Reader(page)
    assert [one["purpose"] for one in data_of(page)] == ["advise", "fit", "compare"]
    assert sum(tag == "article" for tag, _ in seen.tags) == 3 and sum(tag == "h1" for tag, _ in seen.tags) == 1


def test_the_page_is_written_again_but_nothing_else_is_overwritten(runs, tmp_path):
    first = write_report([runs["fit"]]).read_bytes()
    assert write_report([runs["fit"]]).read_bytes() == first
    (tmp_path / "thesis.html").write_text("mine")
    with pytest.raises(RequestError, match="is not a report of Mooring"):
        write_report([runs["fit"]], tmp_path / "thesis.html")
    assert (tmp_path / "thesis.html").read_text() == "mine"
    with pytest.raises(RequestError, match="is a folder"):
        write_report([runs["fit"]], tmp_path)
    with pytest.raises(RequestError, match="at least one run"):
        write_report([])


def test_commands_write_it_and_end_with_its_path(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    federation().to_csv("table.csv", index=False)
    for command in (["advise"], ["fit", "--rounds", "3"], ["compare", "--methods", "local,fedavg", "--rounds", "3"]):
        out = run_of(command, "table.csv")
        last = capsys.readouterr().out.strip().splitlines()[-1]
        assert last.startswith(f"Report: {out}/{REPORT_FILE}    Predict: mooring predict {out} ")
        assert (tmp_path / out / REPORT_FILE).exists()
    (tmp_path / out / REPORT_FILE).unlink()
    with pytest.raises(SystemExit) as left:
        main(["report", out])
    assert left.value.code == 0 and (tmp_path / out / REPORT_FILE).exists()


def test_the_title_is_the_decision_in_at_most_twelve_words():
    assert shorten_headline("Use a personal model at all 42 clients.", {"personal": 42}) == (
        "Use a personal model at all 42 clients"
    )
    long = "Use the global model at 3 of 4 clients and a personal model at Zurich and Basel."
    assert shorten_headline(long, {"global": 3, "personal": 1}) == "Global model for 3 of 4 clients, personal for 1"
    counts = {"global": 5, "local": 3, "personal": 12}  # as JSON sorts them
    title = shorten_headline(long, counts)
    assert title == "Personal for 12 of 20 clients, global for 5, local for 3"
    assert len(title.split()) <= MAX_TITLE_WORDS


def test_the_clients_table_comes_second_and_theory_is_folded(runs):
    page = write_report([runs["advise"]]).read_text()
    parts = re.findall(r'data-part="(\w+)"', page)
    assert parts[0] == "table" and parts.index("mooring") < parts.index("improvements") < parts.index("path")
    assert page.index('<details data-part="theory">') > page.index('data-part="commands"')
    made = collect_contents(runs["advise"])
    assert made.version in page and made.date in page and len(made.digest) == 12 and made.digest in page
    assert f"<code>{html.escape(made.commands[0]['command'])}</code>" in page


def test_a_fit_reports_scores_and_recommends_nothing(runs):
    for kind in ("fit", "compare"):
        told, page = collect_contents(runs[kind]), Reader(write_report([runs[kind]]).read_text())
        assert not told.recommends and "recommended" not in told.clients and "confidence" not in told.clients
        assert "Recommended is" not in page.text and "test rows" in page.text


def test_numbers_that_are_not_finite_are_left_out_and_names_are_kept():
    frame = pd.DataFrame({"client": ["Infinity", "nan", "None"], "x": [np.inf, np.nan, 1 / 3], "n": [7.0, 8.0, 9.5]})
    told = to_plain(list_columns(frame), _digits)
    assert told == {"client": ["Infinity", "nan", "None"], "x": [None, None, 0.333333], "n": [7, 8, 9.5]}
    theory = {"heterogeneity": {"R": 0.5, "low": 0.1, "high": "Infinity"}}
    theory["thresholds"] = {"a_b": {"R": "Infinity", "source": "s"}, "c": {"Gamma": 1.0, "source": "s"}}
    assert summarize_heterogeneity(theory) == {"R": 0.5, "low": 0.1, "high": None, "borders": []}


def test_ten_thousand_clients_fit_eight_megabytes():
    page = page_of_many(10_000)
    assert len(page.encode()) < 8e6
    assert len(data_of(page)[0]["clients"]["client"]) == 10_000


def test_settings_leave_the_seal_out_and_long_lists_in_short(runs):
    told = collect_contents(runs["advise"]).settings
    assert "seal" not in told and re.search(r"numbers from .* to .*: see run.toml", told)


def test_words_in_backticks_are_code_and_nothing_else_is_markup():
    assert mark_code("Use `mooring advise` on <b>.") == "Use <code>mooring advise</code> on &lt;b&gt;."
    assert mark_code("`<script>`") == "<code>&lt;script&gt;</code>"
