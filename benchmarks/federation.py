"""Time of a round of a federation of processes, compared with a minimal hand-written Flower app that does the same
work.

    python -m benchmarks.federation [--clients 3,10,20] [--rounds 5] [--ways mooring,hand] [--evaluate 1]

Processes on this machine; those of Mooring over TLS, with enrolled keys. A round is ten steps of gradient descent on
each client's own table (100 rows, 5 columns), the weighted mean, and all clients' losses under it. Times are medians of
the time between rounds, without the first, and the mean CPU time of all processes per round: on a busy machine the
wall-clock time depends on the load. Megabytes are those of the server and of the largest client, after the second round
and after the last: their difference over many rounds is a leak
(`--clients 20 --rounds 100 --ways mooring --evaluate 100`).

The hand-written app follows Flower's own tutorial: `FedAvg.start` and a stock node for each client.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from mooring.remote import flower, join, keys, serve
from mooring.runs.directory import open_run

COLUMNS, ROWS, STEPS, ETA = 5, 100, 10, 0.05
EVERY = 0.2  # seconds between two measurements of all processes

SERVER = """
import json, time
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
import numpy as np

app = ServerApp()

class Timed(FedAvg):
    def aggregate_evaluate(self, server_round, replies):
        out = super().aggregate_evaluate(server_round, replies)
        with open(self.progress, "a") as file:
            file.write(json.dumps({"kind": "round", "time": time.time()}) + "\\n")
        return out

@app.main()
def main(grid: Grid, context: Context) -> None:
    many, config = int(context.run_config["clients"]), context.run_config
    strategy = Timed(min_available_nodes=many, min_train_nodes=many, min_evaluate_nodes=many)
    strategy.progress = config["progress"]
    strategy.start(grid=grid, initial_arrays=ArrayRecord([np.zeros(DIM)]), num_rounds=int(config["rounds"]))
    with open(config["progress"], "a") as file:
        file.write(json.dumps({"kind": "done"}) + "\\n")
""".replace("DIM", str(COLUMNS + 1))

CLIENT = """
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
import numpy as np
import pandas as pd

app = ClientApp()

def rows(context):
    frame = pd.read_csv(context.node_config["data"])
    x = np.column_stack([np.ones(len(frame)), frame.drop(columns="y").to_numpy()])
    return x, frame["y"].to_numpy()

@app.train()
def train(message: Message, context: Context) -> Message:
    (x, y), (w,) = rows(context), message.content["arrays"].to_numpy_ndarrays()
    for _ in range(STEPS):
        w = w - ETA * x.T @ (x @ w - y) / len(y)
    content = RecordDict({"arrays": ArrayRecord([w]), "metrics": MetricRecord({"num-examples": len(y)})})
    return Message(content, reply_to=message)

@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    (x, y), (w,) = rows(context), message.content["arrays"].to_numpy_ndarrays()
    loss = float(np.mean((x @ w - y) ** 2))
    return Message(RecordDict({"metrics": MetricRecord({"num-examples": len(y), "loss": loss})}), reply_to=message)
""".replace("STEPS", str(STEPS)).replace("ETA", str(ETA))


def write_tables(folder: Path, clients: int) -> Path:
    rng = np.random.default_rng(0)
    (folder / "tables").mkdir(parents=True)
    for i in range(clients):
        x = rng.normal(size=(ROWS, COLUMNS))
        frame = pd.DataFrame(x, columns=[f"x{j}" for j in range(COLUMNS)])
        frame.assign(y=x.sum(1) + rng.normal(size=ROWS)).to_csv(folder / "tables" / f"c{i}.csv", index=False)
    return folder / "tables"


class Cost(dict):
    """Cost of one setup: milliseconds per round (elapsed and CPU time), and megabytes of the server's app and of the
    largest client, early and late."""


def with_mooring(folder: Path, tables: Path, rounds: int, evaluate: int, watch: Watch) -> Cost:
    run = folder / "run.toml"
    run.write_text(
        f'[data]\nsource = "{tables}"\ntarget = "y"\n\n[algorithm]\nname = "fedavg"\neta = {ETA}\nsteps = {STEPS}\n\n'
        f"[training]\nrounds = {rounds}\nevaluate_every = {evaluate}\nthreads = 1\nbaselines = false\n"
        "[federation]\nsecure = false\n"  # as the setups beside it
    )
    round_times: list[float] = []
    usages: list[Usage] = []

    def record_progress(label: str, done: int, total: int) -> None:
        if label == "fedavg":
            round_times.append(time.monotonic())
            usages.append(watch.usage())

    files, port, key_folder = sorted(tables.iterdir()), serve.find_free_port(), folder / "keys"
    keys.init(key_folder, [file.stem for file in files])
    fork = multiprocessing.get_context("fork").Process  # so that Python and its modules are not loaded for each
    clients = [fork(target=client, args=(run, file, folder, port)) for file in files]
    for process in clients:
        process.start()
    try:
        serve.serve(
            run,
            folder / "out",
            key_folder=key_folder,
            port=port,
            clients=len(files),
            report=quiet,
            on_progress=record_progress,
        )
        for process in clients:
            process.join(60)
    finally:
        for process in clients:
            process.kill()
    seconds = open_run(folder / "out").seconds[
        "rounds"
    ]  # by the server's own clock, because progress reports arrive in batches
    return Cost(summary(round_times, usages) | {"ms": 1000 * statistics.median(seconds[1:])})


def client(run: Path, file: Path, folder: Path, port: int) -> None:
    """Join the run as `mooring join` does."""
    ca, key = folder / "keys" / keys.CA, folder / "keys" / keys.CLIENTS / file.stem
    join.join(run, file, folder / file.stem, server=f"127.0.0.1:{port}", ca=ca, key=key, report=quiet)


def quiet(sentence: str) -> None:
    pass


def by_hand(folder: Path, tables: Path, rounds: int, clients: int, watch: Watch) -> Cost:
    """The hand-written app, by Flower's stock commands, without TLS."""
    files = {"hand/__init__.py": "", "hand/server.py": SERVER, "hand/client.py": CLIENT}
    files["pyproject.toml"] = flower.APP_FILES["pyproject.toml"].format(run='""').replace("mooring_app", "hand")
    files["pyproject.toml"] += 'rounds = ""\nprogress = ""\n'
    for name, text in files.items():
        (folder / "app" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "app" / name).write_text(text)
    round_times: list[float] = []
    usages: list[Usage] = []
    progress, home = folder / "progress.jsonl", folder / "flower"
    nodes = {file.stem: {"data": file} for file in sorted(tables.iterdir())}
    with flower.stock_processes(home, nodes) as command:
        config = flower.join_config(clients=clients, rounds=rounds, progress=progress)
        words = [*command, str(folder / "app"), "here", "--run-config", config]
        subprocess.run(words, env=flower.flower_environment(home / "run"), check=True, capture_output=True)
        read = 0
        while True:
            lines = progress.read_text().splitlines() if progress.exists() else []
            for line in map(json.loads, lines[read:]):
                if line["kind"] == "done":
                    return summary(round_times, usages)
                round_times.append(line["time"])
                usages.append(watch.usage())
            read = len(lines)
            time.sleep(0.05)


class Usage(NamedTuple):
    server: float  # megabytes of this process, which is Mooring's server, and of Flower's SuperLink and its app
    client: float  # of the largest of all other processes
    computed: float  # CPU seconds of all of them, including those that have ended


class Watch:
    """Resource usage of the processes that this one starts; a thread measures it repeatedly, since processes come and
    go."""

    def __init__(self) -> None:
        self.process_ids, self.ticks = (
            {os.getpid()},
            dict[tuple[int, int], int](),
        )  # processes by number, and by their start
        self.lock, self.ended = threading.Lock(), threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watch:
        self.thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.ended.set()
        self.thread.join()

    def _watch(self) -> None:
        while not self.ended.wait(EVERY):
            self.usage()

    def usage(self) -> Usage:
        server, client = 0.0, 0.0
        with self.lock:
            for number, command, size, parent, started, ticks in sorted(all_processes()):
                if parent in self.process_ids or number in self.process_ids:
                    self.process_ids.add(number)
                    self.ticks[number, started] = ticks
                    if number == os.getpid() or "superlink" in command or "serverapp" in command:
                        server += size
                    else:
                        client = max(client, size)
            return Usage(server, client, sum(self.ticks.values()) / os.sysconf("SC_CLK_TCK"))


def all_processes() -> Iterator[tuple[int, str, float, int, int, int]]:
    """Yield the id, command, megabytes, parent, start time and ticks of CPU time of each process."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
                size = int((entry / "statm").read_text().split()[1]) * 4096 / 1e6
                fields = [int(field) for field in (entry / "stat").read_text().rpartition(")")[2].split()[1:20]]
            except (OSError, ValueError, IndexError):
                continue
            yield int(entry.name), command, size, fields[0], fields[18], fields[10] + fields[11]


def summary(round_times: list[float], usages: list[Usage]) -> Cost:
    gaps = [1000 * (after - before) for before, after in itertools.pairwise(round_times)]
    early, late = usages[min(1, len(usages) - 1)], usages[-1]
    computed = 1000 * (late.computed - usages[0].computed) / max(len(usages) - 1, 1)
    memory = {"server": (early.server, late.server), "client": (early.client, late.client)}
    return Cost(ms=statistics.median(gaps), computed=computed, **memory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="3,10,20")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--evaluate", type=int, default=1, help="rounds from one evaluation to the next")
    parser.add_argument("--ways", default="mooring,hand")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    out = []
    for clients in map(int, options.clients.split(",")):
        for setup in options.ways.split(","):
            with tempfile.TemporaryDirectory(prefix="federation-") as name, Watch() as watch:
                folder = Path(name)
                tables = write_tables(folder, clients)
                cost = (
                    by_hand(folder, tables, options.rounds, clients, watch)
                    if setup == "hand"
                    else with_mooring(folder, tables, options.rounds, options.evaluate, watch)
                )
            out.append({"clients": clients, "way": setup, **cost})
            (a, b), (c, d) = cost["server"], cost["client"]
            print(
                f"{clients:3d} clients  {setup:9s} {cost['ms']:8.0f} ms a round, {cost['computed']:8.0f} computed   "
                f"server {a:.0f} -> {b:.0f} MB   "
                f"largest client {c:.0f} -> {d:.0f} MB",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(out))


if __name__ == "__main__":
    main()
