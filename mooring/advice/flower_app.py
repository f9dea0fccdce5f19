"""The Flower apps of a federation that is advised; those of a run that is fitted are in `engines/flower`."""

from __future__ import annotations

import os

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from mooring.engines.flower.door import DOOR, bring

server, client = ServerApp(), ClientApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    from flwr.supercore.app_utils import start_parent_process_monitor

    from mooring.advice.by_post import converse
    from mooring.engines.flower.flower_patches import Noticing
    from mooring.engines.flower.server_app import lead

    start_parent_process_monitor(os.getppid())
    lead(Noticing(grid), {key: str(value) for key, value in context.run_config.items()}, converse)


@client.train()
@client.query()
def answer(message: Message, context: Context) -> Message:
    if DOOR in context.node_config:
        return bring(message, str(context.node_config[DOOR]))
    from mooring.advice.at_home import AdvisedHome  # slow to import, which a letter should not cost
    from mooring.engines.flower.replies import reply_as

    return reply_as(AdvisedHome, message, context)
