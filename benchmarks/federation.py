"""How long a round of a real federation takes, beside a minimal Flower app written by hand that does the same work.

    python -m benchmarks.federation [--clients 3,10,20] [--rounds 5] [--ways embedded,stock,hand] [--evaluate 1]

Processes on this machine, over TLS, with enrolled keys. A round is ten steps of gradient descent on each client's own
table (100 rows, 5 columns), the weighted mean, and everyone's loss under it. Times are medians of the clock between
rounds, the first left out, and what all processes computed meanwhile, on average: on a busy machine the clock tells how
busy it is. Megabytes are those of the server's app and of the largest client, after the second round and after the
last: the difference over many rounds is what leaks (`--clients 20 --rounds 100 --ways embedded --evaluate 100`).

The app by hand is what Flower's own tutorial does: `FedAvg.start` and a stock node for each client.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from mooring.engines.flower import child_process, federation, join, keys, superlink
from mooring.engines.flower.superlink import APP_PYPROJECT
from mooring.runs.directory import open_run

COLUMNS, ROWS, STEPS, ETA = 5, 100, 10, 0.05
EVERY = 0.2  # seconds between looks at what processes use

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


class Taken(dict):
    """What a way took: milliseconds a round by the clock, and computed; megabytes early and late, of the server's app
    and the largest client."""


def with_mooring(folder: Path, tables: Path, rounds: int, evaluate: int, embedded: bool, watch: Watch) -> Taken:
    run = folder / "run.toml"
    run.write_text(
        f'[data]\nsource = "{tables}"\ntarget = "y"\n\n[algorithm]\nname = "fedavg"\neta = {ETA}\nsteps = {STEPS}\n\n'
        f"[training]\nrounds = {rounds}\nevaluate_every = {evaluate}\nthreads = 1\nbaselines = false\n"
    )
    told: list[float] = []
    used: list[Used] = []

    def tell(what: str, done: int, of: int) -> None:
        if what == "fedavg":
            told.append(time.monotonic())
            used.append(watch.usage())

    files, port, key_folder = sorted(tables.iterdir()), child_process.find_free_port(), folder / "keys"
    keys.init(key_folder, [file.stem for file in files])
    fork = multiprocessing.get_context("fork").Process  # so that Python and its modules are not loaded for each
    clients = [fork(target=client, args=(run, file, folder, port, embedded)) for file in files]
    for one in clients:
        one.start()
    try:
        federation.serve(
            run,
            folder / "out",
            key_folder=key_folder,
            port=port,
            clients=len(files),
            persistent=False,
            report=quiet,
            on_progress=tell,
        )
        for one in clients:
            one.join(60)
    finally:
        for one in clients:
            one.kill()
    seconds = open_run(folder / "out").seconds["rounds"]  # of the server's own clock: `tell` comes in batches
    return Taken(summary(told, used) | {"ms": 1000 * statistics.median(seconds[1:])})


def client(run: Path, file: Path, folder: Path, port: int, embedded: bool) -> None:
    """What `mooring join` does."""
    ca, key = folder / "keys" / keys.CA, folder / "keys" / keys.CLIENTS / file.stem
    join.join(
        run, file, folder / file.stem, server=f"127.0.0.1:{port}", ca=ca, key=key, embedded=embedded, report=quiet
    )


def quiet(sentence: str) -> None:
    pass


def by_hand(folder: Path, tables: Path, rounds: int, clients: int, watch: Watch) -> Taken:
    names = [file.stem for file in sorted(tables.iterdir())]
    key_folder, port = folder / "keys", child_process.find_free_port()
    keys.init(key_folder, names)
    told: list[float] = []
    used: list[Used] = []
    with ExitStack() as stack:
        link = stack.enter_context(superlink.start_superlink(folder, "127.0.0.1", port, key_folder, False))
        control = superlink.control_client(link)
        superlink.synchronize_keys(control, keys.enrolled_keys(key_folder), quiet)
        for name in names:
            words = [child_process.CHILD_MODULE, "supernode", "--superlink", link.address]
            words += ["--root-certificates", str(link.ca)]
            words += ["--node-config", f'data="{tables / name}.csv"', "--host", "127.0.0.1"]
            words += [
                "--port",
                str(child_process.find_free_port()),
                "--auth-supernode-private-key",
                str(key_folder / "clients" / name),
            ]
            stack.enter_context(child_process.start_process(words, folder / "homes" / name, folder / f"{name}.log"))
        progress = folder / "progress.jsonl"
        start(control, {"clients": str(clients), "rounds": str(rounds), "progress": str(progress)})
        with federation.follow_json_lines(progress) as lines:
            while link.is_alive():
                for line in lines():
                    if line["kind"] == "done":
                        control.close()
                        return summary(told, used)
                    told.append(line["time"])
                    used.append(watch.usage())
                time.sleep(0.05)
    raise RuntimeError("the SuperLink has ended")


def start(control: Any, config: dict[str, str]) -> None:
    """The app by hand, as a run."""
    about = (
        APP_PYPROJECT.replace("mooring_app", "hand")
        .replace("mooring-app", "hand")
        .replace('run = ""\n', 'rounds = ""\n')
    )
    files = {"pyproject.toml": about, "hand/__init__.py": "", "hand/server.py": SERVER, "hand/client.py": CLIENT}
    control.start_run(files, config)


class Used(NamedTuple):
    server: float  # megabytes of the SuperLink and its app
    client: float  # of the largest of all other processes
    computed: float  # seconds of processor time of all of them, those that have ended included


class Watch:
    """What the processes that this one starts use: they come and go, so that a thread looks again and again."""

    def __init__(self) -> None:
        self.mine, self.ticks = {os.getpid()}, dict[tuple[int, int], int]()  # processes by number, and by their start
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

    def usage(self) -> Used:
        server, client = 0.0, 0.0
        with self.lock:
            for number, words, size, parent, begun, ticks in sorted(all_processes()):
                if parent in self.mine or number in self.mine:
                    self.mine.add(number)
                    if number == os.getpid():
                        continue
                    self.ticks[number, begun] = ticks
                    if "superlink" in words or "serverapp" in words:
                        server += size
                    else:
                        client = max(client, size)
            return Used(server, client, sum(self.ticks.values()) / os.sysconf("SC_CLK_TCK"))


def all_processes() -> Iterator[tuple[int, str, float, int, int, int]]:
    """Number, command, megabytes, parent, time of birth and ticks of processor time of each."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace")
                size = int((entry / "statm").read_text().split()[1]) * 4096 / 1e6
                known = [int(word) for word in (entry / "stat").read_text().rpartition(")")[2].split()[1:20]]
            except (OSError, ValueError, IndexError):
                continue
            yield int(entry.name), words, size, known[0], known[18], known[10] + known[11]


def summary(told: list[float], used: list[Used]) -> Taken:
    gaps = [1000 * (after - before) for before, after in itertools.pairwise(told)]
    early, late = used[min(1, len(used) - 1)], used[-1]
    computed = 1000 * (late.computed - used[0].computed) / max(len(used) - 1, 1)
    memory = {"server": (early.server, late.server), "client": (early.client, late.client)}
    return Taken(ms=statistics.median(gaps), computed=computed, **memory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="3,10,20")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--evaluate", type=int, default=1, help="rounds from one evaluation to the next")
    parser.add_argument("--ways", default="embedded,stock,hand")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    out = []
    for clients in map(int, asked.clients.split(",")):
        for way in asked.ways.split(","):
            with tempfile.TemporaryDirectory(prefix="federation-") as name, Watch() as watch:
                folder = Path(name)
                tables = write_tables(folder, clients)
                taken = (
                    by_hand(folder, tables, asked.rounds, clients, watch)
                    if way == "hand"
                    else with_mooring(folder, tables, asked.rounds, asked.evaluate, way == "embedded", watch)
                )
            out.append({"clients": clients, "way": way, **taken})
            (a, b), (c, d) = taken["server"], taken["client"]
            print(
                f"{clients:3d} clients  {way:9s} {taken['ms']:8.0f} ms a round, {taken['computed']:8.0f} computed   "
                f"server {a:.0f} -> {b:.0f} MB   "
                f"largest client {c:.0f} -> {d:.0f} MB",
                flush=True,
            )
    if asked.json:
        asked.json.write_text(json.dumps(out))


if __name__ == "__main__":
    main()
