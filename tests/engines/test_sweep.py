"""Runs that are trained as one cohort end where each would have ended alone."""

from dataclasses import replace

import pytest
import torch

from mooring.algorithms.fedavg import FedAvg
from mooring.algorithms.fedprox_one_stage import FedProxOneStage
from mooring.algorithms.local import Local
from mooring.engines import sweep as engine
from mooring.engines.loop import Plan
from mooring.engines.simulate import simulate
from mooring.engines.sweep import Variant, sweep
from tests.problems import PROBLEMS

PLAN = Plan(rounds=4, participation=0.6)
FAMILIES = {
    "fedavg": [FedAvg(eta=eta, steps=3, batch=4) for eta in (0.01, 0.1)],
    "fedprox": [FedProxOneStage(lam=lam, inner="sgd", eta=0.1 / (1 + lam), steps=3, batch=4) for lam in (0.1, 2.0)],
    "exact": [FedProxOneStage(lam=lam, inner="exact") for lam in (0.1, 2.0)],
    "falling": [FedAvg(eta=eta, decay=0.1, epochs=1, batch=4, server_step=0.5) for eta in (0.01, 0.1)],
}  # fmt: skip


@pytest.mark.parametrize("problem", ["linear", "logistic"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_variant_ends_where_it_would_alone(problem, family, monkeypatch):
    task, clients = PROBLEMS[problem]()
    variants = [Variant(algorithm, seed) for algorithm in FAMILIES[family] for seed in (0, 7)]
    lone = [simulate(one.algorithm, task, clients, replace(PLAN, seed=one.seed)) for one in variants]
    monkeypatch.setattr(engine.loop, "run", None)  # all of them together, or not at all
    for one, found in zip(lone, sweep(variants, task, clients, PLAN)):
        torch.testing.assert_close(found.server.w, one.outcome.progress.server.w, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(found.last.test, one.outcome.last.test, rtol=1e-9, atol=1e-11, equal_nan=True)
        assert found.last.train_loss == pytest.approx(one.outcome.last.train_loss, rel=1e-9)


def test_variants_that_have_nothing_in_common_run_one_by_one():
    task, clients = PROBLEMS["linear"]()
    variants = [Variant(Local(), 0), Variant(FedAvg(eta=0.1, steps=2), 0), Variant(FedAvg(eta=0.1, steps=3), 0)]
    plan = replace(PLAN, participation=1.0)
    for variant, found in zip(variants, sweep(variants, task, clients, plan)):
        alone = simulate(variant.algorithm, task, clients, plan)
        assert found.last.train_loss == alone.outcome.last.train_loss
