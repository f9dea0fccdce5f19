"""Letters to clients and their replies, over a Flower grid.

A client is known by its name, which it says when it is asked "hello"; behind the name is a Flower node: another one, or
the same one activated anew, after the client has been started again. A letter that finds no reply because its node went
away is sent again once the client is back: every request can be answered twice. A reply counts only if it answers a
letter that is still waited for: late, repeated and stale ones are dropped and counted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from flwr.app import Message

from mooring.core.errors import ClientError, RequestError, WorkError
from mooring.engines.flower.flower_records import from_records, to_records
from mooring.engines.flower.messages import PROTOCOL_VERSION, Payload
from mooring.engines.flower.reply_schemas import find_problem, printable
from mooring.runs.sections import installed_version

MESSAGE_TYPE = "query"  # Flower's word for the kind of all our messages; `client_app.py` listens to it
NODE_SCAN_SECONDS = 2.0  # seconds between looks at who is there
FIRST_POLL_SECONDS, MAX_POLL_SECONDS = 0.02, 0.5  # between pulls of replies
RESEND_SECONDS = 2.0  # seconds before a letter that failed is sent again
UNAWAITED_REQUESTS = ("hello", "dismissed")  # letters that nobody waits for
MIN_CLIENTS = 2  # clients of a federation
REVOKED_REASON = "its key was revoked"
REPORT_SECONDS = 10.0  # without a reply, after which a line says which clients are waited for
MESSAGE_TTL_SECONDS = 3600.0  # seconds that Flower keeps a letter


class Grid(Protocol):
    """What is used of Flower's grid."""

    def get_nodes(self) -> Iterable[Any]: ...

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]: ...

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]: ...


class SentMessage(NamedTuple):
    what: str
    node: int
    name: str  # of the client; empty for a node that was not heard yet


class RejectedNode(NamedTuple):
    """A node that takes no part: the name of its client as far as it is known, and why."""

    name: str
    why: str


class CollectedReplies(NamedTuple):
    replies: dict[str, Payload]  # by client
    missing: dict[str, str]  # client -> why there is no reply


class ClientFailedError(ClientError):
    """A client, or some of them, cannot take part; the others may."""

    def __init__(self, client: str, why: str, others: Mapping[str, str] = MappingProxyType({})):
        each = {client: why} | dict(others)
        super().__init__(
            {name: said if f"'{name}'" in said else f"client '{name}': {said}" for name, said in each.items()}
        )


def ignore_message(sentence: str) -> None:
    """For those who do not want to know what is waited for."""


def tensor_bytes(parcel: Payload) -> int:
    """Bytes of a parcel's tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in parcel.tensors.values())


def format_waiting(what: str, silent: list[str], why: Mapping[str, str], seconds: float) -> str:
    """Which clients a request waits for."""
    names = ", ".join(f"'{name}'" + (f" ({why[name]})" if name in why else "") for name in silent[:5])
    more = f" and {len(silent) - 5} more" if len(silent) > 5 else ""
    return f"waiting {seconds:.0f} s for the reply to '{what}' of {names}{more}"


def format_version_mismatch(name: Any, words: Mapping[str, Any]) -> str:
    """A client of another version: what to install."""
    theirs, number = printable(str(words.get("version")), 40), printable(str(words.get("protocol", 1)), 10)
    return (
        f"client '{printable(str(name), 100)}' has Mooring {theirs} (protocol {number}), the server "
        f"{installed_version()} "
        f"(protocol {PROTOCOL_VERSION}); install the same version at both"
    )


class Messenger:
    """The server's post office. `say` gets a sentence whenever somebody comes, is missed, or is refused."""

    def __init__(
        self,
        grid: Grid,
        run: str,
        *,
        wait: float = MESSAGE_TTL_SECONDS,
        say: Callable[[str], None] = ignore_message,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.grid, self.run, self.wait = grid, run, wait
        self.say = lambda sentence: say(printable(sentence))
        self._reasons: dict[str, str] = {}  # client -> why it was left out, as last said
        self.clock, self.sleep = clock, sleep
        self.nodes: dict[str, int] = {}  # client -> its node
        self.enrolled: dict[int, str] = {}  # nodes that are there, and the name that their key was enrolled under
        self.since: dict[int, str] = {}  # when they were last activated: with a new time, letters on the way are lost
        self.strangers: dict[int, RejectedNode] = {}  # nodes that take no part
        self.members: frozenset[str] | None = None  # once the roll was called: nobody else takes part
        self.dropped = 0  # replies that nobody waited for any more
        self.missed: Counter[str] = Counter()  # how often a client's reply did not come in time
        self.revoked: frozenset[str] = frozenset()  # clients whose keys were taken back
        self.dismissed: dict[str, str] = {}  # clients that take no part any more, and why
        self._sent: dict[str, SentMessage] = {}  # letters by message id
        self._looked = -NODE_SCAN_SECONDS
        self.record: Callable[..., None] = getattr(grid, "record", lambda **line: None)  # of the audit log

    def call_roll(self, wanted: int | Iterable[str]) -> tuple[str, ...]:
        """Wait until all clients are there, by number or by name; their names in order.

        A client that came and cannot take part is not waited for, while two others are there.
        """
        need = wanted if isinstance(wanted, int) else frozenset(wanted)

        def lacking() -> str:
            aside = {who.name for who in self.strangers.values() if who.name} - self.nodes.keys()
            if isinstance(need, int):
                enough = max(need - len(aside), min(need, MIN_CLIENTS))
                return "" if len(self.nodes) >= enough else f"{len(self.nodes)} of {need} clients are here"
            away = sorted(need - self.nodes.keys() - aside)
            left = len(need & self.nodes.keys())
            return "" if not away and left >= MIN_CLIENTS else f"not here yet: {', '.join(away or sorted(aside))}"

        begun, told = self.clock(), ""
        while why := lacking():
            if why != told:
                self.say(f"waiting for clients: {why}")
                begun, told = self.clock(), why
            if self.clock() - begun > self.wait:
                raise WorkError(f"the clients did not come in {self.wait:g} seconds: {why}.{self._strange()}")
            self._look()
            self._open(frozenset())
            self.sleep(MAX_POLL_SECONDS / 5)
        chosen = sorted(self.nodes) if isinstance(need, int) else sorted(need & self.nodes.keys())
        self.members = frozenset(chosen[:need] if isinstance(need, int) else chosen)
        return tuple(sorted(self.members))

    def ask(
        self, what: str, letters: dict[str, Payload], *, deadline: float | None = None, quorum: int | None = None
    ) -> CollectedReplies:
        """Replies to one letter per client.

        Returns when everyone has answered, or, `deadline` seconds later, as soon as `quorum` (default: all) have.
        """
        quorum = len(letters) if quorum is None else min(quorum, len(letters))
        found: dict[str, Payload] = {}
        refused: dict[str, str] = {}
        why: dict[str, str] = {}
        retry: dict[str, float] = {}
        begun = progress = reported = self.clock()
        pause = FIRST_POLL_SECONDS
        while len(found) + len(refused) < len(letters):
            self._look()
            self._send(what, letters, found.keys() | refused.keys(), retry)
            before = len(found) + len(refused)
            gone = dict.fromkeys(self.revoked, REVOKED_REASON) | self.dismissed
            refused |= {name: gone[name] for name in letters if name in gone and name not in found}
            for name, reply in self._open(frozenset(letters)):
                if isinstance(reply, str):
                    why[name], retry[name] = reply, self.clock() + RESEND_SECONDS
                elif "refused" in reply.words:
                    refused[name] = printable(str(reply.words["refused"]))
                elif (problem := find_problem(what, letters[name], reply, name)) is not None:
                    refused[name] = f"client '{name}' sent a reply to '{what}' that cannot be used: {problem}"
                    self.dismiss(name, refused[name])
                else:
                    found[name] = reply
            now = self.clock()
            if len(found) + len(refused) > before:
                progress, pause = now, FIRST_POLL_SECONDS
                continue
            if deadline is not None and now - begun > deadline and len(found) >= quorum:
                break
            if now - progress > self.wait:
                silent = (name for name in letters if name not in found and name not in refused)
                away = ", ".join(f"'{name}' ({why.get(name, 'silent')})" for name in silent)
                raise WorkError(f"no reply for {self.wait:g} seconds; missing: {away}. Start the same command again.")
            if now - max(progress, reported) > REPORT_SECONDS:
                reported = now
                missing = [name for name in letters if name not in found and name not in refused]
                self.say(format_waiting(what, missing, why, now - progress))
            self.sleep(pause)
            pause = min(pause * 1.5, MAX_POLL_SECONDS)
        self._sent = {key: sent for key, sent in self._sent.items() if sent.what in UNAWAITED_REQUESTS}
        answered = found.keys() | refused.keys()
        late = {name: why.get(name, "no reply in time") for name in letters if name not in answered}
        sent, came = sum(map(tensor_bytes, letters.values())), sum(map(tensor_bytes, found.values()))
        self.record(
            event="asked", request=what, clients=sorted(found), missing=late | refused, sent=sent, received=came
        )
        for name, reason in (late | refused).items():
            self.missed[name] += 1
            if self._reasons.get(name) != reason or (
                reason not in self.dismissed.values() and reason != REVOKED_REASON
            ):
                self.say(f"client '{name}' is left out of this {what}: {reason}")
            self._reasons[name] = reason
        return CollectedReplies(found, late | refused)

    def ask_all(
        self, what: str, letters: dict[str, Payload], *, deadline: float | None = None, quorum: int | None = None
    ) -> dict[str, Payload]:
        """Everyone's reply; Unfit with their own words for those that refuse, or are late where a quorum is not."""
        answered = self.ask(what, letters, deadline=deadline, quorum=quorum)
        if answered.missing:
            raise ClientFailedError(*next(iter(answered.missing.items())), answered.missing)
        return answered.replies

    def dismiss(self, name: str, why: str) -> None:
        """A client takes no part any more: it is told why, and the others go on."""
        self.members = (self.members or frozenset()) - {name}
        if name in self.dismissed:
            return
        self.dismissed[name] = why
        if (node := self.nodes.pop(name, None)) is not None:
            self._turn_away(node, name, why)

    def _turn_away(self, node: int, name: str, why: str) -> None:
        self.strangers[node] = RejectedNode(name, why)
        self.say(f"a client takes no part: {why}")
        self.record(event="dismissed", client=name, why=why)
        self._push([(SentMessage("dismissed", node, name), Payload({"why": why}))])

    def _look(self) -> None:
        """Greet nodes that were not heard yet."""
        if self.clock() - self._looked < NODE_SCAN_SECONDS:
            return
        self._looked = self.clock()
        self.revoked = getattr(self.grid, "revoked", frozenset)()
        nodes = list(self.grid.get_nodes())
        self.enrolled = {node.node_id: node.name for node in nodes}
        self._forget({node.node_id: node.last_activated_at for node in nodes})
        here = set(self.enrolled)
        known = {*self.nodes.values(), *self.strangers, *(sent.node for sent in self._sent.values() if not sent.name)}
        about = {"run": self.run, "protocol": PROTOCOL_VERSION, "version": installed_version()}
        self._push([(SentMessage("hello", node, ""), Payload(about)) for node in sorted(here - known)])
        self.strangers = {node: who for node, who in self.strangers.items() if node in here}

    def _forget(self, since: dict[int, str]) -> None:
        """Letters to nodes that were started again since: whoever had taken them is no more."""
        lost = {node for node, time in since.items() if self.since.get(node, time) != time}
        self._sent = {key: sent for key, sent in self._sent.items() if sent.node not in lost}
        self.strangers = {node: who for node, who in self.strangers.items() if node not in lost}
        for name in sorted(name for name, node in self.nodes.items() if node in lost):
            self.say(f"client '{name}' was started again")
        self.since |= since

    def _send(self, what: str, letters: dict[str, Payload], done: Any, retry: dict[str, float]) -> None:
        """Letters to all who have none on the way to where they are now."""
        under_way = {(sent.name, sent.node) for sent in self._sent.values() if sent.what == what}
        now = self.clock()
        ready = [
            (SentMessage(what, self.nodes[name], name), parcel)
            for name, parcel in letters.items()
            if name not in done
            and name in self.nodes
            and (name, self.nodes[name]) not in under_way
            and retry.get(name, now) <= now
        ]
        self._push(ready)

    def addressed(self, what: str, parcel: Payload) -> Payload:
        """The parcel with what it asks for, and of which run."""
        return parcel._replace(words=parcel.words | {"what": what, "run": self.run})

    def look_again(self) -> None:
        """Give clients that went away a moment to come back."""
        self.sleep(NODE_SCAN_SECONDS)
        self._look()
        self._open(frozenset())

    def _push(self, letters: list[tuple[SentMessage, Payload]]) -> None:
        if not letters:
            return
        messages = []
        for sent, parcel in letters:
            messages.append(
                Message(to_records(self.addressed(sent.what, parcel)), sent.node, MESSAGE_TYPE, ttl=MESSAGE_TTL_SECONDS)
            )
        for (sent, _), number in zip(letters, self.grid.push_messages(messages)):
            if number:
                self._sent[number] = sent

    def _open(self, asked: frozenset[str]) -> list[tuple[str, Payload | str]]:
        """What came: a parcel, or why there is none, of clients that are asked; greetings are dealt with here."""
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
                reply = f"Flower says: {message.error.reason}" if message.has_error() else from_records(message.content)
            except RequestError as error:
                reply = Payload({"refused": f"its reply cannot be used: {error}"})
                if sent.name in asked:
                    self.dismiss(sent.name, f"client '{sent.name}' sent a reply that cannot be read: {error}")
            if sent.what == "hello":
                self._meet(sent.node, reply)
            elif sent.name in asked:
                out.append((sent.name, reply))
        if getattr(self.grid, "lost", False):
            self._sent = {}  # nobody knows whose replies were lost: all who have not answered are asked again
        return out

    def _meet(self, node: int, reply: Payload | str) -> None:
        """A node has said who it is."""
        if isinstance(reply, str):
            return  # it is greeted again at the next look
        words = reply.words
        name, why = words.get("name"), words.get("refused")
        if why is None and words.get("protocol") != PROTOCOL_VERSION:
            why = format_version_mismatch(name, words)
        if why is None and (not isinstance(name, str) or not name or printable(name, 100) != name):
            why = "it gives no name that can be printed"
        if why is None and self.enrolled.get(node) not in ("", None, name):
            why = f"a client calls itself '{name}', but its key is that of '{self.enrolled[node]}'"
        if why is None and words.get("run") != self.run:
            why = f"client '{name}' has another run file than the server; both need the same"
        if why is None and self.members is not None and name not in self.members:
            why = f"client '{name}' came after the roll was called; it can be given a model by `mooring personalize`"
        if why is not None:
            given = self.enrolled.get(node) or (printable(name, 100) if isinstance(name, str) else "")
            self._turn_away(node, given, str(why))
            return
        assert isinstance(name, str)
        self.say(f"client '{name}' is {'back' if name in self.nodes else 'here'}")
        self.nodes[name] = node
        self.record(event="joined", client=name, version=str(words.get("version"))[:40])

    def _strange(self) -> str:
        return "".join(f" Refused: {who.why}." for who in list(self.strangers.values())[:3])
