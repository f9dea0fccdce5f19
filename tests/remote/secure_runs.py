"""Federations with secure sums for tests: identities, clients, and a transport that records what arrives."""

from cryptography.hazmat.primitives.asymmetric import ec

from mooring.remote.client_node import ClientNode
from mooring.remote.keys import Identity
from mooring.remote.memory import MemoryTransport
from mooring.remote.messages import unpack

ROUNDS = 4
SECURE = {"secure": True, "share_models": False, "secure_range": 4.0}
RECOVERING = SECURE | {"quorum": 0.7}  # clients may be missing: sums are unmasked by those that stay


def identities(names):
    keys = {name: ec.generate_private_key(ec.SECP384R1()) for name in names}
    public = {name: key.public_key() for name, key in keys.items()}
    return {name: Identity(key, public) for name, key in keys.items()}


def make_secure_clients(run, folder, state, known=None, kind=ClientNode, **more):
    files = sorted(folder.iterdir())
    known = known or identities([file.stem for file in files])
    return [kind(run, file, state / file.stem, identity=known[file.stem], **more) for file in files]


class WatchedTransport(MemoryTransport):
    """A transport that keeps what it hands to the server."""

    def __init__(self, clients):
        super().__init__(clients)
        self.seen = []

    def pull(self, numbers):
        found = super().pull(numbers)
        self.seen += [unpack(content, 10**9) for content in found.values()]
        return found


def stage_of(request):
    return str(request.fields.get("what"))
