"""The code of a run's local steps: PyTorch's, or compiled kernels if they save more than their compile time.

Both give the same numbers up to rounding, and either gives the same bytes every time: so a run chooses one before
it begins, and its run file records it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from mooring.algorithms.base import AnyAlgorithm
from mooring.algorithms.hyperparameters import auto_batch
from mooring.core.cohort import HasSummary, chunk_size
from mooring.core.errors import RequestError
from mooring.core.minibatches import batches_per_epoch
from mooring.core.task import Task
from mooring.core.types import JsonObject
from mooring.data.clients import Clients
from mooring.engines.participation import cohort_size
from mooring.engines.training_state import make_plan
from mooring.runs.runfile import RunFile
from mooring.tasks.compiled_steps import compile_steps, has_compiled_steps, is_numba_available
from mooring.tasks.network import NetworkTask

# Processor seconds, measured once: they decide what is worth compiling, never a number of a model.
COMPILE_SECONDS = 4.0  # import and compilation
SECONDS_PER_OPERATION = 7e-11  # what a kernel saves of each multiplication and addition
SECONDS_PER_STEP = 2e-4  # and of each step of a cohort, however small: the calls of PyTorch
SECONDS_PER_NETWORK_STEP = 5e-5  # of each step of each client of a large network
MIN_SAVING_FACTOR = 2.0  # a kernel must save this many times its compilation


def choose_kernels(run: RunFile, clients: Clients, task: Task, methods: Sequence[AnyAlgorithm]) -> tuple[RunFile, Task]:
    """The run with `training.kernels` and `training.chunk` resolved, and its task accordingly."""
    requested, can = run.training.kernels, has_compiled_steps(task)
    if requested == "numba" and not can:
        raise RequestError(
            "kernels = 'numba' are for linear and logistic tasks, and for classification by large networks of linear "
            f"layers and ReLU; task '{task.name}' has none here."
        )
    if requested == "numba" and not is_numba_available():
        raise RequestError(
            "this run takes its local steps by compiled kernels (kernels = 'numba'), and numba is not installed; "
            "install mooring-fl[fast], or start a run with kernels = 'torch', which is the same up to rounding."
        )
    is_worthwhile = (
        can
        and is_numba_available()
        and estimate_seconds_saved(run, clients, task, methods) > MIN_SAVING_FACTOR * COMPILE_SECONDS
    )
    chosen = requested or ("numba" if is_worthwhile else "torch")
    decided = {"kernels": chosen, "chunk": run.training.chunk or chunk_size(task)}
    resolved = run.model_copy(update={"training": run.training.model_copy(update=decided)})
    return resolved, compile_steps(task) if chosen == "numba" else task


def estimate_seconds_saved(run: RunFile, clients: Clients, task: Task, methods: Sequence[AnyAlgorithm]) -> float:
    """Estimate the seconds that compiled kernels would save of all local SGD of a run, from its sizes."""
    plan = make_plan(run.training)
    cohort, rows = cohort_size(plan, len(clients)), clients.train.size.double()
    seconds = 0.0
    for algorithm in methods:
        have = {field.name for field in fields(algorithm)}
        if not {"steps", "batch"} <= have or getattr(algorithm, "inner", "sgd") not in ("sgd", "auto"):
            continue
        work: JsonObject = vars(algorithm)
        batch = auto_batch(task) if work["batch"] == "auto" else work["batch"]
        if not batch and isinstance(task, HasSummary):
            continue  # steps on summaries of all rows
        steps = float(work["steps"])
        if getattr(algorithm, "epochs", 0):
            steps = work["epochs"] * float(batches_per_epoch(clients.train.size, batch or None).double().mean())
        height = float(rows.clamp(max=batch).mean() if batch else rows.mean())
        if isinstance(task, NetworkTask):
            seconds += plan.rounds * steps * cohort * SECONDS_PER_NETWORK_STEP
            continue
        operations = 4 * cohort * height * task.dim  # a product forward and one back
        seconds += plan.rounds * steps * (SECONDS_PER_STEP + SECONDS_PER_OPERATION * operations)
    return seconds
