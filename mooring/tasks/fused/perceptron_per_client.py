"""Local SGD of a large perceptron, client by client: all that a client's steps touch stays in the processor's cache.

Matrices are turned to [in + 1, out], which products with few rows prefer, a layer's bias being the last row; the rows
that go into a layer end with a 1. A layer's step is then one product, added straight to its parameters. Everything
that a step makes is written to memory that the last step used. Such steps take a few microseconds of arithmetic per
call of PyTorch: hence no function is called, and nothing allocated, that can be spared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mooring.core.sgd_step import MixtureUpdate
from mooring.tasks.fused.per_client import ClientPull, ClientUpdate, Loss, MixedSteps, Steps, shrink_in_place
from mooring.tasks.fused.perceptron_stacked import gradient_at, named_layers

Take = Callable[[int, Tensor, Tensor], None]  # (layer, rows before it, turned [in + 1, B]; slopes behind it [B, out])
MIXTURE, APART = "mixture", "apart"  # uses of rooms
PLAIN, RELU, FREE = "plain", "relu", "free"  # what follows a layer
threshold_backward = torch.ops.aten.threshold_backward.grad_input


class LinearStage(NamedTuple):
    """A linear layer and what without parameters follows it."""

    name: str
    layer: nn.Linear
    free: list[nn.Module]

    @property
    def bias(self) -> bool:
        return self.layer.bias is not None

    @property
    def height(self) -> int:
        return self.layer.in_features + self.bias

    @property
    def kind(self) -> str:
        if not self.free:
            return PLAIN
        return RELU if [type(layer) for layer in self.free] == [nn.ReLU] else FREE


class Parameters(NamedTuple):
    """Memory for a client's parameters."""

    flat: Tensor
    layers: list[Tensor]  # [in + 1, out], one after another in `flat`
    turned: list[Tensor]  # the same as [out, in + 1]


class Perceptron:
    """A perceptron whose parameters lie in a vector at `places`, and how its steps are taken."""

    def __init__(self, module: nn.Sequential, places: dict[str, slice], loss: Loss, classifies: bool):
        layers = named_layers(module)
        first = next(i for i, (_, layer) in enumerate(layers) if isinstance(layer, nn.Linear))
        self.before = [layer for _, layer in layers[:first]]
        self.stages: list[LinearStage] = []
        for name, layer in layers[first:]:
            if isinstance(layer, nn.Linear):
                self.stages.append(LinearStage(name, layer, []))
            else:
                self.stages[-1].free.append(layer)
        self.places, self.loss, self.classifies = places, loss, classifies
        self.rooms: dict[object, StepBuffers] = {}

    def quick(self) -> AbstractContextManager[object]:
        """Where no derivative is left to PyTorch, its calls need not prepare for one."""
        plain = self.classifies and all(stage.kind is not FREE for stage in self.stages)
        return torch.inference_mode() if plain else nullcontext()

    def parameters(self) -> Parameters:
        sizes = [stage.height * stage.layer.out_features for stage in self.stages]
        flat = self.stages[0].layer.weight.new_empty(sum(sizes))
        parts = [part.view(stage.height, -1) for part, stage in zip(flat.split(sizes), self.stages)]
        return Parameters(flat, parts, [part.mT for part in parts])

    def load(self, vector: Tensor, into: Parameters) -> Parameters:
        """The vector [d] as these parameters."""
        for target, stage in zip(into.layers, self.stages):
            weight = vector[self.places[f"{stage.name}.weight"]].view(stage.layer.weight.shape)
            target[: stage.layer.in_features].mT.copy_(weight)  # quicker than from a turned view
            if stage.bias:
                target[-1].copy_(vector[self.places[f"{stage.name}.bias"]])
        return into

    def store(self, parameters: Parameters, into: Tensor) -> None:
        """What `load` undoes."""
        for source, stage in zip(parameters.layers, self.stages):
            weight = into[self.places[f"{stage.name}.weight"]].view(stage.layer.weight.shape)
            weight.mT.copy_(source[: stage.layer.in_features])
            if stage.bias:
                into[self.places[f"{stage.name}.bias"]].copy_(source[-1])

    def pulls(self, hold: ClientPull) -> list[tuple[float | Tensor, Tensor | None]]:
        """What holds each layer's parameters, and towards what."""
        held: Sequence[float | Tensor] = [float(hold.held)] * len(self.stages) if len(hold.held) == 1 else []
        held = held or self.load(hold.held, self.parameters()).layers
        if not len(hold.towards):
            return [(factor, None) for factor in held]
        return list(zip(held, self.load(hold.towards, self.parameters()).layers))

    def room(self, height: int, use: str = "") -> StepBuffers:
        """Memory for steps on so many rows; another `use` has memory of its own."""
        if (height, use) not in self.rooms:
            self.rooms[height, use] = StepBuffers(height, self.stages)
        return self.rooms[height, use]

    def gather(self, room: StepBuffers, pool: Tensor, index: Tensor) -> None:
        """Rows of the pool as what goes into the first layer."""
        if not self.before:
            torch.index_select(pool, 0, index, out=room.rows)
            return
        x = pool.index_select(0, index)
        for layer in self.before:
            x = layer(x)
        room.rows.copy_(x)

    def forward(self, room: StepBuffers, weights: list[Tensor], done: int = 0) -> Tensor:
        """The predictions; of the first `done` layers the products are there already."""
        output = room.outs[0]
        for i, (kind, seen, out, wide) in enumerate(room.way):
            if i >= done:
                torch.mm(seen, weights[i], out=out)
            if kind is RELU:
                output = wide.relu_()  # a one stays a one
            elif kind is FREE:
                output, room.undo[i] = through(self.stages[i].free, out)
                if i + 1 < len(self.stages):
                    output = wide[:, : output.shape[1]].copy_(output)
            else:
                output = out
        return output

    def slope(self, room: StepBuffers, output: Tensor, y: Tensor) -> Tensor:
        """Of the sum of losses, at the predictions; y as `labels` made it."""
        if not self.classifies:
            return gradient_at(lambda out: self.loss(out, y).sum(), output) if len(y) else torch.zeros_like(output)
        return torch.softmax(output, -1, out=room.residual).sub_(y)

    def labels(self, y: Tensor) -> Tensor:
        """What a client's targets [S, B] are for `slope`: classes as rows of zeros and a one."""
        if not self.classifies:
            return y
        hot = self.stages[-1].layer.weight.new_zeros(*y.shape, self.stages[-1].layer.out_features)
        return hot.scatter_(-1, y[..., None], 1.0)


class StepBuffers:
    """Memory for what a step on so many rows makes of each layer."""

    def __init__(self, height: int, stages: list[LinearStage]):
        like, last = stages[0].layer.weight, len(stages) - 1
        self.seen = [like.new_ones(height, stage.height) for stage in stages]  # what goes in, the last column being 1
        self.rows = self.seen[0][:, : stages[0].layer.in_features]
        self.gap = like.new_empty(height, stages[0].layer.out_features)  # scores of a mixture's parts, their difference
        self.residual = like.new_empty(height, stages[-1].layer.out_features)
        self.undo: dict[int, Callable[[Tensor], Tensor]] = {}
        self.outs: list[Tensor] = []
        self.way: list[tuple[object, Tensor, Tensor, Tensor]] = []
        self.return_: list[tuple[int, object, Tensor, Tensor, Tensor, Tensor]] = []
        for i, stage in enumerate(stages):
            width = stage.layer.out_features
            out = like.new_empty(height, width)
            if i < last and stage.kind is not FREE:  # straight into the next layer
                out = self.seen[i + 1][:, :width]
            self.outs.append(out)
            self.way.append((stage.kind, self.seen[i], out, self.seen[i + 1] if i < last else out))
            before = like.new_empty(height, stage.height)  # the slopes at what goes in
            narrow = before[:, : stage.layer.in_features]
            self.return_.append((i, stage.kind, self.seen[i], self.seen[i].mT, before, narrow))
        self.return_.reverse()

    def back(self, along: Tensor, turned: list[Tensor], take: Take) -> None:
        """Slopes at the predictions through all layers, whose matrices are `turned` [out, in + 1]: `take`, from the
        last to the first, may change a layer's parameters."""
        behind, output = along, self.outs[-1]
        for i, kind, seen, seen_turned, before, narrow in self.return_:
            if kind is RELU:
                threshold_backward(behind, output, 0, grad_input=behind)
            elif kind is FREE:
                along = self.undo[i](along)
            if i:
                torch.mm(along, turned[i], out=before)
            take(i, seen_turned, along)
            along, behind, output = narrow, before, seen


def through(free: list[nn.Module], x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """What layers without parameters make of x, and of the slope behind them the one before."""
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        z = leaf.clone()  # layers may change it in place
        for layer in free:
            z = layer(z)
    return z.detach(), lambda slope: torch.autograd.grad(z, leaf, slope)[0]


def client(net: Perceptron) -> ClientUpdate:
    """A client's steps. What is the same for all clients, the start or what holds them, is turned once."""
    model, start = net.parameters(), net.parameters()
    weights, turned = model.layers, model.turned
    begun: Tensor | None = None
    holding: ClientPull | None = None
    pulls: list[tuple[float | Tensor, Tensor | None]] = []

    def work(begin: Tensor, v: Tensor, hold: ClientPull, pool: Tensor, steps: Steps) -> None:
        nonlocal begun, holding, pulls
        if begin is not begun:
            net.load(begin, start)
            begun = begin
        if hold is not holding:
            pulls, holding = net.pulls(hold), hold
        model.flat.copy_(start.flat)
        rate, share = 0.0, 0.0

        def take(i: int, seen: Tensor, along: Tensor) -> None:
            weight, (held, towards) = weights[i], pulls[i]
            weight.addmm_(seen, along, beta=shrink_in_place(weight, rate, held), alpha=-share)
            if towards is not None:
                weight.add_(towards, alpha=rate)

        for rate, index, y in steps:
            if not rate:
                continue
            height = index.shape[0]
            room, share = net.room(height), rate / max(height, 1)
            net.gather(room, pool, index)
            room.back(net.slope(room, net.forward(room, weights), y), turned, take)
        net.store(model, v)

    return work


def make_mixture_update(net: Perceptron) -> Callable[..., float]:
    """A client's steps of a model w and of v, its part in the mixture u = alpha v + (1 - alpha) w.

    Mixing scores costs less than mixing parameters, where few rows meet a large layer: the first layer's products with
    v and w are there for their own sakes. By them, and by what the gap v - w makes of each layer's rows, the slope of
    the loss along alpha is known without a gradient at u.
    """
    common, own, mixed, gap, start = (net.parameters() for _ in range(5))
    tail = slice(common.layers[0].numel(), None)
    begun: Tensor | None = None

    def mix(alpha: float) -> None:
        torch.sub(own.flat[tail], common.flat[tail], out=gap.flat[tail])
        torch.add(common.flat[tail], gap.flat[tail], alpha=alpha, out=mixed.flat[tail])

    def first_scores(plain: StepBuffers, room: StepBuffers, alpha: float) -> None:
        """Of the model w and of the mixture, on the rows of `plain`; and of the gap."""
        torch.mm(plain.seen[0], common.layers[0], out=plain.outs[0])
        torch.mm(plain.seen[0], own.layers[0], out=room.gap).sub_(plain.outs[0])
        torch.add(plain.outs[0], room.gap, alpha=alpha, out=room.outs[0])

    def back(plain: StepBuffers, room: StepBuffers, y: Tensor, moves: bool, take: Take) -> float:
        """Through the mixture: the slope of the sum of losses along alpha, if it moves."""
        total = 0.0

        def each(i: int, seen: Tensor, along: Tensor) -> None:
            nonlocal total
            if moves:
                scores = torch.mm(room.seen[i], gap.layers[i]) if i else room.gap
                total += float(torch.mul(scores, along).sum())
            take(i, seen if i else plain.seen[0].mT, along)

        room.back(net.slope(room, net.forward(room, mixed.layers, done=1), y), mixed.turned, each)
        return total

    def work(
        begin: Tensor,
        v0: Tensor,
        w: Tensor,
        v: Tensor,
        alpha: float,
        how: MixtureUpdate,
        pools: tuple[Tensor, Tensor],
        steps: MixedSteps,
    ) -> float:
        nonlocal begun
        if begin is not begun:
            net.load(begin, start)
            begun = begin
        common.flat.copy_(start.flat)
        net.load(v0, own)
        share = 0.0

        def take_own(i: int, seen: Tensor, along: Tensor) -> None:
            own.layers[i].addmm_(seen, along, alpha=-alpha * share)

        def take_common(i: int, seen: Tensor, along: Tensor) -> None:
            common.layers[i].addmm_(seen, along, alpha=-share)

        for rate, index, y, moves, elsewhere in steps:
            if not rate:
                continue
            height = max(index.shape[0], 1)
            plain, room, share = net.room(index.shape[0]), net.room(index.shape[0], MIXTURE), rate / height
            mix(alpha)
            slope = 0.0
            if moves and elsewhere is not None:
                there, other = (net.room(elsewhere[0].shape[0], use) for use in (APART, MIXTURE))
                net.gather(there, pools[1], elsewhere[0])
                first_scores(there, other, alpha)
                slope = back(there, other, elsewhere[1], True, nothing) / elsewhere[0].shape[0]
            net.gather(plain, pools[0], index)
            first_scores(plain, room, alpha)
            felt = back(plain, room, y, moves and elsewhere is None, take_own) / height
            plain.back(net.slope(plain, net.forward(plain, common.layers, done=1), y), common.turned, take_common)
            if moves:
                alpha = how.moved(alpha, rate, felt if elsewhere is None else slope)
        net.store(common, w)
        net.store(own, v)
        return alpha

    return work


def nothing(i: int, seen: Tensor, along: Tensor) -> None:
    """Of a pass whose slopes are all that is wanted."""
