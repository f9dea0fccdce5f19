"""The server's messages to its clients and their replies, over a transport.

A client is identified by its name, which it states in its reply to "hello". Behind the name is a node of the transport:
another one, or the same one in another session, after the client was restarted. A message whose reply was lost because
its node went away is sent again once the client is back: every request can be answered twice. A reply counts only if it
answers a message that is still waited for: late, repeated and stale replies are dropped and counted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from mooring.core.errors import RequestError, WorkError
from mooring.core.types import NamedValues
from mooring.remote.messages import PROTOCOL_VERSION, ClientFailedError, Payload, pack, payload_bytes, printable, unpack
from mooring.remote.requests import REQUESTS, find_problem
from mooring.remote.transport import Transport
from mooring.runs.sections import installed_version

NODE_SCAN_SECONDS = 2.0  # between requests for the list of nodes
FIRST_POLL_SECONDS, MAX_POLL_SECONDS = 0.02, 0.5  # between pulls of replies
RESEND_SECONDS = 2.0  # seconds before a message that failed is sent again
MIN_CLIENTS = 2  # clients of a federation
REVOKED_REASON = "its key was revoked"
REPORT_SECONDS = 10.0  # without a reply, after which a line names the clients that are waited for
MAX_WAIT_SECONDS = 3600.0  # without a reply
DEADLINE_SECONDS = 600.0  # for a reply


class SentMessage(NamedTuple):
    what: str
    node: str
    name: str  # of the client; empty for a node that has not said hello


class RejectedNode(NamedTuple):
    """A node that does not take part: the name of its client, where known, and why."""

    name: str
    why: str


class CollectedReplies(NamedTuple):
    replies: dict[str, Payload]  # by client
    missing: dict[str, str]  # by client: why there is no reply


def ignore_message(sentence: str) -> None:
    """Ignore a sentence for the operator."""


def ignore_event(**line: object) -> None:
    """Ignore a line of the audit log."""


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
        transport: Transport,
        run: str,
        *,
        wait: float = MAX_WAIT_SECONDS,
        deadline: float = DEADLINE_SECONDS,
        report: Callable[[str], None] = ignore_message,
        record: Callable[..., None] = ignore_event,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        """`wait`: seconds for clients to connect; `deadline`: for a reply; `record` writes a line of the audit log."""
        self.transport, self.run, self.wait, self.deadline, self.record = transport, run, wait, deadline, record
        self.report = lambda sentence: report(printable(sentence))
        self._reasons: dict[str, str] = {}  # by client: why it was left out, as last reported
        self.clock, self.sleep = clock, sleep
        self.nodes: dict[str, str] = {}  # by client
        self.enrolled: dict[str, str] = {}  # names of the enrolled keys of connected nodes
        self.sessions: dict[str, str] = {}  # by node
        self.rejected: dict[str, RejectedNode] = {}  # nodes that do not take part
        self.participants: frozenset[str] | None = None  # the participants, once they are fixed
        self.dropped = 0  # replies that were no longer waited for
        self.missed: Counter[str] = Counter()  # how often a client's reply did not come in time
        self.revoked: frozenset[str] = frozenset()  # clients whose keys were revoked
        self.dismissed: dict[str, str] = {}  # clients that no longer take part, and why
        self._sent: dict[str, SentMessage] = {}  # messages by message id
        self._scanned = -NODE_SCAN_SECONDS

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

        It returns when all clients have answered or, after `deadline` seconds, as soon as `quorum` (default: all) have;
        clients that are silent then are named.
        """
        deadline = self.deadline if deadline is None else deadline
        quorum = len(messages) if quorum is None else min(quorum, len(messages))
        replies: dict[str, Payload] = {}
        refused: dict[str, str] = {}
        why: dict[str, str] = {}
        retry: dict[str, float] = {}
        started_at = progress = reported = self.clock()
        pause, overdue = FIRST_POLL_SECONDS, False

        def pending() -> list[str]:
            return [name for name in messages if name not in replies and name not in refused]

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
            if now - started_at > deadline:
                if len(replies) >= quorum:
                    break
                if not overdue:
                    overdue = True
                    self.report(
                        f"{format_waiting(what, pending(), why, deadline)}; {quorum} of {len(messages)} replies are "
                        f"needed (quorum in [federation]), {len(replies)} are here, and the run ends after "
                        f"{self.wait:g} s without a reply"
                    )
            if now - progress > self.wait:
                missing_clients = ", ".join(f"'{name}' ({why.get(name, 'silent')})" for name in pending())
                raise WorkError(
                    f"no reply for {self.wait:g} seconds; missing: {missing_clients}. The same command resumes the run."
                )
            if now - max(progress, reported) > REPORT_SECONDS:
                reported = now
                self.report(format_waiting(what, pending(), why, now - progress))
            self.sleep(pause)
            pause = min(pause * 1.5, MAX_POLL_SECONDS)
        self._sent = {key: sent for key, sent in self._sent.items() if not REQUESTS[sent.what].awaited}
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
        answered = self.ask(what, messages, deadline=deadline, quorum=quorum or 0)
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

    def _reject(self, node: str, name: str, why: str) -> None:
        self.rejected[node] = RejectedNode(name, why)
        self.report(f"a client does not take part: {why}")
        self.record(event="dismissed", client=name, why=why)
        self._push([(SentMessage("dismissed", node, name), Payload({"why": why}))])

    def _scan_nodes(self) -> None:
        """Send hello to nodes that were not seen before."""
        if self.clock() - self._scanned < NODE_SCAN_SECONDS:
            return
        self._scanned = self.clock()
        self.revoked = self.transport.revoked
        nodes = list(self.transport.nodes())
        self.enrolled = {node.id: node.name for node in nodes}
        self._drop_lost({node.id: node.session for node in nodes})
        connected = set(self.enrolled)
        known = {*self.nodes.values(), *self.rejected, *(sent.node for sent in self._sent.values() if not sent.name)}
        about = {"run": self.run, "protocol": PROTOCOL_VERSION, "version": installed_version()}
        self._push([(SentMessage("hello", node, ""), Payload(about)) for node in sorted(connected - known)])
        self.rejected = {node: rejected for node, rejected in self.rejected.items() if node in connected}

    def _drop_lost(self, sessions: dict[str, str]) -> None:
        """Forget messages to nodes that were restarted: the process that had received them is gone."""
        lost = {node for node, session in sessions.items() if self.sessions.get(node, session) != session}
        self._sent = {key: sent for key, sent in self._sent.items() if sent.node not in lost}
        self.rejected = {node: rejected for node, rejected in self.rejected.items() if node not in lost}
        for name in sorted(name for name, node in self.nodes.items() if node in lost):
            self.report(f"client '{name}' restarted")
        self.sessions |= sessions

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
        messages = [(sent.node, pack(self.add_address(sent.what, payload))) for sent, payload in requests]
        for (sent, _), number in zip(requests, self.transport.push(messages)):
            if number:
                self._sent[number] = sent

    def _collect(self, asked: frozenset[str]) -> list[tuple[str, Payload | str]]:
        """Return each received reply of the asked clients: a payload, or the reason why there is none.

        Handles replies to hello."""
        out: list[tuple[str, Payload | str]] = []
        for number, content in self.transport.pull(list(self._sent)).items() if self._sent else ():
            sent = self._sent.pop(number, None)
            if sent is not None and sent.what == "dismissed":
                continue
            if sent is None:
                self.dropped += 1
                continue
            reply: Payload | str
            try:
                reply = content if isinstance(content, str) else unpack(content, REQUESTS[sent.what].values)
            except RequestError as error:
                reply = Payload({"refused": f"its reply cannot be used: {error}"})
                if sent.name in asked:
                    self.dismiss(sent.name, f"client '{sent.name}' sent a reply that cannot be read: {error}")
            if sent.what == "hello":
                self._admit(sent.node, reply)
            elif sent.name in asked:
                out.append((sent.name, reply))
        return out

    def _admit(self, node: str, reply: Payload | str) -> None:
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
