"""Minibatches: every pass visits each row once, and a client's draws depend on nobody else."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mooring.core import minibatches as core_minibatches
from mooring.core.cohort import CohortData, Round, Rows, weighted_mean
from mooring.core.errors import RequestError
from mooring.core.minibatches import DRAWS, count_local_steps, minibatches
from mooring.core.seeds import client_key, generator, random_words, uniforms
from mooring.tasks.linear import Linear

ROUND = Round(3, 10, 4, 4, 1.0, 7)


def cohort(sizes):
    """Row j of client i holds the single feature 100 i + j."""
    rows = Rows.stack(
        [torch.arange(n, dtype=torch.float64)[:, None] + 100 * i for i, n in enumerate(sizes)],
        [torch.zeros(n, dtype=torch.float64) for n in sizes],
    )
    keys = np.array([client_key(f"client {i}") for i in range(len(sizes))], dtype=np.uint64)
    return CohortData(keys, torch.arange(len(sizes)), torch.ones(len(sizes)) / len(sizes), rows, rows)


def drawn(data, c, **how):
    """The rows that client c sees, one list a step."""
    out = []
    for step in minibatches(Linear(1, intercept=False), data, ROUND, **how):
        real = step.batch.weight[c] > 0
        out.append(step.batch.x[c, real, 0].int().tolist())
    return out


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 13), min_size=1, max_size=5), st.integers(1, 15), st.integers(1, 3))
def test_an_epoch_visits_every_row_once(sizes, batch, epochs):
    data = cohort(sizes)
    for c, n in enumerate(sizes):
        steps = [step for step in drawn(data, c, batch=batch, epochs=epochs) if step]
        per_epoch = -(-n // batch)
        assert len(steps) == epochs * per_epoch
        for e in range(epochs):
            seen = [row for step in steps[e * per_epoch : (e + 1) * per_epoch] for row in step]
            assert sorted(seen) == [100 * c + j for j in range(n)]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 13), min_size=2, max_size=5), st.integers(1, 6), st.sampled_from(DRAWS))
def test_draws_do_not_depend_on_the_company(sizes, batch, draws):
    data = cohort(sizes)
    for c, n in enumerate(sizes):
        if batch >= n and draws != "replacement":
            continue  # then every step sees all rows, in whatever order
        together = drawn(data, c, batch=batch, steps=5, draws=draws)
        alone = drawn(data.select(torch.tensor([c])), 0, batch=batch, steps=5, draws=draws)
        assert together == alone


def test_rounds_slots_and_epochs_give_other_orders():
    data = cohort([50])
    first, second = drawn(data, 0, batch=50, epochs=1), drawn(data, 0, batch=10, epochs=2)
    assert second[:5] != second[5:]
    assert drawn(data, 0, batch=10, epochs=1, slot=1) != drawn(data, 0, batch=10, epochs=1, slot=0)
    assert sorted(first[0]) == list(range(50))


def test_weights_sum_to_one_and_finished_clients_carry_none():
    data = cohort([3, 10])
    steps = list(minibatches(Linear(1, intercept=False), data, ROUND, batch=4, epochs=1))
    assert len(steps) == 3
    torch.testing.assert_close(steps[0].batch.weight.sum(1), torch.ones(2, dtype=torch.float64))
    assert steps[1].batch.weight.sum(1).tolist() == [0.0, 1.0]
    assert steps[1].active.tolist() == [False, True]


def test_local_work_is_steps_or_epochs():
    with pytest.raises(RequestError, match="steps or by epochs"):
        count_local_steps(torch.tensor([3]), 2, 5, 5)


def test_words_are_pure_and_look_uniform():
    many = uniforms(1, "batches", np.arange(20_000), 5)
    assert np.array_equal(many, uniforms(1, "batches", np.arange(20_000), 5))
    assert abs(many.mean() - 0.5) < 0.01 and abs(many.var() - 1 / 12) < 0.003
    assert abs(np.corrcoef(many[:-1], many[1:])[0, 1]) < 0.03
    assert len(np.unique(random_words(1, "data", np.arange(1000)[:, None], np.arange(50)))) == 50_000
    assert not np.array_equal(uniforms(2, "batches", np.arange(10)), uniforms(1, "batches", np.arange(10)))
    assert generator(3, "data", 1).normal() == generator(3, "data", 1).normal() != generator(3, "data", 2).normal()


def test_the_mean_does_not_depend_on_chunks():
    rng = torch.Generator().manual_seed(0)
    message = torch.randn(50, 7, generator=rng)
    p = torch.rand(50, generator=rng)
    expected = (p.double()[:, None] * message.double()).sum(0) / p.double().sum()
    torch.testing.assert_close(weighted_mean(message, p).double(), expected, rtol=1e-5, atol=1e-6)
    assert weighted_mean(None, p) is None


def test_blocks_hold_everyone_once_and_waste_little():
    sizes = [1, 500, 3, 40, 45, 900, 20, 2]
    rows = cohort(sizes).train
    blocks = rows.blocks()
    assert sorted(torch.cat(blocks).tolist()) == list(range(len(sizes)))
    for block in blocks:
        held = rows.size[block]
        assert int(held.max()) <= max(2 * int(held.min()), 16)
    assert max(len(block) for block in rows.blocks(most=2)) <= 2


@pytest.mark.parametrize("most", [None, 1, 3])
@pytest.mark.parametrize("room", [1, 10, 100])
def test_blocks_are_as_long_as_their_rules_allow(most, room, monkeypatch):
    sizes = [1, 0, 500, 3, 40, 45, 900, 20, 2, 17, 33, 33]
    rows = cohort(sizes).train
    monkeypatch.setattr("mooring.core.cohort.MAX_PADDED_BYTES", room * rows.x[:1].numel() * rows.x.element_size())
    expected: list[list[int]] = []
    for place in sorted(range(len(sizes)), key=lambda i: sizes[i]):
        joins = expected and (most is None or len(expected[-1]) < most)
        if joins:
            first, width = expected[-1][0], len(expected[-1]) + 1
            joins = sizes[place] * width <= room and sizes[place] <= max(2 * sizes[first], 16)
        expected[-1].append(place) if joins else expected.append([place])
    assert [block.tolist() for block in rows.blocks(most)] == expected


def test_independent_draws_are_fresh_samples_without_replacement():
    """Each step draws from all rows: no row twice in a step, some twice in what a pass would be; every row alike."""
    data = cohort([10, 3])
    steps = drawn(data, 0, batch=4, steps=400, draws="independent")
    assert all(len(set(step)) == 4 for step in steps)
    assert any(set(one) & set(other) for one, other in zip(steps[::2], steps[1::2]))
    often = np.bincount([row for step in steps for row in step], minlength=10)
    assert often.min() > 110 and often.max() < 210  # 160 expected, standard deviation below 10
    assert all(sorted(step) == [100, 101, 102] for step in drawn(data, 1, batch=4, steps=3, draws="independent"))


@pytest.mark.parametrize("draws", ["passes", "independent"])
@pytest.mark.parametrize("steps", [1, 11, 12])
def test_passes_that_are_drawn_at_once_are_those_of_clients_of_other_sizes(draws, steps, monkeypatch):
    """Clients of equal size draw several passes at once, those of unequal sizes each by itself."""
    data, uneven = cohort([10, 10]), cohort([10, 9])
    expected = drawn(uneven, 0, batch=4, steps=steps, draws=draws)
    for words in (1 << 14, 60, 1):
        monkeypatch.setattr(core_minibatches, "MAX_WORDS_AT_ONCE", words)
        assert drawn(data, 0, batch=4, steps=steps, draws=draws) == expected


def test_unknown_draws_are_refused():
    with pytest.raises(RequestError, match="draws must be one of 'passes', 'independent', 'replacement', got 'all'"):
        drawn(cohort([5]), 0, batch=2, steps=1, draws="all")
