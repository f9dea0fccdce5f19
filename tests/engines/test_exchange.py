"""The contract between loop and clients, held by two exchanges: the simulator, and one whose post is bad."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from mooring.algorithms.base import Algorithm, algorithm_names, build, find
from mooring.core.cohort import select
from mooring.core.errors import RequestError
from mooring.engines.exchange import BEST, LAST, Exchange, Scores
from mooring.engines.fit import continue_fit, fit, start_fit
from mooring.engines.loop import collect_models, mean_over_rows, resolve, run
from mooring.engines.prepare import Job, make_simulator, prepare
from mooring.engines.request import request
from mooring.engines.simulator import Simulator
from mooring.engines.training_state import LOSS_COLUMNS, TrainingPlan, TrainingState
from mooring.runs.directory import open_run
from mooring.runs.tensor_files import flatten
from tests.algorithms.cases import CASES
from tests.engines.lossy import COMES, LATE, TWICE, LossyExchange, bad_post, homes_of
from tests.support.problems import PROBLEMS

# An exchange does not depend on the loss: one problem for each row of the table. That a local update by a cohort of one
# is that by a cohort, on every problem, is in tests/algorithms/test_contract.py.
FIRST_ROWS = {f"{name}-{i}": (name, fields, problems[0]) for i, (name, fields, problems) in enumerate(CASES)}
FIRST_ROWS = {label: row for label, row in FIRST_ROWS.items() if not find(row[0]).pooled}
BY_ALGORITHM = {name: (name, fields, problem) for name, fields, problem in reversed(FIRST_ROWS.values())}
# What is lost is a client's state: each algorithm by its defaults, and in every other form that adds to the state.
STATEFUL = {"optimizer", "momentum", "optimizer_state", "aggregation", "per_client"}
BY_STATE = BY_ALGORITHM | {label: row for label, row in FIRST_ROWS.items() if STATEFUL & row[1].keys()}


class Absent(Simulator):
    """A simulator in which the letters that `bad_post` loses or delays were never written."""

    def ask(self, server, cohort, round, deadline=None):
        replies = super().ask(server, cohort, round, deadline)
        here = torch.tensor([bad_post(round.t, place) in COMES for place in cohort.tolist()])
        return replies._replace(clients=cohort[here], message=select(replies.message, here))


def lossy(task, clients, **how):
    return LossyExchange(task, clients.names, homes_of(task, clients, clients.weights()), **how)


def whole(algorithm, task, exchange, **plan):
    """(outcome, models of the last round, models of the best)."""
    plan = TrainingPlan(**{"rounds": 4, "evaluate_every": 1} | plan)
    ready, server = resolve(algorithm, task, exchange, plan.seed)
    outcome = run(ready, exchange, plan, TrainingState(server))
    return outcome, *(collect_models(outcome, exchange, plan, which) for which in (LAST, BEST))


def assert_same(one, other):
    """To rounding: sums over clients are ordered alike, sums over rows are not (padding)."""
    pairs = [(one[1], other[1]), (one[2], other[2])]
    ours, theirs = (flatten("server", outcome.state.server) for outcome, *_ in (one, other))
    assert ours.keys() == theirs.keys()
    pairs += [(ours[name], theirs[name]) for name in ours]
    for mine, right in pairs:
        torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12, equal_nan=True)
    assert one[0].best.t == other[0].best.t and one[0].last.t == other[0].last.t
    assert one[0].best.test_loss == pytest.approx(other[0].best.test_loss, rel=1e-9)


def some(name):
    return {} if find(name).full_participation else {"participation": 3}


@pytest.mark.parametrize("name,fields,problem", BY_ALGORITHM.values(), ids=BY_ALGORITHM)
def test_clients_on_their_own_machines_equal_the_simulator(name, fields, problem):
    task, clients = PROBLEMS[problem]()
    apart = whole(build(name, fields), task, lossy(task, clients), **some(name))
    here = whole(build(name, fields), task, Simulator(task, clients, clients.weights()), **some(name))
    assert_same(apart, here)
    for mine, right in zip(apart[0].state.records, here[0].state.records):
        same = mine.keys() - {"seconds", "gradient_reached", *LOSS_COLUMNS}
        assert {k: mine[k] for k in same} == pytest.approx({k: right[k] for k in same}, nan_ok=True)


@pytest.mark.parametrize("name,fields,problem", BY_STATE.values(), ids=BY_STATE)
def test_lost_and_late_messages_count_as_absence(name, fields, problem):
    """Lost, late, repeated and stale replies: the run is the one in which those letters were never written."""
    task, clients = PROBLEMS[problem]()
    exchange = lossy(task, clients, fate=bad_post)
    apart = whole(build(name, fields), task, exchange, **some(name))
    assert_same(apart, whole(build(name, fields), task, Absent(task, clients, clients.weights()), **some(name)))
    if apart[0].rounds > 1:
        assert len(exchange.dropped) > 3


def test_every_kind_of_message_loss_happens():
    """Over these rounds each kind of accident happens, and each late or repeated letter is dropped once it comes."""
    task, clients = PROBLEMS["linear"]()
    exchange = lossy(task, clients, fate=bad_post)
    outcome, *_ = whole(build("fedprox_personal", {}), task, exchange, rounds=20)
    fates = [bad_post(t, place) for t in range(1, 21) for place in range(5)]
    # A letter that comes twice comes once more a round later; what the last round delays never comes.
    late = sum(bad_post(t, place) in (LATE, TWICE) for t in range(1, 20) for place in range(5))
    assert len(exchange.dropped) == fates.count(TWICE) + late > 20
    accepted = [sum(bad_post(t, place) in COMES for place in range(5)) for t in range(1, 21)]
    assert [record["accepted"] for record in outcome.state.records] == accepted
    assert max(home.most for home in exchange.homes) <= 4  # without snapshots: where it stands, the best, the new one
    assert set(outcome.state.offenders.values()) == {"no reply in time"}


def test_pooled_algorithms_are_refused_where_rows_are_not():
    task, clients = PROBLEMS["linear"]()
    for name in ("pooled", "dichotomous"):
        with pytest.raises(RequestError, match="needs all rows in one place"):
            resolve(build(name, {}), task, lossy(task, clients))


class Only:
    """An exchange of which nothing but the contract can be reached."""

    def __init__(self, exchange):
        self.__dict__["_inside"] = exchange

    def __getattr__(self, name):
        if name not in vars(Exchange) or name.startswith("_"):
            raise AssertionError(f"{name} is not in the contract")
        return getattr(self._inside, name)

    def __setattr__(self, name, value):
        raise AssertionError("an exchange is not to be changed from outside")


def test_the_loop_reaches_for_nothing_but_the_contract():
    task, clients = PROBLEMS["linear"]()
    simulator = Simulator(task, clients, clients.weights())
    assert_same(
        whole(build("apfl", {}), task, Only(simulator)),
        whole(build("apfl", {}), task, Simulator(task, clients, clients.weights())),
    )


class Sketch(NamedTuple):
    w: Tensor


@dataclass(frozen=True)
class Sketched(Algorithm):
    """A client's state is a few numbers, how many is resolved from the data."""

    size: Any = "auto"
    paper: ClassVar[str] = "none"
    reveals: ClassVar[str] = "nothing"

    def resolve(self, task, facts):
        return replace(self, size=int(facts.n.min()))

    def init(self, task, w0):
        return Sketch(w0), Sketch(w0.new_zeros(self.size))

    def client_update(self, server, client, local):
        return Sketch(client.w + 1), local.expand(server.w)

    def server_update(self, server, mean, round):
        return Sketch(server.w + mean)

    def personal_model(self, server, client):
        return server.w + client.w.sum(1, keepdim=True)


@pytest.mark.parametrize("exchange_of", [lossy, lambda task, clients: Simulator(task, clients, clients.weights())])
def test_start_may_use_what_settle_found(exchange_of):
    task, clients = PROBLEMS["linear"]()
    _, models, _ = whole(Sketched(), task, exchange_of(task, clients))
    assert torch.equal(models, torch.full((5, 4), 4.0 * int(clients.train.size.min()), dtype=torch.float64))


def test_who_does_not_answer_is_left_out_of_the_mean():
    risk = torch.tensor([1.0, torch.nan, 5.0], dtype=torch.float64)
    assert mean_over_rows(Scores(risk, torch.tensor([3, 0, 1]))) == 2.0
    assert np.isnan(mean_over_rows(Scores(risk, torch.tensor([3, 2, 1]))))  # a model that is nan is not an absence
    assert np.isnan(mean_over_rows(Scores(risk, torch.tensor([0, 0, 0]))))
    task, clients = PROBLEMS["linear"]()
    everyone, _, _ = whole(build("fedavg", {}), task, lossy(task, clients))
    some, _, _ = whole(build("fedavg", {}), task, lossy(task, clients, silent=(0, 3)))
    known = torch.tensor([1, 2, 4])
    rows = clients.test.size[known].double()
    assert some.last.test_loss == pytest.approx(float(rows @ everyone.last.test[known] / rows.sum()), rel=1e-12)


@pytest.fixture
def table(tmp_path):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(160, 3)), columns=["a", "b", "c"])
    frame["who"] = [f"client {i % 5}" for i in range(160)]
    frame["y"] = frame["a"] - frame["b"] * (1 + (np.arange(160) % 5)) / 4 + rng.normal(size=160)
    frame.to_csv(tmp_path / "rows.csv", index=False)
    return tmp_path / "rows.csv"


def job_of(table, name, fields, **more):
    """A job whose data are elsewhere, and the machines that hold them."""
    how = {"client": "who", "target": "y", "rounds": 7, "evaluate_every": 1, "checkpoint_every": 3, "threads": 1}
    asked = request(str(table), purpose="fit", algorithm=name, settings=fields, **how | more)
    job = prepare(asked)
    known = ("target_mean", "target_scale", "kind", "classes", "features", "schema", "placement", "title", "notes")
    bare = SimpleNamespace(**{fact: getattr(job.clients, fact) for fact in known})
    p = job.clients.weights(asked.training.weights)
    return Job(job.run, bare, job.task), job, homes_of(job.task, job.clients, p)


@pytest.mark.parametrize("name", [name for name in algorithm_names() if not find(name).pooled])
def test_every_algorithm_resumes_with_lost_messages(name, table, tmp_path):
    """The server is killed after round 5, two rounds after its last checkpoint: its clients are ahead of it."""
    fields = dict(next(fields for other, fields, problems in CASES if other == name and "linear" in problems))

    def run(out, tell=lambda *_: None):
        job, real, homes = job_of(table, name, fields, **some(name))
        exchange = LossyExchange(real.task, real.clients.names, homes, fate=bad_post)
        return start_fit(job, out, tell, exchange)

    right = run(tmp_path / "whole")
    homes = None

    def stop(what, done, rounds):
        if what == name and done == 5:
            raise InterruptedError

    job, real, homes = job_of(table, name, fields, **some(name))
    exchange = LossyExchange(real.task, real.clients.names, homes, fate=bad_post)
    try:
        found = start_fit(job, tmp_path / "cut", stop, exchange)
    except InterruptedError:
        again = LossyExchange(real.task, real.clients.names, homes, fate=bad_post)
        again.post = exchange.post  # what was on its way before the kill comes after it
        directory = open_run(tmp_path / "cut")
        found, _ = continue_fit(Job(directory.run, job.clients, job.task), directory, again)
    for which in ("last", "best"):
        one, other = getattr(found.trained, which), getattr(right.trained, which)
        assert one.t == other.t and torch.equal(one.common, other.common) and torch.equal(one.models, other.models)
    assert max(home.most for home in homes) <= 7


def test_fit_needs_no_rows_at_the_server(table, tmp_path):
    """Without the rows there is no pooled referee; training alone is done by the clients, who keep their models."""
    job, real, homes = job_of(table, "fedprox_personal", {})
    exchange = LossyExchange(real.task, real.clients.names, homes, keep_models_home=True)
    result = start_fit(job, tmp_path / "run", exchange=exchange)
    pooled = fit(table, client="who", target="y", rounds=7, evaluate_every=1, threads=1)
    assert np.isnan(result.summary["pooled"]) and result.clients["pooled"].isna().all()
    for who in ("local", "personal"):
        np.testing.assert_allclose(result.clients[who], pooled.clients[who], rtol=1e-9)
        assert result.summary[who] == pytest.approx(pooled.summary[who], rel=1e-9)
    saved = open_run(tmp_path / "run").models
    assert saved.personal is None and saved.clients == tuple(real.clients.names)
    torch.testing.assert_close(saved.common, pooled.trained.common, rtol=1e-11, atol=1e-11)
    with pytest.raises(RequestError, match="keeps its own model"):
        result.predict([[0.0, 0.0, 0.0]], "client 1")


def test_the_simulators_snapshot_brings_everything_back(table):
    real = job_of(table, "apfl", {})[1]
    exchange = make_simulator(real)
    ready, server = resolve(build("apfl", {}), real.task, exchange)
    outcome = run(ready, exchange, TrainingPlan(rounds=3, evaluate_every=1), TrainingState(server))
    twin = make_simulator(real)
    resolve(build("apfl", {}), real.task, twin)
    twin.restore(exchange.snapshot())
    for which in (LAST, BEST):
        plan = TrainingPlan(rounds=3)
        assert torch.equal(collect_models(outcome, twin, plan, which), collect_models(outcome, exchange, plan, which))
