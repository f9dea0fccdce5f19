"""`load` from every kind of source."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from mooring.core.errors import RequestError
from mooring.data import datasets
from mooring.data.clients import from_arrays
from mooring.data.loading import encode_new_rows, load
from tests.support.tables import CONTRACEPTION, EXAM, HSB82, TABLES

PARTS = ("train", "validation", "test")


def table(sizes=(30, 12, 7), seed=0):
    rng = np.random.default_rng(seed)
    client = np.repeat([f"site {i}" for i in range(len(sizes))], sizes)
    x = rng.normal(size=(sum(sizes), 3))
    frame = pd.DataFrame(x, columns=["u", "v", "w"]).assign(site=client, y=x @ [1.0, -2.0, 0.5] + 10)
    return frame.sample(frac=1, random_state=seed, ignore_index=True)


def equal(one, two):
    assert one.names == two.names and one.features == two.features and one.kind == two.kind
    for part in PARTS:
        a, b = getattr(one, part), getattr(two, part)
        for i in range(len(one)):
            for left, right in zip(a.of(i), b.of(i)):
                torch.testing.assert_close(left, right, rtol=0, atol=0)


def test_every_source_gives_the_same_clients(tmp_path):
    frame = table().sort_values("site", kind="stable", ignore_index=True)
    loaded = load(frame, client="site", target="y")
    frame.to_csv(tmp_path / "all.csv", index=False)
    frame.to_parquet(tmp_path / "all.parquet")
    equal(loaded, load(tmp_path / "all.csv", client="site", target="y"))
    equal(loaded, load(str(tmp_path / "all.parquet"), client="site", target="y"))
    (tmp_path / "sites").mkdir()
    (tmp_path / "sites" / "README.md").write_text("one table per site")
    own = {name: rows.drop(columns="site") for name, rows in frame.groupby("site", sort=False)}
    for k, (name, rows) in enumerate(own.items()):
        if k % 2:
            rows.to_parquet(tmp_path / "sites" / f"{name}.parquet", index=False)
        else:
            rows.to_csv(tmp_path / "sites" / f"{name}.csv", index=False)
    folder = load(tmp_path / "sites", target="y")
    equal(loaded, folder)
    assert any("README.md" in note for note in folder.notes)
    equal(loaded, load(own, target="y"))
    x, group = frame[["u", "v", "w"]], frame["site"]
    equal(loaded, load((x, frame["y"], group)))
    arrays = load((x.to_numpy(), frame["y"].to_numpy(), group.to_numpy()))
    assert arrays.features == ("x0", "x1", "x2")
    torch.testing.assert_close(arrays.train.x, loaded.train.x, rtol=0, atol=0)
    pairs = {name: (rows[["u", "v", "w"]].to_numpy(), rows["y"].to_numpy()) for name, rows in own.items()}
    torch.testing.assert_close(load(pairs).train.x, loaded.train.x, rtol=0, atol=0)
    assert folder.placement["row"].max() == 29  # counted within each file


def test_placement_leads_back_to_the_source():
    frame = table()
    clients = load(frame, client="site", target="y")
    assert sorted(clients.placement["row"]) == list(range(len(frame)))
    for i, name in enumerate(clients.names):
        for part in PARTS:
            x, y = getattr(clients, part).of(i)
            mine = clients.placement.query("client == @name and part == @part")["row"]
            np.testing.assert_allclose(y * clients.target_scale + clients.target_mean, frame["y"][mine])
            raw = x.numpy() * clients.schema.scale + clients.schema.mean
            np.testing.assert_allclose(raw, frame.loc[mine, ["u", "v", "w"]])
            assert (frame["site"][mine] == name).all()


def test_clients_keep_their_split_when_others_leave():
    frame = table((20, 20, 20))
    whole = load(frame, client="site", target="y", seed=5).placement
    fewer = frame[frame["site"] != "site 1"]
    left = load(fewer, client="site", target="y", seed=5).placement
    for name in ("site 0", "site 2"):
        assert whole[whole["client"] == name]["part"].tolist() == left[left["client"] == name]["part"].tolist()


def npz(path, **more):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(40, 3)).astype(np.float32)
    x[rng.random(x.shape) < 0.1] = np.nan
    arrays = {"X": x, "y": rng.integers(0, 2, 40).astype(np.uint8), "group": np.repeat([1, 0], 20).astype(np.int32)}
    np.savez(path, **(arrays | more))
    return arrays


def test_npz_with_all_its_extras(tmp_path):
    split = np.tile(["train"] * 12 + ["validation"] * 3 + ["test"] * 5, 2)
    arrays = npz(
        tmp_path / "heart.npz",
        split=split,
        task=np.array("binary"),
        feature_names=np.array(["age", "chol", "ca"]),
        group_names=np.array(["Basel", "Zürich"]),
    )
    clients = load(tmp_path / "heart.npz")
    assert clients.names == ("Basel", "Zürich") and clients.kind == "binary" and clients.classes == ("0", "1")
    assert clients.features == ("age", "age missing", "chol", "chol missing", "ca", "ca missing")
    assert [int(getattr(clients, part).size[0]) for part in PARTS] == [12, 3, 5]
    assert clients.train.y.dtype == torch.int64 and clients.train.x.dtype == torch.float64
    np.testing.assert_array_equal(clients.test.of(0)[1], arrays["y"][20:][split[20:] == "test"])


def test_npz_with_the_least(tmp_path):
    npz(tmp_path / "heart.npz")
    clients = load(tmp_path / "heart.npz", dtype=torch.float32)
    assert clients.names == ("0", "1") and clients.kind == "binary" and clients.train.x.dtype == torch.float32


def test_given_split_column():
    frame = table((20, 20))
    frame["fold"] = np.random.default_rng(0).choice(PARTS, len(frame))
    clients = load(frame, client="site", target="y", split="fold")
    assert (clients.placement["part"] == frame["fold"]).all()
    assert "fold" not in clients.schema.dropped and clients.features == ("u", "v", "w")
    named = load(frame.rename(columns={"fold": "split"}), client="site", target="y")
    equal(clients, named)


def test_a_client_without_training_rows_is_small():
    frame = table((20, 20)).assign(split="train")
    frame.loc[frame["site"] == "site 1", "split"] = "test"
    with pytest.raises(RequestError, match="'site 1' has 0 training rows; at least 1 is needed"):
        load(frame, client="site", target="y")
    clients = load(frame, client="site", target="y", drop_small=True)
    assert clients.names == ("site 0",)
    assert any("no validation rows" in note for note in clients.notes)


@pytest.mark.parametrize("values", [(1.0, 1.0, 2.5, 3.5), (1, 1, 0, 1)])
def test_training_rows_with_one_target_value_are_refused(values):
    frame = table((20, 20)).assign(split=["train", "train", "test", "validation"] * 10, y=values * 10)
    with pytest.raises(RequestError, match="column 'y' has the same value in every training row"):
        load(frame, client="site", target="y")


def test_the_client_and_the_target_must_be_named():
    with pytest.raises(RequestError, match=r"which column is the client\? Name it with --client; the columns are 'u'"):
        load(table(), target="y")
    with pytest.raises(RequestError, match=r"which column is the target\?"):
        load(table(), client="site")
    renamed = table().rename(columns={"site": "client", "y": "target"})
    assert load(renamed).schema.target == "target"


def test_a_split_column_with_other_values_is_a_feature():
    frame = table((20, 20)).assign(split=["left", "right"] * 20)
    assert "split=right" in load(frame, client="site", target="y").features


def test_unit_and_time_columns():
    frame = table((30, 30)).assign(person=np.arange(60) // 4)
    frame["when"] = pd.Timestamp("2024-01-01") + pd.to_timedelta(np.random.default_rng(0).permutation(60), "D")
    by_unit = load(frame, client="site", target="y", group="person")
    parts = by_unit.placement.assign(person=frame["person"]).groupby(["client", "person"])["part"].nunique()
    assert (parts == 1).all() and "person" not in by_unit.features
    assert any("several clients" in note for note in by_unit.notes)
    by_time = load(frame, client="site", target="y", time_column="when")
    last = by_time.placement.assign(when=frame["when"]).groupby(["client", "part"])["when"].agg(["min", "max"])
    for name in by_time.names:
        assert last.loc[(name, "train"), "max"] <= last.loc[(name, "validation"), "min"]
        assert last.loc[(name, "validation"), "max"] <= last.loc[(name, "test"), "min"]
    with pytest.raises(RequestError, match=r"client 'site .' has . groups?; at least 3 are needed"):
        load(frame.assign(person=frame["person"] // 8), client="site", target="y", group="person")


def test_small_clients():
    frame = table((20, 4, 20, 2))
    with pytest.raises(RequestError, match=r"client 'site 1' has 4 rows; at least 5 are needed .*--drop-small"):
        load(frame, client="site", target="y")
    with pytest.raises(RequestError, match=r"client 'site [0123]' has (20|4) rows; .* 2 other clients"):
        load(frame, client="site", target="y", min_rows=21)
    with_four = load(frame, client="site", target="y", min_rows=3)
    assert set(with_four.names) == {"site 0", "site 1", "site 2"}
    (note,) = [n for n in with_four.notes if "too small" in n]
    assert "fewer than 3 rows" in note and "'site 3'; the global model is used for them" in note
    with pytest.raises(RequestError, match="every client is too small"):
        load(table((2, 2, 1)), client="site", target="y")
    clients = load(frame, client="site", target="y", drop_small=True)
    assert set(clients.names) == {"site 0", "site 2"}
    assert any("2 clients too small" in note and "'site 3'" in note for note in clients.notes)
    assert sorted(clients.placement["row"]) == np.flatnonzero(frame["site"].isin(clients.names)).tolist()
    three = load(frame[frame["site"] != "site 3"], client="site", target="y", min_rows=3)
    assert [int(getattr(three, part).size[three.names.index("site 1")]) for part in PARTS] == [2, 1, 1]
    with pytest.raises(RequestError, match="every client is too small"):
        load(frame, client="site", target="y", min_rows=21, drop_small=True)


def test_classification_is_stratified():
    frame = table((40, 40)).assign(y=lambda f: np.where(f.groupby("site").cumcount() < 10, "rare", "usual"))
    clients = load(frame, client="site", target="y")
    assert clients.classes == ("rare", "usual")
    for i in range(2):
        for part, expected in zip(PARTS, (6, 2, 2)):
            assert abs(int((getattr(clients, part).of(i)[1] == 0).sum()) - expected) <= 1


def test_constant_columns_within_clients_are_noted():
    frame = table((20, 20)).assign(level=lambda f: (f["site"] == "site 1") * 1.0, u=lambda f: f["u"] * f["level"])
    (note,) = [n for n in load(frame, client="site", target="y").notes if "do not vary" in n]
    assert "'level' (2 of 2)" in note and "'u' (1 of 2)" in note and "'v'" not in note


def test_client_names_stay_as_written(tmp_path):
    text = "site,x,y\n" + "".join(f"{'007' if i % 2 else '7'},{i / 3:.3f},{i / 7:.3f}\n" for i in range(20))
    (tmp_path / "data.csv").write_text(text)
    assert load(tmp_path / "data.csv", client="site", target="y").names == ("007", "7")


class Squares(Dataset):
    def __init__(self, start, n):
        self.values = torch.arange(start, start + n, dtype=torch.float32)

    def __len__(self):
        return len(self.values)

    def __getitem__(self, i):
        return self.values[i].repeat(1, 2, 2), int(self.values[i]) % 2


def test_torch_data_sets_are_taken_as_they_are():
    clients = load({"a": Squares(0, 10), "b": Squares(100, 6)})
    assert clients.names == ("a", "b") and clients.kind == "binary" and clients.schema is None
    assert clients.train.x.shape[1:] == (1, 2, 2) and clients.train.x.dtype == torch.float64
    x, y = clients.train.of(1)
    assert x.min() >= 100 and torch.equal(x[:, 0, 0, 0].long() % 2, y)
    tokens = TensorDataset(torch.randint(0, 9, (8, 5)), torch.rand(8))
    both = load({"a": tokens, "b": tokens})
    assert both.train.x.dtype == torch.int64 and both.kind == "regression"
    every = torch.cat([both.train.of(0)[1], both.validation.of(0)[1], both.test.of(0)[1]])
    expected = tokens.tensors[1].double()
    torch.testing.assert_close(torch.sort(every * both.target_scale + both.target_mean)[0], torch.sort(expected)[0])
    with pytest.raises(RequestError, match="client 'b': the inputs have the shape"):
        load({"a": tokens, "b": Squares(0, 6)})


def test_images_as_arrays():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (30, 4, 4)).astype(np.uint8)
    clients = load((images, np.arange(30) % 3, np.arange(30) % 2))
    assert clients.kind == "classes" and clients.train.x.dtype == torch.uint8
    row = clients.placement.query("client == '1' and part == 'test'")["row"].to_numpy()
    np.testing.assert_array_equal(clients.test.of(1)[0], images[row])


def test_a_known_schema_is_used_and_not_learnt():
    first = load(table(seed=1), client="site", target="y")
    mine = table((9,), seed=2).drop(columns="site")
    joined = load(mine, schema=first.schema)
    assert joined.names == ("the data frame",) and joined.schema is first.schema
    x, y, _ = encode_new_rows(mine, first.schema)
    row = joined.placement.query("part == 'test'")["row"].to_numpy()
    np.testing.assert_array_equal(joined.test.of(0)[0], x[row])
    np.testing.assert_array_equal(joined.test.of(0)[1], y[row])


@pytest.mark.parametrize(
    ("name", "clients", "rows", "kind", "features"),
    [("heart", 4, 920, "binary", 32), ("parkinsons", 42, 5875, "regression", 19)],
)
def test_embedded_tables(name, clients, rows, kind, features, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaded = load(name)
    assert (len(loaded), len(loaded.placement), loaded.kind, len(loaded.features)) == (clients, rows, kind, features)
    (tmp_path / name).write_text("site,y\n")
    with pytest.raises(RequestError, match="ending"):
        load(name)


def test_embedded_tables_match_their_publications():
    """Sizes, counts, means and ranges that the data sets' documentation gives."""
    heart = pd.read_csv(datasets.table_path("heart"))
    by_hospital = heart.groupby("hospital")["disease"]
    assert by_hospital.size().to_dict() == {
        "Cleveland": 303, "Budapest": 294, "Zurich and Basel": 123, "Long Beach": 200,
    }  # fmt: skip
    ill = by_hospital.apply(lambda disease: int((disease == "yes").sum())).to_dict()
    assert ill == {"Cleveland": 139, "Budapest": 106, "Zurich and Basel": 115, "Long Beach": 149}
    parkinsons = pd.read_csv(datasets.table_path("parkinsons"))
    assert parkinsons.shape == (5875, 21) and parkinsons["subject"].nunique() == 42
    assert parkinsons.groupby("subject")["sex"].first().eq("female").sum() == 14
    scores = parkinsons["total_UPDRS"]
    np.testing.assert_allclose([scores.mean(), scores.min(), scores.max()], [29.019, 7.0, 54.992], atol=1e-3)


def test_the_package_ships_only_tables_that_its_notice_names():
    folder = datasets.table_path("heart").parent
    notice = (folder / "NOTICE").read_text()
    assert {path.name for path in folder.iterdir()} == {
        "NOTICE",
        *(own.file for own in datasets.EMBEDDED_TABLES.values()),
    }
    assert (
        all(own.file in notice for own in datasets.EMBEDDED_TABLES.values())
        and "CC BY 4.0" in notice
        and "GPL" not in notice
    )


@pytest.mark.parametrize(
    ("name", "clients", "rows", "kind", "features"),
    [
        ("exam", 64, 4057, "regression", 12),
        ("contraception", 58, 1928, "binary", 6),
        ("hsb82", 160, 7185, "regression", 5),
    ],
)
def test_classic_tables(name, clients, rows, kind, features):
    table = TABLES[name]
    loaded = load(table.path, **table.columns)
    assert (len(loaded), len(loaded.placement), loaded.kind, len(loaded.features)) == (clients, rows, kind, features)


def test_classic_tables_match_their_publications():
    """Sizes and means that the data sets' documentation gives."""
    hsb = pd.read_csv(HSB82.path)
    assert hsb.shape == (7185, 8) and hsb["school"].nunique() == 160 and (hsb["sector"] == "Catholic").sum() == 3543
    np.testing.assert_allclose(hsb["mAch"].mean(), 12.748, atol=1e-3)
    exam = pd.read_csv(EXAM.path)
    assert exam.shape == (4059, 10) and exam["school"].nunique() == 65
    contraception = pd.read_csv(CONTRACEPTION.path)
    assert contraception.shape == (1934, 6) and contraception["district"].nunique() == 60
    assert (contraception["use"] == "Y").sum() == 759


def test_names_of_other_data_sets():
    from mooring.data.benchmark_datasets import BENCHMARKS

    assert set(datasets.LOADERS) == set(BENCHMARKS)
    assert [datasets.describe(name)["name"] for name in datasets.known_datasets()] == [
        "flights",
        "penguins",
        "heart",
        "parkinsons",
        *BENCHMARKS,
    ]
    assert len(load("digits", seed=1)) == 100
    with pytest.raises(RequestError, match="'digits' is no table"):
        load("digits", target="y")
    with pytest.raises(RequestError, match=r"no file or data set 'haert'.*Did you mean 'heart'"):
        load("haert")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_infinite_inputs_are_refused_by_the_clients_name(value):
    rng = np.random.default_rng(0)
    images = rng.normal(size=(30, 4, 4))
    images[7, 2, 3] = images[13, 0, 0] = value
    expected = "client '1': 2 of 15 rows hold NaN or infinite inputs, the first is row 4"
    with pytest.raises(RequestError, match=expected):
        load((images, np.arange(30) % 3, np.arange(30) % 2))
    data = {
        name: TensorDataset(torch.from_numpy(images[k::2]), torch.from_numpy(np.arange(15) % 3))
        for k, name in enumerate("01")
    }
    with pytest.raises(RequestError, match=expected):
        load(data)
    with pytest.raises(RequestError, match=expected):
        from_arrays([images[0::2], images[1::2]], [np.arange(15.0)] * 2)
    with pytest.raises(RequestError, match="client 'b': 1 of 3 rows hold NaN or infinite targets, the first is row 2"):
        from_arrays([np.zeros((3, 2))] * 2, [np.zeros(3), np.array([0, value, 1])], names=["a", "b"])


def test_large_finite_inputs_are_taken():
    """A sum that overflows is no proof of infinite terms."""
    images = np.full((30, 4, 4), 1e308)
    assert len(load((images, np.arange(30) % 3, np.arange(30) % 2))) == 2


def test_values_that_are_not_what_they_seem_are_noted_wherever_a_table_is_read():
    frame = table((40, 40))
    frame["u"] = frame["u"].where(np.arange(80) % 10 > 0, -999.0)
    frame["weather"] = np.where(np.arange(80) % 2, "rain", "Rain")
    frame["again"] = 2 * frame["y"] + 1
    said = load(frame, client="site", target="y").notes
    assert (
        "Column 'u': -999 stands in 8 rows, far from all other values; if it means missing, leave those cells empty, "
        "or use --na=-999." in said
    )
    assert any("'Rain' and 'rain' differ in case or spaces only" in note and "--merge-levels" in note for note in said)
    assert any("Column 'again' predicts the target 'y' almost perfectly: use --drop 'again'" in note for note in said)
    assert not any("Column" in note for note in load(frame[["site", "v", "w", "y"]], client="site", target="y").notes)


def ordered(seed=0):
    """Three sites, one row per day and site, in no order."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"site": np.repeat(["a", "b", "c"], 20), "day": np.tile(np.arange(20), 3)})
    frame = frame.assign(x=rng.normal(size=60), y=rng.normal(size=60))
    return frame.sample(frac=1, random_state=seed, ignore_index=True)


def test_times_lie_in_the_order_of_the_rows():
    clients = load(ordered().assign(x=lambda f: f["day"] * 1.0), client="site", target="y", time_column="day")
    place = clients.features.index("x")
    for part in PARTS:
        rows, times = getattr(clients, part), clients.times[part]
        assert len(times) == len(rows.y) and float(np.corrcoef(rows.x[:, place], times)[0, 1]) > 0.999
    assert float(clients.times["test"].min()) > float(clients.times["train"].max())
    assert load(ordered(), client="site", target="y").times is None


def test_parts_are_by_chance_unless_a_split_is_given():
    frame = ordered()
    assert load(frame, client="site", target="y").has_random_parts
    assert load(frame, client="site", target="y", time_column="day").has_random_parts  # asked for folds, not for parts
    assert not load(frame, client="site", target="y", split=[0.5, 0.25, 0.25]).has_random_parts
    frame["split"] = np.resize(["train", "train", "validation", "test"], 60)
    both = load(frame, client="site", target="y", time_column="day", split="split")
    assert not both.has_random_parts and len(both.times["test"]) == len(both.test.y) == 15


def test_rows_that_seem_to_be_ordered_in_time_are_noted():
    def noted(frame):
        return [note for note in load(frame, client="site", target="y").notes if "--time-column" in note]

    (note,) = noted(ordered())
    assert "ordered in time by 'day'" in note and "--time-column day" in note
    assert noted(ordered().rename(columns={"day": "k"}))  # the same whole numbers at all sites
    assert not noted(ordered().drop(columns="day"))
    assert not noted(ordered().assign(day=lambda f: f["day"] // 4))  # several rows per value: a category, not a time
    assert not load(ordered(), client="site", target="y", time_column="day").notes


def test_a_run_directory_is_not_data(tmp_path, monkeypatch):
    """`mooring advise heart --out heart` may be repeated, and other run directories are refused in one sentence."""
    monkeypatch.chdir(tmp_path)
    for name in ("heart", "mine"):
        (tmp_path / name).mkdir()
        for file in ("run.toml", "schema.json"):
            (tmp_path / name / file).write_text("{}")
        (tmp_path / name / "clients.csv").write_text("client,y\na,1\n")
    assert len(load("heart")) == 4
    with pytest.raises(RequestError, match="directory of a run"):
        load("mine", target="y")
