"""Results of the experiments from before their claims were registered, read from the repository's history.

    python -m benchmarks.reproduction_history papers/docs/reproduction/history.json

Each claim of each record that was committed to docs/reproduction up to LAST, with its wording, repeats, data and result
at that commit; an unchanged record is listed once. The pages show them folded, including dropped claims.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from mooring.core.papers import paper_key
from mooring.runs.atomic_files import write_json
from mooring_papers.report.markdown import format_key_number

FOLDER = "docs/reproduction"  # where they were at that time
LAST = "44b69c4"  # the last commit before the registration


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout


def read_result(claim: dict[str, Any]) -> str:
    """Return the claim's result; the oldest records have two values only."""
    return claim["word"] if "word" in claim else "held" if claim["held"] else "not held"


def history() -> list[dict[str, Any]]:
    """Return all versions of all claims, oldest first."""
    versions: list[dict[str, Any]] = []
    latest: dict[tuple[str, str, str], dict[str, Any]] = {}
    for line in reversed(git("log", "--format=%h %as", LAST, "--", FOLDER).splitlines()):
        commit, date = line.split()
        for name in git("ls-tree", "--name-only", commit, f"{FOLDER}/").splitlines():
            if not name.endswith(".json"):
                continue
            record = json.loads(git("show", f"{commit}:{name}"))
            experiment = paper_key(record["experiment"])
            for claim in record["claims"]:
                version = {
                    "experiment": experiment,
                    "preset": record["preset"],
                    "claim": claim["claim"],
                    "says": claim["says"],
                    "word": read_result(claim),
                    "repeats": record["repeats"],
                    "data": record["data"],
                    "decided by": format_key_number(claim["worst"]) if "worst" in claim else "",
                }
                key = (experiment, record["preset"], claim["claim"])
                if latest.get(key) != version:
                    latest[key] = version
                    versions.append({"commit": commit, "date": date} | version)
    return versions


if __name__ == "__main__":
    rows = history()
    write_json(sys.argv[1], {"until": LAST, "results": rows})
    print(f"{len(rows)} results of {len({(row['experiment'], row['claim']) for row in rows})} claims")
