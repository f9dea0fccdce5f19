"""Local SGD of a large perceptron by compiled steps: `perceptron_per_client.py` without calls between products.

A step of such a network takes some hundred microseconds of arithmetic, and sixteen calls of PyTorch with Python between
them a fifth as much again. Here a client's stay is one compiled call. Products of matrices are still those of the BLAS
that PyTorch brings and uses itself, found by its Fortran name; where PyTorch brings none, there are no compiled steps.
But BLAS copies a layer's matrix before it multiplies few rows with it: where that counts, scores are summed here.

A client's parameters are one piece of memory for all its steps and lie there as in the model's vector, a layer's bias
behind its matrix [out, in]: these products are as fast as those of turned matrices, and nothing has to be turned.

For layers with nothing or ReLU between them and softmax at the end. Each client is worked on by one thread, in one
order, so that its numbers depend on nobody else's and on no number of threads.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mooring.core.cohort import Rows
from mooring.core.sgd_step import MixtureUpdate, Pull, constant_step_terms
from mooring.core.threads import map_threads
from mooring.tasks.fused.linear_numba import compile_primitives, has_wide_registers
from mooring.tasks.fused.per_client import client_rows
from mooring.tasks.fused.perceptron_per_client import FREE, PLAIN, RELU, Perceptron

LONG, FEW = 300, 32  # inputs from which on, and outputs up to which, scores are faster without BLAS
MANY = 64  # rows up to which they are
AT_ONCE = 40  # outputs whose parameters stay in the cache while all rows meet them
PRODUCTS = {torch.float32: "sgemm_", torch.float64: "dgemm_"}


@lru_cache(maxsize=2)
def find_matrix_product(dtype: torch.dtype) -> int | None:
    """Where PyTorch's product of matrices lies in memory; None where it cannot be found."""
    for path in Path(torch.__file__).parent.glob("lib/libtorch_cpu.*"):
        try:
            return ctypes.cast(getattr(ctypes.CDLL(str(path)), PRODUCTS[dtype]), ctypes.c_void_p).value
        except (OSError, AttributeError, KeyError):
            continue
    return None


def can_compile(net: Perceptron, dtype: torch.dtype) -> bool:
    """Whether there are compiled steps for such a network, numba being installed."""
    kinds = [stage.kind for stage in net.stages]
    if sys.byteorder != "little":  # see add_product
        return False
    plain = net.classifies and not net.before and FREE not in kinds and kinds[-1] is PLAIN
    return plain and dtype in PRODUCTS and find_matrix_product(dtype) is not None


def can_read(rows: Rows) -> bool:
    """Whether rows lie as compiled steps read them."""
    return rows.x.ndim == 2 and rows.x.is_contiguous() and rows.y.is_contiguous()


def by_hand(inputs: int, outputs: int) -> bool:
    """Whether a layer's scores are summed here: BLAS first copies its matrix, which few rows do not make up for."""
    return has_wide_registers() and (inputs >= LONG or outputs <= FEW)


class Workplace:
    """A thread's memory for steps on at most so many rows."""

    def __init__(self, net: Perceptron, rows: int):
        rows = (rows + 3) // 4 * 4
        self.like, self.rows = net.stages[0].layer.weight, rows
        begins = np.array([net.places[f"{stage.name}.weight"].start for stage in net.stages])
        self.inputs = np.array([stage.layer.in_features for stage in net.stages])
        self.outputs = np.array([stage.layer.out_features for stage in net.stages])
        biases = np.array([stage.bias * stage.layer.out_features for stage in net.stages])
        bent = np.array([stage.kind is RELU for stage in net.stages])
        at = rows * (np.cumsum(self.inputs) - self.inputs)  # of what goes into each layer
        direct = np.array([by_hand(*pair) for pair in zip(self.inputs, self.outputs)])
        buffers = np.zeros(6, np.int64), self.like.new_zeros(2).numpy(), np.frombuffer(b"NT", np.uint8).copy()
        nought = self.like.new_zeros(AT_ONCE).numpy()
        self.shape = (begins, self.inputs, self.outputs, biases, bent, at, *buffers, direct, nought)

    def room(self, width: int) -> np.ndarray:
        return self.like.new_zeros(self.rows * width).numpy()

    def passing(self) -> tuple[np.ndarray, ...]:
        """What goes into each layer; scores; slopes behind and before a layer."""
        widest = int(max(self.inputs.max(), self.outputs.max()))
        return self.room(int(self.inputs.sum())), self.room(int(self.outputs[-1])), self.room(widest), self.room(widest)


def side_by_side_parts(work: Callable[[int, int], None], clients: int) -> None:
    """work(first, last) on as many parts of the clients as there are threads."""
    ends = np.linspace(0, clients, min(torch.get_num_threads(), max(clients, 1)) + 1).astype(int).tolist()
    map_threads(lambda part: work(*part), list(pairwise(ends)))


def stay(
    net: Perceptron,
    v: Tensor,
    begin: Tensor,
    rows: Rows,
    place: np.ndarray,
    n: np.ndarray,
    rate: np.ndarray,
    pull: Pull | None,
    shift: Tensor | None,
    *,
    ridge: float,
) -> None:
    """Put into v [C, d] where the steps of every client end that begins at its row of `begin`, [C, d] or [1, d]."""
    held, towards = constant_step_terms(v, pull, shift, ridge)
    starts, helds, goals = client_rows(begin, len(v)), client_rows(held, len(v)), client_rows(towards, len(v))
    x, y = rows.x.numpy(), rows.y.numpy()
    places, heights, rates = (np.ascontiguousarray(array.swapaxes(0, 1)) for array in (place, n, rate))
    take = kernels(v.dtype)[0]

    def part(first: int, last: int) -> None:
        shop, mine = Workplace(net, place.shape[2]), v.new_empty(v.shape[1])
        memory = shop.passing()
        for c in range(first, last):
            mine.copy_(starts[c])
            alike = len(helds[c]) == 1  # one number holds all coefficients
            apart = (vector.contiguous().numpy() for vector in (helds[c][: 0 if alike else None], goals[c]))
            steps = x, y, places[c], heights[c], rates[c]
            take(mine.numpy(), *steps, float(helds[c]) if alike else 0.0, *apart, shop.shape, *memory)
            v[c].copy_(mine)

    side_by_side_parts(part, len(v))


def mix(
    net: Perceptron,
    w: Tensor,
    v: Tensor,
    alpha: Tensor,
    begin: tuple[Tensor, Tensor],
    rows: Rows,
    place: np.ndarray,
    n: np.ndarray,
    rate: np.ndarray,
    felt: MixtureUpdate,
) -> None:
    """Put into w, v [C, d] and alpha [C] where every client's steps of a model and a mixture end, from `begin`; the
    mixture moves along the rows of the steps themselves."""
    commons, owns = client_rows(begin[0], len(v)), client_rows(begin[1], len(v))
    x, y = rows.x.numpy(), rows.y.numpy()
    places, heights, rates = (np.ascontiguousarray(array.swapaxes(0, 1)) for array in (place, n, rate))
    moves, weights = np.array(felt.steps), alpha.numpy()
    take = kernels(v.dtype)[1]

    def part(first: int, last: int) -> None:
        shop = Workplace(net, place.shape[2])
        common, own, *further = (v.new_empty(v.shape[1]) for _ in range(4))  # further: the mixture and its gradient
        memory = *shop.passing(), *shop.passing(), shop.room(int(shop.outputs[0]))
        for c in range(first, last):
            common.copy_(commons[c])
            own.copy_(owns[c])
            steps = x, y, places[c], heights[c], rates[c], moves
            flat = (model.numpy() for model in (common, own, *further))
            weights[c] = take(*flat, float(weights[c]), felt.pull, felt.by_parts, *steps, shop.shape, *memory)
            w[c].copy_(common)
            v[c].copy_(own)

    side_by_side_parts(part, len(v))


@lru_cache(maxsize=2)
def kernels(dtype: torch.dtype) -> tuple[Callable, Callable]:
    """The compiled steps of a client's model, and of a model and a mixture.

    `net` is a Workplace's shape, `seen` what goes into all layers, [rows, inputs] one after another, from `at` on.
    Loops run over slices from 0 on: numba vectorises no others.
    """
    multiply = ctypes.CFUNCTYPE(None, *[ctypes.c_size_t] * 13)(find_matrix_product(dtype) or 0)
    fast, inner, _, four = compile_primitives()
    size = dtype.itemsize

    @inner
    def add_product(turned, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc, net):  # type: ignore[no-untyped-def]
        """C <- alpha A B + beta C in Fortran's order of memory, all by address; A turned if 1, B if 2.

        Sizes are words of 64 bits, whose lower halves come first: right for a BLAS that reads 32 bits as well.
        """
        _, _, _, _, _, _, ints, reals, letters, _, _ = net
        ints[0] = m
        ints[1] = n
        ints[2] = k
        ints[3] = lda
        ints[4] = ldb
        ints[5] = ldc
        reals[0] = alpha
        reals[1] = beta
        i = ints.ctypes.data
        r = reals.ctypes.data
        t = letters.ctypes.data
        multiply(t + turned % 2, t + turned // 2, i, i + 8, i + 16, r, a, i + 24, b, i + 32, r + size, c, i + 40)

    @inner
    def gather(x, index, m, seen):  # type: ignore[no-untyped-def]
        """Rows of x as what goes into the first layer."""
        width = x.shape[1]
        for r in range(m):
            row = x[index[r]]
            to = seen[r * width : (r + 1) * width]
            for j in range(len(to)):
                to[j] = row[j]

    @inner
    def score(W, layer, m, seen, out, net):  # type: ignore[no-untyped-def]
        """What goes into a layer times its matrix, to the beginning of `out`."""
        begins, inputs, outputs, _, _, at, _, _, _, direct, nought = net
        tall = inputs[layer]
        width = outputs[layer]
        if m > MANY or not direct[layer]:
            a = W.ctypes.data + size * begins[layer]
            b = seen.ctypes.data + size * at[layer]
            add_product(1, width, m, tall, 1.0, a, tall, b, tall, 0.0, out.ctypes.data, width, net)
            return
        matrix = W[begins[layer] : begins[layer] + width * tall].reshape((width, tall))
        rows = seen[at[layer] : at[layer] + m * tall].reshape((m, tall))
        room = (m + 3) // 4 * 4
        turned = out[: room * width].reshape((room, width)).T
        for k in range(0, width, AT_ONCE):
            some = matrix[k : k + AT_ONCE]
            to = turned[k : k + AT_ONCE]
            for r in range(0, m, 4):
                i1 = r + 1 if r + 1 < m else r
                i2 = r + 2 if r + 2 < m else r
                i3 = r + 3 if r + 3 < m else r
                four(some, nought, rows, r, i1, i2, i3, r, to)

    @inner
    def bias_of(W, layer, net):  # type: ignore[no-untyped-def]
        """A layer's bias, a view; empty where it has none."""
        begins, inputs, outputs, biases, _, _, _, _, _, _, _ = net
        begin = begins[layer] + inputs[layer] * outputs[layer]
        return W[begin : begin + biases[layer]]

    @inner
    def bend(W, layer, m, out, net):  # type: ignore[no-untyped-def]
        """From products to what leaves a layer: the bias, and what follows."""
        width = net[2][layer]
        bias = bias_of(W, layer, net)
        zero = out.dtype.type(0)
        for r in range(m):
            row = out[r * width : (r + 1) * width]
            for j in range(len(bias)):
                row[j] += bias[j]
            if net[4][layer]:
                for j in range(len(row)):
                    row[j] = zero if row[j] < zero else row[j]

    @inner
    def forward(W, m, done, seen, out, net):  # type: ignore[no-untyped-def]
        """From what goes into the first layer to the scores `out`; `done` layers' products are there already."""
        last = len(net[0]) - 1
        for layer in range(last + 1):
            to = seen[net[5][layer + 1] :] if layer < last else out
            if layer >= done:
                score(W, layer, m, seen, to, net)
            bend(W, layer, m, to, net)

    @inner
    def residual(out, m, y, index, net):  # type: ignore[no-untyped-def]
        """From scores to the slopes of the rows' losses there."""
        width = net[2][-1]
        for r in range(m):
            row = out[r * width : (r + 1) * width]
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
    def back(W, layer, m, seen, behind, slopes, net):  # type: ignore[no-untyped-def]
        """slopes [m, inputs] before a layer, of those behind it; and before what bends what goes in."""
        begins, inputs, outputs, _, bent, at, _, _, _, _, _ = net
        tall = inputs[layer]
        width = outputs[layer]
        a = W.ctypes.data + size * begins[layer]
        add_product(0, tall, m, width, 1.0, a, tall, behind.ctypes.data, width, 0.0, slopes.ctypes.data, tall, net)
        if bent[layer - 1]:
            zero = slopes.dtype.type(0)
            left = seen[at[layer] : at[layer] + m * tall]
            to = slopes[: m * tall]
            for j in range(len(to)):
                to[j] = zero if left[j] <= zero else to[j]

    @inner
    def descend(W, layer, m, seen, behind, share, beta, net):  # type: ignore[no-untyped-def]
        """A layer's parameters <- beta times themselves - share times slopes behind, turned, times what goes in. Where
        beta is 0, what they were does not matter, whatever it was."""
        begins, inputs, outputs, _, _, at, _, _, _, _, _ = net
        tall = inputs[layer]
        width = outputs[layer]
        a = seen.ctypes.data + size * at[layer]
        c = W.ctypes.data + size * begins[layer]
        add_product(2, tall, width, m, -share, a, tall, behind.ctypes.data, width, beta, c, tall, net)
        bias = bias_of(W, layer, net)
        part = W.dtype.type(share)
        factor = W.dtype.type(beta)
        for j in range(len(bias)):
            bias[j] = factor * bias[j] if factor != 0 else factor
        for r in range(m):
            row = behind[r * width : (r + 1) * width]
            for j in range(len(bias)):
                bias[j] -= part * row[j]

    @fast
    def stay(W, x, y, place, n, rate, held, apart, towards, net, seen, out, here, there):  # type: ignore[no-untyped-def]
        """All steps of a client on its parameters W."""
        begins, inputs, outputs, biases, _, _, _, _, _, _, _ = net
        unit = W.dtype.type(1)
        for s in range(len(place)):
            eta = rate[s]
            m = n[s]
            if eta == 0:
                continue
            gather(x, place[s], m, seen)
            forward(W, m, 0, seen, out, net)
            residual(out, m, y, place[s], net)
            behind = out
            for layer in range(len(begins) - 1, -1, -1):
                slopes = here if layer % 2 else there
                if layer > 0:
                    back(W, layer, m, seen, behind, slopes, net)
                beta = unit - eta * W.dtype.type(held)
                begin = begins[layer]
                end = begin + inputs[layer] * outputs[layer] + biases[layer]
                part = W[begin:end]
                if len(apart) > 0:
                    stiff = apart[begin:end]
                    for j in range(len(part)):
                        part[j] *= unit - eta * stiff[j]
                if len(towards) > 0:
                    goal = towards[begin:end]
                    for j in range(len(part)):
                        part[j] = beta * part[j] + eta * goal[j]
                    beta = unit
                descend(W, layer, m, seen, behind, eta / max(m, 1), beta, net)
                behind = slopes

    @inner
    def walk(own, common, gradient, share):  # type: ignore[no-untyped-def]
        """own <- own - share times the gradient; given back is (own - common)'gradient before, of the same pass."""
        part = own.dtype.type(share)
        slope = own.dtype.type(0)
        for j in range(len(own)):
            slope += (own[j] - common[j]) * gradient[j]
            own[j] -= part * gradient[j]
        return slope

    @inner
    def along_first(own, common, m, apart, behind, net):  # type: ignore[no-untyped-def]
        """(own - common)'gradient of the first layer, by the scores that its matrices make, `apart`."""
        width = net[2][0]
        slope = own.dtype.type(0)
        left = apart[: m * width]
        right = behind[: m * width]
        for j in range(len(left)):
            slope += left[j] * right[j]
        own_bias = bias_of(own, 0, net)
        common_bias = bias_of(common, 0, net)
        for r in range(m):
            row = behind[r * width : (r + 1) * width]
            for j in range(len(own_bias)):
                slope += (own_bias[j] - common_bias[j]) * row[j]
        return slope

    @fast
    def mix(  # type: ignore[no-untyped-def]
        common, own, mixed, gradient, alpha, pull, by_parts, x, y, place, n, rate, moves, net,
        seen, out, here, there, seen_mixed, out_mixed, here_mixed, there_mixed, scored,
    ):  # fmt: skip
        """All steps of a client on its model `common` and on `own`, its part in the mixture, whose last weight is
        given back. As in `alone_perceptron.mixed_client`, but the slope along the mixture is taken from the gradients
        of all layers behind the first: a pass over them costs less than a product with the gap."""
        begins, inputs, outputs, biases, _, at, _, _, _, _, _ = net
        last = len(begins) - 1
        width = outputs[0]
        first = seen[at[1] :] if last > 0 else out
        blend = seen_mixed[at[1] :] if last > 0 else out_mixed
        tail = begins[0] + inputs[0] * width  # the first matrix is mixed by its scores
        commons = common[tail:]
        owns = own[tail:]
        mixture = mixed[tail:]
        for s in range(len(place)):
            eta = rate[s]
            m = n[s]
            if eta == 0:
                continue
            weight = common.dtype.type(alpha)
            for j in range(len(commons)):
                mixture[j] = commons[j] + weight * (owns[j] - commons[j])
            gather(x, place[s], m, seen)
            score(common, 0, m, seen, first, net)
            score(own, 0, m, seen, scored, net)
            row = first[: m * width]
            apart = scored[: m * width]
            to = blend[: m * width]
            for j in range(len(row)):
                apart[j] -= row[j]
                to[j] = row[j] + weight * apart[j]
            share = eta / max(m, 1)

            forward(mixed, m, 1, seen_mixed, out_mixed, net)
            residual(out_mixed, m, y, place[s], net)
            slope = common.dtype.type(0)
            behind = out_mixed
            for layer in range(last, -1, -1):
                slopes = here_mixed if layer % 2 else there_mixed
                if layer > 0:
                    back(mixed, layer, m, seen_mixed, behind, slopes, net)
                if moves[s] and layer > 0:
                    descend(gradient, layer, m, seen_mixed, behind, -1.0, 0.0, net)
                    begin = begins[layer]
                    end = begin + inputs[layer] * outputs[layer] + biases[layer]
                    slope += walk(own[begin:end], common[begin:end], gradient[begin:end], alpha * share)
                elif layer > 0:
                    descend(own, layer, m, seen_mixed, behind, alpha * share, 1.0, net)
                else:
                    if moves[s]:
                        slope += along_first(own, common, m, scored, behind, net)
                    descend(own, layer, m, seen, behind, alpha * share, 1.0, net)
                behind = slopes

            forward(common, m, 1, seen, out, net)
            residual(out, m, y, place[s], net)
            behind = out
            for layer in range(last, -1, -1):
                slopes = here if layer % 2 else there
                if layer > 0:
                    back(common, layer, m, seen, behind, slopes, net)
                descend(common, layer, m, seen, behind, share, 1.0, net)
                behind = slopes
            if moves[s]:
                if by_parts:
                    slope *= alpha * alpha + (1 - alpha) * (1 - alpha)
                alpha = alpha - eta * (slope / max(m, 1) + pull * alpha)
                if alpha < 0:
                    alpha = 0.0
                elif alpha > 1:
                    alpha = 1.0
        return alpha

    return stay, mix
