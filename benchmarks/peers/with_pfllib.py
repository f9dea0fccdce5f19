"""PFLlib's own main program compared with Mooring: equal rows, start weights and hyperparameters, a convolutional
network.

    python -m benchmarks.peers.with_pfllib FOLDER fashion_mnist.npz --rows 4000 --rounds 15 --methods fedper,fedrep

FOLDER is a copy of PFLlib (it contains system/main.py); it is copied to a temporary folder and run from there. The file
has x_train and y_train. Rows are assigned to clients by Dirichlet draws of the classes; --train-share of each client's
rows is for training. Printed per method: test accuracy after the last round, over all rows and as the mean over
clients, and CPU seconds of the whole program (PFLlib trains one round more than it evaluates, and leaves out a
client's last incomplete minibatch). fedbn has a network with batch normalization; server optimizers (fedavgm, fedadam,
...) are not in PFLlib. --seeds repeats all with the seeds 0, 1, .... Modules that PFLlib imports and that are not
installed are replaced by empty ones.
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn

from mooring.algorithms.base import build
from mooring.data.clients import from_arrays
from mooring.engines.loop import TrainingPlan
from mooring.engines.simulate import simulate
from mooring.tasks.network import NetworkTask

CLASSES, BATCH, ETA = 10, 10, 0.05
WORK = {"eta": ETA, "batch": BATCH, "epochs": 1}
SERVER_MOMENTUM = {"algorithm": "fedavg", "server_optimizer": "momentum"}
METHODS: dict[str, tuple[str | None, list[str], dict]] = {  # PFLlib's name and arguments, Mooring's hyperparameters
    "fedavg": ("FedAvg", [], {}),
    "fedavgm": (None, [], SERVER_MOMENTUM),
    "fedavgm_slow": (None, [], SERVER_MOMENTUM | {"eta": 0.4 * ETA}),
    "fedavgm_slowest": (None, [], SERVER_MOMENTUM | {"eta": 0.1 * ETA}),  # as far as FedAvg in the long run
    "fedavgm_damped": (None, [], SERVER_MOMENTUM | {"server_step": 0.1}),  # the same
    "fedavgm_lighter": (None, [], SERVER_MOMENTUM | {"server_momentum": 0.7}),
    "fedavgm_half": (None, [], SERVER_MOMENTUM | {"server_step": 0.5}),
    "fedadam": (None, [], {"algorithm": "fedavg", "server_optimizer": "adam"}),
    "fedyogi": (None, [], {"algorithm": "fedavg", "server_optimizer": "yogi"}),
    "fedadagrad": (None, [], {"algorithm": "fedavg", "server_optimizer": "adagrad"}),
    "ditto": ("Ditto", ["-mu", "0.1", "-pls", "1"], {"lam": 0.1, "personal_eta": ETA}),
    "apfl": ("APFL", ["-al", "0.5"], {"alpha": 0.5, "decay": 0.0}),
    "fedbn": ("FedBN", [], {}),
    "fedper": ("FedPer", [], {}),
    "lg_fedavg": ("LG-FedAvg", [], {}),
    "fedrep": ("FedRep", ["-pls", "1"], {"head_epochs": 1, "refit": False}),
    "fedrep_refit": (None, [], {"algorithm": "fedrep", "head_epochs": 1}),
    "fedrod": ("FedROD", [], {}),
    "fedala": ("FedALA", ["-et", "1.0", "-s", "80", "-p", "2"], {"layers": 1, "sample": 0.8}),
    "fedbabu": ("FedBABU", ["-fte", "1"], {"tune_epochs": 1}),
    "local": ("Local", [], {}),
}
DRIVER = """
import importlib.util, json, sys
from unittest.mock import MagicMock
import numpy as np, torch
torch.set_num_threads(1)
for name in ("h5py", "torchvision", "calmsize", "ujson"):
    if importlib.util.find_spec(name) is None:
        sys.modules[name] = MagicMock()
import utils.data_utils, utils.mem_utils, utils.result_utils
utils.result_utils.average_data = utils.mem_utils.MemReporter.report = lambda *args, **kwargs: None

def read_client_data(dataset, idx, is_train=True, few_shot=0):
    rows = np.load(f"../{'train' if is_train else 'test'}-{idx}.npz")
    return list(zip(torch.from_numpy(rows["x"]), torch.from_numpy(rows["y"])))

utils.data_utils.read_client_data = read_client_data
import flcore.trainmodel.models as models
from flcore.servers import serverbase
make = models.FedAvgCNN.__init__

def init(self, *args, **kwargs):
    make(self, *args, **kwargs)
    start = np.load("../start.npz")
    with torch.no_grad():
        for k, part in enumerate(self.parameters()):
            part.copy_(torch.from_numpy(start[str(k)]).reshape(part.shape))

class Normalized(torch.nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()
        self.conv1, self.bn1 = torch.nn.Conv2d(1, 32, 5), torch.nn.BatchNorm2d(32)
        self.conv2, self.bn2 = torch.nn.Conv2d(32, 64, 5), torch.nn.BatchNorm2d(64)
        self.fc1, self.fc = torch.nn.Linear(1024, 512), torch.nn.Linear(512, 10)

    def forward(self, x):
        x = torch.max_pool2d(torch.relu(self.bn1(self.conv1(x))), 2)
        x = torch.max_pool2d(torch.relu(self.bn2(self.conv2(x))), 2)
        return self.fc(torch.relu(self.fc1(x.flatten(1))))

if "FedBN" in sys.argv:
    models.FedAvgCNN, make = Normalized, Normalized.__init__
models.FedAvgCNN.__init__ = init

def record(kind, name):
    measure = getattr(kind, name)

    def test_metrics(self):
        metrics = measure(self)
        n, right = np.array(metrics[1]), np.array(metrics[2])
        json.dump([float(right.sum() / n.sum()), float((right / n).mean())], open("../accuracy.json", "w"))
        return metrics

    setattr(kind, name, test_metrics)

record(serverbase.Server, "test_metrics")
from flcore.servers.serverditto import Ditto
record(Ditto, "test_metrics_personalized")
exec(compile(open("main.py").read(), "main.py", "exec"), {"__name__": "__main__"})
"""


def network(normalized: bool = False) -> nn.Module:
    """The network that PFLlib calls CNN; `normalized`: with batch normalization behind its convolutions."""
    norms = [nn.BatchNorm2d(32)], [nn.BatchNorm2d(64)]
    first, second = norms if normalized else ([], [])
    return nn.Sequential(
        nn.Conv2d(1, 32, 5), *first, nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), *second, nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, CLASSES),
    )  # fmt: skip


def assign_rows(labels: np.ndarray, clients: int, concentration: float, least: int, seed: int) -> list[np.ndarray]:
    """Return the rows of each client: every class is split by Dirichlet shares; each client has at least `least`
    rows."""
    rng = np.random.default_rng(seed)
    while True:
        owner = np.empty(len(labels), dtype=int)
        for c in range(CLASSES):
            rows = rng.permutation(np.flatnonzero(labels == c))
            cuts = np.cumsum(rng.dirichlet(np.full(clients, concentration)))[:-1] * len(rows)
            for client, part in enumerate(np.split(rows, cuts.astype(int))):
                owner[part] = client
        if np.bincount(owner, minlength=clients).min() >= least:
            return [rng.permutation(np.flatnonzero(owner == client)) for client in range(clients)]


def cpu_seconds(target: int) -> float:
    usage = resource.getrusage(target)
    return usage.ru_utime + usage.ru_stime


def run_pfllib(
    folder: Path, xs: list, ys: list, cuts: list, start: list, name: str, extra_args: list, rounds: int
) -> tuple:
    """Return accuracy over all rows, mean accuracy over clients, CPU seconds."""
    with tempfile.TemporaryDirectory() as temporary:
        top = Path(temporary)
        shutil.copytree(folder / "system", top / "system")
        for i, (x, y, cut) in enumerate(zip(xs, ys, cuts)):
            np.savez(top / f"train-{i}.npz", x=x[:cut], y=y[:cut])
            np.savez(top / f"test-{i}.npz", x=x[cut:], y=y[cut:])
        np.savez(top / "start.npz", **{str(k): part for k, part in enumerate(start)})
        (top / "system" / "driver.py").write_text(DRIVER)
        command = [sys.executable, "driver.py", "-data", "FashionMNIST", "-m", "CNN", "-algo", name, "-dev", "cpu"]
        command += ["-gr", str(rounds), "-eg", str(rounds), "-nc", str(len(xs)), "-lbs", str(BATCH), "-lr", str(ETA)]
        before = cpu_seconds(resource.RUSAGE_CHILDREN)
        process = subprocess.run(
            [*command, "-ls", "1", *extra_args], cwd=top / "system", capture_output=True, text=True
        )
        if process.returncode:
            raise SystemExit(f"PFLlib's {name} failed: {process.stderr[-2000:]}")
        return *json.loads((top / "accuracy.json").read_text()), cpu_seconds(resource.RUSAGE_CHILDREN) - before


def run_mooring(xs: list, ys: list, cuts: list, start: list, name: str, fields: dict, rounds: int, seed: int) -> tuple:
    """Return the same quantities for Mooring."""
    parts = [np.where(np.arange(len(y)) < cut, "train", "test") for y, cut in zip(ys, cuts)]
    clients = from_arrays(xs, ys, parts=parts, kind="classes", dtype=torch.float32)
    task = NetworkTask(lambda: network(name == "fedbn"))
    w0 = torch.cat([part.reshape(-1) for part in start])
    w0 = torch.cat([w0, task.start()[len(w0) :]])  # behind the parameters: running statistics
    fields = WORK | fields
    before = cpu_seconds(resource.RUSAGE_SELF)
    plan = TrainingPlan(rounds=rounds, evaluate_every=rounds, checkpoint="last", seed=seed)
    result = simulate(build(fields.pop("algorithm", name), fields), task, clients, plan, w0=w0)
    models = result.models()
    right, rows = [], []
    for i in range(len(clients)):
        x, y = clients.test.of(i)
        right.append(int((task.predict(models[i : i + 1], x[None])[0].argmax(-1) == y).sum()))
        rows.append(len(y))
    seconds = cpu_seconds(resource.RUSAGE_SELF) - before
    right, rows = np.array(right), np.array(rows)
    return float(right.sum() / rows.sum()), float((right / rows).mean()), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--concentration", type=float, default=0.1)
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--train-share", type=float, default=0.75)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", type=int, default=1, help="seeds 0, 1, ...: rows, partition, start, minibatches")
    parser.add_argument("--only", choices=("pfllib", "mooring"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    accuracies: dict[tuple[str, str], list[float]] = {}
    for seed in range(options.seeds):
        for method, library, accuracy in run_methods(options, seed):
            accuracies.setdefault((method, library), []).append(accuracy)
    for (method, library), values in accuracies.items():
        if options.seeds > 1:
            spread = np.std(values, ddof=1)
            print(f"{method:16} {library:9} {np.mean(values):8.1%}  standard deviation over seeds {spread:.1%}")


def run_methods(options: argparse.Namespace, seed: int) -> Iterator[tuple[str, str, float]]:
    """Run every method on the rows of one seed; yield it, the library and the accuracy over all rows."""
    with np.load(options.data) as stored:
        chosen = np.random.default_rng(seed).permutation(len(stored["y_train"]))[: options.rows]
        x = (stored["x_train"][chosen][:, None] / 255 - 0.5).astype(np.float32) / 0.5
        y = stored["y_train"][chosen].astype(np.int64)
    least = round(BATCH / options.train_share) + 1
    places = assign_rows(y, options.clients, options.concentration, max(least, 2 * BATCH), seed)
    xs, ys = [x[rows] for rows in places], [y[rows] for rows in places]
    cuts = [round(options.train_share * len(rows)) for rows in ys]
    counts = f"{sum(cuts)} training rows of {options.rows}, {options.clients} clients, {options.rounds} rounds"
    print(f"seed {seed}: {counts}, batch {BATCH}, eta {ETA}, one epoch per round")
    print("method           library   accuracy  mean over clients  CPU seconds  wall seconds")
    for method in options.methods.split(","):
        pfllib_name, arguments, fields = METHODS[method]
        torch.manual_seed(seed)
        start = [part.detach() for part in network(method == "fedbn").parameters()]
        for library in ("PFLlib", "Mooring"):
            if (library == "PFLlib" and not pfllib_name) or options.only not in (None, library.lower()):
                continue
            begin = time.perf_counter()
            if library == "PFLlib":
                arrays = [part.numpy() for part in start]
                overall, mean, cpu = run_pfllib(
                    options.folder, xs, ys, cuts, arrays, pfllib_name, arguments, options.rounds
                )
            else:
                overall, mean, cpu = run_mooring(xs, ys, cuts, start, method, fields, options.rounds, seed)
            wall = time.perf_counter() - begin
            print(f"{method:16} {library:9} {overall:8.1%}  {mean:17.1%}  {cpu:11.1f}  {wall:12.1f}", flush=True)
            yield method, library, overall


if __name__ == "__main__":
    main()
