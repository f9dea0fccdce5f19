"""Flower's grid, with messages to embedded nodes through the SuperLink's mailbox (`mailbox.py`).

Large messages, and those to Flower's own nodes, take Flower's way: an embedded node gets a note that there is one.
"""

from __future__ import annotations

import os
import ssl
import time
import uuid
from collections.abc import Iterable
from typing import Any

import httpx
from flwr.app import Message, Metadata, RecordDict
from flwr.app.message import make_message

from mooring.core.errors import WorkError
from mooring.engines.flower.frames import join_frames, split_frames
from mooring.engines.flower.gateway import OWN, SECRET
from mooring.engines.flower.local_socket import message_from_bytes, message_to_bytes
from mooring.engines.flower.mailbox import FLOWER_MESSAGE_PREFIX

ADDRESS_VARIABLE, CA_VARIABLE, SECRET_VARIABLE = "MOORING_ADDRESS", "MOORING_CA", "MOORING_SECRET"
MAX_INLINE_BYTES = 4_000_000
RETRY_SECONDS = 30.0  # for the SuperLink to answer again
WAIT_SECONDS = 0.25  # for a first reply; after it the caller looks who is there


def use_gateway(grid: Any) -> Any:
    """The grid with inline messages where this process was started behind a gateway; else the grid."""
    address = os.environ.get(ADDRESS_VARIABLE, "")
    if not address:
        return grid
    ca = os.environ.get(CA_VARIABLE, "")
    check: Any = ssl.create_default_context(cafile=ca) if ca else True
    url = f"{'https' if ca else 'http'}://{address}{OWN}"
    client = httpx.Client(
        base_url=url, verify=check, headers={SECRET: os.environ[SECRET_VARIABLE]}, timeout=30.0, trust_env=False
    )
    return InlineGrid(grid, client)


class InlineGrid:
    def __init__(self, grid: Any, client: httpx.Client):
        self.grid, self.client = grid, client
        self.slow: set[str] = set()  # messages that took Flower's way
        self.lost = False

    def _request(self, what: str, about: dict[str, Any], pieces: Iterable[bytes] = ()) -> Any:
        """The gateway's answer. A request that did not get through is made again: pushing twice does no harm; where an
        answer to a pull was lost, `lost` says so. `mooring serve` sees it if the SuperLink has ended."""
        content, begun = join_frames(about, list(pieces)), time.monotonic()
        while True:
            try:
                response = self.client.post(what, content=content)
                break
            except httpx.TransportError as error:
                self.lost = self.lost or not isinstance(error, httpx.ConnectError)
                if time.monotonic() - begun > RETRY_SECONDS:
                    raise WorkError(
                        f"the SuperLink does not answer ({error}); start the same command again."
                    ) from error
                time.sleep(0.2)
        response.raise_for_status()
        return split_frames(response.content)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        messages = list(messages)
        numbers = [uuid.uuid4().hex for _ in messages]
        contents = [message_to_bytes(message) for message in messages]
        small = [k for k, content in enumerate(contents) if len(content) <= MAX_INLINE_BYTES]
        reached: set[int] = set()
        if small:
            about = {
                "nodes": [messages[k].metadata.dst_node_id for k in small],
                "messages": [numbers[k] for k in small],
            }
            found, _ = self._request("push", about, [contents[k] for k in small])
            reached = {k for k, yes in zip(small, found["reached"]) if yes}
        others = [k for k in range(len(messages)) if k not in reached]
        if others:
            for k, number in zip(others, self.grid.push_messages([messages[k] for k in others])):
                numbers[k] = number
                self.slow.add(number)
            nodes = [messages[k].metadata.dst_node_id for k in others]
            notes = [FLOWER_MESSAGE_PREFIX + uuid.uuid4().hex for _ in nodes]
            self._request("push", {"nodes": nodes, "messages": notes}, [b""] * len(nodes))
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        wanted, out = list(message_ids), list[Message]()
        slow = [number for number in wanted if number in self.slow]
        inline = [number for number in wanted if number not in self.slow]
        self.lost = False
        if slow:
            out += self.grid.pull_messages(slow)
            self.lost = bool(getattr(self.grid, "lost", False))
            self.slow -= {message.metadata.reply_to_message_id for message in out}
        if inline:
            wait = 0.0 if out else 0.02 if slow else WAIT_SECONDS
            found, pieces = self._request("pull", {"messages": inline, "wait": wait})
            for number, piece in zip(found["messages"], pieces):
                out.append(parse_reply(number, piece))
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self.grid, name)


def parse_reply(number: str, content: bytes) -> Message:
    """A node's reply. Bytes that are not one become a reply without content, so that the sender can be named."""
    try:
        message = message_from_bytes(content)
        message.metadata.__dict__["_reply_to_message_id"] = number
        return message
    except Exception:  # of protobuf and of Flower, on bytes that a client chose
        about = Metadata(0, "", 0, 0, number, "", 0.0, 1.0, "query")
        return make_message(about, content=RecordDict())
