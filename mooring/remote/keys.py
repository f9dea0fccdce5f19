"""Certificates and keys of a federation: the server's certificate, and the clients that may join.

    ca.crt, ca.key            the federation's own authority; keep ca.key off the server where secure sums are used
    server.pem, server.key    the server's certificate for its host names, signed by the authority
    clients/NAME.pub          the public keys of enrolled clients, by name; `clients/NAME` where `init` made the pair
    revoked/                  public keys that were taken back: they are never enrolled again
    peers.json                all enrolled public keys, signed by the authority: clients check secure sums against it

A client makes its own key (`request`) and sends the request; the server's operator enrolls it. A client needs
`ca.crt`, its own private key, and for secure sums `peers.json`; the server needs `ca.crt`, `server.pem`, `server.key`
and the public keys.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import ipaddress
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from mooring.core.errors import RequestError

CA, CA_KEY, SERVER, SERVER_KEY, CLIENTS = "ca.crt", "ca.key", "server.pem", "server.key", "clients"
REVOKED, PEERS, REQUEST_ENDING = "revoked", "peers.json", ".request"
LOOPBACK = ("localhost", "127.0.0.1", "::1")  # for trials on one machine
CERTIFICATE_DAYS = 825
SIGNED_WITH = ec.ECDSA(hashes.SHA384())


class Identity(NamedTuple):
    """A client's own key pair and the public keys of the other clients."""

    private: ec.EllipticCurvePrivateKey
    peers: dict[str, ec.EllipticCurvePublicKey]

    @property
    def own(self) -> ec.EllipticCurvePublicKey:
        return self.private.public_key()


def init(folder: str | Path, clients: Iterable[str], hosts: Iterable[str] = ()) -> list[Path]:
    """Create what is missing, so that clients can be added later; return the files that were written."""
    folder, hosts = Path(folder), list(hosts)
    make_private_folder(folder)
    make_private_folder(folder / CLIENTS)
    written = []
    if not (folder / CA).exists():
        written += make_authority(folder)
    if not (folder / SERVER).exists():
        written += make_server(folder, [*dict.fromkeys([*LOOPBACK, *hosts])])
    elif missing := [host for host in hosts if host not in hosts_of(folder)]:
        raise RequestError(
            f"{folder / SERVER} is for {', '.join(hosts_of(folder))}, not for {missing[0]}; use `mooring keys renew "
            f"{folder} --host {','.join(missing)}`."
        )
    for name in clients:
        written += make_client(folder, name)
    if (folder / CA_KEY).exists():
        write_peers(folder)
    return written


def make_private_folder(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.chmod(0o700)


def make_authority(folder: Path) -> list[Path]:
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Mooring federation")])
    usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
    certificate = (
        certificate_builder(name, name, key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    return [
        write_secret(folder / CA_KEY, pem_bytes(key)),
        write(folder / CA, certificate.public_bytes(serialization.Encoding.PEM)),
    ]


def authority_key(folder: Path) -> ec.EllipticCurvePrivateKey:
    if not (folder / CA_KEY).exists():
        raise RequestError(f"{folder} has no {CA_KEY}; run this where the federation's authority is kept.")
    signer = serialization.load_pem_private_key((folder / CA_KEY).read_bytes(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    return signer


def make_server(folder: Path, hosts: list[str]) -> list[Path]:
    authority = x509.load_pem_x509_certificate((folder / CA).read_bytes())
    signer = authority_key(folder)
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0])])
    certificate = (
        certificate_builder(name, authority.subject, key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([general_name(host) for host in hosts]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA384())
    )
    return [
        replace_secret(folder / SERVER_KEY, pem_bytes(key)),
        write(folder / SERVER, certificate.public_bytes(serialization.Encoding.PEM)),
    ]


def hosts_of(folder: Path) -> list[str]:
    """The host names that the server's certificate is for."""
    certificate = x509.load_pem_x509_certificate((folder / SERVER).read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in names]


def renew(folder: str | Path, hosts: Iterable[str] = ()) -> list[Path]:
    """A new certificate and key of the server, for the same host names and more; clients keep what they have."""
    folder = Path(folder)
    known = hosts_of(folder) if (folder / SERVER).exists() else [*LOOPBACK]
    return make_server(folder, [*dict.fromkeys([*known, *hosts])])


def check_name(name: str) -> None:
    if not name or Path(name).name != name or name.startswith(".") or not name.isprintable() or len(name) > 100:
        raise RequestError(f"a client's name must be usable as a file's name, got {name!r}.")


def make_client(folder: Path, name: str) -> list[Path]:
    """A client's key pair, in the form of OpenSSH."""
    check_name(name)
    path = folder / CLIENTS / name
    if path.exists() or path.with_name(f"{name}.pub").exists():
        return []
    key = ec.generate_private_key(ec.SECP384R1())
    return [
        write_secret(path, openssh_bytes(key)),
        write(path.with_name(f"{name}.pub"), ssh_text(key.public_key()).encode() + b"\n"),
    ]


def request(name: str, folder: str | Path) -> tuple[Path, Path]:
    """A key made where it is used: the private key, and the request that the server's operator enrolls."""
    check_name(name)
    folder = Path(folder)
    make_private_folder(folder)
    if (folder / name).exists():
        raise RequestError(f"{folder / name} exists already; a key is not made twice. Choose another --out.")
    key = ec.generate_private_key(ec.SECP384R1())
    about = {"name": name, "public": ssh_text(key.public_key())}
    signature = key.sign(signed_bytes(about), SIGNED_WITH)  # the sender has the private key
    private = write_secret(folder / name, openssh_bytes(key))
    text = json.dumps(about | {"signature": base64.b64encode(signature).decode()}, indent=1)
    return private, write(folder / f"{name}{REQUEST_ENDING}", text.encode() + b"\n")


def read_request(path: str | Path) -> tuple[str, ec.EllipticCurvePublicKey]:
    """The name and the public key of a request whose signature holds."""
    try:
        content = json.loads(Path(path).read_bytes()[:10_000])
        about = {"name": str(content["name"]), "public": str(content["public"])}
        key = parse_public_key(about["public"].encode())
        key.verify(base64.b64decode(content["signature"], validate=True), signed_bytes(about), SIGNED_WITH)
    except (OSError, ValueError, KeyError, TypeError, InvalidSignature) as error:
        raise RequestError(
            f"{path} is not a request made by `mooring keys request`: {error or 'bad signature'}."
        ) from error
    check_name(about["name"])
    return about["name"], key


def enroll(folder: str | Path, path: str | Path, *, replace: bool = False) -> str:
    """Enroll the client of a request and return its name; with `replace`, its former key is revoked."""
    folder = Path(folder)
    name, key = read_request(path)
    known = folder / CLIENTS / f"{name}.pub"
    if fingerprint(key) in revoked_fingerprints(folder):
        raise RequestError(f"the key of {path} was revoked; the client needs a new one: `mooring keys request`.")
    if known.exists() and fingerprint(parse_public_key(known.read_bytes())) != fingerprint(key):
        if not replace:
            raise RequestError(f"client '{name}' has another key already; `mooring keys rotate` replaces it.")
        revoke(folder, name)
    make_private_folder(folder / CLIENTS)
    write(known, ssh_text(key).encode() + b"\n")
    if (folder / CA_KEY).exists():
        write_peers(folder)
    return name


def revoke(folder: str | Path, name: str) -> Path:
    """Revoke a client's key; return where its public key is stored, so that it is never enrolled again."""
    folder = Path(folder)
    known = folder / CLIENTS / f"{name}.pub"
    if not known.exists():
        names = ", ".join(sorted(path.stem for path in (folder / CLIENTS).glob("*.pub"))) or "none"
        raise RequestError(f"client '{name}' has no enrolled key; enrolled: {names}.")
    make_private_folder(folder / REVOKED)
    revoked_path = folder / REVOKED / f"{name}-{fingerprint(parse_public_key(known.read_bytes()))[:16]}.pub"
    os.replace(known, revoked_path)
    (folder / CLIENTS / name).unlink(missing_ok=True)
    if (folder / CA_KEY).exists():
        write_peers(folder)
    return revoked_path


def revoked_fingerprints(folder: Path) -> set[str]:
    return {fingerprint(parse_public_key(path.read_bytes())) for path in (folder / REVOKED).glob("*.pub")}


def public_keys(folder: str | Path) -> dict[str, ec.EllipticCurvePublicKey]:
    """The public keys of all enrolled clients by name."""
    return {
        path.name.removesuffix(".pub"): parse_public_key(path.read_bytes())
        for path in sorted((Path(folder) / CLIENTS).glob("*.pub"))
    }


def write_peers(folder: str | Path) -> Path:
    """All enrolled public keys in one file, signed by the authority, for the clients of secure sums."""
    folder = Path(folder)
    peers = {name: ssh_text(key) for name, key in public_keys(folder).items()}
    signature = authority_key(folder).sign(signed_bytes(peers), SIGNED_WITH)
    text = json.dumps({"peers": peers, "signature": base64.b64encode(signature).decode()}, indent=1, sort_keys=True)
    return write(folder / PEERS, text.encode() + b"\n")


def read_peers(path: str | Path, ca: str | Path | None) -> dict[str, ec.EllipticCurvePublicKey]:
    """The public keys of a file that the federation's authority signed."""
    try:
        content = json.loads(Path(path).read_bytes())
        peers = {str(name): str(key) for name, key in content["peers"].items()}
        signature = base64.b64decode(content["signature"], validate=True)
        known = {name: parse_public_key(key.encode()) for name, key in peers.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(f"{path} is not a list of peers made by `mooring keys`: {error}.") from error
    if ca is None:
        raise RequestError(f"{path} can be checked with the federation's certificate only; give --ca.")
    authority = x509.load_pem_x509_certificate(Path(ca).read_bytes()).public_key()
    assert isinstance(authority, ec.EllipticCurvePublicKey)
    try:
        authority.verify(signature, signed_bytes(peers), SIGNED_WITH)
    except InvalidSignature:
        raise RequestError(f"{path} was not signed by the authority of {ca}.") from None
    return known


def load_identity(key: str | Path | None, peers: str | Path | None, ca: str | Path | None) -> Identity | None:
    """A client's identity in secure sums; None where it has no key or no list of peers."""
    if key is None or peers is None:
        return None
    return Identity(read_private(key), read_peers(peers, ca))


def read_private(path: str | Path) -> ec.EllipticCurvePrivateKey:
    try:
        private = serialization.load_ssh_private_key(Path(path).read_bytes(), None)
    except (OSError, ValueError) as error:
        raise RequestError(f"{path} is not a client's key: {error}.") from error
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise RequestError(f"{path} is not a client's key: `mooring keys request` makes them.")
    return private


def parse_public_key(text: bytes) -> ec.EllipticCurvePublicKey:
    key = serialization.load_ssh_public_key(text)
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise ValueError("a key of the curve P-384 is needed")
    return key


def public_bytes(key: ec.EllipticCurvePublicKey) -> bytes:
    """As requests state it (`http/signatures.py`)."""
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def fingerprint(key: ec.EllipticCurvePublicKey) -> str:
    return hashlib.sha256(public_bytes(key)).hexdigest()


def ssh_text(key: ec.EllipticCurvePublicKey) -> str:
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


def openssh_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )


def signed_bytes(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def certificate_builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=CERTIFICATE_DAYS))
    )


def general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def pem_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
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


def replace_secret(path: Path, data: bytes) -> Path:
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    os.replace(write_secret(fresh, data), path)
    return path
