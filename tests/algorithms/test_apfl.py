"""APFL: gradients, adaptation, projection, averaging and schedules."""

import numpy as np
import pytest
import torch

from mooring.algorithms.apfl import APFL, alpha_gradient, mix_models
from mooring.algorithms.base import build
from mooring.core.cohort import Round
from mooring.core.errors import RequestError
from mooring.core.local_training import schedule
from mooring.data.clients import from_arrays
from mooring.engines import local_update
from mooring.engines.participation import sample_cohort
from mooring.engines.simulate import simulate as library_simulate
from mooring.engines.training_state import TrainingPlan
from mooring.tasks.linear import Linear
from mooring.theory import apfl_schedule
from tests.algorithms.lossy_simulator import LossySimulator, train
from tests.algorithms.naive import problem
from tests.support.problems import PROBLEMS, linear_clients, settled_simulator, simulate

FIRST = Round(1, 1, 5, 5, 1.0, 0)
STEP = 1e-6


def drawn_models(task, m=5):
    draw = torch.Generator().manual_seed(1)
    v, w = (torch.randn(m, task.dim, generator=draw, dtype=torch.float64) for _ in range(2))
    return v, w, torch.rand(m, generator=draw, dtype=torch.float64)


@pytest.mark.parametrize("name", ["linear", "logistic", "softmax"])
def test_gradient_of_alpha_is_the_finite_difference(name):
    task, clients = PROBLEMS[name]()
    rows = clients.train.full(task)
    v, w, alpha = drawn_models(task)
    slope = alpha_gradient(v, w, task.grad(mix_models(alpha, v, w), rows))
    up, down = (task.loss(mix_models(alpha + h, v, w), rows) for h in (STEP, -STEP))
    torch.testing.assert_close(slope, (up - down) / (2 * STEP), rtol=1e-6, atol=1e-6)


def test_step_of_v_carries_the_chain_rule():
    """v moves along the gradient in v of L_i(alpha v + (1 - alpha) w), which has a factor alpha."""
    task, clients = PROBLEMS["logistic"]()
    fields = {"alpha": 0.3, "adapt": "no", "eta": 0.2, "steps": 1}
    algorithm, exchange, server = settled_simulator(build("apfl", fields), task, clients)
    v, w, _ = drawn_models(task)
    client, server = exchange.states.take(torch.arange(5))._replace(v=v), server._replace(w=w[0])
    after, _ = local_update.client_update(algorithm, task, server, client, exchange.data, FIRST)
    rows = exchange.data.train.full(task)
    for j, unit in enumerate(torch.eye(task.dim, dtype=torch.float64)):
        up, down = (task.loss(mix_models(client.alpha, v + h * unit, w[0]), rows) for h in (STEP, -STEP))
        torch.testing.assert_close((v - after.v)[:, j] / 0.2, (up - down) / (2 * STEP), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("eta", [0.2, 20.0])
@pytest.mark.parametrize("part", ["train", "validation"])
def test_once_a_round_alpha_takes_one_clipped_step_at_the_models_before_it(part, eta):
    task, clients = PROBLEMS["logistic"]()
    fields = {"alpha": 0.5, "adapt": "round", "adapt_on": part, "eta": eta, "decay": 0.0, "steps": 4}
    algorithm, exchange, server = settled_simulator(build("apfl", fields), task, clients)
    v, w, _ = drawn_models(task)
    client, server = exchange.states.take(torch.arange(5))._replace(v=v), server._replace(w=w[0])
    after, _ = local_update.client_update(algorithm, task, server, client, exchange.data, FIRST)
    rows = getattr(exchange.data, part).full(task)
    slope = alpha_gradient(v, w[0], task.grad(mix_models(client.alpha, v, w[0]), rows))
    torch.testing.assert_close(after.alpha, (client.alpha - eta * slope).clamp(0, 1))
    assert (after.alpha != 0.5).all()
    assert eta < 1 or {0.0, 1.0} == set(after.alpha.tolist())


def test_held_out_rows_keep_an_overfitting_client_at_the_common_model():
    """Own rows say "alone", held-out rows say "together": alpha follows those that it is adapted on."""
    rng = np.random.default_rng(3)
    truth = rng.normal(size=20)
    xs = [rng.normal(size=(60, 20)) for _ in range(30)]
    ys = [x @ truth + 3 * rng.normal(size=60) for x in xs]
    parts = [np.array(["train"] * 24 + ["validation"] * 36)] * 30
    clients = from_arrays(xs, ys, parts=parts, kind="regression")
    ends = {}
    for part in ("train", "validation"):
        _, _, exchange = simulate(build("apfl", {"adapt_on": part}), Linear(20), clients, rounds=40)
        ends[part] = float(exchange.states.take(torch.arange(30)).alpha.mean())
    assert ends["validation"] < 0.2 < 0.6 < ends["train"]


def test_alpha_can_be_pulled_to_the_common_model():
    task, clients = PROBLEMS["linear"]()
    ends = []
    for pull in (0.0, 100.0):
        fields = {"adapt": "step", "adapt_on": "train", "alpha_pull": pull, "eta": 0.01}
        _, _, exchange = simulate(build("apfl", fields), task, clients)
        ends.append(exchange.states.take(torch.arange(5)).alpha)
    assert (ends[0] > 0.4).all() and (ends[1] < 0.01).all()


def test_clients_without_validation_rows_keep_their_mixture():
    rng = np.random.default_rng(0)
    xs, ys = [rng.normal(size=(9, 2)) for _ in range(2)], [rng.normal(size=9) for _ in range(2)]
    parts = [np.array(["train"] * 9), np.array(["train"] * 6 + ["validation"] * 3)]
    clients = from_arrays(xs, ys, parts=parts, kind="regression")
    for chunk in (0, 1):
        _, _, exchange = simulate(build("apfl", {}), Linear(2, ridge=0.1), clients, chunk=chunk)
        alpha = exchange.states.take(torch.arange(2)).alpha
        assert float(alpha[0]) == 0.5 and float(alpha[1]) != 0.5
    nobody = from_arrays(xs, ys, kind="regression")
    assert settled_simulator(build("apfl", {}), Linear(2), nobody)[0].adapt_on == "train"
    with pytest.raises(RequestError, match="needs validation rows"):
        settled_simulator(build("apfl", {"adapt_on": "validation"}), Linear(2), nobody)


def test_without_a_ball_the_mixture_becomes_the_local_fit_and_in_a_ball_it_does_not():
    """apfl, Remark 2; single steps, so that the w_i in the mixture is the global model."""
    task, clients = PROBLEMS["linear"]()
    fields = {"alpha": 0.5, "adapt": "no", "decay": 0.0, "steps": 1}
    own = task.solve(clients.train.full(task))
    _, free, _ = simulate(build("apfl", fields), task, clients, rounds=600)
    torch.testing.assert_close(free, own, rtol=0, atol=1e-3)
    server, _, exchange = simulate(build("apfl", {**fields, "radius": 0.5}), task, clients, rounds=100)
    v = exchange.states.take(torch.arange(5)).v
    assert float(v.norm(dim=1).max()) <= 0.5 + 1e-12 and float(server.w.norm()) <= 0.5 + 1e-12
    assert float((mix_models(torch.full((5,), 0.5, dtype=v.dtype), v, server.w) - own).norm()) > 0.1


AVERAGE = {"alpha": 0.7, "adapt": "no", "eta": 0.05, "decay": 0.0, "steps": 3, "output": "average", "shift": 2.0}


@pytest.mark.parametrize("exchange_of", ["all replies", "lossy"])
def test_average_counts_the_rounds_that_a_client_missed(exchange_of):
    """Brute force over all iterations: an absent client's v, and in an empty round w, stand still and count on."""
    task, clients, naive, p = problem()
    rounds, m = 9, len(clients)
    lossy = exchange_of == "lossy"
    server, exchange = train(
        build("apfl", AVERAGE), task, clients, LossySimulator if lossy else LossySimulator.__base__, rounds, 0.4
    )
    w, v = np.zeros(4), np.zeros((m, 4))
    total, weight, t, empty = np.zeros((m, 4)), 0.0, 0, 0
    for r in range(1, rounds + 1):
        cohort = sample_cohort(TrainingPlan(participation=0.4), exchange.data.keys, r).numpy()
        if lossy:
            lost = torch.rand(len(cohort), generator=torch.Generator().manual_seed(r)) < 1 / 3
            cohort = cohort[~lost.numpy()]
        empty += len(cohort) == 0
        copies = {i: w.copy() for i in cohort}
        for _ in range(3):
            t += 1
            for i in cohort:
                mixed = 0.7 * v[i] + 0.3 * copies[i]
                v[i], copies[i] = v[i] - 0.05 * 0.7 * naive[i].grad(mixed), copies[i] - 0.05 * naive[i].grad(copies[i])
            virtual = sum(p[i] * copies[i] for i in cohort) / p[cohort].sum() if len(cohort) else w
            total += (t + 2.0) ** 2 * (0.7 * v + 0.3 * virtual)
            weight += (t + 2.0) ** 2
        w = virtual
    assert (empty > 0) == lossy
    end = Round(rounds, rounds, m, m, 1.0, 0)
    taken = np.flatnonzero(exchange.states.merged.numpy())  # who was never asked deploys the global model
    models = exchange.models(server, end).numpy()
    np.testing.assert_allclose(models[taken], (total / weight)[taken], rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(server.w.numpy(), w, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("alpha,any_alpha", [(0.9999, False), (0.5, True)])
def test_theory_sets_the_steps_and_weights_of_the_theorems(alpha, any_alpha):
    task, clients = PROBLEMS["linear"]()
    fields = {"alpha": alpha, "adapt": "no", "eta": "theory", "radius": 9.0, "steps": 4}
    algorithm, exchange, _ = settled_simulator(build("apfl", fields), task, clients)
    facts = exchange.client_statistics(task.start())
    mu, smooth = float(facts.convex.min()), float(facts.smooth.max())
    a = apfl_schedule.shift(mu, smooth, 4, any_alpha)
    assert algorithm.shift == a
    for t in (1, 2, 50):
        taken = algorithm.eta / (1 + algorithm.decay * (t - 1))
        assert taken == pytest.approx(apfl_schedule.step_size(t, mu, a, any_alpha), rel=1e-12)


def test_theory_says_where_it_does_not_hold():
    task, clients = PROBLEMS["linear"]()
    with pytest.warns(UserWarning, match="Theorem 2 covers fixed mixtures alpha >= 0.9.*set radius"):
        settled_simulator(build("apfl", {"adapt": "no", "eta": "theory"}), task, clients)
    with pytest.raises(RequestError, match="strongly convex"):
        settled_simulator(build("apfl", {"eta": "theory", "radius": 1.0}), Linear(12), linear_clients(d=12))


@pytest.mark.parametrize("fields", [{}, {"adapt": "no", "epochs": 2}])
def test_average_needs_a_fixed_mixture_and_equal_steps(fields):
    with pytest.raises(RequestError, match="fixed mixture and equal numbers of steps"):
        APFL(output="average", **fields)


def test_every_client_may_have_its_own_mixture():
    """alpha_i = 0 deploys the global model, 1 the client's own; whoever was never asked has its own mixture too."""
    task, clients = PROBLEMS["linear"]()
    own = [0.0, 0.25, 0.5, 0.75, 1.0]
    fields = {"adapt": "no", "eta": 0.1, "decay": 0.0, "steps": 3}
    server, models, exchange = simulate(build("apfl", {**fields, "alpha": own}), task, clients)
    for i, alpha in enumerate(own):
        _, alike, _ = simulate(build("apfl", {**fields, "alpha": alpha}), task, clients)
        torch.testing.assert_close(models[i], alike[i], rtol=1e-13, atol=1e-13)
    assert torch.equal(models[0], server.w)
    first = exchange.states.__class__(local_update.first_states(exchange.algorithm, task, task.start())[1], 5).take(
        torch.tensor([3, 1])
    )
    waiting = local_update.finetune(
        exchange.algorithm, task, server, first, exchange.data.select(torch.tensor([3, 1])), FIRST
    )
    assert waiting.alpha.tolist() == [0.75, 0.25]


@pytest.mark.parametrize(
    "alpha,sentence",
    [([0.1, 1.2], "alpha must be between 0 and 1, got 1.2"), ([0.1, 0.2], "alpha has 2 numbers, one per")],
)
def test_a_wrong_list_of_mixtures_is_one_sentence(alpha, sentence):
    with pytest.raises(RequestError, match=sentence):
        settled_simulator(build("apfl", {"alpha": alpha}), *PROBLEMS["linear"]())


def test_the_smallest_mixture_decides_the_theorem():
    task, clients = PROBLEMS["linear"]()
    fields = {"adapt": "no", "eta": "theory", "radius": 9.0}
    shifts = [
        settled_simulator(build("apfl", {**fields, "alpha": alpha}), task, clients)[0].shift
        for alpha in ([0.9999] * 5, [0.9999] * 4 + [0.5], 0.5)
    ]
    assert shifts[0] > shifts[1] == shifts[2]


def test_the_schedule_of_theorem_3():
    """1/(2 sqrt(5) L sqrt(T)) at every local iteration, T = rounds * steps, with full gradients."""
    task, clients = PROBLEMS["linear"]()
    algorithm, exchange, server = settled_simulator(build("apfl", {"eta": "nonconvex", "steps": 4}), task, clients)
    smooth = float(exchange.client_statistics(task.start()).smooth.max())
    assert (algorithm.batch, algorithm.decay) == (0, 0.0)
    turn = Round(3, 25, 5, 5, 1.0, 0)
    _, count, eta = schedule(algorithm, exchange.data, turn)
    expected = apfl_schedule.nonconvex_step_size(smooth, 25 * 4, 4)
    assert eta.tolist() == pytest.approx([expected] * 5, rel=1e-12) and count.tolist() == [4] * 5
    with pytest.raises(RequestError, match="needs steps <= rounds, got 4 and 3"):
        local_update.client_update(
            algorithm, task, server, exchange.states.take(torch.arange(5)), exchange.data, turn._replace(rounds=3)
        )
    with pytest.raises(RequestError, match="is for full gradients; set batch = 0, got 4"):
        settled_simulator(build("apfl", {"eta": "nonconvex", "batch": 4}), task, clients)


def test_a_client_may_mix_with_its_own_copy():
    """output = "own" against the three updates step by step, over rounds of two of five clients."""
    task, clients = PROBLEMS["logistic"]()
    eta, steps, alpha, rounds = 0.3, 3, 0.4, 4
    fields = {"alpha": alpha, "adapt": "no", "eta": eta, "decay": 0.0, "steps": steps, "batch": 0, "output": "own"}
    plan = TrainingPlan(rounds, 0.4, 3, evaluate_every=rounds)
    algorithm, exchange, server = settled_simulator(build("apfl", fields), task, clients)
    p, start = exchange.roster.p, server.w.clone()
    w, v, own, seen = start.clone(), start.expand(5, -1).clone(), start.expand(5, -1).clone(), set()
    for t in range(1, rounds + 1):
        who = sample_cohort(plan, exchange.roster.keys, t)
        for i in who.tolist():
            rows = clients.train.select(torch.tensor([i])).full(task)
            copy = w[None].clone()
            for _ in range(steps):
                slope = task.grad(alpha * v[i][None] + (1 - alpha) * copy, rows)
                copy = copy - eta * task.grad(copy, rows)
                v[i] = v[i] - eta * alpha * slope[0]
            own[i] = copy[0]
        w = (p[who, None] * own[who]).sum(0) / p[who].sum()
        seen |= set(who.tolist())
    found = library_simulate(algorithm, task, clients, plan, resolved=True, w0=start)
    visited = sorted(seen)
    assert len(visited) > 2
    torch.testing.assert_close(found.models()[visited], (alpha * v + (1 - alpha) * own)[visited])
    torch.testing.assert_close(found.server.w, w)
