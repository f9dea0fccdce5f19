"""The Flower app of a client: opens the letter, lets the client answer, packs the reply.

Where the client's table and folder are, its node says: `--node-config 'run="run.toml" data="mine.csv" state="state"'`.
"""

from __future__ import annotations

from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from mooring.engines.flower.home import Home
from mooring.engines.flower.packing import pack, unpack
from mooring.engines.request import request


def reply_of(home: Home, message: Message) -> Message:
    """A client's reply to a message."""
    parcel = unpack(message.content)
    return Message(pack(home.answer(str(parcel.words.get("what")), parcel)), reply_to=message)


app = ClientApp()


@app.query()
def answer(message: Message, context: Context) -> Message:
    told = {key: str(value) for key, value in context.node_config.items()}
    run = request(Path(told["run"]), purpose="fit")
    return reply_of(Home(run, told["data"], told["state"], told.get("name")), message)
