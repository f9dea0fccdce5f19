"""Section 7.1 of `kernel`: 25 clients of 500 rows, one truth; the trajectories of Figures 1 to 3."""

import numpy as np

from mooring.algorithms.base import AnyAlgorithm
from mooring.algorithms.kernel_fedavg import KernelFedAvg
from mooring.algorithms.kernel_fedprox import KernelFedProx
from mooring.engines.simulate import simulate
from mooring.engines.training_state import TrainingPlan
from mooring.tasks.linear import Linear
from mooring.theory.kernel_operator import Array, fedavg, fedprox, minibatch_map
from mooring_papers.base.experiment import Preset
from mooring_papers.base.results import Ref, of
from mooring_papers.generators import LinearKernel

ETA = 0.1
FULL = 0  # "batch": all rows at once
METHODS = {"s = 1": 1, "s = 5": 5, "s = 10": 10, "FedProx": None}  # FedAvg's passes over the batches per round


def presets(points: list[dict]) -> dict[str, Preset]:
    """Return the presets; the paper's size is cheap, so `quick` has it as well."""
    full_size = Preset(points, repeats=10, settings={"rounds": 200})
    small = {"rounds": 200, "clients": 10, "samples": 100, "dim": 20}
    return {"smoke": Preset(points, repeats=4, settings=small), "quick": full_size, "paper": full_size}


def gradient(method: str) -> str:
    return f"gradient {method}"


def error(method: str) -> str:
    return f"error {method}"


def package_error(method: str) -> str:
    """The estimation error of KernelFedAvg or KernelFedProx after the last round."""
    return f"package error {method}"


def package_gradient(method: str) -> str:
    return f"package gradient {method}"


def rounds_to(method: str) -> str:
    return f"rounds {method}"


LABELS = {method: method if steps is None else f"FedAvg, {method}" for method, steps in METHODS.items()}
LEVELLING = ("s = 5", "s = 10", "FedProx")


def final(method: str) -> Ref:
    """The last round's gradient."""
    return of(gradient(method), at=-1)


def trial(seed: int, batch: int, rounds: int, clients: int = 25, samples: int = 500, dim: int = 100) -> dict:
    """Norms along the rounds of the gradient of l = 1/N |y - X theta|^2 and of theta_t - theta*, per method.

    `rounds ...` is the first round with an error of at most 1.05 times that of the limit; `limit ...` the gradient
    there. Training is on half of l, so the gradient shown is twice that of the trained objective.
    """
    data = LinearKernel(clients=clients, samples=samples, dim=dim).make(seed)
    parts = [tuple(part.numpy() for part in data.train.of(i)) for i in range(clients)]
    pooled, y = data.train.x.numpy(), data.train.y.numpy()
    task = Linear(dim, intercept=False)
    gram, moment, truth = pooled.T @ pooled / len(y), pooled.T @ y / len(y), data.truth.w[0].numpy()
    out: dict = {"t": list(range(rounds + 1))}
    passes = [minibatch_map(x, target, fedavg(ETA), batch or samples) for x, target in parts]
    solves = [minibatch_map(x, target, fedprox(ETA), batch or samples) for x, target in parts]
    for method, steps in METHODS.items():
        local = solves if steps is None else [repeated(*batch_map, steps) for batch_map in passes]
        matrix, offset = np.mean([m for m, _ in local], axis=0), np.mean([c for _, c in local], axis=0)
        path = [np.zeros(dim)]
        for _ in range(rounds):
            path.append(matrix @ path[-1] + offset)
        limit = np.linalg.solve(np.eye(dim) - matrix, offset)
        errors = np.linalg.norm(np.stack(path) - truth, axis=1)
        goal = 1.05 * np.linalg.norm(limit - truth)
        out[gradient(method)] = [2 * float(np.linalg.norm(gram @ theta - moment)) for theta in path]
        out[error(method)] = errors.tolist()
        out[rounds_to(method)] = int(np.argmax(errors <= goal)) if errors.min() <= goal else float("nan")
        out[f"limit {method}"] = 2 * float(np.linalg.norm(gram @ limit - moment))
        w_package = simulate(
            package(steps, rounds, batch), task, data, TrainingPlan(1, seed=seed), resolved=True
        ).server.w.numpy()
        out[package_error(method)] = float(np.linalg.norm(w_package - truth))
        out[package_gradient(method)] = 2 * float(np.linalg.norm(gram @ w_package - moment))
    return out


def package(steps: int | None, rounds: int, batch: int) -> AnyAlgorithm:
    """The package's algorithm after so many rounds; steps None: FedProx."""
    if steps is None:
        return KernelFedProx(lam=1 / ETA, rounds_exact=rounds, batch=batch)
    return KernelFedAvg(eta=ETA, steps=steps, rounds_exact=rounds, batch=batch)


def repeated(matrix: Array, offset: Array, times: int) -> tuple[Array, Array]:
    """The affine map theta -> matrix theta + offset, applied `times` times: every pass takes the same batches."""
    power, shift = matrix, offset
    for _ in range(times - 1):
        power, shift = matrix @ power, matrix @ shift + offset
    return power, shift
