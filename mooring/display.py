"""What a person sees in the terminal: progress, tables, notes. Everything goes to stderr when stdout is for JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

MOST_ROWS = 20  # clients that a terminal's table shows
SHORT = 22  # a column whose cells are no longer than this is never folded


class Display:
    """One console for everything; `json` mode keeps stdout free."""

    def __init__(self, json: bool = False):
        self.json = json
        self.out = Console(file=sys.stderr if json else sys.stdout, highlight=False, soft_wrap=False)
        self.err = Console(stderr=True, highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        self.out.print(text, markup=False, soft_wrap=True)

    def notes(self, notes: Sequence[str]) -> None:
        for note in notes:
            self.err.print(f"note: {note}", style="dim", markup=False)

    def table(self, title: str, rows: Sequence[dict[str, Any]], columns: dict[str, str], caption: str = "") -> None:
        """Rows as a table; `columns` maps a key to its heading."""
        table = Table(
            title=title,
            caption=caption or None,
            title_justify="left",
            caption_justify="left",
            box=SIMPLE_HEAD,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        for i, (key, heading) in enumerate(columns.items()):
            text = any(isinstance(row.get(key), str) and not is_number(row[key]) for row in rows)
            short = max((len(str(row.get(key, ""))) for row in rows), default=0) <= SHORT
            justify = "left" if text or i == 0 else "right"
            table.add_column(heading, justify=justify, overflow="fold", no_wrap=short)
        for row in rows:
            table.add_row(*(shown(row.get(key)) for key in columns))
        self.out.print(table)

    @contextmanager
    def progress(self) -> Iterator[Any]:
        """A bar per job; yields `tell(what, done, all)`."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self.err, transient=True) as bar:
            jobs: dict[str, Any] = {}

            def tell(what: str, done: int, rounds: int) -> None:
                if what not in jobs:
                    jobs[what] = bar.add_task(what, total=rounds)
                bar.update(jobs[what], completed=done, total=rounds)

            yield tell


def shown(value: Any) -> str:
    """A cell: four significant digits for numbers, a dash for nothing."""
    if value is None or (isinstance(value, float) and value != value):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e5 else f"{value:.3e}"
    if isinstance(value, int):
        return f"{value:,}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return text == "-"
    return True


def size(bytes_: int) -> str:
    """Bytes as a person reads them."""
    value = float(bytes_)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{value:.3g} {unit}"


def show_fit(display: Display, result: Any) -> None:
    """The summary and the clients of a fit."""
    told = result.summary
    name = result.trained.algorithm.name
    frame = result.clients
    display.table(
        f"{result.job.clients.title}: test {told['metric']} over {len(frame)} clients",
        [
            {"who": "alone: every client by itself", "loss": told["alone"]},
            {"who": "common: one model from all rows", "loss": told["common"]},
            {"who": f"personal: {name}", "loss": told["personal"]},
        ],
        {"who": "model", "loss": told["metric"]},
    )
    show_clients(display, frame, told["metric"])
    display.say(which_round(told))
    display.say(gains(frame))
    if result.run is not None:
        display.say(f"Run: {result.run}")


def which_round(told: dict[str, Any]) -> str:
    """Which round's models a fit keeps, and where the others are."""
    best, last, other = told["best_round"], told["last_round"], {"best": "last", "last": "best"}[told["kept"]]
    if best == last:
        return f"The models are those of round {last}, the last; no earlier one was better on validation rows."
    what = {"best": f"round {best}, the best on validation rows", "last": f"round {last}, the last"}
    return (
        f"The models are those of {what[told['kept']]}; those of {what[other]}, are in models-{other}.safetensors. "
        f'`keep = "{other}"` exchanges them.'
    )


def show_clients(display: Display, frame: Any, metric: str) -> None:
    """The clients by how much their own model saves; the middle of a long list is left out."""
    order = frame.sort_values("gain", ascending=False)
    if len(order) > MOST_ROWS:
        order = order.iloc[[*range(MOST_ROWS // 2), *range(len(order) - MOST_ROWS // 2, len(order))]]
    columns = {k: k for k in ("client", "rows", "alone", "common", "personal", "gain")}
    caption = "gain: what the personal model saves over training alone"
    if len(frame) > MOST_ROWS:
        caption = f"The {MOST_ROWS // 2} best and worst of {len(frame)} clients. {caption}"
    display.table(f"Clients, test {metric}", order.to_dict("records"), columns, caption)


def gains(frame: Any) -> str:
    """Who gains from what, in one sentence."""
    seen = frame.dropna(subset=["alone", "common", "personal"])
    common = int((seen["common"] < seen["alone"]).sum())
    personal = int((seen["personal"] < seen["alone"]).sum())
    both = int((seen["personal"] < seen[["alone", "common"]].min(axis=1)).sum())
    return (
        f"Of {len(seen)} clients, {common} do better with the common model than alone, {personal} with their personal "
        f"model than alone, and {both} with their personal model than with either."
    )


def show_comparison(display: Display, result: Any) -> None:
    """A row a method, best first, and who gains."""
    rows = result.methods.sort_values("test_loss").to_dict("records")
    for row in rows:
        row["sent"] = size(row["bytes"])
        row["round"] = f"{row['kept_round']}/{row['rounds']}"
    columns = {
        "method": "method",
        "test_loss": f"test {result.metric}",
        "last_test_loss": "last round",
        "round": "round",
        "sent": "sent",
        "seconds": "seconds",
    }
    caption = "test: models of the kept round (by default the best on validation rows), averaged over test rows"
    display.table(f"{len(result.clients)} clients", rows, columns, caption)
    methods = [m for m in result.methods["method"] if m != "local"]
    if "local" in result.clients:
        for method in methods:
            better = int((result.clients[method] < result.clients["local"]).sum())
            display.say(f"{better} of {len(result.clients)} clients do better with {method} than alone.")
    if result.run is not None:
        display.say(f"Run: {result.run}")


def show_personalized(display: Display, found: Any, out: Any) -> None:
    """Newcomers, and whether joining pays for them."""
    columns = {k: k for k in ("client", "rows", "alone", "common", "personal", "gain")}
    columns |= {"gain_low": "low", "gain_high": "high", "pays": "pays", "verdict": "verdict"}
    caption = f"test {found.metric}; personal models by {found.way}; gain over training alone with its 95 % interval"
    display.table("Newcomers", found.clients.to_dict("records")[:MOST_ROWS], columns, caption)
    told = found.clients["pays"].value_counts()
    display.say(", ".join(f"joining pays: {word} for {told.get(word, 0)}" for word in ("yes", "no", "undecided")) + ".")
    if out is not None:
        display.say(f"Models: {out}")


def show_survey(display: Display, found: Any) -> None:
    """The theory of a federation as tables, and in words."""

    def rows(table: dict[str, Any], value: str = "value") -> list[dict[str, Any]]:
        return [{"name": name.replace("_", " "), **part, "value": part.get(value)} for name, part in table.items()]

    spread = found.heterogeneity
    wide = {"name": "", "value": "value", "low": "low", "high": "high", "method": "from"}
    display.table("Constants", rows(found.constants), wide)
    radii = {"R": {**spread, "value": spread["R"]}, "R_max": spread["R_max"]}
    display.table("Heterogeneity", rows(radii), wide)
    borders = {name: {**part, "value": part.get("R", part.get("Gamma"))} for name, part in found.thresholds.items()}
    display.table("Thresholds of R", rows(borders), {"name": "", "value": "at", "side": "speaks for", "source": "from"})
    display.table(
        "Lambda by rule",
        rows(found.lam),
        {"name": "", "value": "lambda", "low": "low", "high": "high", "source": "from"},
    )
    promised = [{"name": name.replace("_", " "), "value": value} for name, value in found.promises.items()]
    display.table("Promises (orders of the average excess risk; rounds to 1e-3)", promised, {"name": "", "value": ""})
    if spread["by_feature"]:
        top = ", ".join(f"{name} {tau:.2g}" for name, tau in list(spread["by_feature"].items())[:6])
        display.say(f"Coefficients that differ most between clients (standard deviation): {top}.")
    for sentence in found.words:
        display.say(sentence)
    for doubt in found.assumptions:
        display.say(f"Doubt: {doubt}")
