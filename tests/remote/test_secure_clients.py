"""What clients of a secure run refuse, whatever the server asks."""

import secrets

import pytest
import torch

from mooring.core.errors import RequestError, WorkError
from mooring.remote import messages, secure_client, server_run
from mooring.remote.memory import MemoryTransport
from mooring.remote.messages import Payload
from mooring.remote.server_run import run_federation
from tests.remote.federation_runs import Killed, make_run
from tests.remote.secure_runs import RECOVERING, ROUNDS, WatchedTransport, make_secure_clients


class ActiveServer:
    """A server that follows the protocol up to the first round, and then asks its clients whatever it likes."""

    def __init__(self, table, tmp_path, clock):
        self.run = make_run(table, "fedavg", {"eta": 0.05}, rounds=ROUNDS, checkpoint="last", federation=RECOVERING)
        self.homes = make_secure_clients(self.run, table, tmp_path / "state")
        grid, self.requests = MemoryTransport(self.homes), {}

        def fate(message, node, number):
            payload = message
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
        return self.grid.clients[node].name

    def ask(self, name, what, words, tensors=None):
        client = next(one for one in self.homes if one.name == name)
        return client.answer(what, Payload({"run": self.digest, "what": what} | words, tensors or {}))

    def again(self, name, what, **changes):
        """The last request of this kind to a client, with some words changed."""
        known = self.requests[what][name]
        return self.ask(name, what, known.fields | changes, known.tensors)


@pytest.fixture
def server(table, tmp_path, clock):
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
    """Client 3 gets the list of all, the others one without client 3: its seed and its shared masks together
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


def test_a_client_sends_nothing_that_is_not_masked(table, tmp_path, clock, monkeypatch):
    """A server that leaves the protocol out gets no message."""
    run = make_run(table, "fedavg", {"eta": 0.05}, rounds=2, federation=RECOVERING)
    grid = WatchedTransport(make_secure_clients(run, table, tmp_path / "state"))
    plain = run.model_copy(update={"federation": run.federation.model_copy(update={"secure": False})})
    digest = server_run.run_digest
    monkeypatch.setattr(server_run, "run_digest", lambda _: digest(run))
    with pytest.raises((WorkError, RequestError)):
        run_federation(plain, grid, tmp_path / "run")
    assert not any("message" in content.tensors for content in grid.seen)


def test_shares_are_revealed_for_a_confirmed_sum_only(server):
    """Without enough signatures, for another list, or of a client outside of the sum, a peer reveals no share."""
    everybody = sorted(server.requests[messages.SECURE_UPDATE])
    about, replies = confirmed(server, everybody)
    signed = {name: reply.fields["signature"] for name, reply in replies.items()}
    for_one = {name: reply.fields["shares"] for name, reply in replies.items() if name != "site 1"}
    shares = {"site 3": for_one["site 3"]["site 1"]}
    about |= {"commitments": {"site 3": replies["site 3"].fields["commitments"]["site 1"]}}
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
    assert reply.fields == {"shares": {"site 3": None}}
    reply = server.ask("site 1", messages.SECURE_RECOVER, about | {"signatures": signed, "shares": shares})
    assert int(reply.fields["shares"]["site 3"], 16) > 0
