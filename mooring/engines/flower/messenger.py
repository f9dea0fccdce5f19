"""The server's messages to its clients and their replies, over a Flower grid.

A client is identified by its name, which it states in its reply to "hello". Behind the name is a Flower node: another
one, or the same one activated again, after the client was restarted. A message whose reply was lost because its node
went away is sent again once the client is back: every request can be answered twice. A reply counts only if it answers
a message that is still waited for: late, repeated and stale replies are dropped and counted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

from flwr.app import Message

from mooring.core.errors import ClientError, RequestError, WorkError
from mooring.core.types import NamedValues
from mooring.engines.flower.messages import (
    PROTOCOL_VERSION,
    Payload,
    from_records,
    payload_bytes,
    printable,
    to_records,
)
from mooring.engines.flower.reply_validation import find_problem
from mooring.runs.sections import installed_version

MESSAGE_TYPE = "query"  # Flower's word for the kind of all our messages; `client_app.py` listens to it
NODE_SCAN_SECONDS = 2.0  # between requests for the list of nodes
FIRST_POLL_SECONDS, MAX_POLL_SECONDS = 0.02, 0.5  # between pulls of replies
RESEND_SECONDS = 2.0  # seconds before a message that failed is sent again
UNAWAITED_REQUESTS = ("hello", "dismissed")  # messages whose replies are not awaited
MIN_CLIENTS = 2  # clients of a federation
REVOKED_REASON = "its key was revoked"
REPORT_SECONDS = 10.0  # without a reply, after which a line names the clients that are waited for
MESSAGE_TTL_SECONDS = 3600.0  # seconds that Flower keeps a message


class GridNode(Protocol):
    """The part of Flower's description of a node that is used."""

    @property
    def node_id(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def last_activated_at(self) -> str: ...


class Grid(Protocol):
    """The part of Flower's grid that is used."""

    def get_nodes(self) -> Iterable[GridNode]: ...

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]: ...

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]: ...


class SentMessage(NamedTuple):
    what: str
    node: int
    name: str  # of the client; empty for a node that has not said hello


class RejectedNode(NamedTuple):
    """A node that does not take part: the name of its client, where known, and why."""

    name: str
    why: str


class CollectedReplies(NamedTuple):
    replies: dict[str, Payload]  # by client
    missing: dict[str, str]  # by client: why there is no reply


class ClientFailedError(ClientError):
    """One or more clients cannot take part; the others can."""

    def __init__(self, client: str, why: str, others: Mapping[str, str] = MappingProxyType({})):
        reasons = {client: why} | dict(others)
        super().__init__(
            {name: text if f"'{name}'" in text else f"client '{name}': {text}" for name, text in reasons.items()}
        )


def ignore_message(sentence: str) -> None:
    """Ignore a sentence for the operator."""


def format_waiting(what: str, silent: list[str], why: Mapping[str, str], seconds: float) -> str:
    """Which clients a request waits for."""
    names = ", ".join(f"'{name}'" + (f" ({why[name]})" if name in why else "") for name in silent[:5])
    suffix = f" and {len(silent) - 5} others" if len(silent) > 5 else ""
    return f"waiting {seconds:.0f} s for the reply to '{what}' of {names}{suffix}"


def format_version_mismatch(name: object, fields: NamedValues) -> str:
    """Return the sentence about a client of another version."""
    version, protocol = printable(str(fields.get("version")), 40), printable(str(fields.get("protocol", 1)), 10)
    return (
        f"client '{printable(str(name), 100)}' has Mooring {version} (protocol {protocol}), the server "
        f"{installed_version()} "
        f"(protocol {PROTOCOL_VERSION}); install the same version at both"
    )


class Messenger:
    """Sends messages to clients and collects replies; `report` gets sentences for the operator."""

    def __init__(
        self,
        grid: Grid,
        run: str,
        *,
        wait: float = MESSAGE_TTL_SECONDS,
        report: Callable[[str], None] = ignore_message,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.grid, self.run, self.wait = grid, run, wait
        self.report = lambda sentence: report(printable(sentence))
        self._reasons: dict[str, str] = {}  # by client: why it was left out, as last reported
        self.clock, self.sleep = clock, sleep
        self.nodes: dict[str, int] = {}  # by client
        self.enrolled: dict[int, str] = {}  # names of the enrolled keys of connected nodes
        self.since: dict[int, str] = {}  # when nodes were last activated
        self.rejected: dict[int, RejectedNode] = {}  # nodes that do not take part
        self.participants: frozenset[str] | None = None  # the participants, once they are fixed
        self.dropped = 0  # replies that were no longer waited for
        self.missed: Counter[str] = Counter()  # how often a client's reply did not come in time
        self.revoked: frozenset[str] = frozenset()  # clients whose keys were revoked
        self.dismissed: dict[str, str] = {}  # clients that no longer take part, and why
        self._sent: dict[str, SentMessage] = {}  # messages by message id
        self._scanned = -NODE_SCAN_SECONDS
        self.record: Callable[..., None] = getattr(grid, "record", lambda **line: None)  # of the audit log

    def wait_for_clients(self, wanted: int | Iterable[str]) -> tuple[str, ...]:
        """Wait until all clients are connected, by number or by name; return their names in order.

        A client that connected and cannot take part is not waited for, while two others are connected.
        """
        need = wanted if isinstance(wanted, int) else frozenset(wanted)

        def lacking() -> str:
            excluded = {rejected.name for rejected in self.rejected.values() if rejected.name} - self.nodes.keys()
            if isinstance(need, int):
                enough = max(need - len(excluded), min(need, MIN_CLIENTS))
                return "" if len(self.nodes) >= enough else f"{len(self.nodes)} of {need} clients are connected"
            absent = sorted(need - self.nodes.keys() - excluded)
            left = len(need & self.nodes.keys())
            return (
                "" if not absent and left >= MIN_CLIENTS else f"not connected: {', '.join(absent or sorted(excluded))}"
            )

        started_at, reported = self.clock(), ""
        while why := lacking():
            if why != reported:
                self.report(f"waiting for clients: {why}")
                started_at, reported = self.clock(), why
            if self.clock() - started_at > self.wait:
                raise WorkError(
                    f"the clients did not connect in {self.wait:g} seconds: {why}.{self._describe_rejected()}"
                )
            self._scan_nodes()
            self._collect(frozenset())
            self.sleep(MAX_POLL_SECONDS / 5)
        chosen = sorted(self.nodes) if isinstance(need, int) else sorted(need & self.nodes.keys())
        self.participants = frozenset(chosen[:need] if isinstance(need, int) else chosen)
        return tuple(sorted(self.participants))

    def ask(
        self, what: str, messages: dict[str, Payload], *, deadline: float | None = None, quorum: int | None = None
    ) -> CollectedReplies:
        """Return the replies to one message per client.

        It returns when all clients have answered or, after `deadline` seconds, as soon as `quorum` (default: all) have.
        """
        quorum = len(messages) if quorum is None else min(quorum, len(messages))
        replies: dict[str, Payload] = {}
        refused: dict[str, str] = {}
        why: dict[str, str] = {}
        retry: dict[str, float] = {}
        started_at = progress = reported = self.clock()
        pause = FIRST_POLL_SECONDS
        while len(replies) + len(refused) < len(messages):
            self._scan_nodes()
            self._send(what, messages, replies.keys() | refused.keys(), retry)
            before = len(replies) + len(refused)
            excluded_reasons = dict.fromkeys(self.revoked, REVOKED_REASON) | self.dismissed
            excluded = messages.keys() & excluded_reasons.keys() - replies.keys()
            refused |= {name: excluded_reasons[name] for name in messages if name in excluded}
            for name, reply in self._collect(frozenset(messages)):
                if isinstance(reply, str):
                    why[name], retry[name] = reply, self.clock() + RESEND_SECONDS
                elif "refused" in reply.fields:
                    refused[name] = printable(str(reply.fields["refused"]))
                elif (problem := find_problem(what, messages[name], reply, name)) is not None:
                    refused[name] = f"client '{name}' sent a reply to '{what}' that cannot be used: {problem}"
                    self.dismiss(name, refused[name])
                else:
                    replies[name] = reply
            now = self.clock()
            if len(replies) + len(refused) > before:
                progress, pause = now, FIRST_POLL_SECONDS
                continue
            if deadline is not None and now - started_at > deadline and len(replies) >= quorum:
                break
            if now - progress > self.wait:
                pending = (name for name in messages if name not in replies and name not in refused)
                missing_clients = ", ".join(f"'{name}' ({why.get(name, 'silent')})" for name in pending)
                raise WorkError(
                    f"no reply for {self.wait:g} seconds; missing: {missing_clients}. The same command resumes the run."
                )
            if now - max(progress, reported) > REPORT_SECONDS:
                reported = now
                missing = [name for name in messages if name not in replies and name not in refused]
                self.report(format_waiting(what, missing, why, now - progress))
            self.sleep(pause)
            pause = min(pause * 1.5, MAX_POLL_SECONDS)
        self._sent = {key: sent for key, sent in self._sent.items() if sent.what in UNAWAITED_REQUESTS}
        answered = replies.keys() | refused.keys()
        late = {name: why.get(name, "no reply in time") for name in messages if name not in answered}
        turn = next(iter(messages.values())).fields.get("round") if messages else None
        self.record(
            event="asked",
            request=what,
            **({"round": turn[0]} if turn else {}),
            clients=sorted(replies),
            missing=late | refused,
            sent=sum(map(payload_bytes, messages.values())),
            received=sum(map(payload_bytes, replies.values())),
        )
        for name, reason in (late | refused).items():
            self.missed[name] += 1
            if self._reasons.get(name) != reason or (
                reason not in self.dismissed.values() and reason != REVOKED_REASON
            ):
                self.report(f"client '{name}' is left out of this {what.replace('_', ' ')}: {reason}")
            self._reasons[name] = reason
        return CollectedReplies(replies, late | refused)

    def ask_all(
        self, what: str, messages: dict[str, Payload], *, deadline: float | None = None, quorum: int | None = None
    ) -> dict[str, Payload]:
        """Return the replies of all clients; raise ClientFailedError with those that refuse, or are late."""
        answered = self.ask(what, messages, deadline=deadline, quorum=quorum)
        if answered.missing:
            raise ClientFailedError(*next(iter(answered.missing.items())), answered.missing)
        return answered.replies

    def dismiss(self, name: str, why: str) -> None:
        """Continue without a client, and send it the reason."""
        self.participants = (self.participants or frozenset()) - {name}
        if name in self.dismissed:
            return
        self.dismissed[name] = why
        if (node := self.nodes.pop(name, None)) is not None:
            self._reject(node, name, why)

    def _reject(self, node: int, name: str, why: str) -> None:
        self.rejected[node] = RejectedNode(name, why)
        self.report(f"a client does not take part: {why}")
        self.record(event="dismissed", client=name, why=why)
        self._push([(SentMessage("dismissed", node, name), Payload({"why": why}))])

    def _scan_nodes(self) -> None:
        """Send hello to nodes that were not seen before."""
        if self.clock() - self._scanned < NODE_SCAN_SECONDS:
            return
        self._scanned = self.clock()
        self.revoked = getattr(self.grid, "revoked", frozenset)()
        nodes = list(self.grid.get_nodes())
        self.enrolled = {node.node_id: node.name for node in nodes}
        self._drop_lost({node.node_id: node.last_activated_at for node in nodes})
        connected = set(self.enrolled)
        known = {*self.nodes.values(), *self.rejected, *(sent.node for sent in self._sent.values() if not sent.name)}
        about = {"run": self.run, "protocol": PROTOCOL_VERSION, "version": installed_version()}
        self._push([(SentMessage("hello", node, ""), Payload(about)) for node in sorted(connected - known)])
        self.rejected = {node: rejected for node, rejected in self.rejected.items() if node in connected}

    def _drop_lost(self, since: dict[int, str]) -> None:
        """Forget messages to nodes that were restarted: the process that had received them is gone."""
        lost = {node for node, time in since.items() if self.since.get(node, time) != time}
        self._sent = {key: sent for key, sent in self._sent.items() if sent.node not in lost}
        self.rejected = {node: rejected for node, rejected in self.rejected.items() if node not in lost}
        for name in sorted(name for name, node in self.nodes.items() if node in lost):
            self.report(f"client '{name}' restarted")
        self.since |= since

    def _send(self, what: str, messages: dict[str, Payload], done: Collection[str], retry: dict[str, float]) -> None:
        """Send the request to clients without one on the way to their present node."""
        pending = {(sent.name, sent.node) for sent in self._sent.values() if sent.what == what}
        now = self.clock()
        ready = [
            (SentMessage(what, self.nodes[name], name), payload)
            for name, payload in messages.items()
            if name not in done
            and name in self.nodes
            and (name, self.nodes[name]) not in pending
            and retry.get(name, now) <= now
        ]
        self._push(ready)

    def add_address(self, what: str, payload: Payload) -> Payload:
        """Return the payload with the request and the run it belongs to."""
        return payload._replace(fields=payload.fields | {"what": what, "run": self.run})

    def look_again(self) -> None:
        """Give clients that went away a moment to reconnect."""
        self.sleep(NODE_SCAN_SECONDS)
        self._scan_nodes()
        self._collect(frozenset())

    def _push(self, requests: list[tuple[SentMessage, Payload]]) -> None:
        if not requests:
            return
        messages = [
            Message(to_records(self.add_address(sent.what, payload)), sent.node, MESSAGE_TYPE, ttl=MESSAGE_TTL_SECONDS)
            for sent, payload in requests
        ]
        for (sent, _), number in zip(requests, self.grid.push_messages(messages)):
            if number:
                self._sent[number] = sent

    def _collect(self, asked: frozenset[str]) -> list[tuple[str, Payload | str]]:
        """Return each received reply of the asked clients: a payload, or the reason why there is none.

        Handles replies to hello."""
        out: list[tuple[str, Payload | str]] = []
        for message in self.grid.pull_messages(list(self._sent)) if self._sent else []:
            sent = self._sent.pop(message.metadata.reply_to_message_id, None)
            if sent is not None and sent.what == "dismissed":
                continue
            if sent is None:
                self.dropped += 1
                continue
            reply: Payload | str
            try:
                reply = (
                    f"Flower reports: {message.error.reason}" if message.has_error() else from_records(message.content)
                )
            except RequestError as error:
                reply = Payload({"refused": f"its reply cannot be used: {error}"})
                if sent.name in asked:
                    self.dismiss(sent.name, f"client '{sent.name}' sent a reply that cannot be read: {error}")
            if sent.what == "hello":
                self._admit(sent.node, reply)
            elif sent.name in asked:
                out.append((sent.name, reply))
        if getattr(self.grid, "lost", False):
            self._sent = {}  # it is unknown whose replies were lost: all clients without a reply are asked again
        return out

    def _admit(self, node: int, reply: Payload | str) -> None:
        """Accept or reject a node by its reply to hello."""
        if isinstance(reply, str):
            return  # it gets another hello at the next scan
        fields = reply.fields
        name, why = fields.get("name"), fields.get("refused")
        if why is None and fields.get("protocol") != PROTOCOL_VERSION:
            why = format_version_mismatch(name, fields)
        if why is None and (not isinstance(name, str) or not name or printable(name, 100) != name):
            why = "it states no printable name"
        if why is None and self.enrolled.get(node) not in ("", None, name):
            why = f"a client states the name '{name}', but its key was enrolled for '{self.enrolled[node]}'"
        if why is None and fields.get("run") != self.run:
            why = f"client '{name}' has another run file than the server; both need the same"
        if why is None and self.participants is not None and name not in self.participants:
            why = f"client '{name}' connected after the participants were fixed; `mooring personalize` gives it a model"
        if why is not None:
            given = self.enrolled.get(node) or (printable(name, 100) if isinstance(name, str) else "")
            self._reject(node, given, str(why))
            return
        assert isinstance(name, str)
        self.report(f"client '{name}' {'reconnected' if name in self.nodes else 'connected'}")
        self.nodes[name] = node
        self.record(event="joined", client=name, version=str(fields.get("version"))[:40])

    def _describe_rejected(self) -> str:
        return "".join(f" Refused: {rejected.why}." for rejected in list(self.rejected.values())[:3])
