"""A Flower grid without a network: every message is turned into Flower's bytes and back, on both ways.

Nodes answer when replies are pulled. A node may be deaf (gets nothing), and a reply may be held back, repeated or
delivered to a later pull: what a real grid can do.
"""

import itertools
from types import SimpleNamespace

from flwr.app import Message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as Wire
from flwr.supercore.task_identity import TaskIdentity

from mooring.engines.flower.client_node import answer_message


def through_the_wire(message):
    twin = message_from_proto(Wire.FromString(message_to_proto(message).SerializeToString()))
    twin.metadata.__dict__["_message_id"] = message.metadata.message_id
    return twin


class LocalGrid:
    """`homes` by node id."""

    def __init__(self, homes):
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # whose messages these are
        self.nodes = dict(enumerate(homes, start=101))
        self.deaf, self.enrolled = set(), {}  # node ids; the names that their keys were enrolled under
        self.since = {}  # when nodes were last activated
        self.fate = lambda what, node, number: "fine"  # or "lost", "late", "twice"
        self.waiting, self.later, self.counter, self.pushed = [], [], itertools.count(1), 0
        self.log = []

    def get_nodes(self):
        return [
            SimpleNamespace(node_id=node, name=self.enrolled.get(node, ""), last_activated_at=self.since.get(node, ""))
            for node in self.nodes
        ]

    def push_messages(self, messages):
        numbers = []
        for message in messages:
            self.pushed = next(self.counter)
            number = f"m{self.pushed}"
            message.metadata.__dict__["_message_id"] = number
            self.waiting.append(through_the_wire(message))
            numbers.append(number)
        return numbers

    def pull_messages(self, message_ids):
        out = [reply for number, reply in self.later if number < self.pushed]  # something was asked since
        self.later = [(number, reply) for number, reply in self.later if number >= self.pushed]
        for message in self.waiting:
            node = message.metadata.dst_node_id
            if node in self.deaf or node not in self.nodes:
                continue
            reply = through_the_wire(answer_message(self.nodes[node], message))
            assert isinstance(reply, Message) and reply.metadata.reply_to_message_id == message.metadata.message_id
            fate = self.fate(message, node, len(self.log))
            self.log.append((node, fate))
            if fate in ("fine", "twice"):
                out.append(reply)
            if fate in ("late", "twice"):
                self.later.append((self.pushed, reply))
        self.waiting = [m for m in self.waiting if m.metadata.dst_node_id in self.deaf]
        return out
