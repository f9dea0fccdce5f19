"""The gradient of a cohort of perceptrons, written out: linear layers, with anything without parameters between.

It equals what vmap and autograd give for any network, and is faster for this common one: each layer's gradient is
computed straight into its place in the matrix [C, d], where autograd makes it twice and copies it twice.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def is_perceptron(module: nn.Module) -> bool:
    """Whether the module is a Sequential whose layers with parameters are all plain linear ones, none used twice."""
    if not isinstance(module, nn.Sequential):
        return False
    linear = [layer for layer in module if type(layer) is nn.Linear]
    mine = {id(p) for layer in linear for p in (layer.weight, layer.bias) if p is not None}
    return {id(p) for p in module.parameters()} == mine and len(linear) == len(set(map(id, linear)))


def steps_of(module: nn.Sequential) -> list[tuple[str, nn.Module]]:
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
    lead = x.shape[:2]
    back: list[Callable[[Tensor], Tensor]] = []
    for name, layer in steps_of(module):
        if isinstance(layer, nn.Linear):
            x, behind = _linear(name, layers, x, out, first=not back)
        else:
            x, behind = _free(layer, x, lead)
        if back or isinstance(layer, nn.Linear):  # nothing before the first linear layer has a gradient to give
            back.append(behind)
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(total(leaf), leaf)
    while back:
        slope = back.pop()(slope)


def _linear(
    name: str, layers: dict[str, Tensor], x: Tensor, out: dict[str, Tensor], first: bool
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """A linear layer's output, and what turns the slope there into the one before (where there is a layer before)."""
    weight, bias = layers[f"{name}.weight"], layers.get(f"{name}.bias")

    def behind(slope: Tensor) -> Tensor:
        torch.bmm(slope.mT, x, out=out[f"{name}.weight"])
        if bias is not None:
            torch.sum(slope, 1, out=out[f"{name}.bias"])
        return slope if first else slope @ weight

    return (x @ weight.mT if bias is None else torch.baddbmm(bias[:, None], x, weight.mT)), behind


def _free(layer: nn.Module, x: Tensor, lead: torch.Size) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The same for a layer without parameters, which sees all clients' rows as one batch."""
    leaf = x.flatten(0, 1).detach().requires_grad_()
    with torch.enable_grad():
        y = layer(leaf)

    def behind(slope: Tensor) -> Tensor:
        return torch.autograd.grad(y, leaf, slope.flatten(0, 1))[0].unflatten(0, lead)

    return y.detach().unflatten(0, lead), behind
