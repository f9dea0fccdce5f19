"""Secure aggregation: the server learns the weighted mean of the messages of a round, and no single one of them.

Flower's SecAgg+ (its client part `secaggplus_mod`, its server part `SecAggPlusWorkflow`), around the same visit as
without. It costs four letters a client and round instead of one, and precision: entries are rounded at random to
steps of 2 range / 2^22. Entries of a client's share of the mean beyond `range` cannot be sent. Where too few clients
are left to take the masks off, the round is tried again from its beginning.

Bell, Bonawitz, Gascon, Lepoint, Raykova. Secure single-server aggregation with (poly)logarithmic overhead. CCS 2020.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.common import Code, FitIns, FitRes, Parameters, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.common.constant import ErrorCode
from flwr.compat.common import recorddict_compat as compat
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.server.workflow.constant import Key as WorkflowKey
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import SecAggPlusWorkflow, WorkflowState
from torch import Tensor

from mooring.core.errors import RequestError
from mooring.core.seeds import words as seeded
from mooring.engines.flower.home import Home, stay
from mooring.engines.flower.packing import pack, unpack
from mooring.engines.flower.parcels import Parcel

WHOLE = 1_000_000  # the weight of a client that has all rows
WORK = "work"  # what a client says of its work, beside its masked message
STEPS = 2**22  # of the range
MODULUS = 2**32
SHARE = 2 / 3  # of the clients must stay for the masks to come off
FEWEST = 3
PAUSES = (0.02, 0.5)  # seconds between looks for replies: shortest, longest


def answer_masked(home: Home, message: Message, context: Any) -> Message:
    """A client's reply to a letter of the protocol; `context.state` remembers its keys from letter to letter."""

    def visit(letter: Message, _: Any) -> Message:
        parcel = unpack(letter.content)
        home.check_run(parcel)
        reply = stay(home, parcel)
        flat, p = joined(reply.tensors), float(parcel.words["p"])
        most = float(home.federation.secure_range)
        if flat.size and not np.abs(flat).max() * p <= most:
            raise RequestError(
                f"client '{home.name}' would send {np.abs(flat).max() * p:.3g}, and secure_range is {most:g}; raise it."
            )
        # Flower rounds at random: the same draws for the same run, client and round.
        turn = parcel.words["round"]
        np.random.seed(int(seeded(turn[-1], "rounding", turn[0], home.clients.keys)[0] % 2**32))
        work = json.dumps(reply.words["meter"])
        fitted = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([flat]), round(p * WHOLE), {WORK: work})
        return Message(compat.fitres_to_recorddict(fitted, False), reply_to=letter)

    try:
        return secaggplus_mod(message, context, visit)
    except Exception as error:
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, str(error)), reply_to=message)


def joined(tensors: Mapping[str, Tensor]) -> np.ndarray:
    """All entries of a message in one vector, in the order of its parts."""
    parts = [tensor.reshape(-1).double() for tensor in tensors.values()]
    return torch.cat(parts).numpy() if parts else np.zeros(0)


def parted(vector: np.ndarray, pattern: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The vector's entries as the parts of a message that looks like the pattern."""
    rest, out = torch.from_numpy(np.array(vector)), {}
    for name, like in pattern.items():
        out[name] = rest[: like.numel()].reshape(like.shape).to(like.dtype)
        rest = rest[like.numel() :]
    return out


class Summed(NamedTuple):
    """The weighted mean of the messages of those who stayed, and what each of them says of its work."""

    mean: np.ndarray
    works: dict[int, dict[str, Any]]  # by node
    failures: list[str]


def sum_masked(
    grid: Any,
    letters: Mapping[int, Parcel],
    range_: float,
    deadline: float,
    sleep: Callable[[float], None] = time.sleep,
) -> Summed | str:
    """One round of the protocol with these nodes, or why it could not be ended."""
    strategy = Strategy(letters)
    about = ConfigRecord({WorkflowKey.CURRENT_ROUND: 1})
    state = RecordDict(
        {MAIN_CONFIGS_RECORD: about, MAIN_PARAMS_RECORD: compat.parameters_to_arrayrecord(empty(), True)}
    )
    context: Any = SimpleNamespace(state=state, strategy=strategy, client_manager=strategy, history=strategy)
    workflow = SecAggPlusWorkflow(
        1.0, SHARE, max_weight=WHOLE, clipping_range=float(range_), quantization_range=STEPS, modulus_range=MODULUS,
        timeout=deadline,
    )  # fmt: skip
    found, line = WorkflowState(), Line(grid, sleep)
    way: Any = line
    for number, step in enumerate(
        (workflow.setup_stage, workflow.share_keys_stage, workflow.collect_masked_vectors_stage, workflow.unmask_stage)
    ):
        if not step(way, context, found):
            return next(iter(line.failures), "too few clients answered")
        if number == 0:
            found.nid_to_fitins = {node: pack(parcel) for node, parcel in letters.items()}
    works = {proxy.node_id: json.loads(str(fitted.metrics[WORK])) for proxy, fitted in strategy.results}
    return Summed(strategy.mean, works, line.failures)


def empty() -> Parameters:
    return Parameters([], "numpy.ndarray")


class Strategy:
    """What the workflow asks its strategy and client manager: whom to ask, and what to do with the sum."""

    def __init__(self, letters: Mapping[int, Parcel]):
        self.nodes = list(letters)
        self.results: list[tuple[Any, FitRes]] = []
        self.mean = np.zeros(0)

    def num_available(self) -> int:
        return len(self.nodes)

    def configure_fit(self, *_: Any) -> list[tuple[Any, FitIns]]:
        return [(SimpleNamespace(node_id=node), FitIns(empty(), {})) for node in self.nodes]

    def aggregate_fit(self, _: int, results: list[tuple[Any, FitRes]], __: Any) -> tuple[None, dict[str, Any]]:
        self.results = results
        self.mean = parameters_to_ndarrays(results[0][1].parameters)[0]
        return None, {}


class Line:
    """The workflow's way to the nodes: letters, and their replies within a time."""

    def __init__(self, grid: Any, sleep: Callable[[float], None]):
        self.grid, self.sleep, self.failures = grid, sleep, list[str]()

    def send_and_receive(self, messages: list[Message], *, timeout: float | None = None) -> list[Message]:
        waiting = set(self.grid.push_messages(messages))
        replies: list[Message] = []
        left, pause = timeout or 0.0, PAUSES[0]
        while waiting and left > 0:
            for reply in self.grid.pull_messages(list(waiting)):
                waiting.discard(reply.metadata.reply_to_message_id)
                replies.append(reply)
                if reply.has_error():
                    self.failures.append(reply.error.reason)
            if waiting:
                self.sleep(pause)
                left, pause = left - pause, min(1.5 * pause, PAUSES[1])
        return replies
