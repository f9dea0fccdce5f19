"""Advice in a real federation: the rows stay with their clients, and the questions go to them by post.

The server leads `advise` as on one machine; where that asks clients (`client_functions.py`), a letter goes to each,
and each
answers from its own rows with the very same function. Work that does not depend on one another's outcome (the folds,
the paths of each) is done side by side, and its questions travel together: a linear task takes a dozen letters to each
client, one of two classes some hundred. Clients keep nothing between letters, so any of them may be asked again, and an
advice that was interrupted begins again.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mooring.advice.advise import AdviceResult, run_advice
from mooring.advice.folds import FoldSplit
from mooring.advice.remote.client_node import FINISH_MESSAGE, client_record
from mooring.core.cohort import Rows, stack_states
from mooring.core.errors import RequestError
from mooring.data.clients import PARTS, Clients
from mooring.engines.fit import OnProgress, ignore_progress, initial_files
from mooring.engines.flower.exchange import RESULT_DEADLINE_SECONDS, required_replies
from mooring.engines.flower.messages import Payload, rebuild_tree
from mooring.engines.flower.messenger import ClientFailedError, Grid, Messenger, ignore_message
from mooring.engines.flower.server_run import agree_on_run, exclude_clients, prepare_federation, write_participation
from mooring.engines.prepare import Job, make_task
from mooring.estimates.client_summaries import ClientSummary, LinearStats, LocalFits
from mooring.runs.atomic_files import directory_lock
from mooring.runs.directory import RunDirectory, create_run
from mooring.runs.runfile import RunFile
from mooring.runs.sections import FederationSection
from mooring.tasks.proximal import is_dense


class ClientCall(NamedTuple):
    name: str
    part: tuple[Any, ...]  # which of their rows is asked about
    who: tuple[int, ...]  # places of the clients
    own: tuple[Tensor, ...]  # each [len(who), ...]
    shared: dict[str, Tensor | None]


class WaitPolicy(NamedTuple):
    """With whom an advice waits for nobody, and when."""

    deadline: float | None
    quorum: int  # clients


class PendingCall:
    """A thread's question, and its answer once there is one."""

    def __init__(self, path: tuple[int, ...], question: ClientCall):
        self.path, self.question = path, question
        self.done, self.answer = False, None
        self.error: BaseException | None = None


class CallBatcher:
    """Where questions are put up: those of work that is done side by side are sent when all of it waits for answers."""

    def __init__(self, send: Callable[[list[ClientCall]], list[Any]]):
        self.send = send
        self.turn = threading.Condition()
        self.busy, self.waiting = 0, []  # type: tuple[int, list[PendingCall]]
        self.mine = threading.local()  # `path`: which work this thread does; none in the thread that began

    def ask(self, question: ClientCall) -> Any:
        path = getattr(self.mine, "path", None)
        if path is None:
            return self.send([question])[0]
        mine = PendingCall(path, question)
        with self.turn:
            self.waiting.append(mine)
            self.busy -= 1
            self.turn.notify_all()
            self.turn.wait_for(lambda: mine.done)
        if mine.error is not None:
            raise mine.error
        return mine.answer

    def side_by_side(self, work: Callable[[Any], Iterable[Any]], items: Iterable[Any]) -> Iterator[list[Any]]:
        items, above = list(items), getattr(self.mine, "path", None)
        found: list[Any] = [None] * len(items)
        failed: dict[int, BaseException] = {}
        left = len(items)

        def do(k: int) -> None:
            nonlocal left
            self.mine.path = (*(above or ()), k)
            try:
                found[k] = list(work(items[k]))
            except BaseException as error:
                failed[k] = error
            with self.turn:
                left -= 1
                if left or above is None:  # whoever ends last goes on as the one that waits for all of them
                    self.busy -= 1
                self.turn.notify_all()

        with self.turn:
            self.busy += len(items) - (above is not None)
        threads = [threading.Thread(target=do, args=(k,), daemon=True) for k in range(len(items))]
        for thread in threads:
            thread.start()
        if above is None:
            self._serve()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[min(failed)]
        return iter(found)

    def _serve(self) -> None:
        """Send what is waited for, until nobody works any more."""
        with self.turn:
            while True:
                self.turn.wait_for(lambda: self.busy == 0)
                if not self.waiting:
                    return
                now, self.waiting = sorted(self.waiting, key=lambda one: one.path), []
                try:
                    for one, answer in zip(now, self.send([one.question for one in now])):
                        one.answer = answer
                except BaseException as error:
                    for one in now:
                        one.error = error
                for one in now:
                    one.done = True
                self.busy += len(now)
                self.turn.notify_all()


class RemoteRows:
    """Some rows of clients that keep them: what `Rows` is to those who ask."""

    def __init__(
        self, board: CallBatcher, part: tuple[Any, ...], who: tuple[int, ...], size: Tensor, like: Rows, all_: Tensor
    ):
        self.board, self.part, self.who, self.size, self.all = board, part, who, size, all_
        self.x, self.y = like.x, like.y  # one row of zeros, which shows what rows look like
        self.cache: dict[Any, Any] = {}

    def __len__(self) -> int:
        return len(self.who)

    def _with(self, part: tuple[Any, ...], size: Tensor) -> RemoteRows:
        return RemoteRows(self.board, part, self.who, size, self, self.all)  # type: ignore[arg-type]

    def select(self, which: Tensor) -> RemoteRows:
        who = tuple(self.who[i] for i in which.tolist())
        return RemoteRows(self.board, self.part, who, self.size[which], self, self.all[which])  # type: ignore[arg-type]

    @property
    def usable(self) -> RemoteRows:
        """All rows that advice is learnt from."""
        return self._with(("usable",), self.all)

    def folds(self, count: int) -> Iterator[FoldSplit]:
        sizes = self.ask("fold_sizes", (), {"count": torch.tensor(count)})  # [m, count]
        for k in range(count):
            if int(sizes[:, k].sum()):
                held = self._with(("held", k, count), sizes[:, k])
                yield FoldSplit(self._with(("without", k, count), self.size - held.size), held, sizes[:0, k])  # type: ignore[arg-type]

    def ask(self, name: str, own: tuple[Tensor, ...], shared: dict[str, Any]) -> Any:
        return self.board.ask(ClientCall(name, self.part, self.who, own, shared))

    def side_by_side(self, work: Callable[[Any], Iterable[Any]], items: Iterable[Any]) -> Iterator[list[Any]]:
        return self.board.side_by_side(work, items)

    # `estimates.answers.Answers`

    def summary(self) -> ClientSummary:
        found = self.ask("summary", (), {})
        kind = LinearStats if set(found._fields) == set(LinearStats._fields) else LocalFits
        return kind(**found._asdict())

    def slope(self, w: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(self.ask("slope", (), {"w": w}))  # type: ignore[return-value]

    def refit(self, center: Tensor, lam: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(self.ask("refit", (lam, start), {"center": center}))  # type: ignore[return-value]

    def pearson(self, models: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(self.ask("pearson", (models,), {}))  # type: ignore[return-value]


def make_sender(
    post: Messenger, names: tuple[str, ...], patience: WaitPolicy, tell: Callable[[int], None]
) -> Callable[[list[ClientCall]], list[Any]]:
    """How a board's questions go to these clients, all of one moment in one letter each."""
    count = 0

    def send(asked: list[ClientCall]) -> list[Any]:
        nonlocal count
        words: dict[int, dict[str, Any]] = {}
        tensors: dict[int, dict[str, Tensor]] = {}
        for k, question in enumerate(asked):
            same = {f"{k}/shared/{name}": value for name, value in question.shared.items() if value is not None}
            about = {"name": question.name, "part": list(question.part), "own": len(question.own)}
            about["shared"] = {name: value is not None for name, value in question.shared.items()}
            for row, place in enumerate(question.who):
                words.setdefault(place, {})[str(k)] = about
                mine = {f"{k}/own/{i}": part[row : row + 1] for i, part in enumerate(question.own)}
                tensors.setdefault(place, {}).update(same | mine)
        letters = {names[i]: Payload({"asked": words[i]}, tensors[i]) for i in sorted(words)}
        quorum = max(len(letters) - len(names) + patience.quorum, 0)  # of these, where not all are asked
        replies = post.ask_all("asked", letters, deadline=patience.deadline, quorum=quorum)
        count += 1
        tell(count)
        return [stack_replies(k, question, names, replies) for k, question in enumerate(asked)]

    return send


def stack_replies(k: int, question: ClientCall, names: tuple[str, ...], replies: dict[str, Payload]) -> Any:
    """Everyone's answer to one question, stacked; who answers what is no answer is named."""
    parts: list[Any] = []
    for place in question.who:
        try:
            found = rebuild_tree(str(k), replies[names[place]].tensors)
        except RequestError as error:
            raise ClientFailedError(
                names[place], f"client '{names[place]}' does not answer '{question.name}': {error}"
            ) from error
        if reply_shapes(found) != reply_shapes(parts[0] if parts else found) or not is_valid_reply(found):
            raise ClientFailedError(
                names[place], f"client '{names[place]}' answers '{question.name}' with numbers that are none."
            )
        parts.append(found)
    return stack_states(parts)


def reply_shapes(found: Any) -> list[Any]:
    return (
        [tuple(found.shape)] if isinstance(found, Tensor) else [(n, tuple(t.shape)) for n, t in found._asdict().items()]
    )


def is_valid_reply(found: Any) -> bool:
    """One client's answer in finite numbers."""
    parts = [found] if isinstance(found, Tensor) else list(found)
    return all(part.shape[:1] == (1,) and bool(torch.isfinite(part.double()).all()) for part in parts)


def advise_federation(
    run: RunFile,
    grid: Grid,
    out: str | Path,
    *,
    say: Callable[[str], None] = ignore_message,
    tell: OnProgress = ignore_progress,
) -> AdviceResult:
    """Advise a federation; the run directory `out` and the clients' own folders have the answer.

    Every sum is of all clients, so that one that fails in the middle, or is late where a quorum is not, cannot be left
    out of what follows only: the others begin again, schema included, and have the advice of a federation without it.
    """
    directory, run, how, post, clients = prepare_federation(run, grid, out, say, refuse_secure)
    patience = WaitPolicy(how.deadline, required_replies(how, len(clients)))
    while True:
        job = make_remote_job(run, clients, post, patience, tell)
        if directory is None:
            directory = create_run(out, initial_files(job))
        try:
            with directory_lock(directory.path):
                advice = run_advice(job, directory, tell)
            break
        except ClientFailedError as error:
            names = exclude_clients(post, clients.names, error)
            say("the others begin again: an advice is of those who stay to its end")
            remove_run(directory)
            directory = None
            run, clients = agree_on_run(post, names, run)
    send_results(post, advice, how)
    write_participation(out, post, clients.names)
    return advice


def remove_run(directory: RunDirectory) -> None:
    """A run directory is there whole or not at all, whenever we are killed."""
    former = directory.path.with_name(directory.path.name + ".before")
    shutil.rmtree(former, ignore_errors=True)
    directory.path.replace(former)
    shutil.rmtree(former)


def refuse_secure(run: RunFile, how: FederationSection) -> None:
    if how.secure:
        raise RequestError("secure = true lets nobody see single messages, and advice is made of them; leave it out.")


def make_remote_job(run: RunFile, clients: Clients, post: Messenger, patience: WaitPolicy, tell: OnProgress) -> Job:
    """The job of an advice whose rows are elsewhere; refuses tasks that cannot be advised so."""
    task = make_task(run, clients)
    if not is_dense(task):
        raise RequestError(
            f"advice across machines is for linear, logistic and Poisson tasks of up to some hundred coefficients; for "
            f"task '{task.name}' of {task.dim} use `mooring advise` where the rows are in one place."
        )
    said = partial(tell, "asking the clients")
    board = CallBatcher(make_sender(post, clients.names, patience, lambda count: said(count, count + 1)))
    sizes = {part: getattr(clients, part).size for part in PARTS}
    whole = sizes["train"] + sizes["validation"] + (sizes["test"] if clients.has_random_parts else 0)
    who = tuple(range(len(clients)))
    parts = {part: RemoteRows(board, (part,), who, sizes[part], clients.train, whole) for part in PARTS}
    return Job(run, replace(clients, **parts), task)  # type: ignore[arg-type]


def send_results(post: Messenger, advice: AdviceResult, how: FederationSection) -> None:
    """Every client receives its recommendation and its model."""
    models, frame = advice.models, advice.clients
    letters = {}
    for i, name in enumerate(advice.job.clients.names):
        tensors = {"common": models.global_, "own": models.recommended[i : i + 1]}
        letters[name] = Payload({"record": client_record(advice, frame.iloc[i])}, tensors)
    post.ask(FINISH_MESSAGE, letters, deadline=how.deadline or RESULT_DEADLINE_SECONDS, quorum=0)
