"""Federations with secure sums for tests: identities, clients, and a grid that records what the server receives."""

from cryptography.hazmat.primitives.asymmetric import ec

from mooring.remote.client_node import ClientNode
from mooring.remote.keys import Identity
from mooring.remote.memory import MemoryTransport

ROUNDS = 4


SECURE = {"secure": True, "share_models": False, "secure_range": 4.0}


def identities(names):
    keys = {name: ec.generate_private_key(ec.SECP384R1()) for name in names}
    public = {name: key.public_key() for name, key in keys.items()}
    return {name: Identity(key, public) for name, key in keys.items()}


def make_secure_clients(run, folder, state, known=None):
    files = sorted(folder.iterdir())
    known = known or identities([file.stem for file in files])
    return [ClientNode(run, file, state / file.stem, identity=known[file.stem]) for file in files]


class WatchedGrid(MemoryTransport):
    """A grid that keeps what it hands to the server."""

    def __init__(self, homes):
        super().__init__(homes)
        self.seen = []

    def pull(self, numbers):
        found = super().pull(numbers)
        self.seen += found.values()
        return found


def stage_of(message):
    return str(message.fields.get("what"))
