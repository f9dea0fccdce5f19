"""Between clients and server: what a client tells is looked at before it counts.

    facts      a client whose numbers before the first round are not finite is named, and nothing starts
    weights    shares are finite, none negative; the option `weight_cap` bounds every client's share of a round
    replies    of the right kind, shape and dtype, finite, and not absurdly large; others are left out, by name
    clip       the option that shortens a reply to a length of at most `clip`

A reply is absurd when its largest entry exceeds ABSURD times what is usual: the round's median, the common model's
largest entry, or 1. Honest clients of one federation do not differ by that much, so it changes no honest run; it stops
what overflowed or lies, not a careful attacker: for those there are robust averages (`core/aggregation.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mooring.algorithms.base import AnyAlgorithm
from mooring.core.aggregation import flatten_messages, scale_messages
from mooring.core.cohort import CohortData, Round, Rows, StateTree, select, stack_states
from mooring.core.costs import CostMeter
from mooring.core.errors import ClientError, RequestError
from mooring.core.task import Task
from mooring.engines import local_update
from mooring.estimates.client_statistics import ClientStatistics

MAX_SIZE_FACTOR = 1e6
MAX_REPORTED_ROWS = 1e12  # more than anybody has
MIN_REPLIES_FOR_MEDIAN = 3  # replies from which on a median says what is usual
CHECKED_STATISTICS = (
    "smooth",
    "noise",
    "trace",
    "largest",
)  # scalars that every client with rows can tell, if the task can


class CheckedReplies(NamedTuple):
    """The replies that may be merged, and why the others may not."""

    who: Tensor  # [K], places in the roster
    message: StateTree  # stacked [K, ...]
    refused: dict[int, str]


def check_replies(message: StateTree, who: Tensor, pattern: Any = None, usual: float = 1.0) -> CheckedReplies:
    """Which of the replies of the clients `who` may be merged.

    `message` is a stacked one [R, ...], or a list of what each client sent, which then is held to `pattern`: one
    client's message [1, ...] as it must look. `usual` is the size of an entry that nobody need wonder at.
    """
    refused: dict[int, str] = {}
    if isinstance(message, list):
        wrong = [describe_mismatch(reply, pattern) for reply in message]
        refused = {int(place): why for place, why in zip(who, wrong) if why}
        message = stack_states(
            [reply for reply, why in zip(message, wrong) if not why] or [select(pattern, torch.arange(0))]
        )
        who = who[torch.tensor([not why for why in wrong], dtype=torch.bool)]
    good = torch.ones(len(who), dtype=torch.bool)
    for part in message_tensors(message):
        size = largest_entries(part.reshape(len(part), -1)) if part[:1].numel() else torch.zeros(len(part))
        finite = torch.isfinite(size)
        refused |= {int(place): "its reply holds nan or infinity" for place in who[~finite]}
        known = size[finite]
        most = MAX_SIZE_FACTOR * max(float(known.median()) if len(known) >= MIN_REPLIES_FOR_MEDIAN else 0.0, usual, 1.0)
        absurd = finite & (size > most) & (len(known) >= MIN_REPLIES_FOR_MEDIAN)
        for place, norm in zip(who[absurd].tolist(), size[absurd].tolist()):
            refused[place] = f"its reply holds {norm:.3g}, where {most / MAX_SIZE_FACTOR:.3g} is usual"
        good &= finite & ~absurd
    return CheckedReplies(who[good], message if bool(good.all()) else select(message, good), refused)


def largest_entries(flat: Tensor) -> Tensor:
    """[R] in float64: the size of each row's largest entry, nan where there is one; without a copy of the matrix."""
    return torch.maximum(flat.amax(1).double(), -flat.amin(1).double())


def describe_mismatch(message: StateTree, pattern: Any) -> str | None:
    """Why one client's message is not built as `pattern` is; None if it is."""
    if isinstance(pattern, Tensor) or pattern is None:
        return _unlike("its reply", message, pattern)
    if not hasattr(message, "_fields") or message._fields != pattern._fields:
        received = ", ".join(getattr(message, "_fields", ())) or type(message).__name__
        return f"its reply is made of {received} where {', '.join(pattern._fields)} is right"
    differences = (_unlike(f"{name} in its reply", *pair) for name, *pair in zip(pattern._fields, message, pattern))
    return next(filter(None, differences), None)


def _unlike(what: str, value: Any, right: Tensor | None) -> str | None:
    if right is None:
        return None if value is None else f"{what} is a {type(value).__name__} where nothing is right"
    if not isinstance(value, Tensor):
        return f"{what} is a {type(value).__name__} where numbers are right"
    if value.dtype != right.dtype:
        return f"{what} holds {value.dtype} where {right.dtype} is right"
    if value.shape != right.shape:
        return f"{what} has the shape {list(value.shape[1:])} where {list(right.shape[1:])} is right"
    return None


def message_pattern(algorithm: AnyAlgorithm, task: Task, w0: Tensor, x: Tensor, y: Tensor) -> Any:
    """One client's message [1, ...] as it must look: the resolved algorithm applied to one row, x [1, ...], y [1]."""
    rows = Rows.stack([torch.zeros_like(x)], [torch.zeros_like(y)])
    index = torch.tensor([0])
    data = CohortData(np.zeros(1, np.uint64), index, torch.ones(1, dtype=torch.float64), rows, rows)
    server, _ = algorithm.init(task, w0)
    first = local_update.initial_states(algorithm, task, w0, 1)
    return local_update.client_update(algorithm, task, server, first, data, Round(1, 1, 1, 1, 1.0, 0), CostMeter())[1]


def message_tensors(message: StateTree) -> list[Tensor]:
    """The tensors of a message."""
    parts = [message] if isinstance(message, Tensor) or message is None else message
    return [part for part in parts if part is not None and len(part)]


def clip_messages(message: StateTree, most: float | None) -> StateTree:
    """Each client's message with a length of at most `most`; its direction stays."""
    if most is None or message is None:
        return message
    vector = flatten_messages(message)
    length = vector.double().norm(dim=1)
    share = most / length.clamp(min=torch.finfo(length.dtype).tiny)
    below = 1 - 2 * torch.finfo(vector.dtype).eps  # what is shortened is rounded: not above `most`
    return scale_messages(message, torch.where(share < 1, share * below, 1.0))


def cap_shares(p: Tensor, most: float | None) -> Tensor:
    """Shares proportional to p, of which none exceeds `most`; equal ones where there are too few clients for that.

    Without `most` p stays as it is."""
    if most is None:
        return p
    share = p.double() / p.double().sum()
    if most * len(p) <= 1:
        return torch.full_like(share, 1 / len(p))
    held = torch.zeros(len(p), dtype=torch.bool)
    while bool((share > most * (1 + 1e-12)).any()):
        held |= share >= most
        remaining_share = 1 - most * int(held.sum())
        free = torch.where(held, 0.0, p.double())
        share = torch.where(held, most, free / free.sum() * remaining_share)
    return share


def check_weights(names: Sequence[str], p: Tensor) -> None:
    """Refuse shares that are not shares."""
    for name, share in zip(names, p.tolist()):
        if not 0 <= share <= 1:
            raise RequestError(f"client '{name}' would weigh {share:.3g}; a client's share is between 0 and 1.")
    if not float(p.sum()) > 0:
        raise RequestError("no client has any weight: there are no training rows.")


def check_sizes(names: Sequence[str], sizes: Sequence[Any]) -> Tensor:
    """[m] the numbers of rows that clients report, refused by name where they are none."""
    for name, size in zip(names, sizes):
        known = isinstance(size, int | float) and not isinstance(size, bool) and 0 <= size <= MAX_REPORTED_ROWS
        if not known or size != int(size):
            raise RequestError(
                f"client '{name}' reports {size!r} rows; a whole number up to {MAX_REPORTED_ROWS:.0g} is right."
            )
    return torch.tensor([int(size) for size in sizes])


def check_statistics(names: Sequence[str], facts: ClientStatistics) -> None:
    """Refuse to begin with a client whose facts are not finite while others' are: settings would rest on it."""
    for field in CHECKED_STATISTICS:
        value = getattr(facts, field)
        known = torch.isfinite(value) | (facts.n == 0)
        if bool(known[facts.n > 0].any()) and not bool(known.all()):
            place = int((~known).nonzero()[0])
            sentence = (
                f"client '{names[place]}' cannot take part: its rows give {field} = {float(value[place]):.3g} where a "
                "finite number is needed; a value among them is not a number, or too large. Correct it, or leave the "
                "client out."
            )
            raise ClientError({names[place]: sentence})
