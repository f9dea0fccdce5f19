"""A federation of real processes on loopback: TLS, keys, the guard, kills. Each process has a folder of its own."""

import asyncio
import os
import signal
import ssl
import stat
import subprocess
import sys
import time

import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed; the extra is mooring[flower]")

import httpx
from flwr.proto.control_pb2 import ListRunsRequest

from mooring.core.errors import RequestError
from mooring.engines.fit import fit
from mooring.engines.flower import federation, keys
from mooring.engines.flower.home import digest_of_run
from mooring.engines.flower.started import Guard
from mooring.engines.request import request
from mooring.runs.directory import open_run
from tests.engines.test_flower import write_clients

pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # Flower's own


@pytest.fixture(autouse=True)
def silent_flower(monkeypatch, tmp_path):
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "0")
    monkeypatch.setenv("FLWR_DISABLE_UPDATE_CHECK", "1")
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def run_file(tmp_path, name="fedavg", rounds=3, clients=2, more=""):
    folder = write_clients(tmp_path / "clients", clients=clients)
    text = f"""
[data]
source = "{folder}"
target = "y"
[algorithm]
name = "{name}"
[training]
rounds = {rounds}
evaluate_every = {max(rounds // 2, 1)}
threads = 1
[federation]
{more}
"""
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path, folder


def assert_models_are_the_simulators(path, out, place):
    """The common model at the server, every personal one in its client's folder."""
    here, run = fit(path), request(path, purpose="fit")
    saved = open_run(out).models
    torch.testing.assert_close(saved.common, here.trained.common, rtol=1e-12, atol=1e-12)
    assert saved.personal is None
    for name, right in here.models.items():
        own = open_run(place / "clients" / name / digest_of_run(run) / "result").models
        torch.testing.assert_close(own.personal[0], right, rtol=1e-12, atol=1e-12)


def test_a_small_federation_over_tls(tmp_path):
    """Real processes end to end: the simulator's numbers, and nothing left running."""
    path, folder = run_file(tmp_path, "apfl", rounds=2)
    said, told = [], []
    out = federation.up(path, folder, tmp_path / "out", embedded=True, say=said.append, tell=lambda *a: told.append(a))
    assert ("apfl", 2, 2) in told and any("serving apfl" in sentence for sentence in said)
    assert_models_are_the_simulators(path, out, federation.beside(out))
    assert processes_of(tmp_path) == []


def processes_of(folder):
    """Processes whose command line names the folder."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                with open(f"/proc/{entry}/cmdline", "rb") as file:
                    words = file.read()
            except OSError:
                continue
            if str(folder).encode() in words:
                found.append(int(entry))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name,embedded", [("fedprox_one_stage", True), ("scaffold", True), ("apfl", False)])
def test_larger_federations_over_tls(name, embedded, tmp_path):
    path, folder = run_file(tmp_path, name, rounds=20 if embedded else 3, clients=8 if embedded else 3)
    out = federation.up(path, folder, tmp_path / "out", embedded=embedded, say=lambda sentence: None)
    assert_models_are_the_simulators(path, out, federation.beside(out))


def start(words, log):
    with log.open("ab") as file:
        return subprocess.Popen([sys.executable, "-m", "mooring", *map(str, words)], stdout=file, stderr=file)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["server", "client", "all"])
def test_kills_change_nothing(victim, tmp_path):
    """SIGKILL in the middle; the same commands again end with the same models."""
    path, folder = run_file(tmp_path, "apfl", rounds=8, clients=2, more="clients = 2")
    place, port = tmp_path / "out.federation", federation.free_port()
    names = sorted(file.stem for file in folder.iterdir())
    keys.init(tmp_path / "keys", names)
    serve = ["serve", path, "--out", tmp_path / "out", "--keys", tmp_path / "keys", "--port", port]

    def join(name):
        words = ["join", path, "--data", folder / f"{name}.csv", "--state", place / "clients" / name, "--embedded"]
        words += ["--server", f"127.0.0.1:{port}", "--ca", tmp_path / "keys" / "ca.crt"]
        return start([*words, "--key", tmp_path / "keys" / "clients" / name], tmp_path / f"{name}.log")

    alive = {"server": start(serve, tmp_path / "server.log")} | {name: join(name) for name in names}
    try:
        wait_until(lambda: any((tmp_path / "out" / "checkpoint").glob("*")), 300)
        for who in {"server": ["server"], "client": names[:1], "all": ["server", *names]}[victim]:
            alive[who].send_signal(signal.SIGKILL)
            alive[who].wait()
            alive[who] = start(serve, tmp_path / "server.log") if who == "server" else join(who)
        assert alive["server"].wait(600) == 0, (tmp_path / "server.log").read_text()
        assert_models_are_the_simulators(path, tmp_path / "out", place)
    finally:
        for one in alive.values():
            one.kill()
            one.wait()


def wait_until(true, seconds):
    begun = time.monotonic()
    while not true():
        assert time.monotonic() - begun < seconds
        time.sleep(0.2)


def test_strangers_are_refused(tmp_path):
    """The SuperLink with TLS, enrolment and the guard: what other hosts and those without a key may reach."""
    folder = tmp_path / "keys"
    keys.init(folder, ["north"])
    keys.init(tmp_path / "other", ["north"])
    port = federation.free_port()
    with federation.superlink(tmp_path, "127.0.0.1", port, folder, False) as (address, ca):
        control = federation.controls(address, ca)
        assert len(control.ListRuns(ListRunsRequest()).run_dict) == 0  # the server's own host may
        federation.enrol(control, "north", keys.enrolled(folder)["north"])
        federation.enrol(control, "north", keys.enrolled(folder)["north"])  # twice is once
        control.close()
        trusting = ssl.create_default_context(cafile=str(ca))
        elsewhere = httpx.Client(
            transport=httpx.HTTPTransport(verify=trusting, local_address="127.0.0.2"), base_url=f"https://{address}"
        )
        with elsewhere:
            assert elsewhere.get("/health").status_code == 200
            for way in ("control/start-run", "control/list-runs", "control/register-node", "runtime/pull-messages"):
                assert elsewhere.post(f"/v1/{way}").status_code == 403, way
            for page in (
                "/docs",
                "/openapi.json",
                "/v1/fleet/../control/list-runs",
                "/v1/fleet/%2e%2e/control/list-runs",
            ):
                assert elsewhere.get(page).status_code == 403, page
            for head in ("X-Forwarded-For", "X-Real-IP", "Forwarded"):
                assert elsewhere.post("/v1/control/list-runs", headers={head: "127.0.0.1"}).status_code == 403
            for way in ("register-node", "activate-node", "pull-messages"):  # no signature
                assert 400 <= elsewhere.post(f"/v1/fleet/{way}", content=b"").status_code < 500, way
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://{address}/health")  # no TLS
        with pytest.raises(httpx.ConnectError):  # a server that another authority vouches for
            httpx.get(
                f"https://{address}/health", verify=ssl.create_default_context(cafile=str(tmp_path / "other/ca.crt"))
            )
        refused = connect(address, ca, tmp_path / "other" / "clients" / "north")  # a key that was not enrolled
        assert refused is not None and "NoConnection" in refused
        assert connect(address, ca, folder / "clients" / "north") is None


def connect(address, ca, key):
    """None if a node with this key is let in, else what it was told."""
    from mooring.engines.flower import node

    node.connection.flwr_exit = node.give_up
    try:
        with node.connection.http_request_response(address, False, ca.read_bytes(), node.keys_of(key), 0, 5.0):
            return None
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_the_guard_knows_who_asks():
    async def inside(scope, receive, send):
        await send({"type": "inside"})

    def ask(path, client, kind="http"):
        sent = []

        async def send(message):
            sent.append(message)

        asyncio.run(Guard(inside)({"type": kind, "path": path, "client": client}, None, send))
        return sent[0]["type"] == "inside"

    here, other = ("127.0.0.1", 5), ("10.0.0.7", 5)
    assert ask("/v1/control/start-run", here) and ask("/v1/fleet/pull-messages", other) and ask("/health", other)
    assert not ask("/v1/control/start-run", other) and not ask("/v1/runtime/x", other)
    assert not ask("/v1/control/start-run", None) and not ask("/v1/fleet/", other, "websocket")


def test_keys_are_made_once_and_secret(tmp_path):
    made = keys.init(tmp_path / "keys", ["north", "south"], ["fed.example.org"])
    assert len(made) == 8 and keys.init(tmp_path / "keys", ["north"]) == []
    assert {path.name for path in keys.init(tmp_path / "keys", ["west"])} == {"west", "west.pub"}
    for name in ("ca.key", "server.key", "clients/north"):
        assert stat.S_IMODE((tmp_path / "keys" / name).stat().st_mode) == 0o600
    assert set(keys.enrolled(tmp_path / "keys")) == {"north", "south", "west"}
    with pytest.raises(RequestError, match="usable as a file's name"):
        keys.init(tmp_path / "keys", ["../x"])


def test_what_is_not_safe_is_refused_before_anything_starts(tmp_path):
    path, folder = run_file(tmp_path)

    def serve(match, **how):
        with pytest.raises(RequestError, match=match):
            federation.serve(path, tmp_path / "out", say=print, **{"clients": 2} | how)

    serve("needs TLS")
    serve("for this machine only", insecure=True, host="0.0.0.0")
    serve("not both", insecure=True, key_folder=tmp_path)
    serve("has no ca.crt", key_folder=tmp_path)
    serve("how many clients", insecure=True, clients=None)

    def join(match, data="site 0.csv", **how):
        with pytest.raises(RequestError, match=match):
            federation.join(path, folder / data, tmp_path / "state", say=print, **how)

    join("needs TLS")
    join("for this machine only", insecure=True, server="10.0.0.1:9092")
    join("site 9.csv: there is no such file", data="site 9.csv", insecure=True)
    assert not (tmp_path / "out.federation").exists()
