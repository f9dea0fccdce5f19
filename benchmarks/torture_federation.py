"""Trials of a federation of real processes, as a table: kills, cut and slow lines, full disks, malicious clients.

    nice python -m benchmarks.torture_federation [--only kills,slow] [--write]

Each row runs the tests that it names, one after another, and counts how many of them held. Some need root for network
namespaces and are skipped elsewhere. `--write` puts the table into docs/reliability-machines.md.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parent.parent / "docs" / "reliability-machines.md"
BEGIN, END = (
    "<!-- written by python -m benchmarks.torture_federation --write -->",
    "<!-- end of the trials of federations -->",
)
FOLDER = "tests/engines"


class Trial(NamedTuple):
    promise: str
    tests: str  # arguments of pytest; files are in FOLDER


TRIALS = {
    "kills": Trial(
        "ten kills each of the server, the SuperLink, a client and all", "test_flower_kills.py -k ten_kills"
    ),
    "cut": Trial("a line that is cut for 15 s", "test_machines.py -k cut"),
    "slow": Trial("lines with 200 ms delay, by the page on deploying", "test_flower_processes.py -k typed"),
    "disk": Trial("a full disk at a client", "test_flower.py -k full_disk"),
    "identity": Trial(
        "one key at two machines; a name of another key", "test_machines.py test_flower.py -k one_key or a_name_belongs"
    ),
    "version": Trial("another version of Mooring", "test_flower.py -k another_version"),
    "malformed": Trial("malformed replies, and 300 fuzzed federations", "test_malformed_replies.py"),
    "rows": Trial("a client that claims 1e12 rows", "test_flower.py -k claimed"),
    "losses": Trial("messages lost, late or doubled, 0 to 90%", "test_flower.py -k drop_out"),
    "secure": Trial("an active server and leaving clients, secure sums", "test_flower_secure.py"),
    "strangers": Trial("unauthorized clients, forwarders, revoked keys", "test_gateway.py test_flower_unauthorized.py"),
}


def run_trial(trial: Trial) -> str:
    files, _, names = trial.tests.partition(" -k ")
    arguments = [f"{FOLDER}/{file}" for file in files.split()] + (["-k", names] if names else [])
    begin = time.monotonic()
    options = ["-m", "slow or not slow", "-p", "no:cacheprovider"]
    process = subprocess.run([sys.executable, "-m", "pytest", *options, *arguments], capture_output=True, text=True)
    summary = process.stdout.strip().splitlines()[-1]
    counts = {outcome: int(number) for number, outcome in re.findall(r"(\d+) (passed|failed|skipped|error)", summary)}
    passed, total = counts.get("passed", 0), sum(counts.get(outcome, 0) for outcome in ("passed", "failed", "error"))
    skipped = f" ({counts['skipped']} skipped)" if counts.get("skipped") else ""
    command = " ".join(arguments).replace(f"{FOLDER}/", "")
    return f"| {trial.promise} | `{command}` | {passed} of {total}{skipped} | {time.monotonic() - begin:.0f} s |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(TRIALS))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    rows = ["| trial | tests | held | took |", "|---|---|---|---|"]
    print("\n".join(rows), flush=True)
    for name in options.only.split(","):
        rows.append(run_trial(TRIALS[name]))
        print(rows[-1], flush=True)
    if options.write:
        before, _, remainder = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n" + "\n".join(rows) + f"\n\n{END}{remainder.partition(END)[2]}")


if __name__ == "__main__":
    main()
