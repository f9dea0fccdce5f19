"""Flower 1.41.0: federated averaging in its simulation (Ray), rounds driven through the grid."""

import os
import sys

os.environ["WORK"] = os.path.abspath(sys.argv[1]) if len(sys.argv) > 2 else os.environ["WORK"]
os.environ.update(PYTHONPATH=os.path.dirname(os.path.abspath(__file__)), RAY_DEDUP_LOGS="0", FLWR_TELEMETRY_ENABLED="0")

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation
from protocol import BATCH, ETA, rows, serve, threads, tree_seconds

client_app, server_app = ClientApp(), ServerApp()


def net(arrays):
    parts = []
    shapes = [array.shape for array in arrays[::2]]
    for i, (into, out) in enumerate(shapes):
        parts += [torch.nn.Linear(into, out)] + ([torch.nn.ReLU()] if i < len(shapes) - 1 else [])
    module = torch.nn.Sequential(*parts)
    with torch.no_grad():
        for part, array in zip(module.parameters(), arrays):
            part.copy_(torch.from_numpy(array.T))
    return module


@client_app.train()
def train(message, context):
    torch.set_num_threads(1)
    partition = int(context.node_config["partition-id"])
    x, y = (torch.from_numpy(part[partition]) for part in rows(os.environ["WORK"]))
    module = net(message.content["arrays"].to_numpy_ndarrays())
    optimiser = torch.optim.SGD(module.parameters(), lr=ETA)
    for begin in range(0, len(y), BATCH):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(module(x[begin : begin + BATCH]), y[begin : begin + BATCH]).backward()
        optimiser.step()
    arrays = ArrayRecord([part.detach().numpy().T.copy() for part in module.parameters()])
    metrics = MetricRecord({"num-examples": len(y)})
    return Message(content=RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@server_app.main()
def main(grid, context):
    arrays = np.load(os.environ["WORK"])
    clients, layers = len(arrays["y"]), sum(name.startswith("w") for name in arrays)
    start = [arrays[f"{kind}{i}"] for i in range(layers) for kind in "wb"]

    def round_():
        nodes = list(grid.get_node_ids())
        while len(nodes) < clients:
            nodes = list(grid.get_node_ids())
        content = RecordDict({"arrays": ArrayRecord(start)})
        replies = grid.send_and_receive([Message(content, node, "train") for node in nodes])
        failed = [reply.error for reply in replies if not reply.has_content()]
        if failed:
            raise RuntimeError(str(failed[0].reason))
        results = [reply.content["arrays"].to_numpy_ndarrays() for reply in replies]
        mean = [np.mean(parts, 0) for parts in zip(*results)]
        return list(zip(mean[::2], mean[1::2]))

    serve(round_, tree_seconds)


if __name__ == "__main__":
    backend = {"client_resources": {"num_cpus": 1.0}, "init_args": {"num_cpus": threads(), "logging_level": "ERROR"}}
    with np.load(os.environ["WORK"]) as arrays:
        run_simulation(server_app, client_app, len(arrays["y"]), backend_config=backend)
