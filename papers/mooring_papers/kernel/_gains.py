"""Sections 7.2 and 7.3 of `kernel`: gains of a client with 50 rows and of one with 500, at the limit of each method."""

import numpy as np

from mooring.data.clients import Clients
from mooring.theory.federation_gain import least_squares
from mooring.theory.kernel_operator import Array, LocalUpdate, ThetaFlow, fedavg, fedprox, limit_point, theta_flow

METHODS = ("s = 1", "s = 5", "s = 10", "FedProx")
PROBES = {"scarce": 0, "rich": 10}  # clients 0-9 have 50 rows, clients 10-19 have 500


def gain(client: str, method: str) -> str:
    """The series of the ratio of plain norms, which Figure 5 shows; Definition 15 has its square."""
    return f"{client} {method}"


def updates(eta: float) -> dict[str, LocalUpdate]:
    return dict(zip(METHODS, (fedavg(eta, 1), fedavg(eta, 5), fedavg(eta, 10), fedprox(eta))))


def flows(data: Clients, eta: float) -> dict[str, ThetaFlow]:
    features = [data.train.of(i)[0].numpy() for i in range(len(data))]
    return {method: theta_flow(features, update) for method, update in updates(eta).items()}


def gains(data: Clients, flow: dict[str, ThetaFlow], client: str, y: Array, truth: Array) -> dict[str, Array]:
    """|theta_local - theta_j*| / |theta_federated - theta_j*| for responses y [N, R] and truths [d, R]."""
    j = PROBES[client]
    rows = slice(int(data.train.start[j]), int(data.train.start[j] + data.train.size[j]))
    local_error = np.linalg.norm(least_squares(data.train.x[rows].numpy(), y[rows]) - truth, axis=0)
    return {
        gain(client, method): local_error / np.linalg.norm(limit_point(method_flow, y) - truth, axis=0)
        for method, method_flow in flow.items()
    }
