"""FedAvg and FedProx rounds on linear features: the averaged effect of local updates, propagated to any round.

    theta <- theta - matrix theta + push,     matrix = sum_i p_i matrix_i,  push = sum_i p_i push_i

Local updates with full batches are in `kernel_operator`; these have minibatches b (consecutive rows, cut once):

    theta <- theta - (eta/n_i) X_b'(X_b theta - y_b)                                  FedAvg, s passes
    theta <- arg min 1/(2 n_i) |X_b theta' - y_b|^2 + 1/(2 eta) |theta' - theta|^2    FedProx, one pass

A new client is averaged like all others and changes the limit.

Reads    A batch loss is 1/(2 n_i) times its sum (per = "client"), the only reading under which the statements on
         Figures 2 and 3 hold; per = "batch" is 1/(2 B), the last batch of a client possibly shorter than B.
Departs  A ridge/2 |theta|^2 in the local loss is shared out over the batches by their rows: a pass adds up to it.
Departs  Where norm = |f - f_0|_H of Eq. 23 is not given, it is the one that the path confirms: f_T - f_0 at its own T
         has this norm, less the share of noise. On sin(2 pi x) with the kernel min(x, z), 300 rows, noise 0.1
         to 1, the error at that T is mostly 1 to 2 times the best one (at worst 4.5: noise 1, s = 5). A truth that
         drowns in noise gives 0.

Source   kernel, Proposition 1, Eq. 23, Section 7.1.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mooring.core.errors import RequestError
from mooring.theory import kernel_operator as op
from mooring.theory.kernel_stopping import sigma_from_residuals, stopping_time

Array = np.ndarray
SMALLEST_NORM = 1e-300
ROUNDING = 1e-6  # by which the eigenvalue 1 of directions that no row sees may come out larger
PATH_TRIALS = 100
BATCH_LOSS_SCALES = ("client", "batch")  # what a batch loss is divided by: the client's rows or the batch's


def minibatch_round(
    x: Array, y: Array, update: op.LocalUpdate, batch: int, per: str = "client", ridge: float = 0.0
) -> tuple[Array, Array]:
    """Return (matrix, push) of a client's local update with minibatches, for its design x [n, d].

    The ridge enters as d further rows of every batch.
    """
    n, d = x.shape
    starts = range(0, n, batch)
    parts = [(x[a : a + batch], y[a : a + batch]) for a in starts]
    if ridge:
        parts = [(np.vstack([u, np.sqrt(ridge * len(u)) * np.eye(d)]), np.append(v, np.zeros(d))) for u, v in parts]
    longest = batch + d if ridge else batch
    rows = np.concatenate([u for u, _ in parts]) if parts else x
    target = np.concatenate([v for _, v in parts]) if parts else y
    # `minibatch_map` divides by its number of rows; the step makes up for it.
    scaled = update._replace(eta=update.eta * len(rows) / divisor(n, batch, per))
    matrix, push = op.minibatch_map(rows, target, scaled, longest)
    return np.eye(d) - matrix, push


def divisor(n: int, batch: int, per: str) -> int:
    """What a batch loss of a client with n rows is divided by, up to the 2."""
    if per not in BATCH_LOSS_SCALES:
        raise RequestError(f"kernel minibatches: per must be one of {BATCH_LOSS_SCALES}, got {per!r}.")
    return max(n if per == "client" else min(batch, n), 1)


def make_theta_flow(matrix: Array, push: Array, update: op.LocalUpdate) -> op.ThetaFlow:
    """An average of full-batch rounds as a flow with a single response, which is 1: `op.theta_at(flow, [1.0], t)`.

    Its gamma is nan: gamma_K belongs to the clients, not to their average.
    """
    matrix = (matrix + matrix.T) / 2
    values, vectors = np.linalg.eigh(matrix)
    return op.ThetaFlow(update, np.nan, push[:, None], matrix, np.maximum(values[::-1], 0.0), vectors[:, ::-1])


def propagate(matrix: Array, push: Array, rounds: float, start: Array | None = None) -> Array:
    """v after `rounds` (np.inf: the limit) of v <- v - matrix v + push from `start` (0 if absent), any square matrix.

    Repeated squaring, so that a million rounds cost twenty products. Where matrix is singular, the limit is the start
    plus the least-norm correction: rounds never move it otherwise.
    """
    d = len(push)
    first = np.zeros_like(push) if start is None else np.asarray(start, dtype=float)
    ahead = push - matrix @ first
    if np.isinf(rounds):
        factor = float(np.abs(np.linalg.eigvals(np.eye(d) - matrix)).max())
        if factor > 1 + ROUNDING:
            raise RequestError(f"kernel rounds grow {factor:.4g}-fold each and have no limit; choose a smaller eta.")
        return first + np.linalg.lstsq(matrix, ahead, rcond=None)[0]
    columns = ahead.reshape(d, -1)
    k = columns.shape[1]
    affine = np.block([[np.eye(d) - matrix, columns], [np.zeros((k, d)), np.eye(k)]])
    return first + np.linalg.matrix_power(affine, int(rounds))[:d, d:].reshape(push.shape)


def norm_from_path(
    moved: Callable[[int], float],
    reached: Array,
    spectrum: Array,
    samples: int,
    update: op.LocalUpdate,
    sigma: float,
    first: float,
) -> float:
    """|f - f_0|_H such that the path at its own T has this norm, less the noise's share; 0 where noise explains it all.

    moved(t) = |f_t - f_0|_H^2, reached: eigenvalues of eta K_x P, spectrum: those of K_x. Noise alone gives at most
    sigma^2 (eta s/N) sum_k (1 - (1 - reached_k)^t)^2/reached_k, as P <= s I.
    """
    reached = reached[reached > SMALLEST_NORM]
    share = sigma**2 * update.eta * update.steps / samples
    norm = float(first)
    for _ in range(PATH_TRIALS):
        if norm <= SMALLEST_NORM:
            return 0.0
        rounds = max(stopping_time(spectrum, samples, update, sigma, norm), 1)
        noise = share * float((op.geometric_sum(reached, rounds) ** 2 * reached).sum())
        last, norm = norm, max(moved(rounds) - noise, 0.0) ** 0.5
        if abs(norm - last) <= 1e-3 * last:
            break
    return norm


def residual_variance(x: Array, y: Array) -> float:
    """sigma_i^2 of `sigma_from_residuals` for one client; with many rows that is least squares."""
    n, d = x.shape
    if n == 0:
        return 0.0
    if n < 2 * d:
        return sigma_from_residuals([x @ x.T], [y]) ** 2
    fit, _, rank, _ = np.linalg.lstsq(x, y, rcond=None)
    return float(((y - x @ fit) ** 2).sum() / (n - rank))
