"""The registration of claims: what is claimed, how it is decided and on which data, written down before the run.

Each paper's folder has a `claims.toml`:

    [run.fig1]   what decides the claims of apfl-fig1: preset, data, label ("paper's data", which generators are, "part
                 of it" or "stand-in"), clients, rounds, repeats, first_seed
    [[claim]]    experiment, id, version, quote (a sentence of the paper), place (where it is), test (the statistic, its
                 comparison and threshold in words) and check (a digest of the same in code)

A registration changes only as a new version with a reason; old versions stay in the file, with their results. A record
names the digests of the registrations that it answers. `mooring reproduce` refuses to write a record of an experiment
with a claim that is not registered as it stands in the code.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from mooring.core.errors import RequestError
from mooring.experiments.base import catalog

FILE = "claims.toml"
PAPERS_DATA, PART, STAND_IN = LABELS = ("paper's data", "part of it", "stand-in")
RUN_FIELDS = ("preset", "data", "label", "clients", "rounds", "repeats", "first_seed")
CLAIM_FIELDS = ("experiment", "id", "version", "quote", "place", "test", "check")
OPTIONAL = ("reason", "result", "level", "not_run", "takes", "tried")


@dataclass(frozen=True)
class Registration:
    """One version of one claim, with the run that decides it."""

    paper: str
    experiment: str  # as in apfl-fig1
    id: str
    claim: Mapping[str, Any]
    run: Mapping[str, Any]

    @property
    def version(self) -> int:
        return int(self.claim["version"])

    @property
    def level(self) -> float:
        """Of the interval: 0.95, and stricter for a version that has more repeats than the one before."""
        return float(self.claim.get("level", 0.95))

    @property
    def not_run(self) -> str:
        """Why nothing decides it, where the data or the compute are not at hand."""
        return str(self.claim.get("not_run") or self.run.get("not_run") or "")

    @property
    def digest(self) -> str:
        """Of everything that was fixed before the run."""
        fixed = {name: self.claim[name] for name in CLAIM_FIELDS} | {"level": self.level}
        what = {"paper": self.paper, "claim": fixed, "run": {name: self.run[name] for name in RUN_FIELDS}}
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


@cache
def read_registrations(paper: str) -> tuple[Registration, ...]:
    """All versions of all claims of a paper, in the order of its file."""
    given = _given(paper)
    return tuple(_read(paper, claim, given["run"]) for claim in given.get("claim", ()))


def newest_registrations(paper: str) -> dict[tuple[str, str], Registration]:
    """The newest version of each claim, by experiment and claim."""
    found: dict[tuple[str, str], Registration] = {}
    for one in read_registrations(paper):
        key = (one.experiment, one.id)
        if key not in found or found[key].version < one.version:
            found[key] = one
    return found


def require_registered(entry: catalog.CatalogEntry) -> dict[str, Registration]:
    """The registrations of an experiment's claims as they stand in the code, by claim; refused where one is missing."""
    known = {key[1]: one for key, one in newest_registrations(entry.paper).items() if key[0] == entry.id}
    for claim in entry.experiment.claims:
        one = known.get(claim.id)
        if one is None:
            raise RequestError(
                f"{entry.id}: claim '{claim.id}' is not registered. Add it to {entry.paper}/{FILE} with its quotation, "
                "test and repeats, and commit it before the run that decides it."
            )
        if one.claim["check"] != claim.check.digest or one.claim["test"] != claim.says:
            raise RequestError(
                f"{entry.id}: claim '{claim.id}' is tested otherwise than registered (version {one.version}); register "
                f'a new version with its reason: check = "{claim.check.digest}".'
            )
    return {claim.id: known[claim.id] for claim in entry.experiment.claims}


def apply_registration(
    entry: catalog.CatalogEntry, preset: str
) -> tuple[catalog.CatalogEntry, dict[str, Registration]]:
    """The experiment with the registered repeats and seeds, and its registrations; none where another preset decides.

    Refused where a claim is not registered as it stands in the code.
    """
    known = require_registered(entry)
    runs = {json.dumps(dict(one.run), sort_keys=True): one.run for one in known.values()}
    if len(runs) > 1:
        raise RequestError(
            f"{entry.id}: its claims are registered with {len(runs)} different runs; one must decide all."
        )
    run = next(iter(runs.values()))
    if run["preset"] != preset:
        return entry, {}
    size = replace(entry.experiment.presets[preset], repeats=run["repeats"], first_seed=run["first_seed"])
    sizes = {**entry.experiment.presets, preset: size}
    return entry._replace(experiment=replace(entry.experiment, presets=sizes)), known


def describe_registrations(paper: str) -> dict[str, Any]:
    """What pages show of a paper's registrations, as plain data: claims in the order of the file, newest versions."""
    titles = {entry.id: entry.experiment.title for entry in catalog.select_experiments(paper)}
    newest = newest_registrations(paper)
    claims = [
        {
            **{name: one.run[name] for name in RUN_FIELDS},
            **{name: one.claim[name] for name in CLAIM_FIELDS},
            "experiment": one.experiment,
            "title": titles.get(one.experiment, ""),
            "digest": one.digest,
            "not_run": one.not_run,
            "takes": one.claim.get("takes") or one.run.get("takes", ""),
            "tried": one.claim.get("tried", ""),
            "reason": one.claim.get("reason", ""),
            "current": newest[one.experiment, one.id] is one,
        }
        for one in read_registrations(paper)
    ]
    return {"paper": paper, "believe": _given(paper).get("believe", ""), "claims": claims}


@cache
def _given(paper: str) -> dict[str, Any]:
    file = resources.files(f"{catalog.ROOT}.{paper}") / FILE
    return tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _read(paper: str, claim: Mapping[str, Any], runs: Mapping[str, Mapping[str, Any]]) -> Registration:
    run = runs[claim.get("run", claim["experiment"])]
    missing = [name for name in CLAIM_FIELDS if name not in claim] + [name for name in RUN_FIELDS if name not in run]
    unknown = set(claim) - {*CLAIM_FIELDS, *OPTIONAL, "run"} | set(run) - {*RUN_FIELDS, *OPTIONAL}
    if missing or unknown or run["label"] not in LABELS:
        raise RequestError(
            f"{paper}/{FILE}: claim {claim.get('id')!r} lacks {missing}, has unknown {sorted(unknown)}, or its label "
            f"{run.get('label')!r} is not one of {', '.join(LABELS)}."
        )
    return Registration(paper, f"{paper}-{claim['experiment']}", claim["id"], claim, run)
