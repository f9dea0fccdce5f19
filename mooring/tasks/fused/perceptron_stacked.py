"""The gradient of a cohort of perceptrons, written out: linear layers, with anything without parameters between.

It equals what vmap and autograd give for any network, and is faster for this common one: each layer's gradient is
computed straight into its columns of the matrix [C, d], where autograd computes and copies it twice. A step of local
SGD does not need the gradient at all: each layer's product is added to its parameters.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mooring.core.sgd_step import StepTerms


def is_perceptron(module: nn.Module) -> bool:
    """Whether the module is a Sequential whose layers with parameters are all plain linear ones, none used twice."""
    if not isinstance(module, nn.Sequential):
        return False
    linear = [layer for layer in module if type(layer) is nn.Linear]
    parameters = {id(p) for layer in linear for p in (layer.weight, layer.bias) if p is not None}
    return {id(p) for p in module.parameters()} == parameters and len(linear) == len(set(map(id, linear)))


def named_layers(module: nn.Sequential) -> list[tuple[str, nn.Module]]:
    """The layers in order with their names; a layer that is used twice is listed twice."""
    return [(name, layer) for name, layer in module.named_modules(remove_duplicate=False) if name and "." not in name]


def perceptron_grad(
    module: nn.Sequential,
    layers: dict[str, Tensor],
    x: Tensor,
    loss: Callable[[Tensor], Tensor],
    out: dict[str, Tensor],
) -> None:
    """Fill `out` with the gradient of loss(predictions [C, B, ...]) at the parameters `layers`.

    Both have one tensor [C, ...] per parameter, by name; x is [C, B, ...].
    """

    def fill(name: str, gradient: Tensor, seen: Tensor) -> None:
        torch.bmm(gradient.mT, seen, out=out[f"{name}.weight"])
        if f"{name}.bias" in out:
            torch.sum(gradient, 1, out=out[f"{name}.bias"])

    backpropagate(module, layers, x, lambda output: gradient_at(loss, output), fill)


def perceptron_step(
    module: nn.Sequential,
    layers: dict[str, Tensor],
    x: Tensor,
    loss_gradient: Callable[[Tensor], Tensor],
    terms: StepTerms,
    ridge: float,
    slices: dict[str, slice],
) -> None:
    """One step of local SGD on the parameters `layers`, which are views of the columns `slices` of v [C, d].

    loss_gradient(predictions) is the gradient of the loss there, times the step's rate.
    """

    def step_layer(name: str, gradient: Tensor, seen: Tensor) -> None:
        parameter, columns = layers[f"{name}.weight"], slices[f"{name}.weight"]
        flat = parameter.flatten(1)
        parameter.baddbmm_(gradient.mT, seen, beta=terms.shrink(flat, ridge, columns), alpha=-1)
        terms.add(flat, columns)
        if f"{name}.bias" in layers:
            parameter, columns = layers[f"{name}.bias"], slices[f"{name}.bias"]
            parameter.mul_(terms.shrink(parameter, ridge, columns)).sub_(gradient.sum(1))
            terms.add(parameter, columns)

    backpropagate(module, layers, x, loss_gradient, step_layer)


def backpropagate(
    module: nn.Sequential,
    layers: dict[str, Tensor],
    x: Tensor,
    loss_gradient: Callable[[Tensor], Tensor],
    on_layer: Callable[[str, Tensor, Tensor], None],
) -> None:
    """Run x [C, B, ...] forward, then loss_gradient(predictions) backward.

    on_layer(name, gradient at its output, its inputs) is called for every linear layer, from the last to the first, and
    may change the layer's parameters.
    """
    lead = x.shape[:2]
    pending: list[Callable[[Tensor], Tensor]] = []
    for name, layer in named_layers(module):
        if isinstance(layer, nn.Linear):
            x, step_back = _linear(name, layers, x, on_layer, first=not pending)
        else:
            x, step_back = _free(layer, x, lead)
        if pending or isinstance(layer, nn.Linear):  # layers before the first linear one have no parameters
            pending.append(step_back)
    gradient = loss_gradient(x)
    while pending:
        gradient = pending.pop()(gradient)


def gradient_at(function: Callable[[Tensor], Tensor], point: Tensor) -> Tensor:
    """The gradient of a function of one tensor."""
    leaf = point.detach().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(function(leaf), leaf)[0]


def _linear(
    name: str, layers: dict[str, Tensor], x: Tensor, on_layer: Callable[[str, Tensor, Tensor], None], first: bool
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """A linear layer's output, and a function from the gradient there to the one at its inputs."""
    weight, bias = layers[f"{name}.weight"], layers.get(f"{name}.bias")

    def step_back(gradient: Tensor) -> Tensor:
        input_gradient = gradient if first else gradient @ weight
        on_layer(name, gradient, x)
        return input_gradient

    return (x @ weight.mT if bias is None else torch.baddbmm(bias[:, None], x, weight.mT)), step_back


def _free(layer: nn.Module, x: Tensor, lead: torch.Size) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The same for a layer without parameters, which gets all clients' rows as one batch."""
    if type(layer) is nn.ReLU:
        y = torch.relu(x)
        return y, lambda gradient: torch.ops.aten.threshold_backward(gradient, y, 0)
    leaf = x.flatten(0, 1).detach().requires_grad_()
    with torch.enable_grad():
        z = layer(leaf.clone() if getattr(layer, "inplace", False) else leaf)

    def step_back(gradient: Tensor) -> Tensor:
        return torch.autograd.grad(z, leaf, gradient.flatten(0, 1))[0].unflatten(0, lead)

    return z.detach().unflatten(0, lead), step_back
