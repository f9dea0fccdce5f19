"""The local work of a client in a round: how many steps, on which rows, at which step size, by which optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from mooring.core.optimizers import Optimizer
from mooring.core.types import Auto


@dataclass(frozen=True, kw_only=True)
class LocalWork:
    """Hyperparameters of every algorithm that trains locally; `local_training.schedule` has the step sizes."""

    eta: Auto = "auto"  # the step size (learning rate): a number or "auto"
    decay: float = 0.0
    eta_schedule: str = "inverse"  # what decay does, or "cosine", "cosine_rounds", "horizon"
    decay_every: int = 1  # steps, rounds or epochs between two decays of a geometric schedule
    warmup: int = 0  # rounds in which the step size grows linearly to its value
    steps: int = 10
    epochs: int = 0  # passes over the data instead of steps, when > 0
    batch: int | Literal["auto"] = "auto"  # rows of a minibatch; 0: all rows
    draws: str = "passes"  # of minibatches; or "independent", "replacement"
    optimizer: str = "sgd"  # or "adam", "adamw"
    momentum: float = 0.0  # of sgd
    nesterov: bool = False
    beta1: float = 0.9  # of adam and adamw, as are beta2 and epsilon
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 0.0  # the largest norm of a gradient; 0: any
    personal: str | tuple[str, ...] = ()  # names or patterns of parameters that stay with their client; or "head"
    optimizer_state: str = "reset"  # at the beginning of a round; or "keep": each client keeps its own

    trained_models: ClassVar[int] = (
        1  # models that a client trains in a local update, each with an optimizer of its own
    )

    @property
    def rule(self) -> Optimizer:
        """The optimizer of these settings."""
        return Optimizer(
            self.optimizer,
            self.momentum,
            self.nesterov,
            self.beta1,
            self.beta2,
            self.epsilon,
            self.weight_decay,
            self.clip_grad,
        )
