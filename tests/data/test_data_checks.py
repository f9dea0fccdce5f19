"""`check` collects everything that is wrong."""

import numpy as np
import pandas as pd
import pytest

from mooring.core.errors import RequestError
from mooring.data.data_checks import check
from mooring.data.loading import load
from tests.support.tables import EXAM


def clean(clients=4, rows=30, seed=0):
    rng = np.random.default_rng(seed)
    n = clients * rows
    return pd.DataFrame(
        {
            "site": np.repeat([f"s{i}" for i in range(clients)], rows),
            "a": rng.normal(size=n),
            "b": rng.normal(size=n),
            "c": rng.choice(list("xyz"), n),
            "y": rng.permutation(np.arange(n) % 2),
        }
    )


def run(frame, **options):
    return check(frame, **({"client": "site", "target": "y"} | options))


def hit(findings, severity, words, client=None, column=None):
    return any(
        f.severity == severity and words in f.sentence and f.client == client and f.column == column for f in findings
    )


def test_clean_data_has_no_findings_but_what_the_target_is_taken_for():
    (only,) = run(clean())
    assert only.severity == "target" and only.column == "y"
    assert only.sentence == (
        "Target 'y' is taken as binary: 2 classes, '0' (60 rows), '1' (60 rows); another kind can be asked for."
    )
    (asked,) = run(clean().assign(y=lambda f: f["a"] + f["b"]), target_type="regression")
    assert "is taken as regression: numbers from" in asked.sentence and "another kind" not in asked.sentence
    many = run(clean().assign(y=np.arange(120) % 7))
    assert (
        many[0].severity == "target" and "7 classes, '0' (18 rows)" in many[0].sentence and "2 more" in many[0].sentence
    )


def test_many_things_at_once():
    frame = clean().astype({"b": object, "c": object})
    frame.loc[3, "b"] = "oops"
    frame.loc[[5, 6], "a"] = np.inf
    frame.loc[[8, 9], "y"] = np.nan
    frame["id"] = np.arange(len(frame))
    frame["same"] = 1
    frame["c"] = frame["c"].mask(frame["site"] == "s1")
    tiny = frame.iloc[[0]].assign(site="tiny")
    found = run(pd.concat([frame, tiny], ignore_index=True))
    assert hit(found, "error", "'oops' in the data frame, row 4", column="b")
    assert hit(found, "error", "2 infinite values, the first in the data frame, row 6", column="a")
    assert hit(found, "error", "row 9, target column 'y': the value is missing", column="y")
    assert hit(found, "warning", "'tiny' has 1 row; at least 5 are needed", client="tiny")
    assert hit(found, "warning", "gets the global model", client="tiny")
    assert hit(found, "note", "'id' is a key", column="id")
    assert hit(found, "note", "'same' has the same value everywhere", column="same")
    assert hit(found, "note", "24.8% of the values are missing", column="c")
    assert hit(found, "warning", "'s1' has no value of column 'c'", client="s1", column="c")
    order = ["target", "error", "warning", "note"]
    assert [f.severity for f in found] == sorted((f.severity for f in found), key=order.index)


def test_one_class_clients():
    frame = clean()
    frame.loc[frame["site"] == "s2", "y"] = 1
    assert hit(run(frame), "warning", "'s2' has one class only, '1'", client="s2", column="y")


def test_constant_columns_within_clients():
    frame = clean()
    frame.loc[frame["site"] == "s3", "a"] = 2.5
    assert hit(run(frame), "note", "'s3' has one value only of column 'a'", client="s3", column="a")
    many = clean(clients=9).assign(a=lambda f: f["site"].str[1:].astype(float))
    assert hit(run(many), "note", "9 of 9 clients", column="a")


def test_copies():
    frame = clean()
    frame = pd.concat([frame, frame[frame["site"] == "s0"].assign(site="s9")], ignore_index=True)
    assert hit(run(frame), "warning", "'s0' and 's9' hold exactly the same rows", client="s9")
    twice = pd.concat([clean(), clean().iloc[[0, 1]]], ignore_index=True)
    assert hit(run(twice), "note", "'s0' has rows that repeat", client="s0")


def test_names_that_differ_in_case_only():
    frame = clean().replace({"site": {"s1": "S0"}})
    assert hit(run(frame), "warning", "'S0' and 's0'", client="s0", column="site")


def test_unseen_classes_in_test():
    frame = clean().assign(y=lambda f: f["y"].map({0: "no", 1: "yes"}), split="train")
    frame.loc[frame.index % 5 == 0, "split"] = "test"
    frame.loc[frame.index % 5 == 1, "split"] = "validation"
    frame.loc[10, "y"] = "new"
    assert hit(run(frame), "warning", "'new' are in the test rows", column="y")


def test_lopsided_sizes_and_lone_clients():
    frame = clean(clients=3, rows=5)
    big = pd.concat([frame, clean(clients=1, rows=600, seed=1).assign(site="big")], ignore_index=True)
    assert hit(run(big), "warning", "'big' has 600 rows, 120 times", client="big")
    assert hit(run(clean(clients=1)), "error", "one client only", column="site")


def test_the_target_among_the_features():
    assert hit(run(clean().assign(copy=lambda f: f["y"])), "error", "'copy' equals the target", column="copy")


def test_numbers_of_rows_within_clients():
    frame = clean(rows=40).assign(pupil=lambda f: f.groupby("site").cumcount())
    assert hit(run(frame), "note", "'pupil' hardly repeats", column="pupil")
    assert "pupil" in load(frame, client="site", target="y").features


def test_missing_columns_are_all_named():
    found = run(clean(), client="where", target="what")
    assert hit(found, "error", "client column 'where'", column="where")
    assert hit(found, "error", "target column 'what'", column="what")


def test_unreadable_sources(tmp_path):
    (found,) = check(tmp_path / "none.csv", client="a", target="b")
    assert found.severity == "error" and "none.csv" in found.sentence


@pytest.mark.parametrize(
    "spoil",
    [
        lambda f: f.assign(a=np.inf),
        lambda f: f.assign(y=1),
        lambda f: f.assign(y=np.nan),
        lambda f: f.assign(site=None),
        lambda f: f.iloc[:34],
        lambda f: f.groupby("site").head(2),
        lambda f: f.assign(a=np.where(np.arange(len(f)) == 7, 1e30, f["a"])),
        lambda f: f.assign(a=["no", *range(len(f) - 1)]),
        lambda f: f[["site", "y"]],
    ],
)
def test_what_load_refuses_is_an_error(spoil):
    frame = spoil(clean())
    with pytest.raises(RequestError):
        load(frame, client="site", target="y")
    assert any(f.severity == "error" for f in run(frame))


def test_small_clients_that_will_be_left_out_are_a_warning():
    assert hit(run(clean().iloc[:32], drop_small=True), "warning", "it is left out", client="s1")
    assert hit(check(EXAM.path, **EXAM.columns), "warning", "'48' has 2 rows", client="48")


def test_rows_without_a_target_may_be_dropped():
    frame = clean().assign(y=lambda f: f["y"].where(np.arange(len(f)) % 10 > 0))
    assert hit(run(frame), "error", "the value is missing, as in 12 of 120 rows", column="y")
    found = run(frame, drop_missing_target=True)
    assert found[0].severity == "target" and not any(f.severity == "error" for f in found)
    assert hit(found, "note", "12 rows of 120 left out: target 'y' is missing there", column="y")
    clients = load(frame, client="site", target="y", drop_missing_target=True)
    assert len(clients.placement) == 108 and any("12 rows of 120 left out" in note for note in clients.notes)
    assert not set(clients.placement["row"]) & set(range(0, 120, 10))
    with pytest.raises(RequestError, match="'y' has no value in any row"):
        load(frame.assign(y=np.nan), client="site", target="y", drop_missing_target=True)


def test_extreme_cells_are_named():
    frame = clean()
    frame.loc[40, "a"] = 1e30
    frame.loc[70, "b"] = -4e4
    found = run(frame)
    assert hit(found, "error", "1e+30 lies", client="s1", column="a")
    assert hit(found, "warning", "-40000 lies", client="s2", column="b")
    target = clean().assign(y=lambda f: f["a"])
    target.loc[40, "y"] = 1e300
    assert hit(run(target), "error", "1e+300 lies", client="s1", column="y")


@pytest.mark.parametrize("code", [-999, 999, -9, 9999])
def test_codes_for_missing_values(code):
    frame = clean()
    frame.loc[[3, 50, 99], "a"] = code
    assert hit(run(frame), "warning", f"{code} stands in 3 rows", column="a")
    once = clean()
    once.loc[3, "a"] = code
    assert not any("stands in" in f.sentence for f in run(once))


def test_amounts_that_look_like_codes_are_not_suspected():
    rng = np.random.default_rng(0)
    for amounts in (rng.integers(0, 1000, 120), np.where(rng.random(120) < 0.5, 99, 0), rng.integers(900, 1000, 120)):
        assert not any("stands in" in f.sentence for f in run(clean().assign(n=amounts)))


def test_levels_spelt_twice():
    frame = clean().assign(c=np.tile(["Yes", "yes", "No", "n o"], 30), y=np.tile(["A", "a ", "B"], 40))
    found = run(frame)
    assert hit(found, "warning", "'Yes' and 'yes' differ in case or spaces only", column="c")
    assert hit(found, "warning", "classes 'A' and 'a ' differ", column="y")
    assert not any("'No' and 'n o'" in f.sentence for f in found)


def test_columns_that_give_the_target_away():
    rng = np.random.default_rng(1)
    frame = clean(rows=60)
    n = len(frame)
    y = frame["y"].to_numpy()
    giving = {
        "word": np.where(y == 1, "early", "late"),
        "ranges": y + 0.9 * rng.random(n),
        "reversed": -3.0 * y,
    }
    honest = {
        "noisy": y + rng.normal(size=n),
        "flipped": np.where(rng.random(n) < 0.03, 1 - y, y),
        "levels": rng.integers(0, 5, n),
    }
    found = run(frame.assign(**giving, **honest))
    told = {f.column for f in found if "almost perfectly" in f.sentence}
    assert told == set(giving)
    number = frame.assign(y=lambda f: f["a"] * 3 + f["b"])
    number["cents"] = 100 * number["y"] + 0.1 * rng.normal(size=n)
    number["half"] = number["y"] + number["c"].map({"x": 0, "y": 1, "z": 2})
    found = run(number)
    assert {f.column for f in found if "almost perfectly" in f.sentence} == {"cents"}
    three = frame.assign(y=np.arange(n) % 3, ranges=lambda f: f["y"] + 0.9 * rng.random(n), noise=rng.normal(size=n))
    assert {f.column for f in run(three) if "almost perfectly" in f.sentence} == {"ranges"}
    one_sided = frame.assign(y=(np.arange(n) < 2).astype(int), noise=rng.normal(size=n))
    assert not any("almost perfectly" in f.sentence for f in run(one_sided))


def test_many_findings_of_one_form_are_one_line():
    rng = np.random.default_rng(0)
    holes = {f"h{j}": np.where(rng.random(120) < 0.1, np.nan, rng.normal(size=120)) for j in range(8)}
    found = run(clean().assign(**holes))
    (line,) = [f for f in found if "values are missing" in f.sentence]
    assert line.count == 8 and line.column is None and "7 times more: 'h1', 'h2'" in line.sentence
    few = run(clean().assign(**{name: holes[name] for name in ("h0", "h1")}))
    assert [f.count for f in few if "values are missing" in f.sentence] == [1, 1]
