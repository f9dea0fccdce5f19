"""Secure aggregation: the sum is right, a single message looks like noise, and too few survivors give nothing."""

import importlib

import numpy as np
import pytest
import torch
from scipy.stats import kstest

pytest.importorskip("flwr", reason="flwr is not installed; the extra is mooring[flower]")

from flwr.common import bytes_to_ndarray
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key

from mooring.core.errors import RequestError, WorkError
from mooring.engines.fit import fit
from mooring.engines.flower import secure
from mooring.engines.flower.conversation import converse
from mooring.engines.flower.packing import unpack
from tests.engines.local_grid import LocalGrid
from tests.engines.test_flower import HOW, clock, homes_of, run_of, table  # noqa: F401

ROUNDS = 4
SECURE = {"secure": True, "share_models": False, "secure_range": 4.0}


def masked_numbers(grid):
    """What the server saw of single clients in the round's third letter, as shares of the modulus."""
    seen = []
    for content in grid.seen:
        record = content.config_records.get(RECORD_KEY_CONFIGS, {})
        for data in record.get(Key.MASKED_PARAMETERS, []):
            seen += (
                (np.atleast_1d(bytes_to_ndarray(data)).astype(np.float64) % secure.MODULUS / secure.MODULUS)
                .ravel()
                .tolist()
            )
    return np.array(seen)


class Watched(LocalGrid):
    """A grid that keeps what it hands to the server."""

    def __init__(self, homes):
        super().__init__(homes)
        self.seen = []

    def pull_messages(self, message_ids):
        found = super().pull_messages(message_ids)
        self.seen += [message.content for message in found if message.has_content()]
        return found


def looks_like_noise(numbers):
    return len(numbers) > 60 and kstest(numbers, "uniform").pvalue > 1e-4


def run_secure(table, tmp_path, name="fedavg", fate=None, **more):  # noqa: F811
    run = run_of(table, name, rounds=ROUNDS, keep="last", federation=SECURE | more)
    grid = Watched(homes_of(run, table, tmp_path / "state"))
    grid.fate = fate or grid.fate
    return converse(run, grid, tmp_path / "run"), grid


def test_the_sum_is_that_of_the_messages_and_nothing_else_is_seen(table, tmp_path, clock):  # noqa: F811
    result, grid = run_secure(table, tmp_path)
    here = fit(table, algorithm="fedavg", **HOW | {"rounds": ROUNDS, "keep": "last"})
    # Each round adds at most one rounding step per client, over the smallest total weight (1), and a later round is a
    # contraction of the earlier ones' error or near one; weights are rounded to 2^-22 of the whole as well.
    step = 2 * SECURE["secure_range"] / secure.STEPS
    right = here.trained.last.common
    assert float((result.trained.last.common - right).abs().max()) < 4 * ROUNDS * len(here.clients) * step * (
        1 + float(right.abs().max())
    )
    assert not torch.equal(result.trained.last.common, right)
    assert looks_like_noise(masked_numbers(grid))
    assert result.rounds["samples"].tolist() == here.rounds["samples"].tolist()


def test_without_masks_the_same_look_sees_the_messages(table, tmp_path, clock, monkeypatch):  # noqa: F811
    """The negative control: masks of zeros."""
    client = importlib.import_module("flwr.client.mod.secure_aggregation.secaggplus_mod")
    server = importlib.import_module("flwr.server.workflow.secure_aggregation.secaggplus_workflow")

    def no_mask(seed, modulus, shapes):
        return [np.zeros(shape, dtype=np.int64) for shape in shapes]

    for module in (client, server):
        monkeypatch.setattr(module, "pseudo_rand_gen", no_mask)
    _, grid = run_secure(table, tmp_path)
    assert not looks_like_noise(masked_numbers(grid))


def stage_of(message):
    """Which letter of the protocol it is, by what it holds once its client has read it."""
    record = message.content.config_records.get(RECORD_KEY_CONFIGS)
    if record is None:
        return None
    known = {Key.SAMPLE_NUMBER: "setup", Key.CIPHERTEXT_LIST: "collect", Key.ACTIVE_NODE_ID_LIST: "unmask"}
    return next((stage for key, stage in known.items() if key in record), "share")


@pytest.mark.parametrize(
    "stage,first",
    [("collect", 3), *(pytest.param(stage, 4, marks=pytest.mark.slow) for stage in ("setup", "share", "unmask"))],
)
def test_one_client_may_go_in_the_middle(stage, first, table, tmp_path, clock):  # noqa: F811
    """Three of four are enough once all have shared their keys, and the mean is that of the three; before and after,
    the round begins again."""
    lost = []

    def fate(message, node, number):
        if stage_of(message) == stage and node == 103 and not lost:
            lost.append(number)
            return "lost"
        return "fine"

    result, _ = run_secure(table, tmp_path, fate=fate, deadline=5.0)
    assert lost and result.rounds["accepted"].tolist() == [first, 4, 4, 4]


def test_too_few_survivors_give_nothing(table, tmp_path, clock):  # noqa: F811
    def fate(message, node, number):
        return "lost" if stage_of(message) == "collect" and node in (102, 103) else "fine"

    with pytest.raises(WorkError, match="round 1: no secure sum after 10 attempts"):
        run_secure(table, tmp_path, fate=fate, deadline=5.0)


def test_what_secure_rules_out(table, tmp_path, clock):  # noqa: F811
    with pytest.raises(RequestError, match="leave out share_models = true"):
        run_secure(table, tmp_path, share_models=True)
    with pytest.raises(RequestError, match="needs 3 clients or more, and 2 take part"):
        run_secure(table, tmp_path, clients=2)
    with pytest.raises(RequestError, match="secure = true hides messages"):
        run_secure(table, tmp_path, "fedprox_one_stage")
    with pytest.raises(WorkError, match="secure_range is 1e-09; raise it"):
        run_secure(table, tmp_path, secure_range=1e-9)


def test_a_client_sends_nothing_that_is_not_masked(table, tmp_path, clock):  # noqa: F811
    """A server that leaves the protocol out gets no message, whatever it says."""
    run = run_of(table, "fedavg", rounds=2, federation=SECURE)
    grid = LocalGrid(homes_of(run, table, tmp_path / "state"))
    plain = run.model_copy(update={"federation": run.federation.model_copy(update={"secure": False})})
    from mooring.engines.flower import conversation

    digest = conversation.digest_of_run
    conversation.digest_of_run = lambda _: digest(run)
    try:
        with pytest.raises(WorkError, match="sends no message that is not masked"):
            converse(plain, grid, tmp_path / "run")
    finally:
        conversation.digest_of_run = digest
    assert unpack is not None
