"""The plan, the state and the outcome of a training run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from torch import Tensor

from mooring.core.aggregation import MEAN
from mooring.core.cohort import StateTree
from mooring.core.errors import WorkError
from mooring.core.types import JsonObject
from mooring.engines.exchange import BEST, LAST, Scores
from mooring.runs.sections import TrainingSection

LOSS = "loss"
LOSS_COLUMNS = ("train_loss", "validation_loss", "test_loss")


@dataclass(frozen=True)
class TrainingPlan:
    """The options of a training run that are not the algorithm's. `TrainingSection` of the run file checks them."""

    rounds: int = 100
    participation: float = 1.0  # a share of the clients (up to 1), or their number (above 1)
    seed: int = 0
    evaluate_every: int | None = None  # None: about twenty times a run
    patience: int | None = None  # evaluations without a better validation loss before the run stops; None: never
    checkpoint: str = BEST  # whose models are used: the best round on validation rows, or the last
    select_by: str = LOSS  # what the best round goes by: the loss, or a measure
    checkpoint_every: int = 10
    deadline: float | None = None  # seconds that a round waits for replies; None: until all are there
    average: str = MEAN  # of the messages: see core/aggregation.py
    clip: float | None = None  # longest message that is not shortened
    noise: float | None = None  # for privacy, in sensitivities of a round's mean: see privacy.py
    delta: float | None = None
    weight_cap: float | None = None  # the largest share of one client in a round
    attack: str | None = None  # for trials: some clients are malicious, see core/attacks.py


def make_plan(training: TrainingSection) -> TrainingPlan:
    """The plan of a run file."""
    return TrainingPlan(**training.model_dump(include={f.name for f in fields(TrainingPlan)}))


class Evaluation(NamedTuple):
    """Losses of the models that clients would use after a round: each client's risk [m], and their means over rows."""

    t: int
    train: Scores
    validation: Tensor
    test: Tensor
    train_loss: float
    validation_loss: float
    test_loss: float
    measures: Mapping[str, float]  # of all test rows together, by name
    validation_measures: Mapping[str, float] = {}  # where the best round goes by one of them


@dataclass
class TrainingState:
    """All that changes during a run, except the clients' states; a checkpoint contains exactly this and their
    snapshot."""

    server: StateTree
    t: int = 0
    records: list[JsonObject] = field(default_factory=list)
    best: float = float("inf")  # the validation loss of the best round, or less its measure where higher is better
    best_round: int = 0
    best_server: StateTree = None  # None while no round had a finite validation loss
    evaluations_since_best: int = 0
    offenders: dict[int, str] = field(default_factory=dict)  # client -> latest reason for leaving it out
    left_out: dict[int, int] = field(default_factory=dict)  # client -> number of rounds
    rounds_without_reply: int = 0  # in a row: no reply could be used
    first_loss: float = float("nan")  # on training rows, before the first round
    stopped: bool = False


class Diverged(WorkError):
    """The losses or models are no longer finite or are far too large; nothing of that round was saved."""


class TrainingOutcome(NamedTuple):
    """A run after its last round."""

    state: TrainingState
    last: Evaluation
    best: Evaluation  # of the round with the best validation loss; the last one without validation rows
    rounds: int  # the planned number

    def at(self, selection: str) -> tuple[Evaluation, StateTree]:
        """The evaluation and the server's state of the last or of the best round."""
        if selection == LAST or self.best.t == self.last.t:
            return self.last, self.state.server
        return self.best, self.state.best_server
