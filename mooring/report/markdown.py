"""Markdown of an experiment's record: tables with the paper's numbers beside ours, and numbers as phrases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

KEY_NUMBERS = (
    "largest ratio", "r2", "ratio", "slope", "crossing", "worst step", "highest ratio", "difference", "value",
)  # fmt: skip


def format_record_table(record: Mapping[str, Any]) -> str:
    """Ours as mean ± half of its interval; in brackets what the paper prints."""
    rows = [[row["label"], *(_cell(cell) for cell in row["cells"])] for row in record["rows"]]
    head = f"**{record['title']}** (ours ± 95 % interval; in brackets: printed)"
    return f"{head}\n\n{format_table(['', *record['columns']], rows)}"


def format_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def format_number(value: Any) -> str:
    """Four significant digits; a comparison or an estimate as a phrase; lists, tables and words as they are."""
    if isinstance(value, dict):
        return _phrase(value) or "; ".join(f"{name}: {format_number(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return "[" + ", ".join(format_number(item) for item in value) + "]"
    if isinstance(value, bool | str) or value is None:
        return str(value)
    return f"{value:.4g}"


def _phrase(found: dict[str, Any]) -> str:
    """What a comparison (`ratio`, with its limit) or an estimate (in a `range`) found, the interval in brackets."""
    shown = {name: format_number(item) for name, item in found.items()}
    worst = ", ".join(f"{name.removeprefix('worst ')} {item}" for name, item in shown.items() if name[:5] == "worst")
    where = f" (worst: {worst})" if worst else ""
    known = found.get("low") is not None and found["low"] == found["low"]  # a record keeps nan as null
    span = f" [{shown['low']}, {shown['high']}]" if known else ""
    if {"value", "reference", "ratio", "low", "high", "limit"} <= found.keys():
        return f"{shown['value']} / {shown['reference']} = {shown['ratio']}{span}, limit {shown['limit']}{where}"
    if {"low", "high", "range"} <= found.keys():
        name = next((key for key in ("slope", "crossing", "difference", "value") if key in found), None)
        if name:
            return f"{name} {shown[name]}{span}, within {shown['range']}{where}"
    return ""


def format_key_number(found: Mapping[str, Any]) -> str:
    """The one number of a check, its interval in brackets, and what it is held against."""
    name = next((name for name in KEY_NUMBERS if found.get(name) is not None), None)
    if name is None:
        return format_brief(dict(found))
    text = f"{name} {format_number(found[name])}"
    if found.get("low") is not None and found.get("high") is not None:
        text += f" [{format_number(found['low'])}, {format_number(found['high'])}]"
    if "range" in found:
        return text + f", claimed {_range(*found['range'])}"
    limits = {"limit": "limit", "within": "within"}
    return text + "".join(f", {word} {format_number(found[key])}" for key, word in limits.items() if key in found)


def _range(low: float | str, high: float | str) -> str:
    """A range in words; a record keeps infinities as texts."""
    low, high = float(low), float(high)
    if low == -inf:
        return f"at most {format_number(high)}"
    return f"at least {format_number(low)}" if high == inf else f"{format_number(low)} to {format_number(high)}"


def format_brief(numbers: dict[str, Any], most: int = 90) -> str:
    """Numbers for one line of a terminal; records and the page hold all of them."""
    text = format_number(numbers)
    return text if len(text) <= most else text[: most - 4].rstrip() + " ..."


def _cell(cell: Mapping[str, Any]) -> str:
    known = cell["ours"] is not None and cell["ours"] == cell["ours"]  # a record keeps nan as null
    ours = format_number(cell["ours"]) if known else "-"
    if cell["half"] is not None:
        ours += f" ± {format_number(cell['half'])}"
    return ours if cell["printed"] is None else f"{ours} ({format_number(cell['printed'])})"
