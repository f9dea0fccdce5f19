"""Rows that stay with their clients: client functions are called by message, and their results come back.

`RemoteRows` is to callers what `Rows` is (`core/client_functions.py`). Calls of independent work (`map_independent`)
travel together: one message to each client when all of the work waits for results. `answer_calls` is the client's part.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from mooring.core.client_functions import CLIENT_FUNCTIONS, ClientFunction, client_function
from mooring.core.cohort import Batch, Condensed, HasSummary, Rows, StateTree, stack_states
from mooring.core.errors import RequestError
from mooring.core.task import HasColumns, Task, require, with_columns
from mooring.core.types import JsonObject
from mooring.remote.messages import ClientFailedError, Payload, rebuild_tree
from mooring.runs.tensor_files import flatten
from mooring.tasks.linear import Quadratic

MAX_NUMBER = 1e150  # of a result: squares of larger ones overflow
MAX_PARALLEL_NUMBERS = 50_000  # of the Hessians of one chain of fits, in one message: 400 kB
S = TypeVar("S")
T = TypeVar("T")
Part = tuple[Any, ...]  # which of a client's rows: ("train",), ("held", 0, 5), ...


class ClientCall(NamedTuple):
    function: ClientFunction
    part: Part
    clients: tuple[int, ...]  # indices of the clients
    per_client: tuple[Tensor, ...]  # each [len(clients), ...]
    shared: dict[str, Tensor | None]


class PendingCall:
    """A thread's call, and its result when there is one."""

    def __init__(self, path: tuple[int, ...], call: ClientCall):
        self.path, self.call = path, call
        self.result: StateTree = None
        self.done = threading.Event()
        self.error: BaseException | None = None


class CallBatcher:
    """Sends calls: those of independent work when all of it waits for results."""

    def __init__(self, send: Callable[[list[ClientCall]], list[StateTree]]):
        self.send = send
        self.changed = threading.Condition()
        self.busy, self.pending = 0, []  # type: tuple[int, list[PendingCall]]
        self.thread = threading.local()  # `path`: which work this thread does; not set in the first thread

    def call(self, call: ClientCall) -> StateTree:
        path = getattr(self.thread, "path", None)
        if path is None:
            return self.send([call])[0]
        own = PendingCall(path, call)
        with self.changed:
            self.pending.append(own)
            self.busy -= 1
            self.changed.notify()
        own.done.wait()
        if own.error is not None:
            raise own.error
        return own.result

    def map_independent(self, work: Callable[[S], Iterable[T]], items: Iterable[S]) -> Iterator[list[T]]:
        items, parent = list(items), getattr(self.thread, "path", None)
        results: list[list[T]] = [[] for _ in items]
        errors: dict[int, BaseException] = {}
        unfinished = len(items)

        def run(k: int) -> None:
            nonlocal unfinished
            self.thread.path = (*(parent or ()), k)
            try:
                results[k] = list(work(items[k]))
            except BaseException as error:
                errors[k] = error
            with self.changed:
                unfinished -= 1
                if (
                    unfinished or parent is None
                ):  # the last one hands its place to the thread that waits for all of them
                    self.busy -= 1
                self.changed.notify()

        with self.changed:
            self.busy += len(items) - (parent is not None)
        threads = [threading.Thread(target=run, args=(k,), daemon=True) for k in range(len(items))]
        for thread in threads:
            thread.start()
        if parent is None:
            self._send_pending()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[min(errors)]
        return iter(results)

    def _send_pending(self) -> None:
        """Send pending calls until no thread works."""
        with self.changed:
            while True:
                self.changed.wait_for(lambda: self.busy == 0)
                if not self.pending:
                    return
                batch, self.pending = sorted(self.pending, key=lambda pending: pending.path), []
                try:
                    for pending, result in zip(batch, self.send([pending.call for pending in batch])):
                        pending.result = result
                except BaseException as error:
                    for pending in batch:
                        pending.error = error
                self.busy += len(batch)
                for pending in batch:
                    pending.done.set()


class RemoteRows:
    """Some rows of clients that keep them."""

    def __init__(
        self,
        calls: CallBatcher,
        part: Part,
        clients: tuple[int, ...],
        size: Tensor,
        x: Tensor,
        y: Tensor,
    ):
        self.calls, self.part, self.clients, self.size = calls, part, clients, size
        self.x, self.y = x, y  # one row of zeros, with the shape of rows
        self.cache: dict[object, Condensed] = {}

    def __len__(self) -> int:
        return len(self.clients)

    def select(self, position: Tensor) -> RemoteRows:
        clients = tuple(self.clients[i] for i in position.tolist())
        return RemoteRows(self.calls, self.part, clients, self.size[position], self.x, self.y)

    def compact(self) -> RemoteRows:
        return self

    def map(
        self, function: ClientFunction, task: Task | None, *per_client: Tensor, **shared: Tensor | None
    ) -> StateTree:
        return self.calls.call(ClientCall(function, self.part, self.clients, per_client, shared))

    def map_independent(self, work: Callable[[S], Iterable[T]], items: Iterable[S]) -> Iterator[list[T]]:
        return self.calls.map_independent(work, items)

    def split_chain(self, items: list[S], numbers: int) -> list[list[S]]:
        """As many parts as fit into one message: fits that start from one another wait for one another's messages."""
        length = -(-len(items) // max(MAX_PARALLEL_NUMBERS // numbers, 1)) or 1
        return [items[k : k + length] for k in range(0, len(items), length)]

    def keep_batches(self) -> AbstractContextManager[None]:
        return nullcontext()

    def full(self, task: Task) -> Condensed:
        """The clients' summaries of their rows for a linear task, which they send once."""
        name = ("full", task)
        if name not in self.cache:
            parts = condense_rows(task, self)
            unknown = torch.full_like(parts.square, torch.nan)
            self.cache[name] = Quadratic(self.size, parts.values, parts.vectors, parts.moment, parts.square, unknown)
        return self.cache[name]


class SecondMoments(NamedTuple):
    """X'X/n as its eigenvalues and eigenvectors, X'y/n and y'y/n."""

    values: Tensor  # [C, d]
    vectors: Tensor  # [C, d, d]
    moment: Tensor  # [C, d]
    square: Tensor  # [C]


@client_function
def condense_rows(task: Task, batch: Batch) -> SecondMoments:
    """What full passes of a linear task need of the rows."""
    summary = require(task, HasSummary).condense(batch)
    return SecondMoments(summary.values, summary.vectors, summary.moment, summary.square)


def make_sender(
    ask_all: Callable[[dict[str, Payload]], dict[str, Payload]], names: tuple[str, ...]
) -> Callable[[list[ClientCall]], list[StateTree]]:
    """A function that sends calls to these clients, one message to each, and returns the stacked results."""

    def send(calls: list[ClientCall]) -> list[StateTree]:
        requests: dict[int, JsonObject] = {}
        tensors: dict[int, dict[str, Tensor]] = {}
        for k, call in enumerate(calls):
            shared = {f"{k}/shared/{name}": value for name, value in call.shared.items() if value is not None}
            about = {"name": call.function.name, "part": list(call.part), "own": len(call.per_client)}
            about["shared"] = {name: value is not None for name, value in call.shared.items()}
            for row, client in enumerate(call.clients):
                requests.setdefault(client, {})[str(k)] = about
                own = {f"{k}/own/{i}": part[row : row + 1] for i, part in enumerate(call.per_client)}
                tensors.setdefault(client, {}).update(shared | own)
        replies = ask_all({names[i]: Payload({"calls": requests[i]}, tensors[i]) for i in sorted(requests)})
        return [stack_replies(k, call, names, replies) for k, call in enumerate(calls)]

    return send


def stack_replies(k: int, call: ClientCall, names: tuple[str, ...], replies: dict[str, Payload]) -> StateTree:
    """The clients' results of one call, stacked; a client whose result is not valid is named."""
    results: dict[str, StateTree] = {}
    for name in (names[client] for client in call.clients):
        try:
            results[name] = _check_result(call.function, rebuild_tree(str(k), replies[name].tensors))
        except RequestError as error:
            raise ClientFailedError(name, f"client '{name}' does not answer '{call.function.name}': {error}") from error
    shapes = {name: tuple(part.shape for part in _tensors(result)) for name, result in results.items()}
    usual = max(set(shapes.values()), key=list(shapes.values()).count)
    for name, shape in shapes.items():
        if shape != usual:
            raise ClientFailedError(
                name, f"client '{name}' answers '{call.function.name}' in another form than the other clients."
            )
    return stack_states(list(results.values()))


def _check_result(function: ClientFunction, result: StateTree) -> StateTree:
    """One client's result as the type that the function returns, in finite numbers."""
    fields = None if isinstance(result, Tensor) else set(result._fields)
    for kind in function.result_types:
        if fields == (set(kind._fields) if hasattr(kind, "_fields") else None):
            result = result if fields is None else kind(**result._asdict())
            break
    else:
        raise RequestError("the result has another form than the function's.")
    for part in _tensors(result):
        if part.shape[:1] != (1,) or not bool((part.double().abs() <= MAX_NUMBER).all()):
            raise RequestError("it sends numbers that are not finite or too large, or of the wrong shape.")
    return result


def _tensors(result: StateTree) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def answer_calls(
    name: str, task: Task, payload: Payload, rows_of: Callable[[Part], Rows], allowed: Collection[str]
) -> Payload:
    """The results of the calls in a message, from the client's own rows."""
    out: dict[str, Tensor] = {}
    for k, about in payload.fields["calls"].items():
        function = CLIENT_FUNCTIONS.get(str(about["name"]))
        if function is None or function.name not in allowed:
            raise RequestError(f"client '{name}' does not compute {about['name']!r} for this request.")
        own = [payload.tensors[f"{k}/own/{i}"] for i in range(int(about["own"]))]
        shared = {
            key: payload.tensors[f"{k}/shared/{key}"] if given else None for key, given in about["shared"].items()
        }
        rows = rows_of(tuple(about["part"]))
        if isinstance(task, HasColumns) and task.features != rows.x.shape[-1]:
            task = with_columns(task, rows.x.shape[-1])
        out |= flatten(k, function(task, rows, *own, **shared))
    return Payload({}, out)
