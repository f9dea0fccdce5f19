"""What can be done with the result of `advise`: show it, predict, take a client's model, draw, write a report."""

from __future__ import annotations

import tempfile
from html import escape
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from mooring.advice.evaluation.loss_sums import ALTERNATIVES, MODEL_KINDS
from mooring.core.score_sentences import direction, format_loss
from mooring.core.types import JsonObject
from mooring.engines.model_store import TrainedStore
from mooring.engines.predict import name_recommendations
from mooring.runs.directory import REPORT_FILE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


class AdviceMethods(TrainedStore):
    """Methods of the result of `advise`, which has the attributes below."""

    summary: JsonObject
    clients: pd.DataFrame
    models: Any
    headline: str
    words: dict[str, str]

    @property
    def recommendations(self) -> pd.DataFrame:
        """One row per client: the recommended model, the confidence, expected losses, improvements and intervals."""
        return self.clients[list(RECOMMENDATION_COLUMNS)]

    @property
    def recommended_kinds(self) -> dict[str, str]:
        return name_recommendations(self.clients)

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
