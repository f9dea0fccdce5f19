"""What the commands answer in the terminal, from plain tables: of a run directory, or the same in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.filesize import decimal

from mooring.report.terminal import Display, shown
from mooring.runs.directory import open_run
from mooring.runs.files import frame_of

MOST_ROWS = 20  # clients that a terminal's table shows
SCORES = {k: k for k in ("client", "rows", "alone", "common", "personal", "gain")}
FITTED = SCORES | {"gain_percent": "gain %"}
KNOWN = ("rmse", "mae", "r2", "accuracy", "auc")
ADVISED = {
    "client": "client",
    "rows": "rows",
    "deploy": "deploy",
    "will_do": "will do",
    "gain_over_alone_percent": "over alone, %",
    "over_alone": "interval",
    "chance_over_alone": "chance",
    "gain_over_common_percent": "over common, %",
    "over_common": "interval",
    "chance_over_common": "chance",
}
THREE = ("alone", "common", "personal")
PRACTICAL = 0.01  # share of the loss that makes no practical difference, where the run does not say
LOSSES = ("common", "alone", "personal")
SPARE = ("rows", "over_common", "over_alone", "will_do")
PLANS = {
    "common": "one model for all",
    "alone": "everyone's own model, with a ridge",
    "lambda": "one stiffness for all",
    "size": "a stiffness by the client's rows, the fewer the tauter",
    "diagonal": "a stiffness by the client's rows and the coefficient (lam: their geometric mean)",
    "mixture": "own and common model mixed, a being the own one's share",
    "tuned": "the common model after local steps",
}


def show_run(display: Display, run: str | Path, clients: bool = False) -> None:
    """A finished run of any kind, from its directory alone."""
    directory = open_run(run)
    purpose = directory.run.mooring.purpose
    if purpose == "advise":
        show_advice(display, directory.advice, clients)
    elif purpose == "compare":
        show_comparison(display, directory.comparison)
    elif purpose == "personalize":
        told = directory.summary
        show_newcomers(display, frame_of(told["newcomers"]), told["metric"], told["way"])
    else:
        show_fit(display, directory.summary, directory.clients, clients)
    display.say(f"Run: {run}")


def show_fit(display: Display, summary: Mapping[str, Any], clients: pd.DataFrame, each: bool = False) -> None:
    """A fit in short; `each`: a row for every client, too."""
    metric, measures = summary["metric"], summary["measures"]
    display.say(f"{summary['title']}: {len(clients):,} clients, {int(clients['rows'].sum()):,} rows.")
    display.say(fit_in_short(summary))
    for who in THREE[::-1]:
        known = [f"{name} {shown(measures[who][name])}" for name in KNOWN if name in measures.get(who, {})]
        if known:
            display.say(f"  {who}: {', '.join(known)}")
    display.say(which_round(summary))
    if "privacy" in summary:
        display.say(spent_in_all(summary["privacy"]))
    display.say(gains(clients))
    if (odd := clients[clients["left_out"].notna()]).size:
        display.say(left_out(odd))
    if each:
        order, caption = ends(clients, "gain: what the personal model saves over training alone")
        rows = order.to_dict("records")
        display.table(f"Clients, test {metric}", rows, FITTED, caption, spare=("rows", "common", "alone"))


def verdict(losses: Mapping[str, float | None], metric: str, practical: float) -> str:
    """Which of the three kinds of model to use, in one sentence, by their average losses as far as they are known."""
    alone, common, personal = (losses[name] for name in THREE)
    if alone is None or common is None or personal is None:
        known = [f"{name} {loss:.4g}" for name, loss in losses.items() if loss is not None]
        return f"Test {metric} of the models that were trained: {', '.join(known)}."
    over = {name: 1 - personal / loss if loss else 0.0 for name, loss in (("alone", alone), ("common", common))}
    told = (
        f"test {metric} is {personal:.4g}, {per_cent(over['alone'])} than training alone ({alone:.4g}) and "
        f"{per_cent(over['common'])} than one common model ({common:.4g})"
    )
    if over["common"] < practical and common <= alone * (1 + practical):
        return f"One common model will do: with personal ones the {told}."
    if over["alone"] < practical and alone <= common * (1 + practical):
        return f"Training alone will do: with personal models the {told}."
    return f"Personal models pay: their {told}."


def per_cent(share: float) -> str:
    return f"{abs(share):.1%} {'less' if share >= 0 else 'more'}".replace("%", " %")


def fit_in_short(summary: Mapping[str, Any]) -> str:
    """The answer of a fit in one sentence."""
    told = verdict({name: summary[name] for name in THREE}, summary["metric"], PRACTICAL)
    return f"{summary['algorithm']}: {told[:1].lower()}{told[1:]}"


def spent_in_all(privacy: Mapping[str, float]) -> str:
    """What the common models tell of a client, at most."""
    return (
        f"Privacy of each client: epsilon = {privacy['epsilon']:.3g} at delta = {privacy['delta']:g} (clip "
        f"{privacy['clip']:g}, noise {privacy['noise']:g}), for the common models; see docs/privacy.md."
    )


def left_out(odd: pd.DataFrame) -> str:
    """Whose replies could not be used, and why."""
    named = [f"{row['client']} ({row['left_out']})" for row in odd.head(MOST_ROWS // 4).to_dict("records")]
    more = f", and {len(odd) - len(named)} more, see clients.parquet" if len(odd) > len(named) else ""
    return f"Replies that could not be used: {', '.join(named)}{more}."


def which_round(summary: Mapping[str, Any]) -> str:
    """Which round's models a fit keeps, and where the others are."""
    best, last, kept = summary["best_round"], summary["last_round"], summary["kept"]
    if best == last:
        return f"The models are those of round {last}, the last; no earlier one was better on validation rows."
    other = {"best": "last", "last": "best"}[kept]
    what = {"best": f"round {best}, the best on validation rows", "last": f"round {last}, the last"}
    return (
        f"The models are those of {what[kept]}; those of {what[other]}, are in models-{other}.safetensors "
        f"(--keep {other} exchanges them)."
    )


def ends(clients: pd.DataFrame, caption: str) -> tuple[pd.DataFrame, str]:
    """The clients by how much their own model saves; the middle of a long list is left out, and the caption says so."""
    order, half = clients.sort_values("gain", ascending=False), MOST_ROWS // 2
    if len(order) <= MOST_ROWS:
        return order, caption
    some = order.iloc[[*range(half), *range(len(order) - half, len(order))]]
    return some, f"The {half} that gain most and least of {len(clients)} clients. {caption}"


def gains(clients: pd.DataFrame) -> str:
    """Who gains from what, in one sentence."""
    known = clients.reindex(columns=["alone", "common", "personal"])
    if bool(known["alone"].isna().all()):
        return "There is nothing to compare these models with: no client was trained alone beside them."
    if bool(known["common"].isna().all()):  # rows that are not in one place have no common referee
        seen = known.dropna(subset=["alone", "personal"])
        better = int((seen["personal"] < seen["alone"]).sum())
        return f"Of {len(seen)} clients, {better} do better with their personal model than alone."
    seen = known.dropna()
    common = int((seen["common"] < seen["alone"]).sum())
    personal = int((seen["personal"] < seen["alone"]).sum())
    both = int((seen["personal"] < seen[["alone", "common"]].min(axis=1)).sum())
    return (
        f"Of {len(seen)} clients, {common} do better with the common model than alone, {personal} with their personal "
        f"model than alone, and {both} with their personal model than with either."
    )


def show_comparison(display: Display, comparison: Mapping[str, Any]) -> None:
    """A row a method, best first, and who gains."""
    methods, clients = frame_of(comparison["methods"]), frame_of(comparison["clients"])
    rows = methods.sort_values("test_loss").to_dict("records")
    for row in rows:
        row["sent"] = decimal(int(row["bytes"]))
        row["round"] = f"{row['kept_round']:.10g}/{row['rounds']:.10g}"
    more = {name: name for name in KNOWN if name in methods and name != "mae"}  # the file has it too
    if "behind" in methods:  # over several seeds
        more = {"test_loss_sd": "deviation", "behind": "behind", "behind_sd": "its deviation"}
    columns = {
        "method": "method",
        "test_loss": f"test {comparison['metric']}",
        **more,
        "last_test_loss": "last round",
        "round": "round",
        "sent": "sent",
        "seconds": "seconds",
    }
    caption = "test: models of the kept round (by default the best on validation rows), averaged over test rows"
    if "behind" in methods:
        caption += "; means and deviations over seeds, behind: how much more than the best under the same seeds"
    title = f"{comparison['title']}: {len(clients)} clients"
    display.table(title, rows, columns, caption, spare=("seconds", "round", "last_test_loss", "sent"))
    if "local" in clients:
        for method in methods["method"]:
            if method != "local":
                better = int((clients[method] < clients["local"]).sum())
                display.say(f"{better} of {len(clients)} clients do better with {method} than alone.")


def show_advice(display: Display, advice: Mapping[str, Any], clients: bool = False) -> None:
    """The answer and what is behind it; with `clients` a row for each of them, those that gain most first."""
    summary, frame = advice["summary"], frame_of(advice["clients"])
    display.say(f"{advice['title']}: {len(frame):,} clients, {int(frame['rows'].sum()):,} rows.")
    display.say(advice["headline"])
    for sentence in advice["words"]:
        display.say(sentence)
    if clients:
        order = advised_rows(frame.sort_values("gain_over_alone_percent", ascending=False))
        level = f"{100 * summary['level']:g} %"
        caption = f"gains of the deployed model in per cent of the other's loss, their {level} intervals and chances"
        display.table("Clients", order, ADVISED, caption, spare=SPARE)


def show_newcomers(display: Display, clients: pd.DataFrame, metric: str, way: str) -> None:
    """Newcomers, what each should deploy, and whether joining pays for them."""
    told = "losses on held-out rows, gains in per cent of the other model's loss with their 95 % intervals and chances"
    caption = f"{metric}; personal models by {way}; {told}"
    if len(clients) > MOST_ROWS:
        caption = f"The first {MOST_ROWS} of {len(clients)} newcomers. {caption}"
    columns = {**{k: k for k in ("client", "rows", "alone", "common", "personal")}, **ADVISED}
    display.table("Newcomers", advised_rows(clients.head(MOST_ROWS)), columns, caption, spare=(*SPARE, *LOSSES))
    count = clients["sure_over_alone"].value_counts()
    words = [f"{word} for {count[word]}" for word in ("sure", "likely", "open") if count.get(word)]
    same = f"; {count['same']} would deploy its own model" if count.get("same") else ""
    display.say(f"Joining pays: {', '.join(words) or 'for nobody'}{same}.")


def advised_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Clients of an advice as a table shows them."""
    rows = frame.to_dict("records")
    for row in rows:
        for other in ("alone", "common"):
            ends = [row[f"gain_over_{other}_percent_{end}"] for end in ("low", "high")]
            row[f"over_{other}"] = "[" + ", ".join(f"{end:,.1f}" for end in ends) + "]"
            row[f"gain_over_{other}_percent"] = f"{row[f'gain_over_{other}_percent']:,.1f}"
            row[f"chance_over_{other}"] = f"{row[f'chance_over_{other}']:.2f}"
    return rows


def show_theory(display: Display, theory: Mapping[str, Any]) -> None:
    """The theory of a federation as tables, and in words."""

    def rows(table: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [{"name": name.replace("_", " "), **part} for name, part in table.items()]

    spread = theory["heterogeneity"]
    wide = {"name": "", "value": "value", "low": "low", "high": "high", "method": "from"}
    display.table("Constants", rows(theory["constants"]), wide)
    radii = {"R": {**spread, "value": spread["R"]}, "R_max": spread["R_max"], "Gamma": spread["Gamma"]}
    display.table("Heterogeneity", rows(radii), wide)
    borders = {name: {**part, "value": part.get("R", part.get("Gamma"))} for name, part in theory["thresholds"].items()}
    display.table("Thresholds of R", rows(borders), {"name": "", "value": "at", "side": "speaks for", "source": "from"})
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
        display.say(f"Coefficients that differ most between clients (standard deviation): {top}.")
    for sentence in theory["words"]:
        display.say(sentence)
    for doubt in theory["assumptions"]:
        display.say(f"Doubt: {doubt}")


def show_findings(display: Display, source: str, findings: Sequence[Mapping[str, Any]]) -> None:
    """What `check` found in a table."""
    columns = {"severity": "severity", "client": "client", "column": "column", "sentence": "what"}
    many = sum(finding["count"] for finding in findings if finding["severity"] != "target")
    title = f"{many} finding(s)" if many else "nothing to complain about"
    display.table(f"{source}: {title}", [dict(row) for row in findings], columns)
