"""Every option works alike from the flag, the run file and Python; what is given twice overrides or is refused.

The table below has a row for every field of the sections [data], [task], [training] and [advice]: a field without a row
fails.
"""

import shutil
from collections.abc import Callable
from typing import Any, NamedTuple, get_type_hints

import numpy as np
import pandas as pd
import pytest
import tomli_w
import torch
from pydantic import TypeAdapter

import mooring
from mooring.advice import advise as advising
from mooring.cli import main
from mooring.core.errors import RequestError
from mooring.core.trusted_files import trust_code
from mooring.core.user_code import absolute_spec
from mooring.engines import fit as fitting
from mooring.engines.prepare import prepare
from mooring.engines.request import request
from mooring.engines.simulator import Simulator
from mooring.runs.atomic_files import read_bytes
from mooring.runs.option_types import AdviceOptions, Options
from mooring.runs.runfile import parse_run, read_run
from mooring.runs.sections import (
    OPTIONS,
    AdviceSection,
    DataSection,
    TaskSection,
    TrainingSection,
)
from tests.support.repository import ROOT
from tools.option_types import format_types
from tools.reference_pages import format_options

FEW = {"features": ["age", "size"]}
LONG = {"rounds": 40, "evaluate_every": 1, "algorithm": "fedavg"}  # beyond the best round


class Row(NamedTuple):
    """An option, how its flag is written, what that means, another value, and how one sees that it works."""

    name: str
    words: list[str]
    value: Any
    other: Any
    shows: Callable[[Any, Any], bool]  # (what was done, what is done without the option)
    context: dict[str, Any] = {}  # other options that the option needs
    trains: bool = False  # whether one must train to see it
    command: str = "fit"


def sizes(job: Any) -> list[list[int]]:
    return [getattr(job.clients, part).size.tolist() for part in ("train", "validation", "test")]


def parts_of_units(job: Any) -> int:
    """The most parts that one client's pupil is in."""
    placed = job.clients.placement.assign(pupil=pd.read_csv("homes.csv")["pupil"].to_numpy())
    return int(placed.groupby(["client", "pupil"])["part"].nunique().max())


def latest_test(job: Any) -> bool:
    placed = job.clients.placement.assign(year=pd.read_csv("homes.csv")["year"].to_numpy())
    span = placed.groupby(["client", "part"])["year"].agg(["min", "max"]).unstack()
    return bool((span["max"]["train"] <= span["min"]["test"]).all())


def other_models(done: Any, without: Any) -> bool:
    return any(not torch.equal(done.models[name], without.models[name]) for name in done.models)


def own_shares(job: Any) -> list[float]:
    return job.clients.weights(job.run.training.weights).tolist()


def simpler(advice: Any) -> int:
    """Clients for whom something simpler than a personal model will do."""
    return int((advice.clients["recommended"] != "personal").sum())


def width(advice: Any) -> float:
    return advice.summary["improvement_over_local"]["ci_high"] - advice.summary["improvement_over_local"]["ci_low"]


ROWS = [
    Row("client", ["--client", "town"], "town", "client", lambda j, _: j.clients.names[0] == "town 0"),
    Row("target", ["--target", "price"], "price", "target", lambda j, _: j.clients.schema.target == "price"),
    Row("target_type", ["--target-type", "count"], "count", "classes", lambda j, _: j.clients.kind == "count",
        {"target": "visits"}),
    Row("formula", ["--formula", "price ~ age * size + (1 | client)"], "price ~ age * size + (1 | client)",
        "price ~ age + (1 | client)", lambda j, _: j.clients.features == ("age", "size", "age:size")),
    Row("features", ["--features", "age,size"], ["age", "size"], ["age"], lambda j, _: len(j.clients.features) == 2),
    Row("features", ["--features", "age", "--features", "size"], ["age", "size"], ["age"],
        lambda j, _: j.clients.features == ("age", "size")),
    Row("drop", ["--drop", "age"], ["age"], ["size"], lambda j, _: "age" not in j.clients.features),
    Row("group", ["--group", "pupil"], "pupil", "town", lambda j, _: parts_of_units(j) == 1),
    Row("time_column", ["--time-column", "year"], "year", "age", lambda j, _: latest_test(j)),
    Row("split", ["--split", ".5,.25,.25"], [0.5, 0.25, 0.25], [0.8, 0.1, 0.1],
        lambda j, _: sizes(j) == [[24] * 4, [12] * 4, [12] * 4]),
    Row("split", ["--split", "part"], "part", [0.8, 0.1, 0.1], lambda j, _: sizes(j)[2] == [2] * 4),
    Row("decimal", ["--decimal", ","], ",", ".", lambda j, _: j.clients.schema.mean[-1] < 40,
        {"source": "marks.csv", "features": ["mark"]}),
    Row("date_format", ["--date-format", "%m/%d/%Y"], "%m/%d/%Y", "%d/%m/%Y",
        lambda j, _: not isinstance(j, RequestError) and j.clients.schema.formats["day"][2] == "%m/%d/%Y",
        {"source": "marks.csv", "features": ["day"]}),
    Row("encoding", ["--encoding", "cp1250"], "cp1250", "cp1252",
        lambda j, _: "Gdańsk" in str(j.clients.schema.columns), {"source": "places.csv", "features": ["place"]}),
    Row("na", ["--na", "none,k.A."], ["none", "k.A."], ["x"],
        lambda j, _: not isinstance(j, RequestError) and "gap missing" in j.clients.features,
        {"source": "marks.csv", "features": ["gap"]}),
    Row("sheet", ["--sheet", "two"], "two", "1", lambda j, _: sum(map(sum, sizes(j))) == 96,
        {"source": "book.xlsx"}),
    Row("header_row", ["--header-row", "2"], 2, 1, lambda j, _: not isinstance(j, RequestError),
        {"source": "titled.csv"}),
    Row("categorical", ["--categorical", "shoe"], ["shoe"], ["beds"], lambda j, _: "shoe=31" in j.clients.features),
    Row("allow", ["--allow", "copy"], ["copy"], ["age"], lambda j, _: not isinstance(j, RequestError),
        {"source": "leak.csv", "features": ["age", "copy"]}, trains=True, command="advise"),
    Row("drop_repeats", ["--drop-repeats"], True, False, lambda j, _: sum(map(sum, sizes(j))) == 192,
        {"source": "twice.csv"}),
    Row("merge_levels", ["--merge-levels", "yes=no"], ["yes=no"], ["no=yes"],
        lambda j, _: "sold=yes" not in j.clients.features),
    Row("winsorize", ["--winsorize", "10%"], 0.1, 0.2, lambda j, _: "age" in j.clients.schema.clip),
    Row("min_rows", ["--min-rows", "60"], 60, 4, lambda j, _: "48 rows; at least 60 are needed" in str(j)),
    Row("drop_small", ["--drop-small"], True, False, lambda j, _: len(j.clients) == 3,
        {"source": "small.csv"}),
    Row("drop_missing_target", ["--drop-missing-target"], True, False, lambda j, _: sum(map(sum, sizes(j))) == 191,
        {"source": "gaps.csv"}),
    Row("min_category_rows", ["--min-category-rows", "20"], 20, 1, lambda j, _: "part=other" in j.clients.features),
    Row("split_seed", ["--split-seed", "3"], 3, 4,
        lambda j, w: not j.clients.placement.equals(w.clients.placement)),
    Row("partition", ["--partition", "clients=5", "--partition", "partition=iid"], {"clients": 5, "partition": "iid"},
        {"clients": 7}, lambda j, _: len(j.clients) == 5, {"source": "digits"}),
    Row("data_dir", ["--data-dir", "my_folder"], "my_folder", "another", lambda j, _: "my_folder" in str(j),
        {"source": "mnist"}),
    Row("task", ["--task", "absolute"], "absolute", "quantile", lambda j, _: j.task.name == "absolute"),
    Row("model", ["--model", "net.py:make"], "net.py:make", "net.py:other", lambda j, _: j.task.name == "module",
        {"algorithm": "fedavg"}),
    Row("loss", ["--loss", "half_square"], "half_square", "cross_entropy",
        lambda j, _: not j.task.classifies, {"model": "net.py:make", "target": "sold", "algorithm": "fedavg"}),
    Row("rounds", ["--rounds", "3"], 3, 7, lambda r, _: len(r.rounds) == 3, trains=True),
    Row("participation", ["--participation", "2"], 2, 0.5, lambda r, _: set(r.rounds["asked"]) == {2}, {"rounds": 3},
        trains=True),
    Row("participation", ["--participation", "0.75"], 0.75, 2, lambda r, _: set(r.rounds["asked"]) == {3},
        {"rounds": 3}, trains=True),
    Row("weights", ["--weights", "uniform"], "uniform", "size", lambda r, w: other_models(r, w),
        {"rounds": 3, "source": "uneven.csv"}, trains=True),
    Row("weights", ["--weights", "beds"], "beds", "size",
        lambda j, _: own_shares(j) == pytest.approx([0.1, 0.2, 0.3, 0.4]) and "beds" not in j.clients.features),
    Row("seed", ["--seed", "3"], 3, 4, lambda r, w: other_models(r, w), {"rounds": 3}, trains=True),
    Row("baselines", ["--no-baselines"], False, True, lambda r, _: r.clients["local"].isna().all(), {"rounds": 2},
        trains=True),
    Row("evaluate_every", ["--evaluate-every", "2"], 2, 3,
        lambda r, _: r.rounds["test_loss"].notna().tolist() == [False, True, False, True], {"rounds": 4}, trains=True),
    Row("patience", ["--patience", "1"], 1, 9, lambda r, _: len(r.rounds) < LONG["rounds"], LONG, trains=True),
    Row("checkpoint", ["--checkpoint", "last"], "last", "best", lambda r, w: other_models(r, w), LONG, trains=True),
    Row("select_by", ["--select-by", "mae"], "mae", "loss",
        lambda r, _: "mae" in r.trained.outcome.best.validation_measures, LONG, trains=True),
    Row("checkpoint_every", ["--checkpoint-every", "2"], 2, 3,
        lambda r, _: len(list((r.run / "checkpoint").iterdir())) == 2, {"rounds": 3, "out": True}, trains=True),
    Row("threads", ["--threads", "2"], 2, 1, lambda r, _: torch.get_num_threads() == 2, {"rounds": 1}, trains=True),
    Row("kernels", ["--kernels", "numba"], "numba", "torch",
        lambda j, _: "kernels='numba'" in str(j) or "numba is not installed" in str(j)),
    Row("average", ["--average", "trimmed:0.3"], "trimmed:0.3", "median", lambda r, w: other_models(r, w),
        {"rounds": 3}, trains=True),
    Row("clip", ["--clip", "0.01"], 0.01, 0.5, lambda r, w: other_models(r, w), {"rounds": 3}, trains=True),
    Row("noise", ["--noise", "2"], 2.0, 5.0, lambda r, _: r.summary.get("privacy", {}).get("noise") == 2,
        {"rounds": 2, "clip": 0.5}, trains=True),
    Row("delta", ["--delta", "0.001"], 0.001, 0.01, lambda r, _: r.summary.get("privacy", {}).get("delta") == 0.001,
        {"rounds": 2, "clip": 0.5, "noise": 2.0}, trains=True),
    Row("weight_cap", ["--weight-cap", "0.25"], 0.25, 0.9, lambda r, w: other_models(r, w),
        {"rounds": 3, "source": "uneven.csv"}, trains=True),
    Row("attack", ["--attack", "nan:0.25"], "nan:0.25", "sign-flip:0.5",
        lambda r, _: r.clients["left_out"].notna().sum() == 1, {"rounds": 3, "algorithm": "fedavg"}, trains=True),
    Row("device", ["--device", "nowhere"], "nowhere", "cpu", lambda j, _: "'nowhere' is not there" in str(j),
        {"model": "net.py:make", "algorithm": "fedavg"}),
    Row("chunk", ["--chunk", "3"], 3, 2, lambda r, _: Spied.chunks[0] == 3, {"rounds": 1}, trains=True),
    Row("margin", ["--margin", "90%"], 0.9, 0.02, lambda r, w: simpler(r) > simpler(w), FEW, True, "advise"),
    Row("level", ["--level", "0.5"], 0.5, 0.9, lambda r, w: width(r) < 0.6 * width(w), FEW, True, "advise"),
    Row("folds", ["--folds", "3"], 3, 4, lambda r, w: r.summary["local"] != w.summary["local"], FEW, True, "advise"),
    Row("shape", ["--shape", "spline"], "spline", "linear", lambda r, _: r.job.run.advice.shape == "spline", FEW,
        True, "advise"),
    Row("theory", ["--no-theory"], False, True, lambda r, _: r.theory is None, FEW, True, "advise"),
]  # fmt: skip
IDS = [f"{row.name}={' '.join(row.words[1:]) or row.value}" for row in ROWS]


class Spied:
    chunks: list[int] = []


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """A folder with tables and a network."""
    folder = tmp_path_factory.mktemp("tables")
    rng = np.random.default_rng(0)
    n, k = 192, np.arange(192)
    frame = pd.DataFrame(rng.normal(size=(n, 2)), columns=["size", "age"])
    frame["client"], frame["town"] = [f"c{i}" for i in k % 4], [f"town {i}" for i in k // 4 % 4]
    frame["pupil"], frame["year"] = k // 16, rng.permutation(n)
    frame["part"] = np.where(k < 8, "test", np.where(k < 16, "validation", "train"))
    frame["beds"], frame["shoe"] = k % 4 + 1.0, 30 + k % 8
    frame["target"] = 3 * frame["size"] - frame["age"] * (k % 4) + rng.normal(size=n)
    frame["price"] = frame["target"] + rng.normal(size=n)
    frame["visits"] = rng.poisson(np.exp(0.3 * frame["size"]))
    frame["sold"] = np.where(frame["price"] > 0, "yes", "no")
    frame.to_csv(folder / "homes.csv", index=False)
    frame[(k % 4 < 3) | (k < 16)].to_csv(folder / "small.csv", index=False)
    frame[(k % 4 < 3) | (k < 64)].to_csv(folder / "uneven.csv", index=False)
    frame.assign(target=frame["target"].where(k > 0)).to_csv(folder / "gaps.csv", index=False)
    marks = frame[["client", "size", "target"]].assign(
        target=(100 * frame["target"]).round().astype(int),  # without a decimal mark
        mark=[f"{i % 30 + 1},{i % 7:03d}" for i in k],
        day=[f"{i % 12 + 1:02d}/{i % 11 + 1:02d}/2024" for i in k],
        gap=np.where(k % 9 > 0, (k * 7 % 31).astype(str), "k.A."),
    )
    marks.to_csv(folder / "marks.csv", index=False)
    places = frame.assign(place=np.where(k % 3 > 0, "Málaga", "Gdańsk"))  # no language has the letters of both
    places.to_csv(folder / "places.csv", index=False, encoding="cp1250")
    with pd.ExcelWriter(folder / "book.xlsx") as book:
        frame.to_excel(book, sheet_name="one", index=False)
        frame.iloc[:96].to_excel(book, sheet_name="two", index=False)
    (folder / "titled.csv").write_text("client,title\n" + (folder / "homes.csv").read_text())
    frame.assign(copy=2 * frame["target"] + 1).to_csv(folder / "leak.csv", index=False)
    pd.concat([frame, frame.head(8)]).to_csv(folder / "twice.csv", index=False)
    net = "from torch import nn\n\ndef make(features, classes):\n    return nn.Linear(features, max(classes, 1))\n"
    (folder / "net.py").write_text(net + "\n\nother = make\n")
    return folder


@pytest.fixture
def here(tables, tmp_path, monkeypatch):
    """A copy of the tables in the current folder."""
    shutil.copytree(tables, tmp_path, dirs_exist_ok=True)
    trust_code(tmp_path / "net.py")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def context_of(row: Row) -> tuple[str, dict[str, Any]]:
    """The source, and the options that go with it."""
    context = dict(row.context)
    source = context.pop("source", "homes.csv")
    if source == "small.csv":
        context["min_rows"] = 20
    return source, context


def sections(options: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in options.items():
        out.setdefault(OPTIONS[name].section, {})[OPTIONS[name].field] = value
    return out


def write_file(path: str, source: str, options: dict[str, Any]) -> None:
    """A run file as a person writes it."""
    options = dict(options)
    method = {"name": options.pop("algorithm", "fedprox_personal"), **options.pop("settings", {})}
    table = {"data": {"source": source}, "algorithm": method}
    for section, fields in sections(options).items():
        table[section] = table.get(section, {}) | fields
    with open(path, "wb") as file:
        tomli_w.dump(table, file)


def flags(options: dict[str, Any]) -> list[str]:
    """Plain options as words of a command line."""
    plain = {k: v for k, v in options.items() if k not in ("settings", "out")}
    words = [f"--set={k}={v}" for k, v in options.get("settings", {}).items()]
    return words + [
        f"--{name.replace('_', '-')}={','.join(value) if isinstance(value, list) else value}"
        for name, value in plain.items()
    ]


@pytest.fixture
def asked(monkeypatch):
    """What reaches the data: runs a call up to there, and returns the run file that was asked for."""

    class Enough(Exception):
        pass

    seen: list[Any] = []

    def stop(run, *data_and_objects, **objects):
        seen.append(run)
        raise Enough

    def ask(call: Callable[[], Any]) -> Any:
        seen.clear()
        with pytest.raises((Enough, SystemExit)):
            call()
        return seen[0]

    monkeypatch.setattr(fitting, "prepare", stop)
    monkeypatch.setattr(advising, "prepare", stop)
    return ask


def test_every_field_has_a_row_and_a_type():
    declared = {"data": DataSection, "task": TaskSection, "training": TrainingSection, "advice": AdviceSection}
    fields = {(section, name) for section, model in declared.items() for name in model.model_fields}
    assert fields - {("data", "source"), ("advice", "settings")} == {
        (option.section, option.field) for option in OPTIONS.values()
    }
    # `seeds` is of `compare` alone: see tests/journeys/test_researcher.py
    assert {row.name for row in ROWS} == set(OPTIONS) - {"seeds"}
    hints = get_type_hints(AdviceOptions)
    assert set(hints) - set(get_type_hints(Options)) == {o.name for o in OPTIONS.values() if o.section == "advice"}
    assert set(hints) == set(OPTIONS) - {"model"}  # a model may be a network too: an argument of its own
    for row in ROWS:
        if row.name in hints:
            assert TypeAdapter(hints[row.name]).validate_python(row.value) == row.value


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_flag_file_and_python_say_the_same(here, asked, row):
    source, context = context_of(row)
    context.pop("out", None)
    python = asked(lambda: getattr(mooring, row.command)(source, **context, **{row.name: row.value}))
    flag = asked(lambda: main([row.command, source, *flags(context), *row.words]))
    write_file("run.toml", source, context | {row.name: row.value})
    file = asked(lambda: main([row.command, "run.toml"]))
    option = OPTIONS[row.name]
    assert getattr(getattr(python, option.section), option.field) == absolute_spec(row.value)
    assert flag == python == file


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_what_is_given_overrides_the_file(here, asked, row):
    source, context = context_of(row)
    context.pop("out", None)
    write_file("run.toml", source, context | {row.name: row.other})
    option = OPTIONS[row.name]
    call = getattr(mooring, row.command)
    plain = asked(lambda: call("run.toml"))
    assert getattr(getattr(plain, option.section), option.field) == absolute_spec(row.other)
    for run in (
        asked(lambda: main([row.command, "run.toml", *row.words])),
        asked(lambda: call("run.toml", **{row.name: row.value})),
    ):
        assert getattr(getattr(run, option.section), option.field) == absolute_spec(row.value)


def outcome(row: Row, options: dict[str, Any], out: str) -> Any:
    """The prepared job, or the trained result; or the refusal."""
    source, context = context_of(row)
    if context.pop("out", False):
        context["out"] = out
    try:
        if row.trains:
            return getattr(mooring, row.command)(source, **context, **options)
        return prepare(request(source, purpose="fit", **context, **options))
    except RequestError as error:
        return error


@pytest.fixture(scope="module")
def without_option():
    """`outcome` without the option, which many rows share; not of runs that are stored, and of what spies see."""
    known: dict[str, Any] = {}

    def find(row: Row) -> Any:
        if "out" in row.context or row.name == "chunk":
            return outcome(row, {}, "without")
        key = repr((row.command if row.trains else None, *context_of(row)))
        if key not in known:
            known[key] = outcome(row, {}, "without")
        return known[key]

    return find


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_it_works(here, monkeypatch, without_option, row):
    """With the option one sees it, and without it one does not."""
    begin = Simulator.__init__

    def spy(self, *given, **more):
        begin(self, *given, **more)
        Spied.chunks.append(self.chunk)

    monkeypatch.setattr(Simulator, "__init__", spy)
    torch.set_num_threads(1)
    Spied.chunks = []
    without = without_option(row)
    assert isinstance(without, RequestError) or not row.shows(without, without)
    Spied.chunks = []
    assert row.shows(outcome(row, {row.name: row.value}, "with"), without)


def call(capsys, *argv):
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in argv])
    out, err = capsys.readouterr()
    return left.value.code, out, err


def test_another_algorithm_over_a_run_file(here, asked):
    write_file("s.toml", "homes.csv", {"rounds": 40, "settings": {"lam": 0.3}})
    run = asked(lambda: main(["fit", "s.toml", "--algorithm", "apfl", "--rounds", "7", "--seed", "3"]))
    assert (run.algorithm.name, run.algorithm.fields, run.training.rounds, run.training.seed) == ("apfl", {}, 7, 3)
    run = asked(lambda: main(["fit", "s.toml", "--set", "steps=3"]))
    assert run.algorithm.fields == {"lam": 0.3, "steps": 3} and run.training.rounds == 40


def test_settled_numbers_are_those_of_the_run_as_it_was(here, asked):
    plain = asked(lambda: mooring.fit("homes.csv")).model_dump(exclude_none=True)
    resolved = plain | {"algorithm": {"name": "fedprox_personal", "resolved": {"lam": 0.7}}}
    with open("run.toml", "wb") as file:
        tomli_w.dump(resolved, file)
    assert asked(lambda: mooring.fit("run.toml")).algorithm.resolved == {"lam": 0.7}
    assert asked(lambda: mooring.fit("run.toml", seed=0)).algorithm.resolved == {"lam": 0.7}  # changes nothing
    for changed in ({"seed": 1}, {"target": "price"}, {"settings": {"lam": 2.0}}, {"weights": "uniform"}):
        assert asked(lambda changed=changed: mooring.fit("run.toml", **changed)).algorithm.resolved is None


def test_every_command_takes_a_run_file(here, capsys):
    write_file("run.toml", "homes.csv", {"target": "price", "rounds": 2, "drop": ["sold", "target"]})
    for command, words in {
        "fit": ["--rounds", "3"],
        "compare": ["--rounds", "3"],
        "advise": ["--seed", "1"],
        "theory": ["--weights", "uniform"],
        "check": ["--time-column", "year"],
    }.items():
        code, out, err = call(capsys, command, "run.toml", *words, "--json")
        assert code == 0 and out.startswith("{"), (command, err)
    assert read_run("runs/run-fit-1/run.toml").training.rounds == 3
    compared = parse_run(read_bytes("runs/run-compare-1/run.toml"), "here")
    assert [one.name for one in compared.algorithms] == ["local", "pooled", "fedprox_personal"]
    advised = read_run("runs/run-advice-1/run.toml")
    assert advised.data.target == "price" and advised.training.seed == 1
    code, _, err = call(capsys, "fit", "runs/run-compare-1/run.toml")
    assert code == 2 and "lists several methods (local, pooled, fedprox_personal)" in err
    code, *_ = call(capsys, "fit", "runs/run-compare-1/run.toml", "--algorithm", "pooled", "--rounds", "1")
    assert code == 0


def test_a_run_file_may_say_the_data_only(here, asked, capsys):
    (here / "data.toml").write_text('[data]\nsource = "homes.csv"\ntarget = "price"\n')
    run = asked(lambda: mooring.fit("data.toml"))
    assert run.algorithm.name == "fedprox_personal" and run.data.target == "price" and run.mooring.purpose == "fit"
    code, out, _ = call(capsys, "check", "data.toml", "--json")
    assert code == 0 and out.startswith("{")


REFUSED = [
    (["resume", "run", "--rounds", "3"], "mooring resume: unknown option '--rounds'"),
    (["predict", "run", "homes.csv", "--seed", "3"], "mooring predict: unknown option '--seed'"),
    (["personalize", "run", "homes.csv", "--rounds", "3"], "mooring personalize: unknown option '--rounds'"),
    (["check", "homes.csv", "--rounds", "3"], "mooring check: unknown option '--rounds'"),
    (["theory", "homes.csv", "--rounds", "3"], "mooring theory: unknown option '--rounds'"),
    (["fit", "homes.csv", "--margin", "1%"], "mooring fit: unknown option '--margin'"),
    (["advise", "homes.csv", "--margin", "much"], "--margin must be a share from 0 to below 1"),
    (["advise", "homes.csv", "--folds", "1"], "--folds must be a whole number >= 2, got 1"),
    (["advise", "homes.csv", "--checkpoint", "last"], "mooring advise: unknown option '--checkpoint'"),
    (["advise", "homes.csv", "--rounds", "3"], "--rounds does not apply: models of task 'linear' are solved exactly"),
    (["advise", "homes.csv", "--set", "lam=3"], "--set takes task.FIELD=VALUE here, got 'lam'"),
    (["fit", "digits", "--client", "town"], "--client does not apply: data set 'digits' is no table"),
    (["fit", "digits", "--split", "part"], "--split does not apply"),
    (["fit", "digits", "--split", ".6,.2,.2", "--partition", "test=0.1"], "given twice: by --split and by --partition"),
    (["fit", "digits", "--partition", "client=3"], "unknown hyperparameter 'client' (did you mean 'clients'?)"),
    (["fit", "digits", "--partition", "clients=few"], "clients must be a whole number, got 'few'"),
    (["fit", "homes.csv", "--partition", "clients=3"], "--partition does not apply"),
    (["fit", "homes.csv", "--data-dir", "x"], "--data-dir does not apply"),
    (["fit", "homes.csv", "--loss", "half_square"], "loss 'half_square' is for a network"),
    (["fit", "homes.csv", "--task", "linear", "--model", "net.py:make"], "a model is a task of its own"),
    (["fit", "homes.csv", "--group", "pupil", "--time-column", "year"], "rows are held out in one way"),
    (["fit", "homes.csv", "--split", "0.5,0.6"], "--split must be three shares"),
    (["fit", "homes.csv", "--split", "0.5,0.6,-0.1"], "--split must be three shares"),
    (["fit", "homes.csv", "--split", "0.5"], "--split must be three shares"),
    (["fit", "homes.csv", "--rounds", "ten"], "--rounds must be a whole number >= 1, got 'ten'"),
    (["fit", "homes.csv", "--participation", "2.5"], "--participation must be a share"),
    (["fit", "homes.csv", "--checkpoint", "first"], "--checkpoint must be \"best\" or \"last\", got 'first'"),
    (["fit", "homes.csv", "--weights", "bets"], "no weights column 'bets'"),
    (["fit", "homes.csv", "--weights", "age"], "weights column 'age'"),
    (["fit", "homes.csv", "--weights", "shoe"], "a client's weight is the same in all its rows"),
    (["fit", "homes.csv", "--weights", "beds", "--features", "beds,age"], "is the weights column and cannot be"),
    (["fit", "homes.csv", "--set", "lamda=3"], "unknown hyperparameter 'lamda' (did you mean 'lam'?)"),
    (["fit", "homes.csv", "--set", "steps=many"], "fedprox_personal: steps must be a whole number, got 'many'"),
    (["fit", "homes.csv", "--set", "task.rigde=1"], "unknown hyperparameter 'rigde' (did you mean 'ridge'?)"),
    (["fit", "homes.csv", "--set", "task.ridge=big"], "task 'linear': ridge must be a number, got 'big'"),
    (["fit", "homes.csv", "--algorithm", "FedAvgs"], "did you mean 'fedavg'?"),
    (["fit", "shares.csv", "--split", ".6,.2,.2"], "column 'split' already names each row's part"),
    (["fit", "typo.toml"], "typo.toml: unknown field of [training] 'roundz' (did you mean 'rounds'?)"),
    (["fit", "lamda.toml"], "fedprox_personal: unknown hyperparameter 'lamda' (did you mean 'lam'?)"),
]  # fmt: skip


@pytest.mark.parametrize("argv, sentence", REFUSED, ids=[" ".join(argv) for argv, _ in REFUSED])
def test_what_makes_no_sense_is_refused_by_name(here, capsys, argv, sentence):
    frame = pd.read_csv("homes.csv")
    frame.rename(columns={"part": "split"}).to_csv("shares.csv", index=False)
    write_file("typo.toml", "homes.csv", {})
    (here / "typo.toml").write_text((here / "typo.toml").read_text() + "[training]\nroundz = 3\n")
    write_file("lamda.toml", "homes.csv", {"settings": {"lamda": 3}})
    code, out, err = call(capsys, *argv)
    assert code == 2 and out == "" and "Traceback" not in err
    assert sentence in " ".join(err.split())
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"roundz": 3}, "unknown option 'roundz' (did you mean 'rounds'?); see `mooring list options`."),
        ({"margin": 0.1}, "margin does not apply: it is for advise."),
        ({"rounds": "3"}, "rounds must be a whole number >= 1, got '3'."),
        ({"rounds": True}, "rounds must be a whole number >= 1, got True."),
        ({"split": (0.5, 0.5)}, "split must be three shares"),
        ({"features": "age"}, "features must be a list of column names, got 'age'."),
        ({"weights": {"c0": 1.0}}, "weights has no number for client 'c1'."),
        ({"weights": {"c0": 0.0}}, "weights must be"),
        ({"task": "linear", "model": torch.nn.Linear(2, 1)}, "a model is a task of its own; leave out task 'linear'"),
        ({"task": {"ridge": "big"}}, "task 'linear': ridge must be a number, got 'big'."),
    ],
)
def test_python_refuses_alike(here, options, sentence):
    with pytest.raises(RequestError) as error:
        mooring.fit("homes.csv", rounds=options.pop("rounds", 1), **options)
    assert sentence in str(error.value)


def test_numpy_numbers_tuples_paths_and_series_are_taken(here, asked):
    frame = pd.read_csv("homes.csv")
    beds = frame.groupby("client")["beds"].first()
    run = asked(
        lambda: mooring.fit("homes.csv", rounds=np.int64(3), split=(0.5, 0.25, 0.25), features=("age",), weights=beds)
    )
    assert run.training.rounds == 3 and run.data.split == [0.5, 0.25, 0.25] and run.data.features == ["age"]
    assert run.training.weights == {"c0": 1.0, "c1": 2.0, "c2": 3.0, "c3": 4.0}


@pytest.mark.parametrize("weights", ["beds", {"c0": 1, "c1": 2, "c2": 3, "c3": 4}], ids=["column", "mapping"])
def test_own_weights_are_the_minimisers(here, weights):
    """The common model minimises sum p_i L_i with p = 1..4 over 10, and resuming a run keeps it so."""
    result = mooring.fit("homes.csv", algorithm="pooled", weights=weights, features=["age", "size"], out="run")
    rows, p = result.job.clients.train, torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    scale = (p / rows.size).repeat_interleave(rows.size).sqrt()
    x = torch.cat([rows.x, torch.ones(len(rows.x), 1)], dim=1)
    best = torch.linalg.lstsq(x * scale[:, None], (rows.y * scale)[:, None]).solution[:, 0]
    # both solve the same well-conditioned least squares problem in float64
    torch.testing.assert_close(result.trained.common, best, rtol=1e-9, atol=1e-9)
    again, _ = fitting.resume_fit("run")
    assert torch.equal(again.trained.common, result.trained.common)
    assert read_run("run/run.toml").training.weights == weights


def test_advice_heeds_own_weights(here):
    plain = mooring.advise("homes.csv", drop=["sold", "beds"])
    weighed = mooring.advise("homes.csv", drop=["sold"], weights="beds")
    assert not torch.equal(plain.models.global_, weighed.models.global_)
    by_name = mooring.advise("homes.csv", drop=["sold", "beds"], weights={f"c{i}": i + 1 for i in range(4)})
    assert torch.equal(by_name.models.global_, weighed.models.global_)


def test_clients_in_memory_refuse_options_of_tables(here):
    clients = mooring.load("homes.csv")
    with pytest.raises(RequestError, match=r"target \(--target\) does not apply: the clients' data are given"):
        mooring.fit(clients, target="price")


def test_settings_are_not_lost_beside_an_algorithm(here):
    from mooring.algorithms.fedavg import FedAvg

    with pytest.raises(RequestError, match="give the fields of fedavg to the algorithm itself"):
        mooring.fit("homes.csv", algorithm=FedAvg(), settings={"steps": 3})


def test_personalize_leaves_small_newcomers_out(here, capsys):
    code, *_ = call(capsys, "fit", "homes.csv", "--rounds", "2", "--out", "run")
    assert code == 0
    code, _, err = call(capsys, "personalize", "run", "small.csv", "--min-rows", "20")
    assert code == 2 and "--drop-small" in err
    code, *_ = call(capsys, "personalize", "run", "small.csv", "--min-rows", "20", "--drop-small")
    assert code == 0


def test_the_types_of_pythons_options_are_up_to_date():
    assert (ROOT / "mooring" / "runs" / "option_types.py").read_text() == format_types()


def test_the_page_of_options_is_up_to_date():
    assert (ROOT / "docs" / "options.md").read_text() == format_options()


@pytest.mark.parametrize("command", ["fit", "compare", "advise", "theory", "check"])
def test_help_names_every_default_and_an_example(capsys, command):
    code, out, _ = call(capsys, command, "--help")
    said = " ".join(out.split())
    defaults = {"min_rows": "5"}  # of this command, where commands differ
    if command == "advise":
        defaults = {"min_rows": "1", "rounds": "100; networks only", "participation": "1; networks only"}
    assert code == 0 and f"Example: mooring {command} " in said and "[required]" not in said
    for option in OPTIONS.values():
        if f" {option.flag} " in out:
            default = defaults.get(option.name, option.default)
            assert f"{option.info.title} [{default}]" in said
