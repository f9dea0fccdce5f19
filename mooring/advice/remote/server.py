"""Advice in a real federation: rows stay with their clients, and client functions are called by message.

The server runs `advise` as on one machine; where that calls client functions, a message goes to each client, which
computes them on its own rows. Independent work (the folds, the paths of each) is done side by side, and its calls
travel together: a linear task takes 25 to 40 messages to each client, a task of two classes some 65. Clients keep
nothing between messages, so any call may be repeated, and an interrupted advice restarts.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

from mooring.advice.advise import AdviceResult, run_advice
from mooring.advice.remote.access import RemoteAccess
from mooring.advice.remote.client_node import FINISH_MESSAGE, client_record
from mooring.core.errors import RequestError
from mooring.data.clients import PARTS, Clients
from mooring.engines.fit_files import initial_files
from mooring.engines.prepare import Job, make_task
from mooring.engines.progress import OnProgress, ignore_progress
from mooring.remote.exchange import RESULT_DEADLINE_SECONDS, required_replies
from mooring.remote.messages import ClientFailedError, Payload
from mooring.remote.messenger import Messenger, ignore_event, ignore_message
from mooring.remote.remote_rows import CallBatcher, RemoteRows, make_sender
from mooring.remote.server_run import agree_on_run, exclude_clients, prepare_federation, write_participation
from mooring.remote.transport import Transport
from mooring.runs.atomic_files import directory_lock
from mooring.runs.directory import RunDirectory, create_run
from mooring.runs.runfile import RunFile
from mooring.runs.sections import FederationSection
from mooring.tasks.proximal import is_dense


def advise_federation(
    run: RunFile,
    transport: Transport,
    out: str | Path,
    *,
    report: Callable[[str], None] = ignore_message,
    record: Callable[..., None] = ignore_event,
    on_progress: OnProgress = ignore_progress,
) -> AdviceResult:
    """Advise a federation; the result is written to the run directory `out` and to the clients' own folders.

    Every sum is of all clients. If one fails in the middle, or is late where a quorum is not, the others start again
    without it, schema included.
    """
    directory, run, how, messenger, clients = prepare_federation(run, transport, out, report, refuse_secure, record)
    while True:
        job, access = make_remote_job(run, clients, messenger, how, on_progress)
        if directory is None:
            directory = create_run(out, initial_files(job))
        try:
            with directory_lock(directory.path):
                advice = run_advice(job, directory, on_progress, access)
            break
        except ClientFailedError as error:
            names = exclude_clients(messenger, clients.names, error)
            report("the other clients start again: every client takes part to the end of a recommendation")
            remove_run(directory)
            directory = None
            run, clients = agree_on_run(messenger, names, run)
    send_results(messenger, advice, how)
    write_participation(out, messenger, clients.names)
    return advice


def remove_run(directory: RunDirectory) -> None:
    """Delete a run directory; if interrupted, it is complete or absent."""
    former = directory.path.with_name(directory.path.name + ".before")
    shutil.rmtree(former, ignore_errors=True)
    directory.path.replace(former)
    shutil.rmtree(former)


def refuse_secure(run: RunFile, how: FederationSection) -> None:
    if how.secure:
        raise RequestError("secure = true hides single messages, which advice needs; leave it out.")


def make_remote_job(
    run: RunFile, clients: Clients, messenger: Messenger, how: FederationSection, on_progress: OnProgress
) -> tuple[Job, RemoteAccess]:
    """The job of an advice whose clients keep their rows, and the access to these; some tasks are refused."""
    task = make_task(run, clients)
    if not is_dense(task):
        raise RequestError(
            f"advice across machines is for linear, logistic and Poisson tasks of up to some hundred coefficients; for "
            f"task '{task.name}' of {task.dim} use `mooring advise` where the rows are in one place."
        )
    required, messages = required_replies(how, len(clients)), count(1)

    def ask_all(payloads: dict[str, Payload]) -> dict[str, Payload]:
        quorum = max(len(payloads) - len(clients) + required, 0)  # of these, where not all are asked
        replies = messenger.ask_all("asked", payloads, deadline=how.deadline, quorum=quorum)
        number = next(messages)
        on_progress("asking the clients", number, number + 1)
        return replies

    calls = CallBatcher(make_sender(ask_all, clients.names))
    indices, example = tuple(range(len(clients))), (clients.train.x, clients.train.y)
    sizes = {part: getattr(clients, part).size for part in PARTS}
    parts = {part: RemoteRows(calls, (part,), indices, sizes[part], *example) for part in PARTS}
    total = sizes["train"] + sizes["validation"] + (sizes["test"] if clients.has_random_parts else 0)
    usable = RemoteRows(calls, ("usable",), indices, total, *example)
    share_models = bool(run.federation and run.federation.share_models)
    access = RemoteAccess(usable, share_models, run.data.time_column is not None, messenger.report)
    return Job(run, replace(clients, **parts), task), access  # type: ignore[arg-type]


def send_results(messenger: Messenger, advice: AdviceResult, how: FederationSection) -> None:
    """Every client receives its recommendation and its model."""
    models, frame, schema = advice.models, advice.clients, advice.job.clients.schema
    shape = None if schema is None else schema.shape
    payloads = {}
    for i, name in enumerate(advice.job.clients.names):
        tensors = {"common": models.global_, "own": models.recommended[i : i + 1]}
        payloads[name] = Payload({"record": client_record(advice, frame.iloc[i]), "shape": shape}, tensors)
    messenger.ask(FINISH_MESSAGE, payloads, deadline=min(how.deadline, RESULT_DEADLINE_SECONDS), quorum=0)
