"""Where and how a network computes: the device, its precision, and `torch.compile`. No other module moves tensors.

Parameters, minibatches and optimizer states are loaded when a client's local update begins and unloaded when it ends.
"bf16" runs forward passes and their gradients in bfloat16 where torch's autocast holds it safe; parameters, losses,
optimizer states and messages stay in the parameters' own type.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from mooring.core.cohort import Batch
from mooring.core.errors import RequestError

FULL_PRECISION, MIXED_PRECISION = "full", "bf16"
PRECISIONS = (FULL_PRECISION, MIXED_PRECISION)


class Device:
    def __init__(self, name: str = "cpu", precision: str = FULL_PRECISION, compiles: bool = False):
        try:
            self.device = torch.device(name)
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError):
            here = "cpu" + (", cuda" if torch.cuda.is_available() else "")
            raise RequestError(f"device {name!r} is not there; this machine has {here}.") from None
        if precision not in PRECISIONS:
            raise RequestError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}.")
        self.is_mixed, self.compiles = precision == MIXED_PRECISION, compiles

    @property
    def is_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def is_plain(self) -> bool:
        """Whether torch's eager kernels run in the parameters' own precision, as faster forms of training assume."""
        return not self.is_mixed and not self.compiles

    def load(self, part: Tensor) -> Tensor:
        """The tensor on the device."""
        return part.to(self.device)

    def load_batch(self, batch: Batch) -> Batch:
        return batch if self.is_cpu else Batch(*(self.load(part) for part in batch[:3]))

    def load_module(self, module: nn.Module) -> nn.Module:
        return module.to(self.device)

    def unload(self, part: Tensor) -> Tensor:
        """The tensor in the processor's memory."""
        return part.cpu()

    def unload_module(self, module: nn.Module) -> nn.Module:
        return module.cpu()

    def fork_random_state(self) -> AbstractContextManager[None]:
        """A context after which torch's random generators are as before, those of the device included."""
        return torch.random.fork_rng(devices=[] if self.is_cpu else [self.device])

    def autocast(self) -> AbstractContextManager[object]:
        """The context of forward passes."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.is_mixed else nullcontext()

    def compile(self, module: nn.Module) -> Callable[..., Any]:
        """What calls the module: its compiled form where that is wanted."""
        if not self.compiles:
            return module
        compiled = torch.compile(module)

        def call(*inputs: object, **named: object) -> Any:
            try:
                return compiled(*inputs, **named)
            except (torch._dynamo.exc.TorchDynamoException, torch._inductor.exc.InductorError) as error:
                why = str(error).strip().splitlines()[0]
                raise RequestError(
                    f"torch.compile fails on this model or machine ({why}); set compile = false."
                ) from None

        return call
