"""Flower's own simulation, on Ray: a virtual node for each client's table, on this machine or on a Ray cluster.

    python -m mooring.engines.flower.ray_simulation RUN.toml TABLES STATES OUT PROGRESS

On a cluster all paths must be on a file system that its machines share.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation

from mooring.data.file_readers import file_stem
from mooring.engines.flower.client_node import ClientNode, answer_message
from mooring.engines.flower.federation import find_client_tables
from mooring.engines.flower.server_run import lead_run
from mooring.engines.request import request

MAX_CACHED_CLIENTS = 16  # clients whose rows one process keeps in memory


@lru_cache(MAX_CACHED_CLIENTS)
def _load_client(run: str, data: str, state: str) -> ClientNode:
    return ClientNode(request(Path(run), purpose="fit"), data, state)


def _make_client_app(run: str, files: list[str], states: str) -> ClientApp:
    """Return one app for all clients: the partition of its node selects the client."""
    app = ClientApp()

    @app.train()
    @app.query()
    def answer(message: Message, context: Context) -> Message:
        file = files[int(context.node_config["partition-id"])]
        return answer_message(_load_client(run, file, str(Path(states) / file_stem(Path(file)))), message)

    return app


def _make_server_app(config: dict[str, str]) -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: object, context: Context) -> None:
        lead_run(grid, config)

    return app


def main() -> None:
    run, tables, states, out, progress = sys.argv[1:]
    files = [str(file.resolve()) for file in find_client_tables(Path(tables))]
    config = {"run": run, "out": out, "progress": progress, "clients": str(len(files))}
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    apps = _make_server_app(config), _make_client_app(run, files, states)
    run_simulation(*apps, len(files), backend_config=resources)  # type: ignore[arg-type]


if __name__ == "__main__":
    from mooring.engines.flower import ray_simulation

    ray_simulation.main()  # Ray's processes look for what they run in a module that they can import
