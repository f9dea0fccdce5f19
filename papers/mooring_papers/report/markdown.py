"""Markdown of an experiment's record: tables with the paper's numbers beside ours, and numbers as phrases."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from mooring.core.types import JsonObject, NamedValues

KEY_NUMBERS = (
    "largest ratio", "r2", "ratio", "slope", "crossing", "worst step", "highest ratio", "difference", "value",
)  # fmt: skip


def format_record_table(record: NamedValues) -> str:
    """Return a table of our means ± half of their intervals, with the paper's numbers in brackets."""
    rows = [[row["label"], *(_cell(cell) for cell in row["cells"])] for row in record["rows"]]
    head = f"**{record['title']}** (ours ± 95 % interval; in brackets: printed)"
    return f"{head}\n\n{format_table(['', *record['columns']], rows)}"


def format_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def format_number(value: object) -> str:
    """Return a number with four significant digits; a comparison or an estimate as a phrase; text unchanged."""
    if isinstance(value, dict):
        return _phrase(value) or "; ".join(f"{name}: {format_number(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return "[" + ", ".join(format_number(item) for item in value) + "]"
    if isinstance(value, bool | str) or value is None:
        return str(value)
    return f"{value:.4g}"


def _phrase(numbers: JsonObject) -> str:
    """Return a comparison (`ratio`, with its limit) or an estimate (in a `range`) as a phrase, with the interval in
    brackets."""
    texts = {name: format_number(item) for name, item in numbers.items()}
    worst = ", ".join(f"{name.removeprefix('worst ')} {item}" for name, item in texts.items() if name[:5] == "worst")
    worst_text = f" (worst: {worst})" if worst else ""
    has_interval = numbers.get("low") is not None and numbers["low"] == numbers["low"]  # a record stores nan as null
    span = f" [{texts['low']}, {texts['high']}]" if has_interval else ""
    if {"value", "reference", "ratio", "low", "high", "limit"} <= numbers.keys():
        return f"{texts['value']} / {texts['reference']} = {texts['ratio']}{span}, limit {texts['limit']}{worst_text}"
    if {"low", "high", "range"} <= numbers.keys():
        name = next((key for key in ("slope", "crossing", "difference", "value") if key in numbers), None)
        if name:
            return f"{name} {texts[name]}{span}, within {texts['range']}{worst_text}"
    return ""


def format_key_number(numbers: NamedValues) -> str:
    """Return the key number of a check, its interval in brackets, and its threshold."""
    name = next((name for name in KEY_NUMBERS if numbers.get(name) is not None), None)
    if name is None:
        return format_brief(dict(numbers))
    text = f"{name} {format_number(numbers[name])}"
    if numbers.get("low") is not None and numbers.get("high") is not None:
        text += f" [{format_number(numbers['low'])}, {format_number(numbers['high'])}]"
    if "range" in numbers:
        return text + f", claimed {_range(*numbers['range'])}"
    limits = {"limit": "limit", "within": "within"}
    return text + "".join(f", {label} {format_number(numbers[key])}" for key, label in limits.items() if key in numbers)


def _range(low: float | str, high: float | str) -> str:
    """Return a range in words; a record stores infinities as text."""
    low, high = float(low), float(high)
    if low == -inf:
        return f"at most {format_number(high)}"
    return f"at least {format_number(low)}" if high == inf else f"{format_number(low)} to {format_number(high)}"


def format_brief(numbers: JsonObject, max_characters: int = 90) -> str:
    """Return numbers for one line of a terminal; records and the page contain all of them."""
    text = format_number(numbers)
    return text if len(text) <= max_characters else text[: max_characters - 4].rstrip() + " ..."


def _cell(cell: NamedValues) -> str:
    is_number = cell["ours"] is not None and cell["ours"] == cell["ours"]  # a record stores nan as null
    ours = format_number(cell["ours"]) if is_number else "-"
    if cell["half"] is not None:
        ours += f" ± {format_number(cell['half'])}"
    return ours if cell["printed"] is None else f"{ours} ({format_number(cell['printed'])})"
