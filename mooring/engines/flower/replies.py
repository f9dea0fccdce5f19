"""A client's reply to a message of Flower: unpack the request, let the client answer, pack the reply."""

from __future__ import annotations

from typing import Any

from flwr.app import Message

from mooring.core.errors import RequestError
from mooring.engines.flower.home import Home
from mooring.engines.flower.keys import identity_of
from mooring.engines.flower.packing import pack, unpack
from mooring.engines.flower.parcels import Parcel
from mooring.engines.request import asked_run


def reply_of(home: Home, message: Message) -> Message:
    """A client's reply to a message."""
    try:
        parcel = unpack(message.content)
        reply = home.answer(str(parcel.words.get("what")), parcel)
    except RequestError as error:  # the message is not a request
        reply = Parcel({"refused": str(error)})
    return Message(pack(reply), reply_to=message)


def reply_as(kind: type[Home], message: Message, context: Any) -> Message:
    """The reply of the client that its node names."""
    known = {key: str(value) for key, value in context.node_config.items()}
    identity = identity_of(known.get("key"), known.get("peers"), known.get("ca"))
    client = kind(asked_run(known["run"]), known["data"], known["state"], known.get("name"), identity=identity)
    return reply_of(client, message)
