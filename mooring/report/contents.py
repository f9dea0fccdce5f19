"""What a page tells about a run, as plain tables, from its directory alone: an advice, a fit or a comparison.

All three become the same parts (answer, models, clients, path, rounds, heterogeneity, settings); a part that a run does
not have is empty. `judged` alone knows under which names an advice keeps its recommendations.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import tomli_w

from mooring.core.errors import RequestError
from mooring.report.answers import (
    PLANS,
    PRACTICAL,
    THREE,
    fit_in_short,
    gains,
    left_out,
    per_cent,
    spent_in_all,
    verdict,
    which_round,
)
from mooring.runs.directory import METHODS, MODELS, RUN, RunDir, open_run
from mooring.runs.files import frame_of

SURE, LIKELY = 0.95, 0.8
MOST_NUMBERS = 300_000  # coefficients beyond which a page leaves the clients' models out
MOST_BYTES = 2**30  # of models beyond which their distances are left out
LONGEST_LIST = 12  # numbers of a setting that are written out
REFEREES = {"alone": "local", "common": "global"}  # what a comparison calls them
LABELS = {
    "client": "client",
    "recommended": "deploy",
    "how_sure": "how sure",
    "will_do": "will do",
    "saved": "saved, %",
    "saved_low": "low, %",
    "saved_high": "high, %",
    "chance_over_alone": "chance over alone",
    "chance_over_common": "chance over common",
    "rows": "rows",
    "alone": "alone",
    "common": "common",
    "personal": "personal",
    "gain": "gain",
    "gain_low": "gain, low",
    "gain_high": "gain, high",
    "gain_over_common": "gain over common",
    "gain_over_common_low": "low",
    "gain_over_common_high": "high",
    "plan": "plan",
    "lambda": "lambda",
    "alpha": "own share",
    "distance": "distance",
    "train": "train rows",
    "validation": "validation rows",
    "test": "test rows",
    "judged_rows": "judged rows",
    "rows_to_match": "rows to match",
    "brings": "brings the others",
    "unlike": "unlike the rest",
}


@dataclass
class Contents:
    """A run's page."""

    name: str  # of the directory
    purpose: str  # "advise", "fit" or "compare"
    title: str
    metric: str
    headline: str
    todo: list[str]
    words: list[str]
    notes: list[str]
    models: list[dict[str, Any]]  # name, about, loss; the best first in a comparison
    clients: pd.DataFrame  # in the columns of LABELS, and a loss a method in a comparison
    recommends: bool  # whether "recommended" is an advice rather than the lowest test loss
    command: str
    settings: str
    practical: float = PRACTICAL
    path: dict[str, Any] | None = None
    curve: dict[str, Any] | None = None  # of a typical client: rows, alone, personal, common; now, match
    rounds: list[dict[str, Any]] = field(default_factory=list)  # name, kept, table
    theory: dict[str, Any] | None = None
    coefficients: dict[str, Any] | None = None  # names, common [d], personal [m, d]

    def loss(self, who: str) -> float | None:
        """The average test loss of "alone" or "common", by whatever name the run calls it."""
        names = (who, REFEREES.get(who))
        return next((row["loss"] for row in self.models if row["name"] in names), None)


def contents(run: str | Path) -> Contents:
    """All that a finished run's page tells."""
    directory = open_run(run)
    purpose = directory.run.mooring.purpose
    makers = {"advise": of_advice, "fit": of_fit, "compare": of_comparison}
    if purpose not in makers:
        raise RequestError(f"{run} is a run of '{purpose}'; pages are made of {', '.join(makers)}.")
    return makers[purpose](directory)


def of_advice(directory: RunDir) -> Contents:
    advice = directory.advice
    summary, clients = advice["summary"], judged(frame_of(advice["clients"]))
    losses = {"alone": summary["alone"], "common": summary["common"], "personal": summary["advised"]}
    practical = summary.get("practical") or PRACTICAL
    models = [
        {"name": "personal", "about": "what is advised", "loss": summary["advised"]},
        {"name": "one lambda", "about": "the best single stiffness for all", "loss": summary.get("shared_lambda")},
        {"name": "alone", "about": "every client by itself", "loss": summary["alone"]},
        {"name": "common", "about": "one model for all", "loss": summary["common"]},
    ]
    return Contents(
        **_frame(directory, advice, summary["metric"]),
        headline=advice.get("headline") or verdict(losses, summary["metric"], practical),
        todo=[what_to_deploy(clients), *_next_steps(directory.path)],
        words=list(advice["words"]),
        models=[row for row in models if row["loss"] is not None],
        clients=with_distance(clients, directory),
        recommends=True,
        practical=practical,
        path=path_of(advice),
        curve=advice.get("learning_curve"),
        theory=directory.theory,
        coefficients=coefficients(directory),
    )


def of_fit(directory: RunDir) -> Contents:
    summary, clients = directory.summary, by_test_rows(directory.clients.rename(columns={"lam": "lambda"}))
    private = [spent_in_all(summary["privacy"])] if "privacy" in summary else []
    odd = directory.clients.dropna(subset="left_out")
    rounds = {"name": summary["algorithm"], "kept": _kept(summary), "table": directory.rounds}
    models = [
        {"name": "personal", "about": summary["algorithm"], "loss": summary["personal"]},
        {"name": "alone", "about": "every client by itself", "loss": summary["alone"]},
        {"name": "common", "about": "one model from all rows", "loss": summary["common"]},
    ]
    return Contents(
        **_frame(directory, summary, summary["metric"]),
        headline=fit_in_short(summary),
        todo=_next_steps(directory.path),
        words=[which_round(summary), *private, gains(clients), *([left_out(odd)] if len(odd) else [])],
        models=[row for row in models if row["loss"] is not None],
        clients=with_distance(clients, directory),
        recommends=False,
        rounds=[rounds],
        coefficients=coefficients(directory),
    )


def of_comparison(directory: RunDir) -> Contents:
    found = directory.comparison
    methods, clients = frame_of(found["methods"]).sort_values("test_loss"), frame_of(found["clients"])
    names = methods["method"].tolist()
    own = [name for name in names if name not in REFEREES.values()] or names
    best = own[0]
    known = {who: clients[name] for who, name in REFEREES.items() if name in clients}
    clients = by_test_rows(clients.assign(**known, personal=clients[best]))
    rounds = [
        {
            "name": row["method"],
            "kept": int(row["kept_round"]),
            "table": directory.of_method(row["method"]).rounds,
        }
        for row in methods.to_dict("records")
    ]
    return Contents(
        **_frame(directory, found, found["metric"]),
        headline=_winner(methods, found["metric"]),
        todo=[f"Each method's models are in {METHODS}/METHOD/{MODELS}; predict with {METHODS}/{names[0]}."],
        words=_beaten(methods, clients, best),
        models=[{"name": row["method"], "about": "", **_costs(row)} for row in methods.to_dict("records")],
        clients=with_distance(clients, directory.of_method(best)),
        recommends=False,
        rounds=rounds,
    )


def _frame(directory: RunDir, record: Mapping[str, Any], metric: str) -> dict[str, Any]:
    """What all of them have in common."""
    purpose = directory.run.mooring.purpose
    again = ["mooring", purpose, str(directory.path / RUN), "--out", f"{directory.path}-again"]
    return {
        "name": directory.path.resolve().name,
        "purpose": purpose,
        "title": str(record["title"]),
        "metric": metric,
        "notes": list(record.get("notes", [])),
        "command": shlex.join(again),
        "settings": settings(directory),
    }


def judged(frame: pd.DataFrame) -> pd.DataFrame:
    """An advice's clients with `recommended`, `how_sure` and `certainty` (0 to 1), and gains in per cent (`saved`).

    Where the advice tells chances, they say how sure it is; otherwise an interval on one side of 0 is sure.
    """
    frame = frame.rename(columns={"deploy": "recommended", "verdict": "recommended", "lam": "lambda"})
    frame = frame.loc[:, ~frame.columns.duplicated()]
    ends = ("", "_low", "_high")
    frame = frame.rename(columns={f"gain_over_alone_percent{end}": f"saved{end}" for end in ends})
    for end in ("", "_low", "_high"):
        if f"gain_over_alone{end}" in frame:
            frame = frame.drop(columns=f"gain{end}", errors="ignore")
            frame = frame.rename(columns={f"gain_over_alone{end}": f"gain{end}"})
    if {"chance_over_alone", "chance_over_common"} <= set(frame):
        alone, common = frame["chance_over_alone"], frame["chance_over_common"]
        chance = alone.where(frame["recommended"] == "common", common.where(frame["recommended"] == "alone"))
        chance = chance.fillna(np.minimum(alone, common))
        words = np.select([chance >= SURE, chance >= LIKELY], ["sure", "likely"], "open")
        frame = frame.assign(how_sure=words, certainty=((chance - 0.5) / 0.45).clip(0, 1).fillna(0))
    else:
        told = (frame["gain_low"] > 0) | (frame["gain_high"] < 0)
        frame = frame.assign(how_sure=np.where(told, "sure", "open"), certainty=np.where(told, 1.0, 0.35))
    return inper_cent(frame)


def by_test_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Clients of a run that recommends nothing: the model of the lowest test loss, and what the personal one saves."""
    known = frame[[name for name in THREE if name in frame]].dropna(how="all")
    best = known.idxmin(axis=1).reindex(frame.index, fill_value="")
    frame = frame.drop(columns="verdict", errors="ignore").assign(recommended=best, certainty=1.0)
    if "gain" not in frame:
        frame = frame.assign(gain=frame["alone"] - frame["personal"] if "alone" in frame else np.nan)
    return inper_cent(frame.dropna(axis=1, how="all"))


def inper_cent(frame: pd.DataFrame) -> pd.DataFrame:
    """`gain` and its interval in per cent of the loss alone, where they are not told."""
    if "gain" not in frame or "alone" not in frame or "saved" in frame:
        return frame
    base = frame["alone"].where(frame["alone"] > 0)
    ends = [end for end in ("", "_low", "_high") if f"gain{end}" in frame]
    return frame.assign(**{f"saved{end}": 100 * frame[f"gain{end}"] / base for end in ends})


def what_to_deploy(clients: pd.DataFrame) -> str:
    """Who should have which kind of model, and how sure that is."""
    count = clients["recommended"].value_counts()
    kinds = [f"{kind} for {count[kind]:,}" for kind in (*THREE[::-1], "undecided") if count.get(kind)]
    sure = clients["how_sure"].value_counts()
    told = [f"{word} for {sure[word]:,}" for word in ("sure", "likely", "open") if sure.get(word)]
    return f"Deploy: {', '.join(kinds)} of {len(clients):,} clients ({', '.join(told)})."


def _next_steps(run: Path) -> list[str]:
    at = shlex.quote(str(run))
    return [
        f"Predict new rows, each by its own client's model: mooring predict {at} new.csv",
        f"Give a newcomer a model, and see whether joining pays: mooring personalize {at} newcomer.csv",
    ]


def _winner(methods: pd.DataFrame, metric: str) -> str:
    first = methods.iloc[0]
    told = f"{first['method']} has the lowest test {metric} of {len(methods)} methods, {first['test_loss']:.4g}"
    others = methods.iloc[1:]
    against = [
        f"{per_cent(1 - first['test_loss'] / row['test_loss'])} than {row['method']}"
        for row in others.to_dict("records")[:3]
        if row["test_loss"]
    ]
    return f"{told}{': ' if against else ''}{', '.join(against)}."


def _beaten(methods: pd.DataFrame, clients: pd.DataFrame, best: str) -> list[str]:
    said = [f"Boats, gains and cards show {best}, the best method that makes personal models."]
    if "local" in clients:
        for method in methods["method"]:
            if method != "local":
                better = int((clients[method] < clients["local"]).sum())
                said.append(f"{better:,} of {len(clients):,} clients do better with {method} than alone.")
    return said


def _costs(row: Mapping[str, Any]) -> dict[str, Any]:
    kept = {"loss": row["test_loss"], "last round": row["last_test_loss"], "round": row["kept_round"]}
    return kept | {"rounds": row["rounds"], "bytes": row["bytes"], "seconds": row["seconds"]}


def _kept(summary: Mapping[str, Any]) -> int:
    return int(summary[f"{summary['kept']}_round"])


def with_distance(clients: pd.DataFrame, directory: RunDir) -> pd.DataFrame:
    """The clients with how far each personal model is from the common one, where the run holds both."""
    path = directory.path / MODELS
    if not path.exists() or path.stat().st_size > MOST_BYTES:
        return clients
    models = directory.models
    if models.personal is None:
        return clients
    distance = (models.personal - models.common).norm(dim=1).tolist()
    found = dict(zip(models.clients, distance))
    return clients.assign(distance=[found.get(str(name), np.nan) for name in clients["client"]])


def coefficients(directory: RunDir) -> dict[str, Any] | None:
    """Every client's coefficients by name, where the model is a row of them and they are not too many."""
    models = directory.models
    names = [*models.task.get("features", []), "(intercept)"]
    shapes = [part["shape"] for part in models.layout]
    if models.personal is None or models.personal.numel() > MOST_NUMBERS or shapes != [[len(names) - 1], [1]]:
        return None
    return {"names": names, "common": models.common.tolist(), "personal": models.personal.tolist()}


def path_of(advice: Mapping[str, Any]) -> dict[str, Any] | None:
    """Held-out loss by lambda, its two ends, the plan, and every client's own losses where the advice kept them."""
    path = frame_of(advice["path"])
    if path.empty:
        return None
    moored = path[path["family"] == "lambda"].sort_values("lambda")
    ends = path[path["family"] != "lambda"].set_index("family")["loss"]
    lams = pd.Series([row.get("lambda") for row in advice["clients"]], dtype=object)
    lams = pd.to_numeric(lams, errors="coerce").dropna()
    lams = lams[lams > 0]
    plan = advice["plan"]
    return {
        "lambda": moored["lambda"].tolist(),
        "loss": moored["loss"].tolist(),
        "alone": float(ends["alone"]),
        "common": float(ends["common"]),
        "plan": {
            "family": plan["family"],
            "about": PLANS.get(plan["family"], plan["family"]),
            "loss": plan["loss"],
            "low": float(lams.min()) if len(lams) else None,
            "middle": float(lams.median()) if len(lams) else None,
            "high": float(lams.max()) if len(lams) else None,
        },
        "clients": advice.get("client_paths"),
    }


def settings(directory: RunDir) -> str:
    """The run file without its seal; long lists of numbers in short."""
    table = directory.run.model_dump(exclude_none=True)
    table["mooring"].pop("seal", None)
    return tomli_w.dumps(_short(table))


def _short(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _short(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) > LONGEST_LIST and all(isinstance(item, int | float) for item in value):
            return f"{len(value)} numbers from {min(value):.4g} to {max(value):.4g}: see {RUN}"
        return [_short(item) for item in value]
    return value
