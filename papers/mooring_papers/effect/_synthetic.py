"""Synthetic-Logit of effect, Section 6.1: exact minimizers, and Algorithm 1 round by round.

Choices where the paper is silent: m = 20, n = 400, d = 10, drawn labels, true models around a shared N(0, I), a ridge
of 1e-4 that makes every fit exist. Errors are measured from the planted true models.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from mooring.algorithms.fedprox_personal import FedProxPersonal
from mooring.core.cohort import Rows
from mooring.core.newton import damped_newton
from mooring.core.task import HasHessian, HasSolve, Task, require
from mooring.data.clients import Clients
from mooring.engines.loop import TrainingSteps
from mooring.engines.simulate import RoundSnapshot, simulation_steps
from mooring.engines.simulator import resolve
from mooring.engines.training_state import TrainingPlan
from mooring.tasks.logistic import Logistic
from mooring.theory.lambda_one_stage import lambda_one_stage
from mooring.theory.moreau import moreau
from mooring_papers.exact_minimum import Minimum, squared_errors
from mooring_papers.generators import SyntheticLogit

CLIENTS, SAMPLES, DIM, RIDGE = 20, 400, 10, 1e-4
LAMS = {"small": 0.02, "medium": 0.1, "large": 0.5}
FEDPROX = tuple(LAMS)
RHO = 2.0  # as printed
LABELS = {
    "LocalTrain": "LocalTrain",
    "GlobalTrain": "GlobalTrain",
    **{name: rf"FedProx, $\lambda$ = {lam}" for name, lam in LAMS.items()},
    "adaptive": r"FedProx, Theorem 1 with $\rho$ = 2 (an oracle)",
    "smallest curvature": r"FedProx, Theorem 1 with $\mu$ = ridge",
    "from data": r"FedProx, $\lambda$ estimated from the data",
}


class Problem(NamedTuple):
    clients: Clients
    task: Task
    p: Tensor
    smooth: float  # L: the largest eigenvalue of any client's X'X/(4n), plus the ridge
    mean: float  # the mean of these eigenvalues, plus the ridge


@lru_cache(maxsize=2)  # all methods see the same data one after another, or together
def problem(seed: int, spread: float, clients: int, samples: int, ridge: float = RIDGE) -> Problem:
    data = SyntheticLogit(clients, samples, DIM, spread, ridge=0.0).make(seed)
    task = Logistic(DIM, intercept=False, ridge=ridge)
    x = data.train.full(task).x
    curvature = torch.linalg.eigvalsh(x.mT @ x / (4 * samples)) + ridge
    return Problem(data, task, data.weights(), float(curvature.max()), float(curvature.mean()))


def statistical_errors(
    seed: int, spread: float, clients: int = CLIENTS, samples: int = SAMPLES, ridge: float = RIDGE
) -> dict:
    """Return by method: the mean squared error of the personal models ("small"), of the global one ("global small"),
    and how far the personal models lie from those of the two baselines ("small to LocalTrain", "small to
    GlobalTrain")."""
    federation = problem(seed, spread, clients, samples, ridge)
    data, task, p = federation.clients, federation.task, federation.p
    radius, n = data.truth.r_max, data.train.size.numpy()
    local, pooled = (
        require(task, HasSolve).solve(data.train.full(task)),
        require(task, HasSolve).solve(data.train.pooled(p))[0],
    )
    lam = {
        **LAMS,
        "adaptive": lambda_one_stage(radius, federation.mean, federation.smooth, RHO, p.numpy(), n).lam,
        "smallest curvature": lambda_one_stage(radius, ridge, federation.smooth, RHO, p.numpy(), n).lam,
        "from data": vars(resolve(FedProxPersonal(), task, data)[0])["lam"],
    }
    models = {"LocalTrain": (p @ local, local), "GlobalTrain": (pooled, pooled.expand_as(local))}
    models |= {name: minimize_jointly(task, value, p, data.train) for name, value in lam.items()}
    out: dict[str, float] = {"radius": radius} | {f"lam {name}": float(value) for name, value in lam.items()}
    for name, (w, v) in models.items():
        errors = squared_errors(w, v, data.truth.w, p)
        out |= {name: float(errors.personal.mean()), f"global {name}": errors.common}
        out[f"{name} to LocalTrain"] = distance(v, local)
        out[f"{name} to GlobalTrain"] = distance(v, pooled)
    return out


def minimize_jointly(task: Task, lam: float, p: Tensor, rows: Rows) -> Minimum:
    """Return the exact minimizer of Phi (see `experiments/exact_minimum.py`) by Newton's method on all models at once.

    Every figure takes hundreds of them, and nested solves cost ten times as much.

    With A_i = H_i + lam, the step is  (sum_i p_i lam H_i A_i^-1) s_w = grad_w + lam sum_i p_i A_i^-1 g_i  and
    s_i = A_i^-1 (g_i + lam s_w),  g_i being the gradient of h_i.
    """
    full, m, d = rows.full(task), len(rows), task.dim

    def parts(z: Tensor) -> tuple[Tensor, Tensor]:
        return z[0, :d], z[0, d:].view(m, d)

    def value(z: Tensor) -> Tensor:
        w, v = parts(z)
        return (p @ (task.loss(v, full) + lam / 2 * (v - w).square().sum(1)))[None]

    def inner(w: Tensor, v: Tensor) -> Tensor:
        return task.grad(v, full) + lam * (v - w)

    def grad(z: Tensor) -> Tensor:
        w, v = parts(z)
        return torch.cat([lam * (w - p @ v), (p[:, None] * inner(w, v)).flatten()])[None]

    def direction(z: Tensor, g: Tensor) -> Tensor:
        w, v = parts(z)
        hessian = require(task, HasHessian).hessian(v, full)
        stiff = hessian + lam * torch.eye(d, dtype=z.dtype)
        bend = (p[:, None, None] * lam * torch.linalg.solve(stiff, hessian)).sum(0)
        local = inner(w, v)
        s = torch.linalg.solve((bend + bend.T) / 2, g[0, :d] + lam * (p @ torch.linalg.solve(stiff, local)))
        return torch.cat([s, torch.linalg.solve(stiff, local + lam * s).flatten()])[None]

    w, v = parts(damped_newton(value, grad, direction, torch.zeros(1, (m + 1) * d, dtype=task.dtype), tol=1e-12))
    return Minimum(w, v)


def distance(v: Tensor, reference: Tensor) -> float:
    return float((v - reference).square().sum(1).mean())


def total_errors(
    seed: int,
    spread: float,
    lam: float,
    rounds: int,
    relative: bool = False,
    steps: int = 0,
    clients: int = CLIENTS,
    samples: int = SAMPLES,
    participation: float = 1.0,
    exact: bool = True,
) -> TrainingSteps[dict]:
    """Algorithm 1 with the paper's gamma = 1/L_g and eta = 1/(lam + L); steps = 0 solves the inner problems exactly.

    Curves along t = 0..rounds: "total" and "global total", the squared errors of personal and global models; with
    `exact`, "gap", the personal models' squared distance from the exact minimizer as a share of its first value.
    `relative`: lam in units of L.
    """
    federation = problem(seed, spread, clients, samples)
    task, p, truths = federation.task, federation.p, federation.clients.truth.w
    lam = lam * federation.smooth if relative else lam
    gamma, eta = 1 / moreau(RIDGE, federation.smooth, lam).smooth_g, 1 / (lam + federation.smooth)
    inner = {"inner": "descent", "steps": steps, "tol": 0.0} if steps else {"inner": "exact"}
    algorithm = FedProxPersonal(lam=lam, gamma=gamma, eta=eta, batch=0, **inner)
    w0 = task.start()
    best = minimize_jointly(task, lam, p, federation.clients.train).v if exact else w0.expand_as(truths)
    first = distance(w0.expand_as(truths), best) if exact else 1.0
    curves: dict[str, list[float]] = {"t": [], "total": [], "global total": [], "gap": []}

    def watch(now: RoundSnapshot) -> None:
        note(now.t, now.server.w, now.models())

    def note(t: int, w: Tensor, v: Tensor) -> None:
        errors = squared_errors(w, v, truths, p)
        curves["t"].append(t)
        curves["total"].append(float(errors.personal.mean()))
        curves["global total"].append(errors.common)
        curves["gap"].append(distance(v, best) / first)

    note(0, w0, w0.expand_as(truths))
    plan = TrainingPlan(rounds, participation, seed, evaluate_every=rounds)
    yield from simulation_steps(algorithm, task, federation.clients, plan, resolved=True, watch=watch, w0=w0)
    if not exact:
        del curves["gap"]
    return curves
