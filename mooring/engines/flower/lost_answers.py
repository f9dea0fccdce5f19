"""The SuperLink's answers that are lost on the way.

Flower would ask again, and what was in the lost answer would never come: the SuperLink believes that it delivered. A
client would wait for a letter, and the server for its reply. So a client's connection ends instead; once it is made
anew the server sees that the node was activated again, and sends again what was not answered. The server's own app, for
which replies may be lost, asks for them again: every letter can be answered twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import httpx
from flwr.app import Message
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supernode import fleet_http_connection as connection

LOST = (httpx.ReadError, httpx.ReadTimeout, httpx.RemoteProtocolError)  # the request may have been heard and obeyed


class Noticing:
    """Flower's grid. After a pull of messages, `lost` says whether an answer that may have brought some was lost."""

    def __init__(self, grid: Any):
        self.grid, self.lost = grid, False
        usual = grid._retry_invoker.should_giveup

        def noticed(error: Exception) -> bool:
            self.lost = self.lost or isinstance(error, LOST)
            return bool(usual(error))

        grid._retry_invoker.should_giveup = noticed

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        self.lost = False
        return list(self.grid.pull_messages(message_ids))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.grid, name)


def end_connections(until: Callable[[], bool] = lambda: False) -> None:
    """Let Flower's connections of this process end where an answer is lost, and where `until` says that all is done."""

    def invoker() -> Any:
        made = make_simple_http_retry_invoker()
        usual: Any = made.should_giveup
        made.should_giveup = lambda error: until() or isinstance(error, LOST) or usual(error)
        return made

    connection.make_simple_http_retry_invoker = invoker
