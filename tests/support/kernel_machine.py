"""Kernel FedAvg and FedProx as machines: fit to pooled points, predict anywhere, at any round, minibatches included.

    f_t = f_0 + sum_j a_j k(., x_j),    a <- a + B (y - f_{t-1}(x)),    B block-diagonal, B_ii = (n_i/N) A_i

A_i [n_i, n_i] takes a client's residuals to the coefficients that its stay adds. Full batches: A_i = (eta/n_i) P_ii.
With minibatches b (consecutive rows, cut once) and r the residuals at the current local function,

    a_b <- a_b + (eta/n_i) r_b                                     FedAvg, s passes
    a_b <- a_b + (eta/n_i) (I + (eta/n_i) k(x_b, x_b))^(-1) r_b    FedProx, one pass, each solve centred at the last one

Reads    Minibatches, and sigma and norm of Eq. 23 where they are not given: as in `kernel_rounds`.

Source   kernel, Propositions 1 and 3, Lemma 2, Theorem 12, Eq. 23, Section 7.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.linalg import block_diag

from mooring.core.errors import RequestError
from mooring.tasks import kernel_functions
from mooring.theory import kernel_operator as op
from mooring.theory.kernel_rounds import SMALLEST_NORM, divisor, norm_from_path, propagate
from mooring.theory.kernel_stopping import sigma_from_residuals, stopping_time

Array = np.ndarray
Function = Callable[[Array], Array]


class Machine(NamedTuple):
    """f = start + sum_j coefficients_j k(., points_j)."""

    kernel: str | kernel_functions.Kernel
    points: Array  # [N, q]
    coefficients: Array  # [N], or [N, R] for R draws of y
    start: Function | None = None

    def predict(self, z: Any) -> Array:
        """f at z [l, q] (or [l] numbers)."""
        value = evaluate(self.kernel, z, self.points) @ self.coefficients
        return value if self.start is None else value + self.start(np.asarray(z))


def fit(
    kernel: str | kernel_functions.Kernel,
    xs: Sequence[Any],
    ys: Sequence[Any],
    update: op.LocalUpdate,
    rounds: int | str,
    *,
    batch: int = 0,
    per: str = "client",
    start: Function | None = None,
    sigma: float | None = None,
    norm: float | None = None,
) -> Machine:
    """The machine after `rounds` rounds, at the "stop" of Eq. 23 or at the "limit", from f_0 = start (0 if absent).

    `kernel` is a name or a function of two tensors [n, q], [l, q]; batch = 0 takes all rows of a client. sigma and norm
    serve "stop" alone and are estimated where they are not given.
    """
    sizes = [len(y) for y in ys]
    points = np.concatenate([_points(x) for x in xs])
    y = np.concatenate([np.asarray(part, dtype=float) for part in ys])
    gram = evaluate(kernel, points, points)
    ahead = y if start is None else y - start(np.concatenate([np.asarray(x) for x in xs]))
    if rounds == "stop":
        if batch and per == "batch":
            raise RequestError("kernel machine: Eq. 23 knows no steps of size 1/batch; give a number of rounds.")
        rounds = stop(gram, sizes, ahead, update, sigma, norm)
    count = np.inf if rounds == "limit" else rounds
    if isinstance(count, str) or not count >= 0:
        raise RequestError(f"kernel machine: rounds must be a whole number >= 0, 'stop' or 'limit', got {rounds!r}.")
    if not batch:
        return Machine(kernel, points, op.coefficients(op.kernel_flow(gram, sizes, update), ahead, count), start)
    blocks = _blocks(gram, sizes)
    op.require_contraction(op.gamma_k([block / n for block, n in zip(blocks, sizes)], update.eta), update)
    b = block_diag(*[n / len(y) * local_response(block, update, batch, per) for block, n in zip(blocks, sizes)])
    return Machine(kernel, points, propagate(b @ gram, b @ ahead, count), start)


def balance(
    kernel: str | kernel_functions.Kernel, xs: Sequence[Any], truths: Sequence[Function], update: op.LocalUpdate
) -> Machine:
    """The machine at which the clients' truths balance (Theorem 12): the limit on noiseless responses."""
    return fit(kernel, xs, [truth(np.asarray(x)) for truth, x in zip(truths, xs)], update, "limit")


def stop(
    gram: Array,
    sizes: Sequence[int],
    y: Array,
    update: op.LocalUpdate,
    sigma: float | None = None,
    norm: float | None = None,
) -> int:
    """T of Eq. 23 for the pooled Gram matrix and the responses y [N] less f_0; sigma = None: from local residuals."""
    samples, spectrum = len(gram), np.linalg.eigvalsh(gram / len(gram))
    if sigma is None:
        sigma = sigma_from_residuals(_blocks(gram, sizes), np.split(y, np.cumsum(sizes)[:-1]))
    if norm is None:
        flow = op.kernel_flow(gram, sizes, update)

        def moved(rounds: int) -> float:
            a = op.coefficients(flow, y, rounds)
            return float(a @ gram @ a)

        first = np.sqrt((y @ y) / max(np.trace(gram), SMALLEST_NORM))
        norm = norm_from_path(moved, update.eta * flow.eigenvalues, spectrum, samples, update, sigma, first)
    return stopping_time(spectrum, samples, update, sigma, norm) if norm > 0 else 0


def local_response(gram: Array, update: op.LocalUpdate, batch: int, per: str = "client") -> Array:
    """A_i [n, n] for a client's Gram matrix k(x_i, x_i)."""
    n = len(gram)
    response, whole = np.zeros((n, n)), np.eye(n)
    step = update.eta / divisor(n, batch, per)
    for _ in range(update.steps):
        for first in range(0, n, batch):
            rows = slice(first, first + batch)
            added = step * (whole[rows] - gram[rows] @ response)
            if update.prox:
                added = np.linalg.solve(whole[rows, rows] + step * gram[rows, rows], added)
            response[rows] += added
    return response


def evaluate(kernel: str | kernel_functions.Kernel, x: Any, z: Any) -> Array:
    """k(x, z) [n, l] in float64."""
    value = kernel_functions.gram(kernel, torch.from_numpy(_points(x)), torch.from_numpy(_points(z)))
    return np.asarray(value, dtype=float)


def _points(x: Any) -> Array:
    x = np.ascontiguousarray(x, dtype=float)
    return x[:, None] if x.ndim == 1 else x


def _blocks(gram: Array, sizes: Sequence[int]) -> list[Array]:
    ends = np.cumsum(sizes)
    return [gram[e - n : e, e - n : e] for e, n in zip(ends, sizes)]
