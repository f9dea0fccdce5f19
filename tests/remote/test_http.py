"""The HTTP service: who is let in, what is read, requests that are repeated, and keys that are revoked."""

import asyncio
import hashlib
import os
import re
import shutil
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from mooring.core.errors import RequestError
from mooring.remote import keys
from mooring.remote.http import client, mailbox, server
from mooring.remote.http.mailbox import Mailbox
from mooring.remote.http.server import HttpTransport, listen
from mooring.remote.http.signatures import EXCHANGE, LAST, MESSAGE, SIGNATURE, SIGNED, EnrolledKeys, Signer
from mooring.remote.serve import find_free_port
from tests.remote.processes import FORKS, Federation, run_file, wait_until

pytestmark = FORKS


@pytest.fixture
def key_folder(tmp_path):
    keys.init(tmp_path / "keys", ["north", "south"])
    return tmp_path / "keys"


class Service:
    """A server on loopback, and requests to it."""

    def __init__(self, key_folder, host="127.0.0.1"):
        self.keys, self.port, self.reports, self.host = key_folder, find_free_port(), [], host
        self.transport = HttpTransport(EnrolledKeys(key_folder), "token", self.reports.append)
        self.check = ssl.create_default_context(cafile=str(key_folder / keys.CA))
        self.url = f"https://{f'[{host}]' if ':' in host else host}:{self.port}"

    def signer(self, name, **how):
        return Signer(keys.read_private(self.keys / "clients" / name), **how)

    def post(self, path, headers, body=b"", **how):
        return httpx.post(self.url + path, headers=headers, content=body, verify=self.check, timeout=30, **how)

    def get(self, path, **how):
        return httpx.get(self.url + path, verify=self.check, **how)

    def status(self, signer, body=b"", message="", path=EXCHANGE):
        return self.post(path, signer.headers("POST", path, body, message), body).status_code

    def connect(self, signer):
        """Make the key's node known; its id."""
        assert self.status(signer, path=LAST) == 204
        return hashlib.sha256(keys.public_bytes(signer.private.public_key())).hexdigest()


@pytest.fixture
def service(key_folder):
    found = Service(key_folder)
    with listen(found.transport, found.host, found.port, key_folder):
        yield found


def test_only_what_an_enrolled_key_signed_is_accepted(service):
    """Method, path, body, time and number are signed; what is not has no effect."""
    north, other = service.signer("north"), Signer(ec.generate_private_key(ec.SECP384R1()))
    assert service.status(north, path=LAST) == 204
    good = lambda: north.headers("POST", LAST, b"")  # noqa: E731
    for headers in (
        {},
        {SIGNED: good()[SIGNED]},
        {SIGNED: "x" * 10_000, SIGNATURE: "y"},
        other.headers("POST", LAST, b""),
        north.headers("GET", LAST, b""),
        north.headers("POST", EXCHANGE, b""),
        good() | {SIGNATURE: good()[SIGNATURE]},
        good() | {SIGNED: good()[SIGNED].replace(" - ", " m1 ")},
        good() | {SIGNED: re.sub(r" (\d+) (\d+)", r" 9\1 \2", good()[SIGNED])},
        service.signer("north", clock=lambda: time.time() - 100).headers("POST", LAST, b""),
        service.signer("north", clock=lambda: time.time() + 100).headers("POST", LAST, b""),
        service.signer("north", clock=lambda: float("nan")).headers("POST", LAST, b""),
    ):
        assert service.post(LAST, headers).status_code == 401, headers
    assert [node.name for node in service.transport.nodes()] == ["north"]
    for direction in ("behind", "ahead of"):
        sentence = rf"client 'north' was refused: its clock is (99|10\d) s {direction} the server's"
        assert any(re.fullmatch(sentence, text) for text in service.reports), service.reports
    assert "a client whose key is not enrolled was refused" in service.reports and len(service.reports) < 8


def test_a_request_is_accepted_once(service):
    """Not again, not after later ones, not from a session that its key has replaced."""
    first, second = service.signer("north"), service.signer("north")
    early, late = first.headers("POST", LAST, b""), first.headers("POST", LAST, b"")
    unsent = first.headers("POST", LAST, b"")
    assert service.post(LAST, late).status_code == 204
    for headers in (late, early):
        refused = service.post(LAST, headers)
        assert refused.status_code == 401 and "sent before" in refused.text
    assert service.status(second, path=LAST) == 204
    refused = service.post(LAST, unsent)
    assert refused.status_code == 401 and "another connection with this key" in refused.text
    assert service.status(service.signer("south"), path=LAST) == 204


def test_what_was_signed_for_a_former_server_is_refused(key_folder):
    signer = Signer(keys.read_private(key_folder / "clients" / "north"), clock=lambda: time.time() - 40)
    headers, service = signer.headers("POST", LAST, b""), Service(key_folder)
    with listen(service.transport, service.host, service.port, key_folder):
        refused = service.post(LAST, headers)
    assert refused.status_code == 401 and "before the server started" in refused.text


def test_bodies_answer_messages_and_are_bounded(service, monkeypatch):
    monkeypatch.setattr(mailbox, "MIN_REPLY_BYTES", 1_000)
    north = service.signer("north")
    node = service.connect(north)
    number = service.transport.mailbox.push(node, b"a question")
    assert service.status(north, b"unasked", path=LAST) == 400
    assert service.status(north, b"reply", "m9", path=LAST) == 409
    assert service.status(north, bytes(1_001), number, path=LAST) == 413
    headers = north.headers("POST", LAST, b"reply", number)
    assert service.post(LAST, headers, iter([b"reply"])).status_code == 413  # no length
    assert service.post(LAST, north.headers("POST", LAST, b"reply", number), b"other").status_code == 400
    south = service.signer("south")
    service.connect(south)
    assert service.status(south, b"reply", number, path=LAST) == 409  # another client's message
    answered = service.post(EXCHANGE, north.headers("POST", EXCHANGE, b""))
    assert answered.content == b"a question" and answered.headers[MESSAGE] == number
    assert service.status(north, b"reply", number, path=LAST) == 204
    assert service.transport.pull([number]) == {number: b"reply"}
    assert service.status(north, b"reply", number, path=LAST) == 409  # once


def test_strangers_find_four_addresses(service):
    """Wherever they come from: through a port forwarder of the server's host all requests come from it."""
    forwarder = Forwarder(service.port)
    with closing(forwarder):
        for port in (service.port, forwarder.port):
            service.url = f"https://127.0.0.1:{port}"
            for path in ("/docs", "/openapi.json", "/v1/control/start-run", "/v1/exchange/../x", "/v1/mooring/pull"):
                assert service.get(path).status_code == 404, path
                assert service.post(path, {}).status_code == 404, path
            for path in (EXCHANGE, LAST):
                assert service.get(path).status_code == 405 and service.post(path, {}).status_code == 401
            assert service.get("/healthz").json() == {"status": "ok"}
            assert service.get("/metrics").status_code == 403
            for token in ("other", "t\u00f6ken".encode().decode("latin-1")):
                assert (
                    service.get("/metrics", headers={"authorization": f"Bearer {token}".encode("latin-1")}).status_code
                    == 403
                )
            assert service.get("/metrics", headers={"authorization": "Bearer token"}).status_code == 200


def test_metrics_are_in_prometheus_format_with_all_digits(service):
    service.transport.counts["received_bytes"], service.transport.gauges["rounds_done"] = 123_456_789, 12.0
    lines = service.get("/metrics", headers={"authorization": "Bearer token"}).text.splitlines()
    at = lines.index("# TYPE mooring_http_received_bytes_total counter")
    assert lines[at + 1] == "mooring_http_received_bytes_total 123456789"
    assert "# TYPE mooring_rounds_done gauge" in lines and "mooring_rounds_done 12" in lines


def test_a_revoked_key_is_refused_and_its_waiting_request_ends(service):
    north, south = service.signer("north"), service.signer("south")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(service.status, north)
        wait_until(lambda: len(service.transport.nodes()) == 1)
        keys.revoke(service.keys, "north")
        begun = time.monotonic()
        assert waiting.result() == 401 and time.monotonic() - begun < 5
    assert service.status(north, path=LAST) == 401 and service.status(south, path=LAST) == 204
    assert [node.name for node in service.transport.nodes()] == ["south"]
    assert service.transport.revoked == {"north"} and "the key of client 'north' was revoked" in service.reports
    with pytest.raises(RequestError, match="client 'north' has no enrolled key; enrolled: south"):
        keys.revoke(service.keys, "north")


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
        RequestError, match=r"is for localhost, 127.0.0.1, ::1, not for fed.example.org; use `mooring keys renew"
    ):
        keys.init(key_folder, [], ["fed.example.org"])
    before, authority = (key_folder / keys.SERVER).read_bytes(), (key_folder / keys.CA).read_bytes()
    keys.renew(key_folder, ["fed.example.org"])
    assert keys.hosts_of(key_folder) == ["localhost", "127.0.0.1", "::1", "fed.example.org"]
    assert (key_folder / keys.SERVER).read_bytes() != before and (key_folder / keys.CA).read_bytes() == authority
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(key_folder / keys.SERVER, key_folder / keys.SERVER_KEY)  # they fit
    assert oct((key_folder / keys.SERVER_KEY).stat().st_mode)[-3:] == "600"


def test_messages_are_given_until_they_are_answered():
    """At least once to the node, once to the server, whatever is lost on the line."""

    async def story():
        box = Mailbox()
        box.loop = asyncio.get_running_loop()
        assert not box.push("n", b"one")  # nobody is there
        channel = box.open("n", b"key", "first")
        one, two = box.push("n", b"one"), box.push("n", b"two")
        for _ in range(2):
            assert await box.next_message(channel, 1) == (one, b"one")
        assert box.pull([one, two], 0.01) == {}
        box.answer(channel, one, b"reply")
        box.answer(channel, one, b"another")
        box.answer(channel, "m9", b"never asked")
        assert await box.next_message(channel, 1) == (two, b"two")
        assert box.pull([one, two], 1) == {one: b"reply"} and box.pull([one, two], 0.01) == {}
        waiting = asyncio.create_task(asyncio.to_thread(box.pull, [two], 5))
        await asyncio.sleep(0.05)
        begun = time.monotonic()
        box.answer(channel, two, b"late")
        assert await waiting == {two: b"late"} and time.monotonic() - begun < 1.0
        polling = asyncio.create_task(box.next_message(channel, 5))
        await asyncio.sleep(0.01)
        other = box.open("n", b"key", "second")
        assert await polling is None and channel.closed and box.channels == {"n": other}
        polling = asyncio.create_task(box.next_message(other, 5))
        await asyncio.sleep(0.01)
        three = box.push("n", b"three")
        assert await polling == (three, b"three")
        assert box.pull([], 0) == {} and await box.next_message(other, 0.01) is None  # it was not wanted any more

    asyncio.run(story())


class Forwarder:
    """What `ssh -L` and a stream proxy do: connections to its port go to another on the same host."""

    def __init__(self, port):
        self.to, self.listening, self.ends = port, socket.create_server(("127.0.0.1", 0)), []
        self.port = self.listening.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def close(self):
        for end in (self.listening, *self.ends):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # closing alone does not end what another thread waits for
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


def memory():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def test_unauthorized_connections_cost_little(service):
    """100 connections that want to send 60 MB each, and 100 that say nothing, without a key."""
    before, lines = memory(), []
    for k in range(200):
        line = socket.create_connection(("127.0.0.1", service.port))
        line.settimeout(5)
        lines.append(line)
        if k % 2 == 0:
            with suppress(OSError):
                lines[-1] = line = service.check.wrap_socket(line, server_hostname="127.0.0.1")
                line.sendall(b"POST /v1/exchange HTTP/1.1\r\nHost: x\r\nContent-Length: 60000000\r\n\r\n")
                for _ in range(20):
                    line.sendall(bytes(1_000_000))
    assert memory() - before < 100
    begun = time.monotonic()
    assert service.get("/healthz").json() == {"status": "ok"}
    assert time.monotonic() - begun < 1.0
    for line in lines:
        line.close()


def test_headers_without_end_and_slow_connections_are_closed(service, monkeypatch):
    monkeypatch.setattr(server, "FIRST_REQUEST_SECONDS", 0.3)
    monkeypatch.setattr(server, "BODY_SECONDS", 0.3)
    north = service.signer("north")
    node = service.connect(north)

    def answer(content):
        line = service.check.wrap_socket(
            socket.create_connection(("127.0.0.1", service.port)), server_hostname="127.0.0.1"
        )
        line.settimeout(10)
        with closing(line):
            line.sendall(content)
            with suppress(OSError):
                return line.recv(100)
        return b""

    assert answer(b"GET /healthz HTTP/1.1\r\n") == b""
    assert answer(b"GET /healthz HTTP/1.1\r\nx: " + bytes(20_000).replace(b"\0", b"y")).startswith(b"HTTP/1.1 4")
    signed = north.headers("POST", LAST, b"reply", service.transport.mailbox.push(node, b"a question"))
    head = "".join(f"{name}: {value}\r\n" for name, value in signed.items())
    slow = f"POST {LAST} HTTP/1.1\r\nHost: x\r\n{head}Content-Length: 5\r\n\r\nre"
    assert answer(slow.encode()).startswith(b"HTTP/1.1 408")


def test_a_flood_of_a_member_is_not_read(service):
    """50 bodies with a million fields each, at once: one may answer its message, the others are refused unread."""
    north = service.signer("north")
    node = service.connect(north)
    number = service.transport.mailbox.push(node, b"a question")
    body = b'{"fields":{' + b",".join(b'"%d":0' % k for k in range(1_000_000)) + b'},"order":[]}\n' + bytes(8)
    requests = [north.headers("POST", LAST, body, number) for _ in range(50)]

    def send(headers):
        try:
            return service.post(LAST, headers, body).status_code
        except httpx.HTTPError:
            return 0  # the server closed the line before it was all sent

    with ThreadPoolExecutor(10) as pool:
        statuses = list(pool.map(send, requests))
    assert statuses.count(204) <= 1 and service.transport.counts["received_bytes"] <= len(body)
    assert service.status(service.signer("south"), path=LAST) == 204


def test_a_taken_port_and_other_addresses(key_folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(RequestError, match=rf"port {port} of 127\.0\.0\.1 is taken; choose --port"),
            listen(HttpTransport(EnrolledKeys(None)), "127.0.0.1", port, None),
        ):
            pass
    with (
        pytest.raises(RequestError, match=r"of 192\.0\.2\.1 cannot be used"),
        listen(HttpTransport(EnrolledKeys(None)), "192.0.2.1", 0, None),
    ):
        pass


def test_a_server_on_ipv6(key_folder):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    service = Service(key_folder, "::1")
    with listen(service.transport, "::1", service.port, key_folder):
        assert service.status(service.signer("north"), path=LAST) == 204
        address, heard = (
            client.ServerAddress(f"[::1]:{service.port}", key_folder / keys.CA, key_folder / "clients/south"),
            [],
        )
        thread = threading.Thread(
            target=client.answer_until,
            args=(lambda content: b"reply to " + content, address, lambda: bool(heard), print),
        )
        thread.start()
        wait_until(lambda: any(node.name == "south" for node in service.transport.nodes()))
        (node,) = [node.id for node in service.transport.nodes() if node.name == "south"]
        (number,) = service.transport.push([(node, b"one")])
        received = {}
        while not received:
            received = service.transport.pull([number])
        assert received == {number: b"reply to one"}
        heard.append(1)
        service.transport.push([(node, b"the last")])
        thread.join(30)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    "address,host", [("h:1", ("h", 1)), ("[::1]:9092", ("::1", 9092)), ("10.0.0.7:5", ("10.0.0.7", 5))]
)
def test_addresses(address, host):
    assert client.split_address(address) == host
    for wrong in ("h", "h:", ":5", "h:x", "[]:5"):
        with pytest.raises(RequestError, match="is given as HOST:PORT"):
            client.split_address(wrong)


def test_a_refused_client_says_why_and_tries_again(service):
    north, reports = service.keys / "clients" / "north", []
    keys.revoke(service.keys, "south")
    private = service.keys.parent / "south"
    private.write_bytes(keys.openssh_bytes(ec.generate_private_key(ec.SECP384R1())))
    turns = iter([False] * 4 + [True] * 9)
    address = client.ServerAddress(f"127.0.0.1:{service.port}", service.keys / keys.CA, private)
    client.answer_until(bytes, address, lambda: next(turns), reports.append)
    assert "it does not accept our signature: is the key enrolled and not revoked?" in " ".join(reports)
    turns, reports = iter([False, False, True, True, True]), []
    begun = time.monotonic()
    gone = client.ServerAddress(f"127.0.0.1:{find_free_port()}", service.keys / keys.CA, north)
    client.answer_until(bytes, gone, lambda: next(turns), reports.append)  # a finished client does not wait
    assert time.monotonic() - begun < 5 and reports == [f"connecting to {gone.address}"]


def test_an_absent_library_is_named(monkeypatch):
    import importlib

    import mooring.remote

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "httpx" else object())
    with pytest.raises(RequestError, match=r"needs httpx: pip install 'mooring-fl\[federation\]'"):
        importlib.reload(mooring.remote)


@pytest.mark.processes
def test_a_key_revoked_during_a_run_gets_401_and_the_others_finish(tmp_path):
    """The server refuses it at once; its client is left out of what follows, by name."""
    path, folder = run_file(tmp_path, "fedavg", rounds=40, clients=3)
    with Federation(tmp_path, path, folder) as here:
        shutil.copytree(tmp_path / "keys", tmp_path / "copy")
        wait_until(lambda: here.saved() >= 1)
        check = ssl.create_default_context(cafile=str(tmp_path / "keys" / "ca.crt"))
        signer = Signer(keys.read_private(tmp_path / "copy" / "clients" / "site 2"))
        with here.paused("site 0"):
            keys.revoke(tmp_path / "keys", "site 2")
            begun = time.monotonic()
            with httpx.Client(base_url=f"https://127.0.0.1:{here.port}", verify=check) as line:
                while line.post(LAST, headers=signer.headers("POST", LAST, b"")).status_code != 401:
                    assert time.monotonic() - begun < 5
                    time.sleep(0.1)
        here.check_end()
        log = here.log_text("server")
        assert "the key of client 'site 2' was revoked" in log
        assert "site 2' is left out of this" in log and "its key was revoked" in log
