"""The requests that a server may send a client: one table, and what follows from it.

A request that is not in REQUESTS is refused by the client. A row of the table states

    answer     how a client answers (`client_requests.py`, `secure_client.py`); None: the client of another purpose does
    sends      what leaves the client, in words, for its own record
    quantity   what a policy allows or refuses it by (`disclosure.py`)
    fields     what the request must have, and with "?" what it may have; other fields are refused
    check      whether a reply has the form that was asked for, before it counts
    values     how many values the fields of a reply may have; they are counted before they are parsed
    planned    how often a run needs it; a client answers SPARE_REPEATS times as often, since servers are restarted
    purposes   the runs that it belongs to
    sums       the runs that it belongs to by their sums (`secure_rule.py`)
    awaited    whether the server waits for the reply

Messages of rounds are also compared with the algorithm's own pattern (`engines/reply_checks.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mooring.core.errors import RequestError
from mooring.core.types import JsonObject, NamedValues
from mooring.data.clients import PARTS
from mooring.data.column_roles import ColumnRoles
from mooring.data.column_statistics import ColumnStatistics
from mooring.data.column_types import CATEGORY
from mooring.engines.reply_checks import MAX_REPORTED_ROWS
from mooring.estimates.client_statistics import ClientStatistics
from mooring.remote import client_requests, fixed_sums, secure_client
from mooring.remote.messages import MAX_VALUES, NONE_SUFFIX, Payload, commit_to_share, printable
from mooring.remote.secure_rule import FIXED, PLAIN, RECOVERING
from mooring.remote.transcript import is_statement
from mooring.runs.runfile import RunFile
from mooring.runs.sections import FederationSection

if TYPE_CHECKING:
    from mooring.remote.client_node import ClientNode

SPARE_REPEATS = 20
MAX_SCHEMA_VALUES = 3_000_000  # of the statistics of a table with very many columns
MAX_ROUND_VALUES = 1_000
MODELS = ("local", "global", "personal")
MAX_SUM = 1e150  # squares of larger numbers overflow
MAX_LEVELS = 100_000  # of a column
COLUMN_FACTS = {"has", "place", "rows", "present", "numbers", "dates", "whole"}
ORDER_FACTS = {"finite", "distinct", "low", "high", "middle", "between", "off"}
TARGET_FACTS = {"has", "rows", "numbers", "whole", "named"} | ORDER_FACTS
COUNTS = {"has", "place", "rows", "present", "numbers", "dates", "whole", "finite", "distinct", "named", "missing"}
NOT_NEGATIVE = COUNTS | {"between", "off", "squares"}
SEALED = re.compile("[0-9a-f]{96}")  # a secret of 32 bytes and its mark
TENSOR_NAME = re.compile(r"^[A-Za-z0-9_ .-]{1,80}(/[A-Za-z_][A-Za-z0-9_]{0,60})*(=None)?$")


class MalformedReplyError(ValueError):
    """One clause that describes the problem of a reply."""


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


def check_own_statement(request: Payload, reply: Payload, client: str) -> None:
    statement = reply.fields["statement"]
    check_form(reply, {"statement", "signature"}, set())
    if not is_statement(statement):
        raise MalformedReplyError("it sends something else than a statement")
    if statement["name"] != client or not isinstance(reply.fields["signature"], str):
        raise MalformedReplyError("it signs the statement of another client")


def check_form(reply: Payload, fields: set[str], tensors: set[str]) -> None:
    if set(reply.fields) != fields or set(reply.tensors) != tensors:
        raise MalformedReplyError("it has other fields than it was asked for")


def check_sealed(request: Payload, reply: Payload, client: str) -> None:
    check_form(reply, {"sealed"}, set())
    sealed, names = reply.fields["sealed"], [one["name"] for one in request.fields["statements"]["list"]]
    if not isinstance(sealed, dict) or set(sealed) != (set(names[1:]) if client == names[0] else set()):
        raise MalformedReplyError("it does not encrypt the common secret for each other client")
    if not all(isinstance(text, str) and SEALED.fullmatch(text) for text in sealed.values()):
        raise MalformedReplyError("it encrypts something else than the common secret")


def check_fixed_statement(request: Payload, reply: Payload, client: str) -> None:
    check_own_statement(request, reply, client)
    statement = reply.fields["statement"]
    for part in PARTS:
        check_count(statement["sizes"][part], f"rows to {part}")
    weight = statement["weight"]
    if weight is not None and not (isinstance(weight, float) and 0 < weight <= MAX_REPORTED_ROWS):
        raise MalformedReplyError(f"it states a weight of {str(weight)[:40]}")


def check_part(request: Payload, reply: Payload, client: str) -> None:
    ended = reply.fields["ended"]
    check_form(reply, {"ended"}, set() if ended is True else {"masked"})
    if ended is True:
        return
    masked = reply.tensors["masked"]
    if ended is not False or masked.dim() != 1 or masked.dtype != torch.int64 or not len(masked):
        raise MalformedReplyError("it sends no masked vector")


def check_declared(request: Payload, reply: Payload, client: str) -> None:
    declared = reply.fields["declared"]
    check_form(reply, {"declared"}, set())
    if set(declared) != {"rows", "recommended", *MODELS} or declared["recommended"] not in MODELS:
        raise MalformedReplyError("it declares other numbers than it was asked for")
    check_count(declared["rows"], "rows")
    for name in MODELS:
        if not isinstance(declared[name], float) or not 0 <= declared[name] <= MAX_SUM:
            raise MalformedReplyError(f"it declares a loss of {str(declared[name])[:40]}")


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


FIELD_TYPES: dict[str, type | tuple[type, ...]] = {
    "attempt": int, "base": int, "calls": dict, "commitments": dict, "cohort": list, "draft": dict, "field": str,
    "formula": dict, "fresh": bool, "hold": list, "hyperparameters": dict, "index": int, "label": str, "notes": list,
    "number": int, "secret": str, "p": (int, float), "parts": list, "plan": dict, "protocol": int,
    "round": list, "row": dict, "asks": list, "schema": dict, "session": str, "shares": dict,
    "signatures": dict, "start": str, "statements": dict, "summary": dict, "survivors": list, "version": str,
    "wanted": dict, "why": str,
}  # fmt: skip
ADDRESS = {"what", "run"}  # fields of every request


def plan_once(run: RunFile) -> int:
    """A few: every client that cannot take part makes the others agree again."""
    options = run.federation or FederationSection()
    clients = options.clients if isinstance(options.clients, int) else len(options.clients or ())
    return 2 * (clients + 5)


def plan_rounds(run: RunFile) -> int:
    """Of the algorithm and of local models, each with an evaluation or more."""
    return 4 * (run.training.rounds + 5)


class Request(NamedTuple):
    """A row of the table; the module's docstring describes the fields."""

    answer: Callable[[ClientNode, Payload], Payload] | None
    sends: str
    fields: str = ""
    quantity: str = ""
    check: Callable[[Payload, Payload, str], None] | None = None
    values: int = MAX_VALUES
    planned: Callable[[RunFile], int] | None = plan_once
    purposes: tuple[str, ...] = ("fit",)
    sums: tuple[str, ...] = (PLAIN, FIXED, RECOVERING)
    awaited: bool = True


EVERY = ("fit", "advise")
MODEL = "label base index p"
SUM = "session attempt cohort"
REQUESTS: dict[str, Request] = {
    "hello": Request(
        client_requests.handle_hello, "its name, version and a digest of its run file", "protocol? version?",
        planned=None, purposes=EVERY, awaited=False, values=MAX_ROUND_VALUES,
    ),
    "survey": Request(
        client_requests.handle_survey,
        "for every column: counts of values, rounded extremes, median and quartiles; classes of the target",
        "notes? formula?", "schema", check_survey, MAX_SCHEMA_VALUES,
    ),
    "tally": Request(
        client_requests.handle_tally,
        "for every column: sums of values, and how many rows have each level of a category",
        "plan notes? formula?", "schema", check_tally, MAX_SCHEMA_VALUES,
    ),
    "names": Request(
        client_requests.handle_names, "names of levels that are rare here and common over all clients",
        "plan wanted formula?", "schema", check_names, MAX_SCHEMA_VALUES,
    ),
    "spread": Request(
        client_requests.handle_spread, "for every column: the sum of squares about the mean of all clients",
        "plan draft notes? formula?", "schema", check_spread, MAX_SCHEMA_VALUES,
    ),
    "adopt": Request(
        client_requests.handle_adopt, "numbers of rows", "schema fresh", "schema", check_adopt
    ),
    "client_statistics": Request(
        client_requests.handle_client_statistics, "a few numbers about the curvature and noise of the loss",
        "asks index p", "statistics", check_facts,
    ),
    "statistics": Request(
        client_requests.handle_statistics, "sums, gradients or fits that hyperparameters such as lam are resolved from",
        "calls", "statistics", sums=(PLAIN,),
    ),
    "begin": Request(
        client_requests.handle_begin, "nothing but that the algorithm can begin",
        "label hyperparameters fresh start index p",
    ),
    "local_update": Request(
        client_requests.handle_update, "the message of a local update", f"{MODEL} round hold", "updates",
        values=MAX_ROUND_VALUES, planned=plan_rounds,
    ),
    "evaluate": Request(
        client_requests.handle_evaluate, "mean losses of its model", f"{MODEL} round parts", "losses",
        check_evaluate, MAX_ROUND_VALUES, plan_rounds, sums=(PLAIN,),
    ),
    "models": Request(
        client_requests.handle_model, "its personal model", f"{MODEL} round", "models", check_model, sums=(PLAIN,)
    ),
    "numbers": Request(
        client_requests.handle_number, "a number of its personal state", f"{MODEL} field", "models", check_number,
        sums=(PLAIN,),
    ),
    "done": Request(
        client_requests.handle_done, "nothing but that the result was written", f"{MODEL} round row summary"
    ),
    "dismissed": Request(
        client_requests.handle_dismissed, "nothing", "why", planned=None, purposes=EVERY, awaited=False
    ),
    "roll_call": Request(
        None, "its name, the names of its columns and a fresh public key, signed", "", "advice", check_own_statement,
        purposes=("advise",),
    ),
    "cohort": Request(
        None, "a secret for its peers, which the server cannot read", "statements signatures", "advice", check_sealed,
        purposes=("advise",),
    ),
    "step": Request(
        None, "its part of a sum over all clients, under masks", "number secret?", "advice", check_part,
        purposes=("advise",), planned=lambda run: 1_000,
    ),
    "declare": Request(
        None, "its rows, three losses to two digits and its recommendation, where its policy lets results leave",
        "", check=check_declared, values=MAX_ROUND_VALUES, purposes=("advise",),
    ),
    "fixed_keys": Request(
        fixed_sums.handle_keys, "a public key, its weight and its numbers of rows, signed", "",
        check=check_fixed_statement, sums=(FIXED,),
    ),
    "fixed_cohort": Request(fixed_sums.handle_cohort, "nothing", "statements signatures", sums=(FIXED,)),
    "fixed_update": Request(
        fixed_sums.handle_update, "the message of a local update under masks", f"{MODEL} round hold", "updates",
        check_masked, MAX_ROUND_VALUES, plan_rounds, sums=(FIXED,),
    ),
    "fixed_evaluate": Request(
        fixed_sums.handle_evaluate, "its part of the mean losses under masks", f"{MODEL} round parts", "losses",
        check_masked, MAX_ROUND_VALUES, plan_rounds, sums=(FIXED,),
    ),
    "secure_keys": Request(
        secure_client.handle_keys, "a public key, its weight and its numbers of rows, signed", "session cohort",
        check=check_statement, sums=(RECOVERING,),
    ),
    "secure_peers": Request(secure_client.handle_peers, "nothing", "session statements", sums=(RECOVERING,)),
    "secure_update": Request(
        secure_client.handle_masked_update, "the message of a local update under masks", f"{MODEL} round hold {SUM}",
        "updates", check_masked, MAX_ROUND_VALUES, plan_rounds, sums=(RECOVERING,),
    ),
    "secure_evaluate": Request(
        secure_client.handle_masked_losses, "its part of the mean loss under masks", f"{MODEL} round parts {SUM}",
        "losses", check_masked, MAX_ROUND_VALUES, plan_rounds, sums=(RECOVERING,),
    ),
    "secure_confirm": Request(
        secure_client.handle_confirm,
        "a signature under the list of clients of a sum, and encrypted shares of a key for its peers",
        "session attempt survivors", check=check_confirmation, planned=plan_rounds, sums=(RECOVERING,),
    ),
    "secure_unmask": Request(
        secure_client.handle_unmask, "seeds of masks, of a sum that was confirmed",
        "session attempt survivors signatures", check=check_seeds, planned=plan_rounds, sums=(RECOVERING,),
    ),
    "secure_recover": Request(
        secure_client.handle_recover, "shares of the keys of clients that confirmed a sum and went away",
        "session attempt survivors signatures shares commitments", check=check_shares, planned=plan_rounds,
        sums=(RECOVERING,),
    ),
}  # fmt: skip


def check_request(node: ClientNode, what: str) -> Request:
    """Return the row of a request that this client's run may receive; refuse others."""
    request = REQUESTS.get(what)
    if request is None:
        raise RequestError(f"client '{node.name}' does not know the request {what!r}.")
    if node.federation.secure and request.sums == (PLAIN,):
        raise RequestError(f"client '{node.name}' refuses {what!r}: in a secure run it sends secure sums only.")
    if node.run.mooring.purpose not in request.purposes or node.sums_kind not in request.sums:
        raise RequestError(f"client '{node.name}' refuses {what!r}: it does not belong to its run.")
    return request


def check_fields(node: ClientNode, what: str, fields: JsonObject) -> None:
    """Refuse a request without the fields of its row, with others, or with a field of another type."""
    names = REQUESTS[what].fields.split()
    for name in names:
        if not name.endswith("?") and name not in fields:
            raise RequestError(f"client '{node.name}' refuses {what!r}: it lacks the field '{name}'.")
    for name, value in fields.items():
        if name in ADDRESS:
            continue
        if name not in names and f"{name}?" not in names:
            raise RequestError(f"client '{node.name}' refuses {what!r}: it has the field {printable(name, 40)!r}.")
        if not isinstance(value, FIELD_TYPES[name]):
            raise RequestError(f"client '{node.name}' refuses {what!r}: its field '{name}' has another type.")


def max_repeats(what: str, run: RunFile) -> float:
    """How often a client answers a request in one process."""
    planned = REQUESTS[what].planned
    return float("inf") if planned is None else SPARE_REPEATS * planned(run)


def find_problem(what: str, request: Payload, reply: Payload, client: str) -> str | None:
    """The reason why a client's reply does not count, in one clause; None if it is valid."""
    try:
        check_tensors(reply.tensors)
        if (check := REQUESTS[what].check) is not None:
            check(request, reply, client)
    except MalformedReplyError as error:
        return printable(str(error))
    except Exception as error:  # whatever a reply raises is the reply's fault
        return printable(f"it is malformed ({type(error).__name__}: {error})")
    return None
