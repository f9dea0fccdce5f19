"""Callbacks of the round loop: attacks, checks of replies, clipping, noise, the best round, early stopping, progress.

Each is a `Callback` of a few lines. Users write their own in the same way and pass them to `fit(callbacks=[...])`:

    class PrintLoss(Callback):
        def on_round_end(self, training, record):
            print(record["round"], record["train_loss"])

The hooks of a round run in the order in which `Callback` lists them, and for each hook the callbacks in the order
noise, attack, the user's, the built-in ones. So the replies of a user's callback are checked like any client's reply.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from mooring.algorithms.base import AnyAlgorithm
from mooring.core.aggregation import MEAN, average
from mooring.core.attacks import apply_attack
from mooring.core.cohort import Round, StateTree
from mooring.core.errors import RequestError
from mooring.core.types import JsonObject
from mooring.engines.exchange import ClientRoster, Replies
from mooring.engines.metrics import ERROR_MEASURES
from mooring.engines.privacy import PrivateMean, make_private_mean
from mooring.engines.reply_checks import cap_shares, check_replies, clip_messages
from mooring.engines.training_state import LOSS, LOSS_COLUMNS, Diverged, Evaluation, TrainingPlan, TrainingState
from mooring.runs.trackers import Tracker

if TYPE_CHECKING:
    from mooring.engines.loop import RoundRequest, Training

MAX_LOSS_FACTOR = 1e6  # a run diverges if its loss exceeds 1 + the first loss by this factor


class Aggregate(NamedTuple):
    """The average of a round's messages, and the round as `Algorithm.server_update` sees it."""

    mean: StateTree
    round: Round


class Callback:
    """Hooks of the round loop, in the order in which they are called; override those that you need."""

    def on_start(self, training: Training) -> None:
        """Before the first of the rounds that are left."""

    def on_replies(self, training: Training, request: RoundRequest, replies: Replies) -> Replies:
        """Return the replies to use instead of those received."""
        return replies

    def aggregate(self, training: Training, request: RoundRequest, replies: Replies) -> Aggregate | None:
        """Return the average of the messages; None leaves it to later callbacks."""
        return None

    def on_evaluation(self, training: Training, evaluation: Evaluation, round: Round) -> None:
        """After a round whose models were evaluated."""

    def on_round_end(self, training: Training, record: JsonObject) -> None:
        """After every round. `record` is its row in rounds.parquet; `training.state.stopped = True` ends the run."""


class SimulateAttack(Callback):
    """Makes some clients malicious, for trials."""

    def __init__(self, attack: str):
        self.attack = attack

    def on_replies(self, training: Training, request: RoundRequest, replies: Replies) -> Replies:
        seed, keys = training.plan.seed, training.exchange.roster.keys
        message = apply_attack(replies.message, replies.clients, self.attack, seed, keys, request.round.t)
        return replies._replace(message=message)


class CheckReplies(Callback):
    """Replies that are malformed, not finite or far too large are left out."""

    def __init__(self, compare_sizes: bool = True):
        self.compare_sizes = compare_sizes  # a private run bounds messages only by its clip, not by other clients'

    def on_replies(self, training: Training, request: RoundRequest, replies: Replies) -> Replies:
        usual = float(training.state.server.w.abs().max()) if self.compare_sizes else float("inf")
        clients, message, refused = check_replies(replies.message, replies.clients, training.exchange.pattern, usual)
        return replies._replace(clients=clients, message=message, refused=replies.refused | refused)


class ClipMessages(Callback):
    """Messages longer than `clip` are shortened to it."""

    def __init__(self, clip: float):
        self.clip = clip

    def on_replies(self, training: Training, request: RoundRequest, replies: Replies) -> Replies:
        return replies._replace(message=clip_messages(replies.message, self.clip))


class AddNoise(Callback):
    """The mean of clipped messages with Gaussian noise, over the shares of all clients in the cohort."""

    def __init__(self, private: PrivateMean):
        self.private = private

    def aggregate(self, training: Training, request: RoundRequest, replies: Replies) -> Aggregate:
        share = cap_shares(training.exchange.roster.p[request.cohort], training.plan.weight_cap)
        mean = self.private.mean(replies.message, replies.clients, request.cohort, share, request.round.t)
        return Aggregate(mean, request.round)

    def on_round_end(self, training: Training, record: JsonObject) -> None:
        record["epsilon"] = self.private.epsilon


class AverageMessages(Callback):
    """The average that the plan names, over the clients whose replies are used."""

    def aggregate(self, training: Training, request: RoundRequest, replies: Replies) -> Aggregate:
        p = training.exchange.roster.p[replies.clients]
        mean = average(replies.message, cap_shares(p, training.plan.weight_cap), training.plan.average)
        return Aggregate(mean, request.round._replace(cohort=len(replies.clients), weight=float(p.sum())))


class StopDivergence(Callback):
    """The run fails once the loss on training rows is absurdly large: later rounds would only be worse."""

    def on_evaluation(self, training: Training, evaluation: Evaluation, round: Round) -> None:
        first, train, roster = training.state.first_loss, evaluation.train, training.exchange.roster
        risk = torch.where(train.rows > 0, train.risk.double(), 0.0)
        limit = MAX_LOSS_FACTOR * (1 + (first if np.isfinite(first) else 0.0))
        is_too_large = ~(risk <= limit)
        if train.mean is not None and not train.mean <= limit:
            clients_text = ""
        elif not bool(is_too_large.any()):
            return
        elif bool(is_too_large[train.rows > 0].all()):
            clients_text = " (all clients)"
        else:
            order = torch.nan_to_num(risk, nan=torch.inf).argsort(descending=True, stable=True)
            clients_text = f" ({list_clients(order[: int(is_too_large.sum())].tolist(), roster)})"
        raise Diverged(
            f"{training.algorithm.name} diverged by round {evaluation.t}: the loss on training rows rose "
            f"from {first:.3g} to {evaluation.train_loss:.3g}{clients_text}."
        )


class KeepBest(Callback):
    """The state of the best round on validation rows is kept: the lowest loss, or the best value of a measure."""

    def on_evaluation(self, training: Training, evaluation: Evaluation, round: Round) -> None:
        state, loss = training.state, selection_loss(training.plan.select_by, evaluation)
        if loss == float("inf"):
            warnings.warn(f"round {evaluation.t}: the validation loss is infinite.")
        if not np.isfinite(loss):
            return
        if loss < state.best:
            state.best, state.best_round, state.evaluations_since_best = loss, evaluation.t, 0
            state.best_server = state.server
            training.exchange.mark_best(round)
        else:
            state.evaluations_since_best += 1


def selection_loss(by: str, evaluation: Evaluation) -> float:
    """Return the number that is lowest in the best round: the validation loss, or minus a measure that should be
    high."""
    if by == LOSS or np.isnan(evaluation.validation_loss):  # nan: there are no validation rows
        return evaluation.validation_loss
    if by not in evaluation.validation_measures:
        names = ", ".join((LOSS, *evaluation.validation_measures))
        raise RequestError(f"select_by = {by!r} is not measured on the validation rows; known here: {names}.")
    value = evaluation.validation_measures[by]
    return value if by in ERROR_MEASURES else -value


class StopEarly(Callback):
    """The run ends after `patience` evaluations without a better one on validation rows."""

    def __init__(self, patience: int):
        self.patience = patience

    def on_evaluation(self, training: Training, evaluation: Evaluation, round: Round) -> None:
        if training.state.evaluations_since_best >= self.patience:
            training.state.stopped = True


class SaveCheckpoints(Callback):
    """The state is saved every k-th round and after the last."""

    def __init__(self, save: Callable[[TrainingState], None], every: int):
        self.save, self.every = save, every

    def on_round_end(self, training: Training, record: JsonObject) -> None:
        state = training.state
        if state.t % self.every == 0 or state.t == training.rounds or state.stopped:
            self.save(state)


class ReportProgress(Callback):
    """A function of (state, rounds in all) is called after every round."""

    def __init__(self, report: Callable[[TrainingState, int], None]):
        self.report = report

    def on_round_end(self, training: Training, record: JsonObject) -> None:
        self.report(training.state, training.rounds)


class TrackRounds(Callback):
    """Every evaluated round's losses and measures are logged as soon as they are known, in the target's own units."""

    def __init__(self, tracker: Tracker, unit: float):
        self.tracker, self.unit = tracker, unit

    def on_round_end(self, training: Training, record: JsonObject) -> None:
        for name, value in record.items():
            if name in LOSS_COLUMNS and np.isfinite(value):
                self.tracker.log(name, value * self.unit, record["round"])
            elif name.startswith("test_") and name not in LOSS_COLUMNS:
                self.tracker.log(name, value, record["round"])


def plan_callbacks(
    algorithm: AnyAlgorithm,
    plan: TrainingPlan,
    clients: int,
    user: Sequence[Callback] = (),
    private: PrivateMean | None = None,
    save: Callable[[TrainingState], None] | None = None,
    report: Callable[[TrainingState, int], None] | None = None,
) -> list[Callback]:
    """Return the callbacks of a plan, including the user's. `private` has the ledger of a plan with noise (default: one
    in memory)."""
    if not isinstance(user, Sequence) or not all(isinstance(callback, Callback) for callback in user):
        raise RequestError(f"callbacks is a list of objects of mooring.engines.callbacks.Callback, got {user!r}.")
    private = make_private_mean(plan, clients) if private is None else private
    callbacks: list[Callback] = [] if private is None else [AddNoise(private)]
    callbacks += [SimulateAttack(plan.attack)] if plan.attack is not None else []
    callbacks += [*user, CheckReplies(compare_sizes=private is None)]
    callbacks += [ClipMessages(plan.clip)] if plan.clip is not None and private is None else []
    callbacks += [AverageMessages()] + ([] if algorithm.one_shot else [StopDivergence()]) + [KeepBest()]
    callbacks += [StopEarly(plan.patience)] if plan.patience is not None else []
    callbacks += [SaveCheckpoints(save, plan.checkpoint_every)] if save is not None else []
    return callbacks + ([ReportProgress(report)] if report is not None else [])


def check_aggregation(algorithm: AnyAlgorithm, plan: TrainingPlan) -> None:
    """Refuse clipping, robust averages and noise where the algorithm's messages do not allow them."""
    options = [f"average = {plan.average!r}"] if plan.average != MEAN else []
    options += [f"clip = {plan.clip:g}"] if plan.clip is not None else []
    if options and not algorithm.additive:
        raise RequestError(f"{options[0]} does not apply: the messages of {algorithm.name} are no changes of a model.")
    if plan.noise is not None:
        noise = f"noise = {plan.noise:g}"
        if plan.clip is None:
            raise RequestError(f"{noise} needs clip, the longest message: noise is measured in clips.")
        if plan.average != MEAN:
            raise RequestError(f"{noise} goes with average = 'mean'; what it does to {plan.average!r} is not known.")
        if algorithm.name == "local":
            raise RequestError(f"{noise} does not apply: {algorithm.name} sends nothing.")
    elif plan.delta is not None:
        raise RequestError(f"delta = {plan.delta:g} is for noise; give noise too.")


def list_clients(places: list[int], roster: ClientRoster) -> str:
    """Return up to three clients by name."""
    names = ", ".join(f"'{roster.names[place]}'" for place in places[:3])
    return f"client{'s' * (len(places) > 1)} {names}{', ...' * (len(places) > 3)}"
