"""The Flower app of a client: its process lives for one letter, which it brings to the client's door (`mooring join`).

Where there is no door, as with nodes that were started by hand, the client is made anew for each letter; where its
table and folder are, its node says: `--node-config 'run="run.toml" data="mine.csv" state="state"'`.
"""

from __future__ import annotations

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from mooring.engines.flower.door import DOOR, bring

app = ClientApp()


@app.train()
@app.query()
def answer(message: Message, context: Context) -> Message:
    if DOOR in context.node_config:
        return bring(message, str(context.node_config[DOOR]))
    from mooring.engines.flower.home import Home  # slow to import, which a letter should not cost
    from mooring.engines.flower.replies import reply_as

    return reply_as(Home, message, context)
