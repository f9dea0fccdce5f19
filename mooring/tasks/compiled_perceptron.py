"""Local SGD of a large perceptron by compiled steps: what `alone_perceptron.py` does, without calls between products.

A step of such a network takes some hundred microseconds of arithmetic, and sixteen calls of PyTorch with Python between
them a fifth as much again. Here a client's stay is one compiled call. Products of matrices are still those of the BLAS
that PyTorch brings and uses itself, found by its Fortran name; where PyTorch brings none, there are no compiled steps.

For layers with nothing or ReLU between them and softmax at the end. Each client is worked on by one thread, in one
order, so that its numbers depend on nobody else's and on no number of threads.
"""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mooring.core.cohort import Rows
from mooring.core.steps import Felt, hold
from mooring.core.threads import side_by_side
from mooring.tasks.alone import each
from mooring.tasks.alone_perceptron import FREE, PLAIN, RELU, Net, Parameters

FAST = {"reassoc", "contract", "nsz", "arcp"}  # nan and infinity keep their meaning: divergence must show
PRODUCTS = {torch.float32: "sgemm_", torch.float64: "dgemm_"}


@lru_cache(maxsize=2)
def product(dtype: torch.dtype) -> int | None:
    """Where PyTorch's product of matrices lies in memory; None where it cannot be found."""
    for path in Path(torch.__file__).parent.glob("lib/libtorch_cpu.*"):
        try:
            return ctypes.cast(getattr(ctypes.CDLL(str(path)), PRODUCTS[dtype]), ctypes.c_void_p).value
        except (OSError, AttributeError, KeyError):
            continue
    return None


def compiles(net: Net, dtype: torch.dtype) -> bool:
    """Whether there are compiled steps for such a network, numba being installed."""
    kinds = [stage.kind for stage in net.stages]
    if sys.byteorder != "little":  # see add_product
        return False
    plain = net.classifies and not net.before and FREE not in kinds and kinds[-1] is PLAIN
    return plain and dtype in PRODUCTS and product(dtype) is not None


def reads(rows: Rows) -> bool:
    """Whether rows lie as compiled steps read them."""
    return rows.x.ndim == 2 and rows.x.is_contiguous() and rows.y.is_contiguous()


class Workplace:
    """A thread's memory for steps on at most so many rows."""

    def __init__(self, net: Net, rows: int):
        self.like, self.rows = net.stages[0].layer.weight, rows
        self.heights = np.array([stage.height for stage in net.stages])
        self.outputs = np.array([stage.layer.out_features for stage in net.stages])
        inputs = np.array([stage.layer.in_features for stage in net.stages])
        bent = np.array([stage.kind is RELU for stage in net.stages])
        sizes = self.heights * self.outputs
        begins = np.cumsum(sizes) - sizes  # of each layer's parameters
        at = rows * (np.cumsum(self.heights) - self.heights)  # of what goes into each layer
        told = np.zeros(6, np.int64), self.like.new_zeros(2).numpy(), np.frombuffer(b"NT", np.uint8).copy()
        self.shape = (begins, self.heights, inputs, self.outputs, bent, at, *told)

    def room(self, width: int) -> np.ndarray:
        return self.like.new_zeros(self.rows * width).numpy()

    def passing(self) -> tuple[np.ndarray, ...]:
        """What goes into each layer, a 1 at each row's end; scores; slopes behind and before a layer."""
        widest = int(max(self.heights.max(), self.outputs.max()))
        seen = self.like.new_ones(self.rows * int(self.heights.sum())).numpy()
        return seen, self.room(int(self.outputs[-1])), self.room(widest), self.room(widest)


class Turned:
    """Vectors [d] as parameters lie here, turned anew only when another one comes."""

    def __init__(self, net: Net):
        self.net = net
        self.last: Tensor | None = None
        self.found: Parameters | None = None

    def __call__(self, vector: Tensor) -> Tensor:
        """In turned order; nothing of nothing."""
        if not len(vector):
            return vector
        if vector is not self.last:
            self.found, self.last = self.net.load(vector, self.found or self.net.parameters()), vector
        assert self.found is not None
        return self.found.flat


def side_by_side_parts(work: Any, clients: int) -> None:
    """work(first, last) on as many parts of the clients as there are threads."""
    ends = np.linspace(0, clients, min(torch.get_num_threads(), max(clients, 1)) + 1).astype(int).tolist()
    side_by_side(lambda part: work(*part), list(pairwise(ends)))


def stay(
    net: Net,
    v: Tensor,
    begin: Tensor,
    rows: Rows,
    place: np.ndarray,
    n: np.ndarray,
    rate: np.ndarray,
    pull: tuple[Any, Tensor] | None,
    shift: Tensor | None,
    *,
    ridge: float,
) -> None:
    """Put into v [C, d] where the steps of every client end that begins at its row of `begin`, [C, d] or [1, d]."""
    held, towards = hold(v, pull, shift, ridge)
    starts, helds, goals = each(begin, len(v)), each(held, len(v)), each(towards, len(v))
    x, y = rows.x.numpy(), rows.y.numpy()
    places, heights, rates = (np.ascontiguousarray(array.swapaxes(0, 1)) for array in (place, n, rate))
    take = kernels(v.dtype)[0]

    def part(first: int, last: int) -> None:
        shop, mine = Workplace(net, place.shape[2]), net.parameters()
        start, stiff, goal, memory = Turned(net), Turned(net), Turned(net), shop.passing()
        for c in range(first, last):
            mine.flat.copy_(start(starts[c]))
            alike = len(helds[c]) == 1  # one number holds all coefficients
            pulls = float(helds[c]) if alike else 0.0, stiff(helds[c][: 0 if alike else None]), goal(goals[c])
            steps = x, y, places[c], heights[c], rates[c]
            take(mine.flat.numpy(), *steps, pulls[0], *(one.numpy() for one in pulls[1:]), shop.shape, *memory)
            net.store(mine, v[c])

    side_by_side_parts(part, len(v))


def mix(
    net: Net,
    w: Tensor,
    v: Tensor,
    alpha: Tensor,
    begin: tuple[Tensor, Tensor],
    rows: Rows,
    place: np.ndarray,
    n: np.ndarray,
    rate: np.ndarray,
    felt: Felt,
) -> None:
    """Put into w, v [C, d] and alpha [C] where every client's steps of a model and a mixture end, from `begin`; the
    mixture moves along the rows of the steps themselves."""
    commons, owns = each(begin[0], len(v)), each(begin[1], len(v))
    x, y = rows.x.numpy(), rows.y.numpy()
    places, heights, rates = (np.ascontiguousarray(array.swapaxes(0, 1)) for array in (place, n, rate))
    moves, weights = np.array(felt.steps), alpha.numpy()
    take = kernels(v.dtype)[1]

    def part(first: int, last: int) -> None:
        shop, starts = Workplace(net, place.shape[2]), (Turned(net), Turned(net))
        common, own, *further = (net.parameters() for _ in range(4))  # further: the mixture, and how far they are apart
        memory = *shop.passing(), *shop.passing(), shop.room(int(shop.outputs[0]))
        for c in range(first, last):
            common.flat.copy_(starts[0](commons[c]))
            own.flat.copy_(starts[1](owns[c]))
            steps = x, y, places[c], heights[c], rates[c], moves
            flat = (model.flat.numpy() for model in (common, own, *further))
            weights[c] = take(*flat, float(weights[c]), felt.pull, felt.by_parts, *steps, shop.shape, *memory)
            net.store(common, w[c])
            net.store(own, v[c])

    side_by_side_parts(part, len(v))


@lru_cache(maxsize=2)
def kernels(dtype: torch.dtype) -> tuple[Any, Any]:
    """The compiled steps of a client's model, and of a model and a mixture.

    `net` is a Workplace's shape, `seen` what goes into all layers, [rows, height] one after another, from `at` on.
    Loops run over slices from 0 on: numba vectorises no others.
    """
    from numba import njit

    multiply = ctypes.CFUNCTYPE(None, *[ctypes.c_size_t] * 13)(product(dtype) or 0)
    fast = njit(fastmath=FAST, nogil=True, error_model="numpy")
    size = dtype.itemsize

    @fast
    def add_product(turned, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc, net):  # type: ignore[no-untyped-def]
        """C <- alpha A B + beta C in Fortran's order of memory, all by address; A turned if 1, B if 2.

        Sizes are words of 64 bits, whose lower halves come first: right for a BLAS that reads 32 bits as well.
        """
        _, _, _, _, _, _, ints, reals, letters = net
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

    @fast
    def gather(x, index, m, seen, net):  # type: ignore[no-untyped-def]
        """Rows of x as what goes into the first layer."""
        height = net[1][0]
        for r in range(m):
            row = x[index[r]]
            to = seen[r * height : r * height + len(row)]
            for j in range(len(to)):
                to[j] = row[j]

    @fast
    def score(W, layer, m, seen, out, wide, net):  # type: ignore[no-untyped-def]
        """What goes into a layer times its parameters, to the address `out` in rows of `wide`."""
        begins, heights, _, outputs, _, at, _, _, _ = net
        width = outputs[layer]
        height = heights[layer]
        a = W.ctypes.data + size * begins[layer]
        b = seen.ctypes.data + size * at[layer]
        add_product(0, width, m, height, 1.0, a, width, b, height, 0.0, out, wide, net)

    @fast
    def forward(W, m, done, seen, out, net):  # type: ignore[no-untyped-def]
        """From what goes into the first layer to the scores `out`; `done` layers' products are there already."""
        _, heights, _, outputs, bent, at, _, _, _ = net
        zero = out.dtype.type(0)
        last = len(heights) - 1
        for layer in range(last):
            begin = at[layer + 1]
            wide = heights[layer + 1]
            if layer >= done:
                score(W, layer, m, seen, seen.ctypes.data + size * begin, wide, net)
            if bent[layer]:
                for r in range(m):
                    row = seen[begin + r * wide : begin + r * wide + outputs[layer]]
                    for j in range(len(row)):
                        row[j] = zero if row[j] < zero else row[j]
        if last >= done:
            score(W, last, m, seen, out.ctypes.data, outputs[last], net)

    @fast
    def residual(out, m, y, index, net):  # type: ignore[no-untyped-def]
        """From scores to the slopes of the rows' losses there."""
        width = net[3][-1]
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

    @fast
    def back(W, layer, m, seen, behind, slopes, net):  # type: ignore[no-untyped-def]
        """slopes [m, inputs] before a layer, of those behind it; and before what bends what goes in."""
        begins, heights, inputs, outputs, bent, at, _, _, _ = net
        wide = inputs[layer]
        width = outputs[layer]
        a = W.ctypes.data + size * begins[layer]
        add_product(1, wide, m, width, 1.0, a, width, behind.ctypes.data, width, 0.0, slopes.ctypes.data, wide, net)
        if bent[layer - 1]:
            zero = slopes.dtype.type(0)
            for r in range(m):
                begin = at[layer] + r * heights[layer]
                row = seen[begin : begin + wide]
                to = slopes[r * wide : (r + 1) * wide]
                for j in range(len(to)):
                    to[j] = zero if row[j] <= zero else to[j]

    @fast
    def descend(W, layer, m, seen, behind, share, beta, net):  # type: ignore[no-untyped-def]
        """A layer's parameters <- beta times themselves - share times what goes in, turned, times slopes behind."""
        begins, heights, _, outputs, _, at, _, _, _ = net
        width = outputs[layer]
        height = heights[layer]
        b = seen.ctypes.data + size * at[layer]
        c = W.ctypes.data + size * begins[layer]
        add_product(2, width, height, m, -share, behind.ctypes.data, width, b, height, beta, c, width, net)

    @fast
    def stay(W, x, y, place, n, rate, held, apart, towards, net, seen, out, here, there):  # type: ignore[no-untyped-def]
        """All steps of a client on its parameters W."""
        begins, heights, _, outputs, _, _, _, _, _ = net
        one = W.dtype.type(1)
        for s in range(len(place)):
            eta = rate[s]
            m = n[s]
            if eta == 0:
                continue
            gather(x, place[s], m, seen, net)
            forward(W, m, 0, seen, out, net)
            residual(out, m, y, place[s], net)
            behind = out
            for layer in range(len(begins) - 1, -1, -1):
                slopes = here if layer % 2 else there
                if layer > 0:
                    back(W, layer, m, seen, behind, slopes, net)
                beta = one - eta * W.dtype.type(held)
                begin = begins[layer]
                end = begin + heights[layer] * outputs[layer]
                part = W[begin:end]
                if len(apart) > 0:
                    stiff = apart[begin:end]
                    for j in range(len(part)):
                        part[j] *= one - eta * stiff[j]
                if len(towards) > 0:
                    goal = towards[begin:end]
                    for j in range(len(part)):
                        part[j] = beta * part[j] + eta * goal[j]
                    beta = one
                descend(W, layer, m, seen, behind, eta / max(m, 1), beta, net)
                behind = slopes

    @fast
    def mix(  # type: ignore[no-untyped-def]
        common, own, mixed, gap, alpha, pull, by_parts, x, y, place, n, rate, moves, net,
        seen, out, here, there, seen_mixed, out_mixed, here_mixed, there_mixed, scored,
    ):  # fmt: skip
        """All steps of a client on its model `common` and on `own`, its part in the mixture, whose last weight is
        given back. As in `alone_perceptron.mixed_client`."""
        _, heights, _, outputs, _, at, _, _, _ = net
        last = len(heights) - 1
        width = outputs[0]
        wide = heights[1] if last > 0 else width
        first = seen[at[1] :] if last > 0 else out
        blend = seen_mixed[at[1] :] if last > 0 else out_mixed
        rest = heights[0] * width  # the first layer is mixed by its scores
        commons = common[rest:]
        owns = own[rest:]
        mixture = mixed[rest:]
        gaps = gap[rest:]
        for s in range(len(place)):
            eta = rate[s]
            m = n[s]
            if eta == 0:
                continue
            weight = common.dtype.type(alpha)
            for j in range(len(commons)):
                gaps[j] = owns[j] - commons[j]
                mixture[j] = commons[j] + weight * gaps[j]
            gather(x, place[s], m, seen, net)
            score(common, 0, m, seen, first.ctypes.data, wide, net)
            score(own, 0, m, seen, scored.ctypes.data, width, net)
            for r in range(m):
                row = first[r * wide : r * wide + width]
                apart = scored[r * width : (r + 1) * width]
                to = blend[r * wide : r * wide + width]
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
                if moves[s]:
                    along = scored
                    if layer > 0:
                        along = here
                        score(gap, layer, m, seen_mixed, here.ctypes.data, outputs[layer], net)
                    left = along[: m * outputs[layer]]
                    right = behind[: m * outputs[layer]]
                    for j in range(len(left)):
                        slope += left[j] * right[j]
                rows = seen_mixed if layer > 0 else seen
                descend(own, layer, m, rows, behind, alpha * share, 1.0, net)
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
