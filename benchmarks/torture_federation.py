"""Trials of a federation of real processes, as a table: kills, cut and slow lines, full disks, malicious clients.

    nice python -m benchmarks.torture_federation [--only server,slow] [--write]

Each row runs the tests that it names, one after another, and counts how many attempts held; a test of kills makes ten.
Some need root for network namespaces and are skipped elsewhere. `--write` puts the rows into
docs/reliability-machines.md, where those of other trials stay as they are. The exit status is 1 if an attempt failed.
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
FOLDER = "tests/remote"
HEADER = ["| trial | tests | held | took |", "|---|---|---|---|"]
KILLS = 10  # of a test of kills


class Trial(NamedTuple):
    promise: str
    tests: str  # arguments of pytest; files are in FOLDER
    attempts: int = 1  # that each test makes


TRIALS = {
    "server": Trial("the server is killed", "test_kills.py -k ten_kills and server", KILLS),
    "client": Trial("a client is killed", "test_kills.py -k ten_kills and client", KILLS),
    "all": Trial("all processes are killed at once", "test_kills.py -k ten_kills and all", KILLS),
    "cut": Trial("a line is cut for 15 s", "test_machines.py -k cut"),
    "slow": Trial("lines with 200 ms delay, by the page on deploying", "test_processes.py -k typed"),
    "disk": Trial("a disk is full at a client", "test_faults.py -k full_disk"),
    "identity": Trial(
        "one key at two machines; a name of another key",
        "test_machines.py test_faults.py -k one_key or a_name_belongs",
    ),
    "version": Trial("another version of Mooring", "test_faults.py -k another_version"),
    "malformed": Trial("malformed replies, and 300 fuzzed federations", "test_malformed_replies.py"),
    "rows": Trial("a client claims 1e12 rows", "test_faults.py -k claimed"),
    "losses": Trial("messages are lost, late or doubled, 0 to 90%", "test_faults.py -k drop_out"),
    "secure": Trial("an active server and leaving clients, secure sums", "test_secure_sums.py test_secure_clients.py"),
    "unauthorized": Trial("unauthorized clients, forwarders, revoked keys", "test_http.py test_unauthorized.py"),
}


def run_trial(trial: Trial) -> tuple[str, bool]:
    """Return a row of the table, and whether every attempt held."""
    files, _, names = trial.tests.partition(" -k ")
    arguments = [f"{FOLDER}/{file}" for file in files.split()] + (["-k", names] if names else [])
    begin = time.monotonic()
    options = ["-m", "slow or not slow", "-p", "no:cacheprovider"]
    process = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *arguments], capture_output=True, text=True, check=False
    )
    lines = process.stdout.strip().splitlines()
    counts = {outcome: int(number) for number, outcome in re.findall(r"(\d+) (passed|failed|skipped|error)", lines[-1])}
    passed, total = counts.get("passed", 0), sum(counts.get(outcome, 0) for outcome in ("passed", "failed", "error"))
    print(*(line for line in lines if line.startswith(("FAILED", "ERROR"))), sep="\n", end="", file=sys.stderr)
    skipped = f" ({counts['skipped']} skipped)" if counts.get("skipped") else ""
    command = files + (f' -k "{names}"' if names else "")
    held = f"{passed * trial.attempts} of {total * trial.attempts}{skipped}"
    took = f"{time.monotonic() - begin:.0f} s"
    return f"| {trial.promise} | `{command}` | {held} | {took} |", process.returncode == 0


def write_rows(rows: dict[str, str]) -> None:
    """Put rows into the page, by their trials, beside those that it has."""
    before, _, remainder = PAGE.read_text().partition(BEGIN)
    table, _, after = remainder.partition(END)
    known = {line.split("|")[1].strip(): line for line in table.splitlines() if line.startswith("| ")}
    known |= {TRIALS[name].promise: row for name, row in rows.items()}
    lines = [known[trial.promise] for trial in TRIALS.values() if trial.promise in known]
    PAGE.write_text(f"{before}{BEGIN}\n\n" + "\n".join(HEADER + lines) + f"\n\n{END}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(TRIALS))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    print("\n".join(HEADER), flush=True)
    all_held = True
    for name in options.only.split(","):
        row, held = run_trial(TRIALS[name])
        all_held &= held
        print(row, flush=True)
        if options.write:
            write_rows({name: row})
    return 0 if all_held else 1


if __name__ == "__main__":
    sys.exit(main())
