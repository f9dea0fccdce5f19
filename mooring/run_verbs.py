"""What can be done with a run directory, by the purpose of its run: resume it, print it, show it.

`mooring.runs.purposes` states what the files of each purpose contain; `mooring.open` reads those of all purposes.
"""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mooring.core.errors import RequestError
from mooring.core.types import JsonObject, OnProgress
from mooring.report import terminal_results
from mooring.report.terminal import Display
from mooring.runs.atomic_files import frame_from_rows
from mooring.runs.directory import REPORT_FILE, RunDirectory, open_run
from mooring.runs.purposes import PurposeName

if TYPE_CHECKING:
    from mooring.algorithms.base import AnyAlgorithm
    from mooring.engines.callbacks import Callback
    from mooring.engines.compare import Comparison
    from mooring.engines.fit_result import FitResult
    from mooring.engines.metrics import Metric

ADVICE_KEYS = ("headline", "summary", "clients", "run")  # what `mooring advise --json` prints


class Inputs(NamedTuple):
    """Inputs that a run directory cannot contain, and the permission to use those that it names."""

    data: object = None
    model: object = None
    loss: object = None
    algorithms: Sequence[AnyAlgorithm] = ()
    callbacks: Sequence[Callback] = ()
    metrics: Mapping[str, Metric] | None = None
    trust_code: bool = False


Resumed = tuple[Any, list[str]]  # the result, and notes


class RunVerbs(NamedTuple):
    """What can be done with runs of one purpose."""

    resume: Callable[[Path, OnProgress, Inputs], Resumed] | None  # None: such a run is written in one step
    as_json: Callable[[Any, Path], JsonObject]  # the object that the purpose's command prints, of a result
    show: Callable[[Display, RunDirectory, bool], list[str]]  # prints a finished run; the notes on its data


def _resume_fit(path: Path, on_progress: OnProgress, given: Inputs) -> Resumed:
    from mooring.engines.fit import resume_fit

    if len(given.algorithms) > 1:
        raise RequestError(f"{path} is a run of 'fit': it has one algorithm, got {len(given.algorithms)}.")
    algorithm = given.algorithms[0] if given.algorithms else None
    inputs = (given.data, given.model, given.loss, algorithm, given.callbacks, given.trust_code, given.metrics)
    result, note = resume_fit(path, on_progress, *inputs)
    return result, [note] if note else []


def _resume_comparison(path: Path, on_progress: OnProgress, given: Inputs) -> Resumed:
    from mooring.engines.compare import resume_comparison

    _refuse(path, "compare", callbacks=given.callbacks, metrics=given.metrics)
    inputs = (given.data, given.model, given.loss, given.algorithms, given.trust_code)
    return resume_comparison(path, on_progress, *inputs), []


def _resume_advice(path: Path, on_progress: OnProgress, given: Inputs) -> Resumed:
    from mooring.advice.advise import resume as resume_advice
    from mooring.engines.saved_run import open

    _refuse(path, "advise", algorithm=given.algorithms, callbacks=given.callbacks, metrics=given.metrics)
    if open_run(path).finished:
        return open(path, model=given.model, loss=given.loss, trust_code=given.trust_code), []
    return resume_advice(path, on_progress, given.data, given.model, given.loss, given.trust_code), []


def _refuse(path: Path, purpose: str, **given: object) -> None:
    for name, value in given.items():
        if value:
            raise RequestError(f"{name} does not apply: {path} is a run of '{purpose}'.")


def _fit_as_json(result: FitResult, path: Path) -> JsonObject:
    from mooring.engines.fit_result import as_json

    return as_json(result)


def _comparison_as_json(result: Comparison, path: Path) -> JsonObject:
    from mooring.engines.compare import as_json

    return as_json(result)


def _advice_as_json(result: object, path: Path) -> JsonObject:
    """The object that `mooring advise --json` prints, from the run directory."""
    record = open_run(path).advice | {"run": str(path)}
    return {name: record[name] for name in ADVICE_KEYS}


def _show_fit(display: Display, run: RunDirectory, per_client: bool) -> list[str]:
    terminal_results.show_fit(display, run.summary, run.clients, per_client)
    return run.summary["notes"]


def _show_comparison(display: Display, run: RunDirectory, per_client: bool) -> list[str]:
    comparison = run.comparison
    terminal_results.show_comparison(display, comparison, per_client)
    return comparison["notes"]


def _show_advice(display: Display, run: RunDirectory, per_client: bool) -> list[str]:
    advice = run.advice
    terminal_results.show_advice(display, advice, per_client, run.path)
    return advice["notes"]


def _show_new_clients(display: Display, run: RunDirectory, per_client: bool) -> list[str]:
    summary = run.summary
    rows = frame_from_rows(summary["new_clients"])
    terminal_results.show_new_clients(display, rows, summary["metric"], summary["way"])
    return summary["notes"]


VERBS: dict[PurposeName, RunVerbs] = {
    "fit": RunVerbs(_resume_fit, _fit_as_json, _show_fit),
    "compare": RunVerbs(_resume_comparison, _comparison_as_json, _show_comparison),
    "advise": RunVerbs(_resume_advice, _advice_as_json, _show_advice),
    "personalize": RunVerbs(None, _fit_as_json, _show_new_clients),
}


def resume(
    run: str | Path,
    *,
    data: object = None,
    model: object = None,
    loss: object = None,
    algorithm: AnyAlgorithm | Sequence[AnyAlgorithm] | None = None,
    callbacks: Sequence[Callback] = (),
    metrics: Mapping[str, Metric] | None = None,
    progress: bool | OnProgress = False,
    trust_code: bool = False,
) -> Any:
    """Continue the interrupted run of a directory; the result is bit-for-bit what it would have been.

    The run is that of `fit`, `compare` or `advise`, and so is the result. Inputs that were in memory are passed again:
    the same data, model, loss and algorithm (those of a comparison), of a fit also callbacks and metrics. A finished
    run is read: that of `advise` as by `open`.
    """
    from mooring.engines.progress import progress_function

    algorithms = () if algorithm is None else tuple(algorithm) if isinstance(algorithm, Sequence) else (algorithm,)
    given = Inputs(data, model, loss, algorithms, callbacks, metrics, trust_code)
    result, notes = resume_run(run, progress_function(progress), given)
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return result


def resume_run(path: str | Path, on_progress: OnProgress, given: Inputs) -> Resumed:
    """Continue an interrupted run by its purpose; the result and notes."""
    purpose, path = open_run(path).run.mooring.purpose, Path(path)
    resume_purpose = VERBS[purpose].resume
    if resume_purpose is None:
        raise RequestError(f"{path} is a run of '{purpose}', which is written in one step: there is nothing to resume.")
    return resume_purpose(path, on_progress, given)


def as_json(result: object, path: Path) -> JsonObject:
    """The object that the command of the run's purpose prints as JSON."""
    return VERBS[open_run(path).run.mooring.purpose].as_json(result, path)


def show_run(display: Display, path: str | Path, per_client: bool = False) -> None:
    """Print a finished run of any purpose, from its directory."""
    run = open_run(path)
    notes = VERBS[run.run.mooring.purpose].show(display, run, per_client)
    report = Path(path) / REPORT_FILE
    first = f"Report: {shlex.quote(str(report))}" if report.is_file() else f"Run: {shlex.quote(str(path))}"
    predict = f"Predict: mooring predict {shlex.quote(str(path))} new.csv"
    gap = "\n" if len(first) + len(predict) + 4 > display.out.width else "    "
    display.print_line(f"{first}{gap}{predict}")
    terminal_results.show_notes(display, notes)
