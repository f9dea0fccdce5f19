"""Compressed messages: small errors, errors that do not add up, and the same result after a repeated request."""

import pytest
import torch

from mooring.core.errors import RequestError
from mooring.engines.fit import fit
from mooring.remote.compression import compress, compress_with_feedback, decompress
from mooring.remote.memory import MemoryTransport
from mooring.remote.server_run import run_federation
from tests.remote.federation_runs import HOW, make_clients, make_run


@pytest.mark.parametrize(("kind", "error", "bytes_"), [("float16", 5e-4, 2), ("int8", 0.5 / 127, 1)])
def test_a_message_comes_back_within_half_a_step(kind, error, bytes_):
    tensor = torch.randn(3, 700, dtype=torch.float64) * 1e6
    sent = compress({"message": tensor, "message/n": torch.tensor([3])}, kind)
    received = decompress(sent)
    assert received["message"].dtype == tensor.dtype and torch.equal(received["message/n"], torch.tensor([3]))
    assert float((received["message"] - tensor).abs().max()) <= 1.01 * error * float(tensor.abs().max())
    assert sent["message"].numel() * sent["message"].element_size() == bytes_ * tensor.numel()
    zeros = decompress(compress({"m": torch.zeros(5)}, kind))["m"]
    assert torch.equal(zeros, torch.zeros(5))


@pytest.mark.parametrize("kind", ["float16", "int8"])
def test_errors_do_not_add_up(kind):
    """The sum of what was received follows the sum of the messages within one step, however many rounds."""
    messages, residual, total = torch.randn(200, 300, dtype=torch.float64), {}, 0.0
    for message in messages:
        sent, residual = compress_with_feedback({"m": message}, residual, kind)
        total = total + decompress(sent)["m"]
    plain = sum(decompress(compress({"m": message}, kind))["m"] for message in messages)
    with_feedback, without = (float((one - messages.sum(0)).abs().max()) for one in (total, plain))
    assert with_feedback < 0.05 and with_feedback < without


@pytest.mark.parametrize("broken", ["scales", "type"])
def test_what_does_not_fit_is_refused(broken):
    sent = compress({"m": torch.randn(600)}, "int8")
    sent |= {"scale/m": sent["scale/m"][:1]} if broken == "scales" else {"m": sent["m"].long()}
    with pytest.raises(ValueError, match="'m'"):
        decompress(sent)


@pytest.mark.parametrize(("kind", "close"), [("float16", 2e-3), ("int8", 0.03)])
def test_a_federation_with_compressed_updates_ends_near_the_simulators_model(kind, close, table, tmp_path, clock):
    run = make_run(table, "fedavg", {"eta": 0.05}, rounds=8, checkpoint="last", federation={"compress": kind})
    grid = MemoryTransport(make_clients(run, table, tmp_path / "state"))
    lost = []

    def fate(message, node, number):  # a reply that was lost is computed again, from the same residual
        fields = message.fields
        if node == "102" and fields["what"] == "local_update" and fields["round"][0] == 3 and not lost:
            lost.append(number)
            grid.sessions["102"] = "later"
            return "lost"
        return "fine"

    result = run_federation(run, MemoryTransport(make_clients(run, table, tmp_path / "other")), tmp_path / "run")
    grid.fate = fate
    again = run_federation(run, grid, tmp_path / "again")
    assert lost and torch.equal(result.trained.last.common, again.trained.last.common)
    here = fit(table, algorithm="fedavg", settings={"eta": 0.05}, **HOW | {"rounds": 8, "checkpoint": "last"})
    scale = float(here.trained.last.common.abs().max())
    difference = float((result.trained.last.common - here.trained.last.common).abs().max())
    assert 0 < difference < close * scale


def test_compression_does_not_go_with_secure_sums(table, tmp_path, clock):
    federation = {"secure": True, "share_models": False, "compress": "int8"}
    run = make_run(table, "fedavg", {"eta": 0.05}, rounds=2, federation=federation)
    with pytest.raises(RequestError, match="compress needs them"):
        run_federation(run, MemoryTransport([]), tmp_path / "run")
