"""A client's reply to a message of Flower: unpack the request, let the client answer, pack the reply."""

from __future__ import annotations

from typing import Any

from flwr.app import Message

from mooring.core.errors import RequestError
from mooring.engines.flower.client_node import ClientNode
from mooring.engines.flower.flower_records import from_records, to_records
from mooring.engines.flower.keys import load_identity
from mooring.engines.flower.messages import Payload
from mooring.engines.request import read_federation_request


def answer_message(home: ClientNode, message: Message) -> Message:
    """A client's reply to a message."""
    try:
        parcel = from_records(message.content)
        reply = home.answer(str(parcel.words.get("what")), parcel)
    except RequestError as error:  # the message is not a request
        reply = Payload({"refused": str(error)})
    return Message(to_records(reply), reply_to=message)


def answer_as(kind: type[ClientNode], message: Message, context: Any) -> Message:
    """The reply of the client that its node names."""
    known = {key: str(value) for key, value in context.node_config.items()}
    identity = load_identity(known.get("key"), known.get("peers"), known.get("ca"))
    client = kind(
        read_federation_request(known["run"]), known["data"], known["state"], known.get("name"), identity=identity
    )
    return answer_message(client, message)
