"""Any torch.nn.Module with any loss as a task: the cohort's trainable parameters are one matrix [C, d]."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from threading import RLock
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from mooring.core.cohort import Batch, Rows
from mooring.core.errors import RequestError
from mooring.core.items import DatasetItems, TensorItems, map_tensors
from mooring.core.seeds import random_words
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
from mooring.tasks import network_steps
from mooring.tasks.device import FULL_PRECISION, Device
from mooring.tasks.fused import per_client
from mooring.tasks.fused.perceptron_stacked import is_perceptron, perceptron_grad
from mooring.tasks.network_checks import (
    PROBE_ROWS,
    can_stack,
    check_head,
    check_module,
    find_changing_buffers,
    has_dropout,
    has_hooks,
    is_faithful,
    layer_name,
    may_be_random,
    parameter_aliases,
    tracked_buffers,
)
from mooring.tasks.network_curvature import curvature_constants
from mooring.tasks.network_losses import (
    EXP,
    FORWARD_ERRORS,
    SIGMOID,
    SOFTMAX,
    STANDARD_UNITS,
    TARGET_UNITS,
    OutputLoss,
    RowLoss,
    class_dim,
    half_square,
    main_output,
)
from mooring.tasks.network_training import RANDOM_LOCK, NetworkTrainer, fork_python_random, seed_python_random

EVALUATED_ITEMS = 256  # items that are read at once in evaluation: bounds memory
BUFFERS = ("average", "local", "frozen")  # what becomes of running statistics
CALLING = RLock()  # a functional call puts the parameters into the module for its time: one thread at a time
LEAST_PROBABILITY = 1e-12  # of a class, in a divergence
VAR_POSITIONAL, VAR_KEYWORD = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


class NetworkTask(OutputLoss, Task):
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
        target_shape: tuple[int, ...] = (),
        precision: str = FULL_PRECISION,
        compile: bool = False,
    ):
        self.set_loss(loss, units, mean, scale, target_column)
        self.make, self.items, self.sample, self.target_shape = make, items, sample, target_shape
        self._dtype = torch.float32
        self.changes_inputs = False  # whether a forward pass changes its rows in place
        if buffers not in BUFFERS:
            raise RequestError(f"buffers must be one of {', '.join(BUFFERS)}, got {buffers!r}.")
        self.ridge = ridge
        self.device = Device(device, precision, compile)
        self.module = self.device.load_module(self._made(0).eval())
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
        self.is_random = may_be_random(self.module) or isinstance(items, DatasetItems)  # in training
        self.is_structured: bool | None = True if items is not None else None  # inputs or outputs are no tensors
        needs_clients = self.buffer_shapes or self.batch_loss is not None or items is not None
        needs_clients = needs_clients or not self.device.is_plain or self._shrinks_embeddings
        self.by_client: bool | None = True if needs_clients else None
        frozen = any(not p.requires_grad for p in self.module.parameters())
        self.is_perceptron = is_perceptron(self.module) and not frozen and not has_dropout(self.module)
        self.is_perceptron = self.is_perceptron and not has_hooks(self.module)
        self.is_perceptron = self.is_perceptron and self.device.is_plain and items is None
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
        return network_steps.can_compile(self)

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

        def call(module: nn.Module) -> Any:
            rows = self.device.load(self.sample).clone()  # type: ignore[arg-type]
            torch.manual_seed(0)
            seed_python_random(0)
            output = self.call_module(module, rows)
            self.changes_inputs = self.items is None and not torch.equal(rows.cpu(), self.sample)  # type: ignore[arg-type]
            return output

        with torch.no_grad(), RANDOM_LOCK, self.device.fork_random_state(), fork_python_random():
            try:
                call(self.module)
            except Exception:  # explained where the network is used
                return ()
            return find_changing_buffers(self.module, call)

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
            return self.call_one_by_one(layers, x)
        with CALLING:
            if self.stacks is None:
                # a stack of convolutions would be one with as many groups, which is slower
                self.stacks = not self.by_client and can_stack(self, layers, x) and not self.convolutional
        return self.call_stacked(layers, x) if self.stacks else self.call_one_by_one(layers, x)

    def call_module(self, call: Callable[..., Any], x: Tensor) -> Any:
        """What a network answers at rows x [B, ...], or at the items that x numbers."""
        inputs = x if self.items is None else map_tensors(self.items.take(x), self.device.load)
        inputs = map_tensors(inputs, lambda part: part.to(self.dtype) if part.dtype.is_floating_point else part)
        inputs = inputs.clone() if self.changes_inputs and self.items is None else inputs
        with self.device.autocast():
            if isinstance(inputs, Mapping) and self._takes_names(inputs):
                output = call(**inputs)
            elif isinstance(inputs, tuple | list) and (len(self.accepted) > 1 or self._accepts(VAR_POSITIONAL)):
                output = call(*inputs)
            else:
                output = call(inputs)
        return output.to(self.dtype) if self.device.is_mixed and isinstance(output, Tensor) else output

    def _accepts(self, kind: Any) -> bool:
        """Whether the forward pass has a parameter such as *args or **kwargs."""
        return any(parameter.kind is kind for parameter in self.accepted.values())

    def _takes_names(self, inputs: Mapping[str, Any]) -> bool:
        """Whether inputs are arguments by name; if not, the network takes the whole dictionary."""
        if self._accepts(VAR_KEYWORD) or set(inputs) <= set(self.accepted):
            return True
        unknown = [name for name in inputs if name not in self.accepted]
        if len(self.accepted) > 1 and len(unknown) < len(inputs):
            raise RequestError(
                f"the model's forward pass takes {', '.join(self.accepted)}, but the inputs have {unknown[0]!r} as "
                "well: leave it out, or let the model accept **kwargs."
            )
        return False

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
                main_output(output)  # refuses what has no predictions
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
            answer = self.call_loss(self.row_loss, self.loss_input(output), self.own_units(y))
        if isinstance(output, Tensor) and not answer.requires_grad:
            raise RequestError("the loss does not depend on the outputs of the model: is a tensor detached?")
        if answer.ndim == 0:
            self.batch_loss, self.is_structured = self.row_loss, True

    def call_stacked(self, layers: dict[str, Tensor], x: Tensor) -> Tensor:
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

    def call_one_by_one(self, layers: dict[str, Tensor], x: Tensor) -> Tensor:
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
            return self.main_output(self.call_module(call, rows))
        with RANDOM_LOCK, self.device.fork_random_state():
            torch.manual_seed(0)  # of data sets that draw random numbers
            return torch.cat([self.main_output(self.call_module(call, part)) for part in rows.split(EVALUATED_ITEMS)])

    def minibatch_loss(self, module: Callable[..., Any], x: Tensor, y: Tensor) -> Tensor:
        """The loss of one client's minibatch x [B, ...], y [B, ...] as a number, by a copy of the network."""
        try:
            output = self.call_module(module, x)
        except FORWARD_ERRORS as error:
            raise self._explain(x, error) from error
        return self.output_loss(output, y)

    def row_losses(self, layers: dict[str, Tensor], batch: Batch) -> Tensor:
        self._probe(batch.x[0], batch.y[0])
        if not self.has_own_loss or not self.is_structured:
            return self.each_loss(self._forward(layers, batch.x), batch.y)
        return torch.stack([self._client_losses(layers, c, batch) for c in range(len(batch.y))])

    def _client_losses(self, layers: dict[str, Tensor], c: int, batch: Batch) -> Tensor:
        """[B]: a client's losses by a loss that receives what the network returns; one number per batch is asked for
        row by row."""
        single = {name: part[c] for name, part in layers.items()}

        def call(*args: object, **named: object) -> Any:
            return self.call_with(single, *args, **named)

        def losses(x: Tensor, y: Tensor) -> Tensor:
            return self.call_loss(self.row_loss, self.loss_input(self.call_module(call, x)), self.own_units(y))

        x, y = batch.x[c], batch.y[c]
        with CALLING, RANDOM_LOCK, self.device.fork_random_state():
            torch.manual_seed(0)  # of data sets that draw random numbers
            if self.batch_loss is not None:
                return torch.stack([losses(x[i : i + 1], y[i : i + 1]).reshape(()) for i in range(len(y))])
            return losses(x, y).reshape(len(y), -1).mean(1)

    def to_device(self, w: Tensor, batch: Batch) -> tuple[Tensor, Batch]:
        """Parameters and rows where the network computes."""
        return self.device.load(w), self.device.load_batch(batch)

    def loss(self, w: Tensor, batch: Batch) -> Tensor:
        w, batch = self.to_device(w, batch)
        with torch.no_grad():
            data = (batch.weight * self.row_losses(self.layers(w), batch)).sum(1)
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
        w, batch = self.to_device(w, batch)
        out = torch.empty_like(w, memory_format=torch.contiguous_format)
        places = self.layers(out)
        self._probe(batch.x[0, :PROBE_ROWS], batch.y[0, :PROBE_ROWS])
        if self.is_perceptron and isinstance(self.module, nn.Sequential) and self.batch_loss is None:

            def total(output: Tensor) -> Tensor:
                return (batch.weight * self.each_loss(output, batch.y)).sum()

            perceptron_grad(self.module, self.layers(w.detach()), batch.x, total, places)
        elif self.convolutional and not self._is_structured(batch):
            network_steps.grad_by_client(self, w, batch, out)
        else:
            self.grad_by_autograd(w, batch, places)
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
        return partial(network_steps.step_perceptron, self) if self.is_perceptron and self.device.is_cpu else None

    @property
    def steps_by_client(self) -> bool:
        """Whether local steps are faster client by client than stacked: large perceptrons, and convolutions."""
        return (self.convolutional or self.is_large_perceptron) and self.device.is_cpu

    def local_steps(self, rows: Rows) -> LocalSteps | None:
        return partial(network_steps.step_by_client, self) if self.steps_by_client and self._reads(rows) else None

    def mixture_steps(self, rows: Rows) -> MixtureSteps | None:
        fused = self.steps_by_client and self.is_perceptron and not self.ridge and self._reads(rows)
        return partial(network_steps.mix_by_client, self) if fused else None

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

    def _is_structured(self, batch: Batch) -> bool:
        self._probe(batch.x[0], batch.y[0])
        return bool(self.is_structured or self.buffer_shapes)

    def grad_by_autograd(self, w: Tensor, batch: Batch, places: dict[str, Tensor]) -> None:
        layers = self.layers(w.detach())
        if self.frozen >= set(self.shapes):
            return  # nothing moves: `_add_penalty` has the zeros
        leaves = {name: layers[name].detach().requires_grad_() for name in self.shapes if name not in self.frozen}
        with torch.enable_grad():
            total = (batch.weight * self.row_losses(layers | leaves, batch)).sum()
            parts = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        for place, part in zip(
            (places[name] for name in leaves), parts
        ):  # straight into place: half the copying of a cat
            place.copy_(part) if part is not None else place.zero_()

    def predict(self, w: Tensor, x: Tensor) -> Tensor:
        """Probabilities of the classes, or of each label; numbers as (y - mean) / scale, like the rows' own."""
        with torch.no_grad():
            output = self.device.unload(self._forward(self.layers(self.device.load(w)), self.device.load(x)))
        if self.link == SOFTMAX:
            return torch.softmax(output, self._class_dim(output))
        if self.link == EXP:
            return output.exp()
        output = output.reshape(x.shape[:2]) if output.shape[2:].numel() == 1 else output
        if self.link is not None:
            return torch.sigmoid(output) if self.link == SIGMOID else output
        return (output - self.mean) / self.scale if self.units == TARGET_UNITS else output

    def _class_dim(self, output: Tensor) -> int:
        """The dimension of the classes in outputs [C, B, ...]; of tokens in sequences, or images, of another size than
        those of training the last, or the first."""
        inner = tuple(output.shape[2:])
        if len(inner) < 2:
            return -1
        if self.target_shape not in (inner[:-1], inner[1:]):
            return 2 if len(inner) > 2 else -1
        return class_dim(output.shape, (*output.shape[:2], *self.target_shape), 2)

    def predict_items(self, w: Tensor, items: Any, count: int) -> Tensor:
        """[N, ...]: what `predict` returns of a model w [d] for the inputs of the first `count` items."""
        reader = copy.copy(self)
        reader.items, reader.is_structured = items, True
        return reader.predict(w[None], torch.arange(count)[None])[0]

    def row_risk(self, w: Tensor, batch: Batch) -> Tensor:
        w, batch = self.to_device(w, batch)
        with torch.no_grad():
            losses = self.row_losses(self.layers(w), batch)
        return self.device.unload(self.risk_per_loss * losses)

    def row_divergence(self, w: Tensor, reference: Tensor, batch: Batch) -> Tensor:
        """Of predicted numbers, or Kullback and Leibler's of predicted probabilities."""
        if self.has_own_loss:
            return super().row_divergence(w, reference, batch)
        said, true = self.predict(w, batch.x), self.predict(reference, batch.x)
        if self.row_loss is half_square:
            rise = (said - true) ** 2
        elif self.classifies:
            rise = torch.xlogy(true, true) - torch.xlogy(true, said.clamp(min=LEAST_PROBABILITY))
            rise = rise.sum(class_dim(rise.shape, batch.y.shape, 2))
        else:
            p, q = torch.stack([true, 1 - true], -1), torch.stack([said, 1 - said], -1)
            rise = (torch.xlogy(p, p) - torch.xlogy(p, q.clamp(min=LEAST_PROBABILITY))).sum(-1)
        return rise.reshape(*batch.y.shape[:2], -1).mean(2).clamp(min=0)

    def constants(self, batch: Batch, w: Tensor | None = None, rounds: int = 10) -> Constants:
        return curvature_constants(self, batch, w, rounds)


def _freeze(task: NetworkTask, names: frozenset[str]) -> NetworkTask:
    frozen = copy.copy(task)
    frozen.copy_settings(task)
    frozen.frozen = names
    return frozen
