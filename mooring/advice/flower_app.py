"""The Flower apps of a federation that is advised; those of a run that is fitted are in `engines/flower`."""

from __future__ import annotations

import os

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.app_utils import start_parent_process_monitor

from mooring.advice.at_home import AdvisedHome
from mooring.advice.by_post import converse
from mooring.engines.flower.client_app import answer_with
from mooring.engines.flower.server_app import lead

server, client = ServerApp(), ClientApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    start_parent_process_monitor(os.getppid())
    lead(grid, {key: str(value) for key, value in context.run_config.items()}, converse)


@client.train()
@client.query()
def answer(message: Message, context: Context) -> Message:
    return answer_with(AdvisedHome, message, context)
