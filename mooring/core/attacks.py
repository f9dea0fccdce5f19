"""Malicious clients, for tests of robustness: with `mooring fit --attack sign-flip:0.2` a fifth of the clients attack.

    sign-flip    the opposite of the true message
    scale        a hundred times the true message
    noise        normal noise, ten times as long as the true message
    little       the honest mean less z standard deviations, the same from all: small, but always in one direction
    label-flip   the true message of training on wrong labels: classes in reverse, numbers with the other sign
    nan          not a number
    huge         1e30

The malicious clients are drawn once per run. An attack uses a client's own message; `little` uses all messages.

Baruch, Baruch, Goldberg. A little is enough: circumventing defenses for distributed learning. NeurIPS 2019 (little).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor

from mooring.core.aggregation import flatten_messages, scale_messages, unflatten_message
from mooring.core.cohort import Rows, StateTree
from mooring.core.seeds import generator, random_words

LABEL_FLIP = "label-flip"
ATTACKS = ("sign-flip", "scale", "noise", "little", LABEL_FLIP, "nan", "huge")
SCALE_FACTOR, NOISE_FACTOR, HUGE_VALUE = 100.0, 10.0, 1e30


def parse_attack(spec: str) -> tuple[str, float]:
    """("sign-flip", 0.2) of "sign-flip:0.2"; ValueError for any other text."""
    name, _, share = spec.partition(":")
    if name not in ATTACKS or not 0 <= float(share) <= 1:
        raise ValueError(f"no attack {spec!r}")
    return name, float(share)


def malicious_clients(spec: str, seed: int, keys: np.ndarray) -> np.ndarray:
    """[m] bool: which clients are malicious."""
    _, share = parse_attack(spec)
    out = np.zeros(len(keys), dtype=bool)
    out[np.argsort(random_words(seed, "attack", keys), kind="stable")[: round(share * len(keys))]] = True
    return out


def apply_attack(message: StateTree, clients: Tensor, spec: str, seed: int, keys: np.ndarray, t: int) -> StateTree:
    """The messages of these `clients` in round t, with those of malicious clients among them."""
    name, _ = parse_attack(spec)
    malicious = torch.from_numpy(malicious_clients(spec, seed, keys))[clients]
    if name == LABEL_FLIP or message is None or not bool(malicious.any()):
        return message
    if name in ("sign-flip", "scale"):
        by = torch.where(malicious, {"sign-flip": -1.0, "scale": SCALE_FACTOR}[name], 1.0)
        return scale_messages(message, by)
    return replace_rows(message, malicious, malicious_messages(name, flatten_messages(message), malicious, seed, t))


def malicious_messages(name: str, x: Tensor, malicious: Tensor, seed: int, t: int) -> Tensor:
    """[malicious clients, D]: the messages that they send instead of their rows of x [R, D]."""
    replaced = x[malicious]
    if name == "nan":
        return torch.full_like(replaced, torch.nan)
    if name == "huge":
        return torch.full_like(replaced, HUGE_VALUE)
    if name == "noise":
        draw = torch.from_numpy(generator(seed, "attack", t).standard_normal(replaced.shape)).to(x.dtype)
        return NOISE_FACTOR * replaced.norm(dim=1, keepdim=True) / math.sqrt(max(replaced.shape[1], 1)) * draw
    honest = x[~malicious] if bool((~malicious).any()) else x
    n, f = len(x), len(replaced)
    needed = n // 2 + 1 - f  # honest clients that must be further out than the attack, for it to be in the majority
    z = float(ndtri(min(max((n - f - needed) / max(n - f, 1), 0.5), 0.999)))
    return (honest.mean(0) - z * honest.std(0, unbiased=False)).expand_as(replaced)


def replace_rows(message: StateTree, which: Tensor, rows: Tensor) -> StateTree:
    """A stacked message in which these clients' rows are others."""
    new = flatten_messages(message).clone()
    new[which] = rows
    if isinstance(message, Tensor):
        return new.reshape(message.shape).to(message.dtype)
    out = [unflatten_message(row, message) for row in new]
    return type(message)(*(None if part is None else torch.stack(column) for part, column in zip(message, zip(*out))))


def flip_labels(rows: Rows, malicious: np.ndarray, classes: int = 0) -> Rows:
    """The rows with wrong labels at malicious clients."""
    y = rows.y.clone()
    top = max(classes, int(y.max()) + 1) - 1 if not y.dtype.is_floating_point and len(y) else 0
    for c in np.flatnonzero(malicious):
        client_rows = slice(int(rows.start[c]), int(rows.start[c] + rows.size[c]))
        y[client_rows] = -y[client_rows] if y.dtype.is_floating_point else top - y[client_rows]
    return Rows(rows.x, y, rows.start, rows.size)
