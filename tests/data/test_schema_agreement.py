"""Clients whose tables never meet agree on the schema of the pooled table."""

import json
import math
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mooring
from mooring.core.errors import RequestError
from mooring.data.column_roles import client_codes, find_roles
from mooring.data.column_statistics import ColumnStatistics, LevelCount, merge_statistics, order_statistics
from mooring.data.load_options import CellReading, text_columns
from mooring.data.loading import load
from mooring.data.schema import Schema, clip_outliers
from mooring.data.schema_client import (
    ClientTable,
    agree_on_schema,
    count_values,
    parse_table,
    sum_squares,
    survey_table,
)
from mooring.data.schema_server import SchemaPlan, complete_schema, draft_schema, plan_schema
from mooring.data.table_sources import read_source
from mooring.data.tables import Table
from mooring.remote.server_run import notes_visible_to

NAMES = ["10", "9", "b", "B ", "é", "007", "7"]


def federation(seed=0, clients=4, offset=0.0, holes=0.1, target="number"):
    """A pooled table with all kinds of columns."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(5, 15, clients)
    n = int(sizes.sum())
    frame = pd.DataFrame(
        {
            "site": np.repeat(NAMES[:clients], sizes),
            "number": offset + rng.normal(size=n),
            "whole": rng.integers(0, 9, n),
            "colour": rng.choice(["red", "green", "blue", "mauve"], n, p=[0.4, 0.3, 0.28, 0.02]),
            "smoker": rng.random(n) < 0.4,
            "day": pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.integers(0, 300, n), "D"),
            "code": rng.permutation(np.resize(["0", "1", "2", "3+"], n)),
            "id": rng.permutation(n) + 1000,
            "text": [f"note {i}" for i in range(n)],
            "same": 1.5,
            "y": {
                "number": rng.normal(size=n) * 7 + offset,
                "binary": rng.choice(["N", "Y"], n),
                "classes": rng.integers(0, 4, n),
            }[target],
        }
    ).astype({"colour": object})
    for column in ("number", "colour", "day"):
        frame.loc[rng.random(n) < holes, column] = None
    frame = frame.sample(frac=1, random_state=int(seed), ignore_index=True)
    frame["level"] = frame["site"].map({name: k / 7 for k, name in enumerate(NAMES)})
    return frame


def member(frame, target="y", **more):
    table = Table(frame.reset_index(drop=True), "table", client="site", target=target)
    roles = find_roles(table)
    code, clients = client_codes(table, roles.client)
    features = [c for c in frame.columns if c not in ("site", target, roles.split)]
    return ClientTable(table, roles, code, clients, features, **more)


def alone(frame, **more):
    """A member per client."""
    return [member(rows, **more) for _, rows in frame.groupby("site", sort=False)]


@settings(deadline=None, max_examples=10)
@given(
    seed=st.integers(0, 10**6),
    clients=st.integers(2, 7),
    offset=st.sampled_from([0.0, 2e9, -3e-7]),
    holes=st.sampled_from([0.0, 0.3]),
    target=st.sampled_from(["number", "binary", "classes"]),
    rare=st.sampled_from([1, 3]),
    order=st.randoms(use_true_random=False),
)
def test_the_schema_is_that_of_the_pooled_table_bit_for_bit(seed, clients, offset, holes, target, rare, order):
    frame = federation(seed, clients, offset, holes, target)
    pooled, plan, _ = agree_on_schema([member(frame)], rare=rare)
    members = alone(frame)
    order.shuffle(members)
    apart, plan_apart, _ = agree_on_schema(members, rare=rare)
    assert apart.to_json() == pooled.to_json() and plan_apart == plan
    loaded = load(frame, client="site", target="y", min_category_rows=rare).schema
    assert loaded.model_copy(update={"digest": ""}) == pooled


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 10**6), clients=st.integers(2, 7), target=st.sampled_from(["number", "binary", "classes"]))
def test_each_client_says_alone_what_the_pooled_table_says_of_it(seed, clients, target):
    frame = federation(seed, clients, 1e5, target=target)
    pooled, members = member(frame), alone(frame)
    assert merge_statistics(map(survey_table, members)).to_json() == survey_table(pooled).to_json()
    _, plan, (reading,) = agree_on_schema([pooled])
    together = merge_statistics(count_values(m, plan, parse_table(m, plan)) for m in members)
    assert together.to_json() == count_values(pooled, plan, reading).to_json()


@pytest.mark.parametrize("far", [None, ("number", 3e4), ("y", -4e4)])
def test_the_conversation_over_a_wire(far):
    """Everything that travels is JSON, and comes back to the same bits, also where a cell has no say."""
    frame = federation(3, 5)
    if far is not None:
        frame.loc[4, far[0]] = far[1]
    pooled = agree_on_schema([member(frame)])[0]
    members = alone(frame)

    def sent(summaries):
        return merge_statistics(ColumnStatistics.from_json(summary.to_json()) for summary in summaries)

    plan = SchemaPlan.model_validate_json(plan_schema(sent(map(survey_table, members))).model_dump_json())
    readings = [parse_table(m, plan) for m in members]
    draft = draft_schema(sent(count_values(m, plan, r) for m, r in zip(members, readings)), plan)
    draft = Schema.from_json(draft.to_json())
    schema = complete_schema(sent(sum_squares(m, draft, r) for m, r in zip(members, readings)), draft)
    assert schema == pooled


def test_no_row_is_in_what_a_client_sends():
    """Free text, keys, numbers and dates are not to be found in a client's three answers."""
    frame = federation(1, 3, holes=0.0).assign(text=lambda f: [f"secret {i}" for i in range(len(f))])
    one = alone(frame)[0]
    plan = plan_schema(merge_statistics(map(survey_table, alone(frame))))
    reading = parse_table(one, plan)
    draft = draft_schema(merge_statistics(count_values(m, plan, parse_table(m, plan)) for m in alone(frame)), plan)
    said = (
        survey_table(one).to_json()
        + count_values(one, plan, reading).to_json()
        + sum_squares(one, draft, reading).to_json()
    )
    assert "secret" not in said and "note" not in said
    numbers = one.table.frame["number"]
    shown = [value for value in numbers if repr(float(value)) in said]
    assert len(numbers) > 6 and len(shown) <= 6  # extremes of all and of the training rows, medians


def summaries(draw_clients, seed):
    rng = np.random.default_rng(seed)
    out = []
    for name in draw_clients:
        columns = [c for c in ("a", "b", "c") if rng.random() < 0.8]
        facts = {c: {"has": np.ones(1), "total": rng.normal(size=1) * 10.0 ** rng.integers(-9, 9)} for c in columns}
        levels = {
            c: {v: LevelCount(int(rng.integers(1, 9)), name) for v in "xyz" if rng.random() < 0.6} for c in columns
        }
        out.append(ColumnStatistics((name,), facts, levels, {"target": {"y": LevelCount(1, name)}}))
    return out


@settings(deadline=None, max_examples=60)
@given(
    names=st.lists(st.text(max_size=4) | st.integers(0, 99).map(str), min_size=3, max_size=7, unique=True),
    seed=st.integers(0, 10**6),
    cut=st.integers(1, 6),
    order=st.randoms(use_true_random=False),
)
def test_merging_is_associative_and_commutative(names, seed, cut, order):
    parts = summaries(names, seed)
    whole = merge_statistics(parts).to_json()
    order.shuffle(parts)
    cut = min(cut, len(parts) - 1)
    assert merge_statistics([merge_statistics(parts[:cut]), merge_statistics(parts[cut:])]).to_json() == whole
    assert merge_statistics([merge_statistics(parts[cut:]), *parts[:cut]]).to_json() == whole
    assert merge_statistics([merge_statistics(parts)]).to_json() == whole


def test_a_client_that_answers_twice_is_refused():
    (one, two) = alone(federation(0, 2))
    with pytest.raises(RequestError, match="client '10' sent its summary twice"):
        merge_statistics([survey_table(one), survey_table(two), survey_table(one)])


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10**6), offset=st.sampled_from([0.0, 1e9]))
def test_means_and_scales_against_exact_arithmetic(seed, offset):
    """Rounding of n additions: at most n units in the last place of the sum of magnitudes."""
    frame = federation(seed, 5, offset, holes=0.0)
    schema, _, (reading,) = agree_on_schema([member(frame)])
    j = schema.features.index("number")
    values = [Fraction(float(v)) for v in frame["number"][reading.train]]
    mean = sum(values) / len(values)
    variance = sum((v - mean) ** 2 for v in values) / len(values)
    slack = len(values) * np.finfo(float).eps
    assert abs(schema.mean[j] - float(mean)) <= slack * float(sum(map(abs, values)) / len(values))
    # a mean that is off by e adds e^2 to the variance; squares carry the rounding of the differences
    error = 2 * slack + 2 * np.finfo(float).eps * abs(float(mean)) / math.sqrt(float(variance))
    assert abs(schema.scale[j] / math.sqrt(float(variance)) - 1) <= error


def test_a_large_mean_costs_no_digits():
    frame = pd.DataFrame({"site": list("ab") * 50, "x": 1e9 + np.array([-1.0, -1, 1, 1] * 25), "y": np.arange(100) / 3})
    frame["split"] = "train"
    schema = agree_on_schema([member(frame)])[0]
    assert schema.scale == (1.0,)
    assert np.mean(frame.x**2) - np.mean(frame.x) ** 2 != 1.0  # what plain sums of squares would give


def test_rare_levels_are_not_named():
    frame = federation(2, 4, holes=0.2)
    frame.loc[[0, 7], "colour"] = ["scarlet", "crimson"]
    frame["split"] = "train"
    schema = agree_on_schema([member(frame)], rare=6)[0]
    colour = next(c for c in schema.columns if c.name == "colour")
    count = frame["colour"].value_counts()
    assert colour.other and colour.levels == (*sorted(count[count >= 6].index), "other")
    assert "scarlet" not in schema.to_json() and "crimson" not in schema.to_json()
    clients = load(frame, client="site", target="y", min_category_rows=6)
    raw = clients.train.x.numpy() * schema.scale + schema.mean
    j = clients.features.index("colour=other")
    assert round(raw[:, j].sum()) == count[count < 6].sum()
    np.testing.assert_allclose(clients.train.x.numpy().mean(0), 0, atol=1e-9)


def test_a_level_called_other_takes_the_rare_ones_in():
    frame = federation(2, 4, holes=0.0).assign(split="train")
    frame["colour"] = (["other"] * 8 + ["red"] * 20 + ["x", "y"] + ["blue"] * 99)[: len(frame)]
    colour = next(c for c in agree_on_schema([member(frame)], rare=3)[0].columns if c.name == "colour")
    assert colour.levels == ("blue", "red", "other")
    plain = next(c for c in agree_on_schema([member(frame)])[0].columns if c.name == "colour")
    assert plain.levels == ("blue", "other", "red", "x", "y") and not plain.other


def test_clients_that_disagree_are_named():
    frame = federation(4, 3, holes=0.0)
    north, south, west = (rows for _, rows in frame.groupby("site", sort=False))
    name = south["site"].iloc[0]
    with pytest.raises(RequestError, match=f"client '{name}' lacks column 'whole'"):
        agree_on_schema([member(north), member(south.drop(columns="whole")), member(west)])
    with pytest.raises(RequestError, match=f"client '{name}' has the extra column 'more'"):
        agree_on_schema([member(north), member(south.assign(more=1.0)), member(west)])
    with pytest.raises(RequestError, match="the target column must be the same for all clients, but client"):
        agree_on_schema([member(north), member(south, target="number"), member(west)])
    parts = south.assign(split=["train", "test", "validation"] * 3 + ["train"] * (len(south) - 9))
    with pytest.raises(RequestError, match=f"the split column must be .* client '{name}' has 'split'"):
        agree_on_schema([member(north), member(parts), member(west)])
    texts = south.assign(y=["low", "high"] * (len(south) // 2) + ["low"] * (len(south) % 2))
    with pytest.raises(RequestError, match=f"'y' holds numbers at client '.*', but text at client '{name}'"):
        agree_on_schema([member(north), member(texts), member(west)])
    both = [member(rows.assign(y=np.where(rows["smoker"], "N", "Y")), kind="binary") for rows in (north, west)]
    with pytest.raises(RequestError, match=f"'low' at client '{name}'.*a binary target has two"):
        agree_on_schema([*both, member(texts, kind="binary")])


def test_numbers_at_one_client_and_text_at_another():
    """Codes that look like numbers where nobody has the odd one; the pooled column is text, and so is the agreed."""
    frame = federation(5, 3, holes=0.0)
    whole = frame["site"] == frame["site"].iloc[0]
    frame["code"] = np.where(whole, frame.groupby("site").cumcount() % 3, "3+").astype(str)
    frame["split"] = "train"
    apart = [
        member(rows.assign(code=pd.to_numeric(rows["code"])) if rows["code"].str.isdigit().all() else rows)
        for _, rows in frame.groupby("site", sort=False)
    ]
    schema, plan, _ = agree_on_schema(apart)
    assert schema == agree_on_schema([member(frame)])[0]
    assert next(c for c in schema.columns if c.name == "code").levels == ("0", "1", "2", "3+")
    assert any("'code' is numbers at client" in note and "text at client" in note for note in plan.notes)


def test_files_that_were_read_apart(tmp_path):
    """A file's codes are numbers where it has no other; once the plan says that they are text, the file is read anew
    as it is written, and the schema is that of the one file."""
    rows = {
        "a": [f"{['007', '1.50', '2'][i % 3]},{i / 7},{i * 0.37:.2f}\n" for i in range(9)],
        "b": [f"{['3+', '007', '2'][i % 3]},{i / 9},{i * 0.31:.2f}\n" for i in range(9)],
    }
    (tmp_path / "all.csv").write_text("site,code,x,y\n" + "".join(f"{s},{row}" for s in rows for row in rows[s]))
    for site, lines in rows.items():
        (tmp_path / f"{site}.csv").write_text("site,code,x,y\n" + "".join(f"{site},{row}" for row in lines))

    def members(plan=None):
        cells = CellReading(frozenset(text_columns(plan)), frozenset({"site"}))
        return [member(read_source(tmp_path / f"{s}.csv", cells).frame) for s in rows]

    assert members()[0].table.frame["code"].dtype == float
    plan = plan_schema(merge_statistics(map(survey_table, members())))
    readings = [parse_table(m, plan) for m in members(plan)]
    draft = draft_schema(merge_statistics(count_values(m, plan, r) for m, r in zip(members(plan), readings)), plan)
    apart = complete_schema(merge_statistics(sum_squares(m, draft, r) for m, r in zip(members(plan), readings)), draft)
    pooled = load(tmp_path / "all.csv", client="site", target="y").schema
    assert apart == pooled.model_copy(update={"digest": ""})
    assert {"1.50", "007", "3+"} <= set(apart.columns[0].levels)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda s: s[:-2],
        lambda s: s.replace('"rows": [', '"rows": [NaN, ', 1),
        lambda s: s.replace('"rows": [', '"rows": [Infinity, ', 1),
        lambda s: s.replace('"rows": [', '"rows": [1, ', 1),
        lambda s: s.replace('"rows": [', '"rows": ["1", ', 1),
        lambda s: json.dumps(json.loads(s) | {"levels": {"y": {"a": [-1, "x"]}}}),
        lambda s: json.dumps(json.loads(s) | {"clients": []}),
        lambda s: json.dumps(json.loads(s) | {"clients": [3]}),
        lambda s: "[" * 100_000,
        lambda s: "3",
    ],
)
def test_a_damaged_summary_is_refused(spoil):
    with pytest.raises(RequestError, match="summary"):
        ColumnStatistics.from_json(spoil(survey_table(member(federation())).to_json()))


def test_a_cell_that_would_spoil_the_scale_is_refused_by_name():
    frame = federation(6, 5, holes=0.0)
    victim = frame["site"].iloc[3]
    for value in (1e30, -1e30, 1e300, 1e9):
        for column in ("number", "y"):
            bad = frame.copy()
            bad.loc[3, column] = value
            with pytest.raises(RequestError, match=f"client '{victim}', column '{column}': .* for everybody"):
                load(bad, client="site", target="y")
    bad = frame.copy()
    bad.loc[3, "number"] = 5e4
    clients = load(bad, client="site", target="y")
    (note,) = [note for note in clients.notes if "is it right?" in note]
    assert f"client '{victim}', column 'number': 50000" in note
    assert not any("is it right?" in note for note in load(frame, client="site", target="y").notes)


def far_and_usual(clients=4, rows=30):
    """A table, the same with a training cell of client c far out in x and in y, and with what those count as."""
    rng = np.random.default_rng(0)
    names = [f"c{k}" for k in range(clients)]
    frame = pd.DataFrame({"site": np.repeat(names, rows)})
    frame["x"], frame["z"] = rng.normal(size=(2, len(frame)))
    frame["y"] = frame["x"] + 0.5 * rng.normal(size=len(frame))
    places = load(frame, client="site", target="y").placement
    row = places[(places["part"] == "train") & (places["client"] == "c1")]["row"].iloc[2]
    far = frame.copy()
    far.loc[row, ["x", "y"]] = [2e4, -900.0]
    counts = frame.copy()
    told = load(far, client="site", target="y").schema
    counts.loc[row, "x"] = clip_outliers(2e4, told.limits["x"])
    counts.loc[row, "y"] = clip_outliers(-900.0, told.limits["y"])
    return frame, far, counts


@pytest.mark.parametrize("clients", [2, 3, 6])
def test_a_far_cell_counts_as_the_furthest_that_is_usual(clients):
    """Everything is as with a cell that is usual, in a pooled table as with the schema that a lone client is told."""
    frame, far, counts = far_and_usual(clients)
    known, right = load(far, client="site", target="y"), load(counts, client="site", target="y")
    again = load(far, client="site", target="y", schema=known.schema)
    assert len([note for note in known.notes if "is it right?" in note]) == 2
    assert not any("is it right?" in note for note in right.notes) and not right.schema.limits
    for name in ("mean", "scale", "target_mean", "target_scale"):
        assert getattr(known.schema, name) == getattr(right.schema, name)
    for one in (known, again):
        assert torch.equal(one.train.x, right.train.x) and torch.equal(one.train.y, right.train.y)
    for name in ("x", "y"):
        low, high = frame[name].min(), frame[name].max()
        assert 1.5 * low < counts[name].min() and counts[name].max() < 1.5 * high  # a cell as others have them


@pytest.mark.parametrize("algorithm", ["fedprox_personal", "ditto"])
def test_a_far_training_cell_spoils_nobody_elses_model(algorithm):
    frame, far, _ = far_and_usual(6, 40)
    about = {"client": "site", "target": "y", "algorithm": algorithm, "rounds": 20, "threads": 1}
    right, found = mooring.fit(frame, **about).clients, mooring.fit(far, **about).clients
    others = right["client"] != "c1"
    for model in ("local", "pooled", "personal"):
        assert found[model][others].mean() < 1.1 * right[model][others].mean()


def test_heavy_tails_sparse_columns_and_constant_clients_are_not_refused():
    rng = np.random.default_rng(0)
    n = 4000
    frame = pd.DataFrame(
        {
            "site": rng.integers(0, 40, n).astype(str),
            "income": np.exp(3 * rng.normal(size=n)),
            "visits": np.where(rng.random(n) < 0.03, rng.integers(1, 30, n), 0),
            "bonus": np.where(rng.random(n) < 0.001, 2e6, 0.0),
            "year": rng.integers(1990, 2024, n),
            "y": rng.normal(size=n),
        }
    )
    site = frame["site"].astype(int)
    frame["population"] = site.map(lambda i: 1e3 * 1.5**i)
    frame["units"] = np.where(site == 3, 300, 1) * frame["y"] + rng.normal(size=n)
    clients = load(frame, client="site", target="y")
    assert len(clients) == 40 and not clients.schema.limits


def test_one_client_cannot_move_the_limits():
    """A client whose every cell is absurd is refused itself, not the others."""
    frame = federation(7, 5, holes=0.0)
    victim = frame["site"].iloc[0]
    frame.loc[frame["site"] == victim, "number"] *= 1e12
    with pytest.raises(RequestError, match=f"client '{victim}', column 'number'"):
        load(frame, client="site", target="y")


def test_what_a_survey_says_of_numbers_is_no_cell():
    """Extremes enclose the values, by little; medians are near; values that all rows share are told apart."""
    rng = np.random.default_rng(3)
    for values in (rng.normal(size=40), 1e9 + rng.normal(size=40), rng.lognormal(size=40) * 1e-12):
        found = {key: float(value[0]) for key, value in order_statistics(values, np.zeros(40, int), 1).items()}
        assert not set(found.values()) & set(values)
        assert found["low"] < values.min() and values.max() < found["high"]
        reach = 0.1 * found["off"] * (1 + 1e-6)
        assert values.min() - found["low"] <= reach and found["high"] - values.max() <= reach
        assert abs(found["middle"] - np.sort(values)[19]) <= reach / 2
    small = np.array([0.0, 2.0, 5.0, 3.0, 1.0])
    found = order_statistics(small, np.zeros(5, int), 1)
    assert (found["low"][0], found["high"][0], found["middle"][0]) == (0, 5, 2)
    years = np.repeat([2019.0, 2020.0, 2020.0, 0.0, 7.5], 4)
    found = order_statistics(years, np.repeat(np.arange(5), 4), 5)
    low, high = found["low"], found["high"]
    assert np.array_equal(low, high) and low[0] != low[1] == low[2] and list(low[3:]) == [0.0, 7.5]
    assert abs(low[0] - 2020) < 1 and 2019.0 not in low


def test_a_client_reads_notes_that_name_no_client_but_itself():
    frame = federation(clients=3).drop(columns=["id", "text"])
    frame["mixed"] = np.where(frame["site"] == "9", "red", np.arange(len(frame)).astype(str))
    frame.loc[frame.index[frame["site"] == "b"][0], "number"] = 1e3  # an outlier cell of one client
    parts = alone(frame)
    for part in parts:
        if "9" not in part.clients:
            part.table.frame["mixed"] = pd.to_numeric(part.table.frame["mixed"])
    notes = plan_schema(merge_statistics(map(survey_table, parts))).notes
    by_column = {note.column: note for note in notes if note.clients}
    assert by_column["mixed"].clients == ("10", "9") and "client '10' and text at client '9'" in by_column["mixed"]
    assert not any(by_column["mixed"].is_visible_to(name) for name in ("10", "9", "b"))
    about_number = by_column["number"]
    assert (
        [name for name in ("10", "9", "b") if about_number.is_visible_to(name)] == list(about_number.clients) == ["b"]
    )
    readable = notes_visible_to([*notes, "for all"], "b")
    assert by_column["number"] in readable and by_column["mixed"] not in readable and "for all" in readable
