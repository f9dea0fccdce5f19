"""The commands as a person uses them: what they print, what they write, how they refuse."""

import gc
import json
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

import mooring
from mooring.cli import main
from mooring.commands.common import lasting_imports
from mooring.core.errors import RequestError
from mooring.runs.directory import open_run
from mooring.runs.sections import installed_version


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder with one small table in it."""
    rng = np.random.default_rng(0)
    n = 200
    frame = pd.DataFrame(rng.normal(size=(n, 2)), columns=["size", "age"])
    frame["town"] = [f"town {i % 5}" for i in range(n)]
    frame["price"] = 3 * frame["size"] - frame["age"] + (np.arange(n) % 5) + rng.normal(size=n)
    frame["sold"] = np.where(frame["price"] + rng.normal(size=n) > 2, "yes", "no")
    frame.to_csv(tmp_path / "homes.csv", index=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


HOMES = ["homes.csv", "--client", "town", "--target", "price", "--threads", "1"]


def test_first_import_of_pytorch_runs_without_collections_and_stays(monkeypatch):
    with lasting_imports():  # PyTorch is there already
        assert gc.isenabled()
    monkeypatch.delitem(sys.modules, "torch")
    gc.unfreeze()  # what `conftest.py` froze
    try:
        with pytest.raises(ImportError), lasting_imports():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() and gc.get_freeze_count() > 0
    finally:
        gc.freeze()


def call(capsys, *argv):
    """Run a command; (exit code, stdout, stderr)."""
    with pytest.raises(SystemExit) as left:
        main([str(a) for a in argv])
    out, err = capsys.readouterr()
    return left.value.code, out, err


def test_fit_writes_a_run_and_reports_scores(here, capsys):
    code, out, _ = call(capsys, "fit", *HOMES, "--rounds", 5, "--out", "run")
    assert code == 0
    text = " ".join(out.split())
    assert "than with local models" in text and "than with the pooled model" in text
    assert {p.name for p in (here / "run").iterdir()} == {
        "run.toml", "schema.json", "split.parquet", "rounds.parquet", "clients.parquet", "summary.json",
        "models.safetensors", "models-last.safetensors", "checkpoint", "report.html", "seconds.json",
    }  # fmt: skip


def test_fit_json_is_one_object_and_nothing_else(here, capsys):
    code, out, _ = call(capsys, "fit", *HOMES, "--rounds", 5, "--json")
    told = json.loads(out)
    assert code == 0 and set(told) == {"summary", "clients", "run"}
    assert set(told["summary"]) == {
        "metric", "test_rows", "level", "local", "pooled", "personal", "improvement_over_local",
        "improvement_over_pooled", "measures", "checkpoint", "best_round", "last_round",
    }  # fmt: skip
    assert told["summary"]["metric"] == "mse" and len(told["clients"]) == 5
    assert (here / told["run"] / "models.safetensors").exists()


def test_losses_are_in_the_targets_own_units(here, capsys):
    frame = pd.read_csv("homes.csv")
    frame["price"] *= 1000
    frame.to_csv("dear.csv", index=False)
    small = json.loads(call(capsys, "fit", *HOMES, "--rounds", 5, "--json")[1])["summary"]
    large = json.loads(call(capsys, "fit", "dear.csv", *HOMES[1:], "--rounds", 5, "--json")[1])["summary"]
    for who in ("local", "pooled", "personal"):
        assert large[who] == pytest.approx(1e6 * small[who], rel=1e-6)


def test_compare(here, capsys):
    code, out, _ = call(capsys, "compare", *HOMES, "--rounds", 5, "--methods", "local,pooled,fedavg", "--json")
    told = json.loads(out)
    assert code == 0 and set(told) == {"metric", "methods", "clients", "run"}
    assert [row["method"] for row in told["methods"]] == ["local", "pooled", "fedavg"]
    for key in ("test_loss", "validation_loss", "seconds", "rounds", "bytes"):
        assert key in told["methods"][0]
    assert set(told["clients"][0]) == {"client", "rows", "test", "local", "pooled", "fedavg"}


def test_a_run_file_runs_again(here, capsys):
    first = json.loads(call(capsys, "fit", *HOMES, "--rounds", 5, "--set", "lam=0.5", "--json")[1])
    again = json.loads(call(capsys, "fit", f"{first['run']}/run.toml", "--out", "again", "--json")[1])
    assert again["summary"] == first["summary"]
    assert (here / "again" / "models.safetensors").read_bytes() == (
        here / first["run"] / "models.safetensors"
    ).read_bytes()


def test_resume_of_a_finished_run_shows_it(here, capsys):
    first = json.loads(call(capsys, "fit", *HOMES, "--rounds", 5, "--json")[1])
    code, out, _ = call(capsys, "resume", first["run"], "--json")
    assert code == 0 and json.loads(out)["summary"] == first["summary"]


def test_predict(here, capsys):
    run = json.loads(call(capsys, "fit", *HOMES, "--rounds", 5, "--json")[1])["run"]
    code, out, _ = call(capsys, "predict", run, "homes.csv", "--json")
    rows = json.loads(out)["predictions"]
    truth = pd.read_csv("homes.csv")["price"].to_numpy()
    assert code == 0 and len(rows) == 200
    assert np.mean((np.array([row["price"] for row in rows]) - truth) ** 2) < 0.5 * truth.var()
    code, out, _ = call(capsys, "predict", run, "homes.csv", "--client", "town 3")
    assert code == 0 and out.splitlines()[0].endswith("client,price,model")
    code, _, err = call(capsys, "predict", run, "homes.csv", "--client", "town 9")
    assert code == 2 and "unknown client 'town 9'" in err


def test_predict_names_classes(here, capsys):
    argv = ["homes.csv", "--client", "town", "--target", "sold", "--drop", "price", "--rounds", 5, "--json"]
    told = json.loads(call(capsys, "fit", *argv)[1])
    assert told["summary"]["metric"] == "log-loss"
    rows = json.loads(call(capsys, "predict", told["run"], "homes.csv", "--json")[1])["predictions"]
    assert {row["sold"] for row in rows} == {"yes", "no"}
    assert all(abs(row["p(no)"] + row["p(yes)"] - 1) < 1e-9 for row in rows)


def test_a_network_of_ones_own(here, capsys):
    (here / "net.py").write_text(
        "from torch import nn\n\ndef make(features):\n"
        "    return nn.Sequential(nn.Linear(features, 8), nn.Tanh(), nn.Linear(8, 1))\n"
    )
    code, out, _ = call(capsys, "fit", *HOMES, "--rounds", 3, "--model", "net.py:make", "--json")
    assert code == 0 and json.loads(out)["summary"]["metric"] == "mse"
    run = json.loads(out)["run"]
    assert call(capsys, "predict", run, "homes.csv", "--json")[0] == 0


def test_fit_without_validation_rows(here, capsys):
    """Referees need none: local takes no ridge, and the last round is what is deployed."""
    frame = pd.read_csv("homes.csv")
    frame.assign(part=np.where(np.arange(len(frame)) // 5 % 10 < 7, "train", "test")).to_csv("homes.csv", index=False)
    code, out, _ = call(capsys, "fit", *HOMES, "--split", "part", "--rounds", 5, "--json")
    told = json.loads(out)
    assert code == 0 and len(told["clients"]) == 5
    assert all(np.isfinite([row[k] for k in ("local", "pooled", "personal")]).all() for row in told["clients"])


def test_personalize_a_newcomer(here, capsys):
    run = json.loads(call(capsys, "fit", *HOMES, "--rounds", 5, "--json")[1])["run"]
    frame = pd.read_csv("homes.csv").iloc[:60].drop(columns="town")
    frame.assign(price=frame["price"] + 5).to_csv("newtown.csv", index=False)
    code, out, _ = call(capsys, "personalize", run, "newtown.csv", "--out", "new.safetensors", "--json")
    told = json.loads(out)
    (row,) = told["clients"]
    assert code == 0 and told["way"] == "prox" and (here / "new.safetensors").exists()
    assert (
        row["personal"] < row["global"]
        and row["recommended"] in ("personal", "local")
        and 0 <= row["probability_better_than_local"] <= 1
    )
    ratio = row["local_held_out"] / row["personal_held_out"]
    assert row["ratio"] == pytest.approx(ratio) and row["ratio_low"] < row["ratio"]
    code, _, err = call(capsys, "personalize", run, "newtown.csv", "--out", "new.safetensors")
    assert code == 2 and "already exists" in err


@pytest.mark.parametrize("what", ["algorithms", "tasks", "datasets"])
def test_list(here, capsys, what):
    code, out, _ = call(capsys, "list", what, "--json")
    rows = json.loads(out)[what]
    assert code == 0 and len(rows) > 3 and all(row["name"] and row["summary"] for row in rows)


def test_list_algorithms_has_the_promised_keys(here, capsys):
    rows = json.loads(call(capsys, "list", "algorithms", "--json")[1])["algorithms"]
    assert all({"name", "summary", "paper", "fields"} <= set(row) for row in rows)


def test_check(here, capsys):
    frame = pd.read_csv("homes.csv")
    frame.loc[frame["town"] == "town 2", "age"] = np.nan
    pd.concat([frame, frame.iloc[:4].assign(town="hamlet")]).to_csv("odd.csv", index=False)
    odd = ["check", "odd.csv", "--client", "town", "--target", "price", "--json"]
    assert call(capsys, *odd)[0] == 0  # small clients may take part in advice
    code, out, _ = call(capsys, *odd, "--min-rows", 5)
    sentences = " ".join(finding["sentence"] for finding in json.loads(out)["findings"])
    assert code == 2 and "hamlet" in sentences and "age" in sentences
    code, out, _ = call(capsys, "check", "homes.csv", "--client", "town", "--target", "price")
    assert code == 0 and "no problems found" in out and "is taken as" in out


BAD = [
    (["fit", "homes.csv", "--client", "twon", "--target", "price"], "column 'twon'"),
    (["fit", "homes.csv", "--client", "town", "--target", "prise"], "no target column 'prise'"),
    (["fit", "nowhere.csv", "--client", "town", "--target", "price"], "nowhere.csv"),
    (
        ["fit", *HOMES, "--algorithm", "fedavgg"],
        "unknown algorithm 'fedavgg' (did you mean 'fedavg'?); see `mooring list algorithms`",
    ),
    (["fit", *HOMES, "--set", "lamb=1"], "unknown hyperparameter 'lamb' (did you mean 'lam'?); see "),
    (["fit", *HOMES, "--set", "lam=-1"], "lam must be >= 0, got -1"),
    (["fit", *HOMES, "--set", "lam"], "--set takes NAME=VALUE, got 'lam'"),
    (["fit", *HOMES, "--rounds", "0"], "--rounds must be"),
    (["fit", *HOMES, "--participation", "50"], "asks for 50 clients, but there are 5"),
    (["fit", *HOMES, "--task", "logistic"], "task 'logistic' fits a target that is"),
    (["fit", *HOMES, "--task", "nonsense"], "unknown task 'nonsense'"),
    (["fit", *HOMES, "--model", "gone.py:make"], "there is no file gone.py"),
    (["fit", "one.csv", "--client", "town", "--target", "price"], "one client only"),
    (["fit", "text.csv", "--client", "town", "--target", "price"], "'age'"),
    (["fit", "holes.csv", "--client", "town", "--target", "price"], "'price'"),
    (["fit", "infinite.csv", "--client", "town", "--target", "price"], "'age'"),
    (["fit", "same.csv", "--client", "town", "--target", "sold"], "'sold'"),
    (["fit", "small.csv", "--client", "town", "--target", "price"], "'hamlet'"),
    (["fit", "garbage.parquet", "--client", "town", "--target", "price"], "garbage.parquet"),
    (["compare", *HOMES, "--methods", "local,nothing"], "unknown algorithm 'nothing'"),
    (["compare", *HOMES, "--set", "steps=3"], "--set takes METHOD.FIELD=VALUE here"),
    (["resume", "nowhere"], "nowhere does not exist"),
    (["resume", "plain"], "is not a run"),
    (["predict", "plain", "homes.csv"], "is not a run"),
    (["list", "nothing"], "unknown list 'nothing'; known: algorithms, "),
    (["list", "algorithm"], "did you mean 'algorithms'?"),
]


@pytest.mark.parametrize("argv,words", BAD, ids=[" ".join(map(str, a[:1] + a[-2:])) for a, _ in BAD])
def test_bad_requests_are_one_sentence_and_leave_nothing(here, capsys, argv, words):
    frame = pd.read_csv("homes.csv")
    frame[frame["town"] == "town 1"].to_csv("one.csv", index=False)
    frame.astype({"age": object}).assign(age=lambda f: f["age"].where(f.index != 7, "old")).to_csv("text.csv")
    frame.assign(price=frame["price"].where(frame.index != 7)).to_csv("holes.csv", index=False)
    frame.assign(age=frame["age"].where(frame.index != 7, np.inf)).to_csv("infinite.csv", index=False)
    frame.assign(sold="yes").to_csv("same.csv", index=False)
    pd.concat([frame, frame.iloc[:4].assign(town="hamlet")]).to_csv("small.csv", index=False)
    (here / "garbage.parquet").write_bytes(b"PAR1 and then nothing")
    (here / "plain").mkdir()
    before = sorted(here.rglob("*"))
    code, out, err = call(capsys, *argv)
    assert code == 2 and out == ""
    assert words in err and "Traceback" not in err
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert sorted(here.rglob("*")) == before


def test_another_versions_run_is_refused(here, capsys):
    run = json.loads(call(capsys, "fit", *HOMES, "--rounds", 2, "--json")[1])["run"]
    text = (here / run / "run.toml").read_text().replace("format = 2", "format = 7")
    (here / "newer.toml").write_text(text)
    code, _, err = call(capsys, "fit", "newer.toml")
    assert code == 2 and "format 7" in err


def test_debug_shows_the_trace(here):
    with pytest.raises(RequestError, match="nowhere"):  # Python prints the trace of what leaves `main`
        main(["fit", "nowhere.csv", "--debug"])


HEAVY = ("torch", "pandas", "numpy", "rich", "importlib.metadata", "tomli_w", "plotly", "matplotlib")


def test_help_imports_nothing_heavy():
    code = f"import sys; from mooring.cli import app; sys.exit(any(name in sys.modules for name in {HEAVY}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_version(capsys):
    code, out, _ = call(capsys, "--version")
    assert code == 0 and out == f"mooring {installed_version()}\n"


@pytest.mark.parametrize(
    ("argv", "proposal"),
    [
        (["--algorithm", "fedavgs"], "'fedavg'"),
        (["--set", "lamda=1"], "'lam'"),
        (["--set", "LAM=1"], "'lam'"),
        (["--roundz", "3"], "'--rounds'"),
    ],
)
def test_names_that_nobody_knows_are_answered_with_the_nearest(here, capsys, argv, proposal):
    code, _, err = call(capsys, "fit", *HOMES, *argv)
    assert code == 2 and f"(did you mean {proposal}?)" in err and err.count("\n") == 1


def test_wrong_commands_are_told_in_one_line(capsys):
    code, _, err = call(capsys, "fti")
    assert code == 2 and err.startswith("error: mooring: unknown command 'fti' (did you mean 'fit'?)")
    assert err.count("did you mean") == 1
    code, _, err = call(capsys, "fit")
    assert code == 2
    assert err == "error: mooring fit: Missing argument 'SOURCE'. See `mooring fit --help`.\n"


def test_errors_do_nothing_to_a_terminal(here, capsys):
    code, _, err = call(capsys, "fit", "\x1b[31m[bold]red.csv", "--client", "town", "--target", "price")
    assert code == 2 and "\x1b" not in err and "[bold]red.csv" in err


def test_lists_show_the_fields(capsys):
    code, out, _ = call(capsys, "list", "algorithms")
    assert code == 0 and "fields for --set" in out and "alpha" in out


@pytest.mark.parametrize("command", [[], ["fit"], ["predict"], ["export"], ["personalize"], ["list"]])
def test_help_is_plain_text(capsys, command):
    code, out, _ = call(capsys, *command, "--help")
    assert code == 0 and "\\[" not in out and "Usage: " in out


def test_export_and_open_after_a_comparison(here, capsys):
    call(capsys, "compare", *HOMES, "--rounds", 2, "--methods", "local,pooled", "--out", "both")
    code, _, err = call(capsys, "export", "both", "--method", "local", "--client", "town 3", "--out", "town.csv")
    table = pd.read_csv("town.csv")
    assert code == 0 and "Written: town.csv" in err
    assert set(table["client"]) == {"town 3"} and list(table["term"]) == ["(intercept)", "size", "age", "sold=yes"]
    code, out, err = call(capsys, "predict", "both", "homes.csv")
    assert code == 0 and out.count("\n") == 201 and "the best on validation rows" in err
    code, _, err = call(capsys, "export", "both", "--to", "torch")
    assert code == 2 and "is no network" in err


@pytest.mark.parametrize(
    ("argv", "name", "settings"),
    [
        (["--algorithm", "FedAvg", "--set", "lr=0.1"], "fedavg", {"eta": 0.1}),
        (["--algorithm", "fedprox", "--lam", "3"], "fedprox", {"lam": 3}),
        (["--lam", "0.5"], "fedprox_personal", {"lam": 0.5}),
        (["--algorithm", "Ditto", "--lam", "2"], "ditto", {"lam": 2}),
    ],
)
def test_algorithms_and_hyperparameters_by_the_names_that_people_know(here, capsys, argv, name, settings):
    code, out, err = call(capsys, "fit", *HOMES, "--rounds", 2, "--no-baselines", *argv, "--json")
    assert code == 0, err
    asked = open_run(json.loads(out)["run"]).run.algorithm
    assert asked.name == name and settings.items() <= asked.fields.items()


def test_hyperparameters_are_arguments_in_python(here):
    how = {"client": "town", "target": "price", "threads": 1, "rounds": 2, "baselines": False}
    fits = [mooring.fit("homes.csv", **how, **more) for more in ({"lam": 0.5}, {"settings": {"lam": 0.5}})]
    assert fits[0].trained.algorithm == fits[1].trained.algorithm
    assert mooring.fit("homes.csv", algorithm="FedAvg", lr=0.05, **how).trained.algorithm.eta == 0.05


@pytest.mark.parametrize("argv", [[], ["join"], ["serve"], ["keys", "init"]])
def test_summaries_are_whole_and_nothing_is_escaped(capsys, monkeypatch, argv):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = call(capsys, *argv, "--help")
    assert code == 0 and "\\[" not in out
    assert not [line for line in out.splitlines() if line.endswith("...") and not line.startswith("Usage:")]
