"""Local training of a network in training mode: one client after another, each on its own rows without padding.

Batch statistics, dropout and losses of whole batches need exactly the rows of a client's minibatch.
A client's parameters are views of its row of v [C, d], so that an optimizer's step on the row is one on the network.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mooring.core.cohort import Batch, Rows
from mooring.core.errors import RequestError
from mooring.core.sgd_step import constant_step_terms

RANDOM_LOCK = RLock()  # torch has one generator of random numbers: one client draws at a time


class NetworkTrainer:
    """A copy of a task's network in training mode, and what takes steps on it."""

    def __init__(self, task: Any):
        self.task, self.dim = task, task.gradient_dim
        self.module = copy.deepcopy(task.module).train()
        self.call = task.device.compile(self.module)
        norms = [layer for layer in self.module.modules() if isinstance(layer, nn.modules.batchnorm._NormBase)]
        self.tracked = [layer for layer in norms if layer.training and self._is_tracked(layer)]
        for layer in norms:
            layer.train(layer in self.tracked)
        named = dict(self.module.named_parameters())
        places = {part.name: part.place for part in task.layout}
        self.parts = [(named[name], places[name]) for name in task.shapes]
        self.leaves = [part for part, _ in self.parts]
        moving = [(named[name], places[name]) for name in task.shapes if name not in task.frozen]
        self.moving, self.moving_places = [part for part, _ in moving], [place for _, place in moving]
        for name in task.frozen:
            named[name].requires_grad_(False)
        self.buffers = [(*self._owner(name), places[name]) for name in task.buffer_shapes]
        untracked = [name for name in task.changing_buffers if name not in task.buffer_shapes]
        self.fixed_buffers = [(*self._owner(name), self.module.get_buffer(name).clone()) for name in untracked]
        self.unused: list[slice] = []  # the places of parameters that played no part in the last gradient
        self.draws_in_python = False  # whether numpy's or Python's random numbers are drawn
        self.own = [part.data for part, _ in self.parts]
        self.flat: Tensor | None = None  # [parameters], the last gradient: allocated once, since it may be large

    def _is_tracked(self, layer: nn.Module) -> bool:
        names = {id(buffer) for name, buffer in self.module.named_buffers() if name in self.task.buffer_shapes}
        return any(id(buffer) in names for buffer in layer.buffers(recurse=False))

    def _owner(self, name: str) -> tuple[dict[str, Any], str, Tensor]:
        """The buffers of a layer, the name of one of them, and its tensor: a forward pass may put another there."""
        path, _, last = name.rpartition(".")
        buffers: dict[str, Any] = self.module.get_submodule(path)._buffers
        return buffers, last, buffers[last]

    def load(self, row: Tensor) -> None:
        """Make the parameters views of a row [d], and copy its buffers."""
        with torch.no_grad():
            for part, place in self.parts:
                part.data = row[place].view(part.shape)
            for owner, name, buffer, place in self.buffers:
                value = row[place].view(buffer.shape)
                owner[name] = buffer.copy_(value if buffer.dtype.is_floating_point else value.round())
            for owner, name, buffer, value in self.fixed_buffers:
                owner[name] = buffer.copy_(value)

    def store_buffers(self, row: Tensor) -> None:
        for owner, name, _, place in self.buffers:
            row[place] = owner[name].detach().flatten().to(row.dtype)

    def release(self) -> None:
        """Make the parameters tensors of their own again: rows of models are not held in memory."""
        for (part, _), data in zip(self.parts, self.own):
            part.data = data

    def gradient(self, x: Tensor, y: Tensor, key: Any) -> Tensor:
        """[parameters]: the gradient of a minibatch's loss; it is overwritten by the next one."""
        if self.flat is None:
            self.flat = self.leaves[0].new_empty(self.dim)
        grads = self.gradients_by_layer(x, y, key)
        self.unused = [place for g, place in zip(grads, self.moving_places) if g is None] if len(y) else []
        if len(self.moving) == len(self.leaves):
            parts = [torch.zeros_like(p) if g is None else g for p, g in zip(self.leaves, grads)]
            return torch.cat([g.flatten() for g in parts], out=self.flat)
        self.flat.zero_()
        for g, place in zip(grads, self.moving_places):
            if g is not None:
                self.flat[place] = g.flatten()
        return self.flat

    def gradients_by_layer(self, x: Tensor, y: Tensor, key: Any) -> Sequence[Tensor | None]:
        """The gradients of a minibatch's loss in the parameters that move, random numbers drawn from `key`; None where
        a parameter plays no part."""
        task = self.task
        if not len(y):
            return [None] * len(self.moving)
        single = len(y) == 1 and bool(self.buffers)  # one row has no variance: its statistics stay as they are
        for layer in self.tracked:
            layer.train(not single)
        torch.manual_seed(int(key) >> 1)
        if self.draws_in_python:
            seed_python_random(int(key))
        with torch.enable_grad():
            loss = task.minibatch_loss(self.call, x, y)
            if not loss.requires_grad and task.frozen:  # the loss does not depend on the parameters that are left
                return [None] * len(self.moving)
            if not loss.requires_grad:
                raise RequestError("the loss does not depend on the parameters of the model: is a tensor detached?")
            loss.backward()  # not autograd.grad, which does not reach layers that are recomputed by a second backward
        grads = [part.grad for part in self.moving]
        for part in self.moving:
            part.grad = None
        return grads

    def train(
        self, v: Tensor, begin: Tensor, rows: Rows, place: np.ndarray, n: np.ndarray, rate: np.ndarray, terms: Any
    ) -> None:
        """Every client's steps, from its row of `begin` to its row of v."""
        device, dim = self.task.device, self.dim
        pull = None if terms.pull is None else (_leading(terms.pull[0], dim), terms.pull[1][..., :dim])
        shift = None if terms.shift is None else terms.shift[..., :dim]
        held, towards = constant_step_terms(v[:, :dim], pull, shift, self.task.ridge)
        fixed = terms.fixed
        index = torch.from_numpy(np.ascontiguousarray(place))
        with RANDOM_LOCK, device.fork_random_state(), fork_python_random():
            for c in range(len(v)):
                if begin is not v:
                    v[c] = begin[c]
                row, state = device.load(v[c]), device.load(terms.state[c : c + 1])  # on the processor: those rows
                mine, goal = (device.load(part[c if len(part) > 1 else 0]) for part in (held, towards))
                pulled = mine.numel() > 1 or bool(mine.any())  # else a pass over all parameters is saved
                by_layer = terms.rule.is_plain and not pulled and not len(goal) and fixed is None
                self.load(row)
                values = row.clone() if fixed is not None else row
                for s in range(len(place)):
                    size = float(rate[s, c])
                    if not size:
                        continue
                    x, y = rows.rows_at(index[s, c : c + 1, : n[s, c]])
                    inputs = device.load(x[0]), device.load(y[0]), terms.keys[s, c]
                    if by_layer:
                        moves = [(p, g) for p, g in zip(self.moving, self.gradients_by_layer(*inputs)) if g is not None]
                        with torch.no_grad():
                            torch._foreach_sub_([p for p, _ in moves], [g for _, g in moves], alpha=size)
                        continue
                    g = self.gradient(*inputs)
                    with torch.no_grad():
                        if pulled:
                            g.addcmul_(mine.expand_as(g), row[:dim])
                        if len(goal):
                            g.sub_(goal)
                        if fixed is not None and terms.rule.clip_grad:
                            g.masked_fill_(fixed.mask[:dim], 0.0)  # they count in no norm
                        skipped = [] if pulled or len(goal) else self._save_unused(row, state, terms.rule.moments)
                        terms.rule.step(row[None, :dim], g[None], size, state)
                        for part, value in skipped:
                            part.copy_(value)
                        if fixed is not None:
                            row[fixed.mask] = values[fixed.mask]
                self.store_buffers(row)
                if fixed is not None:
                    row[fixed.mask] = values[fixed.mask]
                if not device.is_cpu:
                    v[c], terms.state[c] = device.unload(row), device.unload(state[0])
        self.release()

    def _save_unused(self, row: Tensor, state: Tensor, moments: int) -> list[tuple[Tensor, Tensor]]:
        """Parts of a client's row and of its optimizer's state with their values, for parameters that played no part in
        the last gradient: torch's optimizers leave them as they are, without weight decay."""
        parts = [row[place] for place in self.unused]
        for k in range(moments):
            start = 1 + k * self.dim
            parts += [state[0, start + place.start : start + place.stop] for place in self.unused]
        return [(part, part.clone()) for part in parts]

    def gradients(self, w: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Gradients [C, d] in training mode at w, of each client's rows without padding, where those of buffers are 0;
        and the buffers [C, d - gradient_dim] after the forward passes."""
        out, after, device = torch.zeros_like(w), w[:, self.dim :].clone(), self.task.device
        with RANDOM_LOCK, device.fork_random_state(), fork_python_random():
            for c in range(len(w)):
                real = batch.weight[c] > 0
                row = device.load(w[c].detach().clone())
                self.load(row)
                g = self.gradient(device.load(batch.x[c, real]), device.load(batch.y[c, real]), batch.key[c])
                out[c, : self.dim] = device.unload(g.add_(row[: self.dim], alpha=self.task.ridge))
                if bool(real.any()):
                    self.store_buffers(row)
                    after[c] = device.unload(row[self.dim :])
        self.release()
        return out, after

    def draws_random_numbers(self, x: Tensor, y: Tensor) -> bool:
        """Whether a forward pass in training mode draws random numbers."""
        device = self.task.device
        with RANDOM_LOCK, device.fork_random_state(), fork_python_random(), torch.no_grad():
            before, in_python = torch.get_rng_state(), _python_states()
            self.task.minibatch_loss(self.module, device.load(x), device.load(y))
            self.draws_in_python = in_python != _python_states()
            return self.draws_in_python or not torch.equal(before, torch.get_rng_state())


def _python_states() -> tuple[object, ...]:
    """The states of Python's and numpy's generators of random numbers."""
    state: Any = np.random.get_state()
    return random.getstate(), state[1].tobytes(), *state[2:]


def seed_python_random(seed: int) -> None:
    """Seed Python's and numpy's generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def fork_python_random() -> Iterator[None]:
    """A context after which Python's and numpy's generators are as before."""
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _leading(values: object, dim: int) -> Any:
    """The first `dim` columns of [C, d]; numbers and [C, 1] as they are."""
    return values[:, :dim] if isinstance(values, Tensor) and values.ndim == 2 and values.shape[1] > 1 else values
