"""The round loop: begin a round (draw a cohort), let its clients update, finish the round (average, update, evaluate).

The exchange reaches the clients, and callbacks do everything else in a round (attacks, checks, noise, early
stopping, ...). `run` is the loop; sweeps drive the same two steps of several runs together.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Generator, Iterator
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from mooring.algorithms.base import AnyAlgorithm
from mooring.core.cohort import Round, StateTree
from mooring.core.costs import SolveTolerances
from mooring.core.seeds import mix_counter
from mooring.core.task import Task
from mooring.core.types import JsonObject
from mooring.data.clients import PARTS
from mooring.engines.callbacks import Callback, check_aggregation, list_clients, plan_callbacks
from mooring.engines.exchange import BEST, LAST, ClientRoster, Exchange, Replies, Scores
from mooring.engines.local_update import NOT_FINITE
from mooring.engines.participation import draw_cohort, refuse_partial_participation
from mooring.engines.personal_parts import keep_personal_parts
from mooring.engines.reply_checks import check_statistics, check_weights
from mooring.engines.training_state import (
    LOSS_COLUMNS,
    Diverged,
    Evaluation,
    TrainingOutcome,
    TrainingPlan,
    TrainingState,
)
from mooring.estimates.client_statistics import ALL_RESOLVED, ClientStatistics

DEFAULT_EVALUATIONS = 20  # how often a run is evaluated when evaluate_every is not given
MAX_ROUNDS_WITHOUT_REPLY = 3  # in a row, where a round asks some of the clients only
Result = TypeVar("Result")


class RoundRequest(NamedTuple):
    """The request of a round: the arguments of `Exchange.ask`, and the start time."""

    exchange: Exchange
    server: StateTree
    cohort: Tensor
    round: Round
    deadline: float | None
    started_at: float

    def answer(self) -> Replies:
        """The replies of the run's own clients."""
        return self.exchange.ask(self.server, self.cohort, self.round, self.deadline)


TrainingSteps = Generator[RoundRequest, Replies, Result]  # a run that yields each round's request and takes the replies


class Training:
    """A run between its rounds: its inputs, its state, and its callbacks."""

    def __init__(
        self,
        algorithm: AnyAlgorithm,
        exchange: Exchange,
        plan: TrainingPlan,
        state: TrainingState,
        callbacks: list[Callback],
    ):
        self.algorithm, self.exchange, self.plan = algorithm, exchange, plan
        self.state, self.callbacks = state, callbacks
        self.rounds = 1 if algorithm.one_shot else plan.rounds
        self.evaluate_every = plan.evaluate_every or max(1, self.rounds // DEFAULT_EVALUATIONS)
        self.mixed_keys: np.ndarray = mix_counter(exchange.roster.keys)
        self.last_evaluation: Evaluation | None = None

    def remaining_rounds(self) -> Iterator[int]:
        """The numbers of the rounds that are left, until one of them stops the run."""
        while self.state.t < self.rounds and not self.state.stopped:
            yield self.state.t + 1


def run(
    algorithm: AnyAlgorithm,
    exchange: Exchange,
    plan: TrainingPlan,
    state: TrainingState,
    callbacks: list[Callback] | None = None,
) -> TrainingOutcome:
    """Train for the rounds that are left. `callbacks` are all of them (default: those of the plan)."""
    training = start_training(algorithm, exchange, plan, state, callbacks)
    for t in training.remaining_rounds():
        request = begin_round(training, t)
        finish_round(training, request, request.answer())
    return finish_training(training)


def training_steps(
    algorithm: AnyAlgorithm,
    exchange: Exchange,
    plan: TrainingPlan,
    state: TrainingState,
    callbacks: list[Callback] | None = None,
) -> TrainingSteps[TrainingOutcome]:
    """`run` as a generator that yields each round's request and is sent the replies."""
    training = start_training(algorithm, exchange, plan, state, callbacks)
    for t in training.remaining_rounds():
        request = begin_round(training, t)
        finish_round(training, request, (yield request))
    return finish_training(training)


def run_steps(steps: TrainingSteps[Result]) -> Result:
    """The result of a run whose requests are all answered by its own exchange."""
    try:
        request = next(steps)
        while True:
            request = steps.send(request.answer())
    except StopIteration as end:
        return end.value


def start_training(
    algorithm: AnyAlgorithm,
    exchange: Exchange,
    plan: TrainingPlan,
    state: TrainingState,
    callbacks: list[Callback] | None,
) -> Training:
    """Check the plan, and evaluate the first model where the run is at its beginning."""
    roster = exchange.roster
    refuse_partial_participation(algorithm, plan, len(roster))
    check_aggregation(algorithm, plan)
    callbacks = plan_callbacks(algorithm, plan, len(roster)) if callbacks is None else callbacks
    training = Training(algorithm, exchange, plan, state, callbacks)
    if state.t == 0 and not algorithm.one_shot:
        before = exchange.evaluate(state.server, full_round(1, training.rounds, roster, plan), PARTS[:1])
        state.first_loss = mean_over_rows(before[PARTS[0]])
    for callback in callbacks:
        callback.on_start(training)
    return training


def begin_round(training: Training, t: int) -> RoundRequest:
    """Draw the cohort of round t; nothing changes."""
    started_at, roster, plan = time.perf_counter(), training.exchange.roster, training.plan
    one_shot = training.algorithm.one_shot
    cohort = torch.arange(len(roster)) if one_shot else draw_cohort(plan, training.mixed_keys, t)
    round = Round(t, training.rounds, len(roster), len(cohort), float(roster.p[cohort].sum()), plan.seed)
    return RoundRequest(training.exchange, training.state.server, cohort, round, plan.deadline, started_at)


def finish_round(training: Training, request: RoundRequest, replies: Replies) -> None:
    """Update the server from the replies, evaluate if it is time, and record the round."""
    algorithm, exchange, state, round = training.algorithm, training.exchange, training.state, request.round
    started_at, num_received = request.started_at + replies.elsewhere, len(replies.clients)
    bytes_up = count_bytes(replies.message)
    bytes_down = count_bytes(request.server, algorithm.server_only) * len(request.cohort)
    for callback in training.callbacks:
        replies = callback.on_replies(training, request, replies)
    accepted = replies.clients
    if len(accepted):
        mean, round = next(filter(None, (hook.aggregate(training, request, replies) for hook in training.callbacks)))
        state.server = algorithm.server_update(state.server, mean, round)
        exchange.accept(accepted, round)
    _note_missing(training, request, replies)
    state.t = round.t
    record = {
        "round": round.t,
        "asked": len(request.cohort),
        "accepted": len(accepted),
        "bytes_down": 0 if replies.message is None and num_received else bytes_down,
        "bytes_up": bytes_up,
        **replies.meter.counts(),
        **dict.fromkeys(LOSS_COLUMNS, float("nan")),
    }
    del replies  # frees the memory of messages for the next round
    if round.t % training.evaluate_every == 0 or round.t == training.rounds:
        evaluation = training.last_evaluation = evaluate(exchange, state.server, round)
        record |= {name: getattr(evaluation, name) for name in LOSS_COLUMNS}
        record |= {f"test_{name}": value for name, value in evaluation.measures.items()}
        for callback in training.callbacks:
            callback.on_evaluation(training, evaluation, round)
    record["seconds"] = time.perf_counter() - started_at
    state.records.append(record)
    for callback in training.callbacks:
        callback.on_round_end(training, record)


def _note_missing(training: Training, request: RoundRequest, replies: Replies) -> None:
    """Record clients whose replies were not used, and fail if no reply can be used any more."""
    state, roster = training.state, training.exchange.roster
    for place, reason in (replies.missing | replies.refused).items():
        state.offenders[place] = reason
        state.left_out[place] = state.left_out.get(place, 0) + 1
    unusable = replies.refused | {place: reason for place, reason in replies.missing.items() if reason == NOT_FINITE}
    state.rounds_without_reply = 0 if len(replies.clients) or not unusable else state.rounds_without_reply + 1
    is_full = len(request.cohort) == len(roster)
    if state.rounds_without_reply and (is_full or state.rounds_without_reply >= MAX_ROUNDS_WITHOUT_REPLY):
        raise Diverged(
            f"{training.algorithm.name} diverged in round {request.round.t}: no client's reply can be used "
            f"({list_clients(list(unusable), roster)}: {next(iter(unusable.values()))})."
        )


def finish_training(training: Training) -> TrainingOutcome:
    """The evaluations of the last and of the best round."""
    exchange, state, plan, last = training.exchange, training.state, training.plan, training.last_evaluation
    if last is None or last.t != state.t:
        last = evaluate(exchange, state.server, full_round(state.t, training.rounds, exchange.roster, plan))
    best = last
    if state.best_server is not None and state.best_round != state.t:
        round = full_round(state.best_round, training.rounds, exchange.roster, plan)
        best = evaluate(exchange, state.best_server, round, BEST)
    if (missed := describe_missed_tolerances(state.records)) is not None:
        warnings.warn(f"{training.algorithm.name}: {missed}")
    return TrainingOutcome(state, last, best, training.rounds)


def resolve(
    algorithm: AnyAlgorithm, task: Task, exchange: Exchange, seed: int = 0, w0: Tensor | None = None
) -> tuple[AnyAlgorithm, StateTree]:
    """The algorithm with all its fields as numbers, and the server's first state; the clients receive both.

    The first model is the task's own for this seed, unless `w0` is given.
    """
    w0 = task.start(seed) if w0 is None else w0
    check_weights(exchange.roster.names, exchange.roster.p)
    required = (
        (*algorithm.required_statistics, ALL_RESOLVED) if algorithm.is_resolved else algorithm.required_statistics
    )
    resolved = keep_personal_parts(algorithm.resolve(task, gather_statistics(exchange, w0, required)), task)
    server, _ = resolved.init(task, w0)
    exchange.begin(resolved, w0)
    return resolved, server


def gather_statistics(exchange: Exchange, w0: Tensor, required: tuple[str, ...]) -> ClientStatistics:
    """The clients' statistics; a client whose statistics are not finite is named."""
    try:
        statistics = exchange.client_statistics(w0, required)
    except (ArithmeticError, RuntimeError, ValueError):  # of linear algebra, on numbers that are not finite
        check_statistics(exchange.roster.names, exchange.client_statistics(w0, ()))
        raise
    check_statistics(exchange.roster.names, statistics)
    return statistics


def collect_models(outcome: TrainingOutcome, exchange: Exchange, plan: TrainingPlan, selection: str) -> Tensor | None:
    """[m, d]: every client's model of the last or of the best round; None if clients keep their own."""
    evaluation, server = outcome.at(selection)
    at = LAST if evaluation.t == outcome.last.t else BEST
    return exchange.models(server, full_round(evaluation.t, outcome.rounds, exchange.roster, plan), at)


def full_round(t: int, rounds: int, roster: ClientRoster, plan: TrainingPlan) -> Round:
    """Round t with all clients."""
    return Round(t, rounds, len(roster), len(roster), 1.0, plan.seed)


def evaluate(exchange: Exchange, server: StateTree, round: Round, at: str = LAST) -> Evaluation:
    """The losses of the models that clients would use after a round."""
    scores = exchange.evaluate(server, round, PARTS, at)
    train, validation, test = (scores[part] for part in PARTS)
    losses = {name: mean_over_rows(scores[part]) for name, part in zip(LOSS_COLUMNS, PARTS)}
    return Evaluation(
        round.t,
        train,
        validation.risk,
        test.risk,
        **losses,
        measures=test.measures,
        validation_measures=validation.measures,
    )


def mean_over_rows(scores: Scores) -> float:
    """Return the mean loss over all scored rows; nan if there are none."""
    if scores.mean is not None:
        return scores.mean
    count = scores.rows.double()
    if float(count.sum()) == 0:
        return float("nan")
    return float(torch.where(count > 0, scores.risk * count, 0.0).sum() / count.sum())


def describe_missed_tolerances(records: list[JsonObject]) -> str | None:
    """One sentence about inner solves that did not reach their tolerance; None if there are none."""
    names = SolveTolerances._fields
    total = sum((SolveTolerances(*(record[name] for name in names)) for record in records), SolveTolerances())
    if not total.broken:
        return None
    return (
        f"{total.broken} of {total.promised} inner solves did not reach the gradient they promised, at worst "
        f"{total.gradient_reached:.3g} where {total.gradient_promised:.3g} was promised; "
        "allow more steps, or choose another eta."
    )


def count_bytes(tree: StateTree, skipped: tuple[str, ...] = ()) -> int:
    """Bytes of all tensors of a state, a message or a list of such, without the fields `skipped`."""
    if isinstance(tree, Tensor):
        return tree.numel() * tree.element_size()
    if isinstance(tree, list):
        return sum(map(count_bytes, tree))
    return sum(count_bytes(part) for name, part in zip(getattr(tree, "_fields", ()), tree or ()) if name not in skipped)
