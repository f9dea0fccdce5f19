"""What may leave a client's machine (its policy, whatever the run file), and records of what was asked and sent.

```toml
purposes = ["fit"]                       # of runs: fit, advise
algorithms = ["fedavg", "fedprox_personal"]
quantities = ["schema", "statistics", "updates", "losses"]    # also: models, advice, results
min_clients = 3                          # of a cohort
require_secure = true                    # single messages must be hidden from the server
max_rounds = 100
max_epsilon = 4.0                        # the run must bound what its global models reveal about this client
plans = ["3f2a..."]                      # digests of plans of recommendations, as `mooring advise RUN --plan` prints
```

What is not named is allowed. `mooring join --policy policy.toml` refuses a run that asks for more, and refuses single
requests that the run file does not show.

Records of what was asked and what was sent have one line of JSON each, in a file that only its owner can read:

server   OUT.federation/audit.jsonl     clients that joined or were dismissed; each request with its clients and bytes
client   STATE/RUN/sent.jsonl           what left this machine, for a data protection officer
"""

from __future__ import annotations

import datetime
import json
import os
import tomllib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mooring.core.errors import RequestError
from mooring.core.types import JsonObject, NamedValues
from mooring.remote.messages import Payload, payload_bytes
from mooring.remote.requests import REQUESTS
from mooring.remote.secure_rule import explain_visibility
from mooring.runs.runfile import RunFile
from mooring.runs.sections import FederationSection

SENT_FILE = "sent.jsonl"
AUDIT_FILE = "audit.jsonl"
QUANTITIES = ("schema", "statistics", "updates", "losses", "models", "advice", "results")  # of policies


class Policy(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    purposes: list[str] | None = None
    algorithms: list[str] | None = None
    quantities: list[str] | None = None
    min_clients: int = Field(2, ge=2)
    require_secure: bool = False
    max_rounds: int | None = Field(None, ge=1)
    max_epsilon: float | None = Field(None, gt=0)
    plans: list[str] | None = None

    def check_run(self, run: RunFile) -> None:
        """Refuse a run that asks for more than is allowed."""
        options, purpose = run.federation or FederationSection(), run.mooring.purpose
        algorithm = None if run.algorithm is None else run.algorithm.name
        if self.purposes is not None and purpose not in self.purposes:
            raise RequestError(f"this client's policy allows runs to {', '.join(self.purposes)}, not to {purpose}.")
        if self.algorithms is not None and algorithm is not None and algorithm not in self.algorithms:
            raise RequestError(f"this client's policy allows {', '.join(self.algorithms)}, not {algorithm}.")
        if self.require_secure and purpose == "fit" and (sentence := explain_visibility(run)):  # other runs: sums only
            raise RequestError(f"this client's policy requires secure sums, and {sentence}")
        if options.share_models and not self.allows("models"):
            raise RequestError("this client's policy does not let models leave, and the run file has share_models.")
        many = (
            options.clients if isinstance(options.clients, int) else len(options.clients) if options.clients else None
        )
        if many is not None and many < self.min_clients:
            raise RequestError(f"this client's policy asks for {self.min_clients} clients, and the run has {many}.")
        if self.max_rounds is not None and run.training.rounds > self.max_rounds:
            raise RequestError(f"this client's policy allows {self.max_rounds} rounds, not {run.training.rounds}.")
        if self.max_epsilon is not None:
            self._check_epsilon(run)

    def check_plan(self, digest: str) -> None:
        """Refuse a plan of recommendations that the operator has not read."""
        if self.plans is not None and digest not in self.plans:
            raise RequestError(
                f"this client's policy does not list the plan {digest}; read it with `mooring advise RUN.toml --plan`."
            )

    def _check_epsilon(self, run: RunFile) -> None:
        from mooring.engines.privacy import DEFAULT_DELTA, compute_epsilon

        training = run.training
        if training.noise is None:
            raise RequestError(
                f"this client's policy bounds epsilon by {self.max_epsilon:g}, and the run file has no noise."
            )
        spent = compute_epsilon(training.noise, training.rounds, training.delta or DEFAULT_DELTA)
        if not spent <= self.max_epsilon:  # type: ignore[operator]
            raise RequestError(
                f"this client's policy bounds epsilon by {self.max_epsilon:g}, and the run would spend {spent:.3g}."
            )

    def check_request(self, what: str, fields: JsonObject, name: str) -> None:
        """Refuse a request for a quantity that may not leave, or for too small a cohort."""
        quantity = REQUESTS[what].quantity
        if quantity and not self.allows(quantity):
            raise RequestError(f"client '{name}' does not send {quantity}: its policy does not allow it.")
        turn = fields.get("round")
        if isinstance(turn, list) and len(turn) > 3 and int(turn[3]) < self.min_clients:
            raise RequestError(
                f"client '{name}' takes part in rounds of {self.min_clients} clients or more, by its policy."
            )

    def allows(self, quantity: str) -> bool:
        return self.quantities is None or quantity in self.quantities


def read_policy(path: str | Path) -> Policy:
    try:
        policy = Policy.model_validate(tomllib.loads(Path(path).read_text()))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read: {error}.") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise RequestError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}.") from error
    unknown = set(policy.quantities or ()) - set(QUANTITIES)
    if unknown:
        raise RequestError(f"{path}: unknown quantity {min(unknown)!r}; known: {', '.join(QUANTITIES)}.")
    return policy


def timestamp() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def append_record(path: Path, line: NamedValues) -> None:
    """Append one line of JSON to a file, which is created for its owner only."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(json.dumps({"time": timestamp(), **line}) + "\n")


def count_functions(fields: NamedValues) -> dict[str, int]:
    """How often each client function is called in a request."""
    calls = fields.get("calls")
    names = [str(call.get("name")) for call in calls.values()] if isinstance(calls, dict) else []
    return {name: names.count(name) for name in sorted(set(names))}


def describe_reply(what: str, asked: Payload, reply: Payload) -> JsonObject:
    """Describe what leaves a client: a sentence, and the shape of each array."""
    parts = {name: list(tensor.shape) for name, tensor in reply.tensors.items()}
    sent = REQUESTS[what].sends if what in REQUESTS else "an answer to an unknown request"
    line: JsonObject = {"request": what, "sent": sent}
    if "refused" in reply.fields:
        line["sent"] = "a refusal"
        line["why"] = str(reply.fields["refused"])[:500]
    turn = asked.fields.get("round")
    if isinstance(turn, list) and turn:
        line["round"] = turn[0]
    functions = count_functions(asked.fields)
    if functions and "refused" not in reply.fields:
        line["computed"] = functions
    return line | {"arrays": parts, "bytes": payload_bytes(reply)}
