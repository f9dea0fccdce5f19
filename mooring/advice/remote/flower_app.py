"""The Flower apps of a federation that is advised; those of a run that is fitted are in `engines/flower`."""

from __future__ import annotations

import os

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from mooring.engines.flower.local_socket import SOCKET_KEY, forward_to_client

server, client = ServerApp(), ClientApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    from flwr.supercore.app_utils import start_parent_process_monitor

    from mooring.advice.remote.server import advise_federation
    from mooring.engines.flower.flower_patches import LossDetectingGrid
    from mooring.engines.flower.server_app import run_server_app

    start_parent_process_monitor(os.getppid())
    run_server_app(
        LossDetectingGrid(grid), {key: str(value) for key, value in context.run_config.items()}, advise_federation
    )


@client.train()
@client.query()
def answer(message: Message, context: Context) -> Message:
    if SOCKET_KEY in context.node_config:
        return forward_to_client(message, str(context.node_config[SOCKET_KEY]))
    from mooring.advice.remote.client_node import AdviceClientNode  # slow to import, which a letter should not cost
    from mooring.engines.flower.message_replies import answer_as

    return answer_as(AdviceClientNode, message, context)
