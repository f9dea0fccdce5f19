"""Whether the messages of a run are hidden in secure sums, and by which protocol.

The run file alone decides, so that the server and every client decide alike; the answer is part of the run's digest.

    PLAIN        single messages are visible to the server
    FIXED        every sum is of all clients: one message per sum (`fixed_sums.py`, `transcript.py`)
    RECOVERING   rounds of some clients, or of those that stay: clients unmask the sums (`secure_sums.py`)

Without a line `secure` in [federation] a fit has secure sums wherever it can; `secure = false` is a choice, which a
client's policy may forbid.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping

import torch

from mooring.algorithms.base import AnyAlgorithm, build
from mooring.core.aggregation import MEAN
from mooring.core.errors import RequestError
from mooring.core.task import HasSolve, Task
from mooring.estimates.client_statistics import ClientStatistics
from mooring.remote.transcript import MIN_CLIENTS
from mooring.runs.runfile import RunFile
from mooring.runs.sections import FederationSection
from mooring.tasks import catalog

PLAIN, FIXED, RECOVERING = "plain", "fixed", "recovering"
HIDDEN_IN_SECURE_RUNS = ("convex", "noise", "trace", "dispersion", "largest")  # what clients do not state of their loss
MAX_ROWS_OVER_MEDIAN = 100  # rows that a client counts with at most, in medians, where max_rows is not set
TARGET_KINDS = ("regression", "binary")  # to try, where the run file does not state it


def decide_secure(run: RunFile) -> RunFile:
    """Return the run with `secure` as true or false; a run of another purpose than fit is returned as it is."""
    options = run.federation or FederationSection()
    if run.algorithm is None or run.mooring.purpose != "fit" or options.secure is not None:
        return run
    secure = not find_obstacle(run)
    return run.model_copy(update={"federation": options.model_copy(update={"secure": secure})})


def sums_of(run: RunFile) -> str:
    """Return PLAIN, FIXED or RECOVERING."""
    run = decide_secure(run)
    options = run.federation or FederationSection()
    if not options.secure:
        return PLAIN
    return FIXED if options.quorum == run.training.participation == 1 else RECOVERING


def count_clients(options: FederationSection) -> int | None:
    return len(options.clients) if isinstance(options.clients, list) else options.clients


def explain_visibility(run: RunFile) -> str:
    """Return the sentence for operators of a run whose messages are visible; empty for another run."""
    if run.algorithm is None or run.mooring.purpose != "fit" or sums_of(run) != PLAIN:
        return ""
    why = find_obstacle(run) or "its run file sets secure = false"
    return f"the server sees the single messages of each client: {why}."


def find_obstacle(run: RunFile) -> str:
    """Return why a fit cannot have secure sums, in one clause; empty if it can."""
    options, training = run.federation or FederationSection(), run.training
    ruled_out = [f"average = {training.average!r}"] if training.average != MEAN else []
    ruled_out += ["clip"] * (training.clip is not None) + ["weight_cap"] * (training.weight_cap is not None)
    ruled_out += ["share_models = true"] * options.share_models + ["compress"] * (options.compress is not None)
    if ruled_out:
        return f"{ruled_out[0]} needs them"
    count = count_clients(options)
    if count is not None and count < MIN_CLIENTS:
        return f"of {count} clients, each would learn the other's message from a sum"
    return find_word(run)


def find_word(run: RunFile) -> str:
    """Return which hyperparameter is resolved from statistics that a secure run hides; empty if none is."""
    assert run.algorithm is not None
    algorithm = build(run.algorithm.name, run.algorithm.fields)
    words = [f"{name} = {value!r}" for name, value in vars(algorithm).items() if value in ("auto", "theory")]
    words.sort(key=lambda word: not (algorithm.required_statistics and word.startswith("lam")))
    clause = f"{(words or ['a word'])[0]} of {algorithm.name} is resolved from statistics of single clients"
    if algorithm.is_resolved:
        return ""
    if algorithm.required_statistics:
        return clause
    tasks = make_tasks(run)
    return "" if tasks and all(is_resolved_by_steepness(algorithm, task) for task in tasks) else clause


def make_tasks(run: RunFile) -> list[Task]:
    """Return small tasks of the run's kind whose clients state how steep their loss is; none for networks."""
    name, section = run.task.name or "auto", run.task
    if (
        section.model is not None
        or name == "module"
        or (name != "auto" and not issubclass(catalog.find(name), HasSolve))
    ):
        return []
    kinds: tuple[str, ...] = TARGET_KINDS if run.data.target_type is None else (run.data.target_type,)
    if name != "auto":
        kinds = tuple(catalog.find(name).kinds[:1])
    return [catalog.build(name, kind, 2, 3 if kind == "classes" else 2, section.fields) for kind in kinds]


def is_resolved_by_steepness(algorithm: AnyAlgorithm, task: Task) -> bool:
    """Return whether the steepness of clients' losses is all that the algorithm's words are resolved from."""
    one = torch.ones(MIN_CLIENTS, dtype=torch.float64)
    hidden = dict.fromkeys(HIDDEN_IN_SECURE_RUNS, one * torch.nan)
    facts = ClientStatistics(
        n=one * 10, p=one / 3, smooth=one, fit=None, alone=None, validation=one, federation=None, **hidden
    )
    try:
        resolved = algorithm.resolve(task, facts)
    except (RequestError, ArithmeticError, ValueError, TypeError, AttributeError):
        return False
    return all(math.isfinite(value) for value in vars(resolved).values() if isinstance(value, float))


def check_secure_run(run: RunFile, options: FederationSection) -> None:
    """Refuse `secure = true` where something needs single messages."""
    count = count_clients(options)
    if options.secure and count is not None and count < MIN_CLIENTS:
        raise RequestError(
            f"secure = true needs {MIN_CLIENTS} clients or more, and {count} take part: two see each other's message. "
            "Set secure = false in [federation] to let the server see them."
        )
    obstacle = find_obstacle(run) if options.secure else ""
    if obstacle:
        raise RequestError(f"secure = true hides single messages, and {obstacle}; change that, or set secure = false.")


def bound_rows(train: Iterable[int], max_rows: int | None) -> int:
    """Return the rows that a client counts with at most, given all clients' training rows."""
    return max_rows or max(int(MAX_ROWS_OVER_MEDIAN * statistics.median(train)), 1)


def bound_weight(weight: float, weights: Iterable[float]) -> float:
    """Return the weight that a client counts with, given all clients'."""
    return min(weight, MAX_ROWS_OVER_MEDIAN * statistics.median(weights))


def agreed_shares(run: RunFile, stated: Mapping[str, Mapping[str, object]]) -> dict[str, float]:
    """Return the share of each client in a mean, from the rows and weights that all clients have stated."""
    options, rule = run.federation or FederationSection(), run.training.weights
    sizes: dict[str, dict[str, int]] = {name: dict(about["sizes"]) for name, about in stated.items()}  # type: ignore[call-overload]
    if isinstance(rule, dict):
        weights = {name: float(rule[name]) for name in stated}
    elif rule == "uniform":
        weights = dict.fromkeys(stated, 1.0)
    elif rule == "size":
        bound = bound_rows((about["train"] for about in sizes.values()), options.max_rows)
        weights = {name: float(min(about["train"], bound)) for name, about in sizes.items()}
    else:
        own = {name: float(str(about["weight"])) for name, about in stated.items()}
        weights = {name: bound_weight(weight, own.values()) for name, weight in own.items()}
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}
