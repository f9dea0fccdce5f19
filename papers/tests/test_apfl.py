"""apfl: every row of its catalogue has claims, and what its experiments measure is what they say.

That every experiment runs, and that no claim survives a change of sign, is tested for all papers in test_experiments.
"""

import numpy as np
import pytest
import torch

from mooring.algorithms.apfl import APFL, mix_models
from mooring.algorithms.fedavg_finetune import FedAvgFinetune
from mooring.engines.participation import sample_cohort
from mooring.engines.simulate import simulate
from mooring.engines.training_state import TrainingPlan
from mooring.tasks.logistic import Logistic
from mooring_papers import networks, training_curves
from mooring_papers.apfl import _images, _methods, fig4, fig6
from mooring_papers.base.results import Results, Trial
from mooring_papers.generators import Prototypes


def small(seed=0):
    return Prototypes(4, (20, 30, 40, 50), dim=3, classes=3, distance=3.0).make(seed)


def test_worth_is_the_mean_over_clients_of_their_own_rows():
    clients, task = small(), Logistic(3, 3, ridge=0.1)
    models = torch.randn(4, task.dim, dtype=torch.float64)
    losses, hits = [], []
    for i in range(4):
        x, y = clients.test.of(i)
        scores = x @ models[i, :9].view(3, 3) + models[i, 9:]
        losses.append(float(torch.nn.functional.cross_entropy(scores, y)))
        hits.append(float((scores.argmax(1) == y).double().mean()))
    assert training_curves.loss_and_accuracy(task, models, clients.test) == pytest.approx(
        (np.mean(losses), np.mean(hits))
    )


def test_follow_tells_deployed_and_common_models_apart():
    clients, task = small(), Logistic(3, 3, ridge=0.1)
    work = {"eta": 0.1, "decay": 0.01, "steps": 5, "batch": 8}
    how = {"rounds": 5, "every": 2, "seed": 1}
    tuned = training_curves.train_and_evaluate(FedAvgFinetune(**work, tune_steps=5), task, clients, common=True, **how)
    assert tuned["round"] == [1, 2, 4, 5]
    assert tuned["train loss"] != tuned["common train loss"]
    for alpha, series in ((0.0, "common train loss"), (0.3, None)):
        mixed = training_curves.train_and_evaluate(
            APFL(alpha=alpha, adapt="no", **work), task, clients, common=True, **how
        )
        assert mixed["common train loss"] == pytest.approx(tuned["common train loss"])  # w does not depend on alpha
        assert mixed["alpha"] == pytest.approx([alpha] * 4)
        if series:
            assert mixed["train loss"] == pytest.approx(mixed[series])


def test_the_worst_client_is_followed():
    clients, task = small(), Logistic(3, 3, ridge=0.1)
    method = APFL(alpha=0.4, adapt="no", eta=0.1, decay=0.01, steps=5, batch=8)
    plan = TrainingPlan(2, evaluate_every=2)
    models = simulate(method, task, clients, plan, weights="uniform", resolved=True).models()
    found = training_curves.train_and_evaluate(method, task, clients, rounds=2, every=2, seed=0)
    alone = [
        training_curves.loss_and_accuracy(task, models[[i]], clients.test.select(torch.tensor([i]))) for i in range(4)
    ]
    assert found["worst test loss"][-1] == pytest.approx(max(loss for loss, _ in alone))
    assert found["worst test accuracy"][-1] == pytest.approx(min(accuracy for _, accuracy in alone))


def test_online_clients_are_those_of_the_round():
    clients, task = small(), Logistic(3, 3, ridge=0.1)
    method = APFL(alpha=0.4, adapt="no", eta=0.1, decay=0.01, steps=5, batch=8, output="own")
    how = {"rounds": 3, "every": 1, "seed": 1, "participation": 0.5}
    online = training_curves.train_and_evaluate(method, task, clients, online=True, **how)
    found = {}

    def watch(now):
        found[now.t] = (now.models(), sample_cohort(now.plan, now.exchange.roster.keys, now.t))

    plan = TrainingPlan(3, 0.5, 1, evaluate_every=3)
    simulate(method, task, clients, plan, weights="uniform", resolved=True, watch=watch)
    for k, (models, who) in enumerate(found.values()):
        assert len(who) == 2
        losses = [float(task.risk(models[i][None], clients.train.select(i[None]).padded())) for i in who]
        assert online["train loss"][k] == pytest.approx(np.mean(losses))
    assert online["train loss"] != training_curves.train_and_evaluate(method, task, clients, **how)["train loss"]


def test_step_sizes_and_mixtures_follow_the_paper():
    for run in _methods.runs("APFL 0.25", _methods.ADAPTIVE, _methods.FEDAVG, _methods.SCAFFOLD):
        assert _methods.algorithm(run).eta_schedule == "inverse" and _methods.algorithm(run).decay == 0.01
    adaptive, variant = (_methods.algorithm(run) for run in (_methods.ADAPTIVE, _methods.VARIANT))
    assert (adaptive.alpha_pull, adaptive.alpha_by) == (0.0, "mixture")  # Eq. 6
    assert (variant.alpha_pull, variant.alpha_by) == (0.02, "parts")


def test_fine_tuning_does_not_depend_on_alpha():
    """FedAvg's fine-tuning is plain SGD from w."""
    new = fig6.synthetic(0, 0.5, 3, 50)
    w = torch.zeros(fig6.TASK.dim, dtype=torch.float64)
    work = {"eta": 0.1, "decay": 0.01, "eta_schedule": "epochs", "epochs": 1, "batch": 20, "adapt": "no"}
    half, most = (list(fig6.joining(APFL(alpha=a, **work), w, new, 7, 0, moves_w=True)) for a in (0.5, 0.9))
    assert len(half) == fig6.EPOCHS + 1 and torch.equal(half[0].w, half[0].v)
    torch.testing.assert_close(half[-1].w, most[-1].w)
    losses = [fig6.worths(new, mix_models(stay.alpha, stay.v, stay.w))[0] for stay in half]
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("alpha", [0.25, 0.5, 0.75])
def test_a_new_client_keeps_the_global_model_fixed(alpha):
    """Eq. 7: its mixture moves by alpha^2 of a gradient step at w, here on all rows."""
    new = fig6.synthetic(0, 0.5, 3, 50)
    w = torch.linspace(-1, 1, fig6.TASK.dim, dtype=torch.float64)
    method = APFL(alpha=alpha, eta=0.1, epochs=1, batch=0, adapt="no")
    first, tuned = (list(fig6.joining(method, w, new, 7, 0, moves_w=moves))[1] for moves in (False, True))
    assert torch.equal(first.w, w.expand_as(first.w))
    moved = mix_models(first.alpha, first.v, first.w) - w
    torch.testing.assert_close(moved, alpha**2 * (tuned.w - w))


def test_every_method_has_a_run():
    for run in _methods.runs("APFL 0.25", _methods.ADAPTIVE, _methods.FEDAVG, _methods.SCAFFOLD_LOCAL, "pFedMe"):
        assert _methods.algorithm(run).steps == 10
    assert _methods.runs(_methods.FEDAVG, _methods.FEDAVG_LOCAL) == ["FedAvg"]
    assert _methods.algorithm("SCAFFOLD", scaffold={"eta": 0.05}).eta == 0.05
    assert _methods.algorithm("SCAFFOLD", steps=20).tune_steps == 20
    assert _methods.algorithm("FedAvg", steps=20).output == "own"
    with pytest.raises(KeyError):
        _methods.algorithm("FedSomething")


def test_rows_are_dealt_by_classes_or_at_random():
    by_class = _images.partition_images(0, "digits", 10, 2)
    assert all(len(by_class.train.of(i)[1].unique()) == 2 for i in range(10))
    at_random = _images.partition_images(0, "digits", 10, 10)
    assert min(len(at_random.train.of(i)[1].unique()) for i in range(10)) > 6


def test_damping_compares_what_sampling_costs_each_mixture():
    def results(costs):
        values = {
            (m, r): 1.0 + (cost if r == 0.3 else 0.0) for m, cost in zip(_methods.FIXED, costs) for r in (0.3, 0.7)
        }
        return Results(
            [
                Trial({"run": m, "participation": r}, seed, {"train loss": [v + 0.01 * seed]})
                for (m, r), v in values.items()
                for seed in range(3)
            ]
        )

    check = fig4.damped("train loss")
    alone = [t for t in results((0.3, 0.2, 0.1)).trials if t.seed == 0]
    assert check(Results(alone)).outcome == "open"  # one repeat
    assert check(results((0.3, 0.2, 0.1))).is_held
    assert not check(results((0.3, 0.1, 0.2))).is_held
    assert not check(results((-5.3, -5.4, -5.5))).is_held  # losses below 0 are no losses


def test_newcomers_take_no_part_in_the_training():
    clients = small()
    old, new = fig6.part(clients, torch.arange(3)), fig6.part(clients, torch.tensor([3]))
    assert old.names == clients.names[:3] and new.names == clients.names[3:]
    assert torch.equal(new.train.of(0)[0], clients.train.of(3)[0])


@pytest.mark.parametrize("make, shape", [(networks.mlp(6, 4, 3), (6,)), (networks.cnn(1, 8, 3, (2, 3), 4), (1, 8, 8))])
def test_networks_give_a_score_per_class(make, shape):
    assert make()(torch.randn(5, *shape)).shape == (5, 3)


def test_lstm_equals_the_fused_one_on_texts_without_padding():
    torch.manual_seed(0)
    ours = networks.lstm(20, 2, embedding=4, hidden=5, layers=2)()
    fused = torch.nn.LSTM(4, 5, num_layers=2, batch_first=True)
    with torch.no_grad():
        for k, (into, again) in enumerate(zip(ours.inputs, ours.states)):
            getattr(fused, f"weight_ih_l{k}").copy_(into.weight)
            getattr(fused, f"weight_hh_l{k}").copy_(again.weight)
            getattr(fused, f"bias_ih_l{k}").copy_(into.bias)
            getattr(fused, f"bias_hh_l{k}").zero_()
        tokens = torch.randint(1, 20, (3, 6))
        expected = ours.out(fused(ours.embedding(tokens))[0][:, -1])
        assert torch.allclose(ours(tokens), expected, atol=1e-6)
        padded = torch.cat([tokens, torch.zeros(3, 2, dtype=torch.long)], 1)
        assert torch.allclose(ours(padded), expected, atol=1e-6)
