"""Errors that a person can act on."""


class RequestError(ValueError):
    """The request or its input is wrong: one sentence with the place, the value and what would be right."""


class ClientError(RequestError):
    """Some clients cannot take part, and the others may: `clients` has a sentence for each of them."""

    def __init__(self, clients: dict[str, str]):
        self.clients = clients
        super().__init__(next(iter(clients.values())))


class WorkError(RuntimeError):
    """The request was right but the work failed: one sentence with what happened and what to try."""
