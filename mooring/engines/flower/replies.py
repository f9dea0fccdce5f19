"""A client's reply to a message of Flower: opens the letter, lets the client answer, packs the reply."""

from __future__ import annotations

from typing import Any

from flwr.app import Message
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS

from mooring.core.errors import RequestError
from mooring.engines.flower.home import Home
from mooring.engines.flower.packing import pack, unpack
from mooring.engines.flower.parcels import Parcel
from mooring.engines.request import asked_run


def reply_of(home: Home, message: Message, context: Any) -> Message:
    """A client's reply to a message; `context.state` is what it remembers from one to the next, in memory."""
    if RECORD_KEY_CONFIGS in message.content.config_records:
        from mooring.engines.flower.secure import answer_masked

        return answer_masked(home, message, context)
    try:
        parcel = unpack(message.content)
        reply = home.answer(str(parcel.words.get("what")), parcel)
    except RequestError as error:  # what the server sent is no letter
        reply = Parcel({"refused": str(error)})
    return Message(pack(reply), reply_to=message)


def reply_as(kind: type[Home], message: Message, context: Any) -> Message:
    """The reply of the client that its node names."""
    told = {key: str(value) for key, value in context.node_config.items()}
    return reply_of(kind(asked_run(told["run"]), told["data"], told["state"], told.get("name")), message, context)
