"""Number of clients that one server can handle: lightweight clients, several in one process, over TLS.

    python -m benchmarks.federation_capacity [--clients 3,10,50] [--rounds 200] [--secure]

A round is ten steps of gradient descent on each client's own 20 rows, and all clients' losses under the mean. The
script prints the median round by the server's clock, the CPU time of the server (the SuperLink and its app) per client
and round, and what the kernel counted on the clients' connections beside the tensors. All on one
machine.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import ssl
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pandas as pd

from mooring.remote import join, keys, serve
from mooring.remote.disclosure import AUDIT_FILE
from mooring.runs.directory import open_run

ROWS, COLUMNS = 20, 5
CLIENT_ROUNDS = 600  # that a measurement takes at least
LAST_SAMPLE_SHARE = 0.8  # of the rounds: connections are closed at the end
MESSAGES_PER_ROUND = 2  # an update and an evaluation, under masks or not


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
            report=quiet,
        )

    threads = [threading.Thread(target=join_client, args=(file,), daemon=True) for file in files]
    for thread in threads:
        thread.start()
        time.sleep(0.02)
    for thread in threads:
        thread.join()


def wire_bytes(port: int, processes: set[int]) -> int:
    """Bytes of the open connections of these processes to a port, TLS and headers included, in both directions."""
    lines = subprocess.run(["ss", "-tinpH", f"dport = :{port}"], capture_output=True, text=True, check=True).stdout
    total = 0
    rows = lines.splitlines()
    for first, second in zip(rows[::2], rows[1::2]):
        if any(f"pid={number}," in first for number in processes):
            total += sum(int(number) for number in re.findall(r"bytes_(?:sent|received):(\d+)", second))
    return total


def count_requests(port: int, folder: Path, ca: Path) -> float:
    """Requests of clients that the server has seen."""
    token = next(folder.glob("*.federation/metrics.token")).read_text().strip()
    metrics = httpx.get(
        f"https://127.0.0.1:{port}/metrics",
        headers={"Authorization": f"Bearer {token}"},
        verify=ssl.create_default_context(cafile=str(ca)),
        trust_env=False,
    ).text
    return float(re.search(r"^mooring_http_requests_total (\S+)", metrics, re.MULTILINE).group(1))  # type: ignore[union-attr]


def count_messages(out: Path) -> tuple[int, int]:
    """Messages that clients have answered, and the bytes of tensors in them, both ways."""
    lines = [json.loads(line) for line in (serve.server_folder(out) / AUDIT_FILE).read_text().splitlines()]
    requests = [line for line in lines if line["event"] == "asked"]
    return sum(len(line["clients"]) for line in requests), sum(line["sent"] + line["received"] for line in requests)


class Sample(NamedTuple):
    """What was counted during a run."""

    clock: float
    server_cpu: float
    requests: float
    messages: int
    tensor_bytes: int
    wire_bytes: int


def measure(
    clients: int, secure: bool = False, rounds: int | None = None, steps: int = 10, per_process: int = 25
) -> dict[str, Any]:
    """Measure one federation; `steps` of gradient descent are a client's work in a round."""
    rounds = rounds or max(8, CLIENT_ROUNDS // clients)
    with tempfile.TemporaryDirectory(prefix="capacity-") as name:
        folder = Path(name)
        files = write_tables(folder / "tables", clients)
        keys.init(folder / "keys", [file.stem for file in files])
        run = folder / "run.toml"
        run.write_text(
            f'[data]\nsource = "{folder / "tables"}"\ntarget = "y"\n'
            '[algorithm]\nname = "fedavg"\neta = 0.05\n'
            f"steps = {steps}\n"
            f"[training]\nrounds = {rounds}\nevaluate_every = 1\nbaselines = false\nthreads = 1\n[federation]\n"
            f"clients = {clients}\nsecure = {str(secure).lower()}\n"
        )
        port, samples, out = serve.find_free_port(), list[Sample](), folder / "out"
        context = multiprocessing.get_context("spawn")
        groups = [files[k : k + per_process] for k in range(0, clients, per_process)]
        processes = [context.Process(target=join_all, args=(run, group, folder, port), daemon=True) for group in groups]
        for process in processes:
            process.start()

        def record_progress(label: str, done: int, total: int) -> None:
            if label == "fedavg" and done <= LAST_SAMPLE_SHARE * rounds:
                requests = count_requests(port, folder, folder / "keys" / keys.CA)
                wire = wire_bytes(port, {process.pid for process in processes if process.pid})
                sample = time.monotonic(), time.process_time(), requests, *count_messages(out), wire
                samples.append(Sample(*sample))

        begin = time.monotonic()
        serve.serve(
            run, out, key_folder=folder / "keys", port=port, clients=clients, report=quiet, on_progress=record_progress
        )
        seconds = json.loads((out / "seconds.json").read_text())["rounds"]
        first, last = samples[0], samples[-1]
        client_rounds = (last.messages - first.messages) / MESSAGES_PER_ROUND
        overhead = (last.wire_bytes - first.wire_bytes) - (last.tensor_bytes - first.tensor_bytes)
        for process in processes:
            process.join(60)
            process.kill()
        rounds_table = open_run(out).rounds
        assert (rounds_table["accepted"] == clients).all()
        return {
            "clients": clients,
            "round_seconds": statistics.median(seconds[1:]),
            "server_cpu_ms_per_client_round": 1000 * (last.server_cpu - first.server_cpu) / client_rounds,
            "requests_per_message": (last.requests - first.requests) / (last.messages - first.messages),
            "overhead_bytes_per_client_round": overhead / client_rounds,
            "until_first_round": first.clock - begin,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="3,10,50")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--secure", action="store_true")
    options = parser.parse_args()
    for clients in map(int, options.clients.split(",")):
        result = measure(clients, options.secure, options.rounds)
        print(
            f"{clients:4d} clients: {result['round_seconds']:.3f} s a round, "
            f"{result['server_cpu_ms_per_client_round']:.1f} ms of the server's processor per client and round, "
            f"{result['requests_per_message']:.2f} requests per message, "
            f"{result['overhead_bytes_per_client_round']:.0f} bytes beside tensors per client and round, "
            f"{result['until_first_round']:.1f} s to the first round",
            flush=True,
        )


if __name__ == "__main__":
    main()
