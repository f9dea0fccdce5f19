"""Compiled local SGD of a large perceptron: `perceptron_per_client.py` without Python calls between matrix products.

A step of such a network takes some hundred microseconds of arithmetic, and sixteen calls of PyTorch with Python between
them add a fifth. Here a client's local update is one compiled call. Matrix products are still computed by the BLAS
library that PyTorch ships and uses, found by its Fortran name; where PyTorch ships none, there are no compiled steps.
But BLAS copies a layer's matrix before it multiplies few rows by it: where that costs time, scores are summed here.

A client's parameters stay in one block of memory for all its steps, in the order of the model's vector: a layer's
matrix [out, in], then its bias. These products are as fast as those of transposed matrices, and nothing is transposed.

For layers with ReLU or nothing between them and softmax at the end. One thread works on each client, in one order, so
that its numbers depend neither on other clients nor on the number of threads.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mooring.core.cohort import Rows
from mooring.core.sgd_step import MixtureUpdate, Pull, constant_step_terms
from mooring.tasks.fused.linear_numba import compile_primitives, has_wide_registers
from mooring.tasks.fused.per_client import client_rows, map_client_ranges
from mooring.tasks.fused.perceptron_per_client import FREE, PLAIN, RELU, Perceptron

MIN_DIRECT_INPUTS, MAX_DIRECT_OUTPUTS = 300, 32  # layers whose scores are faster without BLAS
MAX_DIRECT_ROWS = 64  # for at most so many rows
OUTPUTS_PER_BLOCK = 40  # their parameters stay in the cache while all rows are multiplied by them
MATRIX_PRODUCTS = {torch.float32: "sgemm_", torch.float64: "dgemm_"}


@lru_cache(maxsize=2)
def find_matrix_product(dtype: torch.dtype) -> int | None:
    """The address of PyTorch's matrix product; None where it is not found."""
    for path in Path(torch.__file__).parent.glob("lib/libtorch_cpu.*"):
        try:
            return ctypes.cast(getattr(ctypes.CDLL(str(path)), MATRIX_PRODUCTS[dtype]), ctypes.c_void_p).value
        except (OSError, AttributeError, KeyError):
            continue
    return None


def can_compile(net: Perceptron, dtype: torch.dtype) -> bool:
    """Whether there are compiled steps for such a network where numba is installed."""
    kinds = [stage.kind for stage in net.stages]
    if sys.byteorder != "little":  # see add_product
        return False
    plain = net.classifies and not net.before and FREE not in kinds and kinds[-1] is PLAIN
    return plain and dtype in MATRIX_PRODUCTS and find_matrix_product(dtype) is not None


def can_read(rows: Rows) -> bool:
    """Whether compiled steps can read these rows."""
    return rows.x.ndim == 2 and rows.x.is_contiguous() and rows.y.is_contiguous()


def is_summed_directly(inputs: int, outputs: int) -> bool:
    """Whether scores of a layer are summed here: BLAS first copies its matrix, which costs more for few rows."""
    return has_wide_registers() and (inputs >= MIN_DIRECT_INPUTS or outputs <= MAX_DIRECT_OUTPUTS)


class NetworkLayout(NamedTuple):
    """What kernels read about the layers, and arrays for the arguments of a matrix product."""

    starts: np.ndarray  # where each layer's matrix starts in the vector of parameters
    inputs: np.ndarray
    outputs: np.ndarray
    biases: np.ndarray  # number of biases
    has_relu: np.ndarray
    input_starts: np.ndarray  # where each layer's inputs start in the buffer of all inputs
    direct: np.ndarray  # whether scores are summed without BLAS
    integers: np.ndarray
    scalars: np.ndarray
    letters: np.ndarray
    zeros: np.ndarray


class Workspace:
    """A thread's memory for steps on at most so many rows."""

    def __init__(self, net: Perceptron, rows: int):
        self.weight, self.rows = net.stages[0].layer.weight, (rows + 3) // 4 * 4
        inputs = np.array([stage.layer.in_features for stage in net.stages])
        outputs = np.array([stage.layer.out_features for stage in net.stages])
        self.layout = NetworkLayout(
            starts=np.array([net.slices[f"{stage.name}.weight"].start for stage in net.stages]),
            inputs=inputs,
            outputs=outputs,
            biases=np.array([stage.has_bias * stage.layer.out_features for stage in net.stages]),
            has_relu=np.array([stage.kind is RELU for stage in net.stages]),
            input_starts=self.rows * (np.cumsum(inputs) - inputs),
            direct=np.array([is_summed_directly(*pair) for pair in zip(inputs, outputs)]),
            integers=np.zeros(6, np.int64),
            scalars=self.weight.new_zeros(2).numpy(),
            letters=np.frombuffer(b"NT", np.uint8).copy(),
            zeros=self.weight.new_zeros(OUTPUTS_PER_BLOCK).numpy(),
        )

    def allocate(self, width: int) -> np.ndarray:
        return self.weight.new_zeros(self.rows * width).numpy()

    def pass_buffers(self) -> list[np.ndarray]:
        """Memory for the inputs of all layers, the scores, and two gradients with respect to a layer's scores."""
        inputs, outputs = self.layout.inputs, self.layout.outputs
        widest = max(inputs.max(), outputs.max())
        return [self.allocate(int(width)) for width in (inputs.sum(), outputs[-1], widest, widest)]


def run_local_steps(
    net: Perceptron,
    v: Tensor,
    start: Tensor,
    rows: Rows,
    row_index: np.ndarray,
    n: np.ndarray,
    rate: np.ndarray,
    pull: Pull | None,
    shift: Tensor | None,
    *,
    ridge: float,
) -> None:
    """Write each client's model after its steps into v [C, d], from its row of `start`, [C, d] or [1, d]."""
    decay, offset = constant_step_terms(v, pull, shift, ridge)
    start_rows, decay_rows, offset_rows = (client_rows(values, len(v)) for values in (start, decay, offset))
    x, y = rows.x.numpy(), rows.y.numpy()
    client_index, counts, client_rates = (np.ascontiguousarray(array.swapaxes(0, 1)) for array in (row_index, n, rate))
    run_steps = compile_kernels(v.dtype)[0]

    def run_clients(clients: slice) -> None:
        workspace, model = Workspace(net, row_index.shape[2]), v.new_empty(v.shape[1])
        buffers = workspace.pass_buffers()
        for c in range(clients.start, clients.stop):
            model.copy_(start_rows[c])
            is_constant = len(decay_rows[c]) == 1
            decay_number = float(decay_rows[c]) if is_constant else 0.0
            decay_vector = decay_rows[c][: 0 if is_constant else None]
            terms = (decay_number, decay_vector.contiguous().numpy(), offset_rows[c].contiguous().numpy())
            steps = x, y, client_index[c], counts[c], client_rates[c]
            run_steps(model.numpy(), *steps, *terms, workspace.layout, *buffers)
            v[c].copy_(model)

    map_client_ranges(run_clients, len(v))


def run_mixture_steps(
    net: Perceptron,
    w: Tensor,
    v: Tensor,
    alpha: Tensor,
    start: tuple[Tensor, Tensor],
    rows: Rows,
    row_index: np.ndarray,
    n: np.ndarray,
    rate: np.ndarray,
    update: MixtureUpdate,
) -> None:
    """Write each client's w, v [C, d] and alpha [C] after its steps on a model and a mixture, from `start`.

    The gradient of alpha is taken on the rows of the steps themselves.
    """
    w_rows, v_rows = client_rows(start[0], len(v)), client_rows(start[1], len(v))
    x, y = rows.x.numpy(), rows.y.numpy()
    client_index, counts, client_rates = (np.ascontiguousarray(array.swapaxes(0, 1)) for array in (row_index, n, rate))
    alpha_moves, alphas = np.array(update.steps), alpha.numpy()
    run_mixture = compile_kernels(v.dtype)[1]

    def run_clients(clients: slice) -> None:
        workspace = Workspace(net, row_index.shape[2])
        w_c, v_c, *mixture_and_gradient = (v.new_empty(v.shape[1]) for _ in range(4))
        v_scores = workspace.allocate(int(workspace.layout.outputs[0]))
        buffers = *workspace.pass_buffers(), *workspace.pass_buffers(), v_scores
        for c in range(clients.start, clients.stop):
            w_c.copy_(w_rows[c])
            v_c.copy_(v_rows[c])
            steps = x, y, client_index[c], counts[c], client_rates[c], alpha_moves
            vectors = (vector.numpy() for vector in (w_c, v_c, *mixture_and_gradient))
            moves = float(alphas[c]), update.pull, update.by_parts
            alphas[c] = run_mixture(*vectors, *moves, *steps, workspace.layout, *buffers)
            w[c].copy_(w_c)
            v[c].copy_(v_c)

    map_client_ranges(run_clients, len(v))


@lru_cache(maxsize=2)
def compile_kernels(dtype: torch.dtype) -> tuple[Callable, Callable]:
    """The compiled steps of a client's model, and of a model and a mixture.

    `net` is a NetworkLayout; `seen` has the inputs of all layers, [rows, inputs], one after another. Loops run over
    slices from 0 on: numba vectorizes no others.
    """
    multiply = ctypes.CFUNCTYPE(None, *[ctypes.c_size_t] * 13)(find_matrix_product(dtype) or 0)
    fast, inner, _, score_four_rows = compile_primitives()
    size = dtype.itemsize

    @inner
    def add_product(transposed, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc, net):  # type: ignore[no-untyped-def]
        """C <- alpha A B + beta C in column-major order, all by address; A is transposed if 1, B if 2.

        Sizes are 64-bit little-endian words, so that a BLAS library that reads 32 bits reads the same numbers.
        """
        net.integers[0] = m
        net.integers[1] = n
        net.integers[2] = k
        net.integers[3] = lda
        net.integers[4] = ldb
        net.integers[5] = ldc
        net.scalars[0] = alpha
        net.scalars[1] = beta
        i = net.integers.ctypes.data
        r = net.scalars.ctypes.data
        t = net.letters.ctypes.data
        multiply(
            t + transposed % 2, t + transposed // 2, i, i + 8, i + 16, r, a, i + 24, b, i + 32, r + size, c, i + 40
        )

    @inner
    def gather(x, index, m, seen):  # type: ignore[no-untyped-def]
        """Copy rows of x to the inputs of the first layer."""
        width = x.shape[1]
        for r in range(m):
            row = x[index[r]]
            target = seen[r * width : (r + 1) * width]
            for j in range(len(target)):
                target[j] = row[j]

    @inner
    def score(W, layer, m, seen, out, net):  # type: ignore[no-untyped-def]
        """Write the inputs of a layer times its matrix to the start of `out`."""
        n_inputs = net.inputs[layer]
        n_outputs = net.outputs[layer]
        if m > MAX_DIRECT_ROWS or not net.direct[layer]:
            a = W.ctypes.data + size * net.starts[layer]
            b = seen.ctypes.data + size * net.input_starts[layer]
            add_product(1, n_outputs, m, n_inputs, 1.0, a, n_inputs, b, n_inputs, 0.0, out.ctypes.data, n_outputs, net)
            return
        matrix = W[net.starts[layer] : net.starts[layer] + n_outputs * n_inputs].reshape((n_outputs, n_inputs))
        rows = seen[net.input_starts[layer] : net.input_starts[layer] + m * n_inputs].reshape((m, n_inputs))
        padded_rows = (m + 3) // 4 * 4
        transposed = out[: padded_rows * n_outputs].reshape((padded_rows, n_outputs)).T
        for k in range(0, n_outputs, OUTPUTS_PER_BLOCK):
            block = matrix[k : k + OUTPUTS_PER_BLOCK]
            block_out = transposed[k : k + OUTPUTS_PER_BLOCK]
            for r in range(0, m, 4):
                i1 = r + 1 if r + 1 < m else r
                i2 = r + 2 if r + 2 < m else r
                i3 = r + 3 if r + 3 < m else r
                score_four_rows(block, net.zeros, rows, r, i1, i2, i3, r, block_out)

    @inner
    def bias_of(W, layer, net):  # type: ignore[no-untyped-def]
        """A view of a layer's bias; empty where it has none."""
        start = net.starts[layer] + net.inputs[layer] * net.outputs[layer]
        return W[start : start + net.biases[layer]]

    @inner
    def activate(W, layer, m, out, net):  # type: ignore[no-untyped-def]
        """Add the bias to a layer's products and apply its ReLU."""
        n_outputs = net.outputs[layer]
        bias = bias_of(W, layer, net)
        zero = out.dtype.type(0)
        for r in range(m):
            row = out[r * n_outputs : (r + 1) * n_outputs]
            for j in range(len(bias)):
                row[j] += bias[j]
            if net.has_relu[layer]:
                for j in range(len(row)):
                    row[j] = zero if row[j] < zero else row[j]

    @inner
    def forward(W, m, done, seen, out, net):  # type: ignore[no-untyped-def]
        """Write the scores of the network to `out`; the products of the first `done` layers are computed already."""
        last = len(net.starts) - 1
        for layer in range(last + 1):
            target = seen[net.input_starts[layer + 1] :] if layer < last else out
            if layer >= done:
                score(W, layer, m, seen, target, net)
            activate(W, layer, m, target, net)

    @inner
    def residual(out, m, y, index, net):  # type: ignore[no-untyped-def]
        """Replace scores by the gradients of the rows' losses there."""
        n_outputs = net.outputs[-1]
        for r in range(m):
            row = out[r * n_outputs : (r + 1) * n_outputs]
            top = row[0]
            for j in range(1, len(row)):
                if row[j] > top:
                    top = row[j]
            total = out.dtype.type(0)
            for j in range(len(row)):
                row[j] = np.exp(row[j] - top)
                total += row[j]
            for j in range(len(row)):
                row[j] /= total
            row[y[index[r]]] -= out.dtype.type(1)

    @inner
    def backpropagate(W, layer, m, seen, slopes, slopes_before, net):  # type: ignore[no-untyped-def]
        """Gradients with respect to the scores before a layer from those behind it, through its matrix and the ReLU."""
        n_inputs = net.inputs[layer]
        n_outputs = net.outputs[layer]
        a = W.ctypes.data + size * net.starts[layer]
        add_product(
            0,
            n_inputs,
            m,
            n_outputs,
            1.0,
            a,
            n_inputs,
            slopes.ctypes.data,
            n_outputs,
            0.0,
            slopes_before.ctypes.data,
            n_inputs,
            net,
        )
        if net.has_relu[layer - 1]:
            zero = slopes_before.dtype.type(0)
            inputs_of_layer = seen[net.input_starts[layer] : net.input_starts[layer] + m * n_inputs]
            out = slopes_before[: m * n_inputs]
            for j in range(len(out)):
                out[j] = zero if inputs_of_layer[j] <= zero else out[j]

    @inner
    def descend(W, layer, m, seen, slopes, share, beta, net):  # type: ignore[no-untyped-def]
        """W <- beta W - share slopes'inputs for a layer's parameters; with beta = 0 even nan in W has no effect."""
        n_inputs = net.inputs[layer]
        n_outputs = net.outputs[layer]
        a = seen.ctypes.data + size * net.input_starts[layer]
        c = W.ctypes.data + size * net.starts[layer]
        add_product(
            2, n_inputs, n_outputs, m, -share, a, n_inputs, slopes.ctypes.data, n_outputs, beta, c, n_inputs, net
        )
        bias = bias_of(W, layer, net)
        step = W.dtype.type(share)
        factor = W.dtype.type(beta)
        for j in range(len(bias)):
            bias[j] = factor * bias[j] if factor != 0 else factor
        for r in range(m):
            row = slopes[r * n_outputs : (r + 1) * n_outputs]
            for j in range(len(bias)):
                bias[j] -= step * row[j]

    @fast
    def run_steps(W, x, y, row_index, n, rate, decay, decays, offset, net, seen, out, slopes_a, slopes_b):  # type: ignore[no-untyped-def]
        """All steps of a client on its parameters W."""
        unit = W.dtype.type(1)
        for s in range(len(row_index)):
            eta = rate[s]
            m = n[s]
            if eta == 0:
                continue
            gather(x, row_index[s], m, seen)
            forward(W, m, 0, seen, out, net)
            residual(out, m, y, row_index[s], net)
            slopes = out
            for layer in range(len(net.starts) - 1, -1, -1):
                slopes_before = slopes_a if layer % 2 else slopes_b
                if layer > 0:
                    backpropagate(W, layer, m, seen, slopes, slopes_before, net)
                beta = unit - eta * W.dtype.type(decay)
                start = net.starts[layer]
                end = start + net.inputs[layer] * net.outputs[layer] + net.biases[layer]
                block = W[start:end]
                if len(decays) > 0:
                    block_decay = decays[start:end]
                    for j in range(len(block)):
                        block[j] *= unit - eta * block_decay[j]
                if len(offset) > 0:
                    block_offset = offset[start:end]
                    for j in range(len(block)):
                        block[j] = beta * block[j] + eta * block_offset[j]
                    beta = unit
                descend(W, layer, m, seen, slopes, eta / max(m, 1), beta, net)
                slopes = slopes_before

    @inner
    def step_and_slope(v, w, gradient, share):  # type: ignore[no-untyped-def]
        """v <- v - share times the gradient; returns (v - w)'gradient for v before the step."""
        step = v.dtype.type(share)
        slope = v.dtype.type(0)
        for j in range(len(v)):
            slope += (v[j] - w[j]) * gradient[j]
            v[j] -= step * gradient[j]
        return slope

    @inner
    def first_layer_slope(v, w, m, gap, slopes, net):  # type: ignore[no-untyped-def]
        """(v - w)'gradient of the first layer, from the difference of the scores that v and w give, `gap`."""
        width = net.outputs[0]
        slope = v.dtype.type(0)
        gap_scores = gap[: m * width]
        score_slopes = slopes[: m * width]
        for j in range(len(gap_scores)):
            slope += gap_scores[j] * score_slopes[j]
        v_bias = bias_of(v, 0, net)
        w_bias = bias_of(w, 0, net)
        for r in range(m):
            row = slopes[r * width : (r + 1) * width]
            for j in range(len(v_bias)):
                slope += (v_bias[j] - w_bias[j]) * row[j]
        return slope

    @fast
    def run_mixture(  # type: ignore[no-untyped-def]
        w, v, u, u_gradient, alpha, pull, by_parts, x, y, row_index, n, rate, alpha_moves, net,
        seen, out, slopes_a, slopes_b, seen_mixed, out_mixed, slopes_a_mixed, slopes_b_mixed, v_scores,
    ):  # fmt: skip
        """All steps of a client on its model w and on v, its part in the mixture u; returns the last weight alpha.

        As in `perceptron_per_client.make_mixture_update`, but the derivative with respect to alpha is taken from the
        gradients of all layers after the first: a pass over them costs less than a product with the gap v - w.
        """
        last = len(net.starts) - 1
        width = net.outputs[0]
        w_scores = seen[net.input_starts[1] :] if last > 0 else out
        mixed_scores = seen_mixed[net.input_starts[1] :] if last > 0 else out_mixed
        tail = net.starts[0] + net.inputs[0] * width  # the first layer's matrix is not mixed: its scores are
        w_tail = w[tail:]
        v_tail = v[tail:]
        u_tail = u[tail:]
        for s in range(len(row_index)):
            eta = rate[s]
            m = n[s]
            if eta == 0:
                continue
            alpha_as_dtype = w.dtype.type(alpha)
            for j in range(len(w_tail)):
                u_tail[j] = w_tail[j] + alpha_as_dtype * (v_tail[j] - w_tail[j])
            gather(x, row_index[s], m, seen)
            score(w, 0, m, seen, w_scores, net)
            score(v, 0, m, seen, v_scores, net)
            w_row = w_scores[: m * width]
            gap = v_scores[: m * width]
            mixed_row = mixed_scores[: m * width]
            for j in range(len(w_row)):
                gap[j] -= w_row[j]
                mixed_row[j] = w_row[j] + alpha_as_dtype * gap[j]
            rate_per_row = eta / max(m, 1)

            forward(u, m, 1, seen_mixed, out_mixed, net)
            residual(out_mixed, m, y, row_index[s], net)
            slope = w.dtype.type(0)
            slopes = out_mixed
            for layer in range(last, -1, -1):
                slopes_before = slopes_a_mixed if layer % 2 else slopes_b_mixed
                if layer > 0:
                    backpropagate(u, layer, m, seen_mixed, slopes, slopes_before, net)
                if alpha_moves[s] and layer > 0:
                    descend(u_gradient, layer, m, seen_mixed, slopes, -1.0, 0.0, net)
                    start = net.starts[layer]
                    end = start + net.inputs[layer] * net.outputs[layer] + net.biases[layer]
                    slope += step_and_slope(v[start:end], w[start:end], u_gradient[start:end], alpha * rate_per_row)
                elif layer > 0:
                    descend(v, layer, m, seen_mixed, slopes, alpha * rate_per_row, 1.0, net)
                else:
                    if alpha_moves[s]:
                        slope += first_layer_slope(v, w, m, v_scores, slopes, net)
                    descend(v, layer, m, seen, slopes, alpha * rate_per_row, 1.0, net)
                slopes = slopes_before

            forward(w, m, 1, seen, out, net)
            residual(out, m, y, row_index[s], net)
            slopes = out
            for layer in range(last, -1, -1):
                slopes_before = slopes_a if layer % 2 else slopes_b
                if layer > 0:
                    backpropagate(w, layer, m, seen, slopes, slopes_before, net)
                descend(w, layer, m, seen, slopes, rate_per_row, 1.0, net)
                slopes = slopes_before
            if alpha_moves[s]:
                if by_parts:
                    slope *= alpha * alpha + (1 - alpha) * (1 - alpha)
                alpha = alpha - eta * (slope / max(m, 1) + pull * alpha)
                if alpha < 0:
                    alpha = 0.0
                elif alpha > 1:
                    alpha = 1.0
        return alpha

    return run_steps, run_mixture
