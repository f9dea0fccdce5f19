"""Advice whose rows stay with their clients: the simulator's verdicts and models, by message."""

import json
import re
import threading
from functools import partialmethod

import numpy as np
import pandas as pd
import pytest
import torch

from mooring.advice.advise import advise
from mooring.advice.new_clients.personalize import personalize
from mooring.advice.remote import access
from mooring.advice.remote.client_node import AdviceClientNode
from mooring.advice.remote.server import advise_federation
from mooring.advice.reporting.sentences import MODEL_PHRASES
from mooring.core.cohort import Rows
from mooring.core.errors import RequestError
from mooring.data.datasets import EMBEDDED_TABLES
from mooring.data.folds import assign_folds, number_distinct_rows
from mooring.data.table_sources import read_source
from mooring.engines.predict import predict
from mooring.engines.request import read_federation_request
from mooring.estimates.client_queries import summarize_rows
from mooring.remote.client_requests import DISMISSED_FILE, DONE_FILE, RESULT_DIR
from mooring.remote.disclosure import SENT_FILE, Policy
from mooring.remote.memory import MemoryTransport
from mooring.remote.messages import Payload
from mooring.remote.messenger import Messenger
from mooring.remote.remote_rows import SHAPED, CallBatcher, ColumnStore, read_ranges, shape_digest, write_ranges
from mooring.runs.atomic_files import read_json
from mooring.runs.directory import open_run
from mooring.shapes.columns import ShapedColumns
from tests.remote.federation_runs import Clock

CLOSE = 1e-8  # of linear tasks; fits by Newton's method start elsewhere across machines: see NEWTON_CLOSE
NEWTON_CLOSE = 1e-6
WORDS = ("recommended", "confidence", "is_outlier", "plan")
LINEAR_IN_TWO_FOLDS = 'folds = 2\ntheory = false\nshape = "linear"'
CASES = {  # an embedded table: clients, columns, rows of each, and options of [advice]
    "parkinsons": (5, ["age", "test_time", "HNR", "PPE", "RPDE"], 40, 'folds = 3\nshape = "linear"'),
    "heart": (4, ["age", "thalach"], 120, LINEAR_IN_TWO_FOLDS),
    "bent": (4, ["u", "v", "w", "kind"], 70, 'folds = 2\ntheory = false\nshape = "spline"'),
}


def read_case(name):
    """A table with the names of its columns of clients and target."""
    if name != "bent":
        return read_source(name).frame, EMBEDDED_TABLES[name].client, EMBEDDED_TABLES[name].target
    rng, size = np.random.default_rng(0), 280
    frame = pd.DataFrame(rng.normal(size=(size, 3)), columns=["u", "v", "w"])
    frame["kind"], frame["site"] = rng.choice(["a", "b"], size), np.repeat([f"site {i}" for i in range(4)], 70)
    curve = frame["u"] ** 2 + 0.8 * frame["v"] * frame["w"] + (frame["kind"] == "a")
    return frame.assign(y=curve + np.repeat(np.arange(4), 70) * frame["v"] + 0.3 * rng.normal(size=size)), "site", "y"


def write_case(name, folder, clients=None):
    """Each client's rows in a file of its own, and a run file."""
    usual, columns, rows, more = CASES[name]
    frame, client, target = read_case(name)
    (folder / "clients").mkdir(parents=True)
    for who in frame[client].value_counts().index[: clients or usual]:
        mine = frame[frame[client] == who][[*columns, target]].iloc[:rows]
        mine.to_csv(folder / "clients" / f"{who}.csv", index=False)
    return run_file(folder / "run.toml", folder / "clients", target, "", more)


def run_file(path, source, target, data, advice):
    path.write_text(
        f'[mooring]\npurpose = "advise"\n[data]\nsource = "{source}"\ntarget = "{target}"\n{data}\n'
        f"[training]\nthreads = 1\n[advice]\n{advice}\n[federation]\nclients = {len(list(source.iterdir()))}\n"
    )
    return path


def homes_of(path, state):
    run = read_federation_request(path)
    return [AdviceClientNode(run, file, state / file.stem) for file in sorted((path.parent / "clients").iterdir())]


def assert_same_advice(apart, here, close=CLOSE):
    """Recommendations and words are equal, models to `close`, improvements, which are differences of losses, to 1e-6 or
    ten times `close`.

    Newton's method ends with the step after a predicted decrease of `lambda_path.NEWTON_TOLERANCE`, and the next one
    would be about its square: another start changes models by that over their curvature."""
    order = [apart.job.clients.names.index(name) for name in here.job.clients.names]
    for which in ("local", "personal", "recommended"):
        torch.testing.assert_close(
            getattr(apart.models, which)[order], getattr(here.models, which), rtol=close, atol=close
        )
    for which in ("global_", "centers"):
        torch.testing.assert_close(getattr(apart.models, which), getattr(here.models, which), rtol=close, atol=close)
    ours, theirs = apart.clients.iloc[order], here.clients
    for column in WORDS:
        assert ours[column].tolist() == theirs[column].tolist(), column
    for column in theirs.select_dtypes("number"):
        pair = (frame[column].to_numpy(float) for frame in (ours, theirs))
        np.testing.assert_allclose(*pair, rtol=max(1e-6, 10 * close), atol=1e-8, err_msg=column)
    assert apart.headline == here.headline and apart.words == here.words


class Tapped(MemoryTransport):
    """Hears every reply."""

    def __init__(self, homes):
        super().__init__(homes)
        self.heard = []

    def pull(self, numbers):
        replies = super().pull(numbers)
        self.heard += replies.values()
        return replies


@pytest.fixture(scope="module", params=CASES)
def federation(request, tmp_path_factory):
    """A whole advice by post: the run file, the clients, the grid, what came of it, and the run directory."""
    folder = tmp_path_factory.mktemp(request.param)
    path = write_case(request.param, folder)
    homes = homes_of(path, folder / "state")
    grid = Tapped(homes)
    return path, homes, grid, advise_federation(read_federation_request(path), grid, folder / "run"), folder / "run"


def test_verdicts_and_models_are_the_simulators(federation):
    path, homes, _, apart, out = federation
    here = advise(path)
    close = CLOSE if apart.job.task.name == "linear" else NEWTON_CLOSE
    assert_same_advice(apart, here, close)
    assert open_run(out).models.personal is None  # each client has its own
    later = personalize(out, homes[0].path)  # as a newcomer, whose rows are here
    place = here.job.clients.names.index(homes[0].name)
    assert later.way == "average" and later.clients["recommended"].tolist() == ["personal"]
    # To `path.NEAR_ENOUGH`: where a moor is slack, the clients' path ends that far from their exact fits. And a
    # newcomer's noise is found around the centre that the clients were left with, theirs around that of their rows.
    torch.testing.assert_close(later.models[0], here.models.personal[place], rtol=1e-2, atol=1e-3)
    for home in homes:
        row = here.clients.set_index("client").loc[home.name]
        told = read_json(home.folder / DONE_FILE)
        assert told["recommended"] == row["recommended"] and told["said"].startswith(
            f"Use {MODEL_PHRASES[row['recommended']]}"
        )
        own = open_run(home.folder / RESULT_DIR).models.personal[0]
        place = here.job.clients.names.index(home.name)
        torch.testing.assert_close(own, here.models.recommended[place], rtol=close, atol=close)
        predicted = predict(home.folder / RESULT_DIR, home.path)[0]  # whose rows these are needs no word
        assert list(predicted["client"]) == [home.name] * row["rows"]
        assert predicted.equals(predict(home.folder / RESULT_DIR, home.path, client=home.name)[0])


def test_no_value_of_a_row_is_in_any_reply(federation):
    """Each number of the tables, in the units that the task has it in, is looked for in all bytes that clients send;
    sums, which must be there, are found by the same search. A column that is the same in all of a client's rows is its
    own mean."""
    _, homes, grid, _, _ = federation
    sent = b"".join(grid.heard)

    def found(values):
        return [v for v in np.unique(values) if abs(v) not in (0.0, 1.0) and np.float64(v).tobytes() in sent]

    for home in homes:
        rows = home.rows(("usable",))
        varies = (rows.x != rows.x[:1]).any(0)
        assert varies.any() and found(rows.x[:, varies].numpy()) == []
        if home.task.name == "linear":
            total = summarize_rows(home.task, rows).moment[0].numpy()
        else:  # the gradient at 0, from which the first global model is looked for
            total = home.task.grad(torch.zeros(1, home.task.dim, dtype=torch.float64), rows.padded())[0].numpy()
        assert found(total) == sorted(total)
    messages = len(grid.log) / len(homes)
    assert messages < (50 if homes[0].task.name == "linear" else 80), messages  # see docs/remote-advice.md


def test_splines_and_products_are_those_of_one_process(federation):
    """The same knots and pairs; centers and scales are sums in another order."""
    path, homes, _, apart, out = federation
    if path.parent.name[:4] != "bent":
        assert apart.evidence.shape is None
        return
    here = advise(path)
    one, other = here.evidence.shape, apart.evidence.shape
    assert len(one.splines) == 1 and len(one.products) == 1 and one.booster is None
    assert (other.splines, other.products) == (one.splines, one.products)
    np.testing.assert_allclose(other.centers + other.scales, one.centers + one.scales, rtol=1e-12, atol=1e-12)
    assert apart.job.clients.features == here.job.clients.features
    effects = [effect["column"] for effect in here.column_effects]
    assert [effect["column"] for effect in apart.column_effects] == effects == ["u"]
    for pair in zip(apart.column_effects, here.column_effects):
        # The ends of the grid are quantiles of counts: a bin is up to 3% of a standard deviation wide there.
        np.testing.assert_allclose(*(effect["values"] for effect in pair), atol=0.06)
        np.testing.assert_allclose(*(effect["prediction"] for effect in pair), atol=0.2)
    stored = {file.stem for file in (homes[0].folder / "columns").iterdir()}
    assert len(stored) == 5  # candidates, the chosen columns, and these scaled by all rows and without each fold
    assert open_run(out).schema["shape"] == other.as_json()


def test_a_boosted_score_is_made_inside_every_fold(tmp_path, monkeypatch):
    """Trees learn what the linear models miss; the number of messages is announced, and clients predict with them."""
    monkeypatch.setattr(access, "MAX_TREES", 16)
    path = write_case("bent", tmp_path)
    path.write_text(path.read_text().replace('shape = "spline"', 'shape = "boosted"'))
    homes, said = homes_of(path, tmp_path / "state"), []
    grid = MemoryTransport(homes)
    apart = advise_federation(read_federation_request(path), grid, tmp_path / "run", report=said.append)
    (bound,) = [int(re.search(r"up to (\d+) messages", text)[1]) for text in said if "boosted score" in text]
    assert 40 < len(grid.log) / len(homes) < bound + 40
    assert "sums of derivatives" in homes[0].reveals and apart.evidence.shape.booster is not None
    table = apart.choice.table
    lowest = table.groupby("columns")["loss"].min()
    assert lowest["boosted"] < 0.6 * lowest["linear"]
    home = homes[0]  # scores of its rows come from trees without their inner fold
    usable, stacked = home.rows(("usable",)), [part for part in home.parts if part[0] == SHAPED and "usable" in part]
    digest = next(part[1] for part in stacked if home.columns.get(part[1]).without)
    shape, without = home.columns.get(digest)
    fold = assign_folds(usable, home.clients.keys, 3, home.run.training.seed + 1, number_distinct_rows(usable)).numpy()
    scores = np.stack([trees.score(usable.x.numpy())[:, 0] for trees in without])[fold, np.arange(len(fold))]
    found = home.rows((SHAPED, digest, "4-4", "usable")).x[:, 0]
    torch.testing.assert_close(found, shape(usable.x, torch.from_numpy(scores)[:, None])[:, 4])
    assert not np.allclose(scores, shape.booster.score(usable.x.numpy())[:, 0])
    for home in homes:
        stored = open_run(home.folder / RESULT_DIR)
        assert stored.models.personal.shape[1] == 6 and stored.schema["shape"]["booster"] is not None
        place = apart.job.clients.names.index(home.name)
        torch.testing.assert_close(stored.models.personal[0], apart.models.recommended[place])
        predicted = predict(home.folder / RESULT_DIR, home.path)[0]
        assert np.isfinite(predicted["y"]).all()
    personalize(tmp_path / "run", homes[0].path)


def test_a_policy_knows_histograms(federation):
    """A client that does not let histograms leave refuses the run, a single request, and records what it sent."""
    path, homes, _, _, _ = federation
    run, home = read_federation_request(path), homes[0]
    narrow = Policy(quantities=["schema", "advice"])
    asked = {"0": {"name": "count_bins", "part": ["usable"], "own": 0, "shared": {"columns": True}}}
    message = Payload({"run": home.digest, "calls": asked}, {"0/shared/columns": torch.tensor([0])})
    strict = AdviceClientNode(run, home.path, home.folder.parent, policy=narrow)
    assert "does not send histograms" in strict.answer("asked", message).fields["refused"]
    refused = home.answer("asked", message).fields.get("refused", "")
    assert ("its run file sets linear columns" in refused) == (home.run.advice.shape == "linear")
    sent = [json.loads(line) for line in (home.folder / SENT_FILE).read_text().splitlines()]
    has_histograms = any("count_bins" in line.get("computed", {}) for line in sent)
    assert has_histograms == ("bins" in home.reveals) == (home.run.advice.shape != "linear")
    if not has_histograms:
        narrow.check_run(run)
        return
    with pytest.raises(RequestError, match=r'does not let histograms leave.* set shape = "linear"'):
        narrow.check_run(run)
    Policy(quantities=["schema", "advice", "histograms"]).check_run(run)


def test_descriptions_of_columns_are_checked(tmp_path):
    store = ColumnStore(tmp_path)
    shape = ShapedColumns(2, ((0, (-1.0, 0.0, 1.0)),))
    digest = shape_digest(shape.as_json())
    with pytest.raises(RequestError, match="another digest"):
        store.add({"0" * 32: shape.as_json()})
    with pytest.raises(RequestError, match="is not here"):
        store.get(digest)
    with pytest.raises(RequestError, match="is not here"):
        store.get("../run")
    store.add({digest: shape.as_json()})
    assert ColumnStore(tmp_path).get(digest).columns == shape
    rows = Rows(torch.arange(8.0).double().view(4, 2), torch.zeros(4), torch.tensor([0]), torch.tensor([4]))
    assert torch.equal(store.shape_rows(digest, "0-0,2-2", rows).x, shape(rows.x)[:, [0, 2]])
    for wrong in ("0-3", "", "2-0", "1-1,0-0", "0-99999999999", "a-b"):
        with pytest.raises(RequestError, match="columns"):
            store.shape_rows(digest, wrong, rows)
    assert write_ranges([0, 1, 2, 5, 7, 8]) == "0-2,5-5,7-8" and read_ranges("0-2,5-5,7-8") == [0, 1, 2, 5, 7, 8]


def test_the_same_command_again_begins_again_and_ends_the_same(tmp_path):
    """Where the server was killed in the middle, and clients were started anew."""
    path = write_case("parkinsons", tmp_path)
    grid = MemoryTransport(homes_of(path, tmp_path / "state"))

    def killed(what, done, of):
        if (what, done) == ("asking the clients", 9):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        advise_federation(read_federation_request(path), grid, tmp_path / "run", on_progress=killed)
    assert (tmp_path / "run" / "run.toml").exists() and not (tmp_path / "run" / "models.safetensors").exists()
    again = advise_federation(
        read_federation_request(path), MemoryTransport(homes_of(path, tmp_path / "state")), tmp_path / "run"
    )
    assert_same_advice(again, advise(path))


def test_clients_predict_later_rows_from_earlier_ones(tmp_path):
    rng, folder = np.random.default_rng(0), tmp_path / "clients"
    folder.mkdir()
    for i in range(3):
        frame = pd.DataFrame({"day": rng.permutation(24), "x": rng.normal(size=24)})
        frame.assign(y=i * frame["x"] + 0.1 * rng.normal(size=24)).to_csv(folder / f"site {i}.csv", index=False)
    path = run_file(tmp_path / "run.toml", folder, "y", 'time_column = "day"', 'theory = false\nshape = "linear"')
    homes = homes_of(path, tmp_path / "state")
    apart = advise_federation(read_federation_request(path), MemoryTransport(homes), tmp_path / "run")
    here = advise(path)
    assert (here.clients["held_out_rows"] == 12).all()  # two folds of a quarter of the rows each
    assert_same_advice(apart, here)


@pytest.mark.parametrize("random", ["", " + (1 + u | site)"], ids=["all terms vary", "some terms vary"])
def test_a_formula_makes_the_same_columns_as_in_one_process(random, tmp_path):
    """Categories that not all clients have, a transformation, rows with missing cells; models and words are the
    same, and a client predicts from its own columns."""
    pytest.importorskip("formulaic")
    rng, folder = np.random.default_rng(1), tmp_path / "clients"
    folder.mkdir()
    for i in range(3):
        frame = pd.DataFrame({"u": rng.normal(size=30), "size": rng.uniform(1, 9, 30), "code": rng.integers(1, 4, 30)})
        frame["kind"] = rng.choice(["a", "b", "c"][: 2 + (i > 0)], 30)
        frame["y"] = (1 + i) * frame["u"] + np.log(frame["size"]) + (frame["kind"] == "b") + 0.3 * rng.normal(size=30)
        frame.loc[[3, 7], ["u", "kind"]] = [[np.nan, "a"], [1.0, None]]
        frame.assign(site=f"site {i}").to_csv(folder / f"site {i}.csv", index=False)
    formula = (
        f'formula = "y ~ u * kind + np.log(size) + C(code) + bs(u, knots=[0.0], lower_bound=-4, upper_bound=4){random}"'
    )
    data = formula if random else f'{formula}\nclient = "site"'
    path = run_file(tmp_path / "run.toml", folder, "y", data, "folds = 2\ntheory = false")
    homes = homes_of(path, tmp_path / "state")
    apart = advise_federation(read_federation_request(path), MemoryTransport(homes), tmp_path / "run")
    here = advise(path)
    assert_same_advice(apart, here)
    one, other = (result.job.clients.schema for result in (here, apart))
    assert other.features == one.features and len(one.features) == 12
    assert other.formula.fills == {name: pytest.approx(fill) for name, fill in one.formula.fills.items()}
    learned = {"transforms": {}, "fills": {}}
    assert other.formula.model_copy(update=learned) == one.formula.model_copy(update=learned)
    assert other.formula.all_vary == (not random) and int(here.clients["rows"].sum()) == 84
    predicted = predict(homes[0].folder / RESULT_DIR, homes[0].path)[0]
    assert len(predicted) == 30 and np.isfinite(predicted["y"]).all()


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["linear", "spline"])
@pytest.mark.parametrize("kind", ["count", "classes"])
def test_counts_and_several_classes(kind, shape, tmp_path):
    rng, folder = np.random.default_rng(0), tmp_path / "clients"
    folder.mkdir()
    for i in range(4):
        x = rng.normal(size=(50 + 5 * i, 2))
        z = x[:, 0] * (1 + 0.3 * i) - 0.5 * x[:, 1] ** (2 if shape == "spline" else 1) + 0.3 * i
        noisy = z + rng.normal(size=len(z))
        y = (
            rng.poisson(np.exp(z / 2))
            if kind == "count"
            else np.array(["a", "b", "c"])[1 + np.sign(noisy.round(0)).astype(int)]
        )
        pd.DataFrame({"u": x[:, 0], "v": x[:, 1], "y": y}).to_csv(folder / f"site {i}.csv", index=False)
    options = LINEAR_IN_TWO_FOLDS.replace("linear", shape)
    path = run_file(tmp_path / "run.toml", folder, "y", f'target_type = "{kind}"', options)
    apart = advise_federation(
        read_federation_request(path), MemoryTransport(homes_of(path, tmp_path / "state")), tmp_path / "run"
    )
    # Scores of classes are known up to a constant: only the ridge bends the loss along it.
    assert_same_advice(apart, advise(path), close=NEWTON_CLOSE)
    assert (apart.evidence.shape is not None) == (shape == "spline")


def test_questions_of_work_side_by_side_travel_together():
    letters = []

    def send(asked):
        letters.append(list(asked))
        return [10 * one for one in asked]

    calls = CallBatcher(send)

    def inner(k):
        return [calls.call(k) + calls.call(k + 1)]

    def outer(k):
        first = calls.call(k)
        return [first, *(one for (one,) in calls.map_independent(inner, [100 * k, 100 * k + 50]))]

    assert list(calls.map_independent(outer, [1, 2])) == [[10, 2010, 3010], [20, 4010, 5010]]
    assert letters == [[1, 2], [100, 150, 200, 250], [101, 151, 201, 251]]
    assert calls.call(7) == 70 and threading.active_count() >= 1


def test_work_that_fails_is_told_once_and_nothing_hangs():
    def send(asked):
        raise RequestError("the post is closed.")

    calls = CallBatcher(send)
    with pytest.raises(RequestError, match="closed"):
        list(calls.map_independent(lambda k: [calls.call(k)], range(3)))
    with pytest.raises(ValueError, match="one"):
        list(calls.map_independent(lambda k: [int("one" if k else "1")], range(2)))


def test_what_cannot_be_advised_is_told_in_a_sentence(tmp_path):
    path = write_case("heart", tmp_path)
    path.write_text(path.read_text() + "secure = true\n")
    with pytest.raises(RequestError, match="secure = true hides single messages"):
        advise_federation(
            read_federation_request(path), MemoryTransport(homes_of(path, tmp_path / "state")), tmp_path / "run"
        )
    path.write_text(path.read_text().replace("secure = true\n", "") + '[task]\nname = "hinge"\n')
    with pytest.raises(RequestError, match="advice across machines is for linear, logistic and Poisson tasks"):
        advise_federation(
            read_federation_request(path), MemoryTransport(homes_of(path, tmp_path / "state")), tmp_path / "run"
        )


def failing(home, after, failure):
    """Let a client fail from its answer number `after` on."""
    answer, count = home.answer, 0

    def instead(what, payload):
        nonlocal count
        count += what == "asked"
        return failure(answer(what, payload)) if what == "asked" and count > after else answer(what, payload)

    home.answer = instead


def no_numbers(told):
    return Payload(told.fields, {name: tensor * torch.nan for name, tensor in told.tensors.items()})


def test_those_who_fail_in_the_middle_are_left_out_and_the_others_begin_again(tmp_path, monkeypatch):
    """One answers what is no number, one refuses, one goes silent while a quorum is there: the advice is that of the
    tables of the others, and each of the three is named with its reason, at the server and at home."""
    clock = Clock()
    monkeypatch.setattr(Messenger, "__init__", partialmethod(Messenger.__init__, clock=clock, sleep=clock.sleep))
    path = write_case("parkinsons", tmp_path, clients=6)
    path.write_text(path.read_text() + "quorum = 0.5\ndeadline = 30\n")
    homes, said = homes_of(path, tmp_path / "state"), []
    liar, refuser, silent = homes[1], homes[2], homes[4]
    failing(liar, 3, no_numbers)
    failing(refuser, 6, lambda told: Payload({"refused": "the disk is full"}))
    failing(silent, 9, lambda told: grid.deaf.add("105") or told)
    grid = MemoryTransport(homes)
    grid.fate = lambda message, node, number: "lost" if node in grid.deaf else "fine"
    apart = advise_federation(read_federation_request(path), grid, tmp_path / "run", report=said.append)
    for home in (liar, refuser, silent):
        home.path.unlink()
    assert_same_advice(apart, advise(path))
    assert list(apart.job.clients.names) == [home.name for home in homes if home.path.exists()]
    reasons = {liar: "numbers that are not finite", refuser: "the disk is full", silent: "no reply in time"}
    dismissed = read_json(tmp_path / "run" / "federation.json")["dismissed"]
    for home, why in reasons.items():
        assert why in dismissed[home.name] and any(home.name in one and why in one for one in said)
        assert any(home.name in note and why in note for note in open_run(tmp_path / "run").advice["notes"])
    assert "the disk is full" in read_json(refuser.folder / DISMISSED_FILE)["why"]
    assert sum("start again" in one for one in said) == 3
    assert sorted(open_run(tmp_path / "run").run.federation.clients) == sorted(apart.job.clients.names)
    assert not (tmp_path / "run.before").exists()


def test_with_too_few_left_an_advice_ends_and_says_who_failed(tmp_path):
    path = write_case("parkinsons", tmp_path, clients=2)
    homes = homes_of(path, tmp_path / "state")
    failing(homes[1], 1, no_numbers)
    with pytest.raises(RequestError, match=f"'{homes[1].name}' does not answer .* not finite"):
        advise_federation(read_federation_request(path), MemoryTransport(homes), tmp_path / "run")
    asked = {"0": {"name": "rows", "part": ["usable"], "own": 0, "shared": {}}}
    refused = homes[0].answer("asked", Payload({"run": homes[0].digest, "calls": asked})).fields["refused"]
    assert "does not compute 'rows'" in refused
