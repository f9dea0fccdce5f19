"""The gradient of a cohort of perceptrons, written out: linear layers, with anything without parameters between.

It equals what vmap and autograd give for any network, and is faster for this common one: each layer's gradient is
computed straight into its place in the matrix [C, d], where autograd makes it twice and copies it twice. A step of
local SGD needs not even that: each layer's product is added to its parameters.
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
    """The layers in order with their names; one that stands in two places is there twice."""
    return [(name, layer) for name, layer in module.named_modules(remove_duplicate=False) if name and "." not in name]


def perceptron_grad(
    module: nn.Sequential,
    layers: dict[str, Tensor],
    x: Tensor,
    total: Callable[[Tensor], Tensor],
    out: dict[str, Tensor],
) -> None:
    """Fill `out` with the gradient of total(predictions [C, B, ...]) at the parameters `layers`.

    Both have a [C, ...] per parameter, by name; x is [C, B, ...].
    """

    def fill(name: str, slope: Tensor, seen: Tensor) -> None:
        torch.bmm(slope.mT, seen, out=out[f"{name}.weight"])
        if f"{name}.bias" in out:
            torch.sum(slope, 1, out=out[f"{name}.bias"])

    backpropagate(module, layers, x, lambda output: gradient_at(total, output), fill)


def perceptron_step(
    module: nn.Sequential,
    layers: dict[str, Tensor],
    x: Tensor,
    slope: Callable[[Tensor], Tensor],
    move: StepTerms,
    ridge: float,
    places: dict[str, slice],
) -> None:
    """One step of local SGD on the parameters `layers`, views of v [C, d] that lie there at `places`.

    slope(predictions) is the slope of the loss there, times the step's rate.
    """

    def take(name: str, slope: Tensor, seen: Tensor) -> None:
        part, place = layers[f"{name}.weight"], places[f"{name}.weight"]
        flat = part.flatten(1)
        part.baddbmm_(slope.mT, seen, beta=move.keep(flat, ridge, place), alpha=-1)
        move.add(flat, place)
        if f"{name}.bias" in layers:
            part, place = layers[f"{name}.bias"], places[f"{name}.bias"]
            part.mul_(move.keep(part, ridge, place)).sub_(slope.sum(1))
            move.add(part, place)

    backpropagate(module, layers, x, slope, take)


def backpropagate(
    module: nn.Sequential,
    layers: dict[str, Tensor],
    x: Tensor,
    slope: Callable[[Tensor], Tensor],
    visit: Callable[[str, Tensor, Tensor], None],
) -> None:
    """Run x [C, B, ...] forward, then slope(predictions) backward: visit(name, slope behind, rows before) for every
    linear layer, from the last; a visit may change the layer's parameters."""
    lead = x.shape[:2]
    back: list[Callable[[Tensor], Tensor]] = []
    for name, layer in named_layers(module):
        if isinstance(layer, nn.Linear):
            x, behind = _linear(name, layers, x, visit, first=not back)
        else:
            x, behind = _free(layer, x, lead)
        if back or isinstance(layer, nn.Linear):  # nothing before the first linear layer has a gradient to give
            back.append(behind)
    along = slope(x)
    while back:
        along = back.pop()(along)


def gradient_at(total: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """The gradient of a function of one tensor."""
    leaf = at.detach().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(total(leaf), leaf)[0]


def _linear(
    name: str, layers: dict[str, Tensor], x: Tensor, visit: Callable[[str, Tensor, Tensor], None], first: bool
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """A linear layer's output, and what turns the slope there into the one before (where there is a layer before)."""
    weight, bias = layers[f"{name}.weight"], layers.get(f"{name}.bias")

    def behind(slope: Tensor) -> Tensor:
        before = slope if first else slope @ weight
        visit(name, slope, x)
        return before

    return (x @ weight.mT if bias is None else torch.baddbmm(bias[:, None], x, weight.mT)), behind


def _free(layer: nn.Module, x: Tensor, lead: torch.Size) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The same for a layer without parameters, which sees all clients' rows as one batch."""
    if type(layer) is nn.ReLU:
        y = torch.relu(x)
        return y, lambda slope: torch.ops.aten.threshold_backward(slope, y, 0)
    leaf = x.flatten(0, 1).detach().requires_grad_()
    with torch.enable_grad():
        z = layer(leaf.clone() if getattr(layer, "inplace", False) else leaf)

    def behind(slope: Tensor) -> Tensor:
        return torch.autograd.grad(z, leaf, slope.flatten(0, 1))[0].unflatten(0, lead)

    return z.detach().unflatten(0, lead), behind
