"""Number of clients that one server can handle: lightweight embedded clients, several in one process, over TLS.

    python -m benchmarks.federation_capacity [--clients 3,10,50] [--rounds 6] [--secure]

A round is ten steps of gradient descent on each client's own 20 rows, and all clients' losses under the mean. The
script prints the median round by the server's clock and the CPU time of the server (the SuperLink and its app) per
client and round. The clients run on the same machine.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from mooring.engines.flower import child_process, federation, join, keys
from mooring.runs.directory import open_run

ROWS, COLUMNS = 20, 5
CLIENTS_PER_PROCESS = 25


def quiet(*messages: Any) -> None:
    pass


def write_tables(folder: Path, clients: int) -> list[Path]:
    rng = np.random.default_rng(0)
    folder.mkdir()
    for i in range(clients):
        x = rng.normal(size=(ROWS, COLUMNS))
        frame = pd.DataFrame(x, columns=[f"x{j}" for j in range(COLUMNS)])
        frame.assign(y=x @ np.arange(COLUMNS) + rng.normal(size=ROWS)).to_csv(folder / f"c{i:04d}.csv", index=False)
    return sorted(folder.iterdir())


def join_all(run: Path, files: list[Path], folder: Path, port: int) -> None:
    """Join as several clients, one thread each, in this process."""

    def join_client(file: Path) -> None:
        join.join(
            run,
            file,
            folder / "states" / file.stem,
            server=f"127.0.0.1:{port}",
            ca=folder / "keys" / keys.CA,
            key=folder / "keys" / keys.CLIENTS / file.stem,
            peers=folder / "keys" / keys.PEERS,
            embedded=True,
            report=quiet,
        )

    threads = [threading.Thread(target=join_client, args=(file,), daemon=True) for file in files]
    for thread in threads:
        thread.start()
        time.sleep(0.02)
    for thread in threads:
        thread.join()


def server_seconds(folder: Path) -> float:
    """Return the CPU time of the SuperLink and its app."""
    total = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if str(folder).encode() in command + environment and (b"superlink" in command or b"serverapp" in command):
                total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def measure(clients: int, rounds: int, secure: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="capacity-") as name:
        folder = Path(name)
        files = write_tables(folder / "tables", clients)
        keys.init(folder / "keys", [file.stem for file in files])
        run = folder / "run.toml"
        run.write_text(
            f'[data]\nsource = "{folder / "tables"}"\ntarget = "y"\n'
            '[algorithm]\nname = "fedavg"\neta = 0.05\nsteps = 10\n'
            f"[training]\nrounds = {rounds}\nevaluate_every = 1\nbaselines = false\nthreads = 1\n[federation]\n"
            f"clients = {clients}\nsecure = {str(secure).lower()}\n"
        )
        port, ticks = child_process.find_free_port(), list[tuple[int, float, float]]()
        context = multiprocessing.get_context("spawn")
        groups = [files[k : k + CLIENTS_PER_PROCESS] for k in range(0, clients, CLIENTS_PER_PROCESS)]
        processes = [context.Process(target=join_all, args=(run, group, folder, port), daemon=True) for group in groups]
        for process in processes:
            process.start()

        def record_progress(label: str, done: int, total: int) -> None:
            ticks.append((done, time.monotonic(), server_seconds(folder)))

        begin = time.monotonic()
        out = folder / "out"
        federation.serve(
            run, out, key_folder=folder / "keys", port=port, clients=clients, report=quiet, on_progress=record_progress
        )
        seconds = json.loads((out / "seconds.json").read_text())["rounds"]
        first, last = ticks[0], ticks[-1]
        cpu = (last[2] - first[2]) / max(last[0] - first[0], 1) / clients
        for process in processes:
            process.join(60)
            process.kill()
        rounds_table = open_run(out).rounds
        assert (rounds_table["accepted"] == clients).all()
        return {
            "clients": clients,
            "round_seconds": statistics.median(seconds[1:]),
            "server_cpu_ms_per_client_round": 1000 * cpu,
            "until_first_round": first[1] - begin,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="3,10,50")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--secure", action="store_true")
    options = parser.parse_args()
    for clients in map(int, options.clients.split(",")):
        result = measure(clients, options.rounds, options.secure)
        print(
            f"{clients:4d} clients: {result['round_seconds']:.3f} s a round, "
            f"{result['server_cpu_ms_per_client_round']:.1f} ms of the server's processor per client and round, "
            f"{result['until_first_round']:.1f} s to the first round",
            flush=True,
        )


if __name__ == "__main__":
    main()
