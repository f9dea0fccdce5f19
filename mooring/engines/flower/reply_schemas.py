"""What a client's reply to each request must look like. Whatever a client sends, it is checked here before it counts.

`problem_of(request, asked, reply, client)` gives one clause that says what is wrong, or None. The messages of rounds
are also held to the algorithm's own pattern (`engines/guard.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mooring.data.clients import PARTS
from mooring.data.columns import CATEGORY
from mooring.data.roles import Roles
from mooring.data.summary import Summary
from mooring.engines.flower import secure
from mooring.engines.flower.parcels import Parcel
from mooring.engines.guard import MOST_ROWS
from mooring.estimates.facts import Facts
from mooring.estimates.summaries import LinearStats, LocalFits

LARGEST_SUM = 1e150  # squares of larger numbers overflow
MAX_TEXT = 500  # characters of a sentence that a client sends
MAX_LEVELS = 100_000  # of a column
COLUMN_FACTS = {"has", "place", "rows", "present", "numbers", "dates", "whole"}
ORDER_FACTS = {"finite", "distinct", "low", "high", "middle", "between", "off"}
TARGET_FACTS = {"has", "rows", "numbers", "whole", "named"} | ORDER_FACTS
COUNTS = {"has", "place", "rows", "present", "numbers", "dates", "whole", "finite", "distinct", "named", "missing"}
NOT_NEGATIVE = COUNTS | {"between", "off", "squares"}
TENSOR_NAME = re.compile(r"^[A-Za-z0-9_ .-]{1,80}(/[A-Za-z_][A-Za-z0-9_]{0,60})*(=None)?$")


class Malformed(ValueError):
    """One clause that says what is wrong with a reply."""


def problem_of(what: str, asked: Parcel, reply: Parcel, client: str) -> str | None:
    """Why a reply does not count; None if it is as it must be."""
    try:
        check_tensors(reply.tensors)
        if (check := CHECKS.get(what)) is not None:
            check(asked, reply, client)
    except Malformed as error:
        return printable(str(error))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RuntimeError) as error:
        return printable(f"it is malformed ({type(error).__name__}: {error})")
    return None


def printable(text: str, limit: int = MAX_TEXT) -> str:
    """Text of a client for a terminal or a log: one line, without control characters, of bounded length."""
    clean = "".join(c if c.isprintable() else " " for c in text[: 4 * limit])
    clean = " ".join(clean.split())
    return clean if len(clean) <= limit else clean[: limit - 3] + "..."


def check_tensors(tensors: Mapping[str, Tensor]) -> None:
    for name in tensors:
        if not TENSOR_NAME.match(name):
            raise Malformed(f"it names a tensor {name[:60]!r}")


def whole_number(value: Any, what: str, most: float = MOST_ROWS) -> int:
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not known or value != int(value) or not 0 <= value <= most:
        raise Malformed(f"it reports {str(value)[:40]} as {what}; a whole number up to {most:.0g} is right")
    return int(value)


def check_survey(asked: Parcel, reply: Parcel, client: str) -> None:
    summary = summary_of(reply, client)
    if not {"target", "client"} <= set(summary.roles) <= set(Roles._fields):
        raise Malformed("it does not name its target and client columns")
    if any(len(found) != 1 for found in summary.roles.values()):
        raise Malformed("it names two columns for one role")
    targets = summary.roles.get("target", {})
    if len(targets) != 1 or next(iter(targets)) not in summary.facts:
        raise Malformed("it does not describe its target column")
    target = next(iter(targets))
    for column, facts in summary.facts.items():
        needed = TARGET_FACTS if column == target else COLUMN_FACTS | ORDER_FACTS
        check_facts_of(column, facts, needed)


def check_tally(asked: Parcel, reply: Parcel, client: str) -> None:
    summary, plan = summary_of(reply, client), asked.words["plan"]
    wanted = {column["name"]: column["kind"] for column in plan["columns"]}
    if set(summary.facts) != {*wanted, plan["target"]}:
        raise Malformed("it tallies other columns than it was asked for")
    for column, kind in wanted.items():
        needed = {"has", "rows", "present", "missing"} | (set() if kind == CATEGORY else {"total", "low", "high"})
        check_facts_of(column, summary.facts[column], needed)
        if kind == CATEGORY and column not in summary.levels:
            raise Malformed(f"it does not count the levels of '{column}'")
    check_facts_of(plan["target"], summary.facts[plan["target"]], {"has", "rows", "total", "low", "high"})


def check_spread(asked: Parcel, reply: Parcel, client: str) -> None:
    summary, draft = summary_of(reply, client), asked.words["draft"]
    places = {str(j) for j in range(len(draft["mean"]))}
    if set(summary.facts) != {*places, "target"}:
        raise Malformed("it gives the spread of other columns than it was asked for")
    for place in places:
        check_facts_of(place, summary.facts[place], {"squares"})
    needed = {"rows", "squares"} if draft["kind"] == "regression" else {"rows"}
    check_facts_of("target", summary.facts["target"], needed)


def summary_of(reply: Parcel, client: str) -> Summary:
    text = reply.words.get("summary")
    if not isinstance(text, str):
        raise Malformed("it has no summary")
    summary = Summary.from_json(text)
    if summary.clients != (client,):
        raise Malformed(f"it speaks for {', '.join(summary.clients)[:80]}; a client has one name")
    for counted in (summary.levels, summary.roles):
        for column, levels in counted.items():
            if len(levels) > MAX_LEVELS:
                raise Malformed(f"it names {len(levels)} levels of '{column}'")
            for level in levels.values():
                whole_number(level.rows, f"rows of a level of '{column}'")
                if level.client != client:
                    raise Malformed("it counts levels for another client")
    return summary


def check_facts_of(column: str, facts: Mapping[str, Any], needed: set[str]) -> None:
    if missing := needed - set(facts):
        raise Malformed(f"it lacks {min(missing)} of '{column}'")
    for fact, values in facts.items():
        value = float(values[0])
        if abs(value) > LARGEST_SUM or (fact in NOT_NEGATIVE and value < 0):
            raise Malformed(f"it reports {fact} = {value:.3g} of '{column}'")
        if fact in COUNTS:
            whole_number(value, f"{fact} of '{column}'")
    if "low" in facts and float(facts["low"][0]) > float(facts["high"][0]):
        raise Malformed(f"its lowest value of '{column}' is above its highest")


def check_names(asked: Parcel, reply: Parcel, client: str) -> None:
    names, wanted = reply.words["names"], asked.words["wanted"]
    if not isinstance(names, dict) or not set(names) <= set(wanted):
        raise Malformed("it names levels of other columns than it was asked for")
    for column, levels in names.items():
        if not all(isinstance(level, str) for level in levels.values()) or not set(levels) <= set(wanted[column]):
            raise Malformed(f"it names other levels of '{column}' than it was asked for")


def check_adopt(asked: Parcel, reply: Parcel, client: str) -> None:
    sizes, weight = reply.words["sizes"], reply.words["weight"]
    for part in PARTS:
        whole_number(sizes[part], f"rows to {part}")
    if weight is not None and not (
        isinstance(weight, int | float) and not isinstance(weight, bool) and 0 < weight <= MOST_ROWS
    ):
        raise Malformed(f"it reports a weight of {str(weight)[:40]}")
    if not isinstance(reply.words.get("by_chance"), bool):
        raise Malformed("it does not tell how its rows were split")


def check_facts(asked: Parcel, reply: Parcel, client: str) -> None:
    """The statistics that settings are settled from: one number each, and fits of the model's size."""
    size = len(asked.tensors["w0"].reshape(-1))
    for field in Facts._fields:
        found = field_of(reply.tensors, "facts", field)
        if field == "federation":
            if found is not None:
                raise Malformed("it speaks for the federation")
        elif field in ("fit", "alone"):
            if found is not None:
                need_shape(found, (1, size) if field == "fit" else (1, found.shape[-1]), field)
                if not bool(torch.isfinite(found).all()) and field == "fit":
                    raise Malformed("its own fit is not finite")
        else:
            if found is None:
                raise Malformed(f"it does not tell {field}")
            need_shape(found, (1,), field)
            if field in ("n", "p", "validation") and not 0 <= float(found[0]) <= MOST_ROWS:
                raise Malformed(f"it reports {field} = {float(found[0]):.3g}")
            if bool(torch.isinf(found).any()) or float(torch.nan_to_num(found)[0]) < 0:
                raise Malformed(f"it reports {field} = {float(found[0]):.3g}")


def field_of(tensors: Mapping[str, Tensor], prefix: str, field: str) -> Tensor | None:
    """A field of a flattened tuple; None where it is None."""
    if f"{prefix}/{field}=None" in tensors:
        return None
    if f"{prefix}/{field}" not in tensors:
        raise Malformed(f"it does not tell {field}")
    return tensors[f"{prefix}/{field}"]


def need_shape(found: Tensor, shape: tuple[int, ...], what: str) -> None:
    if tuple(found.shape) != shape:
        raise Malformed(f"its {what} has the shape {list(found.shape)} where {list(shape)} is right")
    if not found.dtype.is_floating_point:
        raise Malformed(f"its {what} holds {found.dtype}")


def check_told(asked: Parcel, reply: Parcel, client: str) -> None:
    which, tensors = asked.words["which"], reply.tensors
    if which == "summary":
        names = {name.removeprefix("told/") for name in tensors}
        if names not in (set(LinearStats._fields), set(LocalFits._fields)):
            raise Malformed("it sends no summary of its rows")
        parts = [tensors[f"told/{name}"] for name in names]
    else:
        parts = [tensors["told/first"], tensors["told/second"]]
    for part in parts:
        if part.shape[:1] != (1,) or not part.dtype.is_floating_point or not bool(torch.isfinite(part).all()):
            raise Malformed("it sends numbers that are not finite, or of the wrong shape")
    if which != "summary":
        d = asked.tensors["w" if which == "slope" else "start"].shape[-1]
        need_shape(parts[0], (1, d), "gradient" if which == "slope" else "fit")
        need_shape(parts[1], (1, d, d), "Hessian")


def check_evaluate(asked: Parcel, reply: Parcel, client: str) -> None:
    need_shape(reply.tensors["risk"], (len(asked.words["parts"]),), "loss")


def check_model(asked: Parcel, reply: Parcel, client: str) -> None:
    model = reply.tensors["model"]
    if model.dim() != 2 or not model.dtype.is_floating_point or not bool(torch.isfinite(model).all()):
        raise Malformed("its model is not finite, or of the wrong shape")


def check_number(asked: Parcel, reply: Parcel, client: str) -> None:
    number, known = reply.words["number"], reply.words["known"]
    if not isinstance(known, bool) or not (number is None or isinstance(number, int | float)):
        raise Malformed("it sends no number")


def check_statement(asked: Parcel, reply: Parcel, client: str) -> None:
    statement = reply.words["statement"]
    right = {"session": asked.words["session"], "name": client, "cohort": sorted(asked.words["cohort"])}
    if any(statement.get(key) != value for key, value in right.items()) or not isinstance(statement["public"], str):
        raise Malformed("it signs another statement than it was asked for")
    if not 0 < float(statement["weight"]) <= MOST_ROWS:
        raise Malformed(f"it states a weight of {statement['weight']}")
    for part in PARTS:
        whole_number(statement["sizes"][part], f"rows to {part}")
    if not isinstance(reply.words["signature"], str):
        raise Malformed("it signs nothing")


def check_masked(asked: Parcel, reply: Parcel, client: str) -> None:
    masked = reply.tensors["masked"]
    if masked.dim() != 1 or masked.dtype != torch.int64:
        raise Malformed("it sends no masked vector")
    if "parts" in asked.words and len(masked) != len(asked.words["parts"]):
        raise Malformed("it sends losses of other parts than it was asked for")


def check_confirmation(asked: Parcel, reply: Parcel, client: str) -> None:
    words = reply.words
    if "confirmed" in words:
        if not isinstance(words["confirmed"], list) or not all(isinstance(name, str) for name in words["confirmed"]):
            raise Malformed("it names no clients")
    elif not isinstance(words["signature"], str):
        raise Malformed("it signs nothing")


def check_seeds(asked: Parcel, reply: Parcel, client: str) -> None:
    seeds = [reply.words["seed"], *reply.words["pairs"].values()]
    if not all(isinstance(seed, str) and len(bytes.fromhex(seed)) == 32 for seed in seeds):
        raise Malformed("it reveals no seeds")


CHECKS: dict[str, Callable[[Parcel, Parcel, str], None]] = {
    "survey": check_survey,
    "tally": check_tally,
    "names": check_names,
    "spread": check_spread,
    "adopt": check_adopt,
    "facts": check_facts,
    "told": check_told,
    "evaluate": check_evaluate,
    "models": check_model,
    "numbers": check_number,
    secure.KEYS: check_statement,
    secure.UPDATE: check_masked,
    secure.EVALUATE: check_masked,
    secure.CONFIRM: check_confirmation,
    secure.UNMASK: check_seeds,
}
