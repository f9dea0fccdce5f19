"""`check` collects everything that is wrong."""

import numpy as np
import pandas as pd
import pytest

from mooring.core.errors import RequestError
from mooring.data.checks import check
from mooring.data.sources import load


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


def test_clean_data_has_no_findings():
    assert run(clean()) == []


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
    assert hit(found, "error", "'tiny' has 1 row", client="tiny")
    assert hit(found, "note", "'id' is a key", column="id")
    assert hit(found, "note", "'same' has the same value everywhere", column="same")
    assert hit(found, "note", "24.8% of the values are missing", column="c")
    assert hit(found, "warning", "'s1' has no value of column 'c'", client="s1", column="c")
    order = ["error", "warning", "note"]
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
    frame = clean().replace({"site": {"s1": "S0 "}})
    assert hit(run(frame), "warning", "'s0' and 'S0 '", client="S0 ", column="site")


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
    assert hit(run(clean(clients=1)), "warning", "one client only", column="site")


def test_the_target_among_the_features():
    assert hit(run(clean().assign(copy=lambda f: f["y"])), "warning", "'copy' equals the target", column="copy")


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
        lambda f: f.iloc[:32],
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
    assert hit(check("exam"), "warning", "'48' has 2 rows", client="48")
