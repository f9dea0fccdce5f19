"""Any torch.nn.Module with any loss as a task: the cohort's trainable parameters are one matrix [C, d]."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping
from threading import RLock
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from mooring.core.cohort import Batch, Rows
from mooring.core.errors import RequestError
from mooring.core.items import DatasetItems, TensorItems, map_tensors
from mooring.core.seeds import random_words
from mooring.core.sgd_step import StepTerms
from mooring.core.task import (
    Constants,
    InPlaceStep,
    Layout,
    LocalSteps,
    MixtureSteps,
    Task,
    TrainingSteps,
    layout_of,
)
from mooring.tasks.device import FULL_PRECISION, Device
from mooring.tasks.fused import per_client, perceptron_numba, perceptron_per_client
from mooring.tasks.fused.perceptron_stacked import gradient_at, is_perceptron, perceptron_grad, perceptron_step
from mooring.tasks.network_checks import (
    check_head,
    check_loss,
    check_module,
    find_changing_buffers,
    has_hooks,
    is_faithful,
    layer_name,
    parameter_aliases,
)
from mooring.tasks.network_inputs import (
    BUFFERS,
    CLASS_LOSSES,
    LOSSES,
    RowLoss,
    align_classes,
    as_torch_loss,
    binary_cross_entropy,
    by_row,
    cross_entropy,
    explain_shapes,
    half_square,
    has_dropout,
    main_output,
    may_be_random,
    needs_whole_batches,
    tracked_buffers,
)
from mooring.tasks.network_training import RANDOM_LOCK, NetworkTrainer, fork_python_random

FORWARD_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError)
EVALUATED_ITEMS = 256  # items that are read at once in evaluation: bounds memory
STANDARD_UNITS, TARGET_UNITS = "standard", "target"  # what a network's output is: (y - mean) / scale, or y
ROW_CURVATURE = 5.0  # a network's Hessian has a few large eigenvalues: its trace is taken as this many of the largest
CALLING = RLock()  # a functional call puts the parameters into the module for its time: one thread at a time
FLAT_STEP, NEGLIGIBLE = 0.1, 1e-6  # the first step where a loss has no curvature, and what counts as none
LEAST_PROBABILITY = 1e-12  # of a class, in a divergence
NUDGE = 1e-3  # how far w is moved, as a share of its size, where curvature is a difference of gradients
PROBE_CLIENTS, PROBE_ROWS = 2, 3  # what it takes to see whether networks can be stacked
SLOW = "There is a performance drop"  # how torch begins to say that it stacks by a loop of its own


class NetworkTask(Task):
    """A network as a task. `make()` returns the module: its weights are the start, random ones following the seed.

    w holds the trainable parameters, and behind them the running statistics of normalization layers. Parameters that
    are frozen (`requires_grad = False`) and other buffers stay as they were made and are not sent. Random numbers of a
    forward pass in training, such as dropout's, follow from (seed, client, round, step): a run can be replayed.

    buffers "average": running statistics are averaged with the parameters; "local": each client keeps its own (FedBN);
            "frozen": they stay as they were made

    units   what the network's output is where the target is a number: "standard", that is (y - mean) / scale, or
            "target", that is y itself; a loss of one's own sees outputs and targets in the target's units
    device  where the network computes; parameters and rows are brought there and back
    precision  "full", or "bf16": forward passes and gradients in mixed precision (`device.Device`)
    compile    whether torch.compile compiles the forward and backward passes of training
    kernels "numba": compiled local steps, for large perceptrons of which `compiles` is true
    """

    name: ClassVar[str] = "module"
    kinds: ClassVar[tuple[str, ...]] = ("regression", "binary", "classes", "labels")

    def __init__(
        self,
        make: Callable[[], nn.Module],
        loss: str | RowLoss = "cross_entropy",
        ridge: float = 0.0,
        units: str = STANDARD_UNITS,
        mean: float = 0.0,
        scale: float = 1.0,
        device: str = "cpu",
        kernels: str = "torch",
        buffers: str = "average",
        items: TensorItems | DatasetItems | None = None,
        sample: Tensor | None = None,
        changing_buffers: tuple[str, ...] | None = None,
        target_column: bool = False,
        precision: str = FULL_PRECISION,
        compile: bool = False,
    ):
        if isinstance(loss, str) and loss not in LOSSES:
            raise RequestError(f"loss must be one of {', '.join(LOSSES)} or a function, got {loss!r}.")
        if units not in (STANDARD_UNITS, TARGET_UNITS):
            raise RequestError(f"units must be '{STANDARD_UNITS}' or '{TARGET_UNITS}', got {units!r}.")
        check_loss(loss)
        self.make, self.items, self.sample, self.target_column = make, items, sample, target_column
        self._dtype = torch.float32
        self.changes_inputs = False  # whether a forward pass changes its rows in place
        if buffers not in BUFFERS:
            raise RequestError(f"buffers must be one of {', '.join(BUFFERS)}, got {buffers!r}.")
        self.row_loss: RowLoss = LOSSES[loss] if isinstance(loss, str) else by_row(loss)
        self.batch_loss: Any = as_torch_loss(loss) if needs_whole_batches(loss) else None  # type: ignore[arg-type]
        self.own_module = isinstance(loss, nn.Module)  # of torch's kind: it takes the main output
        self.tokens_loss = loss if isinstance(loss, CLASS_LOSSES) else None
        self.classifies = self.row_loss is cross_entropy
        self.ridge = ridge
        self.mean, self.scale = mean, scale
        self.units = TARGET_UNITS if self.has_own_loss else units
        self.device = Device(device, precision, compile)
        self.module = self.device.load_module(self._made(0).eval())
        for path, layer in self.module.named_modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm) and not layer.track_running_stats:
                raise RequestError(
                    f"layer '{path}' is a {type(layer).__name__} without running statistics: its answer at a row would "
                    "depend on the other rows of a batch. Set track_running_stats = True, or use nn.GroupNorm."
                )
        self._dtype = next((p.dtype for p in self.module.parameters() if p.requires_grad), torch.float32)
        self.shapes = {name: p.shape for name, p in self.module.named_parameters() if p.requires_grad}
        self.sizes = [shape.numel() for shape in self.shapes.values()]
        if not self.sizes:
            raise RequestError("the model has no parameters to train.")
        self.parameter_dim = sum(self.sizes)
        self.accepted = inspect.signature(self.module.forward).parameters
        self.changing_buffers = self._try_sample() if changing_buffers is None else changing_buffers
        self.buffer_shapes = {} if buffers == "frozen" else self._tracked_buffers()
        self.local_buffers = buffers == "local" and bool(self.buffer_shapes)
        self.sizes += [shape.numel() for shape in self.buffer_shapes.values()]
        self.dim = sum(self.sizes)
        self.buffers = buffers
        self.is_random = may_be_random(self.module)
        self.is_structured: bool | None = True if items is not None else None  # inputs or outputs are no tensors
        needs_clients = self.buffer_shapes or self.batch_loss is not None or items is not None
        needs_clients = needs_clients or not self.device.is_plain or self._shrinks_embeddings
        self.by_client: bool | None = True if needs_clients else None
        frozen = any(not p.requires_grad for p in self.module.parameters())
        self.is_perceptron = is_perceptron(self.module) and not frozen and not has_dropout(self.module)
        self.is_perceptron = self.is_perceptron and not has_hooks(self.module)
        self.is_perceptron = self.is_perceptron and self.device.is_plain
        self.convolutional = per_client.has_convolution(self.module)
        self.is_large_perceptron = self.is_perceptron and (
            self.dim * self.dtype.itemsize >= per_client.MIN_PER_CLIENT_BYTES
        )
        self.head_is_checked = False
        self.is_unfaithful = False  # whether faster forms of the gradient differ from the network's own
        self.aliases: dict[str, str] | None = None  # other names of shared parameters, once they are needed
        self.stacks: bool | None = None  # whether clients' networks can be run as one; None until it was tried
        self.kernels = kernels
        self.frozen: frozenset[str] = frozenset()  # parameters that `freeze` leaves as they are
        self.variants: dict[object, NetworkTask] = {}  # tasks that were made from this one, to be used again
        self.trainer: NetworkTrainer | None = None

    @property
    def compiles(self) -> bool:
        """Whether its local steps can be compiled."""
        large = self.is_perceptron and self.steps_by_client
        return large and perceptron_numba.can_compile(self._net(), self.dtype)

    def _made(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(random_words(seed, "model")[0] >> 1))
            made = self.make()
            if not isinstance(made, nn.Module):
                raise RequestError(f"the model's function must return a torch.nn.Module, got {type(made).__name__}.")
            check_module(made)
            for layer in made.modules():
                if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
                    layer.sparse = False  # the same gradients, as tensors that can be stacked
            if any(nn.parameter.is_lazy(part) for part in made.parameters()):
                self._materialize(made)
        return made

    def _materialize(self, made: nn.Module) -> None:
        """Give lazy layers their shapes by a forward pass."""
        if self.sample is None:
            raise RequestError("the model has lazy layers, whose shapes follow from rows: give `sample`, some of them.")
        self.accepted = inspect.signature(made.forward).parameters
        try:
            with torch.no_grad():
                self.call_module(made.eval(), self.sample)
        except FORWARD_ERRORS as error:
            why = str(error).splitlines()[0]
            raise RequestError(
                f"the model's lazy layers cannot be given their shapes ({why}); give a model without lazy layers, or "
                "once it was trained, with the shapes that they had."
            ) from error

    @property
    def _shrinks_embeddings(self) -> bool:
        """Whether a forward pass changes parameters."""
        return any(getattr(layer, "max_norm", None) is not None for layer in self.module.modules())

    def check_head(self) -> None:
        """Refuse a layer that is declared last and plays no part in the output; warn where another one runs last."""
        if self.sample is not None and not self.head_is_checked:
            self.head_is_checked = True
            check_head(self, self.sample)

    def _tracked_buffers(self) -> dict[str, torch.Size]:
        """The shapes of the buffers that training changes."""
        own = {name: self.module.get_buffer(name).shape for name in self.changing_buffers}
        return tracked_buffers(self.module) | own

    def _try_sample(self) -> tuple[str, ...]:
        """The buffers that a forward pass changes, besides those of normalization; whether it changes its rows."""
        if self.sample is None:
            return ()

        def call(module: nn.Module) -> None:
            rows = self.device.load(self.sample).clone()  # type: ignore[arg-type]
            self.call_module(module, rows)
            self.changes_inputs = self.items is None and not torch.equal(rows.cpu(), self.sample)  # type: ignore[arg-type]

        with torch.no_grad(), RANDOM_LOCK, self.device.fork_random_state(), fork_python_random():
            try:
                call(self.module)
            except Exception:  # explained where the network is used
                return ()
            return find_changing_buffers(self.module, call)

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
    def risk_per_loss(self) -> float:
        return 2.0 if self.row_loss is half_square else 1.0

    @property
    def gradient_dim(self) -> int:
        return self.parameter_dim

    @property
    def layout(self) -> Layout:
        parts = self.shapes | self.buffer_shapes
        return layout_of(parts, {name: layer_name(name) for name in parts})

    def describe(self) -> dict[str, object]:
        changing = {"changing_buffers": list(self.changing_buffers)} if self.changing_buffers else {}
        return {"units": self.units, **changing}

    def start(self, seed: int = 0) -> Tensor:
        fresh = self._made(seed)
        values = dict(fresh.named_parameters()) | dict(fresh.named_buffers())
        names = (*self.shapes, *self.buffer_shapes)
        return torch.cat([values[name].detach().reshape(-1).to(self.dtype) for name in names])

    def layers(self, w: Tensor) -> dict[str, Tensor]:
        """Each layer's parameters, and the buffers that change, [C, ...] as views of w [C, d]."""
        parts = self.shapes | self.buffer_shapes
        return {
            name: part.reshape(len(w), *shape)
            for (name, shape), part in zip(parts.items(), torch.split(w, self.sizes, 1))
        }

    def _forward(self, layers: dict[str, Tensor], x: Tensor) -> Tensor:
        """[C, B, ...]: what the clients' networks say about their rows."""
        x = x.to(self.dtype) if x.dtype.is_floating_point else x
        if self.is_structured or len(x) == 1:  # a lone client needs no stacking, and its kernels are faster
            return self._one_by_one(layers, x)
        with CALLING:
            if self.stacks is None:
                # a stack of convolutions would be one with as many groups, which is slower
                self.stacks = not self.by_client and self._can_stack(layers, x) and not self.convolutional
        return self._together(layers, x) if self.stacks else self._one_by_one(layers, x)

    def call_module(self, call: Callable[..., Any], x: Tensor) -> Any:
        """What a network answers at rows x [B, ...], or at the items that x numbers."""
        inputs = x if self.items is None else map_tensors(self.items.take(x), self.device.load)
        inputs = map_tensors(inputs, lambda part: part.to(self.dtype) if part.dtype.is_floating_point else part)
        inputs = inputs.clone() if self.changes_inputs and self.items is None else inputs
        names = list(self.accepted)
        with self.device.autocast():
            if isinstance(inputs, Mapping) and (set(inputs) <= set(names) or "kwargs" in names):
                output = call(**inputs)
            elif isinstance(inputs, tuple | list) and (len(names) > 1 or "args" in names):
                output = call(*inputs)
            else:
                output = call(inputs)
        return output.to(self.dtype) if self.device.is_mixed and isinstance(output, Tensor) else output

    def _main_output(self, output: object) -> Tensor:
        """The tensor that losses are taken of, in the parameters' own precision."""
        main = main_output(output)
        return main.to(self.dtype) if self.device.is_mixed else main

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self._dtype

    def _probe(self, x: Tensor, y: Tensor) -> None:
        """See, once, whether outputs are tensors and whether a loss of one's own is one number per batch."""
        if self.classifies and y.ndim > 1:
            self.by_client = True
        if self.is_structured is not None and not self.has_own_loss:
            return
        if self.is_structured is None or self.items is not None:
            with torch.no_grad(), CALLING:
                rows = x[:2].clone()
                try:
                    output = self.call_module(self.module, rows)
                except FORWARD_ERRORS as error:
                    raise self._explain(x, error) from error
                self.changes_inputs = self.changes_inputs or (self.items is None and not torch.equal(rows, x[:2]))
                self.is_structured = self.items is not None or not isinstance(output, Tensor)
                if self.has_own_loss and self.batch_loss is None and len(y):
                    self._probe_loss(output, y[:2])
            self.by_client = True if self.is_structured else self.by_client

    def _probe_loss(self, output: Any, y: Tensor) -> None:
        """See whether a loss of one's own is one number per batch."""
        if self.tokens_loss is not None and y.ndim > 1 and not y.dtype.is_floating_point:
            self.batch_loss, self.is_structured = self.tokens_loss, True
            return
        if isinstance(output, Tensor):
            output = output.detach().clone().requires_grad_()
        with torch.enable_grad():
            answer = self._call_loss(self.row_loss, self._loss_input(output), self._own_units(y))
        if isinstance(output, Tensor) and not answer.requires_grad:
            raise RequestError("the loss does not depend on the outputs of the model: is a tensor detached?")
        if answer.ndim == 0:
            self.batch_loss, self.is_structured = self.row_loss, True

    def _loss_input(self, output: Any) -> Any:
        """What a loss of one's own receives: modules of torch's kind the main output, functions what there is."""
        return self._main_output(output) if self.own_module and not isinstance(output, Tensor) else output

    def _call_loss(self, loss: Callable[..., Any], output: Any, y: Tensor) -> Tensor:
        """The value of a loss; what fails is explained."""
        try:
            answer = loss(output, y)
        except FORWARD_ERRORS as error:
            why = (str(error) or type(error).__name__).splitlines()[0]
            shape = f"outputs of the shape {tuple(output.shape)}" if isinstance(output, Tensor) else "the outputs"
            wrong = explain_shapes(output, y, self.classifies) if not self.has_own_loss else None
            raise RequestError(
                f"{wrong}." if wrong else f"the loss fails on {shape} and targets of the shape {tuple(y.shape)}: {why}"
            ) from error
        if not isinstance(answer, Tensor):
            raise RequestError(f"the loss must return a tensor, got {type(answer).__name__}.")
        return answer

    def _own_units(self, y: Tensor) -> Tensor:
        """Targets as a loss of one's own receives them: in their own units and shape."""
        y = y * self.scale + self.mean if y.dtype.is_floating_point else y
        return y[..., None] if self.target_column and not self.own_module else y

    def _together(self, layers: dict[str, Tensor], x: Tensor) -> Tensor:
        def call(params: dict[str, Tensor], rows: Tensor) -> Tensor:
            return self.call_with(params, rows.clone() if self.changes_inputs else rows)

        with CALLING:
            return vmap(call)(layers, x)

    def call_with(self, parameters: dict[str, Tensor], *args: object, **named: object) -> Any:
        """What the network returns with these parameters, whichever of their names they have in it."""
        if self.aliases is None:
            self.aliases = parameter_aliases(self.module)
        other = {alias: parameters[name] for alias, name in self.aliases.items() if name in parameters}
        return functional_call(self.module, parameters | other, args, named, tie_weights=False)

    def _one_by_one(self, layers: dict[str, Tensor], x: Tensor) -> Tensor:
        outputs = []
        for c, rows in enumerate(x):
            single = {name: part[c] for name, part in layers.items()}
            try:
                with CALLING:
                    outputs.append(self._evaluate(single, rows))
            except FORWARD_ERRORS as error:
                raise self._explain(rows, error) from error
        return outputs[0][None] if len(outputs) == 1 else torch.stack(outputs)

    def _explain(self, rows: Tensor, error: Exception) -> RequestError:
        """What a user reads where the network fails on its rows."""
        if isinstance(error, RequestError):
            return error
        kind = "its items" if self.items is not None else f"rows of shape {tuple(rows.shape[1:])} of {rows.dtype}"
        return RequestError(f"the model fails on {kind}: {(str(error) or type(error).__name__).splitlines()[0]}")

    def _evaluate(self, parameters: dict[str, Tensor], rows: Tensor) -> Tensor:
        """A client's outputs [B, ...] in evaluation mode, of a structured output the main part: its logits."""

        if self._shrinks_embeddings:
            parameters = {name: part.clone() for name, part in parameters.items()}  # a forward pass shrinks them

        def call(*args: object, **named: object) -> Any:
            return self.call_with(parameters, *args, **named)

        if self.items is None:
            return self._main_output(self.call_module(call, rows))
        with RANDOM_LOCK, self.device.fork_random_state():
            torch.manual_seed(0)  # of data sets that draw random numbers
            return torch.cat([self._main_output(self.call_module(call, part)) for part in rows.split(EVALUATED_ITEMS)])

    def _can_stack(self, layers: dict[str, Tensor], x: Tensor) -> bool:
        """Whether torch runs several of these networks as one, gradients included; what keeps it from that is said."""
        some = {name: part[:PROBE_CLIENTS].detach().requires_grad_() for name, part in layers.items()}
        rows = x[:PROBE_CLIENTS, :PROBE_ROWS]
        try:
            with warnings.catch_warnings(record=True) as notes, torch.enable_grad():
                warnings.simplefilter("always")
                output = self._together(some, rows)
                torch.autograd.grad(output.sum(), list(some.values()), allow_unused=True)
                with torch.no_grad():
                    self._together(some, rows)
            slow = [note.message for note in notes if str(note.message).startswith(SLOW)]
            if slow:
                raise RuntimeError(slow[0])
            return True
        except Exception as error:
            if "random" in str(error):
                raise RequestError(
                    "the model draws random numbers when it is evaluated; its predictions could not be repeated."
                ) from error
            self._one_by_one({name: part.detach() for name, part in some.items()}, rows)  # fails where the model does
            why = str(error).splitlines()[0].split(". ")[0]
            warnings.warn(f"the clients' networks are trained one after another, for torch cannot stack them ({why}).")
            return False

    def minibatch_loss(self, module: Callable[..., Any], x: Tensor, y: Tensor) -> Tensor:
        """The loss of one client's minibatch x [B, ...], y [B, ...] as a number, by a copy of the network."""
        try:
            output = self.call_module(module, x)
        except FORWARD_ERRORS as error:
            raise self._explain(x, error) from error
        return self.output_loss(output, y)

    def output_loss(self, output: Any, y: Tensor) -> Tensor:
        """The loss of what a network returned for a minibatch with targets y [B, ...]."""
        if self.batch_loss is not None:
            return self._call_loss(self.batch_loss, self._loss_input(output), self._own_units(y))
        if self.classifies and y.ndim > 1:  # the mean over all tokens of the minibatch, as torch takes it
            whole = self._main_output(output)
            return self._call_loss(F.cross_entropy, align_classes(whole, y), y)
        if self.has_own_loss and not isinstance(output, Tensor):
            return self._call_loss(self.row_loss, self._loss_input(output), self._own_units(y)).mean()
        return self._each_loss(self._main_output(output)[None], y[None])[0].mean()

    def _row_losses(self, layers: dict[str, Tensor], batch: Batch) -> Tensor:
        self._probe(batch.x[0], batch.y[0])
        if not self.has_own_loss or not self.is_structured:
            return self._each_loss(self._forward(layers, batch.x), batch.y)
        return torch.stack([self._client_losses(layers, c, batch) for c in range(len(batch.y))])

    def _client_losses(self, layers: dict[str, Tensor], c: int, batch: Batch) -> Tensor:
        """[B]: a client's losses by a loss that receives what the network returns; one number per batch is asked for
        row by row."""
        single = {name: part[c] for name, part in layers.items()}

        def call(*args: object, **named: object) -> Any:
            return self.call_with(single, *args, **named)

        def losses(x: Tensor, y: Tensor) -> Tensor:
            return self._call_loss(self.row_loss, self._loss_input(self.call_module(call, x)), self._own_units(y))

        x, y = batch.x[c], batch.y[c]
        with CALLING:
            if self.batch_loss is not None:
                return torch.stack([losses(x[i : i + 1], y[i : i + 1]).reshape(()) for i in range(len(y))])
            return losses(x, y).reshape(len(y), -1).mean(1)

    def _each_loss(self, output: Tensor, y: Tensor) -> Tensor:
        """[C, B]: the loss of outputs [C, B, ...]; several numbers of a row are averaged."""
        lead = y.shape[:2]
        if not self.has_own_loss and self.units == TARGET_UNITS:
            output = (output - self.mean) / self.scale
        targets = y.flatten(0, 1)
        targets = self._own_units(targets) if self.has_own_loss else targets
        losses = self._call_loss(self.row_loss, output.flatten(0, 1), targets)
        rows = lead.numel()
        if losses.ndim == 0 or len(losses) != rows:
            raise RequestError(
                f"the loss must return one number per row, got the shape {tuple(losses.shape)} for {rows} rows."
            )
        return losses.reshape(*lead, -1).mean(2)

    def _here(self, w: Tensor, batch: Batch) -> tuple[Tensor, Batch]:
        """Parameters and rows where the network computes."""
        return self.device.load(w), self.device.load_batch(batch)

    def loss(self, w: Tensor, batch: Batch) -> Tensor:
        w, batch = self._here(w, batch)
        with torch.no_grad():
            data = (batch.weight * self._row_losses(self.layers(w), batch)).sum(1)
        return self.device.unload(data + self.ridge / 2 * (w[:, : self.parameter_dim] ** 2).sum(1))

    def grad(self, w: Tensor, batch: Batch) -> Tensor:
        if batch.key is not None and self._trains_by_client(batch.x[:, :PROBE_ROWS], batch.y[:, :PROBE_ROWS]):
            return self._trainer().gradients(w, batch)[0]
        if self.is_unfaithful:
            return self.trainer_gradients(w, batch)
        busy = batch.weight.any(1)
        if not bool(busy.all()) and (self.convolutional or self.stacks is False or self.is_structured):
            out = torch.zeros_like(w)  # clients are evaluated one by one: those without rows cost nothing
            if bool(busy.any()):
                out[busy] = self.grad(w[busy], Batch(*(part[busy] for part in batch[:3])))
            out[~busy] = self._add_penalty(out[~busy], w[~busy])
            return out
        w, batch = self._here(w, batch)
        out = torch.empty_like(w, memory_format=torch.contiguous_format)
        places = self.layers(out)
        if self.is_perceptron and isinstance(self.module, nn.Sequential):

            def total(output: Tensor) -> Tensor:
                return (batch.weight * self._each_loss(output, batch.y)).sum()

            perceptron_grad(self.module, self.layers(w.detach()), batch.x, total, places)
        elif self.convolutional and not self._is_structured(batch):
            self._grad_by_client(w, batch, out)
        else:
            self._grad_by_autograd(w, batch, places)
        return self.device.unload(self._add_penalty(out, w))

    def _add_penalty(self, g: Tensor, w: Tensor) -> Tensor:
        """Gradients g [C, d] of the data with the ridge's, in place; 0 at buffers and frozen parameters."""
        g[:, self.parameter_dim :] = 0
        if self.ridge:
            g[:, : self.parameter_dim].add_(w[:, : self.parameter_dim], alpha=self.ridge)
        if self.frozen:
            places = self.layers(g)
            for name in self.frozen:
                places[name].zero_()
        return g

    def trainer_gradients(self, w: Tensor, batch: Batch) -> Tensor:
        """Gradients [C, d] of the network itself, in training mode, client by client."""
        keys = np.zeros(len(w), dtype=np.uint64) if batch.key is None else batch.key
        g = self._trainer().gradients(w, batch._replace(key=keys))[0]  # with the ridge's
        places = self.layers(g)
        for name in self.frozen:
            places[name].zero_()
        return g

    def train_grad(self, w: Tensor, batch: Batch) -> tuple[Tensor, Tensor | None]:
        if not self.buffer_shapes:
            return self.grad(w, batch), None
        self._probe(batch.x[0, :PROBE_ROWS], batch.y[0, :PROBE_ROWS])
        return self._trainer().gradients(w, batch)

    def _trainer(self) -> NetworkTrainer:
        self.trainer = self.trainer or NetworkTrainer(self)
        return self.trainer

    def freeze(self, mask: Tensor) -> NetworkTask | None:
        names = frozenset(
            block.name for block in self.layout if bool(mask[block.place].any()) and block.name in self.shapes
        )
        if not all(bool(mask[block.place].all()) for block in self.layout if block.name in names):
            return None
        return self.variant(names, lambda: _freeze(self, names))

    def variant(self, key: object, make: Callable[[], NetworkTask]) -> NetworkTask:
        """The task that `make` makes from this one, made once per key."""
        if key not in self.variants:
            self.variants[key] = make()
        return self.variants[key]

    def copy_settings(self, task: NetworkTask) -> None:
        """Take over what another network's task is, but for what was made for its module."""
        self.__dict__.update(task.__dict__)
        self.variants, self.trainer, self.stacks, self.aliases = {}, None, None, None
        self.is_perceptron, self.kernels = False, "torch"

    def step_in_place(self) -> InPlaceStep | None:
        return self._perceptron_step if self.is_perceptron and self.device.is_cpu else None

    @property
    def steps_by_client(self) -> bool:
        """Whether local steps are faster client by client than stacked: large perceptrons, and convolutions."""
        return (self.convolutional or self.is_large_perceptron) and self.device.is_cpu

    def local_steps(self, rows: Rows) -> LocalSteps | None:
        return self._client_by_client if self.steps_by_client and self._reads(rows) else None

    def mixture_steps(self, rows: Rows) -> MixtureSteps | None:
        fused = self.steps_by_client and self.is_perceptron and not self.ridge and self._reads(rows)
        return self._mixed_client_by_client if fused else None

    def training_steps(self, rows: Rows) -> TrainingSteps | None:
        """Every client's steps in training mode: see `network_training`."""
        some = torch.arange(min(PROBE_ROWS, len(rows.y)))[None]
        by_client = self._trains_by_client(*rows.rows_at(some)) if len(rows.y) else bool(self.by_client)
        return self._trainer().train if by_client else None

    def try_forward(self, rows: Rows, hook: Callable[..., Any], layer: nn.Module) -> Any:
        """What the network, which is probed before, returns for the first rows, the hook being called with the layer's
        outputs; random states stay as they were."""
        x, y = rows.rows_at(torch.arange(min(PROBE_ROWS, len(rows.y)))[None])
        with torch.no_grad(), CALLING, RANDOM_LOCK, self.device.fork_random_state():
            self._probe(x[0], y[0])
            handle = layer.register_forward_hook(hook)
            try:
                return self.call_module(self.module, self.device.load(x[0]))
            finally:
                handle.remove()

    def _trains_by_client(self, x: Tensor, y: Tensor) -> bool:
        """Whether training mode needs each client's own batches: statistics, dropout, a loss of whole batches."""
        self._probe(x[0], y[0])
        if self.by_client is None:
            self.is_random = self.is_random and self._trainer().draws_random_numbers(x[0], y[0])
            self.is_unfaithful = not (self.is_random or self.is_perceptron or is_faithful(self, x[0], y[0]))
            self.by_client = self.is_random or self.is_unfaithful
        return self.by_client

    def _reads(self, rows: Rows) -> bool:
        return type(rows) is Rows and rows.x.dtype == self.dtype

    def _client_by_client(self, v: Tensor, *how: Any) -> None:
        if self._compiled(how[1]):
            perceptron_numba.stay(self._net(), v, *how, ridge=self.ridge)
        elif self.is_perceptron:
            net = self._net()
            with net.quick():
                per_client.stay(perceptron_per_client.client(net), net.labels, v, *how, ridge=self.ridge)
        else:
            work = per_client.make_module_update(self.module, self._places(), self._loss_of_one, self.frozen)
            per_client.stay(work, per_client.keep_labels, v, *how, ridge=self.ridge)

    def _mixed_client_by_client(self, *how: Any) -> None:
        net, rows, felt = self._net(), how[4], how[8]
        if self._compiled(rows) and felt.rows is None:
            perceptron_numba.mix(net, *how)
            return
        with net.quick():
            per_client.mix(perceptron_per_client.make_mixture_update(net), net.labels, *how)

    def _compiled(self, rows: Rows) -> bool:
        return self.kernels == "numba" and self.compiles and perceptron_numba.can_read(rows)

    def _net(self) -> perceptron_per_client.Perceptron:
        assert isinstance(self.module, nn.Sequential)  # what is_perceptron says
        return perceptron_per_client.Perceptron(self.module, self._places(), self._loss_of_one, self.classifies)

    def _places(self) -> dict[str, slice]:
        return {part.name: part.place for part in self.layout}

    def _loss_of_one(self, output: Tensor, y: Tensor) -> Tensor:
        """[B], of a lone client."""
        return self._each_loss(output[None], y[None])[0]

    def _perceptron_step(self, v: Tensor, batch: Batch, move: StepTerms) -> None:
        weight = batch.weight * move.rate

        def slope(output: Tensor) -> Tensor:
            if not self.classifies:
                return gradient_at(lambda out: (weight * self._each_loss(out, batch.y)).sum(), output)
            residual = torch.softmax(output, -1)
            residual.scatter_add_(-1, batch.y[..., None], residual.new_full((), -1).expand_as(batch.y)[..., None])
            return residual.mul_(weight[..., None])

        assert isinstance(self.module, nn.Sequential)  # what is_perceptron says
        perceptron_step(self.module, self.layers(v), batch.x, slope, move, self.ridge, self._places())

    def _grad_by_client(self, w: Tensor, batch: Batch, out: Tensor) -> None:
        """Put the clients' gradients into out [C, d], one after another by a module that is made for speed."""
        module = per_client.FastModule(self.module, self._places(), self.frozen)
        for c in range(len(w)):
            module.load(w[c])
            with torch.enable_grad():
                loss = (
                    batch.weight[c] * self._loss_of_one(self.call_module(module.module, batch.x[c]), batch.y[c])
                ).sum()
                module.put_gradient(loss, out[c])

    def _is_structured(self, batch: Batch) -> bool:
        self._probe(batch.x[0], batch.y[0])
        return bool(self.is_structured or self.buffer_shapes)

    def _grad_by_autograd(self, w: Tensor, batch: Batch, places: dict[str, Tensor]) -> None:
        layers = self.layers(w.detach())
        if self.frozen >= set(self.shapes):
            return  # nothing moves: `_add_penalty` has the zeros
        leaves = {name: layers[name].detach().requires_grad_() for name in self.shapes if name not in self.frozen}
        with torch.enable_grad():
            total = (batch.weight * self._row_losses(layers | leaves, batch)).sum()
            parts = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        for place, part in zip(
            (places[name] for name in leaves), parts
        ):  # straight into place: half the copying of a cat
            place.copy_(part) if part is not None else place.zero_()

    def predict(self, w: Tensor, x: Tensor) -> Tensor:
        """Probabilities of the classes, or of each label; numbers as (y - mean) / scale, like the rows' own."""
        with torch.no_grad():
            output = self.device.unload(self._forward(self.layers(self.device.load(w)), self.device.load(x)))
        if self.classifies:
            return torch.softmax(output, -1)
        output = output.reshape(x.shape[:2]) if output.shape[2:].numel() == 1 else output
        if self.row_loss is binary_cross_entropy:
            return torch.sigmoid(output)
        return (output - self.mean) / self.scale if self.units == TARGET_UNITS else output

    def predict_items(self, w: Tensor, items: Any, count: int) -> Tensor:
        """[N, ...]: what `predict` returns of a model w [d] for the inputs of the first `count` items."""
        reader = copy.copy(self)
        reader.items, reader.is_structured = items, True
        return reader.predict(w[None], torch.arange(count)[None])[0]

    def row_risk(self, w: Tensor, batch: Batch) -> Tensor:
        w, batch = self._here(w, batch)
        with torch.no_grad():
            losses = self._row_losses(self.layers(w), batch)
        return self.device.unload(self.risk_per_loss * losses)

    def row_divergence(self, w: Tensor, reference: Tensor, batch: Batch) -> Tensor:
        """Of predicted numbers, or Kullback and Leibler's of predicted probabilities."""
        if self.has_own_loss:
            return super().row_divergence(w, reference, batch)
        said, true = self.predict(w, batch.x), self.predict(reference, batch.x)
        if self.row_loss is half_square:
            rise = (said - true) ** 2
        elif self.classifies:
            rise = (torch.xlogy(true, true) - torch.xlogy(true, said.clamp(min=LEAST_PROBABILITY))).sum(-1)
        else:
            p, q = torch.stack([true, 1 - true], -1), torch.stack([said, 1 - said], -1)
            rise = (torch.xlogy(p, p) - torch.xlogy(p, q.clamp(min=LEAST_PROBABILITY))).sum(-1)
        return rise.reshape(*batch.y.shape[:2], -1).mean(2).clamp(min=0)

    def constants(self, batch: Batch, w: Tensor | None = None, rounds: int = 10) -> Constants:
        """smooth: the largest curvature at w, by power iteration on Hessian products, or what stands for it where the
        loss has none there; convexity is unknown (nan), and a single row's curvature a guess from `smooth`."""
        w = self.start()[None].expand(len(batch.y), -1) if w is None else w
        w, batch = self._here(w, batch)
        v = self.device.load(torch.randn(w.shape, generator=torch.Generator().manual_seed(0), dtype=w.dtype))
        try:
            v = self._largest_curvature(w, batch, v, rounds)
        except RuntimeError:  # a layer of the network has no second derivative in torch
            for _ in range(rounds):
                v = self._curve_by_difference(w, batch, v / v.norm(dim=1, keepdim=True).clamp(min=1e-30))
        smooth = self._or_by_slope(self.device.unload(v.norm(dim=1)), w, batch) + self.ridge
        nan = torch.full_like(smooth, torch.nan)
        return Constants(smooth, nan, nan, ROW_CURVATURE * smooth, nan, (1 + ROW_CURVATURE) * smooth)

    def _largest_curvature(self, w: Tensor, batch: Batch, v: Tensor, rounds: int) -> Tensor:
        leaf = w[:, : self.parameter_dim].detach().clone().requires_grad_()
        fixed, v = w[:, self.parameter_dim :].detach(), v[:, : self.parameter_dim]
        with torch.enable_grad():
            layers = self.layers(torch.cat([leaf, fixed], 1))
            layers |= {name: layers[name].detach() for name in self.buffer_shapes}
            total = (batch.weight * self._row_losses(layers, batch)).sum()
            (g,) = torch.autograd.grad(total, leaf, create_graph=True)
            for _ in range(rounds):
                v = v / v.norm(dim=1, keepdim=True).clamp(min=1e-30)
                (v,) = torch.autograd.grad(g, leaf, v, retain_graph=True)
        return v

    def _or_by_slope(self, smooth: Tensor, w: Tensor, batch: Batch) -> Tensor:
        """The curvature [C]; where the loss is flat at w (absolute errors, the arms of Huber's loss), what makes a step
        of 1 / curvature take off the share FLAT_STEP of the loss, as its slope has it."""
        slope, height = self.grad(w, batch).square().sum(1), self.loss(w, batch)
        full = slope / height.clamp(min=torch.finfo(w.dtype).tiny)
        flat = smooth <= NEGLIGIBLE * full
        return torch.where(flat & (full > 0), full / FLAT_STEP, torch.where(smooth > 0, smooth, 1.0))

    def _curve_by_difference(self, w: Tensor, batch: Batch, v: Tensor) -> Tensor:
        """The Hessian times v, |v| = 1, as a central difference of gradients."""
        far = NUDGE * w.norm(dim=1, keepdim=True).clamp(min=1)
        v[:, self.parameter_dim :] = 0
        ahead, behind = torch.zeros_like(v), torch.zeros_like(v)
        self._grad_by_autograd(w + far * v, batch, self.layers(ahead))
        self._grad_by_autograd(w - far * v, batch, self.layers(behind))
        return (ahead - behind) / (2 * far)


def _freeze(task: NetworkTask, names: frozenset[str]) -> NetworkTask:
    frozen = copy.copy(task)
    frozen.copy_settings(task)
    frozen.frozen = names
    return frozen


class TargetUnitsModule(nn.Module):
    """A network that was trained on (y - mean) / scale, and answers in the units of y."""

    def __init__(self, net: nn.Module, mean: float, scale: float):
        super().__init__()
        self.net = net
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float64))
        self.register_buffer("scale", torch.tensor(scale, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        output = self.net(x)
        return output * self.scale.to(output.dtype) + self.mean.to(output.dtype)


def build_module(task: Task, w: Tensor, mean: float = 0.0, scale: float = 1.0) -> nn.Module:
    """The network with the parameters w [d], ready to be used: evaluation mode, answers in the target's own units.

    `mean` and `scale` are those of the target that the rows were standardised by. Classes and labels come as logits.
    """
    if not isinstance(task, NetworkTask):
        raise RequestError(f"task '{task.name}' is no network; its models are in .models, and in .coefficients.")
    net = task.device.unload_module(copy.deepcopy(task.module))
    values = task.layers(w[None])
    with torch.no_grad():
        for name, part in (*net.named_parameters(), *net.named_buffers()):
            if name in values:
                part.copy_(values[name][0] if part.dtype.is_floating_point else values[name][0].round())
    plain = task.units == TARGET_UNITS or task.metric == "log-loss" or (mean == 0 and scale == 1)
    return (net if plain else TargetUnitsModule(net, mean, scale)).eval()
