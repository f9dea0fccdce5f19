"""The exchange with clients on other machines, by messages.

The server stores of a client only the round of its last merged reply, now and at the best round, and at the two latest
checkpoints: the generations that a client must keep.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from mooring.algorithms.base import AnyAlgorithm
from mooring.core.cohort import Round, StateTree, stack_states
from mooring.core.costs import CostMeter, SolveTolerances
from mooring.core.errors import RequestError, WorkError
from mooring.core.task import Task
from mooring.core.types import JsonObject, NamedValues
from mooring.engines.exchange import BEST, LAST, ClientRoster, Replies, Scores, check_model_sharing, visible_state
from mooring.engines.local_update import NOT_FINITE
from mooring.engines.personal_parts import drop_personal_entries, personal_coefficients
from mooring.engines.reply_checks import MAX_SIZE_FACTOR, check_statistics, message_pattern
from mooring.engines.request import hyperparameters as hyperparameters_of
from mooring.estimates.client_statistics import ALL_RESOLVED, ClientStatistics, add_federation_estimates
from mooring.remote.compression import decompress
from mooring.remote.fixed_sums import FixedSums
from mooring.remote.messages import Payload, rebuild_tree
from mooring.remote.messenger import CollectedReplies, Messenger
from mooring.remote.remote_rows import CallBatcher, RemoteRows, make_sender
from mooring.remote.secure_sums import LOSS_RANGE, SecureAggregator, split_vector
from mooring.runs.sections import FederationSection
from mooring.runs.tensor_files import flatten

ExampleRow = tuple[Tensor, Tensor]  # x [1, ...] and y [1], with the shape of a client's rows
RESULT_DEADLINE_SECONDS = 90.0  # for clients to reply that they have their result


class RemoteExchange:
    """The clients of a federation, by messages."""

    is_remote = True

    def __init__(
        self,
        messenger: Messenger,
        roster: ClientRoster,
        task: Task,
        options: FederationSection,
        row: ExampleRow,
        *,
        fresh: bool = True,
        sums: SecureAggregator | FixedSums | None = None,
    ):
        self.messenger, self.roster, self.task, self.options, self.row, self.fresh = (
            messenger,
            roster,
            task,
            options,
            row,
            fresh,
        )
        self.algorithm: AnyAlgorithm  # set by `begin`
        self.first: dict[str, Tensor] = {}  # the server's first state
        self.pattern: StateTree = None
        self.merged = torch.zeros(len(roster), dtype=torch.long)
        self.best = self.merged.clone()
        self.secure = sums
        self.pins: deque[tuple[Tensor, Tensor]] = deque(maxlen=2)  # the generations of the two latest snapshots

    def client_statistics(self, w0: Tensor, asks: tuple[str, ...]) -> ClientStatistics:
        if self.options.secure and (shown := [name for name in asks if name != ALL_RESOLVED]):
            raise RequestError(
                f"secure = true hides messages, and a hyperparameter resolved from clients' {' and '.join(shown)} "
                'shows more than they do; give numbers instead of words such as "auto".'
            )
        replies = self._all("client_statistics", {"asks": asks}, {"w0": w0})
        each = stack_states([ClientStatistics(**rebuild_tree("facts", reply.tensors)._asdict()) for reply in replies])
        check_statistics(self.roster.names, each)
        calls = CallBatcher(make_sender(partial(self.messenger.ask_all, "statistics"), self.roster.names))
        all_clients, size = tuple(range(len(self.roster))), self.roster.sizes["train"]
        rows = RemoteRows(calls, ("train",), all_clients, size, *self.row)
        return add_federation_estimates(each, self.task, rows, asks)

    def begin(self, algorithm: AnyAlgorithm, w0: Tensor) -> None:
        if algorithm.pooled:
            raise RequestError(f"{algorithm.name} needs all rows in one place; these clients keep theirs.")
        check_model_sharing(algorithm, self.options.share_models)
        self.algorithm = algorithm
        self.first = flatten("server", algorithm.init(self.task, w0)[0])
        self.pattern = message_pattern(algorithm, self.task, w0, *self.row)
        self.merged = torch.zeros(len(self.roster), dtype=torch.long)
        self.best = self.merged.clone()
        hyperparameters = {name: value for name, value in hyperparameters_of(algorithm).items() if value is not None}
        fields = self._label() | {
            "hyperparameters": hyperparameters,
            "fresh": self.fresh,
            "start": secrets.token_hex(8),
        }
        messages = {name: self._message_to(place, fields, {"w0": w0}) for place, name in enumerate(self.roster.names)}
        if self.secure is not None:
            check_resolved(algorithm.name, hyperparameters)
            self.secure.open()
        self._some("begin", messages)  # a client that cannot begin is left out of every round, with its reason

    def ask(self, server: StateTree, cohort: Tensor, round: Round, deadline: float | None = None) -> Replies:
        tensors = self._server_tensors(visible_state(self.algorithm, server))
        messages = {}
        for place in cohort.tolist():
            base = int(self.merged[place])
            needed_rounds = {base, int(self.best[place]), *(int(tensor[place]) for pin in self.pins for tensor in pin)}
            fields = self._label() | {"round": list(round), "base": base, "hold": sorted(needed_rounds)}
            messages[self.roster.names[place]] = self._message_to(place, fields, tensors)
        if self.secure is not None and self.pattern is not None:
            return self._ask_masked(self.secure, messages, round)
        answered = self._some("local_update", messages, deadline)
        silent = {name: why for name, why in answered.missing.items() if why != NOT_FINITE}
        if not answered.replies and silent:
            name, why = next(iter(silent.items()))
            raise WorkError(f"round {round.t}: no client answered; '{name}': {why}")
        places = {name: place for place, name in enumerate(self.roster.names)}
        ordered = sorted((places[name], reply) for name, reply in answered.replies.items())
        meter = CostMeter()
        for _, reply in ordered:
            meter.add(read_meter(reply.fields.get("meter")))
        message = [self._message(reply) for _, reply in ordered]
        missing = {places[name]: why for name, why in answered.missing.items()}
        return Replies(torch.tensor([place for place, _ in ordered], dtype=torch.long), message, missing, meter)

    def _ask_masked(self, sums: SecureAggregator | FixedSums, messages: dict[str, Payload], round: Round) -> Replies:
        """Return the mean of all remaining clients as the message of each: the server learns no more."""
        places = {name: place for place, name in enumerate(self.roster.names)}
        pattern = flatten("message", self.pattern)
        size = sum(part.numel() for part in pattern.values())
        masked = sums.ask(sums.update, messages, self.options.secure_range, size, f"round {round.t}")
        senders = sorted(places[name] for name in masked.survivors)
        weight = float(self.roster.p[torch.tensor(senders)].sum())
        if not bool((abs(masked.total) <= self.options.secure_range * len(masked.survivors)).all()):
            raise WorkError(
                f"round {round.t}: the secure sum is larger than its clients' messages may be: one of "
                f"{', '.join(masked.survivors)} sent random numbers, and secure sums do not show which. Start a new "
                "run without a client that you suspect."
            )
        mean = rebuild_tree("message", split_vector(masked.total / weight, pattern))
        meter = CostMeter()
        for fields in masked.fields.values():
            meter.add(read_meter({"solves": SolveTolerances(), **fields.get("meter", {})}))
        departed = sorted({places[name] for name in messages} - set(senders))
        return Replies(
            torch.tensor(senders),
            [mean] * len(senders),
            dict.fromkeys(departed, "it left before the end of the sum"),
            meter,
        )

    def _evaluate_masked(
        self, sums: SecureAggregator | FixedSums, server: StateTree, round: Round, parts: tuple[str, ...], at: str
    ) -> dict[str, Scores]:
        """Return the mean loss over all clients' rows; no client's own."""
        everyone = round._replace(cohort=len(self.roster), weight=1.0)  # a model is evaluated by one request only
        messages = self._deployments(server, everyone, at, {"parts": list(parts)})
        masked = sums.ask(sums.evaluate, messages, LOSS_RANGE, len(parts), f"round {round.t}, losses")
        places = {name: place for place, name in enumerate(self.roster.names)}
        present = torch.tensor(sorted(places[name] for name in masked.survivors))
        unknown = torch.full((len(self.roster),), torch.nan, dtype=torch.float64)
        no_rows = torch.zeros(len(self.roster), dtype=torch.long)
        out = {}
        for k, part in enumerate(parts):
            rows = self.roster.sizes[part].double()
            share = float(rows[present].sum() / rows.sum()) if float(rows.sum()) else 0.0
            mean = float(masked.total[k]) / share if share else float("nan")
            out[part] = Scores(unknown, no_rows, mean=mean)
        return out

    def _message(self, reply: Payload) -> StateTree | str:
        """Return a client's message as it arrived; the round loop compares it with the pattern."""
        try:
            return rebuild_tree("message", decompress(reply.tensors) if self.options.compress else reply.tensors)
        except (RequestError, ValueError) as error:
            return str(error)

    def accept(self, clients: Tensor, round: Round) -> None:
        self.merged[clients] = round.t

    def mark_best(self, round: Round) -> None:
        self.best = self.merged.clone()

    def evaluate(self, server: StateTree, round: Round, parts: tuple[str, ...], at: str = LAST) -> dict[str, Scores]:
        if self.secure is not None:
            return self._evaluate_masked(self.secure, server, round, parts, at)
        answered = self._some("evaluate", self._deployments(server, round, at, {"parts": parts}))
        risk = torch.full((len(parts), len(self.roster)), torch.nan, dtype=torch.float64)
        rows = {part: self.roster.sizes[part].clone() for part in parts}
        for place, name in enumerate(self.roster.names):
            if name in answered.replies:
                risk[:, place] = answered.replies[name].tensors["risk"].double()
        absurd = self._absurd(risk, torch.stack([rows[part] for part in parts]), answered.replies)
        for place, name in enumerate(self.roster.names):
            if name not in answered.replies or absurd[place]:
                risk[:, place] = torch.nan
                for part in parts:
                    rows[part][place] = 0
        return {part: Scores(risk[k], rows[part]) for k, part in enumerate(parts)}

    def _absurd(self, risk: Tensor, rows: Tensor, answered: NamedValues) -> Tensor:
        """[m]: whose losses [parts, m] are not finite or absurdly large where most clients' are not: they are left out,
        by name, so that one client cannot end the run as if it had diverged."""
        has_rows = (rows > 0) & torch.tensor([name in answered for name in self.roster.names])
        finite = risk[has_rows & torch.isfinite(risk)]
        usual = float(finite.median()) if len(finite) else 0.0
        absurd = (has_rows & ~(risk.abs() <= MAX_SIZE_FACTOR * max(1.0, usual))).any(0)
        if 2 * int(absurd.sum()) > int(has_rows.any(0).sum()):
            return torch.zeros_like(absurd)  # the run has diverged
        for place in absurd.nonzero().reshape(-1).tolist():
            loss = float(risk[:, place].nan_to_num(nan=torch.inf).max())
            self.messenger.report(
                f"client '{self.roster.names[place]}' is left out of this evaluation: it reports a loss of "
                f"{loss:.3g}, where {usual:.3g} is usual"
            )
        return absurd

    def models(self, server: StateTree, round: Round, at: str = LAST) -> Tensor | None:
        """Return the personal models; a client that sends none is named and recorded with the global model."""
        if not self.options.share_models:
            return None
        answered = self.messenger.ask("models", self._deployments(server, round, at), quorum=0)
        out = server.w.reshape(1, -1).repeat(len(self.roster), 1)
        for place, name in enumerate(self.roster.names):
            reply = answered.replies.get(name)
            if reply is not None and reply.tensors["model"].shape == out[:1].shape:
                out[place] = reply.tensors["model"][0].to(out.dtype)
            else:
                self.messenger.report(f"client '{name}' sent no model of its own; the global model is recorded for it")
        return out

    def numbers(self, field: str, at: str = LAST) -> Tensor | None:
        if not self.options.share_models:
            return None
        messages = {
            name: self._message_to(place, self._label() | {"field": field, "base": base})
            for place, (name, base) in enumerate(zip(self.roster.names, self._generations(at)))
        }
        replies = self.messenger.ask("numbers", messages, quorum=0).replies
        if not any(reply.fields["known"] for reply in replies.values()):
            return None
        numbers = [replies[name].fields["number"] if name in replies else None for name in self.roster.names]
        known = [math.nan if number is None else float(number) for number in numbers]
        return torch.tensor(known, dtype=torch.float64)

    def snapshot(self) -> dict[str, Tensor]:
        self.pins.append((self.merged.clone(), self.best.clone()))
        return {"merged": self.merged.clone(), "best": self.best.clone()}

    def restore(self, snapshot: dict[str, Tensor]) -> None:
        self.merged, self.best = snapshot["merged"].clone(), snapshot["best"].clone()
        self.pins.append((self.merged.clone(), self.best.clone()))

    def beside(self, algorithm: AnyAlgorithm) -> RemoteExchange | None:
        if algorithm.pooled or (self.options.secure and algorithm.required_statistics):
            return None
        return RemoteExchange(
            self.messenger, self.roster, self.task, self.options, self.row, fresh=True, sums=self.secure
        )

    def send_results(
        self, server: StateTree, round: Round, at: str, rows: list[JsonObject], summaries: list[JsonObject]
    ) -> None:
        """Send every client the round whose model it uses, its losses, and a summary."""
        messages = self._deployments(server, round, at)
        for name, row, summary in zip(self.roster.names, rows, summaries):
            messages[name].fields.update(row=row, summary=summary)
        self.messenger.ask("done", messages, deadline=min(self.options.deadline, RESULT_DEADLINE_SECONDS), quorum=0)

    def _generations(self, at: str) -> list[int]:
        return (self.best if at == BEST else self.merged).tolist()

    def _deployments(
        self, server: StateTree, round: Round, at: str, fields: NamedValues | None = None
    ) -> dict[str, Payload]:
        """Return a message to every client about the model that it uses."""
        tensors = self._server_tensors(server)
        about = self._label() | {"round": list(round)} | dict(fields or {})
        return {
            name: self._message_to(place, about | {"base": base}, tensors)
            for place, (name, base) in enumerate(zip(self.roster.names, self._generations(at)))
        }

    def _server_tensors(self, server: StateTree) -> dict[str, Tensor]:
        """Return the server's state as it is sent: without the entries that are personal to clients."""
        tensors, mask = flatten("server", server), personal_coefficients(self.algorithm)
        return tensors if mask is None else drop_personal_entries(tensors, self.first, mask)

    def _label(self) -> JsonObject:
        return {"label": self.algorithm.name}

    def _message_to(self, place: int, fields: NamedValues, tensors: Mapping[str, Tensor] = {}) -> Payload:
        return Payload({**fields, "index": place, "p": float(self.roster.p[place])}, tensors)

    def _all(self, what: str, fields: NamedValues, tensors: Mapping[str, Tensor]) -> list[Payload]:
        """Return all clients' replies to the same message, in roster order."""
        messages = {name: self._message_to(place, fields, tensors) for place, name in enumerate(self.roster.names)}
        replies = self.messenger.ask_all(what, messages)
        return [replies[name] for name in self.roster.names]

    def _some(self, what: str, messages: dict[str, Payload], deadline: float | None = None) -> CollectedReplies:
        """Return the replies of a quorum or more."""
        quorum = required_replies(self.options, len(messages))
        return self.messenger.ask(what, messages, deadline=deadline or self.options.deadline, quorum=quorum)


def required_replies(options: FederationSection, requested: int) -> int:
    """Return the number of clients that must answer."""
    return math.ceil(options.quorum * requested) if options.quorum <= 1 else int(options.quorum)


def read_meter(fields: JsonObject | None) -> CostMeter:
    """Return the work that a client reports; none where the report is malformed."""
    try:
        fields = fields or {}
        solves = SolveTolerances(*(kind(value) for kind, value in zip((int, int, float, float), fields["solves"])))
        return CostMeter(int(fields["samples"]), int(fields["gradients"]), solves)
    except (TypeError, ValueError, KeyError):
        return CostMeter()


def check_resolved(name: str, hyperparameters: NamedValues) -> None:
    """Refuse hyperparameters that could not be resolved from what a secure run reveals."""
    for field, value in hyperparameters.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise RequestError(
                f"secure = true hides what {field} of {name} is resolved from; give {field} as a number."
            )
