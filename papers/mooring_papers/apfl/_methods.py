"""The methods of `apfl`'s experiments by name, and references to what they reached.

The global model of FedAvg and SCAFFOLD is followed in the runs of their localized versions.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from mooring.algorithms.apfl import APFL
from mooring.algorithms.base import AnyAlgorithm
from mooring.algorithms.fedavg_finetune import FedAvgFinetune
from mooring.algorithms.per_fedavg import PerFedAvg
from mooring.algorithms.pfedme import PFedMe
from mooring.algorithms.scaffold_finetune import ScaffoldFinetune
from mooring.core.types import JsonObject
from mooring_papers.base.claims import Check, every, higher, lower
from mooring_papers.base.experiment import Cell, Table
from mooring_papers.base.results import Ref, of

ETA, DECAY, STEPS, BATCH = 0.1, 0.01, 10, 20  # batches are Table 2's
FADING = "inverse"  # "linear decay structure with respect to local steps", by 1% per iteration: eta/(1 + k/100)
EQUATION: JsonObject = {"alpha_pull": 0.0, "alpha_by": "mixture"}  # Eq. 6
PROGRAM: JsonObject = {"alpha_pull": 0.02, "alpha_by": "parts"}  # how the authors' program moves alpha
INNER_ETA = 0.05  # of pFedMe's 5 inner steps, not printed
ALPHAS = (0.25, 0.5, 0.75)
FIXED = tuple(f"APFL {alpha}" for alpha in ALPHAS)
ADAPTIVE, VARIANT = "APFL adaptive", "APFL adaptive, program's variant"  # by Eq. 6; a second row, of which no claim is
FEDAVG, FEDAVG_LOCAL = "FedAvg global", "FedAvg localized"
SCAFFOLD, SCAFFOLD_LOCAL = "SCAFFOLD global", "SCAFFOLD localized"
PER_FEDAVG, PFEDME = "perFedAvg", "pFedMe"

LAST = 5  # evaluated rounds that count as late
LOSS, ACCURACY = "train loss", "test accuracy"  # the paper's validation rows are our test rows


def name_run(method: str) -> str:
    """Return the run in which a method is followed."""
    return method.removesuffix(" global").removesuffix(" localized")


def algorithm(
    run: str,
    *,
    first_alpha: float = 0.5,
    adapt: str = "round",
    scaffold: JsonObject | None = None,
    **work: Any,
) -> AnyAlgorithm:
    """The algorithm of a run; `work`: local work in fields that all share, `scaffold`: overrides for SCAFFOLD."""
    usual: JsonObject = {"eta": ETA, "decay": DECAY, "eta_schedule": FADING, "steps": STEPS, "batch": BATCH}
    work = usual | work
    tuning = {"tune_steps": work["steps"], "tune_epochs": work.get("epochs", 0)}
    if run.startswith(ADAPTIVE):
        rule = PROGRAM if run.endswith(VARIANT.removeprefix(ADAPTIVE)) else EQUATION
        return APFL(alpha=first_alpha, adapt=adapt, adapt_on="train", output="own", **rule, **work)
    if run.startswith("APFL"):
        return APFL(alpha=float(run.split()[1]), adapt="no", output="own", **work)
    if run == "FedAvg":
        return FedAvgFinetune(**work, output="own")
    if run == "SCAFFOLD":
        return ScaffoldFinetune(**work | (scaffold or {}), **tuning)
    if run == PER_FEDAVG:
        return PerFedAvg(**work | {"inner_eta": 0.01, "eta": 0.001, "decay": 0.0}, tune_steps=work["steps"])
    if run == PFEDME:
        return PFedMe(**work | {"lam": 15.0, "eta": 0.01, "decay": 0.0}, inner_eta=INNER_ETA)
    raise KeyError(run)


def has_global_model(run: str) -> bool:
    return run in ("FedAvg", "SCAFFOLD")


def runs(*methods: str) -> list[str]:
    return list(dict.fromkeys(map(name_run, methods)))


def curve(method: str, series: str, at: int | Callable | None = None, **fixed: object) -> Ref:
    """A method's series: of the global model where the method is a global one."""
    common = "common " if method.endswith(" global") else ""
    return of(common + series, at, run=name_run(method), **fixed)


def final(method: str, series: str, **fixed: object) -> Ref:
    """A method's series in the last round."""
    return curve(method, series, -1, **fixed)


def late(method: str, series: str, **fixed: object) -> Ref:
    """A method's series over the last evaluated rounds: where clients are sampled, one round has few of them."""
    return curve(method, series, mean_of_last, **fixed)


def mean_of_last(values: np.ndarray) -> float:
    return float(np.mean(values[-LAST:]))


def percent(method: str, **fixed: Any) -> Ref:
    """A method's last accuracy in %."""
    name = str(curve(method, ACCURACY).series)
    return of(lambda values: 100 * values[name][-1], run=name_run(method), **fixed)


def better(method: str, than: str, **fixed: object) -> Check:
    """In the last round, a lower training loss and a higher validation accuracy."""
    return every(
        loss=lower(final(method, LOSS, **fixed), final(than, LOSS, **fixed)),
        accuracy=higher(final(method, ACCURACY, **fixed), final(than, ACCURACY, **fixed)),
    )


def every_pair(series: str, methods: Iterable[str], than: Iterable[str], **fixed: object) -> Check:
    """In the last round each of the methods has the lower training loss, or the higher accuracy, than each other."""
    compare = lower if series == LOSS else higher
    pairs = [(a, b) for a in methods for b in than]
    return every(
        **{f"{a} against {b}": compare(final(a, series, **fixed), final(b, series, **fixed)) for a, b in pairs}
    )


def best(series: str, method: str, among: Iterable[str], **fixed: object) -> Check:
    """The lowest training loss, or the highest accuracy, in the last round."""
    compare = lower if series == LOSS else higher
    baselines = [name for name in among if name != method]
    own_final = final(method, series, **fixed)
    return every(**{name: compare(own_final, final(name, series, **fixed)) for name in baselines})


def result_table(title: str, printed: Mapping[str, tuple[float | None, float | None]]) -> Table:
    """Training loss and validation accuracy by method, beside the printed ones."""
    return Table(
        title,
        tuple(printed),
        {
            "training loss": [Cell(final(method, LOSS), loss) for method, (loss, _) in printed.items()],
            "validation accuracy, %": [Cell(percent(method), accuracy) for method, (_, accuracy) in printed.items()],
        },
    )
