"""Messages between the server's app and embedded nodes, in the SuperLink's memory.

Flower moves a message in some twenty requests, each through its database, and shows it before its parts have arrived.
Here a node sends its last reply and waits for its next message in one request. A message stays until its reply
arrives: a node that asks again gets it again, and a repeated reply counts once. Nothing is stored: after a crash the
server's app sends unanswered requests again.

All methods run in the SuperLink's event loop.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

MAX_REPLIES = 100_000  # that are not pulled yet
FLOWER_MESSAGE_PREFIX = "look-"  # begins the name of a note: Flower has a message for the node
GATHER_SECONDS = 0.005  # for further replies, after the first: one request carries them
AWAY_SECONDS = 90.0  # without a request after which a node is no longer reached here


@dataclass
class Channel:
    """A node's end: its session, the key that opened it, and the messages that it has not answered."""

    node: int
    key: bytes
    session: str
    outbox: dict[str, bytes] = field(default_factory=dict)
    seen: float = field(default_factory=time.monotonic)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    closed: bool = False
    waiting: int = 0


class Mailbox:
    def __init__(self) -> None:
        self.channels: dict[int, Channel] = {}  # by node
        self.sessions: dict[str, Channel] = {}
        self.replies: dict[str, bytes] = {}  # by the message that they answer
        self.expected: set[str] = set()
        self.arrived = asyncio.Event()

    def open(self, node: int, key: bytes) -> str:
        """A new session of a node; its former one ends, and so do messages that it has not answered."""
        if (former := self.channels.get(node)) is not None:
            self.close(former)
        channel = Channel(node, key, secrets.token_urlsafe(16))
        self.channels[node] = self.sessions[channel.session] = channel
        return channel.session

    def close(self, channel: Channel) -> None:
        channel.closed = True
        channel.changed.set()
        self.sessions.pop(channel.session, None)
        if self.channels.get(channel.node) is channel:
            del self.channels[channel.node]

    def keep_keys(self, keys: Iterable[bytes]) -> None:
        """End the sessions of all other keys."""
        known = set(keys)
        for channel in [channel for channel in self.channels.values() if channel.key not in known]:
            self.close(channel)

    def is_reachable(self, node: int) -> bool:
        channel = self.channels.get(node)
        return channel is not None and (channel.waiting > 0 or time.monotonic() - channel.seen < AWAY_SECONDS)

    def push(self, node: int, message: str, content: bytes) -> bool:
        """Whether the node is reached here."""
        if not self.is_reachable(node):
            return False
        channel = self.channels[node]
        channel.outbox[message] = content
        if not message.startswith(FLOWER_MESSAGE_PREFIX):
            self.expected.add(message)
        channel.changed.set()
        return True

    def answer(self, channel: Channel, message: str, reply: bytes) -> None:
        """Keep the reply to a message of this node that was not answered before."""
        if channel.outbox.pop(message, None) is None or message not in self.expected:
            return
        if len(self.replies) < MAX_REPLIES:
            self.replies[message] = reply
            self.arrived.set()

    async def next_message(self, channel: Channel, seconds: float) -> tuple[str, bytes] | None:
        """The oldest message that the node has not answered; None if none arrives in these seconds."""
        channel.waiting += 1
        try:
            end = time.monotonic() + seconds
            while not channel.outbox and not channel.closed:
                channel.changed.clear()
                left = end - time.monotonic()
                if left <= 0:
                    return None
                try:
                    await asyncio.wait_for(channel.changed.wait(), left)
                except TimeoutError:
                    return None
            return None if channel.closed else next(iter(channel.outbox.items()))
        finally:
            channel.waiting -= 1
            channel.seen = time.monotonic()

    async def pull(self, messages: list[str], seconds: float) -> dict[str, bytes]:
        """Replies to these messages: as soon as there is one, and those that come within GATHER_SECONDS of it."""
        end, received = time.monotonic() + seconds, dict[str, bytes]()
        while True:
            arrived = {message: self.replies.pop(message) for message in messages if message in self.replies}
            self.expected.difference_update(arrived)
            if arrived and not received:
                end = time.monotonic() + GATHER_SECONDS
            received |= arrived
            left = end - time.monotonic()
            if len(received) == len(messages) or left <= 0:
                return received
            self.arrived.clear()
            try:
                await asyncio.wait_for(self.arrived.wait(), left)
            except TimeoutError:
                return received

    def forget(self, messages: Iterable[str]) -> None:
        """Forget messages whose replies are no longer awaited."""
        withdrawn = set(messages)
        self.expected -= withdrawn
        for message in withdrawn:
            self.replies.pop(message, None)
        for channel in self.channels.values():
            for message in withdrawn & channel.outbox.keys():
                del channel.outbox[message]
