"""Terminal, report, JSON, Parquet and models of a run agree, and every percentage follows from the losses beside it.

Six runs: a regression, three classes, counts, a network, a table with its own split, and four clients. Losses are shown
with four digits and percentages with one decimal, so that recomputing one from the other may be off by TOLERANCE.
"""

import io
import json
import re
from contextlib import redirect_stdout

import numpy as np
import pandas as pd
import pytest
import torch

import mooring
from mooring.advice.advise import as_json
from mooring.report.html_report import MAX_CONTRIBUTIONS, MIN_CONTRIBUTION_PCT, write_report
from mooring.report.report_contents import MAX_TITLE_WORDS
from mooring.report.terminal import Display
from mooring.run_verbs import show_run
from mooring.runs.atomic_files import to_json
from mooring.runs.directory import open_run
from tests.support.browser import launched, needs_browser
from tests.support.html_reader import Reader, data_of

TOLERANCE = 0.16  # percentage points: 0.1 from four digits of two losses, 0.05 from one decimal
MODELS, OTHERS = ("local", "global", "personal"), ("local", "global")
HEADINGS = ("client", "recommended", "vs. local", "vs. global", "confidence", *(f"{name} loss" for name in MODELS))
NUMBER = r"([\d.,]+(?:e[-+]\d+)?)"
CHANGE = rf"{NUMBER}% (lower|higher)"


def table(kind, clients=12, rows=30, seed=0):
    """Clients with planted models of three columns."""
    rng = np.random.default_rng(seed)
    who = np.repeat([f"town {i}" for i in range(clients)], rows)
    x = rng.normal(size=(len(who), 3))
    slopes = np.repeat(rng.normal(size=3) + 0.5 * rng.normal(size=(clients, 3)), rows, axis=0)
    score = (x * slopes).sum(1)
    frame = pd.DataFrame(x, columns=["x0", "x1", "x2"]).assign(town=who)
    if kind == "counts":
        return frame.assign(y=rng.poisson(np.exp(0.4 * score)))
    if kind == "classes":
        codes = np.digitize(score + rng.logistic(size=len(score)), [-1.0, 1.0])
        return frame.assign(y=np.array(["low", "middle", "high"])[codes])
    frame = frame.assign(y=50 + 10 * (score + rng.normal(size=len(score))))
    if kind == "split":
        return frame.assign(split=rng.choice(["train", "validation", "test"], len(frame), p=[0.6, 0.2, 0.2]))
    return frame


def network():
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


RUNS = {
    "regression": lambda: (table("regression"), {}),
    "classes": lambda: (table("classes", clients=8, rows=50), {}),
    "counts": lambda: (table("counts"), {"target_type": "count"}),
    "network": lambda: (table("regression", clients=6), {"model": network, "rounds": 6}),
    "split": lambda: (table("split"), {}),
    "four": lambda: (table("regression", clients=4, rows=40, seed=3), {}),
}


class Shown:
    """A run and everything that shows it."""

    def __init__(self, name, folder):
        self.frame, options = RUNS[name]()
        self.path = folder / name
        self.advice = mooring.advise(self.frame, client="town", target="y", threads=1, out=self.path, **options)
        self.report = write_report([self.path]).read_text()
        self.page, self.text = data_of(self.report)[0], Reader(self.report).text
        self.json = json.loads(to_json(as_json(self.advice)))
        self.clients = open_run(self.path).clients
        self.terminal = {}
        for width in (80, 200):
            with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as out:
                patch.setenv("COLUMNS", str(width))
                show_run(Display(), self.path, per_client=True)
            self.terminal[width] = out.getvalue()

    def rows(self, width):
        """The terminal's table: a mapping per client by heading."""
        lines = self.terminal[width].splitlines()
        top = next(k for k, line in enumerate(lines) if line.strip().startswith("client "))
        found = [(head, lines[top].index(head)) for head in HEADINGS if head in lines[top]]
        ends = [found[k + 1][1] if k + 1 < len(found) and "loss" not in found[k + 1][0] else at + len(head)
                for k, (head, at) in enumerate(found)]  # fmt: skip
        starts = [0, *ends[:-1]]
        return [
            {head: line[start:end].strip() for (head, _), start, end in zip(found, starts, ends)}
            for line in lines[top + 2 : top + 2 + len(self.clients)]
        ]


@pytest.fixture(scope="session")
def shown(tmp_path_factory):
    made, folder = {}, tmp_path_factory.mktemp("numbers")

    def find(name):
        if name not in made:
            made[name] = Shown(name, folder)
        return made[name]

    return find


@pytest.fixture(params=RUNS)
def run(request, shown):
    return shown(request.param)


def value(text):
    return float(text.replace(",", ""))


def signed(number, word):
    """A displayed change as an improvement in percent."""
    return value(number) if word == "lower" else -value(number)


def check(pct, mine, other):
    if other > 0:
        assert pct == pytest.approx(100 * (other - mine) / other, abs=TOLERANCE), (pct, mine, other)


def recompute(text):
    """Recompute all percentages of a sentence but those of intervals; how many there were."""
    text = re.sub(r"\((\d+% CI|90% interval): [^)]*\)", "", " ".join(text.split()))
    found = 0
    for mine, sides in re.findall(rf"is {NUMBER}: (.*?), on [\d,]+ held-out rows", text):
        for number, word, other in re.findall(rf"{CHANGE}\s+than with [a-z ]+ \({NUMBER}\)", sides):
            check(signed(number, word), value(mine), value(other))
            found += 1
    for number, word, mine, other in re.findall(
        rf"{CHANGE}(?: than that of the best one with linear columns)? \({NUMBER} instead of {NUMBER}\)", text
    ):
        check(signed(number, word), value(mine), value(other))
        found += 1
    return found


def test_recommendations_are_the_same_everywhere(run):
    kinds = dict(zip(run.clients["client"], run.clients["recommended"]))
    assert {row["client"]: row["recommended"] for row in run.json["clients"]} == kinds
    assert dict(zip(run.page["clients"]["client"], run.page["clients"]["recommended"])) == kinds
    assert dict(zip(run.advice.recommendations["client"], run.advice.recommendations["recommended"])) == kinds
    for width in (80, 200):
        assert {row["client"]: row["recommended"] for row in run.rows(width)} == kinds
    counts = pd.Series(kinds).value_counts().to_dict()
    assert run.json["summary"]["recommended_counts"] == counts
    assert sum(run.json["summary"]["confidence_counts"].values()) == len(kinds)


def test_headlines_agree_with_the_counts(run):
    counts, m = run.json["summary"]["recommended_counts"], len(run.clients)
    headline = run.json["headline"]
    assert headline.rstrip(".") in run.text and headline in " ".join(run.terminal[80].split())
    most = max(counts.values())
    assert f"{most} of {m} clients" in headline or (len(counts) == 1 and f"all {m} clients" in headline)
    for kind, count in counts.items():
        names = run.clients.loc[run.clients["recommended"] == kind, "client"]
        assert f"{kind} model" in headline
        assert str(count) in headline or all(name in headline for name in names)
    title = re.search(r'<h1 class="headline"[^>]*>([^<]*)</h1>', run.report)[1]
    assert len(title.split()) <= MAX_TITLE_WORDS
    for kind, count in counts.items():
        assert kind in title.lower() and (str(count) in title or count == 1)


def test_stored_percentages_follow_from_stored_losses(run):
    tables = [run.clients, pd.DataFrame(run.json["clients"]), run.advice.recommendations]
    page = pd.DataFrame(run.page["clients"])
    for frame, tolerance in [*((one, 1e-6) for one in tables), (page, 1e-2)]:
        mine = np.array([row[row["recommended"]] for row in frame.to_dict("records")], dtype=float)
        for other in OTHERS:
            loss = frame[other].to_numpy(float)
            expected = np.where(loss > 0, 100 * (loss - mine) / np.where(loss > 0, loss, 1), 0)
            np.testing.assert_allclose(frame[f"improvement_over_{other}_pct"], expected, atol=tolerance)


def test_the_federations_percentages_follow_from_its_losses(run):
    summary = run.json["summary"]
    for mine, part in (("recommended", summary), ("personal", summary["personal_models"])):
        for other in OTHERS:
            line = part[f"improvement_over_{other}"]
            assert line["mean"] == pytest.approx(summary[other] - summary[mine], abs=1e-9)
            assert line["pct"] == pytest.approx(100 * line["mean"] / summary[other], abs=1e-6)
            assert line["pct_ci_low"] <= line["pct"] <= line["pct_ci_high"]
    rows = run.clients["held_out_rows"].to_numpy(float)
    for name in MODELS:  # the measured losses of the clients make up the federation's
        loss = np.nansum(rows * run.clients[f"{name}_held_out"].to_numpy(float)) / rows.sum()
        assert summary[name] == pytest.approx(loss, rel=1e-9)
    assert summary["held_out_rows"] == rows.sum()


def test_the_terminals_percentages_follow_from_the_losses_beside_them(run):
    for row in run.rows(200):
        mine = value(row[f"{row['recommended']} loss"])
        for other in OTHERS:
            cell = row[f"vs. {other}"]
            if cell in ("same model", "no difference"):
                assert row["recommended"] == other or mine == value(row[f"{other} loss"])
                continue
            number, word = re.match(CHANGE, cell).groups()
            check(signed(number, word), mine, value(row[f"{other} loss"]))
    narrow = {row["client"]: row for row in run.rows(80)}
    for row in run.rows(200):  # a narrow terminal shows the same, or less
        for head, cell in narrow[row["client"]].items():
            assert row[head].startswith(cell)


def test_sentences_follow_from_the_losses_in_them(run):
    for text in (run.terminal[80].split("\n\n", 3)[3], run.text.split("{")[0]):
        assert recompute(text) >= 1
    sentences = [run.advice.headline, *run.advice.words.values()]
    changes = sum(len(re.findall(CHANGE, re.sub(r"\(\d+% CI: [^)]*\)", "", one))) for one in sentences)
    assert sum(map(recompute, sentences)) == changes  # no percentage without its losses


def loss_of_the_others(run, client):
    """The other clients' held-out loss from the losses and rows that the report's table shows of them."""
    shown = pd.DataFrame(run.page["clients"])
    others = shown[(shown["client"] != client) & (shown["held_out_rows"] > 0)].astype({"held_out_rows": float})
    return np.average(others["personal_held_out"].astype(float), weights=others["held_out_rows"])


def test_contributions_follow_from_the_losses_beside_them(run):
    part = re.search(r'data-part="contributions".*?</section>', run.report, re.S)
    if part is None:
        assert run.clients.get("contribution_pct", pd.Series([0.0])).abs().max() < MIN_CONTRIBUTION_PCT
        assert "contributions" not in run.advice.words
        return
    cell = r'<td class="number">'
    listed = re.findall(
        rf'<th scope="row">([^<]*)</th>{cell}{NUMBER}</td>{cell}{NUMBER}</td>{cell}{CHANGE}</td>', part[0]
    )
    large = run.clients[run.clients["contribution_pct"].abs() >= MIN_CONTRIBUTION_PCT]
    assert len(listed) == min(len(large), MAX_CONTRIBUTIONS)
    for name, now, without, number, word in listed:
        check(signed(number, word), value(without), value(now))
        assert value(now) == pytest.approx(loss_of_the_others(run, name), rel=6e-4)
    stored = pd.DataFrame(run.json["clients"])
    for table in (run.clients, stored):
        others = [loss_of_the_others(run, name) for name in table["client"]]
        np.testing.assert_allclose(table["others_held_out"], others, rtol=1e-3)
        np.testing.assert_allclose(
            table["contribution_pct"], 100 * table["contribution"] / table["others_held_out"], rtol=1e-9
        )


def test_the_sentence_on_contributions_is_about_the_other_clients(run):
    """The loss that a client's absence would change is that of the others, from the losses that are shown of them."""
    sentence = run.advice.words.get("contributions")
    if sentence is None:
        assert not run.clients.get("contribution_pct", pd.Series([0.0])).max() >= MIN_CONTRIBUTION_PCT
        return
    name, without, now = re.search(
        rf"Without (.*?), the other .* \({NUMBER} instead of {NUMBER}\)\.", sentence
    ).groups()
    assert value(now) == pytest.approx(loss_of_the_others(run, name), rel=6e-4)
    most = run.clients.loc[run.clients["contribution_pct"].idxmax()]
    assert (name, value(without)) == (
        most["client"],
        pytest.approx(most["others_held_out"] + most["contribution"], rel=6e-4),
    )


def test_confidence_agrees_with_interval_and_probability(run):
    for row in run.json["clients"]:
        sides = [o for o in OTHERS if row["recommended"] != o and row[f"improvement_over_{o}_ci_high"] != 0]
        least = min((row[f"probability_better_than_{o}"] for o in sides), default=1.0)
        assert row["confidence"] == ("high" if least >= 0.95 else "moderate" if least >= 0.8 else "low")
        excludes = all(row[f"improvement_over_{o}_ci_low"] > 0 for o in sides)
        assert excludes == (row["confidence"] == "high")


def test_predictions_use_the_recommended_models(run):
    """The very models of models.safetensors, which are those of the recommended kind."""
    saved, models = open_run(run.path).models, run.advice.models
    names = list(saved.clients)
    given = {"local": models.local, "global": models.global_.expand_as(models.local), "personal": models.personal}
    opened = mooring.open(run.path, model=network if "net" in run.path.name else None)
    rows = run.frame.groupby("town").head(3)
    predicted = run.advice.predict(rows)
    pd.testing.assert_frame_equal(predicted, opened.predict(rows))
    for i, (name, kind) in enumerate(zip(run.clients["client"], run.clients["recommended"])):
        stored = saved.personal[names.index(name)]
        assert torch.equal(stored, given[kind][i]) and torch.equal(stored, opened.models[name])
        mine = (rows["town"] == name).to_numpy()
        alone = run.advice.predict(rows[mine], client=name)
        pd.testing.assert_frame_equal(alone, predicted[mine].reset_index(drop=True))
        assert set(predicted.loc[mine, "model"]) == {kind}


@pytest.mark.browser
@needs_browser
def test_cards_praise_only_the_recommended_model(shown):
    """Every client's card: each percentage follows from the two losses in its sentence and in its table."""
    driver = pytest.importorskip("playwright.sync_api", reason="playwright, which drives the browser, is not installed")
    run = shown("regression")
    with driver.sync_playwright() as play:
        browser = launched(play)
        page = browser.new_page()
        page.goto((run.path / "report.html").as_uri())
        for row in run.json["clients"]:
            page.get_by_label("Find a client").fill(row["client"])
            card = page.locator('[data-part="card"]')
            assert f"{row['recommended']} (recommended)" in card.locator("tbody").first.inner_text()
            shown_losses = {
                line.split("\t")[0].split(" ")[0]: value(line.split("\t")[1])
                for line in card.locator("table.bars tbody").inner_text().splitlines()
                if "\t" in line
            }
            text = re.sub(r"; \d+% interval: [^.]*\.", ".", card.locator("ul").inner_text())
            sentences = re.findall(
                rf"recommended \((\w+)\) model \({NUMBER}\) is {CHANGE} than with (?:its|the) (\w+) model \({NUMBER}\)",
                text,
            )
            assert len(sentences) == text.count("than with")
            for kind, mine, number, word, other, loss in sentences:
                assert kind == row["recommended"]
                check(signed(number, word), value(mine), value(loss))
                assert (value(mine), value(loss)) == (shown_losses[kind], shown_losses[other])
        browser.close()
