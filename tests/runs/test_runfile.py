import copy
import datetime
import math
import tomllib
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooring.core.errors import RequestError
from mooring.core.penalty import PerClientPenalty, parse_lam
from mooring.data import clients
from mooring.runs.runfile import make_run, parse_run, read_run, run_bytes
from mooring.runs.sections import DataSection
from tests.support.full_run_file import FULL

LEAST = {"data": {"source": "exam.csv"}, "algorithm": {"name": "FedAvg"}}


def changed(path: str, value):
    table = copy.deepcopy(FULL)
    *sections, name = path.split(".")
    place = table
    for section in sections:
        place = place[section]
    if value is None:
        del place[name]
    else:
        place[name] = value
    return table


@pytest.mark.parametrize("table", [FULL, LEAST])
def test_round_trip(tmp_path, table):
    run = make_run(table, "here")
    (tmp_path / "run.toml").write_bytes(run_bytes(run))
    again = read_run(tmp_path / "run.toml")
    assert again == run and run_bytes(again) == run_bytes(run)


def test_every_field_is_written():
    written = tomllib.loads(run_bytes(make_run(FULL, "here")).decode())
    assert written["mooring"].pop("seal").startswith("mooring-sha256:")
    assert written == FULL


def test_sections_with_fields_of_their_own():
    run = make_run(FULL, "here")
    assert run.algorithm.fields == {key: FULL["algorithm"][key] for key in ("lam", "eta")}
    assert run.task.fields == {"ridge": 1e-300}
    assert parse_lam("Ditto", run.algorithm.fields["lam"]) == PerClientPenalty((0.1, 1e-17), (1, 2))
    named = {"name": "A", "fields": 1, "copy": 2, "json": 3, "schema": 4, "model_config": 5}
    again = parse_run(run_bytes(make_run(LEAST | {"algorithm": named}, "here")), "here")
    assert again.algorithm.fields == {key: named[key] for key in named if key != "name"}


def test_values_as_algorithms_hold_them():
    """A dataclass' fields: tuples, Moors, and None where nothing is set."""
    held = {"name": "FedProx", "lam": PerClientPenalty((1.0, 2.0)), "sizes": (3, 4), "batch": None}
    run = make_run(LEAST | {"algorithm": held}, "here")
    assert run.algorithm.fields == {"lam": {"per_client": [1.0, 2.0]}, "sizes": [3, 4]}
    assert parse_run(run_bytes(run), "here") == run


def test_settled_values_added_to_a_copy_are_made_plain():
    run = make_run(LEAST, "here")
    resolved = {"lam": PerClientPenalty((1.0, 2.0)), "eta": 0.5, "batch": None}
    run = run.model_copy(update={"algorithm": run.algorithm.model_copy(update={"resolved": resolved})})
    again = parse_run(run_bytes(run), "here")
    assert again.algorithm.resolved == {"lam": {"per_client": [1.0, 2.0]}, "eta": 0.5}
    assert run_bytes(again) == run_bytes(run)


def test_equal_runs_are_equal_bytes():
    def backwards(value):
        return {key: backwards(value[key]) for key in reversed(value)} if isinstance(value, dict) else value

    assert run_bytes(make_run(backwards(FULL), "here")) == run_bytes(make_run(FULL, "here"))


def test_comparisons_and_advice():
    methods = [{"name": "A", "z": 1}, {"name": "B"}]
    run = make_run({"mooring": {"purpose": "compare"}, "data": {"source": "a"}, "algorithms": methods}, "here")
    assert [algorithm.name for algorithm in run.algorithms] == ["A", "B"]
    assert parse_run(run_bytes(run), "here") == run
    assert make_run({"mooring": {"purpose": "advise"}, "data": {"source": "a"}}, "here").algorithm is None


texts = st.text(max_size=8)
numbers = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
values = st.recursive(
    numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
names = st.from_regex(r"[a-z][a-z_0-9]{0,8}", fullmatch=True)


@settings(max_examples=100, deadline=None)
@given(
    fields=st.dictionaries(names.filter(lambda name: name not in ("name", "resolved")), values, max_size=4),
    resolved=st.dictionaries(names, values, max_size=3),
    source=texts,
    features=st.none() | st.lists(texts, max_size=3),
    participation=st.floats(0, 1, exclude_min=True) | st.integers(1, 10**6),
    seed=st.integers(0, 2**63 - 1),
)
def test_any_run_survives_its_file(fields, resolved, source, features, participation, seed):
    table = {
        "data": {"source": source} | ({} if features is None else {"features": features}),
        "algorithm": {"name": "Ditto", "resolved": resolved, **fields},
        "training": {"participation": participation, "seed": seed},
    }
    run = make_run(table, "here")
    again = parse_run(run_bytes(run), "here")
    assert again == run and repr(again) == repr(run)  # repr tells 1 from 1.0 and 0.0 from -0.0
    assert again.algorithm.fields == fields and again.algorithm.resolved == resolved


def test_nan_survives():
    run = make_run(LEAST | {"algorithm": {"name": "A", "lam": math.nan}}, "here")
    assert math.isnan(parse_run(run_bytes(run), "here").algorithm.fields["lam"])


@pytest.mark.parametrize(
    "path, value, sentence",
    [
        ("training.rounds", "ten", "training.rounds must be a whole number >= 1, got 'ten'."),
        ("training.rounds", 0, "training.rounds must be a whole number >= 1, got 0."),
        ("training.rounds", True, "training.rounds must be a whole number >= 1, got True."),
        ("training.participation", 2.5, "training.participation must be a share of the clients (above 0, up to 1) or a "
         "whole number of them from 2 on, got 2.5."),
        ("training.participation", -1, "training.participation must be a share of the clients (above 0, up to 1) or a "
         "whole number of them from 2 on, got -1."),
        ("training.weights", {"a": -1.0}, "training.weights must be \"size\", \"uniform\", the name of a column, or a "
         "table with a positive number for each client, got {'a': -1.0}."),
        ("training.weights", {"a": math.inf}, "training.weights must be \"size\", \"uniform\", the name of a column, "
         "or a table with a positive number for each client, got {'a': inf}."),
        ("training.participation", math.nan, "training.participation must be a share of the clients (above 0, up to 1) "
         "or a whole number of them from 2 on, got nan."),
        ("training.checkpoint", "first", "training.checkpoint must be \"best\" or \"last\", got 'first'."),
        ("data.min_rows", 0, "data.min_rows must be a whole number >= 1, got 0."),
        ("data.split", [0.0, 0.5, 0.5], "data.split must be three shares (train, validation, test) that add up to 1, "
         "or the name of a column with each row's part, got [0.0, 0.5, 0.5]."),
        ("training.round", 5, "unknown field of [training] 'round' (did you mean 'rounds'?); known: attack, average, "
         "baselines, checkpoint, checkpoint_every, chunk, clip, delta, device, evaluate_every, kernels, noise, "
         "participation, patience, rounds, seed, seeds, select_by, threads, weight_cap, weights."),
        ("trainng", {}, "unknown section 'trainng' (did you mean 'training'?); known: advice, algorithm, algorithms, "
         "data, federation, mooring, task, training."),
        ("training", 5, "training must be a table, got 5."),
        ("data", None, "data is missing; it must be a table with a source."),
        ("data.source", None, "data.source is missing; it must be a file, or the name of a data set."),
        ("data.features", ["a", 3], "data.features must be a list of column names, got 3."),
        ("data.split", [0.5, 0.6, 0.2], "data.split must be three shares (train, validation, test) that add up to 1, "
         "or the name of a column with each row's part, got [0.5, 0.6, 0.2]."),
        ("task.model", "my_model.py", "task.model must be a file and a function in it, as \"my_model.py:make\", "
         "got 'my_model.py'."),
        ("algorithm", None, "a run of 'fit' needs one section [algorithm] with a name, and no [[algorithms]]."),
        ("algorithm.name", None, "algorithm.name is missing; it must be the name of an algorithm."),
        ("algorithm.lam", datetime.date(2026, 1, 1), "algorithm.lam must be a number, text, list or table, "
         "got datetime.date(2026, 1, 1)."),
        ("algorithm.resolved", 3, "algorithm.resolved must be a table of numbers that the run resolved, got 3."),
        ("mooring.purpose", "fitt",
         "mooring.purpose must be \"fit\", \"compare\", \"advise\" or \"personalize\", got 'fitt'."),
        ("mooring.purpose", "compare", "a run of 'compare' needs sections [[algorithms]] with names, and no "
         "[algorithm]."),
        ("algorithms", [{"lam": 1}], "algorithms.0.name is missing; it must be the name of an algorithm."),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence(path, value, sentence):
    with pytest.raises(RequestError) as error:
        make_run(changed(path, value), "run.toml")
    assert str(error.value) == f"run.toml: {sentence}"


def test_another_format_says_who_made_it():
    with pytest.raises(RequestError, match=r"run.toml: made by Mooring 0.9 in format 3; .* reads format 2\."):
        make_run({"mooring": {"format": 3, "version": "0.9"}, "anything": {"else": 1}}, "run.toml")


def test_files_that_are_not_run_files(tmp_path):
    path = tmp_path / "run.toml"
    with pytest.raises(RequestError, match="does not exist"):
        read_run(path)
    for content in (b"[data\n", b"\xff\xfe", b"a = "):
        path.write_bytes(content)
        with pytest.raises(RequestError, match=r"run.toml: this is not TOML: "):
            read_run(path)
    path.write_bytes(b"")
    with pytest.raises(RequestError, match="data is missing"):
        read_run(path)


def test_an_edited_copy_is_read(tmp_path):
    """The seal guards a run's own directory; a person may edit a copy to start another run."""
    text = run_bytes(make_run(FULL, "here")).decode().replace("rounds = 5", "rounds = 50 # more")
    (tmp_path / "copy.toml").write_text(text)
    assert read_run(tmp_path / "copy.toml").training.rounds == 50


def test_kinds_of_target_are_those_of_the_data():
    kinds = get_args(get_args(DataSection.model_fields["target_type"].annotation)[0])
    assert set(kinds) == {clients.REGRESSION, clients.BINARY, clients.CLASSES, clients.COUNT}
