"""A network with a memory: its last layer's scores are mixed with the targets of the nearest stored representations.

A model is (network w, alpha, size, keys, values): the first `size` of `capacity` keys are representations of a client's
rows, what the last layer takes as input, and values are their targets. With zeros behind w it is the network alone.
"""

from __future__ import annotations

import copy
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from mooring.core.cohort import Rows
from mooring.core.errors import RequestError
from mooring.core.task import Task, trained_blocks
from mooring.tasks.kernel_regression import KernelRegression
from mooring.tasks.linear import Linear
from mooring.tasks.logistic import Logistic
from mooring.tasks.network import CALLING, EVALUATED_ITEMS, NetworkTask
from mooring.tasks.network_losses import FORWARD_ERRORS, TARGET_UNITS, main_output
from mooring.tasks.network_training import RANDOM_LOCK

MAX_ALPHA = 1 - 1e-6  # the network's share keeps every probability above 0
ALPHA_GRID = tuple(k / 10 for k in range(10))  # 1 would give classes without neighbors a probability of 0
BUFFERS = ("alpha", "size", "keys", "values")


class Recall(NamedTuple):
    """How a memory is searched: of `capacity` keys the `neighbors` nearest, at distances d_j, weigh exp(-d_j / sigma);
    `classes` is 0 where values are numbers."""

    capacity: int
    neighbors: int
    sigma: float
    classes: int = 0


def neighbor_answer(
    recall: Recall, z: Tensor, keys: Tensor, values: Tensor, size: Tensor | int, without_itself: bool = False
) -> Tensor:
    """[B, classes]: the weights of the nearest keys by class, or [B, 1]: the weighted mean of their values; 0 where
    there are no keys. `without_itself`: z are the keys, and none is its own neighbor."""
    distance = torch.cdist(z, keys, compute_mode="donot_use_mm_for_euclid_dist")
    hidden = torch.arange(len(keys), device=z.device) >= size
    if without_itself:
        hidden = hidden | torch.eye(len(keys), dtype=torch.bool, device=z.device)
    nearest, place = torch.where(hidden, torch.inf, distance).topk(min(recall.neighbors, len(keys)), largest=False)
    exponent = torch.where(nearest.isinf(), -torch.inf, -nearest / recall.sigma)
    weight = torch.softmax(exponent, 1).nan_to_num(0.0)
    if not recall.classes:
        return (weight * values[place]).sum(1, keepdim=True)
    return weight.new_zeros(len(z), recall.classes).scatter_add(1, values[place].long(), weight)


def mix_outputs(recall: Recall, scores: Tensor, answer: Tensor, alpha: Tensor) -> Tensor:
    """alpha times the memory's answer and 1 - alpha times the network's: log-probabilities, one logit, or a number."""
    if not recall.classes:
        return torch.lerp(scores, answer, alpha)
    alpha, is_single = alpha.clamp(max=MAX_ALPHA), scores.shape[1] == 1
    own = F.logsigmoid(torch.cat([-scores, scores], 1)) if is_single else torch.log_softmax(scores, 1)
    mixed = torch.logaddexp(own + torch.log1p(-alpha), torch.log(alpha * answer))
    return mixed[:, 1:] - mixed[:, :1] if is_single else mixed


class LinearScores(nn.Module):
    """A table's model as a network, its parameters in the table's order; two classes have the scores 0 and x'w."""

    def __init__(self, task: Linear | Logistic):
        super().__init__()
        self.in_features, scores = task.features, getattr(task, "scores", 1)
        self.out_features = getattr(task, "classes", 1)
        self.slopes = nn.Parameter(torch.zeros(task.features, scores, dtype=task.dtype))
        self.intercept = nn.Parameter(torch.zeros(scores, dtype=task.dtype)) if task.intercept else None

    def forward(self, x: Tensor) -> Tensor:
        scores = x @ self.slopes if self.intercept is None else x @ self.slopes + self.intercept
        return F.pad(scores, (self.out_features - scores.shape[1], 0))


class MemoryHead(nn.Module):
    """A last layer and a memory."""

    alpha: Tensor
    size: Tensor
    keys: Tensor
    values: Tensor

    def __init__(self, head: nn.Linear | LinearScores, recall: Recall):
        super().__init__()
        self.head, self.recall, like = head, recall, next(head.parameters()).detach()
        self.register_buffer("alpha", like.new_zeros(()))
        self.register_buffer("size", like.new_zeros(()))
        self.register_buffer("keys", like.new_zeros(recall.capacity, head.in_features))
        self.register_buffer("values", like.new_zeros(recall.capacity))

    def forward(self, z: Tensor) -> Tensor:
        answer = neighbor_answer(self.recall, z, self.keys, self.values, self.size)
        return mix_outputs(self.recall, self.head(z), answer, self.alpha)


class MemoryTask(NetworkTask):
    """The task of a network with a memory, to be evaluated; the network alone is trained."""

    name: ClassVar[str] = "memory"

    def __init__(self, network: NetworkTask, recall: Recall):
        self.copy_settings(network)
        self.network, self.module = network, copy.deepcopy(network.module)
        self.head_layer = trained_blocks(network)[-1].layer
        head: nn.Linear = self.module.get_submodule(self.head_layer)  # type: ignore[assignment]
        self.recall = recall._replace(classes=0 if network.metric == "mse" else max(head.out_features, 2))
        memory = MemoryHead(head, self.recall).eval()
        if self.head_layer:
            self.module.set_submodule(self.head_layer, memory)
        else:
            self.module = memory
        own = {f"{self.head_layer}.{name}".lstrip("."): getattr(memory, name).shape for name in BUFFERS}
        self.shapes = {name: p.shape for name, p in self.module.named_parameters() if p.requires_grad}
        self.buffer_shapes = network.buffer_shapes | own
        self.sizes = [shape.numel() for shape in (self.shapes | self.buffer_shapes).values()]
        self.dim = sum(self.sizes)
        self.by_client, self.is_large_perceptron = True, False

    def remember(self, w: Tensor, train: Rows, validation: Rows, alpha: float | None) -> Tensor:
        """[C, dim]: networks w [C, d] with the memories of their clients' training rows.

        Without alpha, each client's is that of ALPHA_GRID with the lowest mean loss on its validation rows, or, if
        there are none, on its stored rows, none being its own neighbor; of equal ones the lowest.
        """
        return torch.stack([self._remember(w[c], train.of(c), validation.of(c), alpha) for c in range(len(w))])

    def _remember(
        self, w: Tensor, train: tuple[Tensor, Tensor], validation: tuple[Tensor, Tensor], alpha: float | None
    ) -> Tensor:
        (x, y), capacity = train, self.recall.capacity
        size = min(len(y), capacity)
        if not size:
            return F.pad(w, (0, self.dim - len(w)))
        stored = torch.arange(size) * len(y) // size
        keys, values = self._represent(w, x[stored]), y[stored].to(self.dtype)
        values = values * self.scale + self.mean if self.units == TARGET_UNITS else values
        if alpha is None:
            held = (keys, y[stored]) if not len(validation[1]) else (self._represent(w, validation[0]), validation[1])
            alpha = self._choose_alpha(w, keys, values, *held)
        padding = capacity - size
        parts = w, w.new_tensor([alpha, size]), F.pad(keys, (0, 0, 0, padding)).flatten(), F.pad(values, (0, padding))
        return torch.cat(parts)

    def _choose_alpha(self, w: Tensor, keys: Tensor, values: Tensor, z: Tensor, y: Tensor) -> float:
        layers = self.network.layers(w[None])
        head = {
            block.name.rpartition(".")[2]: layers[block.name][0]
            for block in trained_blocks(self.network)
            if block.layer == self.head_layer
        }
        scores = functional_call(self.network.module.get_submodule(self.head_layer), head, z)
        answer = neighbor_answer(self.recall, z, keys, values, len(keys), without_itself=z is keys)
        outputs = [mix_outputs(self.recall, scores, answer, w.new_tensor(alpha)) for alpha in ALPHA_GRID]
        losses = torch.stack([self.each_loss(output[None], y[None]).mean() for output in outputs])
        return ALPHA_GRID[int(losses.argmin())]

    def _represent(self, w: Tensor, x: Tensor) -> Tensor:
        """[B, k]: what the last layer takes as input."""
        with torch.no_grad():
            return torch.cat([represent(self.network, w, part) for part in x.split(EVALUATED_ITEMS)]).to(self.dtype)


def add_memory(task: Task, recall: Recall, owner: str) -> MemoryTask:
    """The task with a memory; `owner`, an algorithm, refuses one that has no such form."""
    if isinstance(task, NetworkTask):
        return task.variant(recall, lambda: MemoryTask(_check_network(task, owner), recall))  # type: ignore
    if not isinstance(task, Linear | Logistic) or isinstance(task, KernelRegression):
        raise RequestError(
            f"{owner} mixes the model's answer with that of stored rows, probabilities of classes or numbers with a "
            f"squared loss: not for task '{task.name}'; use ditto or fedprox_personal."
        )
    loss = "half_square" if isinstance(task, Linear) else "cross_entropy"
    return MemoryTask(NetworkTask(lambda: LinearScores(task), loss), recall)


def _check_network(task: NetworkTask, owner: str) -> NetworkTask:
    """The network, whose output must be that of a linear layer: one score per class, or one number."""
    task.check_head()
    head = task.module.get_submodule(trained_blocks(task)[-1].layer)
    if task.has_own_loss:
        raise RequestError(
            f"{owner} mixes probabilities, which a loss of your own does not define; use loss = 'cross_entropy', "
            "'binary_cross_entropy' or 'half_square', or fedavg_finetune."
        )
    is_single = type(head) is nn.Linear and (task.classifies or head.out_features == 1)
    if not is_single or not _is_last(task, head):
        raise RequestError(
            f"{owner} needs a network whose output is that of a last nn.Linear layer: one score per class, or one "
            "number per row; use fedavg_finetune."
        )
    return task


def _is_last(task: NetworkTask, head: nn.Module) -> bool:
    """Whether the network's output is the layer's, for one vector per row; so far as some rows are known."""
    seen: list[tuple[Tensor, Tensor]] = []
    if task.sample is None:
        return True
    hook = head.register_forward_hook(lambda _, given, scores: seen.append((given[0], scores)))
    try:
        with torch.no_grad():
            output = task.call_module(task.module, task.device.load(task.sample))
    except FORWARD_ERRORS:
        return True  # explained where training fails
    finally:
        hook.remove()
    if len(seen) != 1 or seen[0][0].ndim != 2:
        return False
    main = main_output(output)
    return main is seen[0][1] or (task.device.is_mixed and torch.equal(main, seen[0][1].to(task.dtype)))


def has_representation(task: Task) -> bool:
    """Whether the task is a network with more than one layer."""
    task.check_head()
    return hasattr(task, "module") and len({block.layer for block in task.layout}) > 1


def represent(task: NetworkTask | Task, w: Tensor, x: Tensor, key: int = 0) -> Tensor:
    """[B, k]: the representations of rows x [B, ...], or of the items that x numbers, by the network with parameters w
    [d], in evaluation mode; data sets that draw random numbers follow `key`, as in a local step."""
    network: NetworkTask = task  # type: ignore[assignment]  # a metered network is one, too
    device = network.device
    layers = {name: part[0] for name, part in network.layers(device.load(w)[None]).items()}
    layers |= {name: layers[name].detach() for name in network.buffer_shapes}
    last = [block.layer for block in network.layout if block.start < network.gradient_dim][-1]
    seen: list[Tensor] = []
    with CALLING, RANDOM_LOCK, device.fork_random_state():
        torch.manual_seed(int(key) >> 1)
        hook = network.module.get_submodule(last).register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        try:
            network.call_module(lambda *args, **named: network.call_with(layers, *args, **named), device.load(x))
        finally:
            hook.remove()
    return device.unload(seen[-1].flatten(1))
