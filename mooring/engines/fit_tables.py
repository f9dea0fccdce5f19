"""The tables of a fit: one row per client, one row per round."""

from __future__ import annotations

import pandas as pd
import torch
from torch import Tensor

from mooring.algorithms.base import AnyAlgorithm
from mooring.core.types import JsonObject
from mooring.data.clients import REGRESSION
from mooring.engines.exchange import ClientRoster, Scores
from mooring.engines.fit_result import TrainedModels
from mooring.engines.loop import mean_over_rows
from mooring.engines.metrics import improvement_pct
from mooring.engines.prepare import Job
from mooring.engines.training_state import LOSS_COLUMNS, TrainingState


def clients_frame(roster: ClientRoster, losses: dict[str, Tensor], trained: TrainedModels) -> pd.DataFrame:
    """One row per client: sizes, test losses, how much lower the personal model's is than the local one's."""
    sizes = {part: size.numpy() for part, size in roster.sizes.items()}
    return pd.DataFrame(
        {
            "client": roster.names,
            "rows": sum(sizes.values()),
            **sizes,
            **{name: loss.numpy() for name, loss in losses.items()},
            "improvement_over_local": (losses["local"] - losses["personal"]).numpy(),
            "improvement_over_local_pct": improvement_pct(losses["local"].numpy(), losses["personal"].numpy()),
            "lam": per_client_lam(trained.algorithm, len(roster)),
            "alpha": torch.nan if trained.used.alpha is None else trained.used.alpha.numpy(),
            "left_out": describe_unused_replies(trained.outcome.state, len(roster)),
        }
    )


def describe_unused_replies(progress: TrainingState, m: int) -> list[str | None]:
    """Return, for each client with unusable replies, the number of rounds and the last reason."""
    rounds = {place: f"{count} round{'s' * (count > 1)}" for place, count in progress.left_out.items()}
    return [f"{rounds[i]}: {progress.offenders[i]}" if i in rounds else None for i in range(m)]


def per_client_lam(algorithm: AnyAlgorithm, m: int) -> list[float]:
    lam = getattr(algorithm, "lam", float("nan"))
    if isinstance(lam, int | float):
        return [float(lam)] * m
    return list(lam.per_client) if getattr(lam, "per_client", None) else [float("nan")] * m


def rounds_frame(job: Job, records: list[JsonObject]) -> pd.DataFrame:
    """The records in the target's own units."""
    frame = pd.DataFrame(records)
    for column in LOSS_COLUMNS:
        frame[column] = frame[column].astype(float) * job.clients.target_scale**job.task.unit_power
    if job.task.metric == "mse" and job.clients.kind == REGRESSION:
        frame["test_rmse"] = frame["test_loss"] ** 0.5
        rows = getattr(job.clients, "test", None)  # remote clients keep their rows
        variance = 0.0 if rows is None or len(rows.y) == 0 else float(rows.y.double().var(correction=0))
        if variance > 0:
            frame["test_r2"] = 1 - frame["test_loss"] / (variance * job.clients.target_scale**2)
    return frame


def test_losses(trained: TrainedModels | None, roster: ClientRoster) -> Tensor:
    """[m]: nan for a baseline that could not be trained."""
    return torch.full((len(roster),), torch.nan, dtype=torch.float64) if trained is None else trained.test


def mean_known_loss(risk: Tensor, sizes: Tensor) -> float:
    """The mean over rows of the clients whose loss is known."""
    return mean_over_rows(Scores(risk, torch.where(risk.isnan(), 0, sizes)))


def overall_loss(trained: TrainedModels | None, risk: Tensor, sizes: Tensor, job: Job) -> float:
    """The mean over all clients' test rows; of a run without losses by client, the summed one."""
    if trained is None or not bool(risk.isnan().all()):
        return mean_known_loss(risk, sizes)
    return trained.outcome.at(trained.checkpoint)[0].test_loss * job.clients.target_scale**job.task.unit_power
