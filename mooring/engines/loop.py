"""The one round loop: sample a cohort, ask it, guard its replies, average them, merge, count, evaluate, checkpoint.

Where the clients are is the exchange's business; everything that decides the numbers is here, once.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from mooring.core.cohort import Round, weighted_mean
from mooring.core.costs import Solves
from mooring.core.errors import RequestError, WorkError
from mooring.core.seeds import words
from mooring.engines.simulator import select

LOSSES = ("train_loss", "validation_loss", "test_loss")
EVALUATIONS = 20  # how often a run is evaluated when evaluate_every is not given


class Exchange(Protocol):
    """A way to exchange messages with clients."""

    states: Any

    def ask(self, server: Any, cohort: Tensor, round: Round) -> Any: ...

    def accept(self, accepted: Tensor, round: Round) -> None: ...

    def evaluate(self, server: Any, round: Round, parts: tuple[str, ...]) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class Plan:
    """How a run goes on: the numbers that are not the algorithm's."""

    rounds: int = 100
    participation: float = 1.0  # a share of the clients (up to 1), or their number (above 1)
    seed: int = 0
    evaluate_every: int | None = None  # None: about twenty times a run
    patience: int | None = None  # evaluations without a better validation loss before the run stops; None: never
    keep: str = "best"  # the models of the round with the best validation loss, or of the "last" round
    checkpoint_every: int = 10

    def __post_init__(self) -> None:
        for name in ("rounds", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if not self.participation > 0:
            raise RequestError(
                f"participation must be a share in (0, 1] or a number of clients, got {self.participation}."
            )
        if self.keep not in ("best", "last"):
            raise RequestError(f"keep must be 'best' or 'last', got {self.keep!r}.")


class Evaluation(NamedTuple):
    """How the deployed models of a round do: each client's risk [m], and their means over rows."""

    t: int
    validation: Tensor
    test: Tensor
    train_loss: float
    validation_loss: float
    test_loss: float


@dataclass
class Progress:
    """All that changes during a run; a checkpoint holds exactly this and the clients' states."""

    server: Any
    t: int = 0
    records: list[dict[str, Any]] = field(default_factory=list)
    best: float = float("inf")
    best_round: int = 0
    waited: int = 0  # evaluations since the best one
    chosen_server: Any = None
    chosen_states: Any = None  # (fields, merged) at the best round
    offenders: dict[int, str] = field(default_factory=dict)  # client -> why its reply was refused, latest
    stopped: bool = False


class Outcome(NamedTuple):
    progress: Progress
    last: Evaluation
    chosen: Evaluation  # the round with the best validation loss; the last one without validation rows


def sample_cohort(plan: Plan, keys: np.ndarray, t: int) -> Tensor:
    """Who takes part in round t: uniform, without replacement, the same for every method under one seed."""
    lottery = words(plan.seed, "participation", t, keys)
    return torch.from_numpy(np.sort(np.argsort(lottery, kind="stable")[: cohort_size(plan, len(keys))]))


def cohort_size(plan: Plan, m: int) -> int:
    """How many of m clients take part in a round."""
    count = round(plan.participation * m) if plan.participation <= 1 else int(plan.participation)
    if count > m:
        raise RequestError(f"participation asks for {count} clients, but there are {m}.")
    return max(count, 1)


def check_participation(algorithm: Any, plan: Plan, m: int) -> None:
    """Refuse what cannot run before anything is written."""
    if cohort_size(plan, m) < m and (algorithm.full_participation or algorithm.pooled):
        raise RequestError(f"{algorithm.name} needs every client in every round; set participation = 1.")


def guard(message: Any, present: Tensor, cohort: Tensor) -> tuple[Tensor, dict[int, str]]:
    """Who may be merged: replies that came and are finite; and why the others may not."""
    good = present.clone()
    for part in [] if message is None else [message] if isinstance(message, Tensor) else message:
        if part is not None:
            good &= torch.isfinite(part.reshape(len(part), -1)).all(1)
    refused = {int(cohort[i]): "its reply holds nan or infinity" for i in torch.nonzero(present & ~good)[:, 0]}
    return good, refused


def run(
    algorithm: Any,
    exchange: Any,
    plan: Plan,
    progress: Progress,
    *,
    save: Callable[[Progress], None] = lambda progress: None,
    tell: Callable[[Progress, int], None] = lambda progress, rounds: None,
) -> Outcome:
    """Run the remaining rounds from `progress`; `save` is called after every k-th round, `tell` after each."""
    data = exchange.data
    m = len(data)
    rounds = 1 if algorithm.one_shot else plan.rounds
    check_participation(algorithm, plan, m)
    every = plan.evaluate_every or max(1, rounds // EVALUATIONS)
    everyone = torch.arange(m)
    last: Evaluation | None = None
    while progress.t < rounds and not progress.stopped:
        t = progress.t + 1
        begin = time.perf_counter()
        cohort = everyone if algorithm.one_shot else sample_cohort(plan, data.keys, t)
        turn = Round(t, rounds, m, len(cohort), float(data.p[cohort].sum()), plan.seed)
        down = nbytes(progress.server, algorithm.kept) * len(cohort)
        replies = exchange.ask(progress.server, cohort, turn)
        accepted, refused = guard(replies.message, replies.present, cohort)
        progress.offenders.update(replies.missing | refused)
        up = nbytes(replies.message) // max(len(cohort), 1) * int(replies.present.sum())
        if bool(accepted.any()):
            taken = cohort[accepted]
            turn = turn._replace(cohort=len(taken), weight=float(data.p[taken].sum()))
            mean = weighted_mean(select(replies.message, accepted), data.p[taken])
            progress.server = algorithm.merge(progress.server, mean, turn)
            exchange.accept(accepted, turn)
        elif len(cohort) == m and refused:
            names = ", ".join(str(i) for i in list(refused)[:3])
            raise WorkError(
                f"{algorithm.name} diverged in round {t}: no client's reply is finite (clients {names}, ...). "
                "Choose a smaller eta."
            )
        progress.t = t
        record = {
            "round": t,
            "asked": len(cohort),
            "accepted": int(accepted.sum()),
            "bytes_down": 0 if replies.message is None else down,
            "bytes_up": up,
            "samples": replies.samples,
            "gradients": replies.gradients,
            **replies.solves._asdict(),
            **dict.fromkeys(LOSSES, float("nan")),
        }
        if t % every == 0 or t == rounds:
            last = evaluate(exchange, progress.server, turn)
            record |= {name: getattr(last, name) for name in LOSSES}
            _remember(progress, plan, exchange, last)
        record["seconds"] = time.perf_counter() - begin
        progress.records.append(record)
        if t % plan.checkpoint_every == 0 or t == rounds or progress.stopped:
            save(progress)
        tell(progress, rounds)
    turn = Round(progress.t, rounds, m, m, 1.0, plan.seed)
    if last is None or last.t != progress.t:
        last = evaluate(exchange, progress.server, turn)
    chosen = last
    if progress.best_round != progress.t and progress.chosen_server is not None:
        with at_chosen(progress, exchange):
            chosen = evaluate(exchange, progress.chosen_server, turn._replace(t=progress.best_round))
    if (broken := broken_promises(progress.records)) is not None:
        warnings.warn(f"{algorithm.name}: {broken}")
    return Outcome(progress, last, chosen)


def broken_promises(records: list[dict[str, Any]]) -> str | None:
    """One sentence about inner solves that ended above the gradient they promised; None if there are none."""
    total = sum((Solves(*(record[name] for name in Solves._fields)) for record in records), Solves())
    if not total.broken:
        return None
    return (
        f"{total.broken} of {total.promised} inner solves did not reach the gradient they promised, at worst "
        f"{total.gradient_reached:.3g} where {total.gradient_promised:.3g} was promised; "
        "allow more steps, or choose another eta."
    )


def evaluate(exchange: Any, server: Any, round: Round) -> Evaluation:
    risk = exchange.evaluate(server, round, ("train", "validation", "test"))
    sizes = exchange.sizes

    def mean(part: str) -> float:
        """Over rows: each client counts by how many it has."""
        total = sizes[part].double()
        return float((risk[part] * total).nansum() / total.sum()) if float(total.sum()) > 0 else float("nan")

    return Evaluation(round.t, risk["validation"], risk["test"], mean("train"), mean("validation"), mean("test"))


def _remember(progress: Progress, plan: Plan, exchange: Any, now: Evaluation) -> None:
    """Keep the best round's state, and stop when nothing has improved for `patience` evaluations."""
    if not np.isfinite(now.validation_loss):
        if now.validation_loss == float("inf"):
            warnings.warn(f"round {now.t}: the validation loss is infinite.")
        return
    if now.validation_loss < progress.best:
        progress.best, progress.best_round, progress.waited = now.validation_loss, now.t, 0
        if plan.keep == "best":
            progress.chosen_server = progress.server
            progress.chosen_states = exchange.states.copy()
        return
    progress.waited += 1
    progress.stopped = plan.patience is not None and progress.waited >= plan.patience


class at_chosen:
    """Within this block the exchange's clients have the states of the best round."""

    def __init__(self, progress: Progress, exchange: Any):
        self.progress, self.exchange = progress, exchange

    def __enter__(self) -> None:
        self.now = self.exchange.states
        self.exchange.states = self.progress.chosen_states

    def __exit__(self, *what: object) -> None:
        self.exchange.states = self.now


def nbytes(tree: Any, kept: tuple[str, ...] = ()) -> int:
    """Bytes of all tensors of a state or message, fields in `kept` aside."""
    if tree is None:
        return 0
    if isinstance(tree, Tensor):
        return tree.numel() * tree.element_size()
    return sum(nbytes(part) for name, part in zip(tree._fields, tree) if name not in kept)
