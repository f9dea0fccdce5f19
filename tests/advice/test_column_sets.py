"""Columns that bend: models as vectors on all columns, folds that do not leak, and shaped runs from end to end."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

import mooring
from mooring.advice.advise import advise, resume
from mooring.advice.candidates.families import DIAGONAL, GLOBAL, LAMBDA, LOCAL, MIXTURE, SIZE, Setting, fit_settings
from mooring.advice.candidates.shaper import INNER_FOLDS, MIN_ROWS_FOR_AUTO, Shaper, make_shaper
from mooring.advice.evaluation import cross_fitting
from mooring.advice.evaluation.cross_fitting import Evidence
from mooring.advice.evaluation.evidence import apply_shape
from mooring.advice.evaluation.fold_fits import estimate_all_priors
from mooring.advice.evaluation.loss_sums import ModelTriple
from mooring.advice.new_clients.personalize import personalize
from mooring.core.cohort import Rows
from mooring.core.errors import RequestError
from mooring.data.folds import FoldSplit, assign_folds, iterate_folds, usable_rows
from mooring.engines.predict import read_task_and_schema
from mooring.engines.prepare import prepare
from mooring.engines.request import request
from mooring.partial_pooling.client_prior import estimate_priors
from mooring.runs import checkpoint
from mooring.runs.directory import open_run
from mooring.shapes.boosting import Boosting, fit_booster, out_of_fold_scores
from mooring.shapes.column_sets import BOTH, SCORE, ColumnSets, add_columns, prune_columns, used_columns
from mooring.shapes.columns import BOOSTED, LINEAR, PRODUCT, SPLINE, ShapedColumns
from mooring.shapes.fitting import MAX_SPLINE_COLUMNS, limit_splines
from mooring.tasks.extra_columns import boosting_of, can_shape
from mooring.tasks.kernel_regression import KernelRegression
from mooring.tasks.linear import Linear
from mooring.tasks.logistic import Logistic
from tests.support.problems import linear_clients, logistic_clients
from tests.support.trees import draw_trees

pytest.importorskip("xgboost", reason="XGBoost is not installed; the extra is mooring-fl[trees]")

KNOTS = (-1.0, 0.0, 1.0)


def shape_of(rows, outputs=1, inputs=3):
    """Splines of two columns, a product, and a booster."""
    shape = ShapedColumns(inputs, ((0, KNOTS), (2, KNOTS)), ((0, 1),), draw_trees(outputs=outputs, features=inputs))
    return shape.standardize(shape.sum_extra(rows.x.double()))


def problem(classes=0):
    if classes:
        clients = logistic_clients(classes=classes)
        return Logistic(3, classes=classes), clients
    return Linear(3), linear_clients()


@pytest.mark.parametrize("classes", [0, 2, 3])
def test_models_on_a_set_of_columns_are_models_on_all_with_zeros(classes):
    task, clients = problem(classes)
    outputs = 3 if classes == 3 else 1
    shape = shape_of(clients.train, outputs)
    sets = ColumnSets(replace(task, features=shape.width), shape)
    assert sets.names() == [LINEAR, SPLINE, PRODUCT, BOOSTED, BOTH]
    assert [len(sets.columns[name]) for name in sets.names()] == [3, 5, 6, 3 + outputs, 5 + outputs]
    rows, rng = add_columns(clients.train, shape), torch.Generator().manual_seed(0)
    batch = rows.padded()
    for name in sets.names():
        small = sets.task_on(name)
        v = torch.randn(5, small.dim, generator=rng, dtype=torch.float64)
        whole = sets.embed(name, v)
        torch.testing.assert_close(sets.extract(name, whole), v, rtol=0, atol=0)
        assert int((whole != 0).sum()) == v.numel()
        mine = sets.rows_on(rows, name)
        assert mine.x.shape[1] == len(sets.columns[name]) and sets.rows_on(rows, name) is mine
        torch.testing.assert_close(small.predict(v, mine.padded().x), sets.task.predict(whole, batch.x))


@pytest.mark.parametrize("classes", [0, 2])
def test_linear_candidates_on_shaped_columns_are_those_without_shaping(classes):
    task, clients = problem(classes)
    shape = shape_of(clients.train)
    rows, p = add_columns(clients.train, shape), clients.weights()
    sets = ColumnSets(replace(task, features=shape.width), shape)
    plain, shaped = estimate_priors(task, clients.train), estimate_all_priors(sets.task, rows, sets)
    mine = [prior for prior in shaped if prior.columns == LINEAR]
    assert [prior.kind for prior in mine] == [prior.kind for prior in plain]
    for one, other in zip(plain, mine):
        torch.testing.assert_close(one.variance, other.variance)
    settings = [
        Setting(GLOBAL, 0.1),
        Setting(LOCAL, 0.1),
        Setting(LAMBDA, 0.3, 0.01),
        Setting(SIZE, 1.0),
        Setting(DIAGONAL, 2.0),
        Setting(MIXTURE, 0.5, 0.0, 0.1),
    ]
    wanted = {found.setting: found for found in fit_settings(task, clients.train, p, settings, plain)}
    bent = [setting._replace(columns=SPLINE) for setting in settings]
    for found in fit_settings(sets.task, rows, p, [*settings, *bent], shaped, sets):
        if found.setting.columns == LINEAR:
            torch.testing.assert_close(sets.extract(LINEAR, found.v), wanted[found.setting].v)
            torch.testing.assert_close(sets.embed(LINEAR, wanted[found.setting].w), found.w)
        else:
            assert float(found.v[:, 3:5].abs().sum()) > 0 and float(found.v[:, 5].abs().sum()) == 0


def test_prune_drops_what_no_model_uses():
    rows = linear_clients().train
    shape = shape_of(rows)
    bends, scores = prune_columns(shape, {LINEAR, SPLINE}), prune_columns(shape, {BOOSTED})
    assert prune_columns(shape, {LINEAR}) is None and prune_columns(shape, {PRODUCT, BOOSTED}) == shape
    assert bends.booster is None and bends.splines == shape.splines and bends.extra == 2
    assert scores.splines == () and scores.booster is shape.booster and scores.extra == 1
    x = shape(rows.x)
    for used in ({SPLINE}, {BOOSTED}, {BOTH}, {PRODUCT}, {PRODUCT, BOTH}):
        pruned = prune_columns(shape, used)
        torch.testing.assert_close(pruned(rows.x), x[:, used_columns(shape, pruned)], rtol=0, atol=0)
    assert used_columns(shape, scores) == [0, 1, 2, 6] and used_columns(shape, None) == [0, 1, 2]


@pytest.mark.parametrize("used", [(LINEAR,), (SPLINE, BOOSTED), (PRODUCT, BOOSTED), (BOTH, LINEAR), (PRODUCT,)])
def test_a_run_keeps_the_columns_that_its_models_use_and_predicts_the_same(used):
    table = bent_table(clients=4, samples=10)
    job = prepare(request(table, purpose="advise", client="who", target="y"), table)
    rows = job.clients.train
    shape = shape_of(rows)
    sets = ColumnSets(replace(job.task, features=shape.width), shape)
    rng, personal = torch.Generator().manual_seed(0), torch.zeros(4, sets.task.dim, dtype=torch.float64)
    settings = [Setting(SIZE, 1.0, columns=name) for name in used]
    for setting in settings:
        v = torch.randn(4, sets.task_on(setting.columns).dim, generator=rng, dtype=torch.float64)
        personal += sets.embed(setting.columns, v)
    choice = SimpleNamespace(mix=dict.fromkeys(settings, 0.5), local=settings[0], global_=settings[0], own={})
    models = ModelTriple(personal, personal[0], personal, personal[:1])
    before = sets.task.predict(personal, add_columns(rows, shape).padded().x)
    after, _, evidence = apply_shape(job, choice, Evidence(models, None, None, shape=shape))
    found = after.task.predict(evidence.models.personal, after.clients.train.padded().x)
    torch.testing.assert_close(found, before)
    assert len(after.clients.features) == after.task.features == (evidence.shape or ShapedColumns(3)).width


def step_rows(m=6, n=40, seed=0):
    """Clients whose target is a step of the first column."""
    rng = np.random.default_rng(seed)
    x = [torch.from_numpy(rng.standard_normal((n, 3))) for _ in range(m)]
    y = [torch.sign(one[:, 0]) + 0.3 * torch.from_numpy(rng.standard_normal(n)) for one in x]
    return Rows.stack(x, y)


def shaper_with(rows, boosting=True):
    keys = np.arange(len(rows), dtype=np.uint64)
    return Shaper(((0, KNOTS),), (), Boosting("squared", max_trees=5) if boosting else None, None, keys, seed=0)


def test_extra_columns_of_a_fold_come_from_its_training_rows_alone():
    rows = step_rows()
    shaper, part = shaper_with(rows), next(iterate_folds(rows, np.arange(6, dtype=np.uint64), 0, 4))
    shape, train = shaper.fit(part.train)
    mine = shaper.split(part)
    torch.testing.assert_close(mine.train.x, train.x, rtol=0, atol=0)
    torch.testing.assert_close(mine.held.x, shape(part.held.x), rtol=0, atol=0)
    other = Rows(part.held.x + 7, part.held.y - 50, part.held.start, part.held.size)
    changed = shaper.split(FoldSplit(part.train, other, part.place))
    torch.testing.assert_close(changed.train.x, mine.train.x, rtol=0, atol=0)
    # Held-out rows have scores of all training rows' trees; training rows do not.
    whole = fit_booster(part.train.x.numpy(), part.train.y.numpy(), shaper.boosting, 5)
    raw = torch.from_numpy(whole.score(part.held.x.numpy())[:, 0] - whole.base[0])
    torch.testing.assert_close(mine.held.x[:, -1], (raw - shape.centers[-1]) / shape.scales[-1])
    assert float((shape(part.train.x)[:, -1] - train.x[:, -1]).abs().max()) > 0.01


def test_a_training_rows_own_target_does_not_enter_its_score():
    rows = step_rows()
    shaper = shaper_with(rows)

    def scores(y):
        shape, made = shaper.fit(Rows(rows.x, y, rows.start, rows.size))
        return made.x[:, -1] * shape.scales[-1] + shape.centers[-1] + shape.booster.base[0]

    y = rows.y.clone()
    y[11] += 5
    moved = (scores(y) - scores(rows.y)).abs() > 1e-4  # the trees are fitted to standardized targets in float32
    fold = assign_folds(rows, shaper.keys, INNER_FOLDS, shaper.seed + 1)
    assert not bool(moved[fold == fold[11]].any()) and float(moved[fold != fold[11]].double().mean()) > 0.5


def test_rows_of_a_unit_share_their_inner_fold(monkeypatch):
    rows = step_rows()
    units, dealt = torch.arange(len(rows.y)) // 4, []

    def record(some, keys, folds, seed, mine=None):
        dealt.append((some, mine))
        return assign_folds(some, keys, folds, seed, mine)

    monkeypatch.setattr("mooring.advice.candidates.shaper.assign_folds", record)
    known = {tuple(x): int(unit) for x, unit in zip(rows.x.tolist(), units)}
    for part in iterate_folds(rows, np.arange(6, dtype=np.uint64), 0, 4, units):
        shaper_with(rows).split(part, units)
        some, mine = dealt[-1]
        assert mine.tolist() == [known[tuple(x)] for x in some.x.tolist()]


def test_which_tasks_have_extra_columns_and_which_trees():
    assert can_shape(Linear(3)) and not can_shape(KernelRegression(3, width=6))
    assert boosting_of(Logistic(3, classes=3)) == Boosting("softmax", classes=3)
    rows, keys = step_rows(), np.arange(6, dtype=np.uint64)
    both = make_shaper(Linear(3), rows, keys, "auto", None, None, 0, None)
    assert 0 in [i for i, _ in both.splines] and both.boosting == Boosting("squared")
    assert make_shaper(Linear(3), rows, keys, SPLINE, [0], None, 0, None).boosting is None
    only = make_shaper(Linear(3), rows, keys, BOOSTED, [0], None, 0, None)
    assert only.splines == () == only.products and only.boosting is not None
    constant = Rows(torch.ones_like(rows.x), rows.y, rows.start, rows.size)
    assert make_shaper(Linear(3), constant, keys, SPLINE, None, None, 0, None) is None
    many = tuple((i, tuple(range(6))) for i in range(15))
    few = limit_splines(many)
    assert sum(len(knots) - 2 for _, knots in few) <= MAX_SPLINE_COLUMNS and len(few) == 15
    assert all(knots[0] == 0 and knots[-1] == 5 for _, knots in few) and limit_splines(few) == few


def test_trees_predict_by_themselves_where_they_are_better_than_what_they_do_not_improve(monkeypatch):
    rows, keys = step_rows(), np.arange(6, dtype=np.uint64)

    def shaper_of(scores):
        return make_shaper(Linear(3), rows, keys, BOOSTED, None, lambda rows, fold: scores, 0, None)

    useless, perfect = np.zeros((len(rows.y), 1)), rows.y.double().numpy()[:, None]
    assert shaper_of(useless).boosting is not None and not shaper_of(useless).is_score_alone
    assert shaper_of(perfect) is None  # no tree improves it, and none is as good

    def without_trees(*arguments, offset=None, **others):
        held_out = out_of_fold_scores(*arguments, offset=offset, **others)
        return held_out if offset is None else held_out._replace(booster=[])

    monkeypatch.setattr("mooring.shapes.fitting.out_of_fold_scores", without_trees)
    alone = shaper_of(useless)
    assert alone.boosting == Boosting("squared") and alone.is_score_alone
    assert SCORE in ColumnSets(Linear(4), alone.fit(rows)[0]).names()


def bent_table(clients=12, samples=80, seed=0):
    """A target that is a square and a step, with an intercept of each client's own."""
    rng = np.random.default_rng(seed)
    who = np.repeat(np.arange(clients), samples)
    x = rng.standard_normal((len(who), 2))
    y = x[:, 0] ** 2 + np.where(x[:, 1] > 0.3, 1.5, 0.0) + rng.standard_normal(clients)[who]
    frame = pd.DataFrame({"x0": x[:, 0], "x1": x[:, 1], "color": rng.choice(["red", "blue"], len(who))})
    return frame.assign(who=[f"c{i}" for i in who], y=y + 0.5 * rng.standard_normal(len(who)))


OPTIONS = {"client": "who", "target": "y", "threads": 1, "theory": False, "folds": 4}


@pytest.fixture(scope="module")
def bent(tmp_path_factory):
    """(the table's file, the advice with shape auto, its run directory)."""
    folder = tmp_path_factory.mktemp("bent")
    bent_table().iloc[::2].to_csv(folder / "rows.csv", index=False)
    return folder / "rows.csv", advise(folder / "rows.csv", out=folder / "run", **OPTIONS), folder / "run"


def test_where_effects_are_not_linear_the_loss_is_far_lower(bent):
    path, advice, _ = bent
    linear = advise(path, shape="linear", **OPTIONS)
    assert linear.evidence.shape is None and advice.evidence.shape is not None
    assert advice.summary["personal"] < 0.8 * linear.summary["personal"]
    assert advice.summary["recommended"] < 0.8 * linear.summary["recommended"]
    assert advice.words["shape"].startswith("Effects are not linear:")
    assert "shape" not in linear.words
    # The linear candidates of both are the same, and the best of them is compared although it has no weight.
    one, other = (a.choice.table.query("columns == 'linear'")["loss"].min() for a in (advice, linear))
    assert one == pytest.approx(other, rel=0.02)  # the best after two folds, and of all
    assert np.isfinite(advice.path["loss"]).all()


def test_the_held_out_loss_is_that_of_rows_that_no_part_of_the_run_has_seen(bent):
    _, advice, run = bent
    fresh = bent_table().iloc[1::2].reset_index(drop=True)
    served, _ = mooring.predict(run, fresh)
    loss = ((served["y"] - fresh["y"]) ** 2).mean()
    assert loss == pytest.approx(advice.summary["recommended"], rel=0.2)


def test_predictions_from_the_run_directory_are_those_of_the_models(bent):
    path, advice, run = bent
    frame = pd.read_csv(path)
    served, notes = mooring.predict(run, frame)
    assert notes == []
    job = advice.job
    for i, name in enumerate(job.clients.names):
        x, _ = usable_rows(job.clients).of(i)
        z = job.task.predict(advice.models.recommended[i : i + 1], x[None])[0]
        wanted = np.sort((z * job.clients.target_scale + job.clients.target_mean).numpy())
        np.testing.assert_allclose(np.sort(served.loc[frame["who"] == name, "y"]), wanted, rtol=1e-9, atol=1e-9)
    task, schema = read_task_and_schema(open_run(run))
    assert task.features == len(schema.features) == len(job.clients.features) == job.task.features


def test_an_estimator_predicts_from_the_columns_as_its_run_makes_them(bent):
    path, advice, run = bent
    rows = pd.read_csv(path).query("who == 'c3'")
    saved = mooring.open(run)
    assert saved.schema.shape is not None
    np.testing.assert_allclose(saved.model("c3").predict(saved.inputs(rows)), advice.predict(rows)["y"], rtol=1e-9)


def test_a_new_client_with_a_clients_rows_gets_nearly_its_personal_model(bent):
    """Nearly: its noise is found around the centers that the clients were left with, and its boosted scores are those
    of all trees, where the clients' were out of fold."""
    path, advice, run = bent
    frame = pd.read_csv(path)
    assert len(advice.choice.mix) > 1 and not advice.choice.own
    assert len({setting.columns for setting in advice.choice.mix}) > 1 and open_run(run).models.mix.noises
    later = personalize(run, frame.assign(who="new " + frame["who"]))
    personal = np.flatnonzero(later.clients["recommended"] == "personal").tolist()
    assert later.way == "average" and len(personal) > 6
    torch.testing.assert_close(later.models[personal], advice.models.personal[personal], rtol=0.05, atol=0.02)


def test_other_ways_serve_new_clients_of_a_shaped_run_too(bent):
    path, advice, run = bent
    rows = pd.read_csv(path).query("who == 'c3'").assign(who="new")
    later = personalize(run, rows, how="prox")
    assert later.models.shape == (1, advice.job.task.dim) and bool(torch.isfinite(later.models).all())


def test_it_gets_that_model_where_noises_do_not_differ_and_no_trees_are_used(tmp_path):
    frame = bent_table(clients=5, samples=50)
    frame["y"] = np.where(frame["y"] > 1.5, "high", "low")
    advice = advise(frame, shape="spline", out=tmp_path / "run", **OPTIONS | {"folds": 2})
    assert {setting.columns for setting in advice.choice.mix} == {SPLINE} and not advice.choice.own
    later = personalize(tmp_path / "run", frame.assign(who="new " + frame["who"]))
    personal = np.flatnonzero(later.clients["recommended"] == "personal").tolist()
    assert len(personal) > 2
    torch.testing.assert_close(later.models[personal], advice.models.personal[personal], rtol=1e-6, atol=1e-6)


def test_an_interrupted_run_with_shapes_resumes_to_the_same_bytes(bent, tmp_path, monkeypatch):
    path, _, run = bent
    keep, done = checkpoint.save_fold, []

    def save(*given):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(given)
        keep(*given)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoint, "save_fold", save)
        advise(path, out=tmp_path / "cut", **OPTIONS)
    resume(tmp_path / "cut")
    for name in ("models.safetensors", "advice.json", "clients.parquet", "run.toml", "schema.json"):
        assert (tmp_path / "cut" / name).read_bytes() == (run / name).read_bytes(), name


def levelling_off(seed=0, clients=15, days=24):
    """A target that rises twice in the earlier half of the days and stays at its level from then on."""
    rng = np.random.default_rng(seed)
    client, day = np.repeat(np.arange(clients), days), np.tile(np.arange(days), clients)
    level, effect = rng.normal(0, 2, clients), rng.normal(size=clients * days)
    y = level[client] + 5 * (day >= 6) + 3 * (day >= 10) + effect * (effect > 0)
    noise = 0.3 * rng.normal(size=len(day))
    return pd.DataFrame({"client": [f"c{k:02}" for k in client], "day": day, "effect": effect, "y": y + noise})


def test_with_a_time_column_the_score_may_stand_without_linear_columns(tmp_path):
    """Linear columns continue a trend that has ended; trees without an offset stay at its last level."""
    table = levelling_off()
    out = tmp_path / "run"
    options = {"client": "client", "target": "y", "features": ["day", "effect"], "theory": False}
    advice = advise(table, time_column="day", out=out, **options)
    lowest = advice.choice.table.groupby("columns")["loss"].min()
    assert lowest[SCORE] < 0.6 * lowest[LINEAR]
    assert SCORE in {setting.columns for setting in advice.choice.mix} and advice.evidence.shape.is_score_alone
    stored = mooring.predict(out, table)[0]
    np.testing.assert_allclose(stored["y"], advice.predict(table)["y"])
    assert ShapedColumns.from_json(open_run(out).schema["shape"]) == advice.evidence.shape
    new = levelling_off(seed=1, clients=1)
    assert torch.isfinite(personalize(out, new.assign(client="new")).models).all()
    without = advise(table, **options)
    assert SCORE not in set(without.choice.table["columns"])


def test_where_some_clients_choose_for_all_trees_are_fitted_to_their_folds(monkeypatch):
    monkeypatch.setattr(cross_fitting, "MAX_CHOOSING_CLIENTS", 8)
    rng = np.random.default_rng(0)
    x, client = rng.normal(size=(300, 2)), np.repeat(np.arange(12), 25)
    y = rng.poisson(np.exp(0.3 * rng.normal(size=12)[client] + np.sin(3 * x[:, 0])))
    table = pd.DataFrame({"client": client, "a": x[:, 0], "b": x[:, 1], "y": y})
    options = {"client": "client", "target": "y", "target_type": "count", "theory": False, "folds": 2}
    advice = advise(table, shape="boosted", **options)
    assert int((advice.evidence.held.rows > 0).sum()) == 8 and len(advice.clients) == 12
    assert bool(torch.isfinite(advice.models.recommended).all())


def test_few_rows_keep_linear_columns_and_wrong_requests_are_refused():
    few = bent_table(clients=4, samples=MIN_ROWS_FOR_AUTO // 4 - 1)
    assert advise(few, **OPTIONS | {"folds": 2}).evidence.shape is None
    enough = bent_table(clients=4, samples=MIN_ROWS_FOR_AUTO // 4 + 3)
    assert advise(enough, **OPTIONS | {"folds": 2}).evidence.shape is not None
    classes = enough.assign(y=pd.qcut(enough["y"], 3, labels=["low", "middle", "high"]).astype(str))
    assert advise(classes, **OPTIONS | {"folds": 2}).evidence.shape is None  # 50 rows for each class's score
    splines = advise(bent_table(clients=4, samples=50), shape="spline", **OPTIONS | {"folds": 2})
    assert splines.evidence.shape.booster is None and splines.evidence.shape.splines
    with pytest.raises(RequestError, match="needs a table and a task that is linear"):
        advise(few, shape="spline", task={"name": "kernel", "width": 6}, **OPTIONS)
