"""The targets of deployments: how long advice and rounds take across processes, beside plain Flower in the same run.

    python -m benchmarks.federation_targets [--only advice,rounds,secure,flower] [--write]

Everything runs on this machine over TLS with enrolled keys; clients are lightweight (`benchmarks.federation_capacity`),
and every round is evaluated. Plain Flower is the app of `benchmarks.federation`: Flower's own strategy and nodes. The
load of the machine before each measurement is in the table: by the clock, a busy machine is slower. `--write` puts the
table into docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import federation as plain_flower
from benchmarks.federation_capacity import measure
from mooring.data.datasets import EMBEDDED_TABLES
from mooring.data.table_sources import read_source
from mooring.remote.disclosure import AUDIT_FILE
from mooring.remote.serve import server_folder

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
BEGIN, END = "<!-- written by python -m benchmarks.federation_targets --write -->", "<!-- end of the targets -->"
CAPACITY = (3, 10, 50, 100, 200)
ROUND_SECONDS = {3: 0.4, 50: 3.0}
MAX_SERVER_MS, MAX_OVERHEAD_BYTES, MAX_REQUESTS = 20.0, 2_000, 2.0
ADVICE_SECONDS, ADVICE_MESSAGES = 45.0, 60
SECURE_STEPS, SECURE_EXTRA = 20_000, 0.10  # steps of a client's update: about a second of work
FLOWER_ROUNDS = 3


class Line(NamedTuple):
    what: str
    value: str
    target: str
    is_held: bool | None  # None where there is no target
    load: float

    def __str__(self) -> str:
        verdict = {True: f"{self.target}: held", False: f"{self.target}: **missed**", None: self.target}[self.is_held]
        return f"| {self.what} | {self.value} | {verdict} | {self.load:.1f} |"


def load() -> float:
    return os.getloadavg()[0]


def measure_advice() -> Iterator[Line]:
    """Advice on the heart table, one process per hospital, as `mooring federation up` does it."""
    before = load()
    with tempfile.TemporaryDirectory(prefix="targets-") as name:
        folder, declaration, table = Path(name), EMBEDDED_TABLES["heart"], read_source("heart")
        (folder / "clients").mkdir()
        groups = table.frame.groupby(declaration.client)
        for client, rows in groups:
            rows.drop(columns=declaration.client).to_csv(folder / "clients" / f"{client}.csv", index=False)
        run, out = folder / "run.toml", folder / "out"
        run.write_text(
            f'[mooring]\npurpose = "advise"\n[data]\nsource = "{folder / "clients"}"\ntarget = "{declaration.target}"\n'
            f"[training]\nthreads = 1\n[federation]\nclients = {len(groups)}\n"
        )
        arguments = ["federation", "up", run, "--client-dir", folder / "clients", "--out", out]
        begun = time.monotonic()
        subprocess.run([sys.executable, "-m", "mooring", *map(str, arguments)], check=True, capture_output=True)
        seconds = time.monotonic() - begun
        lines = [json.loads(line) for line in (server_folder(out) / AUDIT_FILE).read_text().splitlines()]
        messages = sum(line["event"] == "asked" for line in lines)
    who = f"advice on heart, {len(groups)} clients"
    yield Line(
        f"{who}, from the command to the report", f"{seconds:.1f} s", "at most 45 s", seconds <= ADVICE_SECONDS, before
    )
    target = f"about {ADVICE_MESSAGES}"
    yield Line(f"{who}: messages per client", str(messages), target, messages <= 1.1 * ADVICE_MESSAGES, before)


def measure_rounds() -> Iterator[Line]:
    """Lightweight clients: the round, the server's processor, bytes and requests."""
    for clients in CAPACITY:
        before = load()
        result = measure(clients)
        seconds, target = result["round_seconds"], ROUND_SECONDS.get(clients)
        is_held = None if target is None else seconds <= target
        target_text = "" if target is None else f"at most {target:g} s"
        yield Line(f"a round of {clients} clients", f"{seconds:.3f} s", target_text, is_held, before)
        cpu = result["server_cpu_ms_per_client_round"]
        what = f"server's processor per client and round, {clients} clients"
        yield Line(what, f"{cpu:.1f} ms", f"at most {MAX_SERVER_MS:g} ms", cpu <= MAX_SERVER_MS, before)
        if clients == CAPACITY[0]:
            size, requests = result["overhead_bytes_per_client_round"], result["requests_per_message"]
            what = "bytes beside tensors per client and round (an update and an evaluation)"
            yield Line(what, f"{size:,.0f}", "at most 2,000", size <= MAX_OVERHEAD_BYTES, before)
            yield Line(f"of these per message, {clients} clients", f"{size / 2:,.0f}", "", None, before)
            what = "requests per message, the server's own included"
            yield Line(what, f"{requests:.2f}", "at most 2", requests <= MAX_REQUESTS, before)


def measure_secure() -> Iterator[Line]:
    """`secure = true` beside the same run without it."""
    for steps in (10, SECURE_STEPS):
        before, rounds = load(), 100 if steps == 10 else 8
        plain, secure = (
            measure(3, is_secure, rounds, steps, per_process=1)["round_seconds"] for is_secure in (False, True)
        )
        extra = secure / plain - 1
        value = f"{100 * extra:.0f}% ({secure:.3f} s instead of {plain:.3f} s)"
        what = f"extra time of secure sums, 3 clients, updates of {steps:,} steps"
        yield Line(what, value, "below 10%", extra < SECURE_EXTRA, before)


def measure_plain_flower() -> Iterator[Line]:
    """An app by hand with Flower's own strategy and nodes."""
    before = load()
    with tempfile.TemporaryDirectory(prefix="targets-") as name, plain_flower.Watch() as watch:
        tables = plain_flower.write_tables(Path(name), 3)
        cost = plain_flower.by_hand(Path(name), tables, FLOWER_ROUNDS, 3, watch)
    value = f"{cost['ms'] / 1000:.1f} s ({cost['computed'] / 1000:.1f} s computed)"
    yield Line("a round of 3 clients in plain Flower, its own nodes", value, "", None, before)


PARTS = {
    "advice": measure_advice,
    "rounds": measure_rounds,
    "secure": measure_secure,
    "flower": measure_plain_flower,
}


def write(rows: list[str]) -> None:
    """Put rows into the table of the page, in place of those that measured the same before."""
    before, _, remainder = PAGE.read_text().partition(BEGIN)
    table, _, after = remainder.partition(END)
    known = {line.split("|")[1]: line for line in [*table.splitlines(), *rows] if line.startswith("|")}
    PAGE.write_text(f"{before}{BEGIN}\n\n" + "\n".join(known.values()) + f"\n\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--write", action="store_true")
    options: Any = parser.parse_args()
    rows = ["| what | measured | target | load before |", "|---|---|---|---|"]
    print("\n".join(rows), flush=True)
    for part in options.only.split(","):
        for line in PARTS[part]():
            rows.append(str(line))
            print(line, flush=True)
    if options.write:
        write(rows)


if __name__ == "__main__":
    main()
