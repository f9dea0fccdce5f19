"""Local SGD of networks, one client after another: for models that fill a processor's cache by themselves.

Where a client's parameters are large, a stack of clients is read from memory again at every step; a client that takes
all its steps before the next begins has them in the cache. Rows are gathered without padding and without weights, and
a step is added to the parameters straight from its product of matrices. Convolutions are client by client whatever
their size: a stack of them is one with as many groups, which PyTorch works on slower than on one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mooring.core.cohort import Rows
from mooring.core.steps import hold
from mooring.tasks.perceptron import slope_of, steps_of

LARGE = 1 << 18  # bytes of a model's parameters from which on a client of a perceptron is better alone
RELU: list[nn.Module] = [nn.ReLU()]
Slope = Callable[[Tensor, Tensor], Tensor]  # (predictions [B, ...], y [B]) -> the slope of the sum of their losses
Steps = Iterator[tuple[float, Tensor, Tensor]]  # rate, x [B, ...], y [B]


class Hold(NamedTuple):
    """What pulls a client's parameters, as one vector: (held) v - towards, next to the slope of the data."""

    held: Tensor  # [1] or [d]
    towards: Tensor  # [0], nothing, or [d]

    def at(self, place: slice, shape: torch.Size) -> tuple[float | Tensor, Tensor | None]:
        """The same for a part of the parameters."""
        held = float(self.held) if len(self.held) == 1 else self.held[place].view(shape)
        return held, self.towards[place].view(shape) if len(self.towards) else None


Work = Callable[[Tensor, Hold, Steps], None]
threshold_backward = torch.ops.aten.threshold_backward.grad_input


def convolutional(module: nn.Module) -> bool:
    return any(isinstance(layer, nn.Conv2d) for layer in module.modules())


def stay(
    work: Work,
    v: Tensor,
    rows: Rows,
    place: np.ndarray,
    n: np.ndarray,
    rate: np.ndarray,
    pull: tuple[Any, Tensor] | None,
    shift: Tensor | None,
    *,
    ridge: float,
) -> None:
    """`work(v_c, hold, steps)` for every client: steps are (rate, x, y), of no rows for a client without any."""
    held, towards = hold(v, pull, shift, ridge)
    places = torch.from_numpy(np.ascontiguousarray(place.swapaxes(0, 1)))
    heights, rates, widest = n.T.tolist(), rate.T.tolist(), place.shape[2]

    def steps(c: int) -> Steps:
        """Slices and rows are made for many steps at once: each call of PyTorch counts here."""
        here = places[c]
        targets = rows.y.index_select(0, here.flatten()).view(here.shape)
        for size, height, index, y in zip(rates[c], heights[c], here.unbind(0), targets.unbind(0)):
            if size == 0:
                continue
            if height < widest:
                index, y = index[:height], y[:height]
            yield size, rows.x.index_select(0, index), y

    for c in range(len(v)):
        work(v[c], Hold(held[c if len(held) > 1 else 0], towards[c if len(towards) > 1 else 0]), steps(c))


def perceptron_client(module: nn.Sequential, places: dict[str, slice], slope: Slope) -> Work:
    """A client's steps by a perceptron, slope(predictions, y) being the slope of the sum of losses.

    Matrices are turned to [in, out], which products with few rows prefer, and all that a step makes is written to
    memory that the last step used. Such steps take a few microseconds of arithmetic per call of PyTorch: hence no
    function is called, and nothing allocated, that can be spared.
    """
    layers = steps_of(module)
    first = next(i for i, (_, layer) in enumerate(layers) if isinstance(layer, nn.Linear))
    stages = _stages(layers[first:])
    weights = [layer.weight.new_empty(layer.weight.mT.shape) for _, layer, _ in stages]
    turned = [weight.mT for weight in weights]
    room: dict[int, list[Room]] = {}

    def work(v: Tensor, hold: Hold, steps: Steps) -> None:
        theirs = [v[places[f"{name}.weight"]].view(layer.weight.shape).mT for name, layer, _ in stages]
        for mine, part in zip(weights, theirs):
            mine.copy_(part)
        biases = [None if layer.bias is None else v[places[f"{name}.bias"]] for name, layer, _ in stages]
        of_weights = [_turned(hold.at(places[f"{name}.weight"], layer.weight.shape)) for name, layer, _ in stages]
        of_biases = [
            (0.0, None) if layer.bias is None else hold.at(places[f"{name}.bias"], layer.bias.shape)
            for name, layer, _ in stages
        ]
        for rate, x, y in steps:
            for _, layer in layers[:first]:
                x = layer(x)
            height = len(x)
            if height not in room:
                room[height] = [Room(height, weight) for weight in weights]
            here, seen, undo = room[height], [x], []
            for weight, bias, (_, _, free), own in zip(weights, biases, stages, here):
                x = torch.addmm(bias, x, weight, out=own.out) if bias is not None else torch.mm(x, weight, out=own.out)
                if free is RELU:
                    x.relu_()
                elif free:
                    x, back = _through(free, x)
                    undo.append(back)
                seen.append(x)
            along = slope(x, y)
            for i in range(len(stages) - 1, -1, -1):
                own, free = here[i], stages[i][2]
                if free is RELU:
                    along = threshold_backward(along, seen[i + 1], 0, grad_input=own.kept)
                elif free:
                    along = undo.pop()(along)
                weight, bias, share = weights[i], biases[i], rate / max(height, 1)
                before = torch.mm(along, turned[i], out=here[i - 1].slope) if i else along
                weight.addmm_(seen[i].mT, along, beta=_pulled(weight, rate, *of_weights[i]), alpha=-share)
                if bias is not None:
                    bias.addmv_(along.mT, own.ones, beta=_pulled(bias, rate, *of_biases[i]), alpha=-share)
                along = before
        for mine, part in zip(weights, theirs):
            part.copy_(mine)

    return work


class Room:
    """Memory for what a step makes of one layer."""

    def __init__(self, height: int, weight: Tensor):
        self.out, self.slope, self.kept = (weight.new_empty(height, weight.shape[1]) for _ in range(3))
        self.ones = weight.new_ones(height)


def _stages(layers: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Linear, list[nn.Module]]]:
    """Each linear layer with its name and what without parameters follows it: RELU itself, where it is only that."""
    stages: list[tuple[str, nn.Linear, list[nn.Module]]] = []
    for name, layer in layers:
        if isinstance(layer, nn.Linear):
            stages.append((name, layer, []))
        else:
            stages[-1][2].append(layer)
    return [(name, layer, RELU if [type(f) for f in free] == [nn.ReLU] else free) for name, layer, free in stages]


def _turned(pull: tuple[float | Tensor, Tensor | None]) -> tuple[float | Tensor, Tensor | None]:
    held, towards = pull
    held = held if isinstance(held, float) else held.mT.contiguous()
    return held, None if towards is None else towards.mT.contiguous()


def _pulled(part: Tensor, rate: float, held: float | Tensor, towards: Tensor | None) -> float:
    """Do the pull's share of a step, but for a factor of what `part` is now, which is returned."""
    if towards is None and isinstance(held, float):
        return 1 - rate * held
    part.mul_(1 - rate * held)
    if towards is not None:
        part.add_(towards, alpha=rate)
    return 1.0


def _through(free: list[nn.Module], x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """What layers without parameters make of x, and of the slope behind them the one before."""
    leaf = x.detach().clone().requires_grad_()
    with torch.enable_grad():
        z = leaf
        for layer in free:
            z = layer(z)
    return z.detach(), lambda slope: torch.autograd.grad(z, leaf, slope)[0]


def module_client(module: nn.Module, places: dict[str, slice], loss: Callable[[Tensor, Tensor], Tensor]) -> Work:
    """A client's steps by any module, a copy of it, along the mean of `loss`(predictions, y) [B].

    Convolutions have their channels last, which suits PyTorch's pooling better and its convolutions as well.
    """
    own = deepcopy(module)
    named = dict(own.named_parameters())
    parts = [(named[name], place) for name, place in places.items()]
    leaves = [part for part, _ in parts]
    for part in leaves:
        if part.ndim == 4:
            part.data = torch.empty(part.shape, dtype=part.dtype, memory_format=torch.channels_last)

    def work(v: Tensor, hold: Hold, steps: Steps) -> None:
        with torch.no_grad():
            for part, place in parts:
                part.copy_(v[place].view(part.shape))
        pulls = [hold.at(place, part.shape) for part, place in parts]
        for rate, x, y in steps:
            found: Any = [None] * len(parts)
            if len(y):
                with torch.enable_grad():
                    found = torch.autograd.grad(loss(own(x), y).mean(), leaves, allow_unused=True)
            with torch.no_grad():
                for part, slope, pull in zip(leaves, found, pulls):
                    factor = _pulled(part, rate, *pull)
                    if factor != 1:
                        part.mul_(factor)
                    if slope is not None:
                        part.sub_(slope, alpha=rate)
        with torch.no_grad():
            for part, place in parts:
                v[place].view(part.shape).copy_(part)

    return work


def sum_slope(loss: Callable[[Tensor, Tensor], Tensor], classifies: bool) -> Slope:
    """The slope of the sum of `loss` at predictions; of cross-entropy without autograd."""
    minus: dict[int, Tensor] = {}

    def softmax(output: Tensor, y: Tensor) -> Tensor:
        if len(y) not in minus:
            minus[len(y)] = output.new_full((len(y), 1), -1)
        return torch.softmax(output, -1).scatter_add_(-1, y[:, None], minus[len(y)])

    def any_loss(output: Tensor, y: Tensor) -> Tensor:
        return slope_of(lambda out: loss(out, y).sum(), output) if len(y) else torch.zeros_like(output)

    return softmax if classifies else any_loss
