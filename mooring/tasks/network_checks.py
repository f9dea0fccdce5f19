"""What is checked of a network before it is trained: whether it can be copied and called with other parameters, which
buffers and random numbers a forward pass uses, and whether faster forms of its gradient equal torch's own."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm

from mooring.core.cohort import Batch
from mooring.core.errors import RequestError
from mooring.core.task import trained_blocks
from mooring.tasks.network_losses import FORWARD_ERRORS, main_output

if TYPE_CHECKING:
    from mooring.tasks.network import NetworkTask

GRADIENT_TOLERANCE = 1e-3  # of two forms of a gradient, as a share of its largest entry
MAX_ROUNDINGS = 16  # the same in units of the number format, for parameters of low precision
ANSWER_TOLERANCE = 1e-4  # of two answers to the same rows, relative
SHIFT = 0.01  # how far the models of a check are from the start, as a share of its size
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
PROBE_CLIENTS, PROBE_ROWS = 2, 3  # what it takes to see whether networks can be stacked
SLOW = "There is a performance drop"  # how torch begins to say that it stacks by a loop of its own
PARAMETRIZED = ".parametrizations."  # in names of parameters that torch.nn.utils.parametrize computes others from


def check_module(module: nn.Module) -> None:
    """Refuse modules whose parameters cannot be replaced, or that lose something in a copy."""
    if isinstance(module, torch.jit.ScriptModule):
        raise RequestError("the model is a torch.jit module; give the Python module that it was made from.")
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise RequestError(f"the model is wrapped in {type(module).__name__}; give the wrapped module, model.module.")
    for path, layer in module.named_modules():
        computed = [name for name, value in vars(layer).items() if isinstance(value, Tensor) and not value.is_leaf]
        computed += ["weight" for hook in layer._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)]
        if computed:
            raise RequestError(
                f"layer '{path}' keeps the computed tensor '{computed[0]}', as torch.nn.utils.weight_norm, "
                "spectral_norm and pruning do; use torch.nn.utils.parametrizations, or prune.remove."
            )
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and not layer.track_running_stats:
            raise RequestError(
                f"layer '{path}' is a {type(layer).__name__} without running statistics: its answer at a row would "
                "depend on the other rows of a batch. Set track_running_stats = True, or use nn.GroupNorm."
            )
    for name, part in module.named_parameters():
        if part.dtype.is_complex:
            raise RequestError(f"parameter '{name}' is complex; give its real and imaginary parts as two parameters.")
        if part.is_meta:
            raise RequestError(f"parameter '{name}' is on the device 'meta', without values; make the model elsewhere.")
        if part._backward_hooks or getattr(part, "_post_accumulate_grad_hooks", None):
            raise RequestError(f"parameter '{name}' has a gradient hook, which copies of the model would not have.")
    types = {part.dtype for part in module.parameters() if part.requires_grad}
    if len(types) > 1:
        raise RequestError(f"the parameters are of several types, {', '.join(sorted(map(str, types)))}; use one.")


def copy_module(module: nn.Module) -> nn.Module:
    """A copy of a user's module; what keeps it from being copied is explained."""
    try:
        return copy.deepcopy(module)
    except Exception as error:  # of a layer or an attribute of the user's
        raise RequestError(f"the model cannot be copied for its clients: copy.deepcopy fails ({error}).") from error


def layer_name(parameter: str) -> str:
    """The name of the layer that a parameter belongs to, also one that another parameter is computed from."""
    layer, marker, _ = parameter.partition(PARAMETRIZED)
    return layer if marker else parameter.rpartition(".")[0]


def check_head(task: NetworkTask, rows: Tensor) -> None:
    """Refuse a layer that is declared last and plays no part in the output; warn where another one runs last."""
    last, calls = trained_blocks(task)[-1].layer, []
    layers = {name: part[0].detach() for name, part in task.layers(task.device.load(task.start()[None])).items()}
    leaves = {name: layers[name].requires_grad_() for name in task.shapes}  # in place
    head = [part for name, part in leaves.items() if layer_name(name) == last]
    owners = {layer_name(name) for name in task.shapes} - {""}
    handles = [
        task.module.get_submodule(name).register_forward_hook(lambda *_, name=name: calls.append(name))
        for name in owners
    ]
    try:
        with torch.enable_grad():
            output = task.call_module(lambda *a, **k: task.call_with(layers, *a, **k), task.device.load(rows))
            slopes = torch.autograd.grad(main_output(output).sum(), head, allow_unused=True)
    except FORWARD_ERRORS:
        return  # explained where the network is used; or the output has no gradient of its own
    finally:
        for handle in handles:
            handle.remove()
    if all(slope is None for slope in slopes):
        raise RequestError(
            f"the layer that is declared last, '{last}', plays no part in the model's output; declare the output layer "
            "last, or name the personal part, as in personal = 'fc'."
        )
    if last in calls and calls[-1] != last:
        warnings.warn(
            f"the head is the layer that is declared last, '{last}', but '{calls[-1]}' is the last that runs; name the "
            "personal part if another is meant."
        )


def has_hooks(module: nn.Module) -> bool:
    """Whether a layer has hooks, which forms of a network that are written out do not call."""
    return any(getattr(layer, name) for layer in module.modules() for name in HOOKS)


def parameter_aliases(module: nn.Module) -> dict[str, str]:
    """The other names of parameters and buffers that several layers share, with the name that w has them under.

    One layer in two places has one name: torch's own form of this leaves such a layer with replaced parameters.
    """
    aliases: dict[str, str] = {}
    for kind in ("_parameters", "_buffers"):
        first: dict[int, str] = {}
        for path, layer in module.named_modules():  # each layer once
            for name, part in getattr(layer, kind).items():
                full = f"{path}.{name}".lstrip(".")
                if part is not None and first.setdefault(id(part), full) != full:
                    aliases[full] = first[id(part)]
    return aliases


def find_changing_buffers(module: nn.Module, call: Callable[[nn.Module], Any]) -> tuple[str, ...]:
    """The buffers of other layers than normalization that a forward pass in training mode, `call`, changes.

    Refuses a forward pass that changes parameters; warns of one whose answer depends on what was called before.
    """
    tried = copy_module(module).train()
    norms = {id(b) for m in tried.modules() if isinstance(m, nn.modules.batchnorm._NormBase) for b in m.buffers()}
    own = [name for name, part in tried.named_buffers() if id(part) not in norms]
    _note_frozen_statistics(tried)
    bounded = {id(layer.weight) for layer in tried.modules() if getattr(layer, "max_norm", None) is not None}
    before = {name: part.detach().clone() for name, part in _tensors(tried).items()}
    try:
        output = call(tried)
    except Exception:  # what is wrong shows, and is explained, when the network is used
        return ()
    after = _tensors(tried)
    changed = {name for name, part in before.items() if not torch.equal(part, after[name])}
    for name, parameter in tried.named_parameters():
        if name in changed and id(parameter) not in bounded:
            raise RequestError(
                f"the model changes its parameter '{name}' in a forward pass; make it a buffer, which is stored and "
                "averaged as it is, or change it outside of the model."
            )
    for name, part in after.items():
        part.detach().copy_(before[name])
    if not _answers_alike(output, call(tried)):
        warnings.warn(
            "the model's answer in training mode changes when it is repeated with the same rows, parameters, buffers "
            "and random seeds, so that clients affect each other and a resumed run differs: keep what changes in "
            "buffers, and draw from torch's, numpy's or Python's global random numbers, in data sets as well."
        )
    return tuple(name for name in own if name in changed)


def _note_frozen_statistics(module: nn.Module) -> None:
    """Warn of normalization that torch's training mode would update although its parameters are frozen."""
    for path, layer in module.named_modules():
        is_norm = isinstance(layer, nn.modules.batchnorm._NormBase) and layer.track_running_stats
        if is_norm and layer.training and is_frozen(layer):
            warnings.warn(
                f"the parameters of normalization layer '{path}' are frozen: it uses and keeps its running statistics "
                "as they are in training, too, where torch's training mode would update them."
            )
            return


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def _answers_alike(first: Any, second: Any) -> bool:
    """Whether two outputs agree but for rounding, so far as they can be compared."""
    try:
        first, second = main_output(first), main_output(second)
    except RequestError:
        return True
    return first.shape == second.shape and torch.allclose(first, second, rtol=ANSWER_TOLERANCE, equal_nan=True)


def is_faithful(task: NetworkTask, x: Tensor, y: Tensor) -> bool:
    """Whether the task's fast gradients equal those of the network itself in training mode, on rows x, y [B, ...].

    Two clients have different models, and the second lacks the last row. What differs: recomputed layers
    (torch.utils.checkpoint), answers that depend on the other rows of a minibatch or on the mode, changes in place.
    """
    start = task.start()
    noise = torch.randn(2, task.dim, generator=torch.Generator().manual_seed(0), dtype=start.dtype)
    w = start + SHIFT * start.norm() / len(start) ** 0.5 * noise
    w[:, task.parameter_dim :] = start[task.parameter_dim :]
    weight = torch.full((2, len(y)), 1 / len(y), dtype=start.dtype)
    if len(y) > 1:
        weight[1], weight[1, -1] = 1 / (len(y) - 1), 0
    batch = Batch(torch.stack([x, x]), torch.stack([y, y]), weight)
    expected = task.trainer_gradients(w, batch._replace(x=batch.x.clone()))
    if task.trainer is not None and task.trainer.unused:
        return False  # optimizers leave parameters without a gradient as they are
    try:
        fast = task.grad(w, batch)
    except (RuntimeError, NotImplementedError):
        return False
    tolerance = max(GRADIENT_TOLERANCE, MAX_ROUNDINGS * torch.finfo(expected.dtype).eps)
    unequal = (fast - expected).abs().max() > tolerance * expected.abs().max()
    return not bool(unequal)


def can_stack(task: NetworkTask, layers: dict[str, Tensor], x: Tensor) -> bool:
    """Whether torch runs several of these networks as one, gradients included; what keeps it from that is said."""
    some = {name: part[:PROBE_CLIENTS].detach().requires_grad_() for name, part in layers.items()}
    rows = x[:PROBE_CLIENTS, :PROBE_ROWS]
    try:
        with warnings.catch_warnings(record=True) as notes, torch.enable_grad():
            warnings.simplefilter("always")
            output = task.call_stacked(some, rows)
            torch.autograd.grad(output.sum(), list(some.values()), allow_unused=True)
            with torch.no_grad():
                task.call_stacked(some, rows)
        slow = [note.message for note in notes if str(note.message).startswith(SLOW)]
        if slow:
            raise RuntimeError(slow[0])
        return True
    except Exception as error:
        if "random" in str(error):
            raise RequestError(
                "the model draws random numbers when it is evaluated; its predictions could not be repeated."
            ) from error
        task.call_one_by_one({name: part.detach() for name, part in some.items()}, rows)  # fails where the model does
        why = str(error).splitlines()[0].split(". ")[0]
        warnings.warn(f"the clients' networks are trained one after another, for torch cannot stack them ({why}).")
        return False


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
