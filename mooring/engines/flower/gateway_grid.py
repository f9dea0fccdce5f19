"""A Flower grid that sends messages to embedded nodes through the gateway's mailbox.

Large messages, and those to Flower's own nodes, go through Flower: an embedded node gets a note that there is one.
"""

from __future__ import annotations

import os
import secrets
import ssl
import time
from collections.abc import Iterable

import httpx
from flwr.app import Message

from mooring.core.errors import WorkError
from mooring.core.types import JsonObject
from mooring.engines.flower.child_process import SECRET_VARIABLE
from mooring.engines.flower.flower_patches import empty_reply, message_from_bytes, message_to_bytes
from mooring.engines.flower.gateway import OWN, SECRET
from mooring.engines.flower.mailbox import FLOWER_MESSAGE_PREFIX
from mooring.engines.flower.messages import join_frames, split_frames
from mooring.engines.flower.messenger import Grid, GridNode

ADDRESS_VARIABLE, CA_VARIABLE = "MOORING_ADDRESS", "MOORING_CA"
MAX_INLINE_BYTES = 4_000_000
RETRY_SECONDS = 30.0  # for the SuperLink to respond again
WAIT_SECONDS = 0.25  # for a first reply; then the caller scans the nodes


def use_gateway(grid: Grid) -> Grid:
    """Return a grid that uses the mailbox where this process was started behind a gateway; else the grid itself."""
    address = os.environ.get(ADDRESS_VARIABLE, "")
    if not address:
        return grid
    ca = os.environ.get(CA_VARIABLE, "")
    check: ssl.SSLContext | bool = ssl.create_default_context(cafile=ca) if ca else True
    url = f"{'https' if ca else 'http'}://{address}{OWN}"
    client = httpx.Client(
        base_url=url, verify=check, headers={SECRET: os.environ[SECRET_VARIABLE]}, timeout=30.0, trust_env=False
    )
    return GatewayGrid(grid, client)


class GatewayGrid:
    def __init__(self, grid: Grid, client: httpx.Client):
        self.grid, self.client = grid, client
        self.slow: set[str] = set()  # messages that went through Flower
        self.lost = False

    def _request(self, what: str, about: JsonObject, pieces: Iterable[bytes] = ()) -> tuple[JsonObject, list[bytes]]:
        """Return the gateway's response. A request that failed is repeated, since pushing twice does no harm; `lost` is
        set where the response to a pull may have been lost."""
        content, started_at = join_frames(about, list(pieces)), time.monotonic()
        while True:
            try:
                response = self.client.post(what, content=content)
                break
            except httpx.TransportError as error:
                self.lost = self.lost or not isinstance(error, httpx.ConnectError)
                if time.monotonic() - started_at > RETRY_SECONDS:
                    raise WorkError(
                        f"the SuperLink does not respond ({error}); the same command resumes the run."
                    ) from error
                time.sleep(0.2)
        response.raise_for_status()
        return split_frames(response.content)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        messages = list(messages)
        numbers = [secrets.token_hex(8) for _ in messages]
        contents = [message_to_bytes(message) for message in messages]
        small = [k for k, content in enumerate(contents) if len(content) <= MAX_INLINE_BYTES]
        reached: set[int] = set()
        if small:
            about = {
                "nodes": [messages[k].metadata.dst_node_id for k in small],
                "messages": [numbers[k] for k in small],
            }
            answer, _ = self._request("push", about, [contents[k] for k in small])
            reached = {k for k, yes in zip(small, answer["reached"]) if yes}
        others = [k for k in range(len(messages)) if k not in reached]
        if others:
            for k, number in zip(others, self.grid.push_messages([messages[k] for k in others])):
                numbers[k] = number
                self.slow.add(number)
            nodes = [messages[k].metadata.dst_node_id for k in others]
            notes = [FLOWER_MESSAGE_PREFIX + secrets.token_hex(8) for _ in nodes]
            self._request("push", {"nodes": nodes, "messages": notes}, [b""] * len(nodes))
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        wanted, replies = list(message_ids), list[Message]()
        slow = [number for number in wanted if number in self.slow]
        inline = [number for number in wanted if number not in self.slow]
        self.lost = False
        if slow:
            replies += self.grid.pull_messages(slow)
            self.lost = bool(getattr(self.grid, "lost", False))
            self.slow -= {message.metadata.reply_to_message_id for message in replies}
        if inline:
            wait = 0.0 if replies else 0.02 if slow else WAIT_SECONDS
            answer, pieces = self._request("pull", {"messages": inline, "wait": wait})
            for number, piece in zip(answer["messages"], pieces):
                replies.append(parse_reply(number, piece))
        return replies

    def get_nodes(self) -> Iterable[GridNode]:
        return self.grid.get_nodes()


def parse_reply(number: str, content: bytes) -> Message:
    """Return a node's reply; bytes that are not a reply become one without content, so that the sender can be named."""
    try:
        message = message_from_bytes(content)
        message.metadata.__dict__["_reply_to_message_id"] = number
        return message
    except Exception:  # of protobuf and of Flower, on bytes that a client chose
        return empty_reply(number)
