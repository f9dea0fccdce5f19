"""FedAvg and FedProx on squared loss are linear: their operator, its spectrum, its limit and any round at once.

Clients hold x_i [n_i], y_i; the loss is 1/(2 n_i) sum_j (f(x_ij) - y_ij)^2; weights n_i/N; all clients every round.
With K_x = k(x, x)/N, K_{x_i} = k(x_i, x_i)/n_i and P block-diagonal,

    P_ii = sum_{tau<s} (I - eta K_{x_i})^tau   FedAvg, s gradient steps
    P_ii = (I + eta K_{x_i})^(-1)              FedProx, lam = 1/eta; s = 1 in every bound

    f_t(x)  = (I - eta K_x P) f_{t-1}(x) + eta K_x P y                              in sample (Proposition 3)
    f_t     = f_{t-1} + sum_j a_j k(., x_j),  a = (eta/N) P (y - f_{t-1}(x))        everywhere (Lemma 2)
    theta_t = theta_{t-1} + drive (y - X theta_{t-1}),  drive_i = (eta/N) X_i' P_ii  f = <phi, theta>, X = phi(x)
    theta_inf = (sum_i X_i' P_ii X_i)^(-1) sum_i X_i' P_ii y_i

Balancing model: theta_inf with X_i theta_i* in place of y_i; the limit is unbiased for it (Theorem 12).
gamma_K = eta max_i |K_{x_i}|_2 < 1 puts all eigenvalues of eta K_x P in [0, 1] (Lemma 4; FedProx needs no condition).
With kappa_P = gamma_K s/(1 - (1 - gamma_K)^s) (FedAvg) or 1 + gamma_K (FedProx) the eigenvalues Lambda of K_x P and
lambda of K_x obey  lambda_i s/kappa_P <= Lambda_i <= lambda_i s  (Lemma 5).

Reads    Eq. 14 prints gamma^s for gamma s in kappa_P; Lemma 29 and the sum in Lemma 5 give gamma s.
Reads    Minibatches (Section 7.1): a batch loss is 1/(2 n_i) times its sum, and each proximal solve is centred at the
         current local iterate; only this reading reproduces the statements about Figures 2 and 3.
Departs  Where the pooled design is singular, the limit is the one reached from theta_0: theta_0 plus the minimum-norm
         correction.

Source   kernel, Propositions 1 and 3, Lemmas 2, 4, 5, Theorem 12, Section 7.1.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.linalg import block_diag

from mooring.core.errors import RequestError
from mooring.theory.weights import require_positive

Array = np.ndarray


class LocalUpdate(NamedTuple):
    """What a client does in a round; make it with `fedavg` or `fedprox`."""

    eta: float
    steps: int  # s of the bounds: 1 for FedProx
    prox: bool


def fedavg(eta: float, steps: int = 1) -> LocalUpdate:
    """`steps` full-batch gradient steps of size eta."""
    require_positive("kernel FedAvg", eta=eta, steps=steps)
    return LocalUpdate(eta, steps, prox=False)


def fedprox(eta: float) -> LocalUpdate:
    """One exact proximal step with lam = 1/eta."""
    require_positive("kernel FedProx", eta=eta)
    return LocalUpdate(eta, 1, prox=True)


def geometric_sum(x: Array | float, terms: Array | float) -> Array:
    """sum_{tau < terms} (1 - x)^tau = (1 - (1 - x)^terms)/x, accurate for x near 0; broadcasts."""
    x, terms = np.asarray(x, dtype=float), np.asarray(terms, dtype=float)
    small = x < 0.5
    lo = np.where(small & (x != 0), x, 0.25)
    hi = np.where(small, 1.0, x)
    near_zero = -np.expm1(terms * np.log1p(-lo)) / lo
    return np.where(x == 0, terms, np.where(small, near_zero, (1 - (1 - hi) ** terms) / hi))


def local_gain(eigenvalues: Array, update: LocalUpdate) -> Array:
    """Eigenvalues of P_ii for those of K_{x_i}."""
    if update.prox:
        return 1 / (1 + update.eta * eigenvalues)
    return geometric_sum(update.eta * eigenvalues, update.steps)


def gamma_k(kernels: Sequence[Array], eta: float) -> float:
    """eta max_i |K_{x_i}|_2; X_i' X_i/n_i serves as well as X_i X_i'/n_i."""
    return eta * max(float(np.linalg.norm(k, 2)) for k in kernels)


def kappa_p(gamma: float, update: LocalUpdate) -> float:
    """Lemma 5: the bound on the condition number of P."""
    return 1 + gamma if update.prox else update.steps / float(geometric_sum(gamma, update.steps))


def require_contraction(gamma: float, update: LocalUpdate) -> None:
    """Refuse FedAvg with gamma_K >= 1, for which P need not be positive definite."""
    if not update.prox and gamma >= 1:
        raise RequestError(
            f"kernel FedAvg: eta max|K_i| must be below 1, got {gamma:.4g} at eta = {update.eta:.4g}; "
            f"use eta < {update.eta / gamma:.4g}."
        )


def eigenvalue_sandwich(pooled_eigenvalues: Array, gamma: float, update: LocalUpdate) -> tuple[Array, Array]:
    """Lemma 5: lower and upper bounds of the eigenvalues of K_x P, in the order of those of K_x."""
    top = np.asarray(pooled_eigenvalues) * update.steps
    return top / kappa_p(gamma, update), top


class KernelFlow(NamedTuple):
    """K_x P = V diag(eigenvalues) V^(-1), with everything that follows from the inputs alone."""

    update: LocalUpdate
    gamma: float
    p: Array  # [N, N] block-diagonal
    eigenvalues: Array  # [N], of K_x P, descending
    from_modes: Array  # V = P^(-1/2) U
    to_modes: Array  # V^(-1) = U' P^(1/2)


def kernel_flow(gram: Array, sizes: Sequence[int], update: LocalUpdate) -> KernelFlow:
    """Decompose the round operator for the plain Gram matrix k(x, x) [N, N], clients stacked in blocks of `sizes`."""
    gram, total = np.asarray(gram, dtype=float), int(np.sum(sizes))
    if gram.shape != (total, total):
        raise RequestError(f"kernel flow: the Gram matrix must be {total} x {total} (sum of sizes), got {gram.shape}.")
    ends = np.cumsum(sizes)
    spectra = [np.linalg.eigh(gram[e - n : e, e - n : e] / n) for e, n in zip(ends, sizes)]
    gamma = update.eta * max(float(values[-1]) for values, _ in spectra)
    require_contraction(gamma, update)
    gains = [local_gain(values, update) for values, _ in spectra]

    def power(exponent: float) -> Array:
        return block_diag(*[(u * g**exponent) @ u.T for (_, u), g in zip(spectra, gains)])

    root = power(0.5)
    values, u = np.linalg.eigh(root @ gram @ root / total)
    values, u = np.maximum(values[::-1], 0.0), u[:, ::-1]
    return KernelFlow(update, gamma, power(1.0), values, power(-0.5) @ u, u.T @ root)


def predictions(flow: KernelFlow, y: Array, rounds: int, start: Array | None = None) -> Array:
    """f_t(x) at round t, for f_0(x) = start (0 if absent): y + (I - eta K_x P)^t (f_0(x) - y); y [N] or [N, draws]."""
    residual = flow.to_modes @ (y if start is None else y - start)
    return y - flow.from_modes @ _each_mode((1 - flow.update.eta * flow.eigenvalues) ** rounds, residual)


def coefficients(flow: KernelFlow, y: Array, rounds: int, start: Array | None = None) -> Array:
    """a [N] with f_t = f_0 + sum_j a_j k(., x_j); modes that K_x does not see are left at 0, which changes no f_t."""
    reached = flow.update.eta * flow.eigenvalues
    scale = np.where(reached > _rank_tolerance(reached), geometric_sum(reached, rounds), 0.0)
    residual = flow.to_modes @ (y if start is None else y - start)
    return flow.update.eta / len(y) * flow.p @ (flow.from_modes @ _each_mode(scale, residual))


class ThetaFlow(NamedTuple):
    """The same in coefficients: theta <- theta + drive (y - X theta), matrix = drive X symmetric [d, d]."""

    update: LocalUpdate
    gamma: float
    drive: Array  # [d, N]
    matrix: Array  # [d, d]; I - matrix is the round's linear map
    eigenvalues: Array  # [d], of matrix, descending
    vectors: Array  # [d, d]


def theta_flow(features: Sequence[Array], update: LocalUpdate) -> ThetaFlow:
    """Decompose the round map for the clients' designs X_i [n_i, d]."""
    total = sum(len(x) for x in features)
    drives, gamma = [], 0.0
    for x in features:
        values, u = np.linalg.eigh(x.T @ x / len(x))
        gamma = max(gamma, update.eta * float(values[-1]))
        drives.append((u * local_gain(values, update)) @ u.T @ x.T)  # push-through: X_i' P_ii = g(X_i'X_i/n_i) X_i'
    require_contraction(gamma, update)
    drive = update.eta / total * np.concatenate(drives, axis=1)
    matrix = drive @ np.concatenate(features)
    matrix = (matrix + matrix.T) / 2
    values, vectors = np.linalg.eigh(matrix)
    return ThetaFlow(update, gamma, drive, matrix, np.maximum(values[::-1], 0.0), vectors[:, ::-1])


def limit_point(flow: ThetaFlow, y: Array, start: Array | None = None) -> Array:
    """theta_inf for the stacked responses y [N]; y [N, R], one column per draw, gives [d, R] (start then [d, 1])."""
    return _advance(flow, y, start, np.inf)


def theta_at(flow: ThetaFlow, y: Array, rounds: int, start: Array | None = None) -> Array:
    """theta_t after `rounds` rounds from `start` (0 if absent), at the cost of none."""
    return _advance(flow, y, start, rounds)


def balancing_model(flow: ThetaFlow, features: Sequence[Array], truths: Array) -> Array:
    """The model at which the clients' truths [m, d] balance: the noiseless limit from 0."""
    return limit_point(flow, np.concatenate([x @ w for x, w in zip(features, truths)]))


def risk_gradient(features: Sequence[Array], y: Array, theta: Array) -> Array:
    """Gradient of 1/(2N) |y - X theta|^2, the objective trained on; Figures 1 and 2 plot twice its norm."""
    x = np.concatenate(features)
    return x.T @ (x @ theta - y) / len(x)


def minibatch_map(x: Array, y: Array, update: LocalUpdate, batch: int) -> tuple[Array, Array]:
    """(M, c): one client's round with minibatches takes theta to M theta + c.

    The local rows are cut into consecutive batches. FedAvg: `steps` passes, one gradient step per batch. FedProx: one
    pass of proximal solves. Average M and c over clients by n_i/N; `np.linalg.solve(I - M, c)` is the limit.
    """
    identity = np.eye(x.shape[1])
    matrix, offset = identity, np.zeros(x.shape[1])
    for _ in range(update.steps):
        for first in range(0, len(x), batch):
            xb, yb = x[first : first + batch], y[first : first + batch]
            hessian, pull = update.eta / len(x) * xb.T @ xb, update.eta / len(x) * xb.T @ yb
            if update.prox:
                step = np.linalg.solve(identity + hessian, np.column_stack([matrix, offset + pull]))
                matrix, offset = step[:, :-1], step[:, -1]
            else:
                matrix, offset = matrix - hessian @ matrix, offset - hessian @ offset + pull
    return matrix, offset


def _advance(flow: ThetaFlow, y: Array, start: Array | None, rounds: float) -> Array:
    """theta_0 + (sum_{tau<t} (I - matrix)^tau) drive (y - X theta_0), directions outside the design untouched."""
    a = flow.eigenvalues
    reached = a > _rank_tolerance(a)
    safe = np.where(reached, a, 1.0)
    scale = np.where(reached, 1 / safe if np.isinf(rounds) else geometric_sum(safe, rounds), 0.0)
    push = flow.drive @ np.asarray(y, dtype=float)
    if start is not None:
        push = push - flow.matrix @ start
    moved = (flow.vectors * scale) @ (flow.vectors.T @ push)
    return moved if start is None else start + moved


def _each_mode(scale: Array, modes: Array) -> Array:
    return (scale * modes.T).T


def _rank_tolerance(eigenvalues: Array) -> float:
    return len(eigenvalues) * np.finfo(float).eps * float(eigenvalues[0])
