"""What operators rely on: policies, records of what left, logs, private files, slow lines, units started anywhere."""

import json
import os
import stat

import pytest
import torch

from mooring.cli import main
from mooring.commands.event_log import EventLog
from mooring.core import size_limits
from mooring.core.errors import RequestError
from mooring.engines.request import read_federation_request
from mooring.remote import keys, serve
from mooring.remote.client_node import ClientNode
from mooring.remote.disclosure import SENT_FILE, Policy, read_policy
from mooring.remote.join import join
from mooring.remote.memory import MemoryTransport
from mooring.remote.messages import Payload
from mooring.remote.requests import REQUESTS
from mooring.remote.secure_rule import PLAIN
from mooring.remote.server_run import run_federation
from tests.remote.federation_runs import make_clients, make_run
from tests.remote.machines import DELAY_SECONDS, SlowLine, why_no_namespaces
from tests.remote.processes import FORKS, Federation, assert_models_are_the_simulators, run_file

pytestmark = FORKS


def test_a_client_records_what_left_its_machine(table, tmp_path, clock):
    run = make_run(table, "fedavg", rounds=2)
    homes = make_clients(run, table, tmp_path / "state")
    run_federation(run, MemoryTransport(homes), tmp_path / "run")
    path = homes[1].folder / SENT_FILE
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [line["request"] for line in lines][:2] == ["hello", "survey"] and lines[-1]["request"] == "done"
    updates = [line for line in lines if line["request"] == "local_update" and line["arrays"]]
    assert [line["round"] for line in updates][:2] == [1, 2] and updates[0]["arrays"]["message"] == [1, 7]
    assert all(
        line["sent"] == REQUESTS[line["request"]].sends and line["bytes"] > 0 and "time" in line for line in lines
    )


def test_a_policy_refuses_runs_and_requests(table, tmp_path, clock):
    run = make_run(table, "fedavg", rounds=5)
    for policy, match in (
        (Policy(purposes=["advise"]), "allows runs to advise, not to fit"),
        (Policy(algorithms=["ditto"]), "allows ditto, not fedavg"),
        (Policy(require_secure=True), "requires secure sums, and the server sees the single messages"),
        (Policy(min_clients=9), "asks for 9 clients, and the run has 4"),
        (Policy(max_rounds=4), "allows 4 rounds, not 5"),
        (Policy(quantities=["schema"]), "does not let models leave"),
        (Policy(max_epsilon=1.0), "has no noise"),
    ):
        with pytest.raises(RequestError, match=match):
            policy.check_run(run)
    private = run.model_copy(update={"training": run.training.model_copy(update={"noise": 4.0, "clip": 1.0})})
    with pytest.raises(RequestError, match="would spend"):
        Policy(max_epsilon=0.1).check_run(private)
    Policy(max_epsilon=9.0, algorithms=["fedavg"], purposes=["fit"]).check_run(private)
    file = sorted(table.iterdir())[0]
    client = ClientNode(run, file, tmp_path / "state", policy=Policy(quantities=["schema", "updates"], min_clients=3))
    known = {what: row for what, row in REQUESTS.items() if "fit" in row.purposes and PLAIN in row.sums}
    for what in (what for what, row in known.items() if row.quantity in ("statistics", "losses", "models")):
        reply = client.answer(what, Payload({"run": client.digest}))
        assert "its policy does not allow it" in reply.fields["refused"], what
    assert "summary" in client.answer("survey", Payload({"run": client.digest})).fields
    small = client.answer("local_update", Payload({"run": client.digest, "round": [1, 5, 4, 2, 1.0, 0]}))
    assert "rounds of 3 clients or more" in small.fields["refused"]
    (tmp_path / "policy.toml").write_text('quantities = ["rows"]\n')
    with pytest.raises(RequestError, match="unknown quantity 'rows'; known: schema"):
        read_policy(tmp_path / "policy.toml")
    (tmp_path / "policy.toml").write_text("min_client = 3\n")
    with pytest.raises(RequestError, match="min_client"):
        read_policy(tmp_path / "policy.toml")


def test_logs_have_times_and_rounds_without_a_terminal(capsys):
    for format_ in ("text", "json"):
        log = EventLog(format_)
        log.write_message("client 'north' is here")
        follow = log.follow(lambda *words: None)
        for done in (3, 4, 5, 20):
            follow("fedavg", done, 20)
        lines = capsys.readouterr().err.splitlines()
        if format_ == "json":
            first, second, last = map(json.loads, lines)
            assert first["text"] == "client 'north' is here" and second["done"] == 3 and last["done"] == 20
            assert first["time"] <= second["time"]
        else:
            assert lines[0][:2] == "20" and lines[0].endswith("client 'north' is here")
            assert lines[1].endswith("fedavg: 3 of 20") and lines[2].endswith("fedavg: 20 of 20") and len(lines) == 3


def test_a_deployment_does_not_read_the_source_of_its_run_file(tmp_path, monkeypatch):
    """A unit that is started in / needs no flag: every client names its own table."""
    (tmp_path / "etc").mkdir()
    path = tmp_path / "etc" / "run.toml"
    path.write_text(
        '[data]\nsource = "clients"\ntarget = "y"\n[algorithm]\nname = "fedavg"\n[federation]\nclients = 2\n'
    )
    monkeypatch.chdir("/")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert read_federation_request(path).data.target == "y"
    model = tmp_path / "etc" / "net.py"
    model.write_text("def make(features, classes):\n    raise SystemExit\n")
    path.write_text(path.read_text() + f'[task]\nmodel = "{model}:make"\n')
    with pytest.raises(RequestError, match="--trust-code"):
        read_federation_request(path)
    assert read_federation_request(path, trust_code=True).task.model.endswith("net.py:make")


def test_stored_files_are_for_their_owner(table, tmp_path, clock):
    """States, personal models and run directories, whatever the umask."""
    before = os.umask(0o000)
    try:
        run = make_run(table, "apfl", rounds=2)
        run_federation(run, MemoryTransport(make_clients(run, table, tmp_path / "state")), tmp_path / "run")
    finally:
        os.umask(before)
    found = [path for root in ("state", "run") for path in (tmp_path / root).rglob("*")]
    assert len(found) > 40
    for path in found:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode & 0o077 == 0, (path, oct(mode))


def test_the_limit_of_packed_files_is_an_option(monkeypatch):
    monkeypatch.delenv(size_limits.LIMIT_VARIABLE, raising=False)
    assert size_limits.read_unpacked_limit() == 2**30
    monkeypatch.setenv(size_limits.LIMIT_VARIABLE, "5e9")
    assert size_limits.read_unpacked_limit() == 5 * 10**9
    monkeypatch.setenv(size_limits.LIMIT_VARIABLE, "much")
    with pytest.raises(RequestError, match="must be a number of bytes"):
        size_limits.read_unpacked_limit()


def test_keys_from_the_command_line(tmp_path, monkeypatch, capsys):
    """As an operator types them: the client's key never leaves its folder."""
    monkeypatch.chdir(tmp_path)

    def mooring(*words, fails=False):
        with pytest.raises(SystemExit) as end:
            main(["keys", *words])
        output = "".join(capsys.readouterr())
        assert bool(end.value.code) == fails, output
        return output

    mooring("init", "keys", "--names", "south", "--host", "fed.example.org")
    assert "Send north/north.request" in mooring("request", "north", "--out", "north").replace("\n", " ")
    mooring("enroll", "keys", "north/north.request")
    mooring("request", "north", "--out", "new")
    assert "keys rotate" in mooring("enroll", "keys", "new/north.request", fails=True)
    mooring("rotate", "keys", "new/north.request")
    mooring("revoke", "keys", "south")
    assert "keys renew" in mooring("init", "keys", "--names", "south", "--host", "other.example.org", fails=True)
    assert "other.example.org" in mooring("renew", "keys", "--host", "other.example.org")
    assert set(keys.public_keys(tmp_path / "keys")) == {"north"}


def test_joining_a_secure_run_needs_keys_and_peers(table, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[data]\nsource = "x"\ntarget = "y"\n[algorithm]\nname = "fedavg"\n[federation]\nsecure = true\n')
    with pytest.raises(RequestError, match="give --key and --peers"):
        join(path, sorted(table.iterdir())[0], tmp_path / "state", ca=path, key=path, report=print)


@pytest.mark.processes
@pytest.mark.skipif(not why_no_namespaces(), reason="the page on deploying is followed with this delay in namespaces")
def test_a_line_with_200_ms_delay_ends_nobody(tmp_path):
    path, folder = run_file(tmp_path, "fedavg", rounds=3, clients=3)
    port = serve.find_free_port()
    line = SlowLine(("127.0.0.1", port), DELAY_SECONDS)
    with Federation(tmp_path, path, folder, port=port, through=line.port) as here:
        here.check_end()
        assert_models_are_the_simulators(path, here.out, here.place)
        for name in here.names:
            assert here.alive[name].wait(60) == 0, here.log_text(name)
            assert "unexpected" not in here.log_text(name)
    line.close()


@pytest.mark.processes
def test_a_secure_federation_of_processes(tmp_path):
    """The whole way over TLS: keys, peers, sums; audit log, metrics and modes of what the server keeps."""
    path, folder = run_file(
        tmp_path,
        "fedavg",
        rounds=3,
        clients=3,
        more="",
        settings="eta = 0.05",
        training="checkpoint = 'last'",
    )
    reports = []
    out = serve.run_local_federation(path, folder, tmp_path / "out", report=reports.append)
    from mooring.engines.fit import fit
    from mooring.runs.directory import open_run

    here = fit(path)
    torch.testing.assert_close(open_run(out).models.common, here.trained.common, rtol=1e-9, atol=1e-9)
    place = serve.server_folder(out)
    lines = [json.loads(line) for line in (place / "audit.jsonl").read_text().splitlines()]
    assert {"joined", "asked"} <= {line["event"] for line in lines}
    assert any(line.get("request") == "fixed_update" and len(line["clients"]) == 3 for line in lines)
    assert not any(line.get("request") in ("local_update", "evaluate") for line in lines)
    for name in ("audit.jsonl", "metrics.token"):
        assert stat.S_IMODE((place / name).stat().st_mode) & 0o077 == 0, name
