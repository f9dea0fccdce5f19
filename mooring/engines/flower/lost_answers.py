"""A client whose SuperLink's answer was lost on the way.

Flower would ask again, and the letter in the lost answer would never come: the SuperLink believes that it delivered,
and the server waits for a reply. So the connection ends instead. Once it is made anew the server sees that the node was
activated again, and sends again what was not answered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supernode import fleet_http_connection as connection

LOST = (httpx.ReadError, httpx.ReadTimeout, httpx.RemoteProtocolError)  # the request may have been heard and obeyed


def end_connections(until: Callable[[], bool] = lambda: False) -> None:
    """Let Flower's connections of this process end where an answer is lost, and where `until` says that all is done."""

    def invoker() -> Any:
        made = make_simple_http_retry_invoker()
        usual: Any = made.should_giveup
        made.should_giveup = lambda error: until() or isinstance(error, LOST) or usual(error)
        return made

    connection.make_simple_http_retry_invoker = invoker
