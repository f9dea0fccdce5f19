"""Local SGD of a large perceptron, client by client: all memory of a client's steps stays in the processor's cache.

Matrices are transposed to [in + 1, out], which products with few rows prefer; a layer's bias is the last row, and its
input rows end with a 1. A layer's step is then one product, added straight to its parameters. All intermediate results
are written to memory that the previous step used. Such steps take a few microseconds of arithmetic per call of PyTorch:
hence no function is called, and nothing allocated, that can be avoided.
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

LayerStep = Callable[[int, Tensor, Tensor], None]  # (layer, inputs [in + 1, B], gradients [B, out])
MIXTURE, VALIDATION = "mixture", "validation"  # uses of buffers
PLAIN, RELU, FREE = "plain", "relu", "free"  # what follows a layer
threshold_backward = torch.ops.aten.threshold_backward.grad_input


class LinearStage(NamedTuple):
    """A linear layer and the layers without parameters that follow it."""

    name: str
    layer: nn.Linear
    free: list[nn.Module]

    @property
    def has_bias(self) -> bool:
        return self.layer.bias is not None

    @property
    def n_inputs(self) -> int:
        """Inputs of the layer, with the 1 of its bias."""
        return self.layer.in_features + self.has_bias

    @property
    def kind(self) -> str:
        if not self.free:
            return PLAIN
        return RELU if [type(layer) for layer in self.free] == [nn.ReLU] else FREE


class Parameters(NamedTuple):
    """Memory for a client's parameters."""

    flat: Tensor
    layers: list[Tensor]  # [in + 1, out], one after another in `flat`
    transposed: list[Tensor]  # the same as [out, in + 1]


class Perceptron:
    """A perceptron whose parameters are stored in a vector at `slices`, and the parts of its steps."""

    def __init__(self, module: nn.Sequential, slices: dict[str, slice], loss: Loss, classifies: bool):
        layers = named_layers(module)
        first = next(i for i, (_, layer) in enumerate(layers) if isinstance(layer, nn.Linear))
        self.before = [layer for _, layer in layers[:first]]
        self.stages: list[LinearStage] = []
        for name, layer in layers[first:]:
            if isinstance(layer, nn.Linear):
                self.stages.append(LinearStage(name, layer, []))
            else:
                self.stages[-1].free.append(layer)
        self.slices, self.loss, self.classifies = slices, loss, classifies
        self._buffers: dict[object, StepBuffers] = {}

    def quick(self) -> AbstractContextManager[object]:
        """Inference mode, which is faster, where no derivative is left to PyTorch."""
        plain = self.classifies and all(stage.kind is not FREE for stage in self.stages)
        return torch.inference_mode() if plain else nullcontext()

    def parameters(self) -> Parameters:
        sizes = [stage.n_inputs * stage.layer.out_features for stage in self.stages]
        flat = self.stages[0].layer.weight.new_empty(sum(sizes))
        parts = [part.view(stage.n_inputs, -1) for part, stage in zip(flat.split(sizes), self.stages)]
        return Parameters(flat, parts, [part.mT for part in parts])

    def load(self, vector: Tensor, out: Parameters) -> Parameters:
        """Copy a vector [d] into these parameters."""
        for target, stage in zip(out.layers, self.stages):
            weight = vector[self.slices[f"{stage.name}.weight"]].view(stage.layer.weight.shape)
            target[: stage.layer.in_features].mT.copy_(weight)  # faster than from a transposed view
            if stage.has_bias:
                target[-1].copy_(vector[self.slices[f"{stage.name}.bias"]])
        return out

    def store(self, parameters: Parameters, out: Tensor) -> None:
        """Copy parameters into a vector [d]: the inverse of `load`."""
        for source, stage in zip(parameters.layers, self.stages):
            weight = out[self.slices[f"{stage.name}.weight"]].view(stage.layer.weight.shape)
            weight.mT.copy_(source[: stage.layer.in_features])
            if stage.has_bias:
                out[self.slices[f"{stage.name}.bias"]].copy_(source[-1])

    def layer_pulls(self, client_pull: ClientPull) -> list[tuple[float | Tensor, Tensor | None]]:
        """Decay and offset of each layer's parameters: see `ClientPull`."""
        if len(client_pull.decay) == 1:
            decays: Sequence[float | Tensor] = [float(client_pull.decay)] * len(self.stages)
        else:
            decays = self.load(client_pull.decay, self.parameters()).layers
        if not len(client_pull.offset):
            return [(decay, None) for decay in decays]
        return list(zip(decays, self.load(client_pull.offset, self.parameters()).layers))

    def buffers_for(self, rows: int, use: str = "") -> StepBuffers:
        """Memory for steps on so many rows, separate for each `use`."""
        if (rows, use) not in self._buffers:
            self._buffers[rows, use] = StepBuffers(rows, self.stages)
        return self._buffers[rows, use]

    def gather(self, buffers: StepBuffers, pool: Tensor, index: Tensor) -> None:
        """Write rows of the pool to the inputs of the first layer."""
        if not self.before:
            torch.index_select(pool, 0, index, out=buffers.inputs)
            return
        x = pool.index_select(0, index)
        for layer in self.before:
            x = layer(x)
        buffers.inputs.copy_(x)

    def forward(self, buffers: StepBuffers, weights: list[Tensor], done: int = 0) -> Tensor:
        """The predictions; the products of the first `done` layers are computed already."""
        output = buffers.outs[0]
        for i, (kind, seen, out, wide) in enumerate(buffers.forward_pass):
            if i >= done:
                torch.mm(seen, weights[i], out=out)
            if kind is RELU:
                output = wide.relu_()  # the last column, 1, does not change
            elif kind is FREE:
                output, buffers.undo[i] = apply_free(self.stages[i].free, out)
                if i + 1 < len(self.stages):
                    output = wide[:, : output.shape[1]].copy_(output)
            else:
                output = out
        return output

    def loss_gradient(self, buffers: StepBuffers, output: Tensor, y: Tensor) -> Tensor:
        """The gradient of the sum of losses at the predictions; y as `labels` returns it."""
        if not self.classifies:
            return gradient_at(lambda out: self.loss(out, y).sum(), output) if len(y) else torch.zeros_like(output)
        return torch.softmax(output, -1, out=buffers.residual).sub_(y)

    def labels(self, y: Tensor) -> Tensor:
        """A client's targets [S, B] for `loss_gradient`: classes one-hot."""
        if not self.classifies:
            return y
        hot = self.stages[-1].layer.weight.new_zeros(*y.shape, self.stages[-1].layer.out_features)
        return hot.scatter_(-1, y[..., None], 1.0)


class StepBuffers:
    """Memory for the intermediate results of a step on so many rows."""

    def __init__(self, rows: int, stages: list[LinearStage]):
        weight, last = stages[0].layer.weight, len(stages) - 1
        self.seen = [
            weight.new_ones(rows, stage.n_inputs) for stage in stages
        ]  # inputs of each layer; the last column is 1
        self.inputs = self.seen[0][:, : stages[0].layer.in_features]
        self.gap = weight.new_empty(rows, stages[0].layer.out_features)  # first-layer scores of v minus those of w
        self.residual = weight.new_empty(rows, stages[-1].layer.out_features)
        self.undo: dict[int, Callable[[Tensor], Tensor]] = {}
        self.outs: list[Tensor] = []
        self.forward_pass: list[tuple[object, Tensor, Tensor, Tensor]] = []
        self.backward_pass: list[tuple[int, object, Tensor, Tensor, Tensor, Tensor]] = []
        for i, stage in enumerate(stages):
            width = stage.layer.out_features
            out = weight.new_empty(rows, width)
            if i < last and stage.kind is not FREE:  # written straight to the next layer's inputs
                out = self.seen[i + 1][:, :width]
            self.outs.append(out)
            self.forward_pass.append((stage.kind, self.seen[i], out, self.seen[i + 1] if i < last else out))
            before = weight.new_empty(rows, stage.n_inputs)  # gradients at the inputs
            narrow = before[:, : stage.layer.in_features]
            self.backward_pass.append((i, stage.kind, self.seen[i], self.seen[i].mT, before, narrow))
        self.backward_pass.reverse()

    def backpropagate(self, gradient: Tensor, transposed: list[Tensor], layer_step: LayerStep) -> None:
        """Backpropagate gradients at the predictions through all layers, from the last to the first, with matrices
        `transposed` [out, in + 1]; `layer_step` may change a layer's parameters."""
        behind, output = gradient, self.outs[-1]
        for i, kind, seen, seen_turned, before, narrow in self.backward_pass:
            if kind is RELU:
                threshold_backward(behind, output, 0, grad_input=behind)
            elif kind is FREE:
                gradient = self.undo[i](gradient)
            if i:
                torch.mm(gradient, transposed[i], out=before)
            layer_step(i, seen_turned, gradient)
            gradient, behind, output = narrow, before, seen


def apply_free(free: list[nn.Module], x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The output of layers without parameters at x, and a function that backpropagates a gradient through them."""
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        z = leaf.clone()  # layers may change it in place
        for layer in free:
            z = layer(z)
    return z.detach(), lambda gradient: torch.autograd.grad(z, leaf, gradient)[0]


def make_client_update(net: Perceptron) -> ClientUpdate:
    """A client's steps. A start or a pull that all clients share is transposed once."""
    model, start = net.parameters(), net.parameters()
    weights, transposed = model.layers, model.transposed
    loaded_start: Tensor | None = None
    loaded_pull: ClientPull | None = None
    layer_pulls: list[tuple[float | Tensor, Tensor | None]] = []

    def update_client(client_start: Tensor, v: Tensor, client_pull: ClientPull, pool: Tensor, steps: Steps) -> None:
        nonlocal loaded_start, loaded_pull, layer_pulls
        if client_start is not loaded_start:
            net.load(client_start, start)
            loaded_start = client_start
        if client_pull is not loaded_pull:
            layer_pulls, loaded_pull = net.layer_pulls(client_pull), client_pull
        model.flat.copy_(start.flat)
        rate, share = 0.0, 0.0

        def layer_step(i: int, seen: Tensor, gradient: Tensor) -> None:
            weight, (decay, offset) = weights[i], layer_pulls[i]
            weight.addmm_(seen, gradient, beta=shrink_in_place(weight, rate, decay), alpha=-share)
            if offset is not None:
                weight.add_(offset, alpha=rate)

        for rate, index, y in steps:
            if not rate:
                continue
            rows = index.shape[0]
            buffers, share = net.buffers_for(rows), rate / max(rows, 1)
            net.gather(buffers, pool, index)
            gradient = net.loss_gradient(buffers, net.forward(buffers, weights), y)
            buffers.backpropagate(gradient, transposed, layer_step)
        net.store(model, v)

    return update_client


def make_mixture_update(net: Perceptron) -> Callable[..., float]:
    """A client's steps of a model w and of v, its part in the mixture u = alpha v + (1 - alpha) w.

    For few rows and a large layer, mixing scores costs less than mixing parameters, and the first layer's products with
    v and w are needed anyway. They, and the products of each layer's inputs with the gap v - w, give the derivative of
    the loss with respect to alpha without a gradient at u.
    """
    w_model, v_model, mixture, gap, start = (net.parameters() for _ in range(5))
    tail = slice(w_model.layers[0].numel(), None)
    loaded_start: Tensor | None = None

    def mix_parameters(alpha: float) -> None:
        torch.sub(v_model.flat[tail], w_model.flat[tail], out=gap.flat[tail])
        torch.add(w_model.flat[tail], gap.flat[tail], alpha=alpha, out=mixture.flat[tail])

    def first_scores(w_buffers: StepBuffers, u_buffers: StepBuffers, alpha: float) -> None:
        """First-layer scores of the model w, of the gap and of the mixture, on the rows of `w_buffers`."""
        torch.mm(w_buffers.seen[0], w_model.layers[0], out=w_buffers.outs[0])
        torch.mm(w_buffers.seen[0], v_model.layers[0], out=u_buffers.gap).sub_(w_buffers.outs[0])
        torch.add(w_buffers.outs[0], u_buffers.gap, alpha=alpha, out=u_buffers.outs[0])

    def backpropagate_mixture(
        w_buffers: StepBuffers, u_buffers: StepBuffers, y: Tensor, moves: bool, layer_step: LayerStep
    ) -> float:
        """Backpropagate through the mixture; returns the derivative of the sum of losses by alpha, if alpha moves."""
        total = 0.0

        def add_slope(i: int, seen: Tensor, gradient: Tensor) -> None:
            nonlocal total
            if moves:
                scores = torch.mm(u_buffers.seen[i], gap.layers[i]) if i else u_buffers.gap
                total += float(torch.mul(scores, gradient).sum())
            layer_step(i, seen if i else w_buffers.seen[0].mT, gradient)

        gradient = net.loss_gradient(u_buffers, net.forward(u_buffers, mixture.layers, done=1), y)
        u_buffers.backpropagate(gradient, mixture.transposed, add_slope)
        return total

    def update_client(
        w0: Tensor,
        v0: Tensor,
        w: Tensor,
        v: Tensor,
        alpha: float,
        update: MixtureUpdate,
        pools: tuple[Tensor, Tensor],
        steps: MixedSteps,
    ) -> float:
        nonlocal loaded_start
        if w0 is not loaded_start:
            net.load(w0, start)
            loaded_start = w0
        w_model.flat.copy_(start.flat)
        net.load(v0, v_model)
        share = 0.0

        def step_v(i: int, seen: Tensor, gradient: Tensor) -> None:
            v_model.layers[i].addmm_(seen, gradient, alpha=-alpha * share)

        def step_w(i: int, seen: Tensor, gradient: Tensor) -> None:
            w_model.layers[i].addmm_(seen, gradient, alpha=-share)

        for rate, index, y, moves, validation in steps:
            if not rate:
                continue
            rows = max(index.shape[0], 1)
            share = rate / rows
            w_buffers, u_buffers = (net.buffers_for(index.shape[0], use) for use in ("", MIXTURE))
            mix_parameters(alpha)
            slope = 0.0
            if moves and validation is not None:
                validation_index, targets = validation
                w_validation, u_validation = (
                    net.buffers_for(validation_index.shape[0], use) for use in (VALIDATION, MIXTURE)
                )
                net.gather(w_validation, pools[1], validation_index)
                first_scores(w_validation, u_validation, alpha)
                slope = backpropagate_mixture(w_validation, u_validation, targets, True, no_layer_step)
                slope /= validation_index.shape[0]
            net.gather(w_buffers, pools[0], index)
            first_scores(w_buffers, u_buffers, alpha)
            slope_on_rows = backpropagate_mixture(w_buffers, u_buffers, y, moves and validation is None, step_v) / rows
            gradient = net.loss_gradient(w_buffers, net.forward(w_buffers, w_model.layers, done=1), y)
            w_buffers.backpropagate(gradient, w_model.transposed, step_w)
            if moves:
                alpha = update.updated(alpha, rate, slope_on_rows if validation is None else slope)
        net.store(w_model, w)
        net.store(v_model, v)
        return alpha

    return update_client


def no_layer_step(i: int, seen: Tensor, gradient: Tensor) -> None:
    """Change no parameters: for a pass that only computes the derivative by alpha."""
