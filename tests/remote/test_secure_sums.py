"""Secure sums: the sum is right, single messages look like noise, and clients may leave."""

import itertools
import math
import secrets

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from scipy.stats import kstest

from mooring.core.errors import RequestError, WorkError
from mooring.engines.fit import fit
from mooring.remote import messages, secure_client, secure_sums
from mooring.remote.client_node import ClientNode
from mooring.remote.memory import MemoryTransport
from mooring.remote.messages import Payload
from mooring.remote.requests import REQUESTS
from mooring.remote.server_run import run_federation
from mooring.runs.atomic_files import read_json
from tests.remote.federation_runs import HOW, Killed, answer_with, make_run, write_clients
from tests.remote.secure_runs import RECOVERING, ROUNDS, WatchedTransport, identities, make_secure_clients, stage_of


def masked_numbers(grid):
    """What the server saw of single clients, as shares of the modulus."""
    seen = []
    for content in grid.seen:
        masked = content.tensors.get("masked")
        if masked is not None and len(masked) > 3:  # a message, not losses
            seen += (masked.numpy().view(np.uint64) / 2.0**64).tolist()
    return np.array(seen)


def is_noise(numbers):
    return len(numbers) > 60 and kstest(numbers, "uniform").pvalue > 1e-4


def run_secure(table, tmp_path, name="fedavg", fate=None, **more):
    run = make_run(table, name, rounds=ROUNDS, checkpoint="last", federation=RECOVERING | more)
    grid = WatchedTransport(make_secure_clients(run, table, tmp_path / "state"))
    grid.fate = fate or grid.fate
    return run_federation(run, grid, tmp_path / "run"), grid


def test_the_sum_is_that_of_the_messages_and_nothing_else_is_seen(table, tmp_path, clock):
    eta = 0.05
    run = make_run(table, "fedavg", {"eta": eta}, rounds=ROUNDS, checkpoint="last", federation=RECOVERING)
    grid = WatchedTransport(make_secure_clients(run, table, tmp_path / "state"))
    result = run_federation(run, grid, tmp_path / "run")
    here = fit(table, algorithm="fedavg", settings={"eta": eta}, **HOW | {"rounds": ROUNDS, "checkpoint": "last"})
    torch.testing.assert_close(result.trained.last.common, here.trained.last.common, rtol=1e-10, atol=1e-10)
    assert is_noise(masked_numbers(grid))
    assert result.rounds["samples"].tolist() == here.rounds["samples"].tolist()
    for name in ("train_loss", "validation_loss", "test_loss"):
        np.testing.assert_allclose(result.rounds[name], here.rounds[name], rtol=1e-6)
    assert result.summary["personal"] == pytest.approx(here.summary["personal"], rel=1e-6)
    assert result.clients["personal"].isna().all()  # nobody's own loss is known to the server
    own = [read_json(home.folder / "done.json")["personal"] for home in grid.clients.values()]
    np.testing.assert_allclose(own, here.clients["personal"], rtol=1e-9)
    assert not any((home.folder / secure_client.STATE).exists() for home in grid.clients.values())


def test_a_step_size_is_resolved_from_powers_of_two(table, tmp_path, clock):
    result, grid = run_secure(table, tmp_path)
    assert result.rounds["accepted"].tolist() == [4] * ROUNDS
    shown = [content.tensors for content in grid.seen]
    facts = [tensors for tensors in shown if "facts/smooth" in tensors]
    assert facts and all(float(torch.log2(one["facts/smooth"])) % 1 == 0 for one in facts)
    assert all(bool(one["facts/trace"].isnan().all()) for one in facts)


def test_without_masks_the_messages_are_visible(table, tmp_path, clock, monkeypatch):
    """The negative control: masks of zeros."""
    monkeypatch.setattr(secure_sums, "key_stream", lambda seed, size: np.zeros(size, np.uint64))
    _, grid = run_secure(table, tmp_path)
    assert not is_noise(masked_numbers(grid))


def test_masks_come_from_the_whole_shared_secret():
    """Seeds of 32 bytes: the 2^32 seeds of a shorter one cannot be tried. Each attempt has its own."""
    one, other = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    session, raw = secrets.token_hex(16), lambda key: key.private_bytes_raw()
    public = lambda key: key.public_key().public_bytes_raw()  # noqa: E731
    mine = secure_sums.pair_seed(raw(one), public(other), session, 1, "d", "a", "b")
    assert mine == secure_sums.pair_seed(raw(other), public(one), session, 1, "d", "b", "a") and len(mine) == 32
    others = [secure_sums.pair_seed(raw(one), public(other), session, k, "d", "a", "b") for k in range(2, 50)]
    assert mine != secure_sums.pair_seed(raw(one), public(other), session, 1, "another request", "a", "b")
    assert len({mine, *others}) == 49
    stream = secure_sums.key_stream(mine, 4000)
    assert kstest(stream / 2.0**64, "uniform").pvalue > 1e-4
    near = bytes([mine[0] ^ 1]) + mine[1:]
    assert not np.array_equal(stream[:4], secure_sums.key_stream(near, 4))


@pytest.mark.parametrize("clients,lost", [(3, 0), (5, 1), (8, 2)])
def test_masks_cancel_in_the_sum_of_the_survivors(clients, lost):
    rng, names = np.random.default_rng(clients), [f"c{i}" for i in range(clients)]
    values = {name: rng.normal(size=7) for name in names}
    pairs = {frozenset((a, b)): secrets.token_bytes(32) for a in names for b in names if a < b}
    seeds = {name: secrets.token_bytes(32) for name in names}
    masked = {
        name: secure_sums.mask(
            secure_sums.quantize(values[name], 8.0, clients),
            name,
            seeds[name],
            {other: pairs[frozenset((name, other))] for other in names if other != name},
        )
        for name in names
    }
    stayed, gone = names[lost:], names[:lost]
    shown = {name: {other: pairs[frozenset((name, other))] for other in gone} for name in stayed}
    total = secure_sums.unmask({n: masked[n] for n in stayed}, {n: seeds[n] for n in stayed}, shown)
    np.testing.assert_allclose(
        secure_sums.dequantize(total, 8.0, clients), sum(values[name] for name in stayed), atol=1e-12
    )


@pytest.mark.parametrize(
    "stage,first",
    [
        (messages.SECURE_UPDATE, 3),
        *(
            (stage, 4)
            for stage in (messages.SECURE_KEYS, messages.SECURE_PEERS, messages.SECURE_CONFIRM, messages.SECURE_UNMASK)
        ),
    ],
)
def test_one_client_may_leave_in_the_middle(stage, first, table, tmp_path, clock):
    """Three of four are enough for a sum, which is that of the three; the other stages wait for the client's reply."""
    lost = []

    def fate(message, node, number):
        if stage_of(message) == stage and node == "103" and not lost:
            lost.append(number)
            grid.sessions["103"] = "later"  # the client was started again
            return "lost"
        return "fine"

    run = make_run(table, "fedavg", rounds=2, checkpoint="last", federation=RECOVERING | {"deadline": 5.0})
    grid = WatchedTransport(make_secure_clients(run, table, tmp_path / "state"))
    grid.fate = fate
    if stage == messages.SECURE_UPDATE:
        grid.fate = lambda message, node, number: (
            "lost" if stage_of(message) == stage and node == "103" and message.fields["round"][0] == 1 else "fine"
        )
    result = run_federation(run, grid, tmp_path / "run")
    assert result.rounds["accepted"].tolist() == [first, 4]


def test_too_few_survivors_give_nothing(table, tmp_path, clock):
    def fate(message, node, number):
        return "lost" if stage_of(message) == messages.SECURE_UPDATE and node in ("102", "103") else "fine"

    with pytest.raises(WorkError, match=r"no reply for 60 seconds|no secure sum after 10 attempts"):
        run_secure(table, tmp_path, fate=fate, deadline=5.0, wait=60.0)


@pytest.mark.parametrize(
    "stage", [messages.SECURE_UPDATE, messages.SECURE_CONFIRM, messages.SECURE_UNMASK, messages.SECURE_EVALUATE]
)
def test_a_killed_server_resumes_a_secure_run(stage, table, tmp_path, clock):
    """The round that was cut is summed again, over the same clients, under new masks."""
    eta = {"eta": 0.05}
    run = make_run(table, "fedavg", eta, rounds=ROUNDS, checkpoint="last", federation=RECOVERING)
    homes = make_secure_clients(run, table, tmp_path / "state")
    grid, seen = MemoryTransport(homes), []

    def fate(message, node, number):
        seen.append(stage_of(message))
        if stage_of(message) == stage and seen.count(stage) == 11:
            raise Killed
        return "fine"

    grid.fate = fate
    with pytest.raises(Killed):
        run_federation(run, grid, tmp_path / "run")
    result = run_federation(run, MemoryTransport(homes), tmp_path / "run")
    here = fit(table, algorithm="fedavg", settings=eta, **HOW | {"rounds": ROUNDS, "checkpoint": "last"})
    torch.testing.assert_close(result.trained.last.common, here.trained.last.common, rtol=1e-9, atol=1e-9)


def test_random_numbers_end_a_secure_run_in_a_sentence(table, tmp_path, clock, monkeypatch):
    """Nobody can tell them from a masked vector, and so nobody knows who sent them."""
    usual = REQUESTS[messages.SECURE_UPDATE].answer

    def lie(home, payload):
        reply = usual(home, payload)
        noise = torch.randint(-(2**62), 2**62, reply.tensors["masked"].shape)
        return reply._replace(tensors={"masked": noise}) if home.name == "site 2" else reply

    answer_with(monkeypatch, messages.SECURE_UPDATE, lie)
    with pytest.raises(WorkError, match="one of site 0, site 1, site 2, site 3 sent random numbers"):
        run_secure(table, tmp_path)


def test_what_secure_rules_out(table, tmp_path, clock):
    with pytest.raises(RequestError, match="share_models = true needs them"):
        run_secure(table, tmp_path, share_models=True)
    with pytest.raises(RequestError, match="needs 3 clients or more, and 2 take part"):
        run_secure(table, tmp_path, clients=2)
    with pytest.raises(RequestError, match="lam = 'auto' of fedprox_personal is resolved from"):
        run_secure(table, tmp_path, "fedprox_personal")
    with pytest.raises(WorkError, match="secure_range is 1e-09; raise it"):
        run_secure(table, tmp_path, secure_range=1e-9)


def test_a_client_without_keys_takes_no_part(table, tmp_path, clock):
    run = make_run(table, "fedavg", rounds=2, federation=RECOVERING)
    homes = [ClientNode(run, file, tmp_path / "state" / file.stem) for file in sorted(table.iterdir())]
    with pytest.raises(RequestError, match="needs its key and its peers' keys for secure sums: give --key and --peers"):
        run_federation(run, MemoryTransport(homes), tmp_path / "run")


def test_shares_give_a_secret_back_and_fewer_show_nothing():
    secret = secrets.token_bytes(32)
    shares = dict(enumerate(secure_sums.split_secret(secret, 4, 6), start=1))
    for places in itertools.combinations(shares, 4):
        assert secure_sums.join_shares({place: shares[place] for place in places}) == secret
    three = {place: shares[place] for place in (1, 3, 6)}  # with any other secret, some polynomial goes through these
    other = int.from_bytes(secrets.token_bytes(32), "big")
    points = three | {0: other}
    fourth = sum(
        value * math.prod((2 - x) * pow(place - x, -1, secure_sums.SHARE_PRIME) for x in points if x != place)
        for place, value in points.items()
    )
    fitting = three | {2: fourth % secure_sums.SHARE_PRIME}
    assert int.from_bytes(secure_sums.join_shares(fitting), "big") == other
    assert all(pow(base, secure_sums.SHARE_PRIME - 1, secure_sums.SHARE_PRIME) == 1 for base in (2, 3, 5, 7, 11, 13))


def run_until_silent(table, path, last_stage, count, **more):
    """A secure run whose client 'site 2' falls silent for good at its `count`-th request of a stage."""
    run = make_run(table, "fedavg", {"eta": 0.05}, rounds=ROUNDS, checkpoint="last", federation=RECOVERING | more)
    grid, seen = MemoryTransport(make_secure_clients(run, table, path / "state", COMMON_KEYS)), []

    def fate(message, node, number):
        if node != "103":
            return "fine"
        seen.append(stage_of(message))
        is_gone = seen[:-1].count(last_stage) >= count or (
            seen.count(last_stage) == count and stage_of(message) == last_stage
        )
        return "lost" if is_gone else "fine"

    grid.fate, reports = fate, []
    return run_federation(run, grid, path / "run", report=reports.append), reports


COMMON_KEYS = identities([f"site {i}" for i in range(4)])


def test_a_client_that_confirms_and_never_unmasks_is_recovered(table, tmp_path, clock):
    """Its peers' shares open the sum: the result is that of a run in which it leaves right after it has unmasked."""
    result, reports = run_until_silent(table, tmp_path / "a", messages.SECURE_UNMASK, 3, deadline=5.0)
    assert any("recovering the masks of site 2 from the shares of 3 clients" in sentence for sentence in reports)
    accepted = result.rounds["accepted"].tolist()
    assert accepted[-1] == 3 and 4 in accepted
    run = make_run(
        table, "fedavg", {"eta": 0.05}, rounds=ROUNDS, checkpoint="last", federation=RECOVERING | {"deadline": 5.0}
    )
    grid, seen = MemoryTransport(make_secure_clients(run, table, tmp_path / "b" / "state", COMMON_KEYS)), []

    def fate(message, node, number):
        seen.extend([stage_of(message)] if node == "103" else [])
        return "lost" if node == "103" and seen.count(messages.SECURE_UNMASK) >= 3 and len(seen) > after else "fine"

    after = 10**9

    def leave_after(message, node, number):
        nonlocal after
        answer = fate(message, node, number)
        if node == "103" and seen.count(messages.SECURE_UNMASK) == 3 and after == 10**9:
            after = len(seen)
        return answer

    grid.fate = leave_after
    other = run_federation(run, grid, tmp_path / "b" / "run")
    assert other.rounds["accepted"].tolist() == accepted
    assert torch.equal(result.trained.last.common, other.trained.last.common)


def test_too_many_that_never_unmask_end_the_run_in_a_sentence(table, tmp_path, clock):
    run = make_run(table, "fedavg", {"eta": 0.05}, rounds=2, federation=RECOVERING | {"deadline": 5.0, "wait": 60.0})
    grid = MemoryTransport(make_secure_clients(run, table, tmp_path / "state"))
    grid.fate = lambda message, node, number: (
        "lost" if node in ("102", "103") and stage_of(message) == messages.SECURE_UNMASK else "fine"
    )
    with pytest.raises(WorkError, match="no reply for 60 seconds"):
        run_federation(run, grid, tmp_path / "run")


def run_with_false_shares(monkeypatch, tmp_path, what, lie):
    """A secure run of seven clients, of which 'site 2' never unmasks; `lie` changes handling of a request."""
    folder = write_clients(tmp_path / "clients", clients=7)
    run = make_run(folder, "fedavg", {"eta": 0.05}, rounds=2, federation=RECOVERING | {"deadline": 5.0})
    usual, reports = REQUESTS[what].answer, []
    answer_with(monkeypatch, what, lambda client, payload: lie(usual, client, payload))
    grid = MemoryTransport(make_secure_clients(run, folder, tmp_path / "state"))
    grid.fate = lambda message, node, number: (
        "lost" if node == "103" and stage_of(message) == messages.SECURE_UNMASK else "fine"
    )
    return run_federation(run, grid, tmp_path / "run", report=reports.append), reports


def test_a_false_share_is_left_out_and_its_sender_named(tmp_path, clock, monkeypatch):
    """Five of six shares are enough; the commitment shows which one is false."""

    def lie(usual, client, payload):
        reply = usual(client, payload)
        return Payload({"shares": {"site 2": "5"}}) if client.name == "site 4" else reply

    result, reports = run_with_false_shares(monkeypatch, tmp_path, messages.SECURE_RECOVER, lie)
    assert bool(torch.isfinite(result.trained.common).all()) and len(result.rounds) == 2
    assert any("'site 4'" in text and "false share of 'site 2'" in text for text in reports), reports


@pytest.mark.parametrize("way", ["false secret", "false commitments"])
def test_a_client_that_shares_a_false_key_and_leaves_is_named(way, tmp_path, clock, monkeypatch):
    def lie(usual, client, payload):
        if client.name != "site 2":
            return usual(client, payload)
        with monkeypatch.context() as patch:
            if way == "false secret":
                split = secure_sums.split_secret
                patch.setattr(secure_sums, "split_secret", lambda secret, *a: split(secrets.token_bytes(32), *a))
            else:
                patch.setattr(secure_client, "commit_to_share", lambda *a: "00" * 32)
            return usual(client, payload)

    sentence = "committed to are false" if way == "false secret" else "other than those that it committed to"
    with pytest.raises(WorkError, match=f"client 'site 2' confirmed a secure sum and left.*{sentence}"):
        run_with_false_shares(monkeypatch, tmp_path, messages.SECURE_CONFIRM, lie)
