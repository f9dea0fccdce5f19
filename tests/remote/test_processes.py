"""Federations of real processes on loopback over TLS, keys, the guard, and what is refused before anything starts."""

import http.server
import itertools
import re
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
import tomllib
from contextlib import ExitStack
from multiprocessing.connection import Client
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from flwr.app import Message, RecordDict
from flwr.supercore.corestate import in_memory_corestate, sql_corestate
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState
from mooring.remote.child_process import RefusedKeyLog
from mooring.remote.client_app import forward_to_client, listen_for_messages
from mooring.remote.superlink import write_app

from mooring.commands.federation import describe_test_loss, find_apps
from mooring.core.errors import RequestError
from mooring.engines.fit import fit
from mooring.engines.request import request
from mooring.remote import child_process, client_app, federation, flower_patches, join, keys, superlink
from mooring.remote.client_node import ClientNode, answer_message
from mooring.remote.join import join as join_
from mooring.remote.memory import MemoryTransport
from mooring.remote.messages import Payload, from_records, to_records
from mooring.runs.directory import open_run
from tests.remote.federation_runs import ALGORITHMS, write_clients
from tests.remote.machines import DELAY_SECONDS, Machines, why_no_namespaces
from tests.remote.processes import (
    FORKS,
    LONG,
    Child,
    assert_models_are_the_simulators,
    commands_of,
    run_file,
    wait_until,
)

ROOT = Path(__file__).parents[2]

pytestmark = FORKS

APPS = find_apps()


NAMES = ["north", "south", "west"]
HOST, PORT = "fed.example.org", 9092  # as on the page


def read_page():
    """The run file of three machines, and the commands that are typed at the server and at the client `north`."""
    page = (ROOT / "docs" / "deploying.md").read_text()
    _, init, serve, join, *_ = re.findall(r"^    (mooring .*)$", page, re.M)
    return re.search(r"```toml\n(.*?)```", page, re.S).group(1), init, serve, join


def give_files(folder, run):
    """Every machine's folder with the run file; each client's with its own table."""
    write_clients(folder / "clients", clients=3)
    (folder / "run.toml").write_text(run)
    for file, name in zip(sorted((folder / "clients").iterdir()), NAMES):
        file.rename(file.with_name(f"{name}.csv"))
        shutil.copy(folder / "clients" / f"{name}.csv", folder / name)
    for name in ("server", *NAMES):
        (folder / name / "run.toml").write_text(run)


def give_keys(folder):
    for name in NAMES:
        shutil.copy(folder / "server" / "keys" / "ca.crt", folder / name)
        shutil.copy(folder / "server" / "keys" / "clients" / name, folder / name)


def assert_each_machine_has_its_models(folder):
    here = fit(folder / "run.toml")
    saved = open_run(folder / "server" / "runs" / "three").models
    torch.testing.assert_close(saved.common, here.trained.common, rtol=1e-12, atol=1e-12)
    for name in NAMES:
        own = open_run(next((folder / name / "state").glob("*/result"))).models.personal[0]
        torch.testing.assert_close(own, here.models[name], rtol=1e-12, atol=1e-12)
        assert "A curious server sees" in (folder / f"{name}.log").read_text()
    assert commands_of(folder) == {}


@pytest.mark.skipif(bool(why_no_namespaces()), reason=why_no_namespaces() or "network namespaces work here")
def test_the_page_on_deploying_works_as_typed_on_four_machines(tmp_path, monkeypatch):
    """Four network namespaces, each with its own folder; the clients' lines have a delay of 200 ms. Every command is
    that of the page, without a change, and so are the addresses of health and metrics."""
    run, init, serve, join = read_page()
    with Machines(tmp_path, ["server", *NAMES], HOST, PORT, DELAY_SECONDS) as network:
        machines, started = network.machines, {}
        give_files(tmp_path, run)
        try:
            assert machines["server"].start(init, tmp_path / "keys.log").wait(LONG) == 0
            give_keys(tmp_path)
            started = {"server": machines["server"].start(serve, tmp_path / "server.log")}
            started |= {
                name: machines[name].start(join.replace("north", name), tmp_path / f"{name}.log") for name in NAMES[:-1]
            }
            health = ["curl", "--silent", "--cacert", "ca.crt", f"https://{HOST}:{PORT}/healthz"]
            wait_until(lambda: "ok" in machines["north"].run(*health).stdout)
            wait_until(lambda: "not connected: west" in (tmp_path / "server.log").read_text())
            token = next((tmp_path / "server" / "runs").glob("*.federation/metrics.token")).read_text()
            metrics = ["curl", "--silent", "--cacert", "ca.crt", f"https://{HOST}:{PORT}/metrics"]
            assert "token" in machines["north"].run(*metrics).stdout
            metrics += ["--header", f"Authorization: Bearer {token.strip()}"]
            assert "mooring_gateway_sessions" in machines["north"].run(*metrics).stdout
            started["west"] = machines["west"].start(join.replace("north", "west"), tmp_path / "west.log")
            for who, process in started.items():
                assert process.wait(LONG) == 0, (tmp_path / f"{who}.log").read_text()
        finally:
            for process in started.values():
                process.kill()
                process.wait(60)
    monkeypatch.chdir(tmp_path)  # `source` is relative
    assert_each_machine_has_its_models(tmp_path)


@pytest.mark.skipif(not why_no_namespaces(), reason="the page is followed in network namespaces instead")
def test_the_page_on_deploying_works_as_typed(tmp_path, monkeypatch):
    """From nothing to a federation of three machines: each has a folder of its own, and all of them are this one."""
    run, init, serve, join = read_page()
    for name in ("server", *NAMES):
        (tmp_path / name).mkdir()
    give_files(tmp_path, run)
    port = child_process.find_free_port()

    def command(line, who):
        words = line.replace(f"{HOST}:{PORT}", f"127.0.0.1:{port}").replace("0.0.0.0", "127.0.0.1").split()[1:]
        words += ["--port", str(port)] if who == "server" else []
        return Child(words, tmp_path / f"{who}.log", tmp_path / who)

    assert Child(init.split()[1:], tmp_path / "keys.log", tmp_path / "server").wait(60) == 0
    give_keys(tmp_path)
    started = {"server": command(serve, "server")}
    try:
        started |= {name: command(join.replace("north", name), name) for name in NAMES}
        for who, process in started.items():
            assert process.wait(LONG) == 0, (tmp_path / f"{who}.log").read_text()
    finally:
        for process in started.values():
            process.kill()
    monkeypatch.chdir(tmp_path)  # `source` is relative
    assert_each_machine_has_its_models(tmp_path)


def test_a_message_that_came_before_the_session_is_answered(tmp_path):
    """On a slow line the server sees a node before its session is open, and sends its first message through Flower."""
    waiting, answered = ["hello"], []
    node = SimpleNamespace(answer_next=lambda answer: bool(waiting) and (answered.append(waiting.pop()) or True))
    session = SimpleNamespace(exchange=lambda body: answered.append("exchange"))
    join._answer_inline(SimpleNamespace(folder=tmp_path), node, session, lambda: len(answered) > 2)
    assert answered[:2] == ["hello", "exchange"]


@pytest.mark.slow
@pytest.mark.parametrize("name,embedded", [*((name, True) for name in ALGORITHMS), ("apfl", False)])
def test_larger_federations_over_tls(name, embedded, tmp_path):
    path, folder = run_file(tmp_path, name, rounds=20 if embedded else 3, clients=8 if embedded else 3)
    out = federation.run_local_federation(
        path, folder, tmp_path / "out", embedded=embedded, report=lambda sentence: None
    )
    assert_models_are_the_simulators(path, out, federation.server_folder(out))


def test_the_sentence_about_a_refused_signature(tmp_path):
    notes = RefusedKeyLog(str(tmp_path / "notes"))
    for _ in range(2):
        notes("KEY", "2020-01-01T00:00:00+00:00")
    with federation.follow_json_lines(tmp_path / "notes") as lines:
        (line,) = lines()  # once for each key
    text = federation.describe_refusal({"KEY": "north"}, line)
    assert text.startswith("client 'north' was refused: its clock is") and text.endswith("s behind")
    ahead = line | {"when": "2100-01-01T00:00:00+00:00"}
    assert "ahead" in federation.describe_refusal({"KEY": "north"}, ahead)
    assert federation.describe_refusal({}, line) == "a client whose key is not enrolled was refused"
    assert "its key was revoked" in federation.describe_refusal({"KEY": "north"}, line, {"south"})
    assert "signature is not valid" in federation.describe_refusal({"KEY": "north"}, line | {"when": "nonsense"})


def test_a_process_that_starts_slowly_keeps_its_task(monkeypatch):
    """Flower's own 30 seconds pass while a busy machine starts a process; another would be started in its place."""
    from datetime import timedelta

    for module in (in_memory_corestate, sql_corestate):
        for name in ("HEARTBEAT_DEFAULT_INTERVAL", "HEARTBEAT_PATIENCE"):
            monkeypatch.setattr(module, name, getattr(module, name))  # brought back after the test
    usual, away = in_memory_corestate.now, timedelta(0)
    monkeypatch.setattr(in_memory_corestate, "now", lambda: usual() + away)

    def still_known(seconds):
        nonlocal away
        state, away = InMemoryNodeState(None), timedelta(0)
        task = state.create_task("flwr-clientapp", 1)
        token = state.claim_task(task)
        away = timedelta(seconds=seconds)
        return state.get_task_by_token(token) is not None

    assert still_known(20) and not still_known(40)
    flower_patches.extend_start_timeout()
    long = flower_patches.START_SECONDS
    assert still_known(40) and still_known(long - 20) and not still_known(long + 20)


def test_a_refused_signature_is_reported_and_interrupts_no_run(tmp_path):
    """Flower's own connection would interrupt the process: `mooring join` says what may be wrong, and tries again."""

    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_error(401)

        def log_message(self, *_):
            pass

    path, folder = run_file(tmp_path)
    home = ClientNode(request(path, purpose="fit"), folder / "site 0.csv", tmp_path / "state")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        flower_patches.contain_connection_failures(lambda: False)
        with pytest.raises(flower_patches.ConnectionLostError) as refusal:
            address = join.ServerAddress(f"127.0.0.1:{server.server_port}", None, None)
            join._answer_messages(home, address, lambda: False, print)
        server.shutdown()
    assert "is this machine's clock right" in join.describe_error(refusal.value)
    taken = flower_patches.ConnectionLostError(
        "Failed to initialize the connection.\n[code: 2004] Failed to activate SuperNode."
    )
    assert "or a client with it was connected less than a minute ago" in join.describe_error(taken)


def test_a_finished_client_does_not_wait_for_a_server_that_ended(tmp_path):
    """Flower would try again for 20 seconds, and log it."""
    path, folder = run_file(tmp_path)
    home = ClientNode(request(path, purpose="fit"), folder / "site 0.csv", tmp_path / "state")
    asked, reports = [], []

    def done():
        asked.append(1)
        return len(asked) > 1  # not when it begins

    begun = time.monotonic()
    address = join.ServerAddress(f"127.0.0.1:{child_process.find_free_port()}", None, None)
    join.run_embedded_node(home, address, done, reports.append)
    assert time.monotonic() - begun < 5 and len(reports) == 1 and reports[0].startswith("connecting to 127.0.0.1:")


def test_polls_are_rarer_after_a_long_wait():
    """A message is found after a tenth of the wait for it at most, or after what it was found before."""
    now, pause, looks = 0.0, join.FIRST_POLL_SECONDS, []
    while now < 60:
        looks.append(now)
        now += pause
        pause = join.next_pause(pause, now)
    gaps = [(after, after - before) for before, after in itertools.pairwise(looks)]
    assert all(gap <= max(join.USUAL_POLL_SECONDS, join.POLL_SHARE_OF_WAIT * after) + 1e-9 for after, gap in gaps)
    assert gaps[0][1] == join.FIRST_POLL_SECONDS and gaps[-1][1] == join.MAX_POLL_SECONDS and len(looks) < 40


def test_a_server_waits_for_the_port_of_a_killed_one(monkeypatch):
    """Its SuperLink may need a while to notice; a port that stays taken is reported."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        now = iter([0.0, 0.0, 30.0, 61.0])
        monkeypatch.setattr(child_process, "time", SimpleNamespace(monotonic=lambda: next(now), sleep=lambda _: None))
        with pytest.raises(RequestError, match=f"port {port} of 127.0.0.1 is taken"):
            child_process.wait_for_port("127.0.0.1", port)
        assert next(now, None) is None  # not before a minute
    monkeypatch.undo()
    child_process.wait_for_port("127.0.0.1", port)


def test_the_sentence_about_a_clients_test_loss():
    low, high = "improvement_over_local_ci_low", "improvement_over_local_ci_high"
    result = {"metric": "mse", "personal": 1.5, "local": 1.75, low: 0.1, high: 0.4}
    text = "Test mse of your personal model: 1.5; of your local model: 1.75."
    assert describe_test_loss(result) == f"{text} Difference, 95% CI: 0.1 to 0.4."
    assert describe_test_loss(result | {low: -0.1}).endswith("-0.1 to 0.4, which includes 0.")
    assert "too few test rows" in describe_test_loss(result | {low: None, high: None})
    assert describe_test_loss(result | {"local": None}) == "Test mse of your personal model: 1.5."


def test_messages_are_answered_at_the_local_socket(tmp_path):
    """A process of Flower's own node imports no numerical library; the socket survives bytes that are no message."""
    reports = "import sys, mooring.remote.client_app, mooring.advice.remote.flower_app; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", reports], capture_output=True, text=True, cwd=ROOT, check=True)
    assert found.stdout.strip() == "False"
    path, folder = run_file(tmp_path)
    home = ClientNode(request(path, purpose="fit"), folder / "site 0.csv", tmp_path / "state")
    MemoryTransport([])  # names the run that messages belong to

    def ask(content, address):
        message = Message(content, 5, "query", ttl=60.0)
        message.metadata.__dict__["_message_id"] = "m1"
        return forward_to_client(message, address)

    with listen_for_messages(lambda message: answer_message(home, message)) as address:
        assert stat.S_IMODE(Path(address).parent.stat().st_mode) == 0o700
        with Client(address, "AF_UNIX") as other:
            other.send_bytes(b"no message")
            with pytest.raises(EOFError):
                other.recv_bytes()
        reply = ask(to_records(Payload({"what": "hello"})), address)
        assert from_records(reply.content).fields["name"] == "site 0" and reply.metadata.reply_to_message_id == "m1"
        refused = from_records(ask(RecordDict(), address).content).fields["refused"]
        assert "a message cannot be read" in refused
        context = SimpleNamespace(node_config={"socket": address})
        assert client_app.answer(
            Message(to_records(Payload({"what": "hello"})), 5, "query", ttl=60.0), context
        ).has_content()
    with pytest.raises(OSError):
        ask(to_records(Payload({"what": "hello"})), address)


def test_keys_are_made_once_and_secret(tmp_path):
    made = keys.init(tmp_path / "keys", ["north", "south"], ["fed.example.org"])
    assert len(made) == 8 and keys.init(tmp_path / "keys", ["north"]) == []
    assert {path.name for path in keys.init(tmp_path / "keys", ["west"])} == {"west", "west.pub"}
    for name in ("ca.key", "server.key", "clients/north"):
        assert stat.S_IMODE((tmp_path / "keys" / name).stat().st_mode) == 0o600
    assert set(keys.enrolled_keys(tmp_path / "keys")) == {"north", "south", "west"}
    with pytest.raises(RequestError, match="usable as a file's name"):
        keys.init(tmp_path / "keys", ["../x"])


def test_unsafe_transport_is_refused_before_anything_starts(tmp_path):
    path, folder = run_file(tmp_path)

    def serve(match, **how):
        with pytest.raises(RequestError, match=match):
            federation.serve(path, tmp_path / "out", report=print, **{"clients": 2} | how)

    serve("needs TLS")
    serve("for this machine only", insecure=True, host="0.0.0.0")
    serve("not both", insecure=True, key_folder=tmp_path)
    serve("has no ca.crt", key_folder=tmp_path)
    serve("how many clients", insecure=True, clients=None)

    def join(match, data="site 0.csv", **how):
        with pytest.raises(RequestError, match=match):
            join_(path, folder / data, tmp_path / "state", report=print, **how)

    join("needs TLS")
    join("for this machine only", insecure=True, server="10.0.0.1:9092")
    join("site 9.csv: there is no such file", data="site 9.csv", insecure=True)
    assert not (tmp_path / "out.federation").exists()


@pytest.mark.slow
def test_flowers_own_simulation_gives_the_same_models(tmp_path):
    pytest.importorskip("ray", reason="ray is not installed; the extra is mooring[ray]")
    path, folder = run_file(tmp_path, "apfl", rounds=2, clients=3, more='engine = "flower-simulation"')
    found = []
    out = federation.run_local_federation(
        path, folder, tmp_path / "out", report=lambda sentence: None, on_progress=lambda *a: found.append(a)
    )
    assert ("apfl", 2, 2) in found
    assert_models_are_the_simulators(path, out, federation.server_folder(out))


def test_a_simulation_without_ray_is_refused(tmp_path, monkeypatch):
    path, folder = run_file(tmp_path, more='engine = "flower-simulation"')
    with pytest.raises(RequestError, match="has no clients that join"):
        federation.serve(path, tmp_path / "out", clients=2, insecure=True, report=print)
    find = federation.importlib.util.find_spec
    monkeypatch.setattr(federation.importlib.util, "find_spec", lambda name: None if name == "ray" else find(name))
    with pytest.raises(RequestError, match="needs Ray"):
        federation.run_local_federation(path, folder, tmp_path / "out", report=print)


def test_the_app_of_a_run_is_a_folder_of_its_own(tmp_path):
    """For a fit and for an advice; the run file is filled in."""
    path, _ = run_file(tmp_path, "fedavg")
    app = write_app(path, tmp_path / "app", APPS)
    about = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert about["config"]["run"] == str(path) and about["components"]["clientapp"] == "mooring_app.client:app"
    assert "client_app.app" in (app / "mooring_app" / "client.py").read_text()
    with pytest.raises(RequestError, match="already exists"):
        write_app(path, app, APPS)
    path.write_text('[mooring]\npurpose = "advise"\n' + path.read_text().replace('[algorithm]\nname = "fedavg"\n', ""))
    advice = write_app(path, tmp_path / "advice", APPS)
    assert "mooring.advice.remote.flower_app.server" in (advice / "mooring_app" / "server.py").read_text()


@pytest.mark.slow
def test_plain_flwr_run_gives_the_same_models(tmp_path):
    """A SuperLink and SuperNodes as Flower starts them, and its own command."""
    path, folder = run_file(tmp_path, "fedavg", rounds=2, clients=2, training="baselines = false")
    app, out = write_app(path, tmp_path / "app", APPS), tmp_path / "out"
    port, bin_ = child_process.find_free_port(), Path(sys.executable).parent
    with ExitStack() as stack:

        def start(name, *words):
            """One of Flower's commands, with a home of its own, ended with the block."""
            with (tmp_path / f"{name}.log").open("wb") as log:
                known = child_process.child_environment(tmp_path / f"home {name}")
                one = subprocess.Popen([bin_ / words[0], *words[1:]], env=known, stdout=log, stderr=log)
            stack.callback(child_process.stop_process, one)
            return one

        address = f"127.0.0.1:{port}"
        words = ["--insecure", "--host", "127.0.0.1", "--port", str(port), "--database", str(tmp_path / "state.db")]
        start("link", "flower-superlink", *words, "--disable-runtime-dependency-installation")
        wait_until(lambda: superlink.is_healthy(address, None))
        for i, file in enumerate(sorted(folder.iterdir())):
            found = f'run="{path}" data="{file}" state="{tmp_path / f"state {i}"}"'
            where = ["--superlink", address, "--host", "127.0.0.1", "--port", str(child_process.find_free_port())]
            start(f"node {i}", "flower-supernode", "--insecure", *where, "--node-config", found)
        (tmp_path / "home run").mkdir()
        (tmp_path / "home run" / "config.toml").write_text(
            f'[superlink.here]\naddress = "{address}"\ninsecure = true\n'
        )
        asked = start("run", "flwr", "run", str(app), "here", "--run-config", f'out="{out}" clients="2"')
        assert asked.wait(LONG) == 0, (tmp_path / "run.log").read_text()
        wait_until(lambda: (out / "federation.json").exists(), 3 * LONG)
    here = fit(path)
    torch.testing.assert_close(open_run(out).models.common, here.trained.common, rtol=1e-12, atol=1e-12)
