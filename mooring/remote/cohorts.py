"""A client's checks before it takes part in masked sums of a fixed cohort, in a fit or a recommendation.

The statements of a cohort must be signed by the enrolled keys of its clients. Sums of two runs over the same rows
differ by the clients that are not in both, and sums of the same clients by the rows that have changed, so that both
need the agreement of the client's operator: each client records the file, a digest of the rows and the clients of its
runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mooring.core.errors import RequestError
from mooring.core.types import JsonObject
from mooring.remote.client_requests import client_table_digest
from mooring.remote.messages import Payload
from mooring.remote.secure_sums import is_signed, sign
from mooring.remote.transcript import Cohort, check_cohort
from mooring.runs.atomic_files import read_json, write_json

if TYPE_CHECKING:
    from mooring.remote.client_node import ClientNode

SUMS_FOLDER, KEY_FILE, COHORT_FILE = "sums", "key.json", "cohort.json"  # of a run at a client
COHORTS_FILE = "cohorts.json"  # of all runs of a client: the file, its rows' digest, and the clients it took part with


def sign_statement(node: ClientNode, statement: JsonObject) -> Payload:
    """Return a statement and its signature, which is empty where the client has no enrolled key."""
    signature = "" if node.identity is None else sign(node.identity.private, statement)
    return Payload({"statement": statement, "signature": signature})


def check_statements(node: ClientNode, payload: Payload, own: JsonObject) -> Cohort:
    """Return the cohort of statements that agree with this client's own and are signed by enrolled keys."""
    statements, signatures = payload.fields["statements"].get("list"), payload.fields["signatures"]
    if not isinstance(statements, list):
        raise RequestError(f"client '{node.name}' refuses a cohort without a list of statements.")
    cohort = check_cohort(statements, own, 0 if node.policy is None else node.policy.min_clients)
    if node.identity is not None:
        for statement in cohort.statements:
            name = str(statement["name"])
            public = node.identity.own if name == node.name else node.identity.peers.get(name)
            if public is None or not is_signed(public, statement, signatures.get(name)):
                raise RequestError(f"the statement of client '{name}' is not signed by its enrolled key.")
    return cohort


def related_runs(node: ClientNode) -> tuple[JsonObject, list[JsonObject], list[JsonObject]]:
    """Return this run's rows, and the former runs of this client: over the same file or rows, and others."""
    path = _cohorts_file(node)
    own: JsonObject = {"file": str(node.path.resolve()), "table": client_table_digest(node)}
    known: list[JsonObject] = read_json(path)["runs"] if path.exists() else []
    related = [run for run in known if run["file"] == own["file"] or run["table"] == own["table"]]
    return own, related, [run for run in known if run not in related]


def _cohorts_file(node: ClientNode) -> Path:
    return node.folder.parent / COHORTS_FILE


def check_same_rows(node: ClientNode) -> None:
    """Refuse sums over rows that have changed: the difference of two such runs shows them."""
    own, related, _ = related_runs(node)
    if not node.again and any(run["table"] != own["table"] for run in related):
        raise RequestError(
            f"the rows of client '{node.name}' have changed since a former run; the difference of both runs shows the "
            "rows that changed. Its operator can agree with `mooring join --again`."
        )


def check_same_clients(node: ClientNode, cohort: Cohort) -> None:
    """Refuse sums over the same rows with other clients: two such runs differ by the clients that are not in both."""
    _, related, _ = related_runs(node)
    if not node.again and any(run["clients"] != cohort.names for run in related):
        raise RequestError(
            f"client '{node.name}' has taken part with the same rows and other clients; the difference of both runs "
            "shows these clients. Its operator can agree with `mooring join --again`."
        )


def record_cohort(node: ClientNode, cohort: Cohort) -> None:
    """Check rows and clients once more, and record them; this precedes the first masked answer of a run."""
    check_same_rows(node)
    check_same_clients(node, cohort)
    own, _, others = related_runs(node)
    write_json(_cohorts_file(node), {"runs": [*others, own | {"clients": cohort.names}]})
