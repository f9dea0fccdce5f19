"""Secure sums: the sum is right, single messages look like noise, and an active server gets nothing else."""

import itertools
import math
import secrets

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from scipy.stats import kstest

pytest.importorskip("flwr", reason="flwr is not installed; the extra is mooring[flower]")

from mooring.core.errors import RequestError, WorkError
from mooring.engines.fit import fit
from mooring.engines.flower import client_requests, messages, secure_client, secure_sums, server_run
from mooring.engines.flower.client_node import ClientNode
from mooring.engines.flower.keys import Identity
from mooring.engines.flower.messages import Payload, from_records
from mooring.engines.flower.server_run import run_federation
from mooring.runs.atomic_files import read_json
from tests.engines.local_grid import LocalGrid
from tests.engines.test_flower import HOW, clock, run_of, table  # noqa: F401

ROUNDS = 4
SECURE = {"secure": True, "share_models": False, "secure_range": 4.0}


def identities(names):
    keys = {name: ec.generate_private_key(ec.SECP384R1()) for name in names}
    public = {name: key.public_key() for name, key in keys.items()}
    return {name: Identity(key, public) for name, key in keys.items()}


def secure_homes(run, folder, state, known=None):
    files = sorted(folder.iterdir())
    known = known or identities([file.stem for file in files])
    return [ClientNode(run, file, state / file.stem, identity=known[file.stem]) for file in files]


def masked_numbers(grid):
    """What the server saw of single clients, as shares of the modulus."""
    seen = []
    for content in grid.seen:
        masked = from_records(content).tensors.get("masked")
        if masked is not None and len(masked) > 3:  # a message, not losses
            seen += (masked.numpy().view(np.uint64) / 2.0**64).tolist()
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
    run = run_of(table, name, rounds=ROUNDS, checkpoint="last", federation=SECURE | more)
    grid = Watched(secure_homes(run, table, tmp_path / "state"))
    grid.fate = fate or grid.fate
    return run_federation(run, grid, tmp_path / "run"), grid


def test_the_sum_is_that_of_the_messages_and_nothing_else_is_seen(table, tmp_path, clock):  # noqa: F811
    eta = 0.05
    run = run_of(table, "fedavg", {"eta": eta}, rounds=ROUNDS, checkpoint="last", federation=SECURE)
    grid = Watched(secure_homes(run, table, tmp_path / "state"))
    result = run_federation(run, grid, tmp_path / "run")
    here = fit(table, algorithm="fedavg", settings={"eta": eta}, **HOW | {"rounds": ROUNDS, "checkpoint": "last"})
    torch.testing.assert_close(result.trained.last.common, here.trained.last.common, rtol=1e-10, atol=1e-10)
    assert looks_like_noise(masked_numbers(grid))
    assert result.rounds["samples"].tolist() == here.rounds["samples"].tolist()
    for name in ("train_loss", "validation_loss", "test_loss"):
        np.testing.assert_allclose(result.rounds[name], here.rounds[name], rtol=1e-6)
    assert result.summary["personal"] == pytest.approx(here.summary["personal"], rel=1e-6)
    assert result.clients["personal"].isna().all()  # nobody's own loss is known to the server
    own = [read_json(home.folder / "done.json")["personal"] for home in grid.nodes.values()]
    np.testing.assert_allclose(own, here.clients["personal"], rtol=1e-9)
    assert not any((home.folder / secure_client.STATE).exists() for home in grid.nodes.values())


def test_a_step_size_is_settled_from_powers_of_two(table, tmp_path, clock):  # noqa: F811
    result, grid = run_secure(table, tmp_path)
    assert result.rounds["accepted"].tolist() == [4] * ROUNDS
    shown = [from_records(content).tensors for content in grid.seen]
    facts = [tensors for tensors in shown if "facts/smooth" in tensors]
    assert facts and all(float(torch.log2(one["facts/smooth"])) % 1 == 0 for one in facts)
    assert all(bool(one["facts/trace"].isnan().all()) for one in facts)


def test_without_masks_the_same_look_sees_the_messages(table, tmp_path, clock, monkeypatch):  # noqa: F811
    """The negative control: masks of zeros."""
    monkeypatch.setattr(secure_sums, "key_stream", lambda seed, size: np.zeros(size, np.uint64))
    _, grid = run_secure(table, tmp_path)
    assert not looks_like_noise(masked_numbers(grid))


def test_masks_come_from_the_whole_shared_secret():
    """Seeds of 32 bytes: the 2^32 seeds of a shorter one cannot be tried. Each attempt has its own."""
    one, other = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    session, raw = secrets.token_hex(16), lambda key: key.private_bytes_raw()
    public = lambda key: key.public_key().public_bytes_raw()  # noqa: E731
    mine = secure_sums.pair_seed(raw(one), public(other), session, 1, "a", "b")
    assert mine == secure_sums.pair_seed(raw(other), public(one), session, 1, "b", "a") and len(mine) == 32
    others = [secure_sums.pair_seed(raw(one), public(other), session, k, "a", "b") for k in range(2, 50)]
    assert len({mine, *others}) == 49
    stream = secure_sums.key_stream(mine, 4000)
    assert kstest(stream / 2.0**64, "uniform").pvalue > 1e-4
    near = bytes([mine[0] ^ 1]) + mine[1:]
    assert not np.array_equal(stream[:4], secure_sums.key_stream(near, 4))


@pytest.mark.parametrize("clients,lost", [(3, 0), (5, 1), (8, 2)])
def test_masks_cancel_in_the_sum_of_those_who_stayed(clients, lost):
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


def stage_of(message):
    return str(from_records(message.content).fields.get("what"))


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
def test_one_client_may_go_in_the_middle(stage, first, table, tmp_path, clock):  # noqa: F811
    """Three of four are enough for a sum, which is that of the three; the other stages wait for the client's reply."""
    lost = []

    def fate(message, node, number):
        if stage_of(message) == stage and node == 103 and not lost:
            lost.append(number)
            grid.since[103] = "later"  # the client was started again
            return "lost"
        return "fine"

    run = run_of(table, "fedavg", rounds=ROUNDS, checkpoint="last", federation=SECURE | {"deadline": 5.0})
    grid = Watched(secure_homes(run, table, tmp_path / "state"))
    grid.fate = fate
    if stage == messages.SECURE_UPDATE:
        grid.fate = lambda message, node, number: (
            "lost"
            if stage_of(message) == stage and node == 103 and from_records(message.content).fields["round"][0] == 1
            else "fine"
        )
    result = run_federation(run, grid, tmp_path / "run")
    assert result.rounds["accepted"].tolist() == [first, 4, 4, 4]


def test_too_few_survivors_give_nothing(table, tmp_path, clock):  # noqa: F811
    def fate(message, node, number):
        return "lost" if stage_of(message) == messages.SECURE_UPDATE and node in (102, 103) else "fine"

    with pytest.raises(WorkError, match=r"no reply for 60 seconds|no secure sum after 10 attempts"):
        run_secure(table, tmp_path, fate=fate, deadline=5.0, wait=60.0)


class Killed(BaseException):
    pass


@pytest.mark.parametrize(
    "stage", [messages.SECURE_UPDATE, messages.SECURE_CONFIRM, messages.SECURE_UNMASK, messages.SECURE_EVALUATE]
)
def test_a_killed_server_resumes_a_secure_run(stage, table, tmp_path, clock):  # noqa: F811
    """The round that was cut is summed again, over the same clients, under new masks."""
    eta = {"eta": 0.05}
    run = run_of(table, "fedavg", eta, rounds=ROUNDS, checkpoint="last", federation=SECURE)
    homes = secure_homes(run, table, tmp_path / "state")
    grid, seen = LocalGrid(homes), []

    def fate(message, node, number):
        seen.append(stage_of(message))
        if stage_of(message) == stage and seen.count(stage) == 11:
            raise Killed
        return "fine"

    grid.fate = fate
    with pytest.raises(Killed):
        run_federation(run, grid, tmp_path / "run")
    result = run_federation(run, LocalGrid(homes), tmp_path / "run")
    here = fit(table, algorithm="fedavg", settings=eta, **HOW | {"rounds": ROUNDS, "checkpoint": "last"})
    torch.testing.assert_close(result.trained.last.common, here.trained.last.common, rtol=1e-9, atol=1e-9)


def test_random_numbers_end_a_secure_run_in_a_sentence(table, tmp_path, clock, monkeypatch):  # noqa: F811
    """Nobody can tell them from a masked vector, and so nobody knows who sent them."""
    usual = client_requests.REQUEST_HANDLERS[messages.SECURE_UPDATE]

    def lie(home, payload):
        reply = usual(home, payload)
        noise = torch.randint(-(2**62), 2**62, reply.tensors["masked"].shape)
        return reply._replace(tensors={"masked": noise}) if home.name == "site 2" else reply

    monkeypatch.setitem(client_requests.REQUEST_HANDLERS, messages.SECURE_UPDATE, lie)
    with pytest.raises(WorkError, match="one of site 0, site 1, site 2, site 3 sent random numbers"):
        run_secure(table, tmp_path)


def test_what_secure_rules_out(table, tmp_path, clock):  # noqa: F811
    with pytest.raises(RequestError, match="leave out share_models = true"):
        run_secure(table, tmp_path, share_models=True)
    with pytest.raises(RequestError, match="needs 3 clients or more, and 2 take part"):
        run_secure(table, tmp_path, clients=2)
    with pytest.raises(RequestError, match="secure = true hides messages"):
        run_secure(table, tmp_path, "fedprox_personal")
    with pytest.raises(WorkError, match="secure_range is 1e-09; raise it"):
        run_secure(table, tmp_path, secure_range=1e-9)


def test_a_client_without_keys_takes_no_part(table, tmp_path, clock):  # noqa: F811
    run = run_of(table, "fedavg", rounds=2, federation=SECURE)
    homes = [ClientNode(run, file, tmp_path / "state" / file.stem) for file in sorted(table.iterdir())]
    with pytest.raises(
        RequestError, match="needs its key and its peers' keys for secure = true: give --key and --peers"
    ):
        run_federation(run, LocalGrid(homes), tmp_path / "run")


class ActiveServer:
    """A server that follows the protocol up to the first round, and then asks its clients whatever it likes."""

    def __init__(self, table, tmp_path, clock):  # noqa: F811
        self.run = run_of(table, "fedavg", {"eta": 0.05}, rounds=ROUNDS, checkpoint="last", federation=SECURE)
        self.homes = secure_homes(self.run, table, tmp_path / "state")
        grid, self.requests = LocalGrid(self.homes), {}

        def fate(message, node, number):
            payload = from_records(message.content)
            self.requests.setdefault(payload.fields["what"], {})[self.name(node)] = payload
            if len(self.requests.get(messages.SECURE_UPDATE, {})) == len(self.homes):
                raise Killed  # nothing of round 1 is confirmed yet
            return "fine"

        self.grid = grid
        grid.fate = fate
        with pytest.raises(Killed):
            run_federation(self.run, grid, tmp_path / "run")
        self.digest = self.homes[0].digest

    def name(self, node):
        return self.grid.nodes[node].name

    def ask(self, name, what, words, tensors=None):
        client = next(one for one in self.homes if one.name == name)
        return client.answer(what, Payload({"run": self.digest, "what": what} | words, tensors or {}))

    def again(self, name, what, **changes):
        """The last request of this kind to a client, with some words changed."""
        known = self.requests[what][name]
        return self.ask(name, what, known.fields | changes, known.tensors)


@pytest.fixture
def server(table, tmp_path, clock):  # noqa: F811
    return ActiveServer(table, tmp_path, clock)


def test_requests_outside_the_protocol_are_refused(server):
    """What a run without secure sums answers: sums of rows, losses, fits, models."""
    update = server.requests[messages.SECURE_UPDATE]["site 1"]
    call = {"name": "differentiate_at", "part": ["train"], "own": 0, "shared": {"w": True}}
    asks = [("statistics", {"calls": {"0": call | {"name": "summarize_rows", "shared": {}}}}, {})]
    asks += [("statistics", {"calls": {"0": call}}, {"0/shared/w": torch.zeros(5).double()})]
    asks += [("client_statistics", update.fields | {"asks": ["spread"]}, {"w0": torch.zeros(5).double()})]
    asks += [("evaluate", update.fields | {"parts": ["train"]}, update.tensors)]
    asks += [("models", update.fields, update.tensors), ("numbers", update.fields | {"field": "alpha"}, {})]
    asks += [("local_update", update.fields, update.tensors)]
    for what, words, tensors in asks:
        reply = server.ask("site 1", what, words, tensors)
        assert "refused" in reply.fields and not reply.tensors, what


def test_weights_that_do_not_follow_from_the_sizes_are_refused(server):
    """All weight on one client would make the sum its message."""
    reply = server.again("site 1", messages.SECURE_UPDATE, p=1.0, attempt=90)
    assert "follows from the agreed sizes" in reply.fields["refused"]
    reply = server.again("site 1", messages.SECURE_EVALUATE, p=1.0, attempt=91)
    assert "follows from the agreed sizes" in reply.fields["refused"]


def test_small_and_unknown_cohorts_are_refused(server):
    session = secrets.token_hex(16)
    for cohort in (["site 1"], ["site 0", "site 1"], ["site 1", "site 1", "site 0"]):
        reply = server.ask("site 1", messages.SECURE_KEYS, {"session": session, "cohort": cohort})
        assert "3 clients or more" in reply.fields["refused"]
    reply = server.ask("site 1", messages.SECURE_KEYS, {"session": session, "cohort": ["site 0", "site 1", "invented"]})
    assert "does not know the key of 'invented'" in reply.fields["refused"]
    reply = server.again("site 1", messages.SECURE_UPDATE, cohort=["site 0", "site 1"], attempt=92)
    assert "3 clients or more" in reply.fields["refused"]


def test_keys_and_sizes_that_the_server_invents_are_refused(server):
    """A key of the server's own would open the masks; small sizes of the others would unweight them."""
    known = server.requests[messages.SECURE_PEERS]["site 1"].fields["statements"]
    for change in ({"public": "00" * 32}, {"weight": 1e-9}, {"sizes": {"train": 0, "validation": 0, "test": 0}}):
        forged = dict(known)
        forged["site 2"] = known["site 2"] | {"statement": known["site 2"]["statement"] | change}
        reply = server.again("site 1", messages.SECURE_PEERS, statements=forged)
        assert "that 'site 2' did not sign" in reply.fields["refused"], change


def test_one_mask_is_used_once(server):
    """Another model under the same masks would show the difference of two messages."""
    known = server.requests[messages.SECURE_UPDATE]["site 1"]
    tensors = {name: tensor + 1 for name, tensor in known.tensors.items()}
    reply = server.ask("site 1", messages.SECURE_UPDATE, known.fields, tensors)
    assert "has used the masks" in reply.fields["refused"]
    reply = server.again("site 1", messages.SECURE_UPDATE, cohort=["site 0", "site 1", "site 2"])
    assert "has used the masks" in reply.fields["refused"]


def confirmed(server, survivors, names=None):
    attempt = server.requests[messages.SECURE_UPDATE]["site 1"].fields["attempt"]
    session = server.requests[messages.SECURE_UPDATE]["site 1"].fields["session"]
    about = {"session": session, "attempt": attempt, "survivors": survivors}
    return about, {name: server.ask(name, messages.SECURE_CONFIRM, about) for name in names or survivors}


def test_two_lists_of_survivors_cannot_both_be_opened(server):
    """Client 3 is told that all survived, the others that client 3 did not: its seed and its shared masks together
    would open its message."""
    everybody = sorted(server.requests[messages.SECURE_UPDATE])
    about, replies = confirmed(server, everybody, ["site 3"])
    full = {"site 3": replies["site 3"].fields["signature"]}
    reply = server.ask("site 3", messages.SECURE_UNMASK, about | {"signatures": full})
    assert "needs 3 signatures under a sum, and sees 1" in reply.fields["refused"]
    less, replies = confirmed(server, everybody[:3])
    signed = {name: reply.fields["signature"] for name, reply in replies.items()}
    opened = {name: server.ask(name, messages.SECURE_UNMASK, less | {"signatures": signed}) for name in everybody[:3]}
    assert all("site 3" in reply.fields["pairs"] for reply in opened.values())  # the sum of three is theirs to open
    more = {name: server.ask(name, messages.SECURE_CONFIRM, about) for name in everybody[:3]}
    assert all("signature" not in reply.fields for reply in more.values())
    reply = server.ask("site 3", messages.SECURE_UNMASK, about | {"signatures": full | signed})
    assert "refused" in reply.fields  # the signatures are under another list


def test_a_round_is_summed_over_one_set_of_clients(server):
    """With and without a client, the difference would be its message: also with another attempt, or another round."""
    everybody = sorted(server.requests[messages.SECURE_UPDATE])
    about, replies = confirmed(server, everybody)
    signed = {name: reply.fields["signature"] for name, reply in replies.items()}
    opened = [server.ask(name, messages.SECURE_UNMASK, about | {"signatures": signed}) for name in everybody]
    assert all("seed" in reply.fields for reply in opened)
    for name in everybody[:3]:
        reply = server.again(name, messages.SECURE_UPDATE, attempt=50, cohort=everybody[:3])
        assert "masked" in reply.tensors
        about = {"session": server.requests[messages.SECURE_UPDATE][name].fields["session"], "attempt": 50}
        reply = server.ask(name, messages.SECURE_CONFIRM, about | {"survivors": everybody[:3]})
        assert reply.fields.get("confirmed") == everybody and "signature" not in reply.fields
    for name in everybody[:3]:
        turn = server.requests[messages.SECURE_UPDATE][name].fields["round"]
        reply = server.again(name, messages.SECURE_UPDATE, attempt=51, cohort=everybody[:3], round=[2, *turn[1:]])
        about = {"session": server.requests[messages.SECURE_UPDATE][name].fields["session"], "attempt": 51}
        reply = server.ask(name, messages.SECURE_CONFIRM, about | {"survivors": everybody[:3]})
        assert "sum over other clients for the same model" in reply.fields["refused"]


def test_an_attempt_that_was_not_opened_stays_closed(server):
    """A confirmed attempt may be repeated without a client that went away; then the first one is never opened."""
    everybody = sorted(server.requests[messages.SECURE_UPDATE])
    first, replies = confirmed(server, everybody)
    signed = {name: reply.fields["signature"] for name, reply in replies.items()}
    for name in everybody[:3]:
        server.again(name, messages.SECURE_UPDATE, attempt=70, cohort=everybody)
    second = first | {"attempt": 70, "survivors": everybody[:3]}
    again = {name: server.ask(name, messages.SECURE_CONFIRM, second).fields["signature"] for name in everybody[:3]}
    for name in everybody[:3]:
        reply = server.ask(name, messages.SECURE_UNMASK, first | {"signatures": signed})
        assert "no sum under way with this number" in reply.fields["refused"]
        assert "seed" in server.ask(name, messages.SECURE_UNMASK, second | {"signatures": again}).fields


def test_evaluations_are_budgeted(server):
    """A loss at each of many models is a gradient."""
    known, refused = server.requests[messages.SECURE_EVALUATE]["site 1"], []
    for k in range(40):
        tensors = {name: tensor + 0.01 * k for name, tensor in known.tensors.items()}
        reply = server.ask("site 1", messages.SECURE_EVALUATE, known.fields | {"attempt": 100 + k}, tensors)
        assert "risk" not in reply.tensors
        refused.append("refused" in reply.fields)
    assert 0 < refused.count(False) <= secure_client.evaluation_budget(server.homes[1]) < 30
    assert "all that its run file plans" in reply.fields["refused"]


def test_rounds_settings_and_beginnings_are_those_of_the_run_file(server):
    reply = server.again("site 1", messages.SECURE_UPDATE, attempt=60, round=[ROUNDS + 1, ROUNDS + 1, 4, 4, 1.0, 0])
    assert f"takes part in {ROUNDS} rounds" in reply.fields["refused"]
    begin = server.requests["begin"]["site 1"]
    reply = server.again("site 1", "begin", hyperparameters=begin.fields["hyperparameters"] | {"eta": 50.0}, start="x")
    assert "has eta = 0.05 in its run file" in reply.fields["refused"]
    for k in range(secure_client.MAX_STARTS):
        last = server.again("site 1", "begin", start=f"start {k}")
    assert "start `mooring join` again" in last.fields["refused"]


def test_a_schema_cannot_ask_for_values(server):
    """Numbers taken as a category would be sent as names of levels."""
    plan = server.requests["tally"]["site 1"].fields["plan"]
    columns = [column | {"kind": "category"} if column["name"] == "a" else column for column in plan["columns"]]
    reply = server.again("site 1", "tally", plan=plan | {"columns": columns})
    assert "column of numbers 'a' as a category" in reply.fields["refused"]
    for k in range(10):
        last = server.again("site 1", "tally", plan=plan | {"limits": {"a": [-float(k), float(k)]}})
    assert "it answers no more" in last.fields["refused"]


def test_a_client_sends_nothing_that_is_not_masked(table, tmp_path, clock, monkeypatch):  # noqa: F811
    """A server that leaves the protocol out gets no message."""
    run = run_of(table, "fedavg", {"eta": 0.05}, rounds=2, federation=SECURE)
    grid = Watched(secure_homes(run, table, tmp_path / "state"))
    plain = run.model_copy(update={"federation": run.federation.model_copy(update={"secure": False})})
    digest = server_run.run_digest
    monkeypatch.setattr(server_run, "run_digest", lambda _: digest(run))
    with pytest.raises((WorkError, RequestError)):
        run_federation(plain, grid, tmp_path / "run")
    assert not any("message" in from_records(content).tensors for content in grid.seen)


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


def run_until_gone(table, path, last_stage, count, **more):  # noqa: F811
    """A secure run whose client 'site 2' falls silent for good at its `count`-th request of a stage."""
    run = run_of(table, "fedavg", {"eta": 0.05}, rounds=ROUNDS, checkpoint="last", federation=SECURE | more)
    grid, seen = LocalGrid(secure_homes(run, table, path / "state", COMMON_KEYS)), []

    def fate(message, node, number):
        if node != 103:
            return "fine"
        seen.append(stage_of(message))
        is_gone = seen[:-1].count(last_stage) >= count or (
            seen.count(last_stage) == count and stage_of(message) == last_stage
        )
        return "lost" if is_gone else "fine"

    grid.fate, said = fate, []
    return run_federation(run, grid, path / "run", report=said.append), said


COMMON_KEYS = identities([f"site {i}" for i in range(4)])


def test_a_client_that_confirms_and_never_unmasks_is_recovered(table, tmp_path, clock):  # noqa: F811
    """Its peers' shares open the sum: the result is that of a run in which it leaves right after it has unmasked."""
    result, said = run_until_gone(table, tmp_path / "a", messages.SECURE_UNMASK, 3, deadline=5.0)
    assert any("recovering the masks of site 2 from the shares of 3 clients" in sentence for sentence in said)
    accepted = result.rounds["accepted"].tolist()
    assert accepted[-1] == 3 and 4 in accepted
    run = run_of(
        table, "fedavg", {"eta": 0.05}, rounds=ROUNDS, checkpoint="last", federation=SECURE | {"deadline": 5.0}
    )
    grid, seen = LocalGrid(secure_homes(run, table, tmp_path / "b" / "state", COMMON_KEYS)), []

    def fate(message, node, number):
        seen.extend([stage_of(message)] if node == 103 else [])
        return "lost" if node == 103 and seen.count(messages.SECURE_UNMASK) >= 3 and len(seen) > after else "fine"

    after = 10**9

    def leave_after(message, node, number):
        nonlocal after
        answer = fate(message, node, number)
        if node == 103 and seen.count(messages.SECURE_UNMASK) == 3 and after == 10**9:
            after = len(seen)
        return answer

    grid.fate = leave_after
    other = run_federation(run, grid, tmp_path / "b" / "run")
    assert other.rounds["accepted"].tolist() == accepted
    assert torch.equal(result.trained.last.common, other.trained.last.common)


def test_too_many_that_never_unmask_end_the_run_in_a_sentence(table, tmp_path, clock):  # noqa: F811
    run = run_of(table, "fedavg", {"eta": 0.05}, rounds=2, federation=SECURE | {"deadline": 5.0, "wait": 60.0})
    grid = LocalGrid(secure_homes(run, table, tmp_path / "state"))
    grid.fate = lambda message, node, number: (
        "lost" if node in (102, 103) and stage_of(message) == messages.SECURE_UNMASK else "fine"
    )
    with pytest.raises(WorkError, match="no reply for 60 seconds"):
        run_federation(run, grid, tmp_path / "run")


def test_a_false_share_is_left_out(table):  # noqa: F811
    names = [f"site {i}" for i in range(6)]
    key, places = secrets.token_bytes(32), secure_sums.share_places(names, "site 0")
    values = secure_sums.split_secret(key, secure_sums.share_threshold(6), 5)
    shares = {name: values[place - 1] for name, place in places.items()}
    sealed = secure_sums.encrypt(key, b'{"seed": "x"}', "site 0")
    assert secure_sums.recover_answer(sealed, shares | {"site 2": 5}, names, "site 0") == {"seed": "x"}
    assert secure_sums.recover_answer(sealed, shares | {"site 2": 5, "site 3": 5}, names, "site 0") is None


def test_shares_are_revealed_for_a_confirmed_sum_only(server):
    """Without enough signatures, for another list, or of a client outside of the sum, a peer reveals no share."""
    everybody = sorted(server.requests[messages.SECURE_UPDATE])
    about, replies = confirmed(server, everybody)
    signed = {name: reply.fields["signature"] for name, reply in replies.items()}
    for_one = {name: reply.fields["shares"] for name, reply in replies.items() if name != "site 1"}
    shares = {"site 3": for_one["site 3"]["site 1"]}
    few = {name: signed[name] for name in everybody[:2]}
    reply = server.ask("site 1", messages.SECURE_RECOVER, about | {"signatures": few, "shares": shares})
    assert "needs 3 signatures" in reply.fields["refused"]
    other = about | {"survivors": everybody[:3], "signatures": signed, "shares": shares}
    assert "has not confirmed" in server.ask("site 1", messages.SECURE_RECOVER, other).fields["refused"]
    own = {"site 1": for_one["site 3"]["site 1"]}
    reply = server.ask("site 1", messages.SECURE_RECOVER, about | {"signatures": signed, "shares": own})
    assert "has no share of 'site 1'" in reply.fields["refused"]
    stolen = {"site 3": for_one["site 3"]["site 2"]}  # made for another peer
    reply = server.ask("site 1", messages.SECURE_RECOVER, about | {"signatures": signed, "shares": stolen})
    assert "did not make for it" in reply.fields["refused"]
    reply = server.ask("site 1", messages.SECURE_RECOVER, about | {"signatures": signed, "shares": shares})
    assert set(reply.fields["shares"]) == {"site 3"}
