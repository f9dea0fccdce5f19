"""Messages to nodes, and their replies, in the server's memory.

A node sends its last reply and waits for its next message in one request. A message stays until its reply arrives: a
node that asks again gets it again, and a repeated reply counts once. Nothing is stored: after a crash the server sends
unanswered requests again.

The run's thread pushes and pulls; HTTP's event loop answers and waits. One lock guards what both use.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

GATHER_SECONDS = 0.005  # for further replies, after the first
AWAY_SECONDS = 90.0  # without a request, after which a node is no longer connected
MIN_REPLY_BYTES = 64_000_000  # that any reply may have
REPLY_FACTOR = 4  # a reply may be so many times as large as its message: a model and its optimizer's state


class Message(NamedTuple):
    content: bytes
    max_reply: int  # bytes


@dataclass
class Channel:
    """A node's end: its key, its session, and the messages that it has not answered."""

    node: str
    key: bytes
    session: str
    outbox: dict[str, Message] = field(default_factory=dict)
    seen: float = field(default_factory=time.monotonic)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    closed: bool = False
    waiting: int = 0
    reading: bool = False  # a reply's body: one at a time

    def is_connected(self) -> bool:
        return not self.closed and (self.waiting > 0 or self.reading or time.monotonic() - self.seen < AWAY_SECONDS)


class Mailbox:
    def __init__(self) -> None:
        self.channels: dict[str, Channel] = {}  # by node
        self.replies: dict[str, bytes] = {}  # by the message that they answer
        self.expected: dict[str, str] = {}  # nodes, by message
        self.arrived = threading.Condition()
        self.loop: asyncio.AbstractEventLoop | None = None  # of the channels' events, once it runs

    # in HTTP's event loop

    def open(self, node: str, key: bytes, session: str) -> Channel:
        """The node's channel; a new session ends the former one, and messages that it has not answered."""
        channel = self.channels.get(node)
        if channel is None or channel.session != session:
            if channel is not None:
                self.close(channel)
            with self.arrived:
                channel = self.channels[node] = Channel(node, key, session)
        channel.seen = time.monotonic()
        return channel

    def close(self, channel: Channel) -> None:
        with self.arrived:
            channel.closed = True
            channel.changed.set()
            if self.channels.get(channel.node) is channel:
                del self.channels[channel.node]

    def keep_keys(self, keys: Iterable[bytes]) -> None:
        """End the sessions of all other keys."""
        known = set(keys)
        for channel in [channel for channel in self.channels.values() if channel.key not in known]:
            self.close(channel)

    def answer(self, channel: Channel, number: str, reply: bytes) -> None:
        """Keep the reply to a message of this node that was not answered before."""
        with self.arrived:
            if channel.outbox.pop(number, None) is None or number not in self.expected:
                return
            self.replies[number] = reply
            self.arrived.notify_all()

    async def next_message(self, channel: Channel, seconds: float) -> tuple[str, bytes] | None:
        """The oldest message that the node has not answered; None if none arrives in these seconds."""
        channel.waiting += 1
        try:
            end = time.monotonic() + seconds
            while True:
                with self.arrived:
                    if channel.closed:
                        return None
                    if channel.outbox:
                        number, message = next(iter(channel.outbox.items()))
                        return number, message.content
                    channel.changed.clear()
                left = end - time.monotonic()
                if left <= 0:
                    return None
                try:
                    await asyncio.wait_for(channel.changed.wait(), left)
                except TimeoutError:
                    return None
        finally:
            channel.waiting -= 1
            channel.seen = time.monotonic()

    # in the run's thread

    def connected(self) -> list[Channel]:
        with self.arrived:
            return [channel for channel in self.channels.values() if channel.is_connected()]

    def push(self, node: str, content: bytes) -> str:
        """The number of the message; empty where the node is not connected."""
        with self.arrived:
            channel = self.channels.get(node)
            if channel is None or not channel.is_connected():
                return ""
            number = secrets.token_hex(8)
            channel.outbox[number] = Message(content, max(MIN_REPLY_BYTES, REPLY_FACTOR * len(content)))
            self.expected[number] = node
        if self.loop is not None:
            self.loop.call_soon_threadsafe(channel.changed.set)
        return number

    def pull(self, numbers: list[str], seconds: float) -> dict[str, bytes]:
        """Replies to these messages: as soon as there is one, and those that come within GATHER_SECONDS of it.
        Messages that are not asked for any more are forgotten."""
        end, received, wanted = time.monotonic() + seconds, dict[str, bytes](), set(numbers)
        with self.arrived:
            for number in self.expected.keys() - wanted:
                self._forget(number)
            while True:
                arrived = {number: self.replies.pop(number) for number in numbers if number in self.replies}
                for number in arrived:
                    del self.expected[number]
                if arrived and not received:
                    end = time.monotonic() + GATHER_SECONDS
                received |= arrived
                left = end - time.monotonic()
                if len(received) == len(wanted) or left <= 0:
                    return received
                self.arrived.wait(left)

    def _forget(self, number: str) -> None:
        channel = self.channels.get(self.expected.pop(number))
        self.replies.pop(number, None)
        if channel is not None:
            channel.outbox.pop(number, None)
