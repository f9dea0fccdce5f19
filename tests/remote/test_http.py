"""The gateway before Flower's SuperLink: who is let in, what is read, and keys that are taken back during a run."""

import asyncio
import base64
import datetime
import os
import shutil
import socket
import ssl
import threading
import time
from contextlib import closing, suppress

import httpx
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from mooring.remote.mailbox import Mailbox
from mooring.remote.superlink import (
    FIT_APPS,
    RunningSuperLink,
    control_client,
    make_app_files,
    start_superlink,
    synchronize_keys,
)

from mooring.core.errors import RequestError
from mooring.remote import flower_patches, gateway, join, keys
from mooring.remote.messages import join_frames, split_frames
from tests.remote.processes import FORKS, Federation, find_free_port, run_file, wait_until

pytestmark = FORKS


def headers_of(key, seconds=0.0):
    when = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)).isoformat()
    signature = key.sign(when.encode(), ec.ECDSA(hashes.SHA256()))
    named = {
        gateway.KEY: base64.b64encode(keys.flower_key_bytes(key.public_key())),
        gateway.WHEN: when.encode(),
        gateway.SIGNATURE: base64.b64encode(signature),
    }
    return [(name.encode(), value) for name, value in named.items()]


class Asked:
    """A gateway around an application that counts what it is asked."""

    def __init__(self, folder=None):
        self.inside, self.read = [], 0
        self.gateway = gateway.Gateway(
            self.app, secret="the secret", keys=gateway.EnrolledKeys(folder), node_of=lambda key: 7, metrics_token="t"
        )

    async def app(self, scope, receive, send):
        while (message := await receive())["type"] == "http.request":
            if not message.get("more_body"):
                break
        self.inside.append(message["type"])
        await send({"type": "http.response.start", "status": 200})

    def ask(self, path, headers=(), client=("127.0.0.1", 5), pieces=(b"",), kind="http"):
        sent, rest = [], iter(enumerate(pieces, 1))

        async def receive():
            number, piece = next(rest)
            self.read += len(piece)
            return {"type": "http.request", "body": piece, "more_body": number < len(pieces)}

        async def send(message):
            sent.append(message)

        scope = {"type": kind, "path": path, "client": client, "headers": list(headers)}
        asyncio.run(self.gateway(scope, receive, send))
        return sent[0].get("status", sent[0]["type"]), sent[-1].get("body", b"")


@pytest.fixture
def key_folder(tmp_path):
    keys.init(tmp_path / "keys", ["north", "south"])
    return tmp_path / "keys"


def private(folder, name):
    return keys.read_private(folder / "clients" / name)


def test_the_address_decides_nothing(key_folder):
    """Requests that a port forwarder on the server's host passes on come from 127.0.0.1."""
    asked = Asked(key_folder)
    for path in (
        "/v1/control/start-run",
        "/v1/control/list-runs",
        "/v1/runtime/acquire-task",
        "/docs",
        "/v1/mooring/pull",
    ):
        for client in (("127.0.0.1", 5), ("::1", 5), ("10.0.0.7", 5), None):
            assert asked.ask(path, client=client)[0] == 403, path
    secret = [(gateway.SECRET.encode(), b"the secret")]
    assert asked.ask("/v1/control/start-run", secret, client=("10.0.0.7", 5))[0] == 200
    assert asked.ask("/v1/control/start-run", [(gateway.SECRET.encode(), "thé".encode("latin-1"))])[0] == 403
    assert asked.ask("/v1/fleet/../control/start-run")[0] == 403
    assert asked.ask("/v1/fleet/x", kind="websocket")[0] == "websocket.close"
    assert asked.ask("/health")[0] == 200 and asked.ask("/healthz")[0] == 200
    assert asked.ask("/metrics")[0] == 403 and asked.ask("/metrics", [(b"authorization", b"Bearer t")])[0] == 200


def test_metrics_are_in_prometheus_format_with_all_digits(key_folder):
    asked = Asked(key_folder)
    asked.gateway.counts["bytes received"], asked.gateway.gauges["rounds_done"] = 123_456_789, 12.0
    lines = asked.ask("/metrics", [(b"authorization", b"Bearer t")])[1].decode().splitlines()
    at = lines.index("# TYPE mooring_gateway_bytes_received_total counter")
    assert lines[at + 1] == "mooring_gateway_bytes_received_total 123456789"
    assert "# TYPE mooring_rounds_done gauge" in lines and "mooring_rounds_done 12" in lines


def test_signatures_are_checked_before_anything_is_read(key_folder):
    """A request without an enrolled key costs its headers, whatever it would send."""
    asked, big = Asked(key_folder), [bytes(1_000_000)] * 5
    other = ec.generate_private_key(ec.SECP384R1())
    mine = private(key_folder, "north")
    changed = [
        (name, value if name != b"flwr-timestamp" else value[:-9] + b"3+00:00") for name, value in headers_of(mine)
    ]
    for headers in (
        [],
        headers_of(other),
        headers_of(mine, -600),
        headers_of(mine, 60),
        changed,
        headers_of(mine)[:2],
    ):
        assert asked.ask("/v1/fleet/pull-messages", headers, pieces=big)[0] == 401
    assert asked.read == 0 and not asked.inside
    assert asked.ask("/v1/fleet/pull-messages", headers_of(mine), pieces=big)[0] == 200
    large = [*headers_of(mine), (b"content-length", str(gateway.MAX_BODY_BYTES + 1).encode())]
    assert asked.ask("/v1/fleet/push-object", large, pieces=big)[0] == 413
    asked.gateway.max_body = 3_000_000
    asked.ask("/v1/fleet/push-object", headers_of(mine), pieces=big)
    assert asked.inside[-1] == "http.disconnect"  # bodies without a length are cut off


def test_a_client_cannot_fill_the_memory_with_many_bodies(key_folder, monkeypatch):
    """Of one key, 2.5 MB at once: of two requests of 2 MB the second is cut off; afterwards there is room again."""
    monkeypatch.setattr(gateway, "MAX_BYTES_PER_KEY", 2_500_000)
    asked = Asked(key_folder)
    asked.gateway.max_body = 2_000_000
    north, south = (headers_of(private(key_folder, name)) for name in ("north", "south"))

    async def send_body(headers, meanwhile):
        pieces = iter([True, False])

        async def receive():
            is_first = next(pieces)
            if not is_first:
                await meanwhile()
            return {"type": "http.request", "body": bytes(1_000_000), "more_body": is_first}

        async def send(message):
            pass

        await asked.gateway({"type": "http", "path": "/v1/fleet/x", "headers": headers}, receive, send)

    async def story():
        async def nothing():
            pass

        async def another():
            await send_body(south, nothing)
            await send_body(north, nothing)

        await send_body(north, another)
        await send_body(north, nothing)

    asyncio.run(story())
    assert asked.inside == ["http.request", "http.disconnect", "http.request", "http.request"]
    assert not +asked.gateway.reading


def test_a_revoked_key_is_refused_and_its_session_ends(key_folder):
    asked = Asked(key_folder)
    north, south = private(key_folder, "north"), private(key_folder, "south")
    status, body = asked.ask(gateway.OPEN_CHANNEL, headers_of(north))
    assert status == 200 and b"session" in body
    channel = asked.gateway.mailbox.channels[7]
    keys.revoke(key_folder, "north")
    assert asked.gateway.keys.scan()
    asked.gateway.mailbox.keep_keys(asked.gateway.keys.names)
    assert channel.closed and asked.ask("/v1/fleet/x", headers_of(north))[0] == 401
    assert asked.ask(gateway.EXCHANGE, [(gateway.SESSION.encode(), channel.session.encode())])[0] == 401
    assert asked.ask("/v1/fleet/x", headers_of(south))[0] == 200
    with pytest.raises(RequestError, match="client 'north' has no enrolled key; enrolled: south"):
        keys.revoke(key_folder, "north")


def test_keys_are_requested_enrolled_rotated_and_renewed(tmp_path, key_folder):
    """The server never sees a private key; a revoked one is never enrolled again."""
    made, asked = keys.request("west", tmp_path / "west")
    assert oct(made.stat().st_mode)[-3:] == "600" and b"PRIVATE" not in asked.read_bytes()
    assert keys.enroll(key_folder, asked) == "west" and set(keys.public_keys(key_folder)) == {"north", "south", "west"}
    assert not (key_folder / "clients" / "west").exists()
    with pytest.raises(RequestError, match="exists already"):
        keys.request("west", tmp_path / "west")
    _, second = keys.request("west", tmp_path / "second")
    with pytest.raises(RequestError, match="`mooring keys rotate` replaces it"):
        keys.enroll(key_folder, second)
    old = keys.fingerprint(keys.public_keys(key_folder)["west"])
    keys.enroll(key_folder, second, replace=True)
    assert keys.fingerprint(keys.public_keys(key_folder)["west"]) != old
    with pytest.raises(RequestError, match="was revoked"):
        keys.enroll(key_folder, asked, replace=True)
    forged = tmp_path / "forged.request"
    forged.write_text(second.read_text().replace('"west"', '"north"'))
    with pytest.raises(RequestError, match="is not a request made by"):
        keys.enroll(key_folder, forged, replace=True)
    peers = keys.read_peers(key_folder / keys.PEERS, key_folder / keys.CA)
    assert {name: keys.fingerprint(key) for name, key in peers.items()} == {
        name: keys.fingerprint(key) for name, key in keys.public_keys(key_folder).items()
    }
    keys.init(tmp_path / "other", ["north"])
    with pytest.raises(RequestError, match="was not signed by the authority"):
        keys.read_peers(tmp_path / "other" / keys.PEERS, key_folder / keys.CA)


def test_host_names_are_added_by_renewing(key_folder):
    with pytest.raises(
        RequestError, match=r"is for localhost, 127.0.0.1, not for fed.example.org; use `mooring keys renew"
    ):
        keys.init(key_folder, [], ["fed.example.org"])
    before, authority = (key_folder / keys.SERVER).read_bytes(), (key_folder / keys.CA).read_bytes()
    keys.renew(key_folder, ["fed.example.org"])
    assert keys.hosts_of(key_folder) == ["localhost", "127.0.0.1", "fed.example.org"]
    assert (key_folder / keys.SERVER).read_bytes() != before and (key_folder / keys.CA).read_bytes() == authority
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(key_folder / keys.SERVER, key_folder / keys.SERVER_KEY)  # they fit
    assert oct((key_folder / keys.SERVER_KEY).stat().st_mode)[-3:] == "600"


def test_messages_are_given_until_they_are_answered():
    """At least once to the node, once to the server, whatever is lost on the line."""

    async def story():
        box = Mailbox()
        assert not box.push(7, "m1", b"one")  # nobody is there
        session = box.open(7, b"key")
        channel = box.sessions[session]
        assert box.push(7, "m1", b"one") and box.push(7, "m2", b"two")
        for _ in range(2):
            assert await box.next_message(channel, 1) == ("m1", b"one")
        assert await box.pull(["m1"], 0.01) == {}
        box.answer(channel, "m1", b"reply")
        box.answer(channel, "m1", b"another")
        box.answer(channel, "m9", b"never asked")
        assert await box.next_message(channel, 1) == ("m2", b"two")
        assert await box.pull(["m1", "m2"], 1) == {"m1": b"reply"} and await box.pull(["m1"], 0.01) == {}
        waiting = asyncio.create_task(box.pull(["m2"], 5))
        await asyncio.sleep(0.01)
        begun = time.monotonic()
        box.answer(channel, "m2", b"late")
        assert await waiting == {"m2": b"late"} and time.monotonic() - begun < 0.2
        polling = asyncio.create_task(box.next_message(channel, 5))
        await asyncio.sleep(0.01)
        other = box.open(7, b"key")
        assert await polling is None and channel.closed and session not in box.sessions
        assert box.push(7, "m3", b"three")
        assert await box.next_message(box.sessions[other], 1) == ("m3", b"three")
        box.forget(["m3"])
        assert await box.next_message(box.sessions[other], 0.01) is None

    asyncio.run(story())


@pytest.mark.parametrize("body", [b"", b"x", b"{}\n", b"[]\n", b'{"lengths":[5]}\nabc', b'{"lengths":[-1,4]}\nabc'])
def test_malformed_frames_are_refused(body):
    with pytest.raises(ValueError):
        split_frames(body)
    assert split_frames(join_frames({"a": 1}, [b"x", b"", b"yz"])) == (
        {"a": 1, "lengths": [1, 0, 2]},
        [b"x", b"", b"yz"],
    )


class Forwarder:
    """What `ssh -L` and a stream proxy do: connections to its port go to another on the same host."""

    def __init__(self, port):
        self.to, self.listening, self.ends = port, socket.create_server(("127.0.0.1", 0)), []
        self.port = self.listening.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def close(self):
        for end in (self.listening, *self.ends):
            end.close()

    def accept(self):
        with suppress(OSError):
            while True:
                client, _ = self.listening.accept()
                server = socket.create_connection(("127.0.0.1", self.to))
                self.ends += [client, server]
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=self.copy, args=ends, daemon=True).start()

    def copy(self, source, target):
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


@pytest.fixture
def link(tmp_path, key_folder):
    (tmp_path / "link").mkdir()
    with start_superlink(tmp_path / "link", "127.0.0.1", find_free_port(), key_folder, False) as found:
        yield found


def memory_of(pid):
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def pid_of(port):
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError), open(f"/proc/{entry}/cmdline", "rb") as file:
                words = file.read()
                if b"child_process\0superlink" in words and str(port).encode() in words:
                    return int(entry)
    raise AssertionError("no SuperLink")


@pytest.mark.processes
def test_a_forwarder_on_the_servers_host_opens_nothing(link, key_folder):
    """Runs are not listed, nobody is enrolled, no code is run; the server itself can do all of it."""
    forwarder = Forwarder(int(link.address.rsplit(":", 1)[1]))
    other, own = (
        control_client(RunningSuperLink(f"127.0.0.1:{forwarder.port}", link.ca, "guessed", link.is_alive)),
        control_client(link),
    )
    with closing(other), closing(own), closing(forwarder):
        try_through(other, own, key_folder)


def try_through(other, own, key_folder):
    public = keys.flower_key_bytes(ec.generate_private_key(ec.SECP384R1()).public_key())
    app = make_app_files(FIT_APPS["fit"])
    attempts = (
        other.list_runs,
        lambda: other.register_node("north", public),
        lambda: other.start_run(app, {}),
    )
    for attempt in attempts:
        with pytest.raises(httpx.HTTPStatusError) as error:
            attempt()
        assert error.value.response.status_code == 403
    assert dict(own.list_runs()) == {}
    reports = []
    assert synchronize_keys(own, keys.enrolled_keys(key_folder), reports.append) == set() and not reports
    keys.revoke(key_folder, "north")
    assert synchronize_keys(own, keys.enrolled_keys(key_folder), reports.append) == {"north"} and len(reports) == 1


@pytest.mark.processes
def test_unauthorized_connections_cost_little_memory(link):
    """60 connections that want to send 60 MB each, and 60 that say nothing, without a key."""
    port = int(link.address.rsplit(":", 1)[1])
    pid, context = pid_of(port), ssl.create_default_context(cafile=str(link.ca))
    before, lines = memory_of(pid), []
    for k in range(120):
        line = context.wrap_socket(socket.create_connection(("127.0.0.1", port)), server_hostname="127.0.0.1")
        line.settimeout(5)
        lines.append(line)
        if k % 2:
            continue
        line.sendall(b"POST /v1/fleet/push-object HTTP/1.1\r\nHost: x\r\nContent-Length: 60000000\r\n\r\n")
        with suppress(OSError):
            for _ in range(20):
                line.sendall(bytes(1_000_000))
    grown = memory_of(pid) - before
    begun = time.monotonic()
    assert httpx.get(f"https://{link.address}/healthz", verify=context).json() == {"status": "ok"}
    assert time.monotonic() - begun < 1.0
    assert grown < 100, grown
    for line in lines:
        line.close()


@pytest.mark.processes
def test_a_key_revoked_during_a_run_gets_401_and_the_others_finish(tmp_path):
    """The gateway refuses it at once; its client is left out of what follows, by name."""
    path, folder = run_file(tmp_path, "fedavg", rounds=40, clients=3)
    with Federation(tmp_path, path, folder) as here:
        shutil.copytree(tmp_path / "keys", tmp_path / "copy")
        wait_until(lambda: here.saved() >= 1)
        address, ca = f"127.0.0.1:{here.port}", tmp_path / "keys" / "ca.crt"
        pair = join.load_key_pair(tmp_path / "copy" / "clients" / "site 2")
        with here.paused("site 0"):
            keys.revoke(tmp_path / "keys", "site 2")
            begun = time.monotonic()
            check = ssl.create_default_context(cafile=str(ca))
            with httpx.Client(base_url=f"https://{address}", verify=check) as client:
                while (
                    client.post("/v1/fleet/pull-messages", headers=flower_patches.sign_request(pair)).status_code != 401
                ):
                    assert time.monotonic() - begun < 5
                    time.sleep(0.1)
        here.check_end()
        log = here.log_text("server")
        assert "the key of client 'site 2' was revoked" in log
        assert "site 2' is left out of this" in log and "its key was revoked" in log


def test_every_private_name_of_flower_is_there():
    assert flower_patches.missing_names() == []
    flower_patches.check_flower()


def test_a_flower_without_a_name_is_refused(monkeypatch):
    monkeypatch.setattr(flower_patches, "PRIVATE_NAMES", ("flwr.app:Message", "flwr.app:Nothing"))
    with pytest.raises(RequestError, match=r"lacks flwr.app:Nothing"):
        flower_patches.check_flower()
