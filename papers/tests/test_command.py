"""`mooring reproduce` and `mooring list experiments`: what they print, write and answer with."""

import json
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

from mooring.cli import main
from mooring.report.terminal import Display
from mooring.runs.atomic_files import json_bytes, read_json, write_json
from mooring_papers.base import catalog, registry, reproduce, runner
from mooring_papers.base.claims import Claim, lower
from mooring_papers.base.experiment import Cell, Experiment, Panel, Preset, Table
from mooring_papers.base.records import panel_record, table_record
from mooring_papers.base.results import Results, Trial, of
from mooring_papers.report import experiment_figures as panels_module
from mooring_papers.report.experiment_figures import DPI, draw_panels
from mooring_papers.report.markdown import format_brief, format_record_table
from mooring_papers.report.reproduction import granted_repeats, show_claims, write_page
from tests.test_help import SCREEN, WIDTH
from tests.test_words import find_forbidden

PANEL = Panel("x", {"a": "curve", "theory": "curve"}, "x", "y", log="xy", dashed=("theory",), across={"one": 1.0})
NOTE = "The paper's number is for another scale."


def trial(seed: int) -> dict:
    return {"x": [1, 10, 100], "curve": [3, 2, 1], "error": 2.0 + 0.1 * (seed - 1)}


def toy(limit: float, data: str = "", repeats: int = 3, evidence: str = "") -> catalog.CatalogEntry:
    claims = [
        Claim("small", "the error is small | tiny", lower("error", limit), NOTE, evidence),
        Claim("positive", "ok", lower("error", 9)),
    ]
    tables = [Table("Errors", ("ours",), {"a": [Cell("error", 1.5)], "b": [Cell(lambda results: 3.14159)]})]
    presets = dict.fromkeys(("smoke", "quick", "paper"), Preset(repeats=repeats, data=data))
    experiment = Experiment("A toy", trial, presets, claims, [PANEL], tables, reads="Read so.")
    return catalog.CatalogEntry("009-fig1", "009", experiment)


def registrations(entry, label="paper's data", preset="quick"):
    """As many as the toy has claims."""
    size = entry.experiment.presets["quick"]
    sizes = {"preset": preset, "data": "toys", "label": label, "clients": 0, "rounds": 0, "repeats": size.repeats}
    quoted = {"experiment": "fig1", "version": 1, "quote": "Errors are small.", "place": "Figure 1"}
    return tuple(
        registry.Registration(
            "009",
            "009-fig1",
            claim.id,
            quoted | {"id": claim.id, "test": claim.says, "check": claim.check.digest},
            sizes | {"first_seed": 0},
        )
        for claim in entry.experiment.claims
    )


@pytest.fixture
def use(monkeypatch, session_cache):
    def choose(entry):
        monkeypatch.setattr(catalog, "select_experiments", lambda what: [entry])
        monkeypatch.setattr(catalog, "load_experiment", lambda one: entry)
        monkeypatch.setattr(catalog, "list_experiments", lambda: [entry.id])
        monkeypatch.setattr(registry, "read_registrations", lambda paper: registrations(entry))
        monkeypatch.setattr(runner.os, "cpu_count", lambda: 1)  # other processes would not know the toy

    return choose


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(words))
    return caught.value.code


def test_json_and_exit_codes(use, tmp_path, capsys):
    for limit, code, word in ((3.0, 0, "held"), (1.0, 3, "contradicted"), (2.01, 4, "open")):
        use(toy(limit))
        assert run("reproduce", "009-fig1", "--json", "--out", str(tmp_path)) == code
        claims = json.loads(capsys.readouterr().out)["claims"]
        assert [(c["experiment"], c["claim"], c["word"]) for c in claims] == [
            ("009-fig1", "small", word),
            ("009-fig1", "positive", "held"),
        ]
        assert claims[0]["numbers"]["value"] == pytest.approx(2)
    use(toy(3.0, repeats=1))
    assert run("reproduce", "009-fig1", "--json", "--out", str(tmp_path)) == 4  # one repeat holds nothing
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        f"009-fig1-quick.{end}" for end in ("json", "md", "png", "svg")
    ]


def test_terminal_table(use, tmp_path, capsys):
    use(toy(1.0))
    assert run("reproduce", "009-fig1", "--out", str(tmp_path)) == 3
    shown = capsys.readouterr().out
    assert "2 claims, preset quick: 1 held, 1 contradicted, 0 open" in shown and "ratio" not in shown


def test_the_table_fits_80_columns_and_cuts_no_number(capsys, monkeypatch):
    numbers = {"value": 7654321.25, "reference": 15308642.5, "ratio": -1234567.5, "low": -1234567.5, "high": 7654321.25}
    row = {"experiment": "kernel-fig1", "says": "the error stays below 7,654,321 at every R", "word": "open"}
    row |= {"registration": None, "worst": numbers | {"limit": 1.0}}
    shown = {}
    for width in (80, 300):
        monkeypatch.setenv("COLUMNS", str(width))
        show_claims(Display(), [row], "quick", "out")
        shown[width] = capsys.readouterr().out
    assert all(len(line) <= 80 or line.endswith(".") for line in shown[80].splitlines())
    assert "7,654,321" in shown[80] and "Left out" not in shown[300]


def test_an_out_that_cannot_be_written_is_noticed_at_once(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert run("reproduce", "all", "--out", "file/r") == 2
    assert "file is not a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["reproduce", "kernal"], "(did you mean 'kernel'?); see `mooring list experiments`."),
        (["theorem", "alternatve"], "(did you mean 'alternative'?); see `mooring theorem`."),
    ],
)
def test_unknown_words_get_the_nearest_guess_and_where_the_list_is(words, wanted, capsys):
    assert run(*words) == 2
    assert wanted in capsys.readouterr().err


def test_wrong_requests(capsys, tmp_path):
    assert run("reproduce", "kernel-fig99", "--out", str(tmp_path)) == 2
    assert "unknown experiment 'kernel-fig99'" in capsys.readouterr().err
    assert run("reproduce", "kernel-fig1", "--preset", "huge", "--out", str(tmp_path)) == 2
    assert "--preset must be one of" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["reproduce", "theorem"])
def test_help_fits_a_screen_with_an_example_in_plain_words(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    assert run(name, "--help") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= SCREEN and max(map(len, lines)) <= WIDTH and any(f"mooring {name} " in line for line in lines)
    assert find_forbidden("\n".join(lines)) == []
    assert run("--help") == 0
    assert f"  {name} " in capsys.readouterr().out


def test_list_experiments(capsys):
    assert run("list", "experiments", "--json") == 0
    listed = json.loads(capsys.readouterr().out)["experiments"]
    assert [one["id"] for one in listed] == catalog.list_experiments()
    first = next(one for one in listed if one["id"] == "kernel-fig1")
    assert first["paper"] == "kernel" and "s1-is-stationary" in first["claims"] and first["title"]


def test_a_kept_result_needs_no_second_run(session_cache, tmp_path, capsys):
    entry = catalog.load_experiment("alternative-weights")
    runner.run([entry], "smoke", session_cache, workers=1)
    assert run("reproduce", "alternative-weights", "--preset", "smoke", "--json", "--out", str(tmp_path)) in (0, 3, 4)
    assert {c["experiment"] for c in json.loads(capsys.readouterr().out)["claims"]} == {"alternative-weights"}


def described(entry, **more):
    """The toy's registrations as pages take them."""
    claims = [
        {
            **one.run,
            **one.claim,
            "experiment": one.experiment,
            "title": entry.experiment.title,
            "digest": one.digest,
            **dict.fromkeys(("not_run", "takes", "tried", "reason"), ""),
            "current": True,
        }
        | more
        for one in registrations(entry)
    ]
    return [{"paper": "009", "believe": "Toys are small.", "claims": claims}]


@pytest.fixture
def pages(use, tmp_path):
    """Run the toy and write its pages; gives the overview and the paper's page."""

    def write(entry, *words: str, **more):
        use(entry)
        records, page = tmp_path / "records", tmp_path / "docs" / "page.md"
        page.parent.mkdir(exist_ok=True)
        run("reproduce", "009-fig1", "--out", str(records), *words)
        write_page(records, page, described(entry, **more))
        waiting = (page.parent / "page" / "not-run.md").read_text()
        return page.read_text() + waiting, (page.parent / "page" / "009.md").read_text()

    return write


def test_pages_tell_every_claim_and_why_one_is_contradicted(pages):
    overview, text = pages(toy(1.0))
    for part in (
        "Run: 3 repeats, 0 s on one core, made by version 0.1.0",
        '| "Errors are small." (Figure 1) | the error is small \\| tiny | **contradicted** | '
        "ratio 2 [1.752, 2.248], limit 1 | toys (*paper's data*) |",
        f"*small* is contradicted. {NOTE}",
        "Read so.",
        "![009-fig1-quick](../../records/009-fig1-quick.png)",
        "2 claims: 1 held, 1 contradicted.",
        "3.142",
        "Toys are small.",
        f"numpy {np.__version__}",
    ):
        assert part in text, part
    assert "| [009](page/009.md) |  | 1 | 1 | 0 | 0 | 2 |" in overview
    assert "2 have been run: 1 held, 1 contradicted, 0 open." in overview
    assert "| 009 | paper's data | 1 | 1 | 0 | 0 | 2 |" in overview


def test_records_of_another_version_are_listed(use, tmp_path, capsys):
    use(toy(3.0))
    words = ("reproduce", "009-fig1", "--json", "--out", str(tmp_path), "--page", str(tmp_path / "page.md"))
    run(*words)
    assert json.loads(capsys.readouterr().out)["outdated"] == []
    record = read_json(tmp_path / "009-fig1-quick.json")
    write_json(tmp_path / "009-fig1-paper.json", record | {"made": record["made"] | {"trials": 2}})
    old = {name: value for name, value in record["made"].items() if name != "trials"}
    write_json(tmp_path / "009-fig1-smoke.json", record | {"made": old | {"code": "a digest"}})  # without a version: 1
    run(*words)
    assert json.loads(capsys.readouterr().out)["outdated"] == ["009-fig1-paper"]
    run(*(word for word in words if word != "--json"))
    assert "1 records" not in (shown := capsys.readouterr().out) and "009-fig1-paper" in shown


def test_other_runs_decide_nothing(pages):
    for words in (("--preset", "paper"), ("--preset", "smoke"), ("--repeats", "2")):
        overview, text = pages(toy(3.0), *words)
        assert "| [009](page/009.md) |  | 0 | 0 | 0 | 2 | 2 |" in overview and "**not run**" in text
        assert "3 repeats at preset `quick`" in overview


def test_stand_in_data_are_never_held(pages):
    overview, text = pages(toy(3.0), label="stand-in")
    assert "**smoke test**" in text and "| held |" not in text
    assert "| [009](page/009.md) |  | 0 | 0 | 0 | 0 | 2 |" in overview and "Of 0 registered claims" in overview


def test_what_is_not_run_says_what_it_takes(pages):
    overview, text = pages(toy(3.0), "--preset", "paper", not_run="The data are not available.", takes="the data set")
    assert "The data are not available. A run takes the data set." in overview and "The data are not available." in text


def test_an_open_claim_says_how_many_repeats_are_granted(pages):
    _, text = pages(toy(2.01))
    assert "*small* is open. About" in text
    assert "The protocol grants 10 repeats to a run of this length, and this run has 3." in text
    assert [granted_repeats(seconds) for seconds in (180, 181, 1440, 1441)] == [10, 5, 5, 3]


def test_results_from_before_the_registration_are_folded(pages, tmp_path):
    row = {"commit": "abc", "date": "2026-01-01", "experiment": "009-fig1", "preset": "paper", "claim": "gone"}
    row |= {"says": "it was dropped", "word": "not held", "repeats": 3, "data": "", "decided by": ""}
    (tmp_path / "records").mkdir()
    write_json(tmp_path / "records" / "history.json", {"until": "abc", "results": [row]})
    _, text = pages(toy(3.0))
    assert "| 2026-01-01 abc | gone | it was dropped | not held |  | paper, 3 repeats |" in text
    assert "results from before the registration" in text


def test_titles_name_data_that_are_not_the_papers(use, tmp_path):
    use(toy(3.0, data="stand-ins"))
    assert run("reproduce", "009-fig1", "--out", str(tmp_path)) == 0
    assert "# 009-fig1: A toy (data: stand-ins)" in (tmp_path / "009-fig1-quick.md").read_text()
    assert "data: stand-ins" in (tmp_path / "009-fig1-quick.svg").read_text()


def test_figures_are_the_same_bytes_and_survive_intervals_that_reach_0():
    wide = [Trial({}, seed, {"x": [1, 2, 3], "curve": [1 + seed, 1 + seed, 9 * seed + 0.1]}) for seed in range(3)]
    panel = panel_record(PANEL, Results(wide))
    first, second = draw_panels("A", [panel]), draw_panels("A", [panel])
    assert first == second and first.keys() == {"png", "svg"}
    assert first["png"].startswith(b"\x89PNG")
    kept = json.loads(json_bytes({"panel": panel}))["panel"]  # what a file holds gives the same picture
    assert draw_panels("A", [kept]) == first
    assert b"<dc:date>" not in first["svg"] and b"matplotlib" not in first["svg"].lower()[:400]


def texts(drawn: dict) -> list[str]:
    return [t.text or "" for t in ET.fromstring(drawn["svg"]).iter("{http://www.w3.org/2000/svg}text")]


def test_panels_have_names_of_their_own_and_none_is_empty():
    record = panel_record(PANEL, Results([Trial({}, seed, trial(seed)) for seed in range(3)]))
    nothing = record | {"curves": [curve | {"mean": [None] * 3} for curve in record["curves"]], "title": "nothing"}
    twice = [record | {"title": "(a)", "ylabel": what} for what in ("loss", "accuracy")]
    shown = texts(draw_panels("A", [*twice, nothing]))
    assert "(a): loss" in shown and "(a): accuracy" in shown and "nothing" not in shown
    assert shown.count("theory") == 1  # one legend for panels that show the same
    other = record | {"title": "(b)", "curves": [record["curves"][0] | {"label": "b"}]}
    assert texts(draw_panels("A", [twice[0], other])).count("theory") == 1


def test_legends_lie_beside_the_curves():
    record = panel_record(PANEL, Results([Trial({}, seed, trial(seed)) for seed in range(3)]))
    other = record | {"title": "(b)", "curves": record["curves"][:1]}
    for panels in ([record], [record, other]):
        boxes: list = []

        def look(figure, form, dpi=DPI, boxes=boxes):
            figure.draw_without_rendering()
            legends = [*figure.legends, *(axis.get_legend() for axis in figure.axes if axis.get_legend())]
            for legend in legends:
                boxes.extend(legend.get_window_extent().overlaps(axis.bbox) for axis in figure.axes)
            return b""

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(panels_module, "encode_image", look)
            draw_panels("A", panels)
        assert boxes and not any(boxes)


def test_intervals_on_a_log_axis_are_those_of_logarithms():
    """A mean of 4 with an interval down below 0: the band around log 4 is as wide as the interval is beside 4."""
    wide = [Trial({}, s, {"x": [1, 2, 3, 4], "curve": [1, 1 + 3 * s, 1, 1]}) for s in range(3)]
    record = panel_record(PANEL, Results(wide))
    low, high = (record["curves"][0][side][1] for side in ("low", "high"))
    assert record["curves"][0]["mean"][1] == 4 and low < 0
    found: list = []

    def look(figure, form, dpi=DPI):
        heights = np.concatenate([path.vertices[:, 1] for path in figure.axes[0].collections[0].get_paths()])
        found.append((heights.min(), heights.max()))
        return b""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(panels_module, "encode_image", look)
        draw_panels("A", [record])
    below, above = np.log(found[0])
    assert (below + above) / 2 == pytest.approx(np.log(4)) and above - below == pytest.approx((high - low) / 4)


def test_long_titles_are_not_cut():
    panel = panel_record(PANEL, Results([Trial({}, 0, trial(0))]))
    drawn = ET.fromstring(draw_panels("wide words " * 14, [panel])["svg"])
    lines = [t.text for t in drawn.iter("{http://www.w3.org/2000/svg}text") if "wide words" in (t.text or "")]
    assert len(lines) > 1 and " ".join(lines) == ("wide words " * 14).strip()
    font = FontProperties(size=10)
    assert max(TextPath((0, 0), line, prop=font).get_extents().width for line in lines) < 4.6 * 72


def test_tables_show_intervals_and_printed_numbers():
    results = Results([Trial({"m": m}, seed, {"error": m + seed}) for m in (1, 2) for seed in (-1, 0, 1)])
    given = Table("T", ("one", "two"), {"row": [Cell(of("error", m=1), 0.9), Cell(of("error", m=2), "n/a")]})
    text = format_record_table(table_record(given, results))
    half = 4.303 / np.sqrt(3)
    assert f"1 ± {half:.4g} (0.9)" in text and "(n/a)" in text
    assert format_brief({"a": 1.23456, "b": {"c": [1, 2.5]}}) == "a: 1.235; b: c: [1, 2.5]"
    assert len(format_brief({f"n{k}": k for k in range(99)})) <= 90
    lower = {"value": 1.0, "reference": 2.0, "ratio": 0.5, "low": 0.4, "high": 0.6, "limit": 1.0, "worst n": 3}
    assert format_brief(lower) == "1 / 2 = 0.5 [0.4, 0.6], limit 1 (worst: n 3)"
    assert (
        format_brief({"slope": -1.0, "low": -1.1, "high": -0.9, "range": [-2, 0]})
        == "slope -1 [-1.1, -0.9], within [-2, 0]"
    )


def test_the_pages_of_the_repository_are_made_from_its_records(tmp_path):
    docs, copy = Path(__file__).parents[1] / "docs", tmp_path / "docs"
    shutil.copytree(docs / "reproduction", copy / "reproduction", ignore=shutil.ignore_patterns("*.md"))
    write_page(
        copy / "reproduction",
        copy / "reproduction.md",
        [registry.describe_registrations(p) for p in catalog.list_papers()],
    )
    pages = ["reproduction.md", *(f"reproduction/{paper}.md" for paper in (*catalog.list_papers(), "not-run"))]
    for page in pages:
        assert (copy / page).read_text() == (docs / page).read_text()
    known = {f"{one}-{preset}.json" for one in catalog.list_experiments() for preset in ("quick", "paper")} | {
        "history.json"
    }
    assert {path.name for path in (docs / "reproduction").glob("*.json")} <= known


def test_a_part_of_an_experiment_says_that_it_is_one():
    entry = catalog.load_experiment("effect-tab3")
    some = catalog.restrict_experiment(entry, "paper", ["row=MNIST CNN2", "classes=2"], 5).experiment.presets["paper"]
    assert {(point["row"], point["classes"]) for point in some.points} == {("MNIST CNN2", 2)} and some.repeats == 5
    assert some.data.endswith("; only row = MNIST CNN2; only classes = 2")
    assert catalog.restrict_experiment(entry, "paper", [], None) == entry


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--only", "row=MNIST"), "effect-tab3 has no such point; it has row = MNIST CNN2; classes = 2, 6"),
        (("--repeats", "0"), "--repeats must be a whole number >= 1"),
        (("--only", "method=FedProx"), "--only leaves out what is compared"),
    ],
)
def test_parts_that_cannot_be_run_are_refused(words, sentence, tmp_path, capsys, session_cache, monkeypatch):
    """Before anything is trained."""
    monkeypatch.setattr(reproduce, "run", None)
    assert run("reproduce", "effect-tab3", "--preset", "smoke", "--out", str(tmp_path / "out"), *words) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_points_that_a_plan_does_not_show_as_missing_are_refused_after_the_trials(
    tmp_path, capsys, session_cache, monkeypatch
):
    monkeypatch.setattr(reproduce, "check_comparisons", lambda entry, preset: None)
    monkeypatch.setattr(runner.os, "cpu_count", lambda: 1)  # starting processes takes longer than these trials
    words = ("--preset", "smoke", "--only", "method=FedProx", "--out", str(tmp_path / "out"))
    assert run("reproduce", "effect-tab3", *words) == 2
    assert "--only leaves out what is compared" in " ".join(capsys.readouterr().err.split())


def test_no_experiment_misses_points_of_its_own():
    for name in catalog.list_experiments():
        reproduce.check_comparisons(catalog.load_experiment(name), "paper")
