"""A second exchange, for tests: every client is a machine of its own, and the post between it and the server is bad.

Each client runs `visit` on a cohort of one, keeps the generations of its own state, and knows nobody else. Messages
may be lost on the way there or back, come late (in some later round), come twice and again a round later, and come in
any order. What becomes of a letter is a function of round and client, so that a run can be repeated.
"""

import copy
import itertools
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from mooring.core.cohort import CohortData, Rows, stack_states
from mooring.core.costs import CostMeter
from mooring.core.errors import RequestError
from mooring.data.clients import PARTS
from mooring.engines import local_update
from mooring.engines.exchange import BEST, LAST, ClientRoster, Replies, Scores, visible_state
from mooring.engines.reply_checks import message_pattern
from mooring.estimates.client_statistics import add_federation_estimates, compute_statistics

FINE, NEVER_ASKED, LOST, LATE, TWICE = "fine", "never asked", "lost", "late", "twice"
COMES = (FINE, TWICE)
TICKETS = itertools.count()  # no two asks, of whatever run, have the same
FATES = (FINE, FINE, FINE, TWICE, LOST, LATE, NEVER_ASKED)


def all_well(t, place):
    return FINE


def bad_post(t, place):
    """What becomes of the letters between server and client in round t."""
    draw = np.random.default_rng([t, place]).integers(len(FATES))
    return FATES[draw]


@dataclass
class Home:
    """A client's machine: its rows, and the generations of its state in every run that it takes part in."""

    task: Any
    place: int
    data: CohortData
    parts: dict[str, Rows]
    runs: dict[str, dict[int, Any]] = field(default_factory=dict)
    algorithm: dict[str, Any] = field(default_factory=dict)
    most: int = 0  # generations ever held at once

    def begin(self, run, algorithm, w0):
        self.algorithm[run] = algorithm
        self.runs.setdefault(run, {0: local_update.initial_states(algorithm, self.task, w0, 1)})

    def visit(self, run, server, round, base, hold):
        """From generation `base`; generations that nobody will ask for any more are dropped."""
        known = {t: state for t, state in self.runs[run].items() if t in hold}
        meter = CostMeter()
        state, message = local_update.client_update(
            self.algorithm[run], self.task, copy.deepcopy(server), known[base], self.data, round, meter
        )
        self.runs[run] = known | {round.t: state}
        self.most = max(self.most, len(self.runs[run]))
        return message, meter

    def deployed(self, run, server, round, at):
        state, merged = self.runs[run][at], torch.tensor([at])
        return local_update.personal_models(self.algorithm[run], self.task, server, state, merged, self.data, round)

    def scores(self, run, server, round, at, part):
        task = self.algorithm[run].deployed_task(self.task)
        return local_update.mean_risk(task, self.deployed(run, server, round, at), self.parts[part])


class Letter(NamedTuple):
    ticket: int  # of the ask that it answers
    place: int
    message: Any
    meter: CostMeter


def homes_of(task, clients, p):
    """Each client with its own rows and nothing else."""
    whole, out = clients.cohort(p), []
    for i in range(len(clients)):
        parts = {part: Rows.stack(*([column] for column in getattr(clients, part).of(i))) for part in PARTS}
        index = torch.tensor([i])
        data = CohortData(whole.keys[[i]], index, p[index], parts["train"], parts["validation"])
        out.append(Home(copy.deepcopy(task), i, data, parts))
    return out


class SeparateRows:
    """The rows of clients for which functions are called one client at a time."""

    def __init__(self, each):
        self.each, self.cache = each, {}

    @property
    def size(self):
        return torch.cat([rows.size for rows in self.each])

    def __len__(self):
        return len(self.each)

    def select(self, position):
        return SeparateRows([self.each[i] for i in position.tolist()])

    def map(self, function, task, *per_client, **shared):
        arguments = [[part[i : i + 1] for part in per_client] for i in range(len(self))]
        return stack_states([rows.map(function, task, *own, **shared) for rows, own in zip(self.each, arguments)])

    def map_independent(self, work, items):
        return map(work, items)

    def keep_batches(self):
        return nullcontext()


class LossyExchange:
    """The server's side. All that it remembers of a client is the round of its last merged reply."""

    def __init__(self, task, names, homes, fate=all_well, run="run", silent=(), keep_models_home=False):
        self.homes, self.fate, self.run, self.silent = homes, fate, run, silent
        self.task, self.keep_models_home = task, keep_models_home
        sizes = {part: torch.cat([home.parts[part].size for home in homes]) for part in PARTS}
        keys = np.concatenate([home.data.keys for home in homes])
        self.roster = ClientRoster(tuple(names), keys, torch.cat([home.data.p for home in homes]), sizes)
        self.pins = deque(maxlen=2)  # the generations of the two latest snapshots
        self.post, self.ticket, self.dropped = [], next(TICKETS), []

    def client_statistics(self, w0, asks):
        each = stack_states([compute_statistics(home.task, home.data, w0, asks) for home in self.homes])
        return add_federation_estimates(each, self.task, SeparateRows([home.data.train for home in self.homes]), asks)

    def begin(self, algorithm, w0):
        if algorithm.pooled:
            raise RequestError(f"{algorithm.name} needs all rows in one place.")
        self.algorithm = algorithm
        self.merged = torch.zeros(len(self.homes), dtype=torch.long)
        self.best = self.merged.clone()
        x, y = self.homes[0].parts["train"].x[:1], self.homes[0].parts["train"].y[:1]
        self.pattern = message_pattern(algorithm, self.task, w0, x, y)
        for home in self.homes:
            home.begin(self.run, algorithm, w0)

    def ask(self, server, cohort, round, deadline=None):
        self.ticket = next(TICKETS)
        came = self.post  # what comes now was sent before: late and repeated letters
        self.post = []
        for place in cohort.tolist():
            fate = self.fate(round.t, place)
            if fate == NEVER_ASKED:
                continue
            pinned = [int(tensor[place]) for pin in self.pins for tensor in pin]
            base = int(self.merged[place])
            hold = {base, int(self.best[place]), *pinned}
            message, meter = self.homes[place].visit(self.run, visible_state(self.algorithm, server), round, base, hold)
            letter = Letter(self.ticket, place, message, meter)
            if fate in COMES:
                came = [*came, letter]
            if fate == TWICE:
                came = [letter, *came]
            if fate in (LATE, TWICE):
                self.post.append(letter)
        return self.opened(came, cohort, round)

    def opened(self, came, cohort, round):
        """Whatever order the letters come in: the first one of each client that answers this very ask counts."""
        found = {}
        for k in np.random.default_rng(round.t).permutation(len(came)):
            letter = came[k]
            if letter.ticket == self.ticket and letter.place not in found:
                found[letter.place] = letter
            else:
                self.dropped.append(letter)
        places = sorted(found)
        meter = CostMeter()
        for place in places:
            meter.add(found[place].meter)
        message = [found[place].message for place in places]  # as they came: the loop's guard looks at each
        missing = {place: "no reply in time" for place in cohort.tolist() if place not in found}
        return Replies(torch.tensor(places, dtype=torch.long), message, missing, meter)

    def accept(self, who, round):
        self.merged[who] = round.t

    def mark_best(self, round):
        self.best = self.merged.clone()

    def generation(self, at):
        return (self.best if at == BEST else self.merged).tolist()

    def evaluate(self, server, round, parts, at=LAST):
        out = {}
        for part in parts:
            risk = torch.full((len(self.homes),), torch.nan, dtype=torch.float64)
            count = self.roster.sizes[part].clone()
            for home, t in zip(self.homes, self.generation(at)):
                if home.place in self.silent:
                    count[home.place] = 0
                else:
                    risk[home.place] = home.scores(self.run, server, round, t, part)
            out[part] = Scores(risk, count)
        return out

    def models(self, server, round, at=LAST):
        found = [home.deployed(self.run, server, round, t) for home, t in zip(self.homes, self.generation(at))]
        return None if self.keep_models_home else torch.cat(found)

    def numbers(self, field, at=LAST):
        return None

    def snapshot(self):
        self.pins.append((self.merged.clone(), self.best.clone()))
        return {"merged": self.merged.clone(), "best": self.best.clone()}

    def restore(self, snapshot):
        self.merged, self.best = snapshot["merged"].clone(), snapshot["best"].clone()
        self.pins.append((self.merged.clone(), self.best.clone()))

    def beside(self, algorithm):
        if algorithm.pooled:
            return None
        return LossyExchange(self.task, self.roster.names, self.homes, run=f"{self.run} beside: {algorithm.name}")
