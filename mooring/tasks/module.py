"""Any torch.nn.Module with any per-sample loss as a task: the cohort's parameters are one matrix [C, d]."""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from mooring.core.cohort import Batch
from mooring.core.errors import RequestError
from mooring.core.seeds import words
from mooring.core.steps import Move
from mooring.core.task import Constants, Layout, Task, layout_of
from mooring.tasks.perceptron import is_perceptron, perceptron_grad, perceptron_step, slope_of

RowLoss = Callable[[Tensor, Tensor], Tensor]  # (predictions [B, ...], y [B]) -> [B]


def cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y, reduction="none")


def half_square(output: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (output.reshape(y.shape) - y) ** 2


LOSSES: dict[str, RowLoss] = {"cross_entropy": cross_entropy, "half_square": half_square}
ROW_CURVATURE = 5.0  # a network's Hessian has a few large eigenvalues: its trace is taken as this many of the largest
CALLING = RLock()  # a functional call puts the parameters into the module for its time: one thread at a time
BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)


class Module(Task):
    """A network as a task. `make()` returns the module; its random start follows the seed.

    Stochastic layers such as dropout are switched off, so that a stay at a client can be replayed.
    """

    name: ClassVar[str] = "module"
    kinds: ClassVar[tuple[str, ...]] = ("regression", "binary", "classes")

    def __init__(self, make: Callable[[], nn.Module], loss: str | RowLoss = "cross_entropy", ridge: float = 0.0):
        if isinstance(loss, str) and loss not in LOSSES:
            raise RequestError(f"loss must be one of {', '.join(LOSSES)} or a function, got {loss!r}.")
        self.make = make
        self.row_loss: RowLoss = LOSSES[loss] if isinstance(loss, str) else loss
        self.classifies = self.row_loss is cross_entropy
        self.ridge = ridge
        self.module = make().eval()
        if not isinstance(self.module, nn.Module):
            raise RequestError(f"the model's function must return a torch.nn.Module, got {type(self.module).__name__}.")
        for path, layer in self.module.named_modules():
            if isinstance(layer, BATCH_NORMS):
                raise RequestError(
                    f"layer '{path}' is a {type(layer).__name__}: its running statistics leak between clients and do "
                    "not average. Use nn.GroupNorm or nn.LayerNorm instead."
                )
        self.shapes = {name: p.shape for name, p in self.module.named_parameters()}
        self.sizes = [shape.numel() for shape in self.shapes.values()]
        if not self.sizes:
            raise RequestError("the model has no parameters to train.")
        self.dim = sum(self.sizes)
        self.is_perceptron = is_perceptron(self.module)
        self.dtype = next(self.module.parameters()).dtype

    @property
    def metric(self) -> str:
        return "log-loss" if self.classifies else "mse" if self.row_loss is half_square else "loss"

    @property
    def likelihood(self) -> bool:
        return self.classifies

    @property
    def risk_per_loss(self) -> float:
        return 2.0 if self.row_loss is half_square else 1.0

    @property
    def layout(self) -> Layout:
        return layout_of(self.shapes, {name: name.rpartition(".")[0] for name in self.shapes})

    def start(self, seed: int = 0) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(words(seed, "model")[0] >> 1))
            fresh = self.make()
        return torch.cat([p.detach().reshape(-1) for p in fresh.parameters()]).to(self.dtype)

    def layers(self, w: Tensor) -> dict[str, Tensor]:
        """Each layer's parameters [C, ...] as views of w [C, d]."""
        return {
            name: part.reshape(len(w), *shape)
            for (name, shape), part in zip(self.shapes.items(), torch.split(w, self.sizes, 1))
        }

    def _forward(self, layers: dict[str, Tensor], x: Tensor) -> Tensor:
        if len(x) == 1:  # a lone client needs no stacking, and its kernels are faster
            single = {name: part[0] for name, part in layers.items()}
            with CALLING:
                return functional_call(self.module, single, (x[0],))[None]
        with CALLING:
            return vmap(lambda params, rows: functional_call(self.module, params, (rows,)))(layers, x)

    def _row_losses(self, layers: dict[str, Tensor], batch: Batch) -> Tensor:
        return self._each_loss(self._forward(layers, batch.x), batch.y)

    def _each_loss(self, output: Tensor, y: Tensor) -> Tensor:
        return self.row_loss(output.flatten(0, 1), y.flatten()).view(y.shape[0], y.shape[1])

    def loss(self, w: Tensor, batch: Batch) -> Tensor:
        with torch.no_grad():
            data = (batch.weight * self._row_losses(self.layers(w), batch)).sum(1)
        return data + self.ridge / 2 * (w**2).sum(1)

    def grad(self, w: Tensor, batch: Batch) -> Tensor:
        out = torch.empty_like(w, memory_format=torch.contiguous_format)
        places = self.layers(out)
        if self.is_perceptron and isinstance(self.module, nn.Sequential):

            def total(output: Tensor) -> Tensor:
                return (batch.weight * self._each_loss(output, batch.y)).sum()

            perceptron_grad(self.module, self.layers(w.detach()), batch.x, total, places)
        else:
            self._grad_by_vmap(w, batch, places)
        return out.add_(w, alpha=self.ridge) if self.ridge else out

    @property
    def step(self):  # type: ignore[override]
        return self._perceptron_step if self.is_perceptron else None

    def _perceptron_step(self, v: Tensor, batch: Batch, move: Move) -> None:
        weight = batch.weight * move.rate

        def slope(output: Tensor) -> Tensor:
            if not self.classifies:
                return slope_of(lambda out: (weight * self._each_loss(out, batch.y)).sum(), output)
            residual = torch.softmax(output, -1)
            residual.scatter_add_(-1, batch.y[..., None], residual.new_full((), -1).expand_as(batch.y)[..., None])
            return residual.mul_(weight[..., None])

        assert isinstance(self.module, nn.Sequential)  # what is_perceptron says
        places = {part.name: part.place for part in self.layout}
        perceptron_step(self.module, self.layers(v), batch.x, slope, move, self.ridge, places)

    def _grad_by_vmap(self, w: Tensor, batch: Batch, places: dict[str, Tensor]) -> None:
        leaves = {name: part.detach().requires_grad_() for name, part in self.layers(w).items()}
        with torch.enable_grad():
            total = (batch.weight * self._row_losses(leaves, batch)).sum()
            parts = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        for place, part in zip(places.values(), parts):  # straight into place: half the copying of a cat
            place.copy_(part) if part is not None else place.zero_()

    def predict(self, w: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            output = self._forward(self.layers(w), x)
        if self.classifies:
            return torch.softmax(output, -1)
        return output.reshape(x.shape[:2]) if output.shape[2:].numel() == 1 else output

    def row_risk(self, w: Tensor, batch: Batch) -> Tensor:
        with torch.no_grad():
            losses = self._row_losses(self.layers(w), batch)
        return self.risk_per_loss * losses

    def score(self, w: Tensor, batch: Batch) -> dict[str, Tensor]:
        if not self.classifies:
            return {}
        hit = (batch.weight * (self.predict(w, batch.x).argmax(-1) == batch.y)).sum(1)
        return {"accuracy": torch.where(batch.weight.sum(1) > 0, hit, torch.full_like(hit, torch.nan))}

    def constants(self, batch: Batch, w: Tensor | None = None, rounds: int = 10) -> Constants:
        """smooth: the largest curvature at w, by power iteration on Hessian products; convexity is unknown (nan), and a
        single row's curvature a guess from `smooth`."""
        w = self.start()[None].expand(len(batch.y), -1) if w is None else w
        leaf = w.detach().clone().requires_grad_()
        with torch.enable_grad():
            total = (batch.weight * self._row_losses(self.layers(leaf), batch)).sum()
            (g,) = torch.autograd.grad(total, leaf, create_graph=True)
            v = torch.randn(leaf.shape, generator=torch.Generator().manual_seed(0), dtype=w.dtype)
            for _ in range(rounds):
                v = v / v.norm(dim=1, keepdim=True).clamp(min=1e-30)
                (v,) = torch.autograd.grad(g, leaf, v, retain_graph=True)
        smooth = v.norm(dim=1) + self.ridge
        nan = torch.full_like(smooth, torch.nan)
        return Constants(smooth, nan, nan, ROW_CURVATURE * smooth, nan, (1 + ROW_CURVATURE) * smooth)
