"""Local SGD on linear scores, compiled: one client after another, whose model stays in the cache for all its steps.

The scores of a row are x'W + b, for linear regression, logistic regression and softmax. Batched products of matrices
with so few columns leave most of a processor idle, and every step reads all clients' models from memory again. Here a
client takes all steps of its stay before the next begins, its model turned to [scores, features], so that the inner
loops run along features; rows are read where they lie. Four of them meet five scores at a time: twenty sums, which is
what a processor's registers hold. Meanwhile memory is asked for the next step's rows, a few of them at a time: all at
once they would be in the way of what is read now.

A client's numbers depend on nobody else's and on no number of threads: each is worked on by one thread, in one order.
Sums are reassociated, so that they differ from PyTorch's by rounding. Compiled by `numba` on first use in a process
(about four seconds). Nothing is kept on disk: numba's cache holds pickles, and we read none.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from mooring.core.cohort import Rows
from mooring.core.sgd_step import Pull, constant_step_terms
from mooring.core.task import LocalSteps, Task

SQUARE, SIGMOID, SOFTMAX = 0, 1, 2  # what turns scores into residuals
LINE = 64  # bytes that come from memory at once
VECTOR = 16  # numbers that are worked on at once, at most
LEAST = -87.0  # the exponential of anything below counts as this one's, 1e-38
SERIES = tuple(1 / math.factorial(k) for k in range(14))  # of the exponential, exact to rounding up to log(2) / 2
LOG_2 = math.log(2)
FAST = {"reassoc", "contract", "nsz", "arcp"}  # nan and infinity keep their meaning: divergence must show


def is_numba_available() -> bool:
    """Whether the extra `mooring-fl[fast]` is installed."""
    return importlib.util.find_spec("numba") is not None


def can_read(task: Task, rows: Rows) -> bool:
    """Whether rows lie as the kernel reads them; places in a heap that is drawn from anew are no rows."""
    plain = type(rows) is Rows and rows.x.ndim == 2 and rows.x.dtype == task.dtype
    return plain and rows.x.is_contiguous() and rows.y.is_contiguous()


def local_steps(task: Task, rows: Rows, link: int, scores: int = 1) -> LocalSteps | None:
    """The compiled steps of a task on these rows; None where they do not lie as the kernel reads them."""
    return partial(run_local_steps, link=link, scores=scores, ridge=task.ridge) if can_read(task, rows) else None


def run_local_steps(
    v: Tensor,
    begin: Tensor,
    rows: Rows,
    place: np.ndarray,
    n: np.ndarray,
    rate: np.ndarray,
    pull: Pull | None,
    shift: Tensor | None,
    *,
    link: int,
    scores: int,
    ridge: float,
) -> None:
    """Put into v [C, d] where each client's steps s = 0, 1, ... end, from its row of `begin`, [C, d] or [1, d], along
    the first n[s, c] rows place[s, c] of the pool at rate[s, c]; a rate of 0 is no step."""
    held, towards = constant_step_terms(v, pull, shift, ridge)
    begin = begin if begin.stride(0) else begin[:1]
    small = [array.contiguous().numpy() for array in (begin, held, towards)]
    share = rate / np.maximum(n, 1).astype(rate.dtype)  # of a row in a step
    features, pool_arrays = rows.x.shape[1], [rows.x.numpy(), rows.y.numpy()]
    apart = held.shape[1] > 1 or towards.shape[1] > 0  # coefficients differ in how they are held
    width = (place.shape[2] + VECTOR - 1) // VECTOR * VECTOR
    room = [(scores, features), (scores,), (scores, width), (2, width)]
    room += [(scores if apart else 0, features + 1)] * 2

    def work(part: slice) -> None:
        own = [array if len(array) == 1 else array[part] for array in small]
        steps = (np.ascontiguousarray(array[:, part]) for array in (place, n, rate, share))
        scratch = (v.new_zeros(shape).numpy() for shape in room)  # PyTorch's memory begins where a line of it does
        kernel()(v.numpy()[part], *pool_arrays, *steps, *own, link, *scratch)

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
def has_wide_registers() -> bool:
    """Whether the processor's registers hold twenty sums, and what is added to them."""
    from numba.core.codegen import get_host_cpu_features

    return "+avx512f" in get_host_cpu_features().split(",")


@lru_cache(maxsize=1)
def compile_primitives() -> tuple[Callable, Callable, Callable, Callable]:
    """What kernels are made of: how functions are compiled, and those that Python does not call, which takes less
    time; a mark for wide vectors; the scores of four rows."""
    from numba import njit, types
    from numba.extending import intrinsic

    fast = partial(njit, fastmath=FAST, nogil=True, error_model="numpy")
    inner = fast(no_cpython_wrapper=True, no_cfunc_wrapper=True)

    def widened(typing):  # type: ignore[no-untyped-def]
        """Where it is called, vectors are as wide as the processor's: by itself LLVM takes half of 512 bits. Its
        code is made once, not for every caller anew."""

        def mark(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            attributes = builder.function.attributes
            if isinstance(attributes, set):  # its own `add` knows but a few names
                set.add(attributes, '"prefer-vector-width"="512"')
            attributes.add("noinline")
            return context.get_dummy_value()

        return types.void(), mark

    wide: Callable = intrinsic(widened)

    @inner
    def score(W, b, x, i0, i1, i2, i3, r, z):  # type: ignore[no-untyped-def]
        """z[k, r + j] = x_j'W_k + b_k for four rows j."""
        wide()
        K, F = len(W), W.shape[1]
        zero = W.dtype.type(0)
        k = 0
        while k + 5 <= K:
            a00 = a01 = a02 = a03 = zero
            a10 = a11 = a12 = a13 = zero
            a20 = a21 = a22 = a23 = zero
            a30 = a31 = a32 = a33 = zero
            a40 = a41 = a42 = a43 = zero
            for f in range(F):
                x0 = x[i0, f]
                x1 = x[i1, f]
                x2 = x[i2, f]
                x3 = x[i3, f]
                w = W[k, f]
                a00 += w * x0
                a01 += w * x1
                a02 += w * x2
                a03 += w * x3
                w = W[k + 1, f]
                a10 += w * x0
                a11 += w * x1
                a12 += w * x2
                a13 += w * x3
                w = W[k + 2, f]
                a20 += w * x0
                a21 += w * x1
                a22 += w * x2
                a23 += w * x3
                w = W[k + 3, f]
                a30 += w * x0
                a31 += w * x1
                a32 += w * x2
                a33 += w * x3
                w = W[k + 4, f]
                a40 += w * x0
                a41 += w * x1
                a42 += w * x2
                a43 += w * x3
            z[k, r] = a00 + b[k]
            z[k, r + 1] = a01 + b[k]
            z[k, r + 2] = a02 + b[k]
            z[k, r + 3] = a03 + b[k]
            z[k + 1, r] = a10 + b[k + 1]
            z[k + 1, r + 1] = a11 + b[k + 1]
            z[k + 1, r + 2] = a12 + b[k + 1]
            z[k + 1, r + 3] = a13 + b[k + 1]
            z[k + 2, r] = a20 + b[k + 2]
            z[k + 2, r + 1] = a21 + b[k + 2]
            z[k + 2, r + 2] = a22 + b[k + 2]
            z[k + 2, r + 3] = a23 + b[k + 2]
            z[k + 3, r] = a30 + b[k + 3]
            z[k + 3, r + 1] = a31 + b[k + 3]
            z[k + 3, r + 2] = a32 + b[k + 3]
            z[k + 3, r + 3] = a33 + b[k + 3]
            z[k + 4, r] = a40 + b[k + 4]
            z[k + 4, r + 1] = a41 + b[k + 4]
            z[k + 4, r + 2] = a42 + b[k + 4]
            z[k + 4, r + 3] = a43 + b[k + 4]
            k += 5
        while k < K:
            a0 = a1 = a2 = a3 = zero
            for f in range(F):
                w = W[k, f]
                a0 += w * x[i0, f]
                a1 += w * x[i1, f]
                a2 += w * x[i2, f]
                a3 += w * x[i3, f]
            z[k, r] = a0 + b[k]
            z[k, r + 1] = a1 + b[k]
            z[k, r + 2] = a2 + b[k]
            z[k, r + 3] = a3 + b[k]
            k += 1

    return fast(), inner, wide, score


@lru_cache(maxsize=1)
def kernel() -> Callable:
    """The compiled function; its types are settled, and code made, by the arguments of each first call.

    Written plainly for the compiler's sake: tuples, slices, `min` and allocations all take it longer.
    """
    from llvmlite.ir import Constant, FunctionType, IntType, VoidType
    from numba import types
    from numba.extending import intrinsic

    fast, inner, wide, score = compile_primitives()

    def asked(typing, address):  # type: ignore[no-untyped-def]
        """Have the memory at an address brought into the processor's second cache; nobody waits for it."""

        def ask(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            reading, second_cache, data = (Constant(IntType(32), number) for number in (0, 2, 1))
            place = builder.inttoptr(arguments[0], IntType(8).as_pointer())
            prefetch = builder.module.declare_intrinsic("llvm.prefetch", [place.type], PREFETCH)
            builder.call(prefetch, [place, reading, second_cache, data])
            return context.get_dummy_value()

        return types.void(address), ask

    PREFETCH = FunctionType(VoidType(), [IntType(8).as_pointer(), *[IntType(32)] * 3])
    line: Callable = intrinsic(asked)

    @inner
    def expect(x, index, first, last):  # type: ignore[no-untyped-def]
        """Rows x[index[first : last]], as far as there are any, will be needed."""
        length = x.shape[1] * x.itemsize
        for r in range(first, last if last < len(index) else len(index)):
            begin = x.ctypes.data + index[r] * length
            for at in range(0, length, LINE):
                line(begin + at)

    def raised(typing, n):  # type: ignore[no-untyped-def]
        """2 to the n-th power, n whole and such that there is one."""

        def make(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            word = IntType(signature.args[0].bitwidth)
            digits, zero = (23, 127) if word.width == 32 else (52, 1023)
            power = builder.add(builder.fptosi(arguments[0], word), Constant(word, zero))
            return builder.bitcast(builder.shl(power, Constant(word, digits)), arguments[0].type)

        return n(n), make

    power_of_two: Callable = intrinsic(raised)

    @inner
    def softmax(z, top, total, g):  # type: ignore[no-untyped-def]
        """From scores z [K, rows] to g times probabilities, many rows at a time: a call of `exp` takes one."""
        wide()
        number = z.dtype.type
        least = number(LEAST)
        for r in range(len(top)):
            top[r] = z[0, r]
            total[r] = number(0)
        for k in range(1, len(z)):
            for r in range(len(top)):
                top[r] = z[k, r] if z[k, r] > top[r] else top[r]
        for k in range(len(z)):
            for r in range(len(top)):
                x = z[k, r] - top[r]
                x = least if x < least else x  # what is not a number stays none
                n = np.floor((x if x > least else least) * number(1 / LOG_2) + number(0.5))
                x -= n * number(LOG_2)
                value = number(SERIES[13])
                value = value * x + number(SERIES[12])
                value = value * x + number(SERIES[11])
                value = value * x + number(SERIES[10])
                value = value * x + number(SERIES[9])
                value = value * x + number(SERIES[8])
                value = value * x + number(SERIES[7])
                value = value * x + number(SERIES[6])
                value = value * x + number(SERIES[5])
                value = value * x + number(SERIES[4])
                value = value * x + number(SERIES[3])
                value = value * x + number(SERIES[2])
                value = value * x + number(SERIES[1])
                value = (value * x + number(SERIES[0])) * power_of_two(n)
                z[k, r] = value
                total[r] += value
        for r in range(len(top)):
            total[r] = g / total[r]
        for k in range(len(z)):
            for r in range(len(top)):
                z[k, r] *= total[r]

    @inner
    def residual(z, room, y, index, m, g, link):  # type: ignore[no-untyped-def]
        """From the scores of m rows to g times the loss's slopes at them, 0 behind the last one."""
        unit = z.dtype.type(1)
        if link == SOFTMAX:
            softmax(z, room[0], room[1], g)
            for r in range(m):
                z[int(y[index[r]]), r] -= g
        else:
            for r in range(m):
                target = z.dtype.type(y[index[r]])
                value = unit / (unit + np.exp(-z[0, r])) if link == SIGMOID else z[0, r]  # exp may be infinite: then 0
                z[0, r] = g * (value - target)
        for r in range(m, z.shape[1]):
            for k in range(len(z)):
                z[k, r] = z.dtype.type(0)

    @inner
    def descend(W, x, i0, i1, i2, i3, r, z):  # type: ignore[no-untyped-def]
        """W_k <- W_k - sum_j z[k, r + j] x_j for four rows j."""
        wide()
        K, F = len(W), W.shape[1]
        k = 0
        while k + 5 <= K:
            a00 = z[k, r]
            a01 = z[k, r + 1]
            a02 = z[k, r + 2]
            a03 = z[k, r + 3]
            a10 = z[k + 1, r]
            a11 = z[k + 1, r + 1]
            a12 = z[k + 1, r + 2]
            a13 = z[k + 1, r + 3]
            a20 = z[k + 2, r]
            a21 = z[k + 2, r + 1]
            a22 = z[k + 2, r + 2]
            a23 = z[k + 2, r + 3]
            a30 = z[k + 3, r]
            a31 = z[k + 3, r + 1]
            a32 = z[k + 3, r + 2]
            a33 = z[k + 3, r + 3]
            a40 = z[k + 4, r]
            a41 = z[k + 4, r + 1]
            a42 = z[k + 4, r + 2]
            a43 = z[k + 4, r + 3]
            for f in range(F):
                x0 = x[i0, f]
                x1 = x[i1, f]
                x2 = x[i2, f]
                x3 = x[i3, f]
                W[k, f] -= a00 * x0 + a01 * x1 + a02 * x2 + a03 * x3
                W[k + 1, f] -= a10 * x0 + a11 * x1 + a12 * x2 + a13 * x3
                W[k + 2, f] -= a20 * x0 + a21 * x1 + a22 * x2 + a23 * x3
                W[k + 3, f] -= a30 * x0 + a31 * x1 + a32 * x2 + a33 * x3
                W[k + 4, f] -= a40 * x0 + a41 * x1 + a42 * x2 + a43 * x3
            k += 5
        while k < K:
            a0 = z[k, r]
            a1 = z[k, r + 1]
            a2 = z[k, r + 2]
            a3 = z[k, r + 3]
            for f in range(F):
                W[k, f] -= a0 * x[i0, f] + a1 * x[i1, f] + a2 * x[i2, f] + a3 * x[i3, f]
            k += 1

    @fast
    def stay(v, x, y, place, n, rate, share, begin, held, towards, link, W, b, z, room, H, T):  # type: ignore[no-untyped-def]
        """All steps of all clients; W, b, z, room, H and T are there to work in, z for a multiple of VECTOR rows."""
        wide()
        K, F = len(W), W.shape[1]
        zero = v.dtype.type(0)
        unit = v.dtype.type(1)
        for c in range(len(v)):
            start = c if len(begin) > 1 else 0
            for f in range(F):
                for k in range(K):
                    W[k, f] = begin[start, f * K + k]
            for j in range(F * K, v.shape[1]):
                b[j - F * K] = begin[start, j]
            pull_row = c if len(held) > 1 else 0
            own = c if len(towards) > 1 else 0
            for k in range(len(H)):  # how each coefficient is held, the intercept last
                for f in range(F + 1):
                    j = f * K + k
                    if j < v.shape[1]:
                        H[k, f] = held[pull_row, j if held.shape[1] > 1 else 0]
                        T[k, f] = towards[own, j] if towards.shape[1] > 0 else zero
            for s in range(len(place)):
                eta = rate[s, c]
                m = n[s, c]
                if eta == zero:
                    continue
                then = s + 1 if s + 1 < len(place) else 0
                who = c if then > 0 else c + 1
                coming = place[then, who, : n[then, who]] if who < len(v) else place[s, c, :0]
                for r in range(0, m, 4):
                    i0 = place[s, c, r]
                    i1 = place[s, c, r + 1 if r + 1 < m else r]
                    i2 = place[s, c, r + 2 if r + 2 < m else r]
                    i3 = place[s, c, r + 3 if r + 3 < m else r]
                    expect(x, coming, r, r + 2)
                    score(W, b, x, i0, i1, i2, i3, r, z)
                residual(z, room, y, place[s, c], m, share[s, c], link)
                if len(H) > 0:
                    for k in range(K):
                        for f in range(F):
                            W[k, f] = (unit - eta * H[k, f]) * W[k, f] + eta * T[k, f]
                        b[k] = (unit - eta * H[k, F]) * b[k] + eta * T[k, F]
                elif held[pull_row, 0] != zero:
                    factor = unit - eta * held[pull_row, 0]
                    for k in range(K):
                        for f in range(F):
                            W[k, f] *= factor
                        b[k] *= factor
                for r in range(0, m, 4):
                    i0 = place[s, c, r]
                    i1 = place[s, c, r + 1 if r + 1 < m else r]
                    i2 = place[s, c, r + 2 if r + 2 < m else r]
                    i3 = place[s, c, r + 3 if r + 3 < m else r]
                    expect(x, coming, r + 2, r + 4)
                    descend(W, x, i0, i1, i2, i3, r, z)
                if v.shape[1] > F * K:
                    for k in range(K):
                        for r in range(m):
                            b[k] -= z[k, r]
            for f in range(F):
                for k in range(K):
                    v[c, f * K + k] = W[k, f]
            for j in range(F * K, v.shape[1]):
                v[c, j] = b[j - F * K]

    return stay
