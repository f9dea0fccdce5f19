"""A client's own policy: what may leave its machine, whatever run file it is given.

```toml
purposes = ["fit"]                       # of runs: fit, advise
algorithms = ["fedavg", "fedprox_personal"]
quantities = ["schema", "statistics", "updates", "losses"]    # also: models, advice
min_clients = 3                          # of a cohort
require_secure = true                    # single messages must be hidden from the server
max_rounds = 100
max_epsilon = 4.0                        # the run must bound what its global models reveal about this client
```

What is not named is allowed. `mooring join --policy policy.toml` refuses a run that asks for more, and refuses single
requests that the run file does not show.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mooring.core.errors import RequestError
from mooring.runs.runfile import RunFile
from mooring.runs.sections import FederationSection

REQUESTS_BY_QUANTITY = {
    "schema": {"survey", "tally", "names", "spread", "adopt"},
    "statistics": {"facts", "told"},
    "updates": {"visit", "secure_update"},
    "losses": {"evaluate", "secure_evaluate"},
    "models": {"models", "numbers"},
    "advice": {"asked"},
}


class Policy(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    purposes: list[str] | None = None
    algorithms: list[str] | None = None
    quantities: list[str] | None = None
    min_clients: int = Field(2, ge=2)
    require_secure: bool = False
    max_rounds: int | None = Field(None, ge=1)
    max_epsilon: float | None = Field(None, gt=0)

    def check_run(self, run: RunFile) -> None:
        """Refuse a run that asks for more than is allowed."""
        how, purpose = run.federation or FederationSection(), run.mooring.purpose
        algorithm = None if run.algorithm is None else run.algorithm.name
        if self.purposes is not None and purpose not in self.purposes:
            raise RequestError(f"this client's policy allows runs to {', '.join(self.purposes)}, not to {purpose}.")
        if self.algorithms is not None and algorithm is not None and algorithm not in self.algorithms:
            raise RequestError(f"this client's policy allows {', '.join(self.algorithms)}, not {algorithm}.")
        if self.require_secure and not how.secure:
            raise RequestError("this client's policy asks for secure = true, and the run file does not have it.")
        if how.share_models and not self._allows("models"):
            raise RequestError("this client's policy does not let models leave, and the run file has share_models.")
        many = how.clients if isinstance(how.clients, int) else len(how.clients) if how.clients else None
        if many is not None and many < self.min_clients:
            raise RequestError(f"this client's policy asks for {self.min_clients} clients, and the run has {many}.")
        if self.max_rounds is not None and run.training.rounds > self.max_rounds:
            raise RequestError(f"this client's policy allows {self.max_rounds} rounds, not {run.training.rounds}.")
        if self.max_epsilon is not None:
            self._check_epsilon(run)

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

    def check_request(self, what: str, words: dict[str, Any], name: str) -> None:
        """Refuse a request for a quantity that may not leave, or for too small a cohort."""
        quantity = next((quantity for quantity, requests in REQUESTS_BY_QUANTITY.items() if what in requests), None)
        if quantity is not None and not self._allows(quantity):
            raise RequestError(f"client '{name}' does not send {quantity}: its policy does not allow it.")
        turn = words.get("round")
        if isinstance(turn, list) and len(turn) > 3 and int(turn[3]) < self.min_clients:
            raise RequestError(
                f"client '{name}' takes part in rounds of {self.min_clients} clients or more, by its policy."
            )

    def _allows(self, quantity: str) -> bool:
        return self.quantities is None or quantity in self.quantities


def read_policy(path: str | Path) -> Policy:
    try:
        policy = Policy.model_validate(tomllib.loads(Path(path).read_text()))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read: {error}.") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise RequestError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}.") from error
    unknown = set(policy.quantities or ()) - set(REQUESTS_BY_QUANTITY)
    if unknown:
        raise RequestError(f"{path}: unknown quantity {min(unknown)!r}; known: {', '.join(REQUESTS_BY_QUANTITY)}.")
    return policy
