"""Secure sums of a fixed cohort, the default of `fit`: one message per sum, noise for a server that deviates, the same
models after kills."""

from contextlib import suppress

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from scipy.stats import kstest

from mooring.core.errors import RequestError, WorkError
from mooring.engines.fit import fit
from mooring.remote import transcript
from mooring.remote.client_node import ClientNode
from mooring.remote.cohorts import COHORTS_FILE
from mooring.remote.disclosure import Policy
from mooring.remote.fixed_sums import handle_keys, make_part
from mooring.remote.memory import MemoryTransport
from mooring.remote.messages import FIXED_COHORT, FIXED_EVALUATE, FIXED_KEYS, FIXED_UPDATE, Payload
from mooring.remote.requests import REQUESTS
from mooring.remote.secure_rule import FIXED, PLAIN, RECOVERING, explain_visibility, sums_of
from mooring.remote.secure_sums import sign
from mooring.remote.server_run import run_federation
from mooring.runs.atomic_files import read_json
from tests.remote.federation_runs import HOW, Killed, answer_with, make_run, write_clients
from tests.remote.secure_runs import WatchedTransport, identities, make_secure_clients, stage_of

ROUNDS = 4
ETA = {"eta": 0.05}
DEFAULT = {"secure": None, "share_models": False}
ROUNDING = 1e-12  # of sums of numbers up to 8, in steps of 8 / 2^52, over four rounds
PEERS = identities([f"site {i}" for i in range(4)])


def default_run(folder, name="fedavg", fields=ETA, federation=None, **more):
    how = {"rounds": ROUNDS, "checkpoint": "last"} | more
    return make_run(folder, name, fields, federation=DEFAULT | (federation or {}), **how)


def simulate(folder, name="fedavg", fields=ETA, **more):
    return fit(folder, algorithm=name, settings=fields, **HOW | {"rounds": ROUNDS, "checkpoint": "last"} | more)


def assert_simulators(result, here, tolerance=ROUNDING):
    torch.testing.assert_close(result.trained.last.common, here.trained.last.common, rtol=tolerance, atol=tolerance)


@pytest.fixture
def three(tmp_path):
    return write_clients(tmp_path / "three", clients=3)


def masked_numbers(transport):
    """What the server received of single clients, as shares of the modulus; the last number counts the clients."""
    vectors = [reply.tensors["masked"] for reply in transport.seen if "masked" in reply.tensors]
    return np.concatenate([vector.numpy().view(np.uint64) / 2.0**64 for vector in vectors])


def is_noise(numbers):
    return len(numbers) > 60 and kstest(numbers, "uniform").pvalue > 1e-4


@pytest.mark.parametrize("name,fields", [("fedavg", ETA), ("scaffold", ETA), ("apfl", ETA)])
def test_a_default_federation_of_three_is_secure_and_gives_the_simulators_models(name, fields, three, tmp_path, clock):
    run = default_run(three, name, fields)
    assert sums_of(run) == FIXED
    transport = WatchedTransport(make_secure_clients(run, three, tmp_path / "state"))
    reports = []
    result = run_federation(run, transport, tmp_path / "run", report=reports.append)
    here = simulate(three, name, fields)
    assert_simulators(result, here)
    own = [read_json(client.folder / "done.json")["personal"] for client in transport.clients.values()]
    np.testing.assert_allclose(own, here.clients["personal"], rtol=1e-9)
    assert result.clients["personal"].isna().all() and is_noise(masked_numbers(transport))
    for column in ("train_loss", "validation_loss", "test_loss"):
        np.testing.assert_allclose(result.rounds[column], here.rounds[column], rtol=1e-8)
    assert not any("message/" in key or key == "risk" for reply in transport.seen for key in reply.tensors)
    assert not any("the server sees the single messages" in sentence for sentence in reports)
    assert not any((client.folder / "sums").exists() for client in transport.clients.values())


def test_without_masks_the_same_test_sees_the_messages(three, tmp_path, clock, monkeypatch):
    monkeypatch.setattr(transcript, "key_stream", lambda key, size: np.zeros(size, np.uint64))
    run = default_run(three)
    transport = WatchedTransport(make_secure_clients(run, three, tmp_path / "state"))
    run_federation(run, transport, tmp_path / "run")
    assert not is_noise(masked_numbers(transport))


def test_one_message_per_sum(three, tmp_path, clock):
    run, asked = default_run(three), []
    transport = MemoryTransport(make_secure_clients(run, three, tmp_path / "state"))
    transport.fate = lambda request, node, number: asked.append(stage_of(request)) or "fine"
    run_federation(run, transport, tmp_path / "run")
    assert asked.count(FIXED_UPDATE) == 3 * ROUNDS
    assert asked.count(FIXED_KEYS) == asked.count(FIXED_COHORT) == 3
    assert not any(stage.startswith("secure_") for stage in asked)


@pytest.mark.parametrize(
    "change,kind,why",
    [
        ({}, FIXED, ""),
        ({"fields": {"lam": 0.1}, "name": "fedprox_personal"}, FIXED, ""),
        ({"participation": 0.5}, RECOVERING, ""),
        ({"federation": {"quorum": 0.5}}, RECOVERING, ""),
        ({"federation": {"clients": None}}, FIXED, ""),
        ({"federation": {"clients": 2}}, PLAIN, "of 2 clients, each would learn the other's message"),
        ({"federation": {"share_models": True}}, PLAIN, "share_models = true needs them"),
        ({"federation": {"compress": "int8"}}, PLAIN, "compress needs them"),
        ({"federation": {"secure": False}}, PLAIN, "its run file sets secure = false"),
        ({"average": "median"}, PLAIN, "average = 'median' needs them"),
        ({"clip": 1.0}, PLAIN, "clip needs them"),
        ({"fields": {}, "name": "fedprox_personal"}, PLAIN, "lam = 'auto' of fedprox_personal is resolved from"),
    ],
)
def test_the_run_file_alone_decides(change, kind, why, three):
    run = default_run(three, **change)
    assert sums_of(run) == kind and why in explain_visibility(run) and bool(why) == (kind == PLAIN)
    refused = kind == PLAIN
    if refused:
        with pytest.raises(RequestError, match="requires secure sums"):
            Policy(require_secure=True).check_run(run)
    else:
        Policy(require_secure=True).check_run(run)


def test_secure_runs_have_another_digest_than_visible_ones(three, tmp_path):
    digests = {
        ClientNode(default_run(three, federation=change), three / "site 1.csv", tmp_path).digest
        for change in ({}, {"secure": True}, {"secure": False}, {"quorum": 0.5}, {"max_rows": 7})
    }
    assert len(digests) == 4  # unset and true are the same run


def test_unset_works_where_true_is_refused(three, tmp_path, clock):
    for change in ({"share_models": True}, {"compress": "int8"}):
        secure = default_run(three, federation=change | {"secure": True})
        with pytest.raises(RequestError, match="secure = true hides single messages"):
            run_federation(secure, MemoryTransport([]), tmp_path / "run")
    run, reports = default_run(three, federation={"share_models": True}), []
    clients = [ClientNode(run, file, tmp_path / "state" / file.stem) for file in sorted(three.iterdir())]
    result = run_federation(run, MemoryTransport(clients), tmp_path / "run", report=reports.append)
    assert_simulators(result, simulate(three))
    assert "the server sees the single messages of each client: share_models = true needs them." in reports


class DeviatingTransport(WatchedTransport):
    """Changes what one client is sent."""

    def __init__(self, clients, change):
        super().__init__([ChangedClient(client, change) for client in clients])


class ChangedClient:
    def __init__(self, client, change):
        self.client, self.change = client, change

    def __getattr__(self, name):
        return getattr(self.client, name)

    def answer(self, what, payload):
        return self.client.answer(what, self.change(self.client.name, what, payload))


def move_first_model(payload, by=1e-13):
    name = next(name for name, tensor in payload.tensors.items() if tensor.is_floating_point())
    return payload._replace(tensors=dict(payload.tensors) | {name: payload.tensors[name] + by})


def test_another_model_for_one_client_makes_noise(three, tmp_path, clock):
    def change(name, what, payload):
        return move_first_model(payload) if (name, what) == ("site 1", FIXED_UPDATE) else payload

    run = default_run(three)
    transport = DeviatingTransport(make_secure_clients(run, three, tmp_path / "state"), change)
    with pytest.raises(RequestError, match="is not one of 3 clients"):
        run_federation(run, transport, tmp_path / "run")
    sent = [reply.tensors["masked"] for reply in transport.seen if len(reply.tensors.get("masked", ())) > 4]
    total = torch.stack(sent[-3:]).sum(0).numpy().view(np.uint64) / 2.0**64
    assert kstest(total, "uniform").pvalue > 1e-3 and not np.all((total < 1e-3) | (total > 1 - 1e-3))


def test_another_start_for_one_client_makes_noise(three, tmp_path, clock):
    def change(name, what, payload):
        return move_first_model(payload) if (name, what) == ("site 1", "begin") else payload

    run = default_run(three)
    transport = DeviatingTransport(make_secure_clients(run, three, tmp_path / "state"), change)
    with pytest.raises(RequestError, match="is not one of 3 clients"):
        run_federation(run, transport, tmp_path / "run")


class Stopped:
    """A federation that was killed after round 2, with the requests of all clients."""

    def __init__(self, folder, tmp_path):
        self.run, self.requests = default_run(folder), {}
        self.clients = make_secure_clients(self.run, folder, tmp_path / "state")
        transport = MemoryTransport(self.clients)

        def fate(request, node, number):
            turn = (request.fields.get("round") or [0])[0]
            if turn == 3:
                raise Killed
            if "round" in request.fields:
                self.requests[transport.clients[node].name, stage_of(request), turn] = request
            self.requests[transport.clients[node].name, stage_of(request)] = request
            return "fine"

        transport.fate = fate
        with pytest.raises(Killed):
            run_federation(self.run, transport, tmp_path / "run")

    def ask(self, name, key, tensors=None, **changes):
        request = self.requests[(name, *key)]
        client = next(client for client in self.clients if client.name == name)
        fields = request.fields | changes
        return client.answer(key[0], Payload(fields, tensors or request.tensors))


@pytest.fixture
def stopped(three, tmp_path, clock):
    return Stopped(three, tmp_path)


def test_a_request_is_answered_once(stopped):
    """The same request gets the same bytes; another one of its name is refused."""
    for key in ((FIXED_UPDATE, 2), (FIXED_EVALUATE, 2)):
        first, second = stopped.ask("site 1", key), stopped.ask("site 1", key)
        assert torch.equal(first.tensors["masked"], second.tensors["masked"])
        other = move_first_model(stopped.requests["site 1", *key]).tensors
        assert "for another request; it answers each once" in stopped.ask("site 1", key, other).fields["refused"]
    assert "for another request" in stopped.ask("site 1", (FIXED_EVALUATE, 2), parts=["train"]).fields["refused"]
    reply = stopped.ask("site 1", (FIXED_UPDATE, 2), base=0)
    assert "each after the one before" in reply.fields["refused"]
    reply = stopped.ask("site 1", (FIXED_EVALUATE, 2), base=1)
    assert "of round 2 after that round only" in reply.fields["refused"]
    reply = stopped.ask(
        "site 1",
        (FIXED_UPDATE, 2),
        round=[ROUNDS + 1, *stopped.requests["site 1", FIXED_UPDATE, 2].fields["round"][1:]],
        base=ROUNDS,
    )
    assert f"takes part in rounds 1 to {ROUNDS}" in reply.fields["refused"]


def test_weights_and_places_follow_from_what_all_have_signed(stopped):
    for change in ({"p": 1.0}, {"index": 0}):
        for stage in (FIXED_UPDATE, FIXED_EVALUATE):
            assert (
                "follows from what all clients have signed"
                in stopped.ask("site 1", (stage, 2), **change).fields["refused"]
            )


def test_other_requests_are_refused(stopped):
    """What runs of other kinds answer."""
    request = stopped.requests["site 1", FIXED_UPDATE, 2]
    fields = {name: value for name, value in request.fields.items() if name not in ("what",)}
    asks = [("local_update", fields, request.tensors), ("statistics", {"calls": {}}, {}), ("models", {}, {})]
    asks += [("evaluate", fields | {"parts": ["train"]}, request.tensors), ("numbers", fields | {"field": "w"}, {})]
    asks += [("secure_keys", {"session": "00", "cohort": ["site 0", "site 1", "site 2"]}, {})]
    asks += [("secure_update", fields | {"session": "00", "attempt": 1, "cohort": []}, request.tensors)]
    client = stopped.clients[1]
    for what, asked, tensors in asks:
        reply = client.answer(what, Payload({"run": client.digest} | asked, tensors))
        assert "refused" in reply.fields and not reply.tensors, what


def test_another_cohort_needs_the_operators_agreement(stopped):
    """Sums with and without a client differ by its message."""
    known = stopped.requests["site 1", FIXED_COHORT].fields
    fewer = {"list": [one for one in known["statements"]["list"] if one["name"] != "site 2"]}
    small = stopped.ask("site 1", (FIXED_COHORT,), statements=fewer)
    assert "the cohort has 2 clients, and at least 3" in small.fields["refused"]
    own = identities(["site 9"])
    stranger = known["statements"]["list"][2] | {"name": "site 9"}
    more = {"list": [*known["statements"]["list"], stranger]}
    signed = known["signatures"] | {"site 9": sign(own["site 9"].private, stranger)}
    reply = stopped.ask("site 1", (FIXED_COHORT,), statements=more, signatures=signed)
    assert "the same key" in reply.fields["refused"]
    stranger["public"] = "ab" * 32
    signed["site 9"] = sign(own["site 9"].private, stranger)
    reply = stopped.ask("site 1", (FIXED_COHORT,), statements=more, signatures=signed)
    assert "statement of client 'site 9' is not signed by its enrolled key" in reply.fields["refused"]
    client = stopped.clients[1]
    client.identity.peers["site 9"] = own["site 9"].private.public_key()
    reply = stopped.ask("site 1", (FIXED_COHORT,), statements=more, signatures=signed)
    assert "needs `mooring join --again`" in reply.fields["refused"]
    client.forget_sums()  # its answers are gone, but not the memory of their cohort
    other = handle_keys(client, Payload({})).fields
    more["list"][1], signed["site 1"] = other["statement"], other["signature"]
    reply = stopped.ask("site 1", (FIXED_COHORT,), statements=more, signatures=signed)
    assert "taken part with the same rows and other clients" in reply.fields["refused"]
    client.again = True
    assert "refused" not in stopped.ask("site 1", (FIXED_COHORT,), statements=more, signatures=signed).fields


def test_changed_rows_need_the_operators_agreement(three, tmp_path, clock):
    """The difference of two runs shows the rows that changed. The server is not shown a new statement of theirs."""
    first, second = default_run(three), default_run(three, rounds=2)
    run_federation(first, MemoryTransport(make_secure_clients(first, three, tmp_path / "state")), tmp_path / "first")
    assert [run["clients"] for run in read_json(tmp_path / "state" / "site 1" / COHORTS_FILE)["runs"]] == [
        ["site 0", "site 1", "site 2"]
    ]
    changed = (three / "site 1.csv").read_text().splitlines()[:-1]
    (three / "site 1.csv").write_text("\n".join(changed) + "\n")
    transport = WatchedTransport(make_secure_clients(second, three, tmp_path / "state"))
    reports = []
    with pytest.raises(RequestError, match="the cohort has 2 clients, and at least 3"):
        run_federation(second, transport, tmp_path / "second", report=reports.append)
    assert any("the rows of client 'site 1' have changed since a former run" in sentence for sentence in reports)
    stated = [reply.fields["statement"]["name"] for reply in transport.seen if "statement" in reply.fields]
    assert set(stated) == {"site 0", "site 2"}
    assert not any("masked" in reply.tensors for reply in transport.seen)
    clients = make_secure_clients(second, three, tmp_path / "state")
    for client in clients:
        client.again = True
    run_federation(second, MemoryTransport(clients), tmp_path / "third")


def test_a_refusal_is_stored_and_has_no_numbers(three, tmp_path, clock):
    """Otherwise a server could try models until a client's message is in range."""
    run, requests, reports = default_run(three, federation={"secure_range": 1e-9}), {}, []
    clients = make_secure_clients(run, three, tmp_path / "state", PEERS, report=reports.append)
    transport = MemoryTransport(clients)

    def fate(request, node, number):
        requests[stage_of(request), transport.clients[node].name] = request
        return "fine"

    transport.fate = fate
    with pytest.raises(WorkError, match="secure_range is 1e-09; raise it"):
        run_federation(run, transport, tmp_path / "run")
    request = requests[FIXED_UPDATE, "site 1"]
    known = clients[1].answer(FIXED_UPDATE, request).fields["refused"]
    assert known == "client 'site 1' would send a larger number, and secure_range is 1e-09; raise it."
    for client in (clients[1], make_secure_clients(run, three, tmp_path / "state", PEERS)[1]):  # after a restart, too
        client.federation = client.federation.model_copy(update={"secure_range": 8.0})  # it would be in range now
        other = Payload(request.fields, move_first_model(request, 1.0).tensors)
        assert client.answer(FIXED_UPDATE, other).fields["refused"] == known
    assert any("its message has an entry of" in sentence for sentence in reports)


def test_forged_statements_are_refused(stopped):
    known = stopped.requests["site 1", FIXED_COHORT].fields["statements"]["list"]
    for change in ({"public": "00" * 32}, {"weight": 9.0}, {"sizes": {"train": 1, "validation": 0, "test": 0}}):
        forged = {"list": [*known[:2], known[2] | change]}
        reply = stopped.ask("site 1", (FIXED_COHORT,), statements=forged)
        assert "of client 'site 2' is not signed by its enrolled key" in reply.fields["refused"]
    for change, why in (
        ({"plan": "x"}, "another plan"),
        ({"run": "x"}, "another run"),
        ({"columns": ["z"]}, "has column 'z'"),
    ):
        reply = stopped.ask("site 1", (FIXED_COHORT,), statements={"list": [*known[:2], known[2] | change]})
        assert why in reply.fields["refused"]


@pytest.mark.parametrize(
    "change,why",
    [
        ({"run": "x"}, "another run or another schema"),
        ({"plan": "x"}, "another run or another schema"),
        ({"columns": ["z"]}, "has column 'z'"),
        ({"sizes": {"train": 3, "validation": 3, "test": 3}}, "other numbers of rows"),
        ({"protocol": "x"}, "another kind of statement"),
        ({"sizes": {"train": -1, "validation": 3, "test": 3}}, "rows to train"),
        ({"public": "abc"}, "cannot be used"),
        (None, "has not signed its statement with its enrolled key"),
    ],
)
def test_a_false_statement_is_its_senders(change, why, table, tmp_path, clock, monkeypatch):
    """The sender is named and left out; the others finish without it."""
    run, reports = default_run(table), []
    usual = REQUESTS[FIXED_KEYS].answer

    def lie(client, payload):
        reply = usual(client, payload)
        if client.name != "site 2":
            return reply
        statement = reply.fields["statement"] | (change or {})
        key = client.identity.private if change else ec.generate_private_key(ec.SECP384R1())
        return Payload({"statement": statement, "signature": sign(key, statement)})

    answer_with(monkeypatch, FIXED_KEYS, lie)
    transport = MemoryTransport(make_secure_clients(run, table, tmp_path / "state", PEERS))
    transport.public_keys = {name: known.own for name, known in PEERS.items()}
    result = run_federation(run, transport, tmp_path / "run", report=reports.append)
    assert result.clients["client"].tolist() == ["site 0", "site 1", "site 3"]
    blamed = [sentence for sentence in reports if "does not take part" in sentence]
    assert len(blamed) == 1 and "'site 2'" in blamed[0] and why in blamed[0], reports


@pytest.mark.parametrize("masked", [torch.zeros(3, dtype=torch.int64), torch.zeros(9), None])
def test_malformed_masked_numbers_are_their_senders(masked, three, tmp_path, clock, monkeypatch):
    usual = REQUESTS[FIXED_UPDATE].answer

    def lie(client, payload):
        tensors = {} if masked is None else {"masked": masked}
        return usual(client, payload)._replace(tensors=tensors) if client.name == "site 2" else usual(client, payload)

    answer_with(monkeypatch, FIXED_UPDATE, lie)
    run = default_run(three)
    transport = MemoryTransport(make_secure_clients(run, three, tmp_path / "state"))
    with pytest.raises(WorkError, match="round 1: client 'site 2'"):
        run_federation(run, transport, tmp_path / "run")


def test_random_numbers_end_the_run_without_blame(three, tmp_path, clock, monkeypatch):
    """They look like a masked vector: nobody can be named."""
    usual = REQUESTS[FIXED_UPDATE].answer

    def lie(client, payload):
        reply = usual(client, payload)
        noise = torch.randint(
            -(2**62), 2**62, reply.tensors["masked"].shape, generator=torch.Generator().manual_seed(3)
        )
        return reply._replace(tensors={"masked": noise}) if client.name == "site 2" else reply

    answer_with(monkeypatch, FIXED_UPDATE, lie)
    run, reports = default_run(three), []
    transport = MemoryTransport(make_secure_clients(run, three, tmp_path / "state"))
    with pytest.raises(RequestError, match="Masks hide which"):
        run_federation(run, transport, tmp_path / "run", report=reports.append)
    assert not any("site 2" in sentence and "connected" not in sentence for sentence in reports)


def test_a_client_that_is_gone_ends_the_run_by_name(three, tmp_path, clock):
    run = default_run(three, federation={"deadline": 5.0})
    transport = MemoryTransport(make_secure_clients(run, three, tmp_path / "state"))
    transport.fate = lambda request, node, number: (
        "lost" if node == "102" and stage_of(request) == FIXED_UPDATE and request.fields["round"][0] == 2 else "fine"
    )
    with pytest.raises(WorkError, match=r"round 2: client 'site 1' is missing .*mooring join --again"):
        run_federation(run, transport, tmp_path / "run")
    transport.fate = lambda request, node, number: "fine"
    assert_simulators(run_federation(run, transport, tmp_path / "run"), simulate(three))


KILLS = [*range(3, 110, 9)]


@pytest.mark.parametrize("step", KILLS)
def test_kills_of_everybody_change_nothing(step, three, tmp_path, clock):
    """The server is killed at any message, all clients are started again, and the same commands give the same bytes."""
    run, count = default_run(three), []
    expected = run_federation(
        run, MemoryTransport(make_secure_clients(run, three, tmp_path / "a", PEERS)), tmp_path / "a run"
    )

    def fate(request, node, number):
        count.append(number)
        if len(count) == step:
            raise Killed
        return "fine"

    transport = MemoryTransport(make_secure_clients(run, three, tmp_path / "b", PEERS))
    transport.fate = fate
    with suppress(Killed):
        run_federation(run, transport, tmp_path / "b run")
    again = MemoryTransport(make_secure_clients(run, three, tmp_path / "b", PEERS))
    result = run_federation(run, again, tmp_path / "b run")
    assert torch.equal(result.trained.last.common, expected.trained.last.common)
    assert result.summary["personal"] == expected.summary["personal"]
    own = [read_json(client.folder / "done.json")["personal"] for client in again.clients.values()]
    assert own == [
        read_json(path / run_folder(path) / "done.json")["personal"] for path in sorted((tmp_path / "a").iterdir())
    ]


def run_folder(path):
    return next(folder.name for folder in path.iterdir() if folder.is_dir())


def test_a_client_without_keys_takes_no_part_outside_of_trials(three, tmp_path, clock):
    run = default_run(three)
    clients = [ClientNode(run, file, tmp_path / "state" / file.stem) for file in sorted(three.iterdir())]
    with pytest.raises(RequestError, match="needs its key and its peers' keys"):
        run_federation(run, MemoryTransport(clients), tmp_path / "run")
    for client in clients:
        client.unsigned = True
    assert_simulators(run_federation(run, MemoryTransport(clients), tmp_path / "run"), simulate(three))


def test_rounding_is_to_steps_of_the_range():
    """A part and its total, against exact arithmetic."""
    rng = np.random.default_rng(1)
    values = rng.uniform(-8, 8, size=(5, 200)) / 5
    parts = [transcript.to_integers(make_part("x", row, 8.0, 5)) for row in values]
    total = np.sum(parts, axis=0, dtype=np.uint64)
    from mooring.core.summing import to_values

    out = to_values(total, make_part("x", values[0], 8.0, 5).step, 5)
    assert np.abs(out - values.sum(0)).max() <= 5 * 0.5 * 8 / 2**52 + 1e-15
