"""Registration of claims: the claim, the test that decides it and the data, committed before the run.

Each paper's folder has a `claims.toml`:

    [run.fig1]   the run that decides the claims of apfl-fig1: preset, data, label ("paper's data", which includes the
                 paper's generators, "part of it" or "stand-in"), clients, rounds, repeats, first_seed
    [[claim]]    experiment, id, version, quote (a sentence of the paper), place (where it is), test (the statistic, its
                 comparison and threshold in words) and check (the digest of the test in the code)

A registration changes only as a new version with a reason; old versions stay in the file, with their results. A record
contains the digests of the registrations that it answers. `mooring reproduce` refuses an experiment if a claim is not
registered as it is in the code.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources

from mooring.core.errors import RequestError
from mooring.core.types import JsonObject, NamedValues
from mooring_papers.base import catalog

CLAIMS_FILE = "claims.toml"
PAPERS_DATA, PART_OF_IT, STAND_IN = LABELS = ("paper's data", "part of it", "stand-in")
RUN_FIELDS = ("preset", "data", "label", "clients", "rounds", "repeats", "first_seed")
CLAIM_FIELDS = ("experiment", "id", "version", "quote", "place", "test", "check")
OPTIONAL_FIELDS = ("reason", "result", "level", "not_run", "takes", "tried")


@dataclass(frozen=True)
class Registration:
    """One version of one claim, with the run that decides it."""

    paper: str
    experiment: str  # as in apfl-fig1
    id: str
    claim: NamedValues
    run: NamedValues

    @property
    def version(self) -> int:
        return int(self.claim["version"])

    @property
    def level(self) -> float:
        """Confidence level of the interval: 0.95, and higher for a version with more repeats."""
        return float(self.claim.get("level", 0.95))

    @property
    def not_run(self) -> str:
        """Reason why the claim is undecided, if the data or the compute are not available."""
        return str(self.claim.get("not_run") or self.run.get("not_run") or "")

    @property
    def digest(self) -> str:
        """Digest of everything that was fixed before the run."""
        fixed = {name: self.claim[name] for name in CLAIM_FIELDS} | {"level": self.level}
        content = {"paper": self.paper, "claim": fixed, "run": {name: self.run[name] for name in RUN_FIELDS}}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


@cache
def read_registrations(paper: str) -> tuple[Registration, ...]:
    """Return all versions of all claims of a paper, in the order of its file."""
    content = _read_file(paper)
    return tuple(_make_registration(paper, claim, content["run"]) for claim in content.get("claim", ()))


def newest_registrations(paper: str) -> dict[tuple[str, str], Registration]:
    """Return the newest version of each claim, by experiment and claim."""
    newest: dict[tuple[str, str], Registration] = {}
    for registration in read_registrations(paper):
        key = (registration.experiment, registration.id)
        if key not in newest or newest[key].version < registration.version:
            newest[key] = registration
    return newest


def require_registered(entry: catalog.CatalogEntry) -> dict[str, Registration]:
    """Return the registrations of an experiment's claims, by claim; refuse claims that the code tests otherwise."""
    registered = {id_: value for (name, id_), value in newest_registrations(entry.paper).items() if name == entry.id}
    for claim in entry.experiment.claims:
        registration = registered.get(claim.id)
        if registration is None:
            raise RequestError(
                f"{entry.id}: claim '{claim.id}' is not registered. Add it to {entry.paper}/{CLAIMS_FILE} with its "
                "quotation, test and repeats, and commit it before the run that decides it."
            )
        if registration.claim["check"] != claim.check.digest or registration.claim["test"] != claim.says:
            raise RequestError(
                f"{entry.id}: claim '{claim.id}' is tested otherwise than registered (version {registration.version}); "
                f'register a new version with its reason: check = "{claim.check.digest}".'
            )
    return {claim.id: registered[claim.id] for claim in entry.experiment.claims}


def apply_registration(
    entry: catalog.CatalogEntry, preset: str
) -> tuple[catalog.CatalogEntry, dict[str, Registration]]:
    """Return the experiment with the registered repeats and seeds, and its registrations.

    If another preset decides, the experiment is unchanged and there are no registrations. An experiment is
    refused if a claim is not registered as it is in the code.
    """
    registered = require_registered(entry)
    runs = {json.dumps(dict(value.run), sort_keys=True): value.run for value in registered.values()}
    if len(runs) > 1:
        raise RequestError(
            f"{entry.id}: its claims are registered with {len(runs)} different runs; a single run must decide all."
        )
    run = next(iter(runs.values()))
    if run["preset"] != preset:
        return entry, {}
    size = replace(entry.experiment.presets[preset], repeats=run["repeats"], first_seed=run["first_seed"])
    sizes = {**entry.experiment.presets, preset: size}
    return entry._replace(experiment=replace(entry.experiment, presets=sizes)), registered


def describe_registrations(paper: str) -> JsonObject:
    """Return a paper's registrations as plain data for its page: all versions, in the order of the file."""
    titles = {entry.id: entry.experiment.title for entry in catalog.select_experiments(paper)}
    newest = newest_registrations(paper)
    claims = [
        {
            **{name: value.run[name] for name in RUN_FIELDS},
            **{name: value.claim[name] for name in CLAIM_FIELDS},
            "experiment": value.experiment,
            "title": titles.get(value.experiment, ""),
            "digest": value.digest,
            "not_run": value.not_run,
            "takes": value.claim.get("takes") or value.run.get("takes", ""),
            "tried": value.claim.get("tried", ""),
            "reason": value.claim.get("reason", ""),
            "current": newest[value.experiment, value.id] is value,
        }
        for value in read_registrations(paper)
    ]
    return {"paper": paper, "believe": _read_file(paper).get("believe", ""), "claims": claims}


@cache
def _read_file(paper: str) -> JsonObject:
    file = resources.files(f"{catalog.ROOT}.{paper}") / CLAIMS_FILE
    return tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _make_registration(paper: str, claim: NamedValues, runs: Mapping[str, NamedValues]) -> Registration:
    run = runs[claim.get("run", claim["experiment"])]
    missing = [name for name in CLAIM_FIELDS if name not in claim] + [name for name in RUN_FIELDS if name not in run]
    unknown = set(claim) - {*CLAIM_FIELDS, *OPTIONAL_FIELDS, "run"} | set(run) - {*RUN_FIELDS, *OPTIONAL_FIELDS}
    if missing or unknown or run["label"] not in LABELS:
        raise RequestError(
            f"{paper}/{CLAIMS_FILE}: claim {claim.get('id')!r} lacks {missing}, has unknown {sorted(unknown)}, or its "
            f"label {run.get('label')!r} is not one of {', '.join(LABELS)}."
        )
    return Registration(paper, f"{paper}-{claim['experiment']}", claim["id"], claim, run)
