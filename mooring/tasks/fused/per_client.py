"""Local SGD of networks, one client after another: for models that fill a processor's cache by themselves.

Where a client's parameters are large, a stack of clients is read from memory again at every step; a client that takes
all its steps before the next begins has them in the cache. Rows are gathered without padding and without weights, and
a step is added to the parameters straight from its product of matrices. Convolutions are client by client whatever
their size: a stack of them is one with as many groups, which PyTorch works on slower than on one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mooring.core.cohort import Rows
from mooring.core.sgd_step import MixtureUpdate, Pull, constant_step_terms

MIN_PER_CLIENT_BYTES = 1 << 18  # bytes of a model's parameters from which on a client of a perceptron is better alone
Loss = Callable[[Tensor, Tensor], Tensor]  # (predictions [B, ...], y [B]) -> [B]
Labels = Callable[[Tensor], Tensor]  # a client's targets [S, B] as its steps want them
Steps = Iterator[tuple[float, Tensor, Tensor]]  # rate, which rows of the pool [B], their targets


class ClientPull(NamedTuple):
    """What pulls a client's parameters, as one vector: (held) v - towards, next to the slope of the data."""

    held: Tensor  # [1] or [d]
    towards: Tensor  # [0], nothing, or [d]

    def at(self, place: slice, shape: torch.Size) -> tuple[float | Tensor, Tensor | None]:
        """The same for a part of the parameters."""
        held = float(self.held) if len(self.held) == 1 else self.held[place].view(shape)
        return held, self.towards[place].view(shape) if len(self.towards) else None


Rest = tuple[Tensor, Tensor] | None  # rows and targets along which a mixture moves, if they are not the step's
MixedSteps = Iterator[tuple[float, Tensor, Tensor, bool, Rest]]  # the same; whether the mixture moves; along what
ClientUpdate = Callable[
    [Tensor, Tensor, ClientPull, Tensor, Steps], None
]  # (start, where to put the end, hold, pool of rows, steps)


def has_convolution(module: nn.Module) -> bool:
    return any(isinstance(layer, nn.Conv2d) for layer in module.modules())


def keep_labels(y: Tensor) -> Tensor:
    return y


def stay(
    work: ClientUpdate,
    labels: Labels,
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
    steps = steps_on(rows, place, n, rate, labels)
    holds = [ClientPull(*pair) for pair in zip(client_rows(held, len(v)), client_rows(towards, len(v)))]
    if len(held) == len(towards) == 1:
        holds = holds[:1] * len(v)
    for c, (start, pull_terms) in enumerate(zip(client_rows(begin, len(v)), holds)):
        work(start, v[c], pull_terms, rows.x, steps(c))


def mix(
    work: Callable[..., float],
    labels: Labels,
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
    """Put into w, v [C, d] and alpha [C] where every client's steps of a model and a mixture end, from `begin`."""
    steps = steps_on(rows, place, n, rate, labels)
    apart = None if felt.rows is None else steps_on(felt.rows, felt.place, felt.n, felt.n.astype(rate.dtype), labels)
    pool = rows.x if felt.rows is None else felt.rows.x

    def mixed(c: int) -> MixedSteps:
        elsewhere = iter(()) if apart is None else apart(c)
        for step, moves in zip(steps(c), felt.steps):
            if not moves or apart is None:
                yield *step, moves, None
                continue
            there, index, y = next(elsewhere)
            yield *step, there > 0, (index, y)

    for c, (common, own) in enumerate(zip(client_rows(begin[0], len(v)), client_rows(begin[1], len(v)))):
        alpha[c] = work(common, own, w[c], v[c], float(alpha[c]), felt, (rows.x, pool), mixed(c))


def client_rows(values: Tensor, clients: int) -> list[Tensor]:
    """Every client's row of [C, ...]; one and the same object where all are the same."""
    return list(values) if len(values) > 1 and values.stride(0) else [values[0]] * clients


def steps_on(rows: Rows, place: np.ndarray, n: np.ndarray, rate: np.ndarray, labels: Labels) -> Callable[[int], Steps]:
    """A client's steps, by its number; those at a rate of 0 are none."""
    places = torch.from_numpy(np.ascontiguousarray(place.swapaxes(0, 1)))
    heights, rates, widest = n.T.tolist(), rate.T.tolist(), place.shape[2]

    def steps(c: int) -> Steps:
        """Slices and targets are made for many steps at once: each call of PyTorch counts here."""
        here = places[c]
        targets = labels(rows.y.index_select(0, here.flatten()).unflatten(0, here.shape))
        for size, height, index, y in zip(rates[c], heights[c], here.unbind(0), targets.unbind(0)):
            if height < widest:
                index, y = index[:height], y[:height]
            yield size, index, y

    return steps


def shrink_in_place(part: Tensor, rate: float, held: float | Tensor) -> float:
    """The factor of `part` in a step, if it is a number; if not, `part` is multiplied, and 1 is what is left to do."""
    if isinstance(held, float):
        return 1 - rate * held
    part.mul_(1 - rate * held)
    return 1.0


def pool_first(layers: nn.Sequential) -> None:
    """The largest of what ReLU leaves is what ReLU leaves of the largest, slopes included; it has less to do then."""
    for i in range(len(layers) - 1):
        if type(layers[i]) is nn.ReLU and type(layers[i + 1]) is nn.MaxPool2d and not layers[i + 1].return_indices:
            layers[i], layers[i + 1] = layers[i + 1], layers[i]


class FastModule:
    """A copy of a module whose parameters lie in a vector at `places`; those that are `frozen` have no gradient.

    Convolutions have their channels last, which suits PyTorch's pooling better and its convolutions as well.
    """

    def __init__(self, module: nn.Module, places: dict[str, slice], frozen: frozenset[str]):
        self.module = deepcopy(module)
        for layers in self.module.modules():
            if type(layers) is nn.Sequential:
                pool_first(layers)
        named = dict(self.module.named_parameters())
        self.parts = [(named[name], place) for name, place in places.items()]
        self.moving = [(named[name], place) for name, place in places.items() if name not in frozen]
        self.leaves = [part for part, _ in self.moving]
        for part, _ in self.parts:
            if part.ndim == 4:
                part.data = torch.empty(part.shape, dtype=part.dtype, memory_format=torch.channels_last)
        for name in frozen:
            named[name].requires_grad_(False)

    def load(self, vector: Tensor) -> None:
        """Take the parameters of a vector [d]."""
        with torch.no_grad():
            for part, place in self.parts:
                part.copy_(vector[place].view(part.shape))

    def put_gradient(self, loss: Tensor, into: Tensor) -> None:
        """Put the gradient of a loss of the module's output into its places [d]; 0 where frozen."""
        grads = torch.autograd.grad(loss, self.leaves, allow_unused=True)
        into.zero_()
        for grad, (part, place) in zip(grads, self.moving):
            if grad is not None:
                into[place].view(part.shape).copy_(grad)


def make_module_update(
    module: nn.Module, places: dict[str, slice], loss: Loss, frozen: frozenset[str] = frozenset()
) -> ClientUpdate:
    """A client's steps by any module, a copy of it, along the mean of `loss`(predictions, y) [B]; parameters that are
    `frozen` keep their values."""
    own = FastModule(module, places, frozen)
    parts, moving, leaves = own.parts, own.moving, own.leaves

    def work(begin: Tensor, v: Tensor, hold: ClientPull, pool: Tensor, steps: Steps) -> None:
        own.load(begin)
        pulls = [hold.at(place, part.shape) for part, place in moving]
        for rate, index, y in steps:
            if not rate:
                continue
            grads: Sequence[Tensor | None] = [None] * len(moving)
            if len(y):
                with torch.enable_grad():
                    grads = torch.autograd.grad(
                        loss(own.module(pool.index_select(0, index)), y).mean(), leaves, allow_unused=True
                    )
            with torch.no_grad():
                for part, slope, (held, towards) in zip(leaves, grads, pulls):
                    factor = shrink_in_place(part, rate, held)
                    if factor != 1:
                        part.mul_(factor)
                    if towards is not None:
                        part.add_(towards, alpha=rate)
                    if slope is not None:
                        part.sub_(slope, alpha=rate)
        with torch.no_grad():
            for part, place in parts:
                v[place].view(part.shape).copy_(part)

    return work
