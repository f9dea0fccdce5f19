"""The page of a run: whole in itself, true to the run directory, and deaf to what names try to say."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest

from mooring.cli import main
from mooring.core.errors import RequestError
from mooring.report.contents import contents, judged, verdict
from mooring.report.page import MARK, PAGE, _digits, columns, costs, embedded, spread, write_report
from mooring.runs.directory import open_run
from mooring.runs.files import plain
from tests.report.runs import HOSTILE, advised, federation, page_of_many, run_of


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One run of each kind, on clients with hostile names."""
    return advised(tmp_path_factory.mktemp("runs"))


class Reader(HTMLParser):
    """Tags with their attributes, text outside scripts, and the scripts."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text, self.scripts, self.inside = [], "", [], ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside = tag if tag in ("script", "style") else ""
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        if self.inside == "script":
            self.scripts[-1] += data
        elif not self.inside:
            self.text += data


def data_of(page):
    return json.loads(Reader(page).scripts[0])


@pytest.mark.parametrize("kind", ["advise", "fit", "compare"])
def test_the_page_needs_and_asks_for_nothing(runs, kind):
    page = write_report([runs[kind]]).read_text()
    seen = Reader(page)
    assert page.startswith("<!doctype html>\n" + MARK)
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
    text = embedded({"</script><!--": ["&lt;", "\u2028", "]]>"]})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"</script><!--": ["&lt;", "\u2028", "]]>"]}


def test_the_page_tells_what_the_run_holds(runs):
    directory = open_run(runs["advise"])
    told, page = (
        data_of(write_report([runs["advise"]]).read_text())[0],
        Reader(write_report([runs["advise"]]).read_text()),
    )
    clients = directory.clients
    for name in ("alone", "common", "personal", "rows"):
        np.testing.assert_allclose(told["clients"][name], clients[name], rtol=1e-5)
    models = directory.models
    apart = np.sqrt(((models.personal.numpy() - models.common.numpy()) ** 2).sum(1))
    assert list(models.clients) == told["clients"]["client"]
    np.testing.assert_allclose(told["clients"]["distance"], apart, rtol=1e-5)
    np.testing.assert_allclose(told["coefficients"]["personal"], models.personal.numpy(), rtol=1e-4, atol=1e-6)
    assert told["coefficients"]["names"] == ["x0", "x1", "x2", "(intercept)"]
    for words in (*directory.advice["words"], *directory.advice["notes"], "mooring advise", str(directory.path)):
        assert words in page.text
    assert told["spread"]["R"] == pytest.approx(directory.theory["heterogeneity"]["R"], rel=1e-5)
    lams = [row["lambda"] for row in directory.advice["path"] if row["family"] == "lambda"]
    assert told["path"]["lambda"] == pytest.approx(sorted(lams), rel=1e-5)


def test_rounds_are_told_with_what_was_spent_by_then(runs):
    rounds = open_run(runs["fit"]).rounds
    told = data_of(write_report([runs["fit"]]).read_text())[0]["rounds"]
    assert [one["name"] for one in told] == ["fedprox_one_stage"]
    assert told[0]["table"]["round"] == rounds["t"].tolist()
    sent = [sum(rounds["bytes_up"][: k + 1]) + sum(rounds["bytes_down"][: k + 1]) for k in range(len(rounds))]
    assert told[0]["table"]["bytes"] == sent and costs(rounds)["bytes"] == sent
    methods = data_of(write_report([runs["compare"]]).read_text())[0]["rounds"]
    assert {one["name"] for one in methods} == {"local", "global", "fedprox_one_stage"}


def test_several_runs_share_a_page(runs, tmp_path):
    page = write_report(list(runs.values()), tmp_path / "all.html").read_text()
    seen = Reader(page)
    assert [one["purpose"] for one in data_of(page)] == ["advise", "fit", "compare"]
    assert sum(tag == "article" for tag, _ in seen.tags) == 3 and sum(tag == "h1" for tag, _ in seen.tags) == 1


def test_the_page_is_written_again_but_nothing_else_is_overwritten(runs, tmp_path):
    first = write_report([runs["fit"]]).read_bytes()
    assert write_report([runs["fit"]]).read_bytes() == first
    (tmp_path / "thesis.html").write_text("mine")
    with pytest.raises(RequestError, match="no report of Mooring's"):
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
        said = capsys.readouterr().out
        assert said.strip().splitlines()[-1] == f"Page: {out}/{PAGE}" and (tmp_path / out / PAGE).exists()
    (tmp_path / out / PAGE).unlink()
    with pytest.raises(SystemExit) as left:
        main(["report", out])
    assert left.value.code == 0 and (tmp_path / out / PAGE).exists()


BEFORE = pd.DataFrame(
    {
        "client": ["a", "b", "c"],
        "verdict": ["personal", "common", "undecided"],
        "alone": [2.0, 4.0, 0.0],
        "gain": [0.5, -1.0, 0.1],
        "gain_low": [0.25, -2.0, -1.0],
        "gain_high": [1.0, 2.0, 1.0],
    }
)


def test_an_advice_without_chances_is_sure_where_the_interval_leaves_0():
    found = judged(BEFORE)
    assert found["recommended"].tolist() == ["personal", "common", "undecided"]
    assert found["how_sure"].tolist() == ["sure", "open", "open"]
    assert found["saved"].tolist()[:2] == [25.0, -25.0] and np.isnan(found["saved"][2])
    assert found["saved_low"].tolist()[:2] == [12.5, -50.0]


def test_an_advice_with_chances_is_as_sure_as_its_model_beats_the_others():
    after = pd.DataFrame(
        {
            "client": list("abcd"),
            "deploy": ["personal", "personal", "common", "alone"],
            "alone": [2.0] * 4,
            "gain_over_alone": [1.0, 0.5, 0.2, 0.0],
            "gain_over_alone_low": [0.5, 0.0, -0.2, 0.0],
            "gain_over_alone_high": [1.5, 1.0, 0.6, 0.0],
            "chance_over_alone": [0.99, 0.99, 0.9, 0.5],
            "chance_over_common": [0.96, 0.6, 0.5, 0.97],
        }
    )
    found = judged(after)
    assert found["recommended"].tolist() == after["deploy"].tolist()
    assert found["how_sure"].tolist() == ["sure", "open", "likely", "sure"]
    assert found["gain"].tolist() == [1.0, 0.5, 0.2, 0.0] and found["saved"].tolist() == [50.0, 25.0, 10.0, 0.0]
    np.testing.assert_allclose(found["certainty"], [1, 0.1 / 0.45, 0.4 / 0.45, 1])  # 0 at one half, 1 from .95 on


@pytest.mark.parametrize(
    ("alone", "common", "personal", "begins", "tells"),
    [
        (2.0, 4.0, 1.0, "Personal models pay", ["50.0 % less than training alone", "75.0 % less than one common"]),
        (2.0, 1.0, 1.0, "One common model will do", ["50.0 % less than training alone"]),
        (1.0, 2.0, 1.005, "Training alone will do", ["0.5 % more than training alone", "49.8 % less"]),
    ],
)
def test_the_headline_says_what_the_losses_say(alone, common, personal, begins, tells):
    said = verdict({"alone": alone, "common": common, "personal": personal}, "mse", 0.01)
    assert said.startswith(begins) and all(words in said for words in tells)


def test_numbers_that_are_not_finite_are_left_out_and_names_are_kept():
    frame = pd.DataFrame({"client": ["Infinity", "nan", "None"], "x": [np.inf, np.nan, 1 / 3], "n": [7.0, 8.0, 9.5]})
    told = plain(columns(frame), _digits)
    assert told == {"client": ["Infinity", "nan", "None"], "x": [None, None, 0.333333], "n": [7, 8, 9.5]}
    theory = {"heterogeneity": {"R": 0.5, "low": 0.1, "high": "Infinity"}}
    theory["thresholds"] = {"a_b": {"R": "Infinity", "source": "s"}, "c": {"Gamma": 1.0, "source": "s"}}
    assert spread(theory) == {"R": 0.5, "low": 0.1, "high": None, "borders": []}


def test_ten_thousand_clients_fit_eight_megabytes():
    page = page_of_many(10_000)
    assert len(page.encode()) < 8e6
    assert len(data_of(page)[0]["clients"]["client"]) == 10_000


def test_settings_leave_the_seal_out_and_long_lists_in_short(runs):
    told = contents(runs["advise"]).settings
    assert "seal" not in told and re.search(r"numbers from .* to .*: see run.toml", told)
