"""Local SGD of networks, one client after another: for models that fill a processor's cache by themselves.

Where a client's parameters are large, a stack of clients is read from memory again at every step; a client that takes
all its steps before the next client starts has them in the cache. Rows are gathered without padding and without
weights, and a step is added to the parameters straight from its matrix product. Convolutions of any size are computed
client by client: a stack of them is a convolution with as many groups, which PyTorch computes more slowly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mooring.core.cohort import Rows
from mooring.core.sgd_step import MixtureUpdate, Pull, constant_step_terms
from mooring.core.threads import map_threads

MIN_PER_CLIENT_BYTES = 1 << 18  # of parameters; smaller perceptrons are faster in a stack
Loss = Callable[[Tensor, Tensor], Tensor]  # (predictions [B, ...], y [B]) -> [B]
Labels = Callable[[Tensor], Tensor]  # a client's targets [S, B], as its steps use them
Steps = Iterator[tuple[float, Tensor, Tensor]]  # rate, indices of the pool's rows [B], their targets


class ClientPull(NamedTuple):
    """The terms decay * v - offset of a client's step, which are added to the gradient of the data."""

    decay: Tensor  # [1] or [d]
    offset: Tensor  # [0] where there is none, or [d]

    def for_part(self, columns: slice, shape: torch.Size) -> tuple[float | Tensor, Tensor | None]:
        """The terms of one parameter of the module."""
        decay = float(self.decay) if len(self.decay) == 1 else self.decay[columns].view(shape)
        return decay, self.offset[columns].view(shape) if len(self.offset) else None


MixtureRows = tuple[Tensor, Tensor] | None  # rows and targets for the gradient of alpha; None: those of the step
MixedSteps = Iterator[tuple[float, Tensor, Tensor, bool, MixtureRows]]  # a step; whether alpha moves; its rows
ClientUpdate = Callable[[Tensor, Tensor, ClientPull, Tensor, Steps], None]  # (start, result, pull, pool of rows, steps)


def has_convolution(module: nn.Module) -> bool:
    return any(isinstance(layer, nn.Conv2d) for layer in module.modules())


def identity(y: Tensor) -> Tensor:
    return y


def run_local_steps(
    client_update: ClientUpdate,
    labels: Labels,
    v: Tensor,
    start: Tensor,
    rows: Rows,
    row_index: np.ndarray,
    n: np.ndarray,
    rate: np.ndarray,
    pull: Pull | None,
    shift: Tensor | None,
    *,
    ridge: float,
) -> None:
    """Write each client's model after its steps into v [C, d], from its row of `start`, [C, d] or [1, d]."""
    decay, offset = constant_step_terms(v, pull, shift, ridge)
    steps = steps_by_client(rows, row_index, n, rate, labels)
    pull_terms = [ClientPull(*pair) for pair in zip(client_rows(decay, len(v)), client_rows(offset, len(v)))]
    if len(decay) == len(offset) == 1:
        pull_terms = pull_terms[:1] * len(v)
    for c, (client_start, client_pull) in enumerate(zip(client_rows(start, len(v)), pull_terms)):
        client_update(client_start, v[c], client_pull, rows.x, steps(c))


def run_mixture_steps(
    client_update: Callable[..., float],
    labels: Labels,
    w: Tensor,
    v: Tensor,
    alpha: Tensor,
    start: tuple[Tensor, Tensor],
    rows: Rows,
    row_index: np.ndarray,
    n: np.ndarray,
    rate: np.ndarray,
    update: MixtureUpdate,
) -> None:
    """Write each client's w, v [C, d] and alpha [C] after its steps on a model and a mixture, from `start`."""
    steps = steps_by_client(rows, row_index, n, rate, labels)
    validation_steps = (
        None
        if update.rows is None
        else steps_by_client(update.rows, update.row_index, update.n, update.n.astype(rate.dtype), labels)
    )
    pool = rows.x if update.rows is None else update.rows.x

    def mixture_steps(c: int) -> MixedSteps:
        validation = iter(()) if validation_steps is None else validation_steps(c)
        for step, moves in zip(steps(c), update.steps):
            if not moves or validation_steps is None:
                yield *step, moves, None
                continue
            validation_rate, index, y = next(validation)
            yield *step, validation_rate > 0, (index, y)

    for c, (w0, v0) in enumerate(zip(client_rows(start[0], len(v)), client_rows(start[1], len(v)))):
        alpha[c] = client_update(w0, v0, w[c], v[c], float(alpha[c]), update, (rows.x, pool), mixture_steps(c))


def map_client_ranges(work: Callable[[slice], None], clients: int) -> None:
    """work(clients) on as many ranges of clients as there are threads."""
    bounds = np.linspace(0, clients, min(torch.get_num_threads(), max(clients, 1)) + 1).astype(int).tolist()
    map_threads(work, [slice(*pair) for pair in pairwise(bounds)])


def client_rows(values: Tensor, clients: int) -> list[Tensor]:
    """Each client's row of [C, ...]; the same object for all clients if the values are the same."""
    return list(values) if len(values) > 1 and values.stride(0) else [values[0]] * clients


def steps_by_client(
    rows: Rows, row_index: np.ndarray, n: np.ndarray, rate: np.ndarray, labels: Labels
) -> Callable[[int], Steps]:
    """A function that iterates over the steps of client c; a step at rate 0 is skipped by its users."""
    client_index = torch.from_numpy(np.ascontiguousarray(row_index.swapaxes(0, 1)))
    counts, rates, widest = n.T.tolist(), rate.T.tolist(), row_index.shape[2]

    def steps(c: int) -> Steps:
        """Indices and targets of all steps are sliced at once, because each call of PyTorch costs time here."""
        index_of_steps = client_index[c]
        targets = labels(rows.y.index_select(0, index_of_steps.flatten()).unflatten(0, index_of_steps.shape))
        for rate, count, index, y in zip(rates[c], counts[c], index_of_steps.unbind(0), targets.unbind(0)):
            if count < widest:
                index, y = index[:count], y[:count]
            yield rate, index, y

    return steps


def shrink_in_place(values: Tensor, rate: float, decay: float | Tensor) -> float:
    """The factor 1 - rate * decay of `values` if it is a number; otherwise multiply `values` by it and return 1."""
    if isinstance(decay, float):
        return 1 - rate * decay
    values.mul_(1 - rate * decay)
    return 1.0


def pool_before_relu(layers: nn.Sequential) -> None:
    """Swap ReLU and max pooling where they follow each other: they commute, and ReLU then has fewer values."""
    for i in range(len(layers) - 1):
        if type(layers[i]) is nn.ReLU and type(layers[i + 1]) is nn.MaxPool2d and not layers[i + 1].return_indices:
            layers[i], layers[i + 1] = layers[i + 1], layers[i]


class FastModule:
    """A copy of a module whose parameters are stored in a vector at `slices`; `frozen` ones have no gradient.

    Convolutions are in channels-last layout, in which PyTorch's pooling is faster and its convolutions are no slower.
    """

    def __init__(self, module: nn.Module, slices: dict[str, slice], frozen: frozenset[str]):
        self.module = deepcopy(module)
        for layers in self.module.modules():
            if type(layers) is nn.Sequential:
                pool_before_relu(layers)
        parameters = dict(self.module.named_parameters())
        self.parameters = [(parameters[name], columns) for name, columns in slices.items()]
        self.trained = [(parameters[name], columns) for name, columns in slices.items() if name not in frozen]
        self.leaves = [parameter for parameter, _ in self.trained]
        for parameter, _ in self.parameters:
            if parameter.ndim == 4:
                parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, memory_format=torch.channels_last)
        for name in frozen:
            parameters[name].requires_grad_(False)

    def load(self, vector: Tensor) -> None:
        """Copy a vector [d] into the parameters."""
        with torch.no_grad():
            for parameter, columns in self.parameters:
                parameter.copy_(vector[columns].view(parameter.shape))

    def write_gradient(self, loss: Tensor, out: Tensor) -> None:
        """Write the gradient of a loss of the module's output into `out` [d]; 0 where frozen."""
        grads = torch.autograd.grad(loss, self.leaves, allow_unused=True)
        out.zero_()
        for grad, (parameter, columns) in zip(grads, self.trained):
            if grad is not None:
                out[columns].view(parameter.shape).copy_(grad)


def make_module_update(
    module: nn.Module, slices: dict[str, slice], loss: Loss, frozen: frozenset[str] = frozenset()
) -> ClientUpdate:
    """A client's steps along the gradient of the mean of `loss`(predictions, y) [B], with a copy of any module;
    `frozen` parameters keep their values."""
    fast = FastModule(module, slices, frozen)
    parameters, trained, leaves = fast.parameters, fast.trained, fast.leaves

    def update_client(start: Tensor, v: Tensor, client_pull: ClientPull, pool: Tensor, steps: Steps) -> None:
        fast.load(start)
        pull_by_part = [client_pull.for_part(columns, parameter.shape) for parameter, columns in trained]
        for rate, index, y in steps:
            if not rate:
                continue
            grads: Sequence[Tensor | None] = [None] * len(trained)
            if len(y):
                with torch.enable_grad():
                    grads = torch.autograd.grad(
                        loss(fast.module(pool.index_select(0, index)), y).mean(), leaves, allow_unused=True
                    )
            with torch.no_grad():
                for parameter, gradient, (decay, offset) in zip(leaves, grads, pull_by_part):
                    factor = shrink_in_place(parameter, rate, decay)
                    if factor != 1:
                        parameter.mul_(factor)
                    if offset is not None:
                        parameter.add_(offset, alpha=rate)
                    if gradient is not None:
                        parameter.sub_(gradient, alpha=rate)
        with torch.no_grad():
            for parameter, columns in parameters:
                v[columns].view(parameter.shape).copy_(parameter)

    return update_client
