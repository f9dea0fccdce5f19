"""Local SGD on linear scores, compiled: one client after another, whose model stays in the cache for all its steps.

The scores of a row are x'W + b, for linear regression, logistic regression and softmax. Batched products of matrices
with so few columns leave most of a processor idle, and every step reads all clients' models from memory again. Here a
client takes all steps of its stay before the next begins, its model turned to [scores, features], so that the inner
loops run along features; rows are read where they lie, four at a time.

A client's numbers depend on nobody else's and on no number of threads: each is worked on by one thread, in one order.
Sums are reassociated, so that they differ from PyTorch's by rounding. Compiled by `numba` on first use in a process
(about two seconds). Nothing is kept on disk: numba's cache holds pickles, and we read none.
"""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mooring.core.cohort import Rows, per_client

SQUARE, SIGMOID, SOFTMAX = 0, 1, 2  # what turns scores into residuals
FAST = {"reassoc", "contract", "nsz", "arcp"}  # nan and infinity keep their meaning: divergence must show


def available() -> bool:
    """Whether the extra `mooring[fast]` is installed."""
    return importlib.util.find_spec("numba") is not None


def reads(task: Any, rows: Rows) -> bool:
    """Whether rows lie as the kernel reads them; places in a heap that is drawn from anew are no rows."""
    plain = type(rows) is Rows and rows.x.ndim == 2 and rows.x.dtype == task.dtype
    return plain and rows.x.is_contiguous() and rows.y.is_contiguous()


def stay(task: Any, link: int, scores: int) -> Any:
    """A task's `stay`, if it asks for compiled kernels."""
    if task.kernels != "numba":
        return None
    return partial(take_steps, link=link, scores=scores, intercept=task.intercept, ridge=task.ridge)


def take_steps(
    v: Tensor,
    rows: Rows,
    place: np.ndarray,
    n: np.ndarray,
    rate: np.ndarray,
    pull: tuple[Any, Tensor] | None,
    shift: Tensor | None,
    *,
    link: int,
    scores: int,
    intercept: bool,
    ridge: float,
) -> None:
    """Move each client's parameters v [C, d], in place, by its steps s = 0, 1, ... along the first n[s, c] rows
    place[s, c] of the pool at rate[s, c]; a rate of 0 is no step."""
    held = torch.full((1, 1), ridge, dtype=v.dtype)
    towards = torch.zeros(1, 0, dtype=v.dtype)  # nothing to add
    if pull is not None:
        lam = per_client(pull[0], v).reshape(-1, 1) if torch.as_tensor(pull[0]).ndim < 2 else per_client(pull[0], v)
        held, towards = lam + ridge, (lam * pull[1]).expand(-1, v.shape[1])
    if shift is not None:
        towards = (towards if towards.shape[1] else 0) - shift.to(v.dtype).reshape(-1, v.shape[1])
    small = [array.contiguous().numpy() for array in (held, towards)]
    share = rate / np.maximum(n, 1).astype(rate.dtype)  # of a row in a step
    whole = [rows.x.numpy(), rows.y.numpy()]

    def work(part: slice) -> None:
        mine = [array if len(array) == 1 else array[part] for array in small]
        steps = (np.ascontiguousarray(array[:, part]) for array in (place, n, rate, share))
        kernel()(v.numpy()[part], *whole, *steps, *mine, scores, link, intercept)

    threads = min(torch.get_num_threads(), len(v))
    ends = np.linspace(0, len(v), threads + 1).astype(int)
    parts = [slice(a, b) for a, b in pairwise(ends)]
    if threads == 1:
        work(parts[0])
        return
    kernel()  # made before threads begin
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, parts))


@lru_cache(maxsize=1)
def kernel() -> Any:
    """The compiled function; its types are settled, and code made, by the arguments of each first call."""
    from numba import njit

    @njit(fastmath=FAST, nogil=True)
    def score(W, b, x, place, m, z):  # type: ignore[no-untyped-def]
        """z[k, r] = x_r'W_k + b_k, for rows in fours (the last four may repeat a row)."""
        zero = W.dtype.type(0)
        K, F = W.shape
        for r in range(0, m, 4):
            i0, i1, i2, i3 = place[r], place[min(r + 1, m - 1)], place[min(r + 2, m - 1)], place[min(r + 3, m - 1)]
            for k in range(0, K - 1, 2):
                a0, a1, a2, a3 = zero, zero, zero, zero
                c0, c1, c2, c3 = zero, zero, zero, zero
                for f in range(F):
                    w, u = W[k, f], W[k + 1, f]
                    x0, x1, x2, x3 = x[i0, f], x[i1, f], x[i2, f], x[i3, f]
                    a0 += w * x0
                    a1 += w * x1
                    a2 += w * x2
                    a3 += w * x3
                    c0 += u * x0
                    c1 += u * x1
                    c2 += u * x2
                    c3 += u * x3
                z[k, r], z[k, r + 1], z[k, r + 2], z[k, r + 3] = a0 + b[k], a1 + b[k], a2 + b[k], a3 + b[k]
                z[k + 1, r], z[k + 1, r + 1] = c0 + b[k + 1], c1 + b[k + 1]
                z[k + 1, r + 2], z[k + 1, r + 3] = c2 + b[k + 1], c3 + b[k + 1]
            for k in range(K - K % 2, K):
                a0, a1, a2, a3 = zero, zero, zero, zero
                for f in range(F):
                    w = W[k, f]
                    a0 += w * x[i0, f]
                    a1 += w * x[i1, f]
                    a2 += w * x[i2, f]
                    a3 += w * x[i3, f]
                z[k, r], z[k, r + 1], z[k, r + 2], z[k, r + 3] = a0 + b[k], a1 + b[k], a2 + b[k], a3 + b[k]

    @njit(fastmath=FAST, nogil=True)
    def residual(z, y, place, m, g, link):  # type: ignore[no-untyped-def]
        """From scores to g times the loss's slope at them; 0 for repeated rows."""
        K = len(z)
        zero, one = z.dtype.type(0), z.dtype.type(1)
        for r in range(m):
            target = y[place[r]]
            if link == SOFTMAX:
                top = z[0, r]
                for k in range(1, K):
                    top = max(top, z[k, r])
                total = zero
                for k in range(K):
                    z[k, r] = np.exp(z[k, r] - top)
                    total += z[k, r]
                for k in range(K):
                    z[k, r] *= g / total
                z[int(target), r] -= g
            elif link == SIGMOID:
                e = np.exp(-abs(z[0, r]))
                prob = one / (one + e) if z[0, r] >= 0 else e / (one + e)
                z[0, r] = g * (prob - z.dtype.type(target))
            else:
                z[0, r] = g * (z[0, r] - z.dtype.type(target))
        for r in range(m, z.shape[1]):
            for k in range(K):
                z[k, r] = zero

    @njit(fastmath=FAST, nogil=True)
    def descend(W, b, x, place, m, z, intercept):  # type: ignore[no-untyped-def]
        """W_k <- W_k - sum_r z[k, r] x_r, and the same for b."""
        K, F = W.shape
        for r in range(0, m, 4):
            i0, i1, i2, i3 = place[r], place[min(r + 1, m - 1)], place[min(r + 2, m - 1)], place[min(r + 3, m - 1)]
            for k in range(0, K - 1, 2):
                a0, a1, a2, a3 = z[k, r], z[k, r + 1], z[k, r + 2], z[k, r + 3]
                c0, c1, c2, c3 = z[k + 1, r], z[k + 1, r + 1], z[k + 1, r + 2], z[k + 1, r + 3]
                for f in range(F):
                    x0, x1, x2, x3 = x[i0, f], x[i1, f], x[i2, f], x[i3, f]
                    W[k, f] -= a0 * x0 + a1 * x1 + a2 * x2 + a3 * x3
                    W[k + 1, f] -= c0 * x0 + c1 * x1 + c2 * x2 + c3 * x3
            for k in range(K - K % 2, K):
                a0, a1, a2, a3 = z[k, r], z[k, r + 1], z[k, r + 2], z[k, r + 3]
                for f in range(F):
                    W[k, f] -= a0 * x[i0, f] + a1 * x[i1, f] + a2 * x[i2, f] + a3 * x[i3, f]
        if intercept:
            for k in range(K):
                for r in range(m):
                    b[k] -= z[k, r]

    @njit(nogil=True)
    def turn(flat, W, b):  # type: ignore[no-untyped-def]
        """A vector of d numbers as W [scores, features] and b."""
        K, F = W.shape
        for f in range(F):
            for k in range(K):
                W[k, f] = flat[f * K + k]
        for j in range(F * K, len(flat)):
            b[j - F * K] = flat[j]

    @njit(fastmath=FAST, nogil=True)
    def hold(W, b, held, towards, rate):  # type: ignore[no-untyped-def]
        """The pull, ridge and shift: W <- (1 - rate held) W + rate towards."""
        K, F = W.shape
        one = W.dtype.type(1)
        for k in range(K):
            for f in range(F):
                W[k, f] = (one - rate * held[0][k, f]) * W[k, f] + rate * towards[0][k, f]
            b[k] = (one - rate * held[1][k]) * b[k] + rate * towards[1][k]

    @njit(fastmath=FAST, nogil=True)
    def whole_stay(v, x, y, place, n, rate, share, held, towards, scores, link, intercept):  # type: ignore[no-untyped-def]
        K, F = scores, x.shape[1]
        B = (place.shape[2] + 3) // 4 * 4
        W, b, z = np.empty((K, F), v.dtype), np.zeros(K, v.dtype), np.zeros((K, B), v.dtype)
        zero, one = v.dtype.type(0), v.dtype.type(1)
        apart = held.shape[1] > 1 or towards.shape[1] > 0  # coefficients differ in how they are held
        shape = (K, F) if apart else (0, 0)
        H, T = (np.empty(shape, v.dtype), np.zeros(K, v.dtype)), (np.zeros(shape, v.dtype), np.zeros(K, v.dtype))
        for c in range(len(v)):
            turn(v[c], W, b)
            mine = held[c if len(held) > 1 else 0]
            if apart:
                if len(mine) > 1:
                    turn(mine, H[0], H[1])
                else:
                    H[0][:] = mine[0]
                    H[1][:] = mine[0]
                if towards.shape[1] > 0:
                    turn(towards[c if len(towards) > 1 else 0], T[0], T[1])
            for s in range(len(place)):
                eta, m = rate[s, c], n[s, c]
                if eta == zero:
                    continue
                rows = place[s, c]
                if m > 0:
                    score(W, b, x, rows, m, z)
                    residual(z, y, rows, m, share[s, c], link)
                if apart:
                    hold(W, b, H, T, eta)
                elif mine[0] != zero:
                    factor = one - eta * mine[0]
                    for k in range(K):
                        for f in range(F):
                            W[k, f] *= factor
                        b[k] *= factor
                if m > 0:
                    descend(W, b, x, rows, m, z, intercept)
            for f in range(F):
                for k in range(K):
                    v[c, f * K + k] = W[k, f]
            for j in range(F * K, v.shape[1]):
                v[c, j] = b[j - F * K]

    return whole_stay
