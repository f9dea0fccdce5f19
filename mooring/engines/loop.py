"""The one round loop: sample a cohort, ask it, guard its replies, average them, merge, count, evaluate, checkpoint.

Where the clients are is the exchange's business; everything that decides the numbers is here, once.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from mooring.core.aggregation import MEAN, average
from mooring.core.attacks import apply_attack
from mooring.core.cohort import Round
from mooring.core.costs import SolveTolerances
from mooring.core.errors import RequestError, WorkError
from mooring.core.seeds import add_mixed_counter, mix_counter, random_words, words_below
from mooring.core.task import Task
from mooring.data.clients import PARTS
from mooring.engines.exchange import BEST, LAST, ClientRoster, Exchange, Replies, Scores
from mooring.engines.local_update import NOT_FINITE
from mooring.engines.personal_parts import keep_personal_parts
from mooring.engines.privacy import PrivateMean, make_private_mean
from mooring.engines.reply_checks import cap_shares, check_replies, check_statistics, check_weights, clip_messages
from mooring.estimates.client_statistics import ALL_RESOLVED, ClientStatistics
from mooring.runs.sections import TrainingSection

DEFAULT_EVALUATIONS = 20  # how often a run is evaluated when evaluate_every is not given
LOSS_COLUMNS = ("train_loss", "validation_loss", "test_loss")
MAX_LOSS_FACTOR = 1e6  # times the loss before the first round (and at least this much): a run that diverges
MAX_ROUNDS_WITHOUT_REPLY = (
    3  # rounds in a row in which nobody's reply could be used, where a round asks some clients only
)
Result = TypeVar("Result")
COHORT_DRAW_CLIENTS = 1 << 16  # clients of a large population whose lots are drawn at once


@dataclass(frozen=True)
class TrainingPlan:
    """How a run goes on: the numbers that are not the algorithm's. `TrainingSection` of the run file checks them."""

    rounds: int = 100
    participation: float = 1.0  # a share of the clients (up to 1), or their number (above 1)
    seed: int = 0
    evaluate_every: int | None = None  # None: about twenty times a run
    patience: int | None = None  # evaluations without a better validation loss before the run stops; None: never
    checkpoint: str = BEST  # the models of the round with the best validation loss, or of the last round
    checkpoint_every: int = 10
    deadline: float | None = None  # seconds that a round waits for replies; None: until all are there
    average: str = MEAN  # of the messages: see core/averages.py
    clip: float | None = None  # the longest message that counts as it is
    noise: float | None = None  # for privacy, in sensitivities of a round's mean: see privacy.py
    delta: float | None = None
    weight_cap: float | None = None  # the largest share of one client in a round
    attack: str | None = None  # for trials: some clients lie, see core/attacks.py


def make_plan(training: TrainingSection) -> TrainingPlan:
    """The plan of a run file."""
    return TrainingPlan(**training.model_dump(include={f.name for f in fields(TrainingPlan)}))


class Evaluation(NamedTuple):
    """How the deployed models of a round do: each client's risk [m], and their means over rows."""

    t: int
    train: Scores
    validation: Tensor
    test: Tensor
    train_loss: float
    validation_loss: float
    test_loss: float
    measures: Mapping[str, float]  # of all test rows together, by name


@dataclass
class TrainingState:
    """All that changes during a run, the clients' states aside; a checkpoint holds exactly this and their snapshot."""

    server: Any
    t: int = 0
    records: list[dict[str, Any]] = field(default_factory=list)
    best: float = float("inf")
    best_round: int = 0
    best_server: Any = None  # None while no round had a finite validation loss
    waited: int = 0  # evaluations since the best one
    offenders: dict[int, str] = field(default_factory=dict)  # client -> why it was left out, latest
    left_out: dict[int, int] = field(default_factory=dict)  # client -> in how many rounds
    barren: int = 0  # rounds in a row in which no reply could be used
    first_loss: float = float("nan")  # on training rows, before the first round
    stopped: bool = False


class Diverged(WorkError):
    """The numbers ran away: one sentence that says where; nothing of that round was saved."""


class TrainingOutcome(NamedTuple):
    progress: TrainingState
    last: Evaluation
    best: Evaluation  # of the round with the best validation loss; the last one without validation rows
    rounds: int  # as many as there could have been

    def at(self, which: str) -> tuple[Evaluation, Any]:
        """The evaluation and the server's state of the last or of the best round."""
        if which == LAST or self.best.t == self.last.t:
            return self.last, self.progress.server
        return self.best, self.progress.best_server


class Ask(NamedTuple):
    """A round's question, for whoever answers it; what `Exchange.ask` takes."""

    exchange: Exchange
    server: Any
    cohort: Tensor
    round: Round
    deadline: float | None

    def answer(self) -> Replies:
        return self.exchange.ask(*self[1:])


Asking = Generator[Ask, Replies, Result]  # a run that stops at each round's question and goes on with the replies


def answered(asking: Asking[Result]) -> Result:
    """The run to its end, every question answered by its own exchange."""
    try:
        ask = next(asking)
        while True:
            ask = asking.send(ask.answer())
    except StopIteration as end:
        return end.value


def resolve(algorithm: Any, task: Task, exchange: Exchange, seed: int = 0, w0: Tensor | None = None) -> tuple[Any, Any]:
    """Facts, settle, start: the algorithm in numbers and the server's first state; the clients are told both.

    The first model is the task's own for this seed, unless `w0` is given.
    """
    for need in algorithm.required_capabilities:
        if not getattr(task, need):
            raise RequestError(f"{algorithm.name} needs a task with {need!r}, and task '{task.name}' has none.")
    w0 = task.start(seed) if w0 is None else w0
    check_weights(exchange.roster.names, exchange.roster.p)
    asks = (*algorithm.required_statistics, ALL_RESOLVED) if algorithm.is_resolved else algorithm.required_statistics
    ready = keep_personal_parts(algorithm.resolve(task, gather_statistics(exchange, w0, asks)), task)
    server, _ = ready.init(task, w0)
    exchange.begin(ready, w0)
    return ready, server


def gather_statistics(exchange: Exchange, w0: Tensor, asks: tuple[str, ...]) -> ClientStatistics:
    """The clients' facts; a client whose own are not finite is named, also where they make the common ones fail."""
    try:
        facts = exchange.client_statistics(w0, asks)
    except (ArithmeticError, RuntimeError, ValueError):  # of linear algebra, on numbers that are none
        check_statistics(exchange.roster.names, exchange.client_statistics(w0, ()))
        raise
    check_statistics(exchange.roster.names, facts)
    return facts


def collect_models(outcome: TrainingOutcome, exchange: Exchange, plan: TrainingPlan, which: str) -> Tensor | None:
    """[m, d]: every client's model of the last or of the best round; None where clients keep their own."""
    shown, server = outcome.at(which)
    at = LAST if shown.t == outcome.last.t else BEST
    return exchange.models(server, full_round(shown.t, outcome.rounds, exchange.roster, plan), at)


def full_round(t: int, rounds: int, roster: ClientRoster, plan: TrainingPlan) -> Round:
    """Round t as something that concerns all clients."""
    return Round(t, rounds, len(roster), len(roster), 1.0, plan.seed)


def sample_cohort(plan: TrainingPlan, keys: np.ndarray, t: int) -> Tensor:
    """Who takes part in round t: uniform, without replacement, the same for every method under one seed."""
    return draw_cohort(plan, mix_counter(keys), t)


def draw_cohort(plan: TrainingPlan, lots: np.ndarray, t: int) -> Tensor:
    """`sample_cohort`, given mixed(keys)."""
    state, m = random_words(plan.seed, "participation", t), len(lots)
    count = cohort_size(plan, m)
    share = (count + 6 * count**0.5 + 10) / m  # a bar that hardly ever fewer than `count` lots are under
    places, found = _lots_under(state, lots, share) if share < 0.5 else (np.zeros(0, int), np.zeros(0))
    if len(places) < count:
        places, found = np.arange(m), add_mixed_counter(state, lots)
    return torch.from_numpy(np.sort(places[np.argsort(found, kind="stable")[:count]]))


def _lots_under(state: np.ndarray, lots: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """The places and lots of the clients whose lots are in the lowest `share`: what is looked at of a large population
    fits the cache, and only few are sorted."""
    places, found, room = [], [], np.empty((2, min(COHORT_DRAW_CLIENTS, len(lots))), np.uint64)
    for begin in range(0, len(lots), COHORT_DRAW_CLIENTS):
        low, lot = words_below(state, lots[begin : begin + COHORT_DRAW_CLIENTS], int(share * 2.0**64), room)
        places.append(begin + low)
        found.append(lot)
    return np.concatenate(places), np.concatenate(found)


def cohort_size(plan: TrainingPlan, m: int) -> int:
    """How many of m clients take part in a round."""
    count = round(plan.participation * m) if plan.participation <= 1 else int(plan.participation)
    if count > m:
        raise RequestError(f"participation asks for {count} clients, but there are {m}.")
    return max(count, 1)


def check_participation(algorithm: Any, plan: TrainingPlan, m: int) -> None:
    """Refuse what cannot run before anything is written."""
    if cohort_size(plan, m) < m and (algorithm.full_participation or algorithm.pooled):
        raise RequestError(f"{algorithm.name} needs every client in every round; set participation = 1.")


def run(*given: Any, **more: Any) -> TrainingOutcome:
    """`rounds_of`, every question answered by the run's own exchange."""
    return answered(rounds_of(*given, **more))


def rounds_of(
    algorithm: Any,
    exchange: Exchange,
    plan: TrainingPlan,
    progress: TrainingState,
    *,
    save: Callable[[TrainingState], None] = lambda progress: None,
    tell: Callable[[TrainingState, int], None] = lambda progress, rounds: None,
    private: PrivateMean | None = None,
) -> Asking[TrainingOutcome]:
    """Run the remaining rounds from `progress`; `save` is called after every k-th round, `tell` after each. Whoever
    drives it answers each round's question.

    Where the plan asks for noise, `private` has the ledger (default: one in memory)."""
    roster = exchange.roster
    m, lots = len(roster), mix_counter(roster.keys)
    rounds = 1 if algorithm.one_shot else plan.rounds
    check_participation(algorithm, plan, m)
    check_aggregation(algorithm, plan)
    if private is None:
        private = make_private_mean(plan, m)
    every = plan.evaluate_every or max(1, rounds // DEFAULT_EVALUATIONS)
    last: Evaluation | None = None
    if progress.t == 0 and not algorithm.one_shot:
        before = exchange.evaluate(progress.server, full_round(1, rounds, roster, plan), PARTS[:1])
        progress.first_loss = mean_over_rows(before[PARTS[0]])
    while progress.t < rounds and not progress.stopped:
        t = progress.t + 1
        begin = time.perf_counter()
        cohort = torch.arange(m) if algorithm.one_shot else draw_cohort(plan, lots, t)
        turn = Round(t, rounds, m, len(cohort), float(roster.p[cohort].sum()), plan.seed)
        down = count_bytes(progress.server, algorithm.server_only) * len(cohort)
        replies = yield Ask(exchange, progress.server, cohort, turn, plan.deadline)
        begin += replies.elsewhere
        if plan.attack is not None:
            lied = apply_attack(replies.message, replies.who, plan.attack, plan.seed, roster.keys, t)
            replies = replies._replace(message=lied)
        # Privacy bounds a message by its clip alone: who is absurd beside the others depends on the others.
        usual = float(progress.server.w.abs().max()) if private is None else float("inf")
        taken, message, refused = check_replies(replies.message, replies.who, exchange.pattern, usual)
        for place, why in (replies.missing | refused).items():
            progress.offenders[place] = why
            progress.left_out[place] = progress.left_out.get(place, 0) + 1
        if len(taken):
            if private is not None:
                share = cap_shares(roster.p[cohort], plan.weight_cap)
                mean = private.mean(message, taken, cohort, share, t)
            else:
                turn = turn._replace(cohort=len(taken), weight=float(roster.p[taken].sum()))
                share = cap_shares(roster.p[taken], plan.weight_cap)
                mean = average(clip_messages(message, plan.clip), share, plan.average)
            progress.server = algorithm.server_update(progress.server, mean, turn)
            exchange.accept(taken, turn)
        lost = refused | {place: why for place, why in replies.missing.items() if why == NOT_FINITE}
        progress.barren = 0 if len(taken) or not lost else progress.barren + 1
        if progress.barren and (len(cohort) == m or progress.barren >= MAX_ROUNDS_WITHOUT_REPLY):
            raise no_usable_reply(algorithm, t, lost, roster)
        progress.t = t
        record = {
            "round": t,
            "asked": len(cohort),
            "accepted": len(taken),
            "bytes_down": 0 if message is None and len(replies.who) else down,
            "bytes_up": count_bytes(replies.message),
            **replies.meter.counts(),
            **dict.fromkeys(LOSS_COLUMNS, float("nan")),
            **({} if private is None else {"epsilon": private.epsilon}),
        }
        del replies, message  # a large federation's messages make room for the next round's
        if t % every == 0 or t == rounds:
            last = evaluate(exchange, progress.server, turn)
            record |= {name: getattr(last, name) for name in LOSS_COLUMNS}
            record |= {f"test_{name}": value for name, value in last.measures.items()}
            if not algorithm.one_shot:
                check_loss_growth(algorithm, progress.first_loss, last, roster)
            _remember(progress, plan, exchange, last, turn)
        record["seconds"] = time.perf_counter() - begin
        progress.records.append(record)
        if t % plan.checkpoint_every == 0 or t == rounds or progress.stopped:
            save(progress)
        tell(progress, rounds)
    if last is None or last.t != progress.t:
        last = evaluate(exchange, progress.server, full_round(progress.t, rounds, roster, plan))
    best = last
    if progress.best_server is not None and progress.best_round != progress.t:
        best = evaluate(exchange, progress.best_server, full_round(progress.best_round, rounds, roster, plan), BEST)
    if (broken := describe_missed_tolerances(progress.records)) is not None:
        warnings.warn(f"{algorithm.name}: {broken}")
    return TrainingOutcome(progress, last, best, rounds)


def check_aggregation(algorithm: Any, plan: TrainingPlan) -> None:
    """Clipping and robust averages are for messages that are changes, which may be shortened or left out."""
    asked = [f"average = {plan.average!r}"] if plan.average != MEAN else []
    asked += [f"clip = {plan.clip:g}"] if plan.clip is not None else []
    if asked and not algorithm.additive:
        raise RequestError(f"{asked[0]} does not apply: the messages of {algorithm.name} are no changes of a model.")
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


def no_usable_reply(algorithm: Any, t: int, lost: dict[int, str], roster: ClientRoster) -> Diverged:
    """No reply could be used: all clients were asked, or it went on for BARREN rounds."""
    return Diverged(
        f"{algorithm.name} diverged in round {t}: no client's reply can be used "
        f"({list_clients(list(lost), roster)}: {next(iter(lost.values()))})."
    )


def check_loss_growth(algorithm: Any, first: float, now: Evaluation, roster: ClientRoster) -> None:
    """Stop when the loss on training rows has become absurd: what follows would only be larger."""
    risk = torch.where(now.train.rows > 0, now.train.risk.double(), 0.0)
    most = MAX_LOSS_FACTOR * (1 + (first if np.isfinite(first) else 0.0))
    if now.train.mean is not None and not now.train.mean <= most:
        raise Diverged(
            f"{algorithm.name} diverged by round {now.t}: the loss on training rows rose from {first:.3g} to "
            f"{now.train_loss:.3g}."
        )
    over = ~(risk <= most)
    if bool(over.any()):
        order = torch.nan_to_num(risk, nan=torch.inf).argsort(descending=True, stable=True)
        alike = bool(over[now.train.rows > 0].all())
        who = "all clients" if alike else list_clients(order[: int(over.sum())].tolist(), roster)
        raise Diverged(
            f"{algorithm.name} diverged by round {now.t}: the loss on training rows rose from {first:.3g} to "
            f"{now.train_loss:.3g} ({who})."
        )


def list_clients(places: list[int], roster: ClientRoster) -> str:
    """Clients by name, the first of many."""
    names = ", ".join(f"'{roster.names[place]}'" for place in places[:3])
    return f"client{'s' * (len(places) > 1)} {names}{', ...' * (len(places) > 3)}"


def describe_missed_tolerances(records: list[dict[str, Any]]) -> str | None:
    """One sentence about inner solves that ended above the gradient they promised; None if there are none."""
    total = sum(
        (SolveTolerances(*(record[name] for name in SolveTolerances._fields)) for record in records), SolveTolerances()
    )
    if not total.broken:
        return None
    return (
        f"{total.broken} of {total.promised} inner solves did not reach the gradient they promised, at worst "
        f"{total.gradient_reached:.3g} where {total.gradient_promised:.3g} was promised; "
        "allow more steps, or choose another eta."
    )


def evaluate(exchange: Exchange, server: Any, round: Round, at: str = LAST) -> Evaluation:
    scores = exchange.evaluate(server, round, PARTS, at)
    train, validation, test = (scores[part] for part in PARTS)
    losses = {name: mean_over_rows(scores[part]) for name, part in zip(LOSS_COLUMNS, PARTS)}
    return Evaluation(round.t, train, validation.risk, test.risk, **losses, measures=test.measures)


def mean_over_rows(scores: Scores) -> float:
    """Each client counts by how many rows were scored; nan where none were."""
    if scores.mean is not None:
        return scores.mean
    count = scores.rows.double()
    if float(count.sum()) == 0:
        return float("nan")
    return float(torch.where(count > 0, scores.risk * count, 0.0).sum() / count.sum())


def _remember(progress: TrainingState, plan: TrainingPlan, exchange: Exchange, now: Evaluation, turn: Round) -> None:
    """Keep the best round's state, and stop when nothing has improved for `patience` evaluations."""
    if not np.isfinite(now.validation_loss):
        if now.validation_loss == float("inf"):
            warnings.warn(f"round {now.t}: the validation loss is infinite.")
        return
    if now.validation_loss < progress.best:
        progress.best, progress.best_round, progress.waited = now.validation_loss, now.t, 0
        progress.best_server = progress.server
        exchange.mark_best(turn)
        return
    progress.waited += 1
    progress.stopped = plan.patience is not None and progress.waited >= plan.patience


def count_bytes(tree: Any, kept: tuple[str, ...] = ()) -> int:
    """Bytes of all tensors of a state, a message or a list of such, fields in `kept` aside."""
    if isinstance(tree, Tensor):
        return tree.numel() * tree.element_size()
    if isinstance(tree, list):
        return sum(map(count_bytes, tree))
    return sum(count_bytes(part) for name, part in zip(getattr(tree, "_fields", ()), tree or ()) if name not in kept)
