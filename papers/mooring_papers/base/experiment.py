"""Declaration of an experiment: trials over points and seeds, claims, figures and tables.

    trial(seed=..., **point, **settings) -> {name: a number, or a list for a curve}

or a generator that returns such values and yields a request per round to its caller (`simulation_steps`). A trial
generates its data from its seed, so that methods see the same data at the same seed, and is a pure function of its
arguments, which are part of the key of its results. Everything that changes a number is a coordinate of the point, a
setting or code, never the name of a preset. If a change of the code, here or in `mooring`, changes a number, the
experiment's version is raised; the golden numbers of the smoke presets, which a test compares, show it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from mooring.core.types import JsonObject, NamedValues
from mooring.engines.loop import TrainingSteps
from mooring_papers.base.claims import Claim
from mooring_papers.base.results import Ref, Results

PRESETS = ("smoke", "quick", "paper")


def grid(**coordinates: Sequence[object]) -> list[JsonObject]:
    """Return all combinations of the coordinates, as points."""
    return [dict(zip(coordinates, values)) for values in product(*coordinates.values())]


@dataclass(frozen=True)
class Preset:
    """Size of an experiment."""

    points: Sequence[NamedValues] = ({},)
    repeats: int = 1
    settings: NamedValues = field(default_factory=dict)
    data: str = ""  # part of the title if the data are not the paper's
    needs: tuple[str, ...] = ()  # data sets, by the prefixes of their file names in the data folder
    first_seed: int = 0
    swept: tuple[str, ...] = ()  # coordinates: trials that differ only in these are trained as one cohort


@dataclass(frozen=True)
class Panel:
    """One plot: curves by label, each the mean over repeats with its interval."""

    x: str  # a coordinate of the points, or a series that contains the x values
    curves: Mapping[str, Ref | str]
    xlabel: str
    ylabel: str
    title: str = ""
    log: str = ""  # "x", "y" or "xy"
    dashed: tuple[str, ...] = ()  # labels drawn as plain dashed lines: theory, bounds
    across: Mapping[str, float] = field(default_factory=dict)  # labelled horizontal lines
    upright: Mapping[str, float] = field(default_factory=dict)  # labelled vertical lines


@dataclass(frozen=True)
class Cell:
    """Our number, and the paper's (None if it prints none)."""

    ours: Ref | str | Callable[[Results], float | str]  # a quantity, or a function of the results
    printed: float | str | None = None


@dataclass(frozen=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: Mapping[str, Sequence[Cell]]


@dataclass(frozen=True)
class Experiment:
    title: str
    trial: Callable[..., JsonObject | TrainingSteps[JsonObject]]
    presets: Mapping[str, Preset]
    claims: Sequence[Claim]
    panels: Sequence[Panel] = ()
    tables: Sequence[Table] = ()
    version: int = 1  # of the trials' numbers: raised by hand when a change of the code changes them
    reads: str = ""  # interpretation of what the paper does not state or states incorrectly; shown on the page

    def __post_init__(self) -> None:
        if tuple(self.presets) != PRESETS:
            raise ValueError(f"{self.title}: presets must be {', '.join(PRESETS)}, got {', '.join(self.presets)}")
        ids = [claim.id for claim in self.claims]
        if not ids or len(set(ids)) != len(ids):
            raise ValueError(f"{self.title}: needs claims with different ids, got {ids}")
