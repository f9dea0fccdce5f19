"""The Flower apps of federated advice; those of a fit are in `engines/flower`."""

from __future__ import annotations

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from mooring.engines.flower.client_app import SOCKET_KEY, AppPaths, forward_to_client

APPS = AppPaths(client=f"{__name__}.client", server=f"{__name__}.server")
server, client = ServerApp(), ClientApp()


@server.main()
def main(grid: object, context: Context) -> None:
    from mooring.advice.remote.server import advise_federation
    from mooring.engines.flower.server_run import run_server_app

    run_server_app(grid, context, advise_federation)


@client.train()
@client.query()
def answer(message: Message, context: Context) -> Message:
    if SOCKET_KEY in context.node_config:
        return forward_to_client(message, str(context.node_config[SOCKET_KEY]))
    from mooring.advice.remote.client_node import AdviceClientNode  # slow to import
    from mooring.engines.flower.client_node import answer_as

    return answer_as(AdviceClientNode, message, context)
