"""Whether a client's reply has the form that its request asks for.

`find_problem(what, request, reply, client)` checks a reply before it counts: it returns one clause that describes what
is wrong, or None. Messages of rounds are also compared with the algorithm's own pattern (`engines/reply_checks.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from mooring.core.types import NamedValues
from mooring.data.clients import PARTS
from mooring.data.column_roles import ColumnRoles
from mooring.data.column_statistics import ColumnStatistics
from mooring.data.column_types import CATEGORY
from mooring.engines.flower.messages import (
    NONE_SUFFIX,
    SECURE_CONFIRM,
    SECURE_EVALUATE,
    SECURE_KEYS,
    SECURE_RECOVER,
    SECURE_UNMASK,
    SECURE_UPDATE,
    Payload,
    commit_to_share,
    printable,
)
from mooring.engines.reply_checks import MAX_REPORTED_ROWS
from mooring.estimates.client_statistics import ClientStatistics

MAX_SUM = 1e150  # squares of larger numbers overflow
MAX_LEVELS = 100_000  # of a column
COLUMN_FACTS = {"has", "place", "rows", "present", "numbers", "dates", "whole"}
ORDER_FACTS = {"finite", "distinct", "low", "high", "middle", "between", "off"}
TARGET_FACTS = {"has", "rows", "numbers", "whole", "named"} | ORDER_FACTS
COUNTS = {"has", "place", "rows", "present", "numbers", "dates", "whole", "finite", "distinct", "named", "missing"}
NOT_NEGATIVE = COUNTS | {"between", "off", "squares"}
TENSOR_NAME = re.compile(r"^[A-Za-z0-9_ .-]{1,80}(/[A-Za-z_][A-Za-z0-9_]{0,60})*(=None)?$")


class MalformedReplyError(ValueError):
    """One clause that describes the problem of a reply."""


def find_problem(what: str, request: Payload, reply: Payload, client: str) -> str | None:
    """The reason why a reply does not count; None if it is valid."""
    try:
        check_tensors(reply.tensors)
        if (check := CHECKS.get(what)) is not None:
            check(request, reply, client)
    except MalformedReplyError as error:
        return printable(str(error))
    except Exception as error:  # whatever a reply raises is the reply's fault
        return printable(f"it is malformed ({type(error).__name__}: {error})")
    return None


def check_tensors(tensors: Mapping[str, Tensor]) -> None:
    for name in tensors:
        if not TENSOR_NAME.match(name):
            raise MalformedReplyError(f"it names a tensor {name[:60]!r}")


def check_count(value: object, what: str, most: float = MAX_REPORTED_ROWS) -> int:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most and value % 1 == 0:
        return int(value)
    raise MalformedReplyError(f"it reports {str(value)[:40]} as {what}; a whole number up to {most:.0g} is right")


def check_survey(request: Payload, reply: Payload, client: str) -> None:
    summary = parse_summary(reply, client)
    if not {"target", "client"} <= set(summary.roles) <= set(ColumnRoles._fields):
        raise MalformedReplyError("it does not name its target and client columns")
    if any(len(columns) != 1 for columns in summary.roles.values()):
        raise MalformedReplyError("it names two columns for one role")
    targets = summary.roles.get("target", {})
    if len(targets) != 1 or next(iter(targets)) not in summary.facts:
        raise MalformedReplyError("it does not describe its target column")
    target = next(iter(targets))
    for column, facts in summary.facts.items():
        needed = TARGET_FACTS if column == target else COLUMN_FACTS | ORDER_FACTS
        check_column_statistics(column, facts, needed)


def check_tally(request: Payload, reply: Payload, client: str) -> None:
    summary, plan = parse_summary(reply, client), request.fields["plan"]
    expected = {column["name"]: column["kind"] for column in plan["columns"]}
    if set(summary.facts) != {*expected, plan["target"]}:
        raise MalformedReplyError("it tallies other columns than it was asked for")
    for column, kind in expected.items():
        needed = {"has", "rows", "present", "missing"} | (set() if kind == CATEGORY else {"total", "low", "high"})
        check_column_statistics(column, summary.facts[column], needed)
        if kind == CATEGORY and column not in summary.levels:
            raise MalformedReplyError(f"it does not count the levels of '{column}'")
    check_column_statistics(plan["target"], summary.facts[plan["target"]], {"has", "rows", "total", "low", "high"})


def check_spread(request: Payload, reply: Payload, client: str) -> None:
    summary, draft = parse_summary(reply, client), request.fields["draft"]
    places = {str(j) for j in range(len(draft["mean"]))}
    if set(summary.facts) != {*places, "target"}:
        raise MalformedReplyError("it gives the spread of other columns than it was asked for")
    for place in places:
        check_column_statistics(place, summary.facts[place], {"squares"})
    needed = {"rows", "squares"} if draft["kind"] == "regression" else {"rows"}
    check_column_statistics("target", summary.facts["target"], needed)


def parse_summary(reply: Payload, client: str) -> ColumnStatistics:
    text = reply.fields.get("summary")
    if not isinstance(text, str):
        raise MalformedReplyError("it has no summary")
    summary = ColumnStatistics.from_json(text)
    if summary.clients != (client,):
        raise MalformedReplyError(f"it claims to be {', '.join(summary.clients)[:80]}; a client has one name")
    for counted in (summary.levels, summary.roles):
        for column, levels in counted.items():
            if len(levels) > MAX_LEVELS:
                raise MalformedReplyError(f"it names {len(levels)} levels of '{column}'")
            for level in levels.values():
                check_count(level.rows, f"rows of a level of '{column}'")
                if level.client != client:
                    raise MalformedReplyError("it counts levels for another client")
    return summary


def check_column_statistics(column: str, facts: NamedValues, needed: set[str]) -> None:
    if missing := needed - set(facts):
        raise MalformedReplyError(f"it lacks {min(missing)} of '{column}'")
    for fact, values in facts.items():
        value = float(values[0])
        if abs(value) > MAX_SUM or (fact in NOT_NEGATIVE and value < 0):
            raise MalformedReplyError(f"it reports {fact} = {value:.3g} of '{column}'")
        if fact in COUNTS:
            check_count(value, f"{fact} of '{column}'")
    if "low" in facts and float(facts["low"][0]) > float(facts["high"][0]):
        raise MalformedReplyError(f"its lowest value of '{column}' is above its highest")


def check_names(request: Payload, reply: Payload, client: str) -> None:
    names, expected = reply.fields["names"], request.fields["wanted"]
    if not isinstance(names, dict) or not set(names) <= set(expected):
        raise MalformedReplyError("it names levels of other columns than it was asked for")
    for column, levels in names.items():
        if not all(isinstance(level, str) for level in levels.values()) or not set(levels) <= set(expected[column]):
            raise MalformedReplyError(f"it names other levels of '{column}' than it was asked for")


def check_adopt(request: Payload, reply: Payload, client: str) -> None:
    sizes, weight = reply.fields["sizes"], reply.fields["weight"]
    for part in PARTS:
        check_count(sizes[part], f"rows to {part}")
    if weight is not None and not (
        isinstance(weight, int | float) and not isinstance(weight, bool) and 0 < weight <= MAX_REPORTED_ROWS
    ):
        raise MalformedReplyError(f"it reports a weight of {str(weight)[:40]}")
    if not isinstance(reply.fields.get("by_chance"), bool):
        raise MalformedReplyError("it does not state how its rows were split")


def check_facts(request: Payload, reply: Payload, client: str) -> None:
    """The statistics that settings are resolved from: one number each, and fits of the model's size."""
    size, prefix = len(request.tensors["w0"].reshape(-1)), "facts/"
    names = {name.removeprefix(prefix).removesuffix(NONE_SUFFIX) for name in reply.tensors if name.startswith(prefix)}
    if unknown := names - set(ClientStatistics._fields):
        raise MalformedReplyError(f"it states {min(unknown)[:40]!r}, which it was not asked for")
    for field in ClientStatistics._fields:
        part = get_field(reply.tensors, "facts", field)
        if field == "federation":
            if part is not None:
                raise MalformedReplyError("it claims to be the federation")
        elif field in ("fit", "alone"):
            if part is not None:
                check_shape(part, (1, size) if field == "fit" else (1, part.shape[-1]), field)
                if not bool(torch.isfinite(part).all()) and field == "fit":
                    raise MalformedReplyError("its own fit is not finite")
        else:
            if part is None:
                raise MalformedReplyError(f"it does not state {field}")
            check_shape(part, (1,), field)
            if field in ("n", "p", "validation") and not 0 <= float(part[0]) <= MAX_REPORTED_ROWS:
                raise MalformedReplyError(f"it reports {field} = {float(part[0]):.3g}")
            if bool(torch.isinf(part).any()) or float(torch.nan_to_num(part)[0]) < 0:
                raise MalformedReplyError(f"it reports {field} = {float(part[0]):.3g}")


def get_field(tensors: Mapping[str, Tensor], prefix: str, field: str) -> Tensor | None:
    """A field of a flattened tuple; None where it is None."""
    if f"{prefix}/{field}=None" in tensors:
        return None
    if f"{prefix}/{field}" not in tensors:
        raise MalformedReplyError(f"it does not state {field}")
    return tensors[f"{prefix}/{field}"]


def check_shape(tensor: Tensor, shape: tuple[int, ...], what: str) -> None:
    if tuple(tensor.shape) != shape:
        raise MalformedReplyError(f"its {what} has the shape {list(tensor.shape)} where {list(shape)} is right")
    if not tensor.dtype.is_floating_point:
        raise MalformedReplyError(f"its {what} holds {tensor.dtype}")


def check_evaluate(request: Payload, reply: Payload, client: str) -> None:
    check_shape(reply.tensors["risk"], (len(request.fields["parts"]),), "loss")


def check_model(request: Payload, reply: Payload, client: str) -> None:
    model = reply.tensors["model"]
    if model.dim() != 2 or not model.dtype.is_floating_point or not bool(torch.isfinite(model).all()):
        raise MalformedReplyError("its model is not finite, or of the wrong shape")


def check_number(request: Payload, reply: Payload, client: str) -> None:
    number, known = reply.fields["number"], reply.fields["known"]
    if not isinstance(known, bool) or not (number is None or isinstance(number, float)):
        raise MalformedReplyError("it sends no number")


def check_statement(request: Payload, reply: Payload, client: str) -> None:
    statement = reply.fields["statement"]
    expected = {"session": request.fields["session"], "name": client, "cohort": sorted(request.fields["cohort"])}
    if any(statement.get(key) != value for key, value in expected.items()) or not isinstance(statement["public"], str):
        raise MalformedReplyError("it signs another statement than it was asked for")
    if not 0 < float(statement["weight"]) <= MAX_REPORTED_ROWS:
        raise MalformedReplyError(f"it states a weight of {statement['weight']}")
    for part in PARTS:
        check_count(statement["sizes"][part], f"rows to {part}")
    if not isinstance(reply.fields["signature"], str):
        raise MalformedReplyError("it signs nothing")


def check_masked(request: Payload, reply: Payload, client: str) -> None:
    masked = reply.tensors["masked"]
    if masked.dim() != 1 or masked.dtype != torch.int64:
        raise MalformedReplyError("it sends no masked vector")
    if "parts" in request.fields and len(masked) != len(request.fields["parts"]):
        raise MalformedReplyError("it sends losses of other parts than it was asked for")


def check_confirmation(request: Payload, reply: Payload, client: str) -> None:
    fields = reply.fields
    if "confirmed" in fields:
        if not isinstance(fields["confirmed"], list) or not all(isinstance(name, str) for name in fields["confirmed"]):
            raise MalformedReplyError("it names no clients")
        return
    if not isinstance(fields["signature"], str):
        raise MalformedReplyError("it signs nothing")
    if not set(fields["shares"]) == set(fields["commitments"]) == set(request.fields["survivors"]) - {client}:
        raise MalformedReplyError("it does not send every peer a share and a commitment to it")
    for text in (fields["sealed"], *fields["shares"].values()):
        bytes.fromhex(text)


def check_shares(request: Payload, reply: Payload, client: str) -> None:
    if set(reply.fields["shares"]) != set(request.fields["shares"]):
        raise MalformedReplyError("it returns other shares than it was asked for")
    for name, share in reply.fields["shares"].items():
        if share is not None and commit_to_share(name, client, share) != request.fields["commitments"][name]:
            raise MalformedReplyError(f"it returns a false share of '{name}'")


def check_seeds(request: Payload, reply: Payload, client: str) -> None:
    seeds = [reply.fields["seed"], *reply.fields["pairs"].values()]
    if not all(isinstance(seed, str) and len(bytes.fromhex(seed)) == 32 for seed in seeds):
        raise MalformedReplyError("it reveals no seeds")


CHECKS: dict[str, Callable[[Payload, Payload, str], None]] = {
    "survey": check_survey,
    "tally": check_tally,
    "names": check_names,
    "spread": check_spread,
    "adopt": check_adopt,
    "client_statistics": check_facts,
    "evaluate": check_evaluate,
    "models": check_model,
    "numbers": check_number,
    SECURE_KEYS: check_statement,
    SECURE_UPDATE: check_masked,
    SECURE_EVALUATE: check_masked,
    SECURE_CONFIRM: check_confirmation,
    SECURE_UNMASK: check_seeds,
    SECURE_RECOVER: check_shares,
}
