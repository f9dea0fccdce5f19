"""The Flower app of a client: opens the letter, lets the client answer, packs the reply.

Where the client's table and folder are, its node says: `--node-config 'run="run.toml" data="mine.csv" state="state"'`.
"""

from __future__ import annotations

from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS

from mooring.engines.flower.home import Home
from mooring.engines.flower.packing import pack, unpack
from mooring.engines.request import asked_run


def reply_of(home: Home, message: Message, context: Any) -> Message:
    """A client's reply to a message; `context.state` is what it remembers from one to the next, in memory."""
    if RECORD_KEY_CONFIGS in message.content.config_records:
        from mooring.engines.flower.secure import answer_masked

        return answer_masked(home, message, context)
    parcel = unpack(message.content)
    return Message(pack(home.answer(str(parcel.words.get("what")), parcel)), reply_to=message)


app = ClientApp()


@app.train()
@app.query()
def answer(message: Message, context: Context) -> Message:
    return answer_with(Home, message, context)


def answer_with(kind: type[Home], message: Message, context: Context) -> Message:
    """The reply of the client that its node names."""
    told = {key: str(value) for key, value in context.node_config.items()}
    return reply_of(kind(asked_run(told["run"]), told["data"], told["state"], told.get("name")), message, context)
