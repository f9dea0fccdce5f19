"""Certificates and keys of a federation: who may speak as the server, and which clients may join.

    ca.crt, ca.key            the federation's own authority; the key stays with whoever made it
    server.pem, server.key    the server's certificate for its host names, signed by the authority
    clients/NAME, NAME.pub    a client's key pair; the server enrols the public half under the name

A client needs `ca.crt` and its own private key, the server `ca.crt`, `server.pem`, `server.key` and the public halves.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Iterable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from mooring.core.errors import RequestError

CA, CA_KEY, SERVER, SERVER_KEY, CLIENTS = "ca.crt", "ca.key", "server.pem", "server.key", "clients"
LOOPBACK = ("localhost", "127.0.0.1")  # the server's own processes reach it there
DAYS = 825


def init(folder: str | Path, clients: Iterable[str], hosts: Iterable[str] = ()) -> list[Path]:
    """Make what is not there yet, so that clients can be added later; the files that were written."""
    folder = Path(folder)
    (folder / CLIENTS).mkdir(parents=True, exist_ok=True)
    written = []
    if not (folder / CA).exists():
        written += make_authority(folder)
    if not (folder / SERVER).exists():
        written += make_server(folder, [*dict.fromkeys([*LOOPBACK, *hosts])])
    for name in clients:
        written += make_client(folder, name)
    return written


def make_authority(folder: Path) -> list[Path]:
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Mooring federation")])
    usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
    certificate = (
        begun(name, name, key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    return [
        write_secret(folder / CA_KEY, pem(key)),
        write(folder / CA, certificate.public_bytes(serialization.Encoding.PEM)),
    ]


def make_server(folder: Path, hosts: list[str]) -> list[Path]:
    authority = x509.load_pem_x509_certificate((folder / CA).read_bytes())
    signer = serialization.load_pem_private_key((folder / CA_KEY).read_bytes(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0])])
    certificate = (
        begun(name, authority.subject, key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([named(host) for host in hosts]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA384())
    )
    return [
        write_secret(folder / SERVER_KEY, pem(key)),
        write(folder / SERVER, certificate.public_bytes(serialization.Encoding.PEM)),
    ]


def make_client(folder: Path, name: str) -> list[Path]:
    """A client's key pair, in the form that Flower reads."""
    if not name or Path(name).name != name or name.startswith("."):
        raise RequestError(f"a client's name must be usable as a file's name, got {name!r}.")
    path = folder / CLIENTS / name
    if path.exists():
        return []
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return [write_secret(path, private), write(path.with_name(f"{name}.pub"), public + b"\n")]


def enrolled(folder: Path) -> dict[str, bytes]:
    """The public keys of all clients by name, as Flower's SuperLink registers them."""
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    found = {}
    for path in sorted((folder / CLIENTS).glob("*.pub")):
        key = load_ssh_public_key(path.read_bytes())
        assert isinstance(key, ec.EllipticCurvePublicKey)
        found[path.name.removesuffix(".pub")] = public_key_to_bytes(key)
    return found


def begun(subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=DAYS))
    )


def named(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def write_secret(path: Path, data: bytes) -> Path:
    """A file that only its owner can read, from its first moment on."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    return path
