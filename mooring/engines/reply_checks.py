"""Checks of the clients' statistics, weights and replies before they are used.

    statistics   a client whose numbers before the first round are not finite is named, and nothing starts
    weights      shares are finite, none negative; the option `weight_cap` bounds every client's share of a round
    replies      of the right kind, shape and dtype, finite, and not absurdly large; others are left out, by name
    clip         the option that shortens a reply to a length of at most `clip`

A reply is absurd if its largest entry exceeds MAX_SIZE_FACTOR times the usual: the round's median, the global model's
largest entry, or 1. Honest clients do not differ by that much, so no honest run changes; the check stops
overflows and crude attacks; robust averages stop careful attackers (`core/aggregation.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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
MAX_REPORTED_ROWS = 1e12  # more rows than any client has
MIN_REPLIES_FOR_MEDIAN = 3  # replies from which a median is used
CHECKED_STATISTICS = (
    "smooth",
    "noise",
    "trace",
    "largest",
)  # scalars that every client with rows has, if the task has them


class CheckedReplies(NamedTuple):
    """The replies that may be merged, and the reasons for refusing the others."""

    clients: Tensor  # [K], places in the roster
    message: StateTree  # stacked [K, ...]
    refused: dict[int, str]


def check_replies(message: StateTree, clients: Tensor, pattern: object = None, usual: float = 1.0) -> CheckedReplies:
    """Return which replies of these `clients` may be merged.

    `message` is a stacked one [R, ...], or a list of the clients' messages, which must match `pattern`: one
    client's message [1, ...]. `usual` is the size of a usual entry.
    """
    refused: dict[int, str] = {}
    if isinstance(message, list):
        mismatches = [describe_mismatch(reply, pattern) for reply in message]
        refused = {int(place): reason for place, reason in zip(clients, mismatches) if reason}
        message = stack_states(
            [reply for reply, reason in zip(message, mismatches) if not reason] or [select(pattern, torch.arange(0))]
        )
        clients = clients[torch.tensor([not reason for reason in mismatches], dtype=torch.bool)]
    accepted = torch.ones(len(clients), dtype=torch.bool)
    for part in message_tensors(message):
        size = largest_entries(part.reshape(len(part), -1)) if part[:1].numel() else torch.zeros(len(part))
        finite = torch.isfinite(size)
        refused |= {int(place): "its reply holds nan or infinity" for place in clients[~finite]}
        finite_sizes = size[finite]
        max_size = MAX_SIZE_FACTOR * max(
            float(finite_sizes.median()) if len(finite_sizes) >= MIN_REPLIES_FOR_MEDIAN else 0.0, usual, 1.0
        )
        absurd = finite & (size > max_size) & (len(finite_sizes) >= MIN_REPLIES_FOR_MEDIAN)
        for place, norm in zip(clients[absurd].tolist(), size[absurd].tolist()):
            refused[place] = f"its reply holds {norm:.3g}, where {max_size / MAX_SIZE_FACTOR:.3g} is usual"
        accepted &= finite & ~absurd
    return CheckedReplies(clients[accepted], message if bool(accepted.all()) else select(message, accepted), refused)


def largest_entries(flat: Tensor) -> Tensor:
    """[R] in float64: the size of each row's largest entry, nan if it contains one; without a copy of the matrix."""
    return torch.maximum(flat.amax(1).double(), -flat.amin(1).double())


def describe_mismatch(message: StateTree, pattern: StateTree) -> str | None:
    """Return why one client's message does not match `pattern`; None if it does."""
    if isinstance(pattern, Tensor) or pattern is None:
        return _describe_difference("its reply", message, pattern)
    if not hasattr(message, "_fields") or message._fields != pattern._fields:
        received = ", ".join(getattr(message, "_fields", ())) or type(message).__name__
        return f"its reply is made of {received} where {', '.join(pattern._fields)} is right"
    differences = (
        _describe_difference(f"{name} in its reply", *pair) for name, *pair in zip(pattern._fields, message, pattern)
    )
    return next(filter(None, differences), None)


def _describe_difference(label: str, value: object, right: Tensor | None) -> str | None:
    if right is None:
        return None if value is None else f"{label} is a {type(value).__name__} where nothing is right"
    if not isinstance(value, Tensor):
        return f"{label} is a {type(value).__name__} where numbers are right"
    if value.dtype != right.dtype:
        return f"{label} holds {value.dtype} where {right.dtype} is right"
    if value.shape != right.shape:
        return f"{label} has the shape {list(value.shape[1:])} where {list(right.shape[1:])} is right"
    return None


def message_pattern(algorithm: AnyAlgorithm, task: Task, w0: Tensor, x: Tensor, y: Tensor) -> StateTree:
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


def clip_messages(message: StateTree, max_length: float | None) -> StateTree:
    """Each client's message with a length of at most `max_length`; its direction is unchanged."""
    if max_length is None or message is None:
        return message
    vector = flatten_messages(message)
    length = vector.double().norm(dim=1)
    share = max_length / length.clamp(min=torch.finfo(length.dtype).tiny)
    below = 1 - 2 * torch.finfo(vector.dtype).eps  # rounding must not exceed `max_length`
    return scale_messages(message, torch.where(share < 1, share * below, 1.0))


def cap_shares(p: Tensor, max_share: float | None) -> Tensor:
    """Return shares proportional to p, none above `max_share`; equal ones if there are too few clients for that.

    Without `max_share`, p is unchanged."""
    if max_share is None:
        return p
    share = p.double() / p.double().sum()
    if max_share * len(p) <= 1:
        return torch.full_like(share, 1 / len(p))
    is_capped = torch.zeros(len(p), dtype=torch.bool)
    while bool((share > max_share * (1 + 1e-12)).any()):
        is_capped |= share >= max_share
        remaining_share = 1 - max_share * int(is_capped.sum())
        free = torch.where(is_capped, 0.0, p.double())
        share = torch.where(is_capped, max_share, free / free.sum() * remaining_share)
    return share


def check_weights(names: Sequence[str], p: Tensor) -> None:
    """Refuse shares that are not shares."""
    for name, share in zip(names, p.tolist()):
        if not 0 <= share <= 1:
            raise RequestError(f"client '{name}' would weigh {share:.3g}; a client's share is between 0 and 1.")
    if not float(p.sum()) > 0:
        raise RequestError("no client has any weight: there are no training rows.")


def check_sizes(names: Sequence[str], sizes: Sequence[float]) -> Tensor:
    """[m] the numbers of rows that clients report, refused by name if they are invalid."""
    for name, size in zip(names, sizes):
        is_valid = isinstance(size, int | float) and not isinstance(size, bool) and 0 <= size <= MAX_REPORTED_ROWS
        if not is_valid or size != int(size):
            raise RequestError(
                f"client '{name}' reports {size!r} rows; a whole number up to {MAX_REPORTED_ROWS:.0g} is right."
            )
    return torch.tensor([int(size) for size in sizes])


def check_statistics(names: Sequence[str], statistics: ClientStatistics) -> None:
    """Refuse a client whose statistics are not finite while others' are: hyperparameters would depend on it."""
    for field in CHECKED_STATISTICS:
        value = getattr(statistics, field)
        is_finite = torch.isfinite(value) | (statistics.n == 0)
        if bool(is_finite[statistics.n > 0].any()) and not bool(is_finite.all()):
            place = int((~is_finite).nonzero()[0])
            sentence = (
                f"client '{names[place]}' cannot take part: its rows give {field} = {float(value[place]):.3g} where a "
                "finite number is needed; a value among them is not a number, or too large. Correct it, or leave the "
                "client out."
            )
            raise ClientError({names[place]: sentence})
