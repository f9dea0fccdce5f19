"""Who stays out and what does not leave, with real processes: unauthorized clients, canaries, a network of loopback."""

import ctypes
import datetime
import multiprocessing
import os
import socket
import ssl
import struct
import subprocess
import threading
import time
import traceback
from contextlib import suppress

import httpx
import pandas as pd
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from mooring.engines.request import request
from mooring.remote import keys
from mooring.remote.client_node import run_digest
from mooring.remote.http.signatures import EXCHANGE, LAST, MESSAGE, Signer
from mooring.remote.requests import REQUESTS
from mooring.remote.serve import find_free_port
from mooring.runs.tensor_files import read_tensors
from tests.remote.federation_runs import answer_with
from tests.remote.processes import FORKS, Federation, assert_models_are_the_simulators, run_file, wait_until

pytestmark = FORKS


def post(address, ca, key, **how):
    """The response to a request that is signed with this key."""
    headers = Signer(keys.read_private(key), **how).headers("POST", LAST, b"")
    return httpx.post(f"https://{address}{LAST}", headers=headers, verify=ssl.create_default_context(cafile=str(ca)))


def expired_server(folder):
    """A TLS server of the right authority whose certificate has run out; its address."""
    authority = x509.load_pem_x509_certificate((folder / keys.CA).read_bytes())
    signer = serialization.load_pem_private_key((folder / keys.CA_KEY).read_bytes(), None)
    key = serialization.load_pem_private_key((folder / keys.SERVER_KEY).read_bytes(), None)
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")]))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=2))
        .not_valid_after(now - datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([keys.general_name("127.0.0.1")]), critical=False)
        .sign(signer, hashes.SHA384())
    )
    (folder / "expired.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "expired.pem", folder / keys.SERVER_KEY)
    listening = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                connection, _ = listening.accept()
                context.wrap_socket(connection, server_side=True).close()
            except ssl.SSLError:
                continue
            except OSError:
                return

    threading.Thread(target=serve, daemon=True).start()
    return listening, f"127.0.0.1:{listening.getsockname()[1]}"


def test_unauthorized_clients_are_refused_while_the_run_completes(tmp_path):
    """No TLS, other authorities, expired and misnamed certificates, no key, unknown keys, stale signatures,
    requests without end, and addresses that do not exist."""
    path, folder = run_file(tmp_path, "fedavg", rounds=40, clients=2)
    keys.init(tmp_path / "other", ["site 0"])
    with Federation(tmp_path, path, folder) as here:
        wait_until(lambda: here.saved() >= 1)
        with here.paused("site 1"):
            address, ca, mine = (
                f"127.0.0.1:{here.port}",
                tmp_path / "keys" / "ca.crt",
                tmp_path / "keys" / "clients" / "site 0",
            )
            other_key = tmp_path / "other" / "clients" / "site 0"
            trusting = ssl.create_default_context(cafile=str(ca))
            with pytest.raises(httpx.HTTPError):
                httpx.get(f"http://{address}/healthz")
            with pytest.raises(httpx.ConnectError):
                httpx.get(
                    f"https://{address}/healthz",
                    verify=ssl.create_default_context(cafile=str(tmp_path / "other/ca.crt")),
                )
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                post(address, tmp_path / "other" / "ca.crt", other_key)
            with (
                socket.create_connection(("127.0.0.1", here.port)) as plain,
                pytest.raises(ssl.SSLCertVerificationError),
            ):
                trusting.wrap_socket(plain, server_hostname="elsewhere.example.org")
            listening, old = expired_server(tmp_path / "keys")
            with pytest.raises(httpx.ConnectError, match="certificate has expired"):
                post(old, ca, mine)
            listening.close()
            assert "not enrolled" in post(address, ca, other_key).text
            for seconds in (-600, 600):
                refused = post(address, ca, mine, clock=lambda seconds=seconds: time.time() + seconds)
                assert refused.status_code == 401 and "its clock is 600 s" in refused.text
            elsewhere = httpx.Client(
                transport=httpx.HTTPTransport(verify=trusting, local_address="127.0.0.2"), base_url=f"https://{address}"
            )
            with elsewhere:
                assert elsewhere.get("/healthz").status_code == 200
                for path_ in ("/v1/control/list-runs", "/docs", "/openapi.json", "/v1/exchange/../x", "/v1/%2e%2e/x"):
                    assert elsewhere.get(path_).status_code == 404, path_
                for name in ("X-Forwarded-For", "X-Real-IP", "Forwarded"):
                    assert elsewhere.get("/metrics", headers={name: "127.0.0.1"}).status_code == 403
                for path_ in (EXCHANGE, LAST):  # no signature
                    assert elsewhere.post(path_, content=b"").status_code == 401, path_
            with trusting.wrap_socket(
                socket.create_connection(("127.0.0.1", here.port)), server_hostname="127.0.0.1"
            ) as line:
                line.sendall(b"POST /v1/exchange HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000000\r\n\r\n")
                assert line.recv(100).startswith(b"HTTP/1.1 401")
        here.check_end()
        assert "client 'site 0' was refused: its clock is" in here.log_text("server")
        assert_models_are_the_simulators(path, here.out, here.place)


class Tap:
    """A listener on the line: passes everything on, and keeps what came from clients and what came from the server.

    It loses one answer of the server, the `lose`-th that brings a message, as a bad line does.
    """

    def __init__(self, port, lose):
        self.messages, self.lose = 0, lose
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port, self.to = self.listening.getsockname()[1], port
        self.up, self.down = bytearray(), bytearray()
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                client, _ = self.listening.accept()
                server = socket.create_connection(("127.0.0.1", self.to))
            except ConnectionRefusedError:
                client.close()
                continue
            except OSError:
                return
            for source, target, kept in ((client, server, self.up), (server, client, self.down)):
                threading.Thread(target=self.pass_on, args=(source, target, kept), daemon=True).start()

    def pass_on(self, source, target, kept):
        try:
            while data := source.recv(1 << 16):
                self.messages += kept is self.down and MESSAGE.encode() in data
                if kept is self.down and self.messages == self.lose:
                    self.lose = None
                    break
                kept.extend(data)
                target.sendall(data)
        except OSError:
            pass
        finally:
            for end in (source, target):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)  # closing alone tells nothing while another thread listens there
                end.close()


def in_a_namespace(work):
    """Call `work` in a child whose network has loopback only; skip where that is not permitted."""

    def child(queue):
        libc = ctypes.CDLL(None, use_errno=True)
        new_user, new_network = 0x10000000, 0x40000000
        flags = new_network if os.geteuid() == 0 else new_network | new_user
        if libc.unshare(flags) or subprocess.run(["ip", "link", "set", "lo", "up"], check=False).returncode:
            queue.put("skip")
            return
        try:
            work()
            queue.put("")
        except BaseException:
            queue.put(traceback.format_exc())

    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    problem = queue.get(timeout=900)
    process.join(60)
    if problem == "skip":
        pytest.skip("network namespaces are not permitted here")
    assert not problem, problem


def no_routes():
    """How often a process of this namespace tried to reach an address that nobody here has."""
    with open("/proc/net/snmp") as file:
        names, numbers = (line.split() for line in file if line.startswith("Ip:"))
    return int(dict(zip(names, numbers))["OutNoRoutes"])


def test_nothing_leaves_but_what_is_declared(tmp_path, monkeypatch):
    """Without TLS, for once, and with loopback alone: rows and private state are not on the wire, messages are.

    A message that is lost on the way is asked for again.
    """
    path, folder = run_file(tmp_path, "apfl", rounds=2, clients=2)
    visit = REQUESTS["local_update"].answer

    def noted(home, payload):
        reply = visit(home, payload)
        if payload.fields["label"] == "apfl":
            with (tmp_path / "sent.bin").open("ab") as file:
                file.write(b"".join(tensor.numpy().tobytes() for tensor in reply.tensors.values()))
        return reply

    answer_with(monkeypatch, "local_update", noted)

    def work():
        port = find_free_port()
        tap = Tap(port, lose=9)
        with Federation(tmp_path, path, folder, tls=False, port=port, through=tap.port) as here:
            here.check_end()
            assert tap.lose is None, "no message was lost"
            assert_models_are_the_simulators(path, here.out, here.place)
        assert no_routes() == 0
        with pytest.raises(OSError):
            socket.create_connection(("192.0.2.1", 80), timeout=1)
        assert no_routes() == 1  # it would have been seen
        up, down = bytes(tap.up), bytes(tap.down)
        sent = (tmp_path / "sent.bin").read_bytes()
        shown = doubles(sent)
        assert len(shown) >= 8 and all(one in up for one in shown)
        for name in here.names:
            secrets = doubles(pd.read_csv(folder / f"{name}.csv")[["a", "b", "y"]].to_numpy().tobytes())
            texts = [repr(value).encode() for value in pd.read_csv(folder / f"{name}.csv")["y"]]
            state, _ = read_tensors(
                here.place / "clients" / name / run_digest(request(path, purpose="fit")) / "apfl.safetensors"
            )
            private = [tensor for key, tensor in state.items() if key != "w0"]
            assert private and len(secrets) > 50
            secrets += [one for tensor in private for one in doubles(tensor.numpy().tobytes())]
            found = [one for one in [*secrets, *texts] if one in up or one in down]
            assert not found, (name, len(found))

    in_a_namespace(work)


def doubles(data):
    """The bytes of each number, zeros, ones and nan left out: they are everywhere."""
    numbers = [data[k : k + 8] for k in range(0, len(data), 8)]
    return [
        one for one in numbers if (value := struct.unpack("<d", one)[0]) == value and abs(value) not in (0.0, 0.5, 1.0)
    ]
