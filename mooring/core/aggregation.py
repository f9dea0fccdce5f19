"""Averages of clients' messages that a minority of malicious clients cannot move at will.

    mean             sum_i a_i x_i
    median           each coordinate's weighted median
    trimmed:BETA     each coordinate's mean without the weight BETA at either end            (BETA = 0.25)
    clipped          the mean of messages shortened to the weighted median of their lengths
    geometric        arg min_z sum_i a_i |x_i - z|
    krum:BETA        the message nearest to its n - f - 2 nearest others, f = floor(BETA n)  (BETA = 0.25)

a_i are the clients' shares, sum_i a_i = 1. With equal shares these are the textbook's; krum does not look at shares.
A robust average needs single messages, so it cannot be combined with secure aggregation. It also leaves out honest
clients that differ from most: a global model suffers from that, personal models hardly do.

Yin, Chen, Ramchandran, Bartlett. Byzantine-robust distributed learning. ICML 2018 (median, trimmed mean).
Pillutla, Kakade, Harchaoui. Robust aggregation for federated learning. IEEE TSP 2022 (geometric median).
Blanchard, El Mhamdi, Guerraoui, Stainer. Machine learning with adversaries. NeurIPS 2017 (Krum).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mooring.core.cohort import StateTree, select, weighted_mean

MEAN, MEDIAN, TRIMMED, CLIPPED, GEOMETRIC, KRUM = AVERAGES = (
    "mean", "median", "trimmed", "clipped", "geometric", "krum",
)  # fmt: skip
WITH_MALICIOUS_SHARE = (TRIMMED, KRUM)  # take a share of malicious clients
DEFAULT_MALICIOUS_SHARE = 0.25
MAX_WEISZFELD_STEPS = 200  # steps at most
WEISZFELD_TOLERANCE = 1e-10  # a step shorter than this share of the spread ends them


def parse_average(spec: str) -> tuple[str, float]:
    """("trimmed", 0.3) of "trimmed:0.3"; ValueError for any other text."""
    name, colon, share = spec.partition(":")
    if name not in AVERAGES or (colon and name not in WITH_MALICIOUS_SHARE):
        raise ValueError(f"no average {spec!r}")
    beta = float(share) if colon else DEFAULT_MALICIOUS_SHARE
    if not 0 <= beta < 0.5:
        raise ValueError("a share of malicious clients is below one half")
    return name, beta


def average(message: StateTree, p: Tensor, spec: str = MEAN) -> StateTree:
    """The average of stacked messages [R, ...] with shares proportional to p."""
    name, beta = parse_average(spec)
    if message is None or name == MEAN:
        return weighted_mean(message, p)
    share = p.double() / p.double().sum()
    if name == KRUM:
        chosen = select(
            message, torch.tensor([krum(flatten_messages(message), beta)])
        )  # a copy: messages' memory is used again
        return select(chosen, torch.tensor(0))
    if name == GEOMETRIC:
        return unflatten_message(geometric_median(flatten_messages(message), share), message)
    if name == CLIPPED:
        length = flatten_messages(message).norm(dim=1)
        most = weighted_median(length[:, None], share)[0]
        tiny = torch.finfo(length.dtype).tiny
        return weighted_mean(scale_messages(message, (most / length.clamp(min=tiny)).clamp(max=1.0)), p)
    rule = weighted_median if name == MEDIAN else lambda x, share: trimmed_mean(x, share, beta)
    return unflatten_message(rule(flatten_messages(message), share), message)


def weighted_median(x: Tensor, share: Tensor) -> Tensor:
    """[D] of x [R, D]: the weighted median; the mean of two values where both are medians."""
    value, order = x.sort(0)
    below = share[order].cumsum(0)
    half = 0.5 * (1 - 1e-12), 0.5 * (1 + 1e-12)  # sums of shares are exact to rounding only
    low = (below < half[0]).sum(0).clamp(max=len(x) - 1)
    high = (below < half[1]).sum(0).clamp(max=len(x) - 1)
    return (value.gather(0, low[None])[0] + value.gather(0, high[None])[0]) / 2


def trimmed_mean(x: Tensor, share: Tensor, beta: float) -> Tensor:
    """[D]: the weighted mean of each coordinate after a share beta of the weight is cut off at either end."""
    value, order = x.sort(0)
    weight = share[order].to(x.dtype)
    above = weight.cumsum(0)
    weight_inside = above.clamp(max=1 - beta) - (above - weight).clamp(min=beta)
    weight_inside = weight_inside.clamp(min=0)
    return (weight_inside * value).sum(0) / weight_inside.sum(0)


def geometric_median(x: Tensor, share: Tensor) -> Tensor:
    """[D], by Weiszfeld's iteration from the coordinate median, with distances kept from 0."""
    z = weighted_median(x, share)
    spread = float(weighted_median((x - z).norm(dim=1)[:, None], share)[0])
    if spread == 0:  # at least half of the weight is at z, which then is the answer
        return z
    for _ in range(MAX_WEISZFELD_STEPS):
        pull = share.to(x.dtype) / (x - z).norm(dim=1).clamp(min=WEISZFELD_TOLERANCE * spread)
        new = (pull[:, None] * x).sum(0) / pull.sum()
        moved, z = float((new - z).norm()), new
        if moved <= WEISZFELD_TOLERANCE * spread:
            break
    return z


def krum(x: Tensor, beta: float) -> int:
    """Which message is nearest to its nearest others; all others where they are too few."""
    n = len(x)
    near = max(n - math.floor(beta * n) - 2, min(n - 1, 1))
    scores = [float(((x - row) ** 2).sum(1).sort().values[1 : near + 1].sum()) for row in x]
    return min(range(n), key=scores.__getitem__)


def flatten_messages(message: StateTree) -> Tensor:
    """[R, D]: each client's message as one vector."""
    parts = [message] if isinstance(message, Tensor) else [part for part in message if part is not None]
    return torch.cat([part.reshape(len(part), -1) for part in parts], 1)


def unflatten_message(vector: Tensor, message: StateTree) -> StateTree:
    """One client's vector in the form of a stacked message's rows."""
    if isinstance(message, Tensor):
        return vector.reshape(message.shape[1:]).to(message.dtype)
    out, at = [], 0
    for part in message:
        size = 0 if part is None else part[0].numel()
        out.append(None if part is None else vector[at : at + size].reshape(part.shape[1:]).to(part.dtype))
        at += size
    return type(message)(*out)


def scale_messages(message: StateTree, by: Tensor) -> StateTree:
    """Each client's message times its number."""
    if message is None:
        return None
    if isinstance(message, Tensor):
        return message * by.to(message.dtype).reshape(-1, *[1] * (message.ndim - 1))
    return type(message)(*(scale_messages(part, by) for part in message))
