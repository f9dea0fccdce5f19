"""Losses on held-out rows as the choice asks for them: sums by client and fold, and how far settings are apart.

sums    [folds, m, settings]   sums of losses over a client's rows of a fold
count   [folds, m]             how many rows these are
apart   of pairs of settings, which may differ by fold and client: the sums over all rows of the difference of the
        two losses, and of its square
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class HeldOutLosses:
    """The losses of all settings on held-out rows."""

    loss: Tensor  # [settings, N]
    fold: Tensor  # [N]
    owner: Tensor  # [N], each row's client
    clients: int  # m

    @cached_property
    def _cell(self) -> Tensor:
        """[N]: fold and client as one number."""
        return self.fold * self.clients + self.owner

    @property
    def _shape(self) -> tuple[int, int]:
        return int(self.fold.max()) + 1, self.clients

    @cached_property
    def sums(self) -> Tensor:
        folds, m = self._shape
        out = torch.zeros(folds * m, len(self.loss), dtype=torch.float64)
        return out.index_add_(0, self._cell, self.loss.T.double()).view(folds, m, -1)

    @cached_property
    def count(self) -> Tensor:
        folds, m = self._shape
        return torch.bincount(self._cell, minlength=folds * m).view(folds, m)

    def apart(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Of pairs of settings [pairs, folds, m], two tensors [pairs]."""
        out = []
        for gap, other in zip(first, second):
            gap = self._of(gap) - self._of(other)
            out.append(torch.stack([gap.sum(), gap.square().sum()]))
        total, square = torch.stack(out, 1)
        return total, square

    def _of(self, setting: Tensor) -> Tensor:
        """[N]: each row's loss with the setting [folds, m] of its fold and client."""
        if bool((setting == setting.flatten()[0]).all()):
            return self.loss[int(setting.flatten()[0])].double()
        return self.loss.gather(0, setting.flatten()[self._cell][None])[0].double()
