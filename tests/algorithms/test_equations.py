"""Table 2, equations: a few rounds of every algorithm equal a naive, loop-only transcription of its paper.

The transcriptions use numpy, one client and one row at a time, on half squared losses with a ridge: L(w) = 1/(2n) sum_j
(x_j'w + b - y_j)^2 + ridge/2 |w|^2. Each is told twice: everybody with all rows, and three of five clients of unequal
weight a round with minibatches. Methods that need everybody are told once, or with minibatches only.
"""

from functools import partial

import numpy as np
import pytest
import torch

from mooring.algorithms.base import algorithm_names, build
from tests.algorithms import naive_fedprox as fedprox
from tests.algorithms import naive_kernel as kernel
from tests.algorithms import naive_partial as partly
from tests.algorithms import naive_personal as personal
from tests.algorithms.naive import BATCH, ETA, LAM, RIDGE, ROUNDS, SAMPLED, STEPS, everyone, problem, sampled
from tests.support.problems import simulate


def naive_local(story):
    return np.zeros(4), [c.prox(np.zeros(4), 0.2) for c in story.clients]


def naive_global(story):
    return fedprox.naive_common(story)


SGD = {"eta": ETA, "steps": STEPS}
SERVER = {**SGD, "server_step": 0.9}
DECAY = {"decay": personal.DECAY}
ONE_STAGE = {"lam": LAM, "gamma": 2.0, "inner": "sgd", **SGD}
PFEDME = {**personal.PFEDME, **DECAY, "server_decay": 0.5}
PER_FEDAVG = {"inner_eta": 0.03, **SGD, **DECAY, "tune_steps": 2}
APFL = {**SGD, **personal.APFL_ADAPTIVE}
FADED = [
    (name, {**fields, **SGD, **DECAY, "eta_schedule": fading}, partial(transcription, rate=rate))
    for fading, rate in personal.FADINGS.items()
    for name, fields, transcription in (
        ("local", {"ridge": 0.2, "inner": "sgd"}, personal.naive_local_sgd),
        ("fedavg", {"server_step": 0.9}, personal.naive_fedavg),
        ("scaffold", {"server_step": 0.9}, personal.naive_scaffold),
        ("apfl", APFL if fading != "horizon" else {**APFL, "decay": 0.0}, personal.naive_apfl),
    )
    if not (name == "apfl" and fading == "horizon")  # more steps than rounds: refused, see test_apfl.py
]

# name, fields, transcription of a story -> (common model, every client's deployed model)
SAMPLED_TOO = [
    ("local", {"ridge": 0.2, "inner": "sgd", **SGD}, personal.naive_local_sgd),
    ("fedavg", SERVER, personal.naive_fedavg),
    ("fedavg", {**SERVER, "aggregation": "elastic"}, partial(personal.naive_fedavg, weights="elastic")),
    ("fedavg", {**SERVER, "server_decay": 0.5}, partial(personal.naive_fedavg, server_decay=0.5)),
    *FADED,
    ("fedprox", {"lam": LAM}, fedprox.naive_shared),
    ("fedprox", {"lam": LAM, "growth": "kinked"}, fedprox.naive_kinked),
    ("fedprox", fedprox.SHARED_THEORY | {"eta": ETA}, fedprox.naive_shared_theory),
    ("fedprox_personal", ONE_STAGE, fedprox.naive_one_stage),
    ("fedprox_personal", {**ONE_STAGE, "server_decay": 0.5}, partial(fedprox.naive_one_stage, server_decay=0.5)),
    ("fedprox_personal", {**ONE_STAGE, "aggregation": "elastic"}, partial(fedprox.naive_one_stage, weights="elastic")),
    ("fedprox_personal", {"lam": fedprox.MOOR, "gamma": 0.8}, fedprox.naive_one_stage_moor),
    ("fedprox_two_stage", fedprox.TWO_STAGE, fedprox.naive_two_stage),
    ("fedprox_two_stage", fedprox.INVERSE, fedprox.naive_two_stage_inverse),
    ("apfl", APFL, personal.naive_apfl),
    ("apfl", {**APFL, "alpha_by": "parts"}, partial(personal.naive_apfl, by_parts=True)),
    ("apfl", {**APFL, "eta_ratio": 0.3}, partial(personal.naive_apfl, ratio=0.3)),
    ("apfl", {**SGD, **personal.APFL_FIXED}, personal.naive_apfl_fixed),
    ("apfl", {**SGD, **personal.APFL_AVERAGE}, personal.naive_apfl_average),
    ("scaffold", SERVER, personal.naive_scaffold),
    ("scaffold", {**SERVER, "server_decay": 0.5}, partial(personal.naive_scaffold, server_decay=0.5)),
    ("fedavg_finetune", {**SERVER, "tune_steps": 2}, personal.tuned(personal.naive_fedavg, 2)),
    ("scaffold_finetune", {**SERVER, "tune_steps": 5}, personal.tuned(personal.naive_scaffold, 5)),
    ("ditto", {"lam": LAM, "personal_eta": 0.04, **SGD, **DECAY}, personal.naive_ditto),
    ("pfedme", PFEDME, personal.naive_pfedme),
    ("pfedme", {**PFEDME, "inner": "exact"}, personal.naive_pfedme_exact),
    ("per_fedavg", PER_FEDAVG, personal.naive_per_fedavg),
    ("per_fedavg", {**PER_FEDAVG, "variant": "first-order"}, personal.naive_per_fedavg_first_order),
    ("fedmspp", {"lam": LAM}, fedprox.naive_mspp),
    ("fedmspp", {"lam": LAM, "growth": "kinked"}, fedprox.naive_mspp_kinked),
    ("fedmspp", fedprox.DESCENT, fedprox.naive_mspp_descent),
    (
        "fedmspp",
        fedprox.MSPP_THEORY | {"eta": ETA, "batch": fedprox.MSPP_BATCH},
        fedprox.naive_mspp_theory,
    ),
    ("fedper", SGD, partly.naive_fedper),
    ("lg_fedavg", SGD, partly.naive_lg),
    ("fedbn", {**SGD, "personal": "intercept"}, partly.naive_fedper),
    ("fedrep", {**SGD, "head_steps": 3}, partly.naive_fedrep),
    ("fedrep", {**SGD, "head_steps": 3, "refit": False}, partial(partly.naive_fedrep, refit=False)),
    ("fedbabu", {**SGD, "tune_steps": 2}, partly.naive_fedbabu),
    ("fedbabu", {**SGD, "tune_steps": 2, "tune": "head"}, partly.naive_fedbabu_head),
    ("fedala", {**SGD, "sample": 1.0, "weight_eta": 0.7, "first_passes": 2}, partly.naive_fedala),
    ("feddyn", {**SGD, "lam": LAM, "inner": "sgd"}, partly.naive_feddyn),
    ("feddyn", {"lam": LAM, "inner": "exact"}, partly.naive_feddyn_exact),
    ("ifca", SGD, partly.naive_ifca),
    ("fedrod", SGD, partly.naive_fedrod),
    ("knn_per", {**SGD, **personal.KNN}, personal.naive_knn_per),
    ("moon", SGD, partial(personal.naive_fedavg, server_step=1.0)),  # a table has no body
]
EVERYONE_ONLY = [
    ("local", {"ridge": 0.2}, naive_local),
    ("pooled", {}, naive_global),
    ("l2gd", {"lam": LAM, "q": personal.Q, "eta": ETA}, personal.naive_l2gd),
    ("dichotomous", {**fedprox.KNOWN_R, "radius": 0.5}, fedprox.naive_common),
    ("dichotomous", {**fedprox.KNOWN_R, "radius": 2.0}, fedprox.naive_alone),
    *((name, fields, lambda story, run=run: run(story.clients, story.p)) for name, fields, run in kernel.EQUATIONS),
]


def label(row):
    return row if isinstance(row, str) else ""


def test_every_algorithm_has_a_row():
    assert {name for name, _, _ in SAMPLED_TOO + EVERYONE_ONLY} == set(algorithm_names())


def compare(name, fields, transcription, story, **how):
    task, clients, _, _ = problem()
    algorithm = build(name, fields)
    server, models, exchange = simulate(algorithm, task, clients, rounds=ROUNDS, seed=story.seed, **how)
    w, expected = transcription(story)
    torch.testing.assert_close(server.w, torch.from_numpy(w), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(models, torch.from_numpy(np.stack(expected)), rtol=1e-9, atol=1e-10)
    return exchange


@pytest.mark.parametrize("name,fields,transcription", SAMPLED_TOO + EVERYONE_ONLY, ids=label)
def test_equals_the_papers_equations(name, fields, transcription):
    whole = {"batch": 0} if "batch" in build(name, {}).__dataclass_fields__ and "kernel" not in name else {}
    compare(name, whole | fields, transcription, everyone())


@pytest.mark.parametrize("name,fields,transcription", SAMPLED_TOO, ids=label)
def test_equals_them_with_sampled_clients_and_minibatches(name, fields, transcription):
    compare(name, {"batch": BATCH, **fields}, transcription, sampled(), participation=SAMPLED)


def test_l2gd_equals_its_equations_with_minibatches():
    fields = {"lam": LAM, "q": personal.Q, "eta": ETA, "batch": BATCH}
    compare("l2gd", fields, personal.naive_l2gd, everyone()._replace(batch=BATCH))


def test_the_stories_differ_where_it_matters():
    """Unequal weights, cohorts whose weights do not sum to the mean, and clients that come unequally often."""
    story = sampled()
    assert len(set(np.round(story.p, 6))) == len(story.p) and RIDGE > 0
    assert all(abs(sum(story.elastic(t).values()) - 1) > 0.01 for t in range(ROUNDS))
    assert len({sum(i in cohort for cohort in story.cohorts) for i in range(len(story.p))}) > 1
    assert min(len(c.y) for c in story.clients) > BATCH
