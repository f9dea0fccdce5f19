"""What a network's task accepts: losses of rows or of minibatches, outputs that are no tensors, layers with buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mooring.core.errors import RequestError

RowLoss = Callable[[Tensor, Tensor], Tensor]  # (predictions [B, ...], y [B, ...]) -> [B], or [B, ...] to be averaged
IGNORED_CLASS = -100  # of a token or pixel without a target
CLASS_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss)
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
    """The tensor that a loss is taken of: the output, its logits, or the first part of a tuple, dictionary or data
    class."""
    if isinstance(output, Tensor):
        return output
    if hasattr(output, "logits"):
        return output.logits
    if isinstance(output, Mapping):
        return output.get("logits", next(iter(output.values())))
    if isinstance(output, tuple | list) and output:
        return main_output(output[0])
    if is_dataclass(output):
        values = [getattr(output, field.name) for field in fields(output)]
        if any(isinstance(value, Tensor) for value in values):
            return next(value for value in values if isinstance(value, Tensor))
    raise RequestError(f"the model returns a {type(output).__name__}; give a loss that takes it.")


def by_row(loss: RowLoss) -> RowLoss:
    """A loss that speaks of each row: torch's own loss modules average unless they are told not to."""
    if not isinstance(loss, nn.Module) or getattr(loss, "reduction", "none") == "none":
        return as_torch_loss(loss)
    each = copy.copy(loss)
    each.reduction = "none"  # type: ignore[assignment]
    call = as_torch_loss(each)

    def of_rows(output: Tensor, y: Tensor) -> Tensor:
        losses = call(output, y)
        if isinstance(loss, CLASS_LOSSES) and y.ndim > 1 and not y.dtype.is_floating_point:
            known = (y != loss.ignore_index).flatten(1).sum(1).clamp(min=1)
            return losses.flatten(1).sum(1) / known
        return losses.flatten(1).sum(1) if loss.reduction == "batchmean" else losses

    return of_rows


def as_torch_loss(loss: RowLoss) -> RowLoss:
    """A loss of torch's own as it is meant: outputs [B, 1] have the shape of targets [B], where torch would pair each
    with all, and yes or no is a number. Other losses are as they are."""
    if type(loss).__module__ != nn.modules.loss.__name__ or isinstance(loss, CLASS_LOSSES):
        return loss

    def call(output: Tensor, y: Tensor) -> Tensor:
        output = output[..., 0] if output.shape == (*y.shape, 1) else output
        binary = isinstance(loss, nn.BCEWithLogitsLoss | nn.BCELoss)
        return loss(output, y.to(output.dtype) if binary else y)

    return call


def needs_whole_batches(loss: object) -> bool:
    """Whether a loss is no mean over rows: class weights divide by the weights of a batch, and an ignored class by the
    rows of other classes; a sum does not divide."""
    if not isinstance(loss, nn.Module):
        return False
    is_uneven = isinstance(loss, CLASS_LOSSES) and (loss.weight is not None or loss.ignore_index >= 0)
    return is_uneven or getattr(loss, "reduction", "mean") == "sum"


def explain_shapes(output: Tensor, y: Tensor, classifies: bool) -> str | None:
    """What is wrong with outputs [B, ...] for targets y [B, ...] under a loss of this package; None: nothing."""
    if not classifies:
        if output.numel() == y.numel():
            return None
        hint = (
            "; whole numbers are classes if they are integers, or with target_type = 'classes'" if y.ndim == 1 else ""
        )
        return (
            f"the model returns {output[0].numel()} numbers per row, where the target has {max(y[0].numel(), 1)}{hint}"
        )
    classes = align_classes(output, y).shape[1] if output.ndim > 1 else 1
    highest = int(y.max())
    if highest < classes:
        return None
    return (
        f"the model returns {classes} numbers per row, where the targets have classes up to {highest}: it must return "
        f"{highest + 1}, and classes are numbered from 0"
    )


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
