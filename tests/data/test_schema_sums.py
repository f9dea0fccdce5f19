"""Clients that only add up numbers agree on the schema of the pooled table."""

import re
import time
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooring.core.errors import RequestError
from mooring.core.summing import Sum, run_together
from mooring.data import level_sums
from mooring.data.column_roles import client_codes, find_roles, subset
from mooring.data.column_types import MAX_LEVEL_BYTES
from mooring.data.file_readers import CellReading
from mooring.data.level_sums import hash_text, is_single
from mooring.data.load_options import LoadOptions, text_columns
from mooring.data.loading import read_client_table
from mooring.data.schema_client import ClientTable, agree_on_schema
from mooring.data.schema_sums import LEVELS, MIN_LEVEL_ROWS, NAMES, SchemaOptions, agree_by_sums
from mooring.data.table_sources import read_source
from mooring.data.tables import Table
from mooring.data.vote_bins import COARSE_SIGNED, COUNT_GRID, FINE, RELATIVE, RELATIVE_SIGNED
from tests.support.repository import ROOT

TABLES = ROOT / "tests" / "data" / "tables"
SECRET = b"of the clients"


def planted(seed=0, clients=5, rows=600, offset=0.0, holes=0.1, target="number"):
    """A table with all kinds of columns, useful and useless, common and rare levels."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "site": rng.permutation(np.resize([f"s{i}" for i in range(clients)], rows)),
            "number": offset + rng.normal(size=rows),
            "whole": rng.integers(0, 9, rows),
            "colour": rng.choice(["red", "green", "blue", "mauve", "x" * 80], rows, p=[0.36, 0.3, 0.14, 0.02, 0.18]),
            "smoker": rng.random(rows) < 0.4,
            "day": pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.integers(0, 180, rows), "D"),
            "code": rng.choice(["0", "1", "2", "3+"], rows),
            "id": rng.permutation(rows) + 1000,
            "text": [f"note {i}" for i in range(rows)],
            "street": rng.choice([f"street {i}" for i in range(200)], rows),
            "same": 1.5,
            "empty": np.nan,
            "year": rng.choice([2019, 2020], rows),
            "tiny": 1e-30 * rng.normal(size=rows),
            "large": 1e60 * rng.normal(size=rows),
            "bonus": np.where(rng.random(rows) < 0.01, 2e6, 0.0),
            "sparse": np.where(rng.random(rows) < 0.05, 1e-9, 0.0),
            "skewed": np.exp(rng.normal(size=rows)),
        }
    ).astype({"colour": object})
    place = frame["site"].str[1:].astype(int)
    frame["row number"] = frame.groupby("site").cumcount() + 1
    frame["level"], frame["founded"], frame["population"] = place / 7, 2015 + place, 1e3 * 1.5**place
    frame["y"] = {
        "number": rng.normal(size=rows) * 7 + offset,
        "binary": rng.choice(["N", "Y"], rows),
        "classes": rng.integers(0, 4, rows),
        "count": rng.poisson(3, rows),
    }[target]
    for column in ("number", "colour", "day"):
        frame.loc[rng.random(rows) < holes, column] = None
    return frame


def pooled_member(frame, drop=(), **more):
    table = Table(frame.reset_index(drop=True), "table", client="site", target="y")
    roles = find_roles(table)
    code, clients = client_codes(table, roles.client)
    features = [c for c in frame.columns if c not in ("site", "y", roles.split, *drop)]
    return ClientTable(table, roles, code, clients, features, **more)


def divide(member):
    """Return a member per client."""
    return [
        replace(
            member,
            table=subset(member.table, member.code == i),
            code=np.zeros((member.code == i).sum(), dtype=np.int64),
            clients=[name],
        )
        for i, name in enumerate(member.clients)
    ]


def listen(program, totals):
    """Run a program and keep the totals that it gets, by step."""
    part = next(program)
    while True:
        total = yield part
        totals.append((part.step, total))
        try:
            part = program.send(total)
        except StopIteration as end:
            return end.value


def agree(members, columns=None, record=None, secret=SECRET, totals=None, rereads=None, **options):
    """Return all agreements; the last one is the server's."""
    first = members[0]
    options = SchemaOptions(**{"target": "y", "client": "site", "target_type": first.kind} | options)
    columns = first.features if columns is None else columns
    server = agree_by_sums(None, columns, options, b"", len(members))
    programs = [
        *(
            agree_by_sums(member, columns, options, secret, len(members), reread)
            for member, reread in zip(members, rereads or [None] * len(members))
        ),
        listen(server, [] if totals is None else totals),
    ]
    return run_together(programs, record)


def require_same(schema, pooled, tolerance=1e-9, ignored=()):
    """Require the same decisions, and the same numbers to a part of a scale, or of a number's last digits."""
    numbers = {"mean", "scale", "target_mean", "target_scale", "columns"}
    for name in set(type(pooled).model_fields) - numbers - set(ignored):
        assert getattr(schema, name) == getattr(pooled, name), name
    for column, other in zip(schema.columns, pooled.columns, strict=True):
        fill = other.fill if isinstance(other.fill, str) else pytest.approx(other.fill, rel=1e-9)
        assert column == other.model_copy(update={"fill": column.fill})
        assert column.fill == fill or other.kind != "category"
    scale, mean = np.array(pooled.scale), np.array(pooled.mean)
    digits = 4 * np.finfo(float).eps * np.abs(mean)
    assert (np.abs(np.array(schema.mean) - mean) <= tolerance * scale + digits).all()
    np.testing.assert_allclose(schema.scale, scale, rtol=tolerance)
    slack = tolerance * pooled.target_scale + 4 * np.finfo(float).eps * abs(pooled.target_mean)
    assert abs(schema.target_mean - pooled.target_mean) <= slack
    assert schema.target_scale == pytest.approx(pooled.target_scale, rel=tolerance)


def check_against_pooled(frame, ignored=(), drop=(), keep=False, rare=1, **more):
    member = pooled_member(frame, drop, **more)
    pooled, plan, _ = agree_on_schema([member], keep_useless=keep, rare=max(rare, MIN_LEVEL_ROWS))
    results = agree(divide(member), min_category_rows=rare, keeps_useless=keep)
    for result in results:
        assert result.schema == results[0].schema and result.plan == results[0].plan
        assert result.notes == results[0].notes
    assert results[-1].reading is None and results[-1].own_notes == []
    require_same(results[0].schema, pooled, ignored=ignored)
    return pooled, plan, results


@pytest.mark.parametrize(
    "source, options",
    [
        ("heart", {}),
        ("parkinsons", {}),
        (TABLES / "exam.csv", {"client": "school", "target": "normexam", "drop_small": True}),
        (TABLES / "hsb82.csv", {"client": "school", "target": "mAch"}),
        (TABLES / "contraception.csv", {"client": "district", "target": "use", "drop_small": True}),
    ],
    ids=["heart", "parkinsons", "exam", "hsb82", "contraception"],
)
def test_real_tables_have_the_schema_of_the_pooled_table(source, options):
    member, _, _ = read_client_table(source if isinstance(source, str) else str(source), LoadOptions.make(options))
    pooled, plan, _ = agree_on_schema([member], rare=MIN_LEVEL_ROWS, title="the clients")
    results = agree(divide(member), target=member.roles.target, client=member.roles.client)
    assert all(result.schema == results[0].schema for result in results)
    require_same(results[0].schema, pooled, tolerance=1e-12)
    assert not plan.limits and results[0].notes == list(plan.notes)


@settings(deadline=None, max_examples=12)
@given(
    seed=st.integers(0, 10**6),
    clients=st.integers(2, 7),
    offset=st.sampled_from([0.0, 2e9, -3e-7]),
    holes=st.sampled_from([0.0, 0.3]),
    target=st.sampled_from(["number", "binary", "classes", "count"]),
    keep=st.booleans(),
)
def test_planted_tables_have_the_schema_of_the_pooled_table(seed, clients, offset, holes, target, keep):
    frame = planted(seed, clients, 120 * clients, offset, holes, target)
    frame["colour"] = frame["colour"].mask(frame["colour"] == "mauve")
    kind = "count" if target == "count" else "auto"
    drop = ("text", "street") if keep else ()
    pooled, _, (first, *_) = check_against_pooled(frame, ("max_count",), drop, keep, kind=kind)
    if target == "count":
        assert pooled.max_count <= first.schema.max_count <= 1.19 * pooled.max_count + 1
    if not keep:
        assert {"id", "text", "street", "same", "empty"} <= set(first.schema.dropped)


def test_the_rows_of_a_client_are_encoded_as_in_the_pooled_table():
    member = pooled_member(planted(3))
    _, _, (reading,) = agree_on_schema([member], rare=MIN_LEVEL_ROWS)
    results = agree(divide(member))
    for i, result in enumerate(results[:-1]):
        own = member.code == i
        assert np.array_equal(result.reading.part, reading.part[own])
        assert np.array_equal(result.reading.target.y, reading.target.y[own])
        for name, values in result.reading.columns.items():
            assert list(values.dropna() if hasattr(values, "dropna") else values[~np.isnan(values)]) == [
                value for value in reading.columns[name][own] if value == value
            ]


def levels_of(schema, name):
    return next(column for column in schema.columns if column.name == name)


def test_rare_levels_and_levels_of_few_clients_count_as_other():
    frame = planted(5, holes=0.0).assign(split="train")
    frame["colour"] = "red"
    for level, sites, rows in (("blue", "s0 s1 s2", 4), ("lonely", "s3 s4", 30), ("scarce", "s0 s1 s2", 3)):
        for site in sites.split():
            frame.loc[frame.index[(frame["site"] == site) & (frame["colour"] == "red")][:rows], "colour"] = level
    totals = []
    result, *_ = agree(divide(pooled_member(frame)), totals=totals)
    column = levels_of(result.schema, "colour")
    assert column.levels == ("blue", "red", "other") and column.other
    features = list(result.schema.features)
    means = [result.schema.mean[features.index(f"colour={level}")] for level in column.levels]
    counts = frame["colour"].value_counts()
    np.testing.assert_allclose(means, [counts["blue"] / 600, counts["red"] / 600, (60 + 9) / 600], rtol=1e-12)
    (names,) = (total for step, total in totals if step is NAMES)
    assert (names.reshape(-1, MAX_LEVEL_BYTES + 1)[:, 0] > 0).all()


@pytest.mark.parametrize("rows", [3, 30])
def test_no_total_depends_on_the_name_of_a_level_of_one_client(rows):
    """A level of one client moves a count to another bucket, which only holders of the secret can tell from others."""
    frame = planted(6, holes=0.0).assign(split="train")
    frame["colour"] = np.where(np.arange(600) % 2, "red", "blue")
    own = frame.index[frame["site"] == "s2"][:rows]
    heard = []
    for name in ("Alice Smith", "HIV positive"):
        frame.loc[own, "colour"] = name
        totals = []
        results = agree(divide(pooled_member(frame)), totals=totals)
        assert levels_of(results[0].schema, "colour").levels == ("blue", "red", "other")
        assert name not in repr(results[-1])
        heard.append((results[-1], totals))
    (first, totals), (second, others) = heard
    assert first.schema == second.schema and first.plan == second.plan
    for (step, total), (_, other) in zip(totals, others, strict=True):
        if step is LEVELS:
            assert 0 < (total != other).sum() <= 6  # rows, client and code of two buckets
            counts, other_counts = (values[values < 2**20] for values in (total, other))  # without codes
            assert np.array_equal(np.sort(counts), np.sort(other_counts))
        else:
            assert np.array_equal(total, other), step.name


class Untouchable:
    """A cell that must not be read."""

    def _refuse(self, *_):
        raise AssertionError("a dropped column was read")

    __str__ = __repr__ = __hash__ = __eq__ = __lt__ = __float__ = _refuse


def test_dropped_columns_are_not_read():
    frame = planted(7)
    expected = agree(divide(pooled_member(frame)))[-1].schema
    frame["hiv"] = pd.Series([Untouchable() for _ in range(len(frame))], dtype=object)
    members = divide(pooled_member(frame, drop=("hiv",)))
    with pytest.raises(AssertionError, match="was read"):
        agree(members, columns=[*members[0].features, "hiv"])
    assert agree(members)[-1].schema == expected


def test_two_clients_name_the_levels_that_both_have():
    frame = planted(8, 2, 400, holes=0.0)
    frame["colour"] = np.where(np.arange(400) % 4 > 1, "red", "blue")
    frame.loc[frame.index[frame["site"] == "s1"][:50], "colour"] = "own"
    result, *_ = agree(divide(pooled_member(frame)))
    assert levels_of(result.schema, "colour").levels == ("blue", "red", "other")


def test_levels_that_share_a_bucket_are_separated(monkeypatch):
    frame = planted(9)
    expected = agree(divide(pooled_member(frame)))[0].schema
    monkeypatch.setattr(level_sums, "BUCKETS", 64)
    record = []
    assert agree(divide(pooled_member(frame)), record=record)[0].schema == expected
    assert "schema: separation" in dict(record)


def test_classes_that_are_too_rare_are_refused_in_one_sentence():
    frame = planted(10, target="binary")
    frame.loc[frame.index[frame["site"] == "s0"][:30], "y"] = "maybe"
    with pytest.raises(
        RequestError, match=r"1 of 3 classes have fewer than 10 rows, or are at fewer than 3 clients.*Me"
    ):
        agree(divide(pooled_member(frame)))
    with pytest.raises(RequestError, match="holds 3 values; a binary target has two"):
        agree(divide(pooled_member(frame, kind="binary")))
    frame["y"] = "yes"
    with pytest.raises(RequestError, match="one class only; at least two"):
        agree(divide(pooled_member(frame)))
    frame["y"] = "x" * 70
    with pytest.raises(RequestError, match="longer than 64 bytes"):
        agree(divide(pooled_member(frame)))
    frame["y"] = frame["site"].str[1:].astype(int) / 7  # one number per client: amounts, which need no names
    assert agree(divide(pooled_member(frame)))[0].schema.kind == "regression"


def test_targets_that_differ_between_clients_or_do_not_vary_are_refused():
    frame = planted(11)
    texts = frame.astype({"y": object})
    texts.loc[texts["site"] == "s1", "y"] = "high"
    members = [*divide(pooled_member(frame))]
    members[1] = replace(members[1], table=subset(pooled_member(texts).table, pooled_member(texts).code == 1))
    with pytest.raises(RequestError, match="numbers at some clients, but text at others"):
        agree(members)
    with pytest.raises(RequestError, match="the same value in every row"):
        agree(divide(pooled_member(frame.assign(y=2.5), kind="regression")))


def test_a_column_that_is_text_at_one_client():
    """Texts among numbers make a category, and codes that look like numbers elsewhere keep their spelling."""
    frame = planted(12, holes=0.0)
    frame["code"] = np.where(frame["site"] == "s0", "3+", (np.arange(600) % 3).astype(str))
    frame.loc[frame.index[frame["site"] != "s0"][::7], "code"] = "3+"
    member = pooled_member(frame)
    members = divide(member)
    numbers = members[1].table.frame
    numbers = numbers.assign(code=pd.to_numeric(numbers["code"].mask(numbers["code"] == "3+", "2")))
    members[1] = replace(members[1], table=replace(members[1].table, frame=numbers))
    result, *_ = agree(members)
    assert levels_of(result.schema, "code").levels == ("0", "1", "2", "3+")
    assert result.notes == ["Column 'code' is numbers at some clients and text at others; it was taken as text."]


def test_files_are_read_anew_where_the_plan_says_that_codes_are_text(tmp_path):
    for k, site in enumerate("abc"):
        odd = "3+" if k == 1 else "2"
        lines = [f"{site},{['007', '1.50', odd][i % 3]},{i / 7},{i * 0.37 + k:.2f}\n" for i in range(60)]
        (tmp_path / f"{site}.csv").write_text("site,code,x,y\n" + "".join(lines))

    def read(site, plan=None):
        cells = CellReading(frozenset(text_columns(plan)), frozenset({"site"}))
        return pooled_member(read_source(tmp_path / f"{site}.csv", cells).frame)

    members = [read(site) for site in "abc"]
    assert members[0].table.frame["code"].dtype == float
    result, *_ = agree(members, rereads=[lambda plan, site=site: read(site, plan) for site in "abc"])
    assert levels_of(result.schema, "code").levels == ("1.50", "007", "other")


@pytest.mark.parametrize("value, column", [(2e4, "number"), (-900.0, "y"), (5e4, "number")])
@pytest.mark.parametrize("clients", [2, 3, 6])
def test_outlier_cells_are_clipped_within_the_bins_and_known_to_their_client_alone(value, column, clients):
    frame = planted(13, clients, 100 * clients, holes=0.0)[["site", "number", "whole", "y"]]
    row = frame.index[frame["site"] == "s1"][3]
    frame.loc[row, column] = value
    member = pooled_member(frame)
    pooled, _, _ = agree_on_schema([member])
    results = agree(divide(member))
    assert set(results[0].schema.limits) == set(pooled.limits) == {column}
    np.testing.assert_allclose(results[0].schema.limits[column], pooled.limits[column], rtol=0.3)
    for result, name in zip(results, [*member.clients, "server"]):
        assert len(result.own_notes) == (name == "s1")
        assert f"{value:.6g}" not in "".join(result.notes) and "s1" not in "".join(result.notes)
    assert f"{value:.6g} lies" in "".join(results[1].own_notes)
    clipped = frame.copy()
    low, high = results[0].schema.limits[column]
    clipped.loc[row, column] = (low + high) / 2 + np.sign(value) * (high - low) / 40
    expected, _, _ = agree_on_schema([pooled_member(clipped)])
    require_same(results[0].schema, expected, ignored=("limits",))


def test_columns_of_numbers_whose_squares_overflow_are_refused():
    frame = planted(14, holes=0.0)[["site", "number", "whole", "y"]]
    frame["number"] *= 1e120
    with pytest.raises(RequestError, match=r"column 'number': .* for everybody"):
        agree(divide(pooled_member(frame)))


@pytest.mark.parametrize("value", [1e30, -1e30, 1e300, 1e9])
def test_a_cell_that_would_spoil_the_scale_is_refused_at_its_client(value):
    frame = planted(14, holes=0.0)[["site", "number", "whole", "y"]]
    frame.loc[frame.index[frame["site"] == "s1"][3], "number"] = value
    with pytest.raises(RequestError, match=f"column 'number': {re.escape(f'{value:.6g}')} lies .* for everybody"):
        agree(divide(pooled_member(frame)))


def test_columns_that_are_empty_at_a_client():
    frame = planted(20)
    frame.loc[frame["site"] == "s1", ["number", "colour", "day", "whole"]] = None
    _, _, (first, *_) = check_against_pooled(frame)
    for name in ("number", "colour", "day", "whole"):
        assert levels_of(first.schema, name).flagged


def test_values_of_a_client_that_are_all_equal_are_constant_only_if_they_are_elsewhere():
    frame = planted(15)[["site", "number", "y"]]
    place = frame["site"].str[1:].astype(int)
    frame["equal"], frame["near"] = 0.1 + 0.2, np.where(place == 2, 0.3, 0.1 + 0.2)
    _, _, (first, *_) = check_against_pooled(frame)
    assert first.schema.dropped == {"equal": "has the same value everywhere"}


def test_the_number_of_steps_and_of_numbers_is_bounded():
    record = []
    frame = planted(16, 12, 1800)
    agree(divide(pooled_member(frame)), record=record)
    names = [name for name, _ in record]
    steps = ["survey", "ranges", "centers", "distances", "levels", "names", "tally", "spread"]
    assert names == [f"schema: {step}" for step in steps]
    columns, numbers, categories = len(frame.columns) - 1, dict(record), 5  # with months and weekdays
    assert numbers["schema: survey"] <= 250 * columns
    assert numbers["schema: ranges"] <= (3 * 16 * 12 + 1) * columns
    assert numbers["schema: centers"] <= 220 * columns
    assert numbers["schema: distances"] <= 4 * 220 * columns
    assert numbers["schema: levels"] <= 3 * 4096 * categories + 250 * columns
    assert numbers["schema: names"] <= 65 * 50 * categories
    assert max(len(grid) for grid in (COARSE_SIGNED, RELATIVE, RELATIVE_SIGNED)) <= 220


def test_speed():
    frame = planted(17, 16, 3200)
    member = pooled_member(frame[["site", *frame.columns.drop(["site", "y"])[:20], "y"]])
    members = divide(member)
    start = time.process_time()
    agree(members)
    assert time.process_time() - start < 2


def test_what_cannot_be_agreed_on_is_refused():
    members = divide(pooled_member(planted(18)))
    with pytest.raises(RequestError, match="a formula cannot be agreed on by sums"):
        agree(members, formula="y ~ number")
    with pytest.raises(RequestError, match="the agreed columns 'other' are missing"):
        agree(members, columns=["number", "other"])
    with pytest.raises(RequestError, match="'y' here and 'number' elsewhere"):
        agree(members, columns=["whole"], target="number")
    empty = [replace(m, table=replace(m.table, frame=m.table.frame.assign(split="test"))) for m in members]
    empty = [replace(m, roles=m.roles._replace(split="split")) for m in empty]
    with pytest.raises(RequestError, match="no client has a training row"):
        agree(empty)
    with pytest.raises(RequestError, match="4 of 5 clients take part"):
        run_together([agree_by_sums(m, ["number"], SchemaOptions("y"), SECRET, 5) for m in members[:4]])


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), exponent=st.integers(-20, 40), clients=st.integers(1, 9))
def test_bins_contain_their_values_and_quantiles_are_those_of_numpy(seed, exponent, clients):
    values = np.random.default_rng(seed).normal(size=clients) * 2.0**exponent
    for grid, numbers in (
        (COARSE_SIGNED, values),
        (RELATIVE_SIGNED, values),
        (FINE, np.abs(values)),
        (RELATIVE, np.abs(values)),
        (COUNT_GRID, np.ceil(np.abs(values))),
    ):
        bins = grid.place(numbers)
        assert (grid.lower[bins] <= numbers).all() and (numbers <= grid.upper[bins]).all()
        votes = np.sum([grid.vote(value) for value in numbers], axis=0)
        for share in (0, 0.25, 0.5, 0.75):
            exact = np.quantile(numbers, share, method="inverted_cdf")
            assert grid.quantile(votes, share) == grid.place(exact)
        middle = np.sort(numbers)[[(clients - 1) // 2, clients // 2]]
        assert grid.median(votes) == grid.center[grid.place(middle)].mean()
    fine = FINE.edges[np.abs(np.log2(FINE.edges)) <= 30]
    assert (fine[1:] / fine[:-1]).max() < 1.19


@settings(max_examples=60)
@given(counts=st.lists(st.integers(0, 5), min_size=2, max_size=4), seed=st.integers(0, 10**6))
def test_sums_of_different_codes_are_no_code(counts, seed):
    codes = [hash_text(SECRET, seed, k)[1] for k in range(len(counts))]
    total, used = sum(n * code for n, code in zip(counts, codes)), sum(n > 0 for n in counts)
    assert is_single(float(total), float(sum(counts))) == (used == 1)


def test_parts_are_integers_that_masks_can_hide():
    """All but the moments are whole numbers; the moments are at most one."""
    members = divide(pooled_member(planted(19)))
    parts = []

    def watch(program):
        part = next(program)
        while True:
            assert isinstance(part, Sum)
            parts.append(part)
            total = yield part
            try:
                part = program.send(total)
            except StopIteration as end:
                return end.value

    options = SchemaOptions("y", "site")
    run_together([watch(agree_by_sums(m, m.features, options, SECRET, 5)) for m in members])
    for part in parts:
        if part.step.quantum == 1:
            assert np.array_equal(part.values, np.rint(part.values))
        else:
            assert np.abs(part.values).max() <= 1.1
