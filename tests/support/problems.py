"""Small problems and a short way to run an algorithm on them, shared by the tests."""

import numpy as np
import torch

from mooring.data.clients import Clients, from_arrays
from mooring.engines.simulate import simulate as whole_run
from mooring.engines.simulator import resolve
from mooring.engines.training_state import TrainingPlan
from mooring.tasks.kernel_regression import KernelRegression
from mooring.tasks.linear import Linear
from mooring.tasks.linear_losses import Absolute, Hinge
from mooring.tasks.logistic import Logistic

torch.set_default_dtype(torch.float32)


def linear_clients(m: int = 5, d: int = 3, sizes=None, spread: float = 1.0, seed: int = 0) -> Clients:
    """Linear regression with planted, spread-out truths; the last fifth of each client's rows is for validation."""
    rng = np.random.default_rng(seed)
    sizes = [7 + 3 * i for i in range(m)] if sizes is None else sizes
    common = rng.normal(size=d)
    xs = [rng.normal(size=(n, d)) for n in sizes]
    ys = [x @ (common + spread * rng.normal(size=d)) + 0.5 * rng.normal(size=len(x)) for x in xs]
    return from_arrays(xs, ys, parts=[parts(n) for n in sizes], kind="regression")


def logistic_clients(m: int = 5, d: int = 3, sizes=None, classes: int = 2, seed: int = 0) -> Clients:
    rng = np.random.default_rng(seed)
    sizes = [11 + 3 * i for i in range(m)] if sizes is None else sizes
    common = rng.normal(size=(d, classes))
    xs = [rng.normal(size=(n, d)) for n in sizes]
    ys = [
        np.argmax(x @ (common + 0.7 * rng.normal(size=(d, classes))) + rng.gumbel(size=(len(x), classes)), 1)
        for x in xs
    ]
    kind = "binary" if classes == 2 else "classes"
    return from_arrays(xs, ys, parts=[parts(n) for n in sizes], kind=kind)


def parts(n: int) -> np.ndarray:
    held = max(1, n // 5)
    return np.array(["train"] * (n - 2 * held) + ["validation"] * held + ["test"] * held)


PROBLEMS = {
    "linear": lambda: (Linear(3, ridge=0.1), linear_clients()),
    "logistic": lambda: (Logistic(3, ridge=0.1), logistic_clients()),
    "kernel": lambda: (KernelRegression(3, width=10, ridge=0.01), linear_clients()),
    "softmax": lambda: (Logistic(3, classes=3, ridge=0.1), logistic_clients(classes=3)),
    "absolute": lambda: (Absolute(3, ridge=0.1), linear_clients()),
    "hinge": lambda: (Hinge(3, ridge=0.1), logistic_clients()),
}


def settled_simulator(algorithm, task, clients, **how):
    """A simulator whose algorithm has its settings resolved, and the server's first state."""
    return resolve(algorithm, task, clients, **how)


def simulate(algorithm, task, clients, rounds=3, *, participation=1.0, weights="size", seed=0, chunk=0):
    """Run; returns (the final server state, every client's deployed model [m, d], the simulator)."""
    plan = TrainingPlan(rounds=rounds, participation=participation, seed=seed, evaluate_every=rounds)
    done = whole_run(algorithm, task, clients, plan, weights=weights, chunk=chunk)
    return done.server, done.models(), done.exchange
