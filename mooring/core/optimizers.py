"""Local optimizers on a cohort: the definitions of `torch.optim`, every client one row of [C, d].

    sgd     g <- g + weight_decay v;  m <- momentum m + g (m = g in the first step);  v <- v - eta m
            nesterov: v <- v - eta (g + momentum m)
    adam    g <- g + weight_decay v;  m <- beta1 m + (1 - beta1) g;  s <- beta2 s + (1 - beta2) g^2
            v <- v - eta / (1 - beta1^k) m / (sqrt(s / (1 - beta2^k)) + epsilon)
    adamw   v <- (1 - eta weight_decay) v, then adam without weight decay

Gradients are clipped to the norm `clip_grad` first, as `torch.nn.utils.clip_grad_norm_` does.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

ADAPTIVE_OPTIMIZERS = ("adam", "adamw")
OPTIMIZERS = ("sgd", *ADAPTIVE_OPTIMIZERS)
CLIP_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True)
class Optimizer:
    """The rule that turns gradients [C, d] into steps; its state is one tensor [C, 1 + moments * d]."""

    name: str = "sgd"
    momentum: float = 0.0
    nesterov: bool = False
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 0.0  # the largest norm of a gradient; 0: any

    @property
    def moments(self) -> int:
        """How many vectors [d] the state of a client holds."""
        return int(self.momentum > 0) if self.name == "sgd" else 2

    @property
    def is_plain(self) -> bool:
        """Whether a step is v - eta g."""
        return self.name == "sgd" and not self.momentum and not self.weight_decay and not self.clip_grad

    def init(self, clients: int, dim: int, like: Tensor) -> Tensor:
        """[C, 1 + moments * d]: the state before the first step: a count of steps, then the moments."""
        return like.new_zeros(clients, 1 + self.moments * dim)

    def step(self, v: Tensor, g: Tensor, rate: float | Tensor, state: Tensor, active: Tensor | None = None) -> None:
        """One step of v [C, d] along the gradients g [C, d], in place, at the `rate`, a number or [C, 1]; clients that
        are not `active` [C] stay where they are. g may be overwritten."""
        if active is not None and not bool(active.all()):
            part, own = v[active], state[active]
            self.step(part, g[active], rate[active] if isinstance(rate, Tensor) and rate.ndim else rate, own)
            v[active], state[active] = part, own
            return
        if self.clip_grad:
            norm = g.norm(dim=1, keepdim=True)
            g = g * (self.clip_grad / (norm + CLIP_EPSILON)).clamp(max=1.0)
        state[:, :1] += 1
        if self.name == "sgd":
            self._descend(v, g, rate, state)
        else:
            self._adapt(v, g, rate, state)

    def _descend(self, v: Tensor, g: Tensor, rate: float | Tensor, state: Tensor) -> None:
        if self.weight_decay:
            g = g.add(v, alpha=self.weight_decay)
        if self.momentum:
            mean = state[:, 1:]
            mean.mul_(self.momentum).add_(g)  # zero before the first step: then m = g
            g = g.add(mean, alpha=self.momentum) if self.nesterov else mean
        _subtract(v, g, rate)

    def _adapt(self, v: Tensor, g: Tensor, rate: float | Tensor, state: Tensor) -> None:
        if self.name == "adamw":
            v.mul_(1 - rate * self.weight_decay)
        elif self.weight_decay:
            g = g.add(v, alpha=self.weight_decay)
        count, mean, square = state[:, :1].double(), *state[:, 1:].tensor_split(2, dim=1)
        mean.lerp_(g, 1 - self.beta1)
        square.mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)
        root = (1 - self.beta2**count).sqrt().to(v.dtype)
        _subtract(v, mean / (square.sqrt() / root).add_(self.epsilon), rate / (1 - self.beta1**count).to(v.dtype))


def _subtract(v: Tensor, g: Tensor, rate: float | Tensor) -> None:
    """v <- v - rate g, in place."""
    if isinstance(rate, Tensor):
        v.addcmul_(g, rate.to(v.dtype), value=-1)
    else:
        v.sub_(g, alpha=rate)
