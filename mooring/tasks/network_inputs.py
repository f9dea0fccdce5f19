"""What a network's task accepts: losses of rows or of minibatches, outputs that are no tensors, layers with buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mooring.core.errors import RequestError

RowLoss = Callable[[Tensor, Tensor], Tensor]  # (predictions [B, ...], y [B, ...]) -> [B], or [B, ...] to be averaged
IGNORED_CLASS = -100  # of a token or pixel without a target
BUFFERS = ("average", "local", "frozen")  # what becomes of running statistics


def cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    """Of classes, one per row; of tokens or pixels y [B, ...], the mean over those of a row that have a target."""
    losses = F.cross_entropy(align_classes(output, y), y, reduction="none")
    if y.ndim == 1:
        return losses
    known = (y != IGNORED_CLASS).flatten(1).sum(1).clamp(min=1)
    return losses.flatten(1).sum(1) / known


def align_classes(output: Tensor, y: Tensor) -> Tensor:
    """Logits with the classes in the second dimension, as torch has them, of logits that may have them in the last."""
    last = y.ndim > 1 and output.shape[:-1] == y.shape
    return output.movedim(-1, 1) if last else output


def binary_cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    """Of logits, one for each yes or no of a row."""
    return F.binary_cross_entropy_with_logits(output.reshape(y.shape), y.to(output.dtype), reduction="none")


def half_square(output: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (output.reshape(y.shape) - y) ** 2


LOSSES: dict[str, RowLoss] = {
    "cross_entropy": cross_entropy,
    "binary_cross_entropy": binary_cross_entropy,
    "half_square": half_square,
}


def main_output(output: object) -> Tensor:
    """The tensor that a loss is taken of: the output, its logits, or the first part of a tuple or dictionary."""
    if isinstance(output, Tensor):
        return output
    if hasattr(output, "logits"):
        return output.logits
    if isinstance(output, Mapping):
        return output.get("logits", next(iter(output.values())))
    if isinstance(output, tuple | list) and output:
        return main_output(output[0])
    raise RequestError(f"the model returns a {type(output).__name__}; give a loss that takes it.")


def by_row(loss: RowLoss) -> RowLoss:
    """A loss that speaks of each row: torch's own loss modules average unless they are told not to."""
    if isinstance(loss, nn.Module) and getattr(loss, "reduction", "none") != "none":
        loss = copy.copy(loss)
        loss.reduction = "none"  # type: ignore[assignment]
    return loss


def needs_whole_batches(loss: object) -> bool:
    """Whether a loss is no mean over rows: class weights divide by the weights of a batch, a sum does not divide."""
    if not isinstance(loss, nn.Module):
        return False
    weighted = isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) and loss.weight is not None
    return weighted or getattr(loss, "reduction", "mean") == "sum"


def is_frozen(layer: nn.Module) -> bool:
    """Whether a normalization layer keeps the statistics that it was made with: all its parameters are frozen."""
    parameters = list(layer.parameters())
    return bool(parameters) and not any(p.requires_grad for p in parameters)


def tracked_buffers(module: nn.Module) -> dict[str, torch.Size]:
    """The shapes of the buffers that training changes: running statistics of normalization layers."""
    shapes: dict[str, torch.Size] = {}
    for path, layer in module.named_modules():
        if isinstance(layer, nn.modules.batchnorm._NormBase) and layer.track_running_stats and not is_frozen(layer):
            shapes |= {f"{path}.{name}".lstrip("."): b.shape for name, b in layer.named_buffers(recurse=False)}
    return shapes


def has_dropout(module: nn.Module) -> bool:
    """Whether one of torch's own layers draws random numbers in training."""
    layers = list(module.modules())
    return any(getattr(layer, "p", 0) for layer in layers if isinstance(layer, nn.modules.dropout._DropoutNd)) or any(
        isinstance(layer, nn.RReLU) or getattr(layer, "dropout", 0.0) not in (0, 0.0, None) for layer in layers
    )


def may_be_random(module: nn.Module) -> bool:
    """Whether training may draw random numbers: dropout, or a forward pass that is not torch's own."""
    own = any(not type(layer).__module__.startswith("torch.nn.") for layer in module.modules())
    return own or has_dropout(module)
