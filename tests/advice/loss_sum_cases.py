"""Loss sums that tests construct."""

import torch

from mooring.advice.evaluation.loss_sums import LossSums


def make_sums(rows, loss, divergence, deviation=None, apart=None, loss_square=None, spread=0.0):
    """Sums from means per row: loss [m, 3] (local, global, personal), divergence [m, 2], deviation [m, 3].

    `spread` is the variance of a row's divergence per squared mean.
    """
    n = torch.as_tensor(rows, dtype=torch.float64)
    loss, divergence = (torch.as_tensor(part, dtype=torch.float64) * n[:, None] for part in (loss, divergence))
    if deviation is None:
        deviation = torch.tensor([1.0, 1.0, 0.5]).double().expand(len(n), 3)
    apart = divergence.sum(1) if apart is None else torch.as_tensor(apart, dtype=torch.float64) * n
    square = loss[:, 2] ** 2 / n.clamp(min=1) * 2 if loss_square is None else torch.as_tensor(loss_square) * n
    return LossSums(
        n,
        loss,
        square,
        loss[:, :2] - loss[:, 2:],
        divergence,
        (1 + spread) * divergence**2 / n.clamp(min=1)[:, None],
        apart,
        torch.as_tensor(deviation, dtype=torch.float64) * n[:, None],
    )
