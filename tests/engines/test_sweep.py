"""Runs that are trained as one cohort end where each would have ended alone."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from mooring.algorithms.fedavg import FedAvg
from mooring.algorithms.fedprox_personal import FedProxPersonal
from mooring.algorithms.local import Local
from mooring.algorithms.pfedme import PFedMe
from mooring.core.errors import WorkError
from mooring.engines import compare as comparing
from mooring.engines import sweep as sweeping
from mooring.engines.compare import compare, resume_comparison
from mooring.engines.loop import run_steps
from mooring.engines.simulate import simulate, simulation_steps
from mooring.engines.simulator import Simulator
from mooring.engines.sweep import Variant, group_methods, max_runs_per_cohort, run_together, sweep
from mooring.engines.training_state import TrainingPlan
from mooring.runs.directory import MODELS_FILE, open_run
from mooring.tasks.linear import Linear
from tests.support.problems import PROBLEMS, linear_clients

PLAN = TrainingPlan(rounds=4, participation=0.6)
FAMILIES = {
    "fedavg": [FedAvg(eta=eta, steps=3, batch=4) for eta in (0.01, 0.1)],
    "fedprox": [FedProxPersonal(lam=lam, inner="sgd", eta=0.1 / (1 + lam), steps=3, batch=4) for lam in (0.1, 2.0)],
    "exact": [FedProxPersonal(lam=lam, inner="exact") for lam in (0.1, 2.0)],
    "pfedme": [PFedMe(lam=lam, eta=0.1, inner_eta=0.1 / (1 + lam), steps=3, batch=4) for lam in (0.5, 2.0)],
    "falling": [FedAvg(eta=eta, decay=0.1, epochs=1, batch=4, server_step=0.5) for eta in (0.01, 0.1)],
}  # fmt: skip


@pytest.mark.parametrize("problem", ["linear", "logistic"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_variant_ends_as_in_a_run_of_its_own(problem, family, monkeypatch):
    task, clients = PROBLEMS[problem]()
    variants = [Variant(algorithm, seed) for algorithm in FAMILIES[family] for seed in (0, 7)]
    lone = [simulate(one.algorithm, task, clients, replace(PLAN, seed=one.seed)) for one in variants]
    monkeypatch.setattr(Simulator, "ask", None)  # all of them together, or not at all
    for one, found in zip(lone, sweep(variants, task, clients, PLAN)):
        torch.testing.assert_close(found.server.w, one.outcome.state.server.w, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(found.last.test, one.outcome.last.test, rtol=1e-9, atol=1e-11, equal_nan=True)
        assert found.last.train_loss == pytest.approx(one.outcome.last.train_loss, rel=1e-9)


def test_variants_that_have_nothing_in_common_run_one_by_one():
    task, clients = PROBLEMS["linear"]()
    variants = [Variant(Local(), 0), Variant(FedAvg(eta=0.1, steps=2), 0), Variant(FedAvg(eta=0.1, steps=3), 0)]
    plan = replace(PLAN, participation=1.0)
    for variant, found in zip(variants, sweep(variants, task, clients, plan)):
        alone = simulate(variant.algorithm, task, clients, plan)
        assert found.last.train_loss == alone.outcome.last.train_loss


def test_runs_at_other_clients_or_of_another_task_are_visited_apart():
    task, clients = PROBLEMS["linear"]()
    problems = [(task, clients), (task, linear_clients(seed=1)), (Linear(3, ridge=5.0), clients)]
    lams = (0.1, 2.0)

    def run(task, clients, lam):
        return simulation_steps(FedProxPersonal(lam=lam, inner="sgd", eta=0.05, steps=3, batch=4), task, clients, PLAN)

    found = run_together([run(task, clients, lam) for task, clients in problems for lam in lams])
    for (task, clients, lam), (one, _) in zip([(*given, lam) for given in problems for lam in lams], found):
        alone = run_steps(run(task, clients, lam))
        torch.testing.assert_close(one.server.w, alone.server.w, rtol=1e-9, atol=1e-11)


def test_a_run_that_fills_a_chunk_is_answered_by_its_own_clients(monkeypatch):
    task, clients = PROBLEMS["linear"]()
    monkeypatch.setattr(sweeping, "update_cohorts_together", None)
    plan = replace(PLAN, participation=1.0)
    runs = [simulation_steps(one, task, clients, plan, chunk=len(clients)) for one in FAMILIES["fedprox"]]
    for one, (found, _) in zip(FAMILIES["fedprox"], run_together(runs)):
        assert torch.equal(found.server.w, simulate(one, task, clients, plan, chunk=len(clients)).server.w)


LAMS = ("0.05", "0.5", "5")
STEPS = "inner=sgd steps=4 batch=4"
METHODS = ["local", *(f"fedprox_personal lam={lam} {STEPS}" for lam in LAMS), "fedavg steps=3"]


def table(classes=3):
    """Ten clients, no two of them with as many rows."""
    rng = np.random.default_rng(0)
    who = np.repeat(np.arange(10), np.arange(15, 45, 3))
    x = rng.normal(size=(len(who), 4))
    score = (
        x @ rng.normal(size=(4, classes)) + rng.normal(size=(10, classes))[who] + rng.gumbel(size=(len(who), classes))
    )
    return pd.DataFrame(x, columns=list("abcd")).assign(client=who, target=[f"class {k}" for k in score.argmax(1)])


HOW = {"rounds": 7, "participation": 6, "evaluate_every": 2, "checkpoint_every": 1, "threads": 1}


def test_a_comparison_is_the_same_side_by_side_and_one_by_one(tmp_path, monkeypatch):
    asked = []
    plain = Simulator.ask
    monkeypatch.setattr(Simulator, "ask", lambda self, *how: asked.append(self.algorithm.name) or plain(self, *how))
    found = compare(table(), METHODS, out=tmp_path / "together", **HOW)
    assert sorted(set(asked)) == ["fedavg", "local"]
    monkeypatch.setattr(comparing, "max_runs_per_cohort", lambda *_: 1)
    alone = compare(table(), METHODS, out=tmp_path / "apart", **HOW)
    assert asked.count("fedprox_personal") == 7 * len(LAMS)
    for name in ("methods", "seeds", "curves", "clients"):
        one, other = getattr(found, name), getattr(alone, name)
        pd.testing.assert_frame_equal(
            one.drop(columns="seconds", errors="ignore"), other.drop(columns="seconds", errors="ignore"), rtol=1e-9
        )
    runs = sorted(path.parent.relative_to(tmp_path / "apart") for path in (tmp_path / "apart").rglob(MODELS_FILE))
    assert len(runs) == len(METHODS)
    for run in runs:
        one, other = (open_run(tmp_path / how / run).rounds.drop(columns="seconds") for how in ("together", "apart"))
        pd.testing.assert_frame_equal(one, other, rtol=1e-9)  # counts of rows, gradients and bytes among them
    assert found.seeds["seconds"].gt(0).all()


@pytest.mark.parametrize("classes, cohort", [(3, 6), (2, 5), (2, 7)])
@pytest.mark.parametrize("family", ["fedprox_personal lam={} inner=sgd steps=4 batch=3", "fedavg eta={} batch=3"])
def test_runs_that_were_interrupted_at_different_rounds_resume_to_the_same_bytes(tmp_path, family, classes, cohort):
    how = HOW | {"participation": cohort}
    methods = ["local", *(family.format(number) for number in (0.02, 0.1, 0.3))]

    def stop(what, done, rounds):
        if what.endswith("=0.1") and done == 4:
            raise InterruptedError

    compare(table(classes), methods, out=tmp_path / "whole", **how)
    with pytest.raises(InterruptedError):
        compare(table(classes), methods, out=tmp_path / "cut", progress=stop, **how)
    cut = list((tmp_path / "cut").rglob(MODELS_FILE))
    resume_comparison(tmp_path / "cut", source=table(classes))
    whole = {path.parent.name: path.read_bytes() for path in (tmp_path / "whole").rglob(MODELS_FILE)}
    assert len(whole) == 4 and len(cut) == 2, "those before the one that failed are done"
    assert {path.parent.name: path.read_bytes() for path in (tmp_path / "cut").rglob(MODELS_FILE)} == whole


def test_a_method_that_diverges_does_not_take_those_before_it_along(tmp_path):
    methods = [f"fedprox_personal lam={lam} eta={eta} {STEPS}" for lam, eta in ((0.1, 0.1), (1e3, 1e3), (1, 0.1))]
    with pytest.raises(WorkError, match="diverged"):
        compare(table(), methods, out=tmp_path / "run", **{**HOW, "rounds": 30})
    assert len(list((tmp_path / "run").rglob(MODELS_FILE))) == 1


def test_what_is_worth_training_side_by_side():
    task, clients = PROBLEMS["logistic"]()
    cohort = 5
    assert max_runs_per_cohort(task, clients, cohort, chunk=4 * cohort) == 4
    assert max_runs_per_cohort(task, clients, cohort, chunk=cohort - 1) == 1, "a run fills a chunk by itself"
    prox = {lam: FedProxPersonal(lam=lam, inner="sgd") for lam in (0.1, 1.0, 2.0)}
    others = {"shaped": FedProxPersonal(lam=[0.1] * 5), "told": FedProxPersonal(lam=1.0, tol=1e-3, inner="descent")}
    methods = {**prox, **others, "one": FedAvg(eta=0.1), "two": FedAvg(eta=0.1, steps=3)}
    assert group_methods(methods, 2) == [[0.1, 1.0], [2.0], ["shaped"], ["told"], ["one"], ["two"]]
