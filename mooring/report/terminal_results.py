"""Results of the commands in the terminal, from plain tables of a run directory or in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from rich.filesize import decimal

from mooring.core.score_sentences import ASK_ADVISE, describe_scores, direction, format_percent, join_words
from mooring.core.types import JsonObject, NamedValues
from mooring.report.terminal import Display, format_cell
from mooring.runs.atomic_files import frame_from_rows
from mooring.runs.directory import CLIENTS_FILE

MAX_CLIENTS_SHOWN = 10  # in a terminal's table, unless all are requested
MAX_NOTES = 3  # on the data, below a result; the report has all
EVALUATED_MODELS = ("recommended", "local", "global")  # whose measures `advise` shows
SCORED_MODELS = ("local", "pooled", "personal")
FIT_COLUMNS = {k: k for k in ("client", "rows", *SCORED_MODELS)} | {"over_local": "vs. local"}
METRIC_LABELS = {"rmse": "RMSE", "mae": "MAE", "r2": "R2", "accuracy": "Accuracy", "auc": "AUC"}
REPORTED_METRICS = tuple(METRIC_LABELS)
MODELS, ALTERNATIVES = ("local", "global", "personal"), ("local", "global")
RECOMMENDATION_COLUMNS = {
    "client": "client",
    "recommended": "recommended",
    "over_local": "vs. local",
    "short_over_local": "vs. local",
    "over_global": "vs. global",
    "short_over_global": "vs. global",
    "confidence": "confidence",
    **{name: f"{name} loss" for name in MODELS},
}
COLUMNS_TO_DROP = (
    MODELS,
    "over_global",
    "over_local",
    "short_over_global",
)  # columns that a narrow terminal drops, in this order
PLAN_DESCRIPTIONS = {
    "global": "one model for all",
    "local": "local models, with a ridge",
    "lambda": "one lambda for all",
    "size": "a lambda by the client's rows: the fewer, the larger",
    "diagonal": "a lambda by the client's rows and the coefficient (lam: their geometric mean)",
    "intercept": "a lambda for the intercept only; the slopes are shared",
    "mixture": "local and global model mixed; alpha is the weight of the local one",
    "tuned": "the global model after local steps",
    "ditto": "local models pulled to the global one, trained beside it (Ditto)",
    "fedper": "a shared body with a personal head (FedPer)",
    "fedrod": "a shared body with a generic and a personal head (FedRoD)",
}
THEORY_AND_DATA = "`mooring advise` compares the models on held-out rows; where the two differ, go with the data."
TERMINAL_SENTENCES = (
    "losses",
    "fixed_terms",
    "shape",
    "time",
    "rows_needed",
    "contributions",
    "outliers",
)  # the report has the others


def show_notes(display: Display, notes: Sequence[str]) -> None:
    """Print the first notes on the data, and the number of the others."""
    display.notes(notes[:MAX_NOTES])
    if len(notes) > MAX_NOTES:
        remaining = len(notes) - MAX_NOTES
        display.notes([f"{remaining} more {'notes' if remaining > 1 else 'note'} on the data: see the report."])


def show_fit(display: Display, summary: NamedValues, clients: pd.DataFrame, per_client: bool = False) -> None:
    """Print the scores of a fit; with `per_client` also one row per client."""
    metric, measures = summary["metric"], summary["measures"]
    title = f"{summary['algorithm']} on {summary['title']} ({len(clients):,} clients, {count_rows(clients):,} rows)"
    display.heading(title)
    for sentence in describe_scores(summary):
        display.paragraph(sentence)
    algorithm = summary["algorithm"]  # its models are personal, global or local ones: their name is its own
    by_name = dict(measures) | ({algorithm: measures["personal"]} if "personal" in measures else {})
    for sentence in describe_measures(by_name, list(dict.fromkeys((algorithm, *SCORED_MODELS[1::-1])))):
        display.paragraph(sentence)
    display.paragraph(describe_kept_round(summary))
    if "privacy" in summary:
        display.paragraph(describe_privacy(summary["privacy"]))
    if "left_out" in clients and clients["left_out"].notna().any():
        display.paragraph(describe_left_out(clients.dropna(subset="left_out")))
    display.print_line("")
    if per_client:
        rows = clients.to_dict("records")
        for row in rows:
            row["over_local"] = describe_improvement(row, "local", interval=False)
        caption = f"test {metric} by client; vs. local: the personal model's loss against the local one's"
        display.table("", rows, FIT_COLUMNS, caption, spare=("rows", "pooled", "local"))


def count_rows(clients: pd.DataFrame) -> int:
    return int(clients["rows"].sum())


def describe_measures(measures: Mapping[str, Mapping[str, float]], models: Sequence[str]) -> list[str]:
    """Return measures in the target's unit, one sentence per measure: "RMSE: 1.442 (personal), 9.649 (pooled)."."""
    sentences = []
    for name in REPORTED_METRICS:
        values = [
            f"{format_cell(measures[model][name])} ({model})" for model in models if name in measures.get(model, {})
        ]
        if values:
            sentences.append(f"{METRIC_LABELS[name]}: {', '.join(values)}.")
    return sentences


def describe_privacy(privacy: Mapping[str, float]) -> str:
    """Return a sentence on the privacy of the global models."""
    return (
        f"Privacy of each client: epsilon = {privacy['epsilon']:.3g} at delta = {privacy['delta']:g} (clip "
        f"{privacy['clip']:g}, noise {privacy['noise']:g}), for the global models; see `mooring explain epsilon`."
    )


def describe_left_out(clients: pd.DataFrame) -> str:
    """Return a sentence on clients whose replies could not be used, with reasons."""
    named_clients = [
        f"{row['client']} ({row['left_out']})" for row in clients.head(MAX_CLIENTS_SHOWN // 2).to_dict("records")
    ]
    remainder = (
        f", and {len(clients) - len(named_clients)} more, see clients.parquet"
        if len(clients) > len(named_clients)
        else ""
    )
    return f"Replies that could not be used: {', '.join(named_clients)}{remainder}."


def describe_kept_round(summary: NamedValues) -> str:
    """Return a sentence on the round whose models a fit uses, and the file of the others."""
    best, last, used = summary["best_round"], summary["last_round"], summary["checkpoint"]
    if best == last:
        return f"The models are those of round {last}, the last; no earlier one was better on validation rows."
    unused = {"best": "last", "last": "best"}[used]
    round_texts = {"best": f"round {best}, the best on validation rows", "last": f"round {last}, the last"}
    return (
        f"The models are those of {round_texts[used]}; those of {round_texts[unused]}, are in "
        f"models-{unused}.safetensors (--checkpoint {unused} exchanges them)."
    )


def show_comparison(display: Display, comparison: NamedValues, per_client: bool = False) -> None:
    """Print one row per method, the lowest test loss first, and which methods the test rows cannot separate; with
    `per_client` also each client's loss by method, and of classes its accuracy."""
    methods, clients = frame_from_rows(comparison["methods"]), frame_from_rows(comparison["clients"])
    rows = methods.sort_values("test_loss").to_dict("records")
    for row in rows:
        row["sent"] = decimal(int(row["bytes"]))
        row["round"] = f"{row['used_round']:.10g}/{row['rounds']:.10g}"
        row["above"] = describe_above(row)
    score_columns = {"above": "above the lowest"} | {
        name: name for name in REPORTED_METRICS if name in methods and name != "mae"
    }
    if "behind" in methods:  # over several seeds
        score_columns = {"test_loss_sd": "deviation", "behind": "behind", "behind_sd": "its deviation"}
    columns = {
        "method": "method",
        "test_loss": f"test {comparison['metric']}",
        **score_columns,
        "last_test_loss": "last round",
        "round": "round",
        "sent": "sent",
        "seconds": "seconds",
    }
    caption = (
        "test: models of the kept round (by default the best on validation rows), mean over "
        f"{int(clients['test'].sum()):,} test rows"
    )
    if "behind" in methods:
        caption += "; means and deviations over seeds, behind: difference from the lowest under the same seeds"
    else:
        caption += "; above the lowest: 95% interval over clients"
    display.heading(f"Test scores on {comparison['title']} ({len(clients):,} clients)")
    display.table("", rows, columns, caption, spare=("seconds", "round", "last_test_loss", "sent", *REPORTED_METRICS))
    for sentence in describe_comparison(methods):
        display.paragraph(sentence)
    display.print_line("")
    if per_client:
        names = methods["method"].tolist()
        first = {name: name for name in ("client", "rows")}
        records = clients.to_dict("records")
        display.table("", records, first | {name: name for name in names}, f"test {comparison['metric']} by client")
        accuracies = {f"{name} accuracy": name for name in names if f"{name} accuracy" in clients}
        if accuracies:
            display.table("", records, first | accuracies, "test accuracy by client")


def describe_above(row: NamedValues) -> str:
    """Return the difference of a method's test loss from the lowest one, with its interval over clients."""
    if row.get("above_best_pct") is None or not np.isfinite(row["above_best_pct"]):
        return "-"
    if row["above_best_pct_ci_low"] == row["above_best_pct_ci_high"] == 0:
        return "lowest"
    value, low, high = (row[f"above_best_pct{end}"] for end in ("", "_ci_low", "_ci_high"))
    interval_text = f" ({format_end(low)} to {format_end(high)})" if np.isfinite(low) and np.isfinite(high) else ""
    return f"{format_percent(value)}%{interval_text}"


def describe_comparison(methods: pd.DataFrame) -> list[str]:
    """Return a sentence on methods that the test rows cannot separate from the one with the lowest loss."""
    order = methods.sort_values("test_loss")
    best = order["method"].iloc[0]
    if "above_best_pct_ci_low" not in order:
        return []
    others = order.iloc[1:]
    close = others.loc[~(others["above_best_pct_ci_low"] > 0), "method"].tolist()
    if not close:
        return []
    return [f"These test rows cannot separate {best} from {join_words(close)}. {ASK_ADVISE}"]


def show_advice(display: Display, advice: NamedValues, per_client: bool = False, run: str | Path | None = None) -> None:
    """Print the recommendation, the clients (at most ten, or all), and the sentences behind it."""
    summary, frame = advice["summary"], frame_from_rows(advice["clients"])
    display.heading(f"Recommendation for {advice['title']} ({len(frame):,} clients, {count_rows(frame):,} rows)")
    display.paragraph(advice["headline"])
    display.print_line("")
    alternative = "global" if (frame["recommended"] == "local").all() else "local"
    order = frame.sort_values(f"improvement_over_{alternative}_pct", ascending=False, kind="stable")
    caption = describe_columns(summary, "improvement_over_local_pct_ci_low" in frame)
    if len(order) > MAX_CLIENTS_SHOWN and not per_client:
        file_text = f" or {Path(run) / CLIENTS_FILE}" if run is not None else ""
        caption = (
            f"The {MAX_CLIENTS_SHOWN} of {len(order):,} clients with the largest improvement over {alternative} "
            f"models; all: --per-client{file_text}. {caption}"
        )
        order = order.head(MAX_CLIENTS_SHOWN)
    display.table(
        "",
        format_recommendations(order),
        RECOMMENDATION_COLUMNS,
        caption,
        spare=COLUMNS_TO_DROP,
        shorter=WITHOUT_INTERVALS,
        indent=2,
    )
    for name in TERMINAL_SENTENCES:
        if name in advice["words"]:
            display.paragraph(advice["words"][name])
        if name == "losses":
            for sentence in describe_measures(summary.get("held_out_measures") or {}, EVALUATED_MODELS):
                display.paragraph(sentence)
    display.print_line("")


def describe_columns(summary: NamedValues, has_intervals: bool = True) -> str:
    """Return the caption of the clients' table."""
    text = f"vs.: expected {summary['metric']} with the recommended model against the other"
    if not has_intervals:
        return f"{text}, from losses that clients have declared to two digits."
    level = f"{100 * summary['client_level']:g}%"
    return f"{text}; in brackets the {level} interval of the improvement in % (negative: higher loss)."


WITHOUT_INTERVALS = {"over_local": "short_over_local", "over_global": "short_over_global"}  # without their intervals


def show_new_clients(display: Display, clients: pd.DataFrame, metric: str, method: str, level: float = 0.9) -> None:
    """Print new clients and the model that each should use."""
    shown_clients = clients.head(MAX_CLIENTS_SHOWN)
    caption = f"Personal models by {method}. {describe_columns({'metric': metric, 'client_level': level})}"
    if len(clients) > len(shown_clients):
        caption = f"The first {len(shown_clients)} of {len(clients):,} new clients. {caption}"
    display.heading(f"Recommendation for {len(clients):,} new client{'s' * (len(clients) != 1)}")
    rows = format_recommendations(shown_clients)
    display.table("", rows, RECOMMENDATION_COLUMNS, caption, spare=COLUMNS_TO_DROP, shorter=WITHOUT_INTERVALS, indent=2)


def format_recommendations(frame: pd.DataFrame) -> list[JsonObject]:
    """Return clients with their recommendations as rows of a table."""
    rows = frame.to_dict("records")
    for row in rows:
        for alternative in ALTERNATIVES:
            row[f"over_{alternative}"] = describe_improvement(row, alternative)
            row[f"short_over_{alternative}"] = describe_improvement(row, alternative, interval=False)
    return rows


def describe_improvement(row: NamedValues, alternative: str, interval: bool = True) -> str:
    """Return the improvement of a client's loss over another model: "5.2% lower (-5 to 16)"."""
    pct = row.get(f"improvement_over_{alternative}_pct")
    if pct is None or not np.isfinite(pct):
        return "-"
    if row.get("recommended") == alternative:
        return "same model"
    low, high = (row.get(f"improvement_over_{alternative}_pct_ci_{end}") for end in ("low", "high"))
    if low is not None and low == high == pct == 0:
        return "no difference"
    if not interval or low is None or high is None:
        return direction(pct)
    return f"{direction(pct)} ({format_end(low)} to {format_end(high)})"


def format_end(value: float) -> str:
    """Return an end of an interval in percent, which never rounds to 0 or to 100."""
    if 99.5 <= value < 100:
        return f"{min(value, 99.99):.4g}"
    if value == 0 or abs(value) >= 0.5:
        return f"{value:,.0f}"
    return f"{value:.1g}" if abs(value) >= 0.01 else "0.01" if value > 0 else "-0.01"


def show_theory(display: Display, theory: NamedValues) -> None:
    """Print the theory of a federation: sentences, then tables, then caveats."""

    def rows(table: NamedValues) -> list[JsonObject]:
        return [{"name": name.replace("_", " "), **part} for name, part in table.items()]

    for sentence in (*theory["words"], THEORY_AND_DATA):
        display.print_line(sentence)
    display.print_line("")
    spread = theory["heterogeneity"]
    wide = {"name": "", "value": "value", "low": "low", "high": "high", "method": "from"}
    display.table("Constants", rows(theory["constants"]), wide)
    radii = {"R": {**spread, "value": spread["R"]}, "R_max": spread["R_max"], "Gamma": spread["Gamma"]}
    display.table("Heterogeneity", rows(radii), wide)
    borders = {name: {**part, "value": part.get("R", part.get("Gamma"))} for name, part in theory["thresholds"].items()}
    display.table("Thresholds of R", rows(borders), {"name": "", "value": "at", "side": "favors", "source": "from"})
    display.table(
        "Lambda by rule",
        rows(theory["lambda"]),
        {"name": "", "value": "lambda", "low": "low", "high": "high", "source": "from"},
    )
    promised = [{"name": name.replace("_", " "), "value": value} for name, value in theory["promises"].items()]
    display.table("Promises (orders of the average excess risk; rounds to 1e-3)", promised, {"name": "", "value": ""})
    if spread["by_feature"]:
        largest = sorted(spread["by_feature"].items(), key=lambda pair: -pair[1])[:6]
        top = ", ".join(f"{name} {tau:.2g}" for name, tau in largest)
        display.print_line(f"Coefficients that differ most between clients (standard deviation): {top}.")
    for doubt in theory["assumptions"]:
        display.print_line(f"Caveat: {doubt}")


def show_findings(display: Display, source: str, findings: Sequence[NamedValues]) -> None:
    """Print the findings of `check` in a table."""
    columns = {"severity": "severity", "client": "client", "column": "column", "sentence": "what"}
    count = sum(finding["count"] for finding in findings if finding["severity"] != "target")
    title = f"{count} finding(s)" if count else "no problems found"
    display.table(f"{source}: {title}", [dict(row) for row in findings], columns)
