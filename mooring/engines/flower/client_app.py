"""The Flower app of a client: its process lives for one letter, which it brings to the client's door (`mooring join`).

Where there is no door, as with nodes that were started by hand, the client is made anew for each letter; where its
table and folder are, its node says: `--node-config 'run="run.toml" data="mine.csv" state="state"'`.
"""

from __future__ import annotations

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from mooring.engines.flower.local_socket import SOCKET_KEY, forward_to_client

app = ClientApp()


@app.train()
@app.query()
def answer(message: Message, context: Context) -> Message:
    if SOCKET_KEY in context.node_config:
        return forward_to_client(message, str(context.node_config[SOCKET_KEY]))
    from mooring.engines.flower.client_node import ClientNode  # slow to import, which a letter should not cost
    from mooring.engines.flower.message_replies import answer_as

    return answer_as(ClientNode, message, context)
