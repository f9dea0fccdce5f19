"""Losses of a network's outputs: of rows or of minibatches, this package's, torch's or a user's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mooring.core.errors import RequestError

if TYPE_CHECKING:
    from mooring.tasks.device import Device

RowLoss = Callable[[Tensor, Tensor], Tensor]  # (predictions [B, ...], y [B, ...]) -> [B], or [B, ...] to be averaged
IGNORED_CLASS = -100  # of a token or pixel without a target
CLASS_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss)
STANDARD_UNITS, TARGET_UNITS = "standard", "target"  # what a network's output is: (y - mean) / scale, or y
SQUEEZED = ": of one row, squeeze() leaves no dimension where squeeze(-1) does"
FORWARD_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError)  # of user code


def cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    """Of classes, one per row; of tokens or pixels y [B, ...], the mean over those of a row that have a target."""
    losses = F.cross_entropy(align_classes(output, y), y, reduction="none")
    if y.ndim == 1:
        return losses
    known = (y != IGNORED_CLASS).flatten(1).sum(1).clamp(min=1)
    return losses.flatten(1).sum(1) / known


def align_classes(output: Tensor, y: Tensor) -> Tensor:
    """Logits with the classes in the second dimension, as torch has them, of logits that may have them in the last."""
    return output.movedim(class_dim(output.shape, y.shape), 1) if y.ndim > 1 else output


def class_dim(outputs: Sequence[int], targets: Sequence[int], lead: int = 1) -> int:
    """The dimension of the classes in outputs of that shape: the last one, or the one behind the `lead` of rows."""
    return len(outputs) - 1 if tuple(outputs[:-1]) == tuple(targets) else lead


def binary_cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    """Of logits, one for each yes or no of a row."""
    return F.binary_cross_entropy_with_logits(output.reshape(y.shape), y.to(output.dtype), reduction="none")


def half_square(output: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (output.reshape(y.shape) - y) ** 2


SOFTMAX, EXP, SIGMOID, IDENTITY = "softmax", "exp", "sigmoid", "identity"  # what makes probabilities of outputs
NAMED_LINKS = {"cross_entropy": SOFTMAX, "binary_cross_entropy": SIGMOID}
MODULE_LINKS = {
    nn.CrossEntropyLoss: SOFTMAX,
    nn.NLLLoss: EXP,
    nn.BCEWithLogitsLoss: SIGMOID,
    nn.MultiLabelSoftMarginLoss: SIGMOID,
    nn.BCELoss: IDENTITY,
}
BINARY_LOSSES = (nn.BCEWithLogitsLoss, nn.BCELoss)


def find_link(loss: str | RowLoss) -> str | None:
    """What makes probabilities of outputs, as the loss takes them; None: it does not define any."""
    if isinstance(loss, str):
        return NAMED_LINKS.get(loss)
    return next((link for kind, link in MODULE_LINKS.items() if isinstance(loss, kind)), None)


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
    if isinstance(output, torch.distributions.Distribution):
        return output.mean
    if is_dataclass(output):
        values = [getattr(output, field.name) for field in fields(output)]
        if any(isinstance(value, Tensor) for value in values):
            return next(value for value in values if isinstance(value, Tensor))
    raise RequestError(
        f"the model returns a {type(output).__name__}; it must return a tensor, or one as logits or as its first part."
    )


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
        return loss(output, y.to(output.dtype) if isinstance(loss, BINARY_LOSSES) else y)

    return call


def needs_whole_batches(loss: object) -> bool:
    """Whether a loss is no mean over rows: class weights divide by the weights of a batch, and an ignored class by the
    rows of other classes; a sum does not divide."""
    if not isinstance(loss, nn.Module):
        return False
    is_uneven = isinstance(loss, CLASS_LOSSES) and (loss.weight is not None or loss.ignore_index >= 0)
    return is_uneven or getattr(loss, "reduction", "mean") == "sum"


def check_loss(loss: object) -> None:
    """Refuse losses that cannot be used as given."""
    if isinstance(loss, type):
        raise RequestError(f"the loss is a class; give an object of it, {loss.__name__}().")
    if isinstance(loss, nn.Module) and any(part.requires_grad for part in loss.parameters()):
        raise RequestError("the loss has parameters to train; make them parameters of the model.")


def explain_shapes(output: Tensor, y: Tensor, classifies: bool) -> str | None:
    """What is wrong with outputs [B, ...] for targets y [B, ...] under a loss of this package; None: nothing."""
    if not classifies:
        if output.numel() == y.numel():
            return None
        hint = (
            "; whole numbers are classes if they are integers, or with target_type = 'classes'" if y.ndim == 1 else ""
        )
        if y.ndim > 1 and bool(((y == 0) | (y == 1)).all()):
            hint = "; with target_type = 'classes' its 0 and 1 are classes, not labels"
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


class OutputLoss:
    """The loss of a network's outputs, by row or by minibatch; the base class of a network's task."""

    device: Device
    dtype: torch.dtype

    def set_loss(self, loss: str | RowLoss, units: str, mean: float, scale: float, target_column: bool) -> None:
        """Take a loss by name, of torch's or of the user's; `target_column`: targets were [B, 1]."""
        if isinstance(loss, str) and loss not in LOSSES:
            raise RequestError(f"loss must be one of {', '.join(LOSSES)} or a function, got {loss!r}.")
        if units not in (STANDARD_UNITS, TARGET_UNITS):
            raise RequestError(f"units must be '{STANDARD_UNITS}' or '{TARGET_UNITS}', got {units!r}.")
        check_loss(loss)
        self.row_loss: RowLoss = LOSSES[loss] if isinstance(loss, str) else by_row(loss)
        self.batch_loss: Any = as_torch_loss(loss) if needs_whole_batches(loss) else None  # type: ignore[arg-type]
        self.own_module = isinstance(loss, nn.Module)  # of torch's kind: it takes the main output
        self.tokens_loss = loss if isinstance(loss, CLASS_LOSSES) else None
        self.classifies = self.row_loss is cross_entropy
        self.link = find_link(loss)
        self.mean, self.scale, self.target_column = mean, scale, target_column
        self.units = TARGET_UNITS if self.has_own_loss else units

    @property
    def has_own_loss(self) -> bool:
        """Whether the loss is a function that a user wrote."""
        return self.row_loss not in LOSSES.values()

    @property
    def metric(self) -> str:
        if self.has_own_loss:
            return "loss"
        return "mse" if self.row_loss is half_square else "log-loss"

    @property
    def likelihood(self) -> bool:
        return self.row_loss in (cross_entropy, binary_cross_entropy)

    @property
    def predicts_probabilities(self) -> bool:
        return self.link is not None

    @property
    def risk_per_loss(self) -> float:
        return 2.0 if self.row_loss is half_square else 1.0

    def loss_input(self, output: Any) -> Any:
        """What a loss of one's own receives: modules of torch's kind the main output, functions what there is."""
        return self.main_output(output) if self.own_module and not isinstance(output, Tensor) else output

    def call_loss(self, loss: Callable[..., Any], output: Any, y: Tensor) -> Tensor:
        """The value of a loss; what fails is explained."""
        try:
            answer = loss(output, y)
        except FORWARD_ERRORS as error:
            why = (str(error) or type(error).__name__).splitlines()[0]
            shape = f"outputs of the shape {tuple(output.shape)}" if isinstance(output, Tensor) else "the outputs"
            wrong = explain_shapes(output, y, self.classifies) if not self.has_own_loss else None
            why += SQUEEZED if isinstance(output, Tensor) and not output.ndim else ""
            raise RequestError(
                f"{wrong}." if wrong else f"the loss fails on {shape} and targets of the shape {tuple(y.shape)}: {why}"
            ) from error
        if not isinstance(answer, Tensor):
            raise RequestError(f"the loss must return a tensor, got {type(answer).__name__}.")
        return answer

    def own_units(self, y: Tensor) -> Tensor:
        """Targets as a loss of one's own receives them: in their own units and shape."""
        y = y * self.scale + self.mean if y.dtype.is_floating_point else y
        return y[..., None] if self.target_column and not self.own_module else y

    def main_output(self, output: object) -> Tensor:
        """The tensor that losses are taken of, in the parameters' own precision."""
        main = main_output(output)
        return main.to(self.dtype) if self.device.is_mixed else main

    def output_loss(self, output: Any, y: Tensor) -> Tensor:
        """The loss of what a network returned for a minibatch with targets y [B, ...]."""
        if self.batch_loss is not None:
            return self.call_loss(self.batch_loss, self.loss_input(output), self.own_units(y))
        if self.classifies and y.ndim > 1:  # the mean over all tokens of the minibatch, as torch takes it
            whole = self.main_output(output)
            return self.call_loss(F.cross_entropy, align_classes(whole, y), y)
        if self.has_own_loss and not isinstance(output, Tensor):
            return self.call_loss(self.row_loss, self.loss_input(output), self.own_units(y)).mean()
        return self.each_loss(self.main_output(output)[None], y[None])[0].mean()

    def each_loss(self, output: Tensor, y: Tensor) -> Tensor:
        """[C, B]: the loss of outputs [C, B, ...]; several numbers of a row are averaged."""
        lead = y.shape[:2]
        if output.ndim < 2:
            raise RequestError(f"the model returns a number without dimensions for a minibatch{SQUEEZED}.")
        if not self.has_own_loss and self.units == TARGET_UNITS:
            output = (output - self.mean) / self.scale
        targets = y.flatten(0, 1)
        targets = self.own_units(targets) if self.has_own_loss else targets
        losses = self.call_loss(self.row_loss, output.flatten(0, 1), targets)
        rows = lead.numel()
        if losses.ndim == 0 or len(losses) != rows:
            raise RequestError(
                f"the loss must return one number per row, got the shape {tuple(losses.shape)} for {rows} rows."
            )
        return losses.reshape(*lead, -1).mean(2)
