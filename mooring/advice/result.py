"""What can be done with the result of `advise`: show it, predict, take a client's model, draw, write a report."""

from __future__ import annotations

import tempfile
import warnings
from html import escape
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from torch import Tensor, nn

from mooring.advice.evaluation.loss_sums import ALTERNATIVES, MODEL_KINDS
from mooring.core.errors import RequestError
from mooring.core.field_checks import nearest_names
from mooring.core.score_sentences import direction, format_loss
from mooring.core.types import JsonObject
from mooring.engines.coefficients import coefficient_table, read_scaling
from mooring.engines.exported_models import make_estimator
from mooring.engines.fit_result import to_target_units
from mooring.engines.predict import name_recommendations, predict_rows
from mooring.engines.prepare import Job
from mooring.runs.directory import REPORT_FILE
from mooring.runs.directory import StoredModels as SavedModels
from mooring.tasks.network import NetworkTask
from mooring.tasks.network_module import build_module

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from sklearn.base import BaseEstimator

MAX_PRINTED_LINES = 10  # of a printed result
RECOMMENDATION_COLUMNS = (  # of `recommendations`
    "client",
    "rows",
    "recommended",
    "confidence",
    *MODEL_KINDS,
    *(f"improvement_over_{other}_pct{end}" for other in ALTERNATIVES for end in ("", "_ci_low", "_ci_high")),
    *(f"probability_better_than_{other}" for other in ALTERNATIVES),
)


class AdviceMethods:
    """Methods of the result of `advise`, which has the attributes below."""

    job: Job
    summary: JsonObject
    clients: pd.DataFrame
    models: Any
    headline: str
    words: dict[str, str]
    run: Path | None
    intervals: Any

    @property
    def recommendations(self) -> pd.DataFrame:
        """One row per client: the recommended model, the confidence, expected losses, improvements and intervals."""
        return self.clients[list(RECOMMENDATION_COLUMNS)]

    @property
    def coefficients(self) -> pd.DataFrame:
        """One row per client and term in the units of the data: coefficient, global, deviation."""
        job, models = self.job, self.models
        return coefficient_table(
            job.task, read_scaling(job.clients), models.global_, models.recommended, job.clients.names
        )

    def predict(self, data: object, client: object = None, interval: float | None = None) -> pd.DataFrame | Tensor:
        """Predictions for new rows, each with its client's recommended model, or all with that of `client`.

        `data` is a table like the one given to `advise`; the result is a data frame with one row per row. Unknown
        clients get the global model. `interval` is the level of prediction intervals, such as 0.9. Where `advise` had
        arrays, `data` are arrays too, and the result is a tensor.
        """
        clients = self.job.clients
        if clients.schema is None:
            x = torch.as_tensor(data)
            x = x.to(self.job.task.dtype) if x.dtype.is_floating_point else x
            return to_target_units(clients, self.job.task.predict(self.vector(client)[None], x[None])[0])
        frame, notes = predict_rows(
            self.job.task,
            clients.schema,
            self.saved_models(),
            data,
            client,
            self.run or Path(),
            None if interval is None else self.intervals,
            interval,
            name_recommendations(self.clients),
        )
        for note in notes:
            warnings.warn(note, stacklevel=2)
        return frame

    def vector(self, client: object = None) -> Tensor:
        """The parameters of a client's recommended model (default: of the global model)."""
        if client is None:
            return self.models.global_
        names = list(self.job.clients.names)
        if str(client) not in names:
            near = nearest_names(str(client), names)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise RequestError(
                f"unknown client {str(client)!r}; there are {len(names)}, such as {', '.join(names[:5])}.{hint}"
            )
        return self.models.recommended[names.index(str(client))]

    def module(self, client: object = None) -> nn.Module:
        """The network that a client should use (default: the global one), in evaluation mode and in the target's own
        units; classes and labels come as logits."""
        clients = self.job.clients
        return build_module(self.job.task, self.vector(client), clients.target_mean, clients.target_scale)

    def model(self, client: object = None) -> nn.Module | BaseEstimator:
        """A client's recommended model (default: the global one): a network, or an estimator of scikit-learn's on the
        encoded columns in the units of the data."""
        if isinstance(self.job.task, NetworkTask):
            return self.module(client)
        clients = self.job.clients
        return make_estimator(self.job.task, self.vector(client), read_scaling(clients), clients.kind)

    def plot(self, what: str = "improvements") -> Figure:
        """A matplotlib figure: "improvements" of all clients, the "path" of lambdas, or the "rows" that local models
        need."""
        return import_module("mooring.report.figures").plot(self, what)  # of a package above this one

    def report(self, path: str | Path | None = None) -> Path:
        """Write the report, by default into the run directory, or as report.html where there is none; its path."""
        write_report = import_module("mooring.report.html_report").write_report
        if self.run is not None:
            return write_report([self.run], path)
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / (self.job.clients.title or "run")
            self.save(run)
            return write_report([run], path or REPORT_FILE)

    def save(self, path: str | Path) -> Path:
        """Write the run directory, as `advise(..., out=path)` does."""
        raise NotImplementedError

    def saved_models(self) -> SavedModels:
        """The models as a run directory holds them."""
        raise NotImplementedError

    def __repr__(self) -> str:
        """Ten lines at most: the recommendation, some clients, the losses, where the run is."""
        frame = self.clients
        rows = int(frame["rows"].sum())
        lines = [
            f"Recommendation for {self.job.clients.title or 'clients'} ({len(frame):,} clients, {rows:,} rows)",
            self.headline,
        ]
        room = MAX_PRINTED_LINES - len(lines) - 2
        shown = frame.head(room if len(frame) <= room else room - 1)
        lines += [f"  {describe_client(row)}" for row in shown.to_dict("records")]
        if len(frame) > len(shown):
            lines.append(f"  ... and {len(frame) - len(shown):,} more in .recommendations")
        where = f"run: {self.run}" if self.run else "not written; give out= to keep it, or call .report()"
        return "\n".join([*lines, self.words["losses"], where])

    def _repr_html_(self) -> str:
        table = self.recommendations.head(MAX_PRINTED_LINES).to_html(index=False, float_format=lambda x: f"{x:.4g}")
        hidden = len(self.clients) - MAX_PRINTED_LINES
        note = f"<p>... and {hidden:,} more in <code>.recommendations</code></p>" if hidden > 0 else ""
        return f"<p><strong>{escape(self.headline)}</strong></p><p>{escape(self.words['losses'])}</p>{table}{note}"


def describe_client(row: JsonObject) -> str:
    """A client's recommendation in one line."""
    recommended = row["recommended"]
    sides = [
        f"{direction(row[f'improvement_over_{other}_pct'])} than {other} ({format_loss(row[other])})"
        for other in ALTERNATIVES
        if recommended != other and row[f"improvement_over_{other}"] != 0
    ]
    text = f"{row['client']}: {recommended} ({format_loss(row[recommended])})"
    return f"{text}, {', '.join(sides)}, {row['confidence']} confidence" if sides else f"{text}, no other is better"
