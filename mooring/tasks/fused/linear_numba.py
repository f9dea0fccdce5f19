"""Compiled local SGD on linear scores: one client after another, so that its model stays in the cache for all steps.

The scores of a row are x'W + b, for linear regression, logistic regression and softmax. Batched products of matrices
with so few columns leave most of a processor idle, and every step reads all clients' models from memory again. Here a
client takes all steps of its local update before the next client starts. Its model is transposed to [scores, features],
so that the inner loops run along features; rows are read in place. Four rows are multiplied by five scores' weights at
a time: twenty sums, which is what a processor's registers hold. Meanwhile the next step's rows are prefetched, a few at
a time: all at once they would evict the rows that are being read.

A client's numbers depend neither on other clients nor on the number of threads: one thread works on each, in one order.
Sums are reassociated, so that they differ from PyTorch's by rounding. Compiled by `numba` on first use in a process
(about four seconds). Nothing is cached on disk: numba's cache holds pickles, and we read none.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np
from torch import Tensor

from mooring.core.cohort import Rows
from mooring.core.sgd_step import Pull, constant_step_terms
from mooring.core.task import LocalSteps, Task
from mooring.tasks.fused.per_client import map_client_ranges

SQUARE, SIGMOID, SOFTMAX = 0, 1, 2  # the link between scores and residuals
CACHE_LINE_BYTES = 64
MAX_VECTOR_NUMBERS = 16  # in the widest vector register
MIN_EXPONENT = -87.0  # exp(x) is 1e-38 for any smaller x
EXP_TAYLOR = tuple(1 / math.factorial(k) for k in range(14))  # exact to rounding for |x| <= log(2) / 2
LOG_2 = math.log(2)
FASTMATH_FLAGS = {"reassoc", "contract", "nsz", "arcp"}  # nan and infinity are kept: divergence must show


def is_numba_available() -> bool:
    """Whether the extra `mooring-fl[fast]` is installed."""
    return importlib.util.find_spec("numba") is not None


def can_read(task: Task, rows: Rows) -> bool:
    """Whether the kernel can read these rows: plain contiguous ones, of the task's precision."""
    plain = type(rows) is Rows and rows.x.ndim == 2 and rows.x.dtype == task.dtype
    return plain and rows.x.is_contiguous() and rows.y.is_contiguous()


def local_steps(task: Task, rows: Rows, link: int, scores: int = 1) -> LocalSteps | None:
    """The compiled steps of a task on these rows; None where the kernel cannot read them."""
    return partial(run_local_steps, link=link, scores=scores, ridge=task.ridge) if can_read(task, rows) else None


def run_local_steps(
    v: Tensor,
    start: Tensor,
    rows: Rows,
    row_index: np.ndarray,
    n: np.ndarray,
    rate: np.ndarray,
    pull: Pull | None,
    shift: Tensor | None,
    *,
    link: int,
    scores: int,
    ridge: float,
) -> None:
    """Write each client's model after all steps into v [C, d], from its row of `start`, [C, d] or [1, d].

    Step s of client c takes the first n[s, c] rows row_index[s, c] at rate[s, c]; a rate of 0 is no step.
    """
    decay, offset = constant_step_terms(v, pull, shift, ridge)
    start = start if start.stride(0) else start[:1]
    model_arrays = [array.contiguous().numpy() for array in (start, decay, offset)]
    rate_per_row = rate / np.maximum(n, 1).astype(rate.dtype)
    features, pool_arrays = rows.x.shape[1], [rows.x.numpy(), rows.y.numpy()]
    per_coefficient = decay.shape[1] > 1 or offset.shape[1] > 0
    width = (row_index.shape[2] + MAX_VECTOR_NUMBERS - 1) // MAX_VECTOR_NUMBERS * MAX_VECTOR_NUMBERS
    buffer_shapes = [(scores, features), (scores,), (scores, width), (2, width)]
    buffer_shapes += [(scores if per_coefficient else 0, features + 1)] * 2

    def run_clients(clients: slice) -> None:
        client_arrays = [array if len(array) == 1 else array[clients] for array in model_arrays]
        steps = (np.ascontiguousarray(array[:, clients]) for array in (row_index, n, rate, rate_per_row))
        buffers = (v.new_zeros(shape).numpy() for shape in buffer_shapes)  # PyTorch aligns memory to cache lines
        compile_kernel()(v.numpy()[clients], *pool_arrays, *steps, *client_arrays, link, *buffers)

    compile_kernel()  # before threads start
    map_client_ranges(run_clients, len(v))


@lru_cache(maxsize=1)
def has_wide_registers() -> bool:
    """Whether the processor's registers hold twenty sums and their operands."""
    from numba.core.codegen import get_host_cpu_features

    return "+avx512f" in get_host_cpu_features().split(",")


@lru_cache(maxsize=1)
def compile_primitives() -> tuple[Callable, Callable, Callable, Callable]:
    """The parts of a kernel: the compiler of functions, a faster one of functions that Python does not call, an
    intrinsic that requests wide vectors, and the scores of four rows."""
    from numba import njit, types
    from numba.extending import intrinsic

    fast = partial(njit, fastmath=FASTMATH_FLAGS, nogil=True, error_model="numpy")
    inner = fast(no_cpython_wrapper=True, no_cfunc_wrapper=True)

    def wide_intrinsic(typing):  # type: ignore[no-untyped-def]
        """Use vectors as wide as the processor's in the calling function: by default LLVM takes half of 512 bits.
        The function is not inlined, so that its code is generated once."""

        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            attributes = builder.function.attributes
            if isinstance(attributes, set):  # its own `add` accepts only a few names
                set.add(attributes, '"prefer-vector-width"="512"')
            attributes.add("noinline")
            return context.get_dummy_value()

        return types.void(), generate

    use_wide_vectors: Callable = intrinsic(wide_intrinsic)

    @inner
    def put_scores(z, k, r, a0, a1, a2, a3, bias):  # type: ignore[no-untyped-def]
        z[k, r] = a0 + bias
        z[k, r + 1] = a1 + bias
        z[k, r + 2] = a2 + bias
        z[k, r + 3] = a3 + bias

    @inner
    def score(W, b, x, i0, i1, i2, i3, r, z):  # type: ignore[no-untyped-def]
        """z[k, r + j] = x_j'W_k + b_k for four rows j."""
        use_wide_vectors()
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
            put_scores(z, k, r, a00, a01, a02, a03, b[k])
            put_scores(z, k + 1, r, a10, a11, a12, a13, b[k + 1])
            put_scores(z, k + 2, r, a20, a21, a22, a23, b[k + 2])
            put_scores(z, k + 3, r, a30, a31, a32, a33, b[k + 3])
            put_scores(z, k + 4, r, a40, a41, a42, a43, b[k + 4])
            k += 5
        while k < K:
            a0 = a1 = a2 = a3 = zero
            for f in range(F):
                w = W[k, f]
                a0 += w * x[i0, f]
                a1 += w * x[i1, f]
                a2 += w * x[i2, f]
                a3 += w * x[i3, f]
            put_scores(z, k, r, a0, a1, a2, a3, b[k])
            k += 1

    return fast(), inner, use_wide_vectors, score


@lru_cache(maxsize=1)
def compile_kernel() -> Callable:
    """The compiled function; the first call with new types of arguments generates code for them.

    Slices, `min` and allocations are avoided: they make compilation slower.
    """
    from llvmlite.ir import Constant, FunctionType, IntType, VoidType
    from numba import types
    from numba.extending import intrinsic

    fast, inner, use_wide_vectors, score = compile_primitives()

    def prefetch_intrinsic(typing, address):  # type: ignore[no-untyped-def]
        """Bring the memory at an address into the processor's second-level cache without waiting for it."""

        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            reading, second_cache, data = (Constant(IntType(32), number) for number in (0, 2, 1))
            pointer = builder.inttoptr(arguments[0], IntType(8).as_pointer())
            prefetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], PREFETCH)
            builder.call(prefetch, [pointer, reading, second_cache, data])
            return context.get_dummy_value()

        return types.void(address), generate

    PREFETCH = FunctionType(VoidType(), [IntType(8).as_pointer(), *[IntType(32)] * 3])
    prefetch: Callable = intrinsic(prefetch_intrinsic)

    @inner
    def prefetch_rows(x, index, first, last):  # type: ignore[no-untyped-def]
        """Prefetch the rows x[index[first : last]]."""
        length = x.shape[1] * x.itemsize
        for r in range(first, last if last < len(index) else len(index)):
            start = x.ctypes.data + index[r] * length
            for offset in range(0, length, CACHE_LINE_BYTES):
                prefetch(start + offset)

    def exp2_intrinsic(typing, n):  # type: ignore[no-untyped-def]
        """2**n for an integer n that is an exponent of a normal number."""

        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            word = IntType(signature.args[0].bitwidth)
            digits, zero = (23, 127) if word.width == 32 else (52, 1023)
            power = builder.add(builder.fptosi(arguments[0], word), Constant(word, zero))
            return builder.bitcast(builder.shl(power, Constant(word, digits)), arguments[0].type)

        return n(n), generate

    power_of_two: Callable = intrinsic(exp2_intrinsic)

    @inner
    def softmax(z, top, total, g):  # type: ignore[no-untyped-def]
        """Replace scores z [K, rows] by g times probabilities, many rows at a time, where `exp` would take one."""
        use_wide_vectors()
        number = z.dtype.type
        least = number(MIN_EXPONENT)
        for r in range(len(top)):
            top[r] = z[0, r]
            total[r] = number(0)
        for k in range(1, len(z)):
            for r in range(len(top)):
                top[r] = z[k, r] if z[k, r] > top[r] else top[r]
        for k in range(len(z)):
            for r in range(len(top)):
                x = z[k, r] - top[r]
                x = least if x < least else x  # nan stays nan
                n = np.floor((x if x > least else least) * number(1 / LOG_2) + number(0.5))
                x -= n * number(LOG_2)
                value = number(EXP_TAYLOR[13])
                for power in range(12, -1, -1):
                    value = value * x + number(EXP_TAYLOR[power])
                value *= power_of_two(n)
                z[k, r] = value
                total[r] += value
        for r in range(len(top)):
            total[r] = g / total[r]
        for k in range(len(z)):
            for r in range(len(top)):
                z[k, r] *= total[r]

    @inner
    def residual(z, softmax_buffer, y, index, m, g, link):  # type: ignore[no-untyped-def]
        """Replace the scores of m rows by g times the loss's derivatives there, and those of padding by 0."""
        unit = z.dtype.type(1)
        if link == SOFTMAX:
            softmax(z, softmax_buffer[0], softmax_buffer[1], g)
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
    def load_residuals(z, k, r):  # type: ignore[no-untyped-def]
        return z[k, r], z[k, r + 1], z[k, r + 2], z[k, r + 3]

    @inner
    def combine(residuals, x0, x1, x2, x3):  # type: ignore[no-untyped-def]
        return residuals[0] * x0 + residuals[1] * x1 + residuals[2] * x2 + residuals[3] * x3

    @inner
    def descend(W, x, i0, i1, i2, i3, r, z):  # type: ignore[no-untyped-def]
        """W_k <- W_k - sum_j z[k, r + j] x_j for four rows j."""
        use_wide_vectors()
        K, F = len(W), W.shape[1]
        k = 0
        while k + 5 <= K:
            a0 = load_residuals(z, k, r)
            a1 = load_residuals(z, k + 1, r)
            a2 = load_residuals(z, k + 2, r)
            a3 = load_residuals(z, k + 3, r)
            a4 = load_residuals(z, k + 4, r)
            for f in range(F):
                x0 = x[i0, f]
                x1 = x[i1, f]
                x2 = x[i2, f]
                x3 = x[i3, f]
                W[k, f] -= combine(a0, x0, x1, x2, x3)
                W[k + 1, f] -= combine(a1, x0, x1, x2, x3)
                W[k + 2, f] -= combine(a2, x0, x1, x2, x3)
                W[k + 3, f] -= combine(a3, x0, x1, x2, x3)
                W[k + 4, f] -= combine(a4, x0, x1, x2, x3)
            k += 5
        while k < K:
            a0 = load_residuals(z, k, r)
            for f in range(F):
                W[k, f] -= combine(a0, x[i0, f], x[i1, f], x[i2, f], x[i3, f])
            k += 1

    @fast
    def run_steps(  # type: ignore[no-untyped-def]
        v, x, y, row_index, n, rate, rate_per_row, start, decay, offset, link, W, b, z, softmax_buffer, decays, offsets
    ):
        """All steps of all clients; W, b, z, softmax_buffer, decays and offsets are working memory."""
        use_wide_vectors()
        K, F = len(W), W.shape[1]
        zero = v.dtype.type(0)
        unit = v.dtype.type(1)
        for c in range(len(v)):
            start_row = c if len(start) > 1 else 0
            for f in range(F):
                for k in range(K):
                    W[k, f] = start[start_row, f * K + k]
            for j in range(F * K, v.shape[1]):
                b[j - F * K] = start[start_row, j]
            decay_row = c if len(decay) > 1 else 0
            offset_row = c if len(offset) > 1 else 0
            for k in range(len(decays)):  # per coefficient, the intercept last
                for f in range(F + 1):
                    j = f * K + k
                    if j < v.shape[1]:
                        decays[k, f] = decay[decay_row, j if decay.shape[1] > 1 else 0]
                        offsets[k, f] = offset[offset_row, j] if offset.shape[1] > 0 else zero
            for s in range(len(row_index)):
                eta = rate[s, c]
                m = n[s, c]
                if eta == zero:
                    continue
                next_step = s + 1 if s + 1 < len(row_index) else 0
                next_client = c if next_step > 0 else c + 1
                next_rows = (
                    row_index[next_step, next_client, : n[next_step, next_client]]
                    if next_client < len(v)
                    else row_index[s, c, :0]
                )
                for r in range(0, m, 4):
                    i0 = row_index[s, c, r]
                    i1 = row_index[s, c, r + 1 if r + 1 < m else r]
                    i2 = row_index[s, c, r + 2 if r + 2 < m else r]
                    i3 = row_index[s, c, r + 3 if r + 3 < m else r]
                    prefetch_rows(x, next_rows, r, r + 2)
                    score(W, b, x, i0, i1, i2, i3, r, z)
                residual(z, softmax_buffer, y, row_index[s, c], m, rate_per_row[s, c], link)
                if len(decays) > 0:
                    for k in range(K):
                        for f in range(F):
                            W[k, f] = (unit - eta * decays[k, f]) * W[k, f] + eta * offsets[k, f]
                        b[k] = (unit - eta * decays[k, F]) * b[k] + eta * offsets[k, F]
                elif decay[decay_row, 0] != zero:
                    factor = unit - eta * decay[decay_row, 0]
                    for k in range(K):
                        for f in range(F):
                            W[k, f] *= factor
                        b[k] *= factor
                for r in range(0, m, 4):
                    i0 = row_index[s, c, r]
                    i1 = row_index[s, c, r + 1 if r + 1 < m else r]
                    i2 = row_index[s, c, r + 2 if r + 2 < m else r]
                    i3 = row_index[s, c, r + 3 if r + 3 < m else r]
                    prefetch_rows(x, next_rows, r + 2, r + 4)
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

    return run_steps
